"""Calls a plugin's server as a kubelet would: in the plugin's dialect, each call bounded.

One object is one registration: its connection and its one ListAndWatch, which we never end while the plugin lives. In 15 of 20
known plugins all handlers of ListAndWatch read one Go channel. A second call would leave a handler behind, and that handler would
swallow the next health update.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from adapters.dialect import MalformedError
from adapters.levels import GRPC_GO
from adapters.spelling import require_bounded
from devices.model import ContainerRequest, Fault, Options, RefusedError
from gateway.bridge import judge
from gateway.kubelet.identity import socket_id
from gateway.tasks import first_of
from gateway.wires import rpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from adapters.dialect import Dialect
    from devices.model import ContainerAnswer, PreferredRequest

DIAL_S: Final = 10.0
"""Seconds to connect: kubelets 1.10 and later allow as many."""
OPTIONS_S: Final = 5.0
"""Seconds for GetDevicePluginOptions."""
PREFERRED_S: Final = 10.0
"""Seconds for GetPreferredAllocation."""
PRE_START_S: Final = 28.0
"""Seconds for PreStartContainer. The kubelet waits for 30."""
STREAM_END_S: Final = 0.25
"""If the connection breaks during a call, seconds within which the stream ends also."""
MAX_LIST_BYTES: Final = 4 * 1024 * 1024
"""Most bytes of a message from a plugin, as for every kubelet from 1.10 on."""
BURST_LISTS: Final = 8
"""Lists that a plugin may send without a pause."""
LIST_PERIOD_S: Final = 0.2
"""Least seconds between the further lists."""
READ_BYTES_PER_S: Final = 20e6
"""Most bytes of lists that are read per second."""
READ_PERIOD_S: Final = 0.001
"""Least seconds between two reads of lists, so that endless small lists don't keep the gateway busy. Doubled for each list in a row
that a newer one replaced before it was used, up to 16 times as long."""
CPU_SHARE: Final = 0.1
"""Most of one CPU that the lists of all plugins may take together."""
OWED_REST_S: Final = 10.0
"""Seconds of rest that a plugin may owe. So its first list of 10,000 devices and three more are read without a wait."""
SEND_FACTOR: Final = 5.0
SEND_S: Final = 0.004
"""Until the kubelet has a list, it takes ``SEND_FACTOR`` times the time to read it (10,000 new devices: 270 ms, 55 of them to read
it), plus ``SEND_S`` seconds."""
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_LIST_BYTES),
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # Some HTTP/2 libraries refuse a bare path as authority, which kubelets before 1.26 send.
    ("grpc.default_authority", "localhost"),
    # Some plugins check by it whether the caller is a kubelet.
    ("grpc.primary_user_agent", "grpc-go/{}.{}.{}".format(*GRPC_GO[max(GRPC_GO)][1])),
)
_EMPTY: Final = b""


class AwayError(Exception):
    """The plugin is gone, or hangs (``hangs``). The message names the evidence."""

    def __init__(self, message: str, *, hangs: bool = False) -> None:
        super().__init__(message)
        self.hangs = hangs


class Peer:
    """One registration of a plugin.

    Args:
        path: its socket, at most 107 bytes.
        dialect: the dialect that it speaks.
        options: the options in its Register.
    """

    def __init__(self, path: Path, dialect: Dialect, options: Options) -> None:
        self.path, self.dialect, self.options = path, dialect, options
        self.identity = socket_id(path)
        """The socket of the last connection."""
        self.ended = asyncio.Event()
        """Set when its stream has ended, or the registration is given up."""
        self._calls, self._answered = 0, asyncio.Event()
        """Number of open calls, and an event that is set when the last one is answered."""
        self._channel = rpc.Channel(path, _OPTIONS)

    async def dial(self, seconds: float | None = None) -> None:
        """Connect.

        Raises:
            AwayError: the connection failed.
        """
        try:
            async with asyncio.timeout(DIAL_S if seconds is None else seconds):
                await self._channel.ready()
        except TimeoutError:
            await self.close()
            raise AwayError(f"no process takes connections on {self.path.name}") from None
        self.identity = socket_id(self.path)

    async def close(self) -> None:
        """Close the connection, which cancels its calls."""
        self.ended.set()
        await self._channel.close()

    async def leave(self) -> None:
        """Close the connection once its calls are answered. A call that is cut off would be repeated."""
        self.ended.set()
        try:
            while self._calls:
                self._answered.clear()
                await self._answered.wait()
        finally:
            await self.close()

    async def ask_options(self) -> None:
        """Ask for its options. If it lacks that call, or the call fails, the options in its Register stay.

        An option is in force if Register or this call has it: kubelets before 1.25 use Register, later ones this call.
        """
        if self.dialect.plugin_service != "v1beta1.DevicePlugin":
            return
        try:
            said = self.dialect.decode_options(await self._call("GetDevicePluginOptions", _EMPTY, OPTIONS_S))
        except (RefusedError, AwayError, MalformedError):
            return
        self.options = Options(
            self.options.pre_start_required or said.pre_start_required,
            self.options.preferred_allocation or said.preferred_allocation,
        )

    async def answers(self, seconds: float = 1.0) -> bool:
        """Return True if its server gives any answer within ``seconds``."""
        try:
            await self._call("GetDevicePluginOptions", _EMPTY, seconds)
        except AwayError:
            return False
        except RefusedError as refused:  # Also if it lacks that call.
            return refused.fault is not Fault.DEADLINE_EXCEEDED
        return True

    async def lists(self, rests: Callable[[], float]) -> AsyncGenerator[bytes]:
        """Yield its lists, still encoded, until its stream ends. ``rests`` returns the seconds until the next one may be read.

        Raises:
            CallError: the stream broke.
            ClosedError: the connection is closed.
        """
        stream = self._channel.stream(f"/{self.dialect.plugin_service}/ListAndWatch", _EMPTY)
        newest = _Newest(rests)
        reading = asyncio.create_task(newest.read(stream))
        try:
            while (data := await newest.take()) is not None:
                yield data
            await reading
        finally:
            reading.cancel()
            stream.cancel()
            self.ended.set()

    async def allocate(self, request: ContainerRequest, seconds: float) -> ContainerAnswer:
        """Call Allocate for one container.

        Raises:
            AwayError: the plugin went during the call, or didn't answer in time.
            RefusedError: the plugin refused, in its words, or its answer can't be passed on.
        """
        wire = self.dialect.encode_allocate_request([request])
        data = await self._call("Allocate", wire.data, seconds)
        if len(data) > judge.MAX_ANSWER_BYTES:
            raise _unfit(f"the answer is too long ({len(data)} bytes). Allowed: {judge.MAX_ANSWER_BYTES}")
        try:
            require_bounded(data)
            answers = self.dialect.decode_allocate_answer(data)
        except MalformedError as error:
            raise _unfit(str(error)) from error
        if problem := judge.answer_error(answers):
            raise _unfit(problem)
        return answers[0]

    async def prefer(self, request: PreferredRequest) -> tuple[str, ...]:
        """Call GetPreferredAllocation for one container. Raises as ``allocate``."""
        data = await self._call(
            "GetPreferredAllocation", self.dialect.encode_preferred_request([request]).data, PREFERRED_S
        )
        try:
            require_bounded(data)
            chosen = self.dialect.decode_preferred_answer(data)
        except MalformedError as error:
            raise _unfit(str(error)) from error
        return chosen[0] if chosen else ()

    async def prepare(self, device_ids: tuple[str, ...], seconds: float = PRE_START_S) -> None:
        """Call PreStartContainer. Raises as ``allocate``."""
        await self._call("PreStartContainer", self.dialect.encode_pre_start_request(device_ids).data, seconds)

    async def _call(self, method: str, request: bytes, seconds: float) -> bytes:
        self._calls += 1
        try:
            return await self._channel.call(f"/{self.dialect.plugin_service}/{method}", request, seconds=seconds)
        except rpc.CallError as error:
            if error.code is rpc.Code.DEADLINE_EXCEEDED:
                raise AwayError(f"it didn't answer {method} within {seconds:g} s", hangs=True) from None
            if error.code in _BROKEN and await self._is_over():
                raise AwayError(f"it went during {method}: {error.details[:200]}") from None
            raise RefusedError(Fault(error.code.name), error.details[: judge.MAX_PARTS]) from None
        except rpc.ClosedError:
            raise AwayError("the connection is closed") from None
        finally:
            self._calls -= 1
            if not self._calls:
                self._answered.set()

    async def _is_over(self) -> bool:
        """Return True if the connection broke; False if the plugin itself returned the error."""
        if not self._channel.is_ready:
            return True
        await first_of(self.ended, seconds=STREAM_END_S)
        return self.ended.is_set()


_BROKEN: Final = frozenset({rpc.Code.UNAVAILABLE, rpc.Code.CANCELLED})


def _unfit(what: str) -> RefusedError:
    return RefusedError(Fault.INTERNAL, f"the plugin's answer can't be passed on: {what}")


class ListPace:
    """Decides when a plugin's next list may be read, so that lists take at most ``CPU_SHARE`` of a CPU. Few lists never wait.

    Times are in monotonic seconds.
    """

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        """Until when each plugin must rest for its lists that were read."""

    def rests(self, resource: str, now: float) -> float:
        """Return the seconds until its next list may be read; 0 or less: now."""
        return self._until.get(resource, now) - OWED_REST_S - now

    def spent(self, resource: str, seconds: float, now: float) -> None:
        """Count CPU time that was spent on one of its lists. Plugins that rest at the same time share the limit."""
        resting = {one: until for one, until in self._until.items() if until > now}
        rest = (SEND_FACTOR * seconds + SEND_S) / CPU_SHARE * len({*resting, resource})
        self._until = {**resting, resource: resting.get(resource, now) + rest}


class _Newest:
    """Reads a stream and keeps its last list: each list is complete, so it replaces an unused earlier one.

    ``rests`` returns the seconds until the next list may be used.
    """

    def __init__(self, rests: Callable[[], float]) -> None:
        self._rests = rests
        self._data: bytes | None = None
        self._replaced = 0
        """How many lists in a row were replaced before they were used."""
        self._changed, self._ended = asyncio.Event(), asyncio.Event()
        self._room, self._at = float(BURST_LISTS), time.monotonic()

    async def read(self, stream: rpc.Stream) -> None:
        """Read a stream to its end.

        Raises:
            CallError: the stream broke.
        """
        try:
            while (data := await stream.read()) is not None:
                self._replaced = 0 if self._data is None else self._replaced + 1
                self._data = data
                self._changed.set()
                pause = READ_PERIOD_S * 2.0 ** min(self._replaced, 4)
                await asyncio.sleep(max(pause, len(self._data) / READ_BYTES_PER_S))
        finally:
            self._ended.set()
            self._changed.set()

    async def take(self) -> bytes | None:
        """Wait for the next list, within the limits; None at the end.

        If the stream ends during a rest, its last list is dropped. Otherwise a plugin that registers again after each list
        would never rest.
        """
        await self._changed.wait()
        now = time.monotonic()
        self._room, self._at = min(BURST_LISTS, self._room + (now - self._at) / LIST_PERIOD_S) - 1, now
        await first_of(self._ended, seconds=max(0.0, self._rests(), -self._room * LIST_PERIOD_S))
        data, self._data = self._data, None
        if not self._ended.is_set():
            self._changed.clear()
        return data if self._rests() <= 0 else None
