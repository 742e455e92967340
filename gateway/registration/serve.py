"""Serve one resource: answer the device plugin's gRPC calls in the dialect on offer.

The server is bound once, in the gateway's own folder. A registration only links the bound socket under a new name. The dialect
on offer decodes the calls, so nothing here depends on a version. A dialect is on offer from the moment when Register is *sent*,
because kubelets 1.8 and 1.9 call before Register returns.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from functools import partial
from typing import TYPE_CHECKING, Protocol

import structlog
from msgspec import Struct

from adapters.dialect import Fidelity, MalformedError, UnsayableError, sendable, span
from adapters.levels import Evidence, level, may_be_kubelet
from devices.life import admission, states
from devices.model import Fault, Field, RefusedError
from gateway.kubelet import drift
from gateway.registration.devicelist import DeviceList
from gateway.registration.events import StreamEnded, StreamOpened, Withhold
from gateway.registration.requests import Requests
from gateway.wires import rpc
from gateway.wires.log import Seldom

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from adapters.dialect import Dialect, Level
    from devices.model import ContainerAnswer, ContainerRequest, Device, PreferredRequest
    from devices.source import DeviceSource, Listing
    from gateway.configuration.settings import Settings
    from gateway.kubelet.presence import Presence
    from gateway.kubelet.reader import RecordsReader
    from gateway.registration.events import Event
    from gateway.registration.turns import Turns
    from gateway.tally import Tally
    from gateway.tasks import Signal

    _Answer = Callable[[Dialect, bytes, rpc.Call], Awaitable[bytes]]

MAX_REQUEST_BYTES = 4 * 1024 * 1024
"""Most bytes of a request: gRPC's default, and so the limit of NVIDIA's plugin.

The largest request is GetPreferredAllocation. It names every free device, and those of the pod's init containers twice. Each name
takes 2 bytes more than the ID. So 10,000 devices fit twice if their IDs have 207 bytes, and 43,000 if they have 46 (shared MIG
devices). Every list fits once: there a device takes 13 bytes more than its ID, and a list has at most 4 MiB also.
"""
MAX_CALLS = 1024
"""Most open calls of one server, including streams. gRPC refuses more."""
REFUSALS_PER_MINUTE = 20
"""Most refusals of one kind that are logged per minute, so that endless calls can't fill the disk."""
NOTE_AFTER_S = 0.02
"""Seconds after an Allocate until the given devices are noted, so that the next Allocate doesn't wait. They are on disk within
100 ms (``scribe.SOON``)."""
MAX_STREAMS = 32
"""Most open ListAndWatch streams of a resource. The kubelet has one, or two for a moment."""
_MAX_AGENTS = 16
_SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", -1),
    # For one connection. A kubelet has a stream, a call for each container that starts, and 200 bytes of metadata.
    ("grpc.max_concurrent_streams", 16),
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    # Limits the memory for incoming data: the window of a stream doesn't grow.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.so_reuseport", 0),
)

_streams = itertools.count(1)
_log = structlog.get_logger()


class DeviceMemory(Protocol):
    """What the gateway remembers about a resource's devices, in addition to the list."""

    @property
    def handed_out(self) -> Container[str]:
        """The devices that containers were given at any time, as far as the gateway remembers."""

    @property
    def held(self) -> Container[str]:
        """The devices that containers hold, by the last known records of the kubelet."""

    @property
    def asked(self) -> AbstractContextManager[None]:
        """Prevents reads of the kubelet's records while an Allocate or GetPreferredAllocation is open."""

    async def chosen(self, request: PreferredRequest, choose: Callable[..., Awaitable[Sequence[str]]]) -> Sequence[str]:
        """Let ``choose`` choose devices; tell it which ones to give last, the best of these first."""

    async def let_in(self) -> None:
        """Wait until the kubelet would admit a pod that gets a device."""

    async def require_free(self, device_ids: Iterable[str]) -> None:
        """Raise RefusedError if the gateway remembers a container that holds one of these; the kubelet believes them free."""

    def hand_out(self, given: Iterable[tuple[str, Sequence[str]]]) -> None:
        """Note that containers were given devices: the dialect, and the devices of each container."""


class Leading(Protocol):
    """Who leads on the node; see ``gateway.leader.leadership``."""

    def register_at(self) -> float:
        """Return the earliest time of the next Register (monotonic seconds)."""

    async def passed(self, call: str, dialect: Dialect, resource: str, request: bytes) -> bytes | None:
        """Return the leader's response to a call; None if this gateway leads and must answer."""

    def count_call(self) -> AbstractContextManager[None]:
        """Count a call while it is being answered."""


