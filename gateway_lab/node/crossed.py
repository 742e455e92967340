"""What was seen of a node while its GPUs crossed between the two APIs, and what follows from it.

``Seen`` hears the API server's pods and ResourceSlices; the rest is pure. Times are seconds since 1970 of the node's clock, which is also
the clock of containers' logs and of the gateway's.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Self

from gateway_lab.node.api import Api, Event, Object
from gateway_lab.node.dra import DRIVER, SLICES
from gateway_lab.node.watch import PODS

NEVER: Final = math.inf
"""The time of what didn't happen."""
AFTER_RESTART: Final = 5.0
"""Seconds from a node's being ready until its kubelet has admitted for certain what came meanwhile."""
_OVER: Final = frozenset({"Succeeded", "Failed"})
_UNPREPARED: Final = re.compile(r'"Failed to prepare dynamic resources" err="(.*)" pod="[^"/]*/([^"]*)"')


@dataclass(slots=True)
class Life:
    """A pod's life: when it was created, given to the node, began to run and was over; ``gpus`` are what its container could open.

    ``claim`` says whether it asked by a ResourceClaim. ``opened`` is from when to when it told of its GPUs.
    """

    name: str
    claim: bool
    created: float
    scheduled: float = NEVER
    began: float = NEVER
    ended: float = NEVER
    gpus: frozenset[str] = frozenset()
    opened: tuple[float, float] = (NEVER, NEVER)
    failed: str = ""


@dataclass(slots=True)
class Shown:
    """What the ResourceSlices show: for each GPU (its UUID), since when it is there and free of taints, or no more."""

    slices: dict[str, Mapping[str, bool]] = field(default_factory=dict)
    history: dict[str, list[tuple[float, bool]]] = field(default_factory=dict)

    def hear(self, at: float, name: str, offered: Mapping[str, bool] | None) -> None:
        """Take a slice as it is now: its GPUs, and whether each is offered to anybody; None: the slice is gone."""
        self.slices.pop(name, None) if offered is None else self.slices.update({name: offered})
        free = {one for found in self.slices.values() for one, is_free in found.items() if is_free}
        for one in free | self.history.keys():
            said = self.history.setdefault(one, [])
            if (one in free) != (bool(said) and said[-1][1]):
                said.append((at, one in free))

    def since(self, gpu: str, moment: float) -> float:
        """When a GPU was offered next, or was already; ``NEVER`` where it wasn't."""
        before = [is_free for at, is_free in self.history.get(gpu, ()) if at <= moment]
        if before and before[-1]:
            return moment
        return next((at for at, is_free in self.history.get(gpu, ()) if is_free and at > moment), NEVER)


class Seen:
    """What watches of one API server told so far, by pod's name. ``async with``."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.lives: dict[str, Life] = {}
        self.shown = Shown()
        self.over: Callable[[str], None] = lambda _: None
        """Called with the name of a pod that has just ended by itself."""
        self._behind = time.time() - time.monotonic()

    async def __aenter__(self) -> Self:
        self._watches = self._api.watch(PODS, self._pod), self._api.watch(SLICES, self._slice)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for watch in self._watches:
            await watch.close()

    def _pod(self, event: Event) -> None:
        if event.object is None:
            return
        at, found = event.monotonic_ns / 1e9 + self._behind, event.object
        life = self.lives.get(found["metadata"]["name"])
        if life is None:
            return
        if found["spec"].get("nodeName"):
            life.scheduled = min(life.scheduled, at)
        status = found.get("status", {})
        if (event.gone or status.get("phase") in _OVER) and life.ended == NEVER:
            life.ended = at
            if status.get("phase") == "Failed":
                life.failed = _why(status)
            if not event.gone:
                self.over(life.name)

    def _slice(self, event: Event) -> None:
        if event.object is not None and event.object["spec"]["driver"] == DRIVER:
            at, name = event.monotonic_ns / 1e9 + self._behind, event.object["metadata"]["name"]
            self.shown.hear(at, name, None if event.gone else _offered(event.object))


def _why(status: Mapping[str, Any]) -> str:
    """Say why a pod failed: the kubelet's words, or how its container ended."""
    ends = [one.get("state", {}).get("terminated") or {} for one in status.get("containerStatuses") or ()]
    words = [status.get("reason"), status.get("message")]
    words += [str(one.get(key)) for one in ends for key in ("reason", "exitCode", "message") if key in one]
    return ", ".join(filter(None, words)) or "nobody says why"


def _offered(found: Object) -> dict[str, bool]:
    devices: Iterable[Any] = found["spec"].get("devices") or ()
    return {one["attributes"]["uuid"]["string"]: not one.get("taints") for one in devices}


# What the gateways said.


def sides(log: Iterable[str]) -> dict[str, list[tuple[float, str]]]:
    """Read from the gateways' logs when each GPU came to which side."""
    found: dict[str, list[tuple[float, str]]] = {}
    for line in log:
        if '"GPUs move to the other API"' in line:
            said = json.loads(line)
            for gpu, side in said["boards"].items():
                found.setdefault(gpu, []).append((unix(said["timestamp"]), side))
    return found


