"""The kubelet finds the gateway, whichever API it speaks, and finds it again, whatever goes wrong between them."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import faulthandler
import os
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.contract.clock import patches, spoiled
from tests.contract.node import GPU, Gateway, Kubelet, Node, gpus

_NEW_USER: Final = 0x10000000
"""CLONE_NEWUSER: a user namespace has limits of its own."""
ONE_OF_EACH: Final = ["1.8", "1.9", "1.11", "1.20", "1.28", "1.37"]
"""A kubelet of each class that registers in a way of its own."""


def accepted(kubelet: Kubelet, resource: str = GPU) -> int:
    """Count the Registers that a kubelet answered with OK."""
    return len([one for one in kubelet.notes if one.startswith(f"Register {resource} ") and ": OK" in one])


async def accepted_is(node: Node, count: int, seconds: float) -> None:
    """Wait until the kubelet answered so many Registers with OK."""
    await node.until(lambda: accepted(node.kubelet) == count, f"{count} registrations", seconds)


async def resource_of(gateway: Gateway, name: str = GPU) -> dict[str, Any]:
    """Return what its status says of a resource."""
    return next(one for one in (await gateway.status())["resources"] if one["name"] == name)


async def is_present(gateway: Gateway) -> bool:
    """Whether its status says that there is a kubelet."""
    return bool((await gateway.status())["kubelet"]["present"])


@pytest.mark.also_real(genuine=False)  # The kubelet's own words are counted.
@pytest.mark.parametrize(
    "version", ["1.8", "1.9", "1.10", "1.12", "1.16", "1.19", "1.23", "1.25", "1.28", "1.31", "1.34", "1.36", "1.37"]
)
async def test_each_start_of_a_kubelet_takes_one_registration(node: Node, version: str) -> None:
    await node.served(8, version=version)
    given = await node.admit("first", count=2)
    assert sorted(given.answer.envs["NVIDIA_VISIBLE_DEVICES"].split(",")) == sorted(given.devices[GPU])
    await node.pass_time(400)
    assert accepted(node.kubelet) == 1
    await node.start_kubelet(version)
    await node.allocatable_is(8)
    await node.admit("second")
    await node.pass_time(400)
    assert accepted(node.kubelet) == 1


async def test_a_kubelet_is_upgraded_and_downgraded_under_it(node: Node) -> None:
    one = node.gateway()
    spoken = {}
    for version in ("1.8", "1.9", "1.10", "1.20", "1.25", "1.34", "1.37", "1.28", "1.9", "1.8", "1.37"):
        await node.start_kubelet(version)
        await node.allocatable_is(8, seconds=1)  # What the kubelet before refused is offered again.
        await node.admit(f"on {version}")
        node.remove(f"on {version}")
        assert accepted(node.kubelet) == 1
        spoken[version] = (await resource_of(one))["api"]
    assert spoken == {"1.8": "0.1", "1.9": "v1alpha2"} | dict.fromkeys(
        ("1.10", "1.20", "1.25", "1.34", "1.37", "1.28"), "v1beta1"
    )


@pytest.mark.parametrize("version", ["1.8", "1.9", "1.34"])
@pytest.mark.parametrize("end", ["kill", "terminate"])
async def test_the_next_gateway_asks_a_kubelet_in_its_own_api_at_once(node: Node, version: str, end: str) -> None:
    one = await node.served(8, version=version)
    if end == "kill":
        await node.pass_time(1)
        one.kill()
    else:
        await one.terminate()
    await node.allocatable_is(0)
    before = node.registers[GPU]
    node.gateway()
    await node.allocatable_is(8)
    assert node.registers[GPU] == before + 1


@pytest.mark.parametrize(
    ("version", "api", "served"),
    [
        ("1.8", "0.1", True),
        ("1.9", "v1alpha", True),
        ("1.9", "0.1", False),
        ("1.28", "v1beta1", True),
        ("1.28", "v1alpha", False),
        ("1.8", "v1beta1", False),
    ],
)
async def test_an_api_that_an_operator_fixes_is_kept_to(node: Node, version: str, api: str, *, served: bool) -> None:
    await node.start_kubelet(version)
    one = node.gateway("--api", api)
    if served:
        await node.allocatable_is(8)
        return
    await node.pass_time(60)
    assert (node.allocatable(), accepted(node.kubelet)) == (0, 0)
    assert f"use --api auto (now: --api {api})" in (await resource_of(one))["trouble"]


async def test_a_kubelet_of_an_api_that_nobody_knows_is_asked_again(node: Node) -> None:
    node.fault(supports_only="v2")
    await node.start_kubelet()
    one = node.gateway()
    await node.pass_time(60)
    assert node.registers[GPU] <= 5
    assert "speaks only v2, which this gateway does not know: upgrade" in (await resource_of(one))["trouble"]
    node.fault()
    await node.allocatable_is(8, seconds=20)
    assert (await resource_of(one))["trouble"] == ""


@pytest.mark.parametrize("version", ["1.9", "1.20", "1.34"])
@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("UNKNOWN", "no space left on device"),
        ("UNKNOWN", "the ResourceName is invalid"),
        ("UNAVAILABLE", "connection reset by peer"),
        ("DEADLINE_EXCEEDED", "too late"),
        ("RESOURCE_EXHAUSTED", "too many requests"),
    ],
)
async def test_a_refusal_that_names_no_version_is_tried_again(node: Node, version: str, code: str, text: str) -> None:
    node.fault(register_errors=3, register_code=code, register_text=text)
    await node.start_kubelet(version)
    node.gateway()
    await node.allocatable_is(8, seconds=2)
    assert (node.registers[GPU], accepted(node.kubelet)) == (4, 1)


async def test_an_api_that_was_accepted_last_is_not_offered_where_another_one_is_chosen(node: Node) -> None:
    before = await node.served(8, version="1.9")
    await node.pass_time(2)
    before.kill()
    one = await node.served(8, "--api", "v1beta1", version="1.34")
    refused = {name: count for name, count in (await one.metrics()).items() if "register_errors_total" in name}
    assert not any(refused.values())


async def test_troubles_of_the_kubelet_before_hold_up_no_new_one(node: Node) -> None:
    node.fault(register_errors=1000)
    await node.start_kubelet()
    node.gateway()
    await node.pass_time(120)
    node.fault(register_errors=1)
    await node.start_kubelet()
    await node.allocatable_is(8, seconds=1)


@pytest.mark.parametrize("version", ["1.9", "1.20", "1.36"])
async def test_a_register_that_is_never_answered_is_sent_again_in_the_same_api(node: Node, version: str) -> None:
    node.fault(register_lost=True)
    await node.start_kubelet(version)
    node.gateway()
    await node.pass_time(14)
    assert node.registers[GPU] == 1  # A kubelet may dial for 10 s before it answers.
    node.fault()
    await node.allocatable_is(8, seconds=3)


@pytest.mark.parametrize("version", ONE_OF_EACH)
async def test_a_kubelet_that_never_calls_back_is_registered_with_again(node: Node, version: str) -> None:
    node.fault(never_calls_back=True)
    await node.start_kubelet(version)
    node.gateway()
    await node.until(lambda: node.registers[GPU], "a Register")
    before = node.registers[GPU]
    await node.pass_time(10)  # It may dial for as long as this.
    assert node.registers[GPU] == before or version == "1.8"
    node.fault()
    await node.allocatable_is(8, seconds=10)


async def test_a_kubelet_that_connects_and_never_calls_is_registered_with_again_soon(node: Node) -> None:
    node.fault(never_calls_back=True, register_late_ms=1000)
    await node.start_kubelet("1.37")
    node.gateway()
    await node.until(lambda: node.registers[GPU], "a Register")
    caller = node.stranger("v1beta1", "grpc-go/1.72.1")
    assert (await caller.call("GetDevicePluginOptions"))[0] == "OK"  # As it does before it answers.
    await node.until(lambda: node.registers[GPU] == 2, "another Register", 5)


@pytest.mark.parametrize(("version", "api"), [("1.9", "v1alpha2"), ("1.20", "v1beta1")])
@pytest.mark.parametrize("answers", [False, True])
async def test_a_kubelet_that_calls_is_not_registered_with_again_though_it_answers_late_with_an_error_or_never(
    node: Node, version: str, api: str, *, answers: bool
) -> None:
    late = {"register_late_ms": 2000, "register_errors": 1, "register_code": "UNKNOWN"}
    node.fault(**(late if answers else {"register_lost": True}))
    await node.start_kubelet(version)
    one = node.gateway()
    await node.until(lambda: node.registers[GPU], "a Register")
    stream = node.stranger(api, "grpc-go/1.72.1").listen()
    assert await stream.read()
    await node.pass_time(60)
    assert (node.registers[GPU], (await resource_of(one))["phase"], stream.done()) == (1, "serving", False)


@pytest.mark.parametrize("version", ONE_OF_EACH)
async def test_a_stream_that_breaks_is_followed_by_one_registration(node: Node, version: str) -> None:
    await node.served(8, version=version)
    for number in range(1, 15):
        node.fault(report_late_ms=2)
        node.kubelet.manager.cut(GPU)
        await accepted_is(node, 1 + number, 1)
        await node.pass_time(20)
        assert (accepted(node.kubelet), node.allocatable()) == (1 + number, 8)
    await node.admit("pod")


async def test_a_kubelet_that_ends_every_stream_is_registered_with_less_and_less_often(node: Node) -> None:
    await node.served()
    ends = asyncio.get_running_loop().time() + 60
    while asyncio.get_running_loop().time() < ends:
        if node.allocatable():
            node.kubelet.manager.cut(GPU)
        await asyncio.sleep(0.01)
    assert node.registers[GPU] < 20


@pytest.mark.parametrize("version", ["1.25", "1.36"])
@pytest.mark.parametrize("metrics", [True, False])  # With metrics, the records are read each minute.
async def test_a_resource_that_a_kubelet_ends_late_is_served_again(node: Node, version: str, *, metrics: bool) -> None:
    await node.start_kubelet(version)
    node.ports = node.ports[: 4 if metrics else 2]
    node.gateway()
    await node.allocatable_is(8)
    for late_ms in (5.5, 6.5, 7, 7.3, 7.6, 7.9, 50):
        node.fault(report_late_ms=late_ms)
        node.kubelet.manager.cut(GPU)
        await node.pass_time(20)
        node.fault()
        await node.pass_time(380)  # It forgets a resource only after 300 s.
        assert (node.allocatable(), late_ms) == (8, late_ms)
        await node.admit("pod")
        node.remove("pod")


@pytest.mark.parametrize("version", ["1.25", "1.36"])
async def test_a_resource_that_a_kubelet_loses_later_is_served_again_soon(node: Node, version: str) -> None:
    await node.served(8, version=version)
    node.fault(report_late_ms=100_000)
    node.kubelet.manager.cut(GPU)
    await node.allocatable_after(90, 8)
    node.fault()
    await node.allocatable_is(0, seconds=20)
    await node.allocatable_is(8, seconds=75)


async def test_a_kubelet_whose_records_lack_a_resource_is_registered_with_less_and_less_often(node: Node) -> None:
    await node.start_kubelet()
    await node.lack_all()
    one = node.gateway()
    await node.pass_time(600)
    assert 3 < node.registers[GPU] < 10
    lacks = one.said("the kubelet doesn't hold this resource")
    assert [line["level"] for line in lacks[:5]] == ["warning"] * 3 + ["error"] * 2


@pytest.mark.also_real(genuine=False)  # The kubelet's own words are counted.
async def test_a_name_is_new_for_each_registration(node: Node) -> None:
    node.gateway()
    endpoints: list[str] = []
    for _ in range(3):
        kubelet = await node.start_kubelet("1.37")
        await node.allocatable_is(8)
        kubelet.manager.cut(GPU)
        await accepted_is(node, 2, 5)
        endpoints += [
            note.split("endpoint=")[1].split(":")[0] for note in kubelet.notes if ": OK" in note and "endpoint" in note
        ]
    assert len(endpoints) == len(set(endpoints)) == 6


@pytest.mark.also_real(genuine=False)  # The kubelet's own words are counted.
async def test_an_own_name_that_is_deleted_under_a_stream_is_put_back(node: Node) -> None:
    await node.served(8)
    (name,) = [path for path in node.sockets.glob("*.sock") if path.name != "kubelet.sock"]
    name.unlink()
    await node.until(name.is_socket, "the name", 1)
    async with node.plugin() as plugin:
        assert len(await plugin.first_list()) == 8
    assert accepted(node.kubelet) == 1


async def test_an_end_leaves_nothing_in_the_kubelets_folder(node: Node) -> None:
    one = await node.served(8)
    assert await one.terminate() == 0
    left = {path.name for path in node.sockets.rglob("*")}
    assert left <= {"kubelet.sock", "kubelet_internal_checkpoint", "gateway"}
    await node.allocatable_is(0)


async def test_without_hard_links_it_is_served_all_the_same(node: Node) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "no hard links here")

    patches.setattr(os, "link", refuse)
    await node.served(8, version="1.37")
    await node.start_kubelet("1.37")
    await node.allocatable_is(8)
    await node.admit("pod")


async def test_the_kubelet_takes_the_place_of_a_stranger_that_called_before_it(node: Node) -> None:
    node.fault(register_late_ms=1000)
    await node.start_kubelet("1.20")
    node.gateway()
    await node.until(lambda: node.registers[GPU], "a Register")
    stranger = node.stranger("v1beta1", "grpc-node-js/1.8")
    assert await stranger.listen().read()
    await node.allocatable_is(8)
    await stranger.close()
    await node.pass_time(20)
    assert accepted(node.kubelet) == 1


async def test_a_kubelets_stream_that_ends_beside_a_strangers_is_followed_by_a_registration(node: Node) -> None:
    node.fault(register_late_ms=1000)
    await node.start_kubelet("1.28")
    node.gateway()
    await node.until(lambda: node.registers[GPU], "a Register")
    stranger = node.stranger("v1beta1", "grpc-go/1.72.1")
    assert await stranger.listen().read()
    await node.allocatable_is(8)
    node.fault()
    await node.pass_time(5)
    node.kubelet.manager.cut(GPU)
    await accepted_is(node, 2, 15)
    await node.allocatable_is(8)
    await stranger.close()


# -- what is at kubelet.sock ------------------------------------------------------------------------------------------


async def test_a_kubelet_that_starts_is_registered_with_at_once(node: Node) -> None:
    node.gateway()
    await node.pass_time(1)
    await node.start_kubelet()
    await node.until(lambda: node.registers[GPU], "a Register", 0.003)


@pytest.mark.parametrize("version", ["1.8", "1.34"])
async def test_a_kubelet_that_listens_late_is_found_when_it_does(node: Node, version: str) -> None:
    node.gateway()
    await node.pass_time(1)
    node.fault(listen_late_ms=1500)
    await node.start_kubelet(version)
    await node.pass_time(1.45)
    assert node.registers[GPU] == 0
    await node.allocatable_is(8, seconds=0.2)


async def test_a_socket_on_which_nobody_listens_is_no_kubelet(node: Node) -> None:
    one = await node.served(8)
    assert await is_present(one)
    node.kill_kubelet()
    await node.pass_time(1)
    assert (node.sockets / "kubelet.sock").is_socket()
    assert not await is_present(one)
    two = node.gateway()
    await node.until(lambda: two.said("waiting for a kubelet"), "its word")
    assert not await is_present(two)
    await node.start_kubelet()
    await node.allocatable_is(8)
    assert await is_present(two)


async def test_it_is_told_that_a_kubelets_socket_went_also_where_nothing_is_offered(node: Node) -> None:
    node.simulate({})
    await node.start_kubelet()
    one = node.gateway()
    await node.eventually(lambda: is_present(one), "the kubelet")
    node.kill_kubelet()
    (node.sockets / "kubelet.sock").unlink()
    await node.pass_time(1)
    assert not await is_present(one)


async def test_a_kubelets_age_begins_with_its_start(node: Node) -> None:
    one = await node.served(8)
    await node.pass_time(100)
    await node.start_kubelet()
    await node.allocatable_is(8)
    assert (await one.status())["kubelet"]["age_s"] < 10


def _link(path: Path) -> None:
    os.link(path, path.with_name("another-name"))


@pytest.mark.parametrize(
    "touch",
    [os.utime, lambda path: path.chmod(0o600), lambda path: os.chown(path, os.getuid(), os.getgid()), _link],
    ids=["times", "mode", "owner", "another name"],
)
async def test_a_socket_that_is_touched_is_no_new_kubelet(node: Node, touch: Callable[[Path], None]) -> None:
    await node.served(8)
    touch(node.sockets / "kubelet.sock")
    await node.pass_time(30)
    assert accepted(node.kubelet) == 1
    await node.start_kubelet()
    await accepted_is(node, 1, 1)


@pytest.mark.parametrize("touched", [False, True])
async def test_a_socket_that_is_moved_away_and_back_is_the_same_kubelet(node: Node, touched: bool) -> None:
    one = await node.served(8)
    path, aside = node.sockets / "kubelet.sock", node.folder / "aside.sock"
    path.rename(aside)
    await node.pass_time(20)
    if touched:
        os.utime(aside, ns=(1, 1))
    aside.rename(path)
    await node.pass_time(20)
    assert accepted(node.kubelet) == 1
    assert await is_present(one)


async def test_a_socket_that_takes_the_number_of_a_deleted_one_is_a_new_kubelet(node: Node) -> None:
    await node.served(8)
    path, aside = node.sockets / "kubelet.sock", node.folder / "aside.sock"
    os.link(path, aside)  # Keeps the number.
    path.unlink()
    await node.pass_time(20)
    os.utime(aside, ns=(1, 1))
    aside.rename(path)
    await accepted_is(node, 2, 10)


@pytest.mark.parametrize(("agent", "deadline"), [("grpc-node-js/1.8", None), ("grpc-go/1.72.1", 3600.0)])
async def test_who_listens_besides_is_no_kubelet(node: Node, agent: str, deadline: float | None) -> None:
    one = await node.served(8)
    stranger = node.stranger("v1beta1", agent)
    node.kill_kubelet()
    await node.pass_time(5)
    stream = stranger.listen(deadline)
    assert await stream.read()
    assert (await resource_of(one))["phase"] != "serving"
    await node.start_kubelet()
    await node.allocatable_is(8, seconds=1)
    await stranger.close()
    await node.pass_time(20)
    assert accepted(node.kubelet) == 1


# -- the folder --------------------------------------------------------------------------------------------------------


async def test_a_folder_that_is_removed_with_everything_in_it_and_made_again_is_served_in(node: Node) -> None:
    await node.served(8)
    node.kill_kubelet()
    shutil.rmtree(node.sockets)
    await node.pass_time(10)
    await node.start_kubelet()
    await node.allocatable_is(8, seconds=10)
    await node.admit("pod")


async def test_a_folder_that_is_replaced_while_the_kubelet_starts_is_served_in(node: Node) -> None:
    await node.served(8)
    node.kill_kubelet()
    node.sockets.rename(node.folder / "before")
    await node.start_kubelet()
    await node.allocatable_is(8, seconds=3)
    # It is watched as the one before was.
    node.kill_kubelet()
    await node.pass_time(60)
    await node.start_kubelet()
    await node.allocatable_is(8, seconds=0.1)
    await node.admit("pod")
    # A newer gateway finds the one that is there.
    second = await node.registered()
    await node.pass_time(400)
    assert accepted(node.kubelet) == 2
    second.kill()
    await accepted_is(node, 3, 5)
    await node.allocatable_is(8)
    await node.admit("other")


def _is_without_inotify(lacks: str = "instances") -> bool:
    """Let this process have none of the kernel's inotify instances or watches; False: there are no user namespaces here."""
    faulthandler.cancel_dump_traceback_later()  # Its thread is in the way.
    assert threading.active_count() == 1
    if ctypes.CDLL(None).unshare(_NEW_USER):
        return False
    spoiled.append("user namespace")
    Path(f"/proc/sys/user/max_inotify_{lacks}").write_text("0")
    return True


