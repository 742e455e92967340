"""Every setting of the gateway, in one table: those of NVIDIA's and AMD's device plugins, and our own.

The command line and the environment (``gateway.configuration.commandline``), the configuration file (``gateway.configuration.file``),
``gateway run --help``, ``gateway config show`` and docs/configuration.md come from it. Names, meanings and defaults of the other
plugins' settings are those of NVIDIA's k8s-device-plugin 0.20 (cmd/nvidia-device-plugin/main.go, api/config/v1) and of ROCm's
(cmd/k8s-device-plugin/main.go). Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from devices.policy import CdiFallback, IdStrategy, MigStrategy, Naming, Recovery, Sharing
from gateway.configuration import kinds
from gateway.configuration.kinds import Flag, FlagKind

NODE_LABEL: Final = "nvidia.com/device-plugin.config"
"""The label by which NVIDIA's config-manager chooses a configuration."""
_FLAGS: Final = ("flags",)
_PLUGIN: Final = ("flags", "plugin")
_OURS: Final = ("gateway",)

_switch = partial(Flag, kind=FlagKind.SWITCH)
_theirs = partial(Flag, prefix="")
"""A setting of NVIDIA's plugin, which keeps its variable's name."""
_their_switch = partial(_switch, prefix="")

GROUPS: Final[Mapping[str, tuple[Flag, ...]]] = {
    "Kubelet": (
        Flag(
            "api",
            "the device plugin API to speak: auto finds out at each kubelet start, v1alpha is either alpha dialect",
            form="auto|v1beta1|v1alpha2|0.1|v1alpha",
        ),
        Flag(
            "socket-dir",
            "the kubelet's device plugin directory, with kubelet.sock in it",
            form="PATH",
            take=kinds.whole_path,
        ),
        _theirs("kubelet-socket", "the kubelet's kubelet.sock; its folder is the same as --socket-dir", form="PATH"),
        Flag(
            "pod-resources-socket",
            "the kubelet's pod-resources socket, by which registrations are checked",
            sets="pod_resources",
            otherwise="pod-resources/kubelet.sock next to --socket-dir",
            form="PATH",
            take=kinds.whole_path,
        ),
        Flag(
            "kubelet-version",
            "the kubelet's version, if you know it (CDI names need 1.29)",
            sets="kubelet_minor",
            otherwise="taken from evidence on the connection",
            form="1.N",
            take=kinds.optional(kinds.kubelet_minor),
        ),
        Flag(
            "state-dir",
            "where the gateway remembers which devices it announced; must outlive it, never inside --socket-dir",
            form="PATH",
            take=kinds.whole_path,
        ),
        _switch(
            "host-service",
            "this is the node's own service: gateways in pods stand by while it runs",
        ),
        Flag(
            "POD_UID", "the UID of the gateway's pod (`metadata.uid`)", sets="pod_uid", named=("POD_UID",), option=False
        ),
    ),
    "Devices": (
        Flag(
            "backend",
            "where the devices come from: auto takes the hardware that is found, never a simulation; none: no GPUs",
            form="auto|nvidia|amd|simulated|none",
        ),
        Flag(
            "simulate",
            "a YAML profile of simulated GPUs (watched while the gateway runs), or a shipped one's name",
            sets="profile",
            otherwise="8 healthy GPUs as nvidia.com/gpu",
            form="PROFILE",
            take=kinds.optional(str),
        ),
        Flag(
            "exclude-devices",
            "GPUs to leave out, by UUID, index, PCI address or product; * is anything",
            key=(*_OURS, "excludeDevices"),
            sets="excluded",
            kind=FlagKind.NAMES,
            form="PATTERNS",
            take=kinds.patterns,
        ),
        Flag(
            "startup-grace",
            "after a reboot, let containers wait up to this long (in PreStartContainer) for devices whose driver is late",
            kind=FlagKind.SECONDS,
            form="SECONDS",
            take=partial(kinds.seconds, most=3600),
        ),
        Flag(
            "health-recovery",
            "whether a GPU that became unhealthy may come back: never, or by evidence",
            key=(*_OURS, "healthRecovery"),
            take=Recovery,
        ),
        _their_switch(
            "fail-on-init-error",
            "exit with the reason if the hardware can't be initialised, instead of retrying",
            key=(*_FLAGS, "failOnInitError"),
            otherwise="true with --backend nvidia",
        ),
    ),
    "What containers get": (
        _theirs(
            "device-list-strategy",
            "how a container gets its GPUs; several are possible",
            key=(*_PLUGIN, "deviceListStrategy"),
            sets="list_strategies",
            kind=FlagKind.LIST,
            form="envvar|volume-mounts|cdi-annotations|cdi-cri",
            take=kinds.strategies,
        ),
        _theirs(
            "device-id-strategy",
            "how a GPU is named to its container",
            key=(*_PLUGIN, "deviceIDStrategy"),
            sets="id_strategy",
            take=IdStrategy,
        ),
        _their_switch("pass-device-specs", "also name the device nodes in answers", key=(*_PLUGIN, "passDeviceSpecs")),
        _theirs(
            "shared-devices-allocation-policy",
            "shared GPUs are given out the least used first, or the most used first",
            key=(*_PLUGIN, "sharedDevicesAllocationPolicy"),
            sets="sharing",
            take=Sharing,
        ),
        _theirs(
            "cdi-annotation-prefix",
            "prefix of the keys of CDI annotations",
            key=(*_PLUGIN, "cdiAnnotationPrefix"),
            form="PREFIX",
            take=kinds.path,
        ),
        _theirs(
            "cdi-disable-hooks",
            "hooks to leave out of the CDI specification (an older NVIDIA Container Toolkit has fewer), or all",
            key=(*_PLUGIN, "cdiDisableHooks"),
            sets="cdi_disabled_hooks",
            kind=FlagKind.LIST,
            form="HOOKS",
            take=kinds.hooks,
        ),
        Flag(
            "cdi-fallback",
            "what to do if a kubelet does not accept CDI names, and nothing else carries the GPU",
            key=(*_OURS, "cdiFallback"),
            take=CdiFallback,
        ),
        _theirs(
            "nvidia-cdi-hook-path",
            "the program of CDI hooks, on the host",
            named=("NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"),
            key=(*_PLUGIN, "nvidiaCTKPath"),
            sets="cdi_hook_path",
            form="PATH",
            aliases=("nvidia-ctk-path",),
            take=kinds.path_or_default,
        ),
        _their_switch("gdrcopy-enabled", "containers get GDRCopy", key=(*_FLAGS, "gdrcopyEnabled"), sets="gdrcopy"),
        _their_switch("gds-enabled", "containers get GPUDirect Storage", key=(*_FLAGS, "gdsEnabled"), sets="gds"),
        _their_switch("mofed-enabled", "containers get Mellanox OFED", key=(*_FLAGS, "mofedEnabled"), sets="mofed"),
        _theirs(
            "imex-channel-ids",
            "IMEX channels that each container with a GPU gets: none or 0",
            key=("imex", "channelIDs"),
            sets="imex_channels",
            kind=FlagKind.NUMBERS,
            form="IDS",
            take=kinds.channels,
        ),
        _their_switch(
            "imex-required", "GPUs are unhealthy until their IMEX channel is there", key=("imex", "required")
        ),
    ),
    "NVIDIA and AMD": (
        _theirs(
            "mig-strategy",
            "how MIG instances are offered: not at all, as GPUs, or by profile",
            key=(*_FLAGS, "migStrategy"),
            take=MigStrategy,
        ),
        _theirs(
            "nvidia-driver-root",
            "where the driver is on the host",
            key=(*_FLAGS, "nvidiaDriverRoot"),
            sets="driver_root",
            form="PATH",
            aliases=("driver-root",),
            take=kinds.root,
        ),
        _theirs(
            "nvidia-dev-root",
            "where its device nodes are on the host",
            key=(*_FLAGS, "nvidiaDevRoot"),
            sets="dev_root",
            otherwise="the driver root",
            form="PATH",
            aliases=("dev-root",),
            take=kinds.root_or_none,
        ),
        _theirs(
            "container-driver-root",
            "where the driver root is mounted in the gateway's container",
            named=("DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"),
            key=(*_PLUGIN, "containerDriverRoot"),
            form="PATH",
            aliases=("driver-root-ctr-path",),
            take=kinds.root,
        ),
        _theirs(
            "device-discovery-strategy",
            "how NVIDIA's GPUs are found; tegra is refused",
            key=(*_FLAGS, "deviceDiscoveryStrategy"),
            otherwise="auto",
            form="auto|nvml",
            refused="tegra (the GPUs of Jetson boards) is not supported here: keep NVIDIA's plugin on such a node",
        ),
        Flag(
            "DP_DISABLE_HEALTHCHECKS",
            "Xids after which a GPU stays healthy, separated by commas; all or xids: no health checks",
            named=("DP_DISABLE_HEALTHCHECKS",),
            sets="disabled_health_checks",
            form="IDS",
            option=False,
        ),
        Flag(
            "DP_ENABLE_HEALTHCHECKS",
            "Xids after which it is unhealthy nevertheless",
            named=("DP_ENABLE_HEALTHCHECKS",),
            sets="enabled_health_checks",
            form="IDS",
            option=False,
        ),
        _switch(
            "node-features",
            "write the node labels of NVIDIA's GPU Feature Discovery, for Node Feature Discovery: docs/beside.md",
            key=(*_OURS, "nodeFeatures"),
        ),
        Flag(
            "resource-naming-strategy",
            "how AMD's GPUs are named: all amd.com/gpu, or by partition",
            sets="resource_naming",
            aliases=("resource_naming_strategy",),
            take=Naming,
        ),
        Flag(
            "driver-type",
            "what AMD's GPUs are for; virtual machines (vf-passthrough, pf-passthrough) are refused",
            otherwise="container",
            form="container",
            aliases=("driver_type",),
            take=kinds.driver,
        ),
    ),
    "Configuration file": (
        _theirs(
            "config-file",
            "a file in the format of NVIDIA's plugin: docs/configuration.md",
            form="PATH",
            take=kinds.optional(Path),
        ),
        _theirs(
            "config-file-srcdir",
            "a folder of such files, of which the node's label names one: docs/configuration.md",
            sets="folder",
            form="PATH",
            take=kinds.optional(Path),
        ),
        _theirs(
            "node-label",
            "the label that names the file",
            sets="label",
            otherwise=NODE_LABEL,
            form="NAME",
            take=lambda text: text or NODE_LABEL,
        ),
        _theirs("default-config", "the file for a node without the label", sets="default", form="NAME"),
        _theirs(
            "fallback-strategies",
            "the file without a label and a default, in this order: the one named default, the only one, none",
            sets="fallbacks",
            kind=FlagKind.LIST,
            form="named|single|empty",
            take=kinds.written,
        ),
        _switch("strict-config", "refuse a configuration file with unknown keys"),
        _switch(
            "gateway.honourResourceNames",
            "use what NVIDIA's plugin ignores in the file: names by product, and which GPUs are shared",
            key=(*_OURS, "honourResourceNames"),
            otherwise="false",
            option=False,
        ),
    ),
    "Dynamic resource allocation": (
        Flag(
            "dra",
            "Dynamic Resource Allocation (docs/dra.md): not used, next to the device plugin API, or instead of it",
            form="off|on|only",
        ),
        Flag(
            "dra-drivers",
            "DRA drivers' names by the domain of resources, by commas; without it gpu.nvidia.com, gpu.amd.com, else the domain itself",
            kind=FlagKind.LIST,
            form="DOMAIN=DRIVER",
            take=kinds.drivers,
        ),
        Flag(
            "dra-shares",
            "how claims get a shared GPU: each replica is a device, or the GPU is one device with a capacity of shares (docs/dra.md)",
            form="devices|capacity",
        ),
    ),
    "Other vendors' plugins": (
        Flag(
            "bridge",
            "a folder in which other vendors' device plugins register, to be served through the gateway: docs/bridge.md",
            key=(*_OURS, "bridge", "folder"),
            form="DIR",
            take=kinds.folder_or_none,
        ),
        Flag(
            "bridge-grace",
            "for how many seconds the devices of a bridged plugin that is away stay as they are",
            key=(*_OURS, "bridge", "grace"),
            kind=FlagKind.SECONDS,
            form="SECONDS",
            take=kinds.seconds,
        ),
        Flag(
            "bridge-withdraw",
            "after how many seconds those devices that no container holds are no longer offered",
            key=(*_OURS, "bridge", "withdraw"),
            kind=FlagKind.SECONDS,
            form="SECONDS",
            take=kinds.seconds,
        ),
    ),
    "API server": (
        _theirs(
            "kubeconfig",
            "how to reach the API server, for settings that need it; in a pod, leave it out",
            form="PATH",
            take=kinds.optional(Path),
        ),
        _theirs("node-name", "this node's name at the API server, for settings that need it", form="NAME"),
        Flag(
            "startup-taint",
            "take taints of this key off the node when its GPUs are allocatable at the API server; needs NODE_NAME",
            form="KEY",
            take=kinds.taint_key,
        ),
        _switch(
            "node-condition",
            "keep the node's condition nvidia.com/GPUReady: whether its GPUs are allocatable at the API server; needs NODE_NAME",
        ),
        _switch("node-events", "tell of GPUs that become unhealthy or recover in events of the node; needs NODE_NAME"),
    ),
    "Metrics, probes and log": (
        Flag(
            "metrics-address",
            "serve Prometheus metrics (/metrics) on HOST:PORT, or with a port alone on this machine only",
            otherwise="no metrics",
            form="[[HOST]:]PORT",
            take=kinds.optional(kinds.address),
        ),
        _switch("metrics-device-ids", "one metric for each device: more labels, more to store"),
        _switch(
            "gpu-metrics",
            "metrics of the GPUs themselves, under the names of NVIDIA's DCGM exporter",
        ),
        Flag(
            "probe-address",
            "answer the probes /healthz and /readyz on HOST:PORT, or on :PORT of every address",
            otherwise="no probes",
            form="[[HOST]:]PORT",
            take=kinds.optional(kinds.address),
        ),
        Flag("log-format", "auto: JSON unless on a terminal", form="auto|console|json"),
        Flag("log-level", "the least that is logged", form="debug|info|warning|error"),
    ),
    # NVIDIA's plugin has the first two; ROCm's the others: its own, and those of Go's glog.
    "Without an effect": (
        _theirs("mps-root", key=(*_FLAGS, "mpsRoot"), inert=True),
        _theirs("cdi-feature-flags", kind=FlagKind.LIST, inert=True),
        *(_switch(name, inert=True) for name in ("logtostderr", "alsologtostderr")),
        *(Flag(name, inert=True) for name in ("pulse", "stderrthreshold", "v", "vmodule")),
        *(Flag(name, inert=True) for name in ("log_dir", "log_link", "log_backtrace_at", "logbuflevel")),
    ),
}
"""The settings, by the headings of ``gateway run --help``."""
FLAGS: Final = tuple(flag for group in GROUPS.values() for flag in group)


def help_rows(flags: tuple[Flag, ...]) -> Iterator[tuple[str, str]]:
    """Yield what ``--help`` says of each of these options that has an effect."""
    for flag in flags:
        if flag.option and not flag.inert:
            yield (
                f"--{flag.name} {flag.values}".rstrip(),
                f"{flag.meaning}  [{flag.variables[0]}; default: {flag.default}]",
            )
