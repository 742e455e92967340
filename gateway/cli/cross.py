"""``gateway cross``: GPUs go to the other API, one by one, when nobody holds them. For ``--dra on``."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import click

from gateway.cli import places
from gateway.wires import control
from gateway.wires.control import ControlError
from gateway.wires.log import escaped

ANSWER_TIME = 10.0
"""Seconds within which the gateway must answer: it tells the API server first."""

_EXAMPLES = """\
\b
Examples:
  gateway cross --to dra                     every GPU of this node
  gateway cross --to dra GPU-5f3a-...        this one, and the others stay
  gateway cross --to plugin --dry-run        where they are, and what they would wait for

Exit status: 0 where the gateway took the order, 1 where it did not or there was none to ask, 2 for a wrong flag.
"""


@click.command(epilog=_EXAMPLES)
@click.option("--to", type=click.Choice(["dra", "plugin"]), required=True, help="The API that is to give them away.")
@click.option("--dry-run", is_flag=True, help="Change nothing; say where they are.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: `boards`, each with id, side and words.")
@places.state_dir
@click.argument("ids", metavar="[ID]...", nargs=-1)
def cross(*, to: str, dry_run: bool, as_json: bool, state_dir: Path, ids: tuple[str, ...]) -> None:
    """Move GPUs to the other API: those that are named, or all.

    A GPU goes when nobody holds it; pods keep theirs, and nobody new gets it meanwhile. An order in the other direction takes it back.
    """
    paths = control.sockets(state_dir)
    if len(paths) != 1:
        raise click.ClickException(
            f"expected one gateway on {state_dir}, found {len(paths)}: with --dra on there is one"
        )
    request = {"op": "cross", "to": to, "ids": list(ids), "dry_run": dry_run}
    try:
        answer = asyncio.run(control.ask(paths[0], request, ANSWER_TIME))
    except ControlError as error:
        raise click.ClickException(escaped(str(error))) from error
    if as_json:
        click.echo(json.dumps(answer))
        sys.exit(0)
    for row in answer["boards"]:
        click.echo(escaped(f"{row['id']}: {row['side']}: {row['words']}"))
