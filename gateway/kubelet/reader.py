"""Read the kubelet's records at the right times, and keep the result: who holds what, and how it differs from our lists.

A look (``records.look``) follows each event that the records should show, and repeats while a change is awaited; it takes about a
millisecond. The result is compared with our lists (``drift``), and with the holders from before the kubelet's start, which
the state file has (``earlier``). Each change is logged once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from typing import TYPE_CHECKING, Final, Protocol

import structlog
from msgspec import Struct

from gateway.kubelet import drift, earlier
from gateway.kubelet import records as kubelet_records
from gateway.kubelet.earlier import WRITTEN_AFTER, Absences

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from devices.model import Device
    from gateway.kubelet.drift import Drift, Finding
    from gateway.kubelet.earlier import HandedOut, Rows

AFTER_ALLOCATE: Final = 2.0
"""Seconds after an Allocate until the kubelet has written it to its checkpoint."""
AFTER_DOUBLED: Final = 0.2
"""The same, if an earlier pod may still use the device."""
WHILE_FORGOTTEN: Final = 30.0
"""Seconds between two looks while pods that the kubelet forgot may still run."""
COMPARE_EVERY: Final = 0.02
"""Seconds between two looks for the first checkpoint of a kubelet that just started."""
WHILE_ASKED: Final = 0.5
"""Seconds by which a look is delayed while an Allocate is open. An awaited look is delayed no longer than that."""
AFTER_START: Final = WRITTEN_AFTER + 1.0
"""Seconds after a kubelet's start until it has written its own records for certain."""

_MOST_TOLD: Final = 16
"""Most devices in one log line."""

_log = structlog.get_logger()


class Look(Struct, frozen=True):
    """The result of one look, and when it began (monotonic and Unix seconds)."""

    records: kubelet_records.Records
    at: float
    unix: float


class Deciding(Protocol):
    """What looks need to know about who leads."""

    @property
    def leads(self) -> bool:
        """True if this gateway leads, so that the kubelet has its list."""

    def others_allocate_for(self) -> float:
        """Return for how many seconds List must not be called, because another gateway may be answering an Allocate."""


class HolderRows(Protocol):
    """Who was given which device: the state file's rows."""

    def named(self) -> Sequence[str]:
        """Return the resources with any rows."""

    def handed_out(self, resource: str) -> Mapping[str, HandedOut]:
        """Return what containers were given, by device ID."""

    def earlier(self, resource: str) -> Rows:
        """Return the holders from before the kubelet's start."""

    def set_earlier(self, resource: str, rows: Rows) -> bool:
        """Set all holders from before the kubelet's start. Return True if one is new."""


