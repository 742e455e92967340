"""The ledger: what this node has been promised, on disk, so that the promise outlives the gateway.

One JSON file in ``--state-dir`` (0700, root only). By resource name it holds every device ID that was ever announced and
how it was announced last, which of them are lost, the illnesses that stick, what Allocate handed out, and whom the kubelet
forgot; besides them the operator's cordons, what was prepared for ResourceClaims, to which API each board belongs where both are
served, the dialect that the kubelet accepted last, and which kubelet was looked at last. Only the gateway that leads writes it, as a whole
(write, fsync, rename, fsync of the folder); one that stands by reads it again when it changes. A crash at any moment leaves the old file or
the new one. Fields that this release doesn't know are kept. One that is older than what was written last in this boot is known by a number
(``witness``).
A file that can't be read in full is put aside, never deleted; what is sound in it is kept, cordons even from a newer
format; and nothing about it stops the gateway: the kubelet's devices come first.
"""

from __future__ import annotations

import contextlib
import errno
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from devices import files
from devices.life.merging import Sticky
from devices.model import Device
from gateway.kubelet.drift import Earlier
from gateway.memory import file, mend
from gateway.memory.claimed import Claimed
from gateway.memory.file import LedgerError, ReadFile
from gateway.memory.rows import (
    FORMAT,
    MAX_TEXT,
    TABLES,
    Content,
    Cordon,
    Forgotten,
    HandedOut,
    device_of,
    device_row,
    illness_of,
    illness_row,
    row_of,
)
from gateway.memory.tables import Tables, beside_lists, laid_over
from gateway.memory.witness import Witness, generation_of
from gateway.sides.side import Side

Guard: TypeAlias = Callable[[], contextlib.AbstractContextManager[Callable[[], None]]]
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class LedgerSnapshot(msgspec.Struct, frozen=True):
    """The ledger at one moment, to be written elsewhere than on the event loop."""

    data: bytes
    revision: int
    generation: int
    claims: Content


def unguarded() -> contextlib.AbstractContextManager[Callable[[], None]]:
    """Guard a write of which it is known that nobody else writes."""
    return contextlib.nullcontext(lambda: None)


def boot_id() -> str:
    """Return what the kernel calls this boot, so that a later one can be told from it; empty where it doesn't say."""
    try:
        return _BOOT_ID.read_text().strip()[:MAX_TEXT]
    except (OSError, ValueError):
        return ""


