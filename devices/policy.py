"""What an operator decides about devices: how they are named, shared, handed to containers and judged.

Values only, made once from flags, variables and the configuration file (``gateway.configuration.settings``), and made anew when that file
changes. The names and meanings of NVIDIA's and AMD's device plugins, because people bring their configurations along.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from msgspec import Struct, field


class MigStrategy(Enum):
    """What becomes of MIG instances (``MIG_STRATEGY``)."""

    NONE = "none"
    """GPUs are offered whole, whatever is on them."""
    SINGLE = "single"
    """All instances of the node are alike and stand in for GPUs, under the GPUs' name."""
    MIXED = "mixed"
    """Each profile has a resource name of its own, ``nvidia.com/mig-1g.5gb``."""


class Naming(Enum):
    """How AMD's GPUs and partitions are named (``resource_naming_strategy``)."""

    SINGLE = "single"
    """``amd.com/gpu``, where all are alike."""
    MIXED = "mixed"
    """By partition: ``amd.com/cpx_nps4``."""


class ListStrategy(Enum):
    """How a container is told its GPUs (``DEVICE_LIST_STRATEGY``)."""

    __hash__ = object.__hash__  # As Field's.

    ENVVAR = "envvar"
    VOLUME_MOUNTS = "volume-mounts"
    CDI_ANNOTATIONS = "cdi-annotations"
    CDI_CRI = "cdi-cri"


CDI_STRATEGIES: Final = frozenset({ListStrategy.CDI_ANNOTATIONS, ListStrategy.CDI_CRI})
"""The strategies that name devices of a CDI specification."""


class IdStrategy(Enum):
    """By what a container is told its GPUs (``DEVICE_ID_STRATEGY``); device IDs are UUIDs either way."""

    UUID = "uuid"
    INDEX = "index"


class CdiFallback(Enum):
    """What to do where CDI names can't be said to a kubelet, and nothing else carries the GPU (``--cdi-fallback``)."""

    REFUSE = "refuse"
    ENVVAR = "envvar"
    """Name the GPUs in the environment: the NVIDIA runtime is the node's default."""
    EXPAND = "expand"
    """Say what stands in the CDI specification: nodes, mounts and variables; refused where it has a hook."""


class Sharing(Enum):
    """How replicas of shared GPUs are given out (``SHARED_DEVICES_ALLOCATION_POLICY``)."""

    DISTRIBUTED = "distributed"
    """From the least used GPU first."""
    PACKED = "packed"
    """From as few GPUs as possible, the most used first."""


class Recovery(Enum):
    """Whether a GPU that fell ill may come back (``--health-recovery``)."""

    OFF = "off"
    """Never by itself, as with NVIDIA's plugin: an operator says so (``gateway acquire``), or a reboot."""
    SAFE = "safe"
    """By time where an application was to blame, by evidence of a reset where that is needed."""


class Portion(Struct, frozen=True):
    """Some devices of a resource that is time-sliced: each is offered ``replicas`` times (at least 2), as ``shown_as``.

    ``devices`` names them by place on the node (``2``; ``0:1`` for a MIG instance) or UUID; a number means the first so many.
    """

    devices: tuple[str, ...] | int
    replicas: int
    shown_as: str


class Slices(Struct, frozen=True):
    """One resource that is time-sliced: each of its devices is offered ``replicas`` times (at least 2), as ``shown_as``.

    Devices that ``portions`` mean are offered as the first of these says, whatever holds for the rest; with portions, 0
    ``replicas`` leave the rest unshared.
    """

    replicas: int
    shown_as: str
    portions: tuple[Portion, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """All names that its devices are shown as."""
        return frozenset((self.shown_as, *(portion.shown_as for portion in self.portions)))


class Globbed(Struct, frozen=True):
    """Devices described by path globs, under one resource name.

    Each file that one of ``paths`` matches is a device; ``shared`` files go into every container that has one.
    ``count`` offers each so many times. ``permissions`` is any of ``r``, ``w``, ``m``.
    """

    resource: str
    paths: tuple[str, ...]
    shared: tuple[str, ...] = ()
    count: int = 1
    permissions: str = "rw"


class Bridging(Struct, frozen=True):
    """What holds for single resources of other vendors' plugins (``--bridge``), by patterns of their names (``*`` is anything).

    ``allow`` says which may register (none: all), ``repeat`` for which an Allocate may be answered as an identical earlier one was
    while the plugin is away, ``deadlines`` how many seconds an Allocate may take (the first pattern that matches).
    ``renames`` gives resources other names than their plugins do.
    """

    allow: tuple[str, ...] = ()
    repeat: tuple[str, ...] = ()
    renames: Mapping[str, str] = field(default_factory=dict)
    deadlines: tuple[tuple[str, float], ...] = ()


IMEX_CHANNEL: Final = "/dev/nvidia-caps-imex-channels/channel0"
"""The device node of the only IMEX channel that can be given to every container."""


class Policy(Struct, frozen=True):
    """All that an operator decides about devices. Paths are of the host, without a slash at the end (but ``/``).

    ``dev_root`` is where the host's device nodes are, '' for ``driver_root``; ``container_driver_root`` is where this
    process sees ``driver_root``. ``slices`` are by the name that a resource has unshared. ``disabled_health_checks`` and
    ``enabled_health_checks`` hold what ``DP_DISABLE_HEALTHCHECKS`` and ``DP_ENABLE_HEALTHCHECKS`` held, as it was written.
    ``cdi_disabled_hooks`` are names of hooks that the CDI specification is to lack; ``all`` means all.
    ``gpu_names`` and ``mig_names`` are pairs of a pattern (``*`` is anything) for NVIDIA's products or MIG profiles and the
    resource name for those that it matches, the first that does; what none matches isn't offered. Empty: the usual names.
    ``excluded`` are patterns of GPUs to leave out: of UUIDs, indexes, PCI addresses or products.
    ``node_features``: the node gets the labels of GPU Feature Discovery, by a file for Node Feature Discovery.
    ``imex_channels`` is () or (0,): each container with a GPU gets that IMEX channel. With ``imex_required`` GPUs are unhealthy without it.
    ``bridge`` is the folder in which other vendors' plugins register ('': nowhere); for ``bridge_grace`` seconds the devices of one
    that is away stay as they are, for ``bridge_withdraw`` seconds they stay on the list.
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
        """Say where on the host a device node is that containers find at ``node``."""
        return (self.dev_root or self.driver_root).rstrip("/") + node
