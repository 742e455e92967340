"""What the bridge refuses, by name, while the stream of a plugin beside it goes on untouched."""

from __future__ import annotations

import asyncio
import os
import socket as sockets
import stat
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from adapters.dialect import Level
from adapters.registry import by_name
from devices.model import ContainerAnswer, ContainerRequest, Device, Options, PreferredRequest, RefusedError
from devices.policy import Bridging, Policy
from devices.source import Fate
from gateway.bridge import judge
from gateway.bridge.peer import LISTS_AT_ONCE, LISTS_EVERY, READ_EVERY, _Newest
from gateway.bridge.sockets import _sockets, folder_error
from gateway.lab.plugins.played import Habits, PlayedPlugin
from gateway.lab.waiting import until
from gateway.wires.rpc import target
from tests.unit.bridging import GUARD_S, NIC, Watched, bridged, health, plugin

V1BETA1 = by_name("v1beta1")
OTHER = "other.example/fpga"
MANY = [Device(str(number)) for number in range(judge.MOST_DEVICES + 1)]


@asynccontextmanager
async def beside(folder: Path, **kind: object) -> AsyncIterator[tuple[Watched, PlayedPlugin]]:
    """A bridge, with a good plugin that must not notice anything."""
    async with bridged(folder, **kind) as bridge, plugin(folder, resource=OTHER, endpoint="good.sock") as good:  # type: ignore[arg-type]
        await bridge.lists("a", "b", resource=OTHER)
        yield bridge, good
        assert good.lists == 1
        assert health(bridge.told[OTHER]) == {"a": True, "b": True}
        assert await bridge.allocate("a", resource=OTHER) == ContainerAnswer({"DEVICES": "a"})


def test_of_a_folder_full_of_sockets_the_first_are_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.bridge.sockets.MOST_SOCKETS", 2)
    for name in ("c.sock", "a.sock", ".0.sock", "b.sock"):
        with sockets.socket(sockets.AF_UNIX) as one:
            one.bind(str(folder / name))
    assert set(_sockets(folder)) == {"a.sock", "b.sock"}


def _link(folder: Path) -> None:
    (folder / "good.sock").rename(folder / "there.sock")
    (folder / "link.sock").symlink_to("there.sock")


def _no_plugins_own(folder: Path) -> None:
    os.mkfifo(folder / "pipe.sock")
    (folder / "folder.sock").mkdir()
    (folder / "alias.sock").hardlink_to(folder / "good.sock")
    (folder / "again.sock").hardlink_to(folder / "kubelet.sock")


def _listening_no_more(folder: Path) -> None:
    with sockets.socket(sockets.AF_UNIX) as left:
        left.bind(str(folder / "left.sock"))


