"""What containers hold is nobody else's, whatever the kubelet, its records, the hardware and the configuration do meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest

from tests.contract import wire
from tests.contract.node import GPU, Gateway, Node, OrderError, Refused, gpus

OTHER = "example.com/accelerator"


def share(node: Node, replicas: int, rename: str = "") -> str:
    """Write a configuration file in which each GPU is offered so many times (0: as itself); return its path."""
    entry = {"name": GPU, "replicas": replicas} | ({"rename": rename} if rename else {})
    sharing = {"sharing": {"timeSlicing": {"resources": [entry]}}} if replicas else {}
    path = node.folder / "config.yaml"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"version": "v1", "gateway": {"honourResourceNames": True}, **sharing}))
    draft.replace(path)
    return str(path)


async def drift(gateway: Gateway, resource: str = GPU) -> dict[str, int]:
    """Return how many devices differ in the kubelet's records from the gateway's, by how they do."""
    found = [one for one in (await gateway.status())["resources"] if one["name"] == resource]
    return {finding["kind"]: finding["devices"] for one in found for finding in one["drift"]}


async def holders(gateway: Gateway) -> dict[str, str]:
    """Return who holds which devices, as its status says it."""
    devices = (await gateway.status())["resources"][0]["devices"]
    return {device["id"]: device["holder"] for device in devices if device["holder"]}


def spoil_checkpoint(node: Node) -> None:
    """Change the checkpoint's checksum, so that no kubelet takes it for its own."""
    checkpoint = node.sockets / "kubelet_internal_checkpoint"
    was = checkpoint.stat()
    checkpoint.write_bytes(checkpoint.read_bytes().replace(b'"Checksum":', b'"Checksum":1'))
    os.utime(checkpoint, ns=(was.st_atime_ns, was.st_mtime_ns))


# -- hardware that goes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.10", "1.16", "1.20", "1.37"])
async def test_a_withdrawn_gpu_stays_listed_while_a_pod_has_it(node: Node, version: str) -> None:
    one = await node.served(3, version=version)
    await node.pass_time(10)
    async with node.plugin() as plugin:
        await plugin.allocate("GPU-0")  # So that the pod gets another one, whatever this kubelet prefers.
    given = (await node.admit("pod-a", count=3)).devices[GPU]
    node.simulate(gpus(*range(3), withdrawn=["GPU-0", "GPU-1", "GPU-2"]))  # In the moment that it was given.
    await node.until(lambda: node.allocatable() == 0, "that it is offered no more")
    await node.pass_time(700 if version == "1.37" else 90)  # Longer than it would stay if nobody could say who has it.
    assert (node.capacity(), len(given)) == (3, 3)
    one.kill()
    node.gateway()
    await node.pass_time(90)
    assert node.capacity() == 3
    node.remove("pod-a")
    await node.start_kubelet(version)  # Which frees what ended pods held.
    await node.until(lambda: node.capacity() == 0, "that it is gone with its pod", 120)


@pytest.mark.parametrize("trouble", ["gone", "silent"])
async def test_while_nobody_can_say_who_has_a_withdrawn_gpu_it_stays_for_ten_minutes(node: Node, trouble: str) -> None:
    await node.served(2)
    await node.admit("pod-a")
    await node.hide_pods(silent=trouble == "silent")
    node.forget_checkpoint()
    checkpoint = node.sockets / "kubelet_internal_checkpoint"
    checkpoint.mkdir()  # The kubelet writes none any more.
    await node.pass_time(5)
    node.simulate(gpus(0, 1, withdrawn=["GPU-0", "GPU-1"]))
    await node.allocatable_is(0)
    await node.pass_time(580)
    assert node.capacity() == 2
    await node.until(lambda: node.capacity() == 0, "that they are gone after ten minutes", 60)


@pytest.mark.parametrize("what", ["nonsense", "huge", "pipe", "link"])
async def test_a_checkpoint_that_cannot_be_read_holds_nothing_up(node: Node, what: str) -> None:
    node.simulate(gpus(0, 1))
    await node.start_kubelet()
    checkpoint = node.sockets / "kubelet_internal_checkpoint"
    if what == "pipe":
        os.mkfifo(checkpoint)
    elif what == "link":
        checkpoint.symlink_to(node.folder / "nowhere")
    else:
        checkpoint.write_bytes(b"nonsense" if what == "nonsense" else b"[" * (65 << 20))
    one = node.gateway()
    await node.allocatable_is(2)
    await node.admit("pod-a")
    await node.eventually(one.is_ready, "readiness")
    await node.truthful()


