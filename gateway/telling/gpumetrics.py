"""The GPUs' gauges for Prometheus, under the names of NVIDIA's DCGM exporter, with the pods that hold them.

Imported only with ``--gpu-metrics``. A separate thread reads the drivers. If a driver is slow, a scrape gets the last readings, or
none.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from devices.replicas import unshared
from gateway.wires.log import Seldom

if TYPE_CHECKING:
    from prometheus_client import Metric

    from devices.source import Reading
    from gateway.telling.subject import Subject
    from gateway.wires.http import Answer, Handler

WAIT_S: Final = 0.1
"""Most seconds for which a scrape waits for the drivers."""
LAST_READINGS_S: Final = 60.0
"""Seconds for which the last readings are used while the drivers don't answer."""
FRESH_S: Final = 1.0
"""Seconds for which one reading answers all scrapes."""
HOLDERS_S: Final = 10.0
"""Seconds after which known holders are old: a scrape then causes a new read for the next scrape."""
_HUNG_S: Final = 10.0
"""Seconds without an answer after which a driver counts as hung."""

FAMILIES: Final[Mapping[str, tuple[str, str]]] = {
    "DCGM_FI_DEV_GPU_UTIL": ("busy", "GPU utilization (in %)."),
    "DCGM_FI_DEV_FB_USED": ("used", "Framebuffer memory used (in MiB)."),
    "DCGM_FI_DEV_FB_FREE": ("free", "Framebuffer memory free (in MiB)."),
    "DCGM_FI_DEV_GPU_TEMP": ("celsius", "GPU temperature (in C)."),
    "DCGM_FI_DEV_POWER_USAGE": ("watts", "Power draw (in W)."),
}
"""By name: the field of a reading, and the help text of DCGM's exporter."""
LABELS: Final = (
    *("gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname", "GPU_I_PROFILE", "GPU_I_ID"),
    *("namespace", "pod", "container"),
)
_NOBODY: Final = ("", "", "")

Holder = tuple[str, str, str]
"""Namespace, pod and container."""
_seldom = Seldom()
_log = structlog.get_logger()


class Sampler:
    """Calls ``read`` in a separate thread, because it blocks; one call at a time."""

    def __init__(self, read: Callable[[], Sequence[Reading]]) -> None:
        self._read = read
        self._orders: queue.SimpleQueue[asyncio.Future[None]] = queue.SimpleQueue()
        self._asked: asyncio.Future[None] | None = None
        self._asked_at = 0.0
        self._last: Sequence[Reading] = ()
        self._at = float("-inf")
        self._started = self._told = False

    async def latest(self) -> Sequence[Reading]:
        """Return current readings, or the last ones if the drivers are slow; empty if those are too old."""
        now, loop = time.monotonic(), asyncio.get_running_loop()
        if now - self._at < FRESH_S:
            return self._last
        if not self._started:
            self._started = True
            threading.Thread(target=self._serve, args=(loop,), name="gpu-metrics", daemon=True).start()
        if self._asked is None or self._asked.done():
            self._asked, self._asked_at = loop.create_future(), now
            self._orders.put(self._asked)
        with contextlib.suppress(TimeoutError):
            # A hanging call is not waited for again.
            async with asyncio.timeout(max(self._asked_at + WAIT_S - now, 0)):
                await asyncio.shield(self._asked)
        self._tell()
        return self._last if time.monotonic() - self._at <= LAST_READINGS_S else ()

    def _tell(self) -> None:
        """Log once that the drivers don't answer, and once that they do again."""
        hung = self._asked is not None and not self._asked.done() and time.monotonic() - self._asked_at > _HUNG_S
        if hung and not self._told:
            _log.warning("no GPU metrics: a driver doesn't answer", advice="metrics and all else go on without them")
        elif self._told and not hung:
            _log.info("GPU metrics are there again")
        self._told = hung

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            asked = self._orders.get()
            try:
                found = self._read()
            except Exception as error:  # noqa: BLE001 - no backend's error may end the thread
                if _seldom.tell(repr(error)) is not None:
                    _log.error(
                        "the GPUs' gauges can't be read", reason=repr(error), advice="this is a defect of the backend"
                    )
                found = ()
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(self._take, asked, found)

    def _take(self, asked: asyncio.Future[None], found: Sequence[Reading]) -> None:
        self._last, self._at = found, time.monotonic()
        if not asked.done():
            asked.set_result(None)


class _Gauges(Collector):
    def __init__(self, readings: Sequence[Reading], holders: Mapping[str, Sequence[Holder]], host: str) -> None:
        self._readings, self._holders, self._host = readings, holders, host

    def collect(self) -> Iterator[Metric]:
        rows = [(one, list(self._rows(one))) for one in self._readings]
        for name, (field, words) in FAMILIES.items():
            family = GaugeMetricFamily(name, words, labels=LABELS)
            for reading, labels in rows:
                value = getattr(reading, field)
                for each in labels if value is not None else ():
                    family.add_metric(each, value)
            yield family

    def _rows(self, it: Reading) -> Iterator[Sequence[str]]:
        """Yield the labels of each sample: one sample per container that holds the GPU, or one without a pod's labels."""
        gpu, _, instance = it.index.partition(":")
        profile, number = (it.profile, instance) if it.profile else ("", "")
        own = (gpu, it.uuid, _bus_id(it.pci), f"nvidia{it.minor}", it.product, self._host, profile, number)
        for holder in self._holders.get(it.uuid, (_NOBODY,)):
            yield (*own, *holder)


def text(readings: Sequence[Reading], holders: Mapping[str, Sequence[Holder]], host: str) -> bytes:
    """Return readings in Prometheus' text format. 16 GPUs with 4 pods each take some 5 ms."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Gauges(readings, holders, host))
    return generate_latest(registry)


def holders(held: Iterable[Mapping[str, str] | None]) -> dict[str, list[Holder]]:
    """Return the containers that hold each GPU, by its ID; ``held`` has, per resource, the holder of each device (``namespace/pod/container``)."""
    found: dict[str, dict[Holder, None]] = {}
    for devices in held:
        for device_id, name in (devices or {}).items():
            parts = name.split("/")
            holder = (parts[0], parts[1], parts[2]) if len(parts) == 3 else ("", *(name.rpartition("/")[::2]))
            found.setdefault(unshared(device_id), {})[holder] = None
    return {uuid: list(some) for uuid, some in found.items()}


def added(gateway: Subject, answer: Callable[[], Awaitable[Answer]]) -> Handler:
    """Return a handler that adds the gauges to the answer to ``GET /metrics``."""
    sampler, host = Sampler(gateway.source.readings), gateway.settings.node_name or socket.gethostname()

    async def both() -> Answer:
        (status, kind, body), readings = await asyncio.gather(answer(), sampler.latest())
        last = gateway.holdings.reader.last
        if last is not None and time.monotonic() - last.at > HOLDERS_S:
            gateway.holdings.reader.look_within(0)
        held = [gateway.holdings.recorded(resource.name) for resource in gateway.resources.values()]
        return status, kind, body + await asyncio.to_thread(lambda: text(readings, holders(held), host))

    return both


def _bus_id(pci: str) -> str:
    """Return a PCI address in DCGM's form, ``00000000:07:00.0``."""
    domain, colon, rest = pci.partition(":")
    return f"{domain.rjust(8, '0')}{colon}{rest}".upper() if colon else pci
