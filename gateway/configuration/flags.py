"""The flags, variables and keys of NVIDIA's and AMD's device plugins, and ours beside them: one table of facts.

Command line and environment (``gateway.configuration.commandline``) and the configuration file
(``gateway.configuration.file``) are read by it, ``gateway --help`` and docs/configuration.md show it. Names, meanings and
defaults are those of NVIDIA's k8s-device-plugin 0.20 (cmd/nvidia-device-plugin/main.go, api/config/v1) and of ROCm's
(cmd/k8s-device-plugin/main.go). Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from devices.policy import CdiFallback, IdStrategy, MigStrategy, Naming, Policy, Recovery, Sharing
from gateway.configuration import kinds
from gateway.configuration.kinds import Flag, FlagKind

NODE_LABEL: Final = "nvidia.com/device-plugin.config"
"""The label by which NVIDIA's config-manager chooses a configuration."""
_PLUGIN: Final = ("flags", "plugin")
_OURS: Final = "gateway"


def _switch(
    name: str, meaning: str, variable: str, key: tuple[str, ...] = (), field: str = "", default: str = "false"
) -> Flag:
    return Flag(name, meaning, (variable,), key, field, FlagKind.SWITCH, default)


FLAGS: Final[tuple[Flag, ...]] = (
    Flag(
        "mig-strategy",
        "how MIG instances are offered: not at all, as GPUs, or by profile",
        variables=("MIG_STRATEGY",),
        key=("flags", "migStrategy"),
        field="mig_strategy",
        default="none",
        values="none|single|mixed",
        take=kinds.one_of(MigStrategy),
    ),
    _switch(
        "fail-on-init-error",
        "exit with the reason if the hardware can't be initialised, instead of retrying",
        "FAIL_ON_INIT_ERROR",
        ("flags", "failOnInitError"),
        "fail_on_init_error",
        "true with --backend nvidia",
    ),
    Flag(
        "nvidia-driver-root",
        "where the driver is on the host",
        variables=("NVIDIA_DRIVER_ROOT",),
        key=("flags", "nvidiaDriverRoot"),
        field="driver_root",
        default="/",
        values="PATH",
        aliases=("driver-root",),
        take=kinds.root,
    ),
    Flag(
        "nvidia-dev-root",
        "where its device nodes are on the host",
        variables=("NVIDIA_DEV_ROOT",),
        key=("flags", "nvidiaDevRoot"),
        field="dev_root",
        default="the driver root",
        values="PATH",
        aliases=("dev-root",),
        take=kinds.root_or_none,
    ),
    Flag(
        "container-driver-root",
        "where the driver root is mounted in the gateway's container",
        variables=("DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"),
        key=(*_PLUGIN, "containerDriverRoot"),
        field="container_driver_root",
        default="/driver-root",
        values="PATH",
        aliases=("driver-root-ctr-path",),
        take=kinds.root,
    ),
    _switch(
        "pass-device-specs",
        "also name the device nodes in answers",
        "PASS_DEVICE_SPECS",
        (*_PLUGIN, "passDeviceSpecs"),
        "pass_device_specs",
    ),
    Flag(
        "device-list-strategy",
        "how a container is told its GPUs; several, by commas or by repeating the flag",
        variables=("DEVICE_LIST_STRATEGY",),
        key=(*_PLUGIN, "deviceListStrategy"),
        field="list_strategies",
        kind=FlagKind.LIST,
        default="envvar",
        values="envvar|volume-mounts|cdi-annotations|cdi-cri",
        take=kinds.strategies,
    ),
    Flag(
        "device-id-strategy",
        "how a GPU is named to its container",
        variables=("DEVICE_ID_STRATEGY",),
        key=(*_PLUGIN, "deviceIDStrategy"),
        field="id_strategy",
        default="uuid",
        values="uuid|index",
        take=kinds.one_of(IdStrategy),
    ),
    Flag(
        "shared-devices-allocation-policy",
        "shared GPUs are given out the least used first, or the most used first",
        variables=("SHARED_DEVICES_ALLOCATION_POLICY",),
        key=(*_PLUGIN, "sharedDevicesAllocationPolicy"),
        field="sharing",
        default="distributed",
        values="distributed|packed",
        take=kinds.one_of(Sharing),
    ),
    _switch("gdrcopy-enabled", "containers get GDRCopy", "GDRCOPY_ENABLED", ("flags", "gdrcopyEnabled"), "gdrcopy"),
    _switch("gds-enabled", "containers get GPUDirect Storage", "GDS_ENABLED", ("flags", "gdsEnabled"), "gds"),
    _switch("mofed-enabled", "containers get Mellanox OFED", "MOFED_ENABLED", ("flags", "mofedEnabled"), "mofed"),
    Flag(
        "cdi-annotation-prefix",
        "prefix of the keys of CDI annotations",
        variables=("CDI_ANNOTATION_PREFIX",),
        key=(*_PLUGIN, "cdiAnnotationPrefix"),
        field="cdi_annotation_prefix",
        default=Policy().cdi_annotation_prefix,
        values="PREFIX",
        take=kinds.path,
    ),
    Flag(
        "nvidia-cdi-hook-path",
        "the program of CDI hooks, on the host",
        variables=("NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"),
        key=(*_PLUGIN, "nvidiaCTKPath"),
        field="cdi_hook_path",
        default=Policy().cdi_hook_path,
        values="PATH",
        aliases=("nvidia-ctk-path",),
        take=kinds.path_or_default,
    ),
    Flag(
        "cdi-disable-hooks",
        "hooks to leave out of the CDI specification, by commas (an older NVIDIA Container Toolkit has fewer); all: every one",
        variables=("CDI_DISABLE_HOOKS",),
        key=(*_PLUGIN, "cdiDisableHooks"),
        field="cdi_disabled_hooks",
        kind=FlagKind.LIST,
        values="HOOKS",
        take=kinds.hooks,
    ),
    Flag(
        "kubelet-socket",
        "the kubelet's kubelet.sock; its folder is the same as --socket-dir",
        variables=("KUBELET_SOCKET",),
        values="PATH",
    ),
    Flag(
        "config-file",
        "a file in the format of NVIDIA's plugin: docs/configuration.md",
        variables=("CONFIG_FILE",),
        default="none",
        values="PATH",
    ),
    Flag(
        "config-file-srcdir",
        "a folder of such files, of which the node's label names one: docs/configuration.md",
        variables=("CONFIG_FILE_SRCDIR",),
        default="none",
        values="PATH",
    ),
    Flag("node-label", "the label that names the file", variables=("NODE_LABEL",), default=NODE_LABEL, values="NAME"),
    Flag(
        "default-config",
        "the file for a node without the label",
        variables=("DEFAULT_CONFIG",),
        default="none",
        values="NAME",
    ),
    Flag(
        "fallback-strategies",
        "if there is neither label nor default, in this order: the file named default, the only one, or an empty one",
        variables=("FALLBACK_STRATEGIES",),
        kind=FlagKind.LIST,
        values="named|single|empty",
    ),
    Flag(
        "kubeconfig",
        "how to reach the API server, for settings that need it; in a pod, leave it out",
        variables=("KUBECONFIG",),
        values="PATH",
    ),
    Flag(
        "node-name",
        "this node's name at the API server, for settings that need it",
        variables=("NODE_NAME",),
        values="NAME",
    ),
    Flag(
        "dra",
        "Dynamic Resource Allocation (docs/dra.md): not at all, together with the device plugin API, or instead of it",
        variables=("GATEWAY_DRA",),
        default="off",
        values="off|on|only",
    ),
    Flag(
        "dra-drivers",
        "DRA drivers' names by the domain of resources, by commas; without it gpu.nvidia.com, gpu.amd.com, else the domain itself",
        variables=("GATEWAY_DRA_DRIVERS",),
        kind=FlagKind.LIST,
        values="DOMAIN=DRIVER",
    ),
    Flag(
        "device-discovery-strategy",
        "how NVIDIA's GPUs are found; tegra is refused",
        variables=("DEVICE_DISCOVERY_STRATEGY",),
        key=("flags", "deviceDiscoveryStrategy"),
        default="auto",
        values="auto|nvml",
        take=kinds.discovery,
    ),
    Flag(
        "imex-channel-ids",
        "IMEX channels that each container with a GPU gets: none or 0",
        variables=("IMEX_CHANNEL_IDS",),
        key=("imex", "channelIDs"),
        field="imex_channels",
        kind=FlagKind.NUMBERS,
        default="none",
        values="IDS",
        take=kinds.channels,
    ),
    _switch(
        "imex-required",
        "GPUs are unhealthy until their IMEX channel is there",
        "IMEX_REQUIRED",
        ("imex", "required"),
        "imex_required",
    ),
    Flag("mps-root", variables=("MPS_ROOT",), key=("flags", "mpsRoot"), inert=True),
    Flag("cdi-feature-flags", variables=("CDI_FEATURE_FLAGS",), kind=FlagKind.LIST, inert=True),
    Flag(
        "DP_DISABLE_HEALTHCHECKS",
        "Xids that leave a GPU healthy, by commas; all or xids: no health checks",
        variables=("DP_DISABLE_HEALTHCHECKS",),
        field="disabled_health_checks",
        values="IDS",
        option=False,
    ),
    Flag(
        "DP_ENABLE_HEALTHCHECKS",
        "Xids after which it is unhealthy nevertheless",
        variables=("DP_ENABLE_HEALTHCHECKS",),
        field="enabled_health_checks",
        values="IDS",
        option=False,
    ),
    Flag(
        "resource-naming-strategy",
        "how AMD's GPUs are named: all amd.com/gpu, or by partition",
        variables=("GATEWAY_RESOURCE_NAMING_STRATEGY",),
        field="resource_naming",
        default="single",
        values="single|mixed",
        aliases=("resource_naming_strategy",),
        take=kinds.one_of(Naming),
    ),
    Flag(
        "driver-type",
        "what AMD's GPUs are for; virtual machines (vf-passthrough, pf-passthrough) are refused",
        default="container",
        values="container",
        aliases=("driver_type",),
        take=kinds.driver,
    ),
    # ROCm's plugin has them: its own, and those of Go's glog.
    *(Flag(name, kind=FlagKind.SWITCH, inert=True) for name in ("logtostderr", "alsologtostderr")),
    *(Flag(name, inert=True) for name in ("pulse", "stderrthreshold", "v", "vmodule")),
    *(Flag(name, inert=True) for name in ("log_dir", "log_link", "log_backtrace_at", "logbuflevel")),
    Flag(
        "health-recovery",
        "whether a GPU that became unhealthy may come back: never, or by evidence",
        variables=("GATEWAY_HEALTH_RECOVERY",),
        key=(_OURS, "healthRecovery"),
        field="health_recovery",
        default="safe",
        values="off|safe",
        take=kinds.one_of(Recovery),
    ),
    Flag(
        "exclude-devices",
        "GPUs to leave out, by UUID, index, PCI address or product, by commas; * is anything: docs/configuration.md",
        variables=("GATEWAY_EXCLUDE_DEVICES",),
        key=(_OURS, "excludeDevices"),
        field="excluded",
        kind=FlagKind.NAMES,
        default="none",
        values="PATTERNS",
        take=kinds.patterns,
    ),
    Flag(
        "cdi-fallback",
        "what to do if a kubelet does not accept CDI names, and nothing else carries the GPU",
        variables=("GATEWAY_CDI_FALLBACK",),
        key=(_OURS, "cdiFallback"),
        field="cdi_fallback",
        default="refuse",
        values="refuse|envvar|expand",
        take=kinds.one_of(CdiFallback),
    ),
    Flag(
        "bridge",
        "a folder in which other vendors' device plugins register, to be served through the gateway: docs/bridge.md",
        variables=("GATEWAY_BRIDGE",),
        key=(_OURS, "bridge", "folder"),
        field="bridge",
        default="none",
        values="DIR",
        take=kinds.folder_or_none,
    ),
    Flag(
        "bridge-grace",
        "for how many seconds the devices of a bridged plugin that is away stay as they are",
        variables=("GATEWAY_BRIDGE_GRACE",),
        key=(_OURS, "bridge", "grace"),
        field="bridge_grace",
        kind=FlagKind.SECONDS,
        default="60",
        values="SECONDS",
        take=kinds.seconds,
    ),
    Flag(
        "bridge-withdraw",
        "after how many seconds those devices that no container holds are no longer offered",
        variables=("GATEWAY_BRIDGE_WITHDRAW",),
        key=(_OURS, "bridge", "withdraw"),
        field="bridge_withdraw",
        kind=FlagKind.SECONDS,
        default="3600",
        values="SECONDS",
        take=kinds.seconds,
    ),
    Flag(
        "gateway.honourResourceNames",
        "use what NVIDIA's plugin ignores in the file: names by product, and which GPUs are shared",
        key=(_OURS, "honourResourceNames"),
        kind=FlagKind.SWITCH,
        default="false",
        option=False,
    ),
    _switch("strict-config", "refuse a configuration file with unknown keys", "GATEWAY_STRICT_CONFIG"),
)


def help_rows() -> Iterator[tuple[str, str]]:
    """Yield what ``--help`` says of each flag that has an effect."""
    for flag in FLAGS:
        if flag.option and not flag.inert:
            notes = "; ".join((*flag.variables[:1], *([f"default: {flag.default}"] if flag.default else ())))
            yield f"--{flag.name} {flag.values}".rstrip(), f"{flag.meaning}  [{notes}]"
