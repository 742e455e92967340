"""Write the CDI specifications of NVIDIA's GPUs, and collect what answers need apart from GPUs. Imported only with a CDI strategy."""

from __future__ import annotations

from pathlib import Path

from devices.gpu.asked import NodeTraits
from devices.gpu.backend import Sight
from devices.gpu.cdi import ALL
from devices.gpu.cdi_files import FOLDER, CDIFileError, write
from devices.gpu.nvidia import cdi
from devices.gpu.nvidia.cdi import DriverFiles, extras, specifications
from devices.gpu.nvidia.driverfiles import DriverFilesError, find
from devices.gpu.nvidia.vendor import PREFIX
from devices.policy import CDI_STRATEGIES, Policy


def keep(
    sight: Sight,
    policy: Policy,
    *,
    driver: DriverFiles | None = None,
    folder: Path = FOLDER,
) -> NodeTraits:
    """Write the specifications that the policy needs, and return what answers need. It blocks: call it in a thread.

    Args:
        sight: the GPUs. Left out are other vendors' GPUs, those that lack what a container needs, and those with a CDI
            name of their own, because another program writes their specification.
        policy: without a CDI strategy nothing is written.
        driver: the driver's files, if they are known (a simulated node); None to search them.
        folder: the folder of the specifications.
    """
    gpus = [one for one in sight.gpus if one.resource.startswith(PREFIX) and not one.cdi_name and not one.lacks]
    if not gpus or not policy.list_strategies & CDI_STRATEGIES:
        return NodeTraits(sight.control_nodes)
    # A host service has no mount, and sees the driver's root at its path on the host.
    root = "" if Path(policy.container_driver_root).is_dir() else policy.driver_root
    try:
        driver = driver or find(policy, sight.driver, root, {gpu.pci for gpu in gpus if gpu.pci})
        specs = specifications(gpus, sight.control_nodes, policy, driver, imex=sight.imex)
        for specification in specs:
            write(specification, folder)
    except (DriverFilesError, CDIFileError) as error:
        return NodeTraits(sight.control_nodes, without_cdi=str(error))
    names = [cdi.qualified(ALL, extra.value) for extra in extras(policy, driver)]
    names += [cdi.qualified("0", cdi.IMEX_CLASS)] if sight.imex else []
    return NodeTraits(sight.control_nodes, tuple(names), specs)
