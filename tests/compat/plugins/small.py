"""A small device plugin for kubelets of v1beta1 that keeps every promise; the bad ones beside it vary it in one.

It looks ten times a second whether it must register: there is a new kubelet, its stream has ended, or its socket is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import grpc

from adapters import pluginregistration
from adapters.pb.v1beta1 import v1beta1_pb2 as pb
from adapters.pluginregistration import PluginInfo

IDS = tuple(f"DEV-{index}" for index in range(4))
LOOK_EVERY = 0.1
REGISTER_SECONDS = 2
_names = itertools.count()


class Registration:
    """One registration: a server of its own on a socket of its own."""

    def __init__(
        self,
        kubelet: Path,
        ids: Sequence[str],
        *,
        anything: bool,
        prefer: Prefer,
        lists_once: bool,
        deaf_later: bool,
        found: PluginInfo | None = None,
    ) -> None:
        self._kubelet, self._ids, self._anything, self._prefer = kubelet, ids, anything, prefer
        self._silent, self._lists_once = False, lists_once
        number = next(_names)
        self._follows = number == 0 or not deaf_later
        self._path = kubelet.with_name(f"small-{os.getpid()}-{number}.sock")
        if found is not None:
            self._path = _registry(kubelet) / Path(found.endpoint).name
        self._born = _born(kubelet)
        self._cut = False
        self._server = grpc.aio.server()
        methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(self._options),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(self._list_and_watch),
            "Allocate": grpc.unary_unary_rpc_method_handler(self._allocate),
            "GetPreferredAllocation": grpc.unary_unary_rpc_method_handler(self._choose),
        }
        self._server.add_registered_method_handlers("v1beta1.DevicePlugin", methods)
        if found is not None:
            asked: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
                "GetInfo": grpc.unary_unary_rpc_method_handler(_saying(pluginregistration.encode_info(found))),
                "NotifyRegistrationStatus": grpc.unary_unary_rpc_method_handler(_saying(b"")),
            }
            self._server.add_registered_method_handlers("pluginregistration.Registration", asked)
        self._server.add_insecure_port(f"unix:{self._path}")

    @property
    def over(self) -> bool:
        """Whether the plugin must register again."""
        return self._cut or not self._path.exists() or _born(self._kubelet) != self._born

    async def serve(self) -> None:
        """Serve, and register nowhere."""
        await self._server.start()

    async def make(self) -> bool:
        """Serve and register; say whether the kubelet accepted."""
        await self.serve()
        async with grpc.aio.insecure_channel(
            f"unix:{self._kubelet}", options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            request = pb.RegisterRequest(
                version="v1beta1", endpoint=self._path.name, resource_name="example.com/small"
            ).SerializeToString()
            register: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
                "/v1beta1.Registration/Register"
            )
            try:
                await register(request, timeout=REGISTER_SECONDS)
            except grpc.aio.AioRpcError:
                return False
        return True

    async def end(self) -> None:
        """End the server and remove its socket."""
        await self._server.stop(None)
        self._path.unlink(missing_ok=True)

    async def _options(self, _request: bytes, _context: object) -> bytes:
        return pb.DevicePluginOptions(get_preferred_allocation_available=True).SerializeToString()

    async def _list_and_watch(self, _request: bytes, _context: object) -> AsyncIterator[bytes]:
        try:
            if not self._silent:
                yield self._spelled()
            self._silent = self._lists_once
            while not (self._follows and _ill()):  # noqa: ASYNC110 - a file tells nobody
                await asyncio.sleep(LOOK_EVERY)
            yield self._spelled()
            await asyncio.Event().wait()
        finally:
            self._cut = True

    def _spelled(self) -> bytes:
        devices = [pb.Device(ID=one, health="Healthy") for one in self._ids]
        if self._follows and _ill():
            devices[0].health = "Unhealthy"
        return pb.ListAndWatchResponse(devices=devices).SerializeToString()

    async def _allocate(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        asked = [tuple(one.devicesIDs) for one in pb.AllocateRequest.FromString(request).container_requests]
        if not self._anything and not {*itertools.chain(*asked)} <= {*self._ids}:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown device")
        answers = [pb.ContainerAllocateResponse(envs={"DEVICES": ",".join(one)}) for one in asked]
        return pb.AllocateResponse(container_responses=answers).SerializeToString()

    async def _choose(self, request: bytes, _context: object) -> bytes:
        asked = pb.PreferredAllocationRequest.FromString(request).container_requests
        chosen = [
            self._prefer(tuple(one.available_deviceIDs), tuple(one.must_include_deviceIDs), one.allocation_size)
            for one in asked
        ]
        answers = [pb.ContainerPreferredAllocationResponse(deviceIDs=one) for one in chosen]
        return pb.PreferredAllocationResponse(container_responses=answers).SerializeToString()


Prefer: TypeAlias = Callable[[Sequence[str], Sequence[str], int], Sequence[str]]


def prefer(available: Sequence[str], must: Sequence[str], size: int) -> Sequence[str]:
    """Choose the first ones, beside those that must be included."""
    return [*must, *(one for one in available if one not in must)][:size]


def _registry(kubelet: Path) -> Path:
    return kubelet.parent.with_name("plugins_registry")


def _saying(answer: bytes) -> Callable[[bytes, object], Awaitable[bytes]]:
    async def say(_request: bytes, _context: object) -> bytes:
        return answer

    return say


def _ill() -> bool:
    """Whether the first device is ill: a file ``ill`` in the folder that outlives this process says so."""
    return len(sys.argv) > 2 and (Path(sys.argv[2]) / "ill").exists()


def _born(kubelet: Path) -> tuple[int, int] | None:
    try:
        found = kubelet.stat()
    except FileNotFoundError:
        return None
    return (found.st_ino, found.st_ctime_ns)


async def serve(
    ids: Sequence[str] = IDS,
    *,
    anything: bool = False,
    again: bool = True,
    stay: bool = True,
    prefer: Prefer = prefer,
    lists_once: bool = False,
    deaf_later: bool = False,
    found_as: Sequence[str] = (),
) -> None:
    """Serve ``ids`` in the directory that the command names, until SIGTERM.

    ``anything``: allocate what was never announced, too. ``again``: register whenever it must be. ``stay``: do that in
    this process, not by ending it. ``lists_once``: send the list to the first of a registration's callers only. ``deaf_later``: tell of
    a device that falls ill in its first registration only. ``found_as``: wait in plugins_registry where that is, and say these versions.
    """
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    kubelet = Path(sys.argv[1]) / "kubelet.sock"
    if found_as and _registry(kubelet).is_dir():
        endpoint = f"/var/lib/kubelet/plugins_registry/small-{os.getpid()}.sock"
        info = PluginInfo("DevicePlugin", "example.com/small", endpoint, tuple(found_as))
        waits = Registration(
            kubelet, ids, anything=False, prefer=prefer, lists_once=False, deaf_later=False, found=info
        )
        await waits.serve()
        await ended.wait()
        await waits.end()
        return
    registered: Registration | None = None
    while not ended.is_set():
        if registered is not None and registered.over and again:
            await registered.end()
            registered = None
            if not stay:
                return
        if registered is None and kubelet.exists():
            tried = Registration(
                kubelet, ids, anything=anything, prefer=prefer, lists_once=lists_once, deaf_later=deaf_later
            )
            if await tried.make():
                registered = tried
            else:
                await tried.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_EVERY):
                await ended.wait()
    if registered is not None:
        await registered.end()
