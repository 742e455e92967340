"""The gRPC server of one driver: registration, claims in each API version, and device health, all on one socket."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import structlog

from adapters import pluginregistration
from adapters.dialect import MalformedError
from adapters.dra import health, plugin
from adapters.dra.plugin import APIS, PluginApi, UnsayableShareError
from adapters.pluginregistration import PluginInfo
from devices.claims import Answer, ClaimName, Refused
from gateway.dra.driver import CLAIM_WAIT_S, DriverClaims
from gateway.dra.rivals import DRA_PLUGIN
from gateway.tasks import first_of
from gateway.wires import rpc
from gateway.wires.log import Seldom

if TYPE_CHECKING:
    from pathlib import Path

BIND_RETRY_S: Final = 1.0
"""Seconds until a socket that can't be bound is tried again."""
PASS_RETRY_S, PASS_RETRY_MAX_S = 0.005, 0.25
"""If the leader ends or yields during a call, seconds until the call is passed on again; doubled each time up to the maximum."""
HEALTH_PERIOD_S: Final = 20.0
"""Seconds between two reports of device health if nothing changes."""
HEALTH_VALID_S: Final = 60
"""Seconds for which a report of device health is valid."""
STOP_GRACE_S: Final = 5.0
"""Seconds that open calls have to end when the server stops."""
PASSED_CALL_S: Final = 45.0
"""Seconds that a successor has to answer a call that was passed on: as long as the kubelet waits."""
MAX_CALLS: Final = 512
"""Most open calls of a driver on all connections. Each pod that starts causes one call."""
LOGGED_PER_MINUTE: Final = 100
"""Most results of one kind that are logged per minute, so that endless calls can't fill the disk."""
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", plugin.MAX_BYTES),
    # For one connection. Each pod that starts causes one call.
    ("grpc.max_concurrent_streams", 256),
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    # Limits the memory for incoming data: the window of a stream doesn't grow.
    ("grpc.http2.bdp_probe", 0),
    # Another server must not bind the same path.
    ("grpc.so_reuseport", 0),
)
_log = structlog.get_logger()

_Work = Callable[[], Awaitable[bytes]]
_SERVER_ENDED: Final = frozenset({rpc.Code.UNAVAILABLE, rpc.Code.CANCELLED})
"""The status codes of a call whose server ended."""
SERVICES: Final = (*(api.registered_as for api in APIS), *map(health.service, health.VERSIONS))
"""The services in the registration. Each kubelet uses those that it knows (run on 1.32, 1.36 and 1.37)."""


