"""Crosses a whole node from the device plugin API to DRA and back, again and again, while its pods come and go.

    python -m gateway_lab.node -- python -m gateway_lab.node.crossings --times 10 --seed 1

Short pods come all the time, by name and with claims, and others hold their GPUs through it. In half of the crossings there and back
the kubelet is restarted in mid-way, by turns as another version; in a quarter the gateway is killed, in a quarter a newer one takes over. With
--undisturbed nothing of that happens, and no pod may fail. All is judged by what the pods' containers themselves could open. With --by-name
all pods ask by name: a DeviceClass has the resource's, so they get GPUs of either API. The last line is the summary, as JSON, also
where a signal cuts it off; the exit status is 1 then, and where a GPU was given twice, a holder was touched, or a pod failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from gateway.wires.control import ControlError
from gateway_lab.node import Node, crossed, pods
from gateway_lab.node.crossed import NEVER, Life, Seen, figures
from gateway_lab.node.dra import POD, DraNode
from gateway_lab.node.installed import DEVICES
from gateway_lab.waiting import cut_off, until

LOOKS: Final = (2, 6)
"""How often a short pod looks at its GPU, twice a second: from, to."""
PACE: Final = (0.3, 0.9)
"""Seconds between two short pods."""
WAITING: Final = 2
"""How many short pods of a kind wait at most: on a node that has crossed over, those of the other kind do."""
MIDWAY: Final = 1.5
"""Seconds after an order within which something happens to the node."""
STAY: Final = (2.0, 4.0)
"""Seconds at either end before the next thing is done."""
ASKED_AGAIN: Final = 150.0
"""Seconds that a crossing or a pod is waited for: a claim whose Prepare failed, because no gateway ran or the API server didn't let the
kubelet read it yet (seen on 1.36), is prepared 60 to 90 s later, and keeps its GPU till then."""
UUIDS: Final[Mapping[str, str]] = {path: uuid for uuid, path in DEVICES.items()}
VERSIONS: Final = ("1.36", "1.37")
"""Kubelets that a restart may put in place."""


class Traffic:
    """The pods: short ones that come by themselves, and those that hold."""

    def __init__(self, dra: DraNode, seen: Seen, chance: random.Random, *, by_name: bool) -> None:
        self._dra, self._seen, self._chance, self._by_name = dra, seen, chance, by_name
        self._ended: set[asyncio.Task[None]] = set()
        self._held: dict[str, pods.Account] = {}
        self.touched: list[str] = []
        """What became of holders that should have kept what they had."""
        seen.over = self._over

    def lives(self) -> list[Life]:
        """All pods that were made so far."""
        return [*self._seen.lives.values()]

    async def stream(self) -> None:
        """Make short pods, for ever."""
        for number in range(sys.maxsize):
            claim = self._chance.random() < 0.5 and not self._by_name
            waiting = sum(one.claim is claim and one.scheduled == NEVER and one.ended == NEVER for one in self.lives())
            if waiting < WAITING:
                await self._make(f"s{number}", self._chance.randint(*LOOKS), claim=claim)
            await asyncio.sleep(self._chance.uniform(*PACE))

    async def _make(self, name: str, looks: int, *, claim: bool) -> None:
        self._seen.lives[name] = Life(name, claim, time.time())
        await self._dra.create(name, (self._dra.claiming if claim else self._dra.named)(name, looks))

    def _over(self, name: str) -> None:
        task = asyncio.ensure_future(self._take_away(name))
        self._ended.add(task)
        task.add_done_callback(self._ended.discard)

    async def _take_away(self, name: str) -> None:
        """Keep what an ended pod wrote, and delete it."""
        await asyncio.to_thread(self._note, name)
        await self._dra.api.delete(f"{POD}/{name}")

    def _note(self, name: str) -> None:
        life, said = self._seen.lives[name], self._dra.account(name)
        if said.began:
            life.began, life.gpus = crossed.unix(said.began), frozenset(UUIDS[one] for one in said.nodes)
            life.opened = life.began, crossed.unix(said.last) if said.last else life.began
        if said.lost:
            self.touched.append(f"{name} lost {said.lost[0]}")

    async def hold(self, name: str, *, claim: bool) -> str:
        """Have a pod that keeps its GPU; give its UUID when its container has it."""
        await self._make(name, pods.FOR_EVER, claim=claim and not self._by_name)
        await until(lambda: bool(self._dra.account(name).nodes), ASKED_AGAIN, every=0.05)
        self._held[name] = self._dra.account(name)
        self._note(name)
        [gpu] = self._seen.lives[name].gpus
        return gpu

    async def release(self, name: str) -> None:
        """End a holder, if it kept what it had; return when it is over."""
        before, now = self._held.pop(name), self._dra.account(name)
        if (before.began, before.nodes) != (now.began, now.nodes):
            self.touched.append(
                f"{name} began at {before.began} with {[*before.nodes]}, then {now.began} with {[*now.nodes]}"
            )
        self._note(name)
        await self._dra.delete(name)

    async def settle(self) -> None:
        """Keep what is still to be kept, and end what is there."""
        await asyncio.gather(*self._ended)
        self.keep()
        for life in self.lives():  # What is deleted before it ran has not failed.
            life.ended = min(life.ended, time.time())
        await self._dra.delete_all()

    def keep(self) -> None:
        """Keep what pods that have not ended wrote."""
        for life in self.lives():
            if life.scheduled != NEVER and (life.name in self._held or life.began == NEVER):
                self._note(life.name)


class Crossings:
    """Crossings there and back."""

    def __init__(
        self, dra: DraNode, seen: Seen, chance: random.Random, kubelets: Sequence[str], *, by_name: bool
    ) -> None:
        """``kubelets`` are the versions that a restart may put in place; with none of them nothing happens to the node."""
        self._dra, self._chance, self._seen, self._by_name = dra, chance, seen, by_name
        self._kubelets = kubelets
        self.traffic = Traffic(dra, seen, chance, by_name=by_name)
        self.orders: list[tuple[float, float, str, str]] = []
        """When it was ordered, until when it was waited for, to which side, and what happened meanwhile."""
        self._restarts: list[tuple[float, float]] = []
        """From when to when kubelets were restarted."""
        self._gaps: list[tuple[float, float]] = []
        """From when to when no gateway served, after one was killed."""
        self._crashes = 0
        """How often a kubelet ended by itself."""
        self._restarting = asyncio.Lock()

    async def run(self, times: int) -> None:
        """Cross so often."""
        streaming, keeping = asyncio.ensure_future(self.traffic.stream()), asyncio.ensure_future(self._keep_kubelet())
        try:
            for number in range(times):
                began = time.monotonic()
                happened = await self._once(number)
                print(
                    f"{number + 1} of {times}: {', '.join(happened) or 'nothing'} in mid-way, {time.monotonic() - began:.1f} s",
                    flush=True,
                )
                if streaming.done():
                    await streaming
        finally:
            for one in (streaming, keeping):
                one.cancel()
            await asyncio.gather(streaming, keeping, return_exceptions=True)
        await self.traffic.settle()

    async def _once(self, number: int) -> list[str]:
        """Go there and back: one holder came before, one comes there; each ends there or here."""
        chance, traffic = self._chance, self.traffic
        happens = ["kubelet"] if number % 2 else []
        happens += ["gateway"] if number % 4 == 1 + number // 4 % 2 else []
        happens += ["roll"] if number % 4 == 2 - number // 4 % 2 else []
        happens = happens if self._kubelets else []
        there = chance.random() < 0.5
        named, claiming = f"n{number}", f"c{number}"
        kept = {named: await traffic.hold(named, claim=False)}
        await self._cross("dra", happens if there else (), kept.values())
        kept[claiming] = await traffic.hold(claiming, claim=True)
        await asyncio.sleep(chance.uniform(*STAY))
        if chance.random() < 0.5:
            await traffic.release(named)
            await self._dra.stand({kept.pop(named): "dra"})
        await self._cross("plugin", () if there else happens, [kept[claiming]])
        await asyncio.sleep(chance.uniform(*STAY))
        for name in kept:
            await traffic.release(name)
        await self._dra.stand(dict.fromkeys(DEVICES, "plugin"))
        return happens

    async def _cross(self, to: str, happens: Sequence[str], kept: Iterable[str]) -> None:
        """Order all GPUs to a side, and wait for those that nobody keeps."""
        began = time.time()
        ordering = asyncio.ensure_future(self._dra.cross(to))
        does = {"kubelet": self._restart_kubelet, "gateway": self._kill_gateway, "roll": self._roll}
        for what in happens:
            await asyncio.sleep(self._chance.uniform(0, MIDWAY / len(happens)))
            await does[what]()
        try:
            await ordering
        except ControlError:  # It was killed, or made room, before it had answered.
            await self._dra.cross(to)
        await self._dra.stand(dict.fromkeys(DEVICES.keys() - set(kept), to), ASKED_AGAIN)
        self.orders.append((began, time.time(), to, "+".join(happens)))

    async def _restart_kubelet(self) -> None:
        node = self._dra.node
        async with self._restarting:
            began = time.time()
            await node.kubelet.restart(version=self._chance.choice(self._kubelets))
            await node.ready()
            self._restarts.append((began, time.time()))

    async def _keep_kubelet(self) -> None:
        """Start a kubelet anew that crashed, as a host's systemd does."""
        while True:
            await asyncio.sleep(1)
            async with self._restarting:
                if not self._dra.node.kubelet.alive:
                    began = time.time()
                    self._crashes += 1
                    await self._dra.node.kubelet.start()
                    await self._dra.node.ready()
                    self._restarts.append((began, time.time()))

    async def _kill_gateway(self) -> None:
        began = time.time()
        await self._dra.kill(self._dra.gateways[-1])
        await self._dra.start("on")
        self._gaps.append((began, time.time()))

    async def _roll(self) -> None:
        older = self._dra.gateways[-1]
        await self._dra.start("on")
        await self._dra.end(older)

    def summary(self) -> dict[str, Any]:
        """Say what was seen."""
        lives, moves = self.traffic.lives(), dict.fromkeys(DEVICES, ()) | crossed.sides(_log(self._dra.node))
        now, shown = time.time(), self._seen.shown
        took: dict[str, list[float]] = {}
        for ordered, over, to, happened in self.orders:
            for gpu in DEVICES:
                at = crossed.arrival(gpu, to, ordered, moves, shown)
                if at > over + 1:
                    continue
                ended = crossed.last_end(gpu, ordered, at, lives)
                kind = "something happened" if happened else "it was free" if ended == NEVER else "its pod ended"
                took.setdefault(f"to {to}, {kind}", []).append(at - (ordered if ended == NEVER else ended))
                first = crossed.first_after(gpu, at, lives, claim=to == "dra" and not self._by_name)
                if first is not None and not happened:
                    took.setdefault(f"then a waiting pod is scheduled ({to})", []).append(first.scheduled - at)
                    took.setdefault(f"then a waiting pod runs ({to})", []).append(first.began - at)
        refused = crossed.unprepared((self._dra.node.logs / "kubelet.log").read_text(errors="replace"))
        waits = {one.name: crossed.waited(one, lives, moves, now, either=self._by_name) for one in lives}
        apart = {name: f"{why}: {waits[name]:.1f} s" for name, why in refused.items() if name in waits}
        ran = [one for one in lives if one.began != NEVER]
        return {
            "there and back": len(self.orders) // 2,
            "disturbed": [what for *_, what in self.orders if what],
            "pods that ran": {
                "by name": sum(not one.claim for one in ran),
                "claims": sum(one.claim for one in ran),
            },
            "kubelets that crashed": self._crashes,
            "given twice": crossed.doubly(lives),
            "holders touched": self.traffic.touched,
            "failed": [
                f"{one.name}: {one.failed} ({self._meanwhile(one) or 'nothing happened'})"
                for one in lives
                if one.failed
            ],
            "longest waits beside a free GPU": [
                f"{one.name}: {waits[one.name]:.1f} s ({one.scheduled - one.created:.1f} s until it was given to the node, which ran it "
                f"{one.began - one.scheduled:.1f} s later)"
                for one in sorted(lives, key=lambda one: -waits[one.name])
                if one.name not in apart
            ][:5],
            "Prepare failed at first, and waits": apart,
            "crossing, s": {kind: figures(found) for kind, found in sorted(took.items())},
        }

    def _meanwhile(self, life: Life) -> str:
        return crossed.meanwhile(life.scheduled, life.ended, self._restarts, self._gaps)


