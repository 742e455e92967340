"""The cluster around a node: its API server, what the scheduler allocates, and a kubelet that has claims prepared."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import stat
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

import grpc
import pytest
import trustme

from adapters import pluginregistration
from adapters.dra import health
from adapters.dra.plugin import PREPARE, UNPREPARE, V1, V1BETA1, PluginApi
from adapters.pb.dra import health_pb2
from adapters.pb.pluginregistration.v1_pb2 import RegistrationStatus
from gateway_lab.kubelets.kubelet import KubeletError
from tests.contract import wire
from tests.contract.clock import Process
from tests.contract.node import GPU, Gateway, Kubelet, Node
from tests.fakes.apiserver import Answer, ApiServer, Request, issued

AUTHORITY: Final = trustme.CA()
issued(AUTHORITY, "127.0.0.1")  # Once for all rows.
NAME: Final = "n1"
"""The node's."""
AT: Final = f"/api/v1/nodes/{NAME}"
GROUP: Final = "/apis/resource.k8s.io"
NVIDIA: Final = "gpu.nvidia.com"
_APIS: Final = {32: "v1beta1", 33: "v1beta2"}
"""What the API server of 1.N has of resource.k8s.io; later ones have v1."""
_LOOK_S: Final = 1.0
"""Seconds between two looks of the kubelet for drivers (reconciler.go)."""
_CALL_S: Final = 45.0
_REPORT_S: Final = 10.0
"""Seconds between two reports of a kubelet to the API server (nodeStatusUpdateFrequency)."""
_WIPE_S: Final = 30.0
"""Seconds after which a kubelet deletes the ResourceSlices of a driver that has gone."""


class UnschedulableError(Exception):
    """The scheduler finds no device for a claim."""


@dataclass(frozen=True)
class Claim:
    """A ResourceClaim that was allocated."""

    name: str
    uid: str
    path: str
    device: str
    driver: str = NVIDIA
    shares: int = 0
    """How many shares of the device it was allocated; 0: all of it."""


@dataclass(frozen=True)
class Got:
    """What a container of a claim gets, as the container runtime resolves it; ``shares`` are the share IDs that the kubelet was told."""

    names: tuple[str, ...]
    envs: Mapping[str, str]
    nodes: tuple[str, ...]
    shares: tuple[str, ...] = ()
    requests: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For which of the claim's requests each device is."""

    @property
    def gpus(self) -> frozenset[str]:
        """The GPUs."""
        return frozenset(name.partition("=")[2] for name in self.names if name.startswith(f"k8s.device-plugin.{GPU}="))


@dataclass(eq=False)
class Driver:
    """A driver that a kubelet has registered."""

    name: str
    path: Path
    api: PluginApi
    versions: tuple[str, ...]
    channel: wire.Channel
    seen: tuple[int, int] = field(default=(0, 0))


