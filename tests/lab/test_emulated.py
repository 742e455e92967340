"""The emulated kubelet, row by row: what a device plugin meets on each version. In process, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from adapters.dialect import Level
from adapters.registry import by_name
from devices.model import ContainerAnswer, ContainerRequest, Device, Health, Options, Registration
from gateway_lab.kubelets.behaviour import SecondRegister, behaviour
from gateway_lab.kubelets.checkpoint import FILE_NAME
from gateway_lab.kubelets.devicemanager import DeviceManager
from gateway_lab.kubelets.kubelet import Demand, Faults, KubeletError, Running

Call = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]

GPU = "example.com/gpu"
ONE_OF_EACH = ("1.8", "1.9", "1.10", "1.11", "1.12", "1.20", "1.24", "1.25", "1.28", "1.36", "1.37")


class Plugin(grpc.GenericRpcHandler):
    """The least that is a device plugin, in one dialect: a list that can be changed, and a record of all calls."""

    def __init__(self, directory: Path, dialect: str, name: str, devices: str = "abcd", **options: bool) -> None:
        self.path = directory / name
        self.dialect = by_name(dialect)
        self.options = Options(**options)
        self.devices = devices
        self.calls: list[str] = []
        self.user_agent = ""
        self.streams = 0
        self.answer: Callable[[Sequence[str]], bytes] = self._answer
        self.fails: dict[str, tuple[grpc.StatusCode, str]] = {}
        self.tells_options = asyncio.Event()
        self.tells_options.set()
        self._changed = asyncio.Condition()
        self._turn = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    def _answer(self, ids: Sequence[str]) -> bytes:
        answer = ContainerAnswer(
            {"GPUS": ",".join(sorted(ids))}, annotations={} if self.dialect.name != "v1beta1" else {"a": "b"}
        )
        return self.dialect.encode_allocate_answer([ContainerRequest(tuple(ids))], [answer], Level(10)).data

    async def serve(self) -> Plugin:
        self._server = grpc.aio.server(handlers=[self])
        self._server.add_insecure_port(f"unix:{self.path}")
        await self._server.start()
        return self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)

    async def show(self, devices: str) -> None:
        """Send another list: a letter a device, capitals are ill."""
        async with self._changed:
            self.devices = devices
            self._changed.notify_all()

    async def streams_are(self, number: int) -> None:
        async with asyncio.timeout(30):
            while self.streams != number:
                self._turn.clear()
                await self._turn.wait()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        method = handler_call_details.method.rpartition("/")[2]
        self.user_agent = str(dict(handler_call_details.invocation_metadata).get("user-agent", ""))
        self.calls.append(method)
        if method == "ListAndWatch":
            return grpc.unary_stream_rpc_method_handler(self._lists)

        async def unary(data: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            if method in self.fails:
                await context.abort(*self.fails[method])
            match method:
                case "GetDevicePluginOptions":
                    await self.tells_options.wait()
                    return self.dialect.encode_options(self.options).data
                case "Allocate":
                    (request,) = self.dialect.decode_allocate_request(data)
                    return self.answer(request.device_ids)
                case "GetPreferredAllocation":
                    (wanted,) = self.dialect.decode_preferred_request(data)
                    best = sorted(wanted.available)[-wanted.size :]
                    return self.dialect.encode_preferred_answer([best]).data
                case _:
                    return b""

        return grpc.unary_unary_rpc_method_handler(unary)

    async def _lists(self, _data: bytes, _context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
        self.streams += 1
        self._turn.set()
        try:
            while True:
                shown = self.devices
                yield self.dialect.encode_list(
                    [Device(x.lower(), Health.HEALTHY if x.islower() else Health.UNHEALTHY) for x in shown]
                ).data
                async with self._changed:
                    while self.devices == shown:
                        await self._changed.wait()
        finally:
            self.streams -= 1
            self._turn.set()


class Node:
    """A directory, the kubelets that run on it one after the other, and the plugins."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log: list[str] = []
        self.plugins: list[Plugin] = []
        self._noted = asyncio.Event()
        self._kubelet: DeviceManager | None = None

    def note(self, line: str) -> None:
        self.log.append(line)
        self._noted.set()

    async def logged(self, text: str, times: int = 1) -> None:
        """Wait until the kubelet has logged so many lines with this text."""
        async with asyncio.timeout(30):
            while sum(text in line for line in self.log) < times:
                self._noted.clear()
                await self._noted.wait()

    @property
    def kubelet(self) -> DeviceManager:
        assert self._kubelet is not None
        return self._kubelet

    async def boot(self, version: str, *pods: Demand, faults: Faults | None = None, **start: object) -> DeviceManager:
        await self.halt()
        self._kubelet = DeviceManager(behaviour(version), self.directory, note=self.note, faults=faults)
        await self._kubelet.start(pods, **start)  # type: ignore[arg-type]
        return self._kubelet

    async def halt(self) -> None:
        if self._kubelet is not None:
            kubelet, self._kubelet = self._kubelet, None
            await kubelet.stop()

    async def plugin(self, devices: str = "abcd", name: str = "", **options: bool) -> Plugin:
        name = name or f"p{len(self.plugins)}.sock"
        plugin = await Plugin(self.directory, self.kubelet.behaviour.dialect, name, devices, **options).serve()
        self.plugins.append(plugin)
        return plugin

    async def register(self, plugin: Plugin, *, version: str = "", resource: str = GPU, seconds: float = 5) -> None:
        dialect = by_name(self.kubelet.behaviour.dialect)
        asked = Registration(version or dialect.name, plugin.path.name, resource, plugin.options)
        async with grpc.aio.insecure_channel(f"unix:{self.directory}/kubelet.sock") as channel:
            call: Call = channel.unary_unary(f"/{dialect.registration_service}/Register")
            await call(dialect.encode_register(asked).data, timeout=seconds)

    async def ready(self, version: str, *pods: Demand, devices: str = "abcd", **options: Any) -> Plugin:
        """Boot a kubelet, and register a plugin with it."""
        await self.boot(version, *pods)
        plugin = await self.plugin(devices, **options)
        await self.register(plugin)
        await self.kubelet.wait(GPU, sum(x.islower() for x in devices))
        return plugin

    async def close(self) -> None:
        await self.halt()
        for plugin in self.plugins:
            await plugin.stop()


