"""A pair: whoever of it dies, devices stay; and what another gateway would end with, too, ends the pair."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from devices.model import Device, RefusedError
from gateway.handover import instance
from gateway.lab.gatewayproc import GatewayProcess, gateway_command
from gateway.lab.kubelets.kubelet import KubeletError
from gateway.lab.trials.scenarios import RESOURCE, Node, node
from gateway.lab.waiting import until
from gateway.memory.ledger import Ledger
from gateway.memory.rows import Cordon
from gateway.pair.flight import AT_ONCE, Flight
from gateway.pair.policy import MOST_YOUNG, YOUNG, Deaths, lasting
from gateway.pair.pulse import Pulse
from gateway.pair.role import Role
from gateway.wires.unix import listens
from tests.unit.test_probes import get


@pytest.mark.parametrize(
    ("lives", "wait", "loop"),
    [
        pytest.param([YOUNG], 0.0, False, id="it has lived: the next one comes at once"),
        pytest.param([YOUNG - 1], 1.0, False, id="it died young"),
        pytest.param([1.0, 1.0, 1.0], 4.0, False, id="ever more patience"),
        pytest.param([1.0, 1.0, YOUNG, 1.0], 1.0, False, id="one that has lived ends the row"),
        pytest.param([1.0] * (MOST_YOUNG - 1), 8.0, False, id="not yet"),
        pytest.param([1.0] * MOST_YOUNG, 16.0, True, id="a crash loop"),
    ],
)
def test_deaths(lives: list[float], wait: float, loop: bool) -> None:
    deaths = Deaths()
    for lived in lives:
        deaths = deaths.after(lived)
    assert (deaths.wait, deaths.loop) == (wait, loop)


@pytest.mark.parametrize(("status", "ends"), [(0, False), (1, False), (-9, False), (2, True), (75, True), (78, True)])
def test_what_the_next_one_would_end_with_too(status: int, ends: bool) -> None:
    assert lasting(status) is ends


UNHURRIED = """
from gateway.handover import machine, message
machine.ANSWER_WAIT = machine.REPORT_WAIT = message.ASK_TIME = 20.0
from gateway.cli.main import gateway; gateway()
"""
"""For this gateway another one is in time however busy this machine is."""


@asynccontextmanager
async def pair(made: Node, *options: str, program: str = "") -> AsyncIterator[GatewayProcess]:
    python, *words = gateway_command(made.socket_dir, made.root / "state", made.profile_path)
    start = ("-c", program) if program else words[:2]
    command = [python, *start, *words[2:], "--standby", *options]
    async with await GatewayProcess.launch(command) as process:
        yield process


async def ready(process: GatewayProcess, since: int = 0) -> tuple[int, int]:
    """Wait until both are ready; return who serves and who stands by."""
    stands_by = (await process.wait_for("ready", since=since, serves=False))["gateway"]
    [serves] = {*children(process.pid)} - {stands_by}
    return serves, stands_by


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def test_no_gateway_outlives_the_parent() -> None:
    async with node(gpus={RESOURCE: 1}) as made:
        await made.start_kubelet("1.37")
        async with pair(made) as process:
            both = await ready(process)
            os.kill(process.pid, signal.SIGKILL)
            await until(lambda: all(map(ended, both)), 30)


def score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


async def test_whoever_of_the_pair_dies_devices_stay() -> None:
    async with node(gpus={RESOURCE: 2}) as made:
        kubelet = await made.start_kubelet("1.37")
        async with pair(made, "--probe-address", "127.0.0.1:0") as process:
            serves, stands_by = await ready(process)
            assert score(serves) > score(stands_by), "who serves is the kernel's first choice"
            os.kill(process.pid, signal.SIGHUP)  # Read the configuration: nobody ends for that.
            mark = process.seen
            os.kill(serves, signal.SIGKILL)
            port = int((await process.wait_for("listening", since=mark, what="probes"))["port"])
            await process.wait_for("registered", since=mark)
            await kubelet.wait(RESOURCE, 2)
            assert (await get(port, "/healthz"))[0] == 200
            again, third = await ready(process, mark)
            assert again == stands_by
            mark = process.seen
            os.kill(third, signal.SIGKILL)
            assert (await ready(process, mark))[0] == stands_by
            assert await process.terminate() == 0
            assert (await kubelet.registers())[RESOURCE] == 2, "of a pair that ends nobody takes over"
            assert not any(made.socket_dir.glob("*-*.sock"))


def names(pid: int) -> list[str]:
    """Give the names of a process's Unix sockets; '' where one has none."""
    own = {what[8:-1] for what in descriptors(pid).values() if what.startswith("socket:")}
    there = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return [" ".join(fields[7:]) for fields in there if fields[6] in own]


