"""The ledger: what this node has been promised, on disk, so that the promise outlives the gateway.

One JSON file in ``--state-dir`` (0700, root only). By resource name it holds every device ID that was ever announced and
how it was announced last, which of them are lost, the illnesses that stick, what Allocate handed out, and whom the kubelet
forgot; besides them the operator's cordons, what was prepared for ResourceClaims, the dialect that the kubelet accepted last, and which kubelet was looked at last. Two gateways share it while one replaces the other. So what a gateway keeps is
the file and its own *changes* since its last write, and a write never undoes what the other wrote: it takes the lock, reads
the file anew where somebody else wrote it, applies the changes, and replaces it as a whole (write, fsync, rename, fsync
of the folder). A crash at any moment leaves the old file or the new one. Fields that this release doesn't know are kept.
A file that can't be read in full is put aside, never deleted; what is sound in it is kept, cordons even from a newer
format; and nothing about it stops the gateway: the kubelet's devices come first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast

import msgspec

from devices import naming
from devices.life.merging import Sticky
from devices.model import Device, Health, Kind, Trouble
from gateway.kubelet.drift import MOST_EARLIER, Earlier
from gateway.memory.claimed import Claimed

FORMAT = 1
_MAX_BYTES = 16 * 1024 * 1024
_MAX_TEXT = 1024
_MAX_DEPTH = 32
_MAX_PARTS = 500_000
"""The most lists and objects in a file: 80 000 devices have half of it. Each takes up to 230 bytes of memory."""
_MAX_SALVAGE = 960_000
"""How many bytes of a damaged file are looked through: the cordons and 10 000 devices, and never more than ``_MAX_PARTS``."""
_MAX_WRONG = 1000
"""How many rows of a table may be wrong until the rest of it isn't looked at."""
_MAX_ASIDE = 8
_LOCK = "ledger.lock"
_LOCK_WAIT = 1.0
_LOCK_POLL = 0.005
_NOT_NOW = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Why a sound file may be unreadable for a moment: it is left where it is."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TOKEN = re.compile(r'((?:[^][{}"]+|"(?:[^"\\]|\\.)*(?:"|\Z))*)([][{}]|\Z)', re.DOTALL)
"""What a document's shape hangs on: a bracket, and what is before it; texts count as a whole, and the last may have no end."""
_COMMA = re.compile(r'"(?:[^"\\]|\\.)*"?|,', re.DOTALL)

_Content: TypeAlias = dict[str, Any]
_Changes: TypeAlias = dict[tuple[str, ...], Any]
"""By place in the file: the fields that a row gets, a plain value, or None where the row goes."""
_Identity: TypeAlias = tuple[int, int, int, int]
_V = TypeVar("_V")


class LedgerError(Exception):
    """The ledger could not be read or written. The message says what became of it and what to do."""


class Cordon(msgspec.Struct, frozen=True):
    """An operator's word that a device must not be given to new containers. ``at`` is in unix seconds."""

    reason: str
    at: float


class HandedOut(msgspec.Struct, frozen=True):
    """That Allocate gave a device to a container; ``dialect`` is empty where only the kubelet's books say so.

    ``holder`` is who has it by those books, and empty until they were looked at.
    """

    dialect: str
    at: float
    holder: str = ""


class _Announced(msgspec.Struct, frozen=True):
    """A row of ``announced`` as it must be. The numbers are what an int64 on the wire can say.

    ``part_of`` is there of partitions only; rows of releases before it lack it.
    """

    health: Literal["Healthy", "Unhealthy"]
    numa: list[Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]]
    part_of: str = ""


class _Sticky(msgspec.Struct, frozen=True):
    """A row of ``sticky``: an illness that a restart of the gateway doesn't cure. ``at`` is in unix seconds."""

    reason: str
    kind: str
    at: float
    boot_id: str


class _Lost(msgspec.Struct, frozen=True):
    """A row of ``lost``. ``since`` is in unix seconds."""

    since: float


