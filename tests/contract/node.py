"""A node of a row: folders, an emulated kubelet, gateways as processes, and what is seen of them from outside."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote

import grpc.aio
import pytest

from adapters.registry import by_name
from devices.model import ContainerAnswer, Device, Options, PreferredRequest
from gateway.cli.main import gateway as command_line
from gateway_lab.kubelets.behaviour import behaviour
from gateway_lab.kubelets.devicemanager import DeviceManager
from gateway_lab.kubelets.kubelet import Admission, Demand, Faults, Held, KubeletError, Running
from gateway_lab.kubelets.pluginclient import CallError, PluginClient
from tests.contract import wire
from tests.contract.clock import Clock, Process, patches
from tests.contract.disk import Disk

_T = TypeVar("_T")
GPU: Final = "nvidia.com/gpu"
VERSION: Final = "1.34"
PREFIX: Final = "device_plugin_gateway_"
REPORT_S: Final = 10.0
"""Seconds between two times that a kubelet tells its node's status."""
PATIENCE_S: Final = 60.0
"""Simulated seconds within which what a row waits for must come."""


def gpus(*numbers: int, name: str = GPU, **more: Any) -> dict[str, dict[str, Any]]:
    """Describe these GPUs, ``GPU-0`` and so on, for ``Node.simulate``."""
    return {name: {"gpus": [{"uuid": f"GPU-{number}"} for number in numbers], **more}}


class BrokenError(AssertionError):
    """A promise that holds at every moment does not."""


class OrderError(Exception):
    """A gateway refused an order, in its own words."""


