"""What comes in on a resource's own socket is bounded: bytes, devices, containers, and calls that never say what they want."""

from __future__ import annotations

import asyncio
import gc
import math
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from itertools import chain, product
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
import structlog.testing

from adapters import spelling
from adapters.dialect import MalformedError, Wire
from adapters.registry import by_name
from adapters.v1beta1 import V1BETA1
from devices.life.states import Entry
from devices.life.states import State as Life
from devices.model import (
    ContainerAnswer,
    ContainerRequest,
    Device,
    Fault,
    Health,
    PreferredRequest,
    RefusedError,
    Sayable,
)
from devices.source import Listing
from gateway.lab.waiting import until
from gateway.registration import requests, serve
from gateway.registration.devicelist import LIST_LIMIT
from gateway.registration.serve import REQUEST_LIMIT, DevicePlugin
from gateway.registration.turns import Turns
from gateway.tally import Tally
from gateway.wires import rpc
from gateway.wires.rpc import target
from gateway.wires.unix import listens

IDS = [f"GPU-{number:036}::{number % 10}" for number in range(10_000)]
SERVICE = f"/{V1BETA1.plugin_service}"


class _Source:
    async def answer(self, _resource: str, request: ContainerRequest, _sayable: Sayable) -> ContainerAnswer:
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


def device_plugin(folder: Path) -> DevicePlugin:
    return DevicePlugin(
        "nvidia.com/gpu", cast("Any", _Source()), lambda _: None, _Memory(), Tally(), Turns(folder / "checkpoint")
    )


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
    return ours and any(isinstance(one, bytes) and len(one) > REQUEST_LIMIT // 2 for one in frame.f_locals.values())


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


@pytest.mark.parametrize(
    ("name", "asks", "request_"),
    [
        ("Allocate", "answer", V1BETA1.encode_allocate_request([ContainerRequest((IDS[0],))])),
        # A kubelet sets devices aside as soon as this is answered, before it calls Allocate.
        ("GetPreferredAllocation", "prefer", V1BETA1.encode_preferred_request([PreferredRequest((IDS[0],), (), 1)])),
    ],
)
async def test_a_call_is_open_while_its_source_is_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, asks: str, request_: Wire
) -> None:
    events: list[str] = []
    answer = getattr(_Source, asks)

    async def noted(*given: Any) -> Any:
        events.append("asked")
        return await answer(*given)

    @contextmanager
    def asked() -> Iterator[None]:
        events.append("open")
        yield
        events.append("over")

    monkeypatch.setattr(_Source, asks, noted)
    monkeypatch.setattr(_Memory, "asked", asked())
    async with calling(folder) as channel:
        await call(channel, name, request_.data)
    assert events == ["open", "asked", "over"]


async def test_what_is_held_is_refused_before_its_source_is_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_memory: _Memory, device_ids: Iterable[str]) -> None:
        if IDS[1] in {*device_ids}:
            raise RefusedError(Fault.FAILED_PRECONDITION, f"{IDS[1]} is held")

    monkeypatch.setattr(_Memory, "require_free", refuse)
    monkeypatch.delattr(_Source, "answer")
    request = V1BETA1.encode_allocate_request([ContainerRequest((IDS[0],)), ContainerRequest((IDS[1],))]).data
    async with calling(folder) as channel:
        assert await code(channel, "Allocate", request) is grpc.StatusCode.FAILED_PRECONDITION


async def test_what_was_given_a_moment_ago_is_noted_before_it_is_judged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    async def judged(_memory: _Memory, device_ids: Sequence[str]) -> None:
        events.append(f"judged {device_ids[0]}")

    def noted(_memory: _Memory, given: Iterable[tuple[str, Sequence[str]]]) -> None:
        events.extend(f"noted {one}" for _, ids in given for one in ids)

    monkeypatch.setattr(serve, "NOTED_AFTER", 3600.0)
    monkeypatch.setattr(_Memory, "require_free", judged)
    monkeypatch.setattr(_Memory, "hand_out", noted)
    async with calling(folder) as channel:
        for one in (IDS[0], IDS[1], IDS[0]):
            await call(channel, "Allocate", V1BETA1.encode_allocate_request([ContainerRequest((one,))]).data)
        first, second = IDS[:2]
        assert events == [f"judged {first}", f"judged {second}", f"noted {first}", f"noted {second}", f"judged {first}"]


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
    assert LIST_LIMIT == REQUEST_LIMIT


