"""``python -m tests.mutants [WORD ...]``: run the mutants (those whose rule or name has a WORD in it; all by default).

Each mutant is a patch to a copy of the tree and a test that must go red there. It fails where a mutant survives, where a
patch no longer fits the code, where a rule has no mutant, and where a test is red without any patch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.table import MUTANTS, RULES, Mutant

ROOT = Path(__file__).parents[2]
COPIED = ("adapters", "devices", "gateway", "tests", "docs", "protos", "pyproject.toml", "README.md", "CONTRIBUTING.md")
SECONDS = 180


def run(tree: Path, command: tuple[str, ...]) -> tuple[int, str]:
    """Run a command in ``tree``, on the code that lies there; return its exit status and what it printed."""
    own = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tree,
            env=os.environ | own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return 124, str(error.stdout)
    return done.returncode, done.stdout


def pytest(*tests: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests)


def survives(tree: Path, mutant: Mutant) -> str | None:
    """Break the tree, run the test, mend the tree; say what is wrong with the mutant, if anything is."""
    path = tree / mutant.file
    whole = path.read_text()
    if whole.count(mutant.old) != 1:
        return f"its patch no longer fits: expected {mutant.old!r} once in {mutant.file}, found it {whole.count(mutant.old)} times"
    path.write_text(whole.replace(mutant.old, mutant.new))
    try:
        status, printed = run(tree, mutant.command or pytest(mutant.test))
    finally:
        path.write_text(whole)
    if status != 1:
        return f"it survived {mutant.test} (exit status {status}): make that test notice\n{printed[-1500:]}"
    if mutant.says not in " ".join(printed.split()):
        return f"it was noticed, but not by the sentence {mutant.says!r}:\n{printed[-1500:]}"
    return None


def main(words: list[str]) -> int:
    chosen = [
        mutant for mutant in MUTANTS if not words or any(word in f"{mutant.rule} {mutant.name}" for word in words)
    ]
    troubles = [
        f"rule {rule} has no mutant: {text}" for rule, text in RULES.items() if rule not in {m.rule for m in MUTANTS}
    ]
    troubles += [
        f"mutant {mutant.name} is for no rule: {mutant.rule}" for mutant in MUTANTS if mutant.rule not in RULES
    ]
    with tempfile.TemporaryDirectory(prefix="dpg-mutants-") as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy2(source, tree / name)
        status, printed = run(tree, pytest(*dict.fromkeys(mutant.test for mutant in chosen if not mutant.command)))
        if status:
            print(printed)
            print("the tests named by the table are red without any patch: mend that first")
            return 1
        for number, mutant in enumerate(chosen, 1):
            begin = time.monotonic()
            trouble = survives(tree, mutant)
            verdict = "SURVIVED" if trouble else "noticed"
            print(
                f"[{number}/{len(chosen)}] {verdict} in {time.monotonic() - begin:.1f} s  {mutant.rule}: {mutant.name}",
                flush=True,
            )
            if trouble:
                troubles.append(f"mutant {mutant.name}: {trouble}")
    for trouble in troubles:
        print(trouble)
    print(f"{len(chosen)} mutants over {len(RULES)} rules, {len(troubles)} troubles")
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