@pytest.mark.parametrize("version", ["1.13", "1.20", "1.34"])
async def test_a_lost_gpu_is_remembered_for_thirty_days_after_its_last_pod(node: Node, version: str) -> None:
    one = await node.served(3, version=version)
    await node.admit("pod-a", count=3)
    await node.pass_time(5)
    node.simulate(gpus())
    await node.allocatable_is(0)
    one.kill()
    node.kill_kubelet()
    await node.pass_time(31 * 86400)
    node.simulate(gpus(0))
    await node.start_kubelet(version)
    second = node.gateway()
    await node.until(lambda: node.capacity() == 3 and node.allocatable() == 1, "what is held of what is lost")
    node.remove("pod-a")
    await node.admit("pod-b")  # So that the kubelet frees and writes.
    await node.until(lambda: node.capacity() == 1, "that it is forgotten when its pod has ended")
    node.simulate(gpus(0, 3))
    await node.allocatable_is(2)
    node.simulate(gpus(0))
    await node.allocatable_is(1)
    second.kill()
    node.kill_kubelet()
    await node.pass_time(29 * 86400)
    await node.served(1, version=version)
    await node.pass_time(60)
    assert node.capacity() == 2


async def test_who_holds_a_gpu_that_is_cordoned_or_goes_keeps_it(node: Node) -> None:
    node.simulate(gpus(0, 1, 2))
    await node.start_kubelet("1.8")  # It calls Allocate at each start of a container.
    one = node.gateway()
    await node.allocatable_is(3)
    given = (await node.admit("pod-a", count=2)).devices[GPU]
    free = ({"GPU-0", "GPU-1", "GPU-2"} - {*given}).pop()
    await one.order("cordon", id=given[0], reason="smells")
    await node.restart_container("pod-a")
    node.simulate(gpus(0, 1, 2, withdrawn=[given[1]], unhealthy={free: "hot"}))
    await node.allocatable_is(0)
    await node.restart_container("pod-a")
    node.simulate(gpus(0, 1, 2, withdrawn=[given[1]], unhealthy={given[0]: "hot"}))
    await node.pass_time(5)
    await node.restart_container("pod-a")
    await one.order("uncordon", id=given[0])
    await node.pass_time(5)
    await node.restart_container("pod-a")  # It is ill, and was given before.
    node.simulate(gpus(*(number for number in range(3) if f"GPU-{number}" != given[0])))
    await one.order("cordon", id=given[0], reason="smells")
    await node.pass_time(5)
    with pytest.raises(Refused, match="lost"):
        await node.restart_container("pod-a")


@pytest.mark.parametrize("end", ["kill", "terminate"])
async def test_what_was_given_is_remembered_where_the_kubelet_forgets_it(node: Node, end: str) -> None:
    one = await node.served(1, version="1.8")
    await node.admit("pod-a")
    if end == "kill":
        await node.pass_time(0.2)
        one.kill()
    else:
        await one.terminate()
    node.forget_checkpoint()
    node.simulate(gpus(0, unhealthy={"GPU-0": "hot"}))
    await node.registered()
    await node.pass_time(3)
    await node.restart_container("pod-a")


# -- a GPU that is ill -------------------------------------------------------------------------------------------------


async def test_an_illness_that_needs_a_reset_outlives_restarts_and_names_until_a_reset(node: Node) -> None:
    ill = {"GPU-0": {"reason": "fell off the bus", "kind": "reset-required"}}
    node.simulate(gpus(0, 1, unhealthy=ill))
    one = await node.served(1)
    node.simulate(gpus(0, 1))
    await node.allocatable_after(5, 1)
    one.kill()
    second = node.gateway()
    await node.allocatable_is(0)
    await node.allocatable_is(1)
    node.simulate(gpus(0, 1, name=OTHER))
    await node.allocatable_is(1, OTHER)
    await node.allocatable_after(30, 1, OTHER)
    node.simulate(gpus(0, 1, name=OTHER, recovered=["GPU-0"]))
    await node.allocatable_is(2, OTHER)
    second.kill()
    node.gateway()
    await node.allocatable_is(0, OTHER)
    await node.allocatable_is(2, OTHER)


@pytest.mark.parametrize("cure", ["forget", "reboot"])
async def test_an_illness_that_needs_a_reset_ends_by_order_and_reboot(node: Node, cure: str) -> None:
    node.simulate(gpus(0, 1, unhealthy={"GPU-0": {"reason": "fell off the bus", "kind": "reset-required"}}))
    one = await node.served(1)
    node.simulate(gpus(0, 1))
    await node.pass_time(1)
    if cure == "forget":
        assert (await one.order("forget", id="GPU-0"))["changed"]
        with pytest.raises(OrderError, match="nothing to forget"):
            await one.order("forget", id="GPU-0")
        await node.allocatable_is(2)
        one.kill()
        await node.allocatable_is(0)
    else:
        node.reboot()
        await node.start_kubelet()
    node.gateway()
    await node.allocatable_is(2)
    await node.allocatable_after(5, 2)


