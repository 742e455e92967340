"""Standing by, and watching: do the kubelet's own records show what another gateway is to serve?

Only what is stood by for is looked at, a few times a second until it is shown. After that a gateway that talks to us is
trusted until the kubelet starts anew (it says when it can't serve), and one that doesn't is looked after every second.
``RecordsSeen`` decides when that was long enough; what follows then is its owner's (``Own.unserved``).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Final, Protocol

import structlog
from msgspec.structs import replace

from devices.model import Health
from gateway.age import in_turn
from gateway.handover.instance import socket_name
from gateway.handover.records import LOOK, RecordsSeen
from gateway.kubelet import view as kubelet_view
from gateway.kubelet.view import Untold
from gateway.registration.events import Phase
from gateway.tally import Confirmation
from gateway.wires.unix import listens

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from gateway.age import Age
    from gateway.registration.registrar import Resource

ANSWERS_WITHIN: Final = 0.3
"""Seconds within which another gateway answers a call, or it is thought to stand still."""
_MOST_ASKED: Final = 16
_MOST_NAMES: Final = 4096
_log = structlog.get_logger()


class Own(Protocol):
    """The gateway that stands by."""

    @property
    def resources(self) -> Sequence[Resource]:
        """Its resources."""

    @property
    def doubts(self) -> Mapping[str, Collection[Age]]:
        """The newer gateways, by resource, that can't talk and for which it stood by in vain."""

    def kubelet_listens(self) -> bool:
        """Tell whether a kubelet takes connections now."""

    def talks(self, resource: Resource) -> bool:
        """Tell whether the gateway that a resource stands by for talks to us."""

    def look(self) -> None:
        """Let each resource stand by or resume."""

    def unserved(self, resource: Resource) -> None:
        """Take a resource back that another gateway is to serve, and that the kubelet's records lack."""


class Standby:
    """The resources of one gateway that another one serves, and what the kubelet's records show of them.

    Args:
        own: that gateway.
        socket_dir: where gateways and kubelet meet.
        pod_resources: the socket of the kubelet's pod-resources API.
        checkpoint: the kubelet's checkpoint.
    """

    def __init__(self, own: Own, socket_dir: Path, pod_resources: Path, checkpoint: Path) -> None:
        self._own, self._socket_dir, self._pod_resources, self._checkpoint = own, socket_dir, pod_resources, checkpoint
        self._records: dict[str, RecordsSeen] = {}
        self._since_ns = 0
        self._taken: Counter[tuple[str, Age]] = Counter()
        """How often each resource was taken back from each gateway in this kubelet's life, where only its checkpoint tells."""
        self._failed = False
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Look, for ever, whenever there is something to look at."""
        while True:
            self._wake.clear()
            waits = [wait for resource in self._own.resources if (wait := self._wait(resource)) is not None]
            if not self._own.kubelet_listens():
                waits = []  # The next one wakes us.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(waits, default=None)):
                    await self._wake.wait()
                    continue
            try:
                await self._look()
                self._failed = False
            except Exception:  # noqa: BLE001 - whatever it is, it is tried again
                if not self._failed:
                    _log.exception(
                        "the kubelet's records can't be read because of a defect in the gateway", retry_s=LOOK
                    )
                self._failed = True
                await asyncio.sleep(LOOK)

    def began(self, resource: str) -> None:
        """Take notice that another gateway is to serve a resource from now on."""
        self._since_ns = time.time_ns()
        self._records[resource] = RecordsSeen()
        self._wake.set()

    def kubelet_up(self, since_ns: int) -> None:
        """Take notice of a new kubelet, whose socket was made at ``since_ns`` (unix time): it knows nobody yet."""
        self._since_ns = max(self._since_ns, since_ns)  # It may be seen late: what was ours meanwhile shows nothing.
        self._records = dict.fromkeys(self._records, RecordsSeen())
        self._taken.clear()
        self._wake.set()

    def lacking(self, resource: str, now: float) -> float:
        """Return for how many seconds the kubelet's records have lacked a resource that we stand by for."""
        since = self._records.get(resource, RecordsSeen()).lacking_since
        return 0.0 if since is None else now - since

    def _wait(self, resource: Resource) -> float | None:
        """Return the seconds until the next look at a resource; None: there is nothing to look at."""
        name = resource.name
        if resource.state.phase is not Phase.STANDBY or resource.standing_by_for is None:
            self._records.pop(name, None)
            return LOOK if self._own.doubts.get(name) else None
        return self._records.setdefault(name, RecordsSeen()).again(talks=self._own.talks(resource))

    async def _look(self) -> None:
        own, records = self._own, self._records
        shown = await kubelet_view.shown(self._pod_resources, self._checkpoint, self._since_ns)
        names = set(names_in(self._socket_dir)) if isinstance(shown, Untold) else set[str]()
        if records is not self._records:  # Another kubelet has come meanwhile.
            return
        now = time.monotonic()
        for resource in own.resources:
            name, other = resource.name, resource.standing_by_for
            if other is None or name not in records:
                if own.doubts.get(name):
                    own.look()
                continue
            records[name] = records[name].look(now, shown=self._shown(resource, other, shown, names))
            if records[name].unserved(now, len(resource.entries), self._taken[name, other]):
                records[name] = replace(records[name], told=now)
                if resource.checked is Confirmation.UNKNOWN:  # A kubelet that tells whom it holds is believed.
                    if len(self._taken) > _MOST_NAMES:
                        self._taken.clear()
                    self._taken[name, other] += 1
                own.unserved(resource)

    def _shown(self, resource: Resource, other: Age, shown: frozenset[str] | Untold, names: set[str]) -> bool | None:
        if not any(device.health is Health.HEALTHY for device in resource.plugin.devices):
            return None  # Perhaps none of the other's is well, either: that can't be told from none.
        if shown is Untold.NOW:
            return None
        if not isinstance(shown, Untold):
            return resource.name in shown
        if shown is Untold.SINCE and resource.state.attempt:  # What was ours would be seen to change.
            return False
        # The kubelet tells nothing: whoever registered with it has a name in its folder, which it empties at its start.
        # One that talks and has none is asked; what it answers counts more than that, and one that stands still answers nothing.
        return bool(names_of(other, names)) or (self._own.talks(resource) and self._records[resource.name].told > 0)


