"""The steps of ``.ci/run`` (``.ci/steps``): whatever one of them does, the others run, and the end says how each of them ended."""

import os
import re
import shutil
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


def test_it_runs_from_any_folder(folder: Path) -> None:
    head, _ = (ROOT / ".ci/run").read_text().split("\n. .ci/steps\n")
    for name in (".ci/steps", "tools/step.py"):
        (folder / name).parent.mkdir()
        shutil.copy(ROOT / name, folder / name)
    (folder / ".ci/run").write_text(f"{head}\n. .ci/steps\nstep 60 sweep\nsummary\n")
    (folder / ".ci/run").chmod(0o755)
    environment = {**os.environ, "TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder)}
    done = subprocess.run(
        ["./run"], cwd=folder / ".ci", env=environment, check=False, stdout=subprocess.PIPE, text=True
    )
    assert (done.returncode, ended(done.stdout)) == (0, {"sweep": "ok"}), done.stdout


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


def test_a_step_beside_others_says_its_part_whole_and_after_them(folder: Path) -> None:
    beside = "bash -c 'echo before; sleep 0.5; echo after >&2; exit 3'"
    status, said = run(folder, f"beside 60 {beside}\nstep 60 says one two\ntogether\nstep 60 true")
    assert (status, [*ended(said).values()]) == (1, ["ok", "FAILED", "ok"])
    assert re.search(r"one says two\n(?s:.)+ said:\nbefore\nafter\n==== bash .+: FAILED, ", said)


def test_each_step_beside_others_is_waited_for(folder: Path) -> None:
    first, second = (
        ("beside 60 true", "together"),
        ("step 60 sleep 1", "beside 60 bash -c 'sleep 1; echo late'", "together"),
    )
    status, said = run(folder, "\n".join((*first, *second)))
    assert status == 0
    assert re.search(r"late\n==== bash .+: ok, \d+ s\n", said)


def test_a_step_beside_others_has_a_limit_too(folder: Path, naps: int) -> None:
    status, said = run(folder, "beside 1 inner\nstep 60 true\ntogether", naps)
    assert (status, ended(said)) == (1, {"true": "ok", "inner": "FAILED"})
    assert f"sleep {naps}" in said
    assert asleep(naps) == []


def test_what_has_no_time_left_is_told_as_failed(folder: Path, naps: int) -> None:
    steps = "step 60 inner\nbeside 60 true\nstep 60 says one two\ntogether"
    status, said = run(folder, steps, naps, DEADLINE="1")
    assert status == 1
    assert ended(said) == {"inner": "FAILED", "says one two": "FAILED", "true": "FAILED"}
    assert "one says two" not in said
    assert said.count("not run: no time was left") >= 2  # The first one, too, where a second passed before it.


def test_who_runs_it_ends_and_so_does_what_it_ran(folder: Path, naps: int) -> None:
    with start(folder, "beside 3000 inner\nstep 3000 inner", naps) as process:
        while len(asleep(naps)) < 2:
            time.sleep(0.02)
        process.kill()
    deadline = time.monotonic() + 60
    while asleep(naps) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert asleep(naps) == []
