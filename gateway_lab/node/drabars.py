"""Measures each alone what DRA costs and how soon it is back.

On the whole genuine node:

    python -m gateway_lab.node --kubelet 1.37 -- python -m gateway_lab.node.drabars slices --times 100

``slices``: how long after kubelet.sock a restarted kubelet's node has its ResourceSlices again, and how long it lacked them. ``starts``:
pods by name and with claims by turns, and our part in it. ``cross``: a free GPU crosses there and back, while a pod with a claim waits
for it. ``roll``: gateways that replace each other while pods with claims come and go; ``roll-on``: those of both
APIs, with pods by name, too. ``away``: the API server goes away (``--minutes``), a GPU becomes unhealthy meanwhile, and all is right again so long
after its return. ``reboot``: the node loses power, and pods have their GPUs again. ``cost``: memory and processor time with ``--dra off``
and ``on``, at rest. The last line is JSON, with the machine's load: what was measured on a busy machine is no bar.
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
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from gateway.kubelet.presence import WAITING
from gateway.leader.machine import Stage
from gateway_lab.bench.footprint import Footprint, footprint
from gateway_lab.gatewayproc import GatewayProcess
from gateway_lab.node import crossed, pods
from gateway_lab.node.crossed import NEVER, Seen, figures
from gateway_lab.node.dra import EVERY, PATIENCE, POD, RESOURCES, DraNode
from gateway_lab.node.installed import DEVICES, GPUS, write_profile
from gateway_lab.trials.scenarios import RESOURCE
from gateway_lab.waiting import until

AT_REST, COUNTED = 20.0, 20.0
"""Seconds until a gateway is at rest, and for which its processor time is counted."""
PAUSE: Final = 2.0
"""Seconds between two restarts: slices that vanish again and again are written more slowly (``gateway.dra.publisher``)."""
BACKS_OFF: Final = 1.5
"""Seconds for which the scheduler leaves a pod alone that it found no node for; it looks at once when there is news after that."""
AWAY: Final = "away"
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


async def cross(dra: DraNode, times: int) -> dict[str, Any]:
    """Have a free GPU cross there and back so often; a pod with a claim waits for it, and is gone before the GPU goes back."""
    await dra.start("on")
    await dra.cross("plugin")  # Another measurement may have been here before.
    await dra.stand(dict.fromkeys(DEVICES, "plugin"))
    gpu = next(iter(DEVICES))
    took: dict[str, list[float]] = {"to DRA": [], "then its pod runs": [], "to the device plugin API": []}
    async with Seen(dra.api) as seen:
        for number in range(times):
            await dra.allocatable()
            await dra.create(name := f"x{number}", dra.claiming(name))
            await dra.unschedulable(name)
            await asyncio.sleep(BACKS_OFF)
            ordered = time.time()
            await dra.cross("dra", gpu)
            await until(lambda: bool(dra.account(name).nodes), PATIENCE)
            offered = seen.shown.since(gpu, ordered)
            took["to DRA"].append(offered - ordered)
            took["then its pod runs"].append(crossed.unix(dra.account(name).began) - offered)
            await dra.delete(name)
            await until(partial(_no_claims, dra), PATIENCE, every=EVERY)
            ordered = time.time()
            await dra.cross("plugin", gpu)
            await until(partial(_shown, dra, GPUS), PATIENCE, every=EVERY)
            took["to the device plugin API"].append(time.time() - ordered)
    return {"there and back": times, "s": {what: figures(found) for what, found in took.items()}}


async def _no_claims(dra: DraNode) -> bool:
    return not (await dra.api.get(f"{RESOURCES}/namespaces/{pods.NAMESPACE}/resourceclaims"))["items"]


async def _shown(dra: DraNode, count: int) -> bool:
    """Whether the scheduler may give so many GPUs by name."""
    told = (await dra.api.get(f"/api/v1/nodes/{dra.node.name}"))["status"]["allocatable"]
    return bool(told.get(RESOURCE) == str(count))


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

    everyone = await _rolled(dra, "only", times, [come_and_go(who) for who in range(2)])
    return {"rolls": times, "pods that ran": ran, **await _trouble(dra, everyone)}


async def roll_on(dra: DraNode, times: int) -> dict[str, Any]:
    """Do so with both APIs; say for how long nobody was registered by name."""
    await _share(dra)
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

    everyone = await _rolled(dra, "on", times, [come_and_go(kind) for kind in ran])
    gaps = []
    for older, newer in itertools.pairwise(everyone):
        [leaves], comes = older.lines("leader", stage=Stage.YIELDING.value)[-1:], newer.lines("registered")[0]
        gaps.append(crossed.unix(comes["timestamp"]) - crossed.unix(leaves["timestamp"]))
    return {
        "rolls": times,
        "pods that ran": ran,
        "failed": failed,
        "registered again after, s": figures(gaps),
        "passed on": sum(
            len(one.lines("a call was passed on to the instance of the DRA driver that the kubelet knows now"))
            for one in everyone
        ),
        **await _trouble(dra, everyone),
    }


async def _rolled(
    dra: DraNode, kind: str, times: int, comers: Sequence[Coroutine[Any, Any, None]]
) -> list[GatewayProcess]:
    """Roll while pods come and go; give the gateways, the one that was there first."""
    coming = [asyncio.ensure_future(one) for one in comers]
    everyone = dra.gateways[-1:]
    try:
        for _ in range(times):
            everyone.append(await dra.start(kind))
            await asyncio.sleep(1)
            await dra.end(everyone[-2])
            if ended := [one for one in coming if one.done()]:
                await asyncio.gather(*ended)
    finally:
        for one in coming:
            one.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
    return everyone


async def _trouble(dra: DraNode, gateways: Iterable[GatewayProcess]) -> dict[str, list[str]]:
    """Say what the gateways refused, and what the kubelet says of claims that weren't prepared."""
    found = await dra.api.get("/api/v1/namespaces/default/events")
    return {
        "refused": [line["reason"] for one in gateways for line in one.lines("claim refused")],
        "the kubelet says": [one["message"][:300] for one in found["items"] if one.get("reason") == FAILED],
    }


