"""The flags, variables and keys of NVIDIA's and AMD's device plugins, and ours beside them: one table of facts.

Command line, environment and configuration file (``gateway.configuration.file``) are read by it, ``gateway --help`` and
docs/configuration.md show it. Names, meanings and defaults are those of NVIDIA's k8s-device-plugin 0.20
(cmd/nvidia-device-plugin/main.go, api/config/v1) and of ROCm's (cmd/k8s-device-plugin/main.go), and so is the way in which
flags are spelled: Go's ``-x=true``, and a list by commas or by repetition (urfave/cli v2). The command line beats the
environment, that beats the file, and only what wins is judged. Pure.
"""

from __future__ import annotations

import posixpath
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from enum import Enum
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from devices.policy import CdiFallback, IdStrategy, ListStrategy, MigStrategy, Naming, Policy, Recovery, Sharing
from gateway.configuration.settings import ConfigError, Given

# What Go's strconv.ParseBool takes.
_TRUTH: Final[Mapping[str, bool]] = dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True) | dict.fromkeys(
    ("0", "f", "F", "FALSE", "false", "False"), False
)


NODE_LABEL: Final = "nvidia.com/device-plugin.config"
"""The label by which NVIDIA's config-manager chooses a configuration."""
_PREFIX: Final = "GATEWAY_"
_MAX_STRANGE: Final = 20
_LONGEST: Final = 30 * 86_400
_OF_A_SERVICE: Final = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT_\d+_(TCP|UDP|SCTP)(_|$)")
"""Variables that Kubernetes makes for Services ("Accessing the Service" of its documentation)."""


class Kind(Enum):
    """What a flag takes; the value is a person's word for it."""

    SWITCH = "true or false"
    TEXT = "text"
    LIST = "a list of texts"
    NUMBERS = "a list of whole numbers"
    SECONDS = "a number of seconds"


def _as_is(value: Any) -> Any:
    return value


class Flag(Struct, frozen=True):
    """One setting. ``key`` is its path in the configuration file; ``variables`` are asked in this order.

    ``take`` turns a value of its kind into one for ``Policy.<field>`` and raises ValueError where that can't be. One that has
    no ``option`` is a variable only. One that is ``inert`` is accepted because people bring it along, and does nothing here.
    """

    name: str
    kind: Kind
    meaning: str
    default: str = ""
    variables: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    field: str = ""
    take: Callable[[Any], Any] = _as_is
    values: str = ""
    option: bool = True
    inert: bool = False

    @property
    def parameter(self) -> str:
        """Its name as a Python identifier."""
        return self.name.replace("-", "_")

    def read(self, texts: Sequence[str], source: str) -> Given:
        """Turn what the command line or a variable says into a value; of several texts the last counts, or all of a list.

        Raises:
            ConfigError: it is no value of its kind.
        """
        parts = tuple(part.strip() for text in texts for part in text.split(","))
        match self.kind:
            case Kind.TEXT | Kind.SECONDS:
                return Given(texts[-1], source)
            case Kind.LIST:
                return Given(parts, source)
            case Kind.SWITCH:
                if texts[-1] and texts[-1] not in _TRUTH:
                    raise ConfigError(f"{source}: expected true or false, got {texts[-1]!r:.80}: write one of them")
                return Given(_TRUTH.get(texts[-1], False), source)  # a variable that is empty means false
            case Kind.NUMBERS:
                wrong = [
                    part for part in parts if part and not (part.isascii() and part.isdecimal() and len(part) < 10)
                ]
                if wrong:
                    raise ConfigError(f"{source}: expected whole numbers, got {wrong[0]!r:.80}: write them with commas")
                return Given(tuple(int(part) for part in parts if part), source)


def _one_of(choices: type[Enum]) -> Callable[[str], Enum]:
    def take(text: str) -> Enum:
        try:
            return choices(text)
        except ValueError:
            raise ValueError(f"expected {_or(choices)}, got {text!r:.80}: write one of them") from None

    return take


def _or(choices: type[Enum]) -> str:
    *names, last = [str(choice.value) for choice in choices]
    return f"{', '.join(names)} or {last}"


def _strategies(texts: Sequence[str]) -> frozenset[ListStrategy]:
    if not texts:
        raise ValueError(f"expected at least one of {_or(ListStrategy)}, got none: write one of them")
    take = _one_of(ListStrategy)
    return frozenset(ListStrategy(take(text)) for text in texts)


