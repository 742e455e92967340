"""Counts of what happened since the gateway started.

There is one event loop, so plain dictionaries need no lock. ``gateway status`` and the metrics read them. Each family keeps
``MOST_LABELS`` label sets, and counts all others as ``other``.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum
from typing import Final

MOST_LABELS: Final = 256
MOST_HISTOGRAMS: Final = 64
OTHER: Final = "other"

GAP_BOUNDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 2.5, 10.0, 60.0)
"""Seconds. A restarted kubelet reports its devices to the API server after 0.1 s, and again only 10 s later."""
CALL_BOUNDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0)
"""Seconds. The kubelet sets no deadline for Allocate, and starts no other pod meanwhile (#117435)."""
LAG_WINDOW: Final = 60.0
"""Seconds after which the worst lag of the event loop is forgotten, at the earliest. The latest is twice that."""


class Cause(Enum):
    """Why a resource was registered. The values are shown to people."""

    FIRST = "first"
    KUBELET_START = "kubelet start"
    STREAM_ENDED = "stream ended"
    ERROR = "error"
    NEVER_CALLED = "never called"
    RECORDS = "books"
    """The kubelet's records lacked the resource."""
    OPTIONS = "options"
    HANDOVER = "handover"
    OFFERED = "offered again"
    """The list had been too large for the dialect."""


class Confirmation(Enum):
    """What a read of the kubelet's records found about a registration. The values are shown to people."""

    HELD = "held"
    LACKING = "lacking"
    UNKNOWN = "unknown"
    """The records could not be read."""


class Counts(dict[tuple[str, ...], int]):
    """Counters by labels."""

    def add(self, *labels: str) -> None:
        """Count one more."""
        try:
            self[labels] += 1
        except KeyError:
            if len(self) >= MOST_LABELS:
                labels = (OTHER,) * len(labels)
            self[labels] = self.get(labels, 0) + 1


class Histogram:
    """How many values (seconds) lie in each interval, and their sum.

    ``counts`` has one number per bound, for the values up to it and above the bound before, and one for the values above the
    last bound.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds


class Histograms(dict[tuple[str, ...], Histogram]):
    """Histograms with the same bounds, by labels."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        super().__init__()
        self.bounds = bounds

    def add(self, seconds: float, *labels: str) -> None:
        """Count one value (seconds)."""
        found = self.get(labels)
        if found is None:
            if len(self) >= MOST_HISTOGRAMS:
                labels = (OTHER,) * len(labels)
            found = self.setdefault(labels, Histogram(self.bounds))
        found.add(seconds)


class Tally:
    """All counts of one gateway. The docstring of each attribute names its labels."""

    def __init__(self) -> None:
        self.registrations = Counts()
        """Registers that a kubelet accepted: resource, cause."""
        self.register_errors = Counts()
        """Registers that failed: resource, gRPC's status name (or one of ``negotiate``'s own)."""
        self.restart_gaps = Histograms(GAP_BOUNDS)
        """Resource."""
        self.last_gaps: dict[str, float] = {}
        """Seconds, by resource."""
        self.calls = Counts()
        """Answered calls of the kubelet: resource, call, gRPC's status name."""
        self.call_seconds = Histograms(CALL_BOUNDS)
        """Resource, call."""
        self.lost_fields = Counts()
        """Messages that were sent without a field that the dialect can't carry: dialect, field."""
        self.checks = Counts()
        """Reads of the kubelet's records: resource, result."""
        self._window, self._worst, self._worst_before = 0, 0.0, 0.0

    def restart_gap(self, resource: str, seconds: float) -> None:
        """Count that a stream opened ``seconds`` after the kubelet was found or its last stream ended."""
        self.restart_gaps.add(seconds, resource)
        if resource in self.last_gaps or len(self.last_gaps) < MOST_HISTOGRAMS:
            self.last_gaps[resource] = seconds

    def call(self, resource: str, call: str, seconds: float, code: str) -> None:
        """Count that a call of the kubelet, such as ``Allocate``, was answered with this gRPC status after ``seconds``."""
        self.calls.add(resource, call, code)
        self.call_seconds.add(seconds, resource, call)

    def late(self, seconds: float, now: float) -> None:
        """Count that a timer of the event loop fired ``seconds`` late; ``now`` is in monotonic seconds."""
        self._turn(now)
        self._worst = max(self._worst, seconds)

    def lag(self, now: float) -> float:
        """Return the worst lag of the event loop (seconds) in the last ``LAG_WINDOW`` seconds, or up to twice as long."""
        self._turn(now)
        return max(self._worst, self._worst_before)

    def _turn(self, now: float) -> None:
        window = int(now // LAG_WINDOW)
        if window != self._window:
            self._worst_before = self._worst if window == self._window + 1 else 0.0
            self._window, self._worst = window, 0.0
