"""The resource name of each GPU and partition by its vendor's rules, and the GPUs that a setting leaves out. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from devices.gpu.model import GPU
from devices.gpu.vendor import PLAIN, Vendor, vendor_of
from devices.model import Trouble, TroubleKind
from devices.policy import Policy
from devices.source import Unusable

_SEVERITY: Final = tuple(TroubleKind)
"""The kinds of trouble, the worst one last."""
_LONG_DOMAIN: Final = re.compile(r"^0000(?=[0-9a-f]{4}:)")
"""NVIDIA's tools write a PCI domain with eight digits, the kernel writes four."""


class NamingError(ValueError):
    """The GPUs of the node can't be named under this policy. The message says why and what to do."""


def named(gpus: Iterable[GPU], policy: Policy, vendors: Sequence[Vendor]) -> dict[str, tuple[GPU, ...]]:
    """Group GPUs and partitions by the resource names under which they are offered; leave out the others.

    A partition also has its GPU's trouble. A GPU that is offered whole has the worst trouble of itself and its partitions.

    Raises:
        NamingError: the policy needs equal GPUs of a vendor, and they differ.
    """
    gpus = tuple(gpus)
    around, found = _by_board(gpus), dict[str, list[GPU]]()
    for gpu in gpus:
        if (name := vendor_of(gpu.resource, vendors).name_of(gpu, policy)) is not None:
            found.setdefault(name, []).append(_judged(gpu, around[gpu.board]))
    for vendor in vendors:
        vendor.check([gpu for gpu in gpus if gpu.resource.startswith(vendor.prefix)], policy)
    return {name: tuple(there) for name, there in found.items()}


def as_they_are(before: Mapping[str, GPU], gpus: Sequence[GPU], left_out: Collection[str]) -> dict[str, GPU]:
    """Return the GPUs that were offered before and aren't left out, by UUID, with their state now. Gone ones are unhealthy."""
    now, around = {gpu.uuid: gpu for gpu in gpus}, _by_board(gpus)
    gone = Trouble("it is gone: the GPU was partitioned, or its partitions were changed")
    return {
        uuid: _judged(there, around[there.board])
        if (there := now.get(uuid)) is not None and there.partitioned == gpu.partitioned
        else replace(gpu, trouble=gone)
        for uuid, gpu in before.items()
        if uuid not in left_out
    }


def _by_board(gpus: Iterable[GPU]) -> dict[str, list[GPU]]:
    around: dict[str, list[GPU]] = {}
    for gpu in gpus:
        around.setdefault(gpu.board, []).append(gpu)
    return around


def _judged(gpu: GPU, around: Iterable[GPU]) -> GPU:
    """Return a GPU or partition with the worst trouble of itself, its GPU and its partitions; ``around`` has all of these."""
    troubles = [one.trouble for one in around if not gpu.parent or one.uuid in {gpu.uuid, gpu.parent}]
    if gpu.lacks:
        troubles.append(Trouble(gpu.lacks))
    worst = max(filter(None, troubles), key=lambda trouble: _SEVERITY.index(trouble.kind), default=None)
    return gpu if worst == gpu.trouble else replace(gpu, trouble=worst)


def claimed(resource: str, backend: str, policy: Policy, vendors: Iterable[Vendor]) -> bool:
    """Return True if a backend's GPUs could have this resource name. Without a vendor, any name but those of path rules could be."""
    if any(rule.resource == resource for rule in policy.globbed):
        return False
    vendor = next((one for one in vendors if one.name == backend), PLAIN)
    given = set(vendor.given_names(policy))
    sliced = [one for name, one in policy.slices.items() if name.startswith(vendor.prefix) or name in given]
    shown: set[str] = set().union(*(one.names for one in sliced))
    return resource.startswith(vendor.prefix) or resource in given | shown


def also_left_out(found: Iterable[Unusable], patterns: Collection[str]) -> Iterable[Unusable]:
    """Yield the unusable GPUs; mark those that a setting leaves out."""
    for one in found:
        index = int(one.index) if one.index.isdecimal() else -1
        named = patterns_of(GPU(one.id, index, -1, pci=one.pci), patterns)
        yield as_left_out(one, named) if named else one


def as_left_out(gpu: Unusable, patterns: tuple[str, ...]) -> Unusable:
    """Return the GPU, marked as left out by these patterns."""
    reason = f"the setting exclude-devices names it ({', '.join(patterns)})"
    return replace(gpu, reason=reason, excluded=True, patterns=patterns)


def left_out(gpus: Iterable[GPU], patterns: Collection[str]) -> Mapping[str, tuple[str, ...]]:
    """Return the patterns that leave out each GPU or partition, by UUID. A GPU's patterns also leave out its partitions."""
    by_board: dict[str, tuple[str, ...]] = {}
    found = {}
    for gpu in gpus if patterns else ():
        own = patterns_of(gpu, patterns)
        by_board[gpu.uuid] = own
        if both := tuple(dict.fromkeys((*by_board.get(gpu.parent, ()), *own))):
            found[gpu.uuid] = both
    return found


def patterns_of(gpu: GPU, patterns: Collection[str]) -> tuple[str, ...]:
    """Return the patterns that name a GPU or partition, in upper or lower case: by UUID, index, PCI address or product."""
    if not patterns:
        return ()
    pci = _plain(gpu.pci)
    said = (gpu.uuid, gpu.place or str(gpu.index), pci, pci.removeprefix("0000:"), gpu.product)
    words = {_plain(one) for one in said} - {""}
    return tuple(one for one in patterns if any(matches(word, _plain(one)) for word in words))


def _plain(text: str) -> str:
    return _LONG_DOMAIN.sub("", text.casefold())


def matches(word: str, pattern: str) -> bool:
    """Return True if ``pattern``, in which ``*`` is anything, matches all of ``word``."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), word) is not None
