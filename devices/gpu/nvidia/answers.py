"""How a container gets NVIDIA's GPUs, as by NVIDIA's own device plugin (internal/plugin/server.go of 0.20). Pure.

The operator's strategies are the environment, mounts, annotations and CDI names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from msgspec.structs import replace

from devices.gpu.asked import Asked
from devices.model import ContainerAnswer, DeviceNode, Fault, Field, Mount, RefusedError
from devices.policy import CDI_STRATEGIES, IMEX_CHANNEL, CdiFallback, IdStrategy, ListStrategy
from devices.source import not_carried

UVM: Final = "/dev/nvidia-uvm"
NEEDED: Final = frozenset({"/dev/nvidiactl", UVM})
"""The device nodes without which no CUDA program runs (seen with driver 580: cuInit fails with 100 and 999)."""
VARIABLE: Final = "NVIDIA_VISIBLE_DEVICES"
_MOUNTED: Final = "/var/run/nvidia-container-devices"
_FIELDS: Final[Mapping[ListStrategy, frozenset[Field]]] = {
    ListStrategy.ENVVAR: frozenset({Field.ENVS}),
    ListStrategy.VOLUME_MOUNTS: frozenset({Field.ENVS, Field.MOUNTS}),
    ListStrategy.CDI_ANNOTATIONS: frozenset({Field.ANNOTATIONS}),
    ListStrategy.CDI_CRI: frozenset({Field.CDI_DEVICES}),
}
_EXPANDED: Final = frozenset({Field.ENVS, Field.MOUNTS, Field.DEVICE_NODES})


def by_strategies(asked: Asked) -> ContainerAnswer:
    """Return the answer for NVIDIA's GPUs by each strategy that this kubelet's API supports. At least one must arrive for certain."""
    policy = asked.policy
    chosen = policy.list_strategies - (CDI_STRATEGIES if asked.around.without_cdi else frozenset())
    certain = {one for one in chosen if _FIELDS[one] <= asked.sendable.certain}
    by_cdi = {one for one in chosen & CDI_STRATEGIES if _FIELDS[one] <= asked.sendable.certain | asked.sendable.unsure}
    if not certain:
        said = _fallback(asked)
    elif policy.list_strategies <= CDI_STRATEGIES:  # The specification has everything else.
        said = ContainerAnswer()
    else:
        said = _without_cdi(asked, certain)
    if not by_cdi:
        return said
    names = _cdi_names(asked)
    if names and ListStrategy.CDI_ANNOTATIONS in by_cdi:
        key = f"{policy.cdi_annotation_prefix}nvidia-device-plugin_{asked.token}"
        said = replace(said, annotations={key: ",".join(names)})
    return replace(said, cdi_devices=names) if ListStrategy.CDI_CRI in by_cdi else said


def _fallback(asked: Asked) -> ContainerAnswer:
    """Return the answer by ``--cdi-fallback``.

    Raises:
        RefusedError: the setting forbids one, or this kubelet's API lacks the fields for it.
    """
    policy, around, said = asked.policy, asked.around, asked.sendable.certain
    fields = {field for one in policy.list_strategies for field in _FIELDS[one]} - said
    why = f"{not_carried(asked.resource, fields)}, or another DEVICE_LIST_STRATEGY, or --cdi-fallback"
    if around.without_cdi:
        why = f"a container gets {asked.resource} by CDI, but there is no CDI specification: {around.without_cdi}"
    if policy.cdi_fallback is CdiFallback.ENVVAR and Field.ENVS in said:
        return _without_cdi(asked, {ListStrategy.ENVVAR})
    if policy.cdi_fallback is CdiFallback.EXPAND and not around.without_cdi and said >= _EXPANDED:
        from devices.gpu.cdi import HookError, expanded  # noqa: PLC0415 - loaded with the specifications (survey)

        try:
            return expanded(_cdi_names(asked), around.specifications)
        except HookError as error:
            why += f". --cdi-fallback=expand does not help: {error}"
        except KeyError as error:
            why += f". --cdi-fallback=expand does not help: {error} is in no CDI specification"
    raise RefusedError(Fault.FAILED_PRECONDITION, why)


def _without_cdi(asked: Asked, strategies: Collection[ListStrategy]) -> ContainerAnswer:
    """Name GPUs and the IMEX channel by mounts, else in variables. Pods can set variables, but not these mounts.

    GDRCopy, GDS and MOFED have variables by which the NVIDIA runtime adds them.
    """
    names, imex, policy = _names(asked), asked.around.sight.imex, asked.policy
    modes = {"NVIDIA_GDRCOPY": policy.gdrcopy, "NVIDIA_GDS": policy.gds, "NVIDIA_MOFED": policy.mofed}
    envs = {name: "enabled" for name, is_wanted in modes.items() if is_wanted}
    said = ContainerAnswer()
    if ListStrategy.VOLUME_MOUNTS in strategies:
        mounts = tuple(Mount(f"{_MOUNTED}/{name}", "/dev/null") for name in (*names, *(["imex/0"] if imex else [])))
        said = ContainerAnswer(envs={VARIABLE: _MOUNTED, **envs}, mounts=mounts)
    elif ListStrategy.ENVVAR in strategies:
        channels = {"NVIDIA_IMEX_CHANNELS": "0"} if imex else {}
        said = ContainerAnswer(envs={VARIABLE: ",".join(names), **channels, **envs})
    return _with_nodes(said, asked)


def _with_nodes(said: ContainerAnswer, asked: Asked) -> ContainerAnswer:
    """Add the device nodes that every GPU needs, and with ``pass_device_specs`` the further ones."""
    policy = asked.policy
    always = [DeviceNode(path, path) for gpu in asked.known for path in gpu.device_nodes]
    if not always and not policy.pass_device_specs:
        return said
    if always and Field.DEVICE_NODES not in asked.sendable.certain:
        raise not_carried(asked.resource, [Field.DEVICE_NODES])
    if not policy.pass_device_specs or Field.DEVICE_NODES not in asked.sendable.certain:
        return replace(said, device_nodes=tuple(dict.fromkeys(always)))
    asked.require_known("device nodes")
    _require_nodes(asked)
    paths = [path for gpu in asked.known for path in gpu.spec_nodes]
    paths += [*asked.around.sight.control_nodes, *([IMEX_CHANNEL] if asked.around.sight.imex else [])]
    passed = [DeviceNode(path, policy.on_host(path)) for path in paths]
    return replace(said, device_nodes=tuple(dict.fromkeys((*always, *passed))))


def _require_nodes(asked: Asked) -> None:
    """Check that the device nodes that every CUDA program needs exist.

    Raises:
        RefusedError: FAILED_PRECONDITION, one is missing.
    """
    needed = {path for gpu in asked.known for path in gpu.spec_nodes} | NEEDED
    if missing := [path for path in asked.around.sight.missing_nodes if path in needed]:
        raise RefusedError(
            Fault.FAILED_PRECONDITION,
            f"{asked.resource}: {', '.join(missing)} is missing on this node, so CUDA would fail in the container. Create the "
            "device nodes (nvidia-modprobe -c 0 -u, or nvidia-smi as root), then start the pod again",
        )


def _names(asked: Asked) -> tuple[str, ...]:
    if asked.policy.id_strategy is IdStrategy.UUID:
        return asked.uuids
    asked.require_known("index")
    return tuple(gpu.named_by(asked.policy.id_strategy) for gpu in asked.known)


def _cdi_names(asked: Asked) -> tuple[str, ...]:
    from devices.gpu.nvidia import cdi  # noqa: PLC0415 - as above

    _require_nodes(asked)
    try:
        names = [cdi.qualified(name) for name in _names(asked)]
    except ValueError as error:
        raise RefusedError(
            Fault.FAILED_PRECONDITION, f"a container gets {asked.resource} by CDI, but {error}"
        ) from error
    return (*names, *asked.around.extras)
