"""What Allocate tells the container runtime, so that a container gets its GPUs.

NVIDIA's are said as its own device plugin says them (internal/plugin/server.go of 0.20), by the strategies that an operator
chose: in the environment, by mounts, in annotations, by CDI names; AMD's by their device nodes. What this kubelet can't be
told is left out where something else brings the GPU, and refused where nothing does. Pure; docs/answers.md has the table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from devices.gpu.model import GPU, in_order
from devices.gpu.nvidia import cdi
from devices.gpu.nvidia.cdi import Extra, HookError, Specification
from devices.model import ContainerAnswer, DeviceNode, Fault, Field, Mount, RefusedError, Sayable
from devices.policy import CdiFallback, IdStrategy, ListStrategy, Policy

# Each vendor's runtime has a variable of its own: with one for all, a container that has GPUs of two vendors would see
# only the ones that the kubelet wrote last.
_AMD: Final = "amd.com"
_VARIABLES: Final[Mapping[str, str]] = {_AMD: "AMD_VISIBLE_DEVICES"}
_VARIABLE: Final = "NVIDIA_VISIBLE_DEVICES"
_MOUNTED: Final = "/var/run/nvidia-container-devices"

_SAID_BY: Final[Mapping[ListStrategy, frozenset[Field]]] = {
    ListStrategy.ENVVAR: frozenset({Field.ENVS}),
    ListStrategy.VOLUME_MOUNTS: frozenset({Field.ENVS, Field.MOUNTS}),
    ListStrategy.CDI_ANNOTATIONS: frozenset({Field.ANNOTATIONS}),
    ListStrategy.CDI_CRI: frozenset({Field.CDI_DEVICES}),
}
CDI: Final = frozenset({ListStrategy.CDI_ANNOTATIONS, ListStrategy.CDI_CRI})
"""The strategies that name devices of a CDI specification."""
_EXPANDED: Final = frozenset({Field.ENVS, Field.MOUNTS, Field.DEVICE_NODES})


class Surroundings(Struct, frozen=True):
    """What an answer needs to know of the node besides the GPUs.

    ``control_nodes`` are those of ``Sight``. ``extras`` are what containers get beside GPUs by CDI (``cdi.extras``).
    ``specifications`` are what the CDI names stand for, and ``without_cdi`` why there are none ('' where there are).
    """

    control_nodes: tuple[str, ...] = ()
    extras: tuple[Extra, ...] = ()
    specifications: tuple[Specification, ...] = ()
    without_cdi: str = ""


def answer(
    resource: str,
    device_ids: Collection[str],
    gpus: Mapping[str, GPU],
    policy: Policy,
    sayable: Sayable,
    around: Surroundings,
    token: str,
) -> ContainerAnswer:
    """Say how a container gets these devices, GPUs in the order of their indices, each once.

    Args:
        resource: under which name they were asked for.
        device_ids: UUIDs, or replicas of them.
        gpus: what stands beneath the resource, by UUID. A device that isn't in it is named all the same where its name is all
            that is needed: during the first discovery the gateway serves what it announced before the backend has seen it.
        policy: what the operator decided.
        sayable: what this kubelet can be told.
        around: what else is on the node.
        token: a new UUID (version 4), which makes the key of an annotation unique.

    Raises:
        RefusedError: INVALID_ARGUMENT, more than one of a shared resource where the operator wants that refused;
            FAILED_PRECONDITION, the container would start without a GPU, because this kubelet can't be told what brings it, or
            what brings it isn't known yet.
    """
    if policy.fail_requests_greater_than_one and len(device_ids) > 1 and any(map(_is_replica, device_ids)):
        raise RefusedError(
            Fault.INVALID_ARGUMENT,
            f'invalid allocation request for "{resource}": invalid request: maximum request size for shared resources is 1; '
            f"found {len(device_ids)}: ask for one, or set failRequestsGreaterThanOne to false",
        )
    asked = _Asked(resource, device_ids, gpus, policy, sayable, around)
    if asked.fixed():
        return reached(resource, asked.uuids, gpus, sayable)
    return _by_nodes(asked) if asked.vendor() == _AMD else _by_strategies(asked, token)


def reached(resource: str, device_ids: Iterable[str], gpus: Mapping[str, GPU], sayable: Sayable) -> ContainerAnswer:
    """Say how a container gets these GPUs: by CDI names where all have one, else by ``visible_devices``.

    Where it can't be known whether CDI names arrive, the variable says the same once more.

    Raises:
        RefusedError: as ``visible_devices``; and where CDI names can't arrive, because nothing else brings what they bring.
    """
    ids = in_order(device_ids, gpus)
    names = tuple(gpus[device_id].cdi_name for device_id in ids if device_id in gpus and gpus[device_id].cdi_name)
    if not names or len(names) < len(ids):
        return visible_devices(resource, ids, gpus, sayable)
    if Field.CDI_DEVICES in sayable.said:
        return ContainerAnswer(cdi_devices=names)
    if Field.CDI_DEVICES in sayable.unsure:
        return replace(visible_devices(resource, ids, gpus, sayable), cdi_devices=names)
    raise _unsaid(resource, [Field.CDI_DEVICES])


def visible_devices(
    resource: str, device_ids: Iterable[str], gpus: Mapping[str, GPU], sayable: Sayable
) -> ContainerAnswer:
    """Name the GPUs in the variable that the vendor's runtime reads: their IDs, in the order of their indices.

    An ID without a GPU in ``gpus`` (by UUID) is named like any other: during the first discovery the gateway serves what
    it announced before the backend has seen it.

    Raises:
        RefusedError: the kubelet can't be told what the container needs, so it would start without its GPUs.
    """
    ids = in_order(device_ids, gpus)
    nodes = dict.fromkeys(path for device_id in ids if device_id in gpus for path in gpus[device_id].device_nodes)
    needed = {Field.ENVS} | ({Field.DEVICE_NODES} if nodes else set())
    if unsaid := needed - sayable.said:
        raise _unsaid(resource, unsaid)
    return ContainerAnswer(
        envs={_VARIABLES.get(resource.partition("/")[0], _VARIABLE): ",".join(ids)},
        device_nodes=tuple(DeviceNode(path, path) for path in nodes),
    )


class _Asked:
    """A request, and what it is answered from."""

    def __init__(
        self,
        resource: str,
        device_ids: Iterable[str],
        gpus: Mapping[str, GPU],
        policy: Policy,
        sayable: Sayable,
        around: Surroundings,
    ) -> None:
        self.resource, self.gpus, self.policy, self.sayable, self.around = resource, gpus, policy, sayable, around
        self.uuids = tuple(dict.fromkeys(map(_uuid, in_order(device_ids, gpus))))
        self.known = [gpus[uuid] for uuid in self.uuids if uuid in gpus]

    def vendor(self) -> str:
        """Say whose GPUs these are, by the name that they have before an operator's."""
        for gpu in self.known:
            if gpu.resource:
                return gpu.resource.partition("/")[0]
        return self.resource.partition("/")[0]

    def fixed(self) -> bool:
        """Say whether all of these GPUs have CDI names of their own."""
        without = [gpu for gpu in self.known if not gpu.cdi_name]
        return bool(self.known) and not without and len(self.known) == len(self.uuids)

    def names(self) -> tuple[str, ...]:
        """Name the GPUs as the operator wants containers to know them."""
        if self.policy.id_strategy is IdStrategy.UUID:
            return self.uuids
        self.require_known("index")
        return tuple(cdi.name_of(gpu, self.policy.id_strategy) for gpu in self.known)

    def cdi_names(self) -> tuple[str, ...]:
        """Name the GPUs and extras in CDI."""
        try:
            names = [cdi.qualified(name) for name in self.names()]
        except ValueError as error:
            raise RefusedError(
                Fault.FAILED_PRECONDITION, f"{self.resource} reaches a container by CDI: {error}"
            ) from error
        return (*names, *(cdi.qualified(cdi.ALL, f"{cdi.VENDOR}/{extra.value}") for extra in self.around.extras))

    def require_known(self, what: str) -> None:
        """Refuse where a GPU hasn't been seen yet, and more of it than its name must be said."""
        unknown = [uuid for uuid in self.uuids if uuid not in self.gpus]
        if unknown:
            raise RefusedError(
                Fault.FAILED_PRECONDITION,
                f"{self.resource}: expected to know the {what} of {', '.join(unknown[:4])}, but nobody has looked at that GPU "
                "yet: see in the log whether its driver is loaded, and start the container again",
            )


