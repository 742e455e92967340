"""Build the node's events about its devices, and limit their number. Pure, except the queue's own state.

A shared or flapping GPU causes one event, not hundreds: events of replicas count as events of their GPU, and the same event is
repeated after ``REPEAT_AFTER_S`` seconds at the earliest. ``BURST`` and ``REFILL_S`` limit all events together.
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
"""Nodes have no namespace, so their events are in ``default``."""
REPEAT_AFTER_S: Final = 300.0
"""Fewest seconds between two equal events."""
BURST: Final = 10
REFILL_S: Final = 60.0
"""At most ``BURST`` events at once. After that, one every ``REFILL_S`` seconds."""
MAX_WAITING: Final = 20
"""Most events that wait while the API server is away. The newest are kept."""
_MESSAGE_CHARS: Final = 1024
_BAD_STATES: Final = frozenset({State.UNHEALTHY, State.LOST})
_COMPONENT: Final = "device-plugin-gateway"


class News(Struct, frozen=True):
    """The content of an event: its GPU or other subject, and when it happened (Unix seconds)."""

    reason: str
    subject: str
    message: str
    warning: bool
    at: float


def of_devices(resource: str, before: Mapping[str, Entry], after: Mapping[str, Entry], now: float) -> Iterator[News]:
    """Return the events of a resource's devices between two lists, one per GPU."""
    told: set[tuple[str, str]] = set()
    gpus: Mapping[str, Entry] = {}
    for device_id, entry in after.items():
        was, subject = before.get(device_id), unshared(device_id)
        if was is None:  # An edit of the configuration may have changed the device's ID.
            gpus = gpus or {unshared(one): earlier for one, earlier in before.items()}
            was = gpus.get(subject)
        state, old = entry.state, None if was is None else was.state
        if was is entry or state is old:
            continue
        reason = ""
        if state in _BAD_STATES and old not in _BAD_STATES:
            reason = "GPULost" if state is State.LOST else "GPUUnhealthy"
        elif state is State.CORDONED:
            reason = "GPUCordoned"
        elif state is State.PRESENT and old in _BAD_STATES:
            reason = "GPURecovered"
        elif state is State.PRESENT and old is State.CORDONED:
            reason = "GPUUncordoned"
        if reason and (reason, subject) not in told:
            told.add((reason, subject))
            words = f": {entry.reason}" if entry.reason else ""
            yield News(
                reason, subject, f"{resource}: {subject} is {state.value}{words}", warning=state in _BAD_STATES, at=now
            )


def of_findings(resource: str, before: Sequence[Finding], after: Sequence[Finding], now: float) -> Iterator[News]:
    """Return the events of new differences between the kubelet's records and our lists."""
    known = {(one.kind, one.device_ids) for one in before}
    for one in after:
        if (one.kind, one.device_ids) not in known:
            yield News(
                "GPURecordsDiffer", f"{resource} {one.kind.value}", f"{resource}: {one.words}", warning=True, at=now
            )


class Queue:
    """Events that wait to be sent. If there are too many, some are dropped and counted. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.waiting: deque[News] = deque(maxlen=MAX_WAITING)
        self.dropped = 0
        self._tokens, self._at = float(BURST), float("-inf")
        self._told: dict[tuple[str, str], float] = {}

    def add(self, news: News, now: float) -> bool:
        """Add an event. Return False, and count it as dropped, if it was sent lately or there are too many."""
        key = (news.reason, news.subject)
        self._told = {one: at for one, at in self._told.items() if now - at < REPEAT_AFTER_S}
        self._tokens = min(float(BURST), self._tokens + (now - self._at) / REFILL_S)
        self._at = now
        if key in self._told or self._tokens < 1:
            self.dropped += 1
            return False
        self._tokens -= 1
        self._told[key] = now
        self.waiting.append(news)
        return True


def body(news: News, node: str, token: str) -> Mapping[str, Any]:
    """Return the event's object; ``token`` is the gateway's. ``involvedObject.uid`` is the node's name: kubectl finds events of nodes by it."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(news.at))
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{node}.", "namespace": "default"},
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node},
        "reason": news.reason,
        "message": printable(news.message)[:_MESSAGE_CHARS],
        "type": "Warning" if news.warning else "Normal",
        "source": {"component": _COMPONENT, "host": node},
        "reportingComponent": _COMPONENT,
        "reportingInstance": token,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
