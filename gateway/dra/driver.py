"""The claims of one driver: prepare and unprepare them, with their CDI specifications.

The state file is written before the kubelet gets an answer. The module ``claims`` decides which devices a claim gets.
No other task runs between that decision and its entry in the ledger, so two claims never get the same device.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import structlog
from msgspec.structs import replace

from devices.claims import Answer, ClaimName, DeviceHealth, Prepared, Refused
from devices.model import ContainerAnswer, ContainerRequest, Field, RefusedError, Sendable
from gateway.dra import cdi, claims
from gateway.dra.claims import Grant, ResourceClaim
from gateway.kubernetes.client import KubernetesError
from gateway.tasks import first_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from devices.source import DeviceSource
    from gateway.dra.offer import Offer
    from gateway.dra.rivals import RivalDetector
    from gateway.dra.timeslices import TimeSlices
    from gateway.memory.claimed import Claimed, ClaimedDevice
    from gateway.memory.ledger import Ledger
    from gateway.memory.scribe import Scribe

CLAIM_WAIT_S: Final = 38.0
"""Seconds for which a claim may wait. The kubelet's call ends after 45."""
RETRY_S: Final = 0.5
"""Seconds between two requests to an API server that doesn't respond, and between two checks of a waiting claim."""
REREAD_S: Final = 1.0
"""Timeout in seconds for reading a prepared claim, which may have been allocated again. After that, the kubelet gets the
prepared devices."""
LISTS_UPDATE_S: Final = 0.03
"""Seconds from the preparation of a claim to the update of the device lists. An update at once would delay the response to the
kubelet by a third (measured)."""
ENDED_CLAIMS_PERIOD_S: Final = 300.0
"""Seconds between two searches for prepared claims that the API server no longer has."""
_KUBELET_RETRY_S: Final = 90.0 + CLAIM_WAIT_S
"""Seconds within which a kubelet retries a refused claim: it waits 60 to 90 s (measured on 1.37)."""
_MAX_REFUSED: Final = 16
_NOBODY_LEADS: Final = Refused(
    "no gateway leads on this node now. `gateway status` and the gateways' logs show why. The kubelet asks again"
)
_ALL_FIELDS: Final = Sendable(frozenset(Field))
"""A CDI specification can carry every field of an Allocate response."""

_log = structlog.get_logger()


class NodeOffers(Protocol):
    """What the node offers by DRA now (``Drivers``)."""

    def offers(self, driver: str) -> Mapping[str, Offer]:
        """Return a driver's devices, by name."""
        ...

    def withheld_reasons(self, driver: str) -> Mapping[str, str]:
        """Return why other devices of the driver aren't offered, by name."""
        ...

    @property
    def next_change(self) -> asyncio.Event:
        """An event that the next change sets. Get it before you read the offers, then wait for it."""
        ...

    def note_waiting(self, driver: str, names: Iterable[str]) -> None:
        """Note that a claim waits for these devices."""
        ...

    def note_claims_changed(self) -> None:
        """Note that a claim got or returned devices."""
        ...

    async def give_back(self, claim: ClaimName, had: Collection[str]) -> None:
        """Return devices (by ID) to the device plugin API, if a pod got them by resource name.

        Called when the kubelet unprepares the claim; only later does the kubelet report that the pod has ended.
        """
        ...

    def note_registration(self) -> None:
        """Note that a kubelet accepted or refused a driver."""
        ...

    @property
    def leads(self) -> asyncio.Event:
        """Set while this gateway is the leader and decides about claims."""
        ...


