"""Options that several commands share: paths on the node, and the format of the output."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from gateway.cli.options import Strict, Words
from gateway.configuration.settings import STATE_DIR


def output(
    json: str, wide: str = "the same as table", **more: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds ``-o`` and ``--json``. The command gets ``output``: ``table``, ``wide``, ``json`` or a key of ``more``."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def chosen(*args: Any, as_json: bool, output: str, **options: Any) -> None:
            command(*args, output="json" if as_json else output, **options)

        chosen = click.option("--json", "as_json", is_flag=True, help="The same as -o json.")(chosen)
        words = " ".join(f"{name}: {text}." for name, text in {"json": json, "wide": wide, **more}.items())
        choice = Words(("table", "wide", "json", *more))
        return click.option("-o", "--output", type=choice, default="table", show_default=True, help=words)(chosen)

    return add


state_dir = click.option(
    "--state-dir",
    cls=Strict,
    envvar="GATEWAY_STATE_DIR",
    type=click.Path(path_type=Path, readable=False),
    default=STATE_DIR,
    show_default=True,
    help="The gateways' state directory. It has their control sockets.",
)
host_root = click.option(
    "--host-root",
    cls=Strict,
    type=click.Path(path_type=Path),
    default=Path("/"),
    show_default=True,
    help="The path at which the host's file system is mounted.",
)
