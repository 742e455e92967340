"""Kills the gateway that leads of the two in a pod (a standby is a second container), again and again, and has pods come then.

    python -m gateway_lab.node -- python -m gateway_lab.node.kills --times 50

The images are those of ``make e2e-made``. For how long the kubelet's records were short is told by its own log, to the microsecond (its
pod-resources API, which may be asked 100 times a second at most, must agree in the end); what the API server saw, by a watch of the Node.
On a real cluster the control plane is on other machines: it and this command have one processor here, and the node (kubelet, containerd,
gateway, pods) has the others.
A pod that the kubelet admits while its records are short, or while it still asks the one that was killed, is refused by the kubelet.
A kubelet starts a container that ended again and again later and later: after four kills the DaemonSet is rolled to another image, and the
next ones meet new containers. The exit status is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from gateway.kubelet.records import look
from gateway.leader.machine import Stage
from gateway_lab.bench.measure import Report, describe, document, line, others, spread
from gateway_lab.node import Node, pods, processors
from gateway_lab.node.api import Api, Object
from gateway_lab.node.continuity import IMAGE, ROLLED
from gateway_lab.node.installed import DaemonSet, write_profile
from gateway_lab.node.stage import POD
from gateway_lab.node.watch import NodeSeen, PodSeen, Recorder, drops
from gateway_lab.trials.scenarios import RESOURCE, device_ids
from gateway_lab.waiting import cut_off, until

GPUS: Final = 8
DEVICES: Final[Mapping[str, str]] = {
    uuid: f"/dev/nvidia{index}" for index, uuid in enumerate(device_ids({RESOURCE: GPUS})[RESOURCE])
}
KILLS: Final = 4
"""Of one pod, two of each container: a kubelet starts it again at once, then after 10 s, and after twice as long each time."""
PYTHON: Final = "/usr/bin/python3.13"
"""The image's interpreter."""
MEDIAN_MS: Final = 30.0
WORST_MS: Final = 100.0
PATIENCE: Final = 60.0
MOMENTS: Final = (0.0, 0.1, 0.5)
"""Seconds after a kill at which a pod comes. The first one comes while nobody serves, and may be refused."""
_EVERY: Final = 0.05
_CHANGE: Final = re.compile(
    r"I(?P<time>\d{4} [\d:.]+) .*\"(?:Mark all resources Unhealthy|Processed device updates) for resource\" "
    rf'resourceName="{re.escape(RESOURCE)}"(?: totalCount=\d+ healthyCount=(?P<healthy>\d+))?'
)
_CAME: Final = re.compile(r'I(?P<time>\d{4} [\d:.]+) .*"SyncLoop ADD" source="api" pods=\["default/(?P<pod>[^"]+)"\]')
_REGISTERED: Final = f'"Got registration request from device plugin with resource" resourceName="{RESOURCE}"'


SLOW: Final = """
import asyncio
from devices.gpu.simulated import backend
watch = backend.SimulatedBackend.watch
async def slowly(self):
    await asyncio.sleep(2)
    async for sight in watch(self):
        yield sight
backend.SimulatedBackend.watch = slowly
from gateway.cli.main import gateway
gateway()
"""
"""A program: the gateway with a backend whose first look takes two seconds, as one that waits for a driver."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: from when to when it was looked at (CLOCK_MONOTONIC, ns)."""

    began_ns: int
    ended_ns: int
    failed: Mapping[float, str]
    """Why pods of that second failed, by the moment at which they came; the others ran."""
    changes: int = 1
    """How often a gateway began to lead, until the killed one was there again."""
    way_ms: float = 0.0
    """For how long the pod that came with the kill was on its way to the kubelet."""


def records(log: str, now: datetime, offset_ns: int) -> Iterator[NodeSeen]:
    """Give how many GPUs the kubelet's records had, by lines of its log, which have UTC and no year.

    Args:
        log: the lines.
        now: of the year that is meant.
        offset_ns: what makes unix time another clock's.
    """
    for found in _CHANGE.finditer(log):
        counts = {RESOURCE: int(found["healthy"] or 0)}
        yield NodeSeen(_at(found["time"], now, offset_ns), counts, counts, "", "")


