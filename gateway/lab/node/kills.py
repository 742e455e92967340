"""Kills the gateway that serves of a pair (``--standby``) in its pod, again and again, and has pods come in that second.

    python -m gateway.lab.node -- python -m gateway.lab.node.kills --times 50

The images are those of ``make e2e-made``. For how long the kubelet's records were short is told by its own log, to the microsecond (its
pod-resources API, which may be asked 100 times a second at most, must agree in the end); what the API server saw, by a watch of the Node.
On a real cluster the control plane is on other machines: it and this command have one processor here, and the node (kubelet, containerd,
gateway, pods) has the others; ``--shared`` leaves them together.
A pod that the kubelet admits while its records are short, or while it still asks the one that was killed, is refused by the kubelet.
The fifth young death in a row would end the container (``gateway.pair.policy``): after four kills the DaemonSet is rolled to another image,
and the next ones meet a new pair. The exit status is 1 where a bar is missed.
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

from packaging.version import Version

from gateway.kubelet.view import look
from gateway.lab.bench.measure import Report, describe, document, line, spread
from gateway.lab.bench.standby import MEDIAN_MS, SLOW, WORST_MS, children
from gateway.lab.node import Node, pods, processors
from gateway.lab.node.api import Api, Object
from gateway.lab.node.continuity import IMAGE, ROLLED
from gateway.lab.node.installed import DaemonSet, write_profile
from gateway.lab.node.stage import POD
from gateway.lab.node.watch import NodeSeen, PodSeen, Recorder, drops
from gateway.lab.trials.scenarios import RESOURCE, device_ids
from gateway.lab.waiting import cut_off, until
from gateway.pair.policy import MOST_YOUNG

GPUS: Final = 8
DEVICES: Final[Mapping[str, str]] = {
    uuid: f"/dev/nvidia{index}" for index, uuid in enumerate(device_ids({RESOURCE: GPUS})[RESOURCE])
}
KILLS: Final = MOST_YOUNG - 1
"""Of one pair, each followed by a longer wait."""
PYTHON: Final = "/usr/bin/python3.13"
"""The image's interpreter."""
PATIENCE: Final = 60.0
MOMENTS: Final = (0.0, 0.25, 0.5, 0.75)
"""Seconds after a kill at which a pod comes: the first one while nobody serves."""
_CALLS_AGAIN: Final = Version("1.37")
"""From this kubelet on, a call to the dead gateway is made again; earlier ones refuse the pod (docs/standby.md)."""
_EVERY: Final = 0.05
_CHANGE: Final = re.compile(
    r"I(?P<time>\d{4} [\d:.]+) .*\"(?:Mark all resources Unhealthy|Processed device updates) for resource\" "
    rf'resourceName="{re.escape(RESOURCE)}"(?: totalCount=\d+ healthyCount=(?P<healthy>\d+))?'
)
_CAME: Final = re.compile(r'I(?P<time>\d{4} [\d:.]+) .*"SyncLoop ADD" source="api" pods=\["default/(?P<pod>[^"]+)"\]')
_REGISTERED: Final = f'"Got registration request from device plugin with resource" resourceName="{RESOURCE}"'


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: from when to when it was looked at (CLOCK_MONOTONIC, ns)."""

    began_ns: int
    ended_ns: int
    failed: Mapping[float, str]
    """Why pods of that second failed, by the moment at which they came; the others ran."""
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


def moments(kubelet: str) -> Sequence[float]:
    """Say after which moments a pod has to run on a kubelet of this minor version."""
    return MOMENTS if Version(kubelet) >= _CALLS_AGAIN else MOMENTS[1:]


def judge(
    times: int,
    kills: Sequence[Kill],
    recorded: Sequence[NodeSeen],
    shown: Sequence[NodeSeen],
    held: Sequence[float] = MOMENTS,
) -> Report:
    """Hold what was seen after each kill to the bars.

    Args:
        times: how many kills there should be.
        kills: those that there were.
        recorded: what the kubelet's records had.
        shown: what the API server had.
        held: after which moments a pod has to run.
    """
    report = Report()
    report.bar("kills", len(kills), times, f"of {times}", exact=True)
    if not kills:
        return report
    short = [short_ms(recorded, one) for one in kills]
    sums = spread(short)
    report.keep("records short of GPUs (ms)", "a pair in a pod", short)
    report.bar("the kubelet's records short of GPUs: median", sums["median"], MEDIAN_MS, "ms", line(sums))
    report.bar("the kubelet's records short of GPUs: worst", sums["max"], WORST_MS, "ms")
    seen = sum(short_ms(shown, one) > 0 for one in kills)
    report.bar("kills that the API server saw", seen, 0, f"of {len(kills)}", exact=True)
    failed = Counter(moment for one in kills for moment in one.failed)
    expected = len(kills) * len(held)
    ran = expected - sum(failed[one] for one in held)
    note = ", ".join(f"{failed[one]} failed that came after {one:g} s" for one in sorted(failed))
    report.bar("pods of that second that ran", ran, expected, f"of {expected}", note, exact=True)
    report.figures["ms from a kill until the kubelet knew of the pod that came with it"] = spread(
        [one.way_ms for one in kills]
    )
    report.figures["why pods failed"] = dict(Counter(why for one in kills for why in one.failed.values()))
    report.figures["drops at the API server in all"] = len(drops(shown, RESOURCE, GPUS))
    return report


class Pair(DaemonSet):
    """The DaemonSet with ``--standby``."""

    def __init__(self, node: Node, api: Api, seen: Recorder, *, slow_look: bool) -> None:
        super().__init__(node, api, seen, IMAGE)
        write_profile(node, devices=DEVICES)
        self._slow_look = slow_look

    def _fitted(self, wanted: dict[str, Any]) -> Object:
        if wanted["kind"] == "DaemonSet":
            [container] = wanted["spec"]["template"]["spec"]["containers"]
            container["env"].append({"name": "GATEWAY_STANDBY", "value": "true"})
            if self._slow_look:
                container["command"] = [PYTHON, "-P", "-c", SLOW]
        return super()._fitted(wanted)

    async def change(self) -> None:
        """Have a new pair, which takes over from this one: roll to the other image."""
        await self.roll(ROLLED if self._image == IMAGE else IMAGE)

    async def ready(self) -> int:
        """Wait until one gateway serves and another one stands by; give the process that serves."""
        await self._seen.until(
            lambda seen: [pod.runs for pod in self._pods(seen)] == [True], "one pod of the gateway", PATIENCE
        )
        [pod] = self._pods(self._seen)
        [container] = pod.containers.values()
        parent = await self._process(container.id.removeprefix("containerd://"))
        await until(lambda: both_are_ready(parent, self._said(pod)), PATIENCE, every=_EVERY)
        return max(children(parent), key=_score)

    async def _process(self, container: str) -> int:
        """Give a container's first process."""
        tasks = (line.split() for line in (await self._node.ctr("tasks", "ls")).splitlines())
        return next(int(pid) for name, pid, *_ in tasks if name == container)

    def _said(self, pod: PodSeen) -> str:
        folder = self._node.root / "var/log/pods" / f"{pod.namespace}_{pod.name}_{pod.uid}"
        return "".join(path.read_text(errors="replace") for path in folder.glob("gateway/*.log"))


