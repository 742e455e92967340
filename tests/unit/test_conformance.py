"""The conformance test's own words: commands, rules, and how findings are told. That it finds faults: tests/compat."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gateway.lab.conformance import RULES, CommandError, Finding, Findings, examine, parsed, to_json, to_text
from gateway.lab.scenarios import plugin_command

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