async def test_a_gpu_that_keeps_falling_ill_is_held_back_for_a_while(node: Node) -> None:
    await node.served(2)
    node.simulate(gpus(0, 1, unhealthy={"GPU-0": {"reason": "a program failed", "kind": "application"}}))
    await node.allocatable_after(2, 2)
    for number in range(4):
        node.simulate(gpus(0, 1, unhealthy={"GPU-0": "hot"}))
        await node.allocatable_is(1)
        node.simulate(gpus(0, 1))
        await node.pass_time(50)
        assert node.allocatable() == (2 if number < 2 else 1)
        if number > 2:
            await node.allocatable_after(65, 1)
        await node.allocatable_is(2)
    await node.pass_time(1000)
    node.simulate(gpus(0, 1, unhealthy={"GPU-0": "hot"}))
    await node.allocatable_is(1)
    node.simulate(gpus(0, 1))
    await node.allocatable_is(2, seconds=5)


async def test_a_gpu_that_keeps_falling_ill_is_held_back_for_an_hour_at_most_and_not_after_a_reset(node: Node) -> None:
    async def falls_ill() -> None:
        node.simulate(gpus(0, unhealthy={"GPU-0": "hot"}))
        await node.allocatable_is(0)
        node.simulate(gpus(0))

    node.simulate(gpus(0))
    await node.served(1)
    for _ in range(8):
        await falls_ill()
        await node.allocatable_is(1, seconds=2000)
    await falls_ill()
    await node.allocatable_after(3500, 0)
    await node.allocatable_is(1, seconds=150)
    await falls_ill()
    node.simulate(gpus(0, recovered=["GPU-0"]))
    await node.allocatable_is(1, seconds=5)


async def test_a_gpu_that_was_ill_of_late_is_given_last(node: Node) -> None:
    node.simulate(gpus(0, 1, 2, unhealthy={"GPU-0": "hot"}))
    await node.served(2)
    node.simulate(gpus(0, 1, 2))
    await node.allocatable_is(3)
    assert (await node.admit("pod-a")).devices[GPU] == ("GPU-1",)
    await node.pass_time(700)
    assert (await node.admit("pod-b")).devices[GPU] == ("GPU-0",)


async def test_a_pod_that_comes_as_its_gpu_falls_ill_is_let_in_and_a_later_one_not(node: Node) -> None:
    one = await node.served(2)
    node.simulate(gpus(0, 1, unhealthy={"GPU-0": "hot"}))
    await node.allocatable_is(1)
    async with node.plugin() as plugin:
        await plugin.allocate("GPU-0")
        await node.pass_time(2)
        await plugin.refused("GPU-0", words="unhealthy")
        node.simulate(gpus(0, 1, unhealthy={"GPU-0": "hot", "GPU-1": "hot"}))  # Another one falls ill only now.
        await node.allocatable_is(0)
        await plugin.refused("GPU-0", words="unhealthy")
        await plugin.allocate("GPU-1")
    one.kill()
    await node.registered()
    async with node.plugin() as plugin:
        await plugin.refused("GPU-0", words="unhealthy")  # The gateway before has told so.


@pytest.mark.parametrize("reboots", [False, True])
async def test_what_nobody_can_look_at_is_served_from_memory_for_five_minutes(node: Node, reboots: bool) -> None:
    one = await node.served(2)
    await node.admit("pod-a")
    await node.pass_time(5)
    one.kill()
    if reboots:
        node.reboot()
        await node.start_kubelet()
    node.profile.write_text("nonsense")
    second = node.gateway()
    await node.allocatable_is(0)
    await node.allocatable_is(2)
    await node.admit("pod-b")
    await node.allocatable_after(280, 2)
    await node.allocatable_is(0)
    assert set((await second.states()).values()) == {"unhealthy"}
    node.simulate(gpus(0, 1))
    await node.allocatable_is(2)


async def test_with_a_grace_a_gpu_may_turn_up_late_after_a_start(node: Node) -> None:
    await node.served(2)
    node.reboot()
    node.simulate(gpus(0))
    second = await node.served(2, "--startup-grace", "60")
    await node.allocatable_after(50, 2)
    await node.allocatable_is(1, seconds=15)
    assert await second.states() == {"GPU-0": "healthy", "GPU-1": "lost"}


