"""The manners of other vendors' plugins behind the gateway, what they may say, and which of them may register."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from devices.model import ContainerAnswer, Device, DeviceNode, Health, Mount, Options
from gateway_lab.kubelets.kubelet import KubeletError
from gateway_lab.plugins.played import Habits
from tests.contract.bridged import NIC, OTHER, Neighbour, behind, bridged, bridging, configured, stays
from tests.contract.clock import patches, spoiled
from tests.contract.node import Caller, Node, Refused

PREPARES = Options(pre_start_required=True)


# -- what arrives -----------------------------------------------------------------------------------------------------


async def test_all_that_an_answer_says_and_a_devices_place_arrive(node: Node) -> None:
    full = ContainerAnswer({"K": "v"}, (Mount("/c", "/h", read_only=True),), (DeviceNode("/dev/c", "/dev/h", "r"),))
    devices = (Device("a", numa_nodes=(0, 1)), Device("b", numa_nodes=(-1,)), Device("c", numa_nodes=(1 << 40, 2)))
    await bridged(node, devices=devices, answer=lambda _: full)
    async with node.plugin(NIC) as kubelet:
        assert {one.id: one.numa_nodes for one in await kubelet.first_list()} == {"a": (0, 1), "b": (), "c": (2,)}
    assert (await node.admit("pod", NIC)).answer == full


async def test_a_plugin_that_asked_for_nothing_is_not_asked_to_prepare(node: Node) -> None:
    _, plugin = await bridged(node)
    await node.admit("pod", NIC)
    assert not plugin.played.prepared


@pytest.mark.parametrize("shared", [False, True])
async def test_options_are_those_of_the_last_register_though_the_list_is_the_same(node: Node, *, shared: bool) -> None:
    _, plugin = await bridged(node, habits=Habits(shared_channel=shared))
    plugin.played.options = PREPARES
    await plugin.register()
    await node.pass_time(5)
    for devices in ((Device("c"),), (Device("a"), Device("b")), (Device("d"),)):
        await plugin.change(*devices)
        await node.allocatable_is(len(devices), NIC)
    async with node.plugin(NIC) as kubelet:
        assert await kubelet.options() == PREPARES
    await node.admit("pod", NIC)
    assert plugin.played.prepared == [("d",)]


async def test_a_plugin_that_never_says_what_it_wants_gets_what_register_said(node: Node) -> None:
    _, plugin = await bridged(node, stalls=True, options=PREPARES)
    async with node.plugin(NIC) as kubelet:
        assert await kubelet.options() == PREPARES
    await node.admit("pod", NIC)
    assert plugin.played.prepared


async def test_a_plugins_error_arrives_with_its_code(node: Node) -> None:
    _, plugin = await bridged(node)
    async with node.plugin(NIC) as kubelet:
        for code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED, grpc.StatusCode.PERMISSION_DENIED):
            plugin.played.failing = code, "no pod is pending"
            with pytest.raises(Refused) as refused:
                await kubelet.allocate("a")
            assert code.name.replace("_", "").lower() in str(refused.value).replace("Canceled", "cancelled").lower()


async def test_allocates_reach_a_plugin_in_their_order(node: Node) -> None:
    _, plugin = await bridged(node)
    plugin.played.free.clear()
    async with node.plugin(NIC) as kubelet:
        calls = []
        for one in ("b", "a", "b"):
            calls.append(asyncio.create_task(kubelet.allocate(one)))
            await node.pass_time(0.1)
        assert plugin.allocated == [("b",)]
        plugin.played.free.set()
        await asyncio.gather(*calls)
    assert plugin.allocated == [("b",), ("a",), ("b",)]


# -- manners ----------------------------------------------------------------------------------------------------------


async def test_the_kubelet_is_told_once_of_lists_that_are_equal(node: Node) -> None:
    await bridged(node, habits=Habits(repeats_s=0.1))
    await node.pass_time(5)
    before = len(node.kubelet.noted(f"List {NIC}"))
    await node.pass_time(20)
    assert len(node.kubelet.noted(f"List {NIC}")) == before


async def test_what_an_earlier_handler_of_the_same_server_swallows_still_counts(node: Node) -> None:
    _, plugin = await bridged(node, habits=Habits(shared_channel=True))
    await plugin.register()
    await node.pass_time(5)
    for count in (1, 2, 3, 4, 5):
        await plugin.change(*(Device(f"{count}-{number}") for number in range(count)))
        await node.allocatable_is(count, NIC, 5)


@pytest.mark.parametrize("repeats_s", [0.0, 0.05])
async def test_a_plugin_that_stays_and_says_that_it_has_no_devices_has_none(node: Node, repeats_s: float) -> None:
    _, plugin = await bridged(node, habits=Habits(repeats_s=repeats_s))
    await plugin.change()
    await node.allocatable_is(0, NIC, 5)
    await plugin.change(Device("a"), Device("b"))
    await node.allocatable_is(2, NIC, 5)
    await plugin.change()
    await plugin.change(Device("c"))  # Soon after: the empty one doesn't come late.
    await node.allocatable_is(1, NIC, 5)
    await stays(node, 1, 5)


async def test_a_socket_that_is_bound_again_under_its_name_is_a_new_plugin(node: Node) -> None:
    _, old = await bridged(node)
    new = Neighbour(node, devices=(Device("a"), Device("b"), Device("c")), options=PREPARES)
    await new.start()
    await node.allocatable_is(3, NIC)
    await old.change(Device("stale"))
    await node.allocatable_after(5, 3, NIC)
    await node.admit("pod", NIC)
    assert (len(new.allocated), len(new.played.prepared), old.allocated) == (1, 1, [])


async def test_an_allocate_that_one_had_when_the_next_registered_is_answered_by_that_one(node: Node) -> None:
    one, old = await bridged(node)
    old.played.free.clear()
    admitted = asyncio.create_task(node.admit("pod", NIC))
    await node.until(lambda: old.played.allocated, "the call")
    new = Neighbour(node)
    await new.start()
    await node.pass_time(2)
    old.kill()
    given = (await admitted).devices[NIC]
    assert new.allocated == [given]
    assert (await behind(one))["absences"] == 0


@pytest.mark.parametrize("devices", [(), (Device("a"),)])
async def test_a_plugin_is_asked_for_nothing_that_it_came_back_without(node: Node, devices: Sequence[Device]) -> None:
    _, plugin = await bridged(node)
    plugin.kill()
    async with node.plugin(NIC) as kubelet:
        lost = asyncio.create_task(kubelet.allocate("b"))
        await node.pass_time(2)
        await plugin.start(devices=devices)
        with pytest.raises(Refused, match="came back without"):
            await lost
        await kubelet.refused("b")
        assert plugin.allocated == []
        if devices:
            await kubelet.allocate("a")
    assert plugin.allocated == [("a",)] * len(devices)


async def test_one_that_comes_back_and_says_nothing_has_what_it_had(node: Node) -> None:
    _, plugin = await bridged(node)
    plugin.kill()
    await node.pass_time(1)
    await plugin.start(habits=Habits(silent_again=True), lists=1)
    async with asyncio.timeout(10):
        await node.admit("pod", NIC)
    await stays(node, 2, 5)


# -- answers of before ------------------------------------------------------------------------------------------------

REPEAT = f"    repeat: ['{NIC}']\n"


async def test_an_earlier_answer_is_repeated_if_the_operator_says_so_and_after_a_restart_too(node: Node) -> None:
    options = configured(node, REPEAT)
    one, plugin = await bridged(node, *options)
    async with node.plugin(NIC) as kubelet:
        first = await kubelet.allocate("a", "b")
    plugin.kill()
    await node.pass_time(1)
    for _ in range(2):
        async with node.plugin(NIC) as kubelet:
            assert await kubelet.allocate("b", "a") == first
        assert (await behind(one))["repeated"] == 1
        await one.terminate()
        one = bridging(node, *options)
        await node.until(lambda: one.said("registered"), "its registration")  # noqa: B023
    async with node.plugin(NIC) as kubelet:
        await kubelet.refused("a", words="is away")  # It was never asked for this one alone.


async def test_no_earlier_answer_is_repeated_without_the_operators_word(node: Node) -> None:
    _, plugin = await bridged(node, "--bridge-grace=5")
    async with node.plugin(NIC) as kubelet:
        await kubelet.allocate("a")
        plugin.kill()
        await node.pass_time(1)
        await kubelet.refused("a", words="is away")


async def test_a_large_answer_is_not_repeated(node: Node) -> None:
    _, plugin = await bridged(
        node, "--bridge-grace=5", *configured(node, REPEAT), answer=lambda _: ContainerAnswer({"K": "v" * 20_000})
    )
    async with node.plugin(NIC) as kubelet:
        await kubelet.allocate("a")
        plugin.kill()
        await node.pass_time(1)
        await kubelet.refused("a", words="is away")


async def test_a_plugin_that_hangs_is_answered_for_if_the_operator_says_so(node: Node) -> None:
    one, plugin = await bridged(node, *configured(node, f"{REPEAT}    deadlines: [{{resource: {NIC}, seconds: 5}}]\n"))
    async with node.plugin(NIC) as kubelet:
        first = await kubelet.allocate("a")
        plugin.played.free.clear()
        plugin.played.stalls = True
        assert await kubelet.allocate("a") == first
    assert (await behind(one))["repeated"] == 1


# -- the operator's word ----------------------------------------------------------------------------------------------


async def test_a_resource_that_is_not_allowed_any_more_is_withdrawn_and_held_devices_stay(node: Node) -> None:
    options = configured(node, "    allow: ['*']\n")
    one, plugin = await bridged(node, *options)
    held = await node.admit("pod", NIC)
    configured(node, f"    allow: ['{OTHER}']\n")
    await node.allocatable_is(0, NIC)
    await node.until(lambda: node.capacity(NIC) == 1, "the other device to go")
    configured(node, f"    allow: ['*']\n    deadlines: [{{resource: {NIC}, seconds: 7}}]\n")
    await node.allocatable_is(2, NIC)
    assert held.devices[NIC] == node.pods()["pod"]["main"][NIC]
    plugin.played.free.clear()
    began = asyncio.get_running_loop().time()
    assert "within 7 s" in await node.refused("other", NIC)
    assert asyncio.get_running_loop().time() - began < 15
    assert (await behind(one))["state"] == "live"


async def test_people_read_the_chain_from_the_plugin_to_the_kubelet(node: Node) -> None:
    options = configured(node, f"    rename: [{{resource: {NIC}, name: {OTHER}}}]\n")
    await node.start_kubelet()
    one, plugin = bridging(node, *options), Neighbour(node, api="v1alpha2")
    await plugin.start()
    await node.allocatable_is(2, OTHER)
    told = await behind(one, OTHER)
    assert (told["resource"], told["endpoint"], told["api"], told["state"]) == (NIC, "played.sock", "v1alpha2", "live")

    async def read() -> str:
        return " ".join((await node.command("status", "--state-dir", str(node.state)))[1].split())

    said = await read()
    assert f"device-plugins/played.sock ({NIC}) -v1alpha2-> gateway -v1beta1-> kubelet; live" in said
    await plugin.end()
    await node.pass_time(5)
    said = await read()
    assert "shielded, away for" in said
    assert "it ended its stream, went 1 time" in said


# -- a new start, and a second gateway --------------------------------------------------------------------------------


@pytest.mark.parametrize(("api", "place"), [("v1beta1", (1,)), ("v1alpha2", ())])
async def test_a_new_gateway_has_the_devices_of_an_absent_plugin(node: Node, api: str, place: tuple[int, ...]) -> None:
    devices = (Device("a", numa_nodes=(1,)), Device("b", Health.UNHEALTHY))
    one, plugin = await bridged(node, devices=devices, api=api)
    await plugin.end()
    await one.terminate()
    two = bridging(node)
    await node.until(lambda: two.said("registered"), "its registration")
    await node.allocatable_is(1, NIC)
    async with node.plugin(NIC) as kubelet:
        assert {(one.id, one.health, one.numa_nodes) for one in await kubelet.first_list()} == {
            ("a", Health.HEALTHY, place),
            ("b", Health.UNHEALTHY, ()),
        }
    assert (await behind(two))["api"] == api
    await plugin.start(registers=False)
    await node.pass_time(40)
    assert (await behind(two))["state"] == "live"


async def test_a_start_calls_plugins_before_it_has_them_register_again(node: Node) -> None:
    one, plugin = await bridged(node)
    path = node.bridge / "device-plugins" / "played.sock"
    (node.bridge / "device-plugins" / "notes").touch()
    await one.terminate()
    two = bridging(node)
    await node.until(lambda: two.said("plugins can register here"), "the socket")
    await node.until(lambda: plugin.played.listening, "the call", 0.1)
    assert not path.exists()  # Some register when they see that.
    assert (node.bridge / "device-plugins" / "notes").exists()
    await node.allocatable_is(2, NIC)
    await node.admit("pod", NIC)
    await plugin.end()
    await plugin.start()
    await node.admit("other", NIC)


@pytest.mark.parametrize("version", ["1.28", "1.37"])
@pytest.mark.parametrize("chooses", [False, True])
async def test_a_device_forgotten_in_an_allocate_goes_to_no_other(node: Node, version: str, *, chooses: bool) -> None:
    names = "abc" if chooses else "ab"
    devices = tuple(map(Device, names))
    _, plugin = await bridged(node, version=version, devices=devices, options=Options(preferred_allocation=chooses))
    await node.admit("pod-a", NIC)
    plugin.played.free.clear()
    waiting = asyncio.create_task(node.admit("pod-b", NIC))
    await node.until(lambda: len(plugin.allocated) == 2, "the call")
    node.remove("pod-a")
    await node.list_pods()
    plugin.played.free.set()
    await waiting
    came = []
    for pod in ("pod-c", "pod-d", "pod-e"):
        try:
            await node.admit(pod, NIC)
        except KubeletError:
            continue
        came.append(pod)
    held = [one for pod in node.pods().values() for ids in pod.values() for one in ids[NIC]]
    assert (sorted(held), len(came)) == ([*names], len(names) - 1)


# -- who may register -------------------------------------------------------------------------------------------------

LEFT, PIPE, FOLDER, ALIAS, OWN, LINK, PLAIN = (
    f"{one}.sock" for one in ("left", "pipe", "folder", "alias", "own", "link", "plain")
)
REFUSED: Sequence[tuple[str, str, str]] = (
    ("nic", "", "has no domain"),
    ("kubernetes.io/nic", "", "belongs to Kubernetes"),
    ("requests.example/nic", "", "starts with"),
    (f"vendor.example/{'n' * 64}", "", "1 to 63"),
    ("evil.example/nic", "", "bridge.allow"),
    ("Vendor.example/nic", "", "lower-case letters"),
    (OTHER, "..", "the name of a socket"),
    (OTHER, "../x.sock", "the name of a socket"),
    (OTHER, "/run/x.sock", "the name of a socket"),
    (OTHER, "a\nb.sock", "the name of a socket"),
    (OTHER, "kubelet.sock", "the gateway's own socket"),
    (OTHER, "x" * 108, "Linux allows 107 bytes"),
    (OTHER, "none.sock", "there is no socket"),
    (OTHER, LINK, "there is no socket"),
    (OTHER, PLAIN, "there is no socket"),
    (OTHER, PIPE, "there is no socket"),
    (OTHER, FOLDER, "there is no socket"),
    (OTHER, OWN, "is the gateway's own socket"),
    (OTHER, LEFT, "failed to dial"),
    (OTHER, "played.sock", f"serves {NIC} already"),
    (OTHER, ALIAS, f"serves {NIC} already"),
    (NIC, "", "on played.sock, which still runs"),
)


async def test_a_register_is_refused_with_its_reason_and_the_plugin_beside_notices_nothing(node: Node) -> None:
    allow = "['*vendor.example/*', 'Vendor.example/*', nic, 'kubernetes.io/*', 'requests.*']"
    _, good = await bridged(node, *configured(node, f"    allow: {allow}\n"))
    folder = node.bridge / "device-plugins"
    (folder / LINK).symlink_to("played.sock")
    (folder / PLAIN).touch()
    os.mkfifo(folder / PIPE)
    (folder / FOLDER).mkdir()
    (folder / ALIAS).hardlink_to(folder / "played.sock")
    (folder / OWN).hardlink_to(folder / "kubelet.sock")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / LEFT))
    for resource, endpoint, reason in REFUSED:
        bad = Neighbour(node, resource=resource, endpoint="bad.sock")
        await bad.start(registers=False)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await bad.register(endpoint=endpoint or None)
        assert reason in (refused.value.details() or ""), (resource, endpoint)
        assert bad.played.lists == 0
        await bad.end()
    caller = Caller(str(folder / "kubelet.sock"), "v1beta1.Registration", "agent")
    assert await caller.call("Register", b"\x0a\xff") == ("INVALID_ARGUMENT", b"")
    assert (await caller.call("Register", bytes(65 * 1024)))[0] == "RESOURCE_EXHAUSTED"
    await stays(node, 2, 2)
    assert good.played.lists == 1
    await node.admit("pod", NIC)


async def test_one_socket_that_registers_under_two_names_in_turn_has_the_first(node: Node) -> None:
    _, plugin = await bridged(node)
    for _ in range(20):
        plugin.played.resource = OTHER
        with pytest.raises(grpc.aio.AioRpcError, match=f"serves {NIC} already"):
            await plugin.register()
        plugin.played.resource = NIC
        await plugin.register()
    await node.pass_time(5)
    assert (node.allocatable(NIC), node.capacity(OTHER)) == (2, 0)


async def test_names_that_differ_by_case_are_two(node: Node) -> None:
    _, lower = await bridged(node)
    upper = "vendor.example/NIC"
    await Neighbour(node, resource=upper, endpoint="P.sock").start()
    await node.allocatable_is(2, upper)
    await lower.change(Device("c"))
    await node.allocatable_is(1, NIC)
    assert node.allocatable(upper) == 2


async def test_names_without_end_are_counted_together(node: Node) -> None:
    _, good = await bridged(node)
    reasons = []
    for number in range(620):
        bad = Neighbour(node, resource=f"x.example/n{number}")
        bad.played_by(good)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await bad.register(endpoint="none.sock", seconds=30)
        reasons.append(refused.value.details() or "")
    assert "in a minute" in reasons[-1]
    assert "there is no socket" in reasons[0]
    await good.register()


async def test_of_many_plugins_at_once_some_are_taken_and_one_that_went_without_devices_makes_room(node: Node) -> None:
    bridging(node)
    plugins = [
        Neighbour(node, resource=f"vendor.example/n{number}", endpoint=f"{number}.sock", devices=())
        for number in range(132)
    ]
    told = await asyncio.gather(*(one.start() for one in plugins), return_exceptions=True)
    refused = [one for one in told if isinstance(one, grpc.aio.AioRpcError)]
    assert {one.code() for one in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert len(refused) == 4
    taken, left = (
        next(one for one, came in zip(plugins, told, strict=True) if isinstance(came, Exception) is wanted)
        for wanted in (False, True)
    )
    await taken.end()
    await node.pass_time(2)
    await left.register()


async def test_all_plugins_together_have_so_many_devices_and_a_list_is_taken_when_there_is_room(node: Node) -> None:
    patches.setattr("gateway.bridge.judge.MAX_DEVICES_IN_ALL", 600)
    bridging(node)
    many = [
        Neighbour(
            node, resource=f"vendor.example/n{number}", endpoint=f"{number}.sock",
            devices=tuple(Device(f"d{one}") for one in range(200)),
        )
        for number in range(3)
    ]  # fmt: skip
    for one in many:
        await one.start()
    last = Neighbour(node, habits=Habits(repeats_s=5.0))
    await last.start()
    [refused] = await node.until(lambda: node.gateways[-1].said("a plugin's list is refused"), "the refusal")
    assert "too many devices of all plugins (2 next to 600). Allowed: 600" in refused["reason"]
    await node.start_kubelet()
    await node.pass_time(20)
    assert node.capacity(NIC) == 0
    await many[0].change(Device("a"))
    await node.allocatable_is(2, NIC, 120)
    assert len(node.gateways[-1].said("a plugin's list is refused")) == 1


async def test_a_list_that_is_too_long_takes_no_memory_and_the_last_one_stays(node: Node) -> None:
    one, plugin = await bridged(node)
    plugin.played.raw_list = b"\x0a" + b"\xff" * 5_000_000
    await plugin.change()
    await node.pass_time(5)
    assert "Allowed: 4194304 bytes" in str((await one.status())["hindrances"])
    await stays(node, 2, 2)


async def test_lists_without_end_are_read_slowly_and_the_last_one_counts(node: Node) -> None:
    _, plugin = await bridged(node)
    before = len(node.kubelet.noted(f"List {NIC}"))
    for number in range(500):
        await plugin.change(Device(str(number)))
        await asyncio.sleep(0.01)
    assert len(node.kubelet.noted(f"List {NIC}")) - before < 60
    await plugin.change(Device("x"), Device("y"), Device("z"))
    await node.until(lambda: node.allocatable(NIC) == 3, "the last list", 10)


async def test_the_socket_has_a_kubelets_mode(node: Node) -> None:
    os.umask(0o077)
    spoiled.append("umask")
    bridging(node)
    path = node.bridge / "device-plugins" / "kubelet.sock"
    await node.until(path.exists, "the socket")
    assert path.stat().st_mode & 0o777 == 0o755


# -- plugins_registry -------------------------------------------------------------------------------------------------


async def registry(node: Node) -> Path:
    """Wait for the folder of plugins that are found."""
    folder = node.bridge / "plugins_registry"
    await node.until(folder.exists, "the folder")
    return folder


async def test_a_plugin_that_is_found_is_told_why_it_is_refused_and_asked_again(node: Node) -> None:
    await node.start_kubelet()
    options = configured(node, "    allow: ['none.example/*']\n")
    bridging(node, *options)
    plugin = Neighbour(node, folder=await registry(node))
    played = await plugin.start(registers=False)
    await node.until(lambda: played.told, "the refusal")
    assert "bridge.allow" in played.told[0]
    configured(node, "    allow: ['*']\n")
    await node.allocatable_is(2, NIC)
    assert played.told[-1] == ""
    count = len(played.told)
    await node.pass_time(120)
    assert len(played.told) == count, "nobody asks one that was taken"
    nameless = Neighbour(node, folder=plugin.played.folder, resource="nodomain", endpoint="wrong.sock")
    await nameless.start(registers=False)
    await node.until(lambda: nameless.played.told, "the refusal")
    assert "has no domain" in nameless.played.told[0]


async def test_a_plugin_that_is_found_again_by_a_gateway_that_starts_is_called_once(node: Node) -> None:
    await node.start_kubelet()
    one = bridging(node)
    plugin = Neighbour(node, folder=await registry(node))
    played = await plugin.start(registers=False)
    await node.allocatable_is(2, NIC)
    await one.terminate()
    played.told.clear()
    bridging(node)
    await node.until(lambda: played.told, "it to be told")
    await node.pass_time(10)
    assert (played.told, played.lists, played.listening) == ([""], 2, 1)
    again = Neighbour(node, folder=played.folder, devices=(Device("new"),))
    await again.start(registers=False)  # It binds the same name.
    await node.allocatable_is(1, NIC)


async def test_of_a_folder_full_of_sockets_the_first_ones_are_asked(node: Node) -> None:
    await node.start_kubelet()
    bridging(node)
    folder = await registry(node)
    for number in range(128):
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(folder / f"a{number}.sock"))
    plugin = Neighbour(node, folder=folder, endpoint="z.sock")
    await plugin.start(registers=False)
    await node.pass_time(10)
    assert node.capacity(NIC) == 0
    (folder / "a0.sock").unlink()
    await node.allocatable_is(2, NIC)
