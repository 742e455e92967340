"""The ledger: the gateway's durable record of devices, holders, claims and cordons on this node.

It is one JSON file in ``--state-dir`` (0700, root only). For each resource name it has these tables by device ID:

- ``announced``: each device that was ever announced, with its last state
- ``lost``: the devices that are not found any more
- ``sticky``: the troubles that a restart of the gateway does not end
- ``handed_out``: what Allocate gave
- ``earlier``: the holders from before the kubelet's start

It also has the cordons, the prepared ResourceClaims, the side of each board if both APIs are served, the dialect that the
kubelet accepted last, and the kubelet that got the devices of ``handed_out``.

Only the leader writes it, as a whole (write, fsync, rename, fsync of the folder). A crash leaves the old file or the new one. A
standby reads it again when it changes. Fields of a later release are kept. A generation number shows if a file is older than
the last one written in this boot (``witness``). A file that can't be read in full is put aside, never deleted. Its valid part
is used; cordons are used even from a newer format. No damage stops the gateway.
"""

from __future__ import annotations

import contextlib
import errno
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from devices import files
from devices.life.merging import Sticky
from devices.model import Device
from gateway.kubelet.earlier import HandedOut, Rows
from gateway.memory import file, salvage
from gateway.memory.claimed import Claimed
from gateway.memory.file import LedgerError, ReadFile
from gateway.memory.rows import (
    FORMAT,
    MAX_TEXT,
    TABLES,
    Content,
    Cordon,
    EarlierHolders,
    device_of,
    device_row,
    illness_of,
    illness_row,
    row_of,
)
from gateway.memory.tables import Tables, list_inputs, merged
from gateway.memory.witness import Witness, generation_of
from gateway.sides.side import Side

Guard: TypeAlias = Callable[[], contextlib.AbstractContextManager[Callable[[], None]]]
_BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")


class LedgerSnapshot(msgspec.Struct, frozen=True):
    """A copy of the ledger, which a thread can write."""

    data: bytes
    revision: int
    generation: int
    claims: Content


def unguarded() -> contextlib.AbstractContextManager[Callable[[], None]]:
    """Return a guard that does nothing, for a file that no other process writes."""
    return contextlib.nullcontext(lambda: None)


