"""The operator's settings about devices: how they are named, shared, given to containers and checked.

They are plain values. ``gateway.configuration.settings`` makes them from flags, variables and the configuration file, and
again when that file changes. Names and meanings are those of NVIDIA's and AMD's device plugins, so that their configurations
work here.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from msgspec import Struct, field


class MigStrategy(Enum):
    """How MIG instances are offered (``MIG_STRATEGY``)."""

    NONE = "none"
    """Not at all: only whole GPUs are offered."""
    SINGLE = "single"
    """As GPUs, under the GPUs' resource name; all instances of the node must have one profile."""
    MIXED = "mixed"
    """Each profile under its own resource name: ``nvidia.com/mig-1g.5gb``."""


class Naming(Enum):
    """How AMD's GPUs and partitions are named (``resource_naming_strategy``)."""

    SINGLE = "single"
    """``amd.com/gpu`` for all."""
    MIXED = "mixed"
    """By partition: ``amd.com/cpx_nps4``."""


class ListStrategy(Enum):
    """How a container gets its GPUs (``DEVICE_LIST_STRATEGY``)."""

    __hash__ = object.__hash__  # As for Field.

    ENVVAR = "envvar"
    VOLUME_MOUNTS = "volume-mounts"
    CDI_ANNOTATIONS = "cdi-annotations"
    CDI_CRI = "cdi-cri"


CDI_STRATEGIES: Final = frozenset({ListStrategy.CDI_ANNOTATIONS, ListStrategy.CDI_CRI})
"""The strategies that use a CDI specification."""


class IdStrategy(Enum):
    """How a container's environment names its GPUs (``DEVICE_ID_STRATEGY``). Device IDs are always UUIDs."""

    UUID = "uuid"
    INDEX = "index"


class CdiFallback(Enum):
    """What to do if a kubelet can't carry CDI names, and nothing else gives the GPU (``--cdi-fallback``)."""

    REFUSE = "refuse"
    ENVVAR = "envvar"
    """Name the GPUs in the environment, because the NVIDIA runtime is the node's default."""
    EXPAND = "expand"
    """Send what is in the CDI specification: nodes, mounts and variables; refuse if it has a hook."""


class Sharing(Enum):
    """Which replicas of shared GPUs are given first (``SHARED_DEVICES_ALLOCATION_POLICY``)."""

    DISTRIBUTED = "distributed"
    """Those of the least used GPU."""
    PACKED = "packed"
    """Those of the most used GPU, so that few GPUs are used."""


class Recovery(Enum):
    """Whether an unhealthy GPU may become healthy again (``--health-recovery``)."""

    OFF = "off"
    """Never by itself, as in NVIDIA's plugin: only by ``gateway acquire`` or a reboot."""
    SAFE = "safe"
    """After a time if a program caused it, after a reset if one is needed."""


class Portion(Struct, frozen=True):
    """Some devices of a time-sliced resource: each is offered ``replicas`` times (at least 2), as ``shown_as``.

    ``devices`` names them by index (``2``; ``0:1`` for a MIG instance) or UUID. If it is a number n, it means the first n.
    """

    devices: tuple[str, ...] | int
    replicas: int
    shown_as: str


