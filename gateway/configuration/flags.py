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
            "the version of the device plugin API. auto detects it at each kubelet start; v1alpha allows both alpha versions",
            form="auto|v1beta1|v1alpha2|0.1|v1alpha",
        ),
        Flag(
            "socket-dir",
            "the kubelet's device plugin directory, which contains kubelet.sock",
            form="PATH",
            take=kinds.whole_path,
        ),
        _theirs("kubelet-socket", "the path of kubelet.sock, instead of --socket-dir", form="PATH"),
        Flag(
            "pod-resources-socket",
            "the kubelet's pod-resources socket, by which the gateway checks registrations",
            sets="pod_resources",
            otherwise="pod-resources/kubelet.sock next to --socket-dir",
            form="PATH",
            take=kinds.whole_path,
        ),
        Flag(
            "kubelet-version",
            "the kubelet's version, if you know it (CDI names need 1.29)",
            sets="kubelet_minor",
            otherwise="detected from the connection",
            form="1.N",
            take=kinds.optional(kinds.kubelet_minor),
        ),
        Flag(
            "state-dir",
            "the folder of the gateway's state file. It must survive restarts, and must not be inside --socket-dir",
            form="PATH",
            take=kinds.whole_path,
        ),
        _switch(
            "host-service",
            "run as a service of the host, before which gateways in pods stand by",
        ),
        Flag(
            "POD_UID", "the UID of the gateway's pod (`metadata.uid`)", sets="pod_uid", named=("POD_UID",), option=False
        ),
    ),
    "Devices": (
        Flag(
            "backend",
            "the source of devices. auto uses the GPUs that it finds, and never simulates; none serves no GPUs",
            form="auto|nvidia|amd|simulated|none",
        ),
        Flag(
            "simulate",
            "a YAML file with simulated GPUs (watched while the gateway runs), or the name of a built-in profile",
            sets="profile",
            otherwise="8 healthy GPUs as nvidia.com/gpu",
            form="PROFILE",
            take=kinds.optional(str),
        ),
        Flag(
            "exclude-devices",
            "GPUs to exclude, by UUID, index, PCI address or product (* matches any text)",
            key=(*_OURS, "excludeDevices"),
            sets="excluded",
            kind=FlagKind.NAMES,
            form="PATTERNS",
            take=kinds.patterns,
        ),
        Flag(
            "startup-grace",
            "after a reboot, how long containers may wait (in PreStartContainer) for a late driver",
            kind=FlagKind.SECONDS,
            form="SECONDS",
            take=partial(kinds.seconds, most=3600),
        ),
        Flag(
            "health-recovery",
            "whether an unhealthy GPU may become healthy again. off means never, safe means after evidence of recovery",
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
            "how a container gets its GPUs (one or several strategies)",
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
        _their_switch("pass-device-specs", "add the device nodes to responses", key=(*_PLUGIN, "passDeviceSpecs")),
        _theirs(
            "shared-devices-allocation-policy",
            "whether the least used shared GPU (distributed) or the most used one (packed) is allocated first",
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
            "CDI hooks to leave out, or all (older versions of NVIDIA Container Toolkit have fewer hooks)",
            key=(*_PLUGIN, "cdiDisableHooks"),
            sets="cdi_disabled_hooks",
            kind=FlagKind.LIST,
            form="HOOKS",
            take=kinds.hooks,
        ),
        Flag(
            "cdi-fallback",
            "what to do if CDI is the only strategy and the kubelet does not support CDI names",
            key=(*_OURS, "cdiFallback"),
            take=CdiFallback,
        ),
        _theirs(
            "nvidia-cdi-hook-path",
            "the host's path of the program for CDI hooks",
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
            "IMEX channels for each container with a GPU (none or 0)",
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
            "how MIG instances are offered. none doesn't offer them, single offers them as GPUs, mixed by profile",
            key=(*_FLAGS, "migStrategy"),
            take=MigStrategy,
        ),
        _theirs(
            "nvidia-driver-root",
            "the driver's root folder on the host",
            key=(*_FLAGS, "nvidiaDriverRoot"),
            sets="driver_root",
            form="PATH",
            aliases=("driver-root",),
            take=kinds.root,
        ),
        _theirs(
            "nvidia-dev-root",
            "the root of the driver's device nodes on the host",
            key=(*_FLAGS, "nvidiaDevRoot"),
            sets="dev_root",
            otherwise="the driver root",
            form="PATH",
            aliases=("dev-root",),
            take=kinds.root_or_none,
        ),
        _theirs(
            "container-driver-root",
            "the path in the gateway's container at which the driver root is mounted",
            named=("DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"),
            key=(*_PLUGIN, "containerDriverRoot"),
            form="PATH",
            aliases=("driver-root-ctr-path",),
            take=kinds.root,
        ),
        _theirs(
            "device-discovery-strategy",
            "how the gateway finds NVIDIA GPUs (it refuses tegra)",
            key=(*_FLAGS, "deviceDiscoveryStrategy"),
            otherwise="auto",
            form="auto|nvml",
            refused="tegra (the GPUs of Jetson boards) is not supported here: keep NVIDIA's plugin on such a node",
        ),
        Flag(
            "DP_DISABLE_HEALTHCHECKS",
            "comma-separated Xids after which a GPU stays healthy. all and xids ignore every Xid",
            named=("DP_DISABLE_HEALTHCHECKS",),
            sets="disabled_health_checks",
            form="IDS",
            option=False,
        ),
        Flag(
            "DP_ENABLE_HEALTHCHECKS",
            "comma-separated Xids after which a GPU always becomes unhealthy",
            named=("DP_ENABLE_HEALTHCHECKS",),
            sets="enabled_health_checks",
            form="IDS",
            option=False,
        ),
        _switch(
            "node-features",
            "write the node labels of NVIDIA's GPU Feature Discovery, for Node Feature Discovery (docs/beside.md)",
            key=(*_OURS, "nodeFeatures"),
        ),
        Flag(
            "resource-naming-strategy",
            "the resource names of AMD GPUs. single uses only amd.com/gpu, mixed uses a name for each kind of partition",
            sets="resource_naming",
            aliases=("resource_naming_strategy",),
            take=Naming,
        ),
        Flag(
            "driver-type",
            "the use of AMD GPUs. The gateway refuses virtual machines (vf-passthrough, pf-passthrough)",
            otherwise="container",
            form="container",
            aliases=("driver_type",),
            take=kinds.driver,
        ),
    ),
    "Configuration file": (
        _theirs(
            "config-file",
            "a configuration file in the format of NVIDIA's plugin (docs/configuration.md)",
            form="PATH",
            take=kinds.optional(Path),
        ),
        _theirs(
            "config-file-srcdir",
            "a folder of configuration files, from which the node's label chooses (docs/configuration.md)",
            sets="folder",
            form="PATH",
            take=kinds.optional(Path),
        ),
        _theirs(
            "node-label",
            "the node label that chooses the file",
            sets="label",
            otherwise=NODE_LABEL,
            form="NAME",
            take=lambda text: text or NODE_LABEL,
        ),
        _theirs("default-config", "the file for a node without the label", sets="default", form="NAME"),
        _theirs(
            "fallback-strategies",
            "how to choose a file without a label and a default. named uses the file called default, single the only file, empty no file",
            sets="fallbacks",
            kind=FlagKind.LIST,
            form="named|single|empty",
            take=kinds.written,
        ),
        _switch("strict-config", "refuse a configuration file with unknown keys"),
        _switch(
            "gateway.honourResourceNames",
            "honour resource names by product, and the choice of shared GPUs, which NVIDIA's plugin ignores",
            key=(*_OURS, "honourResourceNames"),
            otherwise="false",
            option=False,
        ),
    ),
    "Dynamic resource allocation": (
        Flag(
            "dra",
            "Dynamic Resource Allocation (docs/dra.md). on offers it next to the device plugin API, only instead of that API",
            form="off|on|only",
        ),
        Flag(
            "dra-drivers",
            "comma-separated names of DRA drivers, by resource domain. By default gpu.nvidia.com and gpu.amd.com, for other domains the domain itself",
            kind=FlagKind.LIST,
            form="DOMAIN=DRIVER",
            take=kinds.drivers,
        ),
        Flag(
            "dra-shares",
            "how claims get a shared GPU (docs/dra.md). devices offers each replica as a device, capacity offers the GPU as one device with shares",
            form="devices|capacity",
        ),
    ),
    "Other vendors' plugins": (
        Flag(
            "bridge",
            "the folder in which other vendors' device plugins register with the gateway (docs/bridge.md)",
            key=(*_OURS, "bridge", "folder"),
            form="DIR",
            take=kinds.folder_or_none,
        ),
        Flag(
            "bridge-grace",
            "for how many seconds the devices of a disconnected plugin keep their health",
            key=(*_OURS, "bridge", "grace"),
            kind=FlagKind.SECONDS,
            form="SECONDS",
            take=kinds.seconds,
        ),
        Flag(
            "bridge-withdraw",
            "after how many seconds the gateway stops offering a disconnected plugin's free devices",
            key=(*_OURS, "bridge", "withdraw"),
            kind=FlagKind.SECONDS,
            form="SECONDS",
            take=kinds.seconds,
        ),
    ),
    "API server": (
        _theirs(
            "kubeconfig",
            "the kubeconfig file for settings that need the API server (not needed in a pod)",
            form="PATH",
            take=kinds.optional(Path),
        ),
        _theirs("node-name", "this node's name at the API server, for settings that need it", form="NAME"),
        Flag(
            "startup-taint",
            "remove taints with this key when the node's GPUs are allocatable at the API server (needs NODE_NAME)",
            form="KEY",
            take=kinds.taint_key,
        ),
        _switch(
            "node-condition",
            "set the node condition nvidia.com/GPUReady, which says whether its GPUs are allocatable at the API server (needs NODE_NAME)",
        ),
        _switch("node-events", "write events of the node when GPUs become unhealthy or recover (needs NODE_NAME)"),
    ),
    "Metrics, probes and log": (
        Flag(
            "metrics-address",
            "the HOST:PORT of Prometheus metrics (/metrics). A port alone is reachable only from this machine",
            otherwise="no metrics",
            form="[[HOST]:]PORT",
            take=kinds.optional(kinds.address),
        ),
        _switch("metrics-device-ids", "export one metric for each device, which needs more storage"),
        _switch(
            "gpu-metrics",
            "export utilization and memory of GPUs, under the metric names of NVIDIA's DCGM exporter",
        ),
        Flag(
            "probe-address",
            "the HOST:PORT of the probes /healthz and /readyz, or :PORT for every address",
            otherwise="no probes",
            form="[[HOST]:]PORT",
            take=kinds.optional(kinds.address),
        ),
        Flag(
            "log-format",
            "the format of log lines. auto is console on a terminal, otherwise json",
            form="auto|console|json",
        ),
        Flag("log-level", "the lowest level that is logged", form="debug|info|warning|error"),
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
    """Yield the two columns of ``--help`` for each of these options that has an effect."""
    for flag in flags:
        if flag.option and not flag.inert:
            yield (
                f"--{flag.name} {flag.values}".rstrip(),
                f"{flag.meaning}  [{flag.variables[0]}; default: {flag.default}]",
            )
