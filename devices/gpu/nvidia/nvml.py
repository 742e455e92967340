"""NVML, NVIDIA's library, as plain values: what its calls return and why they fail, and nothing of ctypes.

Every call can block for as long as the driver likes, so none belongs on an event loop. What a driver doesn't support is
None; strings that come from it are checked and bounded, because they end up in device IDs, paths and logs. Facts about
calls are NVML's API reference (nvml.h).
"""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import re
from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

import pynvml
from msgspec import Struct

from devices.gpu.model import Way
from devices.gpu.nvidia.health import Event, Vitals
from devices.gpu.nvidia.vendor import ADDRESSING_MODES, ARCHITECTURES, BRANDS, SUFFIXES, profile
from devices.model import LibraryFault

_NONE: Final = 0xFFFFFFFF  # What an event says where it is no instance's.
_MOST_GPUS: Final = 256
_MOST_INSTANCES: Final = 64
_MOST_SLICES: Final = 16
# It becomes a name in paths: a slash is in a MIG device's of drivers before 470 alone, MIG-GPU-<UUID>/<GPU instance>/<compute instance>.
_UUID: Final = re.compile(r"(GPU|MIG)-(?!.*\.\.)[0-9A-Za-z.-]{1,80}(/[0-9]{1,3}/[0-9]{1,3})?")
_WAYS: Final = {0: Way.PIX, 10: Way.PIX, 20: Way.PXB, 30: Way.PHB, 40: Way.NODE, 50: Way.SYS}
"""By nvmlGpuTopologyLevel_t; two GPUs on one board (0) have a switch in common."""


class NvmlError(Exception):
    """A call failed, in a way that says nothing of the driver as a whole."""

    cause = LibraryFault.FAILED


class SessionError(NvmlError):
    """NVML can't be used any more, or not yet, if ``open`` or ``count`` raises it; elsewhere it is that GPU's trouble alone."""


class NoLibraryError(SessionError):
    """There is no library, or it can't be loaded."""

    cause = LibraryFault.NO_LIBRARY


class NotLoadedError(SessionError):
    """The driver isn't loaded."""


class MismatchError(SessionError):
    """The library is of another release than the loaded driver: one of them was upgraded."""

    cause = LibraryFault.MISMATCH


class LostError(NvmlError):
    """The GPU doesn't answer any more, and won't until it is reset."""


class UnsupportedError(NvmlError):
    """The driver or the GPU doesn't know this question."""


class DeniedError(NvmlError):
    """This process may not ask this: what the answer would be is unknown."""

    cause = LibraryFault.DENIED


class GoneError(NvmlError):
    """There is no such thing, or no longer: a handle of it is refused."""


class Board(Struct, frozen=True):
    """What doesn't change of a physical GPU. ``pci`` is as in sysfs, ``0000:07:00.0``.

    ``memory`` is in bytes, 0 where the driver doesn't say; ``traits`` are those of ``devices.gpu.model.GPU``.
    """

    uuid: str
    minor: int
    pci: str
    product: str
    memory: int = 0
    traits: tuple[tuple[str, str], ...] = ()


class MigDevice(Struct, frozen=True):
    """A MIG device: its place on its GPU, its GPU and compute instance, its profile (``1c.2g.20gb``, ``1g.10gb+me``).

    ``memory`` is in bytes. ``slot`` is the number of the profile and its first slice of memory (``19-4``), '' where that isn't known.
    ``capacities`` count its multiprocessors, its engines, and the memory slices of its GPU that it covers.
    """

    uuid: str
    place: int
    gpu_instance: int
    compute_instance: int
    profile: str
    memory: int = 0
    slot: str = ""
    capacities: tuple[tuple[str, int], ...] = ()


