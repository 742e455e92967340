"""Generate adapters/pb from protos/, or check that what is committed is what the protos say.

`protoc -I adapters/pb=protos` maps the folder of the sources to the package of the results, so the generated imports are
right as they come and nothing is edited afterwards. Messages and their stubs only: the gateway serves through generic
handlers, so gRPC's own stubs would be dead code. Run by the generator's environment (locks/gen.txt): `make generate`.
"""

from __future__ import annotations

import argparse
import filecmp
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCES = Path("protos")
PACKAGE = Path("adapters/pb")


def generate(out: Path) -> None:
    """Write the package `adapters/pb` under `out`; SystemExit when protoc finds a fault in a proto file."""
    protos = sorted(SOURCES.rglob("*.proto"))
    if not protos:
        sys.exit(f"no *.proto under {SOURCES}/: nothing to generate")
    plugin = Path(sys.prefix) / "bin" / "protoc-gen-mypy"
    arguments = [
        f"-I{PACKAGE}={SOURCES}",
        f"--plugin=protoc-gen-mypy={plugin}",
        f"--python_out={out}",
        f"--mypy_out=quiet:{out}",
        *(str(PACKAGE / proto.relative_to(SOURCES)) for proto in protos),
    ]
    if protoc.main(["protoc", *arguments]) != 0:
        sys.exit("protoc found a fault: see its message above")
    for folder in {(out / PACKAGE / proto.relative_to(SOURCES)).parent for proto in protos} | {out / PACKAGE}:
        where = SOURCES / folder.relative_to(out / PACKAGE)
        (folder / "__init__.py").write_text(f'"""Generated from {where.as_posix()}/ by `make generate`."""\n')


def differences(fresh: Path, committed: Path) -> list[str]:
    """Name every file that only one side has or whose bytes differ."""
    sides = [
        {path.relative_to(side) for path in side.rglob("*.py*") if path.suffix != ".pyc"} for side in (fresh, committed)
    ]
    lone = [f"{path}: only in {place}" for path, place in _lone(*sides)]
    changed = [
        f"{path}: differs"
        for path in sorted(sides[0] & sides[1])
        if not filecmp.cmp(fresh / path, committed / path, shallow=False)
    ]
    return lone + changed


def _lone(fresh: set[Path], committed: set[Path]) -> list[tuple[Path, str]]:
    return [(path, "protos/") for path in sorted(fresh - committed)] + [
        (path, f"{PACKAGE}/") for path in sorted(committed - fresh)
    ]


def _removed_stale(kept: Path) -> None:
    for path in sorted(PACKAGE.rglob("*.py*")):
        if path.suffix != ".pyc" and not (kept / path).exists():
            path.unlink()


def main() -> None:
    """Generate in place, or with --check compare and exit 1 on any difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with what is committed instead of writing")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory(prefix="dpg-generate-") as scratch:
        generate(Path(scratch))
        if not check:
            for path in sorted(Path(scratch).rglob("*.py*")):
                target = path.relative_to(scratch)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
            _removed_stale(Path(scratch))
            return
        if found := differences(Path(scratch) / PACKAGE, PACKAGE):
            sys.exit("\n".join(["generated code is not what protos/ says; run `make generate`:", *found]))


if __name__ == "__main__":
    main()
