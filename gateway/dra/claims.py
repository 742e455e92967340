"""ResourceClaims: what the API server allocated, and whether it may be prepared. Pure.

The kubelet retries a refused Prepare only after 60 to 90 s (run on 1.37). So a claim waits if its problem may pass soon
(``Wait``), and is refused only if a person must fix it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct, field
from msgspec.structs import replace

from devices import boards
from devices.claims import ClaimName, Prepared, Refused
from gateway.dra.offer import Ailment, Offer
from gateway.dra.parameters import Config, intervals
from gateway.dra.slices import SHARES, TAINTS
from gateway.kubernetes import quantity
from gateway.memory.claimed import Claimed, ClaimedDevice, held_devices, holds

MAX_DEVICES: Final = 32
"""Most devices of a claim (AllocationResultsMaxSize of k8s.io/api/resource/v1)."""
_BY_NAME: Final = "resource.kubernetes.io/extended-resource-claim"
"""The annotation of a claim that the scheduler made for a pod that asks by name (ExtendedResourceClaimAnnotation of
k8s.io/api/resource/v1)."""


def key(driver: str, uid: str) -> str:
    """Return the key of a claim in the state file. It has the driver, because several drivers may have devices of one claim."""
    return f"{uid}@{driver}"


def uid_of(known_as: str) -> str:
    """Return the UID of a claim from its key in the state file."""
    return known_as.partition("@")[0]


class Toleration(Struct):
    """A taint that a claim tolerates."""

    key: str = ""
    value: str = ""
    effect: str = ""
    operator: str = "Equal"

    def covers(self, key: str) -> bool:
        """Return True if it covers our taint with that key. Our taints have no value."""
        named = not self.key or self.key == key
        return (
            named
            and self.effect in {"", "NoSchedule"}
            and (self.operator == "Exists" or (bool(self.key) and not self.value))
        )


class Result(Struct):
    """An allocated device."""

    request: str
    driver: str
    pool: str
    device: str
    admin: bool | None = field(default=None, name="adminAccess")
    share: str | None = field(default=None, name="shareID")
    consumed: dict[str, Any] | None = field(default=None, name="consumedCapacity")
    tolerations: list[Toleration] | None = None

    @property
    def of(self) -> str:
        """The request, without its subrequest (gpu for gpu/large), as the kubelet names it."""
        return self.request.partition("/")[0]

    @property
    def shares(self) -> int:
        """How many shares of the device were allocated; 0 if none are named."""
        return (quantity.read((self.consumed or {}).get(SHARES)) or 0) if self.share else 0


class Devices(Struct):
    """The devices of an allocation."""

    results: list[Result] | None = None
    config: list[Config] | None = None


class Allocation(Struct):
    """What was allocated."""

    devices: Devices = field(default_factory=Devices)


class Consumer(Struct):
    """Who may use a claim: usually a pod in the claim's namespace."""

    resource: str = ""
    name: str = ""


class Status(Struct):
    """A claim's status."""

    allocation: Allocation | None = None
    reserved: list[Consumer] | None = field(default=None, name="reservedFor")


class Annotations(Struct):
    """The annotations of a claim that are read. Others may be large."""

    by_name: str = field(default="", name=_BY_NAME)


