"""``python -m tests.mutants [--jobs N] [--turn N] [WORD ...]``: run the mutants (those with a WORD in their rule or name; all by default).

Each mutant is a patch to a copy of the tree and a test that must go red there. It fails where a mutant survives, where a
patch no longer fits the code, where a rule has no mutant, and where a test is red without any patch. What no test noticed
runs once more when the others are over, as does a test that is red without a patch: a machine that stood still is no finding.
What needed its second try is named at the end. Several run at once, each in a copy of its own. Most of a run would be start-up: so each copy has a Python that imported the libraries already
(``warm``), and holds what Python and pytest compiled; a patch is seen nevertheless, because the code's bytecode is checked
against the text it came from.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.mutants import (
    outside_dra,
    outside_memory,
    outside_registration,
    records,
    streams,
    table,
)
from tests.mutants.table import Mutant

ROOT = Path(__file__).parents[2]
TABLES = (
    table, streams, records,
    outside_registration, outside_memory, outside_dra,
)  # fmt: skip
RULES = [rule for one in TABLES for rule in one.RULES.items()]
MUTANTS = [mutant for one in TABLES for mutant in one.MUTANTS]
CODE = ("adapters", "devices", "gateway", "gateway_lab")
COPIED = (*CODE, "tests", "tools", "deploy", "docs", "protos", "pyproject.toml", "README.md", "CONTRIBUTING.md")
SECONDS = 290
"""Less than pytest's own limit: what that ends has failed, and would pass for noticed."""
BASE_SECONDS = 600
SLOWEST = 10
CORES = os.cpu_count() or 1


def environment(tree: Path, *, broken: bool) -> dict[str, str]:
    """The environment of a command that runs on the code of ``tree``; what is compiled of a broken one isn't kept."""
    return os.environ | {
        "PYTHONPATH": str(tree),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1" if broken else "",
    }


def run(tree: Path, command: tuple[str, ...], seconds: float = SECONDS, *, broken: bool = False) -> tuple[int, str]:
    """Run a command in ``tree``; return its exit status and what it printed."""
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tree,
            env=environment(tree, broken=broken),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return 124, str(error.stdout)
    return done.returncode, done.stdout


