"""A node on which a whole gateway serves DRA, and calls that a kubelet makes of its driver."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import structlog
from structlog.typing import EventDict

from adapters import pluginregistration
from adapters.dra import plugin
from adapters.dra.plugin import PluginApi
from devices.claims import ClaimName
from devices.gpu.nvidia.cdi import DriverFiles
from devices.gpu.nvidia.cdifiles import write_all
from devices.gpu.simulated.backend import VENDORS, SimulatedBackend
from devices.gpu.source import GPUSource
from devices.policy import ListStrategy, Policy
from gateway.configuration.settings import Settings
from gateway.daemon import Gateway
from gateway.dra import sockets
from gateway.wires import control
from gateway.wires.rpc import target
from gateway_lab.gatewayproc import BEGUN
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

    async def prepare(self, api: PluginApi, *asked: ClaimName) -> Any:
        wire = await self.call(f"/{api.service}/{plugin.PREPARE}", dracalls.request(api, asked))
        return dracalls.prepare_answer(api, wire)

    async def unprepare(self, api: PluginApi, *asked: ClaimName) -> Any:
        wire = await self.call(f"/{api.service}/{plugin.UNPREPARE}", dracalls.request(api, asked))
        return dracalls.unprepare_answer(api, wire)


class Place:
    """A node's folders, and gateways on it."""

    def __init__(self, folder: Path, server: ApiServer, plugins: str) -> None:
        self.folder, self.server, self.plugins = folder, server, folder / plugins
        (folder / "plugins_registry").mkdir()
        self.profile = folder / "profile.yaml"
        server.put("/apis/resource.k8s.io", versions=[{"version": "v1"}])
        server.put("/api/v1/nodes/n1", metadata={"uid": "node-uid"}, status={"nodeInfo": {"kubeletVersion": "v1.37.1"}})
        server.put(f"{API}/resourceslices/other", spec={"driver": "x", "nodeName": "n2"})

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

    def made(self, dra: str) -> Gateway:
        """Make a gateway."""
        policy = Policy(list_strategies=frozenset({ListStrategy.CDI_CRI if dra == "only" else ListStrategy.ENVVAR}))
        settings = Settings(
            socket_dir=self.plugins,
            state_dir=self.folder / "state",
            policy=policy,
            dra=dra,
            node_name="n1",
        )
        survey = partial(write_all, driver=DriverFiles(()), folder=self.folder / "cdi")
        source = GPUSource(SimulatedBackend(str(self.profile)), policy, VENDORS, survey)
        return Gateway(settings, source)

    @contextlib.asynccontextmanager
    async def gateway(self, dra: str) -> AsyncIterator[Gateway]:
        """Have a gateway whose driver a kubelet takes as soon as that is there."""
        serving = asyncio.Event()

        def heard(_logger: object, _level: str, event: EventDict) -> EventDict:
            if event["event"] in BEGUN:
                serving.set()
            raise structlog.DropEvent

        structlog.configure(processors=[heard])
        one = self.made(dra)
        run = asyncio.ensure_future(one.run())
        registering = asyncio.ensure_future(self._register(one))
        try:
            async with asyncio.timeout(20):
                await serving.wait()
                yield one
        finally:
            registering.cancel()
            one._tasks.end(0)
            async with asyncio.timeout(20):
                assert await run == 0
            with contextlib.suppress(asyncio.CancelledError):
                await registering
            structlog.reset_defaults()

    async def _register(self, one: Gateway) -> None:
        path = sockets.path_of(self.folder / "plugins_registry", "gpu.nvidia.com", one._instance.age.token)
        await until(path.exists)
        kubelet = Kubelet(path)
        async with kubelet.channel:
            await kubelet.call(pluginregistration.NOTIFY, pluginregistration.encode_status(""))

    @property
    def published(self) -> dict[str, list[str]]:
        devices = self.server.objects.get(SLICE, {}).get("spec", {}).get("devices", ())
        return {one["name"]: [taint["key"] for taint in one.get("taints", ())] for one in devices}

    async def kubelet(self) -> Kubelet:
        registry = self.folder / "plugins_registry"
        await until(lambda: list(registry.glob("[!.]*")))
        [path] = registry.glob("[!.]*")
        return Kubelet(path)


class Node:
    """A node with both APIs: a kubelet, and what calls the drivers there."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.claims: Kubelet

    @contextlib.asynccontextmanager
    async def gateway(self) -> AsyncIterator[Gateway]:
        async with self.place.gateway("on") as one:
            self.claims = await self.place.kubelet()
            await self.claims.call(pluginregistration.NOTIFY, pluginregistration.encode_status(""))
            try:
                yield one
            finally:
                await self.claims.channel.close()

    async def cross(self, to: str) -> None:
        [path] = control.sockets(self.place.folder / "state")
        await control.ask(path, {"op": "move", "to": to, "ids": [], "dry_run": False}, 10)
