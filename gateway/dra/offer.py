"""Decide which devices DRA offers: by which driver, with which name and attributes. Pure.

Drivers, names and attributes are those of the vendors' drivers, so that claims and their CEL expressions keep their meaning:
NVIDIA's ``gpu.nvidia.com`` (cmd/gpu-kubelet-plugin/deviceinfo.go and mig.go of dra-driver-nvidia-gpu) and AMD's ``gpu.amd.com``
(cmd/gpu-kubeletplugin/deviceinfo.go of k8s-gpu-dra-driver). Shared and partitioned GPUs are listed as in the device plugin API:
each replica and each partition is a device, and no GPU is listed both whole and in parts.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, Protocol, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from devices import boards
from devices.life.states import AWAY, COUNTED, Entry, State
from devices.model import Health
from devices.replicas import unshared
from devices.source import Facts
from gateway.sides.table import Offered

NVIDIA: Final = "gpu.nvidia.com"
AMD: Final = "gpu.amd.com"
_DRIVERS: Final[Mapping[str, str]] = {"nvidia.com": NVIDIA, "amd.com": AMD}
_PCIE_ROOT: Final = "resource.kubernetes.io/pcieRoot"
_PCI_BUS: Final = "resource.kubernetes.io/pciBusID"
_NUMA: Final = "resource.kubernetes.io/numaNode"
_DRI: Final = re.compile(r"/dev/dri/(card|renderD)([0-9]{1,4})")
_NOT_IN_A_NAME: Final = re.compile(r"[^a-z0-9]+")
_VERSION: Final = re.compile(r"(0|[1-9][0-9]{0,8})(?:\.0*([0-9]{1,9}))?(?:\.0*([0-9]{1,9}))?(?:\.[0-9]+)*")
_VERSIONS: Final = frozenset({"cudaComputeCapability", "cudaDriverVersion"})
"""Traits that are versions."""
_NAME_CHARS: Final = 63
"""Most characters of a device's name: a DNS label (k8s.io/api/resource/v1)."""
_VALUE_BYTES: Final = 64
"""Most bytes of an attribute (DeviceAttributeMaxValueLength)."""


class Version(Struct, frozen=True):
    """A value that claims compare as a semantic version."""

    text: str


Value: TypeAlias = str | int | bool | Version


class Ailment(Enum):
    """Why a listed device is not offered to new claims. Each value is the key of our taint, after our domain."""

    UNHEALTHY = "unhealthy"
    CORDONED = "cordoned"
    LEAVING = "leaving"
    """It moves back to the device plugin API. Claims to which it is allocated still get it."""
    BY_NAME = "by-name"
    """Pods that ask by resource name would run without it. Claims to which it is allocated still get it."""


class Offer(Struct, frozen=True):
    """A device as DRA shows it.

    ``name`` is its name in the pool of its ``driver``; ``resource`` and ``device_id`` are its names in the device plugin API.
    ``memory`` is in bytes (0: unknown), ``capacities`` are its other quantities. ``reason`` explains ``ailment``.
    ``vendor_taints`` are the vendor's driver's taints for the same ailment, values by key. ``beside`` names a pod that holds
    another replica by the device plugin API. ``shares`` are the IDs of its replicas, if claims ask for a number of shares;
    ``device_id`` is the first of them.
    """

    driver: str
    name: str
    resource: str
    device_id: str
    place: boards.Place
    attributes: Mapping[str, Value]
    ailment: Ailment | None = None
    reason: str = ""
    memory: int = 0
    capacities: Mapping[str, int] = {}
    vendor_taints: Mapping[str, str] = {}
    beside: str = ""
    shares: tuple[str, ...] = ()

    @property
    def is_well(self) -> bool:
        """True if the hardware is healthy, whether cordoned or not."""
        return self.ailment is not Ailment.UNHEALTHY


class Withheld(Struct, frozen=True):
    """A device that isn't offered now, and why. ``lasts``: reading the kubelet's records again can't change that."""

    driver: str
    name: str
    device_id: str
    reason: str
    board: str = ""
    lasts: bool = False


class Owner(Protocol):
    """Decides which devices DRA may offer, if the device plugin API is also served."""

    def offered(self, entry: Entry) -> Offered:
        """Return how DRA offers a device."""
        ...

    def words(self, entry: Entry) -> str:
        """Return where a device is, for people."""
        ...


def driver_of(resource: str, drivers: Mapping[str, str]) -> str:
    """Return the driver of a resource: the operator's for its domain (``drivers``), the vendor's, or the domain itself."""
    domain = resource.partition("/")[0]
    return drivers.get(domain) or _DRIVERS.get(domain, domain)