class Metadata(Struct):
    """The metadata of a claim or a class."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    annotations: Annotations | None = None


class ResourceClaim(Struct):
    """A claim of the API server, as far as a driver needs it."""

    metadata: Metadata
    status: Status = field(default_factory=Status)

    @property
    def by_name(self) -> bool:
        """True if the scheduler made it for a pod that asked for a resource by its name."""
        return self.metadata.annotations is not None and self.metadata.annotations.by_name == "true"

    @property
    def results(self) -> Iterable[Result]:
        """The devices that were allocated to it."""
        allocation = self.status.allocation
        return () if allocation is None else allocation.devices.results or ()

    def has(self, driver: str) -> bool:
        """True if a device of a driver was allocated to it."""
        return any(one.driver == driver for one in self.results)

    def configs(self, driver: str) -> list[Config]:
        """Return the parameters of the claim and its classes for a driver."""
        allocation = self.status.allocation
        found = () if allocation is None else allocation.devices.config or ()
        return [one for one in found if one.opaque is not None and one.opaque.driver == driver]

    def devices(self, node: str) -> Iterable[tuple[str, str]]:
        """Yield the driver and the name of each of its devices on a node, except those with adminAccess."""
        for one in self.results:
            if one.pool == node and not one.admin:
                yield one.driver, one.device


class Allocated(Struct, frozen=True):
    """The node's devices that are allocated to claims, as the API server reports them.

    ``boards`` names the claim that has each board, or may get it. ``by_name`` are the IDs of devices that were allocated to pods
    that ask by resource name. ``unshown`` names a claim with a device that no ResourceSlice shows. ``missing`` is True if a claim
    has a device that our drivers don't know now.
    """

    boards: Mapping[str, str] = {}
    by_name: frozenset[str] = frozenset()
    unshown: str = ""
    missing: bool = False


class Wait(Struct, frozen=True):
    """The claim can't be prepared yet, but may be soon. ``reason`` is why."""

    reason: str


class Grant(Struct, frozen=True):
    """What a claim gets: each allocated device, our offer of it, and its GPU's time-slice interval ('' for the default).

    A claim with several shares of a device has a row for each; each share is one of the device's replicas.
    """

    devices: tuple[tuple[Result, Offer, str], ...]


def allocated(claim: ResourceClaim, asked: ClaimName, driver: str, node: str) -> list[Result] | Refused:
    """Return the devices that were allocated to a claim in our pool."""
    if claim.metadata.uid != asked.uid:
        return Refused(f"claim {asked} was replaced by another one of that name, {claim.metadata.uid}")
    if claim.status.allocation is None:
        return Refused(f"claim {asked} is not allocated any more. Delete the pod")
    found = [one for one in claim.results if one.driver == driver]
    if strange := [one.pool for one in found if one.pool != node]:
        return Refused(f"claim {asked} has devices of {strange[0]}, not of the pool {node}")
    if not found or len(found) > MAX_DEVICES:
        return Refused(f"claim {asked} has {len(found)} devices of {driver}. Allowed: 1 to {MAX_DEVICES}")
    return found


def another(asked: ClaimName, row: Claimed | None) -> Refused | None:
    """Refuse a claim with the UID of a prepared claim and another name; None if there is no such conflict."""
    if row is None or (row.namespace, row.name) == (asked.namespace, asked.name):
        return None
    return Refused(f"claim {row.namespace}/{row.name} is prepared with the UID {asked.uid}, not {asked}")


def granted(
    asked: ClaimName,
    results: Sequence[Result],
    configs: Iterable[Config],
    offers: Mapping[str, Offer],
    withheld: Mapping[str, str],
    others: Mapping[str, Claimed],
) -> Grant | Wait | Refused:
    """Decide whether a claim gets what was allocated to it.

    Args:
        asked: the claim.
        results: what was allocated to it.
        configs: its parameters for the driver. If they can't be used, the claim is refused.
        offers: what the driver offers now, by name.
        withheld: why other devices of the driver aren't offered, by name.
        others: what is prepared, by ``key``. The claim itself may be in it.
    """
    there = [
        ({one.request, one.of}, one.device, str(offers[one.device].attributes.get("type")))
        for one in results
        if one.device in offers
    ]
    sliced = intervals(results[0].driver, configs, there)
    if isinstance(sliced, dict) and any(one.admin and one.device in sliced for one in results):
        sliced = Refused("a request with adminAccess sets no time-slice interval. Remove timeSlicingConfig")
    if isinstance(sliced, Refused):
        return Refused(
            f"Cannot use the parameters of claim {asked} or its DeviceClass: {sliced.reason}. Then delete the pod and its claim"
        )
    given, held = list[tuple[Result, Offer, str]](), [*holds(others, except_uid=asked.uid)]
    for result in results:
        offer = offers.get(result.device)
        if offer is None:
            reason = withheld.get(result.device, "it isn't on this node now, or was renamed")
            return Wait(f"{result.device} can't be handed out: {reason}")
        if offer.ailment is not None and not _tolerated(result, offer):
            return Wait(f"{result.device} is {offer.ailment.value}: {offer.reason or 'no reason is known'}")
        interval = sliced.get(result.device, "")
        if offer.shares and not (result.admin or result.shares):
            return Refused(
                f"claim {asked} was allocated {result.device} without a number of shares. The gateway offers it in shares "
                "(--dra-shares capacity). Delete the pod and its claim"
            )
        wanted = result.shares if offer.shares and not result.admin else 1
        taken = {one.device_id for of, one, _ in given if not of.admin}
        ids, beside = ([offer.device_id], "") if result.admin else _free(offer, held, taken, shares=not interval)
        if interval and (beside := beside or offer.beside):
            return Wait(
                f"{result.device} is in use, and the time-slice interval {interval} is set only for a claim that has the GPU alone: {beside}"
            )
        if len(ids) < wanted and offer.shares:
            return Wait(
                f"{result.device} has {len(ids)} free shares, and {wanted} were allocated{beside and f': {beside}'}"
            )
        if len(ids) < wanted:
            return Wait(f"{result.device} is in use: {beside}")
        given += [(result, replace(offer, device_id=one), interval) for one in ids[:wanted]]
    return Grant(tuple(given))


