"""``gateway config``: which settings are in force, and who said them."""

from __future__ import annotations

import click
import msgspec

from gateway.cli import main
from gateway.configuration.settings import ConfigError
from gateway.wires import log as observe

_EXAMPLES = """
\b
Examples:
  gateway config show                                   with the variables and the file that a daemon would have here
  gateway --config-file config.yaml config show         with a flag: the daemon's own, before the command
  gateway --mig-strategy mixed config show --json       for a program
"""


@click.group()
def config() -> None:
    """Settings: flags, variables, the configuration file, and which of them counts."""


@config.command(epilog=_EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_context
def show(ctx: click.Context, *, as_json: bool) -> None:
    """Show each setting that a daemon with these flags, variables and file would go by, and what said it.

    It ends with 78 where one of them can't be gone by, as the daemon does. A running daemon logs its own once, at its start.
    """
    root = ctx.find_root()
    options = dict(root.params)
    observe.configure(options.pop("log_format"), options.pop("log_level"))
    try:
        found = main.effective_settings(root, options)
    except ConfigError as error:
        raise main.wrong(error) from error
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    width = max(len(one.name) for one in found)
    values = [
        one.value if isinstance(one.value, str) and one.value else msgspec.json.encode(one.value).decode()
        for one in found
    ]
    column = min(max(map(len, values)), 40)
    for one, value in zip(found, values, strict=True):
        click.echo(f"{one.name:{width}}  {value:{column}}  {one.source}")