class _Forgotten(msgspec.Struct, frozen=True):
    """A row of ``forgotten``: who held a device, in which boot of the node, before a kubelet's start that forgot it."""

    boot_id: str
    pods: Annotated[list[Earlier], msgspec.Meta(min_length=1, max_length=MOST_EARLIER)]


_TABLES: Mapping[str, type] = {
    "announced": _Announced,
    "lost": _Lost,
    "sticky": _Sticky,
    "handed_out": HandedOut,
    "forgotten": _Forgotten,
}
"""What a resource has rows of, by device ID."""


class Snapshot(msgspec.Struct, frozen=True):
    """The ledger at one moment, to be written elsewhere than on the event loop."""

    data: bytes
    changes: _Changes
    base: _Identity | None
    revision: int


class Written(msgspec.Struct, frozen=True):
    """What a write did, for ``Ledger.settle``. ``content`` is set where the file held more than the snapshot."""

    identity: _Identity
    content: _Content | None = None
    aside: str = ""
    complaint: str = ""


class Found(msgspec.Struct, frozen=True):
    """A file that is there: what is sound of it, and what is not."""

    identity: _Identity | None
    content: _Content = msgspec.field(default_factory=dict)
    complaint: str = ""


def boot_id() -> str:
    """Return what the kernel calls this boot, so that a later one can be told from it; empty where it doesn't say."""
    try:
        return _BOOT_ID.read_text().strip()[:_MAX_TEXT]
    except (OSError, ValueError):
        return ""


