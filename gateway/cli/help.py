"""What ``gateway --help`` and ``gateway run --help`` print, and what is said of an option in the wrong place. A daemon doesn't load it."""

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
  gateway run                            serve this node's GPUs to whichever kubelet runs
  gateway --api auto                     the same: options without a command mean run
  gateway status                         the state of the gateway, its kubelet and its devices
  gateway doctor                         what keeps this node's GPUs from pods?
  gateway config show                    the settings in force, and where each comes from
  gateway release 3                      close GPU 3 for a reset; gateway acquire 3 opens it again
  gateway probe -o json                  which API does this node's kubelet speak?
  gateway demo                           a kubelet upgrade on a simulated node, with no GPU and no cluster

Without a command, and without a terminal, gateway means `gateway run`: containers and units configure it by variables.
"""
_RUN_EXAMPLES: Final = """
\b
Examples:
  gateway run                                        serve this node's GPUs to whichever kubelet runs
  gateway run --backend simulated                    8 healthy simulated GPUs as nvidia.com/gpu
  gateway run --backend simulated --simulate p.yaml  GPUs from a profile; edit it and the node follows
  gateway run --api v1beta1                          only this API; an older kubelet is left alone
  gateway run --mig-strategy mixed                   MIG partitions by profile
  gateway run --config-file config.yaml              a file in the format of NVIDIA's plugin; edit it and the gateway follows

Each option has a variable: --socket-dir is GATEWAY_SOCKET_DIR. NVIDIA's keep the plugin's names: --mig-strategy is MIG_STRATEGY.
Options win over variables, and those over the configuration file. docs/configuration.md lists all.
"""
GROUPS: Final[Mapping[str, Sequence[str]]] = {
    "Kubelet": (
        "api",
        "socket-dir",
        "kubelet-socket",
        "pod-resources-socket",
        "kubelet-version",
        "state-dir",
        "host-service",
    ),
    "Devices": ("backend", "simulate", "exclude-devices", "startup-grace", "health-recovery", "fail-on-init-error"),
    "What containers get": (
        *("device-list-strategy", "device-id-strategy", "pass-device-specs", "shared-devices-allocation-policy"),
        *("cdi-annotation-prefix", "cdi-disable-hooks", "cdi-fallback", "nvidia-cdi-hook-path"),
        *("gdrcopy-enabled", "gds-enabled", "mofed-enabled", "imex-channel-ids", "imex-required"),
    ),
    "NVIDIA and AMD": (
        *(
            "mig-strategy",
            "nvidia-driver-root",
            "nvidia-dev-root",
            "container-driver-root",
            "device-discovery-strategy",
        ),
        *("resource-naming-strategy", "driver-type"),
    ),
    "Configuration file": (
        *("config-file", "config-file-srcdir", "node-label", "default-config", "fallback-strategies", "strict-config"),
    ),
    "Dynamic resource allocation": ("dra", "dra-drivers"),
    "Other vendors' plugins": ("bridge", "bridge-grace", "bridge-withdraw"),
    "API server": ("kubeconfig", "node-name", "startup-taint", "node-condition", "node-events"),
    "Metrics, probes and log": (
        *("metrics-address", "metrics-device-ids", "gpu-metrics", "probe-address", "log-format", "log-level"),
    ),
    "Others": ("version", "help"),
}
"""The options of ``gateway run`` by group."""
_ABOUT: Final = {"daemon": "Daemon", "look": "Look", "orders": "Orders", "tools": "Tools"}


def write_commands(formatter: click.HelpFormatter, commands: Mapping[str, tuple[str, str, str]]) -> None:
    """Write the commands by group, with what each does."""
    width = max(map(len, commands))
    for group, heading in _ABOUT.items():
        rows = [(f"{name:{width}}", text) for name, (one, _, text) in commands.items() if one == group]
        with formatter.section(heading):
            formatter.write_dl(rows)


def write_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter, *, every: bool) -> None:
    """Write a command's own options: those of ``gateway run`` by group, if it has them all for its own."""
    own = [one for one in (*command.params, command.get_help_option(ctx)) if isinstance(one, click.Option)]
    rows = {max(one.opts, key=len).removeprefix("--"): one.get_help_record(ctx) for one in own}
    if not every:
        with formatter.section("Options"):
            formatter.write_dl([row for row in rows.values() if row])
        formatter.write_paragraph()
        formatter.write_text("All options of `gateway run` can be given, too: they decide the settings.")
        return
    rows |= {row[0].partition(" ")[0].removeprefix("--"): row for row in flags.help_rows()}
    for heading, names in GROUPS.items():
        with formatter.section(heading):
            formatter.write_dl([row for name in names if (row := rows[name])])
    command.epilog = _RUN_EXAMPLES


def refuse(ctx: click.Context, words: Sequence[str], rest: Sequence[str]) -> NoReturn:
    """End ``gateway run``, whose words end with ``rest``, which it doesn't take: with another command, say where options go."""
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
    behind = shlex.join([*path, *words[: len(words) - len(rest)], *rest[len(path) :]])
    raise click.UsageError(f"Options go behind their command. Write: gateway {behind}")