class DraManager:
    """A kubelet's DRA manager: finds drivers in ``plugins_registry``, and calls the newest one that is connected."""

    def __init__(self, cluster: Cluster, kubelet: Kubelet) -> None:
        self._cluster, self._kubelet = cluster, kubelet
        self._minor = int(kubelet.version.partition(".")[2])
        self._folder = cluster.node.folder / "plugins_registry"
        self.drivers: list[Driver] = []
        """In the order in which they were registered."""
        self.refuses = ""
        """Why it takes no driver; a blank is no reason."""
        self._gone_at: dict[str, float] = {}

    async def run(self) -> None:
        """Look for drivers, for ever."""
        self._folder.mkdir(exist_ok=True)
        self._cluster.wipe()
        while True:
            for path in sorted(one for one in self._folder.iterdir() if not one.name.startswith(".")):
                seen = _socket(path)
                if seen is not None and all((one.path, one.seen) != (path, seen) for one in self.drivers):
                    await self._meet(path, seen)
            for one in [one for one in self.drivers if _socket(one.path) != one.seen]:
                # Up to 1.32 a name is registered once: the end of any instance is the end of all.
                self.drivers = [
                    other for other in self.drivers if other is not one and (self._minor > 32 or other.name != one.name)
                ]
                self._gone_at[one.name] = asyncio.get_running_loop().time()
            self._wipe_gone(asyncio.get_running_loop().time())
            await asyncio.sleep(_LOOK_S)

    def _wipe_gone(self, now: float) -> None:
        for one in self.drivers if self._minor >= 34 else ():
            if not _listens(one.path):
                self._gone_at.setdefault(one.name, now)
        for name, at in list(self._gone_at.items()):
            if any(one.name == name and _listens(one.path) for one in self.drivers):
                del self._gone_at[name]
            elif now - at > _WIPE_S:
                del self._gone_at[name]
                self._cluster.wipe(name)

    async def _meet(self, path: Path, seen: tuple[int, int]) -> None:
        channel = wire.Channel(f"unix:{path}")
        try:
            info = pluginregistration.decode_info(
                await channel.unary_unary(pluginregistration.GET_INFO)(b"", timeout=10)
            )
        except grpc.aio.AioRpcError:
            await channel.close()
            return
        known = [
            one for one in (V1, V1BETA1) if one.registered_as in info.versions and (self._minor >= 34 or one is V1BETA1)
        ]
        if info.kind != "DRAPlugin" or not known or self.refuses:
            reason = self.refuses or "no version that this kubelet knows"
            status = RegistrationStatus(error=reason.strip()).SerializeToString()
        else:
            status = pluginregistration.encode_status("")
            if self._minor <= 32:
                self.drivers = [one for one in self.drivers if one.name != info.name]
            self.drivers.append(Driver(info.name, path, known[0], info.versions, channel, seen))
        with contextlib.suppress(grpc.aio.AioRpcError):
            await channel.unary_unary(pluginregistration.NOTIFY)(status, timeout=10)

    def driver(self, name: str = NVIDIA) -> Driver | None:
        """Return the instance that is called; None: there is none."""
        there = [one for one in self.drivers if one.name == name]
        return next((one for one in reversed(there) if _listens(one.path)), there[-1] if there else None)

    async def prepare(self, claim: Claim, by: Driver | None = None) -> Got:
        """Have a claim prepared; ``by`` an instance of the driver that is not the one that a kubelet calls.

        Raises:
            KubeletError: that was refused.
        """
        one = by or self._driver_of(claim)
        answer = one.api.pb.NodePrepareResourcesResponse()
        await self._call(one, PREPARE, one.api.pb.NodePrepareResourcesRequest, claim, answer)
        got = answer.claims[claim.uid]
        if got.error or not got.devices:
            raise KubeletError("prepare", got.error or "no device came")
        names = tuple(name for device in got.devices for name in device.cdi_device_ids)
        shares = tuple(device.share_id for device in got.devices) if one.api.carries_share else ()
        requests = {device.device_name: tuple(device.request_names) for device in got.devices}
        return replace(resolved(self._cluster.node.cdi, names), shares=shares, requests=requests)

    async def unprepare(self, claim: Claim, by: Driver | None = None) -> None:
        """Have a claim unprepared; ``by`` as above.

        Raises:
            KubeletError: that was refused.
        """
        one = by or self._driver_of(claim)
        answer = one.api.pb.NodeUnprepareResourcesResponse()
        await self._call(one, UNPREPARE, one.api.pb.NodeUnprepareResourcesRequest, claim, answer)
        if answer.claims[claim.uid].error:
            raise KubeletError("unprepare", answer.claims[claim.uid].error)

    def _driver_of(self, claim: Claim) -> Driver:
        if (one := self.driver(claim.driver)) is None:
            raise KubeletError("DRA", f"DRA driver {claim.driver} is not registered")
        return one

    @property
    def is_connected(self) -> bool:
        """Whether there is a driver that can be called."""
        return any(_listens(one.path) for one in self.drivers)

    async def _call(self, one: Driver, method: str, kind: Any, claim: Claim, answer: Any) -> None:
        request = kind(claims=[one.api.pb.Claim(namespace="default", name=claim.name, uid=claim.uid)])
        where = f"/{one.api.service}/{method}"
        try:
            answer.ParseFromString(await one.channel.unary_unary(where)(request.SerializeToString(), timeout=_CALL_S))
        except grpc.aio.AioRpcError as error:
            raise KubeletError(method, f"{error.code().name}: {error.details()}") from None
        if claim.uid not in answer.claims:
            raise KubeletError(method, "the answer lacks the claim")

    async def ask(self, where: str, data: bytes = b"") -> tuple[str, bytes]:
        """Call a method of the newest driver with any bytes; return how that ended and the answer."""
        try:
            return "OK", await self.drivers[-1].channel.unary_unary(where)(data, timeout=_CALL_S)
        except grpc.aio.AioRpcError as error:
            return error.code().name, b""

    async def health(self, version: str = health.VERSIONS[0]) -> AsyncGenerator[dict[str, bool | None]]:
        """Give what the driver says of its devices' health, each time it says something."""
        one = next(one for one in reversed(self.drivers) if _listens(one.path))
        assert health.service(version) in one.versions
        call = one.channel.unary_stream(f"/{health.service(version)}/{health.WATCH}")(b"")
        meanings = {health_pb2.HEALTHY: True, health_pb2.UNHEALTHY: False}
        while True:
            said = health_pb2.NodeWatchResourcesResponse.FromString(await call.read())
            yield {one.device.device_name: meanings.get(one.health) for one in said.devices}


