"""Events on the node for what became of its devices: few, and each once. Pure, but for the queue's own state.

A GPU that is shared, or one that flaps, makes one event and not hundreds: replicas count as their GPU, the same news of the
same GPU is told again after ``AGAIN`` seconds at the soonest, and all together are bounded by ``BURST`` and ``EACH``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from devices.life.states import State
from devices.replicas import unshared
from gateway.wires.log import printable

if TYPE_CHECKING:
    from devices.life.states import Entry
    from gateway.kubelet.drift import Finding

PATH: Final = "/api/v1/namespaces/default/events"
"""Where events of nodes are, which have no namespace."""
AGAIN: Final = 300.0
BURST: Final = 10
EACH: Final = 60.0
"""So many events at once, and one more each so many seconds."""
MOST: Final = 20
"""How many wait while the API server is away: the newest."""
_REMEMBERED: Final = 1000
_LONGEST: Final = 1024
_ILL: Final = frozenset({State.UNHEALTHY, State.LOST})
_COMPONENT: Final = "device-plugin-gateway"


class News(Struct, frozen=True):
    """What an event tells, of which GPU (or other subject), when (unix seconds)."""

    reason: str
    subject: str
    message: str
    warning: bool
    at: float


def of_devices(resource: str, before: Mapping[str, Entry], after: Mapping[str, Entry], now: float) -> Iterator[News]:
    """Tell what became of a resource's devices between two lists, once for each GPU."""
    told: set[tuple[str, str]] = set()
    gpus: Mapping[str, Entry] = {}
    for device_id, entry in after.items():
        was, subject = before.get(device_id), unshared(device_id)
        if was is None:  # An edit of the configuration may have given its GPU another ID meanwhile.
            gpus = gpus or {unshared(one): earlier for one, earlier in before.items()}
            was = gpus.get(subject)
        state, old = entry.state, None if was is None else was.state
        if was is entry or state is old:
            continue
        reason = ""
        if state in _ILL and old not in _ILL:
            reason = "GPULost" if state is State.LOST else "GPUUnhealthy"
        elif state is State.CORDONED:
            reason = "GPUCordoned"
        elif state is State.PRESENT and old in _ILL:
            reason = "GPURecovered"
        elif state is State.PRESENT and old is State.CORDONED:
            reason = "GPUUncordoned"
        if reason and (reason, subject) not in told:
            told.add((reason, subject))
            words = f": {entry.reason}" if entry.reason else ""
            yield News(reason, subject, f"{resource}: {subject} is {state.value}{words}", warning=state in _ILL, at=now)


def of_findings(resource: str, before: Sequence[Finding], after: Sequence[Finding], now: float) -> Iterator[News]:
    """Tell where the kubelet's records and the gateway's differ, and did not before."""
    known = {(one.kind, one.device_ids) for one in before}
    for one in after:
        if (one.kind, one.device_ids) not in known:
            yield News(
                "GPURecordsDiffer", f"{resource} {one.kind.value}", f"{resource}: {one.words}", warning=True, at=now
            )


class Queue:
    """The events that are to be told, of which too many are dropped and counted. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.waiting: deque[News] = deque(maxlen=MOST)
        self.dropped = 0
        self._tokens, self._at = float(BURST), float("-inf")
        self._told: dict[tuple[str, str], float] = {}

    def add(self, news: News, now: float) -> bool:
        """Take an event, unless it was told of late, or there are too many."""
        key = (news.reason, news.subject)
        self._tokens = min(float(BURST), self._tokens + (now - self._at) / EACH)
        self._at = now
        if now - self._told.get(key, float("-inf")) < AGAIN or self._tokens < 1:
            self.dropped += 1
            return False
        self._tokens -= 1
        self._told.pop(key, None)
        self._told[key] = now
        if len(self._told) > _REMEMBERED:
            del self._told[next(iter(self._told))]
        self.waiting.append(news)
        return True


def body(news: News, node: str, token: str) -> Mapping[str, Any]:
    """Make the event; ``token`` is the gateway's. The UID is the node's name, by which kubectl looks for events of nodes."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(news.at))
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{node}.", "namespace": "default"},
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node},
        "reason": news.reason,
        "message": printable(news.message)[:_LONGEST],
        "type": "Warning" if news.warning else "Normal",
        "source": {"component": _COMPONENT, "host": node},
        "reportingComponent": _COMPONENT,
        "reportingInstance": token,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
