"""NVML, NVIDIA's library, with plain values instead of ctypes: the results of its calls, and why they fail.

Every call may block for as long as the driver takes, so call none on an event loop. What a driver doesn't support is None. Its
strings are checked and bounded, because they end up in device IDs, paths and logs. The source for calls is NVML's API reference
(nvml.h).
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
from msgspec.structs import replace

from devices.gpu.model import GPU, Way
from devices.gpu.nvidia.health import Event, Looked
from devices.gpu.nvidia.vendor import ADDRESSING_MODES, ARCHITECTURES, BRANDS, MIG_PROFILE_SUFFIXES, profile_name
from devices.model import LibraryFault

_RESOURCE: Final = "nvidia.com/gpu"
_NO_INSTANCE: Final = 0xFFFFFFFF  # In an event: no instance.
_MOST_GPUS: Final = 256
_MOST_INSTANCES: Final = 64
_MOST_SLICES: Final = 16
# It becomes a name in paths. Only drivers before 470 have a slash in it: MIG-GPU-<UUID>/<GPU instance>/<compute instance>.
_UUID: Final = re.compile(r"(GPU|MIG)-(?!.*\.\.)[0-9A-Za-z.-]{1,80}(/[0-9]{1,3}/[0-9]{1,3})?")
_WAYS: Final = {0: Way.PIX, 10: Way.PIX, 20: Way.PXB, 30: Way.PHB, 40: Way.NODE, 50: Way.SYS}
"""By nvmlGpuTopologyLevel_t. Two GPUs on one board (0) share a switch."""


class NvmlError(Exception):
    """A call failed. The driver as a whole may work."""

    cause = LibraryFault.FAILED


class SessionError(NvmlError):
    """NVML can't be used now, if ``open`` or ``count`` raises it. From other calls it is the trouble of one GPU."""


class NoLibraryError(SessionError):
    """There is no library, or it can't be loaded."""

    cause = LibraryFault.NO_LIBRARY


class NotLoadedError(SessionError):
    """The driver isn't loaded."""


class MismatchError(SessionError):
    """The library and the loaded driver are of different releases: one of them was upgraded."""

    cause = LibraryFault.MISMATCH


class LostError(NvmlError):
    """The GPU doesn't answer any more, and won't until it is reset."""


class UnsupportedError(NvmlError):
    """The driver or the GPU doesn't support this call."""


class DeniedError(NvmlError):
    """This process has no permission for this call."""

    cause = LibraryFault.DENIED


class GoneError(NvmlError):
    """The GPU doesn't exist, or no longer: NVML refuses its handle."""