class Ledger:
    """The ledger in memory, over one file. Belongs to one thread, but for ``save``, which may run in any."""

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / "ledger.json"
        self.aside = ""
        """The file that was put aside last, by name."""
        self.exposure = ""
        """What makes the state directory less than private and could not be helped; empty where nothing does."""
        self._content: _Content = {}
        self._values: dict[tuple[str, ...], Mapping[str, Any]] = {}
        """Tables as values, by their place in the content: a list of thousands is asked for with each event of one device."""
        self._changes: _Changes = {}
        self._base: _Identity | None = None
        self._revision = self._saved = 0

    # Reading and writing.

    def load(self) -> None:
        """Read the file, at the start and again before taking over from another gateway: what that one wrote is ours then.

        This gateway's own changes that aren't written yet stay. A missing file changes nothing, and one that nobody else
        wrote isn't read again. Blocks: about 20 ms for 10 000 devices.

        Raises:
            LedgerError: it is unreadable, damaged or of a newer format; what is sound of it is in the ledger.
        """
        self.take(self.look())

    def look(self) -> Found | OSError | None:
        """Read the file: the part of ``load`` that blocks, which may run in any thread. None: there is nothing new."""
        self.exposure = _close_to_others(self.path.parent)
        _sweep(self.path)
        try:
            if self._base is not None and self._base == _identity_of(self.path):
                return None
            return _look(self.path)
        except OSError as error:
            return error

    def take(self, found: Found | OSError | None) -> None:
        """Take what ``look`` found: the other part of ``load``."""
        if isinstance(found, OSError):
            self._revision += 1
            raise LedgerError(
                f"could not read {self.path}: {found.strerror}. It stays, and is read again before the next write"
            ) from found
        if found is None:
            return
        self._content = _combine(found, self._content, self._changes)
        self._values.clear()
        self._base = None if found.complaint else found.identity
        if found.complaint:
            self._revision += 1
            raise LedgerError(
                f"expected a state file of format {FORMAT} in {self.path}: {found.complaint}; {self._put_aside_in_words()}"
            )

    def snapshot(self) -> Snapshot:
        """Return what ``save`` needs. The only part of a write that must run on the event loop: 1.4 ms for 10 000 devices."""
        return Snapshot(_encode(self._content), dict(self._changes), self._base, self._revision)

    def save(self, snapshot: Snapshot) -> Written:
        """Replace the file, durably. Blocks: about 0.4 ms on a good disk, and at most a second for the other gateway.

        Where the lock can't be had in that time, its holder is stopped or no gateway, and what must be durable can't wait
        for it: the file is written all the same, and the error has it written once more, until that was under the lock.

        Raises:
            LedgerError: the disk is full, the folder read-only or gone (the file is as it was), or the lock is taken.
        """
        lock = self.path.with_name(_LOCK)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(lock, _LOCK_WAIT) as unlocked:
                written = self._write(snapshot)
        except OSError as error:
            raise LedgerError(
                f"could not write {self.path}: {error.strerror}. Devices are served all the same, but a device that "
                "vanishes while the gateway is down will not be remembered: make the state directory writable"
            ) from error
        if unlocked:
            raise LedgerError(
                f"wrote {self.path} without its lock: {unlocked}. Expected {lock.name} to be held by gateways only, for "
                "milliseconds; another gateway may undo what was written, so it will be written again: end what holds it"
            )
        return written

    def settle(self, snapshot: Snapshot, written: Written) -> None:
        """Take note of a ``save`` that succeeded: its changes are on disk, and what another gateway wrote is ours, too."""
        done = snapshot.changes
        self._changes = {at: row for at, row in self._changes.items() if at not in done or done[at] != row}
        if written.content is not None:
            self._content = _apply(written.content, self._changes)
            self._values.clear()
        self._base = written.identity
        self._saved = snapshot.revision
        self.aside = written.aside or self.aside

    @property
    def revision(self) -> int:
        """A number that grows with each change."""
        return self._revision

    @property
    def written(self) -> int:
        """The ``revision`` that is known to be on disk."""
        return self._saved

    @property
    def pending(self) -> int:
        """How many changes are not known to be on disk."""
        return self._revision - self._saved

    # What is remembered.

    def announced(self, resource: str) -> Mapping[str, Device]:
        """Return the devices ever announced for ``resource``, by ID, as they were announced last."""
        return self._read(resource, "announced", _device)

    def resources(self) -> tuple[str, ...]:
        """Return the resource names with announced devices."""
        return tuple(name for name in self._content.get("resources", {}) if self._rows(name, "announced"))

    def announce(self, resource: str, devices: tuple[Device, ...]) -> bool:
        """Note a list that is about to be sent; True where it names an ID or a health that is news.

        Only who serves the resource may call this: a list that isn't sent announces nothing.
        """
        return self._note(resource, "announced", {device.id: device for device in devices}, _device, _device_row)

    def withdraw(self, resource: str, device_ids: Iterable[str]) -> bool:
        """Forget devices that were withdrawn, forgotten by an operator or aged out; True where any was known.

        Their cordons stay: they are the operator's word about the device, under whatever resource it comes back. So does whom
        the kubelet forgot: that a device isn't offered for a while ends no container.
        """
        device_ids = tuple(device_ids)
        dropped = [self._drop(resource, table, device_ids) for table in _TABLES if table != "forgotten"]
        return any(dropped)

    @property
    def accepted(self) -> str:
        """The dialect that a kubelet accepted last; empty where none is known."""
        return str(self._content.get("accepted", ""))

    def accept(self, dialect: str) -> bool:
        """Note the dialect that the kubelet accepted; True where that is news worth saving."""
        if self.accepted == dialect:
            return False
        self._change({("accepted",): dialect})
        return True

    @property
    def kubelet(self) -> str:
        """The kubelet whose books ``handed_out`` was compared with last; empty where none is known."""
        return str(self._content.get("kubelet", ""))

    def compared_with(self, kubelet: str) -> bool:
        """Note the kubelet whose books ``handed_out`` was compared with; True where that is news worth saving."""
        if self.kubelet == kubelet:
            return False
        self._change({("kubelet",): kubelet})
        return True

    @property
    def cordons(self) -> Mapping[str, Cordon]:
        """The cordons by device ID. They hold for every resource that the device is announced under."""
        return msgspec.convert(self._content.get("cordons", {}), dict[str, Cordon])

    def cordon(self, device_id: str, cordon: Cordon) -> None:
        """Note an operator's cordon, in place of an earlier one."""
        self._change({("cordons", device_id): _row(cordon)})

    def uncordon(self, device_id: str) -> bool:
        """Lift a cordon; True where there was one. It is lifted on disk in either case: another gateway may have set it."""
        known = device_id in self._content.get("cordons", {})
        self._change({("cordons", device_id): None})
        return known

    @property
    def claims(self) -> Mapping[str, Claimed]:
        """What is prepared for ResourceClaims, by their UID."""
        place = ("claims",)
        if place not in self._values:
            self._values[place] = msgspec.convert(self._content.get("claims", {}), dict[str, Claimed])
        return self._values[place]

    def set_claim(self, uid: str, row: Claimed | None) -> None:
        """Note what is prepared for a claim; None: nothing any more. Durable before the kubelet is told."""
        self._change({("claims", uid): None if row is None else msgspec.to_builtins(row)})

    def sticky(self, resource: str) -> Mapping[str, Sticky]:
        """Return the illnesses that outlive a restart, by device ID."""
        return self._read(resource, "sticky", _illness)

    def set_sticky(
        self, resource: str, illnesses: Mapping[str, Sticky], since: Mapping[str, Sticky] | None = None
    ) -> bool:
        """Note all of a resource's lasting illnesses, in place of those before; True where that is news.

        ``since``: what ``sticky`` returned when they were thought of, if that was a while ago. Only what is other than there
        is noted then: what came or went since is another's word.
        """
        known = self.sticky(resource)
        since = known if since is None else since
        dropped = self._drop(resource, "sticky", since.keys() - illnesses.keys())
        if since is not known:
            illnesses = {at: one for at, one in illnesses.items() if since.get(at) is not one}
        return self._note(resource, "sticky", illnesses, _illness, _illness_row) or dropped

    def lost_since(self, resource: str) -> Mapping[str, float]:
        """Return since when devices have been lost, by ID, in unix seconds."""
        return {device_id: float(row["since"]) for device_id, row in self._rows(resource, "lost").items()}

    def set_lost_since(self, resource: str, since: Mapping[str, float]) -> bool:
        """Note all of a resource's lost devices, in place of those before; True where that is news."""
        return self._set(resource, "lost", {device_id: {"since": at} for device_id, at in since.items()})

    def handed_out(self, resource: str) -> Mapping[str, HandedOut]:
        """Return what Allocate gave away, by device ID. Not proof: records may be lost in a crash, and none says "returned"."""
        return msgspec.convert(self._rows(resource, "handed_out"), dict[str, HandedOut])

    def hand_out(self, resource: str, device_ids: Iterable[str], dialect: str, at: float) -> None:
        """Note an Allocate that was answered, at ``at`` in unix seconds."""
        self._put(resource, "handed_out", dict.fromkeys(device_ids, _row(HandedOut(dialect, at))))

    def rebuild_handed_out(self, resource: str, holders: Mapping[str, str], at: float) -> bool:
        """Make the records equal to what the kubelet's books said at ``at`` (unix seconds); True where that is news.

        What was handed out since then stays, and so does what is known of a device that is still held. A holder is empty where
        a device may be held, and the books don't say by whom.
        """
        known = self.handed_out(resource)
        returned = {device_id for device_id, record in known.items() if record.at < at} - holders.keys()
        dropped = self._drop(resource, "handed_out", returned)
        unknown = HandedOut("", at)
        news = {
            device_id: _row(HandedOut(record.dialect, record.at, holder))
            for device_id, holder in sorted(holders.items())
            if (record := known.get(device_id, unknown)) is unknown or (record.at < at and record.holder != holder)
        }
        return self._put(resource, "handed_out", news) or dropped

    def forgotten(self, resource: str) -> Mapping[str, tuple[Earlier, ...]]:
        """Return whom the kubelet forgot to hold devices in this boot, by device ID (``drift.Drift``)."""
        boot = boot_id()
        rows = msgspec.convert(self._rows(resource, "forgotten"), dict[str, _Forgotten])
        return {device_id: tuple(row.pods) for device_id, row in rows.items() if row.boot_id == boot}

    def set_forgotten(self, resource: str, forgotten: Mapping[str, Sequence[Earlier]]) -> bool:
        """Note all of a resource's, in place of those before; True where that is news."""
        boot = boot_id()
        rows = {
            device_id: {"boot_id": boot, "pods": [_row(one) for one in earlier]}
            for device_id, earlier in forgotten.items()
        }
        return self._set(resource, "forgotten", rows)

    def _rows(self, resource: str, table: str) -> dict[str, _Content]:
        rows: dict[str, _Content] = self._content.get("resources", {}).get(resource, {}).get(table, {})
        return rows

    def _read(self, resource: str, table: str, value: Callable[[str, _Content], _V]) -> Mapping[str, _V]:
        """Return a table as values."""
        place = ("resources", resource, table)
        if place not in self._values:
            rows = self._rows(resource, table)
            self._values[place] = {device_id: value(device_id, row) for device_id, row in rows.items()}
        return self._values[place]

    def _note(
        self,
        resource: str,
        table: str,
        values: Mapping[str, _V],
        value: Callable[[str, _Content], _V],
        row: Callable[[_V], _Content],
    ) -> bool:
        """Put values into a table; True where that is news. Those that are there already cost next to nothing."""
        known = self._read(resource, table, value)
        news = {at: one for at, one in values.items() if known.get(at) is not one and known.get(at) != one}
        if not news:
            return False
        changed = self._put(resource, table, {device_id: row(one) for device_id, one in news.items()})
        self._values["resources", resource, table] = {**known, **news}
        return changed

    def _put(self, resource: str, table: str, rows: Mapping[str, _Content]) -> bool:
        known = self._rows(resource, table)
        return self._change(
            {
                ("resources", resource, table, device_id): row
                for device_id, row in rows.items()
                if not row.items() <= known.get(device_id, {}).items()
            }
        )

    def _set(self, resource: str, table: str, rows: Mapping[str, _Content]) -> bool:
        dropped = self._drop(resource, table, self._rows(resource, table).keys() - rows.keys())
        return self._put(resource, table, rows) or dropped

    def _drop(self, resource: str, table: str, device_ids: Iterable[str]) -> bool:
        gone = self._rows(resource, table).keys() & set(device_ids)
        return self._change({("resources", resource, table, device_id): None for device_id in gone})

    def _change(self, changes: _Changes) -> bool:
        """Carry changes out; True where there are any."""
        self._changes |= changes
        self._revision += len(changes)
        _apply(self._content, changes)
        for at in changes:
            self._values.pop(at[:-1], None)
        return bool(changes)

    # The file.

    def _write(self, snapshot: Snapshot) -> Written:
        """Write the snapshot, or, where the file isn't the one it is built on, what the file holds and its changes."""
        data, content, aside, complaint = snapshot.data, None, "", ""
        if _identity_of(self.path) not in {None, snapshot.base} and (found := _look(self.path)) is not None:
            ours = msgspec.json.decode(data) if found.complaint else {}
            content = _combine(found, ours, snapshot.changes)
            data = _encode(content)
            if complaint := found.complaint:
                aside = _put_aside(self.path)
        if len(data) > _MAX_BYTES:
            raise OSError(errno.EFBIG, f"expected at most {_MAX_BYTES} bytes to write, and there are {len(data)}")
        return Written(_replace(self.path, data), content, aside, complaint)

    def _put_aside_in_words(self) -> str:
        try:
            self.aside = _put_aside(self.path)
        except OSError as error:
            return f"it could not be put aside ({error.strerror}); what is sound of it is used"
        return f"it was put aside as {self.aside}, and what is sound of it is used"


