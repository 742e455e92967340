"""Devices that nobody holds are offered: pods end around a kubelet's restart or a gateway's end, and then the configuration changes.

Each sequence ends with an edit that offers the same GPUs under other IDs. Whatever the gateway still takes for held is
withheld then, so what the kubelet counts shows it. The kubelets are real kubelet code, as far as they are built.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from adapters.levels import minor_version
from gateway_lab.gatewayproc import GatewayError
from gateway_lab.kubelets import build
from gateway_lab.kubelets.kubelet import Demand, KubeletError
from gateway_lab.trials.scenarios import RESOURCE, BrokenPromiseError, Node, must, node

VERSIONS: Final = ("1.12", "1.20", "1.28", "1.36", "1.37")
GPUS: Final = 6
RENAMED, PARTITION = "nvidia.com/a100", "nvidia.com/mig-1g.5gb"
SHARED_BY_TWO = f"sharing: {{timeSlicing: {{resources: [{{name: {RESOURCE}, replicas: 2}}]}}}}"
RENAME = f"resources: {{gpus: [{{pattern: '*', name: {RENAMED}}}]}}\ngateway: {{honourResourceNames: true}}"
PARTITIONED = "flags: {migStrategy: mixed}"
PATIENCE: Final = 20.0
"""Seconds after the edit for which the devices are waited for."""


def _configure(made: Node, text: str) -> None:
    path = made.root / "config.yaml"
    fresh = path.with_suffix(".new")
    fresh.write_text(f"version: v1\n{text}\n")
    fresh.replace(path)


async def _admit(made: Node, *pods: str) -> None:
    for pod in pods:
        await made.the_kubelet.admit(pod, RESOURCE, 1)
        made.pods[pod] = Demand(pod, RESOURCE, 1)


async def _end(made: Node, *pods: str) -> None:
    for pod in pods:
        await made.the_kubelet.remove(pod)
        del made.pods[pod]


async def _restart_kubelet(made: Node, version: str) -> None:
    await made.the_kubelet.kill()
    await made.the_kubelet.close()
    made.kubelet = None
    await made.start_kubelet(version)


async def _ended_before(made: Node, version: str) -> tuple[str, int]:
    """A pod has ended and another one was admitted, a second before the kubelet restarts."""
    await _admit(made, "first")
    await asyncio.sleep(5)
    await _end(made, "first")
    await _admit(made, "second")
    await asyncio.sleep(1)
    await _restart_kubelet(made, version)
    await made.the_kubelet.wait(RESOURCE, GPUS)
    _configure(made, SHARED_BY_TWO)
    return RESOURCE, 2 * (GPUS - 1)


async def _killed_after_admissions(made: Node, version: str) -> tuple[str, int]:
    """The gateway that serves is killed right after admissions; the pods end; the kubelet restarts a second later."""
    newer = await made.start_gateway()
    await newer.wait_for("registered")
    await made.the_kubelet.wait(RESOURCE, GPUS)
    await _admit(made, "a", "b", "c")
    await newer.kill()
    await asyncio.sleep(0.5)
    await _end(made, "a", "b", "c")
    await asyncio.sleep(1)
    await _restart_kubelet(made, version)
    await made.the_kubelet.wait(RESOURCE, GPUS)
    _configure(made, RENAME)
    return RENAMED, GPUS


async def _stopped(made: Node, version: str, edit: str, resource: str, count: int) -> tuple[str, int]:
    """All gateways are stopped for 3 s, in which pods end and the kubelet restarts."""
    newer = await made.start_gateway()
    await newer.wait_for("registered")
    await made.the_kubelet.wait(RESOURCE, GPUS)
    await _admit(made, "a", "b", "c")
    for one in made.gateways:
        os.kill(one.pid, signal.SIGSTOP)
    try:
        await _end(made, "a", "b", "c")
        await _restart_kubelet(made, version)
        await asyncio.sleep(3)
    finally:
        for one in made.gateways:
            os.kill(one.pid, signal.SIGCONT)
    await made.the_kubelet.wait(RESOURCE, GPUS)
    _configure(made, edit)
    return resource, count


async def _stopped_renamed(made: Node, version: str) -> tuple[str, int]:
    return await _stopped(made, version, RENAME, RENAMED, GPUS)


async def _stopped_shared(made: Node, version: str) -> tuple[str, int]:
    return await _stopped(made, version, SHARED_BY_TWO, RESOURCE, 2 * GPUS)


async def _replaced(made: Node, _: str) -> tuple[str, int]:
    """A gateway is replaced while a pod ends; then the GPUs are partitioned."""
    await _admit(made, "a")
    older = made.gateway
    newer = await made.start_gateway()
    await _end(made, "a")
    await newer.wait_for("registered")
    await older.terminate()
    await made.the_kubelet.wait(RESOURCE, GPUS)
    _configure(made, PARTITIONED)
    return PARTITION, 2 * GPUS


async def _dead_across_restart(made: Node, version: str) -> tuple[str, int]:
    """No gateway runs while pods end and the kubelet restarts."""
    await _admit(made, "a", "b", "c")
    await asyncio.sleep(3)
    await made.gateway.kill()
    await _end(made, "a", "b", "c")
    await _restart_kubelet(made, version)
    await made.start_gateway()
    await made.the_kubelet.wait(RESOURCE, GPUS)
    _configure(made, RENAME)
    return RENAMED, GPUS


SEQUENCES: Final[Mapping[str, Callable[[Node, str], Awaitable[tuple[str, int]]]]] = {
    "ended before": _ended_before,
    "killed after admissions": _killed_after_admissions,
    "stopped, renamed": _stopped_renamed,
    "stopped, shared": _stopped_shared,
    "replaced, partitioned": _replaced,
    "dead": _dead_across_restart,
}
"""By name. Each returns the resource on offer after its edit, and how many devices of it nobody else's pod keeps back."""


