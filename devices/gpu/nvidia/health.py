"""The health of GPUs by NVIDIA's driver, and when a GPU is healthy again.

The driver reports errors by number (Xid), and states (a row to be remapped, a wanted recovery). Both are judged here. An
application's error leaves a GPU healthy. Other errors make the GPU, or one partition, unhealthy until some time has passed, or
until there is evidence of a reset that is *newer* than the trouble. Pure: a state, and functions that return the next one.

Sources: NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, as of October 2025), its GPU
memory error management (docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt), and for ignored Xids and their settings
internal/rm/health.go of NVIDIA/k8s-device-plugin 0.17 to 0.20.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from devices.model import Trouble, TroubleKind
from devices.policy import Recovery

QUIET_S: Final = 60.0
"""Seconds from the last RESTART_APP error until the GPU is healthy again. Its application has usually ended by then. A further
error makes the GPU unhealthy again; ``devices.life`` damps the repetition."""
_MOST_CAUSES: Final = 32
"""Most causes that are kept of one GPU or partition, the latest ones."""
_MOST_GONE: Final = 256
"""Most GPUs that are remembered after they vanished, the latest ones."""

CATALOGUE: Final[Mapping[str, Mapping[int, str]]] = {
    "IGNORE": {
        37: "driver firmware error", 38: "driver firmware error", 43: "GPU stopped processing",
        44: "graphics engine fault during context switch", 63: "GPU memory remapping event",
        66: "illegal access by driver", 67: "illegal access by driver", 92: "high single-bit ECC error rate",
        93: "InfoROM wear limit", 106: "SMBPBI test message", 107: "SMBPBI test message", 108: "NVLink remote translation",
        121: "C2C error", 137: "NVLink privilege error", 141: "CUDA fast path error", 152: "DLA SMMU error",
        153: "DLA timeout", 154: "GPU recovery action changed", 157: "resource retirement failure",
        160: "channel retirement event", 161: "channel retirement failure",
    },
    "RESTART_APP": {
        8: "GPU stopped processing", 11: "invalid push buffer stream", 13: "graphics engine exception",
        25: "illegal push buffer stream", 31: "GPU memory page fault", 32: "invalid push buffer stream",
        39: "copy engine exception", 40: "copy engine exception", 41: "copy engine exception",
        60: "video processor exception", 68: "NVDEC0 exception", 69: "graphics engine class error", 70: "CE3 error",
        71: "CE4 error", 72: "CE5 error", 75: "CE6 error", 76: "CE7 error", 77: "CE8 error",
        80: "corrupted data sent to GPU", 82: "NVJPG0 error", 83: "NVDEC1 error", 84: "NVDEC2 error", 85: "CE9 error",
        86: "OFA exception", 88: "NVDEC3 error", 89: "NVDEC4 error", 94: "contained memory error", 96: "NVDEC5 error",
        97: "NVDEC6 error", 98: "NVDEC7 error", 99: "NVJPG1 error", 100: "NVJPG2 error", 101: "NVJPG3 error",
        102: "NVJPG4 error", 103: "NVJPG5 error", 104: "NVJPG6 error", 105: "NVJPG7 error", 126: "CE10 error",
        127: "CE11 error", 128: "CE12 error", 129: "CE13 error", 130: "CE14 error", 131: "CE15 error",
        132: "CE16 error", 133: "CE17 error", 134: "CE18 error", 135: "CE19 error", 139: "OFA1 error",
    },
    "RESET_GPU": {
        46: "GPU stopped processing", 62: "internal micro-controller halt", 64: "GPU memory remapping failure",
        95: "uncontained memory error", 109: "context switch timeout", 110: "security fault", 119: "GSP RPC timeout",
        120: "GSP error", 136: "link training failed", 140: "unrecovered ECC error", 143: "GPU initialization error",
        155: "NVLink software defined error", 156: "resource retirement event", 158: "GPU fatal timeout",
    },
    "RESTART_BM": {79: "GPU has fallen off the bus"},
    "RESTART_VM": {151: "key rotation error"},
    "WORKFLOW_XID_45": {45: "preemptive cleanup after another error"},
    "WORKFLOW_XID_48": {48: "double bit ECC error"},
    "WORKFLOW_NVLINK_ERR": {74: "NVLink error"},
    "WORKFLOW_NVLINK5_ERR": {
        144: "NVLink SAW error", 145: "NVLink RLW error", 146: "NVLink TLW error", 147: "NVLink TREX error",
        148: "NVLink NVLPW_CTRL error", 149: "NVLink NETIR error", 150: "NVLink MSE error",
    },
}  # fmt: skip
"""Xids by the catalogue's column "immediate action", in its words, shortened. Xids without an action there are left out."""