def offers(
    listed: Mapping[str, Iterable[Entry]],
    facts: Callable[[str], Callable[[str], Facts]],
    holds: Callable[[str], Sequence[boards.Hold] | None],
    drivers: Mapping[str, str],
    root_of: Callable[[str], str] = lambda _: "",
    owner: Owner | None = None,
    stranger: Callable[[Mapping[str, Value]], str] = lambda _: "",
    overlooked: str = "",
    *,
    by_capacity: bool = False,
) -> tuple[list[Offer], list[Withheld]]:
    """Return the devices to offer, and those that are withheld because a pod may hold them by the device plugin API.

    Args:
        listed: all devices, by resource name.
        facts: returns a function that returns the facts of a resource's device.
        holds: returns the holds on a resource's devices by the device plugin API; None if unknown: then none of them is
            offered.
        drivers: the drivers that an operator chose, by domain.
        root_of: returns the PCIe root complex of a PCI address (``pci0000:00``); '' if unknown.
        owner: decides which devices are DRA's; None: all.
        stranger: returns which other DRA driver offers a device, by its attributes; '' for none.
        overlooked: why pods that ask by resource name would run without their GPU; then no device is offered to new claims.
            '' if no pod would.
        by_capacity: True if the replicas of a device are shares of one device.
    """
    found: list[Offer] = []
    withheld: list[Withheld] = []
    for resource, entries in listed.items():
        known, of = facts(resource), holds(resource)
        held = None if of is None else boards.by_board(of)
        driver = driver_of(resource, drivers)
        for entry in entries:
            device_id = entry.device.id
            about = known(device_id)
            name = _name(driver, entry, about, numbered=not by_capacity)
            place, shows = boards.place_of(entry.device), Offered.FREE if owner is None else owner.offered(entry)
            if owner is not None and shows is Offered.NOT:
                withheld.append(Withheld(driver, name, device_id, owner.words(entry), place.board, lasts=True))
                continue
            under = _without_owner(entry)
            # The device plugin API lists such a device, but the kubelet can't give it to a pod.
            counted = any(layer.state in COUNTED for layer in entry.layers)
            on_board = (
                None if held is None else [one for one in held.get(place.board, ()) if not (counted and one.offer)]
            )
            if reason := _why_not(under, place, on_board):
                withheld.append(Withheld(driver, name, device_id, reason, place.board))
                continue
            ailment, why, code = _ailment(under)
            if ailment is None and shows is Offered.LEAVING:
                ailment, why = Ailment.LEAVING, "it goes back to the device plugin API"
            attributes = _attributes(driver, resource, entry, about, root_of(about.pci))
            if other := stranger(attributes):
                withheld.append(Withheld(driver, name, device_id, other, place.board, lasts=True))
                continue
            found.append(
                Offer(
                    driver,
                    name,
                    resource,
                    device_id,
                    place,
                    attributes,
                    ailment,
                    why,
                    about.memory,
                    about.capacities,
                    _vendor_taints(code),
                    next((one.words for one in on_board or () if not one.offer and one.place.overlaps(place)), ""),
                )
            )
    found = _in_shares(found) if by_capacity else found
    return _held_back(_distinct(found), overlooked), withheld


def _in_shares(found: Iterable[Offer]) -> list[Offer]:
    """Return the replicas of each device as one offer. Replicas with an ailment are left out, unless all have one."""
    alike: dict[tuple[str, str], list[Offer]] = {}
    for one in found:
        alike.setdefault((one.resource, unshared(one.device_id)), []).append(one)
    offers = []
    for replicas in alike.values():
        well = [one for one in replicas if one.ailment is None] or replicas
        ids = tuple(one.device_id for one in well) if well[0].attributes.get("shared") else ()
        offers.append(replace(well[0], shares=ids))
    return offers


def _held_back(offers: list[Offer], why: str) -> list[Offer]:
    if not why:
        return offers
    return [one if one.ailment is not None else replace(one, ailment=Ailment.BY_NAME, reason=why) for one in offers]


def by_driver(
    found: Iterable[Offer], withheld: Iterable[Withheld], known: Iterable[str]
) -> tuple[dict[str, dict[str, Offer]], dict[str, dict[str, str]]]:
    """Return each driver's offers, and why it doesn't offer other devices, by name. ``known`` drivers may have none now."""
    offers: dict[str, dict[str, Offer]] = {driver: {} for driver in known}
    for one in found:
        offers.setdefault(one.driver, {})[one.name] = one
    why_not: dict[str, dict[str, str]] = {}
    for not_now in withheld:
        if not_now.name not in offers.setdefault(not_now.driver, {}):  # Some of its shares may be offered.
            why_not.setdefault(not_now.driver, {})[not_now.name] = not_now.reason
    return offers, why_not


def _without_owner(entry: Entry) -> Entry:
    """Return an entry without the states that only concern the device plugin API's list."""
    if entry.beneath is None:
        return entry
    beneath = _without_owner(entry.beneath)
    return beneath if entry.state in AWAY else replace(entry, beneath=beneath)


def _why_not(entry: Entry, place: boards.Place, holds: Sequence[boards.Hold] | None) -> str:
    """Return why a device isn't offered; '' if it is."""
    for layer in entry.layers:
        if layer.state not in {State.PRESENT, State.UNHEALTHY, State.CORDONED}:
            return layer.reason or layer.state.value
    if holds is None:
        return "the kubelet's records can't be read, so a pod may hold it by the device plugin API"
    hindrance = boards.may_give(entry.device.id, place, holds, shares=True)
    return "" if hindrance is None else hindrance.words


