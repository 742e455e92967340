"""The node's DRA drivers, their sockets, and the devices that they offer now.

The devices are those of the device plugin API's lists. DRA never delays that API: while the API server is away, only claims wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
from msgspec import Struct

from devices.claims import ClaimName
from devices.replicas import unshared
from gateway import compose
from gateway.dra import offer, sockets
from gateway.dra.allocatable import LEAVE_WAIT_S, Allocatable
from gateway.dra.claims import Allocated, ResourceClaim, allocations, key
from gateway.dra.crossing import Crossing
from gateway.dra.desk import FIRST, CrossingOrders, Names, not_taken, too_old
from gateway.dra.driver import DriverClaims, forget_ended_claims
from gateway.dra.pods import AskedClaims, EndedPods, Pod, is_away
from gateway.dra.publisher import Current, Publisher, api_path
from gateway.dra.rivals import DriverSockets, RivalDetector
from gateway.dra.service import Service, serve
from gateway.dra.timeslices import TimeSlices
from gateway.kubernetes.client import KubernetesError
from gateway.kubernetes.node import NodeObject, OwnNode, client, path
from gateway.kubernetes.watch import Retries
from gateway.registration.events import Phase
from gateway.tasks import Background, after, first_of
from gateway.telling.sides import ByNameStatus, DriverStatus

if TYPE_CHECKING:
    from devices.life.states import Entry, State
    from devices.model import Device
    from devices.source import DeviceSource, Facts
    from gateway.age import Age
    from gateway.configuration.settings import Settings
    from gateway.dra.offer import Offer
    from gateway.memory.holdings import Holdings
    from gateway.registration.registrar import Resource
    from gateway.sides.table import BoardStatus
    from gateway.tasks import Tasks
    from gateway.wires.control import Handler

KUBELET_AGAIN: Final = 30.0
"""Seconds until the node's kubelet version is read again, while the kubelet can't prepare claims."""
SERVE_AGAIN: Final = 5.0
"""Seconds until a driver that failed is started again."""

LISTS_WAIT_S: Final = 0.5
"""Seconds for which a new leader waits for a kubelet to accept its lists before it writes to the API server."""
_LOOK_AGAIN: Final = 2.0
"""Seconds between two reads of the kubelet's records while they keep a device from being offered."""
_SYS: Final = Path("/sys/bus/pci/devices")
_log = structlog.get_logger()


class Inside(Struct, frozen=True):
    """The parts of the gateway that the drivers use.

    ``resources`` returns the lists of all devices, as the device plugin API would show them, and ``update`` updates them.
    ``first`` is set once all sources have reported their devices. ``passes_to`` returns the token of the gateway to which calls
    are passed on. The ``told`` functions are called with each change of the node's object.
    """

    age: Age
    source: DeviceSource
    holdings: Holdings
    resources: Callable[[], Sequence[Resource]]
    update: Callable[[], Awaitable[None]]
    first: asyncio.Event
    passes_to: Callable[[], str]
    told: Sequence[Callable[[NodeObject], None]]