_KINDS: Final[Mapping[str, TroubleKind]] = {
    "IGNORE": TroubleKind.APPLICATION,
    "RESTART_APP": TroubleKind.RESTART_APP,
    "WORKFLOW_XID_45": TroubleKind.RESTART_APP,
    "RESET_GPU": TroubleKind.RESET_REQUIRED,
    "RESTART_BM": TroubleKind.RESET_REQUIRED,
    "RESTART_VM": TroubleKind.RESET_REQUIRED,
    # The catalogue says of both: "A GPU reset or node reboot is needed to clear this error".
    "WORKFLOW_XID_48": TroubleKind.RESET_REQUIRED,
    "WORKFLOW_NVLINK_ERR": TroubleKind.RESET_REQUIRED,
}
_XIDS: Final = {xid: (action, words) for action, rows in CATALOGUE.items() for xid, words in rows.items()}

IGNORED: Final = frozenset({13, 31, 43, 45, 68, 109})
"""The Xids that NVIDIA's plugin attributes to an application, whatever the catalogue says."""

_SEVERITY: Final = (TroubleKind.APPLICATION, TroubleKind.RESTART_APP, TroubleKind.RESET_REQUIRED, TroubleKind.UNKNOWN)
_AFTER_RESET: Final = frozenset({TroubleKind.RESET_REQUIRED, TroubleKind.UNKNOWN})

_ACTIONS: Final[Mapping[int, tuple[str, TroubleKind]]] = {
    1: ("a GPU reset", TroubleKind.RESET_REQUIRED),
    2: ("a reboot of the node", TroubleKind.RESET_REQUIRED),
    # All programs that use other GPUs must end; then the driver reports if more is needed.
    3: ("an end of all peer-to-peer traffic", TroubleKind.RESTART_APP),
    4: ("that nothing new starts on it, and then a reset", TroubleKind.RESET_REQUIRED),
    5: ("a recovery of the IMEX domain", TroubleKind.RESET_REQUIRED),
    6: ("a bus reset", TroubleKind.RESET_REQUIRED),
    7: ("a reboot of the system", TroubleKind.RESET_REQUIRED),
}
"""The recovery action that the driver requests (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, nvml.h); 0 is none."""


class Checks(Struct, frozen=True):
    """Which errors make a GPU unhealthy, by ``DP_DISABLE_HEALTHCHECKS`` and ``DP_ENABLE_HEALTHCHECKS``.

    ``marks`` is True for a disabled Xid, False for an enabled one; 0 stands for all. ``malformed`` are words without a meaning.
    """

    marks: Mapping[int, bool]
    malformed: tuple[str, ...] = ()

    @classmethod
    def of(cls, disabled: str = "", enabled: str = "") -> Checks:
        """Read both variables: lists of numbers separated by commas. ``all`` or ``xids`` anywhere in them ends the list.

        Enabled wins over disabled, and over ignored by default. ``all`` enables everything (getDisabledHealthCheckXids of
        health.go; there a 0 also means all).
        """
        off, odd = _listed(disabled)
        on, strange = _listed(enabled)
        marks = dict.fromkeys(off | IGNORED, True) | dict.fromkeys(on, False)
        return cls(marks, odd + strange)

    @property
    def none(self) -> bool:
        """True if all health checks are disabled."""
        return self.marks.get(0, False)

    def ignores(self, xid: int) -> bool | None:
        """Return True if an Xid is ignored, False if it is enabled by name or with all, None if no setting names it."""
        if self.marks.get(0) is False:
            return False
        return self.marks.get(xid, True if self.none else None)


