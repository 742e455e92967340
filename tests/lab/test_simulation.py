"""The simulation: its kubelets do what the emulated ones do, its disk loses what a disk may, and what breaks a rule is found.

The emulated kubelets are held to the genuine ones by transcripts of the wire (``tests/compat/test_transcripts.py``), and by the
tables that are used again here.
"""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from devices.model import Device
from gateway.lab import simulation
from gateway.lab.kubelets.behaviour import SecondRegister, behaviour
from gateway.lab.simulation import run
from gateway.lab.simulation.disk import Disk, KilledError, Place
from gateway.lab.simulation.kubelet import CLASSES, KUBELETS, RESOURCE, Kubelet, remembers
from gateway.lab.simulation.node import Node
from gateway.lab.simulation.run import SOMETIMES
from gateway.lab.simulation.schedule import Schedule, Step, schedule
from tests.lab.test_emulated import HOPS, SECOND
from tests.mutants.simulation import MUTANTS

# Kubelets.


class Listing:
    """A plugin that serves ``ids`` and does nothing by itself."""

    def __init__(self, node: Node, name: str, ids: str) -> None:
        self.node, self.label, self.ids = node, name, ids
        self.plugin, self.listens, self.alive, self.talks = self, True, True, True
        self.open = False
        self.client: Any = None
        node.names[name] = self  # type: ignore[assignment]

    def later(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self.node.clock.after(seconds, call, *args)

    def called(self, _: int, client: Any, kubelet: Kubelet) -> None:
        self.open, self.client = True, client
        self.show(self.ids, kubelet)

    def show(self, ids: str, kubelet: Kubelet) -> None:
        kubelet.hear_list(self.client, [Device(one) for one in ids])

    def stream_over(self, _: int) -> None:
        self.open = False

    def ends(self, kubelet: Kubelet) -> None:
        self.open = False
        kubelet.hear_end(self.client)

    def registers(self, kubelet: Kubelet) -> None:
        kubelet.register(self, self.label, kubelet.behaviour.dialect, lambda *_: None, lambda: False)
        self.node.clock.run(self.node.clock.now + 1)


@pytest.mark.parametrize(("version", "row"), SECOND.items())
def test_a_second_register(version: str, row: tuple[bool, int, int | None, int | None]) -> None:
    stays_open, after_b, after_list, after_end = row
    node = Node(1)
    node.start_kubelet(behaviour(version))
    kubelet, a = node.kubelet, Listing(node, "a", "abcd")
    a.registers(kubelet)
    b = Listing(node, "b", "xy")
    b.registers(kubelet)
    assert (a.open, b.open, count(kubelet)) == (stays_open, True, after_b)
    if after_list is None:
        return
    a.show("abc", kubelet)
    assert count(kubelet) == after_list
    a.ends(kubelet)
    node.clock.run(node.clock.now + 1)
    assert count(kubelet) == after_end
    assert b.open is (kubelet.behaviour.second_register is not SecondRegister.DISCONNECT_NEW)


def count(kubelet: Kubelet) -> int:
    return kubelet.records.totals().allocatable[RESOURCE]


@pytest.mark.parametrize(("hop", "kept"), HOPS.items())
def test_what_a_kubelet_remembers(hop: str, kept: bool) -> None:
    before, after = (behaviour(version) for version in hop.split())
    assert remembers(before, after) is kept


def test_every_kind_of_registration_is_simulated() -> None:
    assert {one.second_register for one in KUBELETS.values()} == {*SecondRegister}
    assert {one.checkpoint for one in KUBELETS.values()} == {behaviour(f"1.{n}").checkpoint for n in range(8, 38)}
    assert len(CLASSES) == 6


# The disk.


@pytest.fixture
def disk() -> Disk:
    chances = iter([0.9, 0.9, 0.1, 0.1, 0.4, 0.2] * 20)
    return Disk(lambda: next(chances), lambda: 1.0)


def write(disk: Disk, name: str, data: bytes, *, flush: bool) -> None:
    descriptor = disk.open(Place(disk, name), os.O_WRONLY | os.O_CREAT)
    disk.write(descriptor, data)
    if flush:
        disk.fsync(descriptor)
    disk.close(descriptor)


def flush_names(disk: Disk) -> None:
    disk.fsync(disk.open(Place(disk), os.O_RDONLY))


def content(disk: Disk, name: str) -> bytes | None:
    if name not in disk.names():
        return None
    return disk.read(disk.open(Place(disk, name), os.O_RDONLY))


@pytest.mark.parametrize(
    ("flush", "named", "left"),
    [
        pytest.param(True, True, b"whole", id="flushed, and so is its name"),
        pytest.param(True, False, None, id="flushed, but not its name"),
        pytest.param(False, True, b"", id="its name alone: torn"),
    ],
)
def test_a_power_cut(disk: Disk, flush: bool, named: bool, left: bytes | None) -> None:
    write(disk, "a", b"whole", flush=flush)
    if named:
        flush_names(disk)
    disk.power_cut()
    assert content(disk, "a") == left


def test_a_death_in_the_middle_leaves_what_was_written(disk: Disk) -> None:
    disk.spares = 2
    with pytest.raises(KilledError):
        write(disk, "a", b"whole", flush=True)
    disk.died()
    assert content(disk, "a") == b"whole"


# Schedules.


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    """The simulated disk is beneath the ledger for a test only: others want a true one."""
    yield
    assert "gateway.lab.simulation.disk" not in str(importlib.import_module("gateway.memory.ledger").__dict__.get("os"))


def simulated(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gateway.lab.simulation.run", "--jobs", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param("168498", id="an ask of a gateway that is dead is read in the next kubelet's life"),
        pytest.param("302632", id="a stranger's call ends before the kubelet's own comes"),
        pytest.param("277852", id="one comes and is killed while the other stands still"),
        pytest.param("293698", id="the same, and it was seen as it started"),
        pytest.param("2082717", id="one that stands still is called, and killed before it goes on"),
        pytest.param(
            "2161098", id="word of one that came reaches the other after its death, and a new kubelet's start"
        ),
        pytest.param("2261324", id="a handover that failed is tried again in a quiet life of the kubelet"),
        pytest.param("487804", id="one is told to end, and the kubelet dies before it has ended"),
        pytest.param("606723", id="the death of one that can't talk is heard of after a new kubelet's start"),
        pytest.param("382537", id="a kubelet is seen after the resource was left to one that it doesn't hold"),
        pytest.param("2075672", id="two serve, and the kubelet stops both when one of them yields"),
        pytest.param(
            "67620", id="of three one stands still that can't talk, and who would leave all to it asks the other"
        ),
        pytest.param("105393", id="one that a kubelet without a checkpoint refuses is newer, and can't talk"),
        pytest.param("570738", id="the last one of several is picked by the highest share"),
        pytest.param(
            "20744608", id="of three the newest stands still, and the middle one can't talk: it alone takes over"
        ),
        pytest.param("20437542", id="one that stands still is called, and ends before it has read that"),
        pytest.param("795990", id="of four the newest stands still, and the oldest can't serve"),
        pytest.param("1730", id="a newer one that was stood by for by age meets the older one, and asks for nothing"),
        pytest.param(
            "30043381", id="a Register that the kubelet before never called for is waited for as the next one starts"
        ),
        pytest.param("813292", id="of four one stands still, and the oldest took it back and can't serve"),
        pytest.param("20260096", id="of four the newest stands still, and the others see that one after another"),
        pytest.param("20754816", id="of three the newest stands still, and the two others see that at once"),
        pytest.param("40716146", id="of three the newest stands still, and kubelet 1.8 shows nothing"),
        pytest.param("40578380", id="of three that can't talk the newest stands still, and both others take over"),
        pytest.param(
            "60280016", id="a kubelet hears of a stream's end after the next Register, and never calls for that"
        ),
        pytest.param("40107593", id="one that can't talk goes before the kubelet was asked whom it holds"),
    ],
)
def test_what_broke_once_is_kept(number: str) -> None:
    played = simulated("--replay", number)
    assert played.returncode == 0, played.stdout


