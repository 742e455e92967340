"""Write the CDI specifications of NVIDIA's GPUs, and return what Allocate responses need. Imported only with a CDI strategy.

Container runtimes read each file when it changes. So files are replaced atomically, and only if their content differs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from devices import files
from devices.gpu.asked import NodeTraits
from devices.gpu.backend import Sight
from devices.gpu.cdi import ALL, Specification, with_gone
from devices.gpu.nvidia import cdi
from devices.gpu.nvidia.cdi import DriverFiles, extras, specifications
from devices.gpu.nvidia.driverfiles import DriverFilesError, find
from devices.gpu.nvidia.vendor import PREFIX
from devices.policy import CDI_STRATEGIES, Policy

FOLDER: Final = Path("/var/run/cdi")
_MAX_BYTES: Final = 8 * 2**20


class CDIFileError(Exception):
    """A specification can't be written. The message says what is wrong and what to do."""


def write_all(
    sight: Sight,
    policy: Policy,
    *,
    driver: DriverFiles | None = None,
    folder: Path = FOLDER,
) -> NodeTraits:
    """Write the specifications that the policy needs, and return what Allocate responses need. It blocks: call it in a thread.

    Args:
        sight: the GPUs. Other vendors' GPUs and incomplete partitions (``lacks``) are left out. GPUs with a ``cdi_name`` are also
            left out, because another program writes their specification.
        policy: without a CDI strategy nothing is written.
        driver: the driver's files, if they are known (a simulated node); None: search for them.
        folder: the folder for the specifications.
    """
    gpus = [one for one in sight.gpus if one.resource.startswith(PREFIX) and not one.cdi_name and not one.lacks]
    if not gpus or not policy.list_strategies & CDI_STRATEGIES:
        return NodeTraits(sight)
    # A host service has no container mount: it uses the path on the host.
    root = "" if Path(policy.container_driver_root).is_dir() else policy.driver_root
    try:
        driver = driver or find(policy, sight.driver_version, root, {gpu.pci for gpu in gpus if gpu.pci})
        specs = specifications(gpus, sight.control_nodes, policy, driver, imex=sight.imex)
        for specification in specs:
            write(specification, folder)
    except (DriverFilesError, CDIFileError) as error:
        return NodeTraits(sight, without_cdi=str(error))
    names = [cdi.qualified(ALL, extra.value) for extra in extras(policy, driver)]
    names += [cdi.qualified("0", cdi.IMEX_CLASS)] if sight.imex else []
    return NodeTraits(sight, tuple(names), specs)


def path_of(specification: Specification, folder: Path = FOLDER) -> Path:
    """Return the path of a specification, named as by CDI's own library (GenerateNameForSpec)."""
    return folder / f"{specification['kind'].replace('/', '-')}.json"


def write(specification: Specification, folder: Path = FOLDER) -> bool:
    """Write a specification if it changed; return True if it did. It blocks (fsync): call it in a thread.

    Devices that only the file has stay in it (``cdi.with_gone``). Other programs' files are never changed.

    Raises:
        CDIFileError: the file can't be written, or it belongs to another program.
    """
    path = path_of(specification, folder)
    try:
        files.sweep(folder, path.name)
        content = _read(path)
        old = _parsed(content)
        if isinstance(old, dict) and old.get("kind", specification["kind"]) != specification["kind"]:
            raise CDIFileError(
                f"{path} has CDI devices of kind {str(old['kind'])[:80]!r}, not "
                f"{specification['kind']}, so another program wrote it. Move it away"
            )
        new = (json.dumps(with_gone(specification, old), indent=1) + "\n").encode()
        if new == content:
            return False
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        files.replace(path, new, 0o644)
    except OSError as error:
        raise CDIFileError(
            f"cannot write the CDI specification {path}: {error}. Mount the host's folder so that the "
            "gateway can write to it"
        ) from error
    return True


def _read(path: Path) -> bytes | None:
    """Read a file; None if it doesn't exist or can't be a specification."""
    try:
        content = files.read_plain(path, _MAX_BYTES, follow=False)
    except (OSError, ValueError):
        return None
    return content if len(content) <= _MAX_BYTES else None


def _parsed(content: bytes | None) -> object:
    try:
        return json.loads(content or b"")
    except (ValueError, RecursionError):
        return None
