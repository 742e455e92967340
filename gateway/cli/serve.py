"""From settings to a daemon that runs: what can't go together is refused, and the process is made ready for it."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, NoReturn

import click

from gateway.configuration.settings import EX_CONFIG, STATE_DIR, Settings

if TYPE_CHECKING:
    from gateway.daemon import Gateway

_LONGEST_SOCKET_PATH = 107


class SettingError(click.ClickException):
    """A setting can't be used: starting again doesn't help."""

    exit_code = EX_CONFIG


def serve(settings: Settings) -> int:
    """Run the daemon; return the exit status."""
    # gRPC logs a line for each mistake of a stranger; ours says what matters.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from gateway import compose, process
    from gateway import daemon as shell

    _refuse_impossible(settings)
    try:
        source = compose.source(settings)
    except compose.NoBackendError as error:
        raise click.ClickException(str(error)) from error
    except ValueError as error:
        raise SettingError(str(error)) from error
    process.allow_descriptors()
    process.give_memory_back()
    return asyncio.run(_run(shell.Gateway(settings, source)))


def _refuse_impossible(settings: Settings) -> None:
    """End with status 2 where these settings can't go together."""
    from gateway.leader import instance

    if settings.state_dir.absolute().is_relative_to(settings.socket_dir.absolute()):
        raise click.UsageError(
            f"--state-dir {settings.state_dir} is inside --socket-dir {settings.socket_dir}, which kubelets clean at "
            "each start: expected a folder of its own, such as " + str(STATE_DIR)
        )
    deepest = instance.Instance(settings.socket_dir).folder / instance.socket_name("")
    if len(os.fsencode(deepest.absolute())) > _LONGEST_SOCKET_PATH:
        raise click.UsageError(
            f"--socket-dir {settings.socket_dir} is too long: expected a path that leaves sockets in it, such as {deepest}, "
            f"at most {_LONGEST_SOCKET_PATH} bytes (Linux has no longer ones): use a shorter path, or a link to it"
        )
    if settings.profile is not None and settings.backend != "simulated":
        raise click.UsageError("--simulate needs --backend simulated: a simulation is never taken for real hardware")
    if settings.dra == "only" and (settings.node_condition or settings.startup_taint):
        raise click.UsageError(
            "--node-condition and --startup-taint go by the device plugin's resources, which --dra only doesn't offer: leave them out"
        )
    if not {*settings.startup_taint}.isdisjoint("=: "):
        raise click.UsageError(
            f"--startup-taint: expected a taint's key, without value and effect, got {settings.startup_taint!r:.80}: write example.com/starting, say"
        )
    if settings.writes_node and not settings.node_name:
        raise click.UsageError(
            "--startup-taint, --node-condition and --node-events need the node's name: expected NODE_NAME (spec.nodeName), got none"
        )
    if (address := settings.probe_address) is not None and address[1] and address == settings.metrics_address:
        raise click.UsageError(
            "--probe-address is --metrics-address: expected two, because only one can listen on a port"
        )


async def _run(gateway: Gateway) -> NoReturn:
    """Serve, and end the process: a thread that waits for a disk that hangs would hold it for as long."""
    from gateway import process
    from gateway.wires import log

    log.log_what_others_write()
    trimming = asyncio.ensure_future(process.trim())
    status = await gateway.run()
    trimming.cancel()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