# What is in the file.


def _device(device_id: str, row: _Content) -> Device:
    return Device(device_id, Health(row["health"]), tuple(row["numa"]), row.get("part_of", ""))


def _device_row(device: Device) -> _Content:
    # The health comes last: a damaged row that ends before it has none, and is known to be incomplete.
    part = {"part_of": device.part_of} if device.part_of else {}
    return part | {"numa": list(device.numa_nodes), "health": device.health.value}


def _illness(_: str, row: _Content) -> Sticky:
    return Sticky(Trouble(row["reason"], Kind.named(row["kind"])), float(row["at"]), row["boot_id"])


def _illness_row(illness: Sticky) -> _Content:
    return _row(_Sticky(illness.trouble.reason, illness.trouble.kind.value, illness.at, illness.boot_id))


def _row(value: Cordon | _Sticky | HandedOut | Earlier) -> _Content:
    """Spell a value as a row, with texts of a size and kind that JSON and a screen can take."""
    fields: _Content = msgspec.to_builtins(value)
    return {name: _fitting(part) for name, part in fields.items()}


def _fitting(part: Any) -> Any:
    if isinstance(part, str):
        return part[:_MAX_TEXT].encode(errors="replace").decode()
    return [_fitting(one) for one in part] if isinstance(part, (list, tuple)) else part