def test_a_seed_makes_one_schedule() -> None:
    assert schedule(7) == schedule(7)
    assert schedule(7) != schedule(8)


def test_schedules_keep_every_promise_and_meet_what_is_rare() -> None:
    played = simulated("--schedules", "600")
    assert played.returncode == 0, played.stdout
    counts = {
        line.split(maxsplit=1)[1]: int(line.split()[0])
        for line in played.stdout.splitlines()
        if line[:10].strip().isdigit()
    }
    assert sum(counts.get(state, 0) > 0 for state in SOMETIMES) > 0.7 * len(SOMETIMES)


@pytest.mark.parametrize("number", ["1", "5", "14"])
def test_a_schedule_is_played_again_to_the_letter(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    one = simulated("--replay", number)
    monkeypatch.setenv("PYTHONHASHSEED", "3")  # What a set's order decides would be otherwise now.
    other = simulated("--replay", number)
    assert (one.stdout, one.returncode) == (other.stdout, 0)
    assert "kubelet" in one.stdout


_SAME = """
import json, sys
from gateway.lab.simulation import disk, opening, schedule
disk.install()
for number in range(40):
    script, told = schedule.schedule(number), []
    for make in (opening.played, opening.copied, opening.copied, opening.copied):
        player = schedule.Player(script, make(script.kubelet, number))
        told.append((player.play(), player.clock.now, dict(player.clock.met)))
    assert told[0] == told[1] == told[2] == told[3], number
"""


def test_a_copy_of_an_opening_goes_on_as_the_opening_itself_does() -> None:
    played = subprocess.run([sys.executable, "-c", _SAME], capture_output=True, text=True, timeout=120, check=False)
    assert played.returncode == 0, played.stderr


def test_what_breaks_is_made_shorter() -> None:
    steps = tuple(Step(float(at), do, lasts=1.0) for at, do in enumerate(("cut", "kill", "new", "ill")))
    shorter = run.shrink(Schedule(1, "1.28", steps), lambda one: any(step.do == "kill" for step in one.steps))
    assert [(step.do, step.lasts) for step in shorter.steps] == [("kill", 0.0)]


def test_a_broken_promise_is_told_with_a_script_that_shows_it() -> None:
    script = msgspec.json.encode(Schedule(1, "1.28", (Step(2.0, "cut"),))).decode()
    told = simulated("--script", script)
    assert (told.returncode, told.stdout.splitlines()[-1]) == (0, "every promise was kept")


def promises() -> Iterator[str]:
    """Give the longest text of each promise that the simulation may find broken."""
    for path in Path(simulation.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            said: list[ast.expr | None] = []
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "broken":
                said = [*node.args]
            elif isinstance(node, ast.FunctionDef) and node.name == "wrong":
                said = [one.value for one in ast.walk(node) if isinstance(one, ast.Return)]
            for text in said:
                if isinstance(text, ast.JoinedStr):
                    parts = [one.value for one in text.values if isinstance(one, ast.Constant)]
                    yield max(map(str, parts), key=len)


def test_every_promise_is_broken_by_a_mutant_that_the_simulation_finds() -> None:
    kept = [*promises()]
    assert len(kept) > 10
    assert [text for text in kept if not any(text.strip(" :,") in mutant.says for mutant in MUTANTS)] == []


def test_two_pods_with_one_device_are_seen() -> None:
    node = Node(1)
    node.pods = {"a": frozenset({"GPU-0"}), "b": frozenset({"GPU-0"})}
    with pytest.raises(Exception, match="GPU-0 is given to both a and b"):
        node.judge_pods()