async def test_what_one_kubelet_refused_is_offered_to_the_next_though_nobody_told_of_that(node: Node) -> None:
    if not _is_without_inotify():
        return
    await node.served(8, version="1.9")
    await node.start_kubelet("1.34")  # The Register after the cut is there before the next look at the folder.
    await node.allocatable_is(8, seconds=1)


@pytest.mark.parametrize("lacks", ["instances", "watches"])
async def test_without_inotify_it_is_served_a_moment_later(node: Node, lacks: str) -> None:
    if not _is_without_inotify(lacks):
        return
    one = await node.served(8)
    await node.pass_time(60)
    if lacks == "instances":
        assert one.said("inotify is not available, polling instead")
    else:  # Each folder once, not with each poll.
        folders = [line["folder"] for line in one.said("cannot watch a folder, polling it")]
        assert sorted(folders) == sorted(set(folders)) != []
    node.kill_kubelet()
    await node.pass_time(60)
    await node.start_kubelet()
    await node.allocatable_is(8, seconds=0.6)
    await node.pass_time(1)
    (name,) = [path for path in node.sockets.glob("*.sock") if path.name != "kubelet.sock"]
    name.unlink()
    await node.until(name.is_socket, "the name", 1)
    node.kill_kubelet()
    shutil.rmtree(node.sockets)
    await node.pass_time(10)
    await node.start_kubelet()
    await node.allocatable_is(8, seconds=2)