def came(log: str, pod: str, now: datetime, offset_ns: int) -> int | None:
    """Say when the kubelet heard of a pod of the default namespace, by its log as ``records`` reads it; None: it didn't."""
    return next((_at(one["time"], now, offset_ns) for one in _CAME.finditer(log) if one["pod"] == pod), None)


def _at(time: str, now: datetime, offset_ns: int) -> int:
    when = datetime.strptime(f"{now.year} {time}", "%Y %m%d %H:%M:%S.%f").replace(tzinfo=UTC)
    return round(when.timestamp() * 1e6) * 1000 + offset_ns


def short_ms(history: Sequence[NodeSeen], kill: Kill) -> float:
    """Say for how long fewer GPUs were allocatable after a kill, in ms; infinite: they never were all again."""
    found = drops(history, RESOURCE, GPUS)
    return sum((one.ms for one in found if kill.began_ns <= one.began_ns < kill.ended_ns), 0.0)


def judge(
    times: int,
    kills: Sequence[Kill],
    recorded: Sequence[NodeSeen],
    shown: Sequence[NodeSeen],
) -> Report:
    """Hold what was seen after each kill to the bars.

    Args:
        times: how many kills there should be.
        kills: those that there were.
        recorded: what the kubelet's records had.
        shown: what the API server had.
    """
    report = Report()
    report.bar("kills", len(kills), times, f"of {times}", exact=True)
    if not kills:
        return report
    short = [short_ms(recorded, one) for one in kills]
    sums = spread(short)
    report.keep("records short of GPUs (ms)", "a standby in a pod", short)
    report.bar("the kubelet's records short of GPUs: median", sums["median"], MEDIAN_MS, "ms", line(sums))
    report.bar("the kubelet's records short of GPUs: worst", sums["max"], WORST_MS, "ms")
    seen = sum(short_ms(shown, one) > 0 for one in kills)
    report.bar("kills that the API server saw", seen, 0, f"of {len(kills)}", exact=True)
    changed = Counter(one.changes for one in kills)
    report.bar("kills with just one change of the leader", changed[1], len(kills), "", others(changed), exact=True)
    failed = Counter(moment for one in kills for moment in one.failed)
    expected = len(kills) * len(MOMENTS[1:])
    ran = expected - sum(failed[one] for one in MOMENTS[1:])
    note = ", ".join(f"{failed[one]} failed that came after {one:g} s" for one in sorted(failed))
    report.bar("pods that came later and ran", ran, expected, f"of {expected}", note, exact=True)
    report.figures["ms from a kill until the kubelet knew of the pod that came with it"] = spread(
        [one.way_ms for one in kills]
    )
    report.figures["why pods failed"] = dict(Counter(why for one in kills for why in one.failed.values()))
    report.figures["drops at the API server in all"] = len(drops(shown, RESOURCE, GPUS))
    return report


