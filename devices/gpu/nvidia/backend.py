"""NVIDIA's GPUs and MIG instances, found and watched through NVML.

Two threads (``watch``) call NVML and pass on their results. On the event loop, ``devices.gpu.nvidia.health`` judges them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog
from msgspec.structs import replace

from devices.gpu.backend import Sight
from devices.gpu.model import GPU
from devices.gpu.nvidia import health
from devices.gpu.nvidia.health import Checks, NodeHealth
from devices.gpu.nvidia.kernel import KernelFacts
from devices.gpu.nvidia.nvml import MismatchError, NotLoadedError, Nvml, NvmlError
from devices.gpu.nvidia.scan import Let, Scan
from devices.gpu.nvidia.watch import GRACE_S, HANG_S, Guests, Happened, Looker, News
from devices.model import LibraryFault, Trouble, TroubleKind
from devices.policy import IMEX_CHANNEL, Policy
from devices.source import GiveUpError, Hindrance, Reading

_LOGGED_AGAIN_S: Final = 60.0
"""Seconds for which the same error of the same GPU isn't logged again."""

_NO_LIBRARY: Final = 12
"""NVML_ERROR_LIBRARY_NOT_FOUND (nvml.h)."""
_CURES: Final[Mapping[int, str]] = {
    4: "Run the gateway as root, and let it use the device nodes /dev/nvidia*.",
    6: "Does this node have an NVIDIA GPU, and does lspci show it?",
    9: "Load the NVIDIA driver on this node.",
    _NO_LIBRARY: "Is the NVIDIA driver installed on this node, and its library visible in the container?",
    18: "The driver was upgraded: restart the container, or reboot the node if that does not help.",
}
"""What to do, by NVML's error code (nvmlReturn_t in nvml.h)."""

_NO_CHANNEL: Final = (
    f"{IMEX_CHANNEL} is missing, so containers get no IMEX channel. Load the driver with NVreg_CreateImexChannel0=1, or set "
    "imex.channelIDs to []"
)

_log = structlog.get_logger()


