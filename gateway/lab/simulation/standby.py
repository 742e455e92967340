"""Standing by, and watching the kubelet's records, under simulated time: what ``gateway.handover.standby`` does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from devices.model import Health
from gateway.age import Age
from gateway.handover.records import LOOK, RecordsSeen
from gateway.lab.simulation.clock import Timer, stop
from gateway.lab.simulation.kubelet import SHOWS
from gateway.registration.events import Phase

if TYPE_CHECKING:
    from gateway.lab.simulation.gateway import Gateway


class Standby:
    """What the kubelet's records show of the resource while another gateway is to serve it."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._node, self._clock = gateway, gateway.node, gateway.clock
        self._records = RecordsSeen()
        self._timer: Timer | None = None
        self._since = 0.0
        self._taken: dict[Age, int] = {}

    def began(self) -> None:
        """Take notice that another gateway is to serve from now on."""
        self._records, self._since = RecordsSeen(), self._clock.now

    def kubelet_up(self, since: float) -> None:
        """Take notice of a new kubelet."""
        self._records, self._since = RecordsSeen(), max(self._since, since)
        self._taken.clear()

    def look_again(self) -> None:
        """Set when to look next."""
        stop(self._timer)
        self._timer = None
        wait: float | None = LOOK if self._gateway.doubts else None
        if self._gateway.plugin.machine.phase is Phase.STANDBY or self._gateway.standing_by_for is not None:
            wait = self._records.again(talks=self._gateway.handover.defers_to() is not None)
        if wait is not None:
            self._timer = self._gateway.later(wait, self._look_into_records)

    def _look_into_records(self) -> None:
        kubelet = self._node.kubelet
        if not kubelet.alive:
            self._timer = self._gateway.later(LOOK, self._look_into_records)
            return
        if self._gateway.standing_by_for is None:
            if self._gateway.doubts:
                self._gateway.look()
            self.look_again()
            return
        shown: bool | None = None
        if any(device.health is Health.HEALTHY for device in self._gateway.devices):
            if kubelet.behaviour.minor >= SHOWS:
                shown = bool(kubelet.allocatable())
            else:
                shown = self._node.registered_since(self._since) if kubelet.behaviour.minor > 8 else None
                if shown is None or not (shown or self._gateway.plugin.machine.attempt):
                    asked = self._gateway.handover.defers_to() is not None and self._records.told > 0
                    shown = bool(self._node.names_of(self._gateway.standing_by_for)) or asked
        self._records = self._records.look(self._clock.now, shown=shown)
        other = self._gateway.standing_by_for
        if self._records.unserved(self._clock.now, len(self._gateway.devices), self._taken.get(other, 0)):
            self._records = replace(self._records, told=self._clock.now)
            self._taken[other] = self._taken.get(other, 0) + (self._gateway.plugin.checks is False)
            self._clock.met["what another gateway is to serve is lacking in the kubelet's records"] += 1
            self._gateway.unserved()
        self.look_again()