@pytest.fixture
async def node(folder: Path) -> AsyncIterator[Node]:
    node = Node(folder)
    yield node
    await node.close()
    assert not [line for line in node.log if "DEFECT" in line]


def capacity(node: Node) -> tuple[int, int]:
    totals = node.kubelet.totals()
    return totals.capacity.get(GPU, 0), totals.allocatable.get(GPU, 0)


# -- Register ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("1.8", "unsupported API version by the Kubelet registry"),
        ("1.9", 'requested API version "probe" is not supported by kubelet. Supported version is "v1alpha2"'),
        ("1.10", 'requested API version "probe" is not supported by kubelet. Supported versions are ["v1beta1"]'),
        ("1.11", 'requested API version "probe" is not supported by kubelet. Supported versions are ["v1beta1"]'),
        ("1.12", 'requested API version "probe" is not supported by kubelet. Supported version is ["v1beta1"]'),
        ("1.28", 'requested API version "probe" is not supported by kubelet. Supported version is ["v1beta1"]'),
        ("1.37", 'requested API version "probe" is not supported by kubelet. Supported version is ["v1beta1"]'),
    ],
)
async def test_another_version_is_refused_in_the_kubelets_words(node: Node, version: str, text: str) -> None:
    await node.boot(version)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await node.register(await node.plugin(), version="probe")
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.UNKNOWN, text)
    assert node.kubelet.registers == {GPU: 1}, "a refused Register counts too"
    assert capacity(node) == (0, 0)


