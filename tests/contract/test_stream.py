"""GPUs move to and fro under a stream of pods that ask by name: scheduler, kubelet and API server each see the others late."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from gateway_lab.kubelets.kubelet import KubeletError
from tests.contract.claiming import cross, device_class
from tests.contract.cluster import Claim, Cluster
from tests.contract.node import GPU, Node

GPUS = 4
LATE = 0.02, 0.08
"""Seconds until a scheduler or a kubelet sees what happened at the API server."""
BINDS, ADMITS, SAYS = (0.01, 0.04), (0.02, 0.3), (0.02, 0.1)
"""Seconds that it takes to bind a pod, until the kubelet has it, and until the API server has its status."""
RUNS = 0.3, 2.0
PACE = 0.05, 0.25


@dataclass(eq=False)
class Pod:
    """A pod that asks for a GPU by name, and the claim that the scheduler made for it, if it did."""

    name: str
    device: str = ""
    claim: Claim | None = None


@dataclass(eq=False)
class Stream:
    """A scheduler and a kubelet around a node. As the real ones do, both count pods by name against allocatable, whichever API gave the GPU."""

    cluster: Cluster
    chance: random.Random
    waiting: deque[Pod] = field(default_factory=deque)
    bound: set[Pod] = field(default_factory=set)
    """By the scheduler's own cache."""
    admitted: set[Pod] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)
    ran: list[Pod] = field(default_factory=list)
    history: deque[tuple[float, int, frozenset[str]]] = field(default_factory=lambda: deque(maxlen=40))
    """What the API server showed: when, how many are allocatable, and what slices offer to anybody."""

    async def run(self, crossings: int) -> None:
        """Let pods come while GPUs move so often."""
        async with asyncio.TaskGroup() as self.tasks:
            parts = [self.tasks.create_task(one) for one in (self._watch(), self._make(), self._schedule())]
            for number in range(crossings):
                to = "plugin" if number % 2 else "dra"
                await cross(self.cluster, to)
                # The next order comes while pods still have GPUs of the other API.
                while [*(await cross(self.cluster, to, dry_run=True)).values()].count(to) < 2:  # noqa: ASYNC110 - an order
                    await asyncio.sleep(0.1)
                await self._pause((0, 0.5))
            for one in parts:
                one.cancel()

    async def _pause(self, seconds: tuple[float, float]) -> None:
        await asyncio.sleep(self.chance.uniform(*seconds))

    async def _watch(self) -> None:
        while True:
            free = frozenset(name for name, taints in self.cluster.published().items() if not taints)
            self.history.append((asyncio.get_running_loop().time(), self.cluster.allocatable, free))
            await asyncio.sleep(0.01)

    def _seen(self) -> tuple[int, frozenset[str]]:
        """Give what somebody sees who is late."""
        at = asyncio.get_running_loop().time() - self.chance.uniform(*LATE)
        return next(((count, free) for when, count, free in reversed(self.history) if when <= at), (0, frozenset()))

    async def _make(self) -> None:
        for number in itertools.count():
            if len(self.waiting) < 2:
                self.waiting.append(Pod(f"p{number}"))
            await self._pause(PACE)

    async def _schedule(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            (count, free), taken = self._seen(), {one.device for one in self.bound}
            if not self.waiting or (len(self.bound) >= count if count else not free - taken):
                continue
            pod = self.waiting.popleft()
            pod.device = "" if count else min(free - taken)
            self.bound.add(pod)
            self.tasks.create_task(self._live(pod))

    async def _live(self, pod: Pod) -> None:
        await self._pause(BINDS)
        if pod.device:
            pod.claim = self.cluster.allocate(pod.name, pod.device, by_name=True)
            self.cluster.pod(pod.name, phase="Pending", extendedResourceClaimStatus={"resourceClaimName": pod.name})
        else:
            self.cluster.pod(pod.name)
        await self._pause(ADMITS)
        try:
            await self._admit(pod)
        except KubeletError as error:
            self.failed.append(f"{pod.name}: {error}")
        else:
            self.tasks.create_task(self._started(pod))
            await self._pause(RUNS)
            self.ran.append(pod)
            if pod.claim is None:
                self.cluster.node.remove(pod.name)
            else:
                await self.cluster.unprepare(pod.claim)
        self.admitted.discard(pod)
        await self._pause(SAYS)
        if pod.claim is not None:
            self.cluster.forget(pod.claim)
        self.cluster.server.remove(f"/api/v1/namespaces/default/pods/{pod.name}")
        self.bound.discard(pod)

    async def _started(self, pod: Pod) -> None:
        await self._pause(SAYS)
        path = f"/api/v1/namespaces/default/pods/{pod.name}"
        if path in self.cluster.server.objects:
            self.cluster.server.change(path, lambda one: one["status"].update(startTime="2026-01-01T00:00:00Z"))

    async def _admit(self, pod: Pod) -> None:
        """Admit a pod, or raise why the kubelet fails it (``predicateAdmitHandler`` in pkg/kubelet/lifecycle of 1.37)."""
        if pod.claim is not None:
            self.admitted.add(pod)
            await self.cluster.prepare(pod.claim)
            return
        await self.cluster.node.admit(pod.name)
        given = 1 + sum(one.claim is None for one in self.admitted)
        if len(self.admitted) + 1 > max(self._seen()[0], given):
            self.cluster.node.remove(pod.name)
            raise KubeletError("admit", f"OutOf{GPU}")
        self.admitted.add(pod)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_no_pod_of_a_stream_by_name_fails_while_gpus_move_to_and_fro(node: Node, seed: int) -> None:
    node.simulate({GPU: {"gpus": [{"uuid": f"GPU-{number}"} for number in range(GPUS)]}})
    async with Cluster(node, "1.37") as cluster:
        device_class(cluster)
        await cluster.start_kubelet("1.37")
        cluster.gateway("--dra", "on")
        await cluster.connected()
        await node.until(lambda: cluster.allocatable == GPUS, "the API server to show all")
        stream = Stream(cluster, random.Random(seed))  # noqa: S311 - no secret
        await stream.run(10)
        assert not stream.failed
        by_claim = sum(pod.claim is not None for pod in stream.ran)
        assert min(by_claim, len(stream.ran) - by_claim) > 5