class Ledger:
    """The ledger in memory, backed by one file. Use it from one thread only; ``look`` and ``save`` may run in any."""

    def __init__(self, state_dir: Path, socket_dir: Path | None = None) -> None:
        self.boot_id = _boot_id()
        self.path, self._witness = state_dir / "ledger.json", Witness(socket_dir, self.boot_id)
        self.aside = ""
        """The name of the last file that was put aside."""
        self.exposure = ""
        """Why the state directory is not private; empty if it is."""
        self.served_in_boot = ""
        """The ID of the boot in which a gateway served last before this process; empty if unknown."""
        self._tables = Tables()
        self._base: file.Identity | None = None
        self._saved = 0

    # Reading and writing.

    def load(self) -> None:
        """Replace the ledger in memory by the file, at the start and while another gateway leads.

        A missing file changes nothing. The file is read again only if another process wrote it. Blocks: about 20 ms for 10,000 devices.

        Raises:
            LedgerError: it is unreadable, damaged or of a newer format; its valid part is in the ledger.
            OSError: descriptors or memory are exhausted, so it can't be read now. Don't write before it was read.
        """
        if isinstance(found := self.look(), OSError):
            raise found
        self.take(found)

    def look(self) -> ReadFile | OSError | None:
        """Read the file: the blocking part of ``load``. May run in any thread. None: no other process wrote the file."""
        self.exposure = file.close_to_others(self.path.parent)
        files.sweep(self.path.parent)
        try:
            return None if self.current else self._witness.held_against(partial(file.read, self.path))
        except OSError as error:
            return error

    @property
    def current(self) -> bool:
        """True if no other process wrote the file since it was read or written here. Reads only the file's metadata."""
        with contextlib.suppress(OSError):
            return self._base is not None and self._base == file.identity_of(self.path)
        return False

    def take(self, found: ReadFile | None) -> None:
        """Use the result of ``look``: the second part of ``load``."""
        if found is None:
            return
        content = found.content
        self._tables.replace(merged(content, self._tables.content) if found.complaint else content)
        self.served_in_boot = self.served_in_boot or self.kubelet.partition(" ")[0]
        self._base, self._saved = None if found.complaint else found.identity, self._tables.revision
        if found.complaint:
            self._tables.revision += 1
            raise LedgerError(
                f"cannot use all of the state file {self.path} (format {FORMAT}): {found.complaint}; {self._put_aside()}"
            )

    def snapshot(self) -> LedgerSnapshot:
        """Return a copy for ``save``. Only this part of a write must run on the event loop."""
        tables = self._tables
        if generation := generation_of(tables.content, tables.touched):
            tables.content["generation"] = generation
        tables.touched.clear()
        claims = dict(tables.content.get("claims", {}))
        return LedgerSnapshot(file.encode(tables.encoded()), tables.revision, generation, claims)

    def save(self, snapshot: LedgerSnapshot, guard: Guard = unguarded) -> file.Identity:
        """Replace the file, durably. Blocks: about 0.4 ms on a good disk.

        Args:
            snapshot: the new content.
            guard: is held during the write; it yields a function that is called right before the file is replaced. Both raise OSError
                if another gateway leads.

        Raises:
            LedgerError: the disk is full, the folder is read-only or gone, or another gateway leads. The file is unchanged.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_size(snapshot.data)
            with guard() as check:
                written = file.identity(files.replace(self.path, snapshot.data, check=check))
                self._witness.write(snapshot.generation, snapshot.claims)
        except OSError as error:
            raise LedgerError(
                f"could not write {self.path}: {error.strerror}. Devices are still served, but the gateway forgets "
                "devices that vanish while it is down. Make the state directory writable"
            ) from error
        return written

    def settle(self, snapshot: LedgerSnapshot, written: file.Identity) -> None:
        """Note a ``save`` that succeeded."""
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
        """How many changes may not be on disk."""
        return self._tables.revision - self._saved

    # The tables.

    def announced(self, resource: str) -> Mapping[str, Device]:
        """Return all devices that were announced for a resource, by ID, with their last state."""
        return self._tables.read(resource, "announced", device_of)

    def list_inputs(self) -> bytes:
        """Return all stored state that a device list depends on, except the announced devices."""
        return list_inputs(self._tables.content)

    def resources(self) -> tuple[str, ...]:
        """Return the resource names with announced devices."""
        return tuple(name for name in self._tables.content.get("resources", {}) if self._tables.rows(name, "announced"))

    def named(self) -> tuple[str, ...]:
        """Return the resource names with any rows, even if no gateway offers them."""
        return tuple(self._tables.content.get("resources", {}))

    def announce(self, resource: str, devices: tuple[Device, ...]) -> bool:
        """Note a list that is about to be sent. Return True if it has a new ID or a changed health.

        Only the leader may call this, because only the leader sends lists.
        """
        return self._tables.note(
            resource, "announced", {device.id: device for device in devices}, device_of, device_row
        )

    def withdraw(self, resource: str, device_ids: Iterable[str]) -> bool:
        """Forget devices that were withdrawn, forgotten by an order, or lost for long. Return True if one was known.

        Their cordons stay, because a cordon is in force for the device under any resource. Holders from before the kubelet's start
        also stay, because their containers keep running when a device isn't offered.
        """
        device_ids = tuple(device_ids)
        dropped = [self._tables.drop(resource, table, device_ids) for table in TABLES if table != "earlier"]
        return any(dropped)

    @property
    def accepted(self) -> str:
        """The dialect that a kubelet accepted last; empty if unknown."""
        return str(self._tables.content.get("accepted", ""))

    def accept(self, dialect: str) -> bool:
        """Note the dialect that the kubelet accepted. Return True if it is new."""
        return self._tables.put_value("accepted", dialect)

    @property
    def kubelet(self) -> str:
        """The kubelet that the devices of ``handed_out`` were given to; empty if unknown."""
        return str(self._tables.content.get("kubelet", ""))

    def set_kubelet(self, kubelet: str) -> bool:
        """Note the kubelet that devices are given to from now on. Return True if it is new."""
        return self._tables.put_value("kubelet", kubelet)

    @property
    def cordons(self) -> Mapping[str, Cordon]:
        """The cordons by device ID. A cordon is in force for each resource with the device."""
        return self._tables.decoded(dict[str, Cordon], "cordons")

    def cordon(self, device_id: str, cordon: Cordon) -> None:
        """Note a cordon. It replaces an earlier one."""
        self._tables.change({("cordons", device_id): row_of(cordon)})

    def uncordon(self, device_id: str) -> bool:
        """Lift a cordon. Return True if there was one."""
        return device_id in self.cordons and self._tables.change({("cordons", device_id): None})

    @property
    def claims(self) -> Mapping[str, Claimed]:
        """The prepared ResourceClaims, by ``dra.claims.key``."""
        return self._tables.decoded(dict[str, Claimed], "claims")

    def set_claim(self, key: str, row: Claimed | None) -> None:
        """Note a prepared claim by its ``dra.claims.key`` (None: remove it). Must be on disk before the kubelet gets the response."""
        self._tables.change({("claims", key): None if row is None else msgspec.to_builtins(row)})

    @property
    def time_slices(self) -> Mapping[str, str]:
        """The time-slice interval of each GPU that has or gets one, by UUID, until it is reset."""
        return self._tables.decoded(dict[str, str], "time_slices")

    def set_time_slice(self, uuid: str, interval: str | None) -> None:
        """Note the time-slice interval of a GPU (None: the default). Must be on disk before the interval is set."""
        self._tables.change({("time_slices", uuid): interval})

    @property
    def sides(self) -> Mapping[str, Side]:
        """The sides of boards, by name. The row '' applies to all boards without a row."""
        return self._tables.decoded(dict[str, Side], "sides")

    def set_side(self, board: str, side: Side | None) -> None:
        """Note the side of a board (None: use the row ''). Must be on disk before it is in force."""
        self._tables.change({("sides", board): None if side is None else side.value})

    def sticky(self, resource: str) -> Mapping[str, Sticky]:
        """Return the troubles that a restart of the gateway does not end, by device ID."""
        return self._tables.read(resource, "sticky", illness_of)

    def set_sticky(
        self, resource: str, illnesses: Mapping[str, Sticky], since: Mapping[str, Sticky] | None = None
    ) -> bool:
        """Set all lasting troubles of a resource. Return True if one is new.

        ``since``: the result of ``sticky`` from which ``illnesses`` were computed, if it may be outdated. Then only the differences
        between both are noted, so that changes made in between stay.
        """
        known = self.sticky(resource)
        since = known if since is None else since
        dropped = self._tables.drop(resource, "sticky", since.keys() - illnesses.keys())
        if since is not known:
            illnesses = {at: one for at, one in illnesses.items() if since.get(at) is not one}
        return self._tables.note(resource, "sticky", illnesses, illness_of, illness_row) or dropped

    def lost_since(self, resource: str) -> Mapping[str, float]:
        """Return since when devices have been lost, by ID (Unix seconds)."""
        return {device_id: float(row["since"]) for device_id, row in self._tables.rows(resource, "lost").items()}

    def set_lost_since(self, resource: str, since: Mapping[str, float]) -> bool:
        """Set all lost devices of a resource. Return True if one is new."""
        return self._tables.set(resource, "lost", {device_id: {"since": at} for device_id, at in since.items()})

    def handed_out(self, resource: str) -> Mapping[str, HandedOut]:
        """Return what Allocate gave, by device ID. A crash may lose rows, and rows of free devices stay: no call reports their release."""
        return self._tables.decoded(dict[str, HandedOut], "resources", resource, "handed_out")

    def hand_out(self, resource: str, device_ids: Iterable[str], dialect: str, at: float) -> None:
        """Note the devices that an Allocate gave at ``at`` (Unix seconds)."""
        self._set_handed_out(resource, dict.fromkeys(device_ids, HandedOut(dialect, at)))

    def set_counted(self, resource: str, device_ids: Iterable[str]) -> bool:
        """Note that the kubelet counts given devices as in use. Return True if that is new."""
        known = self.handed_out(resource)
        return self._set_handed_out(resource, {one: replace(known[one], counted=True) for one in device_ids})

    def rebuild_handed_out(
        self, resource: str, holders: Mapping[str, tuple[str, ...]], at: float, now: float = math.inf
    ) -> bool:
        """Set the rows of a resource to the holders in the kubelet's records at ``at`` (Unix seconds). Return True if one is new.

        Rows of later Allocates and of devices that are still held stay. A holder that the records don't name has no names. If the
        checkpoint still has a holder and List doesn't, the name from List stays: only with it can a later List show that the pod is
        gone. If a row without a holder has a time after ``now``, the clock was set back. Its time becomes ``now``; otherwise the
        device would count as held until the clock reaches the old time.
        """
        known = self.handed_out(resource)
        returned = {device_id for device_id, row in known.items() if row.at < at} - holders.keys()
        dropped = self._tables.drop(resource, "handed_out", returned)
        unknown = HandedOut("", at)
        news = {
            device_id: replace(row, names=names)
            for device_id, names in sorted(holders.items())
            if (row := known.get(device_id, unknown)) is unknown or (row.at < at and not {*names} <= {*row.names})
        }
        news |= {one: replace(row, at=now) for one, row in known.items() if row.at > now and one not in holders}
        return self._set_handed_out(resource, news) or dropped

    def _set_handed_out(self, resource: str, rows: Mapping[str, HandedOut]) -> bool:
        return self._tables.note(resource, "handed_out", rows, lambda _, row: msgspec.convert(row, HandedOut), row_of)

    def earlier(self, resource: str) -> Rows:
        """Return the holders from before the kubelet's start in this boot, by device ID."""
        rows = self._tables.decoded(dict[str, EarlierHolders], "resources", resource, "earlier")
        return {device_id: row.holders for device_id, row in rows.items() if row.boot_id == self.boot_id}

    def set_earlier(self, resource: str, rows: Rows) -> bool:
        """Set all holders of a resource from before the kubelet's start. Return True if one is new."""
        return self._tables.set(
            resource,
            "earlier",
            {
                device_id: {"boot_id": self.boot_id, "holders": [row_of(one) for one in holders]}
                for device_id, holders in rows.items()
            },
        )

    def _put_aside(self) -> str:
        """Put the file aside; return a text about it."""
        try:
            self.aside = file.put_aside(self.path)
        except FileNotFoundError:
            return "the gateway continues with what it has in memory"
        except OSError as error:
            return f"it could not be put aside ({error.strerror}); its valid part is used"
        return f"it was put aside as {self.aside}, and its valid part is used"


def _boot_id() -> str:
    """Return the kernel's ID of this boot; empty if it can't be read."""
    try:
        return _BOOT_FILE.read_text().strip()[:MAX_TEXT]
    except (OSError, ValueError):
        return ""


def _require_size(data: bytes) -> None:
    if len(data) > salvage.MAX_BYTES:
        raise OSError(errno.EFBIG, f"the state file would have {len(data)} bytes. Allowed: {salvage.MAX_BYTES}")