class RecordsReader:
    """The kubelet's records, as of the last look.

    ``looked`` is called after each look, on the event loop; ``noted`` if ``rows`` changed.
    """

    def __init__(
        self,
        pod_resources: Path,
        checkpoint: Path,
        lead: Deciding,
        rows: HolderRows,
        noted: Callable[[], None],
        looked: Callable[[Look], None],
    ) -> None:
        self.pod_resources, self._checkpoint, self._looked = pod_resources, checkpoint, looked
        self._lead, self._rows, self._noted = lead, rows, noted
        self.last: Look | None = None
        self.known: Look | None = None
        """The last look that found holders."""
        self._drifts: dict[str, Drift] = {}
        self._told: dict[str, tuple[Finding, ...]] = {}
        """The differences that were logged, by resource."""
        self._absences = Absences()
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None
        self._is_awaited = False
        """True if a caller awaits the look in progress, so that it isn't cancelled."""
        self.asked = kubelet_records.OpenAllocates(self._drop)
        """The open Allocates, which delay looks."""
        self._is_quiet = False
        """True if the last look did not call List."""
        self._comparing: asyncio.Task[None] | None = None
        """The task that reads the checkpoint until the last started kubelet has written its own."""
        self._found: tuple[bytes, kubelet_records.FileId] | None = None
        """The checkpoint when the last kubelet's socket appeared; None: no kubelet was there yet."""
        self._was_undecided = False
        """True if the earlier kubelet ended too soon: its checkpoint had not shown yet whether that kubelet lost its records."""
        self._since = 0.0
        """When the last kubelet's socket was created (Unix seconds); 0: unknown."""
        self._noticed_at = 0.0
        """When its start was noticed (monotonic seconds)."""
        self.waits_for_own = False
        """True until the last kubelet's first own checkpoint was compared."""
        self._judging = asyncio.Lock()
        """Held while a checkpoint is compared: first the one that the kubelet found, then its own."""
        self._own: tuple[bytes, kubelet_records.FileId] | None = None
        """The first checkpoint that the last kubelet wrote."""
        self._allocated_at = -AFTER_ALLOCATE
        """When the last Allocate was answered (monotonic seconds)."""

    # When to look.

    def look_within(self, seconds: float) -> None:
        """Look at most ``seconds`` from now."""
        due = asyncio.get_running_loop().time() + seconds
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due, self._on_time)

    async def look(self) -> None:
        """Look now, or wait for the look in progress. It is bounded as ``records.look`` is.

        While an Allocate is open, and until the kubelet has noted its answer, the look is delayed, by at most ``WHILE_ASKED``
        seconds.
        """
        if self._looking is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WHILE_ASKED):
                    await self.asked.over()
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look())
        self._is_awaited = True
        await asyncio.shield(self._looking)

    async def close(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()
        tasks = [task for task in (self._looking, self._comparing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_time(self) -> None:
        self._timer = None
        if self.asked.lately():
            self.look_within(WHILE_ASKED)
        elif self._looking is None:
            self._looking, self._is_awaited = asyncio.ensure_future(self._look()), False

    def _drop(self) -> None:
        """Cancel the look in progress and look later, because an Allocate begins."""
        self._read_own()  # Read it before the kubelet writes the next one, after the answer.
        if self._looking is not None and not self._is_awaited:
            self._looking.cancel()
            self._looking = None
            self.look_within(WHILE_ASKED)

    async def _look(self) -> None:
        try:
            at, unix = time.monotonic(), time.time()
            if self.waits_for_own:
                await self._compare_with_own()
            # List makes the kubelet free what ended pods held. Its first checkpoint should still have that.
            quiet_for = self._lead.others_allocate_for()
            self._is_quiet = self.waits_for_own or quiet_for > 0
            places = self.pod_resources, self._checkpoint
            records = await kubelet_records.look(*places, lists=not self._is_quiet)
            records = records.named_as(None if self.known is None else self.known.records)
            self.last = look = Look(records, at, unix)
            self.known = look if records.held is not None else self.known
            if not self.waits_for_own:
                for name, known in self._drifts.items():
                    self._drifts[name] = known.looked(records, at, ours=self._lead.leads)
                self._compare_with_look(records, at)
            self._looked(self.last)
            self._tell()
            if 0 < quiet_for < math.inf:
                self.look_within(quiet_for)
            if at - self._allocated_at < AFTER_ALLOCATE:  # This look was too early for the last Allocate.
                self.look_within(AFTER_ALLOCATE)
            if any(self._rows.earlier(name) for name in self._rows.named()):
                self.look_within(WHILE_FORGOTTEN)
        finally:
            if self._looking is asyncio.current_task():
                self._looking = None

    # Results.

    def findings(self, resource: str) -> tuple[Finding, ...]:
        """Return how the kubelet's records differ from ours, one finding per kind."""
        differs, rows = self._drift(resource).differs, self._rows.earlier(resource)
        if not rows:
            return differs
        holders = self.known.records.holders(resource) if self.known is not None else {}
        return (*drift.forgotten(resource, rows, self._rows.handed_out(resource), holders), *differs)

    def avoid(self, resource: str) -> tuple[str, ...]:
        """Return the devices to give last, the least bad ones first."""
        return self._drift(resource).avoid(time.monotonic(), self._rows.earlier(resource).keys())

    def forgotten_as(self, device_id: str) -> list[str]:
        """Return the resource names under which an earlier kubelet's pod may still use a device."""
        return [name for name in self._rows.named() if device_id in self._rows.earlier(name)]

    def _drift(self, resource: str) -> Drift:
        return self._drifts.get(resource) or drift.Drift(resource)

    # Events.

    def listed(self, resource: str, devices: Sequence[Device]) -> None:
        """Note a list that is being sent."""
        self._drifts[resource] = self._drift(resource).listed(devices, time.monotonic())

    def allocated(self, resource: str, device_ids: Sequence[str]) -> None:
        """Note an answered Allocate."""
        self._allocated_at = time.monotonic()
        self._tell()
        is_doubtful = not self._rows.earlier(resource).keys().isdisjoint(device_ids)
        self.look_within(AFTER_DOUBLED if is_doubtful else AFTER_ALLOCATE)

    def restarted(self, since: float) -> None:
        """Note a new kubelet, whose socket was created at ``since`` (Unix seconds)."""
        self._noticed_at, self._found = time.monotonic(), kubelet_records.raw(self._checkpoint)
        self._since, self._was_undecided, self._absences = since, self._any_in_question(), Absences()
        self._drifts = {name: one.restarted(self._noticed_at) for name, one in self._drifts.items()}
        self.look_within(AFTER_START)

    def compare(self) -> None:
        """Compare the holders in question with the kubelet's checkpoints, then look."""
        if not self._any_in_question():
            return
        if self._comparing is not None:
            self._comparing.cancel()
        if self._found is not None and self._found[0]:  # Without a checkpoint, the kubelet began with empty records.
            self._own, self.waits_for_own = None, True
            self._comparing = asyncio.ensure_future(self._compare_with_files(*self._found))
        self.look_within(AFTER_START)

    async def _compare_with_files(self, content: bytes, found: kubelet_records.FileId) -> None:
        """Compare the holders before a kubelet's start with the checkpoint that it found, then with the first that it writes."""
        try:
            own = found.written_ns >= self._since * 1e9
            async with self._judging:
                record = await asyncio.to_thread(kubelet_records.decoded, content, found)
                if record is not None:
                    self._compare(record, own=own)
            ends = time.monotonic() + AFTER_START
            # If the found checkpoint can't be decoded, the kubelet couldn't read it either: its records are lost.
            while record is not None and not own and self._any_in_question() and time.monotonic() < ends:
                await asyncio.sleep(COMPARE_EVERY)
                await self._compare_with_own()
                if not self.waits_for_own:
                    break
        finally:
            self.waits_for_own = self._comparing is not asyncio.current_task()
        if self._is_quiet or self._any_in_question():
            self.look_within(0)

    async def _compare_with_own(self) -> None:
        """Compare the holders before the kubelet's start with its own first checkpoint, once it is written."""
        async with self._judging:
            self._read_own()
            if self._own is None:
                return
            first = await asyncio.to_thread(kubelet_records.decoded, *self._own)
            if first is None:
                self._own = None
                return
            self._compare(first, own=True)
            self.waits_for_own = False

    def _any_in_question(self) -> bool:
        return any(earlier.in_question(self._rows.earlier(name)) for name in self._rows.named())

    def _read_own(self) -> None:
        """Read the kubelet's own first checkpoint, once it is written."""
        if not self.waits_for_own or self._own is not None or self._found is None:
            return
        if kubelet_records.file_id(self._checkpoint) != self._found[1]:
            self._own = kubelet_records.raw(self._checkpoint)

    def _compare(self, record: kubelet_records.CheckpointRecords, *, own: bool) -> None:
        """Find out by a checkpoint which holders from before the kubelet's start have ended.

        If the checkpoint names one of these holders, the kubelet kept its records. The same holds for the checkpoint that it
        found, if that is not older than the last one we read and has one of our resources: a kubelet that lost its records has
        a resource only after it registers again. If the kubelet before it may have lost the holders of an even earlier one, only
        those prove it.
        """
        asked = {name: rows for name in self._rows.named() if earlier.in_question(rows := self._rows.earlier(name))}
        written = {name: record.written.get(name, {}) for name in asked}
        older = any(one.older for rows in asked.values() for one in earlier.in_question(rows).values())
        same = any(
            earlier.is_in(rows, self._rows.handed_out(name), written[name], older=older) for name, rows in asked.items()
        )
        if not (same or (not own and self._is_continued_by(record))):
            return
        for name, rows in asked.items():
            left = earlier.forgotten(rows) if own else earlier.with_first_checkpoint(rows, written[name])
            self._rows.set_earlier(name, left)
        self._noted()
        self._tell()

    def _compare_with_look(self, records: kubelet_records.Records, at: float) -> None:
        """Find out by a look which holders from before the kubelet's start have ended, and which the kubelet forgot."""
        rows = {name: known for name in self._rows.named() if (known := self._rows.earlier(name))}
        asked = frozenset[str]().union(*(earlier.pods(known) for known in rows.values()))
        self._absences = self._absences.looked(asked, records.pods, at)
        settled = at - self._noticed_at >= WRITTEN_AFTER
        for name, known in rows.items():
            given = self._rows.handed_out(name)
            left = earlier.looked(name, known, given, records, self._absences, at, settled=settled)
            if self._rows.set_earlier(name, left):
                self._noted()

    def _is_continued_by(self, record: kubelet_records.CheckpointRecords) -> bool:
        known = self.known.records.file if self.known is not None else None
        if self._was_undecided or (known is not None and known.written_ns > record.file.written_ns):
            return False
        return record.registered is None or not record.registered.keys().isdisjoint(self._rows.named())

    def forget(self, device_id: str) -> None:
        """Note that an operator cleared a device: only holders that the kubelet knows use it."""
        for name in self.forgotten_as(device_id):
            rows = self._rows.earlier(name)
            self._rows.set_earlier(name, {one: holders for one, holders in rows.items() if one != device_id})
        self._tell()

    def _tell(self) -> None:
        """Log the differences that are new, and those that are over."""
        for resource in dict.fromkeys((*self._drifts, *self._rows.named(), *self._told)):
            before, findings = self._told.get(resource, ()), self.findings(resource)
            if findings == before:
                continue
            self._told[resource] = findings
            for finding in findings:
                if finding not in before:
                    _log.warning("mismatch", resource=resource, kind=finding.kind.value, details=finding.words)
            differing = {device_id for finding in findings for device_id in finding.device_ids}
            for finding in before:
                # A device that now differs in another way is still a mismatch.
                if over := [device_id for device_id in finding.device_ids if device_id not in differing]:
                    _log.info("mismatch is over", resource=resource, kind=finding.kind.value, devices=over[:_MOST_TOLD])
