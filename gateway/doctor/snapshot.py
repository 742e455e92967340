"""The facts about a node that the checks judge. None means that a fact can't be seen from here."""

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
    """A kubelet process, or a process with a kubelet inside (such as k3s), and its arguments."""

    pid: int
    arguments: tuple[str, ...]


class Release(Struct, frozen=True):
    """The kubelet's minor version, and what is known about it."""

    minor: int = 0
    unknown_reason: str = ""
    """Why this gateway doesn't know the version; '' if it does."""
    checkpoint_lost_reason: str = ""
    """Why the next minor version can't read its checkpoint; '' if it can."""
    bugs_fixed_later: tuple[str, ...] = ()
    """Bugs that a later patch release fixes."""


class StateDir(Struct, frozen=True):
    """The gateways' state directory. ``complaint`` is what is wrong with its state file."""

    path: str
    exists: bool = True
    writable: bool = True
    free_bytes: int | None = None
    free_inodes: int | None = None
    complaint: str = ""
    claims: tuple[str, ...] = ()
    """The prepared ResourceClaims in it: ``namespace/name``, with the driver's name."""
    written_at: float | None = None
    """When the state file was last written (Unix seconds)."""


class GatewayProcess(Struct, frozen=True):
    """A gateway's process and its limits. ``capabilities`` is a mask (capability.h)."""

    pid: int
    open_files: int | None = None
    max_open_files: int | None = None
    capabilities: int | None = None
    selinux_label: str = ""
    """The SELinux label of the process."""
    throttled: int | None = None
    """How often its CPU limit throttled it; None if it has no limit, or if that can't be seen."""
    oom_kills: int = 0
    """How often the kernel killed a process of its container for memory."""
    inotify_instances: int = 0
    """Number of inotify instances of its user that are visible."""


class Pci(Struct, frozen=True):
    """A display controller or accelerator on the PCI bus; ``driver`` is the kernel driver that is bound to it."""

    address: str
    vendor: str
    driver: str = ""


class NvmlSeen(Struct, frozen=True):
    """The state of NVIDIA's library.

    ``refused`` says, by GPU index, why the library can't open a GPU that it counts. ``usable_addresses`` are the PCI addresses of
    the GPUs that it can open. If a gateway reported the state, ``missing_gpus`` has a text for each missing GPU instead, and
    ``gpu_count`` is None.
    """

    state: Literal["well", "missing", "mismatch", "failed", "silent"]
    message: str = ""
    gpu_count: int | None = None
    refused: Mapping[int, str] = {}
    usable_addresses: frozenset[str] = frozenset()
    missing_gpus: tuple[str, ...] = ()


class DeviceNodeSeen(Struct, frozen=True):
    """A device node: whether it exists, whether opening it was refused, and whether /dev/char has a link to it."""

    path: str
    exists: bool = True
    refused: bool = False
    linked: bool | None = None


class Runtime(Struct, frozen=True):
    """The container runtime and its configuration.

    ``name`` includes the version: ``containerd 1.7.27``. ``nvidia``: it has NVIDIA's runtime. ``cdi``: CDI is on. None: unknown for
    this version.
    """

    name: str
    config_path: str = ""
    """The path of its configuration file; '' if that can't be seen."""
    nvidia: bool | None = None
    nvidia_is_default: bool = False
    cdi: bool | None = None
    cdi_dirs: tuple[str, ...] | None = None


class ApiNode(Struct, frozen=True):
    """The API server's node object: the kubelet's version, and the quantities of extended resources.

    ``runtime`` is as the kubelet reports it (``containerd://1.7.27``). ``boot`` is the kernel's boot ID.
    """

    kubelet: str = ""
    capacity: Mapping[str, int] = {}
    allocatable: Mapping[str, int] = {}
    runtime: str = ""
    boot: str = ""


class Cluster(Struct, frozen=True):
    """The API server's answers; None if it wasn't asked or didn't answer."""

    node: ApiNode | None = None
    runtime_classes: frozenset[str] | None = None
    device_classes: Mapping[str, str] | None = None
    rights: Mapping[str, bool] | None = None
    node_name: str = ""
    """The node name that was used to query the API server."""
    node_missing: bool = False
    """True if the API server has no node of that name."""


class DoctorAnswer(Struct, frozen=True):
    """The serving gateway's answer to the order ``doctor``: the API server's answers, and the name of its backend."""

    cluster: Cluster = Cluster()
    backend: str = ""


class GatewayFacts(Struct, frozen=True, kw_only=True):
    """Facts known before the node is examined: the gateways' status, and the settings that a gateway would have here.

    ``unreachable`` has the reason for each control socket without an answer, by path.
    """

    statuses: tuple[GatewayStatus, ...] = ()
    unreachable: Mapping[str, str] = {}
    settings_error: str = ""
    """Why these settings can't be used; '' if they can."""
    strategies: frozenset[str] = frozenset({"envvar"})
    """The device list strategies: how containers get their GPUs."""
    monitors_mig: bool = False
    imex: bool = False
    """True if containers get IMEX channel 0."""