def _apply(content: _Content, changes: _Changes) -> _Content:
    """Carry changes out in ``content``. Fields that they don't name stay; what is empty then goes."""
    for (*parents, leaf), row in changes.items():
        trail = [content]
        for key in parents:
            trail.append(trail[-1].setdefault(key, {}))
        if row is None:
            trail[-1].pop(leaf, None)
        elif isinstance(row, dict):
            trail[-1].setdefault(leaf, {}).update(row)
        else:
            trail[-1][leaf] = row
        for key in reversed(parents):
            child, holder = trail.pop(), trail[-1]
            if not child:
                del holder[key]
    return content


def _combine(found: Found, ours: _Content, changes: _Changes) -> _Content:
    """Return what is to be remembered: a sound file and our changes; under a damaged one's remains lies all we know."""
    return _apply(_laid_over(found.content, ours) if found.complaint else found.content, changes)


def _laid_over(under: _Content, over: _Content) -> _Content:
    merged = under | over
    for key in under.keys() & over.keys():
        if isinstance(under[key], dict) and isinstance(over[key], dict):
            merged[key] = _laid_over(under[key], over[key])
    return merged


def _encode(content: _Content) -> bytes:
    """Spell the file. Cordons and claims stand first: what of a file is damaged is mostly its end."""
    first = {"format": FORMAT, "cordons": content.get("cordons", {}), "claims": content.get("claims", {})}
    return msgspec.json.encode(first | {key: value for key, value in content.items() if key not in first})


