"""What one look at a node saw: plain values, which the checks judge. None means that it can't be seen from here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from msgspec import Struct

from gateway.telling.sides import DriverStatus, SideStatus
from gateway.telling.status import GatewayStatus


class SocketDir(Struct, frozen=True):
    """The kubelet's folder for device plugins: what names of sockets it has, and on which of them somebody listens."""

    path: str
    state: Literal["there", "missing", "stale"] = "there"
    listening: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()


class CheckpointSeen(Struct, frozen=True):
    """The kubelet's checkpoint; ``complaint`` says why it can't be read."""

    complaint: str = ""


class KubeletProcess(Struct, frozen=True):
    """A process that is, or holds, a kubelet, with what it was started with."""

    pid: int
    arguments: tuple[str, ...]


class Release(Struct, frozen=True):
    """What is known of the kubelet's release: its minor version, and what of it matters here, in words."""

    minor: int = 0
    unknown: str = ""
    """Why nothing is known of it."""
    unkept: str = ""
    """Why the next minor version can't read its checkpoint."""
    fixed: tuple[str, ...] = ()
    """Bugs that a later patch release fixes."""


class StateDir(Struct, frozen=True):
    """The gateways' state directory; sizes in bytes and inodes, ``complaint`` about its state file."""

    path: str
    there: bool = True
    writable: bool = True
    free_bytes: int | None = None
    free_inodes: int | None = None
    complaint: str = ""
    claims: tuple[str, ...] = ()
    """What it says is prepared for ResourceClaims: ``namespace/name``, with the driver's name."""
    written: float | None = None
    """When the state file was written last, by the clock of then (unix seconds)."""


class Process(Struct, frozen=True):
    """What the kernel lets the gateway's process do. ``capabilities`` is a mask (capability.h)."""

    pid: int
    open_files: int | None = None
    most_files: int | None = None
    capabilities: int | None = None
    context: str = ""
    """SELinux' label of the process."""
    throttled: int | None = None
    """How often its CPU limit held it; None: it has no limit, or that can't be seen."""
    killed: int = 0
    """How often a process of its container was killed for memory."""
    instances: int = 0
    """inotify instances that its user has, as far as that can be seen."""


class Pci(Struct, frozen=True):
    """A display controller or accelerator on the bus; ``driver`` is the kernel's driver that has it."""

    address: str
    vendor: str
    driver: str = ""


class NvmlSeen(Struct, frozen=True):
    """What NVIDIA's library said.

    ``refused`` says of GPUs that it counts, by index, why it gives no handle; ``told`` are the PCI addresses of the others. ``lacking``
    says the same in words, as a gateway reports it, which doesn't report the count (None).
    """

    state: Literal["well", "missing", "mismatch", "failed", "silent"]
    message: str = ""
    gpus: int | None = None
    refused: Mapping[int, str] = {}
    told: frozenset[str] = frozenset()
    lacking: tuple[str, ...] = ()


class DeviceNodeSeen(Struct, frozen=True):
    """A device node: whether it is there, how opening it failed, and whether /dev/char has a link to it."""

    path: str
    there: bool = True
    refused: bool = False
    linked: bool | None = None


class Runtime(Struct, frozen=True):
    """The container runtime and its configuration. ``name`` with its version is as people write it: ``containerd 1.7.27``.

    ``nvidia``: it has a runtime of NVIDIA's, and (``default``) that is the default one. None: that can't be told of this version.
    """

    name: str
    path: str = ""
    """Of its configuration; empty if that can't be seen."""
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
    """What the API server said; None: it wasn't asked, or didn't say."""

    node: ApiNode | None = None
    runtime_classes: frozenset[str] | None = None
    device_classes: Mapping[str, str] | None = None
    rights: Mapping[str, bool] | None = None
    asked_for: str = ""
    """The name of the node."""
    missing: bool = False
    """The API server has no node of that name."""


class Answered(Struct, frozen=True):
    """What the serving gateway answers to ``doctor``: what takes libraries that it has loaded already, and where its devices come from."""

    cluster: Cluster = Cluster()
    backend: str = ""