async def run(
    name: str, version: str, genuine: Callable[[str], Path | None], *, pod_resources: bool, patience: float = PATIENCE
) -> float:
    """Run one sequence on a node of its own; return the seconds from the edit until every free device was offered.

    Without pod-resources a kubelet shows that a pod has ended only when it gives a device to another pod: one is admitted.

    Raises:
        BrokenPromiseError: a device stayed withheld, or a pod's end was reported as lost records.
    """
    async with node(genuine, gpus={RESOURCE: GPUS}) as made:
        made.describe({RESOURCE: ["mig: {" + ", ".join(f"{one}: [1g.5gb, 1g.5gb]" for one in range(GPUS)) + "}"]})
        made.options = ("--config-file", str(made.root / "config.yaml"))
        if not pod_resources:
            made.options = (*made.options, "--pod-resources-socket", str(made.root / "none.sock"))
        _configure(made, "")
        await made.start_kubelet(version)
        await made.start_gateway()
        await made.the_kubelet.wait(RESOURCE, GPUS)
        pod_resources = pod_resources and minor_version(version) >= 15
        resource, count = await SEQUENCES[name](made, version)
        began = time.monotonic()
        if not pod_resources and name != "ended before":  # There the second pod did that.
            await _free_by_allocate(made, resource)
        elif 21 <= minor_version(version) <= 31:  # The pod that was admitted last is a living one to them.
            await made.the_kubelet.admit("without any", "cpu", 0)
        try:
            await made.the_kubelet.wait(resource, count, patience)
        except KubeletError as error:
            raise BrokenPromiseError(
                f"{name}: {resource} isn't whole {patience:g} s after the edit: {error}"
            ) from error
        took = time.monotonic() - began
        told = [
            line
            for one in made.gateways
            for line in one.lines("mismatch")
            if line.get("kind") in {"forgotten", "doubled"}
        ]
        must([f"{name}: reported without a cause: {line.get('details')}" for line in told])
        return took


async def _free_by_allocate(made: Node, resource: str) -> None:
    """Admit a pod as soon as there is a device for it."""
    async with asyncio.timeout(PATIENCE):
        while True:
            totals = await made.the_kubelet.totals()
            listed = resource != RESOURCE or totals.capacity.get(resource, 0) > GPUS  # By the new configuration.
            if listed and totals.allocatable.get(resource, 0) > 0:
                with suppress(KubeletError):
                    await made.the_kubelet.admit("next", resource, 1)
                    return
            await asyncio.sleep(0.05)


async def _all(names: list[str], versions: list[str], times: int, ways: list[bool]) -> bool:
    kept = True
    for version in versions:
        if build.built(version) is None:
            print(f"{version}  not built: run `python -m gateway_lab.kubelets.build {version}`")
            kept = False
            continue
        for name in names:
            for pod_resources in ways:
                took, broke = [], []
                for _ in range(times):
                    try:
                        took.append(await run(name, version, build.built, pod_resources=pod_resources))
                    except (BrokenPromiseError, KubeletError, GatewayError, TimeoutError) as error:
                        broke.append(str(error).splitlines()[0][:300])
                kept = kept and not broke
                seconds = f"median {statistics.median(took):.2f} s, worst {max(took):.2f} s" if took else "-"
                way = "with" if pod_resources else "without"
                print(f"{version:5} {way:7} pod-resources  {name:24} {len(took)}/{times}  {seconds}", flush=True)
                for told in broke:
                    print(f"      {told}", flush=True)
    return kept


def main() -> int:
    """Run each sequence and print how long its devices took to be offered; 1 if one wasn't."""
    parser = argparse.ArgumentParser(
        prog="python -m gateway_lab.trials.ghosts", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--kubelets", default=",".join(VERSIONS), help="which versions")
    parser.add_argument("--sequences", default=";".join(SEQUENCES), help="only these, with ; between them")
    parser.add_argument("--times", type=int, default=20, help="how often each")
    parser.add_argument("--pod-resources", choices=("with", "without", "both"), default="both")
    arguments = parser.parse_args()
    names = [name.strip() for name in arguments.sequences.split(";")]
    ways = {"with": [True], "without": [False], "both": [True, False]}[arguments.pod_resources]
    return 0 if asyncio.run(_all(names, arguments.kubelets.split(","), arguments.times, ways)) else 1


if __name__ == "__main__":
    sys.exit(main())
