"""What a gateway says of itself is what is so: status, readiness, metrics, the words to a service manager."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket

import pytest

from tests.contract.clock import patches
from tests.contract.node import GPU, PREFIX, Gateway, Node

SHARED = "sharing: {{timeSlicing: {{resources: [{{name: nvidia.com/gpu, replicas: {}}}]}}}}\n"


@pytest.mark.parametrize("version", ["1.8", "1.9", "1.10", "1.12", "1.20", "1.28", "1.34", "1.37"])
async def test_status_metrics_and_readiness_say_what_the_kubelets_records_say(node: Node, version: str) -> None:
    one = await node.served(8, version=version)
    await node.admit("pod")
    await node.admit("other", count=3)
    await node.truthful()
    node.remove("pod")
    await node.admit("third", count=3)
    node.gateway()
    await node.truthful()
    assert await one.terminate() == 0
    await node.truthful()
    await node.start_kubelet(version)
    await node.truthful()
    node.kill_kubelet()
    await node.truthful()


async def test_a_gateway_without_a_kubelet_is_ready_and_a_slow_kubelet_is_waited_for(node: Node) -> None:
    one = node.gateway()
    await node.truthful()
    await node.start_kubelet()
    await node.allocatable_is(8)
    await node.truthful()
    node.kill_kubelet()
    await node.pass_time(60)
    await node.truthful()
    node.fault(register_late_ms=4000)
    await node.start_kubelet()
    while node.allocatable() != 8:
        assert await one.is_ready()
        await node.pass_time(0.3)
    await node.truthful()


async def test_a_kubelet_that_is_waited_for_is_said_to_be_again_and_again_until_it_is_there(node: Node) -> None:
    one = node.gateway()
    await node.pass_time(200)
    said = one.said("waiting for a kubelet")
    assert 3 <= len(said) <= 5
    assert [line["level"] for line in said[:3]] == ["info", "warning", "warning"]
    await node.start_kubelet()
    await node.allocatable_is(8)
    told = len(one.said("waiting for a kubelet"))
    await node.pass_time(200)
    assert len(one.said("waiting for a kubelet")) == told
    node.kill_kubelet()
    await node.pass_time(90)
    assert len(one.said("the kubelet is gone")) == 1
    assert 55 <= one.said("waiting for a kubelet")[-1]["waited_s"] <= 65


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"never_calls_back": True}, ""),
        ({"register_hangs": True}, ""),
        ({"supports_only": "v9"}, "v9"),
        ({"register_errors": 10**6, "register_code": "UNKNOWN", "register_text": "no\n\x1b[2Jready\nno"}, "ready"),
    ],
)
@pytest.mark.parametrize("version", ["1.10", "1.34"])
async def test_a_refused_gateway_is_not_ready(node: Node, version: str, fault: dict[str, object], words: str) -> None:
    node.fault(**fault)
    await node.start_kubelet(version)
    one = node.gateway()
    await node.pass_time(15)
    code, text = await one.get("probes", "/readyz")
    assert (code, text.splitlines()[0]) == (503, "not ready")
    assert words in text
    assert all(line.isprintable() and (GPU in line or line == "not ready") for line in text.splitlines())
    assert await one.get("probes", "/healthz") == (200, "alive\n")
    await node.truthful()
    node.fault()
    await node.start_kubelet(version)
    await node.allocatable_is(8)
    await node.truthful()


async def test_readiness_ends_when_the_kubelet_takes_it_no_more(node: Node) -> None:
    one = await node.served(8)
    await node.truthful()
    node.fault(never_calls_back=True)
    node.kubelet.manager.cut(GPU)
    assert await one.is_ready()  # A kubelet may take ten seconds.
    await node.pass_time(30)
    assert not await one.is_ready()
    node.fault()
    await node.allocatable_is(8, seconds=180)
    await node.truthful()


async def test_a_list_that_no_kubelet_takes_makes_it_unready_at_once(node: Node) -> None:
    patches.setattr("gateway.registration.devicelist.MAX_LIST_BYTES", 1 << 16)
    node.simulate({GPU: {"gpus": 2}})
    file = node.folder / "config.yaml"
    file.write_text(SHARED.format(2))
    one = await node.served(4, "--config-file", str(file))
    await node.truthful()
    file.write_text(SHARED.format(640))
    await node.pass_time(4)
    code, text = await one.get("probes", "/readyz")
    assert code == 503
    assert "would fit" in text
    file.write_text(SHARED.format(3))
    await node.allocatable_is(6)
    await node.truthful()


async def test_a_registration_that_the_kubelet_lost_is_not_ready_until_it_is_made_again(node: Node) -> None:
    one = await node.served(8)
    await node.truthful()
    node.fault(report_late_ms=4000)
    node.kubelet.manager.cut(GPU)

    async def unready() -> bool:
        return not await one.is_ready()

    await node.pass_time(50)
    await node.eventually(unready, "unreadiness", 60)
    node.fault()
    await node.allocatable_is(8)
    await node.truthful()


async def test_a_node_without_gpus_is_ready(node: Node) -> None:
    node.simulate({GPU: {"gpus": 0}})
    await node.start_kubelet()
    one = node.gateway()
    await node.pass_time(20)
    code, text = await one.get("probes", "/readyz")
    assert (code, text) == (200, "ready\nno devices\n")
    node.simulate({GPU: {"gpus": 1}})
    await node.allocatable_is(1)
    await node.truthful()


async def test_a_gateway_that_sees_nothing_of_what_worked_is_not_ready(node: Node) -> None:
    node.simulate({GPU: {"gpus": 2}})
    first = await node.served(2)
    await first.terminate()
    right = node.profile.read_text()
    node.profile.write_text("{")
    second = node.gateway()
    await node.pass_time(20)
    code, text = await second.get("probes", "/readyz")
    assert code == 503
    assert "sees none of the 2 usable devices" in text
    assert [one["held_up"] for one in (await second.status())["hindrances"]].count(True) == 1
    node.profile.write_text(right)
    await node.allocatable_is(2)
    await node.truthful()


async def test_what_a_source_only_complains_of_leaves_it_ready(node: Node) -> None:
    node.simulate({GPU: {"gpus": 2}})
    one = await node.served(2)
    node.profile.write_text("{")
    await node.until(lambda: one.said("profile rejected"), "the complaint")
    (hindrance,) = (await one.status())["hindrances"]
    assert "rejected" in hindrance["reason"]
    assert (await one.metrics())[f'{PREFIX}source_hindrances{{source="{hindrance["source"]}"}}'] == 1
    await node.truthful()
    assert node.allocatable() == 2


async def test_held_unhealthy_and_cordoned_devices_count_where_they_are(node: Node) -> None:
    node.simulate({GPU: {"gpus": 4}})
    one = await node.served(4)
    given = await node.admit("pod", count=2)
    free = sorted({device["id"] for device in (await one.status())["resources"][0]["devices"]} - {*given.devices[GPU]})
    await one.order("cordon", id=given.devices[GPU][0], reason="smells")
    await one.order("cordon", id=free[0], reason="smells")
    await node.allocatable_is(2)
    await node.truthful()
    (resource,) = (await one.status())["resources"]
    assert [resource[what] for what in ("listed", "healthy", "held", "free")] == [4, 2, 2, 1]
    node.simulate({GPU: {"gpus": 2}})
    await node.pass_time(20)
    await node.truthful()


async def test_where_the_kubelet_lags_behind_the_list_its_records_count(node: Node) -> None:
    one = await node.served(8)
    first, second = [device["id"] for device in (await one.status())["resources"][0]["devices"]][:2]
    drift = f'{PREFIX}drift_devices{{kind="withheld",resource="{GPU}"}}'
    assert (await one.metrics())[drift] == 0
    node.fault(reads_no_lists=True)
    for device in (first, second):
        await one.order("cordon", id=device, reason="smells")
    await node.allocatable_is(6)
    await node.pass_time(20)
    for device in (first, second):
        await one.order("uncordon", id=device)
    await node.pass_time(5)
    (resource,) = (await one.status())["resources"]
    assert (resource["healthy"], resource["allocatable"], node.allocatable()) == (8, 6, 6)
    assert [(each["kind"], each["devices"]) for each in resource["drift"]] == [("withheld", 2)]
    assert (await one.metrics())[drift] == 2
    node.fault()
    await node.allocatable_is(8)
    await node.truthful()
    assert (await one.status())["resources"][0]["drift"] == []


async def test_a_list_that_the_kubelet_is_about_to_read_is_no_mismatch(node: Node) -> None:
    one = await node.served(8)
    await node.pass_time(5)
    node.fault(reads_no_lists=True)
    for number, id_ in enumerate([*await one.states()][:3]):  # It was about to read one list already.
        await one.order("cordon", id=id_, reason=f"smells {number}")
    (resource,) = (await one.status())["resources"]
    node.fault()
    await node.allocatable_is(5)
    await node.truthful()
    assert (resource["drift"], one.said("mismatch")) == ([], [])


async def test_what_another_pod_holds_now_is_told_at_once(node: Node) -> None:
    one = await node.served(8)
    await node.truthful()
    for number in range(3):
        (device,) = (await node.admit(f"pod-{number}")).devices[GPU]
        await node.pass_time(1.1)
        holders = {each["id"]: each["holder"] for each in (await one.status())["resources"][0]["devices"]}
        assert f"pod-{number}" in holders[device]


async def test_a_gateway_that_stood_still_is_not_alive_and_says_so_for_a_while(node: Node) -> None:
    one = await node.served(8)
    assert await one.get("probes", "/healthz") == (200, "alive\n")
    one.process.stop()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(8):
            await one.get("probes", "/healthz")
    one.process.go_on()
    assert await one.get("probes", "/healthz") == (200, "alive\n")
    assert (await one.status())["lag_s"] > 2
    assert (await one.metrics())[f"{PREFIX}loop_lag_seconds"] > 2
    await node.pass_time(150)
    assert (await one.status())["lag_s"] < 1


async def test_no_counter_falls_or_begins_above_zero(node: Node) -> None:
    one = node.gateway()
    begun = {name: value for name, value in (await one.metrics()).items() if _is_counter(name)}
    await node.start_kubelet()
    await node.allocatable_is(8)
    before = await _counted(node, one, begun)
    async with node.plugin() as plugin:
        for _ in range(3):
            await plugin.refused("GPU-unknown")
        await plugin.options()
    await node.admit("pod")
    before = await _counted(node, one, before)
    node.kubelet.manager.cut(GPU)
    await node.pass_time(60)
    await node.start_kubelet()
    await node.allocatable_is(8)
    counts = await _counted(node, one, before)

    def total(name: str, *labels: str) -> float:
        return sum(
            value
            for key, value in counts.items()
            if key.startswith(f"{PREFIX}{name}{{") and all(f'"{label}"' in key for label in labels)
        )

    assert total("calls_total", "Allocate", "NOT_FOUND") == 3
    assert total("calls_total", "Allocate", "OK") == 1
    assert total("registrations_total") == node.registers[GPU] == 3
    assert total("restart_gap_seconds_count") == 3
    assert total("call_duration_seconds_count", "Allocate") == 4
    assert total("registration_checks_total", "held") >= 3
    new = {name for name in counts if _is_counter(name) and name not in begun}
    assert not [name for name in new if "calls_total" in name and "Options" not in name]
    assert not [name for name in new if "registrations_total" in name]


async def _counted(node: Node, one: Gateway, before: dict[str, float]) -> dict[str, float]:
    await node.truthful()
    counts = {name: value for name, value in (await one.metrics()).items() if _is_counter(name)}
    fell = {name: (value, counts.get(name)) for name, value in before.items() if counts.get(name, -1) < value}
    assert not fell
    return counts


def _is_counter(name: str) -> bool:
    return name.startswith(PREFIX) and name.partition("{")[0].endswith(("_total", "_count", "_sum", "_bucket"))


async def test_all_who_scrape_within_a_second_get_one_text(node: Node) -> None:
    node.simulate({GPU: {"gpus": 1}})
    one = await node.served(1)
    await node.pass_time(2)
    (_, first), *others = [await one.get("metrics", "/metrics") for _ in range(3)]
    assert [text for _, text in others] == [first] * 2
    await node.pass_time(2)
    assert (await one.get("metrics", "/metrics"))[1] != first


async def test_device_ids_are_in_metrics_only_if_asked_for(node: Node) -> None:
    plain = await node.served(8)
    (given,) = (await node.admit("pod")).devices[GPU]
    assert "GPU-" not in (await plain.get("metrics", "/metrics"))[1]
    await plain.order("cordon", id=given, reason="smells")
    await node.truthful()
    (row,) = [name for name in await plain.metrics() if given in name]
    assert 'holder=""' in row
    await plain.order("uncordon", id=given)
    await plain.terminate()
    asked = await node.registered("--metrics-device-ids")
    await node.truthful()
    rows = [name for name in await asked.metrics() if name.startswith(f"{PREFIX}device_info")]
    assert len(rows) == 8
    assert sum(given in row and "pod" in row for row in rows) == 1


async def test_a_service_manager_is_told_of_start_life_and_end(node: Node) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(node.folder / "notify"))
        manager.setblocking(False)
        heard: list[tuple[str, float]] = []
        loop = asyncio.get_running_loop()
        loop.add_reader(manager, lambda: heard.append((manager.recv(100).decode(), loop.time())))
        os.environ |= {
            "NOTIFY_SOCKET": str(node.folder / "notify"),
            "WATCHDOG_USEC": "10000000",
            "WATCHDOG_PID": str(os.getpid()),
        }
        await node.start_kubelet()
        one = node.gateway()
        await node.until(lambda: heard, "the first word")
        await node.allocatable_is(8)
        await node.pass_time(60)
        assert [word for word, _ in heard].count("READY=1") == 1
        alive = [at for word, at in heard if word == "WATCHDOG=1"]
        assert max(later - before for before, later in itertools.pairwise([*alive, loop.time()])) < 8
        one.process.stop()
        heard.clear()
        await node.pass_time(8)
        assert not heard
        one.process.go_on()
        await node.pass_time(1)
        assert [word for word, _ in heard] == ["WATCHDOG=1"]
        assert await one.terminate() == 0
        assert heard[-1][0] == "STOPPING=1"
        os.environ["WATCHDOG_PID"] = "1"
        heard.clear()
        node.gateway()
        await node.pass_time(30)
        assert [word for word, _ in heard] == ["READY=1"]
        loop.remove_reader(manager)


@pytest.mark.parametrize("kubelet", [True, False])
async def test_an_end_in_order_leaves_nothing_behind(node: Node, *, kubelet: bool) -> None:
    if kubelet:
        await node.start_kubelet()
    before = {path.name for path in node.sockets.rglob("*")}
    one, other = node.gateway(), node.gateway()
    for each in (one, other):
        await node.until(lambda each=each: each.said("listening", what="metrics"), "its start")  # type: ignore[misc]
    await node.pass_time(5)
    assert (await one.terminate(), await other.terminate()) == (0, 0)
    left = {path.name for path in node.sockets.rglob("*") if not path.is_dir()}
    assert left <= before | {"kubelet_internal_checkpoint", "kubelet.sock"}
    assert not [path for path in node.sockets.iterdir() if path.is_dir() and any(path.iterdir())]
    assert not list(node.state.glob("*.sock"))
    assert not [line for each in (one, other) for line in each.process.log if line["level"] == "error"]


async def test_a_gateway_that_waits_for_its_folder_says_so_takes_orders_and_ends(node: Node) -> None:
    node.sockets.rmdir()
    node.sockets.write_text("")
    one = node.gateway()
    await node.pass_time(5)
    assert "socket directory" in (await one.status())["waits_for"]
    assert await one.get("probes", "/healthz") == (200, "alive\n")
    assert await one.is_ready()
    device = "GPU-cd7abcd8-11d5-5559-8aec-1acceb82ff36"
    await one.order("cordon", id=device, reason="smells")
    assert await one.terminate() == 0
    two = node.gateway()
    await node.pass_time(5)
    node.sockets.unlink()
    node.sockets.mkdir()
    await node.start_kubelet()
    await node.allocatable_is(7)
    (resource,) = (await two.status())["resources"]
    assert {one["id"] for one in resource["devices"] if one["state"] == "cordoned"} == {device}
