"""Another device plugin, such as a node may have before ours: no handover, a fixed socket name, NVIDIA's answers.

It does what NVIDIA's k8s-device-plugin does, and no more: it serves ``nvidia-gpu.sock`` (``--endpoint``) beside kubelet.sock,
registers, and when a kubelet.sock is created it begins anew. It remembers nothing. Its device IDs are the GPUs' UUIDs, a container is told them in
``NVIDIA_VISIBLE_DEVICES`` and gets their device nodes. ``--delay-ms`` is how long after kubelet.sock was created it registers, for
the experiment of ``registertime.py``.

    python -m gateway_lab.node.otherplugin GPU-0=/dev/nvidia0 GPU-1=/dev/nvidia1
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import grpc

from adapters.pb.v1beta1 import v1beta1_pb2 as pb
from devices import inotify

RESOURCE = "nvidia.com/gpu"
SOCKET = "nvidia-gpu.sock"
KUBELET = "kubelet.sock"
FOLDER = Path("/var/lib/kubelet/device-plugins")


class Plugin:
    """One life of it: from one kubelet.sock to the next."""

    def __init__(self, socket: Path, resource: str, devices: Mapping[str, str]) -> None:
        self._socket, self._resource, self._devices = socket, resource, devices
        self._server = grpc.aio.server()
        methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(self._options),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(self._lists),
            "Allocate": grpc.unary_unary_rpc_method_handler(self._allocate),
        }
        self._server.add_registered_method_handlers("v1beta1.DevicePlugin", methods)

    async def serve(self) -> None:
        """Serve the socket, in the place of whatever had its name."""
        self._socket.unlink(missing_ok=True)
        self._server.add_insecure_port(f"unix:{self._socket}")
        await self._server.start()

    async def register(self) -> None:
        """Tell the kubelet; it must be listening."""
        request = pb.RegisterRequest(version="v1beta1", endpoint=self._socket.name, resource_name=self._resource)
        async with grpc.aio.insecure_channel(f"unix:{self._socket.parent / KUBELET}") as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/v1beta1.Registration/Register")
            await call(request.SerializeToString(), timeout=5, wait_for_ready=True)

    async def stop(self) -> None:
        """End it, and its socket."""
        await self._server.stop(None)
        self._socket.unlink(missing_ok=True)

    async def _options(self, _request: bytes, _context: object) -> bytes:
        return pb.DevicePluginOptions().SerializeToString()

    async def _lists(self, _request: bytes, _context: object) -> AsyncIterator[bytes]:
        devices = [pb.Device(ID=name, health="Healthy") for name in self._devices]
        yield pb.ListAndWatchResponse(devices=devices).SerializeToString()
        await asyncio.Event().wait()

    async def _allocate(self, request: bytes, _context: object) -> bytes:
        asked = pb.AllocateRequest.FromString(request).container_requests
        return pb.AllocateResponse(
            container_responses=[self._answer(one.devicesIDs) for one in asked]
        ).SerializeToString()

    def _answer(self, ids: Sequence[str]) -> pb.ContainerAllocateResponse:
        nodes = [self._devices[one] for one in ids]
        return pb.ContainerAllocateResponse(
            envs={"NVIDIA_VISIBLE_DEVICES": ",".join(ids)},
            devices=[pb.DeviceSpec(container_path=node, host_path=node, permissions="rw") for node in nodes],
        )


async def run(socket: Path, resource: str, devices: Mapping[str, str], delay: float) -> None:
    """Serve for ever, beginning anew with each kubelet; registers ``delay`` seconds after its socket was created."""
    folder = socket.parent
    created = asyncio.Event()
    with contextlib.closing(inotify.INotify()) as notify:
        notify.add_watch(folder, inotify.CREATE)

        def look() -> None:
            if any(event.name == KUBELET for event in notify.read()):
                created.set()

        asyncio.get_running_loop().add_reader(notify.fileno(), look)
        plugin = Plugin(socket, resource, devices)
        try:
            await plugin.serve()
            if (folder / KUBELET).exists():
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await plugin.register()
            _say("serving")
            while await created.wait():
                created.clear()
                began = time.monotonic()
                await plugin.stop()
                plugin = Plugin(socket, resource, devices)
                await plugin.serve()
                await asyncio.sleep(max(0.0, began + delay - time.monotonic()))
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await plugin.register()
                _say("registered", after_ms=round(1000 * (time.monotonic() - began), 1))
        finally:
            await plugin.stop()


def _say(event: str, **fields: float) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it until TERM."""
    parser = argparse.ArgumentParser(prog="python -m gateway_lab.node.otherplugin", description=__doc__)
    parser.add_argument("devices", nargs="+", metavar="ID=NODE")
    parser.add_argument("--socket-dir", type=Path, default=FOLDER)
    parser.add_argument("--endpoint", default=SOCKET)
    parser.add_argument("--resource", default=RESOURCE)
    parser.add_argument("--delay-ms", type=float, default=0)
    options = parser.parse_args(arguments)
    devices = dict(one.split("=", 1) for one in options.devices)

    async def whole() -> None:
        socket = options.socket_dir / options.endpoint
        work = asyncio.ensure_future(run(socket, options.resource, devices, options.delay_ms / 1000))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await work

    asyncio.run(whole())


if __name__ == "__main__":
    main()
