"""Read the kubelet's records: its checkpoint and its pod-resources API.

``holds`` finds registrations that only seem to be in force. Kubelets 1.25 to 1.36 can keep a live stream on an endpoint that
they have stopped: after the next list, allocatable looks right, but every Allocate fails (run on 1.32.13). Only the records
show that.

``look`` returns who holds which device. If a source can't be read (a socket that isn't mounted, a file that is being written),
the unknown parts are None. Every look is bounded in time and size, and none raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import time
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from adapters import checkpoint, podresources
from adapters.dialect import MalformedError
from devices.model import Health
from gateway.wires import rpc
from gateway.wires.unix import listens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from devices.model import Device

    Holders = Mapping[str, Mapping[str, str]]

SEND_AGAIN_S = 30.0
"""Seconds until a list is sent again for the same names: the checkpoint keeps an init container's devices with good reason."""
_DEADLINE = 2.0
"""Most seconds for all calls to the kubelet in one look, and again as many for its file."""
_NOTED = 0.1
"""Seconds after the answer to an Allocate until the kubelet has noted it, also on a busy node."""
_SHOWN_DEADLINE = 1.0
"""Most seconds for a look that decides which gateway serves."""
_READS, _READ_AGAIN = 10, 0.02
"""How often a checkpoint that is being written is read, and the seconds between: the kubelet may wait for a processor."""
_JUST_WRITTEN_NS = 1_000_000_000
_OPTIONS = (
    # The limit of the kubelet's own clients. 10,000 devices in their longest form are 1.5 MiB.
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
)

_Found = TypeVar("_Found")
_decoding = threading.Lock()
Source: TypeAlias = Literal["pod-resources", "checkpoint", "none"]


class FileId(Struct, frozen=True):
    """One version of the checkpoint file: its inode, and when it was written (Unix nanoseconds)."""

    inode: int
    written_ns: int


_NO_FILE = FileId(0, 0)


class CheckpointRecords(Struct, frozen=True):
    """The content of one checkpoint: the holders, the healthy devices (None: kubelet 1.8 doesn't write them), and the file's version."""

    written: Holders
    registered: Mapping[str, frozenset[str]] | None
    file: FileId


class Records(Struct, frozen=True):
    """The result of one look; None for what is unknown. A holder is a text, by resource name and device ID."""

    held: Holders | None = None
    """The holders that List names (``namespace/pod/container``). Without List, those of the checkpoint (``pod UID/container``)."""
    written: Holders | None = None
    """The holders that the checkpoint names; None if it can't be read. Those that List doesn't name may hold their devices. If
    both name a device, List wins: it is newer, and has the pod's name. But List also leaves out init containers (what they hold
    beyond their pod's other containers is free only when the pod ends), and after a kubelet's start every pod that it hasn't
    heard of. The checkpoint has those, but also pods that ended long ago, because a kubelet frees late and writes later."""
    allocatable: Mapping[str, frozenset[str]] | None = None
    """The device IDs that the kubelet knows as healthy, held or not."""
    source: Source = "none"
    """The source of ``held``."""
    pods: frozenset[str] | None = None
    """The pods that List named (``namespace/pod``), with or without devices; None without List."""
    registered: Mapping[str, frozenset[str]] | None = None
    """The device IDs that were healthy when the checkpoint was written; None if it can't be read, or is of kubelet 1.8."""
    file: FileId | None = None
    """The version of the checkpoint file; None if it can't be read."""
    unwritten: bool = False
    """True if there is neither a List nor a checkpoint: kubelet 1.8 writes one only when a container starts."""

    def names_of(self, resource: str, device_id: str) -> tuple[str, ...]:
        """Return the names of the containers that hold, or may hold, a device. List's name comes first."""
        found = ((records or {}).get(resource, {}).get(device_id) for records in (self.held, self.written))
        return tuple(dict.fromkeys(name for name in found if name is not None))

    def holders(self, resource: str) -> dict[str, str]:
        """Return who holds, or may hold, the devices of a resource."""
        return {**(self.written or {}).get(resource, {}), **(self.held or {}).get(resource, {})}

    def only_written(self, resource: str) -> dict[str, str]:
        """Return the UIDs of the pods that the checkpoint names and List does not, by device ID; empty without List."""
        found = (self.written or {}).get(resource, {}) if self.source == "pod-resources" else {}
        held = (self.held or {}).get(resource, {})
        return {one: holder.partition("/")[0] for one, holder in found.items() if one not in held}

    def named_as(self, earlier: Records | None) -> Records:
        """If only the checkpoint could be read, return them with the names of earlier records for the same holders.

        The checkpoint has only UIDs, by which no later List shows that a pod is gone, and it names pods that have ended.
        """
        if earlier is None or earlier.written is None or self.written is None or self.source != "checkpoint":
            return self
        held = {}
        for resource, holders in self.written.items():
            before, names = earlier.written.get(resource, {}), (earlier.held or {}).get(resource, {})
            found = {one: names.get(one) if before.get(one) == holder else holder for one, holder in holders.items()}
            held[resource] = {one: name for one, name in found.items() if name is not None}
        return replace(self, held=held)


