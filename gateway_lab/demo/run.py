"""The demo: a node with eight simulated GPUs goes through kubelet upgrades and a step back, and nobody loses a device.

The story is data and the verdict a pure function of what was seen (``gateway_lab.demo.story``). What lies between, here, is
real: the daemon, the kubelets and their sockets are processes of their own, and all that is judged comes out of the
kubelet's records and out of what a container's runtime is told, never out of a memory of what was asked for.

After each step the GPUs that are free are handed to a pod that only looks: so the kubelet itself names every device it
believes in, and one more pod must find none left.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from devices.gpu.model import GPU
from devices.gpu.simulated import profile
from devices.model import Health
from gateway_lab.demo.story import RESOURCE, STORY, Hop, Look, Recover, Run, Sicken, Step, Verdict, judge
from gateway_lab.gatewayproc import LINES, GatewayError, GatewayProcess, gateway_command
from gateway_lab.kubelets.kubelet import Admission, Demand, Gap, Kubelet, KubeletError
from gateway_lab.trials.invariants import Holding, holdings

GPUS: Final = 8
SLOW: Final = re.compile(r"Executing <.*> took [0-9.]+ seconds")
"""What asyncio says in Python's development mode where the machine is slow."""
PATIENCE: Final = 5.0
"""Seconds until the kubelet's records must show what they should; the gateway is asked to manage in milliseconds."""
_UNKNOWN: Final = re.compile(r"code = (NotFound|NOT_FOUND)")
_STRAY: Final = re.compile(r"Traceback|Exception ignored|Warning:")


