"""The tally: what happened since the gateway started, counted. Always on, because it is nearly free.

Plain integers in plain dictionaries: there is one event loop, so nothing is locked. Whoever sees a thing happen counts it
here; ``gateway status`` and the metrics read it. Everything is bounded, whatever comes from outside: a family of counts
takes ``MOST_LABELS`` different labels, and all others are counted together as ``other``.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum
from typing import Final

MOST_LABELS: Final = 256
MOST_HISTOGRAMS: Final = 64
OTHER: Final = "other"

GAP_BOUNDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 2.5, 10.0, 60.0)
"""Seconds. A restarted kubelet tells the API server what it has after 0.1 s, and then not again for 10 s."""
CALL_BOUNDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0)
"""Seconds. The kubelet sets no deadline for Allocate, and starts no other pod meanwhile (#117435)."""
LAG_WINDOW: Final = 60.0
"""Seconds after which the worst lag of the event loop is forgotten, at the earliest; at the latest after twice as many."""


class Cause(Enum):
    """Why a resource was registered. The values are what people read."""

    FIRST = "first"
    KUBELET_START = "kubelet start"
    STREAM_ENDED = "stream ended"
    ERROR = "error"
    NEVER_CALLED = "never called"
    RECORDS = "books"
    """The kubelet's own records lacked us."""
    OPTIONS = "options"
    HANDOVER = "handover"
    OFFERED = "offered again"
    """The list had been too large for the dialect."""


class Confirmation(Enum):
    """What a look into the kubelet's records told of a registration. The values are what people read."""

    HELD = "held"
    LACKING = "lacking"
    UNKNOWN = "unknown"
    """They could not be reached."""


class Counts(dict[tuple[str, ...], int]):
    """How often, by labels."""

    def add(self, *labels: str) -> None:
        """Count one more."""
        try:
            self[labels] += 1
        except KeyError:
            if len(self) >= MOST_LABELS:
                labels = (OTHER,) * len(labels)
            self[labels] = self.get(labels, 0) + 1


class Histogram:
    """How many values (seconds) lay at or below each bound and above the one before, and the sum of all.

    ``counts`` has one number more than there are bounds: the values above the last.
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
    """Histograms over the same bounds, by labels."""

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
    """All that is counted in one gateway. Its attributes are for readers; the labels are named beside each."""

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
        """The kubelet's calls that were answered: resource, call, gRPC's status name."""
        self.call_seconds = Histograms(CALL_BOUNDS)
        """Resource, call."""
        self.lost_fields = Counts()
        """Messages that went out without a field that the dialect can't say: dialect, field."""
        self.checks = Counts()
        """Looks into the kubelet's records: resource, result."""
        self._window, self._worst, self._worst_before = 0, 0.0, 0.0

    def restart_gap(self, resource: str, seconds: float) -> None:
        """A kubelet's stream is open again, ``seconds`` after the kubelet was found or the last stream ended."""
        self.restart_gaps.add(seconds, resource)
        if resource in self.last_gaps or len(self.last_gaps) < MOST_HISTOGRAMS:
            self.last_gaps[resource] = seconds

    def call(self, resource: str, call: str, seconds: float, code: str) -> None:
        """A call of the kubelet, such as ``Allocate``, was answered with gRPC's status name, after ``seconds``."""
        self.calls.add(resource, call, code)
        self.call_seconds.add(seconds, resource, call)

    def late(self, seconds: float, now: float) -> None:
        """A timer of the event loop fired ``seconds`` too late; ``now`` is in monotonic seconds."""
        self._turn(now)
        self._worst = max(self._worst, seconds)

    def lag(self, now: float) -> float:
        """Give the worst lag of the event loop (seconds) in the last ``LAG_WINDOW`` or more, up to twice as much."""
        self._turn(now)
        return max(self._worst, self._worst_before)

    def _turn(self, now: float) -> None:
        window = int(now // LAG_WINDOW)
        if window != self._window:
            self._worst_before = self._worst if window == self._window + 1 else 0.0
            self._window, self._worst = window, 0.0