class Ledger:
    """The ledger in memory, over one file. Belongs to one thread, but for ``save``, which may run in any."""

    def __init__(self, state_dir: Path, socket_dir: Path | None = None) -> None:
        self.path, self._witness = state_dir / "ledger.json", Witness(socket_dir, boot_id())
        self.aside = ""
        """The file that was put aside last, by name."""
        self.exposure = ""
        """What makes the state directory less than private and could not be helped; empty where nothing does."""
        self._tables = Tables()
        self._base: file.Identity | None = None
        self._saved = 0

    # Reading and writing.

    def load(self) -> None:
        """Read the file, at the start and while another gateway leads: what that one wrote counts.

        A missing file changes nothing, and one that nobody else wrote isn't read again. Blocks: about 20 ms for 10 000 devices.

        Raises:
            LedgerError: it is unreadable, damaged or of a newer format; what is sound of it is in the ledger.
            OSError: descriptors or memory are exhausted: it can't be read now. Don't write before it was read.
        """
        if isinstance(found := self.look(), OSError):
            raise found
        self.take(found)

    def look(self) -> ReadFile | OSError | None:
        """Read the file: the part of ``load`` that blocks, which may run in any thread. None: there is nothing new."""
        self.exposure = file.close_to_others(self.path.parent)
        files.sweep(self.path.parent)
        try:
            return None if self.current else self._witness.held_against(partial(file.read, self.path))
        except OSError as error:
            return error

    @property
    def current(self) -> bool:
        """Whether nobody else has written the file since it was read or written here. Asks for its name alone, which no disk answers."""
        with contextlib.suppress(OSError):
            return self._base is not None and self._base == file.identity_of(self.path)
        return False

    def take(self, found: ReadFile | None) -> None:
        """Take what ``look`` found: the other part of ``load``."""
        if found is None:
            return
        content = found.content
        self._tables.replace(laid_over(content, self._tables.content) if found.complaint else content)
        self._base, self._saved = None if found.complaint else found.identity, self._tables.revision
        if found.complaint:
            self._tables.revision += 1
            raise LedgerError(
                f"{self.path} is no state file of format {FORMAT}: {found.complaint}; {self._put_aside_in_words()}"
            )

    def snapshot(self) -> LedgerSnapshot:
        """Return what ``save`` needs. The only part of a write that must run on the event loop."""
        tables = self._tables
        if generation := generation_of(tables.content, tables.touched):
            tables.content["generation"] = generation
        tables.touched.clear()
        claims = dict(tables.content.get("claims", {}))
        return LedgerSnapshot(file.encode(tables.spelled()), tables.revision, generation, claims)

    def save(self, snapshot: LedgerSnapshot, guard: Guard = unguarded) -> file.Identity:
        """Replace the file, durably. Blocks: about 0.4 ms on a good disk.

        Args:
            snapshot: what it is to have.
            guard: is held meanwhile; what it gives is called right before the old file goes. Both raise OSError if another gateway leads.

        Raises:
            LedgerError: the disk is full, the folder read-only or gone, or another gateway leads: the file is as it was.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_size(snapshot.data)
            with guard() as check:
                written = file.identity(files.replace(self.path, snapshot.data, check=check))
                self._witness.write(snapshot.generation, snapshot.claims)
        except OSError as error:
            raise LedgerError(
                f"could not write {self.path}: {error.strerror}. Devices are served all the same, but a device that "
                "vanishes while the gateway is down will not be remembered: make the state directory writable"
            ) from error
        return written

    def settle(self, snapshot: LedgerSnapshot, written: file.Identity) -> None:
        """Take note of a ``save`` that succeeded."""
        self._base, self._saved = written, snapshot.revision

    @property
    def revision(self) -> int:
        """A number that grows with each change."""
        return self._tables.revision

    @property
    def written(self) -> int:
        """The ``revision`` that is known to be on disk."""
        return self._saved

    @property
    def pending(self) -> int:
        """How many changes are not known to be on disk."""
        return self._tables.revision - self._saved

    # What is remembered.

    def announced(self, resource: str) -> Mapping[str, Device]:
        """Return the devices ever announced for ``resource``, by ID, as they were announced last."""
        return self._tables.read(resource, "announced", device_of)

    def beside_lists(self) -> bytes:
        """Return all that the merge of a list depends on but the announced devices: where it is the same, nothing else was noted."""
        return beside_lists(self._tables.content)

    def resources(self) -> tuple[str, ...]:
        """Return the resource names with announced devices."""
        return tuple(name for name in self._tables.content.get("resources", {}) if self._tables.rows(name, "announced"))

    def named(self) -> tuple[str, ...]:
        """Return the resource names of which anything is known, also if no gateway offers them."""
        return tuple(self._tables.content.get("resources", {}))

    def announce(self, resource: str, devices: tuple[Device, ...]) -> bool:
        """Note a list that is about to be sent; True where it names an ID or a health that is news.

        Only who serves the resource may call this: a list that isn't sent announces nothing.
        """
        return self._tables.note(
            resource, "announced", {device.id: device for device in devices}, device_of, device_row
        )

    def withdraw(self, resource: str, device_ids: Iterable[str]) -> bool:
        """Forget devices that were withdrawn, forgotten by an operator or aged out; True where any was known.

        Their cordons stay: they are the operator's word about the device, under whatever resource it comes back. So does whom
        the kubelet forgot: that a device isn't offered for a while ends no container.
        """
        device_ids = tuple(device_ids)
        dropped = [self._tables.drop(resource, table, device_ids) for table in TABLES if table != "forgotten"]
        return any(dropped)

    @property
    def accepted(self) -> str:
        """The dialect that a kubelet accepted last; empty where none is known."""
        return str(self._tables.content.get("accepted", ""))

    def accept(self, dialect: str) -> bool:
        """Note the dialect that the kubelet accepted. Return True if it is new."""
        return self._tables.put_value("accepted", dialect)

    @property
    def kubelet(self) -> str:
        """The kubelet whose records ``handed_out`` was compared with last; empty where none is known."""
        return str(self._tables.content.get("kubelet", ""))

    def compared_with(self, kubelet: str) -> bool:
        """Note the kubelet whose records ``handed_out`` was compared with. Return True if it is new."""
        return self._tables.put_value("kubelet", kubelet)

    @property
    def cordons(self) -> Mapping[str, Cordon]:
        """The cordons by device ID. They hold for every resource that the device is announced under."""
        return self._tables.whole(dict[str, Cordon], "cordons")

    def cordon(self, device_id: str, cordon: Cordon) -> None:
        """Note an operator's cordon, in place of an earlier one."""
        self._tables.change({("cordons", device_id): row_of(cordon)})

    def uncordon(self, device_id: str) -> bool:
        """Lift a cordon; True where there was one."""
        return device_id in self.cordons and self._tables.change({("cordons", device_id): None})

    @property
    def claims(self) -> Mapping[str, Claimed]:
        """What is prepared for ResourceClaims, by their UID."""
        return self._tables.whole(dict[str, Claimed], "claims")

    def set_claim(self, uid: str, row: Claimed | None) -> None:
        """Note what is prepared for a claim; None: nothing any more. Durable before the kubelet is told."""
        self._tables.change({("claims", uid): None if row is None else msgspec.to_builtins(row)})

    @property
    def time_slices(self) -> Mapping[str, str]:
        """The time-slice intervals that were set, or are about to be, and not yet put back, by the GPU's UUID."""
        return self._tables.whole(dict[str, str], "time_slices")

    def set_time_slice(self, uuid: str, interval: str | None) -> None:
        """Note that a GPU gets a time-slice interval (None: the default again). Durable before it is set."""
        self._tables.change({("time_slices", uuid): interval})

    @property
    def sides(self) -> Mapping[str, Side]:
        """To which API boards belong, by the board's name; the row of '' is that of all that have none."""
        return self._tables.whole(dict[str, Side], "sides")

    def set_side(self, board: str, side: Side | None) -> None:
        """Note to which API a board belongs (None: as those without a row). Durable before it is in force."""
        self._tables.change({("sides", board): None if side is None else side.value})

    def sticky(self, resource: str) -> Mapping[str, Sticky]:
        """Return the illnesses that outlive a restart, by device ID."""
        return self._tables.read(resource, "sticky", illness_of)

    def set_sticky(
        self, resource: str, illnesses: Mapping[str, Sticky], since: Mapping[str, Sticky] | None = None
    ) -> bool:
        """Note all of a resource's lasting illnesses, in place of those before; True where that is news.

        ``since``: what ``sticky`` returned when they were thought of, if that was a while ago. Only what is other than there
        is noted then: what came or went since is another's word.
        """
        known = self.sticky(resource)
        since = known if since is None else since
        dropped = self._tables.drop(resource, "sticky", since.keys() - illnesses.keys())
        if since is not known:
            illnesses = {at: one for at, one in illnesses.items() if since.get(at) is not one}
        return self._tables.note(resource, "sticky", illnesses, illness_of, illness_row) or dropped

    def lost_since(self, resource: str) -> Mapping[str, float]:
        """Return since when devices have been lost, by ID, in unix seconds."""
        return {device_id: float(row["since"]) for device_id, row in self._tables.rows(resource, "lost").items()}

    def set_lost_since(self, resource: str, since: Mapping[str, float]) -> bool:
        """Note all of a resource's lost devices, in place of those before; True where that is news."""
        return self._tables.set(resource, "lost", {device_id: {"since": at} for device_id, at in since.items()})

    def handed_out(self, resource: str, among: Iterable[str] | None = None) -> Mapping[str, HandedOut]:
        """Return what Allocate gave away, by device ID. Not proof: records may be lost in a crash, and none says "returned"."""
        if among is None:
            return self._tables.whole(dict[str, HandedOut], "resources", resource, "handed_out")
        return msgspec.convert(self._tables.rows(resource, "handed_out", among), dict[str, HandedOut])

    def hand_out(self, resource: str, device_ids: Iterable[str], dialect: str, at: float) -> None:
        """Note an Allocate that was answered, at ``at`` in unix seconds."""
        self._tables.put(resource, "handed_out", dict.fromkeys(device_ids, row_of(HandedOut(dialect, at))))

    def rebuild_handed_out(self, resource: str, holders: Mapping[str, str], at: float, now: float = math.inf) -> bool:
        """Make the records equal to what the kubelet's records said at ``at`` (unix seconds); True where that is news.

        What was handed out since then stays, and so does what is known of a device that is still held. A holder is empty where
        a device may be held, and the records don't say by whom. What was handed out after ``now`` was so before the clock was
        set back: it counts from now, or it would be held until the clock is there again.
        """
        known = self.handed_out(resource)
        returned = {device_id for device_id, record in known.items() if record.at < at} - holders.keys()
        dropped = self._tables.drop(resource, "handed_out", returned)
        unknown = HandedOut("", at)
        news = {
            device_id: row_of(HandedOut(record.dialect, record.at, holder))
            for device_id, holder in sorted(holders.items())
            if (record := known.get(device_id, unknown)) is unknown or (record.at < at and record.holder != holder)
        }
        news |= {one: row_of(replace(record, at=now)) for one, record in known.items() if record.at > now}
        return self._tables.put(resource, "handed_out", news) or dropped

    def forgotten(self, resource: str) -> Mapping[str, tuple[Earlier, ...]]:
        """Return whom the kubelet forgot to hold devices in this boot, by device ID (``drift.Drift``)."""
        boot = boot_id()
        rows = msgspec.convert(self._tables.rows(resource, "forgotten"), dict[str, Forgotten])
        return {device_id: tuple(row.pods) for device_id, row in rows.items() if row.boot_id == boot}

    def set_forgotten(self, resource: str, forgotten: Mapping[str, Sequence[Earlier]]) -> bool:
        """Note all of a resource's, in place of those before; True where that is news."""
        boot = boot_id()
        rows = {
            device_id: {"boot_id": boot, "pods": [row_of(one) for one in earlier]}
            for device_id, earlier in forgotten.items()
        }
        return self._tables.set(resource, "forgotten", rows)

    def _put_aside_in_words(self) -> str:
        try:
            self.aside = file.put_aside(self.path)
        except FileNotFoundError:
            return "what else is known of it is used"
        except OSError as error:
            return f"it could not be put aside ({error.strerror}); what is sound of it is used"
        return f"it was put aside as {self.aside}, and what is sound of it is used"


def _require_size(data: bytes) -> None:
    if len(data) > mend.MAX_BYTES:
        raise OSError(errno.EFBIG, f"the state file would have {len(data)} bytes. Allowed: {mend.MAX_BYTES}")
