"""Two and three gateways on one node, as kubelet and pods see them: whichever comes, goes or stands still, every GPU is given once."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import shutil
from contextlib import suppress
from functools import partial
from itertools import pairwise
from random import Random

import pytest

from adapters.registry import by_name
from devices.model import ContainerRequest
from tests.contract.claiming import A, both, cross, sides
from tests.contract.clock import patches
from tests.contract.node import GPU, PREFIX, Caller, Gateway, Node, Refused, gpus

OTHER = "example.com/accelerator"
VERSIONS = ["1.8", "1.10", "1.20", "1.28", "1.37"]


async def serves(node: Node, pod: str, seconds: float = 60.0) -> None:
    """See that a pod is given a GPU within so many seconds, and takes none with it."""
    ends = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            await node.admit(pod)
        except Refused:
            if asyncio.get_running_loop().time() > ends:
                raise
            await asyncio.sleep(0.5)
        else:
            break


async def handed_over(node: Node, *version: str) -> tuple[Gateway, Gateway]:
    """Start two gateways, one after the other; return the first one, which stands by, and the second one, which leads."""
    await node.start_kubelet(*version)
    standby = node.gateway()
    await node.until(lambda: node.allocatable() > 0, "the first one to serve")
    leader = await node.registered()
    return standby, leader


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("ends", ["newer killed", "older killed", "both killed", "newer ends", "older ends"])
async def test_whichever_goes_pods_keep_their_gpus_and_others_get_theirs(node: Node, version: str, ends: str) -> None:
    older = await node.served(8, version=version)
    await node.admit("before")
    newer = node.gateway()
    await node.until(lambda: newer.said("serving"), "that the newer one is there")
    await serves(node, "between", 5)
    await node.pass_time(3)
    if "newer" in ends or "both" in ends:
        newer.kill() if "killed" in ends else await newer.terminate()
    if "older" in ends or "both" in ends:
        older.kill() if "killed" in ends else await older.terminate()
    if "both" in ends:
        newer = node.gateway()
    await serves(node, "after", 5)
    await node.pass_time(30)
    await node.allocatable_is(8)
    for number in range(5):
        await node.admit(f"more-{number}")
    await node.truthful()


async def test_from_1_37_on_a_takeover_has_no_gap(node: Node) -> None:
    older = await node.served(8, version="1.37")
    await node.pass_time(3)
    newer = node.gateway()
    seen = set()
    while not newer.said("registered"):
        await asyncio.sleep(0.001)
        seen.add(node.allocatable())
    ending = asyncio.ensure_future(older.terminate())
    while not ending.done():
        await asyncio.sleep(0.001)
        seen.add(node.allocatable())
    assert seen == {8}
    await node.pass_time(5)
    assert node.registers[GPU] == 2


@pytest.mark.parametrize("what", ["its folder", "its lock", "the state directory's lock"])
async def test_a_lock_that_was_removed_leaves_one_gateway_that_gives_gpus(node: Node, what: str) -> None:
    older = await node.served(8, version="1.28")
    await node.pass_time(3)
    match what:
        case "its folder":
            shutil.rmtree(node.sockets / "gateway")
        case "its lock":
            (node.sockets / "gateway" / "leader.lock").unlink()
        case _:
            (node.state / "leader.lock").unlink()
    newer = node.gateway()
    await node.pass_time(10)
    await serves(node, "pod", 5)
    serving = [one for one in (older, newer) if (await one.metrics()).get(f'{PREFIX}serving{{resource="{GPU}"}}')]
    assert len(serving) == 1
    free = (set(await newer.states()) - {*node.pods()["pod"]["main"][GPU]}).pop()
    for number, one in enumerate((older, newer)):
        await one.order("cordon", id=free, reason=f"smells {number}")
    await node.allocatable_is(7)
    serving[0].kill()
    await serves(node, "other", 5)


async def test_a_container_that_starts_again_takes_over_from_no_leader_of_its_own_pod(node: Node) -> None:
    await node.start_kubelet("1.28")
    pod = {"POD_UID": "0d1e"}
    leader = node.gateway(environment=pod)
    await node.allocatable_is(8)
    for _ in range(3):
        standby = node.gateway(environment=pod)
        await node.pass_time(20)
        assert (node.registers[GPU], await standby.is_ready()) == (1, True)
        standby.kill()
    standby = node.gateway(environment=pod)
    await node.pass_time(20)
    leader.kill()
    await serves(node, "pod", 2)
    assert standby.said("registered")


async def test_a_kubelet_whose_streams_were_cut_has_a_moment_before_the_next_register(node: Node) -> None:
    _, newer = await handed_over(node, "1.28")
    await node.pass_time(5)
    registers, now = node.registers[GPU], asyncio.get_running_loop().time
    newer.kill()
    cut = now()
    await node.until(lambda: node.registers[GPU] > registers, "the next Register")
    assert 0.005 <= now() - cut < 0.1


async def test_a_late_call_at_a_gateway_that_made_room_is_answered_by_the_one_that_leads(node: Node) -> None:
    await node.served(2, version="1.37")
    (before,) = node.sockets.glob("gateway/*/*.sock")
    newer = await node.registered()
    await node.pass_time(5)
    late = Caller(str(before), "v1beta1.DevicePlugin", "grpc-go/1.72.1")
    request = by_name("v1beta1").encode_allocate_request
    code, answer = await late.call("Allocate", request([ContainerRequest(("GPU-1",))]).data)
    assert (code, b"GPU-1" in answer) == ("OK", True)
    assert (await late.call("Allocate", request([ContainerRequest(("GPU-7",))]).data))[0] == "NOT_FOUND"
    await node.until(lambda: newer.said("allocated", devices=["GPU-1"]), "that the newer one gave it")


@pytest.mark.parametrize("errors", [0, 1000])  # What the kubelet once refused the older one is over.
async def test_from_1_37_on_a_gateway_that_ends_leaves_no_gap_if_another_one_stands_by(node: Node, errors: int) -> None:
    await node.start_kubelet("1.37")
    node.fault(register_errors=errors, register_code="UNKNOWN")
    node.gateway()
    await node.pass_time(4)
    node.fault()
    newer = await node.registered()
    await node.pass_time(5)
    ending, seen = asyncio.ensure_future(newer.terminate()), set()
    while not ending.done():
        await asyncio.sleep(0.001)
        seen.add(node.allocatable())
    await node.pass_time(5)
    assert seen == {8}
    await node.admit("pod")


@pytest.mark.parametrize("version", ["1.12", "1.28", "1.36"])
async def test_an_older_gateway_that_ends_as_the_newer_begins_leaves_it_registered(node: Node, version: str) -> None:
    older, _ = await handed_over(node, version)
    assert await older.terminate() == 0
    await node.allocatable_is(8, seconds=5)
    await node.allocatable_after(20, 8)
    await node.admit("pod")
    assert node.registers[GPU] == 2


@pytest.mark.also_real
async def test_what_one_gateway_was_told_the_other_one_knows(node: Node) -> None:
    node.simulate(gpus(0, 1, 2, 3))
    older, newer = await handed_over(node)
    await node.allocatable_is(4)
    await newer.order("cordon", id="GPU-1", reason="smells")
    await older.order("cordon", id="GPU-2", reason="smells")
    await newer.order("cordon", id="GPU-3", reason="smells")
    await older.order("uncordon", id="GPU-3")
    newer.kill()
    await node.allocatable_is(2)
    assert await older.states() == {"GPU-0": "healthy", "GPU-1": "cordoned", "GPU-2": "cordoned", "GPU-3": "healthy"}
    older.kill()
    third = node.gateway()
    await node.allocatable_is(2)
    await third.order("uncordon", id="GPU-1")
    await node.allocatable_is(3)


async def test_orders_to_two_gateways_at_once_all_count(node: Node) -> None:
    node.simulate(gpus(0, 1, 2, 3))
    older, newer = await handed_over(node)
    await node.pass_time(5)
    for first, second in ((older, newer), (newer, older)):
        node.disk.hang(writers=True)
        reason = "smells" if first is older else "burns"
        orders = [asyncio.ensure_future(first.order("cordon", id="GPU-0", reason=reason))]
        await node.pass_time(0.3)  # It is about to be written.
        orders += [asyncio.ensure_future(first.order("uncordon", id="GPU-0"))]
        await node.pass_time(0.3)
        orders += [asyncio.ensure_future(second.order("cordon", id="GPU-1", reason="smells"))]
        await node.pass_time(0.3)
        node.disk.go_on()
        await asyncio.gather(*orders)
    for one in (older, newer):
        one.kill()
    third = node.gateway()
    await node.allocatable_is(3)
    assert await third.states() == {"GPU-0": "healthy", "GPU-1": "cordoned", "GPU-2": "healthy", "GPU-3": "healthy"}


@pytest.mark.parametrize("lock", ["state/leader.lock", "gateway/leader.lock"])
async def test_a_gateway_whose_lock_goes_while_it_writes_replaces_no_file(node: Node, lock: str) -> None:
    one = await node.served(2)
    path = (node.state if lock.startswith("state") else node.sockets / "gateway") / "leader.lock"
    others: list[int] = []

    def goes() -> None:
        path.unlink()
        others.append(os.open(path, os.O_CREAT | os.O_RDWR))
        fcntl.flock(others[0], fcntl.LOCK_EX | fcntl.LOCK_NB)

    before = {each.name: each.stat().st_ino for each in node.state.iterdir() if each.is_file() and each != path}
    node.disk.meanwhile = goes
    try:
        order = asyncio.ensure_future(one.order("cordon", id="GPU-0", reason="smells"))
        await node.pass_time(5)
        assert others
        order.cancel()
        now = {each.name: each.stat().st_ino for each in node.state.iterdir() if each.is_file() and each != path}
        assert now.items() >= before.items()
    finally:
        os.close(others[0])


async def test_what_only_the_newer_one_sees_is_on_disk_before_it_takes_over(node: Node) -> None:
    await node.served(2)
    await node.pass_time(5)
    profile = node.folder / "more.json"
    profile.write_text(json.dumps({"resources": gpus(0, 1, 2)}))
    node.disk.hang(writers=True)
    node.gateway("--backend", "simulated", "--simulate", str(profile))
    await node.pass_time(1.5)
    assert node.capacity() == 2
    node.disk.go_on()
    await node.allocatable_is(3)


async def test_what_only_the_newer_gateway_served_is_not_forgotten_with_it(node: Node) -> None:
    older = await node.served(2)
    profile = node.folder / "more.json"
    profile.write_text(json.dumps({"resources": gpus(0, 1) | gpus(5, 6, name=OTHER)}))
    newer = node.gateway("--backend", "simulated", "--simulate", str(profile))
    await node.allocatable_is(2, OTHER)
    await node.admit("pod", OTHER)
    await node.pass_time(5)
    newer.kill()
    await node.until(lambda: node.capacity(OTHER) and node.allocatable() == 2, "that the older one lists them", 20)
    await node.pass_time(400)
    assert node.capacity(OTHER) == 1
    assert await older.states(OTHER) == {"GPU-5": "withdrawn"}
    node.remove("pod")
    await node.admit("other")
    await node.until(lambda: node.capacity(OTHER) == 0, "that it is gone with its pod", 120)


@pytest.mark.parametrize(
    ("version", "options"), [("1.34", ("--api", "v1alpha2")), ("1.9", ("--api", "v1beta1")), ("1.20", ("--api", "0.1"))]
)
async def test_a_newer_gateway_that_is_refused_leaves_all_to_the_older(
    node: Node, version: str, options: tuple[str, ...]
) -> None:
    await node.served(8, version=version)
    node.gateway(*options)
    for number in range(6):
        await node.allocatable_after(5, 8)
        await node.admit(f"pod-{number}")


async def test_a_newer_gateway_whose_list_no_kubelet_takes_leaves_it_all_to_the_older_one(node: Node) -> None:
    patches.setattr("gateway.registration.devicelist.MAX_LIST_BYTES", 1 << 12)
    await node.served(2)
    sliced = {"sharing": {"timeSlicing": {"resources": [{"name": GPU, "replicas": 640}]}}}
    (node.folder / "config.yaml").write_text(json.dumps(sliced))
    newer = node.gateway("--config-file", str(node.folder / "config.yaml"))
    for number in range(2):
        await node.pass_time(10)
        assert (node.allocatable(), await newer.is_ready()) == (2, False)
        await node.admit(f"pod-{number}")


async def test_an_update_that_no_version_of_the_kubelet_fits_is_not_ready_and_takes_nothing_over(node: Node) -> None:
    await node.served(2)
    newer = node.gateway("--api", "v1alpha2")
    for number in range(2):
        await node.pass_time(20)
        assert (node.allocatable(), await newer.is_ready()) == (2, False)
        await node.admit(f"pod-{number}")


async def test_an_older_gateway_that_this_kubelet_refuses_is_ready_beside_the_one_that_replaced_it(node: Node) -> None:
    await node.start_kubelet()
    older = node.gateway("--api", "v1alpha2")
    await node.pass_time(20)
    assert not await older.is_ready()
    node.gateway()
    await node.allocatable_is(8)
    await node.eventually(older.is_ready, "readiness")


async def test_a_newer_gateway_that_sees_no_gpu_takes_none_over(node: Node) -> None:
    older = await node.served(3)
    profile = node.folder / "none.json"
    profile.write_text(json.dumps({"resources": gpus()}))
    newer = node.gateway("--backend", "simulated", "--simulate", str(profile))
    for number in range(3):
        await node.pass_time(20)
        assert (node.allocatable(), await newer.is_ready()) == (3, False)
        await node.admit(f"pod-{number}")
    assert not newer.said("mismatch")  # The kubelet's list is another gateway's.
    profile.write_text(json.dumps({"resources": gpus(0, 1)}))  # A repair: it sees some.
    await node.until(lambda: (node.capacity(), node.allocatable()) == (3, 2), "what the newer one sees")
    await node.eventually(newer.is_ready, "readiness")
    newer.kill()
    await node.allocatable_is(3)
    older.kill()
    profile.write_text(json.dumps({"resources": gpus()}))
    alone = await node.registered("--backend", "simulated", "--simulate", str(profile))
    await node.pass_time(400)
    assert (node.capacity(), node.allocatable(), await alone.is_ready()) == (3, 0, False)
    again = node.gateway()
    await node.allocatable_is(3)
    await node.eventually(again.is_ready, "readiness", 5)


async def test_a_newer_gateway_with_a_silent_driver_takes_no_gpu_until_it_sees_them_or_is_alone(node: Node) -> None:
    profile = node.folder / "silent.json"
    older = await node.served(3)
    for sees in (True, False):
        profile.write_text("nonsense")
        newer = node.gateway("--backend", "simulated", "--simulate", str(profile))
        await node.pass_time(30)
        assert (node.allocatable(), node.capacity(), await newer.is_ready()) == (3, 3, False)
        assert "none of the 3 usable devices" in str((await newer.status())["hindrances"])
        await node.admit(f"pod-{sees}")
        if sees:
            profile.write_text(json.dumps({"resources": gpus(0, 1, 2)}))
            await node.eventually(newer.is_ready, "readiness")
            await node.allocatable_is(3)
            newer.kill()
            await node.allocatable_is(3)
        else:
            older.kill()
            await serves(node, "third", 20)  # From memory.
            await node.allocatable_is(3)


@pytest.mark.parametrize("version", ["1.10", "1.20", "1.28", "1.37"])
@pytest.mark.parametrize("which", ["older", "newer"])
@pytest.mark.parametrize("restarts", [True, False])
async def test_a_gateway_that_stands_still_is_ended_and_the_other_serves(
    node: Node, version: str, which: str, restarts: bool
) -> None:
    still = await node.served(8, version=version)
    await node.admit("first")
    await node.pass_time(5)
    if which == "newer":
        still = newer = node.gateway()
        await node.until(lambda: newer.said("registered"), "its registration")
        await node.pass_time(5)
    still.process.stop()
    if restarts:
        await node.start_kubelet(version)
    if which == "older":
        node.gateway()
    await node.pass_time(30)
    still.kill()
    await serves(node, "second", 5)
    await node.allocatable_is(8)
    node.gateway()
    await node.pass_time(60)
    await serves(node, "third", 5)
    await node.allocatable_is(8)


@pytest.mark.parametrize("version", ["1.10", "1.28", "1.37"])
async def test_a_gateway_that_stood_still_gives_nothing_away_that_another_one_gave(node: Node, version: str) -> None:
    older = await node.served(8, version=version)
    await node.admit("first")
    newer = await node.registered()
    await node.pass_time(5)
    for one in (newer, older):
        one.process.stop()
        await node.pass_time(40)
        one.process.go_on()
        await serves(node, f"after {one.process.name}", 60)
        await node.pass_time(60)
        await serves(node, f"later than {one.process.name}", 5)
        node.gateway()
        await node.pass_time(60)
    await node.allocatable_is(8)


@pytest.mark.parametrize("version", ["1.10", "1.28", "1.37"])
async def test_the_host_s_service_is_left_alone_by_pods_that_come_and_go(node: Node, version: str) -> None:
    host = await node.served(8, "--host-service", version=version)
    for number in range(3):
        pod = node.gateway()
        await node.allocatable_after(20, 8)
        assert "standby: host service leads" in (await pod.get("probes", "/readyz"))[1]
        assert await pod.is_ready()
        pod.kill() if number else await pod.terminate()
        await node.pass_time(20)
        await node.admit(f"pod-{number}")
    assert node.registers[GPU] == 1
    pod = node.gateway()
    await node.pass_time(10)
    host.kill()
    await serves(node, "after", 5)
    node.gateway("--host-service")
    await node.pass_time(20)
    pod.kill()
    await node.pass_time(3)
    await serves(node, "at last", 5)
    await node.allocatable_is(8)


@pytest.mark.parametrize("version", ["1.10", "1.20", "1.37"])
async def test_gateways_that_share_no_state_directory_give_no_gpu_twice(node: Node, version: str) -> None:
    older = await node.served(8, version=version)
    await node.admit("first")
    newer = node.gateway("--state-dir", str(node.folder / "another"))
    await node.pass_time(10)
    await serves(node, "second", 10)
    await node.pass_time(30)
    newer.kill()
    await serves(node, "third", 5)
    node.gateway("--state-dir", str(node.folder / "another"))
    await node.pass_time(10)
    await older.terminate()
    await serves(node, "fourth", 10)
    await node.pass_time(30)
    for number in range(4):
        await node.admit(f"more-{number}")


@pytest.mark.parametrize(
    ("version", "directory"),
    [
        *((version, "state") for version in ("1.8", "1.9", "1.12", "1.20", "1.34", "1.37")),
        *((version, "another") for version in ("1.9", "1.20", "1.34")),  # 1.8 says to nobody what is offered.
    ],
)
async def test_two_gateways_with_two_names_for_a_gpu_give_none_twice(node: Node, version: str, directory: str) -> None:
    older = await node.served(3, version=version)
    await node.admit("first")
    await node.pass_time(5)
    profile = node.folder / "renamed.json"
    profile.write_text(json.dumps({"resources": gpus(0, 1, 2, name=OTHER)}))
    state = "--state-dir", str(node.folder / directory)
    newer = node.gateway("--backend", "simulated", "--simulate", str(profile), *state)
    given = []
    for number in range(4):
        await node.pass_time(5)
        assert node.allocatable() + node.allocatable(OTHER) <= 3
        for name in (GPU, OTHER) if number == 1 else ():
            with suppress(*Refused):
                if (await node.admit(f"pod-{name}", name)).devices:
                    given.append(name)
    assert len(given) == 1
    older.kill()
    await node.allocatable_is(1 if given == [GPU] else 2, OTHER, 60)
    await node.admit("renamed", OTHER)
    node.remove("first")
    node.remove(f"pod-{given[0]}")
    newer.kill()
    node.gateway("--backend", "simulated", "--simulate", str(profile), *state)
    if version == "1.8":  # It says what has ended when a pod gets a device.
        return
    if version in {"1.9", "1.12"}:  # They take note of a pod's end when the next one comes.
        await node.refused("next", OTHER)
    await node.allocatable_is(3, OTHER, 120)
    await node.admit("all", OTHER, 2)


@pytest.mark.also_real
async def test_dead_gateways_leave_nothing_behind(node: Node) -> None:
    await node.served(8)
    await node.pass_time(1)
    for name in ("nvidia.sock", "0123abcd-e7e3-1.sock"):  # Other vendors'.
        (node.sockets / name).touch()
    before = _entries(node)
    for _ in range(3):
        for one in node.gateways:
            one.kill()
        await node.pass_time(15)
        node.gateway()
        await node.allocatable_is(8)
        await node.pass_time(1)
    assert _entries(node) == before
    assert {"nvidia.sock", "0123abcd-e7e3-1.sock"} <= {path.name for path in node.sockets.iterdir()}


def _entries(node: Node) -> int:
    return sum(1 for folder in (node.sockets, node.state) for _ in folder.rglob("*"))


@pytest.mark.parametrize("seed", range(6))
async def test_three_gateways_come_go_and_stand_still_in_any_order(node: Node, seed: int) -> None:
    random = Random(seed)  # noqa: S311 - no secret
    version = ["1.8", "1.11", "1.20", "1.28", "1.34", "1.37"][seed]
    await node.start_kubelet(version)
    living: list[Gateway] = [node.gateway()]
    await node.allocatable_is(8)
    pods: list[str] = []
    for number in range(10):
        match random.choice(["come", "come", "kill", "end", "stop", "kubelet", "both"]):
            case "come" if len(living) < 3:
                living.append(node.gateway("--host-service") if random.random() < 0.2 else node.gateway())
            case "kill" | "both" if len(living) > 1:
                living.pop(random.randrange(len(living))).kill()
            case "end" if len(living) > 1:
                await living.pop(random.randrange(len(living))).terminate()
            case "stop" if len(living) > 1:
                one = random.choice(living)
                one.process.stop()
                await node.pass_time(random.choice([0.5, 5, 40]))
                one.process.go_on()
            case "kubelet":
                await node.start_kubelet(version)
            case _:
                pass
        await node.pass_time(random.choice([0.0, 0.01, 0.3, 2, 20]))
        if len(pods) > 5:
            node.remove(pods.pop(random.randrange(len(pods))))
        await serves(node, f"pod-{number}")
        pods.append(f"pod-{number}")
    await node.pass_time(60)
    await node.allocatable_is(8)


@pytest.mark.parametrize(
    ("version", "ends"),
    [*((one, "killed") for one in ("1.32", "1.33", "1.36", "1.37")), ("1.32", "ended"), ("1.37", "ended")],
)
async def test_pods_and_claims_keep_their_gpus_whichever_gateway_leads(node: Node, version: str, ends: str) -> None:
    async with both(node, version) as cluster:
        older = node.gateways[-1]
        await node.pass_time(5)
        await cross(cluster, "dra", A)
        await sides(cluster, "dra", "plugin")
        claim = cluster.claim("claim", "gpu-0")
        got = await cluster.prepare(claim)
        newer = cluster.gateway("--dra", "on")
        await node.until(lambda: older.said("leader", stage="yielded"), "the newer one to lead")
        for number, goes in enumerate((newer, older)):
            await node.pass_time(20)
            await cluster.connected()
            assert await cluster.prepare(claim) == got
            await serves(node, f"by-name-{number}", 5)
            node.remove(f"by-name-{number}")
            await sides(cluster, "dra", "plugin")
            if goes is newer:
                newer.kill() if ends == "killed" else await newer.terminate()
                node.gateways.reverse()  # The last one is asked.
        await cluster.end(claim)
        await cross(cluster, "plugin")
        await node.allocatable_is(2)


@pytest.mark.parametrize("version", ["1.28", "1.37"])
async def test_a_gateway_that_took_over_and_is_not_served_leaves_it_to_the_one_before(node: Node, version: str) -> None:
    older = await node.served(8, version=version)
    node.fault(never_calls_back=True)
    newer = node.gateway()
    await node.until(lambda: newer.said("leader", stage="leading"), "the newer one to lead")
    assert not await newer.is_ready()
    await node.until(lambda: not newer.alive, "the newer one to end")
    node.fault()
    await node.allocatable_is(8)
    await serves(node, "after", 5)
    assert older.alive


@pytest.mark.parametrize("version", ["1.28", "1.37"])
async def test_a_new_release_that_crashes_as_it_leads_takes_over_less_and_less_often(node: Node, version: str) -> None:
    older = await node.served(8, version=version)
    loop, led, without = asyncio.get_running_loop(), list[float](), list[float]()
    for _ in range(5):  # Its container is started again and again.
        newer = node.gateway(environment={"POD_UID": "0d1e"})
        await node.until(partial(newer.said, "leader", stage="leading"), "the newer one to lead", 600)
        led.append(loop.time())
        newer.kill()
        await node.allocatable_is(8)
        without.append(loop.time() - led[-1])
        await node.pass_time(1)
    assert all(later - before > 29 * 2**number for number, (before, later) in enumerate(pairwise(led)))
    assert max(without) < 1
    assert older.alive


async def test_a_leader_that_can_not_write_what_it_promised_does_not_yield(node: Node) -> None:
    await node.served(8, version="1.28")
    node.disk.fails = errno.ENOSPC
    await node.admit("pod")
    newer = node.gateway()
    await node.pass_time(40)
    assert (node.registers[GPU], newer.said("leader", stage="leading")) == (1, [])
    await serves(node, "meanwhile", 1)
    node.disk.fails = 0
    await node.until(lambda: newer.said("leader", stage="leading"), "the newer one to lead")
    await node.until(lambda: node.registers[GPU] == 2, "its registration")
    await serves(node, "after", 5)
