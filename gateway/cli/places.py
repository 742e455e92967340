"""The options of several commands that say where things are on the node."""

from __future__ import annotations

from pathlib import Path

import click

from gateway.configuration.settings import STATE_DIR

state_dir = click.option(
    "--state-dir",
    envvar="GATEWAY_STATE_DIR",
    type=click.Path(path_type=Path),
    default=STATE_DIR,
    show_default=True,
    help="The gateways' state directory, with their control sockets in it.",
)
host_root = click.option(
    "--host-root",
    type=click.Path(path_type=Path),
    default=Path("/"),
    show_default=True,
    help="Where the host's file system is.",
)
