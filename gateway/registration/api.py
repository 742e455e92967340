"""Find out which device plugin API a kubelet speaks, without changing anything on it.

It registers under a version that doesn't exist. Every kubelet refuses that before it connects or changes anything, and its
refusal shows its version (run on kubelets 1.8 to 1.37). ``gateway probe`` and a starting gateway use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from adapters.registry import DIALECTS
from devices.model import Registration
from gateway.registration.negotiate import SPOKEN_BY, AnswerKind, classify
from gateway.wires import rpc

if TYPE_CHECKING:
    from pathlib import Path

BOGUS_VERSION: Final = "probe"
PROBE_RESOURCE: Final = "gateway.invalid/probe"
"""The resource name of the probe: kubelets count Registers by resource."""
PROBE_DEADLINE_S: Final = 15.0
"""Seconds for each Register of a probe."""
_ONE_OF_EACH_SERVICE: Final = tuple({one.registration_service: one for one in reversed(DIALECTS)}.values())[::-1]


class Probed(Struct, frozen=True):
    """The result of a probe. ``api`` is None if it is unknown; ``says`` is the kubelet's answer."""

    api: str | None
    kubelets: str
    says: str
    answered: bool = True
    """True if the kubelet answered at all."""


async def ask(socket: Path, deadline: float = PROBE_DEADLINE_S) -> Probed:
    """Probe the kubelet behind ``socket``: send one Register to each known service, each with a deadline in seconds."""
    says: list[str] = []
    answered = False
    for dialect in _ONE_OF_EACH_SERVICE:
        request = dialect.encode_register(Registration(BOGUS_VERSION, "probe.sock", PROBE_RESOURCE)).data
        code, details = await _register(socket, f"/{dialect.registration_service}/Register", request, deadline)
        says.append(f"{dialect.registration_service}: {code} {details}".strip())
        answer = classify(code, details)
        answered = answer.kind is not AnswerKind.NO_ANSWER
        if answer.kind is AnswerKind.OTHER_VERSION:
            named = answer.supported or _unnamed(dialect.registration_service)
            known = [name for name in named if name in SPOKEN_BY]
            if known:
                return Probed(known[0], SPOKEN_BY[known[0]], says[-1])
            return Probed(None, f"newer than this gateway: it speaks {', '.join(named)}", says[-1])
        if answer.kind is not AnswerKind.NO_SERVICE:
            break
    return Probed(None, "unknown", "; ".join(says), answered)


def _unnamed(service: str) -> tuple[str, ...]:
    """Return the dialects of a service whose kubelets don't name their version in a refusal."""
    return tuple(one.name for one in DIALECTS if one.registration_service == service and not one.names_itself)


async def _register(socket: Path, method: str, request: bytes, deadline: float) -> tuple[str, str]:
    options = (("grpc.use_local_subchannel_pool", 1),)  # A connection of its own.
    try:
        async with rpc.Channel(socket, options) as channel:
            await channel.call(method, request, seconds=deadline)
    except rpc.CallError as error:
        return error.code.name, error.details
    return "OK", "accepted a version that does not exist"