async def test_nobody_else_can_speak_to_the_parent() -> None:
    async with node(gpus={RESOURCE: 1}) as made:
        await made.start_kubelet("1.37")
        async with pair(made) as process:
            await ready(process)
            found = names(process.pid)
            assert found.count("") == 2
            assert not any(one.startswith("@") for one in found), "such a name is whoever's has it first"


_FORKS_LATE = """
import errno, os
from gateway.pair import parent
parent.FORK_AGAIN = 0.05
fork, failures = os.fork, iter([False, True, True])
def late():
    if next(failures, False):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()
os.fork = late
from gateway.cli.main import gateway; gateway()
"""


async def test_who_serves_goes_on_while_no_second_one_can_be_started() -> None:
    async with node(gpus={RESOURCE: 1}) as made:
        kubelet = await made.start_kubelet("1.37")
        async with pair(made, program=_FORKS_LATE) as process:
            await process.wait_for("a second gateway can't be started")
            await ready(process)
            assert len(process.lines("a second gateway can't be started")) == 2
            await kubelet.wait(RESOURCE, 1)
            assert not process.lines("a gateway of the pair died")


def descriptors(pid: int) -> dict[int, str]:
    found = {}
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # It was closed meanwhile.
            found[int(one.name)] = str(one.readlink())
    return found


async def test_who_serves_ends_its_connections_before_what_takes_long_to_close() -> None:
    async with node(gpus={RESOURCE: 1}) as made:
        await made.start_kubelet("1.37")
        async with pair(made) as process:
            mark = 0
            for _ in range(2):  # The second one has numbers that became free when it took over.
                serves, stands_by = await ready(process, mark)
                inherited = {*descriptors(process.pid).values()}
                for pid in (serves, stands_by):
                    own = {number: what for number, what in descriptors(pid).items() if what not in inherited}
                    watches = [number for number, what in own.items() if what == "anon_inode:inotify"]
                    assert len(watches) == 2, "the folder's, and the profile's"
                    _, *after = sorted(number for number, what in own.items() if what.startswith("socket:"))
                    assert max(watches) < after[0], "but for the parent's, which comes first"
                mark = process.seen
                os.kill(serves, signal.SIGKILL)
                await process.wait_for("registered", since=mark)


def grpc_threads(pid: int) -> int:
    return sum(task.read_text() == "event_engine\n" for task in Path(f"/proc/{pid}/task").glob("*/comm"))


UNTOLD = """
from gateway.pair.pulse import Pulse
Pulse.at_others_end = lambda self, call: None
from gateway.cli.main import gateway; gateway()
"""
"""Who stands by has no word of a death but the end of the connection."""


@pytest.mark.parametrize("program", [pytest.param("", id="told of the death"), pytest.param(UNTOLD, id="not told")])
async def test_who_stands_by_only_listens_until_it_takes_over(program: str) -> None:
    async with node(gpus={RESOURCE: 1}) as made:
        kubelet = await made.start_kubelet("1.37")
        async with pair(made, program=program) as process:
            serves, stands_by = await ready(process)
            await process.wait_for("registered")
            assert grpc_threads(serves)
            await until(lambda: not grpc_threads(stands_by), 30)  # They wake a dozen times a second.
            folders = [*(made.socket_dir / instance.FOLDER).glob("[0-9a-f]*")]
            assert [listens(folder / instance.socket_name(RESOURCE)) for folder in folders] == [True, True]
            mark = process.seen
            os.kill(serves, signal.SIGKILL)
            await process.wait_for("registered", since=mark)
            await kubelet.wait(RESOURCE, 1)
            assert grpc_threads(stands_by)
            assert (await kubelet.registers())[RESOURCE] == 2
            assert not process.lines("unexpected while registering")