def _discovery(text: str) -> str:
    if text == "tegra":
        raise ValueError("tegra (the GPUs of Jetson boards) is not supported here: keep NVIDIA's plugin on such a node")
    if text not in {"auto", "nvml"}:
        raise ValueError(f"expected auto or nvml, got {text!r:.80}: write one of them")
    return text


def _channels(numbers: Sequence[int]) -> tuple[int, ...]:
    if numbers:
        raise ValueError(
            f"expected no IMEX channels, got {list(numbers)!r:.80}: this gateway doesn't hand them out; leave them away, or keep "
            "NVIDIA's plugin on this node"
        )
    return ()


def _path(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"expected a path, got {text!r:.80}: write it without control characters")
    return text


def _root(text: str) -> str:
    return posixpath.normpath("/" + _path(text).strip("/"))


def _root_or_none(text: str) -> str:
    return _root(text) if text else ""


def _path_or_default(text: str) -> str:
    return _path(text) or Policy().cdi_hook_path


def _folder_or_none(text: str) -> str:
    if text and not text.startswith("/"):
        raise ValueError(f"expected an absolute path, got {_path(text)!r:.80}: write it from the root on")
    return posixpath.normpath(_path(text)) if text else ""


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _LONGEST:
        raise ValueError(f"expected 0 to {_LONGEST} seconds, got {text!r:.80}: write a number without a unit")
    return seconds


def _named(texts: Sequence[str]) -> frozenset[str]:
    return frozenset(texts) - {""}


_PLUGIN: Final = ("flags", "plugin")
_OURS: Final = "gateway"

