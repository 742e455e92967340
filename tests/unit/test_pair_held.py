"""The kubelet's connections outlive the gateway of a pair that had them, so that a kubelet which allows it sees no gap."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from gateway.lab.kubelets.kubelet import KubeletError
from gateway.lab.trials.scenarios import RESOURCE, node
from gateway.lab.waiting import until
from gateway.pair import held
from gateway.wires import notify
from tests.unit.test_pair import descriptors, pair, ready


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


async def test_of_a_kubelet_that_ends_the_new_registration_with_the_old_stream_nothing_is_kept() -> None:
    async with node(gpus={RESOURCE: 2}) as made:
        kubelet = await made.start_kubelet("1.36")
        async with pair(made) as process:
            serves, stands_by = await ready(process)  # It takes longer to start that one than to lend.
            assert sockets(serves) & sockets(process.pid) <= sockets(stands_by)
            os.kill(serves, signal.SIGKILL)
            await kubelet.wait(RESOURCE, 0)
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
        held.lend("gpu", ours.getsockname())
        word, ancillary, _, _ = parent.recvmsg(64, held.SPACE)
        got = held.received(ancillary)
        assert (word.decode(), len(got)) == (f"{held.WORD}gpu", given)
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


def test_without_a_parent_nothing_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    held.lend("gpu", "nowhere")
    parent, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(notify, "parent", [its])
    with its:
        parent.close()
        held.lend("gpu", "nowhere")
