"""Who leads on this node. Only ``gateway.handover`` changes this state; all other modules read it."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import structlog

from devices.model import Fault, RefusedError
from gateway.kubelet.identity import kubelet_id
from gateway.leader import machine
from gateway.leader.instance import FOLDER, socket_name
from gateway.leader.locks import Locks
from gateway.leader.machine import Stage
from gateway.tasks import Signal
from gateway.wires import rpc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from adapters.dialect import Dialect
    from gateway.age import Age
    from gateway.configuration.settings import Settings
    from gateway.kubelet.presence import Presence
    from gateway.leader.instance import Instance

LAST_ALLOCATE_S: Final = 2.0
"""Seconds after a handover until the kubelet's records have the earlier leader's last Allocate."""
LEADER_WAIT_S: Final = 10.0
"""Seconds for which a kubelet's call waits for a leader."""
PASS_RETRY_S: Final = 0.05
"""Seconds between two tries to forward a call to the leader."""
_DECIDING: Final = (Stage.TAKING, Stage.LEADING, Stage.YIELDING)
_NOT_DELIVERED: Final = frozenset({Fault.UNAVAILABLE, Fault.CANCELLED, Fault.DEADLINE_EXCEEDED})
_FAULTS: Final = {rpc.code(fault.value): fault for fault in Fault if fault not in _NOT_DELIVERED}
"""The codes of a leader's refusal. With any other code, the leader may not have got the call."""
_log = structlog.get_logger()


class Leadership:
    """Whether this gateway leads, or which other gateway does."""

    def __init__(self, settings: Settings, own: Instance, presence: Presence) -> None:
        self._settings, self._presence = settings, presence
        self.state = machine.start(own.age)
        self.locks = Locks(settings.socket_dir, settings.state_dir, own.token)
        self.changed = Signal()
        """Set when the stage changes, and when a lock is lost."""
        self.begun = False
        """True if this gateway has started: it leads, or is a standby that could lead."""
        self.waits_for_folder = ""
        """Why the socket directory, in which gateways find each other, can't be used; empty if it can."""
        self.lost = ""
        """Why the locks are no longer valid; empty once ``Handover`` has freed them."""
        self.answering = 0
        """How many calls and orders are being answered."""
        self.leaves = self.ended = False
        """``leaves``: this gateway yields, and still answers calls. ``ended``: it answers no calls any more."""
        self.handed_over_at = -math.inf
        """When the kubelet's streams last ended for a handover (monotonic seconds)."""

    @property
    def leads(self) -> bool:
        """True if this gateway decides: it holds the locks."""
        return self.state.stage in _DECIDING and self.locks.held and not self.lost

    @property
    def writes(self) -> bool:
        """True if this gateway writes the state file."""
        return self.leads or bool(self.waits_for_folder)

    @property
    def takes_over(self) -> bool:
        """True if this gateway has the locks, and will register soon."""
        return self.state.stage is Stage.TAKING

    @property
    def stands_by(self) -> bool:
        """True if another gateway serves the resources, or will."""
        return not self.leads and self.state.stage is not Stage.YIELDED

    @property
    def led_by(self) -> Age | None:
        """The gateway that leads; None if that is this one, or unknown."""
        return None if self.leads else self.state.leader

    @property
    def passes_to(self) -> str:
        """The token of the gateway that gets our calls; empty if this gateway answers them, or none is known."""
        return "" if self.leads else self.other

    @property
    def other(self) -> str:
        """The token of the leader, or of the gateway that this one yields to; empty if there is none."""
        one = self.state.leader or self.state.other
        return "" if one is None else one.token

    @property
    def could_lead(self) -> bool:
        """True if this gateway stands by, and would lead if the leader ended."""
        return self.state.stage is Stage.STANDBY

    @property
    def answers(self) -> bool:
        """True if calls are answered here."""
        return self.leads and (self.state.stage is Stage.LEADING or self.leaves) and not self.ended

    @property
    def waits_for(self) -> str:
        """What the start of this gateway waits for, and why; empty if it has started."""
        if self.begun or self.leads:
            return self.waits_for_folder
        other = self.state.leader
        who = f"the gateway {other.token}, which leads" if other else "the locks that a leader holds"
        why = self.state.refused or self.state.unable
        return self.waits_for_folder or (f"{who}: {why}" if why else who)

    def check_locks(self) -> bool:
        """Return True if our lock files were not replaced. If one was, this gateway stops leading."""
        if not self.lost and (reason := self.locks.lost()):
            _log.error("not leading any more: a lock was replaced", reason=reason)
            self.lost = reason
            self.changed.set()
        return not self.lost

    def register_at(self) -> float:
        """Return when a Register may be sent (monotonic seconds); infinite without the locks."""
        return 0.0 if self.check_locks() and self.leads else math.inf

    async def passed(self, call: str, dialect: Dialect, resource: str, request: bytes) -> bytes | None:
        """Return the leader's response to a kubelet's call; None if this gateway leads and must answer.

        Raises:
            RefusedError: the leader refuses, or no gateway leads.
        """
        ends = time.monotonic() + LEADER_WAIT_S
        while time.monotonic() < ends:
            if self.answers and self.check_locks():
                return None
            if (other := self.other) and self.state.stage is not Stage.YIELDING:
                path = self._settings.socket_dir / FOLDER / other / socket_name(resource)
                try:
                    async with rpc.Channel(path) as channel:
                        return await channel.call(f"/{dialect.plugin_service}/{call}", request, seconds=LEADER_WAIT_S)
                except rpc.CallError as error:
                    if error.code in _FAULTS:
                        raise RefusedError(_FAULTS[error.code], error.details) from None
            await self.changed.wait(PASS_RETRY_S)
        raise RefusedError(Fault.UNAVAILABLE, f"no gateway led on this node within {LEADER_WAIT_S:g} s. Ask again")

    @contextmanager
    def count_call(self) -> Iterator[None]:
        """Count a call, or an order, while it is being answered."""
        self.answering += 1
        try:
            yield
        finally:
            self.answering -= 1

    def others_allocate_for(self) -> float:
        """Return for how many seconds another gateway may still answer Allocate calls; infinite if another one leads or the kubelet is new."""
        if self._settings.dra == "only":  # No gateway answers Allocates.
            return 0.0
        if kubelet_id(self._presence.socket) != self._presence.kubelet or not self.leads:
            return math.inf
        return max(self.handed_over_at + LAST_ALLOCATE_S - time.monotonic(), 0.0)
