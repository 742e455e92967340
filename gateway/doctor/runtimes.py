"""Checks of the container runtime: NVIDIA's runtime, CDI, links to device nodes, and SELinux."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from gateway.doctor.snapshot import NodeFacts

_CDI: Final = frozenset({"cdi-annotations", "cdi-cri"})
_OURS: Final = frozenset({"/var/run/cdi", "/run/cdi"})
_UNCONFINED: Final = ("spc_t", "unconfined_t", "init_t", "unconfined_service_t", "kernel_t")


def _no_runtime(seen: NodeFacts) -> str:
    runtime = seen.runtime
    by_dra_alone = seen.own_drivers and not seen.sides
    if runtime is None or runtime.nvidia is not False or seen.strategies & _CDI or by_dra_alone or not _nvidia(seen):
        return ""
    return f"{runtime.name}: {runtime.config_path} names no runtime of NVIDIA's"


def _no_cdi(seen: NodeFacts) -> str:
    runtime = seen.runtime
    if runtime is None or runtime.cdi is not False or not _needs_cdi(seen):
        return ""
    for_whom = f"--device-list-strategy {', '.join(sorted(seen.strategies))}" if seen.strategies & _CDI else "--dra"
    where = f"{runtime.config_path} doesn't switch CDI on" if runtime.config_path else "this version has no CDI"
    return f"{runtime.name}: {where}, and {for_whom} needs it"


def _unread(seen: NodeFacts) -> str:
    runtime = seen.runtime
    if runtime is None or not runtime.cdi or runtime.cdi_dirs is None or not _needs_cdi(seen):
        return ""
    read = {folder.rstrip("/") for folder in runtime.cdi_dirs}
    said = ", ".join(sorted(read)) or "empty"
    return "" if read & _OURS else f"{runtime.name}: {runtime.config_path}: cdi_spec_dirs is {said}"


def _needs_cdi(seen: NodeFacts) -> bool:
    return bool(seen.strategies & _CDI or seen.own_drivers)


def _unsound(seen: NodeFacts) -> str:
    return "; ".join(f"{path}: {wrong}" for path, wrong in seen.cdi_files.items() if wrong)


def _unlinked(seen: NodeFacts) -> str:
    if seen.strategies & _CDI:
        return ""
    unlinked = [one.path for one in seen.device_nodes or () if one.exists and one.linked is False]
    return f"no link to {', '.join(unlinked)}" if unlinked else ""


def _confined(seen: NodeFacts) -> str:
    if not seen.selinux_enforcing:
        return ""
    for one in seen.processes:
        kind = [*one.selinux_label.split(":"), "", "", ""][2]
        if kind and kind not in _UNCONFINED:
            return f"SELinux is enforcing, and process {one.pid} is {kind}"
    return ""


def _nvidia(seen: NodeFacts) -> bool:
    return any(one.vendor == "0x10de" for one in seen.gpus or ())


CHECKS: Final[Mapping[str, Callable[[NodeFacts], str]]] = {
    "DPG0401": _no_runtime,
    "DPG0402": _no_cdi,
    "DPG0403": _unread,
    "DPG0404": _unsound,
    "DPG0405": _unlinked,
    "DPG0406": _confined,
}