class Scene(msgspec.Struct, frozen=True):
    """What a person is shown: the node now, and how it came here."""

    gpus: tuple[GPU, ...] = ()
    looks: tuple[Look, ...] = ()
    upcoming: tuple[str, ...] = ()
    """The kubelet versions still to come."""
    kubelet: str = ""
    kind: str = ""
    api: str = ""
    capacity: int = 0
    allocatable: int = 0
    holders: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Pod by device ID."""
    verdict: Verdict | None = None


Show = Callable[[Scene, str], None]
"""Called at each change with the scene and a sentence about it (empty: nothing to say)."""


# The node.


class _Seen(msgspec.Struct):
    """What comes to light while a step is done."""

    api: str = ""
    gap: Gap | None = None
    drained: tuple[str, ...] = ()
    told: list[Holding] = msgspec.field(default_factory=list)


class _Node(msgspec.Struct):
    """The real node: one daemon, one kubelet at a time, and a profile that stands for the hardware."""

    root: Path
    gateway: GatewayProcess
    genuine: Mapping[str, Path]
    show: Show
    scene: Scene
    gpus: tuple[GPU, ...]
    stack: AsyncExitStack
    kubelet: Kubelet | None = None
    pods: list[Demand] = msgspec.field(default_factory=list)
    ill: dict[int, str] = msgspec.field(default_factory=dict)
    numbers: Iterator[int] = msgspec.field(default_factory=lambda: itertools.count(1))
    seen: _Seen = msgspec.field(default_factory=_Seen)

    @property
    def expected(self) -> int:
        return len(self.gpus) - len(self.ill)

    def say(self, sentence: str, **changes: Any) -> None:
        self.scene = replace(self.scene, **changes)
        self.show(self.scene, sentence)

    def name(self, device_ids: Sequence[str]) -> str:
        """Name GPUs as a person does, by index; an unknown one by its ID."""
        index = {gpu.uuid: str(gpu.index) for gpu in self.gpus}
        return ", ".join(sorted(index.get(device_id, device_id) for device_id in device_ids)) or "none"

    async def take(self, step: Step) -> Look:
        """Do one step, then look at all there is to see; what can't be done is trouble, which the verdict will name."""
        self.seen = _Seen()
        try:
            await self.do(step)
            trouble: tuple[str, ...] = ()
        except (KubeletError, GatewayError) as error:
            if self.kubelet is None:
                raise  # there is no node to look at
            trouble = (_sentence(error),)
        assert self.kubelet is not None
        look = Look(
            _title(step) if isinstance(step, Hop) else f"{_title(step)} on kubelet {self.kubelet.version}",
            self.kubelet.version,
            self.kubelet.kind,
            hop=isinstance(step, Hop),
            api=self.seen.api,
            expected=self.expected,
            told=tuple(self.seen.told),
            ill=tuple(gpu.uuid for gpu in self.gpus if gpu.health is not Health.HEALTHY),
            drained=self.seen.drained,
            gap=self.seen.gap,
            trouble=trouble,
        )
        try:
            return await self.look(look)
        except KubeletError as error:
            return replace(look, trouble=(*trouble, _sentence(error)))

    async def do(self, step: Step) -> None:
        """Do one step."""
        match step:
            case Hop():
                await self.hop(step)
            case Run():
                await self.run(Demand(f"{step.pod}-1", RESOURCE, step.count))
            case Sicken():
                free = next(gpu for gpu in reversed(self.gpus) if gpu.uuid not in self.scene.holders)
                self.edit({free.index: step.reason})
                self.say(f"GPU {free.index} becomes unhealthy: {step.reason}", gpus=self.gpus)
                await self.settle()
            case Recover():
                ill = [gpu.index for gpu in self.gpus if gpu.health is not Health.HEALTHY]
                self.edit({})
                self.say(f"GPU {', '.join(map(str, ill))} is healthy again", gpus=self.gpus)
                await self.settle()

    async def hop(self, step: Hop) -> None:
        """Replace the kubelet, as an upgrade does: end the old process, start the other version where it was."""
        mark = self.gateway.seen
        drained = self.pods if step.drain else []
        self.seen.drained = tuple(pod.pod for pod in drained)
        if self.kubelet is not None:
            if drained:
                self.say(f"draining the node before kubelet {step.version}: {step.drain}")
                for pod in drained:
                    await self.kubelet.remove(pod.pod)
                self.pods = []
                self.say("", holders={})
            await self.kubelet.close()
        self.kubelet = await Kubelet.launch(
            step.version,
            self.root / "device-plugins",
            self.genuine.get(step.version),
            self.root / f"kubelet-{step.version}.log",
        )
        self.stack.push_async_callback(self.kubelet.close)
        spoke = self.scene.api
        self.say(
            "", kubelet=step.version, kind=self.kubelet.kind, api="", allocatable=0, upcoming=self.scene.upcoming[1:]
        )
        try:
            gap = await self.kubelet.start_measured(RESOURCE, self.expected, seconds=PATIENCE, pods=self.pods)
        except KubeletError as error:
            registered = self.gateway.lines("registered", since=mark, resource=RESOURCE)
            why = (
                ""
                if registered
                else f"; the gateway did not register with it (it spoke {spoke or 'nothing'} to the kubelet before)"
            )
            raise KubeletError(error.op, f"the GPUs are not back: {error.message}{why}") from error
        self.seen.gap = gap
        line = await self.gateway.wait_for("registered", since=mark, resource=RESOURCE, seconds=PATIENCE)
        api = self.seen.api = str(line["api"])
        self.say(
            f"kubelet {step.version} ({self.kubelet.kind}) speaks API {api}: {self.expected} of {len(self.gpus)} GPUs "
            f"allocatable {gap.gap_ms:.1f} ms after it takes connections",
            api=api,
            allocatable=self.expected,
        )
        for pod in self.pods:
            self.seen.told.append(_told(pod.pod, await self.kubelet.restart_container(pod.pod)))
        for pod in drained:
            name, _, number = pod.pod.rpartition("-")
            await self.run(replace(pod, pod=f"{name}-{int(number) + 1}"))

    async def run(self, pod: Demand) -> None:
        """Admit a pod and start its container."""
        assert self.kubelet is not None
        admission = await self.kubelet.admit(pod.pod, RESOURCE, pod.count)
        self.pods.append(pod)
        told = _told(pod.pod, admission)
        self.seen.told.append(told)
        holders = {**self.scene.holders, **dict.fromkeys(told.device_ids, pod.pod)}
        self.say(f"pod {pod.pod} gets GPU {self.name(told.device_ids)}", holders=holders)

    async def settle(self) -> None:
        """Wait until the kubelet has heard of a change of health."""
        assert self.kubelet is not None
        await self.kubelet.wait(RESOURCE, self.expected, PATIENCE)

    async def look(self, look: Look) -> Look:
        """See what the kubelet believes: its records, and the names of the GPUs that it would give away."""
        assert self.kubelet is not None
        names = {pod.pod for pod in self.pods}
        totals = await self.kubelet.totals()
        # The records keep a pod that has ended until the next admission; it holds nothing any more.
        held = tuple(one for one in holdings(await self.kubelet.pods()) if one.pod in names)
        capacity, allocatable = totals.capacity.get(RESOURCE, 0), totals.allocatable.get(RESOURCE, 0)
        holders = {device_id: one.pod for one in held for device_id in one.device_ids}
        self.say("", capacity=capacity, allocatable=allocatable, holders=holders)
        look = replace(look, capacity=capacity, allocatable=allocatable, held=held)
        count = allocatable - sum(len(one.device_ids) for one in held)
        free: tuple[str, ...] = ()
        trouble = list(look.trouble)
        looking = [f"look-{next(self.numbers)}", f"look-{next(self.numbers)}"]
        try:
            if count > 0:
                free = (await self.kubelet.admit(looking[0], RESOURCE, count)).devices.get(RESOURCE, ())
            if allocatable > 0:
                with suppress(KubeletError):  # as it should be: there is none left
                    extra = (await self.kubelet.admit(looking[1], RESOURCE, 1)).devices.get(RESOURCE, ())
                    trouble += [f"{device_id} was given to one more pod when none was left" for device_id in extra]
        except KubeletError as error:
            why = (
                "a device ID changed, and the gateway doesn't know its own device any more"
                if _UNKNOWN.search(error.message)
                else "it fails"
            )
            trouble.append(
                f"{count} GPUs should be free, but of a pod that asks for them is said: {why}: {error.message}"
            )
        for pod in looking:
            await self.kubelet.remove(pod)
        return replace(look, free=free, trouble=tuple(trouble))

    def edit(self, ill: Mapping[int, str]) -> None:
        """Change the hardware, the way a person can: edit the profile that the daemon watches."""
        self.ill = dict(ill)
        text = describe(ill)
        self.gpus = read(text)
        path = self.root / "profile.yaml"
        draft = path.with_suffix(".new")
        draft.write_text(text)
        draft.replace(path)


