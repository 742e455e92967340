"""What comes in on a resource's own socket is bounded: bytes, devices, containers, and calls that never say what they want."""

from __future__ import annotations

import asyncio
import gc
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from adapters import spelling
from adapters.dialect import MalformedError
from adapters.registry import by_name
from adapters.v1beta1 import V1BETA1
from devices.life.states import Entry
from devices.life.states import State as Life
from devices.model import (
    ContainerAnswer,
    ContainerRequest,
    Device,
    PreferredRequest,
    Sendable,
)
from devices.source import Listing
from gateway.configuration.settings import Settings
from gateway.registration import requests, serve
from gateway.registration.devicelist import MAX_LIST_BYTES
from gateway.registration.serve import MAX_REQUEST_BYTES, DevicePlugin
from gateway.registration.turns import Turns
from gateway.tally import Tally
from gateway.wires import rpc
from gateway.wires.rpc import target
from gateway_lab.waiting import until

IDS = [f"GPU-{number:036}::{number % 10}" for number in range(10_000)]
SERVICE = f"/{V1BETA1.plugin_service}"


class _Source:
    async def answer(self, _resource: str, request: ContainerRequest, _sendable: Sendable) -> ContainerAnswer:
        return ContainerAnswer(envs={"IDS": ",".join(request.device_ids)})

    async def prefer(self, _resource: str, request: PreferredRequest) -> tuple[str, ...]:
        return request.available[: request.size]


class _Memory:
    handed_out: Collection[str] = ()
    held: Collection[str] = ()
    asked: AbstractContextManager[None] = nullcontext()

    async def chosen(self, _: PreferredRequest, choose: Callable[..., Awaitable[Sequence[str]]]) -> Sequence[str]:
        return await choose(())

    async def let_in(self) -> None: ...

    async def require_free(self, device_ids: object) -> None:
        pass

    def hand_out(self, given: object) -> None:
        pass


class _Leads:
    """This gateway leads."""

    def register_at(self) -> float:
        return 0.0

    async def passed(self, *_: object) -> bytes | None:
        return None

    def count_call(self) -> AbstractContextManager[None]:
        return nullcontext()


def device_plugin(folder: Path) -> DevicePlugin:
    node = types.SimpleNamespace(
        settings=Settings(), source=_Source(), tally=Tally(), turns=Turns(folder / "checkpoint"), lead=_Leads()
    )
    node.memory = lambda _: _Memory()
    return DevicePlugin("nvidia.com/gpu", cast("Any", node), lambda _: None)


