"""A trivial device plugin on grpcio: the least that a kubelet of 1.10 and later is content with.

The yardstick of the benchmark: what this costs on a node is the price of Python and gRPC, what the gateway costs beyond
it is ours. It registers once and forgets the kubelet when that restarts; with ``--again`` it registers with each kubelet
that comes, as soon as it can. It has no log, no state and no second resource, and looks for no trouble.

    python -m gateway_lab.trivial SOCKET_DIR [--again]
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc

from adapters.pb.v1beta1 import v1beta1_pb2 as pb

NAME = "trivial.sock"
_OWN = (("grpc.use_local_subchannel_pool", 1),)
"""A channel's own connections: without it a new channel waits out what the last one suffered."""
DEVICES = tuple(f"GPU-{index}" for index in range(8))


async def options(_request: bytes, _context: object) -> bytes:
    """Ask for nothing."""
    return pb.DevicePluginOptions().SerializeToString()


async def list_and_watch(_request: bytes, _context: object) -> AsyncIterator[bytes]:
    """Say the list once."""
    devices = [pb.Device(ID=name, health="Healthy") for name in DEVICES]
    yield pb.ListAndWatchResponse(devices=devices).SerializeToString()
    await asyncio.Event().wait()


async def allocate(request: bytes, _context: object) -> bytes:
    """Give what was asked for."""
    asked = pb.AllocateRequest.FromString(request).container_requests
    answers = [pb.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": ",".join(one.devicesIDs)}) for one in asked]
    return pb.AllocateResponse(container_responses=answers).SerializeToString()


async def bound(path: Path) -> grpc.aio.Server:
    """Serve on a socket."""
    server = grpc.aio.server()
    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(options),
        "ListAndWatch": grpc.unary_stream_rpc_method_handler(list_and_watch),
        "Allocate": grpc.unary_unary_rpc_method_handler(allocate),
    }
    server.add_registered_method_handlers("v1beta1.DevicePlugin", methods)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    return server


async def register(directory: Path, endpoint: str) -> None:
    """Register once."""
    async with grpc.aio.insecure_channel(f"unix:{directory / 'kubelet.sock'}", options=_OWN) as channel:
        request = pb.RegisterRequest(version="v1beta1", endpoint=endpoint, resource_name="nvidia.com/gpu")
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/v1beta1.Registration/Register")
        await call(request.SerializeToString(), timeout=15, wait_for_ready=True)


async def serve(directory: Path) -> None:
    """Bind, register once, serve for ever."""
    server = await bound(directory / NAME)
    await register(directory, NAME)
    await server.wait_for_termination()


async def follow(directory: Path) -> None:
    """Register with each kubelet that comes, for ever. A kubelet empties its directory: folders stay."""
    # What the plain yardstick doesn't need, it doesn't pay for.
    from devices import inotify  # noqa: PLC0415
    from gateway.kubelet.identity import KUBELET_SOCKET  # noqa: PLC0415
    from gateway.wires.unix import listens  # noqa: PLC0415

    own = directory / "trivial"
    own.mkdir()
    server = await bound(own / NAME)
    created = asyncio.Event()
    watch = inotify.INotify()
    watch.add_watch(directory, inotify.CREATE)

    def read() -> None:
        if any(event.name == KUBELET_SOCKET for event in watch.read()):
            created.set()

    asyncio.get_running_loop().add_reader(watch.fileno(), read)
    print('{"event": "watching"}', flush=True)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.wait_for_termination())
        for number in itertools.count():
            await created.wait()
            created.clear()
            while not listens(directory / KUBELET_SOCKET):  # noqa: ASYNC110  another process listens
                await asyncio.sleep(0.0005)
            os.link(own / NAME, directory / f"trivial-{number}.sock")
            with contextlib.suppress(grpc.aio.AioRpcError):  # That one is gone already: the next one comes.
                await register(directory, f"trivial-{number}.sock")


if __name__ == "__main__":
    asyncio.run((follow if "--again" in sys.argv[2:] else serve)(Path(sys.argv[1])))