class Node(Struct, frozen=True, kw_only=True):
    """The parts of the node and of the gateway that a resource uses."""

    settings: Settings
    source: DeviceSource
    tally: Tally
    turns: Turns
    token: str
    """The token of this gateway."""
    own_socket: Callable[[str], Path]
    """Returns the path on which a resource's server is bound."""
    memory: Callable[[str], DeviceMemory]
    """Returns what is remembered about a resource's devices."""
    accepted: Callable[[str], None]
    """Remembers the dialect that the kubelet accepted."""
    presence: Presence
    """The kubelet that listens."""
    reader: RecordsReader
    """The kubelet's records."""
    lead: Leading
    """Who leads on the node."""
    moved: Signal
    """Set when the phase of a registration may have changed."""


class _Stream:
    """One ListAndWatch stream: its caller, and whether a new list waits to be sent."""

    def __init__(self, user_agent: str | None, *, likely: bool) -> None:
        self.user_agent, self.likely = user_agent, likely
        self.changed, self.ending = asyncio.Event(), False

    def end(self) -> None:
        """End the stream after the current message."""
        self.ending = True
        self.changed.set()


class DevicePlugin:
    """The device plugin of one resource name.

    ``emit`` gets the registration events that calls cause (a stream opened or ended, a list is too large).
    """

    def __init__(self, name: str, node: Node, emit: Callable[[Event], None]) -> None:
        self.name, self._emit, self._memory = name, emit, node.memory(name)
        self._lead, self._source, self._tally, self._turns = node.lead, node.source, node.tally, node.turns
        self._kubelet_minor = node.settings.kubelet_minor
        self._log = _log.bind(resource=name)
        self._dialect: Dialect | None = None
        self._methods: dict[str, rpc.Method] = {}
        self._evidence = Evidence()
        self.asked_options: set[str | None] = set()
        """User agents that asked for the options since the last Register. Kubelets 1.25 and later do so before they answer it."""
        self.list = DeviceList(name, node.tally, grace=node.settings.startup_grace > 0)
        self._streams: dict[int, _Stream] = {}
        self._heeded: int | None = None
        """The stream that is, or was last, treated as the kubelet's."""
        self._notes: list[tuple[str, tuple[str, ...], Level]] = []
        """Given devices that are not noted yet: the dialect, the devices, and what is known of the kubelet's version."""
        self.given = 0
        """Number of containers that were given devices."""
        self._servers: list[rpc.UnixServer] = []
        self._requests = Requests()
        self._seldom = Seldom(REFUSALS_PER_MINUTE)

    # The list.

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices as the kubelet gets them."""
        return self.list.devices

    def publish(self, listing: Listing | None, entries: tuple[states.Entry, ...]) -> None:
        """Send a new list on every open stream, if it differs. Call it after the device IDs were written to disk."""
        if self.list.becomes(listing, entries):
            self.send_again()

    def send_again(self) -> None:
        """Send the list again on every open stream. A kubelet writes its checkpoint for each list."""
        for stream in self._streams.values():
            stream.changed.set()

    # The server.

    @property
    def level(self) -> Level | None:
        """The kubelet versions that fit the evidence; None without a dialect."""
        return level(self._dialect, self._evidence) if self._dialect is not None else None

    @property
    def streaming(self) -> bool:
        """True if an open ListAndWatch stream may be the kubelet's."""
        return any(stream.likely or number == self._heeded for number, stream in self._streams.items())

    async def bind(self, path: Path) -> None:
        """Bind another server on ``path`` (at most 107 bytes), and start it. Streams on earlier servers continue.

        Raises:
            RuntimeError: gRPC can't bind the path.
        """
        server = rpc.UnixServer(path, self._method, _SERVER_OPTIONS, MAX_CALLS)
        self._servers.append(server)  # If this task is cancelled now, ``close`` stops the server.
        await server.start()

    async def drop_earlier_servers(self) -> None:
        """Stop all servers but the newest."""
        *earlier, last = self._servers
        self._servers = [last]
        if earlier:
            await asyncio.gather(*(server.stop(grace=0) for server in earlier))

    async def close(self) -> None:
        """End the streams, then the servers. With an open stream, a server would wait for its whole grace period."""
        self.end_streams()
        servers, self._servers = self._servers, []
        await asyncio.gather(*(server.stop(grace=0.2) for server in servers))

    def offer(self, dialect: Dialect) -> None:
        """Use ``dialect`` from now on, for a kubelet of unknown version."""
        self._dialect, self._methods = dialect, self._calls(dialect)
        self._evidence = Evidence(pinned=self._kubelet_minor)
        self.asked_options.clear()

    def heed(self, number: int) -> None:
        """Treat a stream as the kubelet's. Only its caller is evidence of the kubelet's version."""
        self._heeded = number
        agent = self._streams[number].user_agent
        self._evidence = Evidence(agent, agent in self.asked_options, self._kubelet_minor)

    def end_streams(self) -> None:
        """End every open ListAndWatch stream."""
        for stream in self._streams.values():
            stream.end()

    # The calls. Each keeps the dialect that was in force when it began.

    def _method(self, path: str) -> rpc.Method | None:
        return self._methods.get(path)

    def _calls(self, dialect: Dialect) -> dict[str, rpc.Method]:
        """Return the methods of a dialect's calls, by full method path. Others are UNIMPLEMENTED."""
        unary: dict[str, _Answer] = {"Allocate": self._allocate}
        if dialect.rules[Field.GET_OPTIONS].verdict is Fidelity.LOSSLESS:
            unary["GetDevicePluginOptions"] = self._get_options
        if dialect.rules[Field.PREFERRED_ALLOCATION].verdict is Fidelity.LOSSLESS:
            unary["GetPreferredAllocation"] = self._prefer
        if dialect.rules[Field.PRE_START].verdict is Fidelity.LOSSLESS:
            unary["PreStartContainer"] = self._pre_start

        async def watch(context: rpc.Call) -> None:  # Its request is empty, so it isn't read.
            await self._list_and_watch(dialect, context)

        calls: dict[str, rpc.Method] = {
            call: rpc.reading(self._answered(call, answer, dialect)) for call, answer in unary.items()
        }
        calls["ListAndWatch"] = rpc.writing(watch)
        return {f"/{dialect.plugin_service}/{call}": method for call, method in calls.items()}

    def _answered(self, call: str, answer: _Answer, dialect: Dialect) -> Callable[[rpc.Call], Awaitable[bytes]]:
        """Return the handler of a call. It answers if this gateway leads, and passes the call on if not. It counts each call."""

        async def answered(context: rpc.Call) -> bytes:
            began, status, text = time.perf_counter(), rpc.Code.UNKNOWN, ""
            try:
                request = await self._requests.read(context)
                wire = await self._lead.passed(call, dialect, self.name, request)
                if wire is None:
                    with self._lead.count_call():
                        wire = await answer(dialect, request, context)
                status = rpc.Code.OK
            except RefusedError as refused:
                status, text = rpc.code(refused.fault.value), str(refused)
            except UnsayableError as unsayable:
                status, text = rpc.Code.FAILED_PRECONDITION, str(unsayable)
            except MalformedError as malformed:
                status, text = rpc.Code.INVALID_ARGUMENT, str(malformed)
            else:
                return wire
            finally:
                self._tally.call(self.name, call, time.perf_counter() - began, status.name)
            if (left_out := self._seldom.tell(f"{call} {status.name}")) is not None:
                untold = {"more_before": left_out} if left_out else {}
                self._log.warning("refused", call=call, code=status.name, reason=text, **untold)
            return await context.abort(status, text)

        return answered

    async def _get_options(self, dialect: Dialect, _request: bytes, context: rpc.Call) -> bytes:
        if len(self.asked_options) < _MAX_AGENTS:
            self.asked_options.add(context.user_agent)
        return dialect.encode_options(self.list.options).data

    async def _list_and_watch(self, dialect: Dialect, context: rpc.Call) -> None:
        number, agent = next(_streams), context.user_agent
        # A kubelet sets no deadline for its stream.
        likely = may_be_kubelet(agent) and context.seconds_left is None
        if not self._has_room(likely=likely):
            text = f"too many clients listen to {self.name}. Allowed: {MAX_STREAMS}. End one of them, and call again"
            await context.abort(rpc.Code.RESOURCE_EXHAUSTED, text)
        stream = self._streams[number] = _Stream(agent, likely=likely)
        self._emit(StreamOpened(number, likely))
        try:
            while True:
                stream.changed.clear()
                in_turn = dialect.spacing > 0 and number == self._heeded and not stream.ending
                if in_turn:
                    await self._turns.take(dialect.spacing, writes=True)
                if stream.ending:
                    if in_turn:  # It ended while it waited, so the kubelet will write nothing.
                        self._turns.unused()
                    break
                await self.list.spell(dialect)
                if reason := self.list.too_large(dialect):
                    if number == self._heeded:
                        self._emit(Withhold(reason))
                    await context.abort(rpc.Code.RESOURCE_EXHAUSTED, reason)
                await context.write(self.list.wire(dialect).data)
                await stream.changed.wait()
        finally:
            del self._streams[number]
            self._emit(StreamEnded(number))

    def _has_room(self, *, likely: bool) -> bool:
        """Return True if one more stream is accepted. If it may be the kubelet's, end the oldest other stream to make room."""
        if len(self._streams) < MAX_STREAMS:
            return True
        if not likely:
            return False
        others = (number for number, stream in self._streams.items() if number != self._heeded and not stream.ending)
        oldest = min(others, key=lambda number: (self._streams[number].likely, number), default=None)
        if oldest is not None:
            self._streams[oldest].end()
        return oldest is not None

    async def _allocate(self, dialect: Dialect, request: bytes, _context: rpc.Call) -> bytes:
        containers = dialect.decode_allocate_request(request)
        if not containers:
            raise RefusedError(
                Fault.INVALID_ARGUMENT,
                f"Allocate for {self.name} names no container. Send the device IDs of a container",
            )
        known_level = level(dialect, self._evidence)
        answers: list[ContainerAnswer] = []
        listed = self.list.entries
        asked = [one for container in containers for one in container.device_ids]
        with self._memory.asked:
            if any(not frozenset(given).isdisjoint(asked) for _, given, _ in self._notes):
                self.note_handed_out()
            await self._memory.let_in()
            await self._memory.require_free(asked)
            for container in containers:
                self._check(dialect, container)
                answers.append(await self._source.answer(self.name, container, sendable(dialect, known_level)))
        if dialect.spacing:
            await self._turns.take(
                dialect.spacing, writes=False
            )  # The kubelet writes when all of the pod's containers are answered.
        # The list changed while the source was asked, so judge again.
        if self.list.entries is not listed:
            for container in containers:
                self._check(dialect, container)
        wire = dialect.encode_allocate_answer(containers, answers, known_level)
        self.list.note_lost(dialect, wire)
        # Note it after the answer is sent: the kubelet starts no other pod until it has the answer (#117435).
        if not self._notes:
            asyncio.get_running_loop().call_later(NOTE_AFTER_S, self.note_handed_out)
        self.given += len(containers)
        self._notes += ((dialect.name, container.device_ids, known_level) for container in containers)
        return wire.data

    def note_handed_out(self) -> None:
        """Note the given devices now. Call it before holders are read."""
        notes, self._notes = self._notes, []
        if notes:
            self._memory.hand_out((dialect, device_ids) for dialect, device_ids, _ in notes)
        for _, device_ids, known_level in notes:
            self._log.info("allocated", devices=list(device_ids), kubelet=span(known_level))

    def _check(self, dialect: Dialect, container: ContainerRequest) -> None:
        """Raise RefusedError if a device's state forbids giving it now."""
        if admission.all_present(container.device_ids, self.list.entries):
            return
        self.note_handed_out()
        warnings = admission.judge(
            self.name,
            container.device_ids,
            self.list.entries,
            now=time.monotonic(),
            # 1.8 asks again at each start of a container, so a refusal would end a running pod.
            handed_out=self._memory.handed_out if dialect.asks_again else frozenset(),
            held=self._memory.held,
        )
        for warning in warnings:
            self._log.warning("allocated a device that is not healthy", reason=warning)

    async def _prefer(self, dialect: Dialect, request: bytes, _context: rpc.Call) -> bytes:
        with self._memory.asked:
            asked = dialect.decode_preferred_request(request)
            chosen = [await self._memory.chosen(one, partial(self._choose, one)) for one in asked]
        return dialect.encode_preferred_answer(chosen).data

    async def _choose(self, request: PreferredRequest, avoid: Sequence[str]) -> tuple[str, ...]:
        return await self._source.prefer(self.name, drift.steer(request, self.list.given_last(avoid, request)))

    async def _pre_start(self, dialect: Dialect, request: bytes, _context: rpc.Call) -> bytes:
        device_ids = dialect.decode_pre_start_request(request)
        admission.judge_pre_start(self.name, device_ids, self.list.entries)
        await self._source.prepare(self.name, device_ids)
        return b""  # PreStartContainerResponse has no fields

    @property
    def says_options(self) -> bool:
        """True if the dialect can carry options; the alpha dialects can't."""
        return self._dialect is not None and self._dialect.rules[Field.OPTIONS].verdict is Fidelity.LOSSLESS