@asynccontextmanager
async def calling(folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    """Serve a resource; give a channel to it."""
    resource = device_plugin(folder)
    resource.publish(Listing(()), tuple(Entry(Device(one), Life.PRESENT) for one in IDS))
    await resource.bind(folder / "gpu.sock")
    resource.offer(V1BETA1)
    try:
        async with grpc.aio.insecure_channel(target(folder / "gpu.sock")) as channel:
            yield channel
    finally:
        await resource.close()


def _large(frame: types.FrameType) -> bool:
    """Whether a frame of ours that has ended, or waits, holds a large text by a name."""
    ours = frame.f_code.co_filename.endswith(("registration/serve.py", "registration/requests.py", "wires/rpc.py"))
    return ours and any(isinstance(one, bytes) and len(one) > MAX_REQUEST_BYTES // 2 for one in frame.f_locals.values())


async def call(channel: grpc.aio.Channel, name: str, request: bytes) -> bytes:
    unary: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"{SERVICE}/{name}")
    return await unary(request, timeout=20)


def silent(channel: grpc.aio.Channel) -> grpc.aio.StreamUnaryCall[bytes, bytes]:
    """Begin an Allocate, and say nothing."""
    unary: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(f"{SERVICE}/Allocate")
    return unary()


async def code(channel: grpc.aio.Channel, name: str, request: bytes) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(channel, name, request)
    return refused.value.code()


async def allocates(channel: grpc.aio.Channel) -> bool:
    """Whether a kubelet's Allocate is answered."""
    request = V1BETA1.encode_allocate_request([ContainerRequest((IDS[0],))]).data
    return V1BETA1.decode_allocate_answer(await call(channel, "Allocate", request))[0].envs == {"IDS": IDS[0]}


@pytest.mark.parametrize("name", ["a%41b", "a%2Fb", "a%zz", "a#b", "a?b", "a b", "a:b", "é", "a;b&c=d"])
async def test_a_folder_may_have_any_name(folder: Path, name: str) -> None:
    """gRPC takes what is after ``unix:`` for a part of a URI."""
    (folder / name).mkdir()
    async with calling(folder / name) as channel:
        assert await allocates(channel)
    async with calling(folder / name), rpc.Channel(folder / name / "gpu.sock") as own:
        answer = await own.call(
            f"{SERVICE}/Allocate", V1BETA1.encode_allocate_request([ContainerRequest((IDS[0],))]).data, seconds=20
        )
        assert V1BETA1.decode_allocate_answer(answer)[0].envs == {"IDS": IDS[0]}


async def test_the_largest_requests_of_a_kubelet_fit(folder: Path) -> None:
    """Every one of 10 000 devices is free, and an init container had them all."""
    request = V1BETA1.encode_preferred_request([PreferredRequest(tuple(IDS), tuple(IDS), 10_000)]).data
    everything = V1BETA1.encode_allocate_request([ContainerRequest(tuple(IDS))]).data
    async with calling(folder) as channel:
        [preferred] = V1BETA1.decode_preferred_answer(await call(channel, "GetPreferredAllocation", request))
        assert list(preferred) == IDS
        [answer] = V1BETA1.decode_allocate_answer(await call(channel, "Allocate", everything))
        assert answer.envs["IDS"].split(",") == IDS


def test_any_list_that_fits_a_kubelet_can_be_asked_back() -> None:
    """Once: the smaller an ID, the more a list needs beside it."""
    for length in (1, 10, 46, 126):
        ids = tuple(f"{number:0{length}x}"[-length:] for number in range(100))
        list_ = len(V1BETA1.encode_list([Device(one) for one in ids]).data)
        assert len(V1BETA1.encode_preferred_request([PreferredRequest(ids, (), 100)]).data) < list_
    assert MAX_LIST_BYTES == MAX_REQUEST_BYTES


@pytest.mark.parametrize(("more", "refused"), [(0, "INVALID_ARGUMENT"), (1, "RESOURCE_EXHAUSTED")])
async def test_a_request_has_so_many_bytes_at_most(folder: Path, more: int, refused: str) -> None:
    async with calling(folder) as channel:
        request = b"\x0a" * (MAX_REQUEST_BYTES + more)
        assert (await code(channel, "Allocate", request)).name == refused
        assert await allocates(channel)


EMPTY = {
    "a container": b"\x0a\x00",
    "a container with a long tag": b"\x8a\x00\x00",
    "a container with the longest tag": b"\x8a\x80\x80\x80\x00\x00",
    "a container with a long length": b"\x0a\x80\x00",
    "a container behind a number": b"\x18\x00\x0a\x00",
    "a container behind a long number": b"\x18\x80\x80\x00\x0a\x00",
    "a container behind four bytes": b"\x1d\x0a\x0a\x0a\x0a\x0a\x00",
    "a container behind eight bytes": b"\x19" + b"\x0a" * 8 + b"\x0a\x00",
    "a container behind a group": b"\x1b\x1c\x0a\x00",
}


@pytest.mark.parametrize("empty", EMPTY.values(), ids=EMPTY.keys())
def test_too_many_containers_are_refused(empty: bytes) -> None:
    for decode in (V1BETA1.decode_allocate_request, V1BETA1.decode_preferred_request):
        assert len(decode(empty * spelling.MAX_CONTAINERS)) == spelling.MAX_CONTAINERS
        with pytest.raises(MalformedError, match="Allowed: 1024"):
            decode(empty * (spelling.MAX_CONTAINERS + 1))
        with pytest.raises(MalformedError, match="Allowed: 200000"):
            decode(empty * (spelling.MAX_NAMES + 1))


def test_as_many_containers_as_may_be_are_read() -> None:
    containers = [ContainerRequest(("a",))] * spelling.MAX_CONTAINERS
    assert V1BETA1.decode_allocate_request(V1BETA1.encode_allocate_request(containers).data) == tuple(containers)


@pytest.mark.parametrize(("dialect", "field"), [*product(["0.1", "v1alpha2"], [b"\x0a\x01x", b"\x8a\x00\x01x"])])
def test_devices_of_an_alpha_are_counted_before_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch, dialect: str, field: bytes
) -> None:
    assert by_name(dialect).decode_allocate_request(field * 1000) == (ContainerRequest(("x",) * 1000),)
    monkeypatch.setattr("adapters.spelling.parse", None)
    with pytest.raises(MalformedError, match="Allowed: 200000"):
        by_name(dialect).decode_allocate_request(field * 200_001)


