"""The conformance test's own words: commands, rules, and how findings are told. That it finds faults: tests/compat."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from devices.model import PreferredRequest
from gateway_lab import inplace
from gateway_lab.conformance.report import from_yaml
from gateway_lab.conformance.started import Unexamined, ended, machine, not_started
from gateway_lab.inplace import KUBELET, InPlaceError, command, see_that_it_works
from gateway_lab.kubelets.kubelet import Faults, KubeletError
from gateway_lab.trials.conformance import (
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
from gateway_lab.trials.scenarios import FIRST_BACKOFF, Node, node, plugin_command


def allowed() -> bool:
    """Whether this machine lets us have mounts of our own."""
    try:
        see_that_it_works()
    except InPlaceError:
        return False
    return True


WITHOUT_LIST = """
import asyncio, sys
from pathlib import Path
from gateway_lab import trivial

async def silent(request, context):
    await asyncio.Event().wait()
    yield

trivial.list_and_watch = silent
asyncio.run(trivial.serve(Path(sys.argv[1])))
"""
"""A plugin that registers and answers its stream with nothing."""

REGISTERS_AND_ENDS = """
import asyncio, sys
from pathlib import Path
from gateway_lab import trivial

async def once(folder):
    server = await trivial.bound(folder / trivial.NAME)
    await trivial.register(folder, trivial.NAME)

trivial.DEVICES = ()
asyncio.run(once(Path(sys.argv[1])))
"""
"""A plugin that ends as soon as it has registered, without a device."""
WITHOUT_DEVICES = """
import asyncio, sys
from pathlib import Path
from gateway_lab import trivial

