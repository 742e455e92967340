"""The kubelet's connections outlive the gateway of a pair that had them, so that a kubelet which allows it sees no gap."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from gateway.lab.kubelets.kubelet import KubeletError
from gateway.lab.trials.scenarios import RESOURCE, node
from gateway.lab.waiting import until
from gateway.pair import held
from gateway.wires import notify
from tests.unit.test_pair import descriptors, pair, ready

FIRST_CALL = """
import asyncio, os
from pathlib import Path
from gateway.registration.serve import DevicePlugin
name, asked = "%s", Path("%s")
answer = getattr(DevicePlugin, name)
async def first(*call):
    if not asked.exists():
        asked.touch()
        %s
    return await answer(*call)
setattr(DevicePlugin, name, first)
from gateway.cli.main import gateway; gateway()
"""
"""What the first of the node's gateways does that is called."""
CALLS = ("_allocate", "_prefer")


def sockets(pid: int) -> set[str]:
    return {what for what in descriptors(pid).values() if what.startswith("socket:")}


async def lent(parent: int, serves: int, stands_by: int) -> set[str]:
    """Wait until a parent has something open with the one that serves that the other one hasn't; give it."""
    found: set[str] = set()

    def looked() -> bool:
        found.update((sockets(serves) & sockets(parent)) - sockets(stands_by))
        return bool(found)

    await until(looked, 30)
    return found


async def test_a_kubelet_sees_no_gap_when_who_serves_is_killed() -> None:
    async with node(gpus={RESOURCE: 2}) as made:
        kubelet = await made.start_kubelet("1.37")
        async with pair(made) as process:
            mark = 0
            inherited: list[set[str]] = []
            for number in range(2):
                serves, stands_by = await ready(process, mark)
                await kubelet.wait(RESOURCE, 2)
                kubelets = await lent(process.pid, serves, stands_by)
                inherited.append(sockets(process.pid) & sockets(stands_by))
                gone = asyncio.create_task(kubelet.wait(RESOURCE, 0, held.LONGER + 2))
                mark = process.seen
                os.kill(serves, signal.SIGKILL)
                await process.wait_for("registered", since=mark)
                await kubelet.admit(f"pod-{number}", RESOURCE, 1)
                with pytest.raises(KubeletError):
                    await gone
                assert not kubelets & sockets(process.pid), "they outlive it for a moment only"
            assert (await kubelet.registers())[RESOURCE] == 3
            assert inherited[0] == inherited[1], "no gateway has what is kept of another one: it would never end"


@pytest.mark.parametrize("call", CALLS)
async def test_a_call_that_a_killed_gateway_left_unanswered_is_answered_by_the_next_one(call: str) -> None:
    await next_one_answers(call)


async def next_one_answers(call: str, genuine: Callable[[str], Path | None] = lambda _: None) -> None:
    """Kill the gateway that serves while a kubelet's call is open, and see the kubelet get its answer."""
    async with node(genuine, gpus={RESOURCE: 2}) as made:
        kubelet, asked = await made.start_kubelet("1.37"), made.root / "asked"
        async with pair(made, program=FIRST_CALL % (call, asked, "await asyncio.Event().wait()")) as process:
            serves, stands_by = await ready(process)
            await kubelet.wait(RESOURCE, 2)
            await lent(process.pid, serves, stands_by)
            admitted = asyncio.create_task(kubelet.admit("pod", RESOURCE, 1))
            await until(asked.exists, 30)
            os.kill(serves, signal.SIGKILL)
            await admitted
            assert len(process.lines("registered")) == 2


async def test_a_request_that_ends_a_gateway_is_refused_by_the_next_one_though_the_kubelet_never_saw_it_fail() -> None:
    async with node(gpus={RESOURCE: 2}) as made:
        kubelet = await made.start_kubelet("1.37")
        async with pair(made, program=FIRST_CALL % ("_allocate", made.root / "asked", "os.abort()")) as process:
            serves, stands_by = await ready(process)
            await kubelet.wait(RESOURCE, 2)
            await lent(process.pid, serves, stands_by)
            with pytest.raises(KubeletError, match="crashed while it answered this very request"):
                await kubelet.admit("pod", RESOURCE, 1)
            assert len(process.lines("a gateway of the pair died")) == 1


