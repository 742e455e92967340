"""What may happen to a GPU node that lives: each thing written once, with what an operator may expect of it.

A scenario runs on a ``Stage``, whatever way the plugin is installed. What was seen is an ``Outcome``; ``judge`` compares it with the
scenario's promise, and ``page.py`` writes it down for people. The order of ``walk`` changes the kubelet's version as seldom as possible.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from gateway import VERSION
from gateway_lab.node import pods
from gateway_lab.node.installed import (
    CDI_ID,
    CDI_KIND,
    CDI_RESOURCE,
    DEVICES,
    GPUS,
    IDS,
    DaemonSet,
    HostService,
    write_profile,
)
from gateway_lab.node.stage import BARE, KINDS, PATIENCE, POD, STATIC, Outcome, Stage
from gateway_lab.node.watch import PodSeen, Recorder
from gateway_lab.trials.scenarios import RESOURCE, must
from gateway_lab.waiting import until

Facts = Mapping[str, str | float]
KEPT = frozenset({"kept"})
SAME_GPU = frozenset({"kept", "restarted, the same GPU"})
RECREATED = frozenset({"kept", "replaced, the same GPU", "replaced, another GPU", "failed"})
"""What becomes of static pods when the kubelet's minor version changes: they get a new UID, and so are other pods. The kubelet admits
them 3 to 200 ms after its socket is there, so that they may fail before any plugin could have registered."""
FREE = GPUS - len(KINDS)
"""How many GPUs no pod holds."""
ANY: frozenset[str] = frozenset()
NEVER = 0.0
IMAGE = f"device-plugin-gateway:{VERSION}"
ROLLED = f"{IMAGE}-b"
INF = float("inf")
_NAMESAKES = 5


@dataclass(frozen=True, slots=True)
class Promise:
    """What must hold: for how long the API server, and the kubelet's records, may show fewer GPUs, and what may become of pods."""

    drop_ms: float = NEVER
    gap_ms: float = INF
    fates: frozenset[str] = KEPT
    static: frozenset[str] | None = None
    """Where static pods fare otherwise."""
    failed: bool = False
    """Whether pods may fail."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """``run`` makes it happen. ``promises`` are by the way of installation; one that isn't there can't have it happen."""

    name: str
    words: str
    run: Callable[[Stage], Awaitable[Facts | None]]
    promises: Mapping[str, Promise]
    everywhere: bool = False
    """Whether it is run on each version of the kubelet, or on the newest one alone."""


def judge(outcome: Outcome, promise: Promise) -> list[str]:
    """Say what was promised and didn't hold, as sentences."""
    fates = {kind: promise.static or promise.fates if kind == STATIC else promise.fates for kind in outcome.fates}
    return [
        *(
            [f"the API server saw fewer GPUs for {outcome.drop_ms:g} ms, expected at most {promise.drop_ms:g}"]
            if outcome.drop_ms > promise.drop_ms
            else []
        ),
        *(
            [f"the kubelet's records had fewer GPUs for {outcome.gap_ms:g} ms, expected at most {promise.gap_ms:g}"]
            if outcome.gap_ms > promise.gap_ms
            else []
        ),
        *(
            f"pod {kind} was {fate}, expected: {' or '.join(sorted(fates[kind]))}"
            for kind, fate in outcome.fates.items()
            if fates[kind] and fate not in fates[kind]
        ),
        *(
            sentence
            for sentence in outcome.failed
            if not promise.failed and not (sentence.startswith(f"pod {STATIC}") and "failed" in fates.get(STATIC, ()))
        ),
        *outcome.lost,
    ]


# What happens.


async def _kubelet(stage: Stage, how: signal.Signals) -> None:
    await stage.node.kubelet.restart(signal=how)


async def _hop(stage: Stage, version: str) -> None:
    await stage.node.kubelet.restart(version=version)


async def _kill(stage: Stage) -> None:
    await stage.plugin.kill()
    await _missed(stage)


async def _delete_pod(stage: Stage) -> None:
    plugin = stage.plugin
    assert isinstance(plugin, DaemonSet)
    await plugin.delete_pod()
    await _missed(stage)


async def _missed(stage: Stage) -> None:
    """Wait until the kubelet misses the plugin, so that what is waited for then is its return."""
    seen = len(stage.records)
    await until(lambda: len(stage.records) != seen, PATIENCE)


async def _roll(stage: Stage) -> None:
    await stage.plugin.roll(ROLLED)


async def _roll_back(stage: Stage) -> None:
    await stage.plugin.roll(IMAGE)


async def _reboot(stage: Stage) -> None:
    await stage.plugin.off()
    await stage.node.power_off()
    await stage.plugin.on()
    await stage.node.power_on()


async def _no_api(stage: Stage) -> Facts:
    """Take the API server away, for five times as long as is looked on after that."""
    seconds = 5 * stage.settle_seconds
    await stage.node.apiserver.stop()
    await asyncio.sleep(seconds)
    await stage.node.apiserver.start()
    return {"away, s": seconds}


async def _containerd(stage: Stage) -> None:
    await stage.node.containerd.restart()