class OpenAllocates:
    """Counts open Allocates: enter it for each call. ``begins`` is called first, and cancels a look in progress.

    GetPreferredAllocation also counts: after its answer a kubelet sets aside what it will give. Until the kubelet has noted the
    answer to Allocate, List may make it forget that, if another pod has ended (UpdateAllocatedDevices; 1.15 and later).
    """

    def __init__(self, begins: Callable[[], None]) -> None:
        self._begins = begins
        self._none = asyncio.Event()
        self._none.set()
        self.open = 0
        self._ended = -math.inf
        """When the last call was answered (monotonic seconds)."""

    def __enter__(self) -> None:
        self.open += 1
        self._none.clear()
        self._begins()

    def __exit__(self, *_: object) -> None:
        self.open -= 1
        if not self.open:
            self._ended = time.monotonic()
            self._none.set()

    def lately(self) -> bool:
        """Return True if a call is open, or was answered a moment ago: the kubelet may not have noted the answer."""
        return self.open > 0 or time.monotonic() < self._ended + _NOTED

    async def over(self) -> None:
        """Wait until the kubelet has noted the answers to all calls."""
        while self.lately():
            await self._none.wait()
            await asyncio.sleep(max(self._ended + _NOTED - time.monotonic(), 0))


async def look(pod_resources: Path, checkpoint_file: Path, *, lists: bool = True) -> Records:
    """Read the kubelet's pod-resources API and its checkpoint.

    The API is v1, or v1alpha1 on kubelets before 1.20. List makes a kubelet free what ended pods held, so it is called only if
    ``lists``.
    """
    found: CheckpointRecords | None = None
    missing = False
    listed: podresources.Listed | None = None
    allocatable: dict[str, frozenset[str]] | None = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DEADLINE):
            found = await asyncio.to_thread(read_record, checkpoint_file)
            missing = found is None and _is_missing(checkpoint_file)
    if listens(pod_resources):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DEADLINE), _channel(pod_resources) as channel:
                listed = await _list(channel) if lists else None
                allocatable = await _allocatable(channel)
    if listed is None:
        if found is None:
            return Records(allocatable=allocatable, unwritten=missing)
        return Records(found.written, found.written, allocatable, "checkpoint", None, found.registered, found.file)
    if found is None:
        return Records(listed.held, None, allocatable, "pod-resources", listed.pods)
    record = found.registered, found.file
    return Records(listed.held, found.written, allocatable, "pod-resources", listed.pods, *record)


async def held_by(pod_resources: Path, pods: Iterable[str]) -> Holders | None:
    """Return what these pods (``namespace/pod``) hold, by Get, which changes nothing in a kubelet; None without an answer."""
    found: dict[str, dict[str, str]] = {}
    with contextlib.suppress(TimeoutError, MalformedError, rpc.CallError):
        async with asyncio.timeout(_SHOWN_DEADLINE), _channel(pod_resources) as channel:
            for pod in pods:
                for resource, holders in (await _get(channel, pod)).items():
                    found.setdefault(resource, {}).update(holders)
            return found
    return None


