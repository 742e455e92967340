"""``gateway``: ``run`` is the daemon; the other commands help people with it.

Commands are imported only when they run, so that the daemon never pays for the lab.
"""

from __future__ import annotations

import importlib
import os
import signal

import click

from gateway import VERSION
from gateway.cli.options import Program
from gateway.wires import log as observe

COMMANDS = {
    "run": ("daemon", "gateway.cli.run:run", "Serve this node's GPUs to its kubelet."),
    "status": ("look", "gateway.cli.status:status", "Show the state of this node's gateways, kubelet and devices."),
    "devices": ("look", "gateway.cli.devices:devices", "Show this node's devices: their state, and who holds them."),
    "doctor": ("look", "gateway.cli.doctor:doctor", "Find what keeps this node's GPUs from pods."),
    "config": ("look", "gateway.cli.config:config", "Show the settings in force, and where each comes from."),
    "probe": ("look", "gateway.cli.probe:probe", "Ask a kubelet which device plugin API it speaks."),
    "support-bundle": ("look", "gateway.cli.bundle:bundle", "Collect what this node knows of its gateways."),
    "cordon": ("orders", "gateway.cli.cordon:cordon", "Let no new pod have a device, and say why."),
    "uncordon": ("orders", "gateway.cli.cordon:uncordon", "Give a cordoned device back to pods."),
    "release": ("orders", "gateway.cli.release:release", "Close GPUs, so that they can be reset or partitioned."),
    "acquire": ("orders", "gateway.cli.release:acquire", "Open released GPUs again."),
    "move": ("orders", "gateway.cli.move:move", "Move GPUs between the device plugin API and DRA."),
    "forget": ("orders", "gateway.cli.cordon:forget", "Forget that a device is lost, unhealthy or still held."),
    "plan": ("tools", "gateway.cli.plan:plan", "Say what a kubelet upgrade does to a GPU node, hop by hop."),
    "compat": ("tools", "gateway.cli.compat:compat", "Run the compatibility matrix on many kubelets."),
    "conformance": (
        "tools",
        "gateway.cli.conformance:conformance",
        "Examine any device plugin by the kubelet's rules.",
    ),
    "bugs": ("tools", "gateway.cli.bugs:bugs", "Show known bugs of kubelets."),
    "demo": ("tools", "gateway.cli.demo:demo", "Show a rolling kubelet upgrade on a simulated node."),
    "dev": ("tools", "gateway.cli.dev:dev", "Try device plugins, for instance on an emulated kubelet."),
    "completion": ("tools", "gateway.cli.completion:completion", "Print what a shell needs to complete commands."),
    "version": ("tools", "gateway.cli.version:version", "Print the version."),
}
"""By name: the group in ``gateway --help``, where the command is, and what it does."""
_OWN = frozenset({"-h", "--help", "--version"})  # They don't mean ``run``.


class _Gateway(Program, click.Group):
    """A group whose commands are named in a table and imported when they are called. Options without a command mean ``run``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] and args[0].startswith("-") and args[0] not in _OWN:
            args = ["run", *args]
        elif not args and not ctx.resilient_parsing:
            # Containers and units have no terminal, and configure the daemon by variables.
            args = ["--help"] if os.isatty(0) and os.isatty(1) else ["run"]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][1].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from gateway.cli import help as texts

        texts.write_commands(formatter, COMMANDS)
        click.Command.format_options(self, ctx, formatter)
        self.epilog = texts.EXAMPLES


@click.group(
    cls=_Gateway,
    context_settings={"auto_envvar_prefix": "GATEWAY", "help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(VERSION)
@click.pass_context
def gateway(ctx: click.Context) -> None:
    """Serve a Kubernetes node's GPUs to its kubelet, and help people with it.

    Options without a command are options of `gateway run`.
    """
    if not observe.wants_colour():
        ctx.color = False
    if ctx.invoked_subcommand != "run":
        observe.configure("auto", "warning")
        if ctx.obj is not None:
            signal.signal(signal.SIGHUP, ctx.obj)