# A process that has what the one that serves has open, and outlives it: as if the kernel took very long to end its connections.
_HELD_OPEN = """
import ctypes
from gateway.registration.events import Phase
from gateway.registration.registrar import Resource
feed, libc = Resource.feed, ctypes.CDLL(None)
def held(self, event):
    before = self.state.phase
    feed(self, event)
    if self.state.phase is Phase.SERVING is not before and libc._Fork() == 0:
        while True:
            libc.pause()
Resource.feed = held
from gateway.cli.main import gateway; gateway()
"""


# Nobody is told of a kubelet that comes: who serves finds it when it registers anew, who stands by doesn't.
_UNTOLD = """
from gateway.kubelet.watch import FolderWatch
look = FolderWatch._look_for_kubelet
FolderWatch._look_for_kubelet = lambda self, now: look(self, now) if self._seen is None else 3600.0
"""


@pytest.mark.parametrize(
    ("versions", "waits", "told"),
    [
        (["1.37"], False, True),
        (["1.36"], True, True),
        (["1.37", "1.36"], True, True),
        (["1.37", "1.36"], True, False),
    ],
)
async def test_a_kubelet_that_takes_a_register_before_a_stream_ends_gets_it_at_once(
    versions: list[str], waits: bool, told: bool
) -> None:
    async with node(gpus={RESOURCE: 2}) as made:
        kubelet = await made.start_kubelet(versions[0])
        async with pair(made, program=("" if told else _UNTOLD) + _HELD_OPEN) as process:
            serves, stands_by = await ready(process)
            for version in versions[1:]:
                kubelet = await made.start_kubelet(version)
            await kubelet.wait(RESOURCE, 2)
            await until(lambda: len(children(serves)) == len(versions), 30)
            holders, mark = children(serves), process.seen
            try:
                os.kill(serves, signal.SIGKILL)
                if waits:
                    await ready(process, mark)
                    assert not process.lines("registered", since=mark), "its stream's end would take the new one down"
                    os.kill(stands_by, signal.SIGSTOP)
                else:
                    await process.wait_for("registered", since=mark)
            finally:
                for holder in holders:
                    os.kill(holder, signal.SIGKILL)
            if waits:
                # A busy machine's kubelet may take longer for that than a gateway waits.
                await kubelet.wait(RESOURCE, 0)
                os.kill(stands_by, signal.SIGCONT)
            await process.wait_for("registered", since=mark)
            await kubelet.wait(RESOURCE, 2)
            await kubelet.admit("pod", RESOURCE, 2)
            assert (await kubelet.registers())[RESOURCE] == 2


# What is loaded after the fork, told when the kubelet calls.
_TELLS_IMPORTS = """
import sys
import structlog
from gateway.pair.parent import Pair
from gateway.registration.registrar import Resource
be, feed, before = Pair._be_a_gateway, Resource.feed, set()
def _be_a_gateway(self, *arguments):
    before.update(sys.modules)
    be(self, *arguments)
def _feed(self, event):
    if type(event).__name__ == "StreamOpened":
        structlog.get_logger().info("called", loaded=sorted(sys.modules.keys() - before))
    feed(self, event)
Pair._be_a_gateway, Resource.feed = _be_a_gateway, _feed
from gateway.cli.main import gateway
gateway()
"""


async def test_who_takes_over_imports_nothing_for_it() -> None:
    async with node(gpus={RESOURCE: 1}) as made:
        await made.start_kubelet("1.37")
        command = gateway_command(made.socket_dir, made.root / "state", made.profile_path)
        async with await GatewayProcess.launch(
            [command[0], "-c", _TELLS_IMPORTS, *command[3:], "--standby"]
        ) as process:
            serves, _ = await ready(process)
            mark = process.seen
            os.kill(serves, signal.SIGKILL)
            assert (await process.wait_for("called", since=mark))["loaded"] == []


async def test_a_pair_takes_over_from_a_pair_by_one_register() -> None:
    async with node(gpus={RESOURCE: 2}) as made:
        kubelet = await made.start_kubelet("1.28")
        async with pair(made, program=UNHURRIED) as old:
            await ready(old)
            async with pair(made, program=UNHURRIED) as new:
                await ready(new)
                assert await old.terminate() == 0
                await kubelet.wait(RESOURCE, 2)
                assert (await kubelet.registers())[RESOURCE] == 2