class Tree:
    """A copy of the tree, and the warm Python that runs its tests. Leaving it ends that Python."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._printed = path.with_suffix(".txt")
        # Not the folder that every pytest shares: there one stumbles over what another one removes.
        self._temporary = f"--basetemp={path.with_suffix('.tmp')}"
        self._warm = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.warm"],
            cwd=path,
            env=environment(path, broken=True),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._warm.communicate()

    def test(self, *arguments: str) -> tuple[int, str]:
        """Run pytest with these arguments; return its exit status (minus the signal that ended it) and what it printed."""
        assert self._warm.stdin
        assert self._warm.stdout
        self._warm.stdin.write(json.dumps([str(self._printed), SECONDS, self._temporary, *arguments]) + "\n")
        self._warm.stdin.flush()
        status = int(self._warm.stdout.readline())
        return status, self._printed.read_text(errors="replace")


def see_green(tree: Path, tests: Iterable[str], noted: Path) -> None:
    """Run tests without any patch; SystemExit if one is red twice. ``noted`` is where pytest notes which are red."""
    options = ("-q", "--hypothesis-profile=mutants", f"--numprocesses={2 * CORES}", "--dist=loadfile")
    command = ("-m", "pytest", *options, "-o", f"cache_dir={noted}", *tests)
    status, printed = run(tree, command, BASE_SECONDS)
    if status:
        print(f"{printed}\nred without any patch; those once more:", flush=True)
        status, printed = run(tree, (*command, "--last-failed", "--last-failed-no-failures=none"), BASE_SECONDS)
        print("\n".join(re.findall(r"^.* (?:passed|failed).* in .*$", printed, re.MULTILINE)), flush=True)
    if status:
        sys.exit(f"{printed}\nthe tests named by the tables are red without any patch: mend that first")


def copy(folder: Path, mutants: list[Mutant], jobs: int) -> list[Path]:
    """Copy the tree ``jobs`` times, if the tests named by the mutants are green in it; SystemExit otherwise."""
    first, *others = (folder / str(number) for number in range(jobs))
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, first / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, first / name)
    run(first, ("-m", "compileall", "-q", "--invalidation-mode=checked-hash", *CODE))
    tests = dict.fromkeys(mutant.test for mutant in mutants if not mutant.command)
    if tests:
        see_green(first, tests, folder / "noted")
    for other in others:
        shutil.copytree(first, other)
    return [first, *others]


def survives(tree: Tree, mutant: Mutant) -> str | None:
    """Break the tree, run the test, mend the tree; say what is wrong with the mutant, if anything is."""
    path = tree.path / mutant.file
    whole = path.read_text()
    if whole.count(mutant.old) != 1:
        return f"its patch no longer fits: expected {mutant.old!r} once in {mutant.file}, found it {whole.count(mutant.old)} times"
    path.write_text(whole.replace(mutant.old, mutant.new))
    try:
        status, printed = run(tree.path, mutant.command, broken=True) if mutant.command else tree.test(mutant.test)
    finally:
        path.write_text(whole)
    # A process that gRPC crashes in once the test has failed did notice.
    if status != 1 and not (status < 0 and re.match(r"[.sx]*F", printed)):
        return f"it survived {mutant.test} (exit status {status}): make that test notice\n{printed[-1500:]}"
    if mutant.says not in " ".join(printed.split()):
        return f"it was noticed, but not by the sentence {mutant.says!r}:\n{printed[-1500:]}"
    return None


def misplaced() -> list[str]:
    """Say what is wrong with the tables themselves."""
    rules, broken = Counter(rule for rule, _ in RULES), {mutant.rule for mutant in MUTANTS}
    return [
        *(f"rule {rule} has no mutant: {text}" for rule, text in RULES if rule not in broken),
        *(f"mutant {mutant.name} is for no rule: {mutant.rule}" for mutant in MUTANTS if mutant.rule not in rules),
        *(f"rule {rule} is there {count} times" for rule, count in rules.items() if count > 1),
    ]


def turn(count: int) -> list[Mutant]:
    """Give one in ``count`` of all, as the commit's hash has it, and those whose code or test the last commit or the tree changed."""

    def git(*words: str) -> str:
        return subprocess.run(("git", *words), cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout

    mine, *parents = git("rev-list", "--parents", "--max-count=1", "HEAD").split()
    changed = git("diff", "--name-only", *(parents[:1] or [mine])).splitlines()
    return [
        one
        for number, one in enumerate(MUTANTS)
        if number % count == int(mine, 16) % count or one.file in changed or one.test.partition("::")[0] in changed
    ]


class Trees:
    """The copies of the tree, and who waits for one that is free."""

    def __init__(self, trees: Iterable[Tree], pool: ThreadPoolExecutor) -> None:
        self._free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        self._pool = pool
        self.took: defaultdict[str, float] = defaultdict(float)
        """Seconds, by the mutant's title."""
        for tree in trees:
            self._free.put(tree)

    def _judge(self, mutant: Mutant) -> tuple[str | None, float]:
        tree, begin = self._free.get(), time.monotonic()
        try:
            return survives(tree, mutant), time.monotonic() - begin
        finally:
            self._free.put(tree)

    def judge(self, mutants: list[Mutant]) -> dict[Mutant, str]:
        """Judge all, and say so of each; give what is wrong with those that aren't noticed."""
        wrong = {}
        judged = {self._pool.submit(self._judge, mutant): mutant for mutant in mutants}
        for number, future in enumerate(as_completed(judged), 1):
            mutant, (trouble, seconds) = judged[future], future.result()
            self.took[mutant.title] += seconds
            verdict = "SURVIVED" if trouble else "noticed"
            print(f"[{number}/{len(judged)}] {verdict} in {seconds:.1f} s  {mutant.title}", flush=True)
            if trouble:
                wrong[mutant] = trouble
        return wrong


def main(chosen: list[Mutant], jobs: int) -> int:
    troubles, jobs = misplaced(), max(1, min(jobs, len(chosen)))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dpg-mutants-")))
        copies = [stack.enter_context(Tree(path)) for path in copy(folder, chosen, jobs)]
        trees = Trees(copies, stack.enter_context(ThreadPoolExecutor(jobs)))
        # The longest first: whole nodes, then the last tables, where a mutant often shows when a test's patience ends.
        in_order = chosen[::-1]
        in_order.sort(key=lambda one: not one.command and "tests/compat" not in one.test)
        first = trees.judge(in_order)
        for mutant, trouble in first.items():
            print(f"once more: {mutant.title}: {trouble}", flush=True)
        wrong = trees.judge([*first])
    print("the slowest:")
    for name, seconds in sorted(trees.took.items(), key=lambda one: -one[1])[:SLOWEST]:
        print(f"  {seconds:5.1f} s  {name}")
    for mutant in first:
        if mutant not in wrong:
            print(f"noticed at the second try only, mend that: {mutant.title}")
    troubles += [f"mutant {mutant.name}: {trouble}" for mutant, trouble in wrong.items()]
    for trouble in troubles:
        print(trouble)
    print(f"{len(chosen)} of {len(MUTANTS)} mutants, over {len(RULES)} rules, {len(troubles)} troubles")
    return 1 if troubles else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="run those whose rule or name has one of these in it")
    parser.add_argument(
        "--jobs",
        type=int,
        default=2 * CORES + 8,
        help="how many run at once; some sixty mostly wait (default: %(default)s)",
    )
    parser.add_argument(
        "--turn",
        type=int,
        metavar="N",
        default=1,
        help="run one in N, other ones at each commit, and those whose code or test the last commit changed",
    )
    given = parser.parse_args()
    asked = turn(given.turn) if given.turn > 1 else MUTANTS
    sys.exit(
        main([one for one in asked if not given.words or any(map(one.title.__contains__, given.words))], given.jobs)
    )