@pytest.mark.parametrize(
    ("version", "resource", "text"),
    [
        ("1.8", "", "invalid Empty ResourceName"),
        ("1.8", "gpu", "the ResourceName is invalid"),
        ("1.9", "gpu", 'the ResourceName "gpu" is invalid'),
        ("1.9", "alpha.kubernetes.io/gpu", 'the ResourceName "alpha.kubernetes.io/gpu" is invalid'),
        ("1.9", "requests.example.com/gpu", None),
        ("1.10", "requests.example.com/gpu", 'the ResourceName "requests.example.com/gpu" is invalid'),
        ("1.37", "example.com/g pu", 'the ResourceName "example.com/g pu" is invalid'),
        ("1.37", "example.com/" + "x" * 64, f'the ResourceName "example.com/{"x" * 64}" is invalid'),
        ("1.37", "example.com/gpu.shared", None),
    ],
)
def test_resource_names(version: str, resource: str, text: str | None) -> None:
    assert behaviour(version).refuse_name(resource) == text


@pytest.mark.parametrize(
    ("version", "path", "text"),
    [
        ("1.8", "/v1beta1.Registration/Register", "unknown service v1beta1.Registration"),
        ("1.9", "/v1beta1.Registration/Register", "unknown service v1beta1.Registration"),
        ("1.10", "/deviceplugin.Registration/Register", "unknown service deviceplugin.Registration"),
        ("1.37", "/deviceplugin.Registration/Register", "unknown service deviceplugin.Registration"),
    ],
)
async def test_another_dialects_service_is_unknown(node: Node, version: str, path: str, text: str) -> None:
    await node.boot(version)
    async with grpc.aio.insecure_channel(f"unix:{node.directory}/kubelet.sock") as channel:
        call: Call = channel.unary_unary(path)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"", timeout=5)
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.UNIMPLEMENTED, text)


@pytest.mark.parametrize("version", ONE_OF_EACH)
async def test_register_brings_the_devices_into_the_records(node: Node, version: str) -> None:
    plugin = await node.ready(version, devices="abC")
    assert capacity(node) == ((3 if version not in {"1.8", "1.9"} else 2), 2)
    asks = version in {"1.25", "1.28", "1.36", "1.37"}
    assert plugin.calls == (["GetDevicePluginOptions"] if asks else []) + ["ListAndWatch"]
    assert plugin.user_agent.startswith(f"grpc-go/{behaviour(version).grpc_go}")


@pytest.mark.parametrize("version", ["1.8", "1.9"])
async def test_who_registers_before_serving_is_never_called(node: Node, version: str) -> None:
    await node.boot(version)
    plugin = Plugin(node.directory, node.kubelet.behaviour.dialect, "late.sock")
    node.plugins.append(plugin)
    await node.register(plugin)
    await node.logged("ended")
    await plugin.serve()
    assert (capacity(node), plugin.calls) == ((0, 0), [])


@pytest.mark.parametrize("version", ["1.10", "1.24", "1.25", "1.37"])
async def test_who_serves_a_little_later_is_called_since_1_10(node: Node, version: str) -> None:
    await node.boot(version)
    plugin = Plugin(node.directory, node.kubelet.behaviour.dialect, "late.sock")
    node.plugins.append(plugin)
    registering = asyncio.create_task(node.register(plugin))
    await node.logged("Dial")
    await plugin.serve()
    await registering
    await node.kubelet.wait(GPU, 4)


@pytest.mark.parametrize(
    ("version", "refused"), [("1.10", False), ("1.24", False), ("1.25", True), ("1.36", True), ("1.37", True)]
)
async def test_an_options_error_fails_a_synchronous_register(node: Node, version: str, refused: bool) -> None:
    await node.boot(version)
    plugin = await node.plugin()
    plugin.fails["GetDevicePluginOptions"] = (grpc.StatusCode.INTERNAL, "no idea")
    if not refused:
        await node.register(plugin)
        await node.kubelet.wait(GPU, 4)
        return
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await node.register(plugin)
    assert error.value.code() is grpc.StatusCode.UNKNOWN
    assert error.value.details() == "failed to get device plugin options: rpc error: code = Internal desc = no idea"


@pytest.mark.parametrize(("version", "called"), [("1.25", True), ("1.34", True), ("1.35", False), ("1.37", False)])
async def test_a_plugin_that_gives_up_its_register_is_called_nevertheless_before_1_35(
    node: Node, version: str, called: bool
) -> None:
    await node.boot(version)
    plugin, other = await node.plugin(), await node.plugin()
    plugin.tells_options.clear()
    with pytest.raises(grpc.aio.AioRpcError) as gave_up:
        await node.register(plugin, seconds=0.2)
    assert gave_up.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await node.logged("the plugin gave up waiting")
    plugin.tells_options.set()
    if called:
        await plugin.streams_are(1)
    else:
        await node.register(other, resource="example.com/other")
        await other.streams_are(1)
        assert "ListAndWatch" not in plugin.calls