async def test_a_new_folder_that_can_not_be_used_yet_is_tried_again(node: Node) -> None:
    await node.served(8)
    node.kill_kubelet()
    node.sockets.rename(node.folder / "before")
    node.sockets.mkdir()
    (node.sockets / "gateway").write_text("in the way")
    await node.pass_time(30)
    (node.sockets / "gateway").unlink()
    await node.start_kubelet()
    await node.allocatable_is(8, seconds=10)


async def test_a_folder_that_was_deleted_under_its_mount_ends_it_for_a_restart(node: Node) -> None:
    descriptor = os.open(node.sockets, os.O_RDONLY | os.O_DIRECTORY)
    await node.start_kubelet()
    one = node.gateway(
        "--socket-dir", f"/proc/self/fd/{descriptor}", "--pod-resources-socket", str(node.folder / "none")
    )
    await node.allocatable_is(8)
    node.kill_kubelet()
    shutil.rmtree(node.sockets)
    await node.until(lambda: not one.alive, "its end")
    assert one.process.ended.result() == 75


async def test_a_folder_that_is_missing_is_waited_for_and_that_is_told(node: Node) -> None:
    later = node.folder / "later"
    node.simulate(gpus(0, 1))
    await node.start_kubelet()
    one = node.gateway("--socket-dir", str(later))
    await node.pass_time(5)
    assert f"there is no folder {later}" in (await one.status())["waits_for"]
    await one.order("cordon", id="GPU-0", reason="smells")
    await node.pass_time(200)
    assert 2 < len(one.said("waiting for the socket directory", folder=str(later), level="warning")) < 10
    later.symlink_to(node.sockets)
    await node.allocatable_is(1)
    assert (await one.status())["waits_for"] == ""


