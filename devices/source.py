"""The interface of device sources: every kind of hardware, real or simulated, implements it.

NVIDIA's NVML, AMD's sysfs, a simulated node and other vendors' plugins behind the bridge all fit it. A source yields whole
inventories, as ListAndWatch does, and answers the kubelet's calls. It knows nothing of kubelets and their API versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from enum import Enum
from functools import cached_property
from typing import Final, Protocol

import structlog
from msgspec import Struct, field

from devices.boards import Place
from devices.model import (
    ContainerAnswer,
    ContainerRequest,
    Device,
    Fault,
    Field,
    Options,
    PreferredRequest,
    RefusedError,
    Sendable,
    Trouble,
)
from devices.policy import Policy

RETRY_S: Final = 5.0
"""Seconds until a source that failed is started again."""
_MAX_CHOICE_IN_LOOP: Final = 1000
"""With more available devices, a thread chooses, so that the event loop isn't blocked."""
_log = structlog.get_logger()


class Listing(Struct, frozen=True, dict=True):
    """All devices of one resource name, and what the kubelet must do for them."""

    devices: tuple[Device, ...]
    options: Options = Options()
    troubles: Mapping[str, Trouble] = field(default_factory=dict)
    """What is wrong, by device ID. The trouble's kind decides if the device is unhealthy. Without one, ``Device.health`` decides."""
    recovered: frozenset[str] = frozenset()
    """IDs of devices that were reset since their last trouble. Their remembered troubles end."""
    released: frozenset[str] = frozenset()
    """IDs of devices that an operator released, for instance for a reset. New containers don't get them, and their last known
    state stays. They may be missing in ``devices``."""

    @cached_property
    def by_id(self) -> Mapping[str, Device]:
        """The devices by ID, in their order."""
        return {device.id: device for device in self.devices}


Inventory = Mapping[str, Listing]
"""All devices of the node, by resource name. It is complete, except if it is a ``PartialInventory``."""


class PartialInventory(dict[str, Listing]):
    """The inventory of several sources, some of which haven't reported their devices yet.

    ``awaits`` returns True if a source that hasn't reported yet may list this resource.
    """

    def __init__(self, listings: Mapping[str, Listing], awaits: Callable[[str], bool]) -> None:
        super().__init__(listings)
        self.awaits = awaits


_EMPTY: Final = Listing(())


def listed(inventory: Inventory, resource: str) -> Listing | None:
    """Return the listing of a resource, which may be empty; None: its source hasn't reported yet."""
    listing = inventory.get(resource)
    if listing is not None:
        return listing
    return None if isinstance(inventory, PartialInventory) and inventory.awaits(resource) else _EMPTY


NOT_REPORTED: Final = "it has not reported its devices yet"


class Hindrance(Struct, frozen=True):
    """Why a source can't report its devices, or can't offer some of them.

    ``held_up``: the source can't apply the configuration, so a rolling update must not go on to the next node. ``cause`` is a
    ``devices.model.LibraryFault`` if a driver's library can't be used, else empty.
    """

    source: str
    reason: str
    held_up: bool = False
    cause: str = ""


class Unusable(Struct, frozen=True):
    """A GPU that the driver or the kernel reports but no resource lists, with the reason.

    ``index`` is its index on the node, ``pci`` its address, ``id`` its UUID; each is '' if unknown. ``excluded``: a setting
    leaves it out, so nothing is wrong with it. ``patterns`` are the patterns of ``--exclude-devices`` that match it. ``cause`` is a
    ``devices.model.LibraryFault`` if the driver's library can't read the GPU, else empty.
    """

    source: str
    reason: str
    index: str = ""
    pci: str = ""
    id: str = ""
    excluded: bool = False
    patterns: tuple[str, ...] = ()
    cause: str = ""

    @property
    def name(self) -> str:
        """Its name for people: ``GPU 3 (0000:4c:00.0)``."""
        first, *others = [one for one in (self.index, self.pci, self.id) if one] or ["?"]
        return f"GPU {first}" + (f" ({', '.join(others)})" if others else "")


def not_offered(resource: str) -> RefusedError:
    """Return the error of a call for a resource that no source offers."""
    return RefusedError(
        Fault.NOT_FOUND,
        f"no source of devices on this node offers {resource} under the present configuration. "
        "Create the pod again with a resource that the node offers, or restore the "
        "configuration that offered this one",
    )


def not_carried(resource: str, fields: Iterable[Field]) -> RefusedError:
    """Return the error if this kubelet may ignore fields of a response."""
    return RefusedError(
        Fault.FAILED_PRECONDITION,
        f"a container gets {resource} by {', '.join(sorted(field.value for field in fields))}, which may not reach this kubelet, "
        "so the container would start without its device. Use a kubelet or an API version that supports these fields",
    )