@pytest.mark.parametrize("version", ONE_OF_EACH)
async def test_a_garbage_list_ends_the_stream(node: Node, version: str) -> None:
    plugin = await node.ready(version)
    plugin.dialect = _Garbage(plugin.dialect)  # type: ignore[assignment]
    await plugin.show("abcdE")
    await plugin.streams_are(0)
    await node.kubelet.wait(GPU, 0)


class _Garbage:
    """A dialect whose lists are no protobuf."""

    def __init__(self, dialect: object) -> None:
        self._dialect = dialect

    def __getattr__(self, name: str) -> object:
        return getattr(self._dialect, name)

    def encode_list(self, _devices: object) -> object:
        return self._dialect.encode_options(Options()).__class__(b"\x0a\xff")  # type: ignore[attr-defined]


# -- a second Register while the first stream lives -------------------------------------------------------------------

SECOND = {
    # version: (A's stream stays open, allocatable after B, after A shows 3, after A has gone)
    "1.8": (False, 6, None, None),
    "1.9": (False, 2, None, None),
    "1.10": (False, 2, None, None),
    "1.11": (False, 2, None, None),
    "1.12": (True, 2, 3, 3),
    "1.24": (True, 2, 3, 3),
    "1.25": (True, 2, 3, 0),
    "1.28": (True, 2, 3, 0),
    "1.36": (True, 2, 3, 0),
    "1.37": (True, 2, 3, 3),
}


@pytest.mark.parametrize(("version", "row"), SECOND.items())
async def test_a_second_register(node: Node, version: str, row: tuple[bool, int, int | None, int | None]) -> None:
    stays_open, after_b, after_list, after_end = row
    a = await node.ready(version, devices="abcd")
    b = await node.plugin("xy")
    await node.register(b)
    await node.kubelet.wait(GPU, after_b)
    if not stays_open:
        await a.streams_are(0)
        assert b.streams == 1
        return
    assert (a.streams, b.streams) == (1, 1)
    assert after_list is not None
    assert after_end is not None
    await a.show("abc")
    await node.kubelet.wait(GPU, after_list)
    await a.stop()
    await node.kubelet.wait(GPU, after_end)
    if node.kubelet.behaviour.second_register is SecondRegister.DISCONNECT_NEW:
        await b.streams_are(0)
        assert capacity(node)[0] == 3, "the resource is unhealthy, not gone"
    else:
        assert b.streams == 1
        await b.show("vwxyz")
        await node.kubelet.wait(GPU, 5)


async def test_1_8_sends_phantom_devices_to_the_new_plugin(node: Node) -> None:
    await node.ready("1.8", devices="abcd")
    b = await node.plugin("xy")
    await node.register(b)
    await node.kubelet.wait(GPU, 6)
    got = await node.kubelet.admit("pod", {GPU: 6})
    assert got.devices[GPU] == tuple("abcdxy")
    assert got.answer.envs == {"GPUS": "a,b,c,d,x,y"}
    await b.stop()
    await node.kubelet.wait(GPU, 4)


async def test_1_9_drops_the_later_of_two_racing_registrations(node: Node) -> None:
    await node.boot("1.10")
    slow = Plugin(node.directory, "v1beta1", "slow.sock", "abcd")
    node.plugins.append(slow)
    await node.register(slow)
    await node.register(await node.plugin("xy"))
    await node.kubelet.wait(GPU, 2)
    await slow.serve()
    await node.logged("dropped")
    assert (slow.calls, capacity(node)) == ([], (2, 2))


async def test_1_37_refuses_a_path_that_is_connected(node: Node) -> None:
    plugin = await node.ready("1.37")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await node.register(plugin)
    assert refused.value.details() == f"device plugin already connected: {plugin.path}"