@pytest.mark.parametrize(
    ("resource", "endpoint", "version", "words"),
    [
        pytest.param("nic", None, None, "expected a resource name with a domain", id="a name without a domain"),
        pytest.param("", None, None, "expected a resource name with a domain", id="no name"),
        pytest.param("kubernetes.io/nic", None, None, "belongs to Kubernetes", id="a domain of Kubernetes"),
        pytest.param("requests.example/nic", None, None, "can't start with", id="a name for quotas"),
        pytest.param(f"vendor.example/{'n' * 64}", None, None, "1 to 63", id="a long name"),
        pytest.param("evil.example/nic", None, None, "bridge.allow", id="a name that isn't allowed"),
        pytest.param(NIC, "", None, "the name of a socket", id="no endpoint"),
        pytest.param(NIC, "..", None, "the name of a socket", id="an endpoint that is the folder above"),
        pytest.param(NIC, "../x.sock", None, "the name of a socket", id="an endpoint in the folder above"),
        pytest.param(NIC, "/run/x.sock", None, "the name of a socket", id="an endpoint elsewhere"),
        pytest.param(NIC, "a\nb.sock", None, "the name of a socket", id="an endpoint of two lines"),
        pytest.param(NIC, "kubelet.sock", None, "the plugin's own socket", id="the bridge's own socket"),
        pytest.param(NIC, "x" * 108, None, "at most 107 bytes", id="a long endpoint"),
        pytest.param(NIC, "none.sock", None, "there is none", id="no socket"),
        pytest.param(NIC, "link.sock", None, "there is none", id="a link"),
        pytest.param(NIC, "plain.sock", None, "there is none", id="a plain file"),
        pytest.param(NIC, "pipe.sock", None, "there is none", id="a pipe"),
        pytest.param(NIC, "folder.sock", None, "there is none", id="a folder"),
        pytest.param(NIC, "again.sock", None, "which is this one", id="the bridge's own socket by another name"),
        pytest.param(NIC, "left.sock", None, "failed to dial", id="a socket that nobody listens on"),
        pytest.param(NIC, "good.sock", None, "which serves other.example/fpga", id="another plugin's socket"),
        pytest.param(NIC, "alias.sock", None, "which serves other.example/fpga", id="another's by another name"),
        pytest.param("Vendor.example/nic", None, None, "lower-case letters", id="a domain in capitals"),
        pytest.param(OTHER, None, None, "on good.sock, which lives", id="another plugin's resource"),
        pytest.param("ours.example/gpu", None, None, "by this gateway itself", id="the gateway's own resource"),
        pytest.param(NIC, None, "v1", "is not supported by kubelet", id="a version that nobody knows"),
    ],
)
async def test_a_register_is_refused_by_name(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    resource: str,
    endpoint: str | None,
    version: str | None,
    words: str,
) -> None:
    monkeypatch.setattr("gateway.bridge.admission.RIVAL_GOES", 0.05)
    bridging = Bridging(
        allow=(
            "*vendor.example/*",
            "Vendor.example/*",
            "other.example/*",
            "nic",
            "",
            "kubernetes.io/*",
            "requests.*",
            "ours.*",
        )
    )
    async with beside(folder, bridging=bridging, taken=lambda name: name.startswith("ours.")) as (_, good):
        (good.folder / "link.sock").symlink_to("good.sock")
        (good.folder / "plain.sock").touch()
        _listening_no_more(good.folder)
        _no_plugins_own(good.folder)
        if endpoint == "left.sock":  # The others are to be reached, however busy this machine is.
            monkeypatch.setattr("gateway.bridge.peer.DIAL_TIME", 0.1)
        async with plugin(folder, start=False, resource=resource) as bad:
            await bad.serve()
            with pytest.raises(grpc.aio.AioRpcError, match=words):
                await bad.register(endpoint=endpoint, version=version)


async def test_what_is_no_register_is_refused(folder: Path) -> None:
    path = folder / "device-plugins" / "kubelet.sock"
    async with beside(folder), grpc.aio.insecure_channel(target(path)) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/v1beta1.Registration/Register")
        with pytest.raises(grpc.aio.AioRpcError, match="expected a RegisterRequest"):
            await call(b"\x0a\xff")


async def test_registers_without_end_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.bridge.admission.MOST_REGISTERS", 20)
    async with beside(folder) as (bridge, _), plugin(folder) as bad:
        for _ in range(20):
            await bad.register()
        with pytest.raises(grpc.aio.AioRpcError, match=r"at most 20 Registers of vendor\.example/nic in a minute"):
            await bad.register()
        await bridge.lists("a", "b")


async def test_one_socket_that_registers_under_two_names_in_turn_has_the_first(folder: Path) -> None:
    async with beside(folder) as (bridge, _), plugin(folder) as bad:
        for _ in range(20):
            bad.resource = "vendor.example/second"
            with pytest.raises(grpc.aio.AioRpcError, match=f"which serves {NIC}"):
                await bad.register()
            bad.resource = NIC
            await bad.register()
        await bridge.lists("a", "b")
        assert bridge.bridge.plugins.keys() == {NIC, OTHER}


async def test_names_that_differ_by_case_are_two(folder: Path) -> None:
    upper = "vendor.example/NIC"
    async with (
        beside(folder) as (bridge, _),
        plugin(folder) as lower,
        plugin(folder, resource=upper, endpoint="P.sock"),
    ):
        await bridge.lists("a", "b")
        await bridge.lists("a", "b", resource=upper)
        await lower.change([Device("c")])
        await bridge.lists("c")
        await bridge.lists("a", "b", resource=upper)


async def test_a_plugin_that_never_says_what_it_wants_gets_what_register_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.bridge.peer.OPTIONS_TIME", 0.1)
    async with beside(folder) as (bridge, _), plugin(folder, stalls=True, options=Options(pre_start_required=True)):
        assert (await bridge.lists("a", "b")).options == Options(pre_start_required=True)
        await bridge.allocate("a")


