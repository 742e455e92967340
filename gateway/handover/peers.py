"""The other gateways of this node: which resources are left to them, and what is served when they go."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from typing import TYPE_CHECKING, Protocol

import structlog

from devices.model import Health
from gateway.handover import instance, message, standby
from gateway.handover.ability import PEERS_AGAIN, Ability
from gateway.handover.events import HandoverOutcome, Standing, standing
from gateway.handover.leases import Leases
from gateway.handover.standby import Doubts, Standby
from gateway.handover.talk import Handover
from gateway.kubelet.watch import CHECKPOINT, kubelet_id
from gateway.registration import events
from gateway.registration.events import Phase
from gateway.registration.registrar import warm_up
from gateway.tally import Confirmation
from gateway.wires.unix import listens

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from adapters.dialect import Level
    from gateway.age import Age
    from gateway.configuration.settings import Settings
    from gateway.handover.instance import Instance
    from gateway.kubelet.identity import KubeletId
    from gateway.memory.holdings import Holdings
    from gateway.registration.registrar import Resource
    from gateway.tally import Tally
    from gateway.tasks import Tasks
    from gateway.unseen import Unseen
    from gateway.wires.control import Handler

ALLOCATES_END = 2.0
"""Seconds from a handover until the gateway before has answered its last Allocate, and the kubelet has noted that."""
OFFERED_WITHIN = 0.1
"""Seconds after a resource was left to another gateway, which may offer under it what is offered here under others, at which the
kubelet's records are read: by then they have what that one offers. An earlier look would cost the kubelet time while that one registers."""
PROBE_AFTER = 0.5
"""Seconds after a kubelet was found at which it is asked: the Registers go first."""
UPDATE_AGAIN = 5.0
"""Seconds until lists that could not be brought up to date are tried again."""
_log = structlog.get_logger()


class OfferedLists(Protocol):
    """The lists of this gateway, as far as they depend on the others."""

    lock: asyncio.Lock
    """Held while they are put together."""

    @property
    def inventory(self) -> object | None:
        """What the source said last; None while it has said nothing."""

    unseen: Unseen
    """What a gateway before this one could serve, and this one doesn't see."""

    @property
    def based_on(self) -> bytes:
        """What the state file remembered beside lists when they were put together last."""

    @property
    def withholds(self) -> bool:
        """Whether something of the hardware is taken under IDs that aren't offered here."""

    async def update(self) -> None:
        """Bring every list up to date."""

    async def announce(self) -> None:
        """Make durable what is about to be sent, as it is on the lists."""

    def update_again(self, moments: Sequence[float]) -> None:
        """Do so again at the first of these moments (monotonic seconds)."""

    def unremembered(self) -> bool:
        """Whether something is about to be sent that the ledger doesn't know."""

    def only_remembered(self) -> Collection[str]:
        """Return the resources that the ledger knows and nobody here serves."""