async def test_of_a_kubelet_that_ends_the_new_registration_with_the_old_stream_nothing_is_kept() -> None:
    async with node(gpus={RESOURCE: 2}) as made:
        kubelet = await made.start_kubelet("1.36")
        async with pair(made) as process:
            serves, stands_by = await ready(process)  # It takes longer to start that one than to lend.
            assert sockets(serves) & sockets(process.pid) <= sockets(stands_by)
            await kubelet.wait(RESOURCE, 2)
            gone = asyncio.create_task(kubelet.wait(RESOURCE, 0))
            await asyncio.sleep(0)
            await kubelet.registers()  # Answered after it has begun to wait: what it waits for takes 10 ms.
            os.kill(serves, signal.SIGKILL)
            await gone
            await kubelet.wait(RESOURCE, 2)


@pytest.mark.parametrize(
    ("number", "given"), [(0, 0), (1, 1), (held.MOST, held.MOST), pytest.param(held.MOST + 1, 0, id="too many")]
)
def test_connections_are_lent_instead_of_those_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, given: int
) -> None:
    with ExitStack() as stack:

        def listener(name: str) -> socket.socket:
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.bind(str(folder / name))
            one.listen(number + 1)
            return one

        def called(at: socket.socket) -> socket.socket:
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(at.getsockname())
            return stack.enter_context(at.accept()[0])

        parent, its = map(stack.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        parent.settimeout(0)
        monkeypatch.setattr(notify, "parent", [its])
        ours, other = listener("ours"), listener("other")
        called(other)
        mine = {called(ours).fileno() for _ in range(number)}
        before_that = descriptors(os.getpid()).keys()
        held.lend("gpu", folder / "1.sock", ours.getsockname())
        assert descriptors(os.getpid()).keys() == before_that, "no copy of what else is open stays"
        word, ancillary, _, _ = parent.recvmsg(256, held.SPACE)
        got = held.received(ancillary)
        assert (word.decode(), len(got)) == (f"{held.WORD}gpu {folder}/1.sock", given)
        if given:
            assert {os.fstat(one).st_ino for one in got} == {os.fstat(one).st_ino for one in mine}
        keeps, (before, after) = held.Connections(), os.pipe()
        keeps.take(word.decode(), [before])
        keeps.take(word.decode(), [*got])
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(before)
        keeps.close()
        for one in got:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(one)
        os.close(after)


def test_who_waits_for_an_answer_is_led_to_the_next_gateway(folder: Path) -> None:
    with ExitStack() as stack:

        def connection() -> tuple[socket.socket, int]:
            one, other = socket.socketpair()
            stack.enter_context(one).settimeout(0)
            return one, other.detach()

        dead, served, following = held.Connections(), held.Connections(), folder / "next.sock"
        following.touch()
        here, there, forgotten = (folder / f"{name}.sock" for name in ("here", "there", "forgotten"))
        for one in (here, there):
            one.touch()
        (gone, first), (kubelet, second), (waits, third), (ends, fourth) = (connection() for _ in range(4))
        dead.take(f"{held.WORD}gpu {here}", [first, second])
        dead.take(f"{held.WORD}nic {there}", [third])
        dead.take(f"{held.WORD}fpga {forgotten}", [fourth])
        dead.lead_to(served)
        for resource in ("gpu", "fpga"):
            served.take(f"{held.WORD}{resource} {following}", [])
        gone.close()
        for _ in range(2):
            dead.lead_to(served)
        # RFC 9113, 6.8: 8 bytes, GOAWAY, no flags, of the connection; up to stream 3, no error.
        assert kubelet.recv(64).hex(" ") == "00 00 08 07 00 00 00 00 00 00 00 00 03 00 00 00 00"
        assert here.samefile(following)
        for end in (waits, ends):  # Nobody serves that resource; nobody can be called under that name.
            with pytest.raises(BlockingIOError):
                end.recv(64)
        assert not there.samefile(following)
        assert not forgotten.exists()
        dead.close()


def test_without_a_parent_nothing_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    held.lend("gpu", Path(), "nowhere")
    parent, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(notify, "parent", [its])
    with its:
        parent.close()
        held.lend("gpu", Path(), "nowhere")
