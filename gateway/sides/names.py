"""Find out if pods that ask by resource name for DRA's GPUs would run without a GPU, or wait. Pure.

If a DeviceClass names a resource and the node has none of it in allocatable, the scheduler makes a claim for such a pod,
whatever the kubelet's version. A kubelet before 1.36 then runs the pod without its GPU and without an error (run on 1.32).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from gateway.sides.side import Side

FIRST_BY_NAME_MINOR: Final = 36
"""The first kubelet (1.N) that gives DRA's devices to pods that ask by resource name (DRAExtendedResource, on by default)."""
_NOT_GIVEN: Final = frozenset({Side.PLUGIN, Side.FOREIGN})
_WITHOUT_PLUGIN: Final = frozenset({Side.DRA, Side.TO_DRA})


def overlooked(
    resources: Collection[str], kubelet: int | None, classes: Mapping[str, str] | None, unsaid: str = ""
) -> str:
    """Return why pods that ask by these resource names would run without their GPU; '' if no pod would.

    Args:
        resources: the resources with GPUs that are DRA's, or will be.
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
    """Return the resources with a GPU that is DRA's, or moves to or from DRA."""
    return frozenset(name for name, found in sides.items() if not _NOT_GIVEN.issuperset(found))


def waiting(sides: Mapping[str, Collection[Side]], classes: Mapping[str, str] | None, asked: Collection[str]) -> str:
    """Return why pods that ask by resource name wait: no DeviceClass names the resource any more; '' if none wait.

    Args:
        sides: the sides of each resource's boards. If the device plugin API has one of them, it serves such pods.
        classes: as for ``overlooked``.
        asked: the resources that a class has named, or that pods got by name. Users of other resources may want claims only.
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