async def test_a_crash_loop_ends_the_pair_and_says_why() -> None:
    async with node(gpus={RESOURCE: 1}) as made:
        profile = made.root / "one.yaml"
        profile.write_text(f"resources: {{{RESOURCE}: {{gpus: 1}}}}\n")
        command = gateway_command(made.socket_dir, made.root / "state", profile)
        dies = "import sys; from gateway import daemon; daemon.Gateway.run = lambda *_: 1 / 0; from gateway.pair import policy\n"
        program = dies + "policy.FIRST_WAIT = 0.01\nfrom gateway.cli.main import gateway; gateway()"
        async with await GatewayProcess.launch([command[0], "-c", program, *command[3:], "--standby"]) as process:
            told = await process.wait_for("ending the pair")
            assert told["reason"] == f"{MOST_YOUNG} died young in a row"
            assert await process.wait() == 1


async def test_a_request_that_ends_a_gateway_does_not_end_the_next_one() -> None:
    async with node(gpus={RESOURCE: 1}, demands=()) as made:
        kubelet = await made.start_kubelet("1.28")
        profile = made.root / "one.yaml"
        profile.write_text(f"resources: {{{RESOURCE}: {{gpus: 1}}}}\n")
        command = gateway_command(made.socket_dir, made.root / "state", profile)
        crash = "async def crash(*_): os.abort()\n"
        program = f"import os; from gateway.registration import serve\n{crash}serve.DevicePlugin._allocate = crash\n"
        program += "from gateway.cli.main import gateway; gateway()"
        async with await GatewayProcess.launch([command[0], "-c", program, *command[3:], "--standby"]) as process:
            _, stood_by = await ready(process)
            mark = process.seen
            with pytest.raises(KubeletError):
                await kubelet.admit("a", RESOURCE, 1)
            died = await process.wait_for("a gateway of the pair died")
            assert (died["status"], died["left_out_from_now_on"]) == (-signal.SIGABRT, 1)
            await process.wait_for("registered", since=mark)
            await kubelet.wait(RESOURCE, 1)
            with pytest.raises(KubeletError, match="crashed while it answered this very request"):
                await kubelet.admit("b", RESOURCE, 1)
            assert stood_by in children(process.pid)


async def test_a_state_file_that_ends_a_gateway_does_not_end_the_next_one() -> None:
    async with node(gpus={RESOURCE: 1}, demands=()) as made:
        kubelet = await made.start_kubelet("1.28")
        profile, state = made.root / "one.yaml", made.root / "crash"
        profile.write_text(f"resources: {{{RESOURCE}: {{gpus: 1}}}}\n")
        state.mkdir(mode=0o700)
        before = Ledger(state)
        before.cordon("GPU-a", Cordon("hums", 1.0))
        before.announce(RESOURCE, (Device("GPU-fatal"),))
        before.save(before.snapshot())
        command = gateway_command(made.socket_dir, state, profile)
        program = "import os; from gateway.memory import mend\ndecode = mend.decode\n"
        program += "mend.decode = lambda data: os.abort() if b'GPU-fatal' in data else decode(data)\n"
        program += "from gateway.cli.main import gateway; gateway()"
        async with await GatewayProcess.launch([command[0], "-c", program, *command[3:], "--standby"]) as process:
            died = await process.wait_for("a gateway of the pair died")
            assert (died["status"], died["left_out_from_now_on"]) == (-signal.SIGABRT, 1)
            await kubelet.wait(RESOURCE, 1)
            assert "a gateway crashed while it read it" in process.log(1000)
            await ready(process)
            assert len(process.lines("a gateway of the pair died")) == 1
        after = Ledger(state)
        after.load()
        assert "GPU-a" in after.cordons, "an operator's word outlives what else the file held"