class Nvml:
    """The library, from ``open`` to ``close``; GPUs are known by their UUIDs.

    At most one thread may call it, and one more ``wait``.

    Args:
        library: its name, or the path of one.
    """

    def __init__(self, library: str) -> None:
        self._library = library
        self._handles: dict[str, Any] = {}
        self._uuids: dict[int, str] = {}
        self._bus_ids: dict[str, str] = {}
        self._events: Any = None
        self._open = False

    def open(self) -> None:
        """Load the library and begin.

        Raises:
            NoLibraryError: there is no library.
            NotLoadedError: there is no driver.
            MismatchError: driver and library don't fit.
            NvmlError: it fails otherwise.
        """
        if pynvml.nvmlLib is None or pynvml.nvmlLib._name != self._library:  # noqa: SLF001 (pynvml has no other way in)
            try:
                library = ctypes.CDLL(self._library)
            except OSError as error:
                raise NoLibraryError(f"{self._library} can't be loaded: {_said(str(error))}") from error
            pynvml.nvmlLib = library
            pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001
        _ask("nvmlInit")
        self._open = True

    def close(self) -> None:
        """Let go of everything: the events, all GPUs, the driver. Never raises."""
        if self._events is not None:
            with contextlib.suppress(NvmlError):
                _ask("nvmlEventSetFree", self._events)
        self._events = None
        self._handles.clear()
        self._uuids.clear()
        if self._open:
            with contextlib.suppress(NvmlError):
                _ask("nvmlShutdown")
        self._open = False

    def unload(self) -> None:
        """Let go of the library, too, once closed, so that ``open`` finds the one that is installed by then."""
        library, pynvml.nvmlLib = pynvml.nvmlLib, None
        pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001
        if library is not None:
            _ctypes.dlclose(library._handle)  # noqa: SLF001 (ctypes has no other way out)

    def driver(self) -> str:
        """The driver's version; '' where it isn't told."""
        return _said(_extra("nvmlSystemGetDriverVersion") or "")

    def count(self) -> int:
        """Say how many GPUs there are; their indexes are those below."""
        return min(int(_ask("nvmlDeviceGetCount")), _MOST_GPUS)

    def at(self, index: int) -> str:
        """Find a GPU by its index, and return its UUID."""
        return self._found(_ask("nvmlDeviceGetHandleByIndex", index))

    def at_address(self, pci: str) -> str:
        """Find a GPU by its address, as ``Board`` had it, and touch no other; return its UUID."""
        asked = self._bus_ids.get(pci, pci).encode()
        return self._found(_ask("nvmlDeviceGetHandleByPciBusId", asked))

    def board(self, uuid: str) -> Board:
        """Say what doesn't change of a GPU."""
        handle = self._handles[uuid]
        minor = _ask("nvmlDeviceGetMinorNumber", handle)
        info = _ask("nvmlDeviceGetPciInfo", handle)
        self._bus_ids[_address(info)] = str(info.busId)
        memory = _extra("nvmlDeviceGetMemoryInfo", handle)
        total = 0 if memory is None else memory.total
        return Board(uuid, minor, _address(info), self.product(uuid), total, _traits(handle))

    def product(self, uuid: str) -> str:
        """Return what a GPU is called; '' if the driver doesn't tell it."""
        return _said(_extra("nvmlDeviceGetName", self._handles[uuid]) or "")

    def vitals(self, uuid: str) -> Vitals:
        """Say how a GPU is."""
        handle = self._handles[uuid]
        rows = _optional("nvmlDeviceGetRemappedRows", handle)
        pending = None if rows is None else rows[2]
        if rows is None:  # before Ampere: pages instead of rows
            pending = _optional("nvmlDeviceGetRetiredPagesPendingStatus", handle)
        return Vitals(
            mig=_is_split(handle),
            remap_pending=None if pending is None else bool(pending),
            remap_failed=None if rows is None else bool(rows[3]),
            action=_field(handle, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),
            clique=_clique(handle),
        )

    def instances(self, uuid: str, total: int) -> tuple[MigDevice, ...]:
        """Return the MIG devices of a GPU. One that goes meanwhile is left out.

        Args:
            uuid: the GPU's.
            total: its memory in bytes, by which profiles are named; 0: not known, so NVML is asked.

        Raises:
            NvmlError: there may be others than those that can be asked.
        """
        handle = self._handles[uuid]
        most = _ask("nvmlDeviceGetMaxMigDeviceCount", handle)
        found = []
        for place in range(min(most, _MOST_INSTANCES)):
            if (one := _mig_handle(handle, place)) is None:
                continue
            try:
                found.append(_instance(handle, one, place, total or _ask("nvmlDeviceGetMemoryInfo", handle).total))
            except GoneError:
                if _mig_handle(handle, place) is not None:
                    raise
        return tuple(found)

    def memory_of(self, uuid: str, place: int, instance: str) -> tuple[float | None, float | None]:
        """Say how much of a MIG device's memory is used and free, in MiB; ``place`` is its place on its GPU.

        Raises:
            GoneError: it is another one by now.
        """
        handle = _ask("nvmlDeviceGetMigDeviceHandleByIndex", self._handles[uuid], place)
        if _uuid(_ask("nvmlDeviceGetUUID", handle)) != instance:
            raise GoneError("nvmlDeviceGetMigDeviceHandleByIndex: another MIG device has its place")
        return _memory(handle)

    def gauges(self, uuid: str) -> tuple[float | None, ...]:
        """Say how busy a GPU is (percent), its used and free memory (MiB), how hot it is (Celsius), and what it draws (watts)."""
        handle = self._handles[uuid]
        rates = _extra("nvmlDeviceGetUtilizationRates", handle)
        celsius = _extra("nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU)
        milliwatts = _extra("nvmlDeviceGetPowerUsage", handle)
        watts = None if milliwatts is None else milliwatts / 1000
        busy, celsius = None if rates is None else float(rates.gpu), None if celsius is None else float(celsius)
        return busy, *_memory(handle), celsius, watts

    def lanes(self, uuid: str) -> Mapping[str, int]:
        """Count a GPU's NVLinks that are up, by the address at their other end; '' is a switch."""
        handle = self._handles[uuid]
        lanes: dict[str, int] = {}
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            try:
                if not _ask("nvmlDeviceGetNvLinkState", handle, link):
                    continue
                to = _extra("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
                switched = to == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
                end = "" if switched else _address(_ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link))
            except NvmlError:  # no such link, or none at all
                continue
            lanes[end] = lanes.get(end, 0) + 1
        return lanes

    def way(self, uuid: str, other: str) -> Way | None:
        """Say how two GPUs reach each other over PCIe; None where the driver doesn't."""
        a, b = self._handles[uuid], self._handles[other]
        level = _extra("nvmlDeviceGetTopologyCommonAncestor", a, b)
        return None if level is None else _WAYS.get(level)

    def listen(self, uuid: str) -> None:
        """Have ``wait`` tell of a GPU's errors: of Xids, and of double bit ECC errors.

        Raises:
            UnsupportedError: it has no such events.
        """
        if self._events is None:
            self._events = _ask("nvmlEventSetCreate")
        handle = self._handles[uuid]
        kinds = _ask("nvmlDeviceGetSupportedEventTypes", handle)
        kinds &= pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError
        if not kinds & pynvml.nvmlEventTypeXidCriticalError:
            raise UnsupportedError("nvmlDeviceGetSupportedEventTypes: no Xids")
        _ask("nvmlDeviceRegisterEvents", handle, kinds, self._events)

    def wait(self, milliseconds: int) -> Event | None:
        """Wait for an error of a GPU that is listened to; None: there was none, or nothing that counts as one.

        Raises:
            NvmlError: NVML doesn't wait any more, or doesn't say whose error it is.
        """
        try:
            data = _ask("nvmlEventSetWait", self._events, milliseconds)
        except _TimeoutError:
            return None
        uuid = self._uuids.get(_number(data.device))
        if uuid is None:
            uuid = _uuid(_ask("nvmlDeviceGetUUID", data.device))
        if data.eventType == pynvml.nvmlEventTypeXidCriticalError:
            xid = data.eventData
        elif data.eventType == pynvml.nvmlEventTypeDoubleBitEccError:
            xid = None
        else:
            return None
        gpu, compute = (None if one == _NONE else one for one in (data.gpuInstanceId, data.computeInstanceId))
        return Event(uuid, xid, gpu, compute)

    def _found(self, handle: Any) -> str:
        uuid = _uuid(_ask("nvmlDeviceGetUUID", handle))
        self._handles[uuid] = handle
        self._uuids[_number(handle)] = uuid
        return uuid


class _TimeoutError(NvmlError):
    """Nothing happened in time."""


def _clique(handle: Any) -> str:
    """Return the cluster and clique of GPUs that a fabric connects a GPU to, as GPU Feature Discovery writes them; '' for none."""
    info = pynvml.c_nvmlGpuFabricInfo_t()
    cluster = (
        b"" if _extra("nvmlDeviceGetGpuFabricInfo", handle, ctypes.byref(info)) is None else bytes(info.clusterUuid)
    )
    joined = info.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED and info.status == pynvml.NVML_SUCCESS
    return f"{UUID(bytes=cluster)}.{info.cliqueId}" if joined and any(cluster) else ""


def _is_split(handle: Any) -> bool | None:
    """Return whether a GPU is in MIG mode; None: it has no such mode.

    Raises:
        NvmlError: that can't be told, so it may be partitioned.
    """
    try:
        mode = _ask("nvmlDeviceGetMigMode", handle)
    except UnsupportedError:
        if _extra("nvmlDeviceGetMaxMigDeviceCount", handle):  # 0 without MIG mode (nvml.h)
            raise
        return None
    return bool(mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE)


def _mig_handle(parent: Any, place: int) -> Any:
    """Return the handle of the MIG device that has a place on its GPU; None if the place is empty."""
    try:
        return _ask("nvmlDeviceGetMigDeviceHandleByIndex", parent, place)
    except GoneError:
        return None


def _instance(parent: Any, handle: Any, place: int, total: int) -> MigDevice:
    uuid = _uuid(_ask("nvmlDeviceGetUUID", handle))
    instance = _ask("nvmlDeviceGetGpuInstanceId", handle)
    compute = _ask("nvmlDeviceGetComputeInstanceId", handle)
    has = _ask("nvmlDeviceGetAttributes", handle)
    name = profile(has.computeInstanceSliceCount, has.gpuInstanceSliceCount, has.memorySizeMB, total)
    suffix, slot, slices = _kind(parent, instance)
    counts = (*_counts(has), *((f"memorySlice{number}", 1) for number in slices))
    return MigDevice(uuid, place, instance, compute, name + suffix, has.memorySizeMB * 2**20, slot, counts)


def _counts(has: Any) -> tuple[tuple[str, int], ...]:
    """Return what a MIG device has, in the words of NVIDIA's DRA driver (CommonCapacitiesMig in mig.go)."""
    return (
        ("multiprocessors", has.multiprocessorCount),
        ("copyEngines", has.sharedCopyEngineCount),
        ("decoders", has.sharedDecoderCount),
        ("encoders", has.sharedEncoderCount),
        ("jpegEngines", has.sharedJpegCount),
        ("ofaEngines", has.sharedOfaCount),
    )


def _kind(parent: Any, instance: int) -> tuple[str, str, range]:
    """What else a profile's name says (that it has the media engines, or none), a GPU instance's slot, and its memory slices."""
    slot, slices = "", range(0)
    with contextlib.suppress(UnsupportedError):
        has = _ask("nvmlGpuInstanceGetInfo", _ask("nvmlDeviceGetGpuInstanceById", parent, instance))
        slot = f"{has.profileId}-{has.placement.start}"
        slices = range(has.placement.start, has.placement.start + min(has.placement.size, _MOST_SLICES))
        for number, suffix in SUFFIXES.items():
            with contextlib.suppress(UnsupportedError, GoneError):
                # In its first form, which every driver with MIG has, as NVIDIA's plugin asks it.
                if _ask("nvmlDeviceGetGpuInstanceProfileInfo", parent, number, 1).id == has.profileId:
                    return suffix, slot, slices
    return "", slot, slices


def _memory(handle: Any) -> tuple[float | None, float | None]:
    found = _extra("nvmlDeviceGetMemoryInfo", handle)
    return (None, None) if found is None else (found.used / 2**20, found.free / 2**20)


def _traits(handle: Any) -> tuple[tuple[str, str], ...]:
    """Say what kind of GPU it is, in the words of NVIDIA's DRA driver (go-nvlib); what the driver doesn't say is left out."""
    found = {
        "architecture": ARCHITECTURES.get(_extra("nvmlDeviceGetArchitecture", handle), ""),
        "brand": BRANDS.get(_extra("nvmlDeviceGetBrand", handle), ""),
    }
    if (capability := _extra("nvmlDeviceGetCudaComputeCapability", handle)) is not None:
        found["cudaComputeCapability"] = ".".join(map(str, capability))
    if (cuda := _extra("nvmlSystemGetCudaDriverVersion")) is not None:
        found["cudaDriverVersion"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
    if (mode := _extra("nvmlDeviceGetAddressingMode", handle)) in range(len(ADDRESSING_MODES)):
        found["addressingMode"] = ADDRESSING_MODES[mode]
    return tuple((name, value) for name, value in found.items() if value)


def _field(handle: Any, field: int) -> int | None:
    values = _optional("nvmlDeviceGetFieldValues", handle, [field])
    if values is None or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    return int(values[0].value.uiVal)


def _address(info: Any) -> str:
    return f"{info.domain:04x}:{info.bus & 0xFF:02x}:{info.device & 0x1F:02x}.0"


def _number(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _uuid(text: str) -> str:
    if not _UUID.fullmatch(text):
        raise NvmlError(f"nvmlDeviceGetUUID returned no UUID: {text[:100]!r}")
    return text


def _said(text: str) -> str:
    """A string of the driver's, fit for people."""
    return "".join(one if one.isprintable() else "?" for one in text[:200])


def _extra(name: str, *args: Any) -> Any:
    """Ask what only describes a GPU or the driver; None if there is no answer, whatever the reason."""
    try:
        return _ask(name, *args)
    except NvmlError:
        return None


def _optional(name: str, *args: Any) -> Any:
    """Ask what not every driver and GPU knows, or tells everybody; None if it doesn't."""
    try:
        return _ask(name, *args)
    except (UnsupportedError, DeniedError):
        return None


def _ask(name: str, *args: Any) -> Any:
    """Call a function of NVML's, and say in our words why it fails."""
    try:
        return getattr(pynvml, name)(*args)
    except UnicodeDecodeError as error:
        raise NvmlError(f"{name}: a string that isn't text") from error
    except pynvml.NVMLError as error:
        kind = _ERRORS.get(error.value, NvmlError)
        raise kind(f"{name}: {_said(str(error)).rstrip('.')} (NVML error {error.value})") from error


_ERRORS: Final[Mapping[int, type[NvmlError]]] = {
    pynvml.NVML_ERROR_UNINITIALIZED: SessionError,
    pynvml.NVML_ERROR_INVALID_ARGUMENT: GoneError,
    pynvml.NVML_ERROR_NOT_SUPPORTED: UnsupportedError,
    pynvml.NVML_ERROR_NO_PERMISSION: DeniedError,
    pynvml.NVML_ERROR_NOT_FOUND: GoneError,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: UnsupportedError,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: NotLoadedError,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: NoLibraryError,
    pynvml.NVML_ERROR_TIMEOUT: _TimeoutError,
    pynvml.NVML_ERROR_GPU_IS_LOST: LostError,
    pynvml.NVML_ERROR_RESET_REQUIRED: LostError,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: MismatchError,
}