def _ailment(entry: Entry) -> tuple[Ailment | None, str, str]:
    """Return a device's ailment, the reason, and the vendor's code for it."""
    *_, own = entry.layers  # The entry beneath a cordon.
    if own.device.health is Health.UNHEALTHY:
        return Ailment.UNHEALTHY, entry.reason, own.code
    if entry.state is State.CORDONED:
        return Ailment.CORDONED, entry.reason, ""
    return None, "", ""


def _vendor_taints(code: str) -> Mapping[str, str]:
    """Return the taint of NVIDIA's driver for a code (healthEventToTaint in cmd/gpu-kubelet-plugin/device_health.go)."""
    key, _, value = code.partition("=")
    return {f"{NVIDIA}/{key}": value} if code else {}


def _name(driver: str, entry: Entry, about: Facts, *, numbered: bool) -> str:
    """Return a device's name, as the vendor's driver names it. A replica's name has its number, if ``numbered``."""
    base = unshared(entry.device.id)
    replica = entry.device.id[len(base) :].lstrip(":")
    name = _amd(about) if driver == AMD else ""
    if not name and about.index:
        gpu, _, part = about.index.partition(":")
        number = gpu if about.minor is None else str(about.minor)
        # Several compute instances may share a slot; then their place is unique.
        part = about.slot if about.slot and "c." not in about.profile else part
        name = f"gpu-{number}" + (f"-mig-{_plain(about.profile.replace('.', ''))}-{part}" if part else "")
    name = _plain(name) or _plain(base)
    return _fitting(f"{name}-shared-{replica}" if replica and numbered else name)


def _amd(about: Facts) -> str:
    """Return AMD's name: ``gpu-<card>-<render node>``."""
    nodes = {match[1]: match[2] for node in about.nodes if (match := _DRI.fullmatch(node))}
    return f"gpu-{nodes['card']}-{nodes['renderD']}" if {"card", "renderD"} <= nodes.keys() else ""


def _plain(text: str) -> str:
    return _NOT_IN_A_NAME.sub("-", text.lower()).strip("-")


def _fitting(name: str) -> str:
    """Shorten a name that is too long, and keep it unique."""
    return name if len(name) <= _NAME_CHARS else f"{name[: _NAME_CHARS - 9].rstrip('-')}-{_digest(name)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _distinct(found: Iterable[Offer]) -> list[Offer]:
    """Make equal names of one driver unique, independent of the order of the devices."""
    found = list(found)
    times = Counter((one.driver, one.name) for one in found)
    return [
        one
        if times[one.driver, one.name] == 1
        else replace(one, name=f"{one.name[: _NAME_CHARS - 9]}-{_digest(f'{one.resource} {one.device_id}')}")
        for one in found
    ]


def _attributes(driver: str, resource: str, entry: Entry, about: Facts, root: str) -> dict[str, Value]:
    """Return the attributes by which claims select. Unknown ones are left out, because CEL can ask if an attribute is there.

    Those of the vendors' drivers come first, because the number of attributes is limited.
    """
    base = unshared(entry.device.id)
    numa = entry.device.numa_nodes
    found: dict[str, Value | None] = {
        "type": _type(driver, about),
        "uuid": base,
        "productName": about.product,
        "parentUUID": about.parent,
        "driverVersion": version(about.driver),
        _PCIE_ROOT: root,
        _NUMA: numa[0] if len(numa) == 1 else None,
        _PCI_BUS: about.pci,
    }
    if driver == AMD:
        found |= {"partitionProfile": about.profile, "driverVersionFull": about.driver, "numaNode": found[_NUMA]}
    else:
        found["profile"] = about.profile
    found |= {name: version(value) if name in _VERSIONS else value for name, value in about.traits.items()}
    found |= {"resource": resource, "shared": base != entry.device.id or None}
    gpu, _, part = about.index.partition(":")
    if gpu.isdecimal():
        found["parentIndex" if part else "index"] = int(gpu)
    if about.minor is not None:
        found["parentMinor" if part else "minor"] = about.minor
    if driver != AMD:  # The name that NVIDIA's driver used up to 25.8.
        found["pcieBusID"] = about.pci
    return {
        name: value
        for name, value in found.items()
        if value not in {None, ""} and not (isinstance(value, str) and len(value.encode()) > _VALUE_BYTES)
    }


def _type(driver: str, about: Facts) -> str:
    if driver == AMD:
        return "amdgpu-partition" if about.parent else "amdgpu"
    if not about.index:
        return "file"
    return "mig" if about.parent else "gpu"


def version(text: str) -> Version | None:
    """Return a driver's version as a semantic one, as NVIDIA's driver does (``535.54.03`` is 535.54.3); None if it isn't a version."""
    match = _VERSION.match(text)
    if match is None:
        return None
    return Version(".".join(part or "0" for part in match.groups()))
