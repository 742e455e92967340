"""``gateway run``: the daemon, from its options to a process that serves."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
import structlog
from click.core import ParameterSource

from gateway import VERSION
from gateway.cli.main import COMMANDS
from gateway.cli.options import Program, Seconds, Strict, Words, variable
from gateway.compose import BACKENDS
from gateway.configuration import commandline, dra, effective, flags, kinds
from gateway.configuration.settings import SOCKET_DIR, STATE_DIR, ConfigError, Given, Settings
from gateway.wires import log as observe

if TYPE_CHECKING:
    from gateway.daemon import Gateway

# Texts alone: what they mean is settled together with variables and the configuration file, by gateway.configuration.flags.
FLAGS = [
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
_LONGEST_SOCKET_PATH = 107
OF_THE_LOG = frozenset({"log_format", "log_level"})

_log = structlog.get_logger()


class Run(Program):
    """A command that takes the daemon's options."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Add other plugins' flags to its own options."""
        return [*super().get_params(ctx), *FLAGS]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse them, spelled as with Go, too. Only ``run`` itself leaves a rest: options in front of another command."""
        options = (one for one in self.get_params(ctx) if isinstance(one, click.Option) and not one.is_flag)
        try:
            args = commandline.spelled(args, {name for option in options for name in option.opts})
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
        if (rest := super().parse_args(ctx, [*args])) and not ctx.resilient_parsing:
            from gateway.cli import help as texts

            texts.refuse(ctx, args, rest)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write its own; the daemon's by group."""
        from gateway.cli import help as texts

        texts.write_options(self, ctx, formatter, every=self is run)


class _Api(Words):
    """The words that ``--api`` allows. They are looked up with the dialects, which take 4 MiB of protobuf: not for ``auto``."""

    def __init__(self) -> None:
        self.case_sensitive = True

    @property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]
        from gateway.registration.negotiate import CHOICES

        return tuple(CHOICES)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return "auto" if value == "auto" else super().convert(value, param, ctx)


class _Read(click.ParamType[Any]):
    """What a function reads out of a text; its ValueError says what is wrong."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name, self._read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._read(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _kubelet_minor(text: str) -> int:
    from adapters.levels import minor_version

    if (minor := minor_version(text)) < 8:
        raise ValueError(f"kubelet {text} has no device plugins. The first that has is 1.8")
    return minor


def _address(text: str) -> tuple[str, int]:
    from gateway.wires.http import address

    return address(text)


@click.command(
    cls=Run,
    context_settings={
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
        "show_default": True,
    },
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
    type=Words(BACKENDS),
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
    type=_Read("1.N", _kubelet_minor),
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
    type=_Read("[[HOST]:]PORT", _address),
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
    type=_Read("[[HOST]:]PORT", _address),
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
@click.option("--log-format", type=Words(observe.FORMATS), default="auto", help="auto: JSON unless on a terminal.")
@click.option("--log-level", type=Words(observe.LEVELS), default="info", help="The least that is logged.")
@click.version_option(VERSION)
@click.pass_context
def run(ctx: click.Context, /, log_format: str, log_level: str, **options: Any) -> None:
    """Serve this node's GPUs to its kubelet, whichever version it is, through every upgrade of it.

    It runs in the foreground, until SIGTERM.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # What changes before ``reload`` listens is read when it does.
    observe.configure(log_format, log_level)
    try:
        settings, said = read(ctx, options)
        for note in kinds.unknown_hooks(settings.policy):
            _log.warning("configuration", note=note)
        changed = {one.name: one.value for one in in_force(ctx, settings, said) if one.source != effective.DEFAULT}
    except ConfigError as error:
        raise wrong(error) from error
    _log.info("starting device-plugin-gateway", version=VERSION, settings=changed)
    sys.exit(serve(settings))


for _option in run.params:
    if _option.expose_value:  # One name of a variable for each setting, whichever command has the option.
        _option.envvar, _option.allow_from_autoenv = variable(_option), False  # type: ignore[attr-defined]


def wrong(error: ConfigError) -> click.ClickException:
    """Return the error that ends the command: with 2 for a wrong value, with 1 if it may be right later."""
    return (click.UsageError if error.lasting else click.ClickException)(str(error))


def in_force(ctx: click.Context, settings: Settings, said: Mapping[str, Given]) -> Iterator[effective.Setting]:
    """Say what each setting is, and who said it."""
    for option in run.params:
        if not hasattr(settings, str(option.name)) and option.name not in OF_THE_LOG:
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