@pytest.mark.parametrize(("more", "refused"), [(0, "INVALID_ARGUMENT"), (1, "RESOURCE_EXHAUSTED")])
async def test_a_request_has_so_many_bytes_at_most(folder: Path, more: int, refused: str) -> None:
    async with calling(folder) as channel:
        request = b"\x0a" * (REQUEST_LIMIT + more)
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
def test_containers_are_counted_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch, empty: bytes) -> None:
    whole = empty * spelling.MAX_CONTAINERS
    few = empty * (spelling.MAX_CONTAINERS // 4)
    for decode in (V1BETA1.decode_allocate_request, V1BETA1.decode_preferred_request):
        assert len(decode(few)) == spelling.MAX_CONTAINERS // 4
        monkeypatch.setattr("adapters.v1beta1.parse", None)
        with pytest.raises(MalformedError, match="at most 1024 containers"):
            decode(whole + empty)
        monkeypatch.undo()


def test_as_many_containers_as_may_be_are_read() -> None:
    containers = [ContainerRequest(("a",))] * spelling.MAX_CONTAINERS
    assert V1BETA1.decode_allocate_request(V1BETA1.encode_allocate_request(containers).data) == tuple(containers)


@pytest.mark.parametrize(("dialect", "field"), [*product(["0.1", "v1alpha2"], [b"\x0a\x01x", b"\x8a\x00\x01x"])])
def test_devices_of_an_alpha_are_counted_before_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch, dialect: str, field: bytes
) -> None:
    assert by_name(dialect).decode_allocate_request(field * 1000) == (ContainerRequest(("x",) * 1000),)
    monkeypatch.setattr("adapters.alpha.parse", None)
    with pytest.raises(MalformedError, match="at most 200000 device IDs"):
        by_name(dialect).decode_allocate_request(field * 200_001)


@pytest.mark.parametrize("tag", [b"\x0a", b"\x12", b"\x8a\x00", b"\x92\x00"])
def test_devices_are_counted_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch, tag: bytes) -> None:
    monkeypatch.setattr("adapters.v1beta1.parse", None)
    for decode in (
        V1BETA1.decode_allocate_request,
        V1BETA1.decode_preferred_request,
        V1BETA1.decode_pre_start_request,
    ):
        with pytest.raises(MalformedError, match="at most 200000 device IDs"):
            decode((tag + b"\x00") * 200_001)


async def test_who_asks_for_nothing_keeps_nobody_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls whose request doesn't come, those that are read make room for those in line; the last ones have more time."""
    monkeypatch.setattr(requests, "IN_LINE", 0.01)
    monkeypatch.setattr(requests, "REQUEST_TIME", 60.0)
    monkeypatch.setattr(requests, "MAX_READ", 3)  # A connection has few calls at once.
    async with calling(folder) as channel:
        calls = [silent(channel) for _ in range(2 * requests.MAX_READ)]
        assert await allocates(channel)
        assert await allocates(channel)
        for one in calls:
            one.cancel()


async def test_so_many_requests_are_read_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "IN_LINE", 60.0)
    monkeypatch.setattr(requests, "MAX_READ", 3)
    begun, read = asyncio.Semaphore(0), requests.Requests._read

    async def begins(reads: requests.Requests, context: Any) -> object:
        begun.release()
        return await read(reads, context)

    monkeypatch.setattr(requests.Requests, "_read", begins)
    async with calling(folder) as channel:
        calls = [silent(channel) for _ in range(requests.MAX_READ)]
        for _ in calls:
            await begun.acquire()
        waiting = asyncio.ensure_future(allocates(channel))
        await asyncio.wait([waiting], timeout=0.2)
        assert not waiting.done()
        calls[0].cancel()
        assert await waiting
        for one in calls:
            one.cancel()


async def test_a_request_has_its_time_and_no_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "REQUEST_TIME", 0.05)
    async with calling(folder) as channel:
        async with asyncio.timeout(20):
            assert (await silent(channel).code()).name == "INVALID_ARGUMENT"
        assert await allocates(channel)


async def test_a_call_without_a_request_is_refused(folder: Path) -> None:
    async with calling(folder) as channel:
        one = silent(channel)
        await one.done_writing()
        assert (await one.code()).name == "INVALID_ARGUMENT"


