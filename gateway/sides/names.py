"""Find pods that ask by resource name for GPUs that DRA gives: they would run without a GPU, or wait. Pure.

If a DeviceClass names a resource and the node has none of it in allocatable, the scheduler makes a claim for such a pod,
whatever the kubelet's version. A kubelet before 1.36 then runs the pod without its GPU and without an error (run on 1.32).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from gateway.sides.side import Side

FIRST_BY_NAME_MINOR: Final = 36
"""The first kubelet (1.N) that gives DRA's devices to pods that ask by name (DRAExtendedResource, on by default)."""
_NOT_GIVEN: Final = frozenset({Side.PLUGIN, Side.FOREIGN})
_WITHOUT_PLUGIN: Final = frozenset({Side.DRA, Side.TO_DRA})


def overlooked(
    resources: Collection[str], kubelet: int | None, classes: Mapping[str, str] | None, unsaid: str = ""
) -> str:
    """Return why pods that ask by name for these resources would run without their GPU; '' if none would.

    Args:
        resources: the resources of which DRA has GPUs, or will have.
        kubelet: the minor version of the node's kubelet; None: unknown.
        classes: the resource that each DeviceClass names ('' for none); None: unknown.
        unsaid: why ``classes`` is unknown.
    """
    if not resources or (kubelet or 0) >= FIRST_BY_NAME_MINOR:
        return ""
    if classes is None:
        return f"it can't be known whether pods that ask by name would run without their GPU: {unsaid}"
    for name, resource in classes.items():
        if resource in resources:
            return (
                f"the DeviceClass {name} has the extendedResourceName {resource}, and kubelet "
                f"1.{kubelet or 0} would run pods that ask for that name without their GPU. Upgrade the "
                f"kubelet to 1.{FIRST_BY_NAME_MINOR} first, or take that field out of the class"
            )
    return ""


def of_dra(sides: Mapping[str, Collection[Side]]) -> frozenset[str]:
    """Return the resources that have GPUs which are DRA's or on their way to or from it."""
    return frozenset(name for name, found in sides.items() if not _NOT_GIVEN.issuperset(found))


def waiting(sides: Mapping[str, Collection[Side]], classes: Mapping[str, str] | None, asked: Collection[str]) -> str:
    """Return the resources for which pods that ask by name wait, because no DeviceClass names them any more; '' if none.

    Args:
        sides: the sides of each resource's boards. If one is the device plugin API's, that API serves such pods.
        classes: as for ``overlooked``.
        asked: the resources that a class named, or that pods got by name. For others only claims may be wanted.
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
