"""A node on which a whole gateway serves DRA, and calls that a kubelet makes of its driver."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import grpc.aio
import msgspec
import structlog
from structlog.typing import EventDict

from adapters import pluginregistration
from adapters.dra import health, plugin
from adapters.dra.plugin import V1, PluginApi
from devices.claims import ClaimName
from devices.gpu.nvidia.cdi import DriverFiles
from devices.gpu.nvidia.survey import keep
from devices.gpu.simulated.backend import VENDORS, SimulatedBackend
from devices.gpu.source import GPUSource
from devices.life.states import State
from devices.policy import ListStrategy, Policy
from gateway.configuration.settings import Settings
from gateway.daemon import Gateway
from gateway.dra import sockets
from gateway.kubelet.watch import CHECKPOINT
from gateway.lab.gatewayproc import BEGUN
from gateway.lab.kubelets.behaviour import behaviour
from gateway.lab.kubelets.devicemanager import DeviceManager
from gateway.wires import control
from gateway.wires.rpc import target
from tests.fakes.apiserver import ApiServer
from tests.unit import dracalls
from tests.unit.kubernetes import until

GPU = "nvidia.com/gpu"
API = "/apis/resource.k8s.io/v1"
SLICE = f"{API}/resourceslices/n1-gpu.nvidia.com-0"
PROFILE = """
resources:
  nvidia.com/gpu:
    gpus:
    - {uuid: GPU-a, device_nodes: [/dev/nvidia0]}
    - {uuid: GPU-b, device_nodes: [/dev/nvidia1]}
"""


class Kubelet:
    """Calls a driver as a kubelet does."""

    def __init__(self, path: Path, patience: float = 10.0) -> None:
        self.channel, self._patience = grpc.aio.insecure_channel(target(path)), patience

    async def call(self, where: str, data: bytes = b"") -> bytes:
        ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(where)
        return await ask(data, timeout=self._patience)

    def watch(self, version: str) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
        where = f"/{health.service(version)}/{health.WATCH}"
        ask: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self.channel.unary_stream(where)
        return ask(b"")

    async def prepare(self, api: PluginApi, *asked: ClaimName) -> Any:
        wire = await self.call(f"/{api.service}/{plugin.PREPARE}", dracalls.request(api, asked))
        return dracalls.prepare_answer(api, wire)

    async def unprepare(self, api: PluginApi, *asked: ClaimName) -> Any:
        wire = await self.call(f"/{api.service}/{plugin.UNPREPARE}", dracalls.request(api, asked))
        return dracalls.unprepare_answer(api, wire)


class Place:
    """A node's folders, and gateways on it."""

    def __init__(self, folder: Path, server: ApiServer, plugins: str = "dp") -> None:
        self.folder, self.server, self.plugins = folder, server, folder / plugins
        (folder / "plugins_registry").mkdir()
        self.profile = folder / "profile.yaml"
        if not self.plugins.exists():  # There is no kubelet, which would have made it.
            self.plugins.mkdir()
            self.profile.write_text(PROFILE)
            self.holds()
        server.put("/apis/resource.k8s.io", versions=[{"version": "v1"}])
        server.put("/api/v1/nodes/n1", metadata={"uid": "node-uid"}, status={"nodeInfo": {"kubeletVersion": "v1.37.1"}})
        server.put(f"{API}/resourceslices/other", spec={"driver": "x", "nodeName": "n2"})

    def holds(self, *device_ids: str) -> None:
        """Have pods hold devices, by the kubelet's checkpoint."""
        entry = {
            "PodUID": "u",
            "ContainerName": "main",
            "ResourceName": GPU,
            "DeviceIDs": list(device_ids),
            "AllocResp": "",
        }
        found = {"PodDeviceEntries": [entry] if device_ids else [], "RegisteredDevices": {}}
        (self.plugins / CHECKPOINT).write_bytes(msgspec.json.encode(found))

    def claim(self, name: str, uid: str, device: str, api: str = API) -> ClaimName:
        result = {"request": "gpu", "driver": "gpu.nvidia.com", "pool": "n1", "device": device}
        path, reserved = (
            f"{api}/namespaces/ns/resourceclaims/{name}",
            [{"resource": "pods", "name": "p", "uid": "uid-p"}],
        )
        self.server.put(
            path,
            metadata={"uid": uid, "namespace": "ns"},
            status={"allocation": {"devices": {"results": [result]}}, "reservedFor": reserved},
        )
        return ClaimName("ns", name, uid)

    def made(self, dra: str, before: Sequence[int] = ()) -> Gateway:
        """Make a gateway."""
        policy = Policy(list_strategies=frozenset({ListStrategy.CDI_CRI if dra == "only" else ListStrategy.ENVVAR}))
        settings = Settings(
            socket_dir=self.plugins,
            state_dir=self.folder / "state",
            policy=policy,
            dra=dra,
            node_name="n1",
        )
        survey = partial(keep, driver=DriverFiles(()), folder=self.folder / "cdi")
        source = GPUSource(SimulatedBackend(str(self.profile)), policy, VENDORS, survey)
        return Gateway(settings, source, before=before)

    @contextlib.asynccontextmanager
    async def gateway(
        self, dra: str, *, registers: bool = True, status: int = 0, seconds: float = 20
    ) -> AsyncIterator[Gateway]:
        """Have a gateway for so many seconds that ends with a status; ``registers``: a kubelet takes its driver as soon as that is there."""
        serving = asyncio.Event()

        def heard(_logger: object, _level: str, event: EventDict) -> EventDict:
            if event["event"] in BEGUN:
                serving.set()
            raise structlog.DropEvent

        structlog.configure(processors=[heard])
        one = self.made(dra)
        run = asyncio.ensure_future(one.run())
        registering = asyncio.ensure_future(self._register(one) if registers else asyncio.sleep(0))
        try:
            async with asyncio.timeout(seconds):
                await serving.wait()
                yield one
        finally:
            registering.cancel()
            one._end(0)
            async with asyncio.timeout(20):
                assert await run == status
            with contextlib.suppress(asyncio.CancelledError):
                await registering
            structlog.reset_defaults()

    async def _register(self, one: Gateway) -> None:
        path = sockets.path_of(self.folder / "plugins_registry", "gpu.nvidia.com", one.age.token)
        await until(path.exists)
        kubelet = Kubelet(path)
        async with kubelet.channel:
            await kubelet.call(pluginregistration.NOTIFY, pluginregistration.encode_status(""))

    @property
    def published(self) -> dict[str, list[str]]:
        return self.published_at(API)

    def published_at(self, api: str) -> dict[str, list[str]]:
        path = SLICE.replace(API, api)
        devices = self.server.objects.get(path, {}).get("spec", {}).get("devices", ())
        return {one["name"]: [taint["key"] for taint in one.get("taints", ())] for one in devices}

    async def kubelet(self) -> Kubelet:
        registry = self.folder / "plugins_registry"
        await until(lambda: list(registry.iterdir()))
        [path] = registry.iterdir()
        return Kubelet(path)


