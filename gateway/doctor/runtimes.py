"""Checks of the container runtime: NVIDIA's runtime, CDI, and what a daemon-reload takes away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from gateway.doctor.snapshot import Surveyed

_CDI: Final = frozenset({"cdi-annotations", "cdi-cri"})
_OURS: Final = frozenset({"/var/run/cdi", "/run/cdi"})
_UNCONFINED: Final = ("spc_t", "unconfined_t", "init_t", "unconfined_service_t", "kernel_t")


def _no_runtime(seen: Surveyed) -> str:
    if seen.runtime is None or seen.runtime.nvidia or seen.strategies & _CDI or not _nvidia(seen):
        return ""
    return f"{seen.runtime.path} names no runtime of NVIDIA's"


def _no_cdi(seen: Surveyed) -> str:
    if seen.runtime is None or seen.runtime.cdi or not seen.strategies & _CDI:
        return ""
    return f"{seen.runtime.path} doesn't switch CDI on"


def _unread(seen: Surveyed) -> str:
    if seen.runtime is None or not seen.runtime.cdi or not seen.strategies & _CDI:
        return ""
    read = {folder.rstrip("/") for folder in seen.runtime.cdi_dirs}
    return "" if read & _OURS else f"{seen.runtime.path}: cdi_spec_dirs is {', '.join(sorted(read)) or 'empty'}"


def _unsound(seen: Surveyed) -> str:
    return "; ".join(f"{path}: {wrong}" for path, wrong in seen.cdi_files.items() if wrong)


def _unlinked(seen: Surveyed) -> str:
    if seen.strategies & _CDI:
        return ""
    unlinked = [one.path for one in seen.nodes or () if one.there and one.linked is False]
    return f"no link to {', '.join(unlinked)}" if unlinked else ""


def _confined(seen: Surveyed) -> str:
    if not seen.enforcing:
        return ""
    for one in seen.processes:
        kind = [*one.context.split(":"), "", "", ""][2]
        if kind and kind not in _UNCONFINED:
            return f"SELinux is enforcing, and process {one.pid} is {kind}"
    return ""


def _nvidia(seen: Surveyed) -> bool:
    return any(one.vendor == "0x10de" for one in seen.gpus or ())


CHECKS: Final[Mapping[str, Callable[[Surveyed], str]]] = {
    "DPG0401": _no_runtime,
    "DPG0402": _no_cdi,
    "DPG0403": _unread,
    "DPG0404": _unsound,
    "DPG0405": _unlinked,
    "DPG0406": _confined,
}