def describe(ill: Mapping[int, str]) -> str:
    """Write the profile of the demo's node: its GPUs, and which of them are unhealthy and why."""
    lines = ["resources:", f"  {RESOURCE}:", f"    gpus: {GPUS}", "    numa: [0, 0, 0, 0, 1, 1, 1, 1]"]
    if ill:
        lines += ["    unhealthy:", *(f"      {index}: {reason}" for index, reason in ill.items())]
    return "\n".join(lines) + "\n"


def read(text: str) -> tuple[GPU, ...]:
    """Read the GPUs out of such a profile."""
    return profile.parse(text.encode(), "the demo's profile")[RESOURCE].gpus


def _told(pod: str, admission: Admission) -> Holding:
    """Read what the container runtime was told, in the variable by which NVIDIA's runtime picks GPUs."""
    value = admission.answer.envs.get("NVIDIA_VISIBLE_DEVICES", "")
    return Holding(pod, "main", RESOURCE, tuple(sorted(value.split(",") if value else ())))


def _sentence(error: KubeletError | GatewayError) -> str:
    """Say an error without the log that it ends with."""
    return (error.message if isinstance(error, KubeletError) else str(error)).splitlines()[0]


def _title(step: Step) -> str:
    match step:
        case Hop():
            return f"kubelet {step.version}"
        case Run():
            return f"pod {step.pod}"
        case Sicken():
            return "a GPU unhealthy"
        case Recover():
            return "recovery"


def logged(lines: Sequence[str]) -> list[str]:
    """Find what the daemon must not have logged: errors, and lines that didn't come from its logger."""
    found = []
    for record in map(json.loads, lines):
        said = record.get(
            "text", record["event"]
        )  # What libraries write to standard error is the text of a line of the log.
        if SLOW.fullmatch(said):
            continue
        if "level" not in record:
            found.append(f"the gateway wrote: {said}")
        elif record["level"] in {"error", "critical"}:
            details = next(filter(None, map(record.get, ("details", "reason", "exception", "text"))), "")
            found.append(f"the gateway logged an error: {record['event']} {details}".rstrip())
    return found