class NodeFacts(GatewayFacts, frozen=True, kw_only=True):
    """All facts about a node. Times are Unix seconds."""

    now: float
    socket_dir: SocketDir
    checkpoint: CheckpointSeen | None = None
    has_pod_resources: bool | None = None
    kubelets: tuple[KubeletProcess, ...] = ()
    release: Release | None = None
    live_tokens: frozenset[str] = frozenset()
    """The tokens of the running gateways, each of which locks a file of this name in the socket folder."""
    state_dir: StateDir
    max_inotify_instances: int | None = None
    processes: tuple[GatewayProcess, ...] = ()
    gpus: tuple[Pci, ...] | None = None
    kernel_modules: frozenset[str] | None = None
    nvml: NvmlSeen | None = None
    device_nodes: tuple[DeviceNodeSeen, ...] | None = None
    kfd_gpus: int | None = None
    runtime: Runtime | None = None
    cdi_files: Mapping[str, str] = {}
    """What is wrong with each CDI specification, by path; '' if nothing is."""
    selinux_enforcing: bool | None = None
    dra_drivers: frozenset[str] | None = None
    """DRA drivers that are registered with the kubelet."""
    node: ApiNode | None = None
    node_name: str = ""
    """The node name that was used to query the API server."""
    node_missing: bool = False
    """True if the API server has no node of that name."""
    boot: str = ""
    """The kernel's boot ID."""
    numa_nodes: frozenset[int] | None = None
    """The NUMA nodes that the kernel has."""
    wsl: str = ""
    """The path of a file that only WSL2 has; '' if this is not WSL2."""
    jetson: str = ""
    """The path of a file that only a Jetson has; '' if this is no Jetson."""
    nvswitches: int | None = None
    """Number of NVSwitches; None if the PCI bus can't be seen."""
    fabric_manager: bool | None = None
    """True if NVIDIA's fabric manager runs; None if the host's processes can't be seen."""
    runtime_classes: frozenset[str] | None = None
    has_registry: bool | None = None
    """True if the kubelet's folder ``plugins_registry`` exists; None if the kubelet's own folder can't be seen."""
    device_classes: Mapping[str, str] | None = None
    """The text of each DeviceClass's selectors, by name."""
    rights: Mapping[str, bool] | None = None
    """For each right that --dra needs: True if we have it. None if no gateway needs rights, or if the API server can't be asked."""

    @property
    def visible_sockets(self) -> SocketDir | None:
        """The kubelet's device plugin folder; None if it is missing or is not the one that the kubelet has."""
        return self.socket_dir if self.socket_dir.state == "there" else None

    @property
    def used_state_dir(self) -> StateDir | None:
        """The gateways' state directory; None if it can't be seen, or if the gateways use another one."""
        return self.state_dir if self.state_dir.exists and not self.state_dir_unused else None

    @property
    def runtime_if_nvidia_known(self) -> Runtime | None:
        """The container runtime; None if it is unknown whether it has NVIDIA's runtime."""
        return None if self.runtime is None or self.runtime.nvidia is None else self.runtime

    @property
    def runtime_if_cdi_known(self) -> Runtime | None:
        """The container runtime; None if it is unknown whether CDI is on."""
        return None if self.runtime is None or self.runtime.cdi is None else self.runtime

    @property
    def runtime_if_cdi_dirs_known(self) -> Runtime | None:
        """The container runtime; None if it is unknown which CDI folders it reads."""
        return None if self.runtime is None or self.runtime.cdi_dirs is None else self.runtime

    @property
    def own_node(self) -> ApiNode | None:
        """The API server's node object; None if its boot ID shows that it is another machine."""
        boots = {self.boot, self.node.boot if self.node is not None else ""}
        is_known = "" not in boots and "kubelet.sock" in self.socket_dir.listening
        return None if is_known and len(boots) > 1 else self.node

    @property
    def own_drivers(self) -> tuple[DriverStatus, ...]:
        """The gateways' DRA drivers."""
        return tuple(one for status in self.statuses for one in status.drivers)

    @property
    def sides(self) -> tuple[SideStatus, ...]:
        """The side of each GPU, if both APIs are served."""
        return tuple(one for status in self.statuses for one in status.sides)

    @property
    def state_dir_unused(self) -> bool:
        """True if gateways run and none of them has a control socket in this state directory."""
        return bool(self.live_tokens) and not self.statuses and not self.unreachable


def joined(found: Iterable[str]) -> str:
    """Join the findings of a check to one line without duplicates; '' if there are none."""
    return "; ".join(dict.fromkeys(found))


def allocatable(seen: NodeFacts) -> dict[str, int]:
    """Return the number of allocatable devices of each resource, as the serving gateways report it."""
    return {one.name: one.allocatable for status in seen.statuses if not status.led_by for one in status.resources}
