"""``gateway``: without a command it is the daemon; its commands help people with it.

Commands are imported only when they run, so that the daemon never pays for the lab.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import structlog
from click.core import ParameterSource

from gateway.cli.options import Seconds, Strict, named, variable
from gateway.cli.serve import SettingError, serve
from gateway.compose import BACKENDS
from gateway.configuration import commandline, dra, effective, flags, kinds
from gateway.configuration.settings import SOCKET_DIR, STATE_DIR, ConfigError, Given, Settings
from gateway.wires import log as observe

_COMMANDS = {
    "compat": ("gateway.cli.compat:compat", "Run the compatibility matrix: scenarios and hops on many kubelets."),
    "completion": ("gateway.cli.completion:completion", "Print what a shell evaluates to complete this command line."),
    "config": ("gateway.cli.config:config", "Show the settings in force, and where each comes from."),
    "cross": ("gateway.cli.cross:cross", "Move GPUs between the device plugin API and DRA."),
    "cordon": ("gateway.cli.cordon:cordon", "Let no new pod have a device, and say why."),
    "demo": ("gateway.cli.demo:demo", "Show a rolling kubelet upgrade on a simulated node."),
    "dev": ("gateway.cli.dev:dev", "Tools for trying device plugins, such as an emulated kubelet."),
    "devices": ("gateway.cli.devices:devices", "Show this node's devices: their state, and who holds them."),
    "doctor": ("gateway.cli.doctor:doctor", "Look at this node, and name what keeps its GPUs from pods."),
    "forget": ("gateway.cli.cordon:forget", "Forget that a device is lost or ill, or who may still use it."),
    "plan": ("gateway.cli.plan:plan", "Say what a kubelet upgrade does to a GPU node, hop by hop."),
    "probe": ("gateway.cli.probe:probe", "Ask a kubelet which device plugin API it speaks."),
    "status": ("gateway.cli.status:status", "Show the state of this node's gateways, kubelet and devices."),
    "support-bundle": ("gateway.cli.bundle:bundle", "Collect what this node knows of its gateways in one archive."),
    "uncordon": ("gateway.cli.cordon:uncordon", "Give a cordoned device back to pods."),
}

# Texts alone: what they mean is settled together with variables and the configuration file, by gateway.configuration.flags.
_FLAGS = [
    click.Option(
        [f"--{name}" for name in (flag.name, *flag.aliases)] + [flag.parameter],
        multiple=True,
        hidden=True,
        allow_from_autoenv=False,
    )
    for flag in flags.FLAGS
    if flag.option
]
_KUBELET_SOCKET = "kubelet.sock"
_FIRST_KUBELET = 8

_log = structlog.get_logger()


@contextlib.contextmanager
def _worded_errors() -> Iterator[None]:
    """Name the variable that an error is about, and keep what somebody wrote from steering the terminal that quotes it."""
    try:
        yield
    except click.ClickException as found:
        error = named(found) if isinstance(found, click.UsageError) else found
        error.message = observe.printable_lines(error.message)  # type: ignore[misc]
        raise error from None
    except OSError as error:
        if error.filename or error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes its buffer again at the exit.
        raise click.ClickException(f"Cannot write the output: {error.strerror}.") from None


class _LazyGroup(click.Group):
    """A group whose commands are named in a table and imported when they are called, as are other plugins' flags."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *_FLAGS]

    make_context = _worded_errors()(click.Group.make_context)
    invoke = _worded_errors()(click.Group.invoke)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        valued = {
            name
            for option in self.params
            if isinstance(option, click.Option) and not option.is_flag
            for name in option.opts
        }
        try:
            args = commandline.spelled(args, valued)
        except ConfigError as error:
            raise click.UsageError(str(error), ctx) from error
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.exceptions.NoSuchCommand as error:
            raise click.exceptions.NoSuchCommand(error.command_name, possibilities=_COMMANDS, ctx=ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        from gateway.cli import help as texts

        texts.write(formatter, _COMMANDS)
        self.epilog = texts.EXAMPLES


class _Api(click.Choice[str]):
    """The words that ``--api`` allows. They are looked up with the dialects, which take 4 MiB of protobuf: not for ``auto``."""

    def __init__(self) -> None:
        self.case_sensitive = True

    @property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]
        from gateway.registration.negotiate import CHOICES

        return tuple(CHOICES)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return "auto" if value == "auto" else super().convert(value, param, ctx)


