"""Devices that are described by path globs (``Policy.globbed``): FPGAs, NICs, InfiniBand, ``/dev/fuse``.

Such a device is a file. Its path is the device ID (``/dev/fuse``, or ``/dev/fuse::3`` if it is offered several times). The
device is healthy while the file exists, and lost when the file vanishes. A container gets the device node. The source searches
for files every ``POLL_S`` seconds, as other plugins of this kind do, because no event covers all changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
import stat
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Container, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import structlog

from devices import replicas
from devices.boards import Place
from devices.model import (
    ContainerAnswer,
    ContainerRequest,
    Device,
    DeviceNode,
    Fault,
    Field,
    Options,
    PreferredRequest,
    RefusedError,
    Sendable,
    Trouble,
)
from devices.naming import resource_name_error
from devices.policy import Globbed, Policy
from devices.replicas import MARK, unshared
from devices.source import Absence, DeviceSource, Facts, Inventory, Listing, check_choice, chosen, not_carried

POLL_S: Final = 5.0
"""Seconds between two searches for files."""
MOST_FILES: Final = 1024
"""Most files of one rule that are offered, the first ones by path."""
MOST_PATTERNS: Final = 32
"""Most paths of one rule, with the shared ones."""
MOST_TIMES: Final = 1000
"""The largest ``Globbed.count``."""
MOST_DEVICES: Final = 10_000
"""Most devices of one rule."""
PATH_CHARS: Final = 240

_DEV: Final = "/dev/"
_OPTIONS: Final = Options(preferred_allocation=True)
_MOST_NUMA_NODES: Final = 1024  # CONFIG_NODES_SHIFT is at most 10

_log = structlog.get_logger()


def rule_error(rule: Globbed, taken: Container[str] = frozenset()) -> str | None:
    """Return why ``rule`` can't be used, or None; ``taken`` are resource names that already have a rule."""
    if problem := resource_name_error(rule.resource):
        return problem
    if rule.resource in taken:
        return f"{rule.resource} has two rules. Put all paths into one"
    patterns = (*rule.paths, *rule.shared)
    if not rule.paths or len(patterns) > MOST_PATTERNS:
        return (
            f"{rule.resource} has {len(patterns)} paths. Allowed: 1 to {MOST_PATTERNS}. Use wildcards, or several names"
        )
    for pattern in patterns:
        if (
            not pattern.startswith(_DEV)
            or len(pattern) > PATH_CHARS
            or not pattern.isprintable()
            or "**" in pattern
            or not {"", ".", ".."}.isdisjoint(pattern.split("/")[1:])
        ):
            return (
                f"{rule.resource} has the path {pattern[:80]!r}. Write one below /dev of at most {PATH_CHARS} characters, without "
                "'..' and '**', such as /dev/infiniband/uverbs*"
            )
    if not 1 <= rule.count <= MOST_TIMES:
        return f"{rule.resource} has the count {rule.count}. Allowed: 1 to {MOST_TIMES} (how many containers may share a file)"
    if not rule.permissions or sorted(set(rule.permissions) & set("rwm")) != sorted(rule.permissions):
        return f"{rule.resource} has the permissions {rule.permissions[:16]!r}. Allowed: r, w and m, each once; rw is usual"
    return None


