"""Crossings under a stream of pods that ask by name: scheduler, kubelet and API server are emulated, and each sees the others late.

Its clocks are real, so it needs a machine with nothing else on it:

    CROSSINGS=1 .venv/bin/pytest tests/unit/test_crossings.py
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from adapters.dra.plugin import V1
from devices.claims import ClaimName
from gateway.kubernetes import allocatable
from gateway.lab.kubelets.kubelet import KubeletError
from tests.unit.kubernetes import authority, server
from tests.unit.test_dra_daemon import API, GPU
from tests.unit.test_dra_on import Node, node

__all__ = ["authority", "node", "server"]
pytestmark = pytest.mark.skipif(
    not os.environ.get("CROSSINGS"),
    reason="expected $CROSSINGS: on a busy machine the emulated scheduler is later than a real one",
)
GPUS = 4
PROFILE = f"resources:\n  {GPU}:\n    gpus:\n" + "".join(
    f"    - {{uuid: GPU-{number}, device_nodes: [/dev/nvidia{number}]}}\n" for number in range(GPUS)
)
NODE, PODS = "/api/v1/nodes/n1", "/api/v1/namespaces/ns/pods"
LATE = 0.02, 0.08
"""Seconds until a scheduler or a kubelet sees what happened at the API server."""
BINDS, ADMITS, SAYS = (0.01, 0.04), (0.02, 0.3), (0.02, 0.1)
"""Seconds that it takes to bind a pod, until the kubelet has it, and until the API server has its status."""
RUNS = 0.3, 2.0
PACE = 0.05, 0.25
TELLS, TAKES = 10.0, (0.005, 0.03)
"""Seconds between two times that the kubelet tells of its devices, and from when it counts them until the API server has it."""


@dataclass(eq=False)
class Pod:
    """A pod that asks for a GPU by name, and the claim that the scheduler made for it, if it did."""

    name: str
    claim: ClaimName | None = None
    device: str = ""


@dataclass
class Seen:
    """What the API server showed: how many GPUs are allocatable, and which devices ResourceSlices offer to anybody."""

    count: int
    free: frozenset[str]


@dataclass(eq=False)
class Cluster:
    """A scheduler and a kubelet around a node. As the real ones do, both count pods by name against allocatable, whichever API gave the GPU."""

    node: Node
    chance: random.Random
    waiting: deque[Pod] = field(default_factory=deque)
    bound: set[Pod] = field(default_factory=set)
    """By the scheduler's own cache."""
    admitted: set[Pod] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)
    ran: list[Pod] = field(default_factory=list)
    history: deque[tuple[float, Seen]] = field(default_factory=lambda: deque(maxlen=200))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Let pods come, and all parts do what they do."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            parts = [tasks.create_task(one) for one in (self._watch(), self._make(), self._schedule(), self._tell())]
            yield
            for one in parts:
                one.cancel()

    async def _pause(self, seconds: tuple[float, float]) -> None:
        await asyncio.sleep(self.chance.uniform(*seconds))

    # The API server, as others see it.

    def _now(self) -> Seen:
        count = int(self.node.told.get(GPU, "0"))
        return Seen(count, frozenset(name for name, taints in self.node.place.published.items() if not taints))

    def _seen(self) -> Seen:
        """Give what somebody sees who is late."""
        at = asyncio.get_running_loop().time() - self.chance.uniform(*LATE)
        return next((seen for when, seen in reversed(self.history) if when <= at), Seen(0, frozenset()))

    async def _watch(self) -> None:
        while True:
            self.history.append((asyncio.get_running_loop().time(), self._now()))
            await asyncio.sleep(0.005)

    # The scheduler.

    async def _make(self) -> None:
        for number in itertools.count():
            if len(self.waiting) < 2:
                self.waiting.append(Pod(f"p{number}"))
            await self._pause(PACE)

    async def _schedule(self) -> None:
        while True:
            await asyncio.sleep(0.005)
            if not self.waiting:
                continue
            seen, pod = self._seen(), self.waiting[0]
            if seen.count:
                fits = len(self.bound) < seen.count
            elif free := seen.free - {one.device for one in self.bound}:
                pod.device, fits = min(free), True
            else:
                fits = False
            if fits:
                self.waiting.popleft()
                self.bound.add(pod)
                self._tasks.create_task(self._bind(pod))

    async def _bind(self, pod: Pod) -> None:
        await self._pause(BINDS)
        status: dict[str, object] = {"phase": "Pending"}
        if pod.device:
            pod.claim = self.node.by_name(f"c-{pod.name}", f"uid-{pod.name}", pod.device)
            status["extendedResourceClaimStatus"] = {"resourceClaimName": pod.claim.name}
        limits = {"resources": {"limits": {GPU: "1"}}}
        spec = {"nodeName": "n1", "containers": [limits]}
        self.node.place.server.put(f"{PODS}/{pod.name}", metadata={"uid": pod.name}, spec=spec, status=status)
        await self._pause(ADMITS)
        why = await self._admit(pod)
        if not why:
            self._tasks.create_task(self._started(pod))
            await self._pause(RUNS)
            self.ran.append(pod)
            await self._end(pod)
        else:
            self.failed.append(f"{pod.name}: {why}")
        self.admitted.discard(pod)
        await self._pause(SAYS)
        if pod.claim is not None:
            self.node.place.server.remove(f"{API}/namespaces/ns/resourceclaims/{pod.claim.name}")
        self.node.place.server.remove(f"{PODS}/{pod.name}")
        self.bound.discard(pod)

    async def _started(self, pod: Pod) -> None:
        await self._pause(SAYS)
        with contextlib.suppress(KeyError):  # It is over already.
            self.node.place.server.change(
                f"{PODS}/{pod.name}", lambda one: one["status"].update(startTime="2026-01-01T00:00:00Z")
            )

    # The kubelet.

    async def _admit(self, pod: Pod) -> str:
        """Admit a pod; return the reason if the kubelet fails it (``predicateAdmitHandler`` in pkg/kubelet/lifecycle of 1.37)."""
        if pod.claim is not None:
            self.admitted.add(pod)
            answer = (await self.node.claims.prepare(V1, pod.claim))[pod.claim.uid]
            return "" if isinstance(answer, tuple) else str(answer)
        try:
            await self.node.manager.admit(pod.name, {GPU: 1})
        except KubeletError as error:
            return f"UnexpectedAdmissionError: {error.message}"
        given = 1 + sum(one.claim is None for one in self.admitted)
        if len(self.admitted) + 1 > max(self._seen().count, given):
            self.node.manager.remove(pod.name)
            return f"OutOf{GPU}"
        self.admitted.add(pod)
        return ""

    async def _end(self, pod: Pod) -> None:
        if pod.claim is None:
            self.node.manager.remove(pod.name)
        else:
            await self.node.claims.unprepare(V1, pod.claim)

    async def _tell(self) -> None:
        """Tell the API server of the devices now and then, by what they were a moment before."""
        while True:
            count = str(self.node.manager.totals().allocatable.get(GPU, 0))
            await self._pause(TAKES)
            if self.node.told.get(GPU) != count:
                self.node.place.server.change(NODE, lambda one: one["status"].update(allocatable={GPU: count}))  # noqa: B023
            await asyncio.sleep(TELLS)


@pytest.mark.parametrize("seed", [1])
async def test_twenty_crossings_under_a_stream_by_name_fail_no_pod(
    node: Node, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(allocatable, "SETTLE", 0.5)
    node.place.profile.write_text(PROFILE)
    cluster = Cluster(node, random.Random(seed))  # noqa: S311 - no secret
    async with node.gateway(seconds=120):
        await node.allocatable(GPUS)
        async with cluster.running():
            for to in ["dra", "plugin"] * 10:
                await node.cross(to)
                # The next order comes while pods still have GPUs of the other API.
                while [*(await node.cross(to, dry_run=True)).values()].count(to) < 2:  # noqa: ASYNC110 - it is a question to another
                    await asyncio.sleep(0.02)
                await asyncio.sleep(cluster.chance.uniform(0, 0.5))
    by_claim = sum(pod.claim is not None for pod in cluster.ran)
    assert not cluster.failed
    assert by_claim > 10
    assert len(cluster.ran) - by_claim > 10
