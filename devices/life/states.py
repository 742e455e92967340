"""The states of a device, and what follows from each, in one table.

Healthy and Unhealthy are not enough. A device may be missing after a reboot, unhealthy, lost, or no longer offered. All of
these are "not Healthy", but need different lists: if a device is Unhealthy too early, the kubelet fails pods for good, and if
it is missing, the kubelet gives its successor away. So each device has a state, and only the table says what follows from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Final

from msgspec import Struct

from devices.model import Device, Fault, Health, TroubleKind


class State(Enum):
    """The state of a device. The values are shown to people."""

    PRESENT = "healthy"
    NOT_LOOKED_YET = "not checked yet"
    UNHEALTHY = "unhealthy"
    LOST = "lost"
    WITHDRAWN = "withdrawn"
    CORDONED = "cordoned"
    RELEASED = "released"
    WITHHELD = "withheld"
    LEAVING = "to-dra"
    ELSEWHERE = "dra"
    LENT = "dra-by-name"
    RETURNING = "to-plugin"


COUNTED: Final = frozenset({State.LENT, State.RETURNING})
"""States of devices that DRA will give back. The kubelet counts them already, because the scheduler never stopped counting them."""
AWAY: Final = frozenset({State.LEAVING, State.ELSEWHERE}) | COUNTED
"""States of devices that are another API's, or go there."""
COVERS: Final = frozenset({State.CORDONED, State.WITHHELD}) | AWAY
"""States that cover another state."""


class Consequence(Struct, frozen=True):
    """What follows from a state.

    ``health`` is what the list has (None: what it had before). ``allocate`` is how Allocate refuses the device (None: it
    doesn't). ``lenient``: it is given with a warning if the kubelet couldn't know the state yet. ``held``: it is given if a
    container holds it already. ``pre_start`` is how PreStartContainer refuses it (None: the backend decides). ``listed`` and
    ``kept`` are for a device without a holder: it is on the list; its ID stays remembered over restarts. ``way_out`` tells a
    person what to do.
    """

    health: Health | None = Health.UNHEALTHY
    allocate: Fault | None = Fault.FAILED_PRECONDITION
    lenient: bool = False
    held: bool = False
    pre_start: Fault | None = None
    listed: bool = True
    kept: bool = True
    way_out: str = ""