@pytest.mark.parametrize(("number", "statuses"), [(signal.SIGHUP, []), (signal.SIGTERM, [-signal.SIGTERM])])
async def test_a_signal_that_comes_before_a_gateway_listens(number: int, statuses: list[int]) -> None:
    program = f"""
import os
from gateway import daemon
run = daemon.Gateway.run
def early(self):
    if self._role.first:
        daemon.Gateway.run = run
        os.kill(os.getpid(), {int(number)})
    return run(self)
daemon.Gateway.run = early
from gateway.cli.main import gateway; gateway()
"""
    async with node(gpus={RESOURCE: 1}) as made:
        kubelet = await made.start_kubelet("1.37")
        async with pair(made, program=program) as process:
            if statuses:
                await process.wait_for("a gateway of the pair died")
            else:
                await ready(process)
                await kubelet.wait(RESOURCE, 1)
            assert [line["status"] for line in process.lines("a gateway of the pair died")] == statuses


async def test_what_only_the_serving_one_has_a_use_for_waits() -> None:
    reading, writing = os.pipe()
    role, done = Role(Flight(), Pulse(), reading, 1), asyncio.Event()

    async def call() -> None:
        done.set()

    role.attach()
    waiting = asyncio.ensure_future(role.once_active(call))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not done.is_set()
    os.write(writing, b"1")
    async with asyncio.timeout(30):
        await done.wait()
    await waiting
    os.close(writing)
    os.close(reading)


async def answered(*_: object) -> bytes:
    return b"yes"


@pytest.mark.parametrize(
    ("status", "again", "suspects"),
    [
        pytest.param(-signal.SIGSEGV, b"ab", 1, id="it crashed: refused"),
        pytest.param(-signal.SIGSEGV, b"ba", 1, id="in another order: the same"),
        pytest.param(-signal.SIGSEGV, b"abc", 0, id="another request"),
        pytest.param(-signal.SIGKILL, b"ab", 0, id="somebody killed it: that is not the request's doing"),
        pytest.param(0, b"ab", 0, id="it ended"),
    ],
)
async def test_what_was_answered_when_a_gateway_died(status: int, again: bytes, suspects: int) -> None:
    flight = Flight()

    async def dies(*_: object) -> bytes:
        flight.landed(0, status)
        return b""

    await flight.guard("Allocate for a/b", dies)(None, b"ab", None)
    flight.take(1)
    guarded = flight.guard("Allocate for a/b", answered)
    if suspects:
        with pytest.raises(RefusedError, match=r"Allocate for a/b .* crashed"):
            await guarded(None, again, None)
        assert await flight.guard("Allocate for c/d", answered)(None, again, None) == b"yes"
    else:
        assert await guarded(None, again, None) == b"yes"


async def test_more_than_are_noted_are_answered_all_the_same() -> None:
    flight, release = Flight(), asyncio.Event()

    async def waits(*_: object) -> bytes:
        await release.wait()
        return b"yes"

    guarded = flight.guard("Allocate for a/b", waits)
    asked = [asyncio.ensure_future(guarded(None, bytes([number]), None)) for number in range(AT_ONCE + 6)]
    await asyncio.sleep(0)
    release.set()
    assert await asyncio.gather(*asked) == [b"yes"] * (AT_ONCE + 6)
    assert flight.landed(0, -signal.SIGSEGV) == 0, "what is over isn't suspect"


_WATCHED = """
import os
os.environ["WATCHDOG_PID"] = str(os.getpid())
from gateway.cli.main import gateway; gateway()
"""


async def test_a_service_manager_hears_of_the_one_that_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node(gpus={RESOURCE: 1}) as made:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(str(tmp_path / "notify"))
            manager.setblocking(False)
            await made.start_kubelet("1.28")
            monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
            monkeypatch.setenv("WATCHDOG_USEC", "100000")
            async with pair(made, program=_WATCHED) as process:
                await ready(process)
                loop, heard = asyncio.get_running_loop(), list[str]()
                async with asyncio.timeout(20):
                    while heard[-2:] != ["WATCHDOG=1", "the next one"]:
                        with contextlib.suppress(BlockingIOError):
                            while True:
                                heard.append(manager.recv(64).decode())
                        # What was on its way when both were ready has come by the next sign of life.
                        heard += [(await loop.sock_recv(manager, 64)).decode(), "the next one"]
            assert heard[0] == "READY=1"
            assert heard.count("READY=1") == 1
