"""Measures each alone what DRA costs and how soon it is back.

On the whole genuine node:

    python -m gateway.lab.node --kubelet 1.37 -- python -m gateway.lab.node.drabars slices --times 100

``slices``: how long after kubelet.sock a restarted kubelet's node has its ResourceSlices again. ``starts``: pods by name and with
claims by turns, and our part in it. ``roll``: gateways that replace each other while pods with claims come and go. ``cost``: memory and
processor time with ``--dra off`` and ``on``, at rest. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from gateway.lab.bench.footprint import Footprint, footprint
from gateway.lab.gatewayproc import GatewayProcess
from gateway.lab.node import crossed
from gateway.lab.node.crossed import NEVER, Seen, figures
from gateway.lab.node.dra import DraNode
from gateway.lab.node.installed import DEVICES, GPUS

AT_REST, COUNTED = 20.0, 20.0
"""Seconds until a gateway is at rest, and for which its processor time is counted."""
PAUSE: Final = 2.0
"""Seconds between two restarts: slices that vanish again and again are written more slowly (``gateway.dra.publisher``)."""
FAILED: Final = "FailedPrepareDynamicResources"


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
    for number in range(2 * times):
        kind, start = (("by name", dra.named_pod), ("claim", dra.claim_pod))[number % 2]
        name, began = f"p{number}", time.time()
        await start(name)
        took.setdefault(kind, []).append(crossed.unix(dra.account(name).began) - began)
        await dra.delete(name)
    prepared = [line["ms"] for line in dra.gateways[-1].lines("claim prepared")]
    middle = {kind: statistics.median(found) for kind, found in took.items()}
    return {
        "s": {kind: figures(found) for kind, found in took.items()},
        "claim / by name": round(middle["claim"] / middle["by name"], 2),
        "Prepare, ms": figures(prepared),
    }


async def roll(dra: DraNode, times: int) -> dict[str, Any]:
    """Replace the gateway so often by a newer one, while pods with claims come and go."""
    await dra.start()
    await dra.published()
    ran = 0

    async def come_and_go(who: int) -> None:
        nonlocal ran
        for number in range(sys.maxsize):
            name = f"r{who}-{number}"
            await dra.claim_pod(name)
            ran += 1
            await dra.delete(name)

    coming = [asyncio.ensure_future(come_and_go(who)) for who in range(2)]
    everyone: list[GatewayProcess] = [*dra.gateways]
    try:
        for _ in range(times):
            elder = dra.gateways[-1]
            everyone.append(await dra.start())
            await asyncio.sleep(1)
            await dra.end(elder)
            if ended := [one for one in coming if one.done()]:
                await asyncio.gather(*ended)
    finally:
        for one in coming:
            one.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
    found = await dra.api.get("/api/v1/namespaces/default/events")
    return {
        "rolls": times,
        "pods that ran": ran,
        "refused": [line["reason"] for one in everyone for line in one.lines("claim refused")],
        "the kubelet says": [one["message"][:300] for one in found["items"] if one.get("reason") == FAILED],
    }


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
    "roll": (roll, 20),
    "cost": (cost, 3),
}


async def run(what: str, times: int) -> dict[str, Any]:
    """Measure one thing on this node."""
    async with DraNode.here() as dra:
        return await WHAT[what][0](dra, times)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m gateway.lab.node.drabars",
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
    print(json.dumps({options.what: asyncio.run(run(options.what, times))}))


if __name__ == "__main__":
    main()