class Service:
    """The server of one driver.

    Args:
        claims: prepares the claims.
        decider: returns the socket of another gateway that decides about claims, to which all calls are passed on; None: there
            is none.
    """

    def __init__(self, claims: DriverClaims, decider: Callable[[], Path | None] = lambda: None) -> None:
        self._claims, self._decider = claims, decider
        self.name = claims.name
        """The driver's name."""
        self._server: rpc.UnixServer | None = None
        self._path: Path | None = None
        """The socket by which the kubelet finds this server."""
        self._ending = asyncio.Event()
        self._successor: Path | None = None
        """The socket of the gateway that the kubelet calls from now on."""
        self._deciding: set[asyncio.Task[bytes]] = set()
        self._stopping: asyncio.Future[None] | None = None
        self._seldom = Seldom(LOGGED_PER_MINUTE)

    async def start(self, path: Path) -> None:
        """Serve on ``path``. The kubelet finds it at once.

        Raises:
            OSError, RuntimeError: it can't be bound.
        """
        methods = {
            pluginregistration.GET_INFO: rpc.unary(self._info),
            pluginregistration.NOTIFY: rpc.unary(self._notified),
        }
        for api in APIS:
            name, prepare = f"/{api.service}/{plugin.PREPARE}", partial(self._prepare, api)
            methods[name] = self._calls(name, api.decode_prepare_request, prepare, api.encode_prepare_answer)
            name = f"/{api.service}/{plugin.UNPREPARE}"
            methods[name] = self._calls(
                name, api.decode_unprepare_request, self._unprepare, api.encode_unprepare_answer
            )
        for version in health.VERSIONS:
            methods[f"/{health.service(version)}/{health.WATCH}"] = rpc.writing(self._watch)
        # When a server ends, gRPC removes the name that it bound, even if it is a newer server's by then.
        made = path.with_name(f".{os.urandom(4).hex()}")  # Kubelets ignore names with a dot in front.
        server = rpc.UnixServer(made, methods.get, _OPTIONS, MAX_CALLS)
        self._server = server  # If this task is cancelled now, ``stop`` ends the server.
        await server.start()
        made.rename(path)
        self._path = path

    async def stop(self, successor: Path | None = None) -> None:
        """Remove the socket, so that the kubelet calls another gateway; end streams, and finish open calls.

        Waiting calls are passed on to the successor. Returns when this gateway decides no more calls; ``finish`` waits for the
        successor's answers.
        """
        self._successor = successor
        self._ending.set()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
        if self._server is not None:
            self._stopping = asyncio.ensure_future(
                self._server.stop(STOP_GRACE_S if successor is None else PASSED_CALL_S)
            )
            if successor is None:
                await self._stopping
            elif self._deciding:
                await asyncio.wait([*self._deciding])

    async def finish(self) -> None:
        """Wait until all calls are answered."""
        if self._stopping is not None:
            await self._stopping

    async def _info(self, _: bytes, __: rpc.Call) -> bytes:
        return pluginregistration.encode_info(PluginInfo(DRA_PLUGIN, self.name, versions=SERVICES))

    async def _notified(self, data: bytes, context: rpc.Call) -> bytes:
        self._claims.note_registration(await _decoded(pluginregistration.decode_status, data, context))
        return b""

    def _calls(
        self,
        method: str,
        decode: Callable[[bytes], Sequence[ClaimName]],
        answer: Callable[[ClaimName], Awaitable[Any]],
        encode: Callable[[dict[str, Any]], bytes],
    ) -> rpc.Method:
        """Return the method that calls ``answer`` for each claim of a request. If another gateway answers, its errors are passed back."""

        async def called(data: bytes, context: rpc.Call) -> bytes:
            asked: Sequence[ClaimName] = await _decoded(decode, data, context)

            async def answered() -> bytes:
                answers = await asyncio.gather(*map(answer, asked))
                return encode(dict(zip((one.uid for one in asked), answers, strict=True)))

            try:
                return await self._answer_or_pass_on(method, data, answered)
            except rpc.CallError as error:
                await context.abort(error.code, error.details)

        return rpc.unary(called)

    async def _call_decider(self, method: str, data: bytes, work: _Work) -> bytes:
        """Answer a call here, or pass it on to the gateway that decides; wait if none decides yet.

        Raises:
            CallError: the other gateway returned an error.
        """
        decides, ends, wait = self._claims.leads, time.monotonic() + CLAIM_WAIT_S, PASS_RETRY_S
        while not decides.is_set() and time.monotonic() < ends:
            if (decider := self._decider()) is not None:
                try:
                    return await _passed_on(decider, method, data)
                except rpc.CallError as error:
                    if error.code not in _SERVER_ENDED:
                        raise
            await first_of(decides, seconds=wait)
            wait = min(2 * wait, PASS_RETRY_MAX_S)
        return await work()

    async def _answer_or_pass_on(self, method: str, data: bytes, work: _Work) -> bytes:
        """Answer a call. If this gateway stops before that, pass the call on to its successor, which gives the same answer."""
        deciding = asyncio.ensure_future(self._call_decider(method, data, work))
        self._deciding.add(deciding)
        deciding.add_done_callback(self._deciding.discard)
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait((deciding, ending), return_when=asyncio.FIRST_COMPLETED)
            if deciding.done() or self._successor is None:
                return await deciding
        finally:
            ending.cancel()
            deciding.cancel()
        _log.info(
            "a call was passed on to the instance of the DRA driver that the kubelet knows now",
            driver=self.name,
            call=method,
            to=self._successor.name,
        )
        return await _passed_on(self._successor, method, data)

    async def _prepare(self, api: PluginApi, claim: ClaimName) -> Answer:
        began = time.monotonic()
        try:
            answer = await self._claims.prepare(claim)
            api.encode_prepare_answer({claim.uid: answer})
        except UnsayableShareError as error:
            answer = Refused(str(error))
        except Exception as error:  # noqa: BLE001 - one claim's error must fail that claim only
            _log.exception("a claim could not be prepared because of a defect in the gateway", claim=str(claim))
            answer = Refused(f"a defect in the gateway: {error!r}")
        ms = round(1e3 * (time.monotonic() - began), 1)
        self._claims.note_result(claim, answer.reason if isinstance(answer, Refused) else "")
        if isinstance(answer, Refused):
            self._tell("claim refused", claim, api=api.version, ms=ms, reason=answer.reason)
        else:
            self._tell("claim prepared", claim, api=api.version, ms=ms, devices=[one.device for one in answer])
        return answer

    async def _unprepare(self, claim: ClaimName) -> Refused | None:
        try:
            refused = await self._claims.unprepare(claim)
        except Exception as error:  # noqa: BLE001 - as above
            _log.exception("a claim could not be unprepared because of a defect in the gateway", claim=str(claim))
            refused = Refused(f"a defect in the gateway: {error!r}")
        self._claims.note_result(claim, "" if refused is None else refused.reason)
        if refused is None:
            self._tell("claim unprepared", claim)
        else:
            self._tell("claim not unprepared", claim, reason=refused.reason)
        return refused

    def _tell(self, what: str, claim: ClaimName, **more: Any) -> None:
        """Log the result of a call for a claim, with a ``reason`` as a warning."""
        if (left_out := self._seldom.tell(what)) is not None:
            untold = {"more_before": left_out} if left_out else {}
            tell = _log.warning if "reason" in more else _log.info
            tell(what, driver=self.name, claim=str(claim), **more, **untold)

    async def _watch(self, call: rpc.Call) -> None:
        await first_of(self._claims.leads, self._ending)  # Two gateways might report different health.
        while not self._ending.is_set():
            news = self._claims.next_change
            await call.write(health.encode(self._claims.health(), HEALTH_VALID_S))
            await first_of(news, self._ending, seconds=HEALTH_PERIOD_S)


async def serve(make: Callable[[], Service], path: Path) -> Service:
    """Start a driver's server on ``path``; try again until the socket can be bound."""
    while True:
        service = make()
        try:
            path.parent.mkdir(mode=0o750, exist_ok=True)
            await service.start(path)
        except (OSError, RuntimeError) as error:
            _log.error("the DRA driver's socket can't be bound", driver=service.name, path=str(path), reason=str(error))
            await service.stop()
            await asyncio.sleep(BIND_RETRY_S)
        except asyncio.CancelledError:
            await service.stop()
            raise
        else:
            _log.info("DRA driver serves", driver=service.name, socket=str(path))
            return service


async def _passed_on(path: Path, method: str, data: bytes) -> bytes:
    async with rpc.Channel(path) as channel:
        return await channel.call(method, data, seconds=PASSED_CALL_S)


async def _decoded(decode: Callable[[bytes], Any], data: bytes, context: rpc.Call) -> Any:
    try:
        return decode(data)
    except MalformedError as error:
        await context.abort(rpc.Code.INVALID_ARGUMENT, str(error))
