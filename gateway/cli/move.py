"""``gateway move``: GPUs go to the other API, one by one, when nobody holds them. For ``--dra on``."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gateway.cli import asking, common
from gateway.cli.devices import look, resolve_devices
from gateway.cli.options import Words
from gateway.cli.page import print_json
from gateway.wires import control
from gateway.wires.control import ControlError
from gateway.wires.log import escaped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ANSWER_TIME = 25.0
"""Seconds within which the gateway must answer: it waits for pods and tells the API server first (``gateway.dra.desk.ORDER_S``)."""

_EXAMPLES = """\
\b
Examples:
  gateway move --to dra                      every GPU of this node
  gateway move --to dra GPU-5f3a             this one, and the others stay
  gateway move --to plugin --dry-run         where they are, and what they would wait for

Exit status: 0 where the gateway took the order, or would take it (--dry-run); 1 where not, or where there was none to ask;
2 for a wrong flag.
"""


@click.command(epilog=_EXAMPLES)
@click.option("--to", type=Words(("dra", "plugin")), required=True, help="The API that is to give them away.")
@click.option("--dry-run", is_flag=True, help="Change nothing; say where they are, and what they would wait for.")
@common.output("one object: `boards`, each with id, side, then and words; `refused`")
@common.state_dir
@click.argument("ids", metavar="[ID]...", nargs=-1)
def move(*, to: str, dry_run: bool, output: str, state_dir: Path, ids: tuple[str, ...]) -> None:
    """Move GPUs to the other API: those that are named, or all.

    ID is a GPU's ID, as much of it as no other begins with, or its index (`gateway devices` shows both).

    A GPU goes when nobody holds it; pods keep theirs, and nobody new gets it meanwhile. An order in the other direction takes it back.

    The order is on disk when the command returns, and needs nobody to wait for it: `gateway status` says what each GPU on its way waits for.
    """
    if not (paths := control.sockets(state_dir)):
        raise asking.no_gateway_error(state_dir, "move")
    wanted = resolve_devices(ids, look(state_dir)[0]) if ids else []
    answer = asyncio.run(_told({"op": "move", "to": to, "ids": wanted, "dry_run": dry_run}, paths))
    refused = answer["refused"]
    if output == "json":
        print_json(answer)
        sys.exit(1 if refused else 0)
    for row in answer["boards"]:
        then = "" if row["then"] == row["side"] else f", then {row['then']}"
        click.echo(escaped(f"{row['id']}: {row['side']}{then}: {row['words']}"))
    if refused:
        raise click.ClickException(escaped(f"the order would be refused: {refused}"))


async def _told(request: Mapping[str, Any], paths: Sequence[Path]) -> dict[str, Any]:
    """Tell the first gateway that answers: one that stands by passes it on to the leader."""
    *others, last = paths
    for path in others:
        with contextlib.suppress(ControlError):
            return await control.ask(path, request, ANSWER_TIME)
    return await control.ask(last, request, ANSWER_TIME)
