"""The conformance test's own words: commands, rules, and how findings are told. That it finds faults: tests/compat."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import cast

import pytest

from devices.model import PreferredRequest
from gateway.lab.kubelets.kubelet import Faults, KubeletError
from gateway.lab.trials.conformance import (
    RULES,
    CommandError,
    Finding,
    Findings,
    _choice_problem,
    _why_none,
    examine,
    parsed,
    to_json,
    to_text,
)
from gateway.lab.trials.scenarios import FIRST_BACKOFF, Node, node, plugin_command

WITHOUT_LIST = """
import asyncio, sys
from pathlib import Path
from gateway.lab import trivial

async def silent(request, context):
    await asyncio.Event().wait()
    yield

trivial.list_and_watch = silent
asyncio.run(trivial.serve(Path(sys.argv[1])))
"""
"""A plugin that registers and answers its stream with nothing."""

MEASURED = {
    "stream-cut",
    "own-socket-deleted",
    "register-errors",
    "kubelet-late",
    "register-hangs",
    "sigterm-in-register",
    "directory-replaced",
    "sigterm",
    "restarts-in-a-row",
    "two-instances",
    "unknown-device",
    "no-device-ids",
}
"""The faults that were measured on the device plugins in use, side by side."""


def finding(rule: str, verdict: str, seen: str = "", exits: int = 0) -> Finding:
    return Finding(rule=rule, kubelet="1.28", kind="emulated", verdict=verdict, seen=seen, exits=exits)  # type: ignore[arg-type]


FOUND = Findings(
    command="plugin {socket_dir}",
    cap_seconds=10,
    resources={"1.28": {"example.com/gpu": 4}},
    findings=(
        finding("registers", "kept"),
        finding("registers-again", "broken", "4 were expected\nlog 1\nlog 2", exits=2),
        finding("init-containers", "not applicable", "it takes 2 healthy devices, there are 1"),
    ),
)


def test_each_fault_that_was_measured_has_a_rule_and_each_rule_says_what_it_rests_on() -> None:
    ids = [rule.id for rule in RULES]
    assert {*ids} >= MEASURED
    assert len({*ids}) == len(ids)
    assert all(rule.promise and len(rule.reference) > 20 for rule in RULES)
    assert all(bool(rule.since) is bool(rule.why) for rule in RULES)


def test_the_page_of_the_docs_has_all_rules() -> None:
    page = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()
    assert [rule.id for rule in RULES if f"| `{rule.id}` | {rule.promise} | {rule.reference} |" not in page] == []


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("", "with {socket_dir} where"),
        ("python plugin.py", "with {socket_dir} where"),
        ("python 'plugin {socket_dir}", "correct its quotes"),
        ("/no/such/plugin {socket_dir}", "expected a program that can be run, got '/no/such/plugin'"),
    ],
)
def test_a_command_that_cannot_be_examined(command: str, says: str) -> None:
    with pytest.raises(CommandError, match=says):
        parsed(command)


def test_a_command_is_filled_in_word_by_word_and_never_by_a_shell(tmp_path: Path) -> None:
    words = parsed(f"{sys.executable} 'a b' --dir={{socket_dir}}/x --state {{state_dir}} ';' $HOME")
    filled = plugin_command(words, Path("/s p"), tmp_path / "state")
    assert filled[1:] == ["a b", "--dir=/s p/x", "--state", str(tmp_path / "state"), ";", "$HOME"]


@pytest.mark.parametrize(
    ("must", "size", "code", "chosen", "says"),
    [
        pytest.param("", 2, "OK", "a b", "", id="right"),
        pytest.param("c", 2, "OK", "a c", "", id="what must be included is"),
        pytest.param("", 2, "OK", "a", "got 1", id="too few"),
        pytest.param("", 1, "OK", "a b", "got 2", id="too many"),
        pytest.param("", 2, "OK", "a a", "got 1", id="one twice"),
        pytest.param("c", 2, "OK", "a b", "the choice lacks c", id="what must be included isn't"),
        pytest.param("", 2, "OK", "a x", "the choice holds x, which isn't available", id="one that isn't available"),
        pytest.param("", 2, "INTERNAL", "", "refused with INTERNAL", id="refused"),
        pytest.param("", 2, "UNAVAILABLE", "", "no answer (UNAVAILABLE)", id="it ended"),
        pytest.param("", 2, "DEADLINE_EXCEEDED", "", "no answer (DEADLINE_EXCEEDED)", id="it hangs"),
    ],
)
def test_what_is_wrong_with_a_choice(must: str, size: int, code: str, chosen: str, says: str) -> None:
    request = PreferredRequest(("a", "b", "c"), tuple(must.split()), size)
    problem = _choice_problem(request, code, chosen.split(), refusable=False)
    assert says in problem
    assert bool(problem) is bool(says)
    refused = code in {"OK", "INTERNAL"} and not chosen
    assert _choice_problem(request, code, chosen.split(), refusable=True) == ("" if refused else problem)


def test_findings_as_text() -> None:
    text = to_text(FOUND)
    assert "kubelet 1.28 (emulated): 4 of example.com/gpu" in text
    assert "BROKEN registers-again: when the kubelet restarts" in text
    assert "1.28 (emulated): 4 were expected" in text
    assert "1.28: not applicable: it takes 2 healthy devices, there are 1" in text
    assert "waited for 10 s; it exits and is started again (2 times: registers-again)" in text
    assert text.endswith("1 rule is broken: registers-again")
    assert "unknown-device" not in text


def test_findings_as_json() -> None:
    told = json.loads(to_json(FOUND))
    assert (told["passed"], told["broken"], told["cap_seconds"]) == (False, ["registers-again"], 10)
    assert [rule["id"] for rule in told["rules"]] == [rule.id for rule in RULES]
    assert told["findings"][1]["seen"] == "4 were expected\nlog 1\nlog 2"


async def test_a_plugin_that_never_registers_breaks_that_rule_and_no_other() -> None:
    command = f"{sys.executable} -c 'import time; time.sleep(60)' {{socket_dir}}"
    found = await examine(command, versions=["1.37"], cap_seconds=1)
    assert found.broken == ("registers",)
    assert {one.verdict for one in found.findings if one.rule != "registers"} == {"not applicable"}
    assert found.findings[0].seen.startswith("no Register came within 1 s; its log ends")
    assert found.watched == "it stays in its process"


async def test_a_plugin_that_ends_at_once_does_not_stay_in_its_process() -> None:
    found = await examine(f"{sys.executable} -c pass {{socket_dir}}", versions=["1.37"], cap_seconds=1)
    assert found.broken == ("registers",)
    assert "; it ended by itself " in found.findings[0].seen
    assert found.watched.startswith("it exits and is started again (")
    assert found.watched.endswith(" registers)")


async def test_a_plugin_that_registers_and_sends_no_list_is_told_from_one_that_does_not_register() -> None:
    found = await examine(f"{sys.executable} -c '{WITHOUT_LIST}' {{socket_dir}}", versions=["1.37"], cap_seconds=3)
    assert found.broken == ("registers",)
    assert found.findings[0].seen.startswith(
        "Registers came (1 of nvidia.com/gpu), but no list with a device within 3 s"
    )


@pytest.mark.parametrize(
    ("registers", "resource", "exits", "why"),
    [
        ({}, "", 0, "no Register came within 9 s"),
        ({}, "a/b", 1, "no Register of a/b came within 9 s; it ended by itself once"),
        ({"c/d": 1}, "a/b", 2, "no Register of a/b came within 9 s (but of c/d); it ended by itself 2 times"),
        ({"c/d": 1, "a/b": 2}, "", 0, "Registers came (2 of a/b, 1 of c/d), but no list with a device within 9 s"),
        ({"c/d": 1, "a/b": 2}, "a/b", 0, "Registers came (2 of a/b), but no list with a device within 9 s"),
    ],
)
def test_how_far_a_plugin_came(registers: dict[str, int], resource: str, exits: int, why: str) -> None:
    assert _why_none(registers, resource, exits, 9) == why


# --- rules that rest on events -------------------------------------------------------------------------------------------


class Slow:
    """A node whose plugin is served after so many waits, and has registered so often by then."""

    patience = 1.0
    resource = "example.com/gpu"

    def __init__(self, registers: list[int]) -> None:
        self.waits, self._registers = 0, registers
        self.the_kubelet = self

    async def start_kubelet(self, version: str, faults: Faults | None = None) -> None:
        """Start nothing."""

    async def start_gateway(self) -> None:
        """Start nothing."""

    async def served(self) -> None:
        self.waits += 1
        if 1 < self.waits <= 1 + len(self._registers):  # the first is before the errors
            raise KubeletError("wait", "not served")

    async def registers(self) -> dict[str, int]:
        return {self.resource: self._registers[self.waits - 2]}

    async def admit(self, pod: str, resource: str, count: int) -> None:
        """Admit nothing."""

    async def remove(self, pod: str) -> None:
        """Remove nothing."""


@pytest.mark.parametrize(
    ("registers", "kept"),
    [
        pytest.param([], True, id="at once"),
        pytest.param([1, 2, 3], True, id="slowly, but it goes on"),
        pytest.param([1, 1, 1], False, id="it stopped"),
        pytest.param([0, 1], False, id="it never began again"),
        pytest.param([1, 2, 3, 4, 5], False, id="it registers, and is never served"),
    ],
)
async def test_a_slow_plugin_is_waited_for_as_long_as_it_tries(registers: list[int], kept: bool) -> None:
    observe = next(rule.observe for rule in RULES if rule.id == "register-errors")
    seen = observe(cast("Node", Slow(registers)), "1.37")
    if kept:
        assert "allocatable after" in await seen
    else:
        with pytest.raises(KubeletError):
            await seen


async def test_a_plugin_is_started_again_only_where_a_kubelet_listens(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    script = f"open({str(starts)!r}, 'a').write('.')"
    async with node(lambda _: None, plugin=[sys.executable, "-c", script, "{socket_dir}"]) as made:
        await made.start_gateway()
        while not made.exits:  # noqa: ASYNC110 - a count tells nobody
            await asyncio.sleep(0.01)
        await asyncio.sleep(4 * FIRST_BACKOFF)
        assert (made.exits, starts.read_text()) == (1, ".")
        await made.start_kubelet("1.37")
        while made.exits < 2:  # noqa: ASYNC110 - a count tells nobody
            await asyncio.sleep(0.01)
