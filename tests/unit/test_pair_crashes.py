"""A crash that repeats: what ended one gateway of a pair is left out by the next one, and says so. Processes are really killed."""

from __future__ import annotations

import asyncio
import copy
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from devices.gpu.nvidia.backend import NvidiaBackend
from devices.gpu.nvidia.nvml import CrashedError
from devices.gpu.nvidia.scan import Busy
from devices.model import RefusedError
from devices.policy import Policy
from gateway.lab.gatewayproc import GatewayProcess, gateway_command
from gateway.lab.trials.scenarios import RESOURCE, Node, node
from gateway.pair import flight as module
from gateway.pair.flight import Flight
from tests.fakes import nvml
from tests.unit.test_pair import ready

DIED = "a gateway of the pair died"
# Stands for a reader with a defect: a text with this word ends the process.
FATAL = "fatal"
CRASHING_PROFILE = f"""
import os
from devices.gpu.simulated import backend
parse = backend.parse
backend.parse = lambda content, name: os.abort() if b"{FATAL}" in content else parse(content, name)
from gateway.cli.main import gateway
gateway()
"""
CRASHING_CONFIGURATION = f"""
import os
from gateway.configuration import file
parse = file.parse
file.parse = lambda content, name, **how: os.abort() if b"{FATAL}" in content else parse(content, name, **how)
from gateway.cli.main import gateway
gateway()
"""


def lanes() -> tuple[Flight, Flight]:
    """What the two gateways of a pair note what they try in."""
    first = Flight()
    second = copy.copy(first)
    second.take(1)
    return first, second


@pytest.mark.parametrize(
    ("status", "what", "about", "left_out"),
    [
        pytest.param(-signal.SIGSEGV, "the look at GPU-1", b"", True, id="it crashed there"),
        pytest.param(-signal.SIGSEGV, "the look at GPU-2", b"", False, id="another device"),
        pytest.param(-signal.SIGSEGV, "the look at GPU-1", b"x", False, id="another content"),
        pytest.param(-signal.SIGKILL, "the look at GPU-1", b"", False, id="somebody killed it"),
    ],
)
def test_what_a_gateway_crashed_at_is_left_out_by_the_other(
    status: int, what: str, about: bytes, *, left_out: bool
) -> None:
    first, second = lanes()
    assert first.begin("the look at GPU-1") == ""
    assert first.begin("the look at GPU-3") == ""
    first.end("the look at GPU-3")
    assert first.landed(0, status) == (status == -signal.SIGSEGV)
    assert bool(reason := second.begin(what, about)) is left_out
    assert [one.reason for one in second.hindrances()] == ([reason] if left_out else [])
    assert second.begin("the look at GPU-3") == "", "it was over"
    assert (what in reason) is left_out, "the error names it"


def test_of_two_one_tries_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 60.0)
    for one, other in (lanes(), lanes()[::-1]):
        told: list[str] = []
        assert one.begin("the profile", b"a") == ""
        waiting = threading.Thread(target=lambda: told.append(other.begin("the profile", b"a")), daemon=True)  # noqa: B023
        waiting.start()
        assert other.begin("the profile", b"b") == "", "nothing else is waited for"
        waiting.join(0.05)
        assert waiting.is_alive(), "the other one is at it"
        one.landed(one._lane, -signal.SIGSEGV)
        waiting.join(10)
        assert "crashed at the profile" in told[0]


def test_of_two_that_begin_at_once_the_first_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 60.0)
    first, second = lanes()
    first.begin("the profile")
    waiting = threading.Thread(target=second.begin, args=("the profile",), daemon=True)
    waiting.start()
    again = threading.Thread(target=first.begin, args=("the profile",), daemon=True)  # As if it had only begun now.
    again.start()
    again.join(10)
    assert (again.is_alive(), waiting.is_alive()) == (False, True)
    first.landed(0, -signal.SIGKILL)
    waiting.join(10)