class Drivers:
    """All DRA drivers of this gateway.

    Args:
        settings: the gateway's settings.
        inside: other parts of the gateway.

    Raises:
        AccessError: the API server can't be configured.
    """

    def __init__(self, settings: Settings, inside: Inside) -> None:
        self._settings, self._inside = settings, inside
        self._api = client(settings)
        self._current = Current(self._api)
        self._registry = settings.socket_dir.parent / sockets.FOLDER
        self._offers: dict[str, dict[str, Offer]] = {}
        self._why_not: dict[str, dict[str, str]] = {}
        self._holdings, self._ended_pods = inside.holdings, EndedPods(inside.holdings)
        self.crossing: Crossing | None = None
        """The table of sides, if the device plugin API is also served."""
        self._orders: CrossingOrders | None = None
        self.alone = settings.dra == "only"
        if settings.dra == "on":
            allocatable = Allocatable(self._api, path(settings), self._pods)
            ask = AskedClaims(self._allocated, lambda: self._foreign({}) is not None)
            self.crossing = Crossing(inside.holdings, inside.resources, ask, inside.update, allocatable, inside.first)
            names = Names(self._api, self._current, path(settings), self.crossing, self._holdings.ledger, self.update)
            self._orders = CrossingOrders(self.crossing, lambda: self.lacking or not_taken(self.standings()), names)
        self._boards: dict[tuple[str, str], str] = {}
        """The board of each device, by driver and name."""
        self._unknown: frozenset[str] = frozenset()
        """Drivers whose devices have unknown holders. Their published slices stay until the holders are known."""
        self._drivers: dict[str, DriverClaims] = {}
        self._slices = TimeSlices(
            self._holdings.ledger, self._holdings.scribe, partial(compose.set_time_slice, settings)
        )
        self._announced, self._rivals = DriverSockets(self._registry), dict[str, RivalDetector]()
        self._publisher = Publisher(
            self._api,
            self._current,
            settings.node_name,
            lambda: {name: None if name in self._unknown else list(one.values()) for name, one in self._offers.items()},
            lambda driver: driver in self._drivers and self._drivers[driver].is_registered,
            self.update,
            self._rivals.get,
            self._slices_changed,
        )
        self._services: list[Service] = []
        self.next_change = asyncio.Event()
        """The event of the next change. Get it before you read the offers, then wait for it."""
        self._kubelet: int | None = None
        self._learned = asyncio.Event()
        """Set when the node's kubelet version is known."""
        self._unasked: str | None = ""
        """Why the API server can't be asked ('' before it was asked); None once the devices are published."""
        self._serving, self._tasks = set[str](), Background()
        self.leads = asyncio.Event()
        """Set while this gateway is the leader and decides about claims."""

    # What is offered (a ``driver.NodeOffers``).

    def offers(self, driver: str) -> Mapping[str, Offer]:
        """Return a driver's devices, by name."""
        return self._offers.get(driver, {})

    def withheld_reasons(self, driver: str) -> Mapping[str, str]:
        """Return why other devices of the driver aren't offered, by name."""
        return self._why_not.get(driver, {})

    def decide(self) -> None:
        """Start to decide about claims, from the content of the state file."""
        if self.crossing is not None:
            self.crossing.adopt()
        self.leads.set()

    @property
    def not_ready(self) -> str:
        """Why this gateway could not lead yet; '' if it could. Drivers of another process don't count."""
        # This kubelet accepts the drivers of one process only, and that is the leader.
        if self._kubelet is not None and self._kubelet < sockets.FIRST_OVERLAP_MINOR:
            return ""
        if self._kubelet is None:
            return too_old(None)
        return not_taken(one for one in self.standings() if not one.rival)

    def note_claims_changed(self) -> None:
        """Note that a claim got devices, or gave them back."""
        if self.crossing is not None:
            self.crossing.claimed()

    async def give_back(self, claim: ClaimName, had: Collection[str]) -> None:
        """Give the devices that a pod got by resource name back to the device plugin API, if they may move now."""
        if self.crossing is not None and self._publisher.has_looked:
            free = {self._boards.get(one, "") for one in self._publisher.free()}
            await self.crossing.bring_back(free, claim, had)

    def note_registration(self) -> None:
        """Note that a kubelet accepted or refused a driver."""
        self._publisher.changed()

    def note_waiting(self, driver: str, names: Iterable[str]) -> None:
        """Note that a claim waits for these devices. DRA reclaims those that the device plugin API has and no pod holds."""
        if self.crossing is not None:
            self.crossing.missed({self._boards.get((driver, name), "") for name in names})

    def away(self, devices: Iterable[Device]) -> Mapping[str, tuple[State, str]]:
        """Return the devices that the device plugin API must not give, by ID, and why."""
        return {} if self.crossing is None else self.crossing.away(devices)

    def update(self) -> None:
        """Compute again what can be offered."""
        inside = self._inside
        if self.crossing is not None:
            there = self.crossing.boards()
            self.crossing.listed(there, time.monotonic())
            self.crossing.strangers.meet(self._foreign(there))
        listed = {resource.name: resource.entries.values() for resource in inside.resources()}
        self._ended_pods.looked(listed)
        holds = {name: self._holdings.on(name, (one.device for one in found)) for name, found in listed.items()}
        names = self._settings.dra_drivers
        self._unknown = frozenset(offer.driver_of(name, names) for name, one in holds.items() if one is None)
        known = inside.source.facts, holds.__getitem__, names, pcie_root
        by_capacity = self._settings.dra_shares == "capacity"
        found, withheld = offer.offers(
            listed, *known, self.crossing, self._publisher.stranger, self.by_name.overlooked, by_capacity=by_capacity
        )
        self._boards = {(one.driver, one.name): one.place.board for one in found}
        self._boards |= {(one.driver, one.name): one.board for one in withheld}
        offers, why_not = offer.by_driver(found, withheld, self._offers)
        if self.leads.is_set() and any(not one.lasts for one in withheld):
            self._holdings.reader.look_within(_LOOK_AGAIN)
        if (offers, why_not) == (self._offers, self._why_not):
            return
        if why_not != self._why_not:
            left_out = {name: why for one in why_not.values() for name, why in one.items()}
            _log.info("devices are not offered by DRA now", devices=left_out)
        self._offers, self._why_not = offers, why_not
        news, self.next_change = self.next_change, asyncio.Event()
        news.set()
        self._publisher.changed()
        for driver in offers.keys() - self._serving:
            self._serving.add(driver)
            self._tasks.background(self._rival(driver).run())
            self._tasks.background(self._keep_serving(driver))

    async def let_in(self, resource: str) -> None:
        """Wait until the kubelet would admit a pod that gets a device of the resource."""
        if self.crossing is not None:
            await self.crossing.allocatable.let_in(resource)

    def standings(self) -> list[DriverStatus]:
        """Return the status of each driver."""
        return [self._standing(name) for name in sorted(self._offers)]

    def standing(self, resource: str) -> DriverStatus:
        """Return the status of a resource's driver."""
        return self._standing(offer.driver_of(resource, self._settings.dra_drivers))

    def _standing(self, name: str) -> DriverStatus:
        claims, rival = self._drivers.get(name), self._rivals.get(name)
        changed = None if claims is None else claims.changed_at
        return DriverStatus(
            name=name,
            devices=len(self._offers.get(name, ())),
            registered=claims is not None and claims.is_registered,
            since_s=None if changed is None else round(time.monotonic() - changed, 3),
            trouble="" if claims is None else claims.registration_error,
            unpublished=self._publisher.trouble(name) if self._unasked is None else self._unasked,
            claims=0 if claims is None else claims.prepared_count,
            rival="" if rival is None else rival.reason,
            refused=() if claims is None else claims.refused,
        )

    def stranger(self, device_id: str, about: Facts) -> str:
        """Return which other DRA driver also offers a device on this node; '' for none."""
        known = {"uuid": unshared(device_id), "parentUUID": about.parent, "pciBusID": about.pci}
        return self._publisher.stranger(known)

    def _foreign(self, there: Mapping[str, Iterable[tuple[str, Entry]]]) -> Mapping[str, str] | None:
        """Return the boards that other DRA drivers offer on this node, and which driver; None: unknown yet."""
        if not self._publisher.has_looked:
            return {} if self._kubelet is not None and self.lacking else None
        if not self._publisher.meets_strangers:
            return {}
        found: dict[str, str] = {}
        for board, devices in there.items():
            for name, entry in devices:
                about = self._inside.source.facts(name)(entry.device.id)
                if words := self.stranger(entry.device.id, about):
                    found.setdefault(board, words)
        return found

    def board_statuses(self) -> Sequence[BoardStatus]:
        """Return where each GPU is; empty if the device plugin API isn't served."""
        return () if self.crossing is None else self.crossing.statuses()

    @property
    def trouble(self) -> str:
        """Why the node's annotation isn't followed; empty if it is."""
        return "" if self._orders is None else self._orders.trouble

    @property
    def by_name(self) -> ByNameStatus:
        """What is wrong for pods that ask by name."""
        return ByNameStatus() if self._orders is None else self._orders.names.status

    # Running.

    async def run(self) -> None:
        """Offer and prepare devices. Never returns."""
        self.update()
        self._holdings.reader.look_within(0)
        own = OwnNode(self._api, self._settings)
        own.told += self._inside.told
        work = [forget_ended_claims(self._drivers, self._read, partial(is_away, self._holdings.presence), self._slices)]
        later = [own.run()]
        if self.crossing is not None and self._orders is not None:
            own.told += [self._orders.take, self._orders.names.take, self.crossing.allocatable.heard]
            work.append(self.crossing.run())
            later += [self._orders.follow(), self._orders.names.run()]
        # If one of these tasks ends, that is a defect, and ends the gateway.
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ended_pods.watch(self._pods, self._pods_ended))
            _ = [group.create_task(after(self.leads.wait, one)) for one in work]
            _ = [group.create_task(after(self._until_registered, one)) for one in later]
            owner = await self._until_kubelet_knows()
            self._unasked = None
            group.create_task(self._publisher.watch())
            await self._until_registered()
            await self._holdings.reader.look()  # A standby's last look may be old.
            if self._orders is not None:
                await self._orders.names.looked.wait()
            self._publisher.changed()
            await self._publisher.run(owner)

    async def _pods(self) -> list[Pod]:
        """Read the node's pods from the API server."""
        found, _ = await self._api.list("/api/v1/pods", Pod, fields=f"spec.nodeName={self._settings.node_name}")
        return found

    def _slices_changed(self) -> None:
        for one in self._rivals.values():
            one.note_slices_changed()

    def _pods_ended(self) -> None:
        self.update()
        if self.crossing is not None:
            self.crossing.ended()

    async def _until_registered(self) -> None:
        """Wait until this gateway leads and a kubelet has its lists: until then, no gateway serves pods that ask by resource name.

        Wait at most ``LISTS_WAIT_S`` seconds. If the lists need the API server first, don't wait.
        """
        await self.leads.wait()
        known, resources = self.crossing is not None and self.crossing.is_known, self._inside.resources
        ends = time.monotonic() + LISTS_WAIT_S if known else 0.0
        while time.monotonic() < ends and any(one.state.phase is not Phase.SERVING for one in resources()):  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(LISTS_WAIT_S / 50)

    async def leave(self) -> None:
        """Before this gateway yields, set allocatable to 0, so that no new pod gets a GPU of DRA's by resource name.

        If a pod has such a GPU already, only wait until no pod is being admitted. With 0, the kubelet would refuse other pods at
        their admission, also after its own restart (``OutOfnvidia.com/gpu``, run on 1.37).
        """
        if self.crossing is None:
            return
        if not any(row.by_name for row in self._holdings.ledger.claims.values()):
            await self.crossing.allocatable.leave(self.crossing.stays())
        else:
            await self.crossing.allocatable.admitted(self.crossing.stays(), LEAVE_WAIT_S)

    async def close(self) -> None:
        """Stop deciding. The sockets go first, so that the kubelet calls another gateway. Waiting calls are passed on to it."""
        await self._tasks.close()
        newest = partial(sockets.newest, self._registry)
        await asyncio.gather(*(one.stop(newest(one.name, self._inside.age.token)) for one in self._services))
        self._api.close()

    async def finish(self) -> None:
        """Wait for the answers to calls that were passed on."""
        await asyncio.gather(*(one.finish() for one in self._services))

    async def _learn(self) -> str:
        """Read what must be known of the API server and the node; return the node's UID."""
        retries = Retries()
        while True:
            try:
                node = await self._api.get(path(self._settings), NodeObject)
                self._kubelet = node.kubelet
                self._learned.set()
                await self._current.anew()
            except KubernetesError as error:
                wait, self._unasked = retries.wait(error), str(error)
                if retries.are_new:
                    _log.warning("the API server can't be asked: claims wait", reason=self._unasked)
                await asyncio.sleep(wait)
            else:
                return node.metadata.uid

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers of orders over the control socket."""
        return {} if self._orders is None else self._orders.handlers

    @property
    def lacking(self) -> str:
        """Why the node's kubelet can't prepare claims; '' if it may."""
        if self.crossing is None or (self._kubelet or 0) >= FIRST:
            return ""
        return too_old(self._kubelet)

    async def _until_kubelet_knows(self) -> str:
        """Wait for a kubelet that prepares claims, while the device plugin API is served; return the node's UID."""
        owner = await self._learn()
        if self.lacking:
            _log.warning("devices are offered by the device plugin API alone", reason=self.lacking)
            self.update()
        while self.lacking:
            await asyncio.sleep(KUBELET_AGAIN)
            owner = await self._learn()
        return owner

    async def _allocated(self) -> Allocated:
        """Return what claims have of this node by the API server.

        Raises:
            KubernetesError: the API server didn't answer.
        """
        node = self._settings.node_name
        try:
            found = await self._current.list("resourceclaims", ResourceClaim, lambda one: any(one.devices(node)))
        except KubernetesError as error:
            if self._current.version is not None or error.status != 404:
                raise
            return Allocated()  # The server has no resource.k8s.io API, so it has no claims.
        published = self._publisher.free(), self._publisher.shown()
        return allocations(found, node, self._boards, published, self._offers, self._holdings.ledger.claims)

    async def _keep_serving(self, driver: str) -> None:
        while True:
            try:
                return await self._serve(driver)
            except Exception:  # noqa: BLE001 - other drivers go on, and the next try may work
                _log.exception("the DRA driver can't be served because of a defect in the gateway", driver=driver)
            await asyncio.sleep(SERVE_AGAIN)

    def _rival(self, driver: str) -> RivalDetector:
        """Return what is known of another process with a driver's name."""
        if driver not in self._rivals:
            others, with_one = (
                partial(self._publisher.others, driver),
                partial(self._current.list, "resourceclaims", ResourceClaim, lambda one: one.has(driver)),
            )
            self._rivals[driver] = RivalDetector(
                driver,
                self._announced,
                others,
                with_one,
                lambda uid: key(driver, uid) in self._holdings.ledger.claims,
                self.note_registration,
            )
        return self._rivals[driver]

    async def _serve(self, driver: str) -> None:
        """Keep a driver registered while its name is free and that breaks no other gateway's. Never returns."""
        inside, rival, token = self._inside, self._rival(driver), self._inside.age.token
        known = inside.source, self._holdings.ledger, self._holdings.scribe, self._read, self._slices
        claims = self._drivers[driver] = DriverClaims(driver, self._settings.node_name, self, *known, rival)
        # Another leader may write and remove specifications until this gateway decides.
        self._tasks.background(after(self.leads.wait, claims.restore()))
        await self._until_may_register(driver)
        if swept := await asyncio.to_thread(sockets.sweep, self._registry, driver):
            _log.info("removed sockets that dead gateways left", sockets=swept)
        elsewhere = partial(sockets.listening_path, self._registry, driver, inside.passes_to)
        while True:
            await rival.until(lambda: not rival.registration_blocker(claims.prepared_count))
            service = await serve(lambda: Service(claims, elsewhere), sockets.path_of(self._registry, driver, token))
            self._services.append(service)
            # While we are registered, the kubelet unprepares our claims with us.
            await rival.until(lambda: rival.reason and rival.registration_blocker(0) and not claims.prepared_count)
            claims.note_deregistration()
            await service.stop()
            self._services.remove(service)

    async def _until_may_register(self, driver: str) -> None:
        """Wait until the driver may be registered: with an old kubelet, the registration would break another gateway's."""
        told = False
        while ((minor := self._kubelet) is None or minor < sockets.FIRST_OVERLAP_MINOR) and (
            self.lacking or not self.leads.is_set() or sockets.others(self._registry, driver, self._inside.age.token)
        ):
            if not told and minor is not None and not self.lacking:
                reason = f"kubelet 1.{minor} allows one process per DRA driver: a second breaks the first"
                _log.info("the DRA driver is registered once this gateway leads", driver=driver, reason=reason)
                told = True
            news = self._learned if minor is None else self.leads
            if news.is_set():
                await asyncio.sleep(sockets.CHECK_S)
            else:
                await first_of(news, seconds=sockets.CHECK_S)

    async def _read(self, claim: ClaimName) -> ResourceClaim:
        where = f"namespaces/{claim.namespace}/resourceclaims/{claim.name}"
        return await self._current.at(lambda version: self._api.get(f"{api_path(version)}/{where}", ResourceClaim))