def _complaints(root: Path) -> list[str]:
    """Find what Python itself had to say in the logs of emulated kubelets."""
    return [
        f"{log.stem}: {line}"
        for log in sorted(root.glob("kubelet-*.log"))
        for line in log.read_text(errors="replace").splitlines()
        if _STRAY.search(line)
    ]


# Running it.


@contextmanager
def counting() -> Iterator[list[str]]:
    """Collect what would otherwise only be printed: exceptions that nobody could raise, and those of threads."""
    found: list[str] = []
    unraisable, thread = sys.unraisablehook, threading.excepthook
    sys.unraisablehook = lambda seen: found.append(
        f"unraisable: {seen.err_msg or 'in'} {seen.object!r}: {seen.exc_value!r}"
    )
    threading.excepthook = lambda seen: found.append(f"thread: {seen.exc_value!r}")
    try:
        yield found
    finally:
        sys.unraisablehook, threading.excepthook = unraisable, thread


def perform(show: Show, genuine: Mapping[str, Path], pace: float) -> tuple[tuple[Look, ...], Verdict]:
    """Play the story and judge it. ``pace`` is in seconds between steps; ``genuine`` gives binaries by kubelet version.

    Raises:
        GatewayError: the gateway didn't come up.
        KubeletError: the first kubelet didn't.
        KeyboardInterrupt: someone had enough (INT, TERM or HUP); everything has been ended and removed.
    """
    with counting() as strays:
        try:
            scene, looks = asyncio.run(_play(show, genuine, pace, strays))
        except asyncio.CancelledError as end:
            raise KeyboardInterrupt from end
        gc.collect()  # what was never awaited or closed says so now
    verdict = judge(STORY, looks, [gpu.uuid for gpu in scene.gpus], strays)
    show(replace(scene, verdict=verdict), "")
    return looks, verdict


def document(looks: Sequence[Look], verdict: Verdict) -> str:
    """Write what was seen and the verdict as one JSON document."""
    return msgspec.json.format(msgspec.json.encode({"steps": looks, "verdict": verdict}), indent=2).decode()


async def _play(
    show: Show, genuine: Mapping[str, Path], pace: float, strays: list[str]
) -> tuple[Scene, tuple[Look, ...]]:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(
        lambda _, context: strays.append(f"event loop: {context.get('exception') or context['message']!r}")
    )
    task = asyncio.current_task()
    assert task is not None
    for end in (signal.SIGTERM, signal.SIGHUP):  # INT is asyncio's own
        loop.add_signal_handler(end, task.cancel)
    looks: list[Look] = []
    # Short: a socket's path may have 107 bytes.
    root = Path(tempfile.mkdtemp(prefix="dpg-"))
    try:
        async with AsyncExitStack() as stack:
            sockets, state = root / "device-plugins", root / "state"
            sockets.mkdir()
            (root / "profile.yaml").write_text(describe({}))
            gpus = read(describe({}))
            gateway = await GatewayProcess.launch(gateway_command(sockets, state, root / "profile.yaml"))
            await stack.enter_async_context(gateway)
            await gateway.begun()
            upcoming = tuple(step.version for step in STORY if isinstance(step, Hop))
            node = _Node(root, gateway, genuine, show, Scene(gpus, upcoming=upcoming), gpus, stack)
            node.say(f"a node with {len(gpus)} simulated GPUs; the gateway is up and waits for a kubelet")
            for step in STORY:
                look = await node.take(step)
                looks.append(look)
                node.say("", looks=tuple(looks))
                if look.trouble:
                    break
                await asyncio.sleep(pace)
            status = await gateway.terminate()
            if status != 0:
                strays.append(f"the gateway ended with exit status {status} on SIGTERM, expected 0")
        strays += logged(gateway.log(LINES).splitlines())
        strays += _complaints(root)
        return node.scene, tuple(looks)
    finally:
        shutil.rmtree(root, ignore_errors=True)
