"""The steps of ``.ci/run`` (``.ci/steps``): whatever one of them does, the others run, and the end says how each of them ended."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.step import TIME_IS_UP

ROOT = Path(__file__).parents[2]
SCRIPT = """
set -uo pipefail
inner() {{ sleep {naps}; }}
says() {{ sleep 0.2; echo "$1 says $2"; }}
[[ ${{1:-}} != --inside ]] || {{ shift; "$@"; exit; }}
exec 2>&1
. .ci/steps
{steps}
summary
"""


def start(folder: Path, steps: str, naps: int = 0, **settings: str) -> "subprocess.Popen[str]":
    script = folder / "run"
    script.write_text("#!/bin/bash" + SCRIPT.format(steps=steps, naps=naps))
    script.chmod(0o755)
    environment = {**os.environ, "TMPDIR": str(folder), **settings}
    return subprocess.Popen([script], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def run(folder: Path, steps: str, naps: int = 0, **settings: str) -> tuple[int, str]:
    """Run some steps; give the exit status and what was printed."""
    with start(folder, steps, naps, **settings) as process:
        said, _ = process.communicate()
    return process.returncode, said


def ended(said: str) -> dict[str, str]:
    """How each step ended, by the summary."""
    summary = said.split("==== all steps: ")[1]
    return dict(re.findall(r"^ +\d+ s  (.+): (\w+)$", summary, re.MULTILINE))


def asleep(seconds: int) -> list[str]:
    """The processes that sleep for so long."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[:2] == [b"sleep", str(seconds).encode()]:
            found.append(path.parent.name)
    return found


@pytest.fixture
def naps() -> int:
    """A number of seconds that nobody else on this machine sleeps for."""
    return 100_000 + os.getpid() % 100_000 + time.monotonic_ns() % 1000 * 1_000_000


def test_all_that_is_well_is_told_and_ends_well(folder: Path) -> None:
    status, said = run(folder, "step 60 true\nstep 60 says one two")
    assert (status, ended(said)) == (0, {"true": "ok", "says one two": "ok"})
    assert "\none says two\n==== says one two: ok, " in said


def test_what_fails_is_named_and_the_next_step_runs(folder: Path) -> None:
    status, said = run(folder, "step 60 false\nstep 60 there-is-no-such-command\nstep 60 true")
    assert status == 1
    assert ended(said) == {"false": "FAILED", "there-is-no-such-command": "FAILED", "true": "ok"}
    assert said.endswith("FAILED: false\nFAILED: there-is-no-such-command\n")


@pytest.mark.parametrize("hang", ["inner", "setsid bash -c '(setsid sleep {0} &); sleep {0}'"])
def test_a_step_that_hangs_is_ended_with_all_its_processes_and_says_what_it_was_doing(
    folder: Path, naps: int, hang: str
) -> None:
    command = hang.format(naps)
    status, said = run(folder, f"step 1 {command}\nstep 60 true", naps)
    assert status == 1
    assert [*ended(said).values()] == ["FAILED", "ok"]
    assert "not done after 1 s; what it was doing:" in said
    assert re.search(rf"^ +\d+ +\d+ s +sleep {naps}$", said, re.MULTILINE)
    assert asleep(naps) == []


def test_who_does_not_heed_a_term_is_killed(naps: int) -> None:
    lines = f"""
import sys
from tools import step
step.GRACE_SECONDS = 0.2
sys.exit(step.main(0.5, ["sh", "-c", "trap '' TERM; sleep {naps} & wait"]))
"""
    done = subprocess.run([sys.executable, "-c", lines], cwd=ROOT, check=False, timeout=60, stdout=subprocess.DEVNULL)
    assert done.returncode == TIME_IS_UP
    assert asleep(naps) == []


def test_what_a_step_leaves_behind_is_named_and_ended(folder: Path, naps: int) -> None:
    status, said = run(
        folder, f"step 60 bash -c 'setsid sleep {naps} & until grep -qx sleep /proc/$!/comm; do :; done'"
    )
    assert status == 0
    assert re.search(rf"left behind, and ended:\n +\d+ +\d+ s sleep {naps}\n", said)
    assert asleep(naps) == []


def test_who_runs_it_ends_and_so_does_what_it_ran(folder: Path, naps: int) -> None:
    with start(folder, "beside 3000 inner\nstep 3000 inner", naps) as process:
        while len(asleep(naps)) < 2:
            time.sleep(0.02)
        process.kill()
    deadline = time.monotonic() + 60
    while asleep(naps) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert asleep(naps) == []