def _listed(text: str) -> tuple[frozenset[int], tuple[str, ...]]:
    words = [word.strip() for word in text[:65536].lower().split(",")]
    if "all" in words or "xids" in words:
        return frozenset({0}), ()
    numbers = {word for word in words if re.fullmatch("[0-9]{1,20}", word)}
    return frozenset(int(word) for word in numbers), tuple(word[:80] for word in words if word and word not in numbers)


def judged(xid: int, checks: Checks) -> Trouble:
    """Return the trouble of an Xid. If the Xid is ignored, it is an application's; if it is enabled by name, it never is."""
    action, words = _XIDS.get(xid, ("", ""))
    kind = _KINDS.get(action, TroubleKind.UNKNOWN)
    ignored = checks.ignores(xid)
    if ignored:
        kind = TroubleKind.APPLICATION
    elif ignored is False and kind is TroubleKind.APPLICATION:
        kind = TroubleKind.RESTART_APP
    known = f"{words}; NVIDIA's catalogue: {action}" if words else "NVIDIA's catalogue names no cure"
    return Trouble(f"Xid {xid} ({known})", kind, f"xid={xid}")


class Event(Struct, frozen=True):
    """An error that the driver reported for the physical GPU ``uuid``; ``xid`` None is a double bit ECC error.

    ``gpu_instance`` and ``compute_instance`` are the partition (None: unknown).
    """

    uuid: str
    xid: int | None
    gpu_instance: int | None = None
    compute_instance: int | None = None


class Looked(Struct, frozen=True):
    """The result of a look at one physical GPU, begun at ``at`` (monotonic seconds).

    ``failed`` is why the look failed; then the other fields are unused. ``lost``: the GPU needs a reset to answer again.
    ``partitions`` are UUIDs by GPU and compute instance. ``remap_pending``: the next reset remaps a row of memory.
    ``remap_failed``: a remap failed. ``action``: the recovery that the driver requests (a value of
    nvmlDeviceGpuRecoveryAction_t). None: not reported.
    """

    at: float
    failed: Trouble | None = None
    lost: bool = False
    partitions: Mapping[tuple[int, int], str] = field(default_factory=dict)
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    action: int | None = None


class Ill(Struct, frozen=True):
    """A trouble, known since ``at`` (monotonic seconds), with its Xid (None: none)."""

    trouble: Trouble
    at: float
    xid: int | None = None


class NodeHealth(Struct, frozen=True):
    """The troubles of a node: ``ills`` by UUID (of a GPU or a partition) and cause, and the last look at each GPU.

    ``recovered`` are UUIDs that were reset since their last trouble.
    """

    ills: Mapping[str, Mapping[str, Ill]] = field(default_factory=dict)
    looks: Mapping[str, Looked] = field(default_factory=dict)
    recovered: frozenset[str] = frozenset()

    def trouble(self, *uuids: str) -> Trouble | None:
        """Return the worst trouble of these UUIDs, such as a partition and its GPU; the latest of equally bad ones."""
        ills = [ill for uuid in uuids for ill in self.ills.get(uuid, {}).values()]
        worst = max(ills, key=lambda ill: (_SEVERITY.index(ill.trouble.kind), ill.at), default=None)
        return None if worst is None else worst.trouble