class _KubeletVersion(click.ParamType[int]):
    """A kubelet version such as ``1.28`` or ``v1.28.15``; the value is its minor number."""

    name = "1.N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from adapters.levels import minor_version

        if isinstance(value, int):
            return value
        try:
            minor = minor_version(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if minor < _FIRST_KUBELET:
            self.fail(
                f"expected 1.{_FIRST_KUBELET} or later, the first kubelet with device plugins; got {value}", param, ctx
            )
        return minor


class _Address(click.ParamType[tuple[str, int]]):
    """Where to listen: ``HOST:PORT``, ``:PORT`` on every address, or ``PORT`` alone for this machine only."""

    name = "[[HOST]:]PORT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        from gateway.wires.http import address

        try:
            return address(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.group(
    cls=_LazyGroup,
    invoke_without_command=True,
    context_settings={"auto_envvar_prefix": "GATEWAY", "help_option_names": ["-h", "--help"], "show_default": True},
)
@click.option(
    "--api",
    type=_Api(),
    default="auto",
    help="The device plugin API to speak. auto finds out at each kubelet start; v1alpha is either alpha dialect.",
)
@click.option(
    "--socket-dir",
    cls=Strict,
    type=click.Path(path_type=Path, readable=False),
    default=SOCKET_DIR,
    help="The kubelet's device plugin directory, with kubelet.sock in it.",
)
@click.option(
    "--state-dir",
    cls=Strict,
    type=click.Path(path_type=Path, readable=False),
    default=STATE_DIR,
    help="Where the gateway remembers which devices it announced. Must outlive it; never inside --socket-dir.",
)
@click.option(
    "--pod-resources-socket",
    "pod_resources",
    cls=Strict,
    envvar="GATEWAY_POD_RESOURCES_SOCKET",
    type=click.Path(path_type=Path, readable=False),
    default=None,
    show_default="pod-resources/kubelet.sock beside --socket-dir",
    help="The kubelet's pod-resources socket: with it, each registration is checked in the kubelet's own records.",
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="auto",
    help="Where the devices come from. auto takes the hardware that is found, never a simulation; none: no GPUs.",
)
@click.option(
    "--simulate",
    "profile",
    envvar="GATEWAY_SIMULATE",
    metavar="PROFILE",
    default=None,
    show_default="8 healthy GPUs as nvidia.com/gpu",
    help="For --backend simulated: a YAML profile (watched while the gateway runs), or the name of a shipped one.",
)
@click.option(
    "--kubelet-version",
    "kubelet_minor",
    envvar="GATEWAY_KUBELET_VERSION",
    type=_KubeletVersion(),
    default=None,
    show_default="taken from evidence on the connection",
    help="The kubelet's version, where you know it: decides what can be said to it (CDI names need 1.29).",
)
@click.option(
    "--startup-grace",
    cls=Strict,
    type=Seconds(0, 3600),
    default=0.0,
    metavar="SECONDS",
    help="After a reboot, let containers wait up to this long (in PreStartContainer) for devices whose driver is late, instead of "
    "calling those lost.",
)
@click.option(
    "--metrics-address",
    type=_Address(),
    default=None,
    show_default="no metrics",
    help="Serve Prometheus metrics (/metrics) on HOST:PORT, or with a port alone on this machine only.",
)
@click.option("--metrics-device-ids", is_flag=True, help="One metric for each device: more labels, more to store.")
@click.option(
    "--gpu-metrics",
    is_flag=True,
    help="Metrics of the GPUs themselves (how busy, full and hot), under the names of NVIDIA's DCGM exporter, with their pods.",
)
@click.option(
    "--probe-address",
    type=_Address(),
    default=None,
    show_default="no probes",
    help="Answer probes on HOST:PORT, or on :PORT of every address: /healthz (it lives) and /readyz (it has done its part).",
)
@click.option(
    "--startup-taint",
    default="",
    show_default="none",
    metavar="KEY",
    help="Take taints of this key off the node when its GPUs are allocatable at the API server; needs NODE_NAME.",
)
@click.option(
    "--node-condition",
    is_flag=True,
    help="Keep the node's condition nvidia.com/GPUReady: whether its GPUs are allocatable at the API server; needs NODE_NAME.",
)
@click.option(
    "--node-events",
    is_flag=True,
    help="Tell of GPUs that become unhealthy or recover in events of the node; needs NODE_NAME.",
)
@click.option(
    "--host-service",
    is_flag=True,
    help="This is the node's own service: gateways in pods leave the resources to it, and take over when it is gone.",
)
@click.option(
    "--log-format", type=click.Choice(observe.FORMATS), default="auto", help="auto: JSON unless on a terminal."
)
@click.option("--log-level", type=click.Choice(observe.LEVELS), default="info", help="The least that is logged.")
@click.version_option(package_name="device-plugin-gateway")
@click.pass_context
def gateway(ctx: click.Context, /, log_format: str, log_level: str, **options: Any) -> None:
    """Serve this node's GPUs to its kubelet, whichever version it is, through every upgrade of it.

    Without a command this runs the device plugin in the foreground, until SIGTERM.
    """
    if not observe.wants_colour():
        ctx.color = False
    if ctx.invoked_subcommand is not None:
        observe.configure(log_format, max(log_level, "warning", key=observe.LEVELS.index))
        if ctx.obj is not None:
            signal.signal(signal.SIGHUP, ctx.obj)
        return
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # What changes before ``reload`` listens is read when it does.
    observe.configure(log_format, log_level)
    try:
        settings, said = _settings(ctx, options)
        for note in kinds.unknown_hooks(settings.policy):
            _log.warning("configuration", note=note)
        _log.info("effective configuration", **effective.logged(_effective(ctx, settings, said)))
    except ConfigError as error:
        raise wrong(error) from error
    sys.exit(serve(settings))


def wrong(error: ConfigError) -> click.ClickException:
    """End with the exit status that a setting has which can't be used."""
    return (SettingError if error.lasting else click.ClickException)(str(error))


def effective_settings(ctx: click.Context) -> list[effective.Setting]:
    """Return the settings that a daemon would use with the options before this command, this process's variables and its file.

    Raises:
        ConfigError: one of them can't be used.
    """
    options = {name: value for name, value in ctx.params.items() if name not in {"log_format", "log_level"}}
    return [*_effective(ctx, *_settings(ctx, options))]


def _effective(ctx: click.Context, settings: Settings, said: Mapping[str, Given]) -> Iterator[effective.Setting]:
    for option in gateway.params:
        if not hasattr(settings, str(option.name)) and option.name not in {"log_format", "log_level"}:
            continue
        value = getattr(settings, option.name, ctx.params[option.name])
        how = ctx.get_parameter_source(option.name)
        source = effective.DEFAULT
        if how is ParameterSource.COMMANDLINE:
            source = option.opts[0]
        elif how is ParameterSource.ENVIRONMENT:
            source = variable(option)
        elif how is ParameterSource.DEFAULT_MAP:
            source = str(ctx.info_name)
        if option.name == "socket_dir" and value != ctx.params[option.name]:
            source = said["kubelet-socket"].source
        yield effective.setting(option.opts[0].removeprefix("--"), value, source)
    yield from effective.of_devices(settings, said)


def _settings(ctx: click.Context, options: dict[str, Any]) -> tuple[Settings, Mapping[str, Given]]:
    """Put together what command line, variables and configuration file say; and say what wins, by flag name."""
    for note in commandline.unknown_variables(os.environ, map(variable, gateway.params), _COMMANDS):
        _log.warning("environment", note=note)
    said = commandline.given(options, os.environ)
    every = dict(said)
    if (socket := said.pop("kubelet-socket", None)) is not None:
        options["socket_dir"] = _socket_dir(ctx, options["socket_dir"], socket)
    nothing = Given("", "")
    strict = bool(said.pop("strict-config", nothing).value)
    file = str(said.pop("config-file", nothing).value)
    options["kubeconfig"] = Path(known) if (known := str(said.pop("kubeconfig", nothing).value)) else None
    options["node_name"] = str(said.pop("node-name", nothing).value)
    options["dra"], options["dra_drivers"] = dra.taken(said, options["node_name"])
    backend = options["backend"]
    if inert := commandline.inert(said):
        _log.info("settings without an effect here", settings=inert)
    if str(said.get("config-file-srcdir", nothing).value):
        chosen = Settings(**options, strict_config=strict, given=said)
        return _settings_by_label(chosen, said, file, every, ask=ctx.invoked_subcommand is None)
    for name in ("config-file-srcdir", "node-label", "default-config", "fallback-strategies"):
        said.pop(name, None)
    if not file:
        return Settings(**options, policy=commandline.settle(said, backend), strict_config=strict, given=said), every
    from gateway.configuration import file as config

    path = Path(file)
    content = config.read(path)
    read = config.parse(content, file, strict=strict)
    for warning in read.warnings:
        _log.warning("configuration", note=warning)
    policy = config.policy(read, said, backend)
    settings = Settings(**options, policy=policy, config_file=path, strict_config=strict, given=said)
    return settings, {**read.given, **every}


def _settings_by_label(
    settings: Settings, said: dict[str, Given], file: str, every: Mapping[str, Given], *, ask: bool
) -> tuple[Settings, Mapping[str, Given]]:
    """Read the configuration file that the node's label chooses. A command doesn't ``ask`` for a label that a gateway followed here."""
    from gateway.cli import nodeconfig

    choice = nodeconfig.take(said)
    if choice is None or file:
        raise ConfigError(
            f"--config-file {file} and --config-file-srcdir name one file and several: leave one of them out"
        )
    found, read = nodeconfig.start(settings, choice, ask=ask)
    return found, {**read.given, **every}


def _socket_dir(ctx: click.Context, folder: Path, socket: Given) -> Path:
    """Say which folder counts: --socket-dir, or that of NVIDIA's --kubelet-socket."""
    path = Path(str(socket.value))
    if path.name != _KUBELET_SOCKET:
        raise ConfigError(
            f"{socket.source}: expected the path of a {_KUBELET_SOCKET}, got {str(socket.value)!r}: write it"
        )
    source = ctx.get_parameter_source("socket_dir")
    ours = 2 if source is ParameterSource.COMMANDLINE else 1 if source is ParameterSource.ENVIRONMENT else 0
    theirs = 2 if socket.source.startswith("--") else 1
    if ours == theirs and folder != path.parent:
        raise ConfigError(
            f"{socket.source} means the folder {path.parent}, --socket-dir {folder}: leave one of them out"
        )
    return path.parent if theirs > ours else folder