async def test_a_registration_between_closing_and_reporting_is_dead_though_its_stream_lives(node: Node) -> None:
    plugin = await node.ready("1.32")
    node.kubelet.faults = Faults(report_late_ms=50)
    node.kubelet.cut(GPU)
    await plugin.streams_are(0)
    await node.register(plugin)
    await node.kubelet.wait(GPU, 0)
    await plugin.streams_are(1)
    await plugin.show("abcde")
    await node.kubelet.wait(GPU, 5)
    with pytest.raises(KubeletError, match="has been stopped"):
        await node.kubelet.admit("pod", {GPU: 1})


# -- start ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "left"),
    [
        ("1.8", {FILE_NAME, "sub", "kubelet.sock"}),
        ("1.28", {FILE_NAME, "sub", "kubelet.sock"}),
        ("1.30", {FILE_NAME, "sub", "kubelet.sock"}),
        ("1.31", {FILE_NAME, "sub", "kubelet.sock", "file"}),
        ("1.37", {FILE_NAME, "sub", "kubelet.sock", "file"}),
    ],
)
async def test_a_start_cleans_its_directory(node: Node, version: str, left: set[str]) -> None:
    (node.directory / "sub").mkdir()
    (node.directory / "sub" / "kept.sock").touch()
    (node.directory / "file").touch()
    (node.directory / FILE_NAME).touch()
    for name in ("stale.sock", "kubelet.sock"):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(node.directory / name))
    await node.boot(version)
    assert {entry.name for entry in node.directory.iterdir()} == left
    assert (node.directory / "sub" / "kept.sock").exists()


@pytest.mark.parametrize("version", ONE_OF_EACH)
async def test_a_plugin_in_a_sub_folder_survives_a_restart(node: Node, version: str) -> None:
    (node.directory / "sub").mkdir()
    await node.boot(version)
    plugin = await node.plugin(name="sub/p.sock")
    dialect = node.kubelet.behaviour.dialect
    for _ in range(2):
        asked = Registration(dialect, "sub/p.sock", GPU)
        async with grpc.aio.insecure_channel(f"unix:{node.directory}/kubelet.sock") as channel:
            call: Call = channel.unary_unary(f"/{plugin.dialect.registration_service}/Register")
            await call(plugin.dialect.encode_register(asked).data, timeout=5)
        await node.kubelet.wait(GPU, 4)
        await node.boot(version)


# -- admission --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "allocates"), [("1.8", 2), ("1.9", 1), ("1.10", 1), ("1.20", 1), ("1.28", 1), ("1.37", 1)]
)
async def test_a_container_restart_is_answered_from_the_checkpoint_since_1_9(
    node: Node, version: str, allocates: int
) -> None:
    plugin = await node.ready(version)
    before = await node.kubelet.admit("pod", {GPU: 2})
    assert await node.kubelet.restart_container("pod") == before
    assert plugin.calls.count("Allocate") == allocates


@pytest.mark.parametrize(
    ("version", "calls"),
    [
        ("1.9", ["Allocate"]),
        ("1.10", ["Allocate", "PreStartContainer"]),
        ("1.18", ["Allocate", "PreStartContainer"]),
        ("1.19", ["GetPreferredAllocation", "Allocate", "PreStartContainer"]),
        ("1.37", ["GetPreferredAllocation", "Allocate", "PreStartContainer"]),
    ],
)
async def test_what_an_admission_asks_the_plugin(node: Node, version: str, calls: list[str]) -> None:
    options: dict[str, Any] = {} if version == "1.9" else {"pre_start_required": True, "preferred_allocation": True}
    plugin = await node.ready(version, **options)
    plugin.calls.clear()
    got = await node.kubelet.admit("pod", {GPU: 2})
    assert plugin.calls == calls
    if "GetPreferredAllocation" in calls:
        assert got.devices[GPU] == ("c", "d"), "the plugin prefers the last"