class DriverClaims:
    """The claims of one driver.

    Args:
        name: the driver's name.
        node: the name of the node and of its pool.
        offers: what the node offers.
        source: returns how a container gets a device.
        ledger: keeps the prepared claims.
        scribe: writes the ledger.
        read: reads a claim from the API server.
        time_slices: sets time-slice intervals.
        rival: detects another process with the driver's name.
    """

    def __init__(
        self,
        name: str,
        node: str,
        offers: NodeOffers,
        source: DeviceSource,
        ledger: Ledger,
        scribe: Scribe,
        read: Callable[[ClaimName], Awaitable[ResourceClaim]],
        time_slices: TimeSlices,
        rival: RivalDetector,
    ) -> None:
        self.name, self._node, self._offers, self._source = name, node, offers, source
        self._ledger, self._scribe, self._read, self._folder = ledger, scribe, read, cdi.FOLDER
        self._time_slices, self._rival = time_slices, rival
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._unprepared = asyncio.Event()
        self._refused: dict[str, tuple[float, str]] = {}
        """When (monotonic seconds) and why each claim was refused, by UID."""
        self.is_registered = False
        """True if a kubelet accepted the registration."""
        self.registration_error = ""
        """Why a kubelet last refused the registration."""
        self.changed_at: float | None = None
        """When a kubelet last accepted or dropped the registration (monotonic seconds)."""

    @property
    def prepared_count(self) -> int:
        """How many claims have devices of this driver."""
        return len(self.prepared_claims())

    # The kubelet's calls.

    async def prepare(self, claim: ClaimName) -> Answer:
        """Prepare a claim's devices. If they are prepared and the claim wasn't allocated again, return the same answer again."""
        deadline = asyncio.get_running_loop().time() + CLAIM_WAIT_S
        async with self._lock_of(claim.uid):
            if not self.leads.is_set():
                return _NOBODY_LEADS
            key = claims.key(self.name, claim.uid)
            before = self._ledger.claims.get(key)
            if another := claims.another(claim, before):
                return another
            row = await self._grant(claim, before, deadline)
            if isinstance(row, Refused):
                return row
            answers: Mapping[str, ContainerAnswer] = {}
            try:
                answers = await self.answers(row)
                refused = await self._time_slices.note(row)
            except RefusedError as error:
                refused = str(error)
            if refused:
                if row is not before:
                    self._forget(key, before)
                return Refused(refused)
            written, durable = await asyncio.gather(self._write_cdi(claim.uid, answers), self._durable(deadline))
            if written:
                return Refused(written)
            if not durable:
                return Refused(
                    f"cannot save the claim in {self._ledger.path.parent}, so after a crash another pod might get its devices. "
                    "The gateway's log shows the reason"
                )
            if unset := await self._time_slices.set(row):
                if row is not before:
                    self._forget(key, before)
                await self._time_slices.put_back()
                return Refused(unset)
            return self._response(claim.uid, row, answers)

    async def unprepare(self, claim: ClaimName) -> Refused | None:
        """Unprepare a claim. Return None once that is on disk, even if the claim wasn't prepared."""
        async with self._lock_of(claim.uid):
            if not self.leads.is_set():
                return _NOBODY_LEADS
            key = claims.key(self.name, claim.uid)
            if another := claims.another(claim, row := self._ledger.claims.get(key)):
                return another
            if row is None and (others := await self._prepared_by_rival(claim)):
                return Refused(others)
            if row is not None:
                self._forget(key)
            await self._time_slices.put_back()
            if not await self._scribe.durable():
                return Refused(
                    f"cannot save in {self._ledger.path.parent} that its devices are free. The gateway's log shows the reason"
                )
            if row is not None and row.by_name:
                await self._offers.give_back(claim, [one.device_id for one in row.devices])
            try:
                await asyncio.to_thread(cdi.remove, self.name, claim.uid, self._folder)
            except OSError as error:
                _log.warning("a claim's CDI specification can't be removed", claim=str(claim), reason=str(error))
            return None

    def health(self) -> Sequence[DeviceHealth]:
        """Return the health of all devices of the driver."""
        now = int(time.time())
        return [
            DeviceHealth(self._node, name, one.is_well, now, one.reason)
            for name, one in self._offers.offers(self.name).items()
        ]

    @property
    def next_change(self) -> asyncio.Event:
        """An event that the next change of devices sets. Get it before you read the devices, then wait for it."""
        return self._offers.next_change

    def note_result(self, claim: ClaimName, refused: str) -> None:
        """Record the result of a prepare or unprepare call: the error, or ''."""
        self._refused.pop(claim.uid, None)
        if refused:
            self._refused[claim.uid] = time.monotonic(), f"claim {claim}: {refused}"
            for uid in list(self._refused)[:-_MAX_REFUSED]:
                del self._refused[uid]

    @property
    def refused(self) -> tuple[str, ...]:
        """The claims that were refused and that the kubelet still asks for, with the reasons."""
        since = time.monotonic() - _KUBELET_RETRY_S
        return tuple(words for at, words in self._refused.values() if at >= since)

    def note_registration(self, reason: str) -> None:
        """Note the kubelet's answer to the registration; '' if it accepted."""
        self.is_registered, self.registration_error, self.changed_at = not reason, reason, time.monotonic()
        if reason:
            _log.error("the kubelet refused the DRA driver", driver=self.name, reason=reason)
        else:
            _log.info("DRA driver registered", driver=self.name)
        self._offers.note_registration()

    def note_deregistration(self) -> None:
        """Note that the driver is no longer registered."""
        self.is_registered, self.changed_at = False, time.monotonic()
        _log.info("DRA driver no longer registered", driver=self.name)

    # The prepared claims.

    def prepared_claims(self) -> dict[str, Claimed]:
        """Return this driver's prepared claims, by UID."""
        return {claims.uid_of(key): row for key, row in self._ledger.claims.items() if row.driver == self.name}

    async def restore(self) -> None:
        """Write the CDI specifications of all prepared claims, because a boot deletes them. Remove all others, and put back time slices."""
        await self._time_slices.put_back()
        rows = self.prepared_claims()
        swept = await asyncio.to_thread(cdi.sweep, (self.name,), frozenset(rows), self._folder)
        if swept:
            _log.info("removed CDI specifications of ended claims", files=swept[:8], count=len(swept))
        for uid in rows:
            async with self._lock_of(uid):
                if (row := self.prepared_claims().get(uid)) is None:
                    continue
                try:
                    trouble = await self._write_cdi(uid, await self.answers(row))
                except RefusedError as error:
                    trouble = str(error)
            if trouble:
                _log.error("a prepared claim has no CDI specification now", **claims.summary(row), reason=trouble)

    def drop(self, uids: Collection[str]) -> None:
        """Forget claims that the API server no longer has."""
        for uid in uids:
            self._forget(claims.key(self.name, uid))

    async def answers(self, row: Claimed) -> dict[str, ContainerAnswer]:
        """Return how a container gets each device of a claim, by ``share_name``.

        Raises:
            RefusedError: it can't get them.
        """
        found: dict[str, ContainerAnswer] = {}
        for group in claims.by_resource(row):
            for device in group:
                found[device.share_name] = await self._answer((device,))
            if len(group) > 1 and any(found[device.share_name].envs for device in group):
                envs = (await self._answer(group)).envs
                found |= {device.share_name: replace(found[device.share_name], envs=envs) for device in group}
        return found

    @property
    def leads(self) -> asyncio.Event:
        """Set while this gateway is the leader and decides about claims."""
        return self._offers.leads

    # Details.

    async def _durable(self, deadline: float) -> bool:
        """Wait until everything is on disk; return False if it isn't by the deadline."""
        while True:
            durable = await self._scribe.durable()
            if durable or asyncio.get_running_loop().time() >= deadline:
                return durable
            await asyncio.sleep(RETRY_S)

    async def _grant(self, claim: ClaimName, before: Claimed | None, deadline: float) -> Claimed | Refused:
        """Give a claim its allocated devices, waiting until they are free. ``before``: its devices that are already prepared."""
        try:
            async with asyncio.timeout(None if before is None else REREAD_S):
                found = await self._read_with_retries(claim, deadline if before is None else 0.0)
        except TimeoutError:
            found = Refused(f"the API server did not answer for claim {claim} within {REREAD_S:g} s")
        if isinstance(found, Refused):
            return before or found
        results = claims.allocated(found, claim, self.name, self._node)
        if isinstance(results, Refused):
            return results
        if before is not None and claims.has(before, results):
            return before
        if theirs := self._rival.other_owner_of(found):
            return Refused(f"{theirs}. Let that process prepare it, or delete the pod")
        configs = found.configs(self.name)
        while True:
            changed = self._offers.next_change
            self._unprepared.clear()
            known = self._offers.offers(self.name), self._offers.withheld_reasons(self.name), self._ledger.claims
            decision = claims.granted(claim, results, configs, *known)
            if isinstance(decision, Refused):
                return decision
            if isinstance(decision, Grant):
                reserved = claims.pods(found)
                row = claims.claimed(claim, self.name, decision, time.time(), reserved, by_name=found.by_name)
                self._ledger.set_claim(claims.key(self.name, claim.uid), row := claims.kept(row, before))
                asyncio.get_running_loop().call_later(LISTS_UPDATE_S, self._offers.note_claims_changed)
                return row
            if asyncio.get_running_loop().time() >= deadline:
                return Refused(f"{decision.reason}; waited {CLAIM_WAIT_S:g} s. The kubelet asks again in 60 to 90 s")
            self._offers.note_waiting(self.name, (one.device for one in results))
            left = max(deadline - asyncio.get_running_loop().time(), 0.0)
            await first_of(changed, self._unprepared, seconds=min(left, RETRY_S))

    async def _prepared_by_rival(self, claim: ClaimName) -> str:
        """Return which other process on the node may have prepared this claim, for display; '' if no such process runs."""
        if not (socket := await self._rival.find_socket()):
            return ""
        try:
            async with asyncio.timeout(REREAD_S):
                found = await self._read(claim)
        except (KubernetesError, TimeoutError) as error:
            if isinstance(error, KubernetesError) and error.is_missing:
                return ""
            return f"cannot read claim {claim}, which the process that listens on {socket} may have prepared: {error}"
        theirs = self._rival.other_owner_of(found) if found.metadata.uid == claim.uid else ""
        return theirs and f"{theirs}. That process must unprepare it: it listens on {socket}"

    async def _read_with_retries(self, claim: ClaimName, deadline: float) -> ResourceClaim | Refused:
        """Read a claim from the API server; try again while the server doesn't answer."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                return await self._read(claim)
            except KubernetesError as error:
                if error.is_missing:
                    return Refused(f"the API server has no claim {claim}. Delete the pod")
                if error.status in {401, 403} or loop.time() + RETRY_S >= deadline:
                    return Refused(f"cannot read claim {claim}: {error}")
                await asyncio.sleep(RETRY_S)

    async def _answer(self, devices: Sequence[ClaimedDevice]) -> ContainerAnswer:
        ids = tuple(device.device_id for device in devices)
        return await self._source.answer(devices[0].resource, ContainerRequest(ids), _ALL_FIELDS)

    async def _write_cdi(self, uid: str, answers: Mapping[str, ContainerAnswer]) -> str:
        """Write a claim's CDI specification; return why that failed, '' on success."""
        wanted = cdi.specification(self.name, uid, answers)
        if wanted is None:
            return ""
        try:
            await asyncio.to_thread(cdi.write, self.name, uid, wanted, self._folder)
        except OSError as error:
            return f"cannot write the claim's CDI specification into {self._folder}: {error.strerror}. Make it writable"
        return ""

    def _response(self, uid: str, row: Claimed, answers: Mapping[str, ContainerAnswer]) -> tuple[Prepared, ...]:
        names = {device: cdi.names(self.name, uid, device, answer) for device, answer in answers.items()}
        return claims.prepared(row, self._node, names)

    def _forget(self, key: str, before: Claimed | None = None) -> None:
        self._ledger.set_claim(key, before)
        self._scribe.soon()
        self._unprepared.set()
        self._offers.note_claims_changed()

    def _lock_of(self, uid: str) -> asyncio.Lock:
        """Return the claim's lock: its calls run one at a time."""
        return self._locks.setdefault(uid, asyncio.Lock())


