"""``gateway probe``: which device plugin API does this kubelet speak?

It registers under a version that doesn't exist. Every kubelet refuses that before it dials or changes anything, and its
refusal tells the version (facts are read from what kubelets 1.8 to 1.37 answered when they were run).
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from gateway.settings import SOCKET_DIR

BOGUS_VERSION = "probe"
_RESOURCE = "gateway.invalid/probe"
_DEADLINE = 15.0

_EXAMPLES = """
\b
Examples:
  gateway probe
  gateway probe --socket-dir /var/lib/kubelet/device-plugins --json
  gateway probe --json | jq -r .api

Exit status: 0 where the API is one of ours, 1 where it is not or nobody answered.
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a probe found. ``api`` is None where the kubelet's API is unknown; ``says`` holds its own words."""

    api: str | None
    kubelets: str
    says: str


async def ask(socket: Path) -> Finding:
    """Probe the kubelet behind ``socket``: two Registers at most, each with a deadline."""
    from adapters.registry import DIALECTS
    from devices.model import Registration
    from gateway.negotiate import SPOKEN_BY, Kind, classify

    says: list[str] = []
    for dialect in DIALECTS[:2]:  # Both alpha dialects share one service.
        request = dialect.encode_register(Registration(BOGUS_VERSION, "probe.sock", _RESOURCE)).data
        code, details = await _register(socket, f"/{dialect.registration_service}/Register", request)
        says.append(f"{dialect.registration_service}: {code} {details}".strip())
        answer = classify(code, details)
        if answer.kind is Kind.OTHER_VERSION:
            named = answer.supported or ("0.1",)  # Kubelet 1.8 alone refuses without naming what it speaks.
            known = [name for name in named if name in SPOKEN_BY]
            if known:
                return Finding(known[0], SPOKEN_BY[known[0]], says[-1])
            return Finding(None, f"newer than this gateway: it speaks {', '.join(named)}", says[-1])
        if answer.kind is not Kind.NO_SERVICE:
            break
    return Finding(None, "unknown", "; ".join(says))


async def _register(socket: Path, method: str, request: bytes) -> tuple[str, str]:
    import grpc.aio

    from gateway.watch import target

    try:
        async with grpc.aio.insecure_channel(target(socket)) as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
            await call(request, timeout=_DEADLINE)
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", "accepted a version that does not exist"


@click.command(epilog=_EXAMPLES)
@click.option(
    "--socket-dir",
    envvar="GATEWAY_SOCKET_DIR",
    type=click.Path(path_type=Path),
    default=SOCKET_DIR,
    show_default=True,
    help="The kubelet's device plugin directory, with kubelet.sock in it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: api, kubelets, says, socket.")
def probe(*, socket_dir: Path, as_json: bool) -> None:
    """Ask a kubelet which device plugin API it speaks.

    It changes nothing in the kubelet, but leaves a trace: the kubelet logs the refused registration and counts it in
    its metric device_plugin_registration_total, under the resource gateway.invalid/probe.
    """
    from gateway.watch import KUBELET_SOCKET, listens

    socket = socket_dir / KUBELET_SOCKET
    if listens(socket):
        finding = asyncio.run(ask(socket))
    else:
        finding = Finding(None, "unknown", f"nobody takes connections on {socket}: is the kubelet running?")
    if as_json:
        click.echo(json.dumps(asdict(finding) | {"socket": str(socket)}))
    elif finding.api:
        click.echo(f"{socket}: {finding.api} ({finding.kubelets})")
    else:
        click.echo(f"{socket}: no API of ours ({finding.kubelets}). {finding.says}", err=True)
    sys.exit(0 if finding.api else 1)