class Slices(Struct, frozen=True):
    """A time-sliced resource: each of its devices is offered ``replicas`` times (at least 2), as ``shown_as``.

    For a device that ``portions`` name, the first such portion is in force instead. With portions, ``replicas`` may be 0: the
    other devices are unshared.
    """

    replicas: int
    shown_as: str
    portions: tuple[Portion, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """All names under which its devices are offered."""
        return frozenset((self.shown_as, *(portion.shown_as for portion in self.portions)))


class Globbed(Struct, frozen=True):
    """Devices that are described by path globs, under one resource name.

    Each file that one of ``paths`` matches is a device. Each container with a device also gets the ``shared`` files. Each
    device is offered ``count`` times. ``permissions`` is any of ``r``, ``w``, ``m``.
    """

    resource: str
    paths: tuple[str, ...]
    shared: tuple[str, ...] = ()
    count: int = 1
    permissions: str = "rw"


class Bridging(Struct, frozen=True):
    """Settings for resources of other vendors' plugins (``--bridge``), by patterns of their names (``*`` is anything).

    ``allow`` are the resources that may register (none: all). ``repeat`` are resources for which the gateway may repeat an
    earlier answer for the same devices while the plugin is away. ``deadlines`` are the seconds for an Allocate (the first
    pattern that matches). ``renames`` are other names for resources.
    """

    allow: tuple[str, ...] = ()
    repeat: tuple[str, ...] = ()
    renames: Mapping[str, str] = field(default_factory=dict)
    deadlines: tuple[tuple[str, float], ...] = ()


IMEX_CHANNEL: Final = "/dev/nvidia-caps-imex-channels/channel0"
"""The device node of the only IMEX channel that containers can get."""


class Policy(Struct, frozen=True):
    """The operator's settings about devices. Paths are the host's, without a slash at the end (except ``/``).

    ``dev_root`` is where the host's device nodes are, '' for ``driver_root``; ``container_driver_root`` is where this process
    sees ``driver_root``. ``slices`` are by the unshared name of a resource. ``disabled_health_checks`` and
    ``enabled_health_checks`` are the words of ``DP_DISABLE_HEALTHCHECKS`` and ``DP_ENABLE_HEALTHCHECKS``.
    ``cdi_disabled_hooks`` are the hooks that the CDI specification lacks; ``all`` means all.

    ``gpu_names`` and ``mig_names`` are pairs: a pattern (``*`` is anything) of NVIDIA's products or MIG profiles, and a resource
    name. The first pattern that matches is in force; if none matches, the GPU isn't offered. Empty: the usual names.
    ``excluded`` are patterns of GPUs to leave out: UUIDs, indexes, PCI addresses or products. ``node_features``: write the
    labels of GPU Feature Discovery for Node Feature Discovery.

    ``imex_channels`` is () or (0,): each container with a GPU gets that IMEX channel. With ``imex_required``, GPUs are
    unhealthy without it. ``bridge`` is the folder in which other vendors' plugins register ('': none). If a plugin is away, its
    devices stay as they are for ``bridge_grace`` seconds, and on the list for ``bridge_withdraw`` seconds.
    """

    mig_strategy: MigStrategy = MigStrategy.NONE
    resource_naming: Naming = Naming.SINGLE
    fail_on_init_error: bool = False
    driver_root: str = "/"
    dev_root: str = ""
    container_driver_root: str = "/driver-root"
    pass_device_specs: bool = False
    list_strategies: frozenset[ListStrategy] = frozenset({ListStrategy.ENVVAR})
    id_strategy: IdStrategy = IdStrategy.UUID
    cdi_annotation_prefix: str = "cdi.k8s.io/"
    cdi_hook_path: str = "/usr/bin/nvidia-ctk"
    cdi_disabled_hooks: frozenset[str] = frozenset()
    cdi_fallback: CdiFallback = CdiFallback.REFUSE
    gdrcopy: bool = False
    gds: bool = False
    mofed: bool = False
    imex_channels: tuple[int, ...] = ()
    imex_required: bool = False
    sharing: Sharing = Sharing.DISTRIBUTED
    gpu_names: tuple[tuple[str, str], ...] = ()
    mig_names: tuple[tuple[str, str], ...] = ()
    slices: Mapping[str, Slices] = field(default_factory=dict)
    fail_requests_greater_than_one: bool = False
    disabled_health_checks: str = ""
    enabled_health_checks: str = ""
    health_recovery: Recovery = Recovery.SAFE
    excluded: tuple[str, ...] = ()
    node_features: bool = False
    globbed: tuple[Globbed, ...] = ()
    bridge: str = ""
    bridge_grace: float = 60.0
    bridge_withdraw: float = 3600.0
    bridging: Bridging = Bridging()

    def on_host(self, node: str) -> str:
        """Return where the host has a device node that containers find at ``node``."""
        return (self.dev_root or self.driver_root).rstrip("/") + node
