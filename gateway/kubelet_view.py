"""What the kubelet believes: a look into its own books, to tell a registration that holds from one that only seems to.

Kubelets 1.25 to 1.36 can be left with a live stream on an endpoint that they have stopped: allocatable looks right after
the next list, and every Allocate fails (run on 1.32.13). The stream can't show that; the kubelet's pod-resources API can.
Where it can't be reached (a kubelet before 1.23, a socket that isn't mounted), nothing is known and nothing is claimed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import grpc.aio
import tenacity

from adapters import podresources
from adapters.dialect import MalformedError
from devices.model import Health
from gateway.watch import listens

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from devices.model import Device

_DEADLINE = 2.0
_RECEIVE_LIMIT = 64 * 1024 * 1024


async def holds(socket: Path, resource: str, devices: Sequence[Device]) -> bool | None:
    """Tell whether the kubelet behind ``socket`` would give out just the healthy ones of ``devices``.

    A kubelet takes a moment to book a list, so a difference counts only when it stays for a fifth of a second. None:
    the kubelet could not be asked.
    """
    expected = frozenset(device.id for device in devices if device.health is Health.HEALTHY)
    differs = tenacity.retry_if_result(lambda found: found is not None and found.get(resource, frozenset()) != expected)
    retrying = tenacity.AsyncRetrying(
        retry=differs,
        wait=tenacity.wait_fixed(0.05),
        stop=tenacity.stop_after_attempt(5),
        retry_error_callback=lambda state: state.outcome.result() if state.outcome is not None else None,
    )
    found: dict[str, frozenset[str]] | None = await retrying(_allocatable, socket)
    return None if found is None else found.get(resource, frozenset()) == expected


async def _allocatable(socket: Path) -> dict[str, frozenset[str]] | None:
    if not listens(socket):
        return None
    options = (("grpc.max_receive_message_length", _RECEIVE_LIMIT), ("grpc.use_local_subchannel_pool", 1))
    try:
        async with grpc.aio.insecure_channel(f"unix:{socket}", options=options) as channel:
            ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(podresources.GET_ALLOCATABLE)
            return podresources.decode_allocatable(await ask(b"", timeout=_DEADLINE))
    except (grpc.aio.AioRpcError, MalformedError):
        return None
