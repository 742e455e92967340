"""The neutral model of the device plugin API: everything that any version of it can express, as frozen values.

A device source answers with these values, and each dialect (``adapters``) declares which of them it can carry. Nothing here
depends on a wire format, a kubelet version or a kind of hardware. Mappings in these values never change after construction.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum

from msgspec import Struct, field


class Health(Enum):
    """Whether the kubelet may give a device to a new container. The values are the kubelet's words."""

    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"


class TroubleKind(Enum):
    """What is needed to end a device's trouble. The values are shown to people."""

    APPLICATION = "application"
    """Nothing: a program that used the device failed, and the device is healthy."""
    RESTART_APP = "restart-app"
    """All programs that use the device must end. The backend reports when it is healthy."""
    RESET_REQUIRED = "reset-required"
    """A reset of the device, a reboot, or a reload of the driver."""
    UNKNOWN = "unknown"
    """Perhaps any of these."""

    @classmethod
    def named(cls, word: str) -> TroubleKind:
        """Return the kind with that value; ``UNKNOWN`` for a word of a later release."""
        return next((kind for kind in cls if kind.value == word), cls.UNKNOWN)


class LibraryFault(StrEnum):
    """Why a driver's library can't be used, or a GPU can't be read by it. The values are in the status document, for programs."""

    NO_LIBRARY = "no-library"
    MISMATCH = "library-mismatch"
    FAILED = "library-failed"
    SILENT = "library-silent"
    DENIED = "not-permitted"


class Trouble(Struct, frozen=True, gc=False):
    """What is wrong with a device: ``reason`` in words for a person, and ``kind``, what is needed to end it.

    ``code`` is the vendor's DRA driver's name for it (``xid=79``, ``gpu-lost``), empty if it has none. ``cause`` is a
    ``LibraryFault`` if the driver's library can't be used, else empty.
    """

    reason: str
    kind: TroubleKind = TroubleKind.RESTART_APP
    code: str = ""
    cause: str = ""


class Device(Struct, frozen=True, gc=False):
    """An allocatable device as the kubelet sees it.

    ``numa_nodes`` are its NUMA nodes; empty means unknown (never "node 0"). ``part_of`` is the ID of the physical GPU that it
    is a partition of, ``pci`` that GPU's PCI address; both are not sent to the kubelet.
    """

    id: str
    health: Health = Health.HEALTHY
    numa_nodes: tuple[int, ...] = ()
    part_of: str = ""
    pci: str = ""


class Options(Struct, frozen=True):
    """Which optional calls the kubelet should make; sent in Register and GetDevicePluginOptions."""

    pre_start_required: bool = False
    preferred_allocation: bool = False


class Registration(Struct, frozen=True):
    """One Register call: the dialect's version string, the socket's name in the kubelet's directory, the resource."""

    version: str
    endpoint: str
    resource_name: str
    options: Options = Options()


class Mount(Struct, frozen=True):
    """A path of the host, mounted into the container."""

    container_path: str
    host_path: str
    read_only: bool = False


class DeviceNode(Struct, frozen=True):
    """A device node of the host, made available in the container. ``permissions`` is any of ``r``, ``w``, ``m``."""

    container_path: str
    host_path: str
    permissions: str = "rw"


class ContainerRequest(Struct, frozen=True):
    """The devices that one container needs."""

    device_ids: tuple[str, ...]


class ContainerAnswer(Struct, frozen=True):
    """How one container gets its devices. ``cdi_devices`` are fully qualified CDI names (``vendor/class=name``)."""

    envs: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()


class PreferredRequest(Struct, frozen=True):
    """A request to choose ``size`` of the ``available`` devices for one container, including all of ``must_include``."""

    available: tuple[str, ...]
    must_include: tuple[str, ...]
    size: int


class Field(Enum):
    """The parts of the model that not every dialect can carry. The values are their names in errors and docs."""

    __hash__ = object.__hash__  # Enum's own is a Python function, which would slow down each lookup in a set of fields.

    OPTIONS = "options in Register"
    GET_OPTIONS = "GetDevicePluginOptions"
    TOPOLOGY = "topology (NUMA nodes) of a device"
    SEVERAL_CONTAINERS = "several containers in one Allocate"
    ENVS = "environment variables"
    MOUNTS = "mounts"
    DEVICE_NODES = "device nodes"
    ANNOTATIONS = "annotations"
    CDI_DEVICES = "CDI device names"
    PREFERRED_ALLOCATION = "GetPreferredAllocation"
    PRE_START = "PreStartContainer"


class Sendable(Struct, frozen=True):
    """The fields of a response that the kubelet's API can carry. A device source gets them with each request.

    ``certain`` fields reach the kubelet. A kubelet of unknown version may silently drop ``unsure`` fields, so an answer must not
    depend on them alone. Other fields don't arrive.
    """

    certain: frozenset[Field]
    unsure: frozenset[Field] = frozenset()


class Fault(Enum):
    """The gRPC status of a refused request. The values are gRPC's names.

    The gateway itself uses the first four; a plugin behind the bridge may use any.
    """

    NOT_FOUND = "NOT_FOUND"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    ABORTED = "ABORTED"
    OUT_OF_RANGE = "OUT_OF_RANGE"
    INTERNAL = "INTERNAL"
    UNAVAILABLE = "UNAVAILABLE"
    DATA_LOSS = "DATA_LOSS"
    UNAUTHENTICATED = "UNAUTHENTICATED"


class RefusedError(Exception):
    """A request that must not be served. The message says what is wrong and what to do."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault
