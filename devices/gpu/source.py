"""The ``DeviceSource`` of a backend's GPUs: names, shares, chooses and gives them by the operator's policy.

The pure modules for this are the same for every vendor: ``naming`` (which resource), ``sharing`` (how often), ``allocation``
(which GPU), ``vendor`` (how a container gets it). The backend only finds and watches hardware.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import is_not
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import structlog
from msgspec.structs import replace

from devices.boards import Place
from devices.gpu import naming, sharing
from devices.gpu.allocation import preferred
from devices.gpu.asked import Asked, NodeTraits
from devices.gpu.backend import Backend, Sight
from devices.gpu.model import GPU, found
from devices.gpu.naming import NamingError
from devices.gpu.sharing import NamedGPUs
from devices.gpu.vendor import Vendor, answer, vendor_of
from devices.model import ContainerAnswer, ContainerRequest, Fault, Health, PreferredRequest, RefusedError, Sendable
from devices.policy import CDI_STRATEGIES, ListStrategy, Policy, Slices
from devices.replicas import unshared
from devices.source import (
    Absence,
    DeviceSource,
    Facts,
    GiveUpError,
    Hindrance,
    Inventory,
    Reading,
    Unusable,
    chosen,
    not_offered,
)

if TYPE_CHECKING:
    from devices.gpu.labels import FeatureFile

_CDI_CHECK_S: Final = 30.0
"""Seconds between two checks of the files in a CDI specification, because some appear late: those in /dev/dri with DRM's
driver."""
_MAX_REMEMBERED: Final = 4096
"""Most GPUs and partitions that are remembered, present or gone: each new MIG layout has new UUIDs."""
_UNNAMED: Final = "devices can't be named"
_MAX_ANSWERS: Final = 1024
"""Most answers that are cached."""
_MISSING: Final = "missing, so CUDA programs in containers fail: create the device nodes (nvidia-modprobe -c 0 -u)"

_log = structlog.get_logger()


class GPUSource(DeviceSource):
    """The GPUs of one backend; ``vendors`` are the vendors of its GPUs.

    While the policy has no valid name for the node's devices, the earlier list stays, with the present health, and the reason
    is logged. ``survey`` finds the driver's files in a thread and writes the CDI specifications. ``tell`` passes new settings
    to the backend. ``features`` makes the file of the node's labels; None: there is none.
    """

    def __init__(
        self,
        backend: Backend,
        policy: Policy,
        vendors: Sequence[Vendor] = (),
        survey: Callable[[Sight, Policy], NodeTraits] | None = None,
        tell: Callable[[Policy], None] = lambda _: None,
        features: Callable[[], FeatureFile] | None = None,
    ) -> None:
        self.name = backend.name
        self._backend, self._policy, self._vendors = backend, policy, vendors
        self._survey_cdi, self._tell = survey, tell
        self._make_features, self._leads = features, False
        self._features: FeatureFile | None = None
        self._around = NodeTraits()
        self._news = asyncio.Event()
        self._sight: Sight | None = None
        self._offers: Mapping[str, NamedGPUs] = {}
        self._inventory: Inventory | None = None
        self._left_out: Mapping[str, tuple[str, ...]] = {}
        self._known: dict[str, GPU] = {}
        self._unnamed = ""
        self._unusable: tuple[Unusable, ...] = ()
        self._cached_answer = lru_cache(_MAX_ANSWERS)(self._make_answer)
        self._answers_rest_on: tuple[Mapping[str, NamedGPUs], Policy, NodeTraits] = (self._offers, policy, self._around)
        """The cached answers are valid while these objects are the same."""

    async def watch(self) -> AsyncGenerator[Inventory]:
        """Yield the inventory, and again after each change of the backend's GPUs or the settings.

        Raises:
            GiveUpError: the backend can't go on. With ``fail_on_init_error`` also: at the start, the node's devices can't be
                named, or none of its GPUs can be used.
        """
        following, told = asyncio.ensure_future(self._follow()), False
        try:
            while True:
                news = asyncio.ensure_future(self._news.wait())
                kept = self._policy.list_strategies & CDI_STRATEGIES or self._features
                again = _CDI_CHECK_S if kept else None
                done, _ = await asyncio.wait({news, following}, timeout=again, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                if following.done():
                    following.result()
                    raise RuntimeError(f"the backend {self.name} ended, which it must not")
                await self._label()
                if not done:
                    await self._survey()
                    continue
                self._news.clear()
                held_up = [one.reason for one in self._own_hindrances() if one.held_up]
                if held_up and not told and self._policy.fail_on_init_error:
                    raise GiveUpError("; ".join(held_up))
                if self._inventory is not None:
                    inventory, told = self._inventory, True
                    await self._survey()
                    yield inventory
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            if self._features is not None:
                self._features.withdraw()

    async def answer(self, resource: str, request: ContainerRequest, sendable: Sendable) -> ContainerAnswer:
        """Return how a container gets these GPUs, by the policy's strategies.

        Raises:
            RefusedError: this kubelet's API lacks a field for it, a partition lacks a part, or NOT_FOUND: this source has
                neither the resource nor a device of it.
        """
        offer = self._offers.get(resource)
        if offer is None and not (
            self.claims(resource) or any(unshared(one, self._known) in self._known for one in request.device_ids)
        ):
            raise not_offered(resource)
        rests_on = (self._offers, self._policy, self._around)
        if any(map(is_not, rests_on, self._answers_rest_on)):
            self._answers_rest_on = rests_on
            self._cached_answer.cache_clear()
        # The key of an annotation is used once.
        is_unique = ListStrategy.CDI_ANNOTATIONS in self._policy.list_strategies
        make = self._make_answer if is_unique else self._cached_answer
        return make(resource, request.device_ids, sendable)

    def _make_answer(self, resource: str, device_ids: tuple[str, ...], sendable: Sendable) -> ContainerAnswer:
        offer = self._offers.get(resource)
        gpus = self._known if offer is None else offer.gpus  # A kubelet 1.8 also asks under earlier names.
        for device_id in device_ids:
            if (gpu := found(device_id, gpus)) is not None and gpu.lacks:
                raise RefusedError(Fault.FAILED_PRECONDITION, f"a container cannot use {device_id[:80]!r}: {gpu.lacks}")
        token = str(uuid4()) if ListStrategy.CDI_ANNOTATIONS in self._policy.list_strategies else ""
        asked = Asked(resource, device_ids, gpus, self._policy, sendable, self._around, token)
        return answer(asked, device_ids, self._vendors)

    async def prefer(self, resource: str, request: PreferredRequest) -> tuple[str, ...]:
        """Choose GPUs near each other, partitions on few GPUs, replicas as the policy says.

        Raises:
            RefusedError: no choice meets the request.
        """
        gpus, policy = self._offers.get(resource, NamedGPUs({})).gpus, self._policy
        return await chosen(request, lambda: preferred(request, gpus, policy.sharing))

    async def prepare(self, resource: str, device_ids: tuple[str, ...]) -> None:
        """Let a container start only with GPUs that are present and healthy.

        Raises:
            RefusedError: FAILED_PRECONDITION, a GPU is unhealthy or gone.
        """
        gpus = self._offers.get(resource, NamedGPUs({})).gpus
        ill = [one for one in device_ids if (gpu := found(one, gpus)) is None or gpu.health is not Health.HEALTHY]
        if ill:
            raise RefusedError(
                Fault.FAILED_PRECONDITION,
                f"{', '.join(ill[:4])} of {resource} is not healthy, so the container is not started. "
                "Repair it; the kubelet tries again",
            )

    def absence(self, resource: str, device_id: str) -> Absence:
        """Return LOST for a GPU that vanished, WITHDRAWN for a device that is no longer offered."""
        sight = self._sight
        if sight is None or self._inventory is None:
            return Absence.UNKNOWN
        uuid = unshared(device_id, self._known)
        there = {gpu.uuid for gpu in sight.gpus}
        offer = self._offers.get(resource)
        if offer is not None and uuid in offer.gpus and device_id in offer.ids(uuid):
            return Absence.LOST  # It is on the list.
        known = self._known.get(uuid)
        if uuid in self._left_out or naming.patterns_of(known or GPU(uuid, -1, -1), self._policy.excluded):
            return Absence.EXCLUDED
        if uuid in there or uuid in sight.withdrawn or (sight.resources and offer is None):
            return Absence.WITHDRAWN
        if known is None:  # From an earlier process. If a GPU can't be read, its partitions are unknown.
            looked_at = bool(sight.gpus) and all(one.excluded for one in sight.unusable)
            repartitioned = looked_at and any(one.was_repartitioned(uuid, sight.gpus) for one in self._vendors)
            return Absence.WITHDRAWN if repartitioned else Absence.UNKNOWN
        replaced = bool(known.pci) and any(gpu.pci == known.pci and gpu.board != known.board for gpu in sight.gpus)
        if replaced or known.parent in there or self._differently(resource, device_id, known):
            return Absence.WITHDRAWN
        return Absence.LOST

    def place(self, device_id: str) -> Place | None:
        """Return where a GPU or partition is. A partition that is gone may have been anywhere on its GPU."""
        uuid = unshared(device_id, self._known)
        gpu = next((gpu for gpu in (self._sight or Sight(())).gpus if gpu.uuid == uuid), None)
        if gpu is not None:
            return Place(gpu.board, gpu.uuid if gpu.parent else "")
        known = self._known.get(uuid)
        return None if known is None else Place(known.board)

    def claims(self, resource: str) -> bool:
        """Return True if it is offered, or the vendor's GPUs could have this name. Simulated GPUs have their own names."""
        if resource in self._offers:
            return True
        if self._sight is not None and self._sight.resources and self._inventory is not None:
            return False
        return naming.claimed(resource, self.name, self._policy, self._vendors)

    def hindrances(self) -> tuple[Hindrance, ...]:
        """Return why the node's devices can't be named, why GPUs can't be used, and what hinders the backend."""
        backends, trouble = self._backend.hindrance, "" if self._features is None else self._features.trouble
        found = self._own_hindrances() + ([] if backends is None else [backends])
        return (*found, Hindrance(self.name, trouble)) if trouble else tuple(found)

    def _own_hindrances(self) -> list[Hindrance]:
        """Return one hindrance for each unusable GPU. They hold up a rolling update only if no GPU can be used."""
        if self._unnamed:
            return [Hindrance(self.name, f"{_UNNAMED}: {self._unnamed}", held_up=self._inventory is None)]
        none = not any(offer.gpus for offer in self._offers.values())
        gpus = [one for one in self._unusable if not one.excluded]
        found = [Hindrance(self.name, f"{one.name} can't be used: {one.reason}", held_up=none) for one in gpus]
        missing = ", ".join(self._around.sight.missing_nodes)
        return [*found, Hindrance(self.name, f"{missing}: {_MISSING}")] if missing else found

    def unusable(self) -> tuple[Unusable, ...]:
        """Return the GPUs that no resource lists, each with its reason."""
        return self._unusable

    def facts(self, resource: str) -> Callable[[str], Facts]:
        """Return the facts of a GPU."""
        gpus, sight = self._offers.get(resource, NamedGPUs({})).gpus, self._sight or Sight(())
        places = {one.uuid: one.place or str(one.index) for one in sight.gpus}
        return lambda one: Facts() if (gpu := found(one, gpus)) is None else _facts(gpu, places, sight.driver_version)

    def adopt(self, policy: Policy) -> None:
        """Use ``policy`` from now on."""
        self._policy = policy
        self._tell(policy)
        self._decide()

    async def lead(self) -> None:
        """Start to keep the node's labels."""
        self._leads = True
        if self._policy.node_features:
            self._news.set()

    async def rest(self) -> None:
        """Leave the node's labels to the leader."""
        self._leads = False

    def readings(self) -> Sequence[Reading]:
        """Read the GPUs' gauges, if the backend can. Blocks."""
        return getattr(self._backend, "readings", tuple)()

    async def release(self, device_ids: Collection[str]) -> Collection[str]:
        """Release the GPUs of these devices; return the IDs of all devices on them."""
        return await self._handled(self._backend.release, device_ids)

    async def acquire(self, device_ids: Collection[str]) -> Collection[str]:
        """Use the GPUs of these devices again; return the IDs of all devices on them."""
        return await self._handled(self._backend.acquire, device_ids)

    async def _handled(self, do: Callable[[Collection[str]], Awaitable[None]], named: Collection[str]) -> list[str]:
        """Call ``do`` with the GPUs of the named devices (none means all); return the IDs of all devices on them."""
        wanted = frozenset(named)
        boards = {gpu.board for offer, gpu in self._offered() if not wanted.isdisjoint(offer.ids(gpu.uuid))}
        if boards or not named:
            await do(boards)
        meant = [(offer, gpu) for offer, gpu in self._offered() if gpu.board in boards or not named]
        return [device_id for offer, gpu in meant for device_id in offer.ids(gpu.uuid)]

    def _offered(self) -> Iterator[tuple[NamedGPUs, GPU]]:
        return ((offer, gpu) for offer in self._offers.values() for gpu in offer.gpus.values())

    async def _follow(self) -> None:
        async with contextlib.aclosing(self._backend.watch()) as sights:
            async for sight in sights:
                before = self._sight or Sight(())
                if sight.missing_nodes and sight.missing_nodes != before.missing_nodes:
                    _log.error("device nodes are missing", nodes=list(sight.missing_nodes), reason=_MISSING)
                self._sight = _completed(sight, before.gpus, self._known)
                for gpu in self._sight.gpus:
                    self._known.pop(gpu.uuid, None)
                    self._known[gpu.uuid] = gpu
                for uuid in list(self._known)[:-_MAX_REMEMBERED]:
                    del self._known[uuid]
                self._decide()

    def _decide(self) -> None:
        """Compute what is offered now, if the GPUs can be named."""
        sight = self._sight
        if sight is None:
            return
        self._left_out = naming.left_out(sight.gpus, self._policy.excluded)
        try:
            named = dict.fromkeys(sight.resources, ()) | naming.named(
                _wanted(sight, self._left_out), self._policy, self._vendors
            )
            self._offers = sharing.offered(named, self._policy)
        except NamingError as error:
            if str(error) != self._unnamed:
                kept = {name: len(offer.gpus) for name, offer in self._offers.items()}
                _log.error(_UNNAMED, reason=str(error), kept=kept)
            self._unnamed = str(error)
            if self._inventory is None:
                self._news.set()
                return
            self._offers = {
                name: replace(offer, gpus=naming.as_they_are(offer.gpus, sight.gpus, self._left_out))
                for name, offer in self._offers.items()
            }
        else:
            self._unnamed = ""
        other = naming.also_left_out(sight.unusable, self._policy.excluded)
        unusable = (*other, *sharing.unlisted(self.name, sight.gpus, self._offers.values(), self._left_out))
        for one in unusable:
            if one not in self._unusable and not one.excluded:
                _log.warning("a GPU can't be used", gpu=one.name, reason=one.reason)
        self._unusable = unusable
        self._inventory = {
            name: sharing.listing(offer, sight.recovered | _regained(offer, sight), sight.released)
            for name, offer in self._offers.items()
        }
        self._news.set()

    async def _survey(self) -> None:
        """Find the driver's files for CDI and write the specifications, before the GPUs are listed."""
        sight, policy = self._sight, self._policy
        if self._inventory is None or sight is None or not (sight.gpus or self._known):
            return  # Without the driver, the earlier specifications stay.
        if self._survey_cdi is None or not policy.list_strategies & CDI_STRATEGIES:
            self._around = NodeTraits(sight)
            return
        around = await asyncio.to_thread(self._survey_cdi, replace(sight, gpus=_wanted(sight, self._left_out)), policy)
        if around.without_cdi:
            if policy.fail_on_init_error and not self._around.specifications:
                raise GiveUpError(around.without_cdi)
            if around.without_cdi != self._around.without_cdi:
                _log.error("no CDI specification", reason=around.without_cdi, retry_s=_CDI_CHECK_S)
            # Once specifications were written, the start has not failed.
            around = replace(around, specifications=self._around.specifications)
        self._around = around

    async def _label(self) -> None:
        """Write the node's labels, if this gateway leads. While the driver can't be used, its labels stay."""
        if self._features is None and self._policy.node_features and self._make_features is not None:
            self._features = self._make_features()
        if self._features is not None and self._leads and self._sight is not None:
            sight = replace(self._sight, gpus=_wanted(self._sight, self._left_out))
            await asyncio.to_thread(self._features.keep, sight, self._policy)

    def _differently(self, resource: str, device_id: str, gpu: GPU) -> bool:
        """Return True if this GPU, if it were present, would not be offered as ``device_id`` of ``resource``."""
        name = vendor_of(gpu.resource, self._vendors).name_of(gpu, self._policy) or ""
        slices = self._policy.slices.get(name, Slices(0, name))
        return not sharing.could_be(gpu, device_id, resource, slices)