def _decode(data: bytes) -> tuple[_Content, str]:
    """Return what is sound in a file, and what is wrong with the rest (empty: nothing)."""
    complaint = f"it is larger than {_MAX_BYTES} bytes" if len(data) > _MAX_BYTES else ""
    try:
        if data.count(b"[") + data.count(b"{") > _MAX_PARTS:
            raise ValueError(f"it has more than {_MAX_PARTS} lists and objects")  # noqa: TRY301 - as one that can't be read
        content = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        complaint = complaint or str(error)
        content = _mend(data)
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        complaint = complaint or "it holds no object with a format number"
        content = _only_cordons(content)
    elif content["format"] > FORMAT:
        complaint = f"it is of format {content['format']}, written by a newer gateway"
        content = _only_cordons(content)
    elif not _is_shallow(content):
        complaint = f"it is more than {_MAX_DEPTH} levels deep"
        content = _only_cordons(content)
    wrong = _prune(content)
    return content, complaint or "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")


def _mend(data: bytes) -> Any:
    """Decode as much of the beginning of a damaged file as makes sense, in a second or so; None where nothing does."""
    text = data[:_MAX_SALVAGE].decode(errors="replace")
    with contextlib.suppress(ValueError, RecursionError):
        try:
            whole = json.loads(text)
        except json.JSONDecodeError as error:
            whole = json.loads(_closed(text[: error.pos]))
        # What comes out can be encoded again: halves of a surrogate pair can't, and the lenient decoder takes them.
        return msgspec.json.decode(json.dumps(whole, ensure_ascii=False).encode(errors="replace"))
    return None