FLAGS: Final[tuple[Flag, ...]] = (
    Flag(
        "mig-strategy",
        Kind.TEXT,
        "how MIG instances are offered: not at all, as GPUs, or by profile",
        default="none",
        values="none|single|mixed",
        variables=("MIG_STRATEGY",),
        key=("flags", "migStrategy"),
        field="mig_strategy",
        take=_one_of(MigStrategy),
    ),
    Flag(
        "fail-on-init-error",
        Kind.SWITCH,
        "end with the reason where the hardware can't be initialised, instead of trying on",
        default="true with --backend nvidia",
        variables=("FAIL_ON_INIT_ERROR",),
        key=("flags", "failOnInitError"),
        field="fail_on_init_error",
    ),
    Flag(
        "nvidia-driver-root",
        Kind.TEXT,
        "where the driver is on the host",
        default="/",
        values="PATH",
        variables=("NVIDIA_DRIVER_ROOT",),
        key=("flags", "nvidiaDriverRoot"),
        aliases=("driver-root",),
        field="driver_root",
        take=_root,
    ),
    Flag(
        "nvidia-dev-root",
        Kind.TEXT,
        "where its device nodes are on the host",
        default="the driver root",
        values="PATH",
        variables=("NVIDIA_DEV_ROOT",),
        key=("flags", "nvidiaDevRoot"),
        aliases=("dev-root",),
        field="dev_root",
        take=_root_or_none,
    ),
    Flag(
        "container-driver-root",
        Kind.TEXT,
        "where the driver root is mounted in the gateway's container",
        default="/driver-root",
        values="PATH",
        variables=("DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"),
        key=(*_PLUGIN, "containerDriverRoot"),
        aliases=("driver-root-ctr-path",),
        field="container_driver_root",
        take=_root,
    ),
    Flag(
        "pass-device-specs",
        Kind.SWITCH,
        "name the device nodes in answers, too",
        default="false",
        variables=("PASS_DEVICE_SPECS",),
        key=(*_PLUGIN, "passDeviceSpecs"),
        field="pass_device_specs",
    ),
    Flag(
        "device-list-strategy",
        Kind.LIST,
        "how a container is told its GPUs; several, by commas or by repeating the flag",
        default="envvar",
        values="envvar|volume-mounts|cdi-annotations|cdi-cri",
        variables=("DEVICE_LIST_STRATEGY",),
        key=(*_PLUGIN, "deviceListStrategy"),
        field="list_strategies",
        take=_strategies,
    ),
    Flag(
        "device-id-strategy",
        Kind.TEXT,
        "by what a container is told its GPUs",
        default="uuid",
        values="uuid|index",
        variables=("DEVICE_ID_STRATEGY",),
        key=(*_PLUGIN, "deviceIDStrategy"),
        field="id_strategy",
        take=_one_of(IdStrategy),
    ),
    Flag(
        "shared-devices-allocation-policy",
        Kind.TEXT,
        "shared GPUs are given out the least used first, or the most used first",
        default="distributed",
        values="distributed|packed",
        variables=("SHARED_DEVICES_ALLOCATION_POLICY",),
        key=(*_PLUGIN, "sharedDevicesAllocationPolicy"),
        field="sharing",
        take=_one_of(Sharing),
    ),
    Flag(
        "gdrcopy-enabled",
        Kind.SWITCH,
        "containers get GDRCopy",
        default="false",
        variables=("GDRCOPY_ENABLED",),
        key=("flags", "gdrcopyEnabled"),
        field="gdrcopy",
    ),
    Flag(
        "gds-enabled",
        Kind.SWITCH,
        "containers get GPUDirect Storage",
        default="false",
        variables=("GDS_ENABLED",),
        key=("flags", "gdsEnabled"),
        field="gds",
    ),
    Flag(
        "mofed-enabled",
        Kind.SWITCH,
        "containers get Mellanox OFED",
        default="false",
        variables=("MOFED_ENABLED",),
        key=("flags", "mofedEnabled"),
        field="mofed",
    ),
    Flag(
        "cdi-annotation-prefix",
        Kind.TEXT,
        "what the keys of CDI annotations begin with",
        default=Policy().cdi_annotation_prefix,
        values="PREFIX",
        variables=("CDI_ANNOTATION_PREFIX",),
        key=(*_PLUGIN, "cdiAnnotationPrefix"),
        field="cdi_annotation_prefix",
        take=_path,
    ),
    Flag(
        "nvidia-cdi-hook-path",
        Kind.TEXT,
        "the program of CDI hooks, on the host",
        default=Policy().cdi_hook_path,
        values="PATH",
        variables=("NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"),
        key=(*_PLUGIN, "nvidiaCTKPath"),
        aliases=("nvidia-ctk-path",),
        field="cdi_hook_path",
        take=_path_or_default,
    ),
    Flag(
        "cdi-disable-hooks",
        Kind.LIST,
        "hooks that the CDI specification is to lack, by commas (an older NVIDIA Container Toolkit has fewer); all: it has none",
        values="HOOKS",
        variables=("CDI_DISABLE_HOOKS",),
        key=(*_PLUGIN, "cdiDisableHooks"),
        field="cdi_disabled_hooks",
        take=_named,
    ),
    Flag(
        "kubelet-socket",
        Kind.TEXT,
        "the kubelet's kubelet.sock; its folder is the same as --socket-dir",
        values="PATH",
        variables=("KUBELET_SOCKET",),
    ),
    Flag(
        "config-file",
        Kind.TEXT,
        "a file in the format of NVIDIA's plugin: docs/configuration.md",
        default="none",
        values="PATH",
        variables=("CONFIG_FILE",),
    ),
    Flag(
        "config-file-srcdir",
        Kind.TEXT,
        "a folder of such files, of which the node's label names one: docs/configuration.md",
        default="none",
        values="PATH",
        variables=("CONFIG_FILE_SRCDIR",),
    ),
    Flag(
        "node-label",
        Kind.TEXT,
        "the label that names the file",
        default=NODE_LABEL,
        values="NAME",
        variables=("NODE_LABEL",),
    ),
    Flag(
        "default-config",
        Kind.TEXT,
        "the file for a node without the label",
        default="none",
        values="NAME",
        variables=("DEFAULT_CONFIG",),
    ),
    Flag(
        "fallback-strategies",
        Kind.LIST,
        "without the label and a default, in this order: the file named default, the only one, or an empty one",
        values="named|single|empty",
        variables=("FALLBACK_STRATEGIES",),
    ),
    Flag(
        "kubeconfig",
        Kind.TEXT,
        "how to reach the API server, for what needs one: a token, its file, or a client certificate",
        default="what every pod is told",
        values="PATH",
        variables=("KUBECONFIG",),
    ),
    Flag(
        "node-name",
        Kind.TEXT,
        "this node's name at the API server, for what needs one",
        values="NAME",
        variables=("NODE_NAME",),
    ),
    Flag(
        "dra",
        Kind.TEXT,
        "dynamic resource allocation (docs/dra.md): not at all, or instead of the device plugin API",
        default="off",
        values="off|only",
        variables=("GATEWAY_DRA",),
    ),
    Flag(
        "dra-drivers",
        Kind.LIST,
        "DRA drivers' names by the domain of resources, by commas",
        default="gpu.nvidia.com, gpu.amd.com, else the domain",
        values="DOMAIN=DRIVER",
        variables=("GATEWAY_DRA_DRIVERS",),
    ),
    Flag(
        "device-discovery-strategy",
        Kind.TEXT,
        "how NVIDIA's GPUs are found; tegra is refused",
        default="auto",
        values="auto|nvml",
        variables=("DEVICE_DISCOVERY_STRATEGY",),
        key=("flags", "deviceDiscoveryStrategy"),
        take=_discovery,
    ),
    Flag(
        "imex-channel-ids",
        Kind.NUMBERS,
        "IMEX channels for each container; any is refused",
        default="none",
        values="IDS",
        variables=("IMEX_CHANNEL_IDS",),
        key=("imex", "channelIDs"),
        take=_channels,
    ),
    Flag("imex-required", Kind.SWITCH, "", variables=("IMEX_REQUIRED",), key=("imex", "required"), inert=True),
    Flag("mps-root", Kind.TEXT, "", variables=("MPS_ROOT",), key=("flags", "mpsRoot"), inert=True),
    Flag("cdi-feature-flags", Kind.LIST, "", variables=("CDI_FEATURE_FLAGS",), inert=True),
    Flag(
        "DP_DISABLE_HEALTHCHECKS",
        Kind.TEXT,
        "Xids that are no illness, by commas; all or xids: no health checks",
        values="IDS",
        variables=("DP_DISABLE_HEALTHCHECKS",),
        field="disabled_health_checks",
        option=False,
    ),
    Flag(
        "DP_ENABLE_HEALTHCHECKS",
        Kind.TEXT,
        "Xids that are an illness in spite of that",
        values="IDS",
        variables=("DP_ENABLE_HEALTHCHECKS",),
        field="enabled_health_checks",
        option=False,
    ),
    Flag(
        "resource-naming-strategy",
        Kind.TEXT,
        "how AMD's GPUs are named: all amd.com/gpu, or by partition",
        default="single",
        values="single|mixed",
        variables=("GATEWAY_RESOURCE_NAMING_STRATEGY",),
        aliases=("resource_naming_strategy",),
        field="resource_naming",
        take=_one_of(Naming),
    ),
    # AMD's images pass these.
    Flag("pulse", Kind.TEXT, "", inert=True),
    Flag("logtostderr", Kind.SWITCH, "", inert=True),
    Flag("stderrthreshold", Kind.TEXT, "", inert=True),
    Flag("v", Kind.TEXT, "", inert=True),
    Flag(
        "health-recovery",
        Kind.TEXT,
        "whether a GPU that became unhealthy may come back: never, or by evidence",
        default="safe",
        values="off|safe",
        variables=("GATEWAY_HEALTH_RECOVERY",),
        key=(_OURS, "healthRecovery"),
        field="health_recovery",
        take=_one_of(Recovery),
    ),
    Flag(
        "cdi-fallback",
        Kind.TEXT,
        "what to do where a kubelet can't be told CDI names, and nothing else carries the GPU",
        default="refuse",
        values="refuse|envvar|expand",
        variables=("GATEWAY_CDI_FALLBACK",),
        key=(_OURS, "cdiFallback"),
        field="cdi_fallback",
        take=_one_of(CdiFallback),
    ),
    Flag(
        "bridge",
        Kind.TEXT,
        "a folder in which other vendors' device plugins register, to be served through the gateway: docs/bridge.md",
        default="none",
        values="DIR",
        variables=("GATEWAY_BRIDGE",),
        key=(_OURS, "bridge", "folder"),
        field="bridge",
        take=_folder_or_none,
    ),
    Flag(
        "bridge-grace",
        Kind.SECONDS,
        "for how many seconds the devices of a bridged plugin that is away stay as they are",
        default="60",
        values="SECONDS",
        variables=("GATEWAY_BRIDGE_GRACE",),
        key=(_OURS, "bridge", "grace"),
        field="bridge_grace",
        take=_seconds,
    ),
    Flag(
        "bridge-withdraw",
        Kind.SECONDS,
        "after how many seconds those that no container holds are offered no longer",
        default="3600",
        values="SECONDS",
        variables=("GATEWAY_BRIDGE_WITHDRAW",),
        key=(_OURS, "bridge", "withdraw"),
        field="bridge_withdraw",
        take=_seconds,
    ),
    Flag(
        "strict-config",
        Kind.SWITCH,
        "refuse a configuration file with unknown keys",
        default="false",
        variables=("GATEWAY_STRICT_CONFIG",),
    ),
)
_BY_OPTION: Final[Mapping[str, Flag]] = {
    name: flag for flag in FLAGS if flag.option for name in (flag.name, *flag.aliases)
}


