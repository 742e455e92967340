"""``gateway config``: which settings are in force, and where each comes from."""

from __future__ import annotations

import click
import msgspec

from gateway.cli import main
from gateway.configuration.settings import ConfigError
from gateway.wires import log as observe

_EXAMPLES = """
\b
Examples:
  gateway config show                                   as a daemon would have them that was started here
  gateway --config-file config.yaml config show         with a flag of the daemon: it goes before the command
  gateway --mig-strategy mixed config show --json       the same as JSON
"""


@click.group()
def config() -> None:
    """Show the settings in force, and where each comes from."""


@config.command(epilog=_EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_context
def show(ctx: click.Context, *, as_json: bool) -> None:
    """Show each setting, and where it comes from.

    That is a flag, a variable, a line of the configuration file, or the default. Shown is what a daemon would use that was
    started here. A running daemon logs its own settings once, at its start.

    Exit status: 0; like the daemon, 2 or 78 where a setting can't be used, 1 where the file can't be read.
    """
    try:
        found = main.effective_settings(ctx.find_root())
    except ConfigError as error:
        raise main.wrong(error) from error
    if as_json:
        click.echo(observe.escaped(msgspec.json.format(msgspec.json.encode(found)).decode()))
        return
    width = max(len(one.name) for one in found)
    values = [
        one.value if isinstance(one.value, str) and one.value else msgspec.json.encode(one.value).decode()
        for one in found
    ]
    column = min(max(map(len, values)), 40)
    for one, value in zip(found, values, strict=True):
        click.echo(observe.printable(f"{one.name:{width}}  {value:{column}}  {one.source}"))