def _by_nodes(asked: _Asked) -> ContainerAnswer:
    """Say AMD's GPUs: /dev/kfd and their own nodes. Simulated ones have none, and are named in a variable."""
    asked.require_known("device nodes")
    bare = [gpu.uuid for gpu in asked.known if not gpu.device_nodes]
    if len(bare) == len(asked.known):
        return visible_devices(f"{_AMD}/", asked.uuids, asked.gpus, asked.sayable)
    if bare:
        raise RefusedError(
            Fault.FAILED_PRECONDITION,
            f"{asked.resource}: expected device nodes of each GPU, but {', '.join(bare[:4])} has none: see whether its driver "
            "is loaded",
        )
    if Field.DEVICE_NODES not in asked.sayable.said:
        raise _unsaid(asked.resource, [Field.DEVICE_NODES])
    paths = dict.fromkeys((*asked.around.control_nodes, *(path for gpu in asked.known for path in gpu.device_nodes)))
    return ContainerAnswer(device_nodes=tuple(DeviceNode(path, path) for path in paths))


def _by_strategies(asked: _Asked, token: str) -> ContainerAnswer:
    """Say NVIDIA's GPUs by each strategy that can be said; at least one must be sure to arrive."""
    policy = asked.policy
    certain, by_cdi = _ways(policy.list_strategies, asked.sayable, with_cdi=not asked.around.without_cdi)
    if not certain:
        said = _fallback(asked)
    elif policy.list_strategies <= CDI:  # The specification has all the rest.
        said = ContainerAnswer()
    else:
        said = _with_nodes(_with_modes(_in_environment(asked.names(), certain), policy), asked)
    if not by_cdi:
        return said
    names = asked.cdi_names()
    if names and ListStrategy.CDI_ANNOTATIONS in by_cdi:
        key = f"{policy.cdi_annotation_prefix}nvidia-device-plugin_{token}"
        said = replace(said, annotations={key: ",".join(names)})
    return replace(said, cdi_devices=names) if ListStrategy.CDI_CRI in by_cdi else said