def spelled(arguments: Sequence[str], valued: Collection[str]) -> list[str]:
    """Spell flags of the table as ``--name=value``, up to a command's name, as Go's flag package understands them.

    That takes one dash or two, and of a switch nothing but ``=``: NVIDIA's plugin takes ``--x false`` for ``--x`` and ignores
    all that follows. ``valued`` are the other options that take a value.

    Raises:
        ConfigError: a switch has its value beside it.
    """
    left, done = deque(arguments), list[str]()
    while left:
        word = left.popleft()
        if word in {"-", "--"} or not word.startswith("-"):
            return [*done, word, *left]
        name, joined, value = word.removeprefix("-").removeprefix("-").partition("=")
        flag = _BY_OPTION.get(name)
        if word == "-v" and not (left and left[0].isdecimal()):
            done.append("--version")
        elif flag is None:
            done.append(word)
            if word in valued and left:
                done.append(left.popleft())
        elif joined:
            done.append(f"--{name}={value}")
        elif flag.kind is Kind.SWITCH:
            if left and left[0] in _TRUTH:
                raise ConfigError(
                    f"--{name} {left[0]}: expected the value of a switch behind '=': write --{name}={left[0]}"
                )
            done.append(f"--{name}=true")
        else:
            done.append(f"--{name}={left.popleft()}" if left else f"--{name}")
    return done