def _free(offer: Offer, held: Iterable[boards.Hold], taken: Container[str], *, shares: bool) -> tuple[list[str], str]:
    """Return the free replicas of a device (itself, if it has no shares), and who holds the device or its other replicas.

    ``taken`` are replicas that this claim has already. A replica that a claim holds counts, even if it is no longer offered.
    """
    here = {one.device_id: one for one in held if one.place.overlaps(offer.place)}
    ids = offer.shares or (offer.device_id,)
    free = [one for one in ids if one not in here and one not in taken]
    # A holder that excludes this claim from one replica excludes it from all.
    hindrance = boards.may_give((free or ids)[0], offer.place, here.values(), shares=shares)
    more = here.keys() - set(ids) if offer.shares else ()
    words = next((one.words for one in (hindrance, *here.values()) if one is not None), "")
    return [] if hindrance is not None else free[: max(len(free) - len(more), 0)], words


def _tolerated(result: Result, offer: Offer) -> bool:
    if offer.ailment in {Ailment.LEAVING, Ailment.BY_NAME}:  # It was allocated before that.
        return True
    key = f"{TAINTS}{offer.ailment.value}" if offer.ailment is not None else ""
    return bool(result.admin) or any(one.covers(key) for one in result.tolerations or ())


def pods(claim: ResourceClaim) -> list[str]:
    """Return the pods for which a claim is reserved."""
    return [one.name for one in claim.status.reserved or () if one.resource == "pods"]


def claimed(
    asked: ClaimName, driver: str, grant: Grant, at: float, pods: Iterable[str] = (), *, by_name: bool = False
) -> Claimed:
    """Return the row of a claim for the state file; ``at`` is in Unix seconds, ``pods`` are those for which it is reserved."""
    return Claimed(
        asked.namespace,
        asked.name,
        driver,
        at,
        [
            ClaimedDevice(
                offer.name,
                offer.resource,
                offer.device_id,
                offer.place.board,
                offer.place.part,
                [result.of],
                share=result.share or "",
                admin=bool(result.admin),
                interval=interval,
            )
            for result, offer, interval in grant.devices
        ],
        list(pods),
        by_name,
    )


def has(row: Claimed, results: Iterable[Result]) -> bool:
    """Return True if the prepared devices of a claim are exactly its allocated devices."""
    had = {(device.name, request, device.share) for device in current(row) for request in device.requests}
    return had == {(one.device, one.of, one.share or "") for one in results}


def current(row: Claimed) -> Iterable[ClaimedDevice]:
    """Return the devices that the claim's next pod gets."""
    return (device for device in row.devices if not device.former)


def kept(row: Claimed, before: Claimed | None) -> Claimed:
    """Return the row of a claim that was allocated again, with its earlier devices until it is unprepared.

    A pod that was deleted by force may still run with the earlier devices: the API server deallocates its claim, and a
    restarted kubelet prepares it again before it has ended the pod (read in 1.37).
    """
    now = {device.device_id for device in row.devices}
    had = before.devices if before is not None else ()
    former = [replace(device, former=True) for device in had if device.device_id not in now]
    return replace(row, devices=[*row.devices, *former])


