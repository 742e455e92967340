"""The runner: a genuine node for one command.

Everything is made if it isn't there, the node is started, the command runs on it, and all of it ends with the command.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gateway_lab.kubelets.build import BuildError
from gateway_lab.node import build, machine
from gateway_lab.node.cluster import VARIABLE, Node, NodeError
from gateway_lab.node.root import RootError, root

EXAMPLES = """\
examples:
  python -m gateway_lab.node -- pytest -m e2e tests/e2e
  python -m gateway_lab.node --kubelet 1.32 -- bash            this kubelet alone; kubectl is on the PATH
  python -m gateway_lab.node --make                            build what nodes need, and start none
  python -m gateway_lab.node --leftovers                       what is left of nodes on this machine: nothing, it is hoped
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``python -m gateway_lab.node``; gives the exit status: the command's, or 1 when there was no node."""
    parser = argparse.ArgumentParser(
        prog="python -m gateway_lab.node",
        description="Runs a command on a genuine single-node Kubernetes, made for it and gone with it. Wants root.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--kubelet",
        action="append",
        choices=build.versions(),
        help="which kubelets there are, each named so; the node begins with the newest of them (default: all)",
    )
    parser.add_argument(
        "--make", action="store_true", help="only make what isn't there yet: Kubernetes, the node's root"
    )
    parser.add_argument(
        "--leftovers", action="store_true", help="only list what earlier runs left; exit status 1 if anything"
    )
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="what to run on the node, after --")
    options = parser.parse_args(arguments)
    if options.leftovers:
        left = machine.leftovers()
        for line in left:
            print(line)
        return 1 if left else 0
    if not options.command and not options.make:
        parser.error("expected a command, as in: python -m gateway_lab.node -- kubectl get node")
    wanted = [version for version in build.versions() if version in (options.kubelet or build.versions())]
    try:
        machine.check()
        lower, binaries = root(progress=_say), build.binaries(wanted, progress=_say)
        if options.make:
            return 0
        return machine.run(lower, binaries, lambda folder: _inside(folder, wanted[-1], options.command))
    except (BuildError, RootError, machine.MachineError) as error:
        print(error, file=sys.stderr)
        return 1


def _inside(folder: Path, version: str, command: Sequence[str]) -> int:
    """Starts the node and becomes the command."""
    node = Node(folder)
    began = time.monotonic()
    try:
        asyncio.run(node.up(version))
    except NodeError as error:
        print(error, file=sys.stderr)
        return 1
    _say(f"the node is ready after {time.monotonic() - began:.1f} s: kubelet {version}, logs in {node.logs}")
    facts: Mapping[str, str] = {
        VARIABLE: str(folder),
        "KUBECONFIG": str(node.kubeconfig),
        "PATH": f"{node.kubectl.parent}:{os.environ.get('PATH', os.defpath)}",
    }
    os.environ.update(facts)
    try:
        os.execvp(command[0], list(command))  # noqa: S606  the caller's command, and no shell
    except OSError as error:
        print(f"expected a command after --, got {' '.join(command)!r}, but: {error}", file=sys.stderr)
        return 127


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