def unix(written: str) -> float:
    """Read a time of RFC 3339 in UTC, whose fraction may have nine digits."""
    whole, _, fraction = written.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")


def unprepared(log: str) -> dict[str, str]:
    """Read from the kubelet's log which pods it could not prepare the claims of at first, and why."""
    found: dict[str, str] = {}
    for why, pod in _UNPREPARED.findall(log):
        words = "the API server didn't let the kubelet read the claim" if "is forbidden" in why else why[:160]
        found.setdefault(pod, words)
    return found


# What follows.


def meanwhile(
    scheduled: float, ended: float, restarts: Sequence[tuple[float, float]], gaps: Sequence[tuple[float, float]]
) -> str:
    """Return what happened to the node while it had a pod that failed; '' for nothing.

    The API server may learn 10 s late that a kubelet refused a pod, so the moment at which the pod ended is not enough.

    Args:
        scheduled: when the node got the pod.
        ended: when the API server showed the failure.
        restarts: from when to when kubelets were restarted, until their node was ready.
        gaps: from when to when no gateway served.
    """
    found = [f"no gateway served for {end - begin:.1f} s" for begin, end in gaps if begin <= ended and scheduled <= end]
    found += [
        f"{ended - begin:.1f} s after the kubelet's end"
        for begin, end in restarts
        if begin <= ended and scheduled <= end + AFTER_RESTART
    ]
    return ", ".join(found)


def doubly(lives: Iterable[Life]) -> list[str]:
    """Say which GPUs two containers could open at once, by what they themselves wrote."""
    by_gpu: dict[str, list[Life]] = {}
    for life in lives:
        for gpu in life.gpus:
            by_gpu.setdefault(gpu, []).append(life)
    return [
        f"{gpu}: {one.name} and {other.name}"
        for gpu, users in by_gpu.items()
        for number, one in enumerate(users)
        for other in users[number + 1 :]
        if one.opened[0] <= other.opened[1] and other.opened[0] <= one.opened[1]
    ]


def waited(
    life: Life,
    lives: Sequence[Life],
    moves: Mapping[str, Sequence[tuple[float, str]]],
    until: float,
    *,
    either: bool = False,
) -> float:
    """Say for how long a pod waited while a GPU of the side that it asks was free, in seconds.

    A GPU isn't free from when a pod that gets it was given to the node, until that pod is over.

    Args:
        life: the pod.
        lives: all pods.
        moves: when each GPU came to which side; all begin at the device plugin API.
        until: when nobody looked any more.
        either: whether it takes a GPU of either side.
    """
    wanted = {"dra", "plugin"} if either else {"dra" if life.claim else "plugin"}
    ends = min(life.began, life.ended, until)
    taken = {gpu: [(one.scheduled, one.ended) for one in lives if gpu in one.gpus and one is not life] for gpu in moves}
    cuts = {life.created, ends}
    for gpu, said in moves.items():
        cuts |= {at for at, _ in said} | {at for pair in taken[gpu] for at in pair}
    inside = sorted(at for at in cuts if life.created <= at <= ends)
    total = 0.0
    for begin, end in itertools.pairwise(inside):
        middle = (begin + end) / 2
        if any(
            _side(said, middle) in wanted and not any(first <= middle <= last for first, last in taken[gpu])
            for gpu, said in moves.items()
        ):
            total += end - begin
    return total


def _side(said: Sequence[tuple[float, str]], moment: float) -> str:
    return next((side for at, side in reversed(said) if at <= moment), "plugin")


def last_end(gpu: str, begin: float, end: float, lives: Iterable[Life]) -> float:
    """When the last pod was over that had a GPU between two moments; ``NEVER`` where none had.

    The API server may tell that a pod is over after its GPU is back; that pod was over at ``end``.
    """
    users = [one for one in lives if gpu in one.gpus and one.began < end and one.ended > begin]
    return max((min(one.ended, end) for one in users), default=NEVER)


def arrival(gpu: str, to: str, ordered: float, moves: Mapping[str, Sequence[tuple[float, str]]], shown: Shown) -> float:
    """When a GPU that was ordered to a side could be given away there: at DRA when the API server offered it."""
    at = next((at for at, side in moves.get(gpu, ()) if side == to and at >= ordered), NEVER)
    return shown.since(gpu, at) if to == "dra" and at != NEVER else at


def first_after(gpu: str, at: float, lives: Iterable[Life], *, claim: bool) -> Life | None:
    """Give the first pod that got a GPU after its arrival, if it had waited for one."""
    users = [one for one in lives if one.claim is claim and gpu in one.gpus and one.began >= at]
    first = min(users, key=lambda one: one.began, default=None)
    return None if first is None or first.created > at else first


def figures(values: Iterable[float]) -> dict[str, float | int]:
    """Sum up: how many, their median, the largest; what never happened isn't counted."""
    there = sorted(one for one in values if one != NEVER)
    if not there:
        return {"count": 0}
    return {"count": len(there), "median": round(statistics.median(there), 3), "worst": round(there[-1], 3)}