async def _ill(stage: Stage) -> Facts:
    """Let the bare pod's GPU become unhealthy and recover; tell how long each took to show at the API server."""
    [uuid] = stage.standing()[BARE].devices
    loop = asyncio.get_running_loop()
    took = {}
    for word, ill, healthy in (("ill", [IDS.index(uuid)], GPUS - 1), ("healthy again", [], GPUS)):
        write_profile(stage.node, ill)
        began = loop.time()
        await stage.seen.until(_allocatable(healthy), f"the GPU to be {word}", PATIENCE)
        took[f"{word} at the API server after, s"] = round(loop.time() - began, 1)
        await stage.seen.until(
            partial(_says, stage, uuid, "Unhealthy" if ill else "Healthy"),
            f"the pod's status to say that its GPU is {word}",
        )
    return {**took, "the pod's status names it": "yes" if _health(stage, uuid) else "no"}


def _allocatable(count: int, resource: str = RESOURCE) -> Callable[[Recorder], bool]:
    return lambda seen: seen.node.allocatable.get(resource) == count


def _says(stage: Stage, uuid: str, health: str, _: Recorder) -> bool:
    """Whether the pod's status says so of its GPU; before kubelet 1.36 it says nothing."""
    return _health(stage, uuid) in {"", health}


def _health(stage: Stage, uuid: str) -> str:
    [pod] = stage.seen.named(BARE)
    return pod.containers[pods.CONTAINER].health.get(uuid, "")


async def _asks_too_much(stage: Stage) -> Facts:
    """Ask for more than is free: by the scheduler, and past it."""
    await stage.api.create(POD, pods.gpu_pod("too-many", FREE + 1))
    wanted = dict(pods.gpu_pod("past-scheduler", FREE + 1))
    wanted["spec"] = {**wanted["spec"], "nodeName": stage.node.name}
    await stage.api.create(POD, wanted)
    await stage.seen.until(lambda seen: any(one.phase == "Failed" for one in seen.named("past-scheduler")), "a refusal")
    [refused] = stage.seen.named("past-scheduler")
    [waiting] = stage.seen.named("too-many")
    must([] if waiting.phase == "Pending" else [f"expected the scheduler to hold too-many back, it is {waiting.phase}"])
    for name in ("too-many", "past-scheduler"):
        await stage.remove(name)
    return {"by the scheduler": waiting.phase, "past it": f"{refused.reason}: {refused.message}"}


async def _created_meanwhile(stage: Stage) -> Facts:
    """Create a pod while the kubelet restarts."""
    fate = await _create_meanwhile(stage, 1)
    must([] if fate == "runs" else [f"the pod that was created meanwhile: {fate}"])
    return {"the new pod": fate}


async def _reused_meanwhile(stage: Stage) -> Facts:
    """Do the same with all the GPUs that are free, some of which a pod held until a moment ago."""
    await stage.api.create(POD, pods.gpu_pod("ended"))
    await _decided(stage, "ended")
    await stage.remove("ended")
    return {"the new pod": await _create_meanwhile(stage, FREE)}


async def _create_meanwhile(stage: Stage, count: int) -> str:
    """Restart the kubelet, and create a pod when it has just ended; tell what became of the pod."""
    name = "meanwhile"
    await stage.node.kubelet.stop()
    await asyncio.gather(stage.node.kubelet.start(), stage.api.create(POD, pods.gpu_pod(name, count)))
    pod = await _decided(stage, name)
    await stage.remove(name)
    return "runs" if pod.runs else f"{pod.phase}: {pod.reason}: {pod.message}"


async def _named_again(stage: Stage) -> Facts:
    """End a pod that has all the GPUs that are free, and create it anew under its name at once, as a StatefulSet does."""
    for _ in range(_NAMESAKES):
        await stage.api.create(POD, pods.gpu_pod("again", FREE))
        pod = await _decided(stage, "again")
        must([] if pod.runs else [f"the pod that came again: {pod.phase}: {pod.reason}: {pod.message}"])
        await stage.remove("again")
    return {"pods of that name": _NAMESAKES}


async def _decided(stage: Stage, name: str) -> PodSeen:
    """Wait until a pod runs or has failed."""

    def over(seen: Recorder) -> bool:
        return any(pod.runs or pod.phase == "Failed" for pod in seen.named(name))

    await stage.seen.until(over, f"pod {name} to run or to fail", PATIENCE)
    [pod] = stage.seen.named(name)
    return pod