class Nvml:
    """The library, from ``open`` to ``close``. GPUs are named by their UUIDs.

    Only one thread may call it, and another one ``wait``.

    Args:
        library: its name or path.
    """

    def __init__(self, library: str) -> None:
        self._library = library
        self._handles: dict[str, Any] = {}
        self._uuids: dict[int, str] = {}
        self._bus_ids: dict[str, str] = {}
        self._events: Any = None
        self._open = False

    def open(self) -> None:
        """Load the library and initialise it.

        Raises:
            NoLibraryError: there is no library.
            NotLoadedError: there is no driver.
            MismatchError: driver and library are of different releases.
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
        """Free everything: the events, all GPUs, the driver. Never raises."""
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
        """Unload the closed library, so that ``open`` loads the one that is installed then."""
        library, pynvml.nvmlLib = pynvml.nvmlLib, None
        pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001
        if library is not None:
            _ctypes.dlclose(library._handle)  # noqa: SLF001 (ctypes has no other way out)

    def driver(self) -> str:
        """Return the driver's version; '' if unknown."""
        return _said(_extra("nvmlSystemGetDriverVersion") or "")

    def count(self) -> int:
        """Return the number of GPUs. Their indexes are the numbers below it."""
        return min(int(_ask("nvmlDeviceGetCount")), _MOST_GPUS)

    def at(self, index: int) -> str:
        """Find a GPU by its index, and return its UUID."""
        return self._found(_ask("nvmlDeviceGetHandleByIndex", index))

    def at_address(self, pci: str) -> str:
        """Find a GPU by its address, as in ``Board``, without using another GPU; return its UUID."""
        asked = self._bus_ids.get(pci, pci).encode()
        return self._found(_ask("nvmlDeviceGetHandleByPciBusId", asked))

    def board(self, uuid: str) -> GPU:
        """Return the fixed properties of a GPU. Its address is as in sysfs: ``0000:07:00.0``."""
        handle = self._handles[uuid]
        minor = _ask("nvmlDeviceGetMinorNumber", handle)
        info = _ask("nvmlDeviceGetPciInfo", handle)
        self._bus_ids[_address(info)] = str(info.busId)
        memory = _extra("nvmlDeviceGetMemoryInfo", handle)
        return GPU(
            uuid,
            index=0,
            minor=minor,
            resource=_RESOURCE,
            product=self.product(uuid),
            pci=_address(info),
            memory=0 if memory is None else memory.total,
            traits=_traits(handle),
        )

    def product(self, uuid: str) -> str:
        """Return the product name of a GPU; '' if unknown."""
        return _said(_extra("nvmlDeviceGetName", self._handles[uuid]) or "")

    def look(self, uuid: str, at: float) -> Looked:
        """Return the state of a GPU, without its partitions; ``at`` is now."""
        handle = self._handles[uuid]
        rows = _optional("nvmlDeviceGetRemappedRows", handle)
        pending = None if rows is None else rows[2]
        if rows is None:  # Before Ampere: pages instead of rows.
            pending = _optional("nvmlDeviceGetRetiredPagesPendingStatus", handle)
        return Looked(
            at,
            remap_pending=None if pending is None else bool(pending),
            remap_failed=None if rows is None else bool(rows[3]),
            action=_field(handle, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),
        )

    def clique(self, uuid: str) -> str:
        """Return the cluster and clique that a fabric connects a GPU to, as GPU Feature Discovery writes them; '' for none."""
        info = pynvml.c_nvmlGpuFabricInfo_t()
        found = _extra("nvmlDeviceGetGpuFabricInfo", self._handles[uuid], ctypes.byref(info))
        cluster = b"" if found is None else bytes(info.clusterUuid)
        joined = info.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED and info.status == pynvml.NVML_SUCCESS
        return f"{UUID(bytes=cluster)}.{info.cliqueId}" if joined and any(cluster) else ""

    def mig(self, uuid: str) -> bool | None:
        """Return True if a GPU is in MIG mode; None: it has no such mode.

        Raises:
            NvmlError: it is unknown, so the GPU may be partitioned.
        """
        handle = self._handles[uuid]
        try:
            mode = _ask("nvmlDeviceGetMigMode", handle)
        except UnsupportedError:
            if _extra("nvmlDeviceGetMaxMigDeviceCount", handle):  # 0 without MIG mode (nvml.h)
                raise
            return None
        return bool(mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE)

    def instances(self, gpu: GPU) -> Mapping[tuple[int, int], GPU]:
        """Return the MIG devices of a GPU, by GPU and compute instance, without those that vanish during the call.

        Raises:
            NvmlError: some may be missing.
        """
        handle = self._handles[gpu.uuid]
        most = _ask("nvmlDeviceGetMaxMigDeviceCount", handle)
        found = {}
        for place in range(min(most, _MOST_INSTANCES)):
            if (one := _mig_handle(handle, place)) is None:
                continue
            try:
                instance = _ask("nvmlDeviceGetGpuInstanceId", one)
                compute = _ask("nvmlDeviceGetComputeInstanceId", one)
                found[instance, compute] = _instance(gpu, handle, one, place, instance)
            except GoneError:
                if _mig_handle(handle, place) is not None:
                    raise
        return found

    def memory_of(self, uuid: str, place: int, instance: str) -> tuple[float | None, float | None]:
        """Return the used and free memory of a MIG device, in MiB; ``place`` is its place on its GPU.

        Raises:
            GoneError: another device has that place now.
        """
        handle = _ask("nvmlDeviceGetMigDeviceHandleByIndex", self._handles[uuid], place)
        if _uuid(_ask("nvmlDeviceGetUUID", handle)) != instance:
            raise GoneError("nvmlDeviceGetMigDeviceHandleByIndex: another MIG device has its place")
        return _memory(handle)

    def gauges(self, uuid: str) -> tuple[float | None, ...]:
        """Return load (percent), used and free memory (MiB), temperature (Celsius) and power (watts) of a GPU."""
        handle = self._handles[uuid]
        rates = _extra("nvmlDeviceGetUtilizationRates", handle)
        celsius = _extra("nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU)
        milliwatts = _extra("nvmlDeviceGetPowerUsage", handle)
        watts = None if milliwatts is None else milliwatts / 1000
        busy, celsius = None if rates is None else float(rates.gpu), None if celsius is None else float(celsius)
        return busy, *_memory(handle), celsius, watts

    def lanes(self, uuid: str) -> Mapping[str, int]:
        """Count a GPU's active NVLinks, by the address at their other end; '' is a switch."""
        handle = self._handles[uuid]
        lanes: dict[str, int] = {}
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            try:
                if not _ask("nvmlDeviceGetNvLinkState", handle, link):
                    continue
                to = _extra("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
                switched = to == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
                end = "" if switched else _address(_ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link))
            except NvmlError:  # This link doesn't exist, or none does.
                continue
            lanes[end] = lanes.get(end, 0) + 1
        return lanes

    def way(self, uuid: str, other: str) -> Way | None:
        """Return how two GPUs are connected over PCIe; None if unknown."""
        a, b = self._handles[uuid], self._handles[other]
        level = _extra("nvmlDeviceGetTopologyCommonAncestor", a, b)
        return None if level is None else _WAYS.get(level)

    def listen(self, uuid: str) -> None:
        """Let ``wait`` return a GPU's errors: Xids, and double bit ECC errors.

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
        """Wait for an error of the GPUs that were passed to ``listen``; None: there was none.

        Raises:
            NvmlError: NVML doesn't wait any more, or doesn't name the GPU of the error.
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
        gpu, compute = (None if one == _NO_INSTANCE else one for one in (data.gpuInstanceId, data.computeInstanceId))
        return Event(uuid, xid, gpu, compute)

    def _found(self, handle: Any) -> str:
        uuid = _uuid(_ask("nvmlDeviceGetUUID", handle))
        self._handles[uuid] = handle
        self._uuids[_number(handle)] = uuid
        return uuid


class _TimeoutError(NvmlError):
    """The time limit passed without an event."""


def _mig_handle(parent: Any, place: int) -> Any:
    """Return the handle of the MIG device at a place of its GPU; None if the place is empty."""
    try:
        return _ask("nvmlDeviceGetMigDeviceHandleByIndex", parent, place)
    except GoneError:
        return None


def _instance(gpu: GPU, parent: Any, handle: Any, place: int, instance: int) -> GPU:
    """Return the MIG device at a place of its GPU. Its profile is such as ``1c.2g.20gb`` or ``1g.10gb+me``.

    Its slot is the number of the profile and its first slice of memory: ``19-4``.
    """
    uuid = _uuid(_ask("nvmlDeviceGetUUID", handle))
    has = _ask("nvmlDeviceGetAttributes", handle)
    memory = gpu.memory or _ask("nvmlDeviceGetMemoryInfo", parent).total
    name = profile_name(has.computeInstanceSliceCount, has.gpuInstanceSliceCount, has.memorySizeMB, memory)
    suffix, slot, slices = _kind(parent, instance)
    return replace(
        gpu,
        uuid=uuid,
        parent=gpu.uuid,
        profile=name + suffix,
        memory=has.memorySizeMB * 2**20,
        place=f"{gpu.index}:{place}",
        slot=slot,
        capacities=(*_counts(has), *((f"memorySlice{number}", 1) for number in slices)),
        partitioned=False,
        clique="",
        links=(),
    )


def _counts(has: Any) -> tuple[tuple[str, int], ...]:
    """Return the capacities of a MIG device, with the names of NVIDIA's DRA driver (CommonCapacitiesMig in mig.go)."""
    return (
        ("multiprocessors", has.multiprocessorCount),
        ("copyEngines", has.sharedCopyEngineCount),
        ("decoders", has.sharedDecoderCount),
        ("encoders", has.sharedEncoderCount),
        ("jpegEngines", has.sharedJpegCount),
        ("ofaEngines", has.sharedOfaCount),
    )


def _kind(parent: Any, instance: int) -> tuple[str, str, range]:
    """Return the suffix of a profile's name (with media engines, or without any), the slot of its GPU instance, and its memory slices."""
    slot, slices = "", range(0)
    with contextlib.suppress(UnsupportedError):
        has = _ask("nvmlGpuInstanceGetInfo", _ask("nvmlDeviceGetGpuInstanceById", parent, instance))
        slot = f"{has.profileId}-{has.placement.start}"
        slices = range(has.placement.start, has.placement.start + min(has.placement.size, _MOST_SLICES))
        for number, suffix in MIG_PROFILE_SUFFIXES.items():
            with contextlib.suppress(UnsupportedError, GoneError):
                # In its first version, which every driver with MIG has, as in NVIDIA's plugin.
                if _ask("nvmlDeviceGetGpuInstanceProfileInfo", parent, number, 1).id == has.profileId:
                    return suffix, slot, slices
    return "", slot, slices


def _memory(handle: Any) -> tuple[float | None, float | None]:
    found = _extra("nvmlDeviceGetMemoryInfo", handle)
    return (None, None) if found is None else (found.used / 2**20, found.free / 2**20)


def _traits(handle: Any) -> tuple[tuple[str, str], ...]:
    """Return the properties of a GPU, with the names of NVIDIA's DRA driver (go-nvlib), without unknown ones."""
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
    """Return a driver's string, made printable."""
    text = text[:200]
    return text if text.isprintable() else "".join(one if one.isprintable() else "?" for one in text)


def _extra(name: str, *args: Any) -> Any:
    """Make a call whose result is only for people; return None if it fails for any reason."""
    try:
        return _ask(name, *args)
    except NvmlError:
        return None


def _optional(name: str, *args: Any) -> Any:
    """Make a call; return None if the driver or GPU doesn't support or allow it."""
    try:
        return _ask(name, *args)
    except (UnsupportedError, DeniedError):
        return None


def _ask(name: str, *args: Any) -> Any:
    """Call a function of NVML, and convert its errors."""
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