def _log(node: Node) -> list[str]:
    return (node.logs / "gateway.log").read_text(errors="replace").splitlines()


async def run(times: int, seed: int, kubelets: Sequence[str], *, by_name: bool) -> dict[str, Any]:
    """Cross so often on this node, and say what was seen."""
    async with DraNode.here() as dra, dra.by_name() if by_name else contextlib.nullcontext():
        await dra.start("on")
        async with Seen(dra.api) as seen:
            await dra.allocatable()
            crossings = Crossings(dra, seen, random.Random(seed), kubelets, by_name=by_name)
            if (broke := await cut_off(crossings.run(times))) is None:
                return crossings.summary()
            crossings.traffic.keep()
            return {"broke off": repr(broke), **crossings.summary()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m gateway_lab.node.crossings",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--times", type=int, default=50, help="how often there and back (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of what happens by chance (default: %(default)s)")
    parser.add_argument("--by-name", action="store_true", help="all pods ask by name, whichever API gives them GPUs")
    parser.add_argument("--undisturbed", action="store_true", help="nothing happens to the node meanwhile")
    parser.add_argument(
        "--kubelet",
        choices=VERSIONS,
        action="append",
        help="which a restart puts in place (default: by turns all of these)",
    )
    options = parser.parse_args(arguments)
    kubelets = () if options.undisturbed else options.kubelet or VERSIONS
    found = asyncio.run(run(options.times, options.seed, kubelets, by_name=options.by_name))
    print(json.dumps(found))
    return 1 if any(found.get(what) for what in ("broke off", "given twice", "holders touched", "failed")) else 0


if __name__ == "__main__":
    sys.exit(main())