@pytest.mark.parametrize("version", ["1.10", "1.28", "1.37"])
async def test_a_pre_start_error_is_no_rejection(node: Node, version: str) -> None:
    plugin = await node.ready(version, pre_start_required=True)
    plugin.fails["PreStartContainer"] = (grpc.StatusCode.FAILED_PRECONDITION, "not yet")
    with pytest.raises(KubeletError) as failed:
        await node.kubelet.admit("pod", {GPU: 1})
    assert failed.value.stage == "start"
    assert failed.value.message == (
        "device plugin PreStartContainer rpc failed with err: rpc error: code = FailedPrecondition desc = not yet"
    )
    plugin.fails.clear()
    assert (await node.kubelet.restart_container("pod")).answer.envs


@pytest.mark.parametrize(("version", "starts"), [("1.12", False), ("1.20", False), ("1.21", True), ("1.37", True)])
async def test_a_container_that_asks_for_none_of_a_resource_starts_since_1_21(
    node: Node, version: str, starts: bool
) -> None:
    await node.ready(version, pre_start_required=True)
    if starts:
        assert not (await node.kubelet.admit("pod", {GPU: 0})).devices
        return
    with pytest.raises(KubeletError, match="no devices found allocated in local cache for pod pod") as failed:
        await node.kubelet.admit("pod", {GPU: 0})
    assert failed.value.stage == "start"


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("1.9", "rpc error: code = NotFound desc = unknown device"),
        ("1.28", "rpc error: code = NotFound desc = unknown device"),
    ],
)
async def test_an_allocate_error_rejects_the_pod_and_frees_its_devices(node: Node, version: str, message: str) -> None:
    plugin = await node.ready(version)
    plugin.fails["Allocate"] = (grpc.StatusCode.NOT_FOUND, "unknown device")
    with pytest.raises(KubeletError) as failed:
        await node.kubelet.admit("pod", {GPU: 4})
    assert (failed.value.stage, failed.value.message) == ("allocate", message)
    plugin.fails.clear()
    assert len((await node.kubelet.admit("other", {GPU: 4})).devices[GPU]) == 4


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("1.10", "runtime error: index out of range"),
        ("1.12", "no containers return in allocation response"),
        ("1.37", "no containers return in allocation response"),
    ],
)
async def test_an_answer_without_containers(node: Node, version: str, message: str) -> None:
    plugin = await node.ready(version)
    plugin.answer = lambda _ids: b""
    with pytest.raises(KubeletError, match=message):
        await node.kubelet.admit("pod", {GPU: 1})


@pytest.mark.parametrize(
    ("version", "spoken", "result"),
    [
        ("1.8", "v1alpha2", "rpc error: code = Internal"),
        ("1.9", "0.1", {"GPUS"}),
    ],
)
async def test_the_other_alphas_answer_is_misread(
    node: Node, version: str, spoken: str, result: str | set[str]
) -> None:
    plugin = await node.ready(version)
    other = by_name(spoken)
    plugin.answer = lambda ids: (
        other.encode_allocate_answer(
            [ContainerRequest(tuple(ids))], [ContainerAnswer({"GPUS": ",".join(ids)})], Level(8)
        ).data
    )
    if isinstance(result, str):
        with pytest.raises(KubeletError, match=result):
            await node.kubelet.admit("pod", {GPU: 1})
    else:
        assert set((await node.kubelet.admit("pod", {GPU: 1})).answer.envs) != result


@pytest.mark.parametrize(
    ("version", "gates", "told"),
    [
        ("1.10", "", ()),
        ("1.27", "", ()),
        ("1.28", "", ()),
        ("1.28", "DevicePluginCDIDevices=true", ("example.com/gpu=0",)),
        ("1.29", "", ("example.com/gpu=0",)),
        ("1.37", "", ("example.com/gpu=0",)),
    ],
)
async def test_cdi_names_reach_the_runtime(node: Node, version: str, gates: str, told: tuple[str, ...]) -> None:
    await node.boot(version, gates=gates)
    plugin = await node.plugin()
    plugin.answer = lambda ids: (
        plugin.dialect.encode_allocate_answer(
            [ContainerRequest(tuple(ids))], [ContainerAnswer(cdi_devices=("example.com/gpu=0",))], Level(37)
        ).data
    )
    await node.register(plugin)
    await node.kubelet.wait(GPU, 4)
    assert (await node.kubelet.admit("pod", {GPU: 1})).answer.cdi_devices == told


