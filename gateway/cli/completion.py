"""``gateway completion``: what a shell evaluates to complete the command line."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from gateway.cli.options import Words

_EXAMPLES = """
\b
Examples:
  gateway completion bash > /etc/bash_completion.d/gateway
  gateway completion zsh > "${fpath[1]}/_gateway"
  gateway completion fish > ~/.config/fish/completions/gateway.fish
"""


@click.command(epilog=_EXAMPLES)
@click.argument("shell", type=Words(("bash", "zsh", "fish")))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print what SHELL evaluates to complete commands and options."""
    found = get_completion_class(shell)
    if found is None:
        raise click.UsageError(f"SHELL: unknown value {shell!r}. Allowed: bash, zsh, fish")
    program = "gateway"
    click.echo(found(ctx.find_root().command, {}, program, f"_{program.upper()}_COMPLETE").source())
