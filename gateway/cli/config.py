"""``gateway config``: which settings are in force, and where each comes from."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from gateway.cli import common, run
from gateway.cli.page import print_json
from gateway.configuration.settings import ConfigError
from gateway.wires import log as observe

_EXAMPLES = """
\b
Examples:
  gateway config show                                   as a daemon would have them that was started here
  gateway config show --config-file config.yaml         with an option of `gateway run`
  gateway config show --mig-strategy mixed -o json      the same as JSON
"""


@click.group()
def config() -> None:
    """Show the settings in force, and where each comes from."""


@config.command(cls=run.Settled, epilog=_EXAMPLES)
@common.output("a list of objects with name, value and from")
@click.pass_context
def show(ctx: click.Context, /, *, output: str, **_: Any) -> None:
    """Show each setting, and where it comes from.

    That is a flag, a variable, a line of the configuration file, or the default. Shown is what a daemon would use that was
    started here. A running daemon logs its own once, at its start: those that differ from the defaults.

    Exit status: 0; like the daemon, 2 if a setting is wrong, 1 if the file can't be read.
    """
    try:
        found = run.effective_settings(ctx)
    except ConfigError as error:
        raise run.ending_error(error, {}) from error
    if output == "json":
        print_json(found, indent=2)
        return
    width = max(len(one.name) for one in found)
    values = [
        one.value if isinstance(one.value, str) and one.value else msgspec.json.encode(one.value).decode()
        for one in found
    ]
    column = min(max(map(len, values)), 40)
    for one, value in zip(found, values, strict=True):
        click.echo(observe.printable(f"{one.name:{width}}  {value:{column}}  {one.source}"))