async def test_an_unknown_feature_gate_is_an_error(node: Node) -> None:
    with pytest.raises(KubeletError, match=r"unrecognized feature gate: Nonsense"):
        await node.boot("1.28", gates="Nonsense=true")


# -- restart, upgrade, downgrade --------------------------------------------------------------------------------------

HOPS = {
    "1.8 1.8": True,
    "1.9 1.9": True,
    "1.9 1.10": True,
    "1.11 1.12": True,
    "1.12 1.13": True,
    "1.13 1.16": True,
    "1.18 1.20": True,
    "1.20 1.24": True,
    "1.24 1.25": True,
    "1.25 1.26": True,
    "1.26 1.28": True,
    "1.28 1.32": True,
    "1.32 1.36": True,
    "1.36 1.37": True,
    "1.18 1.24": True,
    "1.18 1.28": True,
    "1.24 1.37": True,
    "1.16 1.11": True,
    "1.10 1.9": True,
    "1.36 1.24": True,
    "1.36 1.20": True,
    "1.36 1.32": True,
    "1.36 1.28": True,
    "1.26 1.25": True,
    "1.8 1.9": False,
    "1.10 1.11": False,
    "1.18 1.32": False,
    "1.11 1.10": False,
    "1.9 1.8": False,
    "1.20 1.18": False,
    "1.25 1.18": False,
    "1.36 1.18": False,
}


@pytest.mark.parametrize(("hop", "kept"), HOPS.items())
async def test_what_a_pod_holds_over_a_hop(node: Node, hop: str, kept: bool) -> None:
    before, after = hop.split()
    await node.ready(before)
    held = (await node.kubelet.admit("pod", {GPU: 2})).devices[GPU]
    await node.boot(after, Demand("pod", GPU, 2))
    assert node.kubelet.pods() == ({"pod": {"main": {GPU: held}}} if kept else {})
    plugin = await node.plugin()
    await node.register(plugin)
    await node.kubelet.wait(GPU, 4)
    if kept:
        again = await node.kubelet.admit("pod")
        assert again.devices[GPU] == held
        assert again.answer.envs == {"GPUS": ",".join(held)}
        other = await node.kubelet.admit("other", {GPU: 2})
        assert set(other.devices[GPU]).isdisjoint(held)


@pytest.mark.parametrize(("hop", "given"), [("1.9 1.8", 2), ("1.11 1.10", 0), ("1.20 1.18", 2), ("1.18 1.32", 2)])
async def test_a_container_whose_devices_were_forgotten_gets_others_at_its_start_since_1_14(
    node: Node, hop: str, given: int
) -> None:
    before, after = hop.split()
    await node.ready(before)
    await node.kubelet.admit("pod", {GPU: 2})
    await node.boot(after, Demand("pod", GPU, 2))
    await node.register(await node.plugin())
    await node.kubelet.wait(GPU, 4)
    assert len((await node.kubelet.restart_container("pod")).devices.get(GPU, ())) == given


@pytest.mark.parametrize("version", ONE_OF_EACH)
async def test_a_pod_that_is_not_told_of_loses_its_devices(node: Node, version: str) -> None:
    await node.ready(version)
    await node.kubelet.admit("pod", {GPU: 4})
    await node.ready(version)
    assert len((await node.kubelet.admit("other", {GPU: 4})).devices[GPU]) == 4


async def test_nothing_is_freed_before_all_pods_are_known(node: Node) -> None:
    await node.ready("1.28")
    await node.kubelet.admit("pod", {GPU: 4})
    await node.boot("1.28", ready=False)
    await node.register(await node.plugin())
    await node.kubelet.wait(GPU, 4)
    with pytest.raises(KubeletError, match="Requested: 1, Available: 0"):
        await node.kubelet.admit("other", {GPU: 1})
    node.kubelet.ready()
    assert (await node.kubelet.admit("other", {GPU: 1})).devices


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("1.9", None),
        ("1.10", None),
        ("1.18", None),
        ("1.24", None),
        ("1.25", f"no healthy devices present; cannot allocate unhealthy devices {GPU}"),
        ("1.37", f"no healthy devices present; cannot allocate unhealthy devices {GPU}"),
    ],
)
async def test_admission_before_the_plugin_is_back(node: Node, version: str, message: str | None) -> None:
    await node.ready(version)
    before = await node.kubelet.admit("pod", {GPU: 2})
    await node.boot(version, Demand("pod", GPU, 2))
    assert capacity(node) == (0, 0)
    if message is None:
        assert await node.kubelet.admit("pod") == before
    else:
        with pytest.raises(KubeletError) as refused:
            await node.kubelet.admit("pod")
        assert refused.value.message == message


