"""Hops: a node's kubelet is replaced by another version while its gateway runs on and its pods hold devices.

A walk is a path of versions on one node: one socket directory with the kubelets' own checkpoint, one gateway, pods that live
throughout. Each hop of it is observed: what the kubelets' records say, and what the gateway and the new kubelet did. Where a
kubelet can't know the pods of its predecessor they are drained first, as an operator would, and it must then be seen that
it indeed doesn't know them: the checkpoint still names them.

Hops are walked one after another, with nothing beside them, because each measures a gap.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from adapters.levels import minor_version
from gateway_lab.gatewayproc import GatewayError
from gateway_lab.kubelets.kubelet import Demand, Kubelet, KubeletError
from gateway_lab.matrix import witness
from gateway_lab.matrix.record import Hop, PodFact
from gateway_lab.trials.invariants import Holding, holdings
from gateway_lab.trials.scenarios import RESOURCE, BrokenPromiseError, Node, counted, forgets, must, node

JUMPS = (("1.20", "1.24"), ("1.24", "1.28"), ("1.28", "1.32"), ("1.32", "newest"))
"""The jumps over several versions that people make."""
HOP_SECONDS = 60
LOGGED_LINES = 12
_TROUBLE = re.compile(r"^[WEF]\d{4} ")
"""A warning, an error or a fatal error in the kubelet's log."""

_FAILURES = (BrokenPromiseError, GatewayError, KubeletError, TimeoutError)


def walks(versions: Sequence[str]) -> list[tuple[str, ...]]:
    """Give the paths that make each pair of neighbours a hop up and a hop down, and each of ``JUMPS`` that can be made.

    Args:
        versions: minor versions, oldest first.
    """
    if len(versions) < 2:
        return []
    jumps = [(old, versions[-1] if new == "newest" else new) for old, new in JUMPS]
    neighbours = {*itertools.pairwise(versions)}
    possible = [jump for jump in jumps if jump[0] in versions and jump[1] in versions and jump[0] != jump[1]]
    return [tuple(versions), tuple(reversed(versions)), *(jump for jump in possible if jump not in neighbours)]


async def walk(
    path: Sequence[str],
    genuine: Callable[[str], Path | None],
    done: Callable[[Hop], None],
    **setting: Any,
) -> None:
    """Walk a path and hand each hop to ``done``; after one that failed the walk goes on with a fresh node.

    Args:
        path: the kubelets' versions in their order.
        genuine: as for ``scenarios.node``.
        done: takes the record of each hop.
        setting: what else ``scenarios.node`` is to be told.
    """
    at = 0
    while at < len(path) - 1:
        async with node(genuine, **setting) as made:
            whole = True
            while whole and at < len(path) - 1:
                record = await observe(made, path[at], path[at + 1])
                done(record)
                whole = record.status == "passed"
                at += 1


async def observe(node: Node, old: str, new: str) -> Hop:
    """Make one hop, on a node that runs kubelet ``old`` or none yet, and say what was seen."""
    kinds = {"emulated" if node.genuine(version) is None else "genuine" for version in (old, new)}
    hop = _Hop(
        Hop(old=old, new=new, kind="genuine" if kinds == {"genuine"} else "emulated", status="passed"),
    )
    began = time.monotonic()
    mark = 0
    try:
        async with asyncio.timeout(HOP_SECONDS):
            if node.kubelet is None:
                await node.start_kubelet(old)
                await node.start_gateway()
                await node.served()
                await node.run_pods()
                await _late(node)
            mark = node.gateway.seen
            await hop.make(node)
    except _FAILURES as error:
        why = str(error) or f"it took more than {HOP_SECONDS} s"
        hop.note(status="failed", reason=why)
    return msgspec.structs.replace(hop.seen, seconds=time.monotonic() - began, transcript=witness.logs(node, mark))


