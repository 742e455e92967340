"""``gateway probe``: which device plugin API does this kubelet speak?

``kubelet_api`` asks; this prints the answer.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click
from msgspec.structs import asdict

from gateway.cli import common
from gateway.cli.options import Strict
from gateway.cli.page import print_json
from gateway.configuration.settings import SOCKET_DIR
from gateway.wires.log import printable, printable_lines

_EXAMPLES = """
\b
Examples:
  gateway probe
  gateway probe --socket-dir /var/lib/kubelet/device-plugins --json
  gateway probe --json | jq -r .api

Exit status: 0 if the gateway speaks the kubelet's API, otherwise 1.
"""


@click.command(epilog=_EXAMPLES)
@click.option(
    "--socket-dir",
    cls=Strict,
    envvar="GATEWAY_SOCKET_DIR",
    type=click.Path(path_type=Path, readable=False),
    default=SOCKET_DIR,
    show_default=True,
    help="The kubelet's device plugin directory, with kubelet.sock in it.",
)
@common.output("one object with api, kubelets, says and socket")
def probe(*, socket_dir: Path, output: str) -> None:
    """Ask a kubelet which device plugin API it speaks.

    It changes nothing in the kubelet, but leaves a trace: the kubelet logs the refused registration and counts it in
    its metric device_plugin_registration_total, under the resource gateway.invalid/probe.
    """
    from gateway.kubelet.identity import KUBELET_SOCKET
    from gateway.registration.api import Probed, ask
    from gateway.wires.unix import connect_error

    socket = socket_dir / KUBELET_SOCKET
    error = connect_error(socket)
    finding = (
        asyncio.run(ask(socket)) if error is None else Probed(None, "unknown", _why(socket, error), answered=False)
    )
    if output == "json":
        said = asdict(finding)
        del said["answered"]
        print_json(said | {"socket": socket})
    elif finding.api:
        click.echo(printable(f"{socket}: {finding.api} ({finding.kubelets})"))
    else:
        unknown = f"No API is known that this kubelet speaks ({finding.kubelets}): " if finding.answered else ""
        click.echo(printable_lines(unknown + finding.says), err=True)
    sys.exit(0 if finding.api else 1)


def _why(socket: Path, error: OSError) -> str:
    """Name the cause of a failed connection, and what to do about it."""
    if isinstance(error, PermissionError):
        return f"Cannot connect to {socket}: permission denied. Run this command as root."
    if isinstance(error, FileNotFoundError):
        return f"{socket} does not exist. Start the kubelet, or set --socket-dir to its device plugin directory."
    if isinstance(error, ConnectionRefusedError):
        return f"No kubelet listens on {socket}. Start the kubelet."
    return (
        f"Cannot connect to {socket}: {error.strerror or error}. Is --socket-dir the kubelet's device plugin directory?"
    )
