"""A trivial device plugin on grpcio: the least that a kubelet of 1.10 and later is content with.

The yardstick of the benchmark: what this costs on a node is the price of Python and gRPC, what the gateway costs beyond
it is ours. It registers once and forgets the kubelet when that restarts. It has no log, no state and no second resource, and
looks for no trouble.

    python -m gateway_lab.trivial SOCKET_DIR
"""

from __future__ import annotations

import asyncio
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


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