class _Hop:
    """A hop under way, and what was seen so far."""

    def __init__(self, seen: Hop) -> None:
        self.seen = seen

    def note(self, **facts: Any) -> None:
        self.seen = msgspec.structs.replace(self.seen, **facts)

    async def make(self, node: Node) -> None:
        old, new = self.seen.old, self.seen.new
        mark, before, accepted = node.gateway.seen, node.held, node.accepted
        why = forgets(old, new)
        self.note(api_before=_last(node, "registered", "api"), level_before=_last(node, "allocated", "kubelet"))
        if why:
            await node.drain()
        kubelet = await self._replace(node, new)
        try:
            await self._look(node, kubelet, before, why, mark)
            # Nothing of the node is waited for any more: a Register too many would have come by now, or with the next hop.
            self.note(registers=dict(await kubelet.registers()))
            await node.registers(counted(new, accepted))
        finally:
            self.note(logged=tuple(line for line in kubelet.log().splitlines() if _TROUBLE.match(line))[:LOGGED_LINES])

    async def _replace(self, node: Node, new: str) -> Kubelet:
        """End the old kubelet as an upgrade does, and start the new one with a measurement."""
        await node.the_kubelet.terminate()
        await node.the_kubelet.close()
        kubelet = node.kubelet = await Kubelet.launch(new, node.kubelet_dir, genuine=node.genuine(new))
        gap = await kubelet.start_measured(RESOURCE, node.healthy(), pods=[*node.pods.values()])
        self.note(gap_ms=gap.gap_ms, timer_late_ms=gap.timer_late_ms)
        return kubelet

    async def _look(self, node: Node, kubelet: Kubelet, before: Sequence[Holding], why: str | None, mark: int) -> None:
        line = await node.gateway.wait_for("registered", since=mark)
        mark = node.gateway.seen  # What the gateway says from now on is about this kubelet.
        self.note(api_after=str(line["api"]))
        found = holdings(await kubelet.pods())
        known = [one for one in before if one in found]
        self.note(checkpoint_kept=len(known) == len(before))
        await node.served()
        if why:
            must([f"{one.pod} still holds {', '.join(one.device_ids)}, although {why}" for one in found])
            self.note(forgets=why)
            await node.run_pods()
        else:
            self.note(pods=_pods(before, found))
            await node.check()
            await node.readmit()
            self.note(pods=_pods(before, holdings(await kubelet.pods())))
        await _late(node)
        await node.gateway.wait_for("allocated", since=mark)
        level = _last(node, "allocated", "kubelet", mark)
        self.note(level_after=level)
        must(
            []
            if covers(level, minor_version(kubelet.version))
            else [f"the gateway takes kubelet {kubelet.version} for {level}"]
        )


def covers(span: str, minor: int) -> bool:
    """Tell whether a span of kubelets, such as ``1.26 to 1.28`` or ``1.37 and later``, holds 1.``minor``; '' holds all."""
    ends = [int(number) for number in re.findall(r"1\.(\d+)", span)]
    if not ends:
        return True
    return ends[0] <= minor and ("later" in span or minor <= ends[-1])


def _pods(before: Sequence[Holding], after: Sequence[Holding]) -> tuple[PodFact, ...]:
    now = {one.pod: one.device_ids for one in after}
    return tuple(PodFact(pod=one.pod, before=one.device_ids, after=now.get(one.pod, ())) for one in before)


def _last(node: Node, event: str, field: str, since: int = 0) -> str:
    """Look a field up in the gateway's last line of a kind; '' where there is none."""
    return next((str(line[field]) for line in reversed(node.gateway.lines(event, since)) if field in line), "")


async def _late(node: Node) -> None:
    """Let one more pod have all that is free, for a moment: nobody else's devices may be among them."""
    taken = node.held
    free = node.healthy() - sum(len(one.device_ids) for one in taken)
    late = Demand("late", RESOURCE, free)
    await node.admit(late)
    await node.refuse(Demand("one-too-many", RESOURCE, 1))
    await node.check()
    await node.the_kubelet.remove(late.pod)
    del node.pods[late.pod]
    node.held = taken