class Doubts:
    """Which newer gateway that can't talk is to be stood by for: none for which that was in vain, until it registers.

    Args:
        own: this gateway.
        socket_dir: where gateways and kubelet meet.
        decides: tells whether what a gateway serves of a resource is settled with it, not by age.
        kubelet_listens: tells whether a kubelet takes connections now.
    """

    def __init__(
        self, own: Age, socket_dir: Path, decides: Callable[[Age, str], bool], kubelet_listens: Callable[[], bool]
    ) -> None:
        self._own, self._socket_dir, self._decides, self._kubelet_listens = own, socket_dir, decides, kubelet_listens
        self.known: dict[str, dict[Age, frozenset[str]]] = {}
        """By resource, those for which it was in vain, with their names in the socket directory then: each Register has a new one."""

    def in_turn(self, resource: str, peers: Mapping[Age, Path]) -> list[Age]:
        """Return those that offer a resource, the one to stand by for first."""
        offering = [
            age
            for age, folder in peers.items()
            if not self._decides(age, resource) and listens(folder / socket_name(resource))
        ]
        if resource in self.known and self._kubelet_listens():
            names = names_in(self._socket_dir)
            self.known[resource] = {
                age: had for age, had in self.known[resource].items() if age in peers and names_of(age, names) <= had
            }
        return in_turn(self._own, offering, self.known.get(resource, ()))

    def add(self, resource: str, others: Iterable[Age], names: Sequence[str]) -> None:
        """Doubt some, which have these ``names`` among others in the socket directory."""
        self.known.setdefault(resource, {}).update((other, names_of(other, names)) for other in others)

    async def ask(self, resource: str, peers: Mapping[Age, Path], names: Sequence[str]) -> None:
        """Doubt all at once that come next and answer no call: each in turn would cost the kubelet's records its time."""
        if others := self.in_turn(resource, peers)[:_MOST_ASKED]:
            from gateway.registration import api  # noqa: PLC0415 - paid where several other gateways don't serve

            sockets = [peers[other] / socket_name(resource) for other in others]
            found = await asyncio.gather(*(api.ask(socket, ANSWERS_WITHIN) for socket in sockets))
            self.add(resource, [other for other, one in zip(others, found, strict=True) if not one.answered], names)


def names_in(socket_dir: Path) -> list[str]:
    """Return the names in the socket directory; none where it can't be read."""
    try:
        return [path.name for path, _ in zip(socket_dir.iterdir(), range(_MOST_NAMES), strict=False)]
    except OSError:
        return []


def names_of(peer: Age, names: Iterable[str]) -> frozenset[str]:
    """Choose those under which a gateway registers its sockets."""
    return frozenset(name for name in names if name.startswith(f"{peer.token}-"))