async def held(pod_resources: Path) -> Holders | None:
    """Return who holds what, by List, which makes a kubelet free what ended pods held; None without an answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DEADLINE), _channel(pod_resources) as channel:
            listed = await _list(channel)
            return None if listed is None else listed.held
    return None


async def holds(socket: Path, resource: str, devices: Sequence[Device], patience: float = 0.5) -> bool | None:
    """Return True if the kubelet has exactly the healthy devices of ``devices`` as allocatable.

    A kubelet takes a while to record a list, so a difference counts only after ``patience`` seconds. None: the kubelet did not
    answer (it is older than 1.23, or its socket can't be reached).
    """
    expected = frozenset(device.id for device in devices if device.health is Health.HEALTHY)
    if not listens(socket):
        return None

    def differs(found: dict[str, frozenset[str]] | None) -> bool:
        return found is not None and found.get(resource, frozenset()) != expected

    try:
        async with asyncio.timeout(patience + _DEADLINE), _channel(socket) as channel:
            found = await _allocatable(channel)
            if differs(found):
                import tenacity  # noqa: PLC0415 - as in _ask

                retrying = tenacity.AsyncRetrying(
                    retry=tenacity.retry_if_result(differs),
                    wait=tenacity.wait_exponential(0.05, max=0.5),
                    stop=tenacity.stop_after_delay(patience),
                    retry_error_callback=lambda state: state.outcome.result() if state.outcome is not None else None,
                )
                found = await retrying(_allocatable, channel)
    except TimeoutError:
        return None
    return None if found is None else found.get(resource, frozenset()) == expected


def _channel(socket: Path) -> rpc.Channel:
    return rpc.Channel(socket, _OPTIONS)


async def _list(channel: rpc.Channel) -> podresources.Listed | None:
    try:
        return await _ask(channel, podresources.LIST, podresources.decode_list)
    except rpc.CallError as error:
        if error.code is not rpc.Code.UNIMPLEMENTED:
            return None
    except MalformedError:
        return None
    with contextlib.suppress(rpc.CallError, MalformedError):
        return await _ask(channel, podresources.LIST_V1ALPHA1, podresources.decode_list)
    return None


async def _get(channel: rpc.Channel, pod: str) -> Holders:
    try:
        return (await _ask(channel, podresources.GET, podresources.decode_list, podresources.encode_get(pod))).held
    except rpc.CallError as error:
        if podresources.is_not_found(error.details):
            return {}
        raise


async def _allocatable(channel: rpc.Channel) -> dict[str, frozenset[str]] | None:
    with contextlib.suppress(rpc.CallError, MalformedError):
        return await _ask(channel, podresources.GET_ALLOCATABLE, podresources.decode_allocatable)
    return None


def _too_often(error: BaseException) -> bool:
    """Return True if the kubelet refused because of its rate limit (1.27 and later: 100 requests a second for all clients)."""
    return isinstance(error, rpc.CallError) and "rate limit" in error.details


async def _ask(channel: rpc.Channel, method: str, decode: Callable[[bytes], _Found], request: bytes = b"") -> _Found:
    async def ask() -> bytes:
        return await channel.call(method, request, seconds=_DEADLINE)

    try:
        answer = await ask()
    except rpc.CallError as error:
        if not _too_often(error):
            raise
        import tenacity  # noqa: PLC0415 - 15 ms at a start that needs it for nothing

        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(_too_often),
            wait=tenacity.wait_random_exponential(multiplier=0.02, max=0.2),
            stop=tenacity.stop_after_delay(_SHOWN_DEADLINE),
            reraise=True,
        )
        answer = await retrying(ask)
    return await asyncio.to_thread(
        _alone, decode, answer
    )  # In a thread: 10,000 devices take 15 ms, in which an Allocate would wait.


def _alone(decode: Callable[[bytes], _Found], data: bytes) -> _Found:
    """Decode in a thread, one answer at a time. Otherwise an abandoned decoding would run next to the next one."""
    if not _decoding.acquire(timeout=_DEADLINE):
        raise MalformedError(f"the answer before was not decoded within {_DEADLINE:g} s")
    try:
        return decode(data)
    finally:
        _decoding.release()


def _checkpoint(path: Path) -> tuple[checkpoint.Checkpoint | None, FileId]:
    """Return the checkpoint and its file's version; None if it can't be read, or is a pipe.

    Kubelets 1.8 and 1.9 write it in place, so a checkpoint that was just written and can't be decoded is read again.
    """
    for _ in range(_READS):
        content, file = raw(path)
        with contextlib.suppress(MalformedError):
            return _alone(checkpoint.read, content), file
        if len(content) > checkpoint.MAX_BYTES or abs(time.time_ns() - file.written_ns) > _JUST_WRITTEN_NS:
            break
        time.sleep(_READ_AGAIN)
    return None, _NO_FILE


def raw(path: Path) -> tuple[bytes, FileId]:
    """Return a checkpoint's bytes and its file's version; no bytes if it can't be read."""
    content, file_id = b"", _NO_FILE
    with contextlib.suppress(OSError), open(path, "rb", opener=_opener) as file:
        file_id = _id_of(os.fstat(file.fileno()))
        content = file.read(checkpoint.MAX_BYTES + 1) or b""
    return content, file_id


def decoded(content: bytes, file: FileId) -> CheckpointRecords | None:
    """Decode a checkpoint's bytes; None if they are malformed. Call it in a thread."""
    with contextlib.suppress(MalformedError):
        return _record(_alone(checkpoint.read, content), file)
    return None


def file_id(path: Path) -> FileId:
    """Return the version of the checkpoint that is there now."""
    with contextlib.suppress(OSError):
        return _id_of(path.lstat())
    return _NO_FILE


def _id_of(status: os.stat_result) -> FileId:
    return FileId(status.st_ino, status.st_mtime_ns)


def _is_missing(path: Path) -> bool:
    try:
        path.lstat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def _opener(path: str, flags: int) -> int:
    """Open a file as root, without following a link or waiting for a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def read_record(path: Path) -> CheckpointRecords | None:
    """Read the current checkpoint; None if it can't be read. Call it in a thread, because a disk may be slow."""
    found, file = _checkpoint(path)
    return None if found is None else _record(found, file)


def _record(found: checkpoint.Checkpoint, file: FileId) -> CheckpointRecords:
    holders: dict[str, dict[str, str]] = {}
    for held in found.held:
        holder = f"{held.pod_uid}/{held.container}"  # One text for all devices of a container.
        for device_id in held.device_ids:
            holders.setdefault(held.resource, {}).setdefault(device_id, holder)
    return CheckpointRecords(holders, found.registered or None, file)


class Outdated:
    """Decides when to make a kubelet write its checkpoint again, because it names pods that have ended and so keeps their GPUs.

    From 1.15 on, List makes a kubelet free what ended pods held, but its checkpoint is written only with the next
    Allocate or list of devices. If all GPUs wait for pods that only the checkpoint names, no Allocate comes. Then a
    list is sent once more (run on 1.37.1): when the pods or the checkpoint's names changed, and every ``SEND_AGAIN_S``.
    """

    def __init__(self) -> None:
        self._seen: object = None
        self._at = -math.inf

    def is_due(self, records: Records, now: float) -> bool:
        """Return True if a list should be sent once more, after a look at ``now`` (monotonic seconds)."""
        only_written = {name: records.only_written(name) for name in records.written or {}}
        if not any(only_written.values()):
            return False
        seen = only_written, records.pods
        if seen == self._seen and now < self._at + SEND_AGAIN_S:
            return False
        self._seen, self._at = seen, now
        return True