def prepared(row: Claimed, pool: str, names: Mapping[str, Sequence[str]]) -> tuple[Prepared, ...]:
    """Return the answer to the kubelet for a claim; ``names`` are the CDI names by device."""
    return tuple(
        Prepared(tuple(device.requests), pool, device.name, tuple(names[device.share_name]), device.share)
        for device in {device.share_name: device for device in current(row)}.values()
    )


def by_resource(row: Claimed) -> Iterable[tuple[ClaimedDevice, ...]]:
    """Group the devices of a claim that one container gets of one resource, with one replica per share.

    A variable that names devices must name all of the group, because a container sees only the last value.
    """
    together: dict[tuple[str, tuple[str, ...]], dict[str, ClaimedDevice]] = {}
    for device in current(row):
        together.setdefault((device.resource, tuple(device.requests)), {}).setdefault(device.share_name, device)
    return (tuple(devices.values()) for devices in together.values())


def summary(row: Claimed) -> dict[str, Any]:
    """Return what a claim got, for the log."""
    return {"claim": f"{row.namespace}/{row.name}", "devices": [device.name for device in row.devices]}


def allocated_to(namespace: str, name: str) -> str:
    """Return the words for a claim to which a board is allocated."""
    return f"claim {namespace}/{name}"


def allocations(
    claims: Sequence[ResourceClaim],
    node: str,
    boards_of: Mapping[tuple[str, str], str],
    published: tuple[frozenset[tuple[str, str]], frozenset[tuple[str, str]]],
    offers: Mapping[str, Mapping[str, Offer]],
    rows: Mapping[str, Claimed],
) -> Allocated:
    """Return what claims have of a node, or may get, as the API server reports it.

    Args:
        claims: all claims.
        node: the name of the node and of its pool.
        boards_of: the board of each device, by driver and name.
        published: the devices that ResourceSlices offer to new claims, and all those that they show.
        offers: our offers, by driver and name.
        rows: the prepared claims.
    """
    free, shown = published
    drivers = {driver for driver, _ in boards_of}
    found = {boards_of[one]: "a ResourceSlice still offers it" for one in free if one in boards_of}
    unshown, missing = "", False
    for claim in claims:
        words = allocated_to(claim.metadata.namespace, claim.metadata.name)
        for one in claim.devices(node):
            if one in boards_of:
                found[boards_of[one]] = words
                continue
            missing = missing or one[0] in drivers
            # Another DRA driver offered a device that is not shown, and ended while it was in use. It may be any GPU.
            unshown = unshown or ("" if one in shown else words)
    return Allocated(found, got_by_name(claims, node, offers, rows), unshown, missing)


def got_by_name(
    claims: Iterable[ResourceClaim],
    node: str,
    offers: Mapping[str, Mapping[str, Offer]],
    rows: Mapping[str, Claimed],
) -> frozenset[str]:
    """Return the IDs of the devices that were allocated to pods that ask by resource name; ``offers`` are by driver and name.

    A claim for shares that isn't prepared yet (not in ``rows``) counts as so many of the device's free shares.
    """
    held, found = {one.device_id for _, _, one in held_devices(rows)}, set[str]()
    for claim in claims:
        for one in claim.results if claim.by_name else ():
            offer = offers.get(one.driver, {}).get(one.device)
            if offer is None or one.pool != node or one.admin:
                continue
            if not offer.shares:
                found.add(offer.device_id)
            elif key(one.driver, claim.metadata.uid) not in rows:
                found |= {*[share for share in offer.shares if share not in held | found][: one.shares]}
    return frozenset(found)


def by_board(rows: Mapping[str, Claimed]) -> tuple[Mapping[str, str], frozenset[str]]:
    """Return the holder of each prepared board, and the devices that are prepared for pods that ask by resource name."""
    names: dict[str, str] = {}
    for _, row, one in held_devices(rows):
        names.setdefault(one.board, row.words)
    return names, frozenset(one.device_id for _, row, one in held_devices(rows) if row.by_name)