class NvidiaBackend:
    """A ``Backend`` over NVML.

    If a GPU fails, its last known state stays, with a trouble; other GPUs aren't affected. While NVML can't be used, the last
    known state of all GPUs stays; if the driver isn't loaded, all are unhealthy. While any GPU is released, new GPUs aren't
    found.

    A call that hangs makes only its GPU unhealthy; errors of the others still arrive, and the watch can still be closed. The
    thread of such a call ends when the call returns, or with the process.

    Args:
        policy: the operator's settings; ``judge_by`` changes them.
        library: NVML's name, or its path.
        sys: where this process sees ``/sys``.
        proc: where it sees ``/proc``.
        dev: where it sees the host's ``/dev``.
        without_uvm: as in ``KernelFacts``.
    """

    name = "nvidia"

    def __init__(
        self,
        policy: Policy,
        *,
        library: str = "libnvidia-ml.so.1",
        sys: Path = Path("/sys"),
        proc: Path = Path("/proc"),
        dev: Path = Path("/dev"),
        without_uvm: bool = False,
    ) -> None:
        self._policy = policy
        self._checks = _checks(policy)
        self._node = KernelFacts(sys, proc, dev, without_uvm, Path(policy.container_driver_root))
        self._library = library
        self._health = NodeHealth()
        self._scan: Scan | None = None
        self._down: NvmlError | None = None
        self._defect: Exception | None = None
        self._stuck = ""
        self._mismatch_since: float | None = None
        self._let = Let()
        self._news = asyncio.Event()
        self._looker: Looker | None = None
        self._guests = Guests()
        self._logged: dict[tuple[str, int | None], float] = {}

    @property
    def hindrance(self) -> Hindrance | None:
        """Why no GPU was seen yet, or why containers get no IMEX channel. Once GPUs were seen, their troubles have the rest."""
        if self._scan is not None:
            lacks = self._lacks_channel(self._scan) and not self._policy.imex_required
            return Hindrance(self.name, _NO_CHANNEL) if lacks else None
        if self._down is not None:
            error = self._down
            return Hindrance(self.name, f"NVML can't be used: {error}", cause=error.cause)
        if not self._stuck:
            return None
        silent = f"NVML doesn't answer: {self._stuck} has hung for {HANG_S:g} s"
        return Hindrance(self.name, silent, cause=LibraryFault.SILENT)

    async def watch(self) -> AsyncGenerator[Sight]:
        """Yield what exists, and again after each change.

        Raises:
            GiveUpError: status 1, the first attempt failed and ``fail_on_init_error`` makes that final. Status 75, the
                library has been of another release than the driver for ``GRACE_S``; only a new container gets another library.
        """
        nvml = Nvml(self._library)
        looker = Looker(nvml, self._node, self._let, self._guests, lambda news: self._take(looker, news))
        self._looker = looker
        self._defect = None
        if self._scan is None:
            self._down = None  # An earlier watch's failure doesn't count here.
        last: Sight | None = None
        try:
            while True:
                now = time.monotonic()
                self._health = health.rested(self._health, now, self._policy.health_recovery)
                self._mind(looker, now)
                sight = self._sight()
                if sight is not None and sight != last:
                    last = sight
                    yield sight
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HANG_S):  # News of each look comes more often.
                        await self._news.wait()
                self._news.clear()
        finally:
            self._looker = None
            await looker.end()

    async def release(self, uuids: Collection[str]) -> None:
        """Close NVML, and open it again without using these GPUs (none means all; then it stays closed).

        Raises:
            TimeoutError: NVML hangs, so the GPUs are not released.
        """
        self._let = Let(self._let.uuids | frozenset(uuids), all=self._let.all or not uuids)
        await self._renew()

    async def acquire(self, uuids: Collection[str]) -> None:
        """Use these GPUs again (none means all), and remove their troubles. The next look may find troubles again.

        Raises:
            TimeoutError: NVML hangs.
        """
        self._health = health.vouched(self._health, uuids)
        self._let = Let(self._released() - frozenset(uuids) if uuids else frozenset())
        await self._renew()

    def readings(self) -> Sequence[Reading]:
        """Read the gauges of the GPUs that answer and aren't released. It blocks: call it in a thread. Never raises."""
        scan = self._scan
        if scan is None:
            return ()
        silent = {uuid for uuid, look in scan.looks.items() if look.failed is not None or look.lost} | {self._stuck}
        left_out = self._released() | silent
        gpus = [one for one in scan.sight.gpus if one.board not in left_out]
        return _gauges(self._library, self._guests, gpus)

    def judge_by(self, policy: Policy) -> None:
        """Judge health by new settings. Must not block, and never raises."""
        self._policy, self._checks = policy, _checks(policy)
        self._health = health.rejudged(self._health, self._checks)
        self._news.set()
        if self._looker is not None:
            self._looker.look()

    async def _renew(self) -> None:
        self._news.set()
        if self._looker is not None:
            await self._looker.renew(self._let)

    def _take(self, looker: Looker, news: News) -> None:
        """Handle what a thread passed on, on the event loop."""
        if looker is not self._looker:
            return
        match news:
            case Happened():
                self._tell(news)
                self._health = health.event(self._health, news.event, self._checks, news.at)
            case Scan():
                if self._down is not None or self._scan is None:
                    _log.info("NVML answers", driver=news.sight.driver_version, gpus=len(news.looks))
                if self._lacks_channel(news) and (self._scan is None or self._scan.sight.imex):
                    _log.warning("no IMEX channel", reason=_NO_CHANNEL)
                self._scan, self._down, self._mismatch_since = news, None, None
                self._health = health.looked(
                    self._health,
                    news.looks,
                    self._checks,
                    self._policy.health_recovery,
                    now=news.at,
                    reloaded=news.reloaded,
                    released=news.let,
                )
            case NvmlError():
                if self._down is None or str(self._down) != str(news):
                    _log.error(
                        "NVML can't be used",
                        reason=str(news),
                        gpus="as they were seen last" if self._scan is not None else "none yet",
                    )
                self._down = news
                if not isinstance(news, MismatchError):
                    self._mismatch_since = None
                elif self._mismatch_since is None:
                    self._mismatch_since = time.monotonic()
            case Exception():
                self._defect = news
        self._news.set()

    def _tell(self, news: Happened) -> None:
        """Log an error, unless an equal one was logged within ``_LOGGED_AGAIN_S``."""
        key = news.event.uuid, news.event.xid
        if news.at < self._logged.get(key, -_LOGGED_AGAIN_S) + _LOGGED_AGAIN_S:
            return
        if len(self._logged) >= 1024:
            self._logged.clear()
        self._logged[key] = news.at
        if news.event.xid is None:
            _log.warning("double bit ECC error", gpu=news.event.uuid)
            return
        trouble = health.judged(news.event.xid, self._checks)
        tell = _log.info if trouble.kind is TroubleKind.APPLICATION else _log.warning
        tell(
            "Xid",
            gpu=news.event.uuid,
            reason=trouble.reason,
            kind=trouble.kind.value,
            gpu_instance=news.event.gpu_instance,
            compute_instance=news.event.compute_instance,
        )

    def _mind(self, looker: Looker, now: float) -> None:
        """Handle a call that hangs, a first attempt that failed, and the end of the grace for another release.

        Raises:
            GiveUpError: see ``watch``.
        """
        if self._defect is not None:
            raise self._defect
        stuck = looker.stuck(now)
        if stuck and stuck != self._stuck:
            _log.error("NVML doesn't answer", call=stuck, seconds=HANG_S)
        elif self._stuck and not stuck:
            _log.info("NVML answers again")
        self._stuck = stuck
        if self._down is None:
            return
        if self._scan is None and self._policy.fail_on_init_error:
            cure = _CURES.get(getattr(self._down.__cause__, "value", _NO_LIBRARY), "Does nvidia-smi work here?")
            words = f"Cannot use NVML: {self._down}. {cure} To keep trying, set FAIL_ON_INIT_ERROR=false."
            raise GiveUpError(words)
        if self._mismatch_since is not None and now >= self._mismatch_since + GRACE_S:
            raise GiveUpError(
                f"the driver was upgraded while this container ran, so its libraries are of the release before "
                f"({self._down}): restart it, so that it gets the new ones",
                status=75,
            )

    def _released(self) -> frozenset[str]:
        every = self._scan.sight.gpus if self._let.all and self._scan is not None else ()
        return self._let.uuids | {gpu.board for gpu in every}

    def _sight(self) -> Sight | None:
        """Return the GPUs with their troubles; None: no look succeeded yet. If the driver isn't loaded, there are no GPUs."""
        if self._scan is None:
            unloaded = self._down is not None and isinstance(self._down, NotLoadedError)
            return Sight(()) if unloaded else None
        sight, let = self._scan.sight, self._released()
        return replace(
            sight,
            gpus=tuple(replace(gpu, trouble=self._trouble(gpu)) for gpu in sight.gpus),
            recovered=self._health.recovered,
            released=frozenset(gpu.uuid for gpu in sight.gpus if gpu.board in let) | let,
            imex=sight.imex and bool(self._policy.imex_channels),
        )

    def _trouble(self, gpu: GPU) -> Trouble | None:
        trouble = self._health.trouble(*{gpu.uuid, gpu.board})
        if trouble is not None and trouble.kind is not TroubleKind.APPLICATION:
            return trouble
        if self._down is not None:
            error = self._down
            if isinstance(error, NotLoadedError):
                return Trouble(f"the driver isn't loaded: {error}", TroubleKind.RESTART_APP, cause=error.cause)
            return Trouble(f"NVML can't be asked: {error}", TroubleKind.APPLICATION, cause=error.cause)
        if self._stuck and gpu.board == self._stuck:
            return Trouble(f"NVML hasn't answered about it for {HANG_S:.0f} s", TroubleKind.RESTART_APP)
        if self._policy.imex_required and self._scan is not None and self._lacks_channel(self._scan):
            return Trouble(_NO_CHANNEL, TroubleKind.RESTART_APP)
        return trouble

    def _lacks_channel(self, scan: Scan) -> bool:
        return bool(self._policy.imex_channels) and not scan.sight.imex


