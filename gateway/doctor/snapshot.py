"""The result of one look at a node: plain values for the checks. None means that a fact can't be seen from here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from msgspec import Struct

from gateway.telling.sides import DriverStatus, SideStatus
from gateway.telling.status import GatewayStatus


class SocketDir(Struct, frozen=True):
    """The kubelet's folder for device plugins: the names in it, and the sockets on which a process listens."""

    path: str
    state: Literal["there", "missing", "stale"] = "there"
    listening: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()


class CheckpointSeen(Struct, frozen=True):
    """The kubelet's checkpoint; ``complaint`` is why it can't be read."""

    complaint: str = ""


class KubeletProcess(Struct, frozen=True):
    """A process that is, or contains, a kubelet, with its arguments."""

    pid: int
    arguments: tuple[str, ...]


class Release(Struct, frozen=True):
    """The facts about the kubelet's release: its minor version, and remarks in words."""

    minor: int = 0
    unknown: str = ""
    """Why the release is unknown to this gateway; empty if it is known."""
    unkept: str = ""
    """Why the next minor version can't read its checkpoint; empty if it can."""
    fixed: tuple[str, ...] = ()
    """Bugs that a later patch release fixes."""


class StateDir(Struct, frozen=True):
    """The gateways' state directory. Sizes are in bytes and inodes, ``complaint`` is about its state file."""

    path: str
    there: bool = True
    writable: bool = True
    free_bytes: int | None = None
    free_inodes: int | None = None
    complaint: str = ""
    claims: tuple[str, ...] = ()
    """The prepared ResourceClaims in it: ``namespace/name``, with the driver's name."""
    written: float | None = None
    """When the state file was last written (Unix seconds)."""


class Process(Struct, frozen=True):
    """The gateway's process and its limits. ``capabilities`` is a mask (capability.h)."""

    pid: int
    open_files: int | None = None
    most_files: int | None = None
    capabilities: int | None = None
    context: str = ""
    """The SELinux label of the process."""
    throttled: int | None = None
    """How often its CPU limit throttled it; None: it has no limit, or that can't be seen."""
    killed: int = 0
    """How often a process of its container was killed for memory."""
    instances: int = 0
    """The visible inotify instances of its user."""


class Pci(Struct, frozen=True):
    """A display controller or accelerator on the bus; ``driver`` is the kernel driver that is bound to it."""

    address: str
    vendor: str
    driver: str = ""


class NvmlSeen(Struct, frozen=True):
    """The state of NVIDIA's library.

    ``refused`` are the GPUs that it counts and can't open, by index, with the reason. ``told`` are the PCI addresses of the
    others. If a gateway reported the state, ``lacking`` has the missing GPUs in words instead, and ``gpus`` is None.
    """

    state: Literal["well", "missing", "mismatch", "failed", "silent"]
    message: str = ""
    gpus: int | None = None
    refused: Mapping[int, str] = {}
    told: frozenset[str] = frozenset()
    lacking: tuple[str, ...] = ()


class DeviceNodeSeen(Struct, frozen=True):
    """A device node: whether it exists, whether opening it was refused, and whether /dev/char has a link to it."""

    path: str
    there: bool = True
    refused: bool = False
    linked: bool | None = None


class Runtime(Struct, frozen=True):
    """The container runtime and its configuration.

    ``name`` includes the version: ``containerd 1.7.27``. ``nvidia`` is True if it has NVIDIA's runtime, ``default`` if that is the
    default one. None: unknown for this version.
    """

    name: str
    path: str = ""
    """The path of its configuration; empty if that can't be seen."""
    nvidia: bool | None = None
    default: bool = False
    cdi: bool | None = None
    cdi_dirs: tuple[str, ...] | None = None


class ApiNode(Struct, frozen=True):
    """The node as the API server has it: quantities of extended resources.

    ``runtime`` is as the kubelet reports it (``containerd://1.7.27``), ``boot`` the kernel's ID of its boot.
    """

    kubelet: str = ""
    capacity: Mapping[str, int] = {}
    allocatable: Mapping[str, int] = {}
    runtime: str = ""
    boot: str = ""


class Cluster(Struct, frozen=True):
    """The API server's answers; None: it wasn't asked, or didn't answer."""

    node: ApiNode | None = None
    runtime_classes: frozenset[str] | None = None
    device_classes: Mapping[str, str] | None = None
    rights: Mapping[str, bool] | None = None
    node_name: str = ""
    """The name under which the node was asked for."""
    node_missing: bool = False
    """True if the API server has no node of that name."""


class Answered(Struct, frozen=True):
    """The serving gateway's answer to ``doctor``: the API server's answers, and the name of its backend."""

    cluster: Cluster = Cluster()
    backend: str = ""