def event(health: NodeHealth, happened: Event, checks: Checks, now: float) -> NodeHealth:
    """Add an error: to the partition if the driver names a known one, else to the whole GPU.

    An Xid of a GPU instance affects all its compute instances. An application's error changes nothing.
    """
    if happened.xid is None:
        ecc = Trouble("a double bit ECC error", TroubleKind.RESET_REQUIRED)
        trouble, cause = replace(ecc, kind=TroubleKind.APPLICATION) if checks.none else ecc, "ecc"
    else:
        trouble, cause = judged(happened.xid, checks), f"xid {happened.xid}"
    if trouble.kind is TroubleKind.APPLICATION:
        return health
    look = health.looks.get(happened.uuid)
    hit = {
        uuid
        for (instance, compute), uuid in (look.partitions if look is not None else {}).items()
        if instance == happened.gpu_instance and happened.compute_instance in {None, compute}
    } or {happened.uuid}
    ills = dict(health.ills)
    for uuid in hit:
        ills[uuid] = _with(ills.get(uuid, {}), cause, Ill(trouble, now, happened.xid))
    # An Xid of the whole GPU also affects its partitions.
    on_it = hit | (frozenset(look.partitions.values()) if look is not None and happened.uuid in hit else frozenset())
    return replace(health, ills=ills, recovered=health.recovered - on_it)


def looked(
    health: NodeHealth,
    looks: Mapping[str, Looked],
    checks: Checks,
    recovery: Recovery,
    *,
    now: float,
    reloaded: float | None = None,
    released: Collection[str] = (),
) -> NodeHealth:
    """Add a look, begun at ``now``, at all GPUs (by UUID) except those ``released``. Any other GPU missing in it is gone.

    If this look shows a reset since the look before, all troubles known at the look before have ended. Later troubles stay,
    because they may be newer than the reset. Evidence of a reset: a GPU that was lost or gone answers again, the driver no
    longer requests a reset, or a remap is no longer pending. A reload of the driver ends all troubles from before ``reloaded``,
    the moment when NVML was closed (None: no reload).
    """
    ills: dict[str, Mapping[str, Ill]] = dict(health.ills)
    recovered = set(health.recovered)
    gone = [uuid for uuid in health.looks if uuid not in looks and uuid not in released][-_MOST_GONE:]
    every = {uuid: replace(health.looks[uuid], at=now, lost=True) for uuid in gone}
    every |= {uuid: last for uuid, last in health.looks.items() if uuid in released}
    for uuid, found in looks.items():
        look, before = found, health.looks.get(uuid, found)
        if look.failed is not None:  # The last known state stays.
            look = replace(before, at=look.at, failed=look.failed, lost=look.lost or before.lost)
        every[uuid] = look
        both = {uuid, *look.partitions.values(), *before.partitions.values()}
        reset = look.failed is None and (reloaded is not None or _was_reset(before, look))
        if reset and recovery is Recovery.SAFE:
            for one in both:
                until = before.at if reloaded is None else max(reloaded, before.at)
                later = {cause: ill for cause, ill in ills.get(one, {}).items() if ill.at > until}
                ills[one] = later
                if not any(ill.trouble.kind in _AFTER_RESET for ill in later.values()):
                    recovered.add(one)
        ills[uuid] = _states(ills.get(uuid, {}), look, checks, recovery)
        if any(ill.trouble.kind is not TroubleKind.APPLICATION and ill.at >= look.at for ill in ills[uuid].values()):
            recovered -= both
    there = every.keys() | {one for look in every.values() for one in look.partitions.values()}
    return NodeHealth(
        ills={uuid: causes for uuid, causes in ills.items() if causes and uuid in there},
        looks=every,
        recovered=frozenset(recovered & there),
    )


