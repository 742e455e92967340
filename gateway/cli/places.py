"""The options of several commands that say where things are on the node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from gateway.cli.options import Strict
from gateway.configuration.settings import STATE_DIR


def given_before(name: str, otherwise: Path) -> Callable[[], Path]:
    """Take for a command's option what the daemon's own one of that name says: ``gateway --state-dir DIR status``."""
    return lambda: Path(click.get_current_context().find_root().params.get(name, otherwise))


def nobody(state_dir: Path, command: str) -> str:
    """Say that no gateway runs on a state directory, and what to do about it."""
    return (
        f"No gateway runs on this node, as far as {state_dir} tells. Where it runs in a pod, ask there: kubectl exec --namespace "
        f"device-plugin-gateway POD -- gateway {command}. Where it keeps its state elsewhere, name that folder with --state-dir. "
        "Else start it (docs/install.md, docs/host-service.md)"
    )


state_dir = click.option(
    "--state-dir",
    cls=Strict,
    envvar="GATEWAY_STATE_DIR",
    type=click.Path(path_type=Path, readable=False),
    default=given_before("state_dir", STATE_DIR),
    show_default=str(STATE_DIR),
    help="The gateways' state directory, with their control sockets in it.",
)
host_root = click.option(
    "--host-root",
    cls=Strict,
    type=click.Path(path_type=Path),
    default=Path("/"),
    show_default=True,
    help="Where the host's file system is.",
)
