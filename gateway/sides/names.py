"""Pods that ask by name for GPUs of DRA's: which of them would run without, and which wait. Pure.

The scheduler makes a claim for such a pod where a DeviceClass names its resource and the node's allocatable has none of it,
whatever the kubelet is. One before 1.36 runs the pod without its GPU, and says nothing (run on 1.32).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from gateway.sides.side import Side

BY_NAME: Final = 36
"""The first kubelet, 1.N, that has DRA's devices for pods that ask by name (DRAExtendedResource, on by default)."""
_NOT_GIVEN: Final = frozenset({Side.PLUGIN, Side.FOREIGN})
_WITHOUT_PLUGIN: Final = frozenset({Side.DRA, Side.TO_DRA})


def overlooked(
    resources: Collection[str], kubelet: int | None, classes: Mapping[str, str] | None, unsaid: str = ""
) -> str:
    """Say why pods that ask by name for resources of DRA's would run without their GPU; '' where none would.

    Args:
        resources: those of which DRA has GPUs, or gets them.
        kubelet: the node's, 1.N; None: it doesn't say.
        classes: of each DeviceClass the resource that it names ('' for none); None: that was never known.
        unsaid: why not.
    """
    if not resources or (kubelet or 0) >= BY_NAME:
        return ""
    if classes is None:
        return f"it can't be known whether pods that ask by name would run without their GPU: {unsaid}"
    for name, resource in classes.items():
        if resource in resources:
            return (
                f"the DeviceClass {name} has the extendedResourceName {resource}, and kubelet "
                f"1.{kubelet or 0} would run pods that ask for that name without their GPU. Upgrade the "
                f"kubelet to 1.{BY_NAME} first, or take that field out of the class"
            )
    return ""


def of_dra(sides: Mapping[str, Collection[Side]]) -> frozenset[str]:
    """Name the resources that have GPUs which are DRA's or on their way, by the sides of all their boards."""
    return frozenset(name for name, found in sides.items() if not _NOT_GIVEN.issuperset(found))


def waiting(sides: Mapping[str, Collection[Side]], classes: Mapping[str, str] | None, asked: Collection[str]) -> str:
    """Say for which resources pods that ask by name wait, because no DeviceClass names them any more; '' for none.

    Args:
        sides: those of each resource's boards. Where the device plugin API has one, it serves such pods.
        classes: as above.
        asked: the resources that a class had named, or that pods got by name. Elsewhere people may want claims alone.
    """
    if classes is None:
        return ""
    wanting = sorted(
        name
        for name, found in sides.items()
        if name in asked
        and _WITHOUT_PLUGIN.intersection(found)
        and _WITHOUT_PLUGIN.issuperset({*found} - {Side.FOREIGN})
    )
    named = {*classes.values()}
    return "; ".join(
        f"no DeviceClass has the extendedResourceName {name} any more, and no GPU of it is the device plugin API's: pods that ask "
        "for that name wait"
        for name in wanting
        if name not in named
    )