async def _share(dra: DraNode) -> None:
    """Have half of the GPUs at either API."""
    await dra.start("on")
    await dra.cross("plugin")  # Another measurement may have been here before.
    await dra.stand(dict.fromkeys(DEVICES, "plugin"))
    await dra.allocatable()
    half = [*DEVICES][: GPUS // 2]
    await dra.cross("dra", *half)
    await dra.stand(dict.fromkeys(half, "dra"))
    await dra.published(len(half))


async def _ended(dra: DraNode, name: str) -> dict[str, Any]:
    """Give a pod's status when it has ended."""
    found: dict[str, Any] = {}

    async def is_over() -> bool:
        found.update((await dra.api.get(f"{POD}/{name}"))["status"])
        return found.get("phase") in {"Succeeded", "Failed"}

    await until(is_over, 3 * PATIENCE, every=EVERY)
    return found


async def away(dra: DraNode, minutes: float) -> dict[str, Any]:
    """Take the API server away for so long."""
    await _share(dra)
    await dra.claim_pod("claim")
    await dra.named_pod("named")
    ill = 0
    await dra.node.apiserver.stop()
    await asyncio.sleep(60 * minutes)
    write_profile(dra.node, ill={ill})
    last = {name: dra.account(name) for name in ("claim", "named")}
    await dra.node.apiserver.start()
    back = time.monotonic()

    async def is_right() -> bool:
        return await dra.tainted() == {f"gpu-{ill}"}

    await until(is_right, PATIENCE, every=EVERY)
    right = time.monotonic() - back
    now = {name: dra.account(name) for name in last}
    return {
        "away, s": 60 * minutes,
        "slices right after, s": round(right, 2),
        "touched": [name for name, one in now.items() if one.lost or one.began != last[name].began],
        "refused": [line["reason"] for line in dra.gateways[-1].lines("claim refused")],
    }


async def reboot(dra: DraNode, times: int) -> dict[str, Any]:
    """Cut the node's power so often; the gateway is there before the kubelet, as a host's service is."""
    await _share(dra)
    nodes = {"claim": "", "named": await dra.named_pod("named")}
    await dra.claim_pod("claim")
    [nodes["claim"]] = dra.account("claim").nodes
    kept: dict[str, int] = dict.fromkeys(nodes, 0)
    took: dict[str, list[float]] = {name: [] for name in nodes}
    others: list[str] = []
    for number in range(times):
        await dra.kill(dra.gateways[-1])
        await dra.node.power_off()
        booted = time.time()
        starting = asyncio.ensure_future(dra.start("on"))
        await until(lambda: bool(dra.gateways), PATIENCE)
        await dra.gateways[-1].wait_for(WAITING, seconds=PATIENCE)
        await dra.node.power_on()
        await starting
        for name, node in [*nodes.items()]:
            try:
                await until(partial(_runs_since, dra, name, booted), 3 * PATIENCE, every=EVERY)
            except TimeoutError:
                others.append(f"boot {number}: {name}: {(await dra.api.get(f'{POD}/{name}'))['status'].get('message')}")
                del nodes[name]  # It is over: other boots tell nothing of it.
                continue
            now = dra.account(name)
            kept[name] += now.nodes == {node}
            took[name].append(time.time() - booted)
            if now.nodes != {node}:
                others.append(f"boot {number}: {name} had {node}, and now {[*now.nodes]}")
        print(f"{number + 1} of {times}: {kept}", flush=True)
    return {"boots": times, "same GPU": kept, "others": others, "s": {name: figures(one) for name, one in took.items()}}


def _runs_since(dra: DraNode, name: str, moment: float) -> bool:
    last = dra.account(name).last
    return bool(last) and crossed.unix(last) > moment


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
    "cross": (cross, 20),
    "roll": (roll, 20),
    "roll-on": (roll_on, 20),
    "reboot": (reboot, 10),
    "cost": (cost, 3),
}


async def run(what: str, times: int, minutes: float) -> dict[str, Any]:
    """Measure one thing on this node."""
    async with DraNode.here() as dra, contextlib.AsyncExitStack() as after:
        after.push_async_callback(dra.delete_all)
        return await (away(dra, minutes) if what == AWAY else WHAT[what][0](dra, times))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m gateway_lab.node.drabars",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=[*WHAT, AWAY])
    parser.add_argument(
        "--times",
        type=int,
        help="how often (default: " + ", ".join(f"{name} {count}" for name, (_, count) in WHAT.items()) + ")",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="for how long the API server is away (default: 10)")
    options = parser.parse_args(arguments)
    times = options.times or WHAT.get(options.what, (None, 1))[1]
    before, found = os.getloadavg()[0], asyncio.run(run(options.what, times, options.minutes))
    print(json.dumps({options.what: found, "load before and after": (before, os.getloadavg()[0])}))


if __name__ == "__main__":
    main()