def _closed(text: str) -> str:
    """Cut the beginning of a JSON document back to its last whole part, and close what is open there."""
    closers: list[str] = []
    end = 0
    for token in _TOKEN.finditer(text):
        between, bracket = token.group(1, 2)
        if bracket in {"{", "["}:
            closers.append("}" if bracket == "{" else "]")
        elif bracket:
            closers.pop()
        elif comma := [part.start() for part in _COMMA.finditer(between) if part[0] == ","]:
            end = token.start() + comma[-1]
        if bracket:
            end = token.end()
    return text[:end] + "".join(reversed(closers))


def _only_cordons(content: Any) -> _Content:
    """Keep what must outlive any format. Only known fields: what others mean there isn't known."""
    cordons = content.get("cordons") if isinstance(content, dict) else None
    return {"cordons": {key: _sound_cordon(row) for key, row in cordons.items()}} if isinstance(cordons, dict) else {}


def _sound_cordon(row: Any) -> _Content:
    """Make a cordon of whatever stands in its place: that it is there counts for more than why."""
    fields = row if isinstance(row, dict) else {"reason": row}
    reason, at = fields.get("reason"), fields.get("at")
    return _row(
        Cordon(
            reason if isinstance(reason, str) else "its reason was lost with a damaged ledger",
            float(at) if isinstance(at, (int, float)) and 0 <= at < 2**63 else 0.0,
        )
    )


def _prune(content: _Content) -> list[str]:
    """Take away what isn't as it must be, in place; return what that was."""
    wrong: list[str] = []
    for key in ("accepted", "kubelet"):
        if not isinstance(content.get(key, ""), str):
            wrong.append(f"{key}: expected a text")
            del content[key]
    for key, kind in {"cordons": Cordon, "claims": Claimed, "resources": dict}.items():
        if key in content:
            content[key] = _sound_rows(content[key], kind, key, wrong)
    resources = content.get("resources", {})
    for name in [name for name in resources if naming.resource_name_error(name)]:
        wrong.append(f"resources: {name[:80]!r} is no resource name")
        del resources[name]
    for name, resource in resources.items():
        for table, kind in _TABLES.items():
            if table in resource:
                resource[table] = _sound_rows(resource[table], kind, f"resources.{name}.{table}", wrong)
    return wrong


def _sound_rows(rows: Any, kind: Any, path: str, wrong: list[str]) -> dict[str, Any]:
    with contextlib.suppress(msgspec.ValidationError):  # All at once is the fast way, and nearly always the only one.
        msgspec.convert(rows, dict[str, kind])
        return cast("dict[str, Any]", rows)
    if not isinstance(rows, dict):
        wrong.append(f"{path}: expected an object")
        return {}
    sound = {}
    most = len(wrong) + _MAX_WRONG
    for key, row in rows.items():
        try:
            msgspec.convert(row, kind)
            sound[key] = row
        except msgspec.ValidationError as error:
            wrong.append(f"{path}.{key}: {error}")
            if len(wrong) > most:
                break
            if kind is Cordon:
                sound[key] = _sound_cordon(row)
    return sound


def _is_shallow(content: _Content) -> bool:
    """Whether it can be encoded from any depth of the stack: decoding it took some."""
    level: list[Any] = [content]
    for _ in range(_MAX_DEPTH):
        parts = (part for value in level for part in (value.values() if isinstance(value, dict) else value))
        level = [part for part in parts if isinstance(part, (dict, list))]
    return not level


# On the disk.


def _identity(info: os.stat_result) -> _Identity:
    return info.st_dev, info.st_ino, info.st_ctime_ns, info.st_size


def _identity_of(path: Path) -> _Identity | None:
    try:
        return _identity(path.lstat())
    except FileNotFoundError:
        return None


