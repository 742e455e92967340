"""``gateway run``: the daemon, from its options to a process that serves."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import click
import structlog
from click.core import ParameterSource
from msgspec.structs import replace

from gateway import VERSION
from gateway.cli.main import COMMANDS
from gateway.cli.options import Program, setting
from gateway.configuration import commandline, effective, kinds
from gateway.configuration.flags import FLAGS
from gateway.configuration.settings import STATE_DIR, ConfigError, Given, Settings
from gateway.wires import log as observe

if TYPE_CHECKING:
    from gateway.daemon import Gateway

_LONGEST_SOCKET_PATH = 107
NVIDIA = "nvidia-device-plugin"
"""Under this name it has the defaults of NVIDIA's plugin."""

_log = structlog.get_logger()


class Run(Program):
    """A command that takes the daemon's options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, also in Go's spelling, and refuse a command's name behind the options of ``run``."""
        options = (one for one in self.get_params(ctx) if isinstance(one, click.Option) and not one.is_flag)
        try:
            args = commandline.normalize_flags(args, {name for option in options for name in option.opts})
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
        if (rest := super().parse_args(ctx, [*args])) and not ctx.resilient_parsing:
            from gateway.cli import help as texts

            texts.refuse(ctx, args, rest)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own options, or all of ``gateway run`` by group."""
        from gateway.cli import help as texts

        texts.write_options(self, ctx, formatter, every=self is run)


@click.command(
    cls=Run,
    params=[setting(flag) for flag in FLAGS if flag.option],
    context_settings={
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
        "show_default": True,
    },
)
@click.version_option(VERSION)
@click.pass_context
def run(ctx: click.Context, /, **texts: Any) -> None:
    """Serve this node's GPUs to its kubelet, whichever version it is, through every upgrade of it.

    It runs in the foreground, until SIGTERM.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # What changes before ``reload`` listens is read when it does.
    said: dict[str, Given] = {}
    try:
        said, start = given(ctx, texts)
        observe.configure(start.log_format, start.log_level)
        settings, every = read(ctx, said, start)
        for note in kinds.unknown_hooks(settings.policy):
            _log.warning("configuration", note=note)
        changed = {
            one.name: one.value for one in effective.in_force(settings, every) if one.source != effective.DEFAULT
        }
        _log.info("starting device-plugin-gateway", version=VERSION, settings=changed)
        sys.exit(serve(settings))
    except ConfigError as error:
        raise ending_error(error, said) from error


def ending_error(error: ConfigError, said: Mapping[str, Given]) -> click.ClickException:
    """Return the error that ends the command: exit status 2 for a wrong value, 1 for one that may become right later.

    If a setting that the message names doesn't come from the command line, it adds where it comes from.
    """
    words = str(error) + "".join(
        f" (--{name} comes from {said[name].source})"
        for name in error.options
        if name in said and not said[name].source.startswith("--")
    )
    return (click.UsageError if error.lasting else click.ClickException)(words)


def given(ctx: click.Context, texts: Mapping[str, Any]) -> tuple[dict[str, Given], Settings]:
    """Return what options and variables set, by flag name, and the settings of the start."""
    said = commandline.read_sources(texts, os.environ)
    if ctx.info_name == NVIDIA:
        said.setdefault("backend", Given("nvidia", NVIDIA))
    return said, commandline.make_settings(said)


def read(ctx: click.Context, said: Mapping[str, Given], start: Settings) -> tuple[Settings, Mapping[str, Given]]:
    """Return the settings with the configuration file, and where each comes from, by flag name."""
    for note in commandline.unknown_variables(os.environ, COMMANDS.keys() - {"run"}):
        _log.warning("environment", note=note)
    if inert := commandline.sources_without_effect(said):
        _log.info("settings without an effect here", settings=inert)
    policy = commandline.make_policy(said, start.backend)
    if (choice := commandline.make_choice(said)) is not None:
        if start.config_file:
            raise ConfigError(
                f"--config-file {start.config_file}: it does not go with --config-file-srcdir. Leave one of them out",
                "config-file",
                "config-file-srcdir",
            )
        from gateway.cli import nodeconfig

        settings, file = nodeconfig.start(start, choice, ask=ctx.command is run)
        return settings, {**file.given, **said, "config-file": Given(str(settings.config_file), choice.label)}
    if start.config_file is None:
        return replace(start, policy=policy), said
    from gateway.configuration import file as config

    found = config.parse(config.read(start.config_file), str(start.config_file), strict=start.strict_config)
    for warning in found.warnings:
        _log.warning("configuration", note=warning)
    return replace(start, policy=config.policy(found, start.given, start.backend)), {**found.given, **said}


