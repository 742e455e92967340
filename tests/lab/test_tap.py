"""The tap between a kubelet and a plugin that are both nothing but grpcio, so that only the tap is on trial."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from adapters.pb.v1beta1 import v1beta1_pb2 as pb
from gateway_lab.wire.calls import CALLER_CANCELLED
from gateway_lab.wire.tap import CHECKPOINT, Connection, Tap
from gateway_lab.wire.transcript import transcript

RESOURCE = "nvidia.com/gpu"
LARGE = 3_000_000


class Plugin:
    """Serves one path: a list, and Allocate with an answer as large as a kubelet takes."""

    def __init__(self, path: Path) -> None:
        self.server = grpc.aio.server()
        self.server.add_registered_method_handlers(
            "v1beta1.DevicePlugin",
            {
                "ListAndWatch": grpc.unary_stream_rpc_method_handler(self.watch),
                "Allocate": grpc.unary_unary_rpc_method_handler(self.allocate),
            },
        )
        self.server.add_insecure_port(f"unix:{path}")

    async def watch(self, _request: bytes, _context: object) -> AsyncIterator[bytes]:
        yield pb.ListAndWatchResponse(devices=[pb.Device(ID="G1"), pb.Device(ID="G0")]).SerializeToString()
        await asyncio.Event().wait()

    async def allocate(self, request: bytes, _context: object) -> bytes:
        envs = {"REQUEST": request.hex(), "LARGE": "x" * LARGE}
        return pb.AllocateResponse(container_responses=[pb.ContainerAllocateResponse(envs=envs)]).SerializeToString()


class Kubelet:
    """Takes Registers and dials the endpoint at once, inside Register, as 1.25 and later do."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.dialed = asyncio.Event()
        self.channel: grpc.aio.Channel | None = None
        self.server = grpc.aio.server()
        self.server.add_registered_method_handlers(
            "v1beta1.Registration", {"Register": grpc.unary_unary_rpc_method_handler(self.register)}
        )

    async def start(self) -> None:
        path = self.directory / "kubelet.sock"
        path.unlink(missing_ok=True)
        self.server.add_insecure_port(f"unix:{path}")
        await self.server.start()

    async def register(self, request: bytes, _context: object) -> bytes:
        endpoint = self.directory / pb.RegisterRequest.FromString(request).endpoint
        self.channel = grpc.aio.insecure_channel(f"unix:{endpoint}")
        watch: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self.channel.unary_stream(
            "/v1beta1.DevicePlugin/ListAndWatch"
        )
        self.stream = watch(b"")
        assert await self.stream.read()
        self.dialed.set()
        return b""

    async def allocate(self) -> bytes:
        assert self.channel is not None
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devicesIDs=["G1", "G0"])])
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(
            "/v1beta1.DevicePlugin/Allocate"
        )
        return await call(request.SerializeToString())

    async def stop(self) -> None:
        if self.channel is not None:
            await self.channel.close()
        await self.server.stop(None)


async def register(directory: Path, endpoint: str) -> None:
    async with grpc.aio.insecure_channel(f"unix:{directory / 'kubelet.sock'}") as channel:
        request = pb.RegisterRequest(version="v1beta1", endpoint=endpoint, resource_name=RESOURCE)
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/v1beta1.Registration/Register")
        await call(request.SerializeToString(), wait_for_ready=True)


@pytest.fixture
def directories(folder: Path) -> tuple[Path, Path]:
    (folder / "k").mkdir()
    (folder / "p").mkdir()
    return folder / "k", folder / "p"


@asynccontextmanager
async def served(directories: tuple[Path, Path], endpoint: str) -> AsyncIterator[tuple[Tap, Kubelet, Plugin]]:
    kubelet = Kubelet(directories[0])
    async with Tap(*directories) as tap:
        await kubelet.start()
        await tap.wait(lambda _: tap.kubelets == 1)
        (directories[1] / endpoint).parent.mkdir(exist_ok=True)
        plugin = Plugin(directories[1] / endpoint)
        await plugin.server.start()
        try:
            await register(directories[1], endpoint)
            yield tap, kubelet, plugin
        finally:
            await kubelet.stop()
            await plugin.server.stop(None)


def ended(connections: list[Connection]) -> bool:
    return all(call.end is not None for connection in connections for call in connection.calls)