class _Silent:
    """The other gateways that can't be talked to, by their tokens."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self._talked: set[str] = set()
        """Those that ever talked to us."""
        self.before: dict[str, str] = {}
        """By resource, the one that ended its stream before our Register."""

    def came(self, names: Iterable[str]) -> None:
        """Take note of names that came."""
        self.known |= {*filter(instance.TOKEN.fullmatch, names)}

    def gone(self, peers: Iterable[Age], talks_to: Callable[[Age], bool]) -> set[str]:
        """Tell which have gone: these live now."""
        living = {age.token: age for age in peers}
        gone = self.known - living.keys()
        self._talked = {token for token, age in living.items() if token in self._talked or talks_to(age)}
        self.known = living.keys() - self._talked  # Who is about to end doesn't talk any more, and has given all away.
        return gone

    def ended(self, resource: str, other: Age | None, peers: Mapping[Age, Path]) -> None:
        """Take note of the one from which a resource is taken over: whether its stream has ended."""
        folder = None if other is None else peers.get(other)
        ended = folder is not None and not listens(folder / instance.socket_name(resource))
        self.before[resource] = other.token if other is not None and ended else ""


class Peers:
    """The other gateways, and what is agreed with them.

    ``lists`` gives this gateway's lists, which depend on the others, too; ``ending`` tells whether it is about to end.
    """

    def __init__(
        self,
        settings: Settings,
        own: Instance,
        holdings: Holdings,
        resources: Mapping[str, Resource],
        lists: Callable[[], OfferedLists],
        ending: Callable[[], bool],
        tally: Tally,
        tasks: Tasks,
    ) -> None:
        self._settings, self._instance, self._holdings = settings, own, holdings
        self._resources, self._lists = resources, lists
        self._presence, self._beliefs, self._scribe = holdings.presence, holdings.beliefs, holdings.scribe
        self._ending, self._tally, self._tasks = ending, tally, tasks
        self.begun = False
        """Whether this gateway is done with its start."""
        self.handover = Handover(own.age, settings.state_dir, self, tally.handovers.add)
        self.ability = Ability(settings.api, self._presence, resources, self.living, self.handover.changed)
        self.standby = Standby(
            self, settings.socket_dir, settings.pod_resources_socket, settings.socket_dir / CHECKPOINT
        )
        self._leases = Leases(self._left, tasks)
        self._doubts = Doubts(own.age, settings.socket_dir, self.handover.decides, self.kubelet_listens)
        self.doubts = self._doubts.known
        """Those that ``Standby`` looks after."""
        self._resuming: set[str] = set()
        self._silent = _Silent()
        self._yielding: set[str] = set()
        """What another gateway is to serve as soon as no Register of ours is in flight for it."""
        self._asked = False
        """Whether the gateways that were there first were asked for what we have."""
        self._took_over_at = -math.inf
        """When another gateway last left a resource to this one (monotonic seconds)."""
        self._beliefs.lists_after = self._others_allocate_for

    @property
    def age(self) -> Age:
        """This gateway's own age."""
        return self._instance.age

    @property
    def resources(self) -> Sequence[Resource]:
        """The resources of this gateway."""
        return tuple(self._resources.values())

    def _others_allocate_for(self) -> float:
        """Return for how many seconds another gateway may be answering an Allocate, of which this one doesn't know (infinite: it serves).

        A kubelet that was not found yet is to write its first checkpoint before List makes it free what ended pods held.
        """
        if kubelet_id(self._presence.socket) != self._presence.kubelet:
            return math.inf
        if not self.begun:
            return math.inf if self.living() else 0.0
        if any(one.standing_by_for is not None for one in self._resources.values()):
            return math.inf
        return max(self._took_over_at + ALLOCATES_END - time.monotonic(), 0.0)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Who meets which order of another gateway over the control socket."""
        return {message.OP: self.handover.serve}

    def register_at(self) -> float:
        """Say when a Register may be sent (monotonic seconds)."""
        return self.handover.register_at

    async def end(self) -> None:
        """Keep what was promised to other gateways, before this one ends."""
        await self.handover.waits.keep_promises()

    async def close(self) -> None:
        """End the conversations."""
        await self.handover.close()

    # Who is there, and serves what.

    def living(self) -> dict[Age, Path] | None:
        """Return the other living gateways; None where no descriptor is left to look for them.

        None of them is any business of one whose devices are offered by DRA.
        """
        if self._settings.dra == "only":
            return {}
        try:
            return self._instance.peers()
        except OSError as error:
            _log.warning("other gateways can't be looked for", reason=str(error))
            return None

    def elsewhere(self, resource: str) -> bool:
        """Whether another gateway serves a resource."""
        one = self._resources.get(resource)
        if one is not None and (one.state.phase is Phase.SERVING or _is_well(one)):
            return one.standing_by_for is not None or self.handover.defers_to(resource) is not None
        return any(listens(folder / instance.socket_name(resource)) for folder in (self.living() or {}).values())

    def to_be_sent(self, names: Iterable[str]) -> list[str]:
        """Choose the resources that this gateway serves, or is about to: not those that it is to leave to another."""
        peers = {} if self.begun else self.living() or {}
        if peers and not self._asked:
            return []
        return [
            name
            for name in names
            if not (name in self._resources and self._resources[name].standing_by_for)
            and self.handover.defers_to(name) is None
            and not (peers and self._newer(name, peers))
        ]

    def look(self, came: Iterable[str] = ()) -> None:
        """Let each resource stand by or resume; what only others served is taken up when nobody is left to.

        ``came`` has the names of gateways that came since the last look: of one that has gone again nothing else is left.
        """
        if self.begun and not self._ending():
            self._silent.came({*came} - {self.age.token})
            self.look_at_peers()
            if self._lists().only_remembered() and self.living() == {}:
                self._tasks.background(self._take_up())

    def look_at_peers(self) -> None:
        """Stand by, resource by resource, for the gateway that serves it instead: by what was agreed, else by age."""
        began, peers = time.monotonic(), self.living()
        if peers is None or self._settings.dra == "only":
            return
        self._yielding.clear()
        self._look_for_gone(peers)
        for name, resource in self._resources.items():
            other = self.handover.defers_to(name) or self._served_by(name, peers)
            if other is not None:
                if resource.standing_by_for != other:
                    self.standby.began(name)
                    self._beliefs.look_within(OFFERED_WITHIN)
                resource.feed(events.StandBy(other))
            elif resource.state.phase is Phase.STANDBY and name not in self._resuming:
                self._resuming.add(name)
                self._silent.ended(name, resource.standing_by_for, peers)
                self._tasks.background(self._resume(resource, began))
        if any(peer < self._instance.age for peer in peers):
            self._tasks.background(self.handover.take_over(peers))

    def _look_for_gone(self, peers: Mapping[Age, Path]) -> None:
        """Register once more where a gateway that couldn't talk has gone, and this kubelet doesn't tell whom it holds.

        Kubelets 1.12 to 1.24 leave our stream open when another gateway registers, and give out nothing when that one ends;
        that one may have come and gone while we stood still. From 1.23 on they tell.
        """
        gone = self._silent.gone(peers, self.handover.talks_to)
        for silent in (folder for age, folder in peers.items() if age.token in self._silent.known):
            for name in self._resources:  # Whoever is killed leaves its folder as it is.
                if listens(path := silent / instance.socket_name(name)):
                    self._leases.hold(path)
        for resource in (one for name, one in self._resources.items() if gone - {self._silent.before.get(name, "")}):
            if resource.checked in {Confirmation.HELD, Confirmation.LACKING}:
                resource.feed(events.Lacking())
            elif resource.state.phase is Phase.SERVING and _leaves_streams_open(resource.plugin.level):
                resource.feed(events.Renew("another gateway ended, and this kubelet doesn't tell whom it holds"))

    def _served_by(self, resource: str, peers: Mapping[Age, Path]) -> Age | None:
        """Return the newer gateway, of those that can't be talked to, to which a resource must be left."""
        if (newer := self._newer(resource, peers)) is None:
            return None
        if self.standing(resource) is Standing.BUSY:  # A Register that is given up goes on in kubelets 1.25 to 1.34.
            self._yielding.add(resource)
            return None
        self._leases.hold(peers[newer] / instance.socket_name(resource))
        return newer

    def _newer(self, resource: str, peers: Mapping[Age, Path]) -> Age | None:
        """Return the newest gateway, of those that can't be talked to, that offers a resource."""
        return next(iter(self._doubts.in_turn(resource, peers)), None)

    def unserved(self, resource: Resource) -> None:
        """Take a resource back from those who talk, and the newest who doesn't: the kubelet's records lack it."""
        name = resource.name
        deferred, other = self.handover.defers_to(name), self._newer(name, self.living() or {})
        self.handover.unserved(name)
        if other is not None and (deferred is None or other > deferred):  # One in between takes it back itself.
            names = standby.names_in(self._settings.socket_dir)
            self._doubts.add(name, [other], names)
            self._tasks.background(self._doubt_deaf(name, names))
            self._tally.handovers.add("older", HandoverOutcome.BACK.value)
            _log.warning(
                "taking a resource back: another gateway is to serve it, and the kubelet's records show no device of it",
                resource=name,
                peer=other.token,
                advice="the newer gateway has a socket for it and doesn't serve it: look at its log, or end it",
            )
        self.look()  # Also where it talks by now, and says nothing.

    async def _doubt_deaf(self, resource: str, names: Sequence[str]) -> None:
        await self._doubts.ask(resource, self.living() or {}, names)
        self.look()

    @property
    def registering(self) -> bool:
        """Whether a Register of ours is about to be sent, or not answered by a call yet: what takes seconds waits until it is."""
        busy = Standing.BUSY in map(self.standing, self._resources)
        return busy or bool(self._resuming) or (self._asked and not self.begun)

    def talks(self, resource: Resource) -> bool:
        """Tell whether the gateway that a resource stands by for talks to us."""
        return self.handover.defers_to(resource.name) is not None

    def over(self, token: str, kubelet: str) -> None:
        """Take over from a gateway that is dying, if the kubelet is the one that takes a Register while an earlier stream lives."""
        if kubelet == str(kubelet_id(self._presence.socket)):  # Nobody has told us yet of one that came a moment ago.
            self._instance.over.add(token)
            self.handover.part(token)

    def _left(self) -> None:
        if not self._ending():
            self.look_at_peers()

    # What happens.

    def kubelet_up(self, kubelet: KubeletId) -> None:
        """Take note of a new kubelet: it knows nobody yet."""
        self.standby.kubelet_up(kubelet.mtime_ns)
        if self.handover.talks:
            asyncio.get_running_loop().call_later(PROBE_AFTER, lambda: self._tasks.background(self.ability.probe()))

    def stood(self, resource: Resource) -> None:
        """Take note that a resource's registration may stand elsewhere now."""
        name = resource.name
        self.handover.changed(name)
        doubted = resource.state.phase is Phase.WAITING and self.doubts.get(name)
        if doubted or (name in self._yielding and self.standing(name) is not Standing.BUSY):
            self.look()

    # What is taken over.

    def approach(self, kubelet: KubeletId) -> None:
        """Begin to connect to a kubelet that is there."""
        for resource in self._resources.values():
            if resource.state.phase is not Phase.STANDBY:
                resource.approach(kubelet)

    async def know_devices(self, first: asyncio.Event, backend: str) -> None:
        """Wait until the source has reported its devices once, as long as another gateway lives that can serve some."""
        if self._must_wait():
            _log.warning("waiting for the devices: meanwhile another gateway serves", backend=backend)
        while self._must_wait():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PEERS_AGAIN):
                    await first.wait()
        async with self._lists().lock:  # Whether a long list fits this kubelet shows once it is put together.
            pass

    def _must_wait(self) -> bool:
        lists = self._lists()
        return lists.inventory is None and not lists.unseen.none_before and bool(self.living())

    async def take_over(self, older_ones: Collection[Age]) -> None:
        """Ask older gateways for what they serve; what they remembered until then is remembered here, too."""
        self._asked = True
        others = bool(older_ones or self.living())
        if others and self.kubelet_listens():
            await warm_up(self._presence.socket)
        if not older_ones:
            if others:  # What they don't serve, this one does: it is remembered before it is sent.
                await self._lists().update()
            return
        if self._presence.kubelet is not None:
            self.approach(self._presence.kubelet)
        await self._lists().announce()  # Thousands of devices take their time, in which the older one still serves.
        await self.handover.take_over(older_ones)
        self._took_over_at = time.monotonic()
        await _bring_up(self._holdings, self._lists())

    async def _resume(self, resource: Resource, began: float) -> None:
        """Serve what another one served, with what it remembered; since ``began`` the kubelet has time to see its stream end."""
        if resource.standing_by_for is not None and resource.standing_by_for.token in self._instance.over:
            began = float("-inf")  # Of this kubelet's nothing is lost by that end.
        self._took_over_at = time.monotonic()
        try:
            resource.feed(events.Ours())
            if self._presence.kubelet is not None:
                resource.approach(self._presence.kubelet)
            ours = {name for name, one in self._resources.items() if one.standing_by_for is None}
            await _bring_up(self._holdings, self._lists(), ours - self._resuming, withheld=False)
        except Exception:  # noqa: BLE001 - nobody else serves it, and the list of before is better than none
            _log.exception("the lists could not be brought up to date: serving the last one", retry_s=UPDATE_AGAIN)
            self._lists().update_again([time.monotonic() + UPDATE_AGAIN])
        finally:
            self._resuming.discard(resource.name)
        if resource.standing_by_for:  # Another one came meanwhile, and may have gone again: nothing else would tell.
            self.look()
        else:
            resource.feed(events.Resume(time.monotonic() - began))

    async def _take_up(self) -> None:
        """Serve what only another gateway served, with what that one remembered of it and by what is held now."""
        await self._scribe.load()
        await self._beliefs.look()
        self._holdings.recall_all(self._resources)
        await self._lists().update()

    # What the handover asks (a ``talk.Holder``).

    def names(self) -> Collection[str]:
        """Return the resources of this gateway."""
        return self._resources.keys()

    def standing(self, resource: str) -> Standing:
        """Return where the registration of a resource stands."""
        one = self._resources[resource]
        stands = standing(one.state.phase, streams=one.plugin.streaming, refused=one.state.refused)
        return Standing.OUT if stands is Standing.IDLE and self.ability.unfit(one) else stands

    def level(self, resource: str) -> Level | None:
        """Return the kubelets that fit the evidence of a resource's stream; None without one."""
        one = self._resources[resource]
        return one.plugin.level if one.plugin.streaming else None

    def kubelet_listens(self) -> bool:
        """Tell whether a kubelet takes connections now."""
        return self._presence.listens()

    def leaves(self, resource: str) -> bool:
        """Tell whether a resource would be left to a newer gateway that can't be talked to, were it not for those that can."""
        return self._newer(resource, self.living() or {}) is not None

    def renew(self, resource: str) -> None:
        """Register a resource once more: the kubelet may hold another gateway's Register."""
        self._resources[resource].feed(events.Renew("another gateway registered at the same time"))


def _leaves_streams_open(level: Level | None) -> bool:
    """Whether another's Register may leave our stream open. Before 1.12 it ends it; 1.8 can lose all devices by a second Register."""
    return level is None or level.reaches(12) is not False


async def _bring_up(
    holdings: Holdings, lists: OfferedLists, served: Collection[str] = (), *, withheld: bool = True
) -> None:
    """Make the lists ready to be sent, by what another gateway remembered until it left its resources to us.

    To put tens of thousands of devices together takes seconds, in which nobody would serve them: where the other one has noted
    nothing but its own list, that comes later; what may be ``withheld`` from us because of that list waits, too.
    """
    await holdings.scribe.load()
    news = holdings.recall_all(served)
    known = not news and lists.based_on == holdings.ledger.beside_lists()
    await (lists.announce() if known and (withheld or not lists.withholds) else lists.update())


def _is_well(resource: Resource) -> bool:
    return any(device.health is Health.HEALTHY for device in resource.plugin.devices)