@pytest.mark.parametrize("name", ["at the start", "later"])
async def test_a_resource_without_a_socket_holds_up_no_other_and_is_served_later(node: Node, name: str) -> None:
    there, bind = set[str](), socket.socket.bind

    def refuse(self: socket.socket, path: object) -> None:
        parent = Path(str(path)).parent
        if parent.parent.name == "gateway" and failing and str(path) not in there and len(there) > 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        there.add(str(path)) if parent.parent.name == "gateway" else None
        bind(self, path)  # type: ignore[arg-type]

    failing = True
    patches.setattr(socket.socket, "bind", refuse)
    both = gpus(0, 1) | gpus(5, 6, name="example.com/late")
    node.simulate(both if name == "at the start" else gpus(0, 1))
    await node.start_kubelet()
    one = node.gateway()
    await node.until(lambda: node.allocatable() or node.allocatable("example.com/late"), "one of them")
    node.simulate(both)
    await node.until(lambda: one.said("can't be bound"), "its word")
    assert node.allocatable() + node.allocatable("example.com/late") == 2
    node.simulate(both | gpus(0, 1, unhealthy={"GPU-0": "smoke"}))
    await node.pass_time(1)
    node.simulate(both)
    await node.pass_time(10)
    failing = False
    await node.allocatable_is(2, seconds=10)
    await node.allocatable_is(2, "example.com/late", seconds=10)
    assert {line["event"] for line in one.process.log if line["level"] in {"error", "text"}} == {"can't be bound"}