# -- a kubelet that forgets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.20", "1.28", "1.34", "1.37"])
@pytest.mark.parametrize("sees", [True, False])
async def test_what_the_kubelet_forgot_is_given_last_until_its_pod_ends(node: Node, version: str, sees: bool) -> None:
    one = await node.served(4, version=version)
    assert (await node.admit("train-a")).devices[GPU] == ("GPU-0",)
    await node.admit("train-b")
    await node.pass_time(10)
    if not sees:
        one.kill()
    await node.start_forgetful_kubelet(version)
    two = one if sees else node.gateway()
    await node.allocatable_is(4)
    await node.pass_time(15)
    assert await drift(two) == {"forgotten": 2}
    two.kill()
    three = await node.registered()
    await node.allocatable_is(4)
    await node.admit("new-c")
    await node.admit("new-d")  # The oracle sees that both got the other two.
    node.kubelet.manager.remove("train-a")  # Deleted by force: its container runs on for its grace period.
    node.kubelet.manager.remove("new-c")
    await node.pass_time(20)
    assert await drift(three) == {"forgotten": 2}
    node.remove("new-c")
    given = await node.admit("new-e")
    assert given.devices[GPU][0] in {"GPU-2", "GPU-3"}
    node.remove("train-a")
    await node.until(lambda: three.said("mismatch is over", devices=["GPU-0"]), "that it is free", 150)
    assert (await node.admit("new-f")).devices[GPU] == ("GPU-0",)
    assert await drift(three) == {"forgotten": 1}


async def test_what_one_kubelet_forgot_the_next_one_s_checkpoint_does_not_set_free(node: Node) -> None:
    await node.served(3)
    await node.admit("train-a")
    await node.pass_time(10)
    await node.start_forgetful_kubelet()
    await node.allocatable_is(3)
    await node.admit("train-b")
    node.kill_kubelet()  # Before anything could be seen of its records.
    await node.start_kubelet()
    await node.allocatable_is(3)
    await node.admit("train-c")  # The oracle sees that nobody else has what it gets.


@pytest.mark.parametrize("version", ["1.10", "1.22", "1.34", "1.37"])
@pytest.mark.parametrize("then", ["killed", "terminated", "replaced"])
async def test_a_gpu_in_two_pods_is_reported_until_an_operator_acts(node: Node, version: str, then: str) -> None:
    one = await node.served(2, version=version)
    await node.admit("train-a", count=2)
    await node.pass_time(10)
    await node.start_forgetful_kubelet(version)
    await node.allocatable_is(2)
    await node.pass_time(15)
    assert (await one.metrics())[f'device_plugin_gateway_drift_devices{{kind="forgotten",resource="{GPU}"}}'] == 2
    await node.kubelet.ask(node.kubelet.manager.admit("new-b", {GPU: 1}))  # There is no other GPU.
    await node.until(lambda: one.said("mismatch", kind="doubled"), "its word", 1)
    await node.pass_time(5)
    assert await drift(one) == {"doubled": 1, "forgotten": 1}
    # The next gateway says it, too: it sees nothing amiss in the kubelet's records.
    older = one
    if then != "replaced":
        older.kill() if then == "killed" else await older.terminate()
    one = await node.registered()
    if older.alive:
        await older.terminate()
    await node.allocatable_is(2)
    await node.pass_time(15)
    assert await drift(one) == {"doubled": 1, "forgotten": 1}
    words = str((await one.status())["resources"][0]["drift"])
    assert "train-a" in words
    assert "new-b" in words or version == "1.10"  # Which knows pods by their UIDs alone.
    node.remove("new-b")
    assert (await one.order("forget", id="GPU-0"))["changed"]
    assert (await one.order("forget", id="GPU-1"))["changed"]
    await node.pass_time(1)
    assert await drift(one) == {}
    one.kill()
    again = await node.registered()
    await node.pass_time(15)
    assert await drift(again) == {}


@pytest.mark.parametrize("version", ["1.13", "1.22", "1.37"])
async def test_pods_that_end_while_no_gateway_runs_were_not_forgotten(node: Node, version: str) -> None:
    one = await node.served(2, version=version)
    await node.admit("train-a", count=2)
    await node.pass_time(10)
    one.kill()
    node.remove("train-a")
    await node.allocatable_is(0)
    two = node.gateway()
    await node.allocatable_is(2)
    await node.admit("new-b", count=2)
    await node.pass_time(30)
    assert await drift(two) == {}
    assert not two.said("mismatch")