@pytest.mark.parametrize("endpoint", ["plugin.sock", "sub/folder.sock"])
async def test_every_call_is_kept_whole_and_in_order(directories: tuple[Path, Path], endpoint: str) -> None:
    (directories[1] / endpoint).parent.mkdir(exist_ok=True)
    async with served(directories, endpoint) as (tap, kubelet, _):
        answer = await kubelet.allocate()
        kubelet.stream.cancel()
        await tap.wait(ended)
        registration, plugin = tap.connections
        assert [call.path for call in registration.calls] == ["/v1beta1.Registration/Register"]
        assert [call.end for call in registration.calls] == ["OK"]
        listed, allocated = plugin.calls
        assert listed.end == CALLER_CANCELLED
        assert allocated.end == "OK"
        assert allocated.answers == [answer]
        assert len(answer) > LARGE
        lines = transcript(tap.connections)
    assert lines[0] == "connection 1, to the kubelet"
    assert '"endpoint": "<socket 1>"' in lines[2]
    assert lines[4] == "connection 2, to <socket 1>"
    assert lines[7] == '    < ListAndWatchResponse {"devices": [{"ID": "G0"}, {"ID": "G1"}]}'
    assert lines[9] == '    > AllocateRequest {"container_requests": [{"devicesIDs": ["G0", "G1"]}]}'


async def test_a_kubelets_end_cuts_the_plugins_connection_and_its_successor_is_announced(
    directories: tuple[Path, Path],
) -> None:
    _, plugin_dir = directories
    async with served(directories, "first.sock") as (tap, kubelet, _):
        (plugin_dir / "folder").mkdir()
        (plugin_dir / CHECKPOINT).write_text("{}")
        await kubelet.stop()
        await tap.wait(ended)
        successor = Kubelet(directories[0])
        await successor.start()
        try:
            await tap.wait(lambda _: tap.kubelets == 2)
            assert {entry.name for entry in plugin_dir.iterdir()} == {"folder", CHECKPOINT, "kubelet.sock"}
            second = Plugin(plugin_dir / "second.sock")
            await second.server.start()
            await register(plugin_dir, "second.sock")
            assert await successor.allocate()
            await second.server.stop(None)
        finally:
            await successor.stop()
        assert [connection.endpoint for connection in tap.connections if connection.calls] == [
            "kubelet.sock",
            "first.sock",
            "kubelet.sock",
            "second.sock",
        ]


async def test_a_plugins_end_cuts_the_kubelets_connection(directories: tuple[Path, Path]) -> None:
    async with served(directories, "plugin.sock") as (tap, kubelet, plugin):
        await plugin.server.stop(None)
        with pytest.raises(grpc.aio.AioRpcError):
            await kubelet.stream.read()
        await tap.wait(ended)
        assert tap.connections[1].calls[0].end != "OK"


async def test_where_the_kubelet_does_not_listen_the_plugin_is_refused(directories: tuple[Path, Path]) -> None:
    async with served(directories, "plugin.sock") as (tap, kubelet, _):
        await kubelet.stop()
        await tap.wait(ended)
        reader, writer = await asyncio.open_unix_connection(directories[1] / "kubelet.sock")
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_unix_connection(directories[1] / "kubelet.sock")


@pytest.mark.parametrize("endpoint", ["../outside.sock", "/tmp/outside.sock", "", "kubelet.sock"])
async def test_an_endpoint_outside_the_directory_is_not_bound(directories: tuple[Path, Path], endpoint: str) -> None:
    kubelet = Kubelet(directories[0])
    async with Tap(*directories) as tap:
        await kubelet.start()
        await tap.wait(lambda _: tap.kubelets == 1)
        before = {entry.name for entry in directories[0].iterdir()}
        call = asyncio.create_task(register(directories[1], endpoint))
        await tap.wait(lambda all_: any(one.calls and one.calls[0].requests for one in all_))
        assert {entry.name for entry in directories[0].iterdir()} == before
        call.cancel()
        await asyncio.wait([call])
        await kubelet.stop()


async def test_bytes_that_are_no_grpc_are_relayed_and_told_of(directories: tuple[Path, Path]) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read(100)).upper())
        writer.close()

    server = await asyncio.start_unix_server(echo, directories[0] / "kubelet.sock")
    async with server, Tap(*directories) as tap:
        await tap.wait(lambda _: tap.kubelets == 1)
        reader, writer = await asyncio.open_unix_connection(directories[1] / "kubelet.sock")
        writer.write(b"hello, kubelet: this is no http/2")
        assert await reader.read() == b"HELLO, KUBELET: THIS IS NO HTTP/2"
        writer.close()
        await writer.wait_closed()
        assert "expected the HTTP/2 preface" in tap.connections[0].fault
        assert any("unreadable" in line for line in transcript(tap.connections))