async def test_names_without_end_are_counted_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.bridge.admission.MOST_REGISTERS", 20)
    async with beside(folder) as (bridge, good):
        for number in range(20):
            with pytest.raises(grpc.aio.AioRpcError, match=r"there is none|in a minute"):
                await PlayedPlugin(folder=good.folder, resource=f"x.example/n{number}").register(endpoint="none.sock")
        assert len(bridge.bridge.counted) <= 2


async def test_a_resource_that_is_not_allowed_any_more_is_withdrawn(folder: Path) -> None:
    async with beside(folder) as (bridge, _), plugin(folder):
        await bridge.lists("a", "b")
        bridge.bridge.adopt(Policy(bridging=Bridging(allow=(OTHER,))))
        await bridge.until(lambda told: NIC not in told)
        assert bridge.bridge.fate(NIC, "a") is Fate.WITHDRAWN


@pytest.mark.parametrize("devices", [("a", "b"), ()], ids=["beside one with devices", "beside one without"])
async def test_resources_without_end_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...]
) -> None:
    monkeypatch.setattr("gateway.bridge.judge.MOST_PLUGINS", 2)
    async with (
        beside(folder) as (bridge, _),
        plugin(folder, devices=tuple(map(Device, devices))),
        plugin(folder, start=False, resource="x.example/y", endpoint="y") as bad,
    ):
        await bridge.lists(*devices)
        await bad.serve()
        with pytest.raises(grpc.aio.AioRpcError, match="at most 2 resources"):
            await bad.register()