@pytest.mark.parametrize("version", ["1.22", "1.37"])
@pytest.mark.parametrize("away", [0.0, 100.0])
async def test_a_drained_node_s_kubelet_that_lost_its_records_forgot_nobody(
    node: Node, version: str, away: float
) -> None:
    one = await node.served(2, version=version)
    await node.admit("train-a", count=2)
    for name in ("proxy-x1b2c", "network-d3e4f"):
        await node.admit(name, count=0)
    await node.pass_time(10)
    if away:  # Meanwhile only the checkpoint says who has what, by UIDs.
        node.kill_kubelet()
        await node.pass_time(away)
    node.remove("train-a")
    await node.start_forgetful_kubelet(version)
    await node.allocatable_is(2)
    await node.admit("new-b", count=2)
    await node.pass_time(100)
    assert await drift(one) == {}
    assert not one.said("mismatch", kind="doubled")


@pytest.mark.parametrize("version", ["1.13", "1.20", "1.28", "1.34", "1.37"])
@pytest.mark.parametrize("sees", [True, False])
async def test_a_pod_that_ends_while_its_kubelet_is_away_is_not_forgotten(node: Node, version: str, sees: bool) -> None:
    one = await node.served(3, version=version)
    ended = (await node.admit("train-a")).devices[GPU]
    await node.admit("train-b")
    await node.pass_time(10)
    node.kill_kubelet()
    if not sees:
        one.kill()
    node.remove("train-a")
    await node.start_kubelet(version)
    if not sees:
        one = node.gateway()
    await node.allocatable_is(3)
    await node.pass_time(30)
    assert await drift(one) == {}
    assert ended[0] in (await node.admit("new-c", count=2)).devices[GPU]
    await node.pass_time(30)
    assert await drift(one) == {}


@pytest.mark.parametrize("version", ["1.20", "1.28", "1.37"])
@pytest.mark.parametrize("sees", [True, False])
async def test_a_kubelet_that_cannot_read_its_checkpoint_forgot_all(node: Node, version: str, sees: bool) -> None:
    one = await node.served(4, version=version)
    held = (await node.admit("train-a", count=2)).devices[GPU]
    await node.pass_time(10)
    node.kill_kubelet()
    if not sees:
        one.kill()
    spoil_checkpoint(node)
    await node.start_kubelet(version)
    if not sees:
        one = node.gateway()
    await node.allocatable_is(4)
    await node.pass_time(15)
    assert await drift(one) == {"forgotten": 2}
    given = (await node.admit("new-b", count=2)).devices[GPU]
    assert not {*given} & {*held}


@pytest.mark.parametrize("version", ["1.20", "1.28", "1.37"])
async def test_a_pod_that_ended_before_its_kubelet_lost_its_records_was_not_forgotten(node: Node, version: str) -> None:
    one = await node.served(3, version=version)
    await node.admit("train-a", count=2)
    await node.admit("train-b")
    await node.pass_time(10)
    node.remove("train-a")
    await node.admit("new-c")  # The kubelet frees and writes, and nobody has read it yet.
    node.kill_kubelet()
    spoil_checkpoint(node)
    await node.start_kubelet(version)
    await node.allocatable_is(3)
    await node.pass_time(15)
    assert await drift(one) == {"forgotten": 2}
    assert "train-a" not in str((await one.status())["resources"][0]["drift"])


@pytest.mark.parametrize("version", ["1.20", "1.28", "1.37"])
async def test_what_a_kubelet_gives_after_it_forgot_is_no_sign_that_it_remembers(node: Node, version: str) -> None:
    one = await node.served(3, version=version)
    await node.admit("train-a", count=2)
    await node.pass_time(10)
    await node.start_forgetful_kubelet(version)
    await node.allocatable_is(3)
    await node.admit("new-b")
    await node.pass_time(0.5)  # The gateway has written that down, and hasn't compared the records yet.
    one.kill()
    two = node.gateway()
    await node.pass_time(15)
    assert await drift(two) == {"forgotten": 2}


async def test_a_holder_whose_end_is_only_likely_is_known_to_the_next_gateway(node: Node) -> None:
    one = await node.served(2)
    for pod in ("proxy-x7k2p", "agent-9fw4c", "train-a"):
        await node.admit(pod, count=1 if pod == "train-a" else 0)
    await node.pass_time(10)
    node.kill_kubelet()
    node.forget_checkpoint()
    node.remove("train-a")  # Its containers run on for a while, and no List has it.
    await node.start_kubelet()
    await node.allocatable_is(2)
    await node.pass_time(8)
    one.kill()
    two = await node.registered()
    await node.pass_time(2)
    assert await drift(two) == {"forgotten": 1}