class Two(DaemonSet):
    """The DaemonSet with the component ``standby``: a second container with the same arguments, and ports of its own."""

    components = ("standby",)

    def __init__(self, node: Node, api: Api, seen: Recorder, *, slow_look: bool) -> None:
        super().__init__(node, api, seen, IMAGE)
        write_profile(node, devices=DEVICES)
        self._slow_look = slow_look

    def _fitted(self, wanted: dict[str, Any]) -> Object:
        fitted = super()._fitted(wanted)
        if fitted["kind"] == "DaemonSet" and self._slow_look:
            for container in fitted["spec"]["template"]["spec"]["containers"]:
                container["command"] = [PYTHON, "-P", "-c", SLOW]
        return fitted

    async def change(self) -> None:
        """Have a new pod, which takes over from this one: roll to the other image."""
        await self.roll(ROLLED if self._image == IMAGE else IMAGE)

    async def ready(self) -> int:
        """Wait until one gateway leads and the other one stands by; give the process that leads."""
        leads = 0

        async def both() -> bool:
            nonlocal leads
            if [pod.runs and not pod.ending for pod in self._pods(self._seen)] != [True]:
                return False
            [pod] = self._pods(self._seen)
            tasks = (line.split() for line in (await self._node.ctr("tasks", "ls")).splitlines())
            pids = {name: pid for name, pid, *_ in tasks}
            found = {
                stage(self._said(pod, name)): pids.get(one.id.removeprefix("containerd://"))
                for name, one in pod.containers.items()
            }
            if found.keys() != {Stage.LEADING.value, Stage.STANDBY.value} or None in found.values():
                return False
            leads = int(found[Stage.LEADING.value] or 0)
            return True

        await until(both, PATIENCE, every=_EVERY)
        return leads

    def took(self, since: datetime) -> int:
        """Count how often a gateway of the pod began to lead."""
        [pod] = self._pods(self._seen)
        return sum(took(text, since) for name in pod.containers for text in self._logs(pod, name))

    def _said(self, pod: PodSeen, container: str) -> str:
        return next(reversed(self._logs(pod, container)), "")

    def _logs(self, pod: PodSeen, container: str) -> list[str]:
        """Read a container's logs, the newest last."""
        folder = self._node.root / "var/log/pods" / f"{pod.namespace}_{pod.name}_{pod.uid}" / container
        return [path.read_text(errors="replace") for path in sorted(folder.glob("*.log"), key=lambda it: int(it.stem))]


def stage(said: str) -> str:
    """Give the last stage that a gateway's log in a container tells; the runtime puts three words before each line."""
    return next((str(found["stage"]) for _, found in reversed([*_leading(said)])), "")


def took(said: str, since: datetime) -> int:
    """Count how often a gateway began to lead since then."""
    return sum(found["why"] == "ListsReady" and at >= since for at, found in _leading(said))


def _leading(said: str) -> Iterator[tuple[datetime, Mapping[str, Any]]]:
    """Give what a log tells of who leads, with the runtime's time (UTC)."""
    for told in said.rpartition("\n")[0].splitlines():
        at, _, _, words = told.split(" ", 3)
        if '"leader"' in words and (found := json.loads(words))["event"] == "leader":
            yield datetime.fromisoformat(f"{at[:26].rstrip('Z')}+00:00"), found


