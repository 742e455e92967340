"""The states of a device, and what follows from each, in one table.

Healthy and Unhealthy are not enough. A device may be missing after a reboot, unhealthy, lost, or no longer offered. All of
these are "not Healthy", but need different lists. If a device is listed as Unhealthy too early, the kubelet fails pods for
good. If it is missing from the list, the kubelet forgets its holder and may give its hardware to another pod. So each device
has a state, and only the table says what follows from it.
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
    DRA_BY_NAME = "dra-by-name"
    RETURNING = "to-plugin"


COUNTED: Final = frozenset({State.DRA_BY_NAME, State.RETURNING})
"""States of devices that DRA will give back. The kubelet counts them already, because the scheduler never stopped counting them."""
AWAY: Final = frozenset({State.LEAVING, State.ELSEWHERE}) | COUNTED
"""States of devices that another API gives, or that move there or back."""
COVERS: Final = frozenset({State.CORDONED, State.WITHHELD}) | AWAY
"""States that cover another state: that one is in force again when they end."""


class Consequence(Struct, frozen=True):
    """What follows from a state.

    ``health`` is the health on the list (None: as before). ``allocate`` is the status with which Allocate refuses the device
    (None: it gives it). ``lenient``: Allocate gives it with a warning if the kubelet couldn't know the state yet. ``held``:
    Allocate gives it if a container holds it already. ``pre_start`` is the status with which PreStartContainer refuses it
    (None: the backend decides). ``way_out`` tells a person what to do.
    """

    health: Health | None = Health.UNHEALTHY
    allocate: Fault | None = Fault.FAILED_PRECONDITION
    lenient: bool = False
    held: bool = False
    pre_start: Fault | None = None
    way_out: str = ""


TABLE: Final[Mapping[State, Consequence]] = {
    State.PRESENT: Consequence(Health.HEALTHY, allocate=None),
    # The state file has its ID; the first inventory decides. Allocate gives it, because a refused Allocate fails the pod for
    # good. PreStartContainer refuses it, because the kubelet tries that again.
    State.NOT_LOOKED_YET: Consequence(
        None, allocate=None, pre_start=Fault.FAILED_PRECONDITION, way_out="the kubelet tries again"
    ),
    State.UNHEALTHY: Consequence(
        lenient=True,
        way_out="restart the pod so that it gets another device, and repair this one",
    ),
    # It stays listed while a container may hold it: otherwise the kubelet would forget the holder.
    State.LOST: Consequence(
        way_out="restart the pod so that it gets another device, and check this one's slot, power and driver",
    ),
    # An operator removed it, so it stays only for a container that holds it.
    State.WITHDRAWN: Consequence(
        allocate=Fault.NOT_FOUND,
        held=True,
        way_out="restart the pod so that it gets another device; this one is no longer offered under this name",
    ),
    # For its holders, the state beneath decides.
    State.CORDONED: Consequence(
        held=True,
        way_out="restart the pod so that it gets another device, or lift the cordon",
    ),
    # Its hardware is in use under another ID (``devices.boards``). For its holders, the state beneath decides.
    State.WITHHELD: Consequence(
        held=True,
        way_out="wait until that container has ended, or undo the change of the configuration",
    ),
    # It moves to DRA when no container holds it. For its holders, the state beneath decides.
    State.LEAVING: Consequence(
        held=True,
        way_out="restart the pod so that it gets another device, or request it by a ResourceClaim",
    ),
    # DRA gives it. No container holds it by this API, even if the kubelet's checkpoint still names pods that ended.
    State.ELSEWHERE: Consequence(
        way_out="restart the pod so that it gets another device, or request it by a ResourceClaim; `gateway move --to plugin` moves it back",
    ),
    # A pod that asked by resource name has it by DRA. The scheduler counts that pod for this API, so the list counts its device
    # as healthy. It is given last. Allocate doesn't wait for it: if a kubelet is asked for its records during Allocate
    # (pod-resources List), it forgets what it was about to give. It then gave the device to two pods (run on 1.37;
    # UpdateAllocatedDevices of devicemanager/manager.go).
    State.DRA_BY_NAME: Consequence(
        Health.HEALTHY,
        way_out="restart the pod; DRA gives the device back when the pod that holds it has ended",
    ),
    # That pod has ended, and DRA gives the device back within moments. The kubelet may already ask for it for the next pod.
    State.RETURNING: Consequence(
        Health.HEALTHY,
        way_out="restart the pod; DRA gives the device back as soon as the API server reports that no claim holds it",
    ),
    # It will be reset or partitioned. It is Unhealthy even while a container holds it: otherwise the kubelet would give it to
    # the next pod when that container ends. For its holders, the state that it covers decides, as seen last.
    State.RELEASED: Consequence(
        held=True,
        way_out="restart the pod so that it gets another device; after the reset run `gateway acquire`",
    ),
}
SPELLS: Final = 3
"""From this count of spells in a row (times a device became unhealthy), it stays Unhealthy for a while after it recovered. One
or two are common; a third shows a lasting fault."""
STEADY_S: Final = 600.0
"""Seconds for which a device must stay healthy on the list, until its earlier spells are forgotten. A job that makes it
unhealthy again has usually done so by then."""
HOLD_S: Final = 60.0
"""Seconds for which a device must be healthy before it is listed as Healthy after ``SPELLS`` spells. Each further spell doubles
it."""
HOLD_MAX_S: Final = 3600.0
"""Most seconds of that wait."""


class Spells(Struct, frozen=True, gc=False):
    """How often in a row a device became unhealthy, and when it last recovered. A restart of the gateway forgets both.

    ``count`` is the number of spells without ``STEADY_S`` of health between them. ``ended`` is when the last one ended
    (monotonic seconds; None: the device is unhealthy, or never was).
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
