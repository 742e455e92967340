"""Examine device plugins and keep what was found: ``python -m tools.examine [--kubelets 1.28,1.37] [NAME[@VERSION]...]``.

Genuine plugins of others, built from the Go module proxy, and our own: each by ``gateway conformance``, and its report goes to
conformance/reports/NAME/VERSION.yaml. ``make docs`` makes docs/compared.md of them. Nothing of what is built is kept in the tree.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version as installed
from pathlib import Path
from types import MappingProxyType
from typing import Final

from gateway_lab.kubelets.build import BuildError
from gateway_lab.plugins.thirdparty import built
from tests.fakes import nvml

ROOT: Final = Path(__file__).resolve().parents[1]
REPORTS: Final = ROOT / "conformance" / "reports"
KUBELETS: Final = "1.28,1.37"
"""One of those that a second Register can disconnect (1.25 to 1.36), and today's. Both are built by ``make kubelets``."""
CAP: Final = "30"
"""Seconds. Some look for their kubelet every ten seconds, which is slow, not silent."""
OURS: Final = "device-plugin-gateway"
_PROGRAMS: Final = Path(sys.executable).parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine those that are named, or all; return 1 where one could not be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubelets", default=KUBELETS, help="by default %(default)s")
    parser.add_argument(
        "names", nargs="*", metavar="NAME[@VERSION]", help=f"{OURS}, {', '.join(one.name for one in built.EXAMINED)}"
    )
    options = parser.parse_args(arguments)
    known = {OURS, *(one.name for one in built.EXAMINED)}
    if strangers := [name for name in options.names if name.partition("@")[0] not in known]:
        parser.error(f"expected one of {', '.join(sorted(known))}, got {', '.join(strangers)}")
    failed = False
    if OURS in (options.names or [OURS]):
        failed |= _examine_ours(options.kubelets)
    for plugin in built.EXAMINED:
        try:
            wanted = not options.names or {plugin.name, f"{plugin.name}@{built.version(plugin)}"} & {*options.names}
            failed |= bool(wanted) and _examine(plugin, options.kubelets)
        except BuildError as error:
            print(error, file=sys.stderr)
            failed = True
    return int(failed)


def _examine(plugin: built.ThirdParty, kubelets: str) -> bool:
    """Build and examine a plugin of somebody else; say whether that failed."""
    binary = built.binary(plugin)
    options = {
        "--plugin-name": plugin.name,
        "--plugin-version": built.version(plugin),
        "--change": plugin.change,
        "--notes": plugin.notes,
    }
    home = built.folder(plugin)
    hard_wired = ["--hard-wired"] if plugin.hard_wired else []
    with tempfile.TemporaryDirectory(prefix="dpg-") as folder:
        hardware = nvml.dgx(Path(folder) / "world").env() if plugin.nvml else {}
        return _run(
            plugin.command, options, hard_wired, kubelets, binary.parent, home if home.is_dir() else ROOT, hardware
        )


def _examine_ours(kubelets: str) -> bool:
    command = "gateway --backend simulated --socket-dir {socket_dir} --state-dir {state_dir}"
    options = {
        "--plugin-name": OURS,
        "--plugin-version": f"v{installed(OURS)}",
        "--change": "gateway cordon 0 --reason rule --state-dir {state_dir}",
        "--notes": "This project's own, whose rules they are, with eight simulated GPUs.",
    }
    return _run(command, options, [], kubelets, _PROGRAMS, ROOT)


def _run(
    command: str,
    options: Mapping[str, str],
    flags: Sequence[str],
    kubelets: str,
    place: Path,
    home: Path,
    hardware: Mapping[str, str] = MappingProxyType({}),
) -> bool:
    """Examine a plugin and keep its report; a broken rule is no failure here.

    ``place``, where its program is, goes on the path, and it runs in ``home``, so that a report names no folder of this machine.
    """
    name, version = options["--plugin-name"], options["--plugin-version"]
    print(f"{name} {version}", flush=True)
    with tempfile.TemporaryDirectory(prefix="dpg-") as out:
        words = [word for option in options.items() for word in option]
        fixed = ["--kubelets", kubelets, "--genuine", "yes", "--cap", CAP, "--out", out]
        subprocess.run(
            [_PROGRAMS / "gateway", "conformance", command, *words, *flags, *fixed],
            check=False,
            cwd=home,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **hardware, "PATH": f"{place}:{_PROGRAMS}:{os.environ['PATH']}"},
        )
        if not (Path(out) / "plugin-report.yaml").exists():
            return True
        kept = REPORTS / name / f"{version}.yaml"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes((Path(out) / "plugin-report.yaml").read_bytes())
    return False


if __name__ == "__main__":
    sys.exit(main())