@lru_cache(maxsize=64)
def _ways(
    strategies: frozenset[ListStrategy], sayable: Sayable, *, with_cdi: bool
) -> tuple[frozenset[ListStrategy], frozenset[ListStrategy]]:
    """Say which of these strategies are sure to arrive, and which of those with CDI names may arrive."""
    chosen = strategies if with_cdi else strategies - CDI
    certain = frozenset(one for one in chosen if _SAID_BY[one] <= sayable.said)
    by_cdi = frozenset(one for one in chosen & CDI if _SAID_BY[one] <= sayable.said | sayable.unsure)
    return certain, by_cdi


def _fallback(asked: _Asked) -> ContainerAnswer:
    """Say GPUs in another way than by CDI, if the operator wants that.

    Raises:
        RefusedError: they don't, or that can't be said either.
    """
    policy, around, said = asked.policy, asked.around, asked.sayable.said
    fields = {field for one in policy.list_strategies for field in _SAID_BY[one]} - said
    why = f"{_unsaid(asked.resource, fields)}, or another DEVICE_LIST_STRATEGY, or --cdi-fallback"
    if around.without_cdi:
        why = f"{asked.resource} reaches a container by CDI, and there is no specification: {around.without_cdi}"
    if policy.cdi_fallback is CdiFallback.ENVVAR and Field.ENVS in said:
        return _with_nodes(_with_modes(_in_environment(asked.names(), {ListStrategy.ENVVAR}), policy), asked)
    if policy.cdi_fallback is CdiFallback.EXPAND and not around.without_cdi and said >= _EXPANDED:
        try:
            return cdi.expanded(asked.cdi_names(), around.specifications)
        except HookError as error:
            why += f"; nor can what it stands for be said (--cdi-fallback=expand): {error}"
        except KeyError as error:
            why += f"; nor can what it stands for be said (--cdi-fallback=expand): {error} is in no CDI specification"
    raise RefusedError(Fault.FAILED_PRECONDITION, why)