async def test_a_request_that_was_refused_is_not_kept(folder: Path) -> None:
    """A refusal's traceback holds what its functions held, until the garbage collector comes: 4 MiB for each."""
    gc.collect()
    gc.disable()
    try:
        async with calling(folder) as channel:
            await code(channel, "Allocate", b"\x0a\x00" * (REQUEST_LIMIT // 2))
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

    monkeypatch.setattr(requests, "REQUEST_TIME", 0.05)
    monkeypatch.setattr(serve, "MOST_STREAMS", 0)
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
    monkeypatch.setattr(requests, "REQUEST_TIME", 0.01)
    slow: Any = _Slow()
    with pytest.raises(MalformedError, match="expected a request within"):
        await requests.Requests().read(rpc.Call(slow))
    slow.comes.set()
    async with asyncio.timeout(20):
        await slow.ended.wait()
    assert not slow.gone


async def test_each_of_several_requests_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "REQUEST_TIME", 0.2)
    reads, slow = requests.Requests(), cast("Any", _Slow())
    first = asyncio.create_task(reads.read(rpc.Call(slow)))
    await asyncio.sleep(0.1)  # One begins while the other is under way.
    async with asyncio.timeout(20):
        late = await asyncio.gather(first, reads.read(rpc.Call(slow)), return_exceptions=True)
    assert [type(one) for one in late] == [MalformedError, MalformedError]


async def test_who_is_read_when_nobody_waits_any_more_has_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "IN_LINE", 0.01)
    monkeypatch.setattr(requests, "MAX_READ", 1)
    reads, first, second = requests.Requests(), cast("Any", _Slow()), cast("Any", _Slow())
    held_up, waits = asyncio.create_task(reads.read(rpc.Call(first))), asyncio.create_task(reads.read(rpc.Call(second)))
    with pytest.raises(MalformedError):
        await held_up
    await asyncio.wait([waits], timeout=0.1)
    second.comes.set()
    assert await waits == b"a request"


async def test_nobody_waits_in_line_for_longer_than_a_request_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "IN_LINE", 60.0)
    monkeypatch.setattr(requests, "REQUEST_TIME", 0.05)
    monkeypatch.setattr(requests, "MAX_READ", 1)
    reads, slow = requests.Requests(), cast("Any", _Slow())
    held_up = asyncio.create_task(reads.read(rpc.Call(slow)))
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        with pytest.raises(MalformedError):
            await reads.read(rpc.Call(slow))
    slow.comes.set()
    assert await held_up == b"a request"


async def test_only_the_server_that_was_bound_last_is_kept(folder: Path) -> None:
    resource = device_plugin(folder)
    for name in ("earlier", "last"):
        await resource.bind(folder / name)
    for _ in range(2):
        await resource.drop_earlier_servers()
    assert [listens(folder / name) for name in ("earlier", "last")] == [False, True]
    assert len(resource._servers) == 1
    await resource.close()


@pytest.mark.parametrize("likely", [(True, False), (False, True), (False, False)])
def test_whether_a_stream_is_open_that_may_be_the_kubelets(folder: Path, likely: Collection[bool]) -> None:
    resource = device_plugin(folder)
    resource._streams = {number: serve._Stream("somebody", likely=one) for number, one in enumerate(likely, 1)}
    assert resource.streaming is any(likely)
    resource._heeded = 2
    assert resource.streaming