def rested(health: NodeHealth, now: float, recovery: Recovery) -> NodeHealth:
    """Remove RESTART_APP errors that are ``QUIET_S`` old."""
    if recovery is Recovery.OFF:
        return health

    def is_over(ill: Ill) -> bool:
        restart = ill.xid is not None and ill.trouble.kind is TroubleKind.RESTART_APP
        return restart and now >= ill.at + QUIET_S

    ills = {
        uuid: {cause: ill for cause, ill in causes.items() if not is_over(ill)} for uuid, causes in health.ills.items()
    }
    return replace(health, ills={uuid: causes for uuid, causes in ills.items() if causes})


def rejudged(health: NodeHealth, checks: Checks) -> NodeHealth:
    """Judge the known errors by new settings. Errors that are ignored now have ended."""
    ills: dict[str, Mapping[str, Ill]] = {}
    recovered = set(health.recovered)
    for uuid, causes in health.ills.items():
        now = {}
        for cause, ill in causes.items():
            trouble = ill.trouble if ill.xid is None else judged(ill.xid, checks)
            counts = ill.xid is None or trouble.kind is not TroubleKind.APPLICATION
            if cause == "unreachable" or (counts and not checks.none):
                now[cause] = replace(ill, trouble=trouble)
        if now:
            ills[uuid] = now
        else:
            recovered.add(uuid)
    return replace(health, ills=ills, recovered=frozenset(recovered))


def vouched(health: NodeHealth, uuids: Collection[str]) -> NodeHealth:
    """Remove all troubles of these GPUs (none means all) and their partitions, on an operator's order.

    It is for troubles that can't end otherwise: older drivers don't report a reset. The next look may find them again.
    """
    boards = [uuid for uuid in health.looks if uuid in uuids or not uuids]
    over = {one for uuid in boards for one in (uuid, *health.looks[uuid].partitions.values())}
    ills = {uuid: causes for uuid, causes in health.ills.items() if uuid not in over}
    return replace(health, ills=ills, recovered=health.recovered | over)


def _was_reset(before: Looked, look: Looked) -> bool:
    wanted = _ACTIONS.get(before.action or 0, ("", TroubleKind.UNKNOWN))[1]
    return (
        before.lost
        or (bool(before.action) and wanted in _AFTER_RESET and look.action == 0)
        or (before.remap_pending is True and look.remap_pending is False)
    )


def _states(causes: Mapping[str, Ill], look: Looked, checks: Checks, recovery: Recovery) -> Mapping[str, Ill]:
    """Add the states that a look found. Remove states that have ended, unless recovery is off."""
    states: dict[str, Trouble | None] = {"unreachable": look.failed}
    if look.failed is None:
        states |= {"action": None, "failed remap": None, "remap": None}
        if look.action and not checks.none:
            unknown = (f"a recovery that this release doesn't know ({look.action})", TroubleKind.UNKNOWN)
            words, kind = _ACTIONS.get(look.action, unknown)
            states["action"] = Trouble(f"the driver wants {words}", kind)
        if look.remap_failed and not checks.none:
            states["failed remap"] = Trouble("a broken row of its memory could not be replaced", TroubleKind.UNKNOWN)
        if look.remap_pending and not checks.none:
            # New programs may use the GPU: the broken page is out of use already (NVIDIA's memory error management).
            states["remap"] = Trouble("broken memory is replaced at its next reset", TroubleKind.APPLICATION)
    now = dict(causes)
    for cause, trouble in states.items():
        ill = now.get(cause)
        if trouble is not None:
            if ill is None or ill.trouble != trouble:
                now[cause] = Ill(trouble, look.at)
        elif ill is not None and (recovery is Recovery.SAFE or ill.trouble.kind is TroubleKind.APPLICATION):
            del now[cause]
    return now


def _with(causes: Mapping[str, Ill], cause: str, ill: Ill) -> Mapping[str, Ill]:
    """Add a trouble as the latest; drop the oldest ones."""
    rest = [(name, one) for name, one in causes.items() if name != cause]
    return dict([*rest[-(_MOST_CAUSES - 1) :], (cause, ill)])
