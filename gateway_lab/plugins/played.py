"""A device plugin of any API version, with the habits that real ones have, over real sockets in this process.

It shows what a kubelet (or the bridge) must stand: handlers that share one channel, second calls that get no list, an empty list
before the end, sockets under a fixed name. The habits are those of the plugins in the bridge's documentation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from adapters import pluginregistration
from adapters.dialect import Dialect, Level
from adapters.pluginregistration import PluginInfo
from adapters.registry import by_name
from devices.model import ContainerAnswer, ContainerRequest, Device, Options, Registration
from gateway.kubelet.identity import KUBELET_SOCKET
from gateway.wires.rpc import target

Context = grpc.aio.ServicerContext[bytes, bytes]
_OWN = (("grpc.use_local_subchannel_pool", 1),)


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What it does otherwise than a good plugin.

    ``shared_channel``: every ListAndWatch reads the same channel, and none looks whether its caller is still there.
    ``silent_again``: a second ListAndWatch gets no list until something changes. ``empties``: it sends an empty list before it
    stops. ``no_options``: it has no GetDevicePluginOptions; ``bare_options``: that asks for nothing, whatever Register said.
    ``repeats_s``: it sends its list again every so many seconds. ``compresses``: whatever it sends.
    """

    shared_channel: bool = False
    silent_again: bool = False
    empties: bool = False
    no_options: bool = False
    bare_options: bool = False
    repeats_s: float = 0.0
    compresses: bool = False


def plainly(request: ContainerRequest) -> ContainerAnswer:
    """Answer as most do: name the devices in a variable."""
    return ContainerAnswer({"DEVICES": ",".join(request.device_ids)})