async def forget_ended_claims(
    drivers: Mapping[str, DriverClaims],
    read: Callable[[ClaimName], Awaitable[ResourceClaim]],
    is_away: Callable[[float], bool],
    slices: TimeSlices,
) -> None:
    """Forget prepared claims that two checks in a row didn't find in the API server, and reset their time slices.

    Forget none while the kubelet ``is_away`` or has just started: it may not have ended their pods yet.
    """
    missing: set[tuple[str, str]] = set()
    while True:
        await asyncio.sleep(ENDED_CLAIMS_PERIOD_S)
        if is_away(ENDED_CLAIMS_PERIOD_S):
            missing = set()
            continue
        before, missing = missing, set()
        for driver, of in list(drivers.items()):
            for uid, row in of.prepared_claims().items():
                if await _is_gone(read, ClaimName(row.namespace, row.name, uid)):
                    missing.add((driver, uid))
            gone = [uid for uid in of.prepared_claims() if (driver, uid) in missing & before]
            if gone:
                _log.warning("forgetting claims that were deleted and not unprepared", driver=driver, uids=gone)
                of.drop(gone)
                await of.restore()
        await slices.put_back()


async def _is_gone(read: Callable[[ClaimName], Awaitable[ResourceClaim]], claim: ClaimName) -> bool:
    try:
        return (await read(claim)).metadata.uid != claim.uid
    except KubernetesError as error:
        return error.is_missing