def both_are_ready(parent: int, said: str) -> bool:
    """Tell whether two gateways run, have said so in the container's log, and one of them alone serves: its score is higher."""
    try:
        pair = children(parent)
        return (
            len(pair) == 2
            and len({_score(pid) for pid in pair}) == 2
            and {_inside(pid) for pid in pair} <= told_ready(said)
        )
    except (FileNotFoundError, ProcessLookupError):  # It has just died.
        return False


def told_ready(said: str) -> set[int]:
    """Give which gateways (process IDs in the container) the parent's log calls ready; the runtime puts three words before each line."""
    whole = said.rpartition("\n")[0].splitlines()
    lines = (json.loads(found.split(" ", 3)[3]) for found in whole if '"ready"' in found)
    return {found["gateway"] for found in lines if found["event"] == "ready"}


def _score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def _inside(pid: int) -> int:
    """Give a process's ID in its container."""
    [found] = re.findall(r"^NSpid:.*?(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found)


class Killing:
    """The kills on a node."""

    def __init__(self, node: Node, api: Api, seen: Recorder, pair: Pair, *, shared: bool) -> None:
        self._node, self._api, self._seen, self._pair = node, api, seen, pair
        self._processors = set() if shared else os.sched_getaffinity(0)
        self._log = node.logs / "kubelet.log"
        self._offset_ns = time.monotonic_ns() - time.time_ns()
        self.kills: list[Kill] = []
        """What was done so far."""
        self.parted = ""
        """Who has which processor."""

    async def run(self, times: int) -> None:
        """Kill so often, each pair as often as it may be."""
        for number in range(times):
            if number and number % KILLS == 0:
                await self._pair.change()
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
        """Kill who serves while pods come; return when each has run or failed and is gone, and the GPUs are all there."""
        serves, mark = await self._pair.ready(), self._log.stat().st_size
        self.parted = processors.part(self._node, self._processors)
        began = time.monotonic_ns()
        os.kill(serves, signal.SIGKILL)
        whys = await asyncio.gather(*(self._come(f"{name}-{number}", after) for number, after in enumerate(MOMENTS)))
        await until(lambda: self._back(mark), PATIENCE, every=_EVERY)
        await until(self._agrees, PATIENCE, every=_EVERY)
        names = {f"{name}-{number}" for number in range(len(MOMENTS))}
        await self._seen.until(
            lambda seen: names.isdisjoint(pod.name for pod in seen.pods.values()), "the pods to be gone", PATIENCE
        )
        heard = came(self._told(mark), f"{name}-0", datetime.now(UTC), self._offset_ns)
        way_ms = math.nan if heard is None else (heard - began) / 1e6
        return Kill(
            began, time.monotonic_ns(), {after: why for after, why in zip(MOMENTS, whys, strict=True) if why}, way_ms
        )

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
        view = await look(folder.parent / "pod-resources" / "kubelet.sock", folder / "kubelet_internal_checkpoint")
        return len((view.allocatable or {}).get(RESOURCE, ())) == GPUS


async def run(times: int, images: Sequence[Path], *, slow_look: bool, shared: bool) -> bool:
    """Kill so often on this node, say what was seen, also where a signal or an error cuts it off, and whether all bars are kept."""
    node = Node.here()
    for archive in images:
        await node.import_image(archive)
    for path in DEVICES.values():
        node.make_device(path)
    api = Api.of(node)
    async with Recorder(api) as seen:
        pair = Pair(node, api, seen, slow_look=slow_look)
        killing = Killing(node, api, seen, pair, shared=shared)
        await pair.start()
        try:
            await pair.ready()
            await seen.until(
                lambda seen: seen.node.allocatable.get(RESOURCE, 0) == GPUS, "all GPUs at the API server", PATIENCE
            )
            first = len(seen.nodes) - 1
            broke = await cut_off(killing.run(times))
            held = moments(node.kubelet.version)
            report = judge(times, killing.kills, killing.recorded(), seen.nodes[first:], held)
            report.figures["processors"] = killing.parted
            print(*map(describe, report.bars), document(report), sep="\n", flush=True)
            if isinstance(broke, Exception):
                raise broke
            return report.passed
        finally:
            await pair.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m gateway.lab.node.kills",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--times", type=int, default=50, help="how often (default: %(default)s)")
    parser.add_argument("--slow-look", action="store_true", help="a backend whose first look takes 2 s")
    parser.add_argument("--shared", action="store_true", help="the control plane shares all processors with the node")
    parser.add_argument("--images", type=Path, default=Path("build/e2e"), help="the folder of the images (%(default)s)")
    options = parser.parse_args(arguments)
    images = sorted(options.images.glob("*.oci.tar"))
    if not images:
        parser.error(f"expected the gateway's images in {options.images.absolute()}: `make e2e-made` makes them")
    return 0 if asyncio.run(run(options.times, images, slow_look=options.slow_look, shared=options.shared)) else 1


if __name__ == "__main__":
    sys.exit(main())