def check_choice(request: PreferredRequest) -> None:
    """Check that a request for a choice of devices can be met.

    Raises:
        RefusedError: the request is invalid (INVALID_ARGUMENT).
    """
    available, must = frozenset(request.available), frozenset(request.must_include)
    strangers = must - available
    if request.size < 1:
        problem = f"cannot choose {request.size} devices. Ask for at least 1"
    elif len(available) < len(request.available) or len(must) < len(request.must_include):
        problem = "the same device ID came twice; give each ID once"
    elif strangers:
        some = repr(min(strangers)[:80]) + (f" and {len(strangers) - 1} more" if len(strangers) > 1 else "")
        problem = f"{some} must be included but aren't available; list them as available too"
    elif len(must) > request.size:
        problem = f"{len(must)} devices must be included in a choice of {request.size}; ask for at least {len(must)}"
    elif len(available) < request.size:
        problem = f"{request.size} wanted and {len(available)} available; ask for at most {len(available)}"
    else:
        return
    raise RefusedError(Fault.INVALID_ARGUMENT, f"no such choice of devices: {problem}")


async def chosen(request: PreferredRequest, choose: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
    """Return the result of ``choose``. If there are many devices, run it in a thread."""
    return choose() if len(request.available) <= _MAX_CHOICE_IN_LOOP else await asyncio.to_thread(choose)


class Absence(Enum):
    """Why a device isn't listed any more. The values are shown to people."""

    LOST = "lost"
    """The hardware vanished by itself."""
    WITHDRAWN = "withdrawn"
    """An operator's change removed it (configuration, partitions, replicas, another name), or other hardware replaced it."""
    EXCLUDED = "excluded"
    """Withdrawn by the setting ``--exclude-devices``."""
    UNKNOWN = "unknown"
    """This source never had the device. It is treated as lost."""


class Facts(Struct, frozen=True):
    """Facts of a device, for display. Unknown ones are empty.

    ``index`` is the vendor's index on the node, ``parent`` the ID of the device that it is part of, ``profile`` a
    partition's profile. ``links`` are its connections to other devices, by index (``{"1": "nvlink x4"}``). ``minor`` is the number of its
    GPU's device node, ``driver`` the driver's version, ``memory`` in bytes (0: unknown), ``traits`` and ``capacities`` other
    properties. ``slot`` is a partition's place in the hardware (MIG: profile number and first memory slice, ``19-4``).
    """

    product: str = ""
    index: str = ""
    pci: str = ""
    parent: str = ""
    profile: str = ""
    links: Mapping[str, str] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    minor: int | None = None
    driver: str = ""
    memory: int = 0
    traits: Mapping[str, str] = field(default_factory=dict)
    capacities: Mapping[str, int] = field(default_factory=dict)
    slot: str = ""


class Reading(Struct, frozen=True):
    """The gauges of a GPU or a partition at one moment; None if the driver doesn't report them.

    ``uuid`` is its device ID, ``index`` the vendor's index on the node, ``minor`` the number of its device node, ``profile`` a
    partition's kind. ``busy`` is in percent, ``used`` and ``free`` memory in MiB, ``celsius`` the GPU's temperature, ``watts``
    its power draw.
    """

    uuid: str
    index: str
    minor: int
    pci: str = ""
    product: str = ""
    profile: str = ""
    busy: float | None = None
    used: float | None = None
    free: float | None = None
    celsius: float | None = None
    watts: float | None = None


class Behind(Struct, frozen=True, rename={"folder": "door"}):
    """The other vendor's plugin that offers a resource through the bridge.

    ``resource`` is the plugin's own name for the resource, ``folder`` the folder in which it registered, ``endpoint`` its
    socket there, ``api`` its API version. ``state`` is ``live``; while the plugin is away it is ``shielded``, ``unhealthy``
    or ``withdrawn``. ``state_s`` is the seconds in this state. ``registrations`` and ``absences`` are counts; ``repeated`` counts
    remembered responses that were given while the plugin was away.
    """

    resource: str
    endpoint: str
    folder: str
    api: str
    state: str
    state_s: float
    reason: str = ""
    registrations: int = 0
    absences: int = 0
    repeated: int = 0


class GiveUpError(Exception):
    """The process can't go on with this source, and must end. The message says why and what to do.

    Args:
        message: for a person.
        status: the exit status: 1, or 75 (EX_TEMPFAIL) if a restart of the container helps.
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class DeviceSource(Protocol):
    """A source of devices. Its methods run on the event loop and must not block it: hardware calls belong into threads.

    Methods with a body have a default for sources that don't need them.
    """

    name: str

    def watch(self) -> AsyncGenerator[Inventory]:
        """Yield the whole inventory once it is known, and again after each change. Never ends by itself.

        It is closed (``aclose``) when it is no longer needed, and then frees what it holds. If it can't see its hardware now (a
        driver still loads), it yields nothing and keeps trying. An end, or any other exception, is a defect that the gateway
        reports.

        Raises:
            GiveUpError: the process can't go on.
        """

    async def answer(self, resource: str, request: ContainerRequest, sendable: Sendable) -> ContainerAnswer:
        """Return how a container gets the devices of ``request`` (all known, no duplicates), using only ``sendable`` fields.

        Raises:
            RefusedError: this kubelet's API can't carry what the container needs.
        """

    async def prefer(self, resource: str, request: PreferredRequest) -> tuple[str, ...]:
        """Choose ``request.size`` of the available devices, including all of ``must_include``."""

    async def prepare(self, resource: str, device_ids: tuple[str, ...]) -> None:  # noqa: ARG002 - for those that need it
        """Prepare devices right before a container starts (PreStartContainer; the kubelet waits 30 s).

        Raises:
            RefusedError: they can't be prepared; the kubelet tries again with its restart back-off.
        """
        return

    def absence(self, resource: str, device_id: str) -> Absence:
        """Return why a device of ``resource`` isn't in the last inventory. Must not block, and never raises."""

    def claims(self, resource: str) -> bool:
        """Return True if this source lists the resource, or may list it later.

        Must not block, and never raises.
        """

    def source_of(self, resource: str) -> str:  # noqa: ARG002 - for combined sources
        """Return the name of the source that has a resource's devices. Must not block, and never raises."""
        return self.name

    def hindrances(self) -> tuple[Hindrance, ...]:
        """Return why it can't report its devices, or can't offer some of them. Must not block, and never raises."""
        return ()

    def unusable(self) -> tuple[Unusable, ...]:
        """Return the GPUs that no resource lists, each with its reason. Must not block, and never raises."""
        return ()

    def facts(self, resource: str) -> Callable[[str], Facts]:  # noqa: ARG002 - as above
        """Return a function from a device ID to its facts for people, which are empty if unknown.

        The function uses what is known now, and may be called in a thread. Must not block, and never raises.
        """
        return lambda _: Facts()

    def behind(self, resource: str) -> Behind | None:  # noqa: ARG002 - as above
        """Return the vendor's plugin that offers a resource; None if this source offers it itself. Must not block, and never raises."""
        return None

    def place(self, device_id: str) -> Place | None:  # noqa: ARG002 - as above
        """Return where on the hardware a device is, offered or not; None if this source doesn't see it.

        Must not block, and never raises.
        """
        return None

    def readings(self) -> Sequence[Reading]:
        """Read the gauges of all GPUs that may be used now; leave out what can't be read. Never raises.

        It blocks for as long as a driver takes: call it in a thread.
        """
        return ()

    def adopt(self, policy: Policy) -> None:
        """Use new settings: ``watch`` yields the result. Must not block, and never raises."""

    async def lead(self) -> None:
        """Note that this gateway leads from now on. Inventories after the return are complete."""
        return

    async def rest(self) -> None:
        """Note that this gateway no longer leads. After the return, another gateway may open the hardware."""
        return

    async def release(self, device_ids: Collection[str]) -> Collection[str]:  # noqa: ARG002 - as above
        """Close the hardware of these devices (all if none is given), so that it can be reset or partitioned.

        They stay listed, and are ``released`` until ``acquire``. Returns the IDs of all devices on the same hardware, so
        possibly more.
        """
        return ()

    async def acquire(self, device_ids: Collection[str]) -> Collection[str]:  # noqa: ARG002 - as above
        """Open the hardware of these devices again (all if none is given); return the IDs of all devices on it."""
        return ()


async def follow(source: DeviceSource, take: Callable[[Inventory], Awaitable[None]]) -> str:
    """Run a source until it ends or fails; return what happened, for people. The caller starts it again.

    Raises:
        GiveUpError: the source can't go on.
    """
    try:
        async with aclosing(source.watch()) as inventories:
            async for inventory in inventories:
                await take(inventory)
    except GiveUpError:
        raise
    except Exception as error:  # noqa: BLE001 - a source's defect must not remove devices
        _log.exception("a device source failed: its last inventory stays", source=source.name, retry_s=RETRY_S)
        return f"it failed ({error!r}): its last inventory stays in force"
    _log.error("a device source ended unexpectedly: starting it again", source=source.name, retry_s=RETRY_S)
    return "it ended unexpectedly: starting it again"
