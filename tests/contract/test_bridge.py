"""Plugins of other vendors behind the gateway: they end, hang and come back, and pods keep their devices."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest

from devices.model import ContainerAnswer, Device, Health, Options
from gateway_lab.plugins.played import Habits
from tests.contract.bridged import NIC, OTHER, Neighbour, behind, bridged, bridging, configured, socket_of, stays
from tests.contract.node import GPU, PREFIX, Node, gpus
from tests.contract.test_holders import reasons


@pytest.mark.parametrize(
    ("api", "version"),
    [("0.1", "1.34"), ("v1alpha2", "1.34"), ("v1beta1", "1.8"), ("v1beta1", "1.9"), ("v1beta1", "1.37")],
)
async def test_pods_keep_a_plugins_devices_through_every_restart(node: Node, api: str, version: str) -> None:
    one, plugin = await bridged(node, version=version, api=api)
    given = await node.admit("pod", NIC)
    assert given.answer.envs == {"DEVICES": given.devices[NIC][0]}
    await plugin.end()
    await stays(node, 2, 20)
    await plugin.start()
    await stays(node, 2, 5)
    await node.start_kubelet(version)
    await node.allocatable_is(2, NIC)
    plugin.kill()
    await stays(node, 2, 2)
    await plugin.start()
    await stays(node, 2, 5)
    assert await one.terminate() == 0
    two = bridging(node)
    await node.until(lambda: two.said("registered"), "its registration")
    await node.allocatable_is(2, NIC)
    await node.admit("other", NIC)
    two.kill()
    await node.pass_time(1)
    bridging(node)
    await node.allocatable_is(2, NIC)
    await node.truthful()
    assert node.pods()["pod"]["main"][NIC] == given.devices[NIC]
    assert plugin.played.listening == 1


@pytest.mark.parametrize("own", [False, True])
async def test_a_plugin_that_registers_once_is_called_again(node: Node, *, own: bool) -> None:
    if own:
        node.simulate(gpus(7))
    one, plugin = await bridged(node)
    for end in (plugin.end, None):
        if end is None:
            plugin.kill()
        else:
            await end()
        await node.pass_time(10)
        await plugin.start(registers=False)
        await node.pass_time(45)
        assert (await behind(one))["state"] == "live"
        assert plugin.played.lists == 1
        await node.admit("pod", NIC)
        node.remove("pod")
    await node.truthful()


async def test_a_plugin_that_stays_away_loses_its_devices_by_and_by_but_those_that_pods_hold(node: Node) -> None:
    one, plugin = await bridged(node, "--bridge-grace=20", "--bridge-withdraw=100")
    held = (await node.admit("pod", NIC)).devices[NIC]
    plugin.kill()
    await stays(node, 2, 18)
    assert (await behind(one))["state"] == "shielded"
    assert (await one.metrics())[f'{PREFIX}bridged_plugin_up{{resource="{NIC}"}}'] == 0
    await node.pass_time(5)
    assert (await behind(one))["state"] == "unhealthy"
    assert (node.allocatable(NIC), node.capacity(NIC)) == (0, 2)
    await node.refused("late", NIC)
    await node.truthful()
    assert await one.is_ready()
    await node.pass_time(80)
    assert (await behind(one))["state"] == "withdrawn"
    assert (node.allocatable(NIC), node.capacity(NIC)) == (0, 1)
    await node.start_kubelet()
    await node.pass_time(20)
    assert node.pods()["pod"]["main"][NIC] == held
    await plugin.start()
    await node.allocatable_is(2, NIC, 5)
    assert (await node.restart_container("pod")).devices[NIC] == held
    await node.truthful()
    metrics = await one.metrics()
    assert metrics[f'{PREFIX}bridged_plugin_up{{resource="{NIC}"}}'] == 1
    assert metrics[f'{PREFIX}bridged_absences_total{{resource="{NIC}"}}'] == 1
    assert metrics[f'{PREFIX}bridged_registrations_total{{resource="{NIC}"}}'] == 2


async def test_a_plugin_that_comes_back_late_again_and_again_has_its_devices_at_once(node: Node) -> None:
    _, plugin = await bridged(node, "--bridge-grace=2")
    for _ in range(5):
        plugin.kill()
        await node.allocatable_is(0, NIC, 5)
        await plugin.start()
        await node.allocatable_is(2, NIC, 2)
    await node.truthful()


async def test_a_restart_of_the_gateway_gives_a_plugin_that_is_away_no_more_time(node: Node) -> None:
    one, plugin = await bridged(node)
    plugin.kill()
    await node.pass_time(40)
    await one.terminate()
    bridging(node)
    await node.allocatable_is(2, NIC)
    await node.allocatable_after(30, 0, NIC)


async def test_an_empty_list_at_the_end_takes_nothing_away_and_one_that_is_meant_does(node: Node) -> None:
    _, plugin = await bridged(node, habits=Habits(empties=True))
    await plugin.end()
    await stays(node, 2, 10)
    await plugin.start()
    await stays(node, 2, 5)
    await plugin.change()
    await node.allocatable_is(0, NIC, 5)
    await plugin.change(Device("a"), Device("c"), Device("d"))
    await node.allocatable_is(3, NIC, 5)
    await node.truthful()


async def test_what_a_plugin_says_of_its_devices_is_so_at_once(node: Node) -> None:
    _, plugin = await bridged(node)
    for _ in range(4):
        await plugin.change(Device("a", Health.UNHEALTHY), Device("b"))
        await node.allocatable_is(1, NIC, 3)
        await plugin.change(Device("a"), Device("b"))
        await node.allocatable_is(2, NIC, 3)
    assert node.capacity(NIC) == 2
    assert plugin.played.lists == 1
    await node.truthful()


async def test_a_plugin_that_hangs_is_away_until_it_answers_and_is_never_asked_for_its_list_again(node: Node) -> None:
    one, plugin = await bridged(node, *configured(node, f"    deadlines: [{{resource: {NIC}, seconds: 5}}]\n"))
    played = plugin.played
    played.free.clear()
    began = asyncio.get_running_loop().time()
    assert "look at its log" in await node.refused("pod", NIC)
    assert asyncio.get_running_loop().time() - began < 10
    assert (await behind(one))["state"] == "live"
    played.stalls = True
    assert "hangs" in await node.refused("pod", NIC)
    assert (await behind(one))["state"] == "shielded"
    await stays(node, 2, 30)
    waiting = asyncio.ensure_future(node.admit("other", NIC))
    await node.pass_time(1)
    played.stalls = False
    for event in played.stalled:
        event.set()
    played.free.set()
    await node.pass_time(10)
    assert waiting.done()
    await waiting
    assert (await behind(one))["state"] == "live"
    await node.admit("pod", NIC)
    assert (played.lists, played.listening) == (1, 1)
    await node.truthful()


async def test_a_plugin_that_is_stopped_is_not_replaced_and_goes_on(node: Node) -> None:
    one, plugin = await bridged(node)
    played = plugin.played
    plugin.process.stop()
    await stays(node, 2, 10)
    admitted = asyncio.ensure_future(node.admit("pod", NIC))
    await node.pass_time(10)
    plugin.process.go_on()
    await admitted
    assert (played.lists, len(played.allocated)) == (1, 1)
    assert (await behind(one))["absences"] == 0


async def test_a_call_waits_for_a_plugin_that_restarts_and_not_for_ever(node: Node) -> None:
    _, plugin = await bridged(node, "--bridge-grace=20")
    played = plugin.played
    played.free.clear()
    admitted = asyncio.ensure_future(node.admit("pod", NIC))
    await node.until(lambda: played.allocated, "the call")
    plugin.kill()
    await node.pass_time(10)
    assert not admitted.done()
    await plugin.start()
    given = await admitted
    assert plugin.allocated == [given.devices[NIC]] * 2
    plugin.kill()
    began = asyncio.get_running_loop().time()
    assert "is away" in await node.refused("other", NIC)
    assert 15 < asyncio.get_running_loop().time() - began < 25


@pytest.mark.parametrize("habits", [Habits(), Habits(bare_options=True), Habits(no_options=True)])
async def test_a_plugin_chooses_and_prepares_whichever_way_it_asked_for_it(node: Node, habits: Habits) -> None:
    four = tuple(Device(name) for name in "abcd")
    _, plugin = await bridged(node, devices=four, habits=habits, options=Options(True, True))
    async with node.plugin(NIC) as kubelet:
        assert await kubelet.options() == Options(True, True)
        assert await kubelet.prefer(["a", "b", "c", "d"], 1) == {"d"}
        given = (await node.admit("pod", NIC, 2)).devices[NIC]
        assert [set(one) for one in plugin.played.prepared] == [set(given)]
        plugin.kill()
        await node.pass_time(1)
        for available in ("abcd", "dcba"):
            for must in available:
                chosen = await kubelet.prefer(available, 2, must)
                assert (len(chosen), must in chosen) == (2, True)


async def test_a_refusal_is_passed_on_in_the_plugins_words_and_is_no_absence(node: Node) -> None:
    one, plugin = await bridged(node)
    played = plugin.played
    for code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN):
        played.failing = code, "the vendor's own words"
        assert "the vendor's own words" in await node.refused("pod", NIC)
    played.failing = None
    await node.admit("pod", NIC)
    assert (await behind(one))["absences"] == 0
    assert played.lists == 1


def _twice(_: object) -> ContainerAnswer:
    return ContainerAnswer({f"V{number}": "x" * 1000 for number in range(1200)})


async def test_an_answer_that_no_kubelet_takes_is_not_passed_on(node: Node) -> None:
    one, plugin = await bridged(node)
    played = plugin.played
    for raw in (b"", b"\xff" * 10, b"\x0a\x00" * 2, b"\x0a\x00" * 300_000):
        played.raw_answer = raw
        assert "can't be passed on" in await node.refused("pod", NIC)
    played.raw_answer, played.answer = None, _twice
    assert "can't be passed on" in await node.refused("pod", NIC)
    played.answer = lambda _: ContainerAnswer({f"V{number}": "" for number in range(5000)})
    assert "can't be passed on" in await node.refused("pod", NIC)
    played.answer = lambda _: ContainerAnswer({"FINE": "yes"})
    assert (await node.admit("pod", NIC)).answer.envs == {"FINE": "yes"}
    assert (await behind(one))["absences"] == 0


@pytest.mark.parametrize(
    ("devices", "raw", "words"),
    [
        ([Device("a"), Device("a")], None, "2 times"),
        ([Device("a"), Device("")], None, "has no ID"),
        ([Device("x" * 254)], None, "253"),
        ([Device("a\n")], None, "printable"),
        ([Device(f"dev-{number}") for number in range(20_001)], None, "20000"),
        ([], b"\xff" * 10, ""),
        ([], b"\x0a\x00" * 1_000_000, "Allowed: 200000"),
    ],
)
async def test_a_bad_list_changes_nothing(node: Node, devices: Sequence[Device], raw: bytes | None, words: str) -> None:
    one, plugin = await bridged(node)
    played = plugin.played
    played.raw_list = raw
    await plugin.change(*devices)
    await node.pass_time(5)
    assert (node.allocatable(NIC), node.capacity(NIC)) == (2, 2)
    reason = str((await behind(one))["reason"])
    assert "a list was refused" in reason
    assert words in reason
    await node.admit("pod", NIC)
    played.raw_list = None
    await plugin.change(Device("a"), Device("b"), Device("c"))
    await node.allocatable_is(3, NIC)
    assert not (await behind(one))["reason"]


async def _refused(plugin: Neighbour, **how: object) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as found:
        await plugin.register(**how)
    return f"{found.value.code().name} {found.value.details()}"


async def test_a_plugin_never_takes_a_name_that_another_has(node: Node) -> None:
    node.simulate({GPU: {"gpus": 2}})
    await node.start_kubelet()
    bridging(node, *configured(node, f"    rename: [{{resource: {OTHER}, name: {NIC}}}]\n"))
    await node.allocatable_is(2)
    thief = Neighbour(node, resource=GPU, endpoint="thief.sock", devices=(Device("x"), Device("y"), Device("z")))
    with pytest.raises(grpc.aio.AioRpcError, match="ALREADY_EXISTS"):
        await thief.start()
    first = Neighbour(node)
    await first.start()
    await node.allocatable_is(2, NIC)
    for endpoint, resource in (("second.sock", NIC), ("third.sock", OTHER)):
        rival = Neighbour(node, endpoint=endpoint, resource=resource, devices=(Device("q"),))
        with pytest.raises(grpc.aio.AioRpcError, match="ALREADY_EXISTS"):
            await rival.start()
        assert rival.played.lists == 0
    await node.pass_time(10)
    assert (node.allocatable(), node.allocatable(NIC), node.allocatable(OTHER)) == (2, 2, 0)
    assert "DEVICES" not in (await node.admit("pod")).answer.envs
    await first.end()
    await node.pass_time(1)
    newer = Neighbour(node, endpoint="newer.sock", devices=(Device("a"), Device("b"), Device("c")))
    await newer.start()
    await node.allocatable_is(3, NIC)
    await node.truthful()


async def test_a_gpu_that_a_plugin_lists_as_well_is_given_by_one_of_them(node: Node) -> None:
    node.simulate(gpus(1))
    await node.start_kubelet()
    one = bridging(node)
    await node.allocatable_is(1)
    plugin = Neighbour(node, devices=(Device("GPU-0"), Device("GPU-1")))
    await plugin.start()
    await node.allocatable_is(1, NIC)
    assert (await node.admit("first", NIC)).devices[NIC] == ("GPU-0",)
    await plugin.change(Device("GPU-0"), Device("GPU-1"), Device("a"))
    await node.pass_time(5)
    node.simulate(gpus(0, 1))  # Our own source finds what the plugin has given.
    await node.pass_time(10)
    assert (node.allocatable(), node.allocatable(NIC)) == (1, 1)
    assert (await node.admit("second")).devices[GPU] == ("GPU-1",)
    assert (await node.admit("third", NIC)).devices[NIC] == ("a",)
    assert "by this gateway" in (await reasons(one, NIC))["GPU-1"]
    node.remove("first")
    await node.allocatable_is(2)
    assert (await node.admit("fourth")).devices[GPU] == ("GPU-0",)


async def test_a_renamed_resource_has_its_new_name_alone(node: Node) -> None:
    await node.start_kubelet()
    bridging(node, *configured(node, f"    rename: [{{resource: {NIC}, name: {OTHER}}}]\n"))
    plugin = Neighbour(node)
    await plugin.start()
    await node.allocatable_is(2, OTHER)
    given = await node.admit("pod", OTHER)
    assert given.answer.envs["DEVICES"] == given.devices[OTHER][0]
    assert node.capacity(NIC) == 0
    await node.truthful()


async def test_a_register_that_means_nothing_is_refused_in_words(node: Node) -> None:
    _, plugin = await bridged(node, *configured(node, "    allow: ['vendor.example/*']\n"))
    for endpoint in ("kubelet.sock", "../played.sock", "", "nowhere.sock", "x" * 200):
        assert (await _refused(plugin, endpoint=endpoint)).startswith("INVALID_ARGUMENT")
    said = await _refused(plugin, version="v9")
    assert said.startswith('UNKNOWN requested API version "v9" is not supported by kubelet. Supported version')
    for resource in ("another.example/nic", "no name", "vendor.example/"):
        stranger = Neighbour(node, endpoint="stranger.sock", resource=resource)
        with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
            await stranger.start()
    await stays(node, 2, 5)
    assert plugin.played.lists == 1
    await node.truthful()


async def test_a_plugin_that_registers_again_keeps_its_earlier_stream(node: Node) -> None:
    _, plugin = await bridged(node)
    played = plugin.played
    played.free.clear()
    admitted = asyncio.ensure_future(node.admit("pod", NIC))
    await node.until(lambda: played.allocated, "the call")
    await plugin.register()
    await node.pass_time(10)
    assert played.listening == 2
    played.free.set()
    await admitted
    await node.pass_time(5)
    assert (len(played.allocated), played.listening) == (1, 2)
    await plugin.change(Device("a"))
    await node.allocatable_is(1, NIC)
    await node.truthful()


async def test_registers_without_end_are_refused_and_others_are_not_kept_away(node: Node) -> None:
    await node.start_kubelet()
    bridging(node)
    plugin, quiet = Neighbour(node), Neighbour(node, resource=OTHER, endpoint="quiet.sock", devices=(Device("q"),))
    await plugin.start()
    await quiet.start()
    refused = ""
    for _ in range(650):
        try:
            await plugin.register(seconds=30)
        except grpc.aio.AioRpcError as error:
            refused = f"{error.code().name} {error.details()}"
            break
    assert refused.startswith("RESOURCE_EXHAUSTED")
    await quiet.register()
    await node.admit("pod", NIC)
    await node.admit("other", OTHER)
    assert plugin.played.listening <= 5


async def test_a_plugin_that_registers_once_outlives_a_gateway_that_is_killed_at_once(node: Node) -> None:
    await node.start_kubelet()
    one = bridging(node)
    plugin = Neighbour(node)
    await node.until((node.bridge / "device-plugins" / "kubelet.sock").exists, "the bridge's socket")
    await node.pass_time(5)
    node.disk.hang(writers=True)
    started = asyncio.ensure_future(plugin.start())
    await node.pass_time(1)
    assert not started.done()
    node.disk.go_on()
    await started
    one.kill()
    two = bridging(node)
    await node.allocatable_is(2, NIC)
    await node.admit("pod", NIC)
    await node.pass_time(5)
    await two.terminate()
    three = bridging(node)
    await node.allocatable_is(2, NIC)
    await node.pass_time(5)
    assert (await behind(three))["state"] == "live"
    assert plugin.played.listening == 1
    (memory,) = node.state.glob("bridge.json")
    three.kill()
    memory.write_text("{")
    bridging(node)
    await node.pass_time(5)
    await plugin.start()
    await node.allocatable_is(2, NIC)
    assert [one.read_text() for one in node.state.glob("*.damaged")] == ["{"]
    await node.truthful()


async def test_the_socket_is_opened_once_and_again_when_it_went(node: Node) -> None:
    await node.start_kubelet()
    bridging(node)
    (node.bridge / "device-plugins").mkdir(parents=True, mode=0o750, exist_ok=True)
    plugin = Neighbour(node)
    await plugin.start()
    before = socket_of(node.bridge)
    await node.allocatable_is(2, NIC)
    await node.pass_time(60)
    assert socket_of(node.bridge) == before
    (node.bridge / "device-plugins" / "kubelet.sock").unlink()
    await node.until((node.bridge / "device-plugins" / "kubelet.sock").exists, "the socket")
    await stays(node, 2, 5)
    other = Neighbour(node, resource=OTHER, endpoint="other.sock", devices=(Device("o"),))
    await other.start()
    await node.allocatable_is(1, OTHER)
    await node.admit("pod", NIC)
    assert plugin.played.lists == 1


async def test_sockets_of_dead_plugins_go_when_the_bridge_opens_and_those_of_the_living_are_called(node: Node) -> None:
    await node.start_kubelet()
    one = bridging(node)
    dead, living = (
        Neighbour(node, resource=OTHER, endpoint="dead.sock", devices=(Device("d"),)),
        Neighbour(node, endpoint="living.sock"),
    )
    await dead.start()
    await living.start()
    await node.allocatable_is(2, NIC)
    dead.kill()
    await node.pass_time(2)
    await one.terminate()
    assert (node.bridge / "device-plugins" / "dead.sock").exists()
    bridging(node)
    await node.until(lambda: not (node.bridge / "device-plugins" / "dead.sock").exists(), "its removal")
    await node.allocatable_is(2, NIC)
    await node.admit("pod", NIC)
    assert living.played.listening == 1


@pytest.mark.parametrize(
    ("which", "mode"),
    [
        ("", 0o777),
        ("device-plugins", 0o777),
        ("plugins_registry", 0o777),
        ("device-plugins", 0o770),
        ("device-plugins", 0o707),
    ],
)
async def test_a_folder_that_others_can_write_into_takes_no_plugins(node: Node, which: str, mode: int) -> None:
    folder = node.bridge / which
    folder.mkdir(parents=True)
    folder.chmod(mode)
    await node.start_kubelet()
    one = bridging(node)
    await node.pass_time(10)
    assert not (node.bridge / "device-plugins" / "kubelet.sock").exists()
    assert any("chown root" in each["reason"] for each in (await one.status())["hindrances"])
    assert await one.is_ready()
    folder.chmod(0o750)
    await Neighbour(node).start()
    await node.allocatable_is(2, NIC)


async def test_what_lies_in_plugins_registry_is_found_told_and_served(node: Node) -> None:
    await node.start_kubelet()
    bridging(node, *configured(node, f"    allow: ['{NIC}']\n"))
    registry = node.bridge / "plugins_registry"
    await node.until(registry.exists, "the folder")
    plugin = Neighbour(node, folder=registry, options=Options(pre_start_required=True))
    stranger = Neighbour(node, folder=registry, resource=OTHER, endpoint="stranger.sock")
    for one in (plugin, stranger):
        await one.start(registers=False)
    await node.allocatable_is(2, NIC)
    await node.admit("pod", NIC)
    assert plugin.played.prepared
    await node.pass_time(10)
    assert plugin.played.told == [""]
    assert any("bridge.allow" in words for words in stranger.played.told)
    assert (plugin.played.lists, stranger.played.lists) == (1, 0)
    plugin.kill()
    await node.pass_time(2)
    await plugin.start(registers=False)
    await node.pass_time(5)
    await node.admit("other", NIC)
    await node.truthful()


@pytest.mark.parametrize("version", ["1.20", "1.34"])
async def test_a_newer_gateway_has_the_plugin_before_and_after_the_older_one_ends(node: Node, version: str) -> None:
    one, plugin = await bridged(node, version=version)
    await node.admit("pod", NIC)
    two = bridging(node)
    await node.until(lambda: two.said("registered"), "its registration")
    await node.admit("other", NIC)
    assert plugin.played.listening == 1
    node.remove("other")
    plugin.kill()
    await stays(node, 2, 5)
    await plugin.start()
    await node.admit("third", NIC)
    assert await one.terminate() == 0
    await node.allocatable_after(10, 2, NIC)
    assert plugin.played.listening == 1
    await plugin.change(Device("a"), Device("b"), Device("c"))
    await node.allocatable_is(3, NIC)
    await node.admit("fourth", NIC)
    await node.truthful()
