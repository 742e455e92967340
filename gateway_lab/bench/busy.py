"""A node whose pods use every processor: how soon the gateway is back after a kubelet's restart, by its CPU request.

Processors are shared out by weight then, and a pod's weight is what it requests. The kubelet, the pods that never rest and
the gateway get cgroups as on a node. Needs root, and a cgroup hierarchy (version 1 or 2) that may be written to.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from gateway_lab.bench.load import busy_loops
from gateway_lab.bench.measure import Report, line, spread
from gateway_lab.bench.node import GPUS, RESOURCE, Node
from gateway_lab.gatewayproc import GatewayProcess
from gateway_lab.kubelets.kubelet import KubeletError

REQUESTS: Final = (0, 10, 100, 200, 500)
"""In thousandths of a processor; 0: the pod requests nothing."""
MANIFEST: Final = 200
"""What deploy/kustomize requests."""
TOO_LATE_MS: Final = 100.0
"""When a restarted kubelet tells the API server of its node: what isn't registered by then is missed for ten seconds."""
FIGURES: Final = "a busy node, restart gap by CPU request (ms)"

_ROOT: Final = Path("/sys/fs/cgroup")
_LOOPS: Final = 2
"""Busy loops for each processor."""


@dataclass(frozen=True, slots=True)
class Group:
    """A cgroup with a weight."""

    path: Path

    @classmethod
    @contextmanager
    def make(cls, path: Path, request: int) -> Iterator[Self]:
        """Make one as a kubelet does for a request, and remove it in the end, when its processes are gone.

        Raises:
            OSError: it can't be made here.
        """
        path.mkdir()
        try:
            shares = max(2, request * 1024 // 1000)
            if path.joinpath("cpu.shares").exists():
                path.joinpath("cpu.shares").write_text(str(shares))
            else:
                path.joinpath("cpu.weight").write_text(str(1 + (shares - 2) * 9999 // 262142))
            yield cls(path)
        finally:
            path.rmdir()

    def parent(self) -> None:
        """Let groups below this one have weights."""
        if self.path.joinpath("cgroup.subtree_control").exists():
            self.path.joinpath("cgroup.subtree_control").write_text("+cpu")

    def add(self, pid: int) -> None:
        """Move a process here, with all its threads."""
        self.path.joinpath("cgroup.procs").write_text(str(pid))


async def busy_node(report: Report, python: Path, runs: int) -> None:
    """Restart a kubelet again and again beneath gateways of different requests, on a node that is never idle."""
    name = f"a busy node, CPU request {MANIFEST}m as in the manifests: worst restart gap"
    processors = os.cpu_count() or 1
    root = _ROOT if _ROOT.joinpath("cgroup.controllers").exists() else _ROOT / "cpu"
    found: dict[str, dict[str, float]] = {}
    try:
        with ExitStack() as stack:
            node = stack.enter_context(Group.make(root / f"dpg-busy-{os.getpid()}", 1000 * processors))
            node.parent()
            kubelet = stack.enter_context(Group.make(node.path / "kubelet", 1000))
            pods = stack.enter_context(Group.make(node.path / "pods", 1000 * processors))
            pods.parent()
            busy = stack.enter_context(Group.make(pods.path / "busy", 1000 * processors))
            for pid in stack.enter_context(busy_loops(_LOOPS)):
                busy.add(pid)
            for request in REQUESTS:
                with Group.make(pods.path / f"gateway-{request}", request) as own:
                    gaps = await _gaps(python, own, kubelet, runs)
                found[f"{request}m" if request else "none"] = spread(gaps)
    except OSError as error:
        report.bar(
            name, math.nan, TOO_LATE_MS, "ms", f"expected cgroups below {root} that may be written to, but: {error}"
        )
        return
    report.figures[FIGURES] = found
    measured = found[f"{MANIFEST}m"]
    report.bar(name, measured["max"], TOO_LATE_MS, "ms", line(measured))


async def _gaps(python: Path, own: Group, kubelets: Group, runs: int) -> list[float]:
    async with Node.make(python) as node:
        gateway = await node.gateway()
        await gateway.begun()
        own.add(gateway.pid)
        return [await _gap(node, gateway, kubelets) for _ in range(runs)]


async def _gap(node: Node, gateway: GatewayProcess, kubelets: Group) -> float:
    """Start a kubelet and end it, and wait until the gateway knows both; infinite: it wasn't back within the lab's ten seconds."""
    kubelet, mark = await node.kubelet(), gateway.seen
    kubelets.add(kubelet.pid)
    try:
        gap = await kubelet.start_measured(RESOURCE, GPUS)
    except KubeletError:
        return math.inf
    finally:
        await kubelet.close()
    await gateway.wait_for("stream ended", since=mark)
    return gap.gap_ms