def _checks(policy: Policy) -> Checks:
    checks = Checks.of(policy.disabled_health_checks, policy.enabled_health_checks)
    if checks.malformed:
        _log.warning("health checks that are no Xid are ignored", words=", ".join(checks.malformed[:8]))
    return checks


def _gauges(library: str, guests: Guests, gpus: Sequence[GPU]) -> Sequence[Reading]:
    """Read the gauges of these GPUs and MIG devices; leave out those that can't be read. It blocks.

    NVML is opened and closed for each reading. That costs little, because the looking thread keeps it open. While that thread
    has closed it (GPUs are released, the driver is being replaced), nothing is read. Several threads may call the library at the
    same time (NVML API reference, "thread safe").
    """
    found: list[Reading] = []
    with guests.inside:
        if not guests.allowed:
            return ()
        nvml = Nvml(library)
        with contextlib.suppress(NvmlError):
            nvml.open()
            for board in (gpu for gpu in gpus if not gpu.parent):
                with contextlib.suppress(NvmlError):
                    found += _of_board(nvml, board, [gpu for gpu in gpus if gpu.parent == board.uuid])
        nvml.close()
    return found


def _of_board(nvml: Nvml, board: GPU, parts: Iterable[GPU]) -> Iterator[Reading]:
    if nvml.at_address(board.pci) != board.uuid:
        return  # Another GPU is at its index; the next look finds it.
    busy, used, free, celsius, watts = nvml.gauges(board.uuid)
    index = board.place or str(board.index)
    yield Reading(
        board.uuid, index, board.minor, board.pci, board.product, "", busy, used, free, celsius, watts
    )  # fmt: skip
    for part in parts:
        try:
            used, free = nvml.memory_of(board.uuid, int(part.place.rpartition(":")[2]), part.uuid)
        except (NvmlError, ValueError):
            continue
        yield Reading(
            part.uuid, part.place, board.minor, board.pci, board.product, part.profile, None, used, free, celsius, None
        )  # fmt: skip
