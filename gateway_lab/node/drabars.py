"""Measures each alone what DRA costs and how soon it is back.

On the whole genuine node:

    python -m gateway_lab.node --kubelet 1.37 -- python -m gateway_lab.node.drabars slices --times 100

``slices``: how long after kubelet.sock a restarted kubelet's node has its ResourceSlices again, and how long it lacked them. ``starts``:
pods by name and with claims by turns, and our part in it. ``roll-on``: gateways that replace each other while pods by name and with
claims come and go. ``cost``: memory and processor time with ``--dra off`` and ``on``, at rest. The last line is JSON, with the
machine's load: what was measured on a busy machine is no bar.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from gateway.leader.machine import Stage
from gateway_lab.bench.footprint import Footprint, footprint
from gateway_lab.node import crossed
from gateway_lab.node.crossed import NEVER, Seen, figures
from gateway_lab.node.dra import EVERY, PATIENCE, POD, DraNode
from gateway_lab.node.installed import DEVICES, GPUS
from gateway_lab.waiting import until

AT_REST, COUNTED = 20.0, 20.0
"""Seconds until a gateway is at rest, and for which its processor time is counted."""
PAUSE: Final = 2.0
"""Seconds between two restarts: slices that vanish again and again are written more slowly (``gateway.dra.publisher``)."""
"""Seconds for which the scheduler leaves a pod alone that it found no node for; it looks at once when there is news after that."""


async def slices(dra: DraNode, times: int) -> dict[str, Any]:
    """Restart the kubelet so often; all are published again so long after kubelet.sock was there."""
    await dra.start("only")
    await dra.published()
    took: list[float] = []
    parts: list[tuple[float, float]] = []
    async with Seen(dra.api) as seen:
        for _ in range(times):
            began = time.time()
            await dra.node.kubelet.restart()
            await dra.node.ready()
            await dra.published()
            there = dra.node.kubelet.socket.stat().st_mtime
            # A kubelet that starts removes them first.
            gone = max(_changes(seen, began, free=False), default=NEVER)
            back = max((at for at in _changes(seen, began, free=True) if at > gone), default=NEVER)
            took.append(back - there)
            parts.append((gone - there, back - gone))
            await asyncio.sleep(PAUSE)
    return {
        "restarts": times,
        "back within 100 ms": sum(one <= 0.1 for one in took),
        "within 100 ms of their removal": sum(after <= 0.1 for _, after in parts),
        "s": figures(took),
        "gone after": figures(one for one, _ in parts),
        "then back after": figures(one for _, one in parts),
        "slow": [(round(a, 3), round(b, 3)) for a, b in parts if a + b > 0.1],
    }


def _changes(seen: Seen, since: float, *, free: bool) -> list[float]:
    return [at for said in seen.shown.history.values() for at, is_free in said if at >= since and is_free is free]


async def starts(dra: DraNode, times: int) -> dict[str, Any]:
    """Start pods by turns, by name and with a claim: from the order to the container's first word."""
    await dra.start("on")
    await dra.allocatable()
    half = [*DEVICES][: GPUS // 2]
    await dra.cross("dra", *half)
    await dra.stand(dict.fromkeys(half, "dra"))
    took: dict[str, list[float]] = {}
    late: list[str] = []
    for number in range(2 * times):
        kind, start = (("by name", dra.named_pod), ("claim", dra.claim_pod))[number % 2]
        name, began = f"p{number}", time.time()
        try:
            await start(name)
            took.setdefault(kind, []).append(crossed.unix(dra.account(name).began) - began)
        except AssertionError as error:  # The kubelet asks again for a claim only after 60 to 90 s.
            late.append(str(error))
        await dra.delete(name)
    prepared = [line["ms"] for line in dra.gateways[-1].lines("claim prepared")]
    middle = {kind: statistics.median(found) for kind, found in took.items()}
    return {
        "s": {kind: figures(found) for kind, found in took.items()},
        "claim / by name": round(middle["claim"] / middle["by name"], 2),
        "Prepare, ms": figures(prepared),
        "within 15 ms": sum(one <= 15 for one in prepared),
        "asked again late": late,
    }


async def roll_on(dra: DraNode, times: int) -> dict[str, Any]:
    """Replace the gateway so often by a newer one, while pods of both APIs come and go; say for how long nobody was registered by name."""
    await dra.start("on")
    await dra.cross("plugin")  # Another measurement may have been here before.
    await dra.stand(dict.fromkeys(DEVICES, "plugin"))
    await dra.allocatable()
    half = [*DEVICES][: GPUS // 2]
    await dra.cross("dra", *half)
    await dra.stand(dict.fromkeys(half, "dra"))
    await dra.published(len(half))
    ran = {"claims": 0, "by name": 0}
    failed: list[str] = []

    async def come_and_go(kind: str) -> None:
        make = {"claims": dra.claiming, "by name": dra.named}[kind]
        for number in range(sys.maxsize):
            name = f"{kind[0]}{number}"
            await dra.create(name, make(name, 1))
            status = await _ended(dra, name)
            ran[kind] += status["phase"] == "Succeeded"
            if status["phase"] == "Failed":
                failed.append(f"{name}: {status.get('reason')}, {status.get('message')}")
            await dra.delete(name)

    everyone = dra.gateways[-1:]
    async with asyncio.TaskGroup() as coming:
        tasks = [coming.create_task(come_and_go(kind)) for kind in ran]
        for _ in range(times):
            everyone.append(await dra.start("on"))
            await asyncio.sleep(1)
            await dra.end(everyone[-2])
        for task in tasks:
            task.cancel()
    gaps = []
    for older, newer in itertools.pairwise(everyone):
        [leaves], comes = older.lines("leader", stage=Stage.YIELDING.value)[-1:], newer.lines("registered")[0]
        gaps.append(crossed.unix(comes["timestamp"]) - crossed.unix(leaves["timestamp"]))
    passed_on = "a call was passed on to the instance of the DRA driver that the kubelet knows now"
    return {
        "rolls": times,
        "pods that ran": ran,
        "failed": failed,
        "registered again after, s": figures(gaps),
        "passed on": sum(len(one.lines(passed_on)) for one in everyone),
        "refused": [line["reason"] for one in everyone for line in one.lines("claim refused")],
    }


async def _ended(dra: DraNode, name: str) -> dict[str, Any]:
    """Give a pod's status when it has ended."""
    found: dict[str, Any] = {}

    async def is_over() -> bool:
        found.update((await dra.api.get(f"{POD}/{name}"))["status"])
        return found.get("phase") in {"Succeeded", "Failed"}

    await until(is_over, 3 * PATIENCE, every=EVERY)
    return found


async def cost(dra: DraNode, times: int) -> dict[str, Any]:
    """Look at a gateway at rest, with ``--dra`` off and on, so often."""
    found: dict[str, list[Footprint]] = {"off": [], "on": []}
    for _ in range(times):
        for kind, seen in found.items():
            one = await dra.start(kind)
            await asyncio.sleep(AT_REST)
            before = footprint(one.pid)
            await asyncio.sleep(COUNTED)
            seen.append(footprint(one.pid).since(before))
            await dra.end(one)
    return {
        kind: {
            "PSS, MiB": figures(one.pss for one in seen),
            "RSS, MiB": figures(one.rss for one in seen),
            f"processor in {COUNTED:g} s, ms": figures(one.cpu for one in seen),
        }
        for kind, seen in found.items()
    }


WHAT: Final[Mapping[str, tuple[Callable[[DraNode, int], Awaitable[dict[str, Any]]], int]]] = {
    "slices": (slices, 100),
    "starts": (starts, 20),
    "roll-on": (roll_on, 20),
    "cost": (cost, 3),
}


async def run(what: str, times: int) -> dict[str, Any]:
    """Measure one thing on this node."""
    async with DraNode.here() as dra, contextlib.AsyncExitStack() as after:
        after.push_async_callback(dra.delete_all)
        return await WHAT[what][0](dra, times)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m gateway_lab.node.drabars",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=WHAT)
    parser.add_argument(
        "--times",
        type=int,
        help="how often (default: " + ", ".join(f"{name} {count}" for name, (_, count) in WHAT.items()) + ")",
    )
    options = parser.parse_args(arguments)
    times = options.times or WHAT[options.what][1]
    before, found = os.getloadavg()[0], asyncio.run(run(options.what, times))
    print(json.dumps({options.what: found, "load before and after": (before, os.getloadavg()[0])}))


if __name__ == "__main__":
    main()
