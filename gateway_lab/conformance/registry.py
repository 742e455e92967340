"""A plugin that waits in ``plugins_registry`` to be found, asked as a kubelet asks it.

A kubelet looks into that folder of its own, asks each socket there what it is, takes up the device plugins, and tells them what
became of it. It does so at each of its starts: for such a plugin there is nothing to register.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Final

import grpc

from adapters import pluginregistration
from adapters.dialect import MalformedError
from adapters.pluginregistration import PluginInfo
from adapters.registry import by_name
from gateway.bridge import judge
from gateway.bridge.judge import REGISTRATION, REGISTRY
from gateway.bridge.sockets import GET_INFO_S, NOTIFY_S
from gateway.wires.unix import listens
from gateway_lab.trials.scenarios import Node, must
from gateway_lab.waiting import until

_SERVICE: Final = f"/{by_name('v1beta1').plugin_service}"
_OWN: Final = (("grpc.use_local_subchannel_pool", 1),)


class InapplicableError(Exception):
    """A rule has nothing to say of this plugin. The message says why."""


async def waits_in_registry(node: Node, version: str) -> str:
    """Have the folder beside the plugin's, and see what the plugin makes of it.

    Raises:
        InapplicableError: it registers on kubelet.sock all the same.
        BrokenPromiseError: it is found, and not as a kubelet can use it.
    """
    folder = node.root / REGISTRY
    folder.mkdir()
    kubelet = await node.start_kubelet(version)
    await node.start_gateway()

    async def came() -> bool:
        return bool(_found(folder)) or bool(await kubelet.registers())

    try:
        await until(came, node.patience, every=0.05)
    except TimeoutError:
        must([f"with a folder {REGISTRY} beside {REGISTRATION}, neither a socket in it nor a Register came"])
    if not _found(folder):
        raise InapplicableError(f"it registers on kubelet.sock, with a folder {REGISTRY} beside it, too")
    [first, *_] = _found(folder)
    async with grpc.aio.insecure_channel(f"unix:{first}", options=_OWN) as channel:
        info = await _taken(node, channel, first)
        must(
            []
            if await _taken(node, channel, first) == info
            else [f"{first.name} says another thing each time it is asked"]
        )
    served = _path(node.root, info, first.name)
    async with grpc.aio.insecure_channel(f"unix:{served}", options=_OWN) as channel:
        await _listed(node, channel, info.name)
    both = await kubelet.registers()
    must([f"it waits in {REGISTRY} and registers on kubelet.sock, too: {', '.join(both)}"] if both else [])
    return f"it is found as {first.name}, and serves {info.name} on {served.name}"


def _found(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_socket() and listens(path))


def _path(root: Path, info: PluginInfo, found: str) -> Path:
    """Tell where it is served: a plugin in a container sees other paths than the node."""
    folder, name = judge.endpoint_of(info, found)
    return root / folder / name


def _judge(node: Node, info: PluginInfo, found: Path) -> None:
    served = _path(node.root, info, found.name)
    must(
        [
            *filter(None, [judge.info_error(info)]),
            *(
                []
                if info.name in node.gpus
                else [f"GetInfo says {info.name!r}, and it registers {', '.join(node.gpus)}"]
            ),
            *([] if listens(served) else [f"GetInfo says {info.endpoint!r}, and nobody listens there"]),
        ]
    )


async def _taken(node: Node, channel: grpc.aio.Channel, found: Path) -> PluginInfo:
    """Do what a kubelet does with a plugin that it finds, at each of its starts."""
    info = await _ask(channel, found.name)
    _judge(node, info, found)
    await _call(channel, pluginregistration.NOTIFY, pluginregistration.encode_status(""), NOTIFY_S)
    return info


async def _ask(channel: grpc.aio.Channel, name: str) -> PluginInfo:
    data = await _call(channel, pluginregistration.GET_INFO, b"", GET_INFO_S)
    try:
        return pluginregistration.decode_info(data)
    except MalformedError as error:
        must([f"{name}: {error}"])
        raise


async def _call(channel: grpc.aio.Channel, method: str, request: bytes, seconds: float) -> bytes:
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
    try:
        return await call(request, timeout=seconds)
    except grpc.aio.AioRpcError as error:
        what = method.rpartition("/")[2]
        must([f"expected an answer to {what} within {seconds:g} s, got {error.code().name}: {error.details()}"])
        raise


async def _listed(node: Node, channel: grpc.aio.Channel, resource: str) -> None:
    calls: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"{_SERVICE}/ListAndWatch")
    lists = calls(b"")
    data: object = grpc.aio.EOF
    with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
        async with asyncio.timeout(node.patience):
            data = await lists.read()
    lists.cancel()
    count = len(by_name("v1beta1").decode_list(data)) if isinstance(data, bytes) else 0
    expected = node.gpus[resource]
    must([] if count == expected else [f"expected a list of {expected} devices of {resource}, got {count}"])