def read(ctx: click.Context, options: dict[str, Any]) -> tuple[Settings, Mapping[str, Given]]:
    """Put together what command line, variables and configuration file say; and say what wins, by flag name."""
    for note in commandline.unknown_variables(os.environ, map(variable, run.params), COMMANDS.keys() - {"run"}):
        _log.warning("environment", note=note)
    said = commandline.given(options, os.environ)
    every = dict(said)
    if (socket := said.pop("kubelet-socket", None)) is not None:
        options["socket_dir"] = _socket_dir(ctx, options["socket_dir"], socket)
    nothing = Given("", "")
    strict = bool(said.pop("strict-config", nothing).value)
    file = str(said.pop("config-file", nothing).value)
    options["kubeconfig"] = Path(known) if (known := str(said.pop("kubeconfig", nothing).value)) else None
    options["pod_uid"] = os.environ.get("POD_UID", "")
    options["node_name"] = str(said.pop("node-name", nothing).value)
    options["dra"], options["dra_drivers"] = dra.taken(said, options["node_name"])
    if inert := commandline.inert(said):
        _log.info("settings without an effect here", settings=inert)
    if str(said.get("config-file-srcdir", nothing).value):
        if file:
            raise ConfigError(f"--config-file {file}: it does not go with --config-file-srcdir. Leave one of them out")
        chosen = Settings(**options, strict_config=strict, given=said)
        from gateway.cli import nodeconfig

        found, read = nodeconfig.start(chosen, nodeconfig.take(said), ask=ctx.command is run)
        return found, {**read.given, **every}
    for name in ("config-file-srcdir", "node-label", "default-config", "fallback-strategies"):
        said.pop(name, None)
    if not file:
        return Settings(
            **options, policy=commandline.settle(said, options["backend"]), strict_config=strict, given=said
        ), every
    from gateway.configuration import file as config

    path = Path(file)
    content = config.read(path)
    read = config.parse(content, file, strict=strict)
    for warning in read.warnings:
        _log.warning("configuration", note=warning)
    policy = config.policy(read, said, options["backend"])
    settings = Settings(**options, policy=policy, config_file=path, strict_config=strict, given=said)
    return settings, {**read.given, **every}


def _socket_dir(ctx: click.Context, folder: Path, socket: Given) -> Path:
    """Say which folder counts: --socket-dir, or that of NVIDIA's --kubelet-socket."""
    path = Path(str(socket.value))
    if path.name != _KUBELET_SOCKET:
        raise ConfigError(f"{socket.source}: {str(socket.value)!r} is not the path of a {_KUBELET_SOCKET}")
    source = ctx.get_parameter_source("socket_dir")
    ours = 2 if source is ParameterSource.COMMANDLINE else 1 if source is ParameterSource.ENVIRONMENT else 0
    theirs = 2 if socket.source.startswith("--") else 1
    if ours == theirs and folder != path.parent:
        raise ConfigError(
            f"{socket.source}: its folder {path.parent} is not --socket-dir {folder}. Leave one of them out"
        )
    return path.parent if theirs > ours else folder


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
        raise click.UsageError(str(error)) from error
    process.allow_descriptors()
    process.give_memory_back()
    return asyncio.run(_run(shell.Gateway(settings, source)))


def _refuse_impossible(settings: Settings) -> None:
    """End with status 2 where these settings can't go together."""
    from gateway.leader import instance

    if settings.state_dir.absolute().is_relative_to(settings.socket_dir.absolute()):
        raise click.UsageError(
            f"--state-dir {settings.state_dir} is inside --socket-dir {settings.socket_dir}, which kubelets clean at "
            f"each start. Use a folder of its own, such as {STATE_DIR}"
        )
    deepest = instance.Instance(settings.socket_dir).folder / instance.socket_name("")
    if len(os.fsencode(deepest.absolute())) > _LONGEST_SOCKET_PATH:
        raise click.UsageError(
            f"--socket-dir {settings.socket_dir} is too long: a socket in it, such as {deepest}, may have at most "
            f"{_LONGEST_SOCKET_PATH} bytes on Linux. Use a shorter path, or a link to it"
        )
    if settings.profile is not None and settings.backend != "simulated":
        raise click.UsageError("--simulate needs --backend simulated: a simulation is never taken for real hardware")
    if settings.dra == "only" and (settings.node_condition or settings.startup_taint):
        raise click.UsageError(
            "--node-condition and --startup-taint go by the device plugin's resources, which --dra only doesn't offer. Leave them out"
        )
    if not {*settings.startup_taint}.isdisjoint("=: "):
        raise click.UsageError(
            f"--startup-taint: {settings.startup_taint!r:.80} is not a taint's key. Write it without value and effect, such as example.com/starting"
        )
    if settings.writes_node and not settings.node_name:
        raise click.UsageError(
            "--startup-taint, --node-condition and --node-events need the node's name. Set --node-name, or NODE_NAME from spec.nodeName"
        )
    if (address := settings.probe_address) is not None and address[1] and address == settings.metrics_address:
        raise click.UsageError(
            "--probe-address is the same as --metrics-address, and only one can listen on a port. Use two ports"
        )


async def _run(gateway: Gateway) -> NoReturn:
    """Serve, and end the process: a thread that waits for a disk that hangs would hold it for as long."""
    from gateway import process
    from gateway.wires import log

    log.log_what_others_write()
    trimming = asyncio.ensure_future(process.trim())
    status = await gateway.run()
    trimming.cancel()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