@pytest.mark.parametrize("version", ["1.20", "1.28", "1.37"])
async def test_a_gateway_that_is_there_before_its_kubelet_knows_whom_that_forgot(node: Node, version: str) -> None:
    one = await node.served(3, version=version)
    held = (await node.admit("train-a")).devices[GPU]
    await node.pass_time(10)
    one.kill()
    node.kill_kubelet()
    node.forget_checkpoint()
    two = node.gateway()
    await node.until(lambda: two.said("waiting for a kubelet"), "its word")
    await node.start_kubelet(version)
    await node.allocatable_is(3)
    await node.pass_time(15)
    assert await drift(two) == {"forgotten": 1}
    assert (await node.admit("new-b")).devices[GPU] != held


@pytest.mark.parametrize("version", ["1.20", "1.28", "1.37"])
async def test_two_kubelets_in_a_row_that_know_of_no_pod_have_forgotten_them(node: Node, version: str) -> None:
    one = await node.served(3, version=version)
    await node.admit("train-a", count=2)
    await node.pass_time(10)
    node.kill_kubelet()
    spoil_checkpoint(node)
    for _ in range(2):  # The second one reads what the first one wrote.
        await node.start_kubelet(version)
        await node.allocatable_is(3)
    await node.pass_time(15)
    assert await drift(one) == {"forgotten": 2}


@pytest.mark.parametrize("version", ["1.20", "1.28", "1.37"])
async def test_an_older_checkpoint_that_is_put_back_shows_no_pod_s_end(node: Node, version: str) -> None:
    one = await node.served(4, version=version)
    await node.admit("early")
    await node.pass_time(10)
    checkpoint = node.sockets / "kubelet_internal_checkpoint"
    was, older = checkpoint.stat(), checkpoint.read_bytes()
    await node.admit("train-a", count=2)
    node.remove("early")
    await node.admit("train-b", count=2)  # It has what that had, of which the older one says something.
    await node.pass_time(10)
    node.kill_kubelet()
    checkpoint.write_bytes(older)
    os.utime(checkpoint, ns=(was.st_atime_ns, was.st_mtime_ns))
    await node.start_kubelet(version)
    await node.allocatable_is(4)
    await node.pass_time(15)
    assert await drift(one) == {"forgotten": 3}


async def test_a_checkpoint_without_list_names_no_pod_of_before(node: Node) -> None:
    one = await node.served(1)
    await node.admit("train-a")
    await node.pass_time(5)
    await node.hide_pods()
    node.remove("train-a")
    await node.admit("new-b")
    await node.pass_time(5)
    assert "new-b" in (await holders(one))["GPU-0"]
    await node.truthful()


async def forgotten(node: Node) -> Gateway:
    """Have a kubelet forget a pod that has a GPU."""
    one = await node.served(2)
    await node.admit("train-a")
    await node.pass_time(10)
    await node.start_forgetful_kubelet()
    await node.allocatable_is(2)
    await node.pass_time(15)
    assert await drift(one) == {"forgotten": 1}
    return one


async def test_a_reboot_ends_what_the_kubelet_forgot(node: Node) -> None:
    await forgotten(node)
    node.reboot()
    node.remove("train-a")
    node.forget_checkpoint()
    one = await node.served(2)
    await node.pass_time(15)
    assert await drift(one) == {}
    assert (await node.admit("new-b")).devices[GPU] == ("GPU-0",)


@pytest.mark.parametrize("version", ["1.12", "1.28", "1.37"])
async def test_a_kubelet_that_has_not_heard_of_its_pods_yet_frees_nothing(node: Node, version: str) -> None:
    await node.served(3, version=version)
    await node.admit("train-a", count=2)
    await node.pass_time(10)
    await node.start_kubelet(version, ready=False, hears=False)
    await node.allocatable_is(3)
    node.simulate(gpus(0, 1, 2, withdrawn=["GPU-0", "GPU-1", "GPU-2"]))
    await node.pass_time(200)
    assert node.capacity() == 2
    node.hear()
    await node.pass_time(60)
    assert node.capacity() == 2
    node.remove("train-a")
    await node.start_kubelet(version)
    await node.until(lambda: node.capacity() == 0, "that they are gone with their pod", 120)


async def test_a_kubelet_that_knows_no_pods_but_static_ones_shows_no_pod_s_end(node: Node) -> None:
    one = await node.served(2)
    await node.admit("train-a")
    await node.pass_time(10)
    node.kill_kubelet()
    node.forget_checkpoint()
    await node.start_kubelet(hears=False)
    for name in ("proxy-n1", "scheduler-n1"):  # Static pods are called after their node.
        await node.admit(name, count=0)
    await node.pass_time(100)
    assert await drift(one) == {"forgotten": 1}