class GenericSource(DeviceSource):
    """Devices that are files. The source never keeps them open, so it has nothing to release.

    Character and block devices are offered, and links to these. So is a folder that a rule names without wildcards: a
    container gets all devices in it. A ``shared`` file isn't offered.

    Args:
        policy: the operator's settings; its rules have no ``rule_error``.
        root: where this process sees the host's ``/dev`` and ``/sys``.
    """

    name = "generic"

    def __init__(self, policy: Policy, root: Path = Path("/")) -> None:
        self._root = root
        self._adopted = asyncio.Event()
        self._seen: Inventory = {}
        self.adopt(policy)

    def adopt(self, policy: Policy) -> None:
        """Use new rules."""
        self._rules = {rule.resource: rule for rule in policy.globbed}
        self._adopted.set()

    async def watch(self) -> AsyncGenerator[Inventory]:
        """Yield the inventory, and again after each change of files or rules."""
        last: Inventory | None = None
        while True:
            self._adopted.clear()
            rules = self._rules
            seen = await asyncio.to_thread(_look, rules, self._root)
            if seen != last:
                self._seen = last = seen
                for name, listing in seen.items():
                    if len(listing.devices) >= _most(rules[name]) * rules[name].count:
                        _log.warning(
                            "a rule has all the devices it may have", resource=name, devices=len(listing.devices)
                        )
                yield seen
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._adopted.wait()

    async def answer(self, resource: str, request: ContainerRequest, sendable: Sendable) -> ContainerAnswer:
        """Return the device nodes of the requested devices, and the rule's shared ones, each once.

        Raises:
            RefusedError: FAILED_PRECONDITION, if the kubelet's API can't carry device nodes, or the rule was removed.
        """
        rule = self._rules.get(resource)
        if rule is None or not all(_describes(rule, device_id) for device_id in request.device_ids):
            raise RefusedError(
                Fault.FAILED_PRECONDITION,
                f"no rule of the configuration describes {', '.join(request.device_ids[:4])} of "
                f"{resource} any more. Start the pod again, or put the rule back",
            )
        if Field.DEVICE_NODES not in sendable.certain:
            raise not_carried(resource, [Field.DEVICE_NODES])
        own = sorted({unshared(device_id) for device_id in request.device_ids})
        shared = await asyncio.to_thread(_files, rule.shared, self._root) if rule.shared else []
        nodes = dict.fromkeys((*own, *shared))
        return ContainerAnswer(device_nodes=tuple(DeviceNode(path, path, rule.permissions) for path in nodes))

    async def prefer(self, resource: str, request: PreferredRequest) -> tuple[str, ...]:
        """Choose devices on the fewest NUMA nodes. On these, choose as many different files as possible, least used first.

        Raises:
            RefusedError: INVALID_ARGUMENT, no choice meets the request.
        """
        seen = self._seen.get(resource)
        return await chosen(request, lambda: _preferred(request, seen))

    def absence(self, resource: str, device_id: str) -> Absence:
        """Return LOST for a file that vanished, WITHDRAWN if no rule describes it, UNKNOWN if the ID isn't a path below /dev."""
        if not device_id.startswith(_DEV):
            return Absence.UNKNOWN
        rule = self._rules.get(resource)
        return Absence.LOST if rule is not None and _describes(rule, device_id) else Absence.WITHDRAWN

    def claims(self, resource: str) -> bool:
        """Return True if a rule has this name."""
        return resource in self._rules

    def place(self, device_id: str) -> Place | None:
        """Return the device's file, which is the same under each rule."""
        return Place(unshared(device_id)) if device_id.startswith(_DEV) else None

    def facts(self, resource: str) -> Callable[[str], Facts]:
        """Return a function that returns the device's file."""
        rule = self._rules.get(resource)
        return lambda one: Facts(nodes=(unshared(one),)) if rule is not None and _describes(rule, one) else Facts()


def _describes(rule: Globbed, device_id: str) -> bool:
    """Return True if the rule would offer a device with this ID if its file existed."""
    path, several, number = device_id.partition(MARK)
    if rule.count == 1:
        fits = not several
    else:
        fits = number.isdecimal() and len(number) <= len(str(MOST_TIMES)) and int(number) < rule.count
    return fits and _matches(rule.paths, path) and not _matches(rule.shared, path)


def _matches(patterns: Iterable[str], path: str) -> bool:
    names = path.split("/")
    return any(
        len(parts) == len(names) and all(map(fnmatchcase, names, parts))
        for parts in (pattern.split("/") for pattern in patterns)
    )


