"""What was promised is known after a kill, a power cut and a bad disk, and no disk holds a pod up."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.contract.node import Gateway, Node, OrderError, gpus


async def state_file(gateway: Gateway) -> dict[str, Any]:
    """Return what the status says of the state file."""
    return dict((await gateway.status())["ledger"])


async def state_path(gateway: Gateway) -> Path:
    """Return where the state file is."""
    return Path((await state_file(gateway))["path"])


# -- what was sent is on disk ------------------------------------------------------------------------------------------


async def test_an_id_is_on_disk_before_the_kubelet_hears_of_it(node: Node) -> None:
    node.simulate(gpus(0, 1))
    await node.start_kubelet()
    node.disk.hang(writers=True)
    node.gateway()
    await node.pass_time(1.5)
    assert node.capacity() == 0
    node.disk.go_on()
    await node.allocatable_is(2)
    node.disk.hang(writers=True)
    node.simulate(gpus(0, 1, 2))
    await node.pass_time(1.5)
    assert node.capacity() == 2
    node.disk.go_on()
    await node.allocatable_is(3)


@pytest.mark.parametrize("from_turn", [66, 90])
async def test_a_kill_at_any_moment_forgets_no_id_that_the_kubelet_was_told(node: Node, from_turn: int) -> None:
    for turns in range(from_turn, from_turn + 24, 8):
        async with Node(_folder(node, turns), node.clock) as one:
            one.simulate(gpus(0, 1, 2))
            await one.start_kubelet()
            gateway = one.gateway()
            gateway.process.dies_at = turns
            await gateway.process.ended
            told = one.capacity()
            one.simulate(gpus(0))
            one.gateway()
            await one.allocatable_is(1)
            await one.pass_time(3)
            assert one.capacity() >= told, f"killed at turn {turns}"


def _folder(node: Node, number: int) -> Path:
    folder = node.folder / str(number)
    folder.mkdir()
    return folder


@pytest.mark.parametrize("keeps_names", [False, True])
async def test_a_power_cut_undoes_no_order_and_forgets_no_id(node: Node, keeps_names: bool) -> None:
    one = await node.served(3)
    await one.order("cordon", id="GPU-1", reason="smells")
    node.reboot()
    node.disk.cut_power(keeps_names=keeps_names)
    node.simulate(gpus(0, 1))
    again = await node.served(1)
    assert await again.states() == {"GPU-0": "healthy", "GPU-1": "cordoned", "GPU-2": "lost"}
    assert not (await state_file(again))["put_aside"]


@pytest.mark.also_real
async def test_orders_survive_a_kill_as_soon_as_they_are_answered(node: Node) -> None:
    one = await node.served(4)
    orders = [one.order("cordon", id=f"GPU-{number}", reason="smells") for number in range(3)]
    await asyncio.gather(*orders, one.order("cordon", id="GPU-0", reason="burns"))
    one.kill()
    second = node.gateway()
    await node.allocatable_is(1)
    # An order comes while the write for another one is under way.
    await asyncio.gather(second.order("uncordon", id="GPU-0"), second.order("uncordon", id="GPU-1"))
    second.kill()
    third = node.gateway()
    await node.allocatable_is(3)
    assert [one for one, state in (await third.states()).items() if state == "cordoned"] == ["GPU-2"]
    await third.order("uncordon", id="GPU-2")
    third.kill()
    node.gateway()
    await node.allocatable_is(4)


@pytest.mark.also_real
async def test_a_lost_gpu_that_was_forgotten_by_order_stays_forgotten(node: Node) -> None:
    one = await node.served(2)
    await node.admit("pod-a")
    node.simulate(gpus(2))
    await node.until(lambda: node.capacity() == 3 and node.allocatable() == 1, "the change")
    with pytest.raises(OrderError, match="end that pod first"):
        await one.order("forget", id="GPU-0")
    assert (await one.order("forget", id="GPU-1"))["changed"]
    await node.until(lambda: node.capacity() == 2, "that GPU-1 is gone")
    one.kill()
    again = node.gateway()
    await node.allocatable_is(1)
    assert await again.states() == {"GPU-0": "lost", "GPU-2": "healthy"}


async def test_a_lost_gpu_that_is_forgotten_while_new_ones_are_written_stays_forgotten(node: Node) -> None:
    one = await node.served(2)
    node.simulate(gpus(0))
    await node.allocatable_is(1)
    await node.pass_time(5)
    node.disk.hang(writers=True)
    node.simulate(gpus(0, 2))
    await node.pass_time(0.5)
    order = asyncio.ensure_future(one.order("forget", id="GPU-1"))
    await node.pass_time(0.5)
    node.disk.go_on()
    assert (await order)["changed"]
    await node.allocatable_is(2)
    await node.pass_time(5)
    assert await one.states() == {"GPU-0": "healthy", "GPU-2": "healthy"}
    one.kill()
    again = node.gateway()
    await node.allocatable_is(2)
    assert await again.states() == {"GPU-0": "healthy", "GPU-2": "healthy"}


async def test_an_order_is_answered_when_it_is_on_disk(node: Node) -> None:
    one = await node.served(2)
    await node.pass_time(5)
    node.disk.hang(writers=True)
    order = asyncio.ensure_future(one.order("cordon", id="GPU-0", reason="smells"))
    await node.allocatable_is(1)
    await node.pass_time(1)
    assert not order.done()
    node.disk.go_on()
    assert (await order)["changed"]
    one.kill()
    node.gateway()
    await node.allocatable_is(1)


@pytest.mark.parametrize("disk", ["hangs", "is well"])
async def test_an_illness_is_told_at_once_and_remembered(node: Node, disk: str) -> None:
    one = await node.served(2)
    await node.pass_time(5)
    if disk == "hangs":
        node.disk.hang(writers=True)
    ill = {"GPU-0": {"reason": "fell off the bus", "kind": "reset-required"}}
    node.simulate(gpus(0, 1, unhealthy=ill))
    await node.allocatable_is(1, seconds=0.5)
    node.disk.go_on()
    await node.pass_time(0.05)
    one.kill()
    node.simulate(gpus(0, 1))
    again = await node.registered()
    await node.pass_time(5)
    assert await again.states() == {"GPU-0": "unhealthy", "GPU-1": "healthy"}


async def test_an_illness_that_needs_a_reset_outlives_that_its_gpu_is_not_offered(node: Node) -> None:
    ill = {"GPU-0": {"reason": "fell off the bus", "kind": "reset-required"}}
    node.simulate(gpus(0, 1, unhealthy=ill))
    one = await node.served(1)
    node.simulate(gpus(0, 1, withdrawn=["GPU-0"]))
    await node.until(lambda: node.capacity() == 1, "that it is not offered")
    node.simulate(gpus(0, 1))
    await node.until(lambda: node.capacity() == 2, "that it is offered")
    await node.pass_time(5)
    assert await one.states() == {"GPU-0": "unhealthy", "GPU-1": "healthy"}


# -- a bad disk --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["full", "read-only", "hangs"])
@pytest.mark.parametrize("begins", ["at the start", "later"])
async def test_a_disk_without_room_holds_no_pod_up_and_is_told(node: Node, trouble: str, begins: str) -> None:
    node.simulate(gpus(0, 1, 2))
    await node.start_kubelet()
    if begins == "later":
        node.gateway()
        await node.allocatable_is(3)
        await node.pass_time(5)
    if trouble == "hangs":
        node.disk.hang(writers=True)
    node.disk.fails = {"full": errno.ENOSPC, "read-only": errno.EROFS}.get(trouble, 0)
    one = node.gateways[0] if begins == "later" else node.gateway()
    await node.allocatable_is(3, seconds=10)
    await node.admit("pod-a")
    with pytest.raises(OrderError, match="forgotten when the gateway restarts"):
        await one.order("cordon", id="GPU-2", reason="smells")
    async with asyncio.timeout(0.5):  # A disk that hangs is waited for once.
        with pytest.raises(OrderError, match="forgotten when the gateway restarts"):
            await one.order("cordon", id="GPU-2", reason="smells")
    await node.allocatable_is(2)
    assert not (await state_file(one))["writable"]
    await node.pass_time(60)
    node.disk.fails = 0
    node.disk.go_on()
    await node.pass_time(45)  # It is tried again, more and more seldom.
    found = await state_file(one)
    assert (found["writable"], found["error"], found["pending"]) == (True, "", 0)
    assert not (await one.order("cordon", id="GPU-2", reason="smells"))["changed"]
    for op in ("cordon", "uncordon"):  # It is trusted again.
        assert (await one.order(op, id="GPU-0", reason="smells"))["changed"]
    one.kill()
    node.simulate(gpus(0, 2))
    again = node.gateway()
    await node.allocatable_is(1)
    assert await again.states() == {"GPU-0": "healthy", "GPU-1": "lost", "GPU-2": "cordoned"}


async def test_a_disk_that_stays_bad_is_told_once_for_each_reason_and_tried_more_and_more_seldom(node: Node) -> None:
    one = await node.served(2)
    await node.pass_time(5)
    node.disk.fails, begun = errno.ENOSPC, node.disk.refused
    with pytest.raises(OrderError):
        await one.order("cordon", id="GPU-0", reason="smells")
    await node.pass_time(2)
    assert node.disk.refused - begun >= 3
    await node.pass_time(600)
    assert node.disk.refused - begun < 80  # A try may open more than one file.
    node.disk.fails = errno.EROFS
    await node.pass_time(60)
    node.disk.fails = 0
    await node.pass_time(60)
    told = [line["event"] for line in one.process.log if str(line["event"]).startswith("state file")]
    assert told == ["state file not written", "state file not written", "state file written again"]
    # The next trouble is tried again soon.
    node.disk.fails, begun = errno.ENOSPC, node.disk.refused
    with pytest.raises(OrderError):
        await one.order("uncordon", id="GPU-0")
    await node.pass_time(2)
    assert node.disk.refused - begun >= 3


@pytest.mark.parametrize("disk", ["hangs", "is full"])
async def test_an_end_does_not_wait_for_a_disk(node: Node, disk: str) -> None:
    one = await node.served(2)
    await node.pass_time(5)
    if disk == "hangs":
        node.disk.hang(writers=True)
    else:
        node.disk.fails = errno.ENOSPC
    with pytest.raises(OrderError):
        await one.order("cordon", id="GPU-0", reason="smells")
    one.process.terminate()
    await node.until(lambda: not one.alive, "its end", 10)
    assert one.process.ended.result() == 0


async def test_a_gateway_to_which_nothing_happens_writes_nothing(node: Node) -> None:
    one = await node.served(2)
    await node.admit("pod")
    await node.pass_time(60)
    before = (await state_path(one)).stat().st_ino, (await state_file(one))["writes"]
    await node.pass_time(3600)
    assert ((await state_path(one)).stat().st_ino, (await state_file(one))["writes"]) == before


@pytest.mark.parametrize("damage", ["nonsense", '{"format": 2}'])
async def test_who_writes_into_the_state_file_of_a_gateway_changes_nothing(node: Node, damage: str) -> None:
    one = await node.served(3)
    await one.order("cordon", id="GPU-0", reason="smells")
    file = await state_path(one)
    file.write_text(damage)
    await one.order("cordon", id="GPU-2", reason="smells")
    await node.allocatable_is(1)
    assert json.loads(file.read_text())["cordons"].keys() == {"GPU-0", "GPU-2"}


async def test_a_start_waits_for_a_disk_that_does_not_answer(node: Node) -> None:
    one = await node.served(2)
    await one.order("cordon", id="GPU-0", reason="smells")
    one.kill()
    await node.allocatable_is(0)
    node.disk.hang()
    node.gateway()
    await node.allocatable_after(30, 0)
    node.disk.go_on()
    await node.allocatable_is(1)
    await node.allocatable_after(5, 1)


async def test_without_a_descriptor_a_start_waits_and_writes_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await node.served(2)
    await one.order("cordon", id="GPU-0", reason="smells")
    one.kill()
    opens = os.open
    with monkeypatch.context() as exhausted:

        def refuse(path: Any, *how: Any, **more: Any) -> int:
            if Path(path).name == "ledger.json":
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return opens(path, *how, **more)

        exhausted.setattr(os, "open", refuse)
        again = node.gateway()
        await node.pass_time(30)
        assert (node.allocatable(), len(again.said("state file not read"))) == (0, 1)
    await node.allocatable_is(1)
    assert await again.states() == {"GPU-0": "cordoned", "GPU-1": "healthy"}


@pytest.mark.parametrize("damage", ["cut", "empty", "nonsense", "newer release's"])
async def test_a_damaged_state_file_is_kept_aside_and_cordons_outlive_it(node: Node, damage: str) -> None:
    one = await node.served(40)
    for number in range(30):
        await one.order("cordon", id=f"GPU-{number}", reason="smells")
    file = await state_path(one)
    one.kill()
    whole = file.read_bytes()
    newer = json.dumps({**json.loads(whole), "format": 1000, "new": {}}).encode()
    damaged = {"cut": whole[:700], "empty": b"", "nonsense": b"\0\xff" * 900, "newer release's": newer}[damage]
    file.write_bytes(damaged)
    again = await node.registered()
    await node.pass_time(5)
    aside = file.with_name((await state_file(again))["put_aside"])
    assert aside.read_bytes() == damaged
    cordoned = [id_ for id_, state in (await again.states()).items() if state == "cordoned"]
    assert {"cut": 5 < len(cordoned) < 30, "newer release's": len(cordoned) == 30}.get(damage, not cordoned)
    assert node.allocatable() == 40 - len(cordoned)
    await again.order("cordon", id="GPU-39", reason="smells")
    again.kill()
    node.gateway()
    await node.allocatable_is(39 - len(cordoned))


@pytest.mark.parametrize("damage", ["nonsense", "gone"])
async def test_a_state_file_that_is_lost_while_the_gateway_runs_is_written_anew(node: Node, damage: str) -> None:
    one = await node.served(4)
    await one.order("cordon", id="GPU-0", reason="smells")
    file = await state_path(one)
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(b"nonsense")
    await one.order("cordon", id="GPU-1", reason="smells")
    one.kill()
    node.simulate(gpus(0, 1, 2))
    again = node.gateway()
    await node.allocatable_is(1)
    assert await again.states() == {"GPU-0": "cordoned", "GPU-1": "cordoned", "GPU-2": "healthy", "GPU-3": "lost"}


@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
async def test_what_is_no_file_in_the_state_file_s_place_is_not_followed(node: Node, what: str) -> None:
    one = await node.served(2)
    await one.order("cordon", id="GPU-0", reason="smells")
    file = await state_path(one)
    one.kill()
    planted = file.rename(node.folder / "planted")
    before = planted.read_bytes()
    if what == "pipe":
        os.mkfifo(file)
    elif what == "folder":
        file.mkdir()
    else:
        file.symlink_to(planted)
    again = node.gateway()
    await node.allocatable_is(2)
    await again.order("cordon", id="GPU-1", reason="smells")
    assert planted.read_bytes() == before
    assert (await state_file(again))["writable"]
    again.kill()
    third = node.gateway()
    await node.allocatable_is(1)
    assert await third.states() == {"GPU-0": "healthy", "GPU-1": "cordoned"}


async def test_the_state_directory_is_private(node: Node) -> None:
    node.state.mkdir(mode=0o755)
    one = await node.served(1)
    await one.order("cordon", id="GPU-0", reason="smells")
    found = await state_file(one)
    assert stat.S_IMODE(node.state.stat().st_mode) == 0o700
    file = await state_path(one)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not found["exposed"]
    one.kill()
    file.chmod(0o644)
    two = await node.registered()
    assert await two.states() == {"GPU-0": "cordoned"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_a_folder_that_others_use_is_left_open_and_told(node: Node) -> None:
    node.state.mkdir()
    node.state.chmod(0o1777)
    one = await node.served(8)
    assert stat.S_IMODE(node.state.stat().st_mode) == 0o1777
    assert "--state-dir of its own" in (await state_file(one))["exposed"]