async def _cdi(stage: Stage) -> Facts:
    """Start a pod whose GPU is a CDI name, with a runtime that honours CDI and with one that ignores it."""
    folder = stage.node.root / "etc/cdi"
    folder.mkdir(parents=True, exist_ok=True)
    spec = folder / "example.com-gpu.yaml"
    spec.write_text(
        f"cdiVersion: 0.5.0\nkind: {CDI_KIND}\ndevices:\n- name: {CDI_ID}\n  containerEdits:\n"
        f"    env: [CDI_SAID=yes]\n    deviceNodes: [{{path: /dev/nvidia9, hostPath: {DEVICES[IDS[0]]}}}]\n"
    )
    write_profile(stage.node, cdi=True)
    await stage.seen.until(_allocatable(1, CDI_RESOURCE), f"{CDI_RESOURCE} to be allocatable")
    found = {}
    try:
        for honours in (True, False):
            await stage.node.set_cdi(honours)
            name = f"cdi-{'honoured' if honours else 'ignored'}"
            await stage.api.create(POD, pods.gpu_pod(name, 1, CDI_RESOURCE))
            pod = await _decided(stage, name)
            must([] if pod.runs else [f"pod {name}: {pod.phase}: {pod.reason}: {pod.message}"])
            await asyncio.sleep(1)
            said = pods.account(pods.words(stage.node.root / "var/log/pods", name, pod.uid))
            found[name] = "has its GPU" if "/dev/nvidia9" in said.nodes else "runs without a GPU"
            await stage.remove(name)
    finally:
        await stage.node.set_cdi(True)
        write_profile(stage.node)
        spec.unlink()
    must([] if found["cdi-honoured"] == "has its GPU" else [f"expected CDI to work: {found}"])
    return found


_HOST, _POD = HostService.kind, DaemonSet.kind
_BOTH = {_HOST: Promise(), _POD: Promise()}
_BOTH_REFUSE = {_HOST: Promise(failed=True), _POD: Promise(failed=True)}

SCENARIOS: Mapping[str, Scenario] = {
    one.name: one
    for one in (
        Scenario(
            "kubelet-term",
            "the kubelet is restarted (TERM)",
            partial(_kubelet, how=signal.SIGTERM),
            _BOTH,
            everywhere=True,
        ),
        Scenario(
            "kubelet-kill", "the kubelet crashes (KILL)", partial(_kubelet, how=signal.SIGKILL), _BOTH, everywhere=True
        ),
        Scenario(
            "created-meanwhile", "a pod is created in the second of a kubelet's restart", _created_meanwhile, _BOTH
        ),
        Scenario(
            "reused-meanwhile",
            "a pod is created in the second of a kubelet's restart, on the GPU of one that has just ended",
            _reused_meanwhile,
            _BOTH_REFUSE,
        ),
        Scenario(
            "named-again",
            "a pod ends, and a new pod of the same name requests the same GPUs at once",
            _named_again,
            _BOTH,
        ),
        Scenario("rolled", "the gateway is replaced by another release", _roll, _BOTH),
        Scenario("rolled-back", "and back", _roll_back, _BOTH),
        Scenario(
            "gateway-kill",
            "the gateway is killed (KILL)",
            _kill,
            {_HOST: Promise(drop_ms=11_000, gap_ms=2_000), _POD: Promise(drop_ms=21_000, gap_ms=20_000)},
        ),
        Scenario(
            "pod-deleted",
            "the gateway's pod is deleted",
            _delete_pod,
            {_POD: Promise(drop_ms=21_000, gap_ms=20_000)},
        ),
        Scenario("api-away", "the API server is gone for a while", _no_api, _BOTH),
        Scenario("containerd", "containerd is restarted", _containerd, _BOTH),
        Scenario(
            "gpu-ill",
            "a GPU becomes unhealthy under a running pod, and recovers",
            _ill,
            {_HOST: Promise(drop_ms=30_000), _POD: Promise(drop_ms=30_000)},
        ),
        Scenario(
            "over-asking",
            "pods ask for more GPUs than are free",
            _asks_too_much,
            _BOTH_REFUSE,
        ),
        Scenario("cdi", "a container gets a GPU only by the GPU's CDI name", _cdi, _BOTH),
        Scenario(
            "reboot",
            "the node loses power and boots",
            _reboot,
            {
                _HOST: Promise(fates=SAME_GPU, static=SAME_GPU | {"failed"}),
                _POD: Promise(drop_ms=INF, fates=ANY, failed=True),
            },
        ),
    )
}


def hop(version: str) -> Scenario:
    """Give the scenario of a change to another kubelet version."""
    promise = Promise(static=RECREATED)
    return Scenario(
        f"to-{version}",
        f"the kubelet is replaced by {version}",
        partial(_hop, version=version),
        {_HOST: promise, _POD: promise},
    )


def walk(versions: Sequence[str], installed: str) -> list[tuple[str, Scenario]]:
    """Give the scenarios of one repetition, each with the kubelet's version that it begins on: up, everything, and down."""
    there = [one for one in SCENARIOS.values() if installed in one.promises]
    steps: list[tuple[str, Scenario]] = []
    for old, new in zip(versions, (*versions[1:], None), strict=True):
        steps += [(old, one) for one in there if one.everywhere or new is None]
        steps += [] if new is None else [(old, hop(new))]
    down = list(reversed(versions))
    return [*steps, *((old, hop(new)) for old, new in itertools.pairwise(down))]


async def run(stage: Stage, version: str, scenario: Scenario) -> Outcome:
    """Run one scenario; what became of it isn't judged."""
    await stage.prepare(version)
    label = version if not scenario.name.startswith("to-") else f"{version} -> {scenario.name.removeprefix('to-')}"
    return await stage.observe(scenario.name, partial(scenario.run, stage), label)