class Settled(Run):
    """A command that also has the daemon's options, to know the settings of a daemon. Its own of the same name win."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Add the daemon's options to its own."""
        own = super().get_params(ctx)
        names = {one.name for one in own}
        return [*own, *(one for one in run.params if one.name not in names and one.expose_value)]


def effective_settings(ctx: click.Context) -> list[effective.Setting]:
    """Return the settings that a daemon would use with this command's options, this process's variables and its file.

    Raises:
        ConfigError: one of them can't be used.
    """
    texts = {
        name: value if isinstance(value, tuple) else (str(value),)
        for name, value in ctx.params.items()
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    return [*effective.in_force(*read(ctx, *given(ctx, texts)))]


def serve(settings: Settings) -> int:
    """Run the daemon; return the exit status."""
    # gRPC logs a line for each mistake of a stranger; ours says what matters.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from gateway import compose, process
    from gateway import daemon as shell

    _refuse_impossible(settings)
    try:
        source = compose.source(settings)
    except compose.NoBackendError as error:
        raise click.ClickException(str(error)) from error
    except ValueError as error:
        raise ConfigError(str(error), "backend" if settings.backend == "none" else "simulate") from error
    process.allow_descriptors()
    process.give_memory_back()
    return asyncio.run(_run(shell.Gateway(settings, source)))


def _refuse_impossible(settings: Settings) -> None:
    """End with status 2 where these settings can't go together."""
    from gateway.leader import instance

    if settings.state_dir.absolute().is_relative_to(settings.socket_dir.absolute()):
        raise ConfigError(
            f"--state-dir {settings.state_dir} is inside --socket-dir {settings.socket_dir}, which kubelets clean at "
            f"each start. Use a folder of its own, such as {STATE_DIR}",
            "state-dir",
            "socket-dir",
        )
    deepest = instance.Instance(settings.socket_dir).folder / instance.socket_name("")
    if len(os.fsencode(deepest.absolute())) > _LONGEST_SOCKET_PATH:
        raise ConfigError(
            f"--socket-dir {settings.socket_dir} is too long: a socket in it, such as {deepest}, may have at most "
            f"{_LONGEST_SOCKET_PATH} bytes on Linux. Use a shorter path, or a link to it",
            "socket-dir",
        )
    if settings.profile is not None and settings.backend != "simulated":
        raise ConfigError(
            "--simulate needs --backend simulated: a simulation is never taken for real hardware", "simulate", "backend"
        )
    if settings.dra == "only" and (settings.node_condition or settings.startup_taint):
        raise ConfigError(
            "--node-condition and --startup-taint go by the device plugin's resources, which --dra only doesn't offer. Leave them out",
            "node-condition",
            "startup-taint",
            "dra",
        )
    if settings.writes_node and not settings.node_name:
        raise ConfigError(
            "--startup-taint, --node-condition and --node-events need the node's name. Set --node-name, or NODE_NAME from spec.nodeName",
            "startup-taint",
            "node-condition",
            "node-events",
        )
    if (address := settings.probe_address) is not None and address[1] and address == settings.metrics_address:
        raise ConfigError(
            "--probe-address is the same as --metrics-address, and only one can listen on a port. Use two ports",
            "probe-address",
            "metrics-address",
        )


async def _run(gateway: Gateway) -> NoReturn:
    """Serve, and end the process: a thread that waits for a disk that hangs would hold it for as long."""
    from gateway.wires import log

    log.log_what_others_write()
    status = await gateway.run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