async def test_of_many_that_register_at_once_no_more_are_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More could not be read back: the file would be put aside as damaged, with all that it says of the others."""
    monkeypatch.setattr("gateway.bridge.judge.MOST_PLUGINS", 3)
    async with bridged(folder) as bridge, AsyncExitStack() as stack:
        kinds = [{"resource": f"x.example/{number}", "endpoint": str(number)} for number in range(8)]
        played = [await stack.enter_async_context(plugin(folder, start=False, **kind)) for kind in kinds]
        await asyncio.gather(*(one.serve() for one in played))
        told = await asyncio.gather(*(one.register() for one in played), return_exceptions=True)
        assert sum(one is None for one in told) == len(bridge.bridge.plugins) == 3


async def test_a_plugin_that_went_without_a_device_makes_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.bridge.judge.MOST_PLUGINS", 2)
    async with beside(folder) as (bridge, _):
        async with plugin(folder, devices=()):
            await bridge.lists()
        await bridge.until(lambda _: bridge.one().peer is None)
        async with plugin(folder, resource="x.example/y", endpoint="y"):
            await bridge.lists("a", "b", resource="x.example/y")


async def test_a_list_for_which_there_was_no_room_is_taken_when_there_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gateway.bridge.judge.MOST_IN_ALL", 3)
    other = "x.example/y"
    async with (
        bridged(folder) as bridge,
        plugin(folder, resource=other, endpoint="y") as played,
    ):
        await bridge.lists("a", "b", resource=other)
        async with plugin(folder, habits=Habits(repeats_s=0.01)):
            await until(lambda: NIC in bridge.bridge.plugins and bool(bridge.one().trouble), GUARD_S)
            peer = bridge.one().peer
            assert peer is not None
            await until(lambda: peer.lists >= 3, GUARD_S)
            await played.change([Device("a")])
            await bridge.lists("a", "b")
            assert bridge.one().trouble == ""
    assert capsys.readouterr().out.count("a plugin's list is refused") == 1


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        pytest.param(V1BETA1.encode_list(MANY).data, "at most 20000 devices", id="too many devices"),
        pytest.param(V1BETA1.encode_list([Device("d"), Device("d")]).data, "each device ID once", id="an ID twice"),
        pytest.param(V1BETA1.encode_list([Device("")]).data, "expected an ID", id="an empty ID"),
        pytest.param(V1BETA1.encode_list([Device("x" * 254)]).data, "1 to 253", id="a long ID"),
        pytest.param(V1BETA1.encode_list([Device("x\x1b[2J")]).data, "printable", id="an ID that steers a screen"),
        pytest.param(b"\x0a\xff\xff", "that are none", id="no message"),
        pytest.param(b"\x0a\x00" * 1_000_000, "at most 200000", id="a million empty devices"),
        pytest.param(b"\x0a" + b"\xff" * 5_000_000, "at most 4194304 bytes", id="5 MB"),
    ],
)
async def test_a_list_is_refused_by_name_and_the_last_one_stays(folder: Path, bad: bytes, words: str) -> None:
    async with beside(folder) as (bridge, _), plugin(folder) as played:
        before = await bridge.lists("a", "b")
        played.raw_list = bad
        await played.change(())
        await until(lambda: bool(bridge.one().trouble), GUARD_S)
        assert words in bridge.one().trouble
        assert any(words in one.reason for one in bridge.bridge.hindrances())
        assert bridge.told[NIC].devices == before.devices
        played.raw_list = None
        await played.change([Device("c")])
        await bridge.lists("c")
        assert (bridge.one().trouble, bridge.bridge.hindrances()) == ("", ())


async def test_all_plugins_together_have_so_many_devices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.bridge.judge.MOST_IN_ALL", 5)
    async with beside(folder) as (bridge, _), plugin(folder) as played:
        await bridge.lists("a", "b")
        await played.change([Device(str(number)) for number in range(4)])
        await until(lambda: bool(bridge.one().trouble), GUARD_S)
        assert "at most 5 devices of all plugins, got 4 besides 2" in bridge.one().trouble
        peer = bridge.one().peer
        assert peer is not None
        assert len(peer._known) == 2  # What was refused takes no memory.
        await played.change([Device(str(number)) for number in range(3)])
        await bridge.lists("0", "1", "2")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        pytest.param(b"", "for one container, got 0", id="for no container"),
        pytest.param(b"\x0a\x00\x0a\x00", "for one container, got 2", id="for two"),
        pytest.param(b"\xff\xff", "that are none", id="no message"),
        pytest.param(b"\x0a\x00" * 150_000, "for one container", id="for 150 000"),
        pytest.param(b"\x0a\x00" * 300_000, "at most", id="for 300 000"),
        pytest.param(
            V1BETA1.encode_allocate_answer(
                [ContainerRequest(("a",))], [ContainerAnswer({str(number): "" for number in range(5000)})], Level(30)
            ).data,
            "at most 4096 variables",
            id="5000 variables",
        ),
        pytest.param(
            V1BETA1.encode_allocate_answer(
                [ContainerRequest(("a",))], [ContainerAnswer({"K": "v" * 2_000_000})], Level(30)
            ).data,
            "at most 1048576 bytes",
            id="2 MB",
        ),
    ],
)
async def test_an_answer_is_refused_by_name(folder: Path, bad: bytes, words: str) -> None:
    async with beside(folder) as (bridge, _), plugin(folder, raw_answer=bad):
        await bridge.lists("a", "b")
        with pytest.raises(RefusedError, match="the plugin's answer can't be passed on") as refused:
            await bridge.allocate("a")
        assert words in str(refused.value)


async def test_a_choice_without_end_is_refused(folder: Path) -> None:
    async def chosen(_: bytes, __: object) -> bytes:
        return b"\x0a\x00" * 300_000

    preferring = Options(preferred_allocation=True)
    async with beside(folder) as (bridge, _), plugin(folder, start=False, options=preferring) as played:
        played._prefer = chosen  # type: ignore[assignment, method-assign]
        await played.start()
        await bridge.lists("a", "b")
        with pytest.raises(RefusedError, match="can't be passed on: expected at most"):
            await bridge.bridge.prefer(NIC, PreferredRequest(("a", "b"), (), 1))


async def test_a_plugin_that_sends_lists_without_end_is_read_slowly(folder: Path) -> None:
    async with beside(folder) as (bridge, _), plugin(folder) as played:
        await bridge.lists("a", "b")
        count, began = bridge.count, time.monotonic()
        for number in range(100):
            await played.change([Device(str(number))])
            await asyncio.sleep(0.001)
        assert bridge.count - count <= LISTS_AT_ONCE + (time.monotonic() - began) / LISTS_EVERY + 2
        await bridge.lists("99")


async def test_small_lists_without_end_leave_time_for_others() -> None:
    sent = iter([b"x"] * 6)
    began = time.monotonic()
    await _Newest(lambda: 0.0).read(SimpleNamespace(read=lambda: _soon(next(sent, None))))  # type: ignore[arg-type]
    assert time.monotonic() - began >= (1 + 2 + 4 + 8 + 16 + 16) * READ_EVERY, "nobody takes them"


async def test_the_last_of_a_flood_of_small_lists_is_read_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds wait in a stream by then: after pauses that go on doubling it would come when the node has long changed."""
    pauses: list[float] = []

    async def slept(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", slept)
    sent = iter([b"x"] * 200)
    await _Newest(lambda: 0.0).read(SimpleNamespace(read=lambda: _soon(next(sent, None))))  # type: ignore[arg-type]
    assert len(pauses) == 200
    assert sum(pauses) <= 200 * 16 * READ_EVERY


async def _ended(rests: float) -> _Newest:
    """What a stream said that has ended."""
    newest, sent = _Newest(lambda: rests), iter([b"x"])
    await newest.read(SimpleNamespace(read=lambda: _soon(next(sent, None))))  # type: ignore[arg-type]
    return newest


async def test_who_ends_while_it_rests_is_not_read() -> None:
    """Else it would register anew after each list, and never rest. Its end is known at once."""
    assert await (await _ended(-1.0)).take() == b"x"
    assert await (await _ended(3600.0)).take() is None


async def test_who_rests_is_read_later() -> None:
    rest, sent, silent = 3600.0, iter([_soon(b"x")]), asyncio.get_running_loop().create_future()
    newest = _Newest(lambda: rest)
    reading = asyncio.ensure_future(newest.read(SimpleNamespace(read=lambda: next(sent, silent))))  # type: ignore[arg-type]
    taking = asyncio.ensure_future(newest.take())
    await until(newest._changed.is_set, GUARD_S)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not taking.done()
    rest = -1.0
    silent.set_result(None)
    assert await taking == b"x"
    await reading


async def test_a_list_is_paid_for(folder: Path) -> None:
    async with beside(folder) as (bridge, _), plugin(folder):
        await bridge.lists("a", "b")
        await until(lambda: NIC in bridge.bridge._pace._until, GUARD_S)


async def _soon(said: object) -> object:
    return said


async def test_a_list_that_is_small_until_it_is_unpacked_is_refused(folder: Path) -> None:
    bomb = V1BETA1.encode_list([Device("d" * 200)]).data * 100_000
    async with beside(folder) as (bridge, _), plugin(folder, habits=Habits(compresses=True), raw_list=bomb):
        await until(lambda: bool(bridge.one().trouble), GUARD_S)
        assert "at most 4194304 bytes" in bridge.one().trouble


async def test_a_register_that_is_small_until_it_is_unpacked_is_refused(folder: Path) -> None:
    path = folder / "device-plugins" / "kubelet.sock"
    async with (
        beside(folder),
        grpc.aio.insecure_channel(target(path), compression=grpc.Compression.Gzip) as channel,
    ):
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/v1beta1.Registration/Register")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"\x0a\x00" * 20_000_000)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_connections_without_end_leave_the_others_alone(folder: Path) -> None:
    async with beside(folder) as (bridge, good):
        path = str(good.folder / "kubelet.sock")
        held = []
        for _ in range(600):
            one = sockets.socket(sockets.AF_UNIX)
            one.setblocking(False)
            try:
                one.connect(path)
            except BlockingIOError:
                one.close()
                await asyncio.sleep(0.01)
            else:
                held.append(one)
        await bridge.allocate("b", resource=OTHER)
        for one in held:
            one.close()
        async with asyncio.timeout(GUARD_S), grpc.aio.insecure_channel(target(Path(path))) as channel:
            await channel.channel_ready()  # It was noticed that they went.
        async with plugin(folder):
            await bridge.lists("a", "b")


@pytest.mark.parametrize("mode", [0o770, 0o707], ids=["a group", "everybody"])
async def test_a_folder_that_others_can_write_into_is_not_opened(folder: Path, mode: int) -> None:
    (folder / "device-plugins").mkdir()
    (folder / "device-plugins").chmod(mode)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3), bridged(folder):
            pass
    assert not (folder / "device-plugins" / "kubelet.sock").exists()


@pytest.mark.parametrize(("owner", "ours"), [(0, True), (os.geteuid(), True), (os.geteuid() + 1, False)])
def test_a_folder_is_roots_or_ones_own(owner: int, *, ours: bool) -> None:
    found = SimpleNamespace(st_mode=stat.S_IFDIR | 0o750, st_uid=owner)
    one: Any = SimpleNamespace(mkdir=lambda **_: None, stat=lambda **_: found)
    assert ("can be written to by others" in folder_error(one)) is not ours
