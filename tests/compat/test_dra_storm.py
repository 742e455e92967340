"""Whatever happens at once to a node whose gateway serves both APIs (--dra on): no GPU is ever with two, and in the end none is lost.

The gateway is a process that is killed and started, or two, of which one stands by and either is killed; the kubelet is an emulated 1.37 that restarts, the API server a stand-in that
goes away, refuses, or answers late and wrong. GPUs become time-sliced and whole again. Pods, claims, orders to cross, the node's annotation, cordons and
faults come when a seed says so. For more of it:

    STORMS=20 STORM_SECONDS=40 .venv/bin/python -m pytest tests/compat/test_dra_storm.py
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from adapters import pluginregistration
from adapters.dra.plugin import V1
from devices.claims import ClaimName, Refused
from gateway.leader.machine import Stage
from gateway.sides.table import ANNOTATION
from gateway.wires import control
from gateway.wires.control import ControlError
from gateway.wires.unix import listens
from gateway_lab.gatewayproc import GatewayProcess, gateway_command, leader_socket
from gateway_lab.kubelets.behaviour import behaviour
from gateway_lab.kubelets.devicemanager import DeviceManager
from gateway_lab.kubelets.kubelet import Demand, KubeletError
from gateway_lab.waiting import until
from tests.fakes.apiserver import Answer, ApiServer, Fault, Request
from tests.unit.dracalls import Kubelet
from tests.unit.kubernetes import authority, server

__all__ = ["authority", "server"]
GPU = "nvidia.com/gpu"
API = "/apis/resource.k8s.io/v1"
SLICE = f"{API}/resourceslices/n1-gpu.nvidia.com-0"
STORMS = int(os.environ.get("STORMS", "1"))
SECONDS = float(os.environ.get("STORM_SECONDS", "8"))
IDS = tuple(f"GPU-{number}" for number in range(4))
SHARING = (
    "version: v1\nsharing: {timeSlicing: {renameByDefault: %s, resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n"
)
CONFIGS = {GPU: ("version: v1\n", SHARING % "false"), f"{GPU}.shared": (SHARING % "true",)}
"""Configuration files, by the name under which there are GPUs then."""
NODE = "/api/v1/nodes/n1"
ROLLS = 4.0
"""Seconds within which one of two gateways ends, when the second was started."""
LASTS = (0.2, 1.0, 4.0)
"""Seconds that a pod may run."""
CLAIMS = f"{API}/namespaces/ns/resourceclaims"
FAULTS = (
    "killed",
    "ended",
    *("rolled", "kubelet", "trouble", "annotated") * 2,
    "away",
    "unhealthy",
    "cordoned",
    "configured",
)
RAN = {"a pod ran", "a claim ran"}
GIVES_UP = 45.0
"""Seconds after which a kubelet gives up a call."""
ENDS = 90.0
"""Seconds for all that is under way to end, and for all GPUs to get to one side."""
# CDI specifications go where any user may write.
_RUN = (
    "import sys, pathlib; from devices.gpu.nvidia import cdifiles; from gateway.dra import cdi; "
    "cdifiles.write_all.__kwdefaults__['folder'] = cdi.FOLDER = pathlib.Path(sys.argv.pop(1)); from gateway.__main__ import main; main()"
)


async def _refuse(answer: Answer, status: int) -> None:
    await answer.no(status, "Refused", {"Retry-After": "1"} if status == 429 else {})


async def _break_off(answer: Answer, _: Request) -> None:
    await answer.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{")
    answer.writer.transport.abort()


async def _stand_still(_answer: Answer, _: Request) -> None:
    await asyncio.sleep(3600)


TROUBLES: tuple[Fault, ...] = (
    *(lambda answer, _, status=status: _refuse(answer, status) for status in (401, 403, 409, 410, 429, 500, 503)),
    *(_break_off, _stand_still),
)


class Storm:
    """A node, and all that happens on it at once."""

    def __init__(self, seed: int, folder: Path, server: ApiServer, *, standby: bool = False) -> None:
        self.standby, self.resource = standby, GPU
        self.random, self.folder, self.server = random.Random(seed), folder, server  # noqa: S311 - no secret
        self.plugins, self.registry = folder / "dp", folder / "plugins_registry"
        for one in (self.plugins, self.registry, folder / "state"):
            one.mkdir()
        self.profile = folder / "profile.yaml"
        self.unhealthy()
        server.put("/apis/resource.k8s.io", versions=[{"version": "v1"}])
        self.configure(GPU, CONFIGS[GPU][0])
        server.put(NODE, metadata={"uid": "node"}, status={"nodeInfo": {"kubeletVersion": "v1.37.1"}})
        server.put(f"{API}/resourceslices/other", spec={"driver": "x", "nodeName": "n2"})
        server.put(f"{API}/namespaces/x/resourceclaims/other")
        self.manager = DeviceManager(behaviour("1.37"), self.plugins)
        self.drivers: dict[Path, Kubelet] = {}
        self.gateways: tuple[int, list[GatewayProcess]] = 0, []
        """The newest pod of the gateway: its number, and its containers' processes."""
        self.holders: dict[str, tuple[str, ...]] = {}
        """What runs, and the GPUs that it has."""
        self.asked: dict[str, str] = {}
        """Which resource a pod asked for."""
        self.twice: list[str] = []
        self.saw: Counter[str] = Counter()
        self.number, self.over = 0, asyncio.Event()
        self.slices: list[dict[str, str]] = [{}]
        """What the scheduler may still go by: free devices of the last slices, with their UUIDs."""

    # Who has what.

    def has(self, holder: str, ids: tuple[str, ...]) -> None:
        """Take note of who has what. Two may share a GPU by replicas of one API."""
        self.holders.pop(holder, None)
        for other, found in self.holders.items():
            for one, had in itertools.product(ids, found):
                shares = "::" in one and "::" in had and one != had and other[0] == holder[0]
                if one.partition("::")[0] == had.partition("::")[0] and not shares:
                    self.twice.append(f"{one} with {holder}, and {had} with {other}")
        self.holders[holder] = ids

    async def runs(self, holder: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.random.choice(LASTS)):
                await self.over.wait()
        del self.holders[holder]

    # By name.

    async def pod(self, name: str) -> None:
        manager, resource = self.manager, self.resource
        self.asked[name] = resource
        try:
            admitted = await manager.admit(name, {resource: self.random.choice((1, 1, 2))})
        except KubeletError as error:
            self.saw[f"a pod was refused: {error.message:.100}"] += 1
            return
        if manager is self.manager:  # Else the kubelet died before the pod began.
            self.saw["a pod ran"] += 1
            self.has(name, admitted.devices.get(resource, ()))  # A kubelet that never heard of it gives nothing.
            await self.runs(name)
        self.manager.remove(name)

    # By claim.

    async def call(self, ask: Callable[[Kubelet], Coroutine[Any, Any, Any]]) -> Any:
        """Ask the driver until it answers, as a kubelet does again and again."""
        while True:
            try:
                # A kubelet prefers the newest to which it is connected (read in 1.37).
                if there := [driver for path, driver in self.drivers.items() if listens(path)]:
                    return await ask(there[-1])
            except grpc.aio.AioRpcError:
                pass
            except asyncio.CancelledError:  # So ends a call whose channel was closed, too.
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
            self.saw["a driver was away"] += 1
            await asyncio.sleep(0.2)

    async def claim(self, name: str, device: str, uuid: str) -> None:
        asked = ClaimName("ns", name, f"uid-{name}")
        by_name = self.told == "0" and self.random.random() < 0.5
        said = {"resource.kubernetes.io/extended-resource-claim": "true"} if by_name else {}
        about = {"uid": asked.uid, "namespace": "ns", "annotations": said}
        had: tuple[str, ...] = ()
        while True:
            result = {"request": "gpu", "driver": "gpu.nvidia.com", "pool": "n1", "device": device}
            status = {"allocation": {"devices": {"results": [result]}}}
            self.server.put(f"{CLAIMS}/{name}", metadata=about, status=status)
            answer = (await self.call(lambda driver: driver.prepare(V1, asked)))[asked.uid]
            if isinstance(answer, Refused):
                self.saw[f"a claim was refused: {answer.reason:.100}"] += 1
                break
            self.saw["a claim ran"] += 1
            self.saw["a claim ran, by name"] += by_name
            if answer[0].device == device:  # Else the API server didn't say that it is another one now.
                had = (*had, uuid)
            self.has(name, had)
            if by_name or self.random.random() < 0.8 or not (free := [*self.free().items()]):
                break
            # Its pod is deleted by force and goes on, and the kubelet starts: it asks again.
            self.saw["a claim was allocated anew"] += 1
            device, uuid = self.random.choice(free)
        if had:
            await self.runs(name)
        assert (await self.call(lambda driver: driver.unprepare(V1, asked)))[asked.uid] is None
        self.server.remove(f"{CLAIMS}/{name}")

    def free(self) -> dict[str, str]:
        """Choose a device as a scheduler does that may have old news of slices, and knows what it gave away."""
        slices = self.random.choice(self.slices[-8:])
        gone = {
            result["device"]
            for path, found in self.server.objects.items()
            if path.startswith(CLAIMS)
            for result in found["status"]["allocation"]["devices"]["results"]
        }
        return {name: uuid for name, uuid in slices.items() if name not in gone}

    @property
    def told(self) -> str:
        """What the API server shows as allocatable; only the gateway writes that here."""
        found: str = self.server.objects[NODE]["status"].get("allocatable", {}).get(GPU, "")
        return found

    # What goes wrong.

    def unhealthy(self, *ids: str) -> None:
        rows = "".join(
            f"    - {{uuid: {one}, device_nodes: [/dev/nvidia{number}]{', health: Unhealthy' if one in ids else ''}}}\n"
            for number, one in enumerate(IDS)
        )
        self.profile.with_suffix(".new").write_text(f"resources:\n  {GPU}:\n    gpus:\n{rows}")
        self.profile.with_suffix(".new").replace(self.profile)

    def configure(self, resource: str, config: str) -> None:
        self.resource, path = resource, self.folder / "config.yaml"
        path.with_suffix(".new").write_text(config)
        path.with_suffix(".new").replace(path)

    async def start_pod(self) -> None:
        number = self.gateways[0] + 1
        self.gateways = number, [await self.launch(number) for _ in range(1 + self.standby)]

    async def launch(self, pod: int) -> GatewayProcess:
        options = ["--dra", "on", "--node-name", "n1", "--kubeconfig", str(self.folder / "kubeconfig")]
        options += ["--config-file", str(self.folder / "config.yaml")]
        command = gateway_command(self.plugins, self.folder / "state", self.profile, options=options)
        command = ["env", f"POD_UID={pod}", sys.executable, "-c", _RUN, str(self.folder / "cdi"), *command[3:]]
        return await GatewayProcess.launch(command, self.folder / "log")

    async def start_kubelet(self) -> None:
        """Start the next kubelet; it deletes the node's slices."""
        self.manager = DeviceManager(
            behaviour("1.37"), self.plugins
        )  # Who is admitted by the one before from now on never runs.
        await self.manager.start(
            [Demand(name, self.asked[name], len(ids)) for name, ids in self.holders.items() if name[0] == "p"]
        )
        if SLICE in self.server.objects:
            self.server.remove(SLICE)

    async def fault(self) -> None:
        what = self.random.choice(FAULTS)
        self.saw[what] += 1
        if what == "killed":
            number, pod = self.gateways
            at = self.random.randrange(len(pod))
            self.saw[f"killed, {pod[at].stage}"] += 1
            await pod[at].kill()
            pod[at] = await self.launch(number)
        elif what == "ended":
            await asyncio.gather(*(one.terminate() for one in self.gateways[1]))
            await self.start_pod()
        elif what == "rolled":
            await self.roll()
        elif what == "kubelet":
            await self.manager.stop()
            await self.start_kubelet()
        elif what == "away":
            await self.server.stop()
            await asyncio.sleep(self.random.choice(LASTS))
            await self.server.start()
        elif what == "trouble":
            self.server.faults.extend(self.random.choices(TROUBLES, k=self.random.choice((1, 3, 10))))
        elif what == "annotated":
            self.annotate(self.random.choice(("dra", "plugin", "nonsense", None)))
        elif what == "cordoned":
            one = self.random.choice((*IDS, *(f"{one}::1" for one in IDS)))
            await self.ask({"op": "cordon", "id": one, "reason": "storm"})
        elif what == "configured":
            resource = self.random.choice((*CONFIGS,))
            self.configure(resource, self.random.choice(CONFIGS[resource]))
        else:
            self.unhealthy(*self.random.sample(IDS, self.random.choice((0, 1))))

    async def roll(self) -> None:
        """Start a newer pod beside the older one, and end one of them, at any moment of the handover."""
        older = self.gateways
        await self.start_pod()
        await asyncio.sleep(self.random.uniform(0.0, ROLLS))
        self.gateways, (_, goes) = self.random.sample((older, self.gateways), 2)
        crash = self.random.random() < 0.5
        await asyncio.gather(*(one.kill() if crash else one.terminate() for one in goes))
        self.saw["made room"] += any(one.lines("leader", stage=Stage.YIELDED.value) for one in older[1])

    def annotate(self, to: str | None) -> None:
        """Have the node's annotation want all GPUs at a side; None: it wants nothing."""
        about = {ANNOTATION: to} if to else {}
        self.server.change(NODE, lambda one: one["metadata"].update(annotations=about))

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Ask the gateway; {} where it refuses, or there is none."""
        try:
            return await control.ask(leader_socket(self.plugins, self.folder / "state"), request, 5)
        except (ControlError, OSError, ValueError) as error:  # No gateway, or one that is too young.
            self.saw[f"refused: {request['op']}: {error!s:.80}"] += 1
            return {}

    async def cross(self, to: str, *ids: str) -> list[str]:
        """Order GPUs to a side; say where all of them are."""
        answer = await self.ask({"op": "move", "to": to, "ids": list(ids)})
        return [row["side"] for row in answer.get("boards", ())]

    # All at once.

    async def watch(self) -> None:
        """Do what a kubelet and a scheduler do all the time: find drivers, and look at slices."""
        known: dict[Path, tuple[int, int]] = {}
        while True:
            before, known = known, {}
            for path in self.registry.glob("*.sock"):
                with contextlib.suppress(FileNotFoundError):
                    known[path] = path.lstat().st_ino, path.lstat().st_ctime_ns  # Inodes are used again.
            gone = {path for path in self.drivers if known.get(path) != before.get(path)}
            for path in gone:
                await self.drivers.pop(path).channel.close()
            for path in known.keys() - self.drivers.keys():
                driver = Kubelet(path, GIVES_UP)
                try:
                    await driver.call(pluginregistration.GET_INFO)
                    await driver.call(pluginregistration.NOTIFY, pluginregistration.encode_status(""))
                except grpc.aio.AioRpcError:
                    await driver.channel.close()
                else:
                    self.drivers[path] = driver
            devices = self.server.objects.get(SLICE, {}).get("spec", {}).get("devices", ())
            free = {one["name"]: _device_id(one) for one in devices if not one.get("taints")}
            self.slices.append(free)
            await asyncio.sleep(0.05)

    async def often(self, rate: float, do: Callable[[], Coroutine[Any, Any, object]]) -> None:
        await asyncio.sleep(self.random.expovariate(rate))
        while not self.over.is_set():
            await do()
            await asyncio.sleep(self.random.expovariate(rate))

    async def rage(self, seconds: float) -> None:
        async with asyncio.TaskGroup() as group:

            async def begin() -> None:
                self.number += 1
                if free := [*self.free().items()]:
                    group.create_task(self.claim(f"c{self.number}", *self.random.choice(free)))
                else:
                    group.create_task(self.pod(f"p{self.number}"))

            async def order() -> None:
                to = self.random.choice(("dra", "dra", "plugin"))
                await self.cross(to, *self.random.sample(IDS, self.random.choice((0, 1, 2))))

            for rate, do in ((8.0, begin), (1.0, order), (0.5, self.fault)):
                group.create_task(self.often(rate, do))
            await asyncio.sleep(seconds)
            with contextlib.suppress(TimeoutError):  # A disk that stands still lets neither run for a while.
                await until(lambda: self.saw.keys() >= RAN, ENDS / 2)
            self.over.set()
            await self.calm()  # From here on all that waits must end.

    async def forget(self) -> None:
        """Say that pods have ended which a kubelet forgot, as the gateway asks for."""
        for one in (*IDS, *(f"{one}::{part}" for one in IDS for part in (0, 1))):
            await self.ask({"op": "forget", "id": one})

    async def has_begun(self) -> bool:
        """Whether there is a GPU for a first claim."""
        await self.cross("dra", IDS[0])
        return bool(self.slices[-1])

    async def all_at(self, to: str) -> bool:
        """Whether all GPUs got to a side, and are on offer there."""
        if [*await self.cross(to)] != [to] * len(IDS):
            return False
        return len(self.slices[-1]) == (len(IDS) if to == "dra" else 0)

    async def calm(self) -> None:
        """Have nothing wrong any more, and nothing wanted."""
        self.unhealthy()
        self.server.faults.clear()
        self.annotate(None)
        self.configure(GPU, CONFIGS[GPU][0])
        async with asyncio.timeout(ENDS):
            for one in IDS:
                while not await self.ask({"op": "uncordon", "id": one}):  # noqa: ASYNC110 - it is a question to another
                    await asyncio.sleep(0.2)

    @contextlib.asynccontextmanager
    async def node(self) -> AsyncIterator[None]:
        self.server.kubeconfig(self.folder / "kubeconfig")
        await self.manager.start()
        await self.start_pod()
        watching = asyncio.ensure_future(self.watch())
        try:
            await self.manager.wait(GPU, len(IDS), 30)
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await asyncio.gather(*(one.kill() for one in self.gateways[1]))
            await self.manager.stop()
            for driver in self.drivers.values():
                await driver.channel.close()


def _device_id(shown: dict[str, Any]) -> str:
    """Give the ID of a device that a slice shows: a replica's name ends with its number."""
    uuid: str = shown["attributes"]["uuid"]["string"]
    _, is_shared, number = shown["name"].partition("-shared-")
    return f"{uuid}::{number}" if is_shared else uuid


@pytest.mark.parametrize("standby", [False, True], ids=["alone", "with a standby"])
@pytest.mark.parametrize("seed", range(STORMS))
async def test_no_gpu_is_with_two_and_none_is_lost(seed: int, folder: Path, server: ApiServer, standby: bool) -> None:
    storm = Storm(seed, folder, server, standby=standby)
    async with storm.node():
        await until(storm.has_begun, ENDS, every=0.2)
        async with asyncio.timeout(SECONDS + ENDS):
            await storm.rage(SECONDS)
        assert storm.twice == []
        await storm.forget()
        for to in storm.random.sample(("dra", "plugin"), 2):
            await until(lambda to=to: storm.all_at(to), ENDS, every=0.2)  # type: ignore[misc]
            if to == "plugin":
                await storm.manager.wait(GPU, len(IDS), 30)
    assert "Traceback" not in (folder / "log").read_text()
    assert storm.saw.keys() >= RAN, storm.saw