class Told(Struct, frozen=True, kw_only=True):
    """What is known before the look: the gateways' status, and the settings that they would have here."""

    statuses: tuple[GatewayStatus, ...] = ()
    silent: Mapping[str, str] = {}
    settings: str = ""
    """Why these settings can't be used."""
    strategies: frozenset[str] = frozenset({"envvar"})
    """How containers get their GPUs."""
    monitors_mig: bool = False
    imex: bool = False
    """True if containers get IMEX channel 0."""


class Surveyed(Told, frozen=True, kw_only=True):
    """All facts about a node. Times are Unix seconds."""

    now: float
    socket_dir: SocketDir
    checkpoint: CheckpointSeen | None = None
    pod_resources: bool | None = None
    kubelets: tuple[KubeletProcess, ...] = ()
    release: Release | None = None
    alive: frozenset[str] = frozenset()
    """Tokens of the living gateways, by their locks in the socket folder."""
    state_dir: StateDir
    inotify_most: int | None = None
    processes: tuple[Process, ...] = ()
    gpus: tuple[Pci, ...] | None = None
    modules: frozenset[str] | None = None
    nvml: NvmlSeen | None = None
    nodes: tuple[DeviceNodeSeen, ...] | None = None
    kfd_gpus: int | None = None
    runtime: Runtime | None = None
    cdi_files: Mapping[str, str] = {}
    """CDI specifications, and what is wrong with each (empty if nothing is)."""
    enforcing: bool | None = None
    drivers: frozenset[str] | None = None
    """DRA drivers that are registered with the kubelet."""
    node: ApiNode | None = None
    node_name: str = ""
    """The name under which the node was asked for."""
    node_missing: bool = False
    """True if the API server has no node of that name."""
    boot: str = ""
    """The kernel's ID of this boot."""
    numa_nodes: frozenset[int] | None = None
    """The NUMA nodes that the kernel has."""
    wsl: str = ""
    """The path of a file that only WSL2 has; '' if there is none."""
    jetson: str = ""
    """The path of a file that only a Jetson has; '' if there is none."""
    switches: int | None = None
    """Number of NVSwitches; None: the bus can't be seen."""
    fabric_manager: bool | None = None
    """True if NVIDIA's fabric manager runs; None: the host's processes can't be seen."""
    runtime_classes: frozenset[str] | None = None
    registry: bool | None = None
    """True if the kubelet has its folder for drivers; None if its own folder can't be seen."""
    device_classes: Mapping[str, str] | None = None
    """DeviceClasses, with the text of their selectors."""
    rights: Mapping[str, bool] | None = None
    """The rights that --dra needs, in words, and if we have each; None if no gateway needs them, or it can't be asked."""

    @property
    def sockets(self) -> SocketDir | None:
        """The kubelet's folder, if it can be seen."""
        return self.socket_dir if self.socket_dir.state == "there" else None

    @property
    def state(self) -> StateDir | None:
        """The gateways' state directory, if it can be seen and is the one that they use."""
        return self.state_dir if self.state_dir.there and not self.elsewhere else None

    @property
    def nvidia_runtime(self) -> Runtime | None:
        """The runtime, if it is known whether it has NVIDIA's runtime."""
        return None if self.runtime is None or self.runtime.nvidia is None else self.runtime

    @property
    def cdi_switch(self) -> Runtime | None:
        """The runtime, if it is known whether CDI is on."""
        return None if self.runtime is None or self.runtime.cdi is None else self.runtime

    @property
    def cdi_folders(self) -> Runtime | None:
        """The runtime, if it is known which CDI folders it reads."""
        return None if self.runtime is None or self.runtime.cdi_dirs is None else self.runtime

    @property
    def own_node(self) -> ApiNode | None:
        """The node at the API server, unless it runs on another machine: a kubelet reports its boot ID."""
        boots = {self.boot, self.node.boot if self.node is not None else ""}
        is_known = "" not in boots and "kubelet.sock" in self.socket_dir.listening
        return None if is_known and len(boots) > 1 else self.node

    @property
    def dra(self) -> tuple[DriverStatus, ...]:
        """The gateways' DRA drivers."""
        return tuple(one for status in self.statuses for one in status.drivers)

    @property
    def sides(self) -> tuple[SideStatus, ...]:
        """The GPUs, if both APIs are served."""
        return tuple(one for status in self.statuses for one in status.sides)

    @property
    def elsewhere(self) -> bool:
        """True if gateways run, and none of them has a control socket in this state directory."""
        return bool(self.alive) and not self.statuses and not self.silent


def joined(found: Iterable[str]) -> str:
    """Join the findings of a check to one line, each once; '' if there are none."""
    return "; ".join(dict.fromkeys(found))


def offered(seen: Surveyed) -> dict[str, int]:
    """Return what the kubelet can give by the serving gateways' status, by resource."""
    return {one.name: one.allocatable for status in seen.statuses if not status.led_by for one in status.resources}
