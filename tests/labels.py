"""Compares our node labels with those of NVIDIA's GPU Feature Discovery: ``python -m tests.labels [--write] [NODE...]``.

It builds the program from the Go module proxy into the user's cache, runs it on each fake node of tests/fakes/labelled.py, and
compares what it writes with tests/golden/labels, which tests/contract/test_labels.py holds our gateway to. It takes root, or user
namespaces: the program looks for PCI devices in /sys, where it finds the fake node's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gateway_lab.plugins.thirdparty import built
from tests.fakes.labelled import GOLDEN, NODES, LabelledNode

_PLACE: Final = "/sys/bus/pci/devices"
_RUNS: Final = 40
"""Of several products the program labels one by chance: so often it may choose another one than ours does."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the nodes that are named, or all; return 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="also write what differs to tests/golden/labels")
    parser.add_argument("nodes", nargs="*", metavar="NODE", help=", ".join(NODES))
    options = parser.parse_args(arguments)
    if unknown := {*options.nodes} - {*NODES}:
        parser.error(f"unknown nodes: {', '.join(sorted(unknown))}")
    program = built.binary(built.FEATURE_DISCOVERY)
    print(f"{built.FEATURE_DISCOVERY.name} {built.version(built.FEATURE_DISCOVERY)}")
    failed = 0
    for name in options.nodes or NODES:
        golden = GOLDEN / name
        ours = golden.read_text(encoding="utf-8") if golden.exists() else ""
        theirs, runs = discovered(program, NODES[name]), 1
        while theirs != ours and NODES[name].by_chance and runs < _RUNS:
            theirs, runs = discovered(program, NODES[name]), runs + 1
        if theirs == ours:
            print(f"{name}: equal, {len(ours.splitlines())} labels (run {runs})")
            continue
        if options.write:
            golden.write_text(theirs, encoding="utf-8")
        failed += 1
        print(f"{name}: DIFFERENT")
        for line in sorted({*ours.splitlines()} ^ {*theirs.splitlines()}):
            print(f"  {'ours' if line in ours.splitlines() else 'theirs'}: {line}")
    return int(bool(failed))


def discovered(program: Path, node: LabelledNode) -> str:
    """Return the labels that the program writes of a node, sorted, but for the timestamp."""
    with tempfile.TemporaryDirectory(prefix="dpg-") as made:
        folder = Path(made)
        world = node.make(folder / "world")
        world.write()
        node.kernel(world, folder / "sys")
        (folder / "config.yaml").write_text(node.configuration(), encoding="utf-8")
        file = folder / "labels"
        place = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
        mounted = f'mount --bind "$1" {_PLACE} && shift && exec "$@"'
        command = [str(program), "--oneshot", "--use-node-feature-api=false", f"--config-file={folder}/config.yaml"]
        command += [f"--output-file={file}", f"--machine-type-file={folder}/sys/class/dmi/id/product_name"]
        done = subprocess.run(
            [*place, "sh", "-c", mounted, "sh", f"{folder}/sys/bus/pci/devices", *command],
            env={**os.environ, **world.env()},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if done.returncode:
            sys.exit(f"{program.name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        lines = file.read_text(encoding="utf-8").splitlines()
        return "".join(f"{line}\n" for line in sorted(lines) if not line.startswith("nvidia.com/gfd.timestamp="))


if __name__ == "__main__":
    sys.exit(main())
