"""The control socket: orders are in force and on disk before they are answered, and strangers get nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Mapping
from typing import Any

import pytest

from tests.contract.node import GPU, Gateway, Node, OrderError

LIMIT = 64 * 1024
CONNECTIONS = 16


async def _devices(one: Gateway) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for resource in (await one.status())["resources"] for each in resource["devices"]}


async def _talk(one: Gateway, *lines: bytes) -> list[dict[str, Any]]:
    """Send lines on one connection; return the answers until it is closed or silent."""
    reader, writer = await one.control()
    for line in lines:
        writer.write(line)
    answers = []
    try:
        async with asyncio.timeout(20):
            while line := await reader.readline():
                answers.append(json.loads(line))
    except ConnectionError:
        pass
    finally:
        writer.close()
    return answers


def _line(op: str, **fields: object) -> bytes:
    return json.dumps({"v": 1, "op": op, **fields}).encode() + b"\n"


@pytest.mark.also_real
async def test_an_order_is_in_force_and_on_disk_before_it_is_answered(node: Node) -> None:
    one = await node.served(8)
    first, second, *_ = await _devices(one)
    async with node.plugin() as plugin:
        outcome = await one.order("cordon", id=first, reason="smells")
        await plugin.refused(first)
    assert outcome["changed"] is True
    assert [(each["before"], each["now"]) for each in outcome["found"]] == [("healthy", "cordoned")]
    one.kill()
    two = await node.registered()
    await node.allocatable_is(7)
    assert (await _devices(two))[first]["state"] == "cordoned"
    assert "smells" in (await _devices(two))[first]["reason"]
    await two.order("cordon", id=second, reason="smells, too")
    await two.order("uncordon", id=first)
    two.kill()
    three = await node.registered()
    await node.allocatable_is(7)
    assert {name: each["state"] for name, each in (await _devices(three)).items() if each["state"] != "healthy"} == {
        second: "cordoned"
    }
    await three.order("uncordon", id=second)
    await node.allocatable_is(8)
    await node.truthful()


@pytest.mark.also_real
async def test_a_cordon_keeps_what_a_pod_has_and_says_who_holds_it(node: Node) -> None:
    one = await node.served(8)
    (given,) = (await node.admit("pod")).devices[GPU]
    outcome = await one.order("cordon", id=given, reason="smells")
    assert "pod" in outcome["found"][0]["holder"]
    await node.allocatable_is(7)
    await node.start_kubelet()
    await node.allocatable_is(7)
    assert (await node.restart_container("pod")).devices[GPU] == (given,)
    again = await one.order("cordon", id=given, reason="smells")
    assert again["changed"] is False
    other = await one.order("cordon", id=given, reason="burns")
    assert other["changed"] is True
    assert "burns" in (await _devices(one))[given]["reason"]
    assert (await one.order("uncordon", id=given))["changed"] is True
    assert (await one.order("uncordon", id=given))["changed"] is False
    await node.allocatable_is(8)
    await node.truthful()


async def test_an_order_that_can_not_be_written_down_says_so_and_is_in_force(node: Node) -> None:
    one = await node.served(8)
    first, *_ = await _devices(one)
    reader, writer = await one.control()
    away = node.state.rename(node.folder / "away")
    node.state.write_text("")
    writer.write(_line("cordon", id=first, reason="smells") + _line("status"))
    assert "forgotten when the gateway restarts" in json.loads(await reader.readline())["error"]
    assert json.loads(await reader.readline())["status"]["ledger"]["writable"] is False
    writer.close()
    await node.allocatable_is(7)
    assert (await one.metrics())["device_plugin_gateway_ledger_writable"] == 0
    node.state.unlink()
    away.rename(node.state)
    assert (await one.order("cordon", id=first, reason="smells"))["changed"] is False
    one.kill()
    await node.registered()
    await node.allocatable_is(7)
    await node.truthful()


@pytest.mark.parametrize(
    ("op", "fields", "words"),
    [
        ("cordon", {"id": "GPU-nobody", "reason": "smells"}, "GPU-nobody"),
        ("uncordon", {"id": "GPU-nobody"}, "GPU-nobody"),
        ("forget", {"id": "GPU-nobody"}, "GPU-nobody"),
        ("cordon", {"id": "GPU-nobody"}, "reason"),
        ("cordon", {"id": "GPU-nobody", "reason": " "}, "reason"),
        ("cordon", {"id": "GPU-nobody", "reason": "x" * 257}, "reason"),
        ("cordon", {"id": "GPU-nobody", "reason": "\x1b[2J"}, "a reason of at most 256 printable"),
        ("cordon", {"id": "GPU\n", "reason": "smells"}, "device ID"),
        ("uncordon", {"id": "x" * 257}, "a device ID of at most 256"),
        ("cordon", {"reason": "smells"}, "device ID"),
        ("forget", {"id": ["GPU-nobody"]}, "device ID"),
        ("release", {"ids": "GPU-nobody"}, "list"),
        ("release", {"ids": ["GPU-nobody"]}, "GPU-nobody"),
        ("release", {"ids": ["GPU-nobody", 7]}, "device ID"),
        ("release", {}, "Leave them out for all"),
        ("acquire", {"ids": ["x"] * 129}, "128"),
        ("move", {"ids": [], "side": "dra"}, "--dra on"),
        ("explode", {}, "status"),
        ("", {}, "unknown op"),
    ],
)
async def test_a_meaningless_order_is_refused(node: Node, op: str, fields: Mapping[str, Any], words: str) -> None:
    one = await node.served(8)
    with pytest.raises(OrderError, match=words):
        await one.order(op, **fields)
    await node.truthful()
    assert node.allocatable() == 8


async def test_what_is_lost_is_forgotten_once_no_pod_holds_it(node: Node) -> None:
    node.simulate({GPU: {"gpus": 3}})
    one = await node.served(3)
    *_, here, free = await _devices(one)
    node.simulate({GPU: {"gpus": 2}})
    await node.allocatable_is(2)
    assert (await _devices(one))[free]["state"] == "lost"
    with pytest.raises(OrderError, match="nothing to forget"):
        await one.order("forget", id=here)
    outcome = await one.order("forget", id=free)
    assert (outcome["changed"], outcome["found"][0]["now"]) == (True, "forgotten")
    assert free not in await _devices(one)
    one.kill()
    two = await node.registered()
    await node.allocatable_is(2)
    assert free not in await _devices(two)
    held = (await node.admit("pod", count=2)).devices[GPU]
    node.simulate({GPU: {"gpus": 1}})
    await node.allocatable_is(1)
    (lost,) = {name for name, each in (await _devices(two)).items() if each["state"] == "lost"}
    assert lost in held
    with pytest.raises(OrderError, match="pod"):
        await two.order("forget", id=lost)
    assert lost in await _devices(two)
    node.remove("pod")
    await node.admit("other")
    await node.pass_time(20)
    await two.order("forget", id=lost)
    await node.truthful()
    await node.until(lambda: node.capacity() == 1, "the kubelet to hear of it", 1)


async def test_hardware_that_is_released_is_not_looked_at_until_it_is_acquired(node: Node) -> None:
    node.simulate({GPU: {"gpus": 2}})
    one = await node.served(2)
    (given,) = (await node.admit("pod")).devices[GPU]
    answer = await one.order("release", ids=[given])
    assert answer["devices"] == [given]
    assert "pod" in answer["holders"][given]
    states = {name: each["state"] for name, each in (await _devices(one)).items()}
    assert states == {name: "released" if name == given else "healthy" for name in states}
    await node.truthful()
    assert (await one.order("acquire", ids=[given]))["devices"] == [given]
    await node.pass_time(1)
    assert {each["state"] for each in (await _devices(one)).values()} == {"healthy"}
    assert len((await one.order("release", ids=[]))["devices"]) == 2
    await one.order("acquire", ids=[])
    await node.allocatable_is(2)
    await node.truthful()


async def test_another_user_gives_no_orders_whatever_the_files_mode(node: Node) -> None:
    one = await node.served(8)
    first, *_ = await _devices(one)
    path = one.control_socket
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600  # noqa: PTH116 - a moment
    assert stat.S_IMODE(node.state.stat().st_mode) & 0o022 == 0
    asked = socket.socket.getsockopt

    def another(self: socket.socket, *what: int) -> Any:
        if what[:2] == (socket.SOL_SOCKET, socket.SO_PEERCRED):
            return struct.pack("iII", 1, 65534, 65534)
        return asked(self, *what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "getsockopt", another)
        for _ in range(3):
            assert await _talk(one, _line("cordon", id=first, reason="smells")) == []
    assert (await _devices(one))[first]["state"] == "healthy"


@pytest.mark.parametrize(
    "garbage",
    [
        b"\n",
        b"hello\n",
        b"[]\n",
        b"1\n",
        b'{"v": 1, "op": "status"',
        b"\xff\xfe\n",
        b"[" * 20000 + b"\n",
        b"x" * LIMIT * 3,
    ],
)
async def test_garbage_ends_the_conversation_and_nothing_else(node: Node, garbage: bytes) -> None:
    one = node.gateway()
    assert await _talk(one, garbage) == []
    assert (await one.status())["resources"]
    assert not [line for line in one.process.log if line["level"] == "error"]


async def test_an_answered_error_leaves_the_conversation_open(node: Node) -> None:
    one = node.gateway()
    answers = await _talk(
        one,
        b'{"v": 2, "op": "status"}\n',
        b'{"op": "status"}\n',
        _line("explode"),
        b'{"v": 1}\n',
        _line("cordon"),
        _line("status", unheard="of"),
    )
    assert ["error" in each for each in answers] == [True] * 5 + [False]
    assert "version 1" in answers[0]["error"]
    assert "version 1" in answers[1]["error"]
    assert all(each["v"] == 1 for each in answers)


async def test_who_holds_every_connection_or_says_nothing_goes_after_a_while(node: Node) -> None:
    one = node.gateway()
    await one.status()
    talks = [await one.control() for _ in range(CONNECTIONS)]
    await node.pass_time(0.1)
    with pytest.raises(OrderError, match="try again"):
        await one.order("status")
    await node.pass_time(8)
    assert (await one.status())["resources"]
    for reader, writer in talks:
        assert await reader.read() == b""
        writer.close()


async def test_who_does_not_read_is_let_go_and_many_requests_keep_nobody_away(node: Node) -> None:
    one = await node.served(8)
    with socket.socket(socket.AF_UNIX) as deaf:
        path = await node.until(lambda: one.control_socket, "its control socket")
        deaf.connect(path)
        deaf.settimeout(5)
        deaf.sendall(_line("status") * 1000)
        for number in range(3):
            began = asyncio.get_running_loop().time()
            await one.status()
            assert asyncio.get_running_loop().time() - began < 5
            await node.admit(f"pod-{number}")
        await node.pass_time(60)
        deaf.setblocking(False)
        read = []
        with contextlib.suppress(ConnectionResetError):
            while data := deaf.recv(1024 * 1024):
                read.append(len(data))  # BlockingIOError: it is open still.
        assert sum(read) < 600 * 1024
    await node.truthful()


async def test_sockets_of_the_dead_are_removed_and_those_of_the_living_stay(node: Node) -> None:
    dead = await node.served(8)
    left = dead.control_socket
    dead.kill()
    assert os.path.exists(left)  # noqa: PTH110, ASYNC240 - a moment
    await node.pass_time(20)
    one = node.gateway()
    await one.status()
    assert not os.path.exists(left)  # noqa: PTH110, ASYNC240 - as above
    two = node.gateway()
    await two.status()
    await node.pass_time(20)
    assert (await one.status())["token"] != (await two.status())["token"]
    assert len(list(node.state.glob("*.sock"))) == 2
    await node.truthful()


async def test_only_what_dead_gateways_left_is_removed(node: Node) -> None:
    dead, young, old = ("00000000.sock", ".22222222.sock", ".11111111.sock")
    node.state.mkdir()
    for name in (dead, young, old, "foreign.sock"):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(node.state / name))
    os.utime(node.state / old, (0, 0))
    os.utime(node.state / young, (time.time(),) * 2)  # Perhaps another gateway makes it right now.
    (node.state / "33333333.sock").write_text("no socket")
    one = node.gateway()
    await one.status()
    await node.pass_time(5)
    there = {path.name for path in node.state.iterdir()}
    assert there >= {young, "33333333.sock", "foreign.sock"}
    assert not there & {dead, old}


async def test_the_control_socket_is_its_users_alone_before_it_can_be_found(node: Node) -> None:
    seen: list[tuple[bool, int]] = []
    listen = socket.socket.listen

    def watched(self: socket.socket, *arguments: int) -> None:
        if self.family == socket.AF_UNIX and (path := str(self.getsockname())).startswith(str(node.state)):
            seen.append((os.path.basename(path).startswith("."), stat.S_IMODE(os.stat(path).st_mode)))  # noqa: PTH116, PTH119
        listen(self, *arguments)

    umask = os.umask(0)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket.socket, "listen", watched)
            one = node.gateway()
            await one.status()
    finally:
        os.umask(umask)
    assert seen == [(True, 0o600)]
    assert stat.S_IMODE(node.state.stat().st_mode) == 0o700


async def test_an_end_ends_every_conversation(node: Node) -> None:
    one = node.gateway()
    await one.status()
    talks = [await one.control() for _ in range(3)]
    await node.pass_time(0.1)
    assert await one.terminate() == 0
    for reader, writer in talks:
        assert await reader.read() == b""
        writer.close()


async def test_a_control_socket_that_can_not_be_made_at_the_start_comes_when_it_can(node: Node) -> None:
    node.state.write_text("")
    one = await node.served(8)
    assert not one.control_socket
    await node.admit("pod")
    node.state.unlink()
    await node.pass_time(10)
    first, *_ = await _devices(one)
    await one.order("cordon", id=first, reason="smells")
    await node.allocatable_is(7)
    await node.truthful()


async def test_the_commands_of_a_person_reach_every_gateway_and_say_what_became_of_it(node: Node) -> None:
    state = ("--state-dir", str(node.state))
    status, said = await node.command("status", *state)
    assert status == 1
    assert "No gateway runs" in said
    await node.start_kubelet()
    one, two = node.gateway(), node.gateway()
    await node.allocatable_is(8)
    (given,) = (await node.admit("pod")).devices[GPU]
    await node.pass_time(5)
    status, said = await node.command("cordon", *state, given, "--reason", "smells")
    assert status == 0
    assert f"{given} is cordoned: smells" in said
    assert "held by default/pod/main" in said
    await node.allocatable_is(7)
    for each in (one, two):
        assert (await _devices(each))[given]["state"] == "cordoned"
    assert "cordoned" in (await node.command("devices", *state))[1]
    status, said = await node.command("forget", *state, "GPU-nobody")
    assert status == 1
    assert "GPU-nobody" in said
    two.process.stop()
    assert "did not answer" in (await node.command("status", *state))[1]
    two.process.go_on()
    await node.pass_time(5)
    assert (await node.command("uncordon", *state, given))[0] == 0
    assert (await node.command("status", *state))[0] == 0
    await node.allocatable_is(8)
    await node.truthful()


async def test_what_is_known_of_each_device_is_told(node: Node) -> None:
    node.simulate({GPU: {"gpus": 2}})
    node.shared = (GPU,)
    file = node.folder / "config.yaml"
    file.write_text("sharing:\n  timeSlicing:\n    resources: [{name: nvidia.com/gpu, replicas: 3}]\n")
    one = await node.served(6, "--config-file", str(file))
    answer = await one.order("devices")
    facts = answer["facts"][GPU]
    listed = [each["id"] for each in answer["status"]["resources"][0]["devices"]]
    assert len(listed) == 6
    assert {each.partition("::")[0] for each in listed} == {*facts}
    first = next(iter(facts))
    outcome = await one.order("release", ids=[first])
    assert sorted(outcome["devices"]) == sorted(each for each in listed if each.startswith(first))
    assert (await one.order("acquire", ids=[outcome["devices"][0]]))["devices"] == outcome["devices"]


@pytest.mark.parametrize("op", ["release", "acquire"])
async def test_hardware_is_named_by_a_part_of_it_or_as_a_whole(node: Node, op: str) -> None:
    mig = {0: ["1g.10gb", "1g.10gb"]}
    node.simulate({GPU: {"gpus": [{"uuid": "GPU-a"}, {"uuid": "GPU-b"}], "mig": mig}})
    await node.start_kubelet()
    one = node.gateway("--mig-strategy=mixed")
    part = "nvidia.com/mig-1g.10gb"
    await node.allocatable_is(2, part)
    await node.allocatable_is(1)
    first, second = await one.states(part)
    for ids, meant in (
        ([first], [first, second]),
        (["GPU-a"], [first, second]),
        (["GPU-b", second], [first, second, "GPU-b"]),
    ):
        assert sorted((await one.order(op, ids=ids))["devices"]) == sorted(meant)
    with pytest.raises(OrderError, match="no device here is called 'GPU-7': `gateway devices` lists them"):
        await one.order(op, ids=["GPU-b", "GPU-7"])
    with pytest.raises(OrderError, match="Leave them out for all"):
        await one.order(op)


async def test_a_gpu_that_is_released_takes_all_that_is_on_it_along(node: Node) -> None:
    node.simulate({GPU: {"gpus": [{"uuid": "GPU-a"}, {"uuid": "GPU-b"}], "mig": {0: ["1g.10gb", "1g.10gb"]}}})
    await node.start_kubelet()
    one = node.gateway("--mig-strategy=mixed")
    part = "nvidia.com/mig-1g.10gb"
    await node.allocatable_is(2, part)
    (first, _) = await one.states(part)
    await one.order("release", ids=[first])
    await node.allocatable_is(0, part)
    assert set((await one.states(part)).values()) == {"released"}
    assert set((await one.states()).values()) == {"healthy"}
    await one.order("acquire", ids=["GPU-a"])
    await node.allocatable_is(2, part)


async def test_ten_thousand_devices_with_their_facts_fit_an_answer(node: Node) -> None:
    reason = "r" * 256
    gpus = [{"uuid": f"GPU-{number:036}", "health": "Unhealthy", "reason": reason} for number in range(10_000)]
    node.simulate({GPU: {"gpus": gpus}})
    one = node.gateway()
    answer = await one.order("devices")
    assert len(answer["facts"][GPU]) == len(answer["status"]["resources"][0]["devices"]) == 10_000
