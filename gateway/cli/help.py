"""The texts of ``gateway --help`` and ``gateway run --help``, and the error about options before their command. A daemon doesn't load this module."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

import click
from click.core import ParameterSource

from gateway.configuration import flags

EXAMPLES: Final = """
\b
Examples:
  gateway run                            offer this node's GPUs to the kubelet, whatever its version
  gateway --api auto                     the same: options without a command mean run
  gateway status                         the state of the gateway, its kubelet and its devices
  gateway doctor                         what keeps this node's GPUs from pods?
  gateway config show                    the settings in force, and where each comes from
  gateway release 3                      close GPU 3 for a reset; gateway acquire 3 opens it again
  gateway probe -o json                  which API does this node's kubelet speak?
  gateway demo                           a kubelet upgrade on a simulated node, with no GPU and no cluster

If there is no command and no terminal, gateway means `gateway run`. Containers and systemd units set its variables.
"""
_RUN_EXAMPLES: Final = """
\b
Examples:
  gateway run                                        offer this node's GPUs to the kubelet, whatever its version
  gateway run --backend simulated                    8 healthy simulated GPUs as nvidia.com/gpu
  gateway run --backend simulated --simulate p.yaml  GPUs from a profile; changes of the file apply at once
  gateway run --api v1beta1                          only this API; it does not register with an older kubelet
  gateway run --mig-strategy mixed                   MIG partitions by profile
  gateway run --config-file config.yaml              a file in the format of NVIDIA's plugin; changes apply at once

Each option has a variable: --socket-dir is GATEWAY_SOCKET_DIR. Options of NVIDIA's plugin have that plugin's variables: --mig-strategy is MIG_STRATEGY.
Options win over variables, and variables over the configuration file. `gateway config show` prints the values in force.
"""
_HEADINGS: Final = {"daemon": "Daemon", "look": "Look", "orders": "Orders", "tools": "Tools"}


def write_commands(formatter: click.HelpFormatter, commands: Mapping[str, tuple[str, str, str]]) -> None:
    """Write the commands by group, each with its description."""
    width = max(map(len, commands))
    for group, heading in _HEADINGS.items():
        rows = [(f"{name:{width}}", text) for name, (one, _, text) in commands.items() if one == group]
        with formatter.section(heading):
            formatter.write_dl(rows)


def write_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter, *, every: bool) -> None:
    """Write a command's own options; with ``every`` all options of ``gateway run``, by group."""
    own = [one for one in (*command.params, command.get_help_option(ctx)) if isinstance(one, click.Option)]
    rows = [row for one in own if not one.multiple or not every if (row := one.get_help_record(ctx))]
    if not every:
        with formatter.section("Options"):
            formatter.write_dl(rows)
        formatter.write_paragraph()
        formatter.write_text("You can also give all options of `gateway run`. They change the settings.")
        return
    for heading, of_group in flags.GROUPS.items():
        if shown := [*flags.help_rows(of_group)]:
            with formatter.section(heading):
                formatter.write_dl(shown)
    with formatter.section("Others"):
        formatter.write_dl(rows)
    command.epilog = _RUN_EXAMPLES


def refuse(ctx: click.Context, words: Sequence[str], rest: Sequence[str]) -> NoReturn:
    """Refuse ``rest``, the extra arguments of ``gateway run``. If they name a command, show the correct order."""
    given = [
        one.opts[0]
        for one in ctx.command.get_params(ctx)
        if ctx.get_parameter_source(str(one.name)) is ParameterSource.COMMANDLINE
    ]
    command: click.Command | None = ctx.parent.command if ctx.parent is not None else None
    path: list[str] = []
    for word in rest:
        found = command.get_command(ctx, word) if isinstance(command, click.Group) else None
        if found is None:
            break
        command = found
        path.append(word)
    if command is None or not path or not given:
        ctx.fail(f"Got unexpected extra argument ({rest[0]})")
    known = {name for one in command.get_params(ctx) for name in one.opts}
    name = " ".join(["gateway", *path])
    if strange := [option for option in given if option not in known]:
        raise click.UsageError(f"{strange[0]} is an option of `gateway run`, not of `{name}`. Leave it out")
    corrected = shlex.join([*path, *words[: len(words) - len(rest)], *rest[len(path) :]])
    raise click.UsageError(f"Options go after their command. Write: gateway {corrected}")