@pytest.mark.parametrize(("status", "refused"), [(-signal.SIGSEGV, True), (-signal.SIGKILL, False)])
async def test_what_the_other_is_answering_is_answered_when_it_is_known_what_came_of_it(
    monkeypatch: pytest.MonkeyPatch, status: int, *, refused: bool
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 60.0)
    for one, other in (lanes(), lanes()[::-1]):
        asked = asyncio.Event()

        async def hangs(*_: object) -> bytes:
            asked.set()  # noqa: B023
            await asyncio.Event().wait()
            return b"never"

        async def answers(*_: object) -> bytes:
            return b"an answer"

        dying = asyncio.ensure_future(one.guard("Allocate", hangs)(None, b"a", None))
        await asked.wait()
        assert await other.guard("Allocate", answers)(None, b"b", None) == b"an answer"
        waits = asyncio.ensure_future(other.guard("Allocate", answers)(None, b"a", None))
        await asyncio.wait([waits], timeout=0.05)
        assert not waits.done(), "the other one is at it"
        one.landed(one._lane, status)
        [found] = await asyncio.gather(waits, return_exceptions=True)
        assert isinstance(found, RefusedError) if refused else found == b"an answer"
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)


def test_of_very_much_at_once_some_is_not_noted() -> None:
    first, second = lanes()
    for number in range(module.AT_ONCE + 1):
        assert second.begin(f"the look at GPU-{number}") == ""
    assert first.landed(0, -signal.SIGSEGV) == 0
    assert first.landed(1, -signal.SIGSEGV) == module.AT_ONCE


def test_of_many_suspects_the_oldest_is_forgotten() -> None:
    first, second = lanes()
    for number in range(module.SUSPECTS + 1):
        first.begin(f"the look at GPU-{number}")
        first.landed(0, -signal.SIGSEGV)
    assert [bool(second.begin(f"the look at GPU-{number}")) for number in (0, 1, module.SUSPECTS)] == [
        False,
        True,
        True,
    ]


def test_what_the_other_hangs_at_is_tried_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.01)
    for one, other in (lanes(), lanes()[::-1]):
        assert one.begin("the look at GPU-1") == ""
        looking = threading.Thread(target=other.begin, args=("the look at GPU-1",), daemon=True)
        looking.start()
        looking.join(10)
        assert not looking.is_alive()


def test_what_is_well_again_is_no_hindrance_any_more() -> None:
    first, second = lanes()
    first.begin("the profile", b"bad")
    first.landed(0, -signal.SIGABRT)
    assert second.begin("the profile", b"bad")
    assert second.hindrances()
    assert second.begin("the profile", b"good") == ""
    assert second.hindrances() == ()


def test_a_step_that_ended_a_process_is_not_taken_again() -> None:
    first, second = lanes()
    Busy(first).on("GPU-1")
    first.landed(0, -signal.SIGSEGV)
    busy = Busy(second)
    busy.on("GPU-0")
    with pytest.raises(CrashedError, match="the look at GPU-1"):
        busy.on("GPU-1")
    assert busy.at is None
    assert second.landed(1, -signal.SIGSEGV) == 0, "GPU-0 was looked at, and nothing is any more"
    busy.on_all_the_same("nvmlShutdown")
    assert second.landed(1, -signal.SIGSEGV) == 0, "what can't be left out isn't noted"


@pytest.mark.parametrize(
    ("read", "said"),
    [
        pytest.param(
            "os.abort",
            "config.yaml: expected a file that can be read, but it crashes who reads it (SIGABRT)",
            id="it crashes",
        ),
        pytest.param("lambda: print('read')", "read\nread\n", id="it is read, and read again"),
        pytest.param(
            "lambda: int('line 2')", "ValueError: invalid literal for int() with base 10: 'line 2'", id="it is wrong"
        ),
    ],
)
def test_a_file_is_tasted_before_it_is_gone_by(read: str, said: str) -> None:
    program = f"import os; from gateway.pair.taste import tasted; tasted('config.yaml', {read})"
    command = [sys.executable, "-u", "-c", program]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert said in done.stdout


@asynccontextmanager
async def crashing(made: Node, program: str, *options: str) -> AsyncIterator[GatewayProcess]:
    """A pair with a defect in a reader."""
    command = gateway_command(made.socket_dir, made.root / "state", made.profile_path)
    command = [command[0], "-c", program, *command[3:], "--standby", *options]
    async with await GatewayProcess.launch(command) as process:
        yield process


async def test_a_profile_that_ends_a_gateway_does_not_end_the_other() -> None:
    async with node(gpus={RESOURCE: 2}) as made:
        kubelet = await made.start_kubelet("1.28")
        async with crashing(made, CRASHING_PROFILE) as process:
            await ready(process)
            await kubelet.wait(RESOURCE, 2)
            mark = process.seen
            made.profile_path.write_text(f"resources: {{{RESOURCE}: {{gpus: 1}}}}  # {FATAL}\n")
            died = await process.wait_for(DIED, since=mark)
            assert (died["status"], died["left_out_from_now_on"]) == (-signal.SIGABRT, 1)
            rejected = await process.wait_for("profile rejected", since=mark)
            assert f"crashed at the profile {made.profile_path}" in rejected["reason"]
            await kubelet.wait(RESOURCE, 2)
            made.profile_path.write_text(f"resources: {{{RESOURCE}: {{gpus: 1}}}}\n")
            await kubelet.wait(RESOURCE, 1)
            await ready(process, mark)
            assert len(process.lines(DIED)) == 1


