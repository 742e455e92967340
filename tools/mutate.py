"""Break the pure modules in every small way (mutmut), and say which mistakes the tests of their tables don't notice.

``make mutate`` runs it in an environment of its own. The modules are those that the import contracts of pyproject.toml call pure, and
the dialects. mutmut needs a tree to itself, so it works in a copy. A mistake that changes a text alone is one that no test need notice,
so a part may survive (``LEAST_NOTICED``). Words name modules: ``make mutate MUTATE="negotiate drift"``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PURE: Final = ("pure-decisions", "pure-model")
DIALECTS: Final = ("adapters.alpha", "adapters.checkpoint", "adapters.levels", "adapters.spelling", "adapters.v1beta1")
TESTS: Final = (
    *("adapters", "adapters_golden", "adapters_levels", "adapters_table", "adapters_wire", "dra_decisions", "drift"),
    *("gpu_allocation", "gpu_answers", "gpu_answers_golden", "gpu_cdi", "gpu_health", "gpu_names", "gpu_naming"),
    *("life", "names", "negotiate", "readiness", "registration", "served", "tally"),
)
"""The tests of tables: no process, no socket, no waiting."""
ONCE: Final = "tests/unit/test_dra_decisions.py::test_settings_that_cannot_be_gone_by"
"""mutmut runs tests several times in one process, and these rows hold only the first time."""
APART: Final = ("gateway.doctor", "gateway.cli", "gateway.leader", "gateway.sides")
"""Pure modules whose tests are of another kind."""
LEAST_NOTICED: Final = 0.75
NOTICED: Final = ("killed", "timeout", "segfault")


def modules(words: list[str]) -> list[str]:
    """Return the paths of the modules to break, of those whose name has one of the words."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    pure = [name for one in contracts if one["id"] in PURE for name in one["source_modules"]]
    wanted = [name for name in (*DIALECTS, *pure) if not name.startswith(APART)]
    return [f"{name.replace('.', '/')}.py" for name in wanted if not words or any(word in name for word in words)]


def configured(tree: Path, paths: list[str]) -> None:
    """Tell mutmut in the copy what to break, and which tests must notice."""
    copied = sorted(path.name for path in tree.iterdir() if path.name not in {".git", "pyproject.toml"})
    tests = [f"tests/unit/test_{name}.py" for name in TESTS]
    with (tree / "pyproject.toml").open("a") as file:
        file.write(f"\n[tool.mutmut]\nsource_paths = {json.dumps(paths)}\nalso_copy = {json.dumps(copied)}\n")
        file.write(f"pytest_add_cli_args_test_selection = {json.dumps(tests)}\n")
        file.write(
            f'pytest_add_cli_args = ["-p", "no:rerunfailures", "--hypothesis-profile=mutants", "--deselect={ONCE}"]\n'
        )


def main(words: list[str]) -> int:
    """Break the modules; return 1 if too few of the mistakes are noticed."""
    paths = modules(words)
    if not paths:
        sys.exit(f"no pure module has {' or '.join(words)} in its name")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutate-") as name:
        tree, mutmut = Path(name) / "tree", [sys.executable, "-m", "mutmut"]
        ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info")
        shutil.copytree(ROOT, tree, ignore=ignored)
        configured(tree, paths)
        print(f"breaking {len(paths)} modules", flush=True)
        done = subprocess.run([*mutmut, "run"], cwd=tree, capture_output=True, text=True, check=False)
        subprocess.run([*mutmut, "export-cicd-stats"], cwd=tree, capture_output=True, check=False)
        stats = tree / "mutants" / "mutmut-cicd-stats.json"
        counts: dict[str, int] = json.loads(stats.read_text()) if stats.exists() else {"total": 0}
        if not any(counts.get(how) for how in NOTICED):
            sys.exit(f"mutmut failed:\n{done.stdout[-3000:]}\n{done.stderr[-1000:]}")
        found = subprocess.run([*mutmut, "results"], cwd=tree, capture_output=True, text=True, check=False).stdout
    print(found, end="")
    total, noticed = counts["total"], sum(counts[how] for how in NOTICED)
    minutes = (time.monotonic() - began) / 60
    print(f"{total} mistakes, {noticed} noticed, {total - noticed} not, in {minutes:.1f} minutes")
    if not total or noticed < LEAST_NOTICED * total:
        print(f"less than {LEAST_NOTICED:.0%} were noticed: give the tables above the rows that they lack")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