trivial.DEVICES = ()
asyncio.run(trivial.serve(Path(sys.argv[1])))
"""
OWN_MOUNTS = pytest.mark.skipif(not allowed(), reason="no mount namespace of one's own is allowed here")

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


def test_each_rule_is_a_heading_of_the_page_so_that_it_can_be_linked_to() -> None:
    page = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()
    assert [
        rule.id for rule in RULES if f"\n### {rule.id}\n\n{rule.promise[0].upper()}{rule.promise[1:]}." not in page
    ] == []


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
    assert found.findings[0].seen == "no Register came within 1 s; it has logged nothing"
    assert found.watched == "it stays in its process"


async def test_a_plugin_that_registers_and_ends_does_not_stay_in_its_process() -> None:
    found = await examine(
        f"{sys.executable} -c '{REGISTERS_AND_ENDS}' {{socket_dir}}", versions=["1.37"], cap_seconds=10
    )
    assert found.broken == ("registers",)
    assert "; it ended by itself " in found.findings[0].seen
    assert found.watched.startswith("it exits and is started again (")
    assert found.watched.endswith(" registers)")


@pytest.mark.parametrize(
    ("script", "kind", "says"),
    [
        pytest.param("pass", "ended by itself", "it ended by itself with status 0 before it registered", id="at once"),
        pytest.param(
            "import os; os.kill(os.getpid(), 9)", "ended by itself", "it was ended by SIGKILL", id="by a signal"
        ),
        pytest.param(
            "import argparse as a; p = a.ArgumentParser(); p.add_argument(chr(45)*2 + chr(99), required=True); p.parse_args()",
            "other arguments",
            "it ended by itself with status 2, and asks for other arguments",
            id="it lacks an argument",
        ),
    ],
)
async def test_a_plugin_that_ends_before_it_registers_breaks_no_rule(script: str, kind: str, says: str) -> None:
    found = await examine(f"{sys.executable} -c '{script}' {{socket_dir}}", versions=["1.37"], cap_seconds=2)
    assert (found.passed, found.broken) == (False, ())
    assert {one.verdict for one in found.findings} == {"not applicable"}
    assert found.watched == "whether it stays in its process wasn't seen"
    assert (found.unexamined["1.37"].kind, says in found.unexamined["1.37"].why) == (kind, True)
    assert f"NOT EXAMINED, {kind}" in to_text(found)
    assert to_text(found).endswith("no rule was looked at: see NOT EXAMINED above")
    assert "not applicable" not in to_text(found)
    assert json.loads(to_json(found))["unexamined"]["1.37"]["kind"] == kind


async def test_a_plugin_without_devices_breaks_no_rule() -> None:
    found = await examine(f"{sys.executable} -c '{WITHOUT_DEVICES}' {{socket_dir}}", versions=["1.37"], cap_seconds=10)
    assert (found.passed, found.broken) == (False, ())
    assert found.unexamined["1.37"].kind == "no devices"
    assert "it registered nvidia.com/gpu and listed no device" in found.unexamined["1.37"].why


async def test_a_resource_that_the_plugin_does_not_have_is_told_from_one_without_devices() -> None:
    found = await examine(
        f"{sys.executable} -c '{WITHOUT_DEVICES}' {{socket_dir}}",
        versions=["1.37"],
        cap_seconds=3,
        resource="a.example/b",
    )
    assert found.findings[0].seen.startswith("no Register of a.example/b came within 3 s (but of nvidia.com/gpu)")


@pytest.mark.parametrize("hard_wired", [False, pytest.param(True, marks=OWN_MOUNTS)])
async def test_a_plugin_for_another_machine_is_told_by_its_file(tmp_path: Path, hard_wired: bool) -> None:
    other = {"x86_64": 183, "aarch64": 62}.get(platform.machine(), 62)
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + (2).to_bytes(2, "little") + other.to_bytes(2, "little")
    plugin = tmp_path / "plugin"
    plugin.write_bytes(head + bytes(100))
    plugin.chmod(0o755)
    found = await examine(f"{plugin} {{socket_dir}}", versions=["1.37"], cap_seconds=3, hard_wired=hard_wired)
    assert found.broken == ()
    [why] = found.unexamined.values()
    assert why.kind == "another architecture"
    assert f"and this machine is {platform.machine()}" in why.why


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


# --- plugins that don't run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        pytest.param("flag provided but not defined: -x\nUsage of ./p:", "other arguments", id="Go"),
        pytest.param('Error: required flag(s) "config" not set\nUsage:', "other arguments", id="cobra"),
        pytest.param("p: error: the following arguments are required: --dir", "other arguments", id="argparse"),
        pytest.param("error: Missing option '--dir'.", "other arguments", id="click"),
        pytest.param("error: unexpected argument '--dir' found", "other arguments", id="clap"),
        pytest.param("panic: NODE_NAME environment variable must be set", "other arguments", id="a variable"),
        pytest.param("panic: runtime error: invalid memory address", "ended by itself", id="a crash"),
        pytest.param("F1122 no RDMA devices found", "ended by itself", id="no hardware"),
        pytest.param("error while loading shared libraries: libnvidia-ml.so.1", "ended by itself", id="no library"),
        pytest.param("", "ended by itself", id="silence"),
    ],
)
def test_a_plugin_that_wants_arguments_says_so(log: str, kind: str) -> None:
    assert ended(1, log).kind == kind
    assert ended(-11, log) == Unexamined("ended by itself", ended(-11, log).why), "a crash asks for nothing"
    assert log in ended(1, log).why


@pytest.mark.parametrize(
    ("content", "number", "says"),
    [
        pytest.param(b"#!/no/such/python3\n", errno.ENOENT, "plugin wants '/no/such/python3'", id="its interpreter"),
        pytest.param(b"hello", errno.ENOEXEC, "plugin is no program for this machine", id="no program"),
        pytest.param(b"\x7fELF", errno.EACCES, "plugin: Permission denied", id="no permission"),
    ],
)
def test_why_a_program_is_not_executable(tmp_path: Path, content: bytes, number: int, says: str) -> None:
    plugin = tmp_path / "plugin"
    plugin.write_bytes(content)
    found = not_started(str(plugin), OSError(number, os.strerror(number)))
    assert (found.kind, says in found.why) == ("not executable", True), found


def test_the_machine_of_a_file() -> None:
    little, big = b"\x7fELF\x02\x01" + bytes(12), b"\x7fELF\x01\x02" + bytes(12)
    assert [
        machine(one) for one in (little + b"\xb7\x00", big + b"\x00\x15", little + b"\x39\x30", b"#!/bin/sh" * 9)
    ] == [
        "aarch64",
        "ppc64",
        "ELF machine 12345",
        "",
    ]


# --- plugins with the kubelet's path compiled in ----------------------------------------------------------------------------


@OWN_MOUNTS
async def test_a_plugin_with_the_path_compiled_in_is_served() -> None:
    plugin = f"{sys.executable} -m gateway_lab.trivial {KUBELET}/device-plugins"
    rules = [rule for rule in RULES if rule.id == "registers"]
    found = await examine(plugin, versions=["1.37"], cap_seconds=20, rules=rules, hard_wired=True)
    assert [one.verdict for one in found.findings] == ["kept"], to_text(found)


@OWN_MOUNTS
def test_what_runs_in_place_of_the_kubelets_folder_leaves_nothing_on_the_machine(folder: Path) -> None:
    before = (KUBELET.exists(), sorted(path.name for path in KUBELET.parent.iterdir()))
    script = f'touch {KUBELET}/device-plugins/here && test -d "$HOME" && ls {KUBELET.parent} && exit 7'
    (folder / "device-plugins").mkdir()
    done = subprocess.run(
        command(str(folder / "device-plugins"), ["sh", "-c", script]), check=False, capture_output=True, text=True
    )
    assert (done.returncode, (folder / "device-plugins" / "here").exists()) == (7, True), done.stderr
    assert {name for name in before[1] if (KUBELET.parent / name).is_dir()} <= {*done.stdout.split()}
    assert (KUBELET.exists(), sorted(path.name for path in KUBELET.parent.iterdir())) == before


def test_where_no_mounts_of_ones_own_are_allowed_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "unshare: Operation not permitted")

    monkeypatch.setattr(inplace, "_call", refused)
    with pytest.raises(InPlaceError, match=r"Operation not permitted; run it as root, or allow user namespaces"):
        inplace.enter(Path("/tmp/device-plugins"))


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


# --- the command ----------------------------------------------------------------------------------------------------------


def test_a_plugin_is_examined_without_the_extra_lab(tmp_path: Path) -> None:
    """As in the image, which has the daemon's libraries alone."""
    without = "import sys; sys.modules.update(hpack=None, rich=None); from gateway.__main__ import main; main()"
    plugin = f"{sys.executable} -m gateway_lab.trivial {{socket_dir}}"
    options = ["--kubelets", "1.37", "--genuine", "no", "--only", "registers", "--out", str(tmp_path)]
    asked = [sys.executable, "-c", without, "conformance", plugin, "--plugin-version", "v1", *options]
    done = subprocess.run(asked, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    told = from_yaml((tmp_path / "plugin-report.yaml").read_bytes())
    assert (told.version, told.kubelets, told.levels) == ("v1", {"1.37": "emulated"}, {"core": "kept"})
    assert told.plugin == Path(sys.executable).name
    assert json.loads((tmp_path / "plugin-badge.json").read_text())["message"] == "core kept"


def test_a_plugin_that_did_not_run_ends_the_command_with_2(tmp_path: Path) -> None:
    options = ["--kubelets", "1.37", "--genuine", "no", "--only", "registers", "--cap", "1", "--out", str(tmp_path)]
    plugin = f"{sys.executable} -c pass {{socket_dir}}"
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "conformance", plugin, *options],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    told = from_yaml((tmp_path / "plugin-report.yaml").read_bytes())
    assert told.unexamined["1.37"].startswith("ended by itself: ")
    assert told.result == "not applicable"