@pytest.mark.parametrize("tag", [b"\x0a", b"\x12", b"\x8a\x00", b"\x92\x00"])
def test_devices_are_counted_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch, tag: bytes) -> None:
    monkeypatch.setattr("adapters.spelling.parse", None)
    for decode in (
        V1BETA1.decode_allocate_request,
        V1BETA1.decode_preferred_request,
        V1BETA1.decode_pre_start_request,
    ):
        with pytest.raises(MalformedError, match="Allowed: 200000"):
            decode((tag + b"\x00") * 200_001)


async def test_a_request_that_was_refused_is_not_kept(folder: Path) -> None:
    """A refusal's traceback holds what its functions held, until the garbage collector comes: 4 MiB for each."""
    gc.collect()
    gc.disable()
    try:
        async with calling(folder) as channel:
            await code(channel, "Allocate", b"\x0a\x00" * (MAX_REQUEST_BYTES // 2))
            kept = [one for one in gc.get_objects() if isinstance(one, types.FrameType) and _large(one)]
            assert kept == []
    finally:
        gc.enable()


class _Slow:
    """What a call has for its handler: a request that comes when it is told to, and a list that is taken then."""

    def __init__(self) -> None:
        self.comes, self.ended = asyncio.Event(), asyncio.Event()
        self.gone = False

    async def read(self) -> bytes:
        try:
            await self.comes.wait()
        except asyncio.CancelledError:
            self.gone = True
            self.ended.set()
            raise
        self.ended.set()
        return b"a request"

    async def write(self, _data: bytes) -> None:
        await self.read()

    def invocation_metadata(self) -> None: ...

    def time_remaining(self) -> None: ...


async def _refused(channel: grpc.aio.Channel) -> None:
    await code(channel, "Allocate", b"\x0a")


async def _empty(channel: grpc.aio.Channel) -> None:
    one = silent(channel)
    await one.done_writing()
    await one.code()


async def _late(channel: grpc.aio.Channel) -> None:
    await silent(channel).code()


async def _too_many(channel: grpc.aio.Channel) -> None:
    watch: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"{SERVICE}/ListAndWatch")
    await watch(b"", timeout=20).code()


@pytest.mark.parametrize("refuse", [_refused, _empty, _late, _too_many])
async def test_a_call_that_was_refused_is_freed_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[grpc.aio.Channel], Awaitable[None]]
) -> None:
    """The garbage collector knows nothing of what gRPC holds for a call."""

    def calls() -> int:
        return sum(type(one).__name__ == "_ServicerContext" for one in gc.get_objects())

    monkeypatch.setattr(requests, "REQUEST_S", 0.05)
    monkeypatch.setattr(serve, "MAX_STREAMS", 0)
    gc.collect()
    gc.disable()
    try:
        async with calling(folder) as channel:
            for _ in range(5):
                await refuse(channel)
            await until(lambda: not calls(), 20)
    finally:
        gc.enable()


async def test_a_read_that_nobody_waits_for_comes_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC never frees the message of one that was cancelled."""
    monkeypatch.setattr(requests, "REQUEST_S", 0.01)
    slow: Any = _Slow()
    with pytest.raises(MalformedError, match="no request came within"):
        await requests.Requests().read(rpc.Call(slow))
    slow.comes.set()
    async with asyncio.timeout(20):
        await slow.ended.wait()
    assert not slow.gone


async def test_a_write_that_nobody_waits_for_comes_to_its_end(folder: Path) -> None:
    resource = device_plugin(folder)
    slow: Any = _Slow()
    stream = asyncio.ensure_future(resource._list_and_watch(V1BETA1, rpc.Call(slow)))
    for _ in range(5):
        await asyncio.sleep(0)
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream
    slow.comes.set()
    async with asyncio.timeout(20):
        await slow.ended.wait()
    assert not slow.gone


async def test_a_stream_needs_no_request(folder: Path) -> None:
    """What is sent for it stays with gRPC, unread."""
    async with calling(folder) as channel:
        watch: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"{SERVICE}/ListAndWatch")
        stream = watch()
        lists = aiter(stream)
        assert len(V1BETA1.decode_list(await anext(lists))) == len(IDS)
        stream.cancel()