def _completed(sight: Sight, before: Sequence[GPU], known: Mapping[str, GPU]) -> Sight:
    """Add released GPUs, and products that can't be read now, as they were seen before."""
    there = {gpu.uuid for gpu in sight.gpus}
    kept = [gpu for gpu in before if gpu.board in sight.released and gpu.uuid not in there]
    gpus = (
        replace(gpu, product=known[gpu.uuid].product) if not gpu.product and gpu.uuid in known else gpu
        for gpu in sight.gpus
    )
    return replace(sight, gpus=(*gpus, *kept))


def _wanted(sight: Sight, left_out: Collection[str]) -> tuple[GPU, ...]:
    """Return the GPUs of a sight that no setting leaves out."""
    return tuple(gpu for gpu in sight.gpus if gpu.uuid not in left_out)


def _regained(offer: NamedGPUs, sight: Sight) -> frozenset[str]:
    """Return the GPUs, offered whole, on which a partition was reset: they had its trouble, too."""
    return frozenset(gpu.parent for gpu in sight.gpus if gpu.uuid in sight.recovered and gpu.parent in offer.gpus)


def _facts(gpu: GPU, places: Mapping[str, str], driver: str) -> Facts:
    return Facts(
        product=gpu.product,
        index=places.get(gpu.uuid, gpu.place or str(gpu.index)),
        pci=gpu.pci,
        parent=gpu.parent,
        profile=gpu.profile,
        links={
            places.get(link.peer, link.peer): link.way.value + (f" x{link.lanes}" if link.lanes > 1 else "")
            for link in gpu.links
        },
        nodes=(*gpu.device_nodes, *gpu.spec_nodes),
        minor=gpu.minor,
        driver=driver,
        memory=gpu.memory,
        traits=dict(gpu.traits),
        capacities=dict(gpu.capacities),
        slot=gpu.slot,
    )