class Killing:
    """The kills on a node."""

    def __init__(self, node: Node, api: Api, seen: Recorder, two: Two) -> None:
        self._node, self._api, self._seen, self._two = node, api, seen, two
        self._processors = os.sched_getaffinity(0)
        self._log = node.logs / "kubelet.log"
        self._offset_ns = time.monotonic_ns() - time.time_ns()
        self.kills: list[Kill] = []
        """What was done so far."""
        self.parted = ""
        """Who has which processor."""

    async def run(self, times: int) -> None:
        """Kill so often, each pod's as often as may be."""
        for number in range(times):
            if number and number % KILLS == 0:
                await self._two.change()
            one = await self._once(f"k{number}")
            self.kills.append(one)
            took = f"short of GPUs for {short_ms(self.recorded(), one):.1f} ms, the first pod came after {one.way_ms:.1f} ms"
            print(f"{number + 1} of {times}: {took}; pods that failed: {dict(one.failed) or 'none'}", flush=True)

    def recorded(self, since: int = 0) -> list[NodeSeen]:
        """Give what the kubelet's log tells of its records, from a byte on."""
        return [*records(self._told(since), datetime.now(UTC), self._offset_ns)]

    def _told(self, since: int) -> str:
        with self._log.open("rb") as file:
            file.seek(since)
            return file.read().decode(errors="replace")

    async def _once(self, name: str) -> Kill:
        """Kill who leads while pods come; return when each has run or failed and is gone, and all is as before."""
        leads, mark = await self._two.ready(), self._log.stat().st_size
        self.parted = processors.part(self._node, self._processors)
        began, at = time.monotonic_ns(), datetime.now(UTC)
        os.kill(leads, signal.SIGKILL)
        whys = await asyncio.gather(*(self._come(f"{name}-{number}", after) for number, after in enumerate(MOMENTS)))
        await until(lambda: self._back(mark), PATIENCE, every=_EVERY)
        await until(self._agrees, PATIENCE, every=_EVERY)
        names = {f"{name}-{number}" for number in range(len(MOMENTS))}
        await self._seen.until(
            lambda seen: names.isdisjoint(pod.name for pod in seen.pods.values()), "the pods to be gone", PATIENCE
        )
        heard = came(self._told(mark), f"{name}-0", datetime.now(UTC), self._offset_ns)
        way_ms = math.nan if heard is None else (heard - began) / 1e6
        failed = {after: why for after, why in zip(MOMENTS, whys, strict=True) if why}
        ended = time.monotonic_ns()
        await self._two.ready()
        return Kill(began, ended, failed, self._two.took(at), way_ms)

    async def _come(self, name: str, after: float) -> str:
        """Have a pod after so many seconds, for a moment; say why it failed, or nothing."""
        await asyncio.sleep(after)
        await self._api.create(POD, pods.gpu_pod(name))
        await self._seen.until(
            lambda seen: any(pod.runs or pod.phase == "Failed" for pod in seen.named(name)), f"{name} to run", PATIENCE
        )
        [pod] = self._seen.named(name)
        await self._api.delete(f"{POD}/{name}")
        return f"{pod.reason}: {pod.message}" if pod.phase == "Failed" else ""

    def _back(self, mark: int) -> bool:
        """Whether another gateway registered, and the kubelet's records are whole since then."""
        _, registered, after = self._told(mark).rpartition(_REGISTERED)
        counts = [one.allocatable[RESOURCE] for one in records(after, datetime.now(UTC), 0)]
        return bool(registered) and counts[-1:] == [GPUS]

    async def _agrees(self) -> bool:
        folder = self._node.plugins
        records = await look(folder.parent / "pod-resources" / "kubelet.sock", folder / "kubelet_internal_checkpoint")
        return len((records.allocatable or {}).get(RESOURCE, ())) == GPUS


async def run(times: int, images: Sequence[Path], *, slow_look: bool) -> bool:
    """Kill so often on this node, say what was seen, also where a signal or an error cuts it off, and whether all bars are kept."""
    node = Node.here()
    for archive in images:
        await node.import_image(archive)
    for path in DEVICES.values():
        node.make_device(path)
    api = Api.of(node)
    async with Recorder(api) as seen:
        two = Two(node, api, seen, slow_look=slow_look)
        killing = Killing(node, api, seen, two)
        await two.start()
        try:
            await two.ready()
            await seen.until(
                lambda seen: seen.node.allocatable.get(RESOURCE, 0) == GPUS, "all GPUs at the API server", PATIENCE
            )
            first = len(seen.nodes) - 1
            broke = await cut_off(killing.run(times))
            report = judge(times, killing.kills, killing.recorded(), seen.nodes[first:])
            report.figures["processors"] = killing.parted
            print(*map(describe, report.bars), document(report), sep="\n", flush=True)
            if isinstance(broke, Exception):
                raise broke
            return report.passed
        finally:
            await two.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m gateway_lab.node.kills",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--times", type=int, default=50, help="how often (default: %(default)s)")
    parser.add_argument("--slow-look", action="store_true", help="a backend whose first look takes 2 s")
    parser.add_argument("--images", type=Path, default=Path("build/e2e"), help="the folder of the images (%(default)s)")
    options = parser.parse_args(arguments)
    images = sorted(options.images.glob("*.oci.tar"))
    if not images:
        parser.error(f"expected the gateway's images in {options.images.absolute()}: `make e2e-made` makes them")
    return 0 if asyncio.run(run(options.times, images, slow_look=options.slow_look)) else 1


if __name__ == "__main__":
    sys.exit(main())