@dataclass(eq=False, kw_only=True)
class PlayedPlugin:
    """One process's worth of a plugin.

    Args:
        folder: where its socket goes, and kubelet.sock is.
        resource: its resource name.
        devices: its list.
        api: what it speaks.
        endpoint: its socket's name.
        options: what it asks of the kubelet.
        habits: its manners.
        answer: makes an answer to Allocate; may raise what ends the call.
    """

    folder: Path
    resource: str = "vendor.example/nic"
    devices: Sequence[Device] = ()
    api: str = "v1beta1"
    endpoint: str = "played.sock"
    options: Options = Options()
    habits: Habits = Habits()
    answer: Callable[[ContainerRequest], ContainerAnswer] = plainly
    failing: tuple[grpc.StatusCode, str] | None = None
    """How Allocate fails; None: it doesn't."""
    raw_list: bytes | None = None
    """What it sends as its list, whatever its devices are."""
    raw_answer: bytes | None = None
    stalls: bool = False
    """Whether GetDevicePluginOptions is left unanswered, too."""
    stalled: list[asyncio.Event] = field(default_factory=list)
    """Its calls that are left unanswered, in their order: each is answered once its event is set."""
    allocated: list[tuple[str, ...]] = field(default_factory=list)
    prepared: list[tuple[str, ...]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    """What NotifyRegistrationStatus said: '' for registered, else why not."""
    lists: int = 0
    """How often ListAndWatch was called."""
    listening: int = 0
    """How many of these calls are open."""
    most_listening: int = 0
    """How many were open at once."""

    def __post_init__(self) -> None:
        self.dialect: Dialect = by_name(self.api)
        self.free = asyncio.Event()
        """Allocate waits for it."""
        self.free.set()
        self._changed = asyncio.Condition()
        self._changes = 0
        self._channel: asyncio.Queue[None] = asyncio.Queue()
        self._ending = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    @property
    def path(self) -> Path:
        """Its socket."""
        return self.folder / self.endpoint

    async def serve(self) -> None:
        """Bind its socket in the place of whatever had the name."""
        self._ending.clear()
        self.path.unlink(missing_ok=True)
        compression = grpc.Compression.Gzip if self.habits.compresses else None
        server = self._server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)], compression=compression)
        unary = grpc.unary_unary_rpc_method_handler
        service = f"/{self.dialect.plugin_service}"
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            f"{service}/ListAndWatch": grpc.unary_stream_rpc_method_handler(self._list),
            f"{service}/Allocate": unary(self._allocate),
            f"{service}/PreStartContainer": unary(self._prepare),
            f"{service}/GetPreferredAllocation": unary(self._prefer),
            pluginregistration.GET_INFO: unary(self._info),
            pluginregistration.NOTIFY: unary(self._notified),
        }
        if not self.habits.no_options and self.api == "v1beta1":
            handlers[f"{service}/GetDevicePluginOptions"] = unary(self._options)
        server.add_generic_rpc_handlers((_Handlers(handlers),))
        server.add_insecure_port(target(self.path))
        await server.start()

    async def register(self, *, endpoint: str | None = None, version: str | None = None, seconds: float = 15) -> None:
        """Register with whoever is behind kubelet.sock; raises gRPC's error where it is refused."""
        asked = Registration(
            self.api if version is None else version,
            self.endpoint if endpoint is None else endpoint,
            self.resource,
            Options() if self.api != "v1beta1" else self.options,
        )
        async with grpc.aio.insecure_channel(target(self.folder / KUBELET_SOCKET), options=_OWN) as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
                f"/{self.dialect.registration_service}/Register"
            )
            await call(self.dialect.encode_register(asked).data, timeout=seconds)

    async def start(self) -> None:
        """Serve and register."""
        await self.serve()
        await self.register()

    async def change(self, devices: Sequence[Device]) -> None:
        """Have another list from now on, and tell of it."""
        self.devices = devices
        self._changes += 1
        self._channel.put_nowait(None)
        async with self._changed:
            self._changed.notify_all()

    async def stop(self) -> None:
        """End in order."""
        server, self._server = self._server, None
        await self.hang_up()
        if server is not None:
            await server.stop(0.2)
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    async def hang_up(self) -> None:
        """End its streams, as one that is about to end does while it still answers what it was asked."""
        self._ending.set()
        async with self._changed:
            self._changed.notify_all()

    def _spelled(self) -> bytes:
        return self.raw_list if self.raw_list is not None else self.dialect.encode_list(self.devices).data

    async def _list(self, _request: bytes, _context: Context) -> AsyncIterator[bytes]:
        self.lists += 1
        self.listening += 1
        self.most_listening = max(self.most_listening, self.listening)
        told = self._changes
        try:
            if not (self.habits.silent_again and self.lists > 1):
                yield self._spelled()
            while not self._ending.is_set():
                await self._news(told)
                told = self._changes  # What changes while this is sent is told after it.
                if not self._ending.is_set():
                    yield self._spelled()
            if self.habits.empties:
                yield self.dialect.encode_list(()).data
        finally:
            self.listening -= 1

    async def _news(self, told: int) -> None:
        """Wait for a change after so many, or the end."""
        if self.habits.shared_channel:
            ends = asyncio.ensure_future(self._ending.wait())
            news = asyncio.ensure_future(self._channel.get())
            try:
                await asyncio.wait({ends, news}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:  # A handler in Go goes on: nobody tells it.
                await asyncio.wait({ends, news}, return_when=asyncio.FIRST_COMPLETED)
                raise
            finally:
                ends.cancel()
                news.cancel()
            return
        with contextlib.suppress(TimeoutError):
            async with self._changed, asyncio.timeout(self.habits.repeats_s or None):
                await self._changed.wait_for(lambda: self._ending.is_set() or self._changes != told)

    async def _options(self, _request: bytes, _context: Context) -> bytes:
        if self.stalls:
            self.stalled.append(goes_on := asyncio.Event())
            await goes_on.wait()
        return self.dialect.encode_options(Options() if self.habits.bare_options else self.options).data

    async def _allocate(self, request: bytes, context: Context) -> bytes:
        containers = self.dialect.decode_allocate_request(request)
        self.allocated += [one.device_ids for one in containers]
        await self.free.wait()
        if self.failing is not None:
            await context.abort(*self.failing)
        if self.raw_answer is not None:
            return self.raw_answer
        answers = [self.answer(one) for one in containers]
        return self.dialect.encode_allocate_answer(containers, answers, Level(30)).data

    async def _prepare(self, request: bytes, _context: Context) -> bytes:
        self.prepared.append(self.dialect.decode_pre_start_request(request))
        return b""

    async def _prefer(self, request: bytes, _context: Context) -> bytes:
        """Choose the last ones, which nobody else would."""
        asked = self.dialect.decode_preferred_request(request)
        return self.dialect.encode_preferred_answer([one.available[-one.size :] for one in asked]).data

    async def _info(self, _request: bytes, _context: Context) -> bytes:
        path = f"/var/lib/kubelet/{self.folder.name}/{self.endpoint}"
        return pluginregistration.encode_info(PluginInfo("DevicePlugin", self.resource, path, ("v1beta1",)))

    async def _notified(self, request: bytes, _context: Context) -> bytes:
        self.told.append(pluginregistration.decode_status(request))
        return b""


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]]) -> None:
        self._handlers = handlers

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        return self._handlers.get(handler_call_details.method)
