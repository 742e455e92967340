"""Which processors the node has for itself, and which its control plane: on a real cluster that is on other machines."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from gateway_lab.node.cluster import Node


def part(node: Node, processors: Iterable[int]) -> str:
    """Give the control plane and the caller the first processor, and all else that runs on the node the others; say who has which.

    What starts later has those of who starts it, but a container, which has all: so it is done again before each measurement.
    Of one processor nothing is parted.
    """
    every = sorted(processors)
    first, others = set(every[:1]), set(every[1:])
    if not others:
        return "the control plane shares the machine's only processor"
    daemons = (node.etcd, node.apiserver, node.controllers, node.scheduler)
    apart = {os.getpid(), *(daemon.pid for daemon in daemons)}
    for process in Path("/proc").glob("[0-9]*"):
        _bind(process, first if int(process.name) in apart else others)
    return f"the control plane and this command have processor {_spelled(first)}, the node {_spelled(others)}"


def _bind(process: Path, processors: set[int]) -> None:
    with contextlib.suppress(OSError):  # It has just ended.
        for thread in process.joinpath("task").iterdir():
            os.sched_setaffinity(int(thread.name), processors)


def _spelled(processors: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(processors)))