class Kubelet:
    """One start of a kubelet. It dies as kubelets do: its socket and its checkpoint stay."""

    def __init__(self, node: Node, version: str, differs: Mapping[str, Any]) -> None:
        self.version, self._node = version, node
        self.process = Process(f"kubelet {version}")
        self.notes: list[str] = []
        self._noted_at: list[float] = []
        self.manager: DeviceManager = self.process.context.run(
            lambda: DeviceManager(
                replace(behaviour(version), **differs),
                node.sockets,
                note=self._note,
                registers=node.registers,
                faults=node.faults,
            )
        )

    def _note(self, event: str) -> None:
        self.notes.append(event)
        self._noted_at.append(time.monotonic())
        self._node.noted()

    def noted(self, beginning: str) -> list[float]:
        """Return when it noted events that begin so."""
        return [at for at, note in zip(self._noted_at, self.notes, strict=True) if note.startswith(beginning)]

    async def ask(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Have the kubelet do something."""
        return await self.process.ask(work)

    def report(self) -> None:
        """Tell the API server again and again what there is: a kubelet forgets a plugin that is gone only then."""

        async def tell() -> None:
            while True:
                await asyncio.sleep(REPORT_S)
                self.manager.totals()

        _ = self.process.run(tell())

    def kill(self) -> None:
        """End it."""
        self.process.kill()


class Gateway:
    """One gateway: the daemon as its command line starts it."""

    def __init__(self, node: Node, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._node = node
        self.process = Process("gateway")
        command = [*arguments]

        def program() -> None:
            os.environ.update(environment)
            command_line.main(command, prog_name="gateway", standalone_mode=True)

        self.process.main(program)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process.alive

    @property
    def is_heard(self) -> bool:
        """Whether it answers: it runs, and isn't stopped."""
        return self.alive and not self.process.stopped

    def said(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the lines of its log about an event."""
        wanted = {"event": event, **fields}.items()
        return [line for line in self.process.log if wanted <= line.items()]

    def kill(self) -> None:
        """Kill it: -9."""
        self.process.kill()

    async def terminate(self) -> int:
        """End it by SIGTERM; return its exit status."""
        self.process.terminate()
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.shield(self.process.ended)

    async def order(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send a request to its control socket, and return the answer.

        Raises:
            OrderError: it was refused.
        """
        reader, writer = await self.control()
        writer.write(json.dumps({"v": 1, "op": op, **fields}).encode() + b"\n")
        async with asyncio.timeout(PATIENCE_S):
            line = await reader.readline()
        writer.close()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise OrderError(answer["error"])
        return answer

    async def control(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to its control socket."""
        path = await self._node.until(lambda: self.control_socket, "its control socket")
        return await asyncio.open_unix_connection(path, limit=16 * 1024 * 1024)

    async def status(self) -> dict[str, Any]:
        """Return its status document."""
        return dict((await self.order("status"))["status"])

    async def states(self, resource: str = GPU) -> dict[str, str]:
        """Return the state of each device of a resource, by ID."""
        found = [one for one in (await self.status())["resources"] if one["name"] == resource]
        return {device["id"]: device["state"] for one in found for device in one["devices"]}

    async def port(self, what: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to one of its HTTP ports: ``what`` is "metrics" or "probes"."""
        line = (await self._node.until(lambda: self.said("listening", what=what), f"the port for {what}"))[-1]
        return await asyncio.open_connection(line["host"], line["port"])

    async def get(self, what: str, path: str) -> tuple[int, str]:
        """Ask one of its HTTP ports; return status and body."""
        reader, writer = await self.port(what)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n".encode())
        async with asyncio.timeout(PATIENCE_S):
            answer = (await reader.read()).decode()
        writer.close()
        head, _, body = answer.partition("\r\n\r\n")
        return int(head.split()[1]), body

    async def is_ready(self) -> bool:
        """Whether its readiness probe succeeds."""
        return (await self.get("probes", "/readyz"))[0] == 200

    async def metrics(self) -> dict[str, float]:
        """Return its metrics, by name with labels as they are written."""
        _, body = await self.get("metrics", "/metrics")
        lines = (line.rsplit(" ", 1) for line in body.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    @property
    def control_socket(self) -> str:
        """Where its control socket is; empty while there is none."""
        bound = (name.rpartition("/") for name in self.process.bound())
        known = [f"{folder}/{name.lstrip('.')}" for folder, _, name in bound if folder == str(self._node.state)]
        return next(filter(os.path.exists, known), "")


class Plugin:
    """A kubelet's connection to a plugin's socket, for the calls that no good kubelet makes."""

    def __init__(self, client: PluginClient) -> None:
        self._client = client

    async def __aenter__(self) -> Self:
        await self._client.dial()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def allocate(self, *ids: str) -> ContainerAnswer:
        """Call Allocate for one container."""
        return (await self._client.allocate(ids))[0]

    async def refused(self, *ids: str, words: str = "") -> None:
        """See that Allocate is refused for one container, with words that match."""
        with pytest.raises(Refused, match=words or None):
            await self._client.allocate(ids)

    async def prefer(self, available: Sequence[str], count: int, must: Sequence[str] = ()) -> frozenset[str]:
        """Call GetPreferredAllocation."""
        return await self._client.prefer(PreferredRequest(tuple(available), tuple(must), count))

    async def options(self) -> Options:
        """Call GetDevicePluginOptions."""
        return await self._client.ask_options()

    async def first_list(self) -> tuple[Device, ...]:
        """Return the first list of a ListAndWatch of its own."""
        lists = self._client.lists()
        try:
            return await anext(lists)
        finally:
            self._client.cancel_lists()


class Caller:
    """Anybody who calls a gateway's socket, with any bytes, under any name."""

    def __init__(self, path: str, service: str, agent: str) -> None:
        self._service = service
        self._channel = wire.Channel(f"unix:{quote(path)}", [("grpc.primary_user_agent", agent)])

    async def call(self, method: str, request: bytes | None = b"", seconds: float | None = None) -> tuple[str, bytes]:
        """Call a method; return how that ended and the answer. ``request`` None: send none. ``seconds``: its deadline."""
        try:
            return "OK", await self._channel.unary_unary(f"/{self._service}/{method}")(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            return error.code().name, b""

    def listen(self, seconds: float | None = None) -> Any:
        """Call ListAndWatch; the lists are read from what this returns."""
        return self._channel.unary_stream(f"/{self._service}/ListAndWatch")(b"", timeout=seconds)

    async def close(self) -> None:
        """Hang up."""
        await self._channel.close()


class Node:
    """One node. After each step that a row takes, ``check`` holds the promises that hold at every moment."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder, self.clock = folder, clock
        self.sockets, self.state = folder / "device-plugins", folder / "state"
        self.sockets.mkdir()
        self.profile = folder / "gpus.json"
        self.disk = Disk(self.state)
        """The disk of the gateways' state directory."""
        self.cdi = folder / "cdi"
        self.bridge = folder / "bridge"
        """Where other vendors' plugins register, for a gateway with ``--bridge`` of it."""
        self.ports = ["--probe-address", "127.0.0.1:0", "--metrics-address", "127.0.0.1:0"]
        self.registers: Counter[str] = Counter()
        self.faults = Faults()
        self.noted: Callable[[], object] = lambda: None
        """What is called whenever the kubelet notes something: after that it will have done it."""
        self.gateways: list[Gateway] = []
        self._kubelet: Kubelet | None = None
        self._running: dict[tuple[str, str], tuple[Demand, Admission]] = {}
        self.shared: Collection[str] = ()
        """Resources whose replicas of one GPU may be in several pods: a row that shares them says so."""
        self.claims: dict[str, frozenset[str]] = {}
        """The GPUs that containers have by a ResourceClaim, by its UID."""
        self.shares: dict[str, int] = {}
        """How many shares of each they have; 0: all of it."""
        self.most = 0
        """How many shares a GPU has that claims ask for shares of."""
        self.forgotten: set[str] = set()
        """Pods that the kubelet's records lack: it may give their devices again."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for one in self.gateways:
            one.kill()
        if self._kubelet is not None:
            self._kubelet.kill()

    # -- the kubelet --------------------------------------------------------------------------------------------------

    @property
    def kubelet(self) -> Kubelet:
        """The kubelet that runs."""
        assert self._kubelet is not None
        return self._kubelet

    async def start_kubelet(
        self, version: str = VERSION, *, ready: bool = True, hears: bool = True, **differs: Any
    ) -> Kubelet:
        """Start a kubelet, which finds the pods that run; one that runs is killed first. ``differs``: in what it isn't as released.

        Unless it ``hears``, it can't reach the API server: it knows none of these pods until ``hear``.
        """
        self.kill_kubelet()
        kubelet = self._kubelet = Kubelet(self, version, differs)
        pods = [demand for demand, _ in self._running.values()] if hears else []
        running = [Running(pod, container, "") for pod, container in self._running]
        await kubelet.ask(kubelet.manager.start(pods, ready=ready, running=running))
        kubelet.report()
        return kubelet

    async def start_forgetful_kubelet(self, version: str = VERSION) -> Kubelet:
        """Start a kubelet without the checkpoint of the one before."""
        self.kill_kubelet()
        self.forget_checkpoint()
        return await self.start_kubelet(version)

    def hear(self) -> None:
        """Let the kubelet reach the API server: it hears of the pods that run."""
        manager = self.kubelet.manager
        manager._records.expect([demand for demand, _ in self._running.values()], [])
        manager.ready()

    async def list_pods(self) -> None:
        """Have a monitoring agent read the kubelet's pod-resources API."""
        caller = Caller(str(self.pod_resources), "v1.PodResourcesLister", "agent")
        await caller.call("List")
        await caller.close()

    @property
    def pod_resources(self) -> Path:
        """Where the kubelet has its pod-resources API."""
        return self.sockets.parent / "pod-resources" / "kubelet.sock"

    def kill_kubelet(self) -> None:
        """Kill the kubelet, if one runs."""
        if self._kubelet is not None:
            self._kubelet.kill()
            self._kubelet = None

    def reboot(self) -> None:
        """Boot the machine anew: all processes end, and the disks keep what they have. Start kubelet and gateway again."""
        for one in self.gateways:
            one.kill()
        self.kill_kubelet()
        self.clock.reboot()

    async def hide_pods(self, *, silent: bool = False) -> None:
        """Let the kubelet's pod-resources API be gone until the kubelet's next start, or be there and answer nobody (``silent``)."""
        await self.kubelet.ask(self.kubelet.manager._pod_resources.stop())
        if silent:
            listener = self._silent = socket.socket(socket.AF_UNIX)
            listener.bind(str(self.pod_resources))
            listener.listen()

    def limit_pods(self) -> None:
        """Let the kubelet refuse four of five calls of its pod-resources API, because there are too many (from 1.28 on)."""
        api, calls = self.kubelet.manager._pod_resources, itertools.count()
        answers = api.service

        async def too_many(_request: bytes, context: Any) -> bytes:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
            return b""

        def service(call: Any) -> Any:
            return answers(call) if next(calls) % 5 == 4 else grpc.unary_unary_rpc_method_handler(too_many)

        patches.setattr(api, "service", service)

    async def lack_all(self) -> None:
        """Let the kubelet's pod-resources API name no pod and no device until the kubelet's next start."""

        async def nothing(_request: bytes, _context: Any) -> bytes:
            return b""

        await self.hide_pods()
        methods: dict[str, Any] = dict.fromkeys(
            ("List", "GetAllocatableResources"), grpc.unary_unary_rpc_method_handler(nothing)
        )
        server = wire.Server([grpc.method_handlers_generic_handler("v1.PodResourcesLister", methods)])
        server.add_insecure_port(f"unix:{self.pod_resources}")
        await server.start()

    def fault(self, **what: Any) -> None:
        """Make things go wrong at the kubelet from now on; nothing heals it."""
        self.faults = Faults(**what)
        if self._kubelet is not None:
            self._kubelet.manager.faults = self.faults

    def forget_checkpoint(self) -> None:
        """Remove the kubelet's checkpoint, as an operator does who wants a fresh start."""
        (self.sockets / "kubelet_internal_checkpoint").unlink(missing_ok=True)

    def allocatable(self, resource: str = GPU) -> int:
        """Return how many of a resource the kubelet tells the API server."""
        return self.kubelet.manager.totals().allocatable.get(resource, 0)

    def capacity(self, resource: str = GPU) -> int:
        """Return how many of a resource there are, with those that are unhealthy."""
        return self.kubelet.manager.totals().capacity.get(resource, 0)

    async def allocatable_is(self, count: int, resource: str = GPU, seconds: float = PATIENCE_S) -> None:
        """Wait until so many are allocatable."""
        await self.until(lambda: self.allocatable(resource) == count, f"{count} allocatable {resource}", seconds)

    async def allocatable_after(self, seconds: float, count: int, resource: str = GPU) -> None:
        """Let so much simulated time pass, and see that so many are allocatable then."""
        await self.pass_time(seconds)
        there = self.allocatable(resource)
        assert there == count, f"{there} allocatable {resource} instead of {count}.\n{self.tale()}"

    async def admit(self, pod: str, resource: str = GPU, count: int = 1, container: str = "main") -> Admission:
        """Admit a pod with one container.

        Raises:
            KubeletError: the kubelet refused it.
        """
        manager = self.kubelet.manager
        given = await self.kubelet.ask(manager.admit(pod, {resource: count}, container=container))
        self._running[pod, container] = Demand(pod, resource, count, container), given
        self.check()
        return given

    async def refused(self, pod: str, resource: str = GPU, count: int = 1) -> str:
        """See that a pod is refused, and return the kubelet's reason."""
        try:
            given = await self.kubelet.ask(self.kubelet.manager.admit(pod, {resource: count}))
        except KubeletError as error:
            return error.message
        raise BrokenError(f"{pod} was to be refused, and was given {dict(given.devices)}")

    async def restart_container(self, pod: str, container: str = "main") -> Admission:
        """Start a pod's container again."""
        return await self.kubelet.ask(self.kubelet.manager.restart_container(pod, container))

    def remove(self, pod: str) -> None:
        """End a pod."""
        for key in [key for key in self._running if key[0] == pod]:
            del self._running[key]
        if self._kubelet is not None:
            self.kubelet.manager.remove(pod)

    def pods(self) -> Held:
        """Return what the kubelet's records say."""
        return self.kubelet.manager.pods()

    # -- gateways -----------------------------------------------------------------------------------------------------

    def gateway(self, *options: str, environment: Mapping[str, str] = {}) -> Gateway:
        """Start a gateway; by default with the simulated GPUs of ``simulate``, or the eight of the default profile."""
        backend = [] if "--backend" in options else ["--backend", "simulated"]
        if self.profile.exists() and backend:
            backend += ["--simulate", str(self.profile)]
        folders = ["--socket-dir", str(self.sockets), "--state-dir", str(self.state)]
        one = Gateway(self, ["--log-format", "json", *folders, *self.ports, *backend, *options], environment)
        self.gateways.append(one)
        return one

    async def served(
        self,
        count: int = 8,
        *options: str,
        version: str = "",
        resource: str = GPU,
        environment: Mapping[str, str] = {},
    ) -> Gateway:
        """Start a kubelet and a gateway, and wait until so many devices are allocatable.

        Unless the row has simulated hardware, there are so many GPUs. Eight are those of the default profile.
        """
        if count != 8 and not self.profile.exists() and "--backend" not in options:
            self.simulate(gpus(*range(count)))
        await (self.start_kubelet(version) if version else self.start_kubelet())
        one = self.gateway(*options, environment=environment)
        await self.allocatable_is(count, resource)
        return one

    async def registered(self, *options: str) -> Gateway:
        """Start one more gateway, and wait until it is registered."""
        one = self.gateway(*options)
        await self.until(lambda: one.said("registered"), "its registration")
        return one

    async def command(self, *words: str) -> tuple[int, str]:
        """Run a command of the command line; return its exit status and what it printed."""
        process = Process("command")
        process.main(lambda: command_line.main([*words], prog_name="gateway", standalone_mode=True))
        async with asyncio.timeout(PATIENCE_S):
            status = await process.ended
        said = (str(line["event"]) if "event" in line else json.dumps(line) for line in process.log)
        return status, "\n".join(said)

    def simulate(self, resources: Mapping[str, Mapping[str, Any]]) -> None:
        """Write the simulated hardware, as ``--simulate`` takes it; a running gateway sees the change."""
        draft = self.profile.with_suffix(".draft")
        draft.write_text(re.sub(r'"(\d+)":', r"\1:", json.dumps({"resources": resources})))  # Indices are numbers.
        draft.replace(self.profile)

    def plugin(self, resource: str = GPU) -> Plugin:
        """Connect to the gateway's socket for a resource as the kubelet does, for calls that no good kubelet makes."""
        endpoint = self.kubelet.manager._endpoints[resource]
        return Plugin(PluginClient(resource, endpoint.path, self.kubelet.manager.behaviour))

    def caller(self, resource: str = GPU, agent: str = "grpc-go/1.72.1") -> Caller:
        """Be somebody who knows the gateway's socket for a resource."""
        manager = self.kubelet.manager
        return Caller(manager._endpoints[resource].path, by_name(manager.behaviour.dialect).plugin_service, agent)

    def stranger(self, api: str, agent: str) -> Caller:
        """Be somebody who finds the only gateway's own socket in its folder."""
        (path,) = self.sockets.glob("gateway/*/*.sock")
        return Caller(str(path), by_name(api).plugin_service, agent)

    async def until(self, found: Callable[[], _T], what: str, seconds: float = PATIENCE_S) -> _T:
        """Wait until ``found`` finds something, and return that.

        Raises:
            BrokenError: it didn't within so many simulated seconds.
        """
        loop = asyncio.get_running_loop()
        began, pause = loop.time(), 0.001
        while not (result := found()):
            passed = loop.time() - began
            if passed > seconds:
                raise BrokenError(f"waited {seconds:g} s for {what}.\n{self.tale()}")
            await asyncio.sleep(pause)
            pause = min(pause * 1.3, max(0.1, passed / 40))
        return result

    async def eventually(self, found: Callable[[], Awaitable[_T]], what: str, seconds: float = PATIENCE_S) -> _T:
        """Wait as ``until`` does, for what has to be asked for."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not (result := await found()):
            passed = loop.time() - began
            if passed > seconds:
                raise BrokenError(f"waited {seconds:g} s for {what}.\n{self.tale()}")
            await asyncio.sleep(max(0.2, min(passed / 10, seconds - passed)))
        return result

    async def pass_time(self, seconds: float) -> None:
        """Let so much simulated time pass."""
        await asyncio.sleep(seconds)
        self.check()

    # -- what holds at every moment -----------------------------------------------------------------------------------

    def check(self) -> None:
        """See that no GPU is in two pods, whatever it is called, but by replicas of a shared resource, or by shares that it has."""
        held: dict[str, list[tuple[str, str, str]]] = {}
        shares: Counter[str] = Counter()
        for claim, gpus in self.claims.items():
            for one in gpus:
                shares[one] += self.shares.get(claim) or max(self.most, 1)
                if shares[one] > max(self.most, 1):
                    raise BrokenError(f"{one} is given to both {held.get(one)} and claim {claim}.\n{self.tale()}")
                held.setdefault(one, []).append((f"claim {claim}", "", one))
        for (pod, _), (_, given) in self._running.items():
            if pod in self.forgotten:
                continue
            for resource, ids in given.devices.items():
                for one in ids:
                    there = held.setdefault(one.partition("::")[0], [])
                    for other, name, id_ in there:
                        shared = resource == name and resource in self.shared and one != id_
                        if other != pod and not shared:
                            raise BrokenError(
                                f"{id_} ({name}) is in {other}, {one} ({resource}) in {pod}.\n{self.tale()}"
                            )
                    there.append((pod, resource, one))

    async def truthful(self, seconds: float = 15.0) -> None:
        """See that each gateway's status, metrics and readiness come to say what the kubelet's records say.

        Raises:
            BrokenError: they still differ after so many seconds in which the row does nothing.
        """
        loop = asyncio.get_running_loop()
        ends = loop.time() + seconds
        while untrue := await self._untruths():
            if loop.time() > ends:
                raise BrokenError(f"a gateway doesn't say what is so: {'; '.join(untrue)}\n{self.tale()}")
            await asyncio.sleep(1.1)  # Metrics are a second old at most.

    async def _untruths(self) -> list[str]:
        statuses = [(one, await one.status()) for one in self.gateways if one.is_heard]
        told = {
            resource["name"]
            for _, status in statuses
            for resource in status["resources"]
            if self._kubelet is not None and resource["allocatable"] == self.allocatable(resource["name"])
        }
        return [words for one, status in statuses for words in await self._untrue(one, status, told)]

    async def _untrue(self, one: Gateway, status: Mapping[str, Any], told: Collection[str]) -> list[str]:
        metrics, (code, probe) = await one.metrics(), await one.get("probes", "/readyz")
        wrong = []

        def same(what: str, said: object, so: object) -> None:
            if said != so:
                wrong.append(f"{what} is said to be {said}, and is {so}")

        here = {one["name"]: one for one in status["resources"]}
        seen = self._kubelet is not None
        same("the kubelet's presence", status["kubelet"]["present"], seen)
        same("the kubelet's presence in metrics", metrics[f"{PREFIX}kubelet_present"], seen)
        for name, resource in here.items():
            ids = {device["id"]: device for device in resource["devices"]}
            same(f"the list of {name}", resource["listed"], len(ids))
            same(f"what is healthy of {name}", resource["healthy"], sum(_is_well(device) for device in ids.values()))
            for what in ("allocatable", "healthy", "held", "free"):
                same(
                    f"{what} {name} in metrics",
                    metrics.get(f'{PREFIX}{what}_devices{{resource="{name}"}}'),
                    resource[what],
                )
            if not seen:
                continue
            holders = {
                device: pod
                for pod, containers in self.pods().items()
                for given in containers.values()
                for device in given.get(name, ())
            }
            if name in told and not resource["allocatable"]:
                continue  # Another one says the rest.
            same(f"what is allocatable of {name}", resource["allocatable"], self.allocatable(name))
            if resource["listed"]:
                here_or_there = resource["verdict"]["state"] in {"served", "standby"}
                same(f"whether {name} is served", here_or_there, bool(self.capacity(name)))
            if resource["held"] is not None:
                same(f"what is held of {name}", resource["held"], len(holders.keys() & ids))
                well = {device for device in ids if _is_well(ids[device])} if self.allocatable(name) else set()
                same(f"what is free of {name}", resource["free"], len(well - holders.keys()))
                named = {device: one["holder"] for device, one in ids.items() if one["holder"]}
                same(f"who holds {name}", {*named}, holders.keys() & ids)
                for device, holder in named.items():
                    if holders.get(device, "") not in holder:
                        wrong.append(f"{device} is said to be held by {holder}, and is by {holders.get(device)}")
        served = all(self.capacity(name) for name, resource in here.items() if resource["listed"]) if seen else True
        held_up = any(hindrance["held_up"] for hindrance in status["hindrances"])
        same(f"readiness ({probe!r})", code == 200, served and not held_up)
        return wrong

    def tale(self) -> str:
        """Tell what gateways and kubelet logged last, for a row that fails."""
        lines = [line for one in self.gateways for line in (json.dumps(line) for line in one.process.log[-12:])]
        if self._kubelet is not None:
            lines += self._kubelet.notes[-8:]
        return "\n".join(line[:400] for line in lines)


Refused = (CallError, KubeletError)


def _is_well(device: Mapping[str, Any]) -> bool:
    return bool(device["health"] == "Healthy")