class Surveyed(Struct, frozen=True, kw_only=True):
    """All that was seen. Times are unix seconds."""

    now: float
    socket_dir: SocketDir
    checkpoint: CheckpointSeen | None = None
    pod_resources: bool | None = None
    kubelets: tuple[KubeletProcess, ...] = ()
    release: Release | None = None
    statuses: tuple[GatewayStatus, ...] = ()
    silent: Mapping[str, str] = {}
    alive: frozenset[str] = frozenset()
    """Tokens of the gateways that live, by their locks in the socket folder."""
    state_dir: StateDir
    settings: str = ""
    """Why these settings can't be used."""
    strategies: frozenset[str] = frozenset({"envvar"})
    """How containers are told their GPUs."""
    monitors_mig: bool = False
    imex: bool = False
    """Containers get IMEX channel 0."""
    inotify_most: int | None = None
    processes: tuple[Process, ...] = ()
    gpus: tuple[Pci, ...] | None = None
    modules: frozenset[str] | None = None
    nvml: NvmlSeen | None = None
    nodes: tuple[DeviceNodeSeen, ...] | None = None
    kfd_gpus: int | None = None
    runtime: Runtime | None = None
    cdi_files: Mapping[str, str] = {}
    """CDI specifications, and what is wrong with each (mostly nothing)."""
    enforcing: bool | None = None
    drivers: frozenset[str] | None = None
    """Names of DRA drivers that are registered with the kubelet."""
    node: ApiNode | None = None
    node_name: str = ""
    """As the API server was asked for it; ``node_missing``: it has none of that name."""
    node_missing: bool = False
    boot: str = ""
    """The kernel's ID of this boot."""
    numa_nodes: frozenset[int] | None = None
    """Those that the kernel has, and so the kubelet."""
    wsl: str = ""
    """A file that only WSL2 has, and (``jetson``) one that only a Jetson has."""
    jetson: str = ""
    switches: int | None = None
    """NVSwitches; None: the bus can't be seen."""
    fabric_manager: bool | None = None
    """Whether NVIDIA's fabric manager runs; None: the host's processes can't be seen."""
    runtime_classes: frozenset[str] | None = None
    registry: bool | None = None
    """Whether the kubelet has its folder for drivers; None where its own folder can't be seen."""
    device_classes: Mapping[str, str] | None = None
    """DeviceClasses, and the text of each one's selectors."""
    rights: Mapping[str, bool] | None = None
    """What --dra needs of the API server, in words, and whether it is allowed; None where no gateway needs it, or it can't be asked."""

    @property
    def sockets(self) -> SocketDir | None:
        """The kubelet's folder, where there is one to look into."""
        return self.socket_dir if self.socket_dir.state == "there" else None

    @property
    def state(self) -> StateDir | None:
        """The gateways' state directory, where there is one to look into, and theirs isn't another."""
        return self.state_dir if self.state_dir.there and not self.elsewhere else None

    @property
    def nvidia_runtime(self) -> Runtime | None:
        """The runtime, if it can be told whether it has one of NVIDIA's."""
        return None if self.runtime is None or self.runtime.nvidia is None else self.runtime

    @property
    def cdi_switch(self) -> Runtime | None:
        """The runtime, if it can be told whether it has CDI."""
        return None if self.runtime is None or self.runtime.cdi is None else self.runtime

    @property
    def cdi_folders(self) -> Runtime | None:
        """The runtime, if it can be told which folders it reads."""
        return None if self.runtime is None or self.runtime.cdi_dirs is None else self.runtime

    @property
    def own_node(self) -> ApiNode | None:
        """The node at the API server, unless it runs on another machine: a kubelet reports its boot when it starts."""
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
        """Whether gateways live, and none of them has a control socket in the state directory that is looked into."""
        return bool(self.alive) and not self.statuses and not self.silent


def joined(found: Iterable[str]) -> str:
    """Make one line of what a check found, each thing once; '' where it found nothing."""
    return "; ".join(dict.fromkeys(found))


def offered(seen: Surveyed) -> dict[str, int]:
    """Say what the serving gateways say that the kubelet can give out, by resource."""
    return {one.name: one.allocatable for status in seen.statuses if not status.led_by for one in status.resources}