def test_what_was_handed_out_a_moment_ago_is_given_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubelet 1.8 asks again at each start of a container, also where the device has fallen ill meanwhile."""
    monkeypatch.setattr("devices.life.admission.JUST_TURNED_S", 0.0)
    given = set[str]()

    def hand_out(_: _Memory, notes: Iterable[tuple[str, Sequence[str]]]) -> None:
        given.update(chain.from_iterable(ids for _, ids in notes))

    monkeypatch.setattr(_Memory, "handed_out", given)
    monkeypatch.setattr(_Memory, "hand_out", hand_out)
    resource = device_plugin(folder)
    resource.publish(Listing(()), (Entry(Device("a", Health.UNHEALTHY), Life.UNHEALTHY, "ill"),))
    with pytest.raises(RefusedError):
        resource._check(by_name("0.1"), ContainerRequest(("a",)))
    resource._notes = [("0.1", ("a",), by_name("0.1").kubelets)]
    resource._check(by_name("0.1"), ContainerRequest(("a",)))


async def test_a_call_that_a_defect_ended_is_counted_as_failed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = list[tuple[str, str]]()
    monkeypatch.setattr(Tally, "call", lambda _, _resource, call, _seconds, code: counted.append((call, code)))
    monkeypatch.delattr(_Source, "answer")
    request = V1BETA1.encode_allocate_request([ContainerRequest((IDS[0],))]).data
    async with calling(folder) as channel:
        assert await code(channel, "Allocate", request) is grpc.StatusCode.UNKNOWN
    assert counted == [("Allocate", "UNKNOWN")]


def test_who_makes_room_for_a_stream_that_may_be_the_kubelets(folder: Path) -> None:
    """All look like a kubelet, and the first is taken for it."""
    resource = device_plugin(folder)
    resource._streams = {number: serve._Stream("a kubelet", likely=True) for number in range(serve.MOST_STREAMS)}
    resource._heeded = 0
    assert not resource._has_room(likely=False)
    made = [resource._has_room(likely=True) for _ in range(serve.MOST_STREAMS)]
    assert made == [True] * (serve.MOST_STREAMS - 1) + [False]
    assert [number for number, stream in resource._streams.items() if not stream.ending] == [0]
    del resource._streams[1]
    assert resource._has_room(likely=False)


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


async def test_a_request_that_is_here_counts_where_the_loop_was_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "REQUEST_TIME", 0)
    slow: Any = _Slow()
    slow.comes.set()
    slow.read = _turns_later(slow.read)
    assert await requests.Requests().read(rpc.Call(slow)) == b"a request"


def _turns_later(read: Callable[[], Awaitable[bytes]]) -> Callable[[], Awaitable[bytes]]:
    async def later() -> bytes:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return await read()

    return later


async def test_who_waits_may_come_while_others_end() -> None:
    """Their time is over, and they haven't noticed yet."""
    reads, slow, last = requests.Requests(), cast("Any", _Slow()), cast("Any", _Slow())
    readers = [asyncio.ensure_future(reads.read(rpc.Call(slow))) for _ in range(requests.MAX_READ)]
    await asyncio.sleep(0)
    reads._end_late(math.inf, 0)
    last.comes.set()
    assert await reads.read(rpc.Call(last)) == b"a request"
    ended = await asyncio.gather(*readers, return_exceptions=True)
    assert {type(one) for one in ended} == {MalformedError}
    slow.comes.set()


async def test_a_request_that_has_come_is_not_late() -> None:
    """It came before the look at who is late, and its reader hasn't run yet."""
    reads, slow = requests.Requests(), cast("Any", _Slow())
    reader = asyncio.ensure_future(reads.read(rpc.Call(slow)))
    await asyncio.sleep(0)
    [reading] = reads._reading
    reading.set_result(b"a request")
    reads._end_late(math.inf, 0)
    assert await reader == b"a request"
    slow.comes.set()


async def test_each_request_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one timer: it goes on to the next when the one that it was set for is read."""
    monkeypatch.setattr(requests, "REQUEST_TIME", 0.02)
    reads, quick, slow = requests.Requests(), cast("Any", _Slow()), cast("Any", _Slow())
    quick.comes.set()
    assert await reads.read(rpc.Call(quick)) == b"a request"
    with pytest.raises(MalformedError, match="expected a request within"):
        async with asyncio.timeout(20):
            await reads.read(rpc.Call(slow))
    with pytest.raises(MalformedError, match="expected a request within"):
        async with asyncio.timeout(20):
            await reads.read(rpc.Call(slow))
    slow.comes.set()


async def test_what_goes_wrong_is_told() -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise OSError

    async def is_cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(OSError):
        await rpc.Call(cast("Any", types.SimpleNamespace(read=fails))).read()
    with pytest.raises(asyncio.CancelledError):
        await rpc.Call(cast("Any", types.SimpleNamespace(read=is_cancelled))).read()


async def test_a_stream_needs_no_request(folder: Path) -> None:
    """What is sent for it stays with gRPC, unread."""
    async with calling(folder) as channel:
        watch: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"{SERVICE}/ListAndWatch")
        stream = watch()
        lists = aiter(stream)
        assert len(V1BETA1.decode_list(await anext(lists))) == len(IDS)
        stream.cancel()


async def test_refusals_are_told_up_to_a_number(folder: Path) -> None:
    async with calling(folder) as channel:
        with structlog.testing.capture_logs() as logs:
            for _ in range(serve.REFUSALS_TOLD + 5):
                await code(channel, "Allocate", b"")
            await code(channel, "PreStartContainer", b"\x0a\x01x")
    assert [line["call"] for line in logs] == ["Allocate"] * serve.REFUSALS_TOLD + ["PreStartContainer"]