def _in_environment(names: Sequence[str], strategies: Collection[ListStrategy]) -> ContainerAnswer:
    """Name GPUs in the variable or by mounts, which win: only an administrator can mount (NVIDIA's accept-…-as-volume-mounts)."""
    if ListStrategy.VOLUME_MOUNTS in strategies:
        mounts = tuple(Mount(f"{_MOUNTED}/{name}", "/dev/null") for name in names)
        return ContainerAnswer(envs={_VARIABLE: _MOUNTED}, mounts=mounts)
    if ListStrategy.ENVVAR in strategies:
        return ContainerAnswer(envs={_VARIABLE: ",".join(names)})
    return ContainerAnswer()


def _with_modes(said: ContainerAnswer, policy: Policy) -> ContainerAnswer:
    """Ask the NVIDIA runtime, where it is told of GPUs, for what an operator wants beside them."""
    if not (said.envs and (policy.gdrcopy or policy.gds or policy.mofed)):
        return said
    wanted = {"NVIDIA_GDRCOPY": policy.gdrcopy, "NVIDIA_GDS": policy.gds, "NVIDIA_MOFED": policy.mofed}
    return replace(said, envs={**said.envs, **{name: "enabled" for name, is_wanted in wanted.items() if is_wanted}})


def _with_nodes(said: ContainerAnswer, asked: _Asked) -> ContainerAnswer:
    """Pass the device nodes that a GPU always needs, and those that an operator wants passed."""
    policy = asked.policy
    always = [DeviceNode(path, path) for gpu in asked.known for path in gpu.device_nodes]
    if not always and not policy.pass_device_specs:
        return said
    if always and Field.DEVICE_NODES not in asked.sayable.said:
        raise _unsaid(asked.resource, [Field.DEVICE_NODES])
    if not policy.pass_device_specs or Field.DEVICE_NODES not in asked.sayable.said:
        return replace(said, device_nodes=tuple(dict.fromkeys(always)))
    asked.require_known("device nodes")
    paths = (*(path for gpu in asked.known for path in gpu.spec_nodes), *asked.around.control_nodes)
    passed = [DeviceNode(path, cdi.on_host(path, policy)) for path in paths]
    return replace(said, device_nodes=tuple(dict.fromkeys((*always, *passed))))


def _is_replica(device_id: str) -> bool:
    return "::" in device_id and device_id.rpartition("::")[2].isdigit()


def _uuid(device_id: str) -> str:
    return device_id.rpartition("::")[0] if _is_replica(device_id) else device_id


def _unsaid(resource: str, fields: Iterable[Field]) -> RefusedError:
    return RefusedError(
        Fault.FAILED_PRECONDITION,
        f"{resource} reaches a container by {', '.join(sorted(field.value for field in fields))}, which can't be said for "
        "certain to this kubelet, so the container would start without its GPU; use a kubelet or an API version that can be "
        "told, or another backend",
    )