class Cluster:
    """An API server, and what is done there."""

    def __init__(self, node: Node, version: str = "1.34") -> None:
        self.node = node
        self.server = ApiServer(AUTHORITY)
        self.version = _APIS.get(int(version.partition(".")[2]), "v1")
        self.kubeconfig = node.folder / "kubeconfig"
        self.running: dict[str, tuple[str, Claim]] = {}
        """The claims that a kubelet has prepared, by UID, each with its pod: the kubelet's own checkpoint."""
        self._dra: DraManager | None = None
        self._uids = 0
        self._healed = asyncio.Event()
        content: dict[str, dict[str, Any]] = {
            GROUP: {"versions": [{"version": self.version}]},
            AT: {"metadata": {"uid": "node-uid"}, "status": {"nodeInfo": {"kubeletVersion": f"v{version}.1"}}},
            f"{self.api}/resourceslices/other": {"spec": {"driver": "x", "nodeName": "n2"}},
            f"{self.api}/namespaces/x/resourceclaims/other": {},
            f"{self.api}/deviceclasses/{NVIDIA}": {"spec": {}},
        }
        for path, found in content.items():
            self.server.put(path, **found)

    async def __aenter__(self) -> Self:
        await self.server.start()
        self.server.kubeconfig(self.kubeconfig)
        return self

    async def __aexit__(self, *_: object) -> None:
        for one in self.node.gateways:
            one.kill()
        self.node.kill_kubelet()
        await self.server.stop()

    def hang(self) -> None:
        """Answer no request from now on, until ``heal``."""
        self.server.always = self._stand_still

    def heal(self) -> None:
        """Answer again, also what came meanwhile."""
        self.server.always = None
        self._healed.set()
        self._healed = asyncio.Event()

    def mute(self) -> None:
        """Have nothing come any more on the watches that there are, as behind a proxy that has lost the server."""
        self.server.mute = self.server.watches

    async def _stand_still(self, answer: Answer, request: Request) -> None:
        await self._healed.wait()
        await self.server.answer(answer, request)

    async def upgrade(self, version: str) -> None:
        """Start the API server again as a release with another version of resource.k8s.io."""
        await self.server.upgrade(version)
        self.version = version

    @property
    def api(self) -> str:
        """Where resource.k8s.io is."""
        return f"{GROUP}/{self.version}"

    # -- the node -----------------------------------------------------------------------------------------------------

    def gateway(self, *options: str, **more: Any) -> Gateway:
        """Start a gateway that reaches the API server."""
        return self.node.gateway("--kubeconfig", str(self.kubeconfig), "--node-name", NAME, *options, **more)

    def restart_gateway(self, *options: str) -> Gateway:
        """Kill the newest gateway, and start another one."""
        self.node.gateways[-1].kill()
        return self.gateway(*options)

    async def start_kubelet(self, version: str = "1.34") -> DraManager:
        """Start a kubelet that takes claims, and tells the API server what is allocatable."""
        self.server.change(AT, lambda node: node["status"].update(nodeInfo={"kubeletVersion": f"v{version}.1"}))
        kubelet = await self.node.start_kubelet(version)
        self._dra = dra = kubelet.process.context.run(DraManager, self, kubelet)
        if int(version.partition(".")[2]) >= min(_APIS):
            _ = kubelet.process.run(dra.run())
        _ = kubelet.process.run(self._report())
        return dra

    @property
    def dra(self) -> DraManager:
        """The kubelet's DRA manager."""
        assert self._dra is not None
        return self._dra

    async def _report(self) -> None:
        while True:
            totals = self.node.kubelet.manager.totals()
            self.tell({name: str(count) for name, count in totals.allocatable.items()})
            await asyncio.sleep(_REPORT_S)

    def tell(self, allocatable: Mapping[str, str]) -> None:
        """Have the API server show the node's allocatable devices."""
        if self.server.objects[AT]["status"].get("allocatable", {}) != allocatable:
            self.server.change(AT, lambda node: node["status"].update(allocatable=dict(allocatable)))

    @property
    def allocatable(self) -> int:
        """How many GPUs the API server shows as allocatable."""
        return int(self.server.objects[AT]["status"].get("allocatable", {}).get(GPU, 0))

    def wipe(self, driver: str = "") -> None:
        """Delete the node's ResourceSlices, as a kubelet does when it starts, or when a driver has gone."""
        for path, found in list(self.server.objects.items()):
            spec = found.get("spec", {})
            ours = "/resourceslices/" in path and spec["nodeName"] == NAME
            if ours and (not driver or spec["driver"] == driver):
                self.server.remove(path)

    # -- what the scheduler sees --------------------------------------------------------------------------------------

    def slices(self, driver: str = NVIDIA) -> dict[str, dict[str, Any]]:
        """Return a driver's devices on the node by name, from the newest whole generation of its pool."""
        pool = [
            found["spec"]
            for path, found in self.server.objects.items()
            if "/resourceslices/" in path and (found["spec"]["driver"], found["spec"].get("nodeName")) == (driver, NAME)
        ]
        newest = max((one["pool"]["generation"] for one in pool), default=0)
        whole = [one for one in pool if one["pool"]["generation"] == newest]
        if not whole or len(whole) != whole[0]["pool"]["resourceSliceCount"]:
            return {}
        return {device["name"]: device.get("basic", device) for one in whole for device in one["devices"]}

    def published(self, driver: str = NVIDIA) -> dict[str, list[str]]:
        """Return the devices that slices offer, each with the keys of its taints."""
        return {
            name: [one["key"].partition("/")[2] for one in device.get("taints", ()) if one["effect"] == "NoSchedule"]
            for name, device in self.slices(driver).items()
        }

    def generation(self, driver: str = NVIDIA) -> int:
        """Return the generation of a driver's pool; 0: there is none."""
        specs = (found["spec"] for path, found in self.server.objects.items() if "/resourceslices/" in path)
        return max((one["pool"]["generation"] for one in specs if one["driver"] == driver), default=0)

    def sizes(self) -> list[int]:
        """Return how many devices each slice of the node has, the most first."""
        specs = (found["spec"] for path, found in self.server.objects.items() if "/resourceslices/" in path)
        return sorted((len(one["devices"]) for one in specs if one["nodeName"] == NAME), reverse=True)

    def claims(self, driver: str = NVIDIA) -> dict[str, str]:
        """Return the claims that have each device of a driver on the node, by device."""
        return {
            result["device"]: path
            for path, found in self.server.objects.items()
            if "/resourceclaims/" in path
            for result in found.get("status", {}).get("allocation", {}).get("devices", {}).get("results", ())
            if (result["driver"], result["pool"]) == (driver, NAME)
        }

    def claim(self, name: str, device: str = "", *, driver: str = NVIDIA, by_name: bool = False) -> Claim:
        """Have the scheduler allocate a device to a new claim: any that is free, or this one.

        Raises:
            UnschedulableError: there is none.
        """
        taken = self.claims(driver)
        free = [one for one, taints in self.published(driver).items() if not taints and one not in taken]
        if device not in {"", *free} or not free:
            raise UnschedulableError(f"{device or 'no device'} is free, but {free}")
        return self.allocate(name, device or free[0], driver=driver, by_name=by_name)

    def allocate(
        self,
        name: str,
        device: str,
        *others: str,
        driver: str = NVIDIA,
        pool: str = NAME,
        by_name: bool = False,
        **more: Any,
    ) -> Claim:
        """Allocate a device, and others with it, to a claim, new or not, whatever slices say now."""
        path = f"{self.api}/namespaces/default/resourceclaims/{name}"
        self._uids += 1
        uid = self.server.objects.get(path, {}).get("metadata", {}).get("uid") or f"uid-{self._uids}"
        results = [
            {"request": "gpu", "driver": driver, "pool": pool, "device": one, **more} for one in (device, *others)
        ]
        pods = [{"resource": "pods", "name": name, "uid": name}]
        metadata: dict[str, Any] = {"uid": uid, "namespace": "default"}
        if by_name:
            metadata["annotations"] = {"resource.kubernetes.io/extended-resource-claim": "true"}
        status = {"allocation": {"devices": {"results": results}}, "reservedFor": pods}
        self.server.put(path, metadata=metadata, status=status)
        return Claim(name, uid, path, device, driver)

    def share(self, name: str, count: int = 1, device: str = "", **more: Any) -> Claim:
        """Have the scheduler allocate shares of a device to a new claim: of the first that has so many left, or of this one.

        Raises:
            UnschedulableError: there is none.
        """
        left, taken = Counter[str](), self.claims()
        for one, said in self.slices().items():
            if said.get("allowMultipleAllocations") and not said.get("taints"):
                left[one] = int(said["capacity"]["shares"]["value"])
            elif one not in taken:
                left[one] = 0
        for found in self.server.objects.values():
            for result in found.get("status", {}).get("allocation", {}).get("devices", {}).get("results", ()):
                left[result["device"]] -= int(result.get("consumedCapacity", {}).get("shares", 0))
        fits = [one for one in left if left[one] >= count and device in {"", one}]
        if not fits:
            raise UnschedulableError(f"no device has {count} shares: {left}")
        return self.allocate_shares(name, count, fits[0], **more)

    def allocate_shares(self, name: str, count: int, device: str, *others: str, **more: Any) -> Claim:
        """Allocate so many shares of a device to a claim, and of others with it, whatever slices say now."""
        claim = self.allocate(name, device, *others, **more)

        def number(found: dict[str, Any]) -> None:
            for at, result in enumerate(found["status"]["allocation"]["devices"]["results"]):
                result |= {"shareID": f"{claim.uid}-share-{at}", "consumedCapacity": {"shares": str(count)}}

        self.server.change(claim.path, number)
        return replace(claim, shares=count)

    def forget(self, claim: Claim) -> None:
        """Delete a claim."""
        self.server.remove(claim.path)

    def offer(self, driver: str, **devices: str) -> str:
        """Have another driver's slice offer GPUs, each by its UUID; return the slice's path."""
        path = f"{self.api}/resourceslices/{driver}-theirs"
        said = [{"name": name, "attributes": {"uuid": {"string": uuid}}} for name, uuid in devices.items()]
        pool = {"name": NAME, "generation": 1, "resourceSliceCount": 1}
        self.server.put(path, spec={"driver": driver, "nodeName": NAME, "pool": pool, "devices": said})
        return path

    def pod(self, name: str, count: int = 1, kind: str = "containers", **status: Any) -> None:
        """Bind a pod to the node that asks for GPUs by name; by default the kubelet has not admitted it yet."""
        limits = [{"resources": {"limits": {GPU: str(count)}}}]
        self.server.put(
            f"/api/v1/namespaces/default/pods/{name}",
            metadata={"uid": name, "namespace": "default"},
            spec={"nodeName": NAME, kind: limits},
            status=status or {"phase": "Pending"},
        )

    def annotate(self, **annotations: str) -> None:
        """Set the node's annotations of the gateway."""
        said = {f"device-plugin-gateway.io/{name.replace('_', '-')}": value for name, value in annotations.items()}
        self.server.change(AT, lambda node: node["metadata"].update(annotations=said))

    # -- pods ---------------------------------------------------------------------------------------------------------

    async def prepare(self, claim: Claim, pod: str = "") -> Got:
        """Start a pod with a claim: the kubelet has it prepared.

        Raises:
            KubeletError: that was refused.
        """
        got = await self.node.kubelet.ask(self.dra.prepare(claim))
        self.running[claim.uid] = pod or claim.name, claim
        self.node.claims[claim.uid], self.node.shares[claim.uid] = got.gpus, claim.shares
        self.node.check()
        return got

    async def refused(self, claim: Claim, reason: str = "") -> str:
        """See that a claim is refused, for a reason that matches; return the reason."""
        with pytest.raises(KubeletError, match=reason or None) as error:
            await self.prepare(claim)
        return str(error.value)

    async def prepared(self, claim: Claim, seconds: float = 300) -> Got:
        """Start a pod with a claim, and again as the kubelet does while that is refused."""

        async def asked() -> Got | None:
            try:
                return await self.prepare(claim)
            except KubeletError:
                await asyncio.sleep(60)
                return None

        found = await self.node.eventually(asked, f"claim {claim.name} to be prepared", seconds)
        assert found is not None
        return found

    async def unprepare(self, claim: Claim) -> None:
        """End the pod of a claim.

        Raises:
            KubeletError: it was refused to unprepare the claim.
        """
        self.node.claims.pop(claim.uid, None)  # Its containers have ended before.
        await self.node.kubelet.ask(self.dra.unprepare(claim))
        self.running.pop(claim.uid, None)

    async def end(self, claim: Claim) -> None:
        """End the pod of a claim, and delete the claim."""
        await self.unprepare(claim)
        self.forget(claim)

    async def connected(self) -> None:
        """Wait until the kubelet has a driver that it can call."""
        await self.node.until(lambda: self.dra.is_connected, "a driver that can be called")

    async def published_is(self, within: float = 60, /, **devices: list[str] | None) -> None:
        """Wait until slices offer these devices, with these taints, and those not that are None; ``_`` stands for ``-``."""
        wanted = {name.replace("_", "-"): taints for name, taints in devices.items() if taints is not None}
        try:
            await self.node.until(lambda: self.published() == wanted, f"slices to offer {wanted}", within)
        except AssertionError as error:
            raise AssertionError(f"{self.published()} instead of {error}") from None