def _look(rules: Mapping[str, Globbed], root: Path) -> Inventory:
    return {name: _listing(rule, root) for name, rule in rules.items()}


def _listing(rule: Globbed, root: Path) -> Listing:
    """Return the devices of one rule. If a file is missing that every container needs, all are unhealthy."""
    paths = [path for path in _files(rule.paths, root) if not _matches(rule.shared, path)]
    devices = []
    for path in paths[: _most(rule)]:
        numa_nodes = _numa_nodes(path, root)
        ids = replicas.ids(path, 0 if rule.count == 1 else rule.count)
        devices += [Device(device_id, numa_nodes=numa_nodes) for device_id in ids]
    missing = [pattern for pattern in rule.shared if not _files([pattern], root)]
    trouble = Trouble(f"every container with it needs {missing[0]}, which isn't there") if missing else None
    return Listing(tuple(devices), _OPTIONS, {device.id: trouble for device in devices} if trouble else {})


def _most(rule: Globbed) -> int:
    return min(MOST_FILES, MOST_DEVICES // rule.count)


def _files(patterns: Iterable[str], root: Path) -> list[str]:
    """Return the host's paths that match and can be given to a container, sorted, at most ``MOST_FILES`` for each pattern."""
    found: set[str] = set()
    for pattern in patterns:
        matches = (f"/{path.relative_to(root)}" for path in root.glob(pattern[1:]))
        found.update(
            heapq.nsmallest(MOST_FILES, (path for path in matches if _fits(path, root, folder=path == pattern)))
        )
    return sorted(found)


def _fits(path: str, root: Path, *, folder: bool) -> bool:
    """Return True if a path can be an ID, and is a device node or, if wanted, a folder."""
    if len(path) > PATH_CHARS or not path.isprintable() or MARK in path:
        return False
    try:
        mode = (root / path[1:]).stat().st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or (folder and stat.S_ISDIR(mode))


def _numa_nodes(path: str, root: Path) -> tuple[int, ...]:
    """Return the NUMA node of a device file's hardware (Documentation/ABI/testing/sysfs-bus-pci: -1 if unknown)."""
    try:
        status = (root / path[1:]).stat()
        kind = "block" if stat.S_ISBLK(status.st_mode) else "char"
        number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
        with (root / "sys/dev" / kind / number / "device/numa_node").open("rb") as file:
            node = int(file.read(16))
    except (OSError, ValueError):
        return ()
    return (node,) if 0 <= node < _MOST_NUMA_NODES else ()


def _preferred(request: PreferredRequest, seen: Listing | None) -> tuple[str, ...]:
    check_choice(request)
    known = {} if seen is None else seen.by_id
    must = frozenset(request.must_include)
    free = frozenset(request.available) - must
    missing = request.size - len(must)
    room = Counter(known[device_id].numa_nodes for device_id in free if device_id in known)
    opened = {known[device_id].numa_nodes for device_id in must if device_id in known}
    lacking = missing - sum(room[place] for place in opened)
    while lacking > 0 and (fresh := sorted(room.keys() - opened)):
        enough = [place for place in fresh if room[place] >= lacking]
        best = min(enough, key=room.__getitem__) if enough else max(fresh, key=room.__getitem__)
        opened.add(best)
        lacking -= room[best]
    left, taken = Counter(map(unshared, free)), Counter(map(unshared, must))
    ranks = {}
    for device_id in sorted(free, key=_in_order):
        path = unshared(device_id)
        far = 2 if device_id not in known else known[device_id].numa_nodes not in opened
        ranks[device_id] = (far, taken[path], -left[path], path)
        taken[path] += 1
    return tuple(sorted([*must, *sorted(ranks, key=ranks.__getitem__)[:missing]], key=_in_order))


def _in_order(device_id: str) -> tuple[str, int, str]:
    """Sort by path, then by number: a longer number is the higher one."""
    return unshared(device_id), len(device_id), device_id