@pytest.mark.parametrize("version", ["1.20", "1.34", "1.37"])
async def test_a_gpu_that_the_kubelet_forgot_during_an_allocate_goes_to_no_second_pod(node: Node, version: str) -> None:
    await node.served(3, version=version)
    await node.pass_time(10)
    await node.admit("old")
    await node.pass_time(10)
    node.remove("old")
    admitted = asyncio.ensure_future(node.admit("first"))
    while not admitted.done():  # A monitoring agent reads meanwhile, and the kubelet counts anew what is in use.
        await node.list_pods()
    await admitted
    for name in ("second", "third", "fourth"):
        try:
            await node.admit(name)
        except Refused:
            await node.pass_time(1)
            await node.admit(name) if name != "fourth" else None


def asked() -> int:
    """Count the calls that the kubelet's pod-resources API had about who has what."""
    return sum(count for method, count in wire.calls.items() if method.endswith(("Lister/Get", "Lister/List")))


@pytest.mark.parametrize("version", ["1.15", "1.20", "1.28", "1.37"])
async def test_what_a_pod_has_goes_to_no_other_whatever_the_kubelet_takes_it_for(node: Node, version: str) -> None:
    await node.served(3, version=version)
    (held,) = (await node.admit("first")).devices[GPU]
    free = sorted({"GPU-0", "GPU-1", "GPU-2"} - {held})
    for seconds in (0.001, 0.1, 10):
        await node.pass_time(seconds)
        async with node.plugin() as plugin:
            await plugin.refused(held, words=r"default/first/main holds ")
            await plugin.refused(free[0], held, words="holds ")
            await plugin.allocate(free[1])  # It never was given, or is known to be free.
            if node.kubelet.manager.behaviour.preferred:
                assert await plugin.prefer([held, *free], 1) <= {*free}
                assert await plugin.prefer([held, *free], 3) == {held, *free}
    node.remove("first")
    async with node.plugin() as plugin:
        await plugin.allocate(held)


async def test_the_pod_that_has_a_gpu_now_is_asked_about_and_no_earlier_one(node: Node) -> None:
    await node.served(1)
    await node.admit("first")
    await node.pass_time(10)
    node.remove("first")
    await node.admit("second")
    async with node.plugin() as plugin:
        await plugin.refused("GPU-0", words="second")


@pytest.mark.parametrize("call", ["Allocate", "GetPreferredAllocation"])
async def test_while_the_kubelet_asks_for_devices_it_is_not_asked_for_a_list_of_pods(node: Node, call: str) -> None:
    def lists() -> int:
        return sum(count for method, count in wire.calls.items() if method.endswith("Lister/List"))

    await node.served(3)
    (held,) = (await node.admit("first")).devices[GPU]
    free = sorted({"GPU-0", "GPU-1", "GPU-2"} - {held})
    await node.pass_time(10)
    async with node.plugin() as plugin:
        await plugin.allocate(free[0])  # The records are to be read two seconds later.
        before, ends = lists(), asyncio.get_running_loop().time() + 4
        while asyncio.get_running_loop().time() < ends:
            await asyncio.sleep(0.02)
            if call == "Allocate":
                await plugin.refused(held)
            else:
                await plugin.prefer([held, free[1]], 1)
        assert lists() == before
    await node.pass_time(2)
    assert lists() > before


@pytest.mark.parametrize("version", ["1.28", "1.37"])
async def test_a_kubelet_that_is_asked_too_often_is_asked_again(node: Node, version: str) -> None:
    one = await node.served(1, version=version)
    await node.pass_time(5)
    node.limit_pods()
    for number in range(3):
        await node.admit(f"pod-{number}")
        await node.pass_time(3)
        assert f"pod-{number}" in (await holders(one))["GPU-0"]
        node.remove(f"pod-{number}")


@pytest.mark.parametrize("version", ["1.8", "1.20", "1.37"])
async def test_a_checkpoint_alone_names_all_that_pods_hold(node: Node, version: str) -> None:
    node.simulate(gpus(0, 1, 2, numa=[0, 1, 1]))
    one = await node.served(3, version=version)
    await node.admit("pod", count=3)  # Of two NUMA nodes.
    await node.hide_pods()
    await node.pass_time(70)
    assert {*await holders(one)} == {"GPU-0", "GPU-1", "GPU-2"}


async def test_what_is_known_to_be_free_is_asked_about_once(node: Node) -> None:
    await node.served(2)
    (held,) = (await node.admit("first")).devices[GPU]
    await node.pass_time(10)
    node.remove("first")
    async with node.plugin() as plugin:
        before = asked()
        for _ in range(5):
            await plugin.prefer([held], 1)
        assert asked() == before + 1