def _look(path: Path) -> Found | None:
    """Read the file; None where there is none. Links are not followed, and a pipe isn't waited for.

    Raises:
        OSError: it can't be read now, but perhaps later: descriptors or memory are exhausted.
    """
    try:
        descriptor = os.open(path, _READ)
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                return Found(None, complaint="it is no regular file")
            if info.st_mode & 0o077:
                with contextlib.suppress(OSError):
                    os.fchmod(descriptor, 0o600)
                    info = os.fstat(descriptor)
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                content, complaint = _decode(file.read(_MAX_BYTES + 1))
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in _NOT_NOW:
            raise
        return Found(None, complaint=error.strerror or str(error))
    return Found(_identity(info), content, complaint)


@contextlib.contextmanager
def _locked(path: Path, seconds: float) -> Iterator[str]:
    """Hold the lock of the state directory. Yields why it is not held, or nothing."""
    unlocked, descriptor = "", -1
    deadline = time.monotonic() + seconds
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_LOCK_POLL)
    except BlockingIOError:
        unlocked = f"{path.name} was held by another process for {seconds:g} s"
    except OSError as error:
        unlocked = f"{path.name}: {error.strerror}"
    try:
        yield unlocked
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _close_to_others(folder: Path) -> str:
    """Make the state directory private where it is ours; return what makes it less than that, or nothing.

    A folder with the sticky bit or with sub-folders (/tmp, /var/lib) is in use by others, too: it isn't closed to them.
    """
    try:
        info = folder.stat()
        if info.st_uid != os.geteuid():
            return f"expected {folder} to belong to uid {os.geteuid()}, and it is uid {info.st_uid}'s: chown it"
        if not info.st_mode & 0o077:
            return ""
        folders = {entry.name for entry in list(os.scandir(folder)) if entry.is_dir(follow_symlinks=False)}
        if info.st_mode & stat.S_ISVTX or folders - {"lost+found"}:
            return f"expected {folder} to be the gateway's alone, and others use it: give it a --state-dir of its own"
        folder.chmod(0o700)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"expected {folder} to be a private folder (0700): {error.strerror}"
    return ""


def _sweep(path: Path) -> None:
    """Remove what a crash left of a write, unless another gateway is writing now."""
    with contextlib.suppress(OSError):
        entries = [Path(entry.path) for entry in list(os.scandir(path.parent))]
        leftovers = [entry for entry in entries if entry.name.startswith("ledger") and entry.suffix == ".tmp"]
        if leftovers:
            with _locked(path.with_name(_LOCK), 0) as unlocked:
                for leftover in leftovers if not unlocked else ():
                    leftover.unlink(missing_ok=True)


def _replace(path: Path, data: bytes) -> _Identity:
    temporary = path.with_name(f"ledger-{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
        os.replace(temporary, path)  # noqa: PTH105 - beside the other calls of one write
        identity = _identity(os.fstat(descriptor))  # A rename changes the time, so only now.
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    finally:
        os.close(descriptor)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return identity


def _put_aside(path: Path) -> str:
    """Give a damaged file a second name, by which it stays when it is replaced; keep the newest few such files.

    It keeps its first name until then, so that a crash in between loses nothing. The name tells the file: one that is met
    twice is put aside once.
    """
    info = path.lstat()
    aside = path.with_name(f"ledger.damaged-{info.st_mtime_ns}-{info.st_ino}.json")
    try:
        os.link(path, aside, follow_symlinks=False)
    except FileExistsError:
        return aside.name
    except OSError:  # No folder, and no file system without links, can be named twice.
        path.rename(aside)
    files = [entry for entry in path.parent.glob("ledger.damaged-*.json") if entry != aside and not entry.is_dir()]
    files.sort(key=lambda entry: entry.lstat().st_mtime_ns, reverse=True)
    for old in files[_MAX_ASIDE - 1 :]:
        with contextlib.suppress(OSError):
            old.unlink()
    return aside.name