TABLE: Final[Mapping[State, Consequence]] = {
    State.PRESENT: Consequence(Health.HEALTHY, allocate=None),
    # The state file knows its ID; the first inventory decides. It is given, because a refused admission would be final, while a
    # refused pre-start is tried again.
    State.NOT_LOOKED_YET: Consequence(
        None, allocate=None, pre_start=Fault.FAILED_PRECONDITION, way_out="the kubelet tries again"
    ),
    State.UNHEALTHY: Consequence(
        lenient=True,
        way_out="start the pod anew so that it gets another device, and repair this one",
    ),
    # It stays listed while a container may hold it: otherwise the kubelet would forget the holder.
    State.LOST: Consequence(
        way_out="start the pod anew so that it gets another device, and check this one's seat, power and driver",
    ),
    # An operator wanted it gone, so it stays only for a container that holds it.
    State.WITHDRAWN: Consequence(
        allocate=Fault.NOT_FOUND,
        held=True,
        listed=False,
        kept=False,
        way_out="start the pod anew so that it gets another device; this one is no longer offered under this name",
    ),
    # For its holders, the state beneath decides.
    State.CORDONED: Consequence(
        held=True,
        way_out="start the pod anew so that it gets another device, or lift the cordon",
    ),
    # Its hardware is in use under another ID (``devices.boards``). For its holders, the state beneath decides.
    State.WITHHELD: Consequence(
        held=True,
        way_out="it is offered again when that container has ended; or take the change of the configuration back",
    ),
    # It goes to DRA when no container holds it. For its holders, the state beneath decides.
    State.LEAVING: Consequence(
        held=True,
        way_out="start the pod anew so that it gets another device, or ask by a ResourceClaim",
    ),
    # DRA gives it. No container holds it by this API, even if the kubelet's checkpoint still names pods that ended.
    State.ELSEWHERE: Consequence(
        way_out="start the pod anew so that it gets another device, or ask by a ResourceClaim; `gateway move --to plugin` brings it back",
    ),
    # A pod that asked by name has it by DRA, and the scheduler counts that pod with those of this API: so the list counts its
    # device. It is given last, and Allocate doesn't wait for it: a kubelet that is asked for its records meanwhile (pod-resources List)
    # forgets what it was about to give, and gave it to two pods (run on 1.37; UpdateAllocatedDevices of devicemanager/manager.go).
    State.LENT: Consequence(
        Health.HEALTHY,
        way_out="start the pod anew; it comes back from DRA when the pod has ended that has it",
    ),
    # That pod has ended, and the device is here in a moment. The next pod may be on its way to the kubelet.
    State.RETURNING: Consequence(
        Health.HEALTHY,
        way_out="start the pod anew; it comes back from DRA as soon as the API server says that no claim has it",
    ),
    # Somebody is about to reset or partition it. Unhealthy also while a container holds it: the moment that one ends, the
    # kubelet would give it to the next. What it covers stays as it was seen last, and decides for those who hold it.
    State.RELEASED: Consequence(
        held=True,
        way_out="start the pod anew so that it gets another device; after the reset say `gateway acquire`",
    ),
}
SPELLS: Final = 3
"""From so many spells of illness in a row on, a device that is well again is held back. An error and its repetition are
everyday; a third is a habit."""
STEADY_S: Final = 600.0
"""How long a device must have been well, in seconds, for its earlier spells to be forgotten: a job that makes it ill again
has mostly done so by then."""
HOLD_S: Final = 60.0
"""How long it must first be well to be let back after that many spells, in seconds; each further spell doubles it."""
HOLD_MAX_S: Final = 3600.0
"""The most of it: a device that is well for an hour deserves another try."""


class Spells(Struct, frozen=True, gc=False):
    """How often in a row a device fell ill, and when the last time ended.

    ``count`` is the number of spells between which it was never well for long; ``ended`` the moment from which it has been
    well (monotonic seconds; None: it is ill, or never was). Of this process only: a restart forgets them.
    """

    count: int = 0
    ended: float | None = None

    def after(self, *, ill: bool, now: float) -> Spells:
        """Return the next count, given the backend's health now."""
        if ill == (self.count > 0 and self.ended is None):
            return self
        if not ill:
            return Spells(self.count, now)
        steady = self.ended is None or now >= self.ended + self.hold + STEADY_S
        return Spells(1 if steady else self.count + 1)

    @property
    def hold(self) -> float:
        """Seconds for which it must be healthy before it is healthy on the list."""
        return min(HOLD_MAX_S, HOLD_S * 2 ** min(self.count - SPELLS, 16)) if self.count >= SPELLS else 0.0


class Entry(Struct, frozen=True, gc=False):
    """A device as the list shows it, with its state and the reason in words.

    ``since`` is when the list got its present health (monotonic seconds); None: before this process looked. ``kind``, ``code``
    and ``cause`` are those of its trouble. ``until`` is when its state ends by itself (monotonic seconds; None: it doesn't).
    ``beneath`` is the entry that a cordon, a release or another's hold covers.
    """

    device: Device
    state: State
    reason: str = ""
    since: float | None = None
    kind: TroubleKind | None = None
    until: float | None = None
    spells: Spells = Spells()
    beneath: Entry | None = None
    code: str = ""
    cause: str = ""

    @property
    def layers(self) -> Iterator[Entry]:
        """Yield this entry, then the entries that it covers, from top to bottom."""
        layer: Entry | None = self
        while layer is not None:
            yield layer
            layer = layer.beneath
