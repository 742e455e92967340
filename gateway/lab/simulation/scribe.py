"""When the ledger is written, under simulated time: what ``gateway.memory.scribe`` does with the daemon's own ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gateway.lab.simulation.clock import Timer, stop
from gateway.lab.simulation.disk import KilledError, Place, WaitsError, mounted
from gateway.memory import mend
from gateway.memory.file import LedgerError, ReadFile
from gateway.memory.ledger import Ledger
from gateway.memory.rows import Content, Cordon

if TYPE_CHECKING:
    from gateway.lab.simulation.gateway import Gateway

SOON: Final = 0.075
RETRY_FIRST, RETRY_MAX = 0.1, 30.0
"""As in ``gateway.memory.scribe``, in seconds."""
CALLS: Final = 12
"""How many calls of the disk a write has, and some more."""


_sound: Final[set[bytes]] = set()
"""Files that were found sound, which isn't looked for again in the same bytes."""
_MOST_SOUND: Final = 10_000


def _decode(data: bytes) -> tuple[Content, str]:
    if data in _sound:
        return msgspec.json.decode(data), ""
    content, complaint = mend.decode(data)
    if not complaint and len(_sound) < _MOST_SOUND:
        _sound.add(data)
    return content, complaint


class Scribe:
    """Writes one gateway's ledger on the disk of its state directory."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._node, self._clock = gateway, gateway.node, gateway.clock
        self._disk = gateway.node.disks[gateway.talks]
        self.ledger = Ledger(Place(self._disk), _decode)  # type: ignore[arg-type]
        self._writing = False
        self._saving: Timer | None = None
        """The write that is about to begin."""
        self._soon: Timer | None = None
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._retry = RETRY_FIRST

    def cordon(self, device_id: str, done: Callable[[], None]) -> None:
        """Take an operator's order; ``done`` is called when it is on disk."""
        self.ledger.cordon(device_id, Cordon("hums", self._clock.now))
        self.durable(done)

    def uncordon(self, device_id: str, done: Callable[[], None]) -> None:
        """Lift a cordon."""
        self.ledger.uncordon(device_id)
        self.durable(done)

    def load(self) -> None:
        """Read the file."""
        disk = self._disk
        mounted.mount(disk)
        if self.ledger.current:
            return
        spares, disk.spares = disk.spares, -1  # Only who writes is killed in the middle of it.
        try:
            self.ledger.load()
        except LedgerError:
            self._clock.met["a damaged state file is read as far as it is sound"] += 1
            self._node.damaged(self._gateway)
        disk.spares = spares

    def durable(self, then: Callable[[], None]) -> None:
        """Call ``then`` when all that was changed until now is on disk, or can't be got there."""
        self._waiting.append((self.ledger.revision, then))
        self._write()

    def soon(self) -> None:
        """Have it on disk within a moment."""
        if self._soon is None:
            self._soon = self._gateway.later(SOON, self._on_time)

    def _on_time(self) -> None:
        self._soon = None
        self._write()

    def _write(self) -> None:
        if self._writing:
            return
        if not self.ledger.pending:
            self._go_on()
            return
        self._writing = True
        snapshot = self.ledger.snapshot()
        self._saving = self._gateway.later(self._clock.latency(), self._save, snapshot)

    def _save(self, snapshot: Any) -> None:
        self._saving = None
        mounted.mount(self._disk)
        others = [
            one.scribe
            for one in self._node.others(self._gateway)
            if one.talks is self._gateway.talks and not one.frozen
        ]
        if others:
            chance = self._clock.random
            other = others[int(chance() * len(others))]
            self._disk.interrupt(int(chance() * CALLS), other.meanwhile)
        try:
            self._save_now(snapshot)
        finally:
            self._disk.interrupt(0, None)

    def meanwhile(self) -> None:
        """Take a turn while another gateway is in the middle of its write: write what is due, or look at the file."""
        if self._saving is not None or (self.ledger.pending and not self._writing):
            self._clock.met["two gateways write the state file at once"] += 1
            stop(self._saving)
            self._saving, self._writing = None, True
            self._save_now(self.ledger.snapshot())
            return
        self._clock.met["the state file is read in the middle of a write"] += 1
        found = self.ledger.look()
        if isinstance(found, ReadFile) and found.complaint:
            self._node.damaged(self._gateway)

    def _save_now(self, snapshot: Any) -> None:
        covered = snapshot.revision
        try:
            written = self.ledger.save(snapshot)
        except WaitsError:
            self._clock.met["a write waits for another gateway's"] += 1
            self._saving = self._gateway.later(self._clock.latency(), self._save, snapshot)
            return
        except KilledError:
            self._clock.met["killed while it writes the state file"] += 1
            self._disk.died()
            self._gateway.die()
            return
        except LedgerError:
            self._clock.met["the state file can't be written"] += 1
            self._writing = False
            waiting, self._waiting = self._waiting, []
            for _, then in waiting:
                self._gateway.later(0.0, then)  # Devices are served without memory rather than not at all.
            self._retry = min(2 * self._retry, RETRY_MAX)
            self._gateway.later(self._retry, self._write)
            return
        if written.content is not None:
            self._clock.met["a write takes in what another gateway wrote"] += 1
        self._gateway.later(self._clock.latency() * 0.1, self._saved, snapshot, written, covered)

    def _saved(self, snapshot: Any, written: Any, covered: int) -> None:
        self.ledger.settle(snapshot, written)
        self._writing, self._retry = False, RETRY_FIRST
        self._go_on(covered)
        if self.ledger.pending:
            self._write()

    def _go_on(self, covered: int | None = None) -> None:
        done = self.ledger.revision if covered is None else covered
        ready = [then for revision, then in self._waiting if revision <= done]
        self._waiting = [(revision, then) for revision, then in self._waiting if revision > done]
        for then in ready:
            then()