class RenewedDrivers:
    """The drivers of a gateway, which are made again each time it stops leading.

    So what they knew as the leader's never mixes with what another gateway decided later. Raises as ``Drivers``.
    """

    def __init__(self, settings: Settings, inside: Inside, tasks: Tasks) -> None:
        self._settings, self._inside, self._tasks = settings, inside, tasks
        self.now = Drivers(settings, inside)
        """The current drivers."""
        self._runs: asyncio.Task[None] | None = None
        self._answers: set[asyncio.Future[None]] = set()
        """The ends of calls that were passed on."""

    def begin(self) -> None:
        """Serve the kubelet's calls. They are passed on while another gateway leads."""
        self._runs = self._tasks.spawn_cancellable("dra", self.now.run())

    async def let_in(self, resource: str) -> None:
        """Wait until the kubelet would admit a pod that gets a device of the resource."""
        await self.now.let_in(resource)

    async def leave(self) -> None:
        """Let no new pod get a GPU by name, before another gateway leads. It may take seconds, in which calls are still answered."""
        if self.now.leads.is_set():
            await self.now.leave()

    async def rest(self) -> None:
        """Stop acting as the leader's. Return when all decisions were handed to the scribe. Waiting calls go to the next leader."""
        if self._runs is not None:
            await self.close()
            self.now = Drivers(self._settings, self._inside)
            self.begin()

    async def close(self) -> None:
        """Stop for good."""
        runs, self._runs = self._runs, None
        if runs is not None:
            runs.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await runs
            await self.now.close()
            answers = asyncio.ensure_future(self.now.finish())
            self._answers.add(answers)
            answers.add_done_callback(self._answers.discard)

    async def finish(self) -> None:
        """Wait for the answers to calls that were passed on."""
        await asyncio.gather(*self._answers)


def pcie_root(pci: str) -> str:
    """Return the PCIe root complex of a PCI address (``pci0000:00``), as deviceattribute of Kubernetes names it; '' if unknown."""
    try:
        parts = (_SYS / pci).resolve(strict=True).parts if pci else ()
    except (OSError, RuntimeError):
        return ""
    return next((part for part in parts if part.startswith("pci") and ":" in part), "")