async def test_a_kubelet_that_offers_another_numa_node_s_gpus_says_nothing_of_the_others(node: Node) -> None:
    node.simulate({GPU: {"gpus": [{"uuid": f"GPU-{number}"} for number in range(3)], "numa": [0, 0, 1]}})
    await node.served(3)
    (held,) = (await node.admit("first")).devices[GPU]
    await node.pass_time(3)
    async with node.plugin() as plugin:
        await plugin.prefer(["GPU-2"], 1)
        await plugin.refused(held, words="holds ")


async def test_while_the_kubelet_does_not_answer_nothing_is_given_twice(node: Node) -> None:
    await node.served(3)
    (held,) = (await node.admit("first")).devices[GPU]
    await node.pass_time(10)
    await node.hide_pods(silent=True)
    async with node.plugin() as plugin:
        await plugin.refused(held, words="doesn't answer")
    await node.admit("second")


# -- a GPU under another name ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["kept", "lost"])
@pytest.mark.parametrize("version", ["1.20", "1.34"])
async def test_a_gpu_under_a_new_name_stays_with_its_pod_of_the_old_one(node: Node, version: str, memory: str) -> None:
    one = await node.served(3, version=version)
    await node.admit("pod-a", count=2)
    await one.order("cordon", id="GPU-2", reason="smells")
    await node.pass_time(5)
    one.kill()
    if memory == "lost":
        for file in node.state.iterdir():
            file.unlink()
    node.simulate(gpus(0, 1, 2, name=OTHER))
    await node.registered()
    await node.pass_time(30)
    assert node.allocatable(OTHER) == (1 if memory == "lost" else 0)
    with pytest.raises(Refused):
        async with node.plugin(OTHER) as plugin:
            await plugin.allocate("GPU-0")
    node.remove("pod-a")
    await node.allocatable_is(3 if memory == "lost" else 2, OTHER, 120)
    await node.admit("pod-b", OTHER, 2)


@pytest.mark.parametrize("restarts", [False, True])
async def test_gpus_are_shared_and_unshared_under_running_pods(node: Node, restarts: bool) -> None:
    node.simulate(gpus(0, 1))
    await node.start_kubelet()
    options = ("--config-file", share(node, 0))
    one = node.gateway(*options)
    await node.allocatable_is(2)
    await node.admit("alone")

    async def edit(replicas: int, rename: str = "") -> None:
        nonlocal one
        await node.pass_time(3)
        share(node, replicas, rename)
        if restarts:
            one.kill()
            one = node.gateway(*options)
        await node.pass_time(40)

    node.shared = (GPU, OTHER)
    await edit(4)
    assert node.allocatable() == 4
    await node.admit("b", count=2)
    await node.admit("c", count=2)
    await edit(2)  # They go on sharing it; nobody else gets a part of it.
    assert node.allocatable() == 2
    await node.refused("too much")
    await edit(2, OTHER)
    assert (node.allocatable(), node.allocatable(OTHER)) == (0, 0)
    node.remove("b")
    node.remove("alone")
    await node.allocatable_is(2, OTHER, 120)
    await node.admit("d", OTHER, 2)
    await edit(0)
    assert node.allocatable() == 0
    node.remove("c")
    await node.allocatable_is(1, GPU, 120)
    await node.admit("e")
    node.remove("d")
    await node.allocatable_is(2, GPU, 120)
    await node.admit("f")


async def test_a_cordon_stays_with_the_gpu_however_often_it_is_offered(node: Node) -> None:
    one = await node.served(2, "--config-file", share(node, 0))
    await one.order("cordon", id="GPU-1", reason="smells")
    await node.allocatable_is(1)
    share(node, 4)
    await node.allocatable_is(4)
    await node.pass_time(10)
    assert (node.allocatable(), node.capacity()) == (4, 8)
    await one.order("uncordon", id="GPU-1")
    await node.allocatable_is(8)


async def test_a_partition_and_its_gpu_are_not_given_to_two_pods(node: Node) -> None:
    await node.served(2, "--mig-strategy", "mixed")
    await node.admit("whole")
    await node.pass_time(3)
    parted: dict[str, Any] = {"mig": {"GPU-0": ["1g.10gb", "2g.20gb"], "GPU-1": ["1g.10gb"]}}
    node.simulate(gpus(0, 1, **parted))
    await node.allocatable_is(1, "nvidia.com/mig-1g.10gb")
    await node.pass_time(60)
    assert (node.allocatable(), node.allocatable("nvidia.com/mig-2g.20gb")) == (0, 0)
    await node.admit("part", "nvidia.com/mig-1g.10gb")
    node.simulate(gpus(0, 1))
    await node.allocatable_after(60, 1)  # That of the first pod, which still has it.
    node.remove("part")
    await node.allocatable_is(2, seconds=120)
    await node.admit("other")