async def test_a_configuration_that_ends_a_gateway_does_not_end_the_other() -> None:
    async with node(gpus={RESOURCE: 2}) as made:
        kubelet = await made.start_kubelet("1.28")
        config = made.root / "config.yaml"
        config.write_text("version: v1\n")
        async with crashing(made, CRASHING_CONFIGURATION, "--config-file", str(config)) as process:
            await ready(process)
            mark = process.seen
            config.write_text(f"version: v1  # {FATAL}\n")
            died = await process.wait_for(DIED, since=mark)
            assert (died["status"], died["left_out_from_now_on"]) == (-signal.SIGABRT, 1)
            rejected = await process.wait_for("configuration rejected: the last good one stays in force", since=mark)
            assert f"crashed at the configuration file {config}" in rejected["reason"]
            await kubelet.wait(RESOURCE, 2)
            await ready(process, mark)
            assert len(process.lines(DIED)) == 1


async def test_a_configuration_that_ends_who_reads_it_is_named_at_the_start() -> None:
    async with node(gpus={RESOURCE: 2}) as made:
        config = made.root / "config.yaml"
        config.write_text(f"version: v1  # {FATAL}\n")
        async with crashing(made, CRASHING_CONFIGURATION, "--config-file", str(config)) as process:
            assert await process.wait() == 78
            assert f"{config}: expected a file that can be read, but it crashes who reads it" in process.log(1000)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nvml.World:
    """Eight H100s, for a gateway in a process of its own."""
    made = nvml.dgx(tmp_path / "world")
    made.write()
    for name, value in made.env().items():
        monkeypatch.setenv(name, value)
    return made


@asynccontextmanager
async def over_nvml(made: Node) -> AsyncIterator[GatewayProcess]:
    command = gateway_command(made.socket_dir, made.root / "state")
    command[command.index("simulated")] = "nvidia"
    async with await GatewayProcess.launch([*command, "--standby"]) as process:
        yield process


async def test_a_gpu_whose_look_ends_a_gateway_is_ill_for_the_other(world: nvml.World) -> None:
    async with node(gpus={}) as made:
        kubelet = await made.start_kubelet("1.28")
        async with over_nvml(made) as process:
            await ready(process)
            await kubelet.wait(RESOURCE, 8)
            mark, uuid = process.seen, world.gpus[3].uuid
            world.crashes("nvmlDeviceGetRemappedRows", 3)
            world.write()
            world.event(0, 13)  # Both look at once.
            died = await process.wait_for(DIED, since=mark)
            assert (died["status"], died["left_out_from_now_on"]) == (-signal.SIGSEGV, 1)
            told = await process.wait_for("a GPU can't be looked at", since=mark, gpu=uuid)
            assert f"crashed at the look at {uuid}" in told["reason"]
            await kubelet.wait(RESOURCE, 7)
            await ready(process, mark)
            assert len(process.lines(DIED)) == 1


async def test_a_gpu_whose_first_look_ends_a_gateway_is_left_out_by_the_next(world: nvml.World) -> None:
    world.crashes("nvmlDeviceGetPciInfo", 3)
    world.write()
    async with node(gpus={}) as made:
        kubelet = await made.start_kubelet("1.28")
        async with over_nvml(made) as process:
            await process.wait_for(DIED)
            await kubelet.wait(RESOURCE, 7)
            await ready(process)
            assert len(process.lines(DIED)) == 1


async def test_gauges_that_end_a_gateway_are_left_out(world: nvml.World) -> None:
    first, second = lanes()
    uuid = world.gpus[3].uuid
    first.begin(f"the gauges of {uuid}")
    first.landed(0, -signal.SIGSEGV)
    backend = NvidiaBackend(Policy(), library=str(nvml.library()), attempts=second)
    watching = backend.watch()
    await anext(watching)
    seen = {one.uuid for one in await asyncio.to_thread(backend.readings)}
    assert seen == {one.uuid for one in world.gpus} - {uuid}
    assert second.landed(1, -signal.SIGSEGV) == 0
    await watching.aclose()