def given(arguments: MutableMapping[str, Any], environment: Mapping[str, str]) -> dict[str, Given]:
    """Take the table's flags out of ``arguments`` (texts by ``Flag.parameter``), the rest from variables; by flag name.

    Raises:
        ConfigError: one is no value of its kind.
    """
    found = {}
    for flag in FLAGS:
        texts = arguments.pop(flag.parameter, ())
        variable = next((name for name in flag.variables if name in environment), None)
        if texts:
            found[flag.name] = flag.read(texts, f"--{flag.name}")
        elif variable is not None:
            found[flag.name] = flag.read((environment[variable],), variable)
    return found


def settle(said: Mapping[str, Given], backend: str) -> Policy:
    """Make the policy that these settings (by flag name) mean for a backend.

    Raises:
        ConfigError: one of them can't be gone by.
    """
    values: dict[str, Any] = {"fail_on_init_error": backend == "nvidia"}
    for flag in FLAGS:
        one = said.get(flag.name)
        if one is None or flag.inert:
            continue
        try:
            value = flag.take(one.value)
        except ValueError as error:
            raise ConfigError(f"{one.source}: {error}") from error
        if flag.field:
            values[flag.field] = value
    return replace(Policy(), **values)


def inert(said: Mapping[str, Given]) -> list[str]:
    """Name the settings that have no effect here."""
    return [said[flag.name].source for flag in FLAGS if flag.inert and flag.name in said]


def unknown_variables(environment: Mapping[str, str], options: Iterable[str], commands: Iterable[str]) -> list[str]:
    """Say which variables look like settings of the gateway and are none, with the one that may be meant; never a value.

    What Kubernetes sets for a Service whose name begins with "gateway" is none of them.

    Args:
        environment: all that there is.
        options: the daemon's own variables, besides those of the table.
        commands: the names of the commands, whose options have variables, too.
    """
    known = {*options, *(name for flag in FLAGS for name in flag.variables)}
    of_commands = tuple(f"{_PREFIX}{name.upper()}_" for name in commands)
    strange = [
        name
        for name, value in sorted(environment.items())
        if name.startswith(_PREFIX) and not name.startswith(of_commands) and name not in known
        if not _OF_A_SERVICE.search(name) and "://" not in value
    ]
    if not strange:
        return []
    from difflib import get_close_matches  # noqa: PLC0415 - needed where a name is wrong, and nowhere else

    near = {name: get_close_matches(name, known, 1) for name in strange}
    return [
        f"{name:.80}: no setting of the gateway, ignored" + (f"; did you mean {near[name][0]}?" if near[name] else "")
        for name in strange[:_MAX_STRANGE]
    ]


def help_rows() -> Iterator[tuple[str, str]]:
    """Yield what ``--help`` says of each flag that has an effect."""
    for flag in FLAGS:
        if flag.option and not flag.inert:
            notes = "; ".join((*flag.variables[:1], *([f"default: {flag.default}"] if flag.default else ())))
            yield f"--{flag.name} {flag.values}".rstrip(), f"{flag.meaning}  [{notes}]"