async def other_driver(
    node: Node, name: str = NVIDIA, file: str = f"{NVIDIA}-reg.sock", *, silent: bool = False
) -> Process:
    """Start another vendor's driver, with a socket of this name in ``plugins_registry``; kill it to end it.

    One that is ``silent`` listens and answers nobody.
    """

    async def info(_request: bytes, _context: Any) -> bytes:
        return pluginregistration.encode_info(
            pluginregistration.PluginInfo("DRAPlugin", name, versions=("v1.DRAPlugin",))
        )

    async def notified(_request: bytes, _context: Any) -> bytes:
        return b""

    process = Process("another driver")
    methods = {"GetInfo": info, "NotifyRegistrationStatus": notified}
    handlers: dict[str, Any] = {one: grpc.unary_unary_rpc_method_handler(answer) for one, answer in methods.items()}
    server = process.context.run(wire.Server)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("pluginregistration.Registration", handlers)])
    path = node.folder / "plugins_registry" / file
    path.parent.mkdir(exist_ok=True, parents=True)
    if silent:
        process.context.run(_listening, path)
        return process
    process.context.run(server.add_insecure_port, f"unix:{path}")
    await process.ask(server.start())
    return process


def _listening(path: Path) -> None:
    one = socket.socket(socket.AF_UNIX)
    one.bind(str(path))
    one.listen()


def resolved(folder: Path, names: Sequence[str]) -> Got:
    """Resolve CDI names as a container runtime does.

    Raises:
        KubeletError: one is in no file.
    """
    there: dict[str, Any] = {}
    for path in folder.glob("*.json") if folder.exists() else ():
        found = json.loads(path.read_text())
        there |= {f"{found['kind']}={one['name']}": (found, one) for one in found["devices"]}
    envs: dict[str, str] = {}
    nodes: list[str] = []
    for name in names:
        if name not in there:
            raise KubeletError("CDI", f"unresolvable CDI device {name}", "start")
        for edits in (one.get("containerEdits", {}) for one in there[name]):
            envs |= dict(one.split("=", 1) for one in edits.get("env", ()))  # As a runtime does: the last one is seen.
            nodes += [one["path"] for one in edits.get("deviceNodes", ())]
    return Got(tuple(names), envs, tuple(nodes))


def _socket(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns) if stat.S_ISSOCK(found.st_mode) else None


def _listens(path: Path) -> bool:
    with contextlib.suppress(OSError):
        if wire.listening(str(path)) is not None:
            return True  # To connect would be work for it.
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) == 0