async def test_a_running_container_is_left_alone_while_pods_are_unknown(node: Node) -> None:
    await node.ready("1.28")
    before = await node.kubelet.admit("pod", {GPU: 2})
    await node.boot("1.28", Demand("pod", GPU, 2), ready=False, running=[Running("pod")])
    assert await node.kubelet.admit("pod") == before


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("1.24", None),
        ("1.25", f"previously allocated devices are no longer healthy; cannot allocate unhealthy devices {GPU}"),
    ],
)
async def test_readmission_with_a_sick_device(node: Node, version: str, message: str | None) -> None:
    plugin = await node.ready(version, devices="ab")
    before = await node.kubelet.admit("pod", {GPU: 2})
    await plugin.show("aB")
    await node.kubelet.wait(GPU, 1)
    if message is None:
        assert await node.kubelet.admit("pod") == before
    else:
        with pytest.raises(KubeletError) as refused:
            await node.kubelet.admit("pod")
        assert refused.value.message == message


@pytest.mark.parametrize(
    ("version", "totals"), [("1.8", (0, 0)), ("1.9", (0, 0)), ("1.10", (4, 0)), ("1.28", (4, 0)), ("1.37", (4, 0))]
)
async def test_a_plugin_that_goes_leaves_its_capacity_behind(node: Node, version: str, totals: tuple[int, int]) -> None:
    plugin = await node.ready(version)
    await plugin.stop()
    await node.kubelet.wait(GPU, 0)
    assert capacity(node) == totals


@pytest.mark.parametrize(
    ("version", "keys"),
    [
        ("1.8", {"Entries"}),
        ("1.9", {"PodDeviceEntries", "RegisteredDevices"}),
        ("1.10", {"PodDeviceEntries", "RegisteredDevices"}),
        ("1.11", {"Data", "Checksum"}),
        ("1.37", {"Data", "Checksum"}),
    ],
)
async def test_the_checkpoints_shape(node: Node, version: str, keys: set[str]) -> None:
    await node.ready(version)
    await node.kubelet.admit("pod", {GPU: 2})
    assert set(json.loads((node.directory / FILE_NAME).read_bytes())) == keys


@pytest.mark.parametrize(
    ("version", "ids"),
    [("1.19", ["a", "b"]), ("1.20", {"0": ["a", "b"]}), ("1.22", {"0": ["a", "b"]}), ("1.23", {"-1": ["a", "b"]})],
)
async def test_the_checkpoints_device_ids(node: Node, version: str, ids: object) -> None:
    await node.ready(version, devices="ab")
    await node.kubelet.admit("pod", {GPU: 2})
    (entry,) = json.loads((node.directory / FILE_NAME).read_bytes())["Data"]["PodDeviceEntries"]
    assert entry["DeviceIDs"] == ids


@pytest.mark.parametrize("version", ["1.9", "1.11", "1.28"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"Data":{},"Checksum":1}', b"\xff"])
async def test_a_damaged_checkpoint_is_no_reason_not_to_start(node: Node, version: str, content: bytes) -> None:
    (node.directory / FILE_NAME).write_bytes(content)
    await node.ready(version)
    assert node.kubelet.pods() == {}


# -- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.7", "2.0", "1", "", "1.28.x", "v1"])
def test_what_is_no_kubelet_version(version: str) -> None:
    with pytest.raises(ValueError, match=r"expected a kubelet version from 1.8 on"):
        behaviour(version)


@pytest.mark.parametrize(("version", "certain"), [("1.8", True), ("v1.37.1", True), ("1.38", False)])
def test_a_version_newer_than_any_known_says_so(version: str, certain: bool) -> None:
    assert behaviour(version).certain is certain