def states(gateway: Gateway) -> dict[str, State]:
    return {device_id: one.state for plugin in gateway.resources for device_id, one in plugin.entries.items()}


class Node:
    """A node with both APIs: a kubelet's device manager, its DRA manager, and the API server."""

    def __init__(self, place: Place) -> None:
        self.place = place
        (place.plugins / CHECKPOINT).unlink(missing_ok=True)
        place.server.put(f"{API}/namespaces/x/resourceclaims/other")
        self.manager = DeviceManager(behaviour("1.37"), place.plugins)
        self.claims: Kubelet

    @classmethod
    def beside(cls, place: Place) -> Self:
        """Make one beside a kubelet that is there."""
        one = cls.__new__(cls)
        one.place = place
        return one

    @contextlib.asynccontextmanager
    async def gateway(self, *, known: bool = True, status: int = 0, seconds: float = 20) -> AsyncIterator[Gateway]:
        async with self.place.gateway("on", registers=known, status=status, seconds=seconds) as one:
            registry = self.place.folder / "plugins_registry"
            if known:
                await until(lambda: list(registry.iterdir()))
                self.claims = await self.place.kubelet()
                await self.claims.call(pluginregistration.NOTIFY, pluginregistration.encode_status(""))
            try:
                yield one
            finally:
                if known:
                    await self.claims.channel.close()

    async def cross(self, to: str, *ids: str, dry_run: bool = False) -> dict[str, str]:
        [path] = control.sockets(self.place.folder / "state")
        answer = await control.ask(path, {"op": "cross", "to": to, "ids": list(ids), "dry_run": dry_run}, 10)
        return {row["id"]: row["side"] for row in answer["boards"]}

    async def stand(self, **sides: str) -> None:
        async with asyncio.timeout(10):
            wanted = {f"GPU-{name}": side for name, side in sides.items()}
            while await self.cross("dra", dry_run=True) != wanted:  # noqa: ASYNC110 - it is a question to another
                await asyncio.sleep(0.02)

    @property
    def told(self) -> dict[str, str]:
        """What the API server shows as allocatable; only the gateway writes that here."""
        found: dict[str, str] = self.place.server.objects["/api/v1/nodes/n1"]["status"].get("allocatable", {})
        return found

    def by_name(self, name: str, uid: str, device: str) -> ClaimName:
        """Have a claim that the scheduler made for a pod that asked by name."""
        asked = self.place.claim(name, uid, device)
        said = {"resource.kubernetes.io/extended-resource-claim": "true"}
        path = f"{API}/namespaces/ns/resourceclaims/{name}"
        self.place.server.change(path, lambda one: one["metadata"].update(annotations=said))
        return asked

    async def allocatable(self, count: int) -> None:
        await self.manager.wait(GPU, count)

    async def at_dra(self) -> None:
        """Have both GPUs at DRA."""
        await self.allocatable(2)
        await self.cross("dra")
        await self.stand(a="dra", b="dra")

    async def lent(self) -> ClaimName:
        """Have B back from DRA, and A on its way, because a pod that asked by name holds it; give that pod's claim."""
        await self.at_dra()
        asked = self.by_name("c", "uid-c", "gpu-0")
        assert isinstance((await self.claims.prepare(V1, asked))["uid-c"], tuple)
        await self.cross("plugin")
        await self.stand(a="to-plugin", b="plugin")
        return asked

    @contextlib.asynccontextmanager
    async def newer(self) -> AsyncIterator[tuple[Gateway, asyncio.Task[int]]]:
        """Run one beside another, up to where it could take over but for a kubelet that takes its driver."""
        one = self.place.made("on")
        running = asyncio.create_task(one.run())
        try:
            await until(lambda: "expected the kubelet to have taken the DRA driver" in one.waits_for)
            yield one, running
        finally:
            one._end(0)
            await running


def listening(path: Path) -> socket.socket:
    one = socket.socket(socket.AF_UNIX)
    one.bind(str(path))
    one.listen()
    return one
