"""From settings to a daemon that runs: what can't go together is refused, and the process is made ready for it."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, NoReturn

import click
import structlog

from gateway.configuration.settings import EX_CONFIG, STATE_DIR, Settings

if TYPE_CHECKING:
    from gateway.daemon import Gateway
    from gateway.pair.role import Role

_LONGEST_SOCKET_PATH = 107
_BORN = "DEVICE_PLUGIN_GATEWAY_BORN_NS"
"""The variable by which a gateway that begins anew knows how old it is, and how often in a row it made room in vain."""
_log = structlog.get_logger()


class SettingError(click.ClickException):
    """A setting can't be used: starting again doesn't help."""

    exit_code = EX_CONFIG


def serve(settings: Settings) -> int:
    """Run the daemon, or a pair of them; return the exit status."""
    # gRPC logs a line for each mistake of a stranger; ours says what matters.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from gateway import compose, process
    from gateway import daemon as shell

    _refuse_impossible(settings)
    flight = None
    if settings.standby:
        from gateway.pair.flight import Flight

        flight = Flight()
    try:
        source = compose.source(settings, attempts=flight)
    except compose.NoBackendError as error:
        raise click.ClickException(str(error)) from error
    except ValueError as error:
        raise SettingError(str(error)) from error
    process.allow_descriptors()
    process.give_memory_back()
    before = [int(one) for one in os.environ.pop(_BORN, "").split() if one.isdecimal()]
    if flight is None:
        return asyncio.run(_run(shell.Gateway(settings, source, before=before)))
    from gateway.pair.parent import Pair

    def serve_as(role: Role) -> int:
        return asyncio.run(_run(shell.Gateway(settings, source, role), role))

    pair = Pair(serve_as, flight, dra=settings.dra != "off", before=before)
    status = pair.run()
    return status if pair.resigned is None else _begin_anew(pair.born_ns, pair.resigned)


def _refuse_impossible(settings: Settings) -> None:
    """End with status 2 where these settings can't go together."""
    from gateway.handover import instance

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
    if settings.standby and settings.policy.bridge:
        raise click.UsageError(
            "--standby keeps two gateways, and plugins behind the bridge want one: leave --standby out, or those"
        )
    if (address := settings.probe_address) is not None and address[1] and address == settings.metrics_address:
        raise click.UsageError(
            "--probe-address is --metrics-address: expected two, because only one can listen on a port"
        )


async def _run(gateway: Gateway, role: Role | None = None) -> NoReturn:
    """Serve, and end the process: a thread that waits for a disk that hangs would hold it for as long."""
    from gateway import daemon, process
    from gateway.wires import log

    log.log_what_others_write()
    trimming = asyncio.ensure_future(process.trim() if role is None else role.once_active(process.trim))
    status = await gateway.run()
    trimming.cancel()
    sys.stdout.flush()
    sys.stderr.flush()
    if status == daemon.RESIGNED:  # Anew, with nothing of before but its age: it is to stay the older one.
        status = _begin_anew(gateway.age.born_ns, gateway.alone.in_vain if gateway.alone is not None else 1)
    os._exit(status)


def _begin_anew(born_ns: int, in_vain: int) -> int:
    """Run this program once more in this process; return the exit status where that can't be."""
    before = {_BORN: f"{born_ns} {in_vain}"}
    try:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | before)  # noqa: S606 - itself
    except OSError as error:
        _log.error("giving up: can't begin anew", reason=str(error))
    return 1
