"""The metrics for Prometheus, from the status document and the tally. Imported only with ``--metrics-address``.

Each scrape gets a new document, unless one was made just before. The number of samples is bounded: devices are counted by state,
and at most ``status.FEW`` unhealthy ones per resource have their own sample, unless ``--metrics-device-ids`` asks for all. Counters
for alerts begin at 0, so that their first event is an increase.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from itertools import accumulate, product
from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from devices.life.states import State
from devices.model import Health
from gateway import tally
from gateway.kubelet import drift
from gateway.registration.events import Phase
from gateway.sides.side import Side
from gateway.telling.served import VerdictState

if TYPE_CHECKING:
    from prometheus_client import Metric

    from gateway.telling.status import GatewayStatus, ResourceStatus
    from gateway.wires.http import Answer

PREFIX: Final = "device_plugin_gateway_"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

FRESH_S: Final = 1.0
"""Seconds for which one text answers all requests."""
CALLS: Final = ("Allocate", "GetPreferredAllocation", "PreStartContainer")
CODES: Final = ("OK", "NOT_FOUND", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "UNIMPLEMENTED", "UNKNOWN")
_LIVE: Final = "live"


class Family(Struct, frozen=True):
    """The declaration of a metric. ``name`` lacks the prefix; a counter's ends in ``_total``."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    help: str


def _gauge(name: str, text: str, labels: str = "") -> Family:
    return Family(name, "gauge", tuple(labels.split()), text)


def _counter(name: str, text: str, labels: str = "") -> Family:
    return Family(name, "counter", tuple(labels.split()), text)


def _histogram(name: str, text: str, labels: str) -> Family:
    return Family(name, "histogram", tuple(labels.split()), text)


_FAMILIES: Final = (
    _gauge("build_info", "Always 1; the versions that run.", "version python grpcio protobuf"),
    _gauge("kubelet_present", "1 while a kubelet accepts registrations, else 0."),
    _gauge(
        "serving",
        "1 while this gateway serves the resource, else 0; absent while another gateway serves it.",
        "resource",
    ),
    _gauge("registration_phase", "1 for the current phase of the resource's registration, else 0.", "resource phase"),
    _gauge(
        "registration_info",
        "Always 1; the API version that the kubelet accepted, and the possible versions of the kubelet.",
        "resource api kubelets",
    ),
    _gauge("stream_age_seconds", "Age of the kubelet's open ListAndWatch stream; absent without a stream.", "resource"),
    _counter("registrations_total", "Registrations that a kubelet accepted.", "resource cause"),
    _counter("register_errors_total", "Calls of Register that failed.", "resource code"),
    _histogram(
        "restart_gap_seconds",
        "Time without the kubelet's ListAndWatch stream, after the kubelet started or the stream ended.",
        "resource",
    ),
    _counter(
        "registration_checks_total",
        "Checks whether the kubelet's records have the resource after a registration: held, lacking, unknown.",
        "resource result",
    ),
    _counter("calls_total", "Calls of the kubelet that the gateway responded to.", "resource call code"),
    _histogram("call_duration_seconds", "Duration of the kubelet's calls, including errors.", "resource call"),
    _gauge("devices", "Devices that the gateway lists, by state and class of their fault.", "resource state kind"),
    _gauge("healthy_devices", "Devices that the gateway lists as Healthy.", "resource"),
    _gauge("allocatable_devices", "Devices that the kubelet can give out, by its own records.", "resource"),
    _gauge("held_devices", "Devices with a holder in the kubelet's records; absent if unknown.", "resource"),
    _gauge(
        "free_devices",
        "Allocatable devices without a holder in the kubelet's records; absent if unknown.",
        "resource",
    ),
    _gauge(
        "device_info",
        "Always 1, for each device that is not healthy (at most 32 of a resource, without holders). With --metrics-device-ids, healthy devices also have a sample.",
        "resource device state kind numa holder",
    ),
    _gauge("drift_devices", "Devices for which the kubelet's records differ from the gateway's.", "resource kind"),
    _gauge("bridged_plugin_up", "1 while the plugin of a bridged resource is connected, else 0.", "resource"),
    _counter("bridged_absences_total", "How often the plugin of a bridged resource disconnected.", "resource"),
    _counter("bridged_registrations_total", "Registrations of the plugin of a bridged resource.", "resource"),
    _counter(
        "bridged_repeated_answers_total",
        "Allocate calls that got an earlier response, because the plugin was away.",
        "resource",
    ),
    _gauge("ledger_writable", "0 if the last write of the state file failed, else 1."),
    _gauge("ledger_pending_changes", "Changes of the state file that may not be on disk yet."),
    _counter("ledger_writes_total", "Successful writes of the state file."),
    _gauge("ledger_written_age_seconds", "Time since the last write of the state file; absent before the first."),
    _gauge(
        "source_hindrances",
        "Reasons why a source of devices reports no devices, or not as configured.",
        "source",
    ),
    _gauge(
        "unusable_gpu_info",
        "Always 1, for each GPU that the driver or the kernel reports and no resource has.",
        "source index pci reason",
    ),
    _gauge(
        "gpus",
        "Physical GPUs: of an API (plugin, dra), moving (to-dra, to-plugin, reclaimed), or of another driver (foreign). Only with --dra on.",
        "side",
    ),
    _gauge("dra_driver_registered", "1 while the DRA driver is registered, else 0. Only with --dra.", "driver"),
    _gauge(
        "dra_driver_published",
        "0 while the driver's ResourceSlices are not up to date, else 1. Only with --dra.",
        "driver",
    ),
    _gauge(
        "dra_driver_devices",
        "Devices that the DRA driver offers, including devices of claims. Only with --dra.",
        "driver",
    ),
    _gauge("dra_driver_claims", "Prepared ResourceClaims of the DRA driver. Only with --dra.", "driver"),
    _gauge(
        "config_last_reload_successful",
        "0 while the configuration file is invalid, else 1; absent without a file.",
    ),
    _gauge("config_last_reload_success_age_seconds", "Time since the last accepted configuration file."),
    _gauge("books_info", "Always 1; the source of the kubelet's records: pod-resources, checkpoint, none.", "source"),
    _counter(
        "lost_fields_total",
        "Messages from which the gateway left out a field that the kubelet's API lacks.",
        "api field",
    ),
    _gauge("loop_lag_seconds", "Worst delay of the event loop in the last minute or two."),
)
FAMILIES: Final[Mapping[str, Family]] = {family.name: family for family in _FAMILIES}


class Metrics(Collector):
    """All metrics of one gateway. With ``device_ids`` each device has its own sample.

    ``document`` gathers the facts now, with rows for a few devices if it is called with True. It returns a function that makes the
    status document in any thread.
    """

    def __init__(
        self, document: Callable[[bool], Callable[[], GatewayStatus]], counted: tally.Tally, *, device_ids: bool = False
    ) -> None:
        self._document, self._tally, self._device_ids = document, counted, device_ids
        self._taken: tuple[Callable[[], GatewayStatus], tally.Tally]
        """The data for the next text."""
        self._text: asyncio.Future[bytes] | None = None
        self._text_since = float("-inf")
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        # Memory, CPU time and descriptors, read from /proc at each scrape. Python's garbage collector metrics are left out.
        ProcessCollector(registry=self._registry)

    def take(self) -> None:
        """Collect the data for the next text. Call it on the event loop; ``exposition`` may run in a thread."""
        self._taken = self._document(not self._device_ids), copy.deepcopy(self._tally)

    def exposition(self) -> bytes:
        """Return the collected data in Prometheus' text format. With samples for 10 000 devices it takes 0.2 s."""
        return generate_latest(self._registry)

    async def answer(self) -> Answer:
        """Answer ``GET /metrics``. One text is made at a time, and at most one in ``FRESH_S`` seconds."""
        now = time.monotonic()
        if self._text is None or (self._text.done() and (now - self._text_since >= FRESH_S or _failed(self._text))):
            self.take()
            self._text, self._text_since = asyncio.ensure_future(asyncio.to_thread(self.exposition)), now
        return HTTPStatus.OK, CONTENT_TYPE, await asyncio.shield(self._text)

    def collect(self) -> Iterable[Metric]:
        """Yield every family, also without samples."""
        document, counted = self._taken
        status = document()
        samples = {**_gauges(status, device_ids=self._device_ids), **_counters(status, counted)}
        histograms = {"restart_gap_seconds": counted.restart_gaps, "call_duration_seconds": counted.call_seconds}
        for name, family in FAMILIES.items():
            if family.kind == "histogram":
                histogram = HistogramMetricFamily(PREFIX + name, family.help, labels=family.labels)
                for labels, found in histograms[name].items():
                    bounds = [*map(str, found.bounds), "+Inf"]
                    histogram.add_metric(
                        labels, list(zip(bounds, accumulate(found.counts), strict=True)), sum_value=found.sum
                    )
                yield histogram
                continue
            kind = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
            plain = kind(PREFIX + name, family.help, labels=family.labels)
            for labels, value in samples.get(name, {}).items():
                plain.add_metric(labels, value)
            yield plain


def _failed(text: asyncio.Future[bytes]) -> bool:
    return text.cancelled() or text.exception() is not None


def _gauges(status: GatewayStatus, *, device_ids: bool) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the gauges of the document, by family and labels. An unknown value has no sample."""
    build = status.build
    found: dict[str, dict[tuple[str, ...], float]] = {
        "build_info": {(build.gateway, build.python, build.grpcio, build.protobuf): 1},
        "kubelet_present": {(): status.kubelet.present},
        "ledger_writable": {(): status.ledger.writable},
        "ledger_pending_changes": {(): status.ledger.pending},
        "books_info": {(status.books.source,): 1},
        "loop_lag_seconds": {(): status.lag_s},
    }
    for source in dict.fromkeys(one.source for one in status.hindrances):
        found.setdefault("source_hindrances", {})[(source,)] = sum(one.source == source for one in status.hindrances)
    if status.unusable:
        rows = ((one.source, one.index, one.pci, one.reason) for one in status.unusable)
        found["unusable_gpu_info"] = dict.fromkeys(rows, 1)
    if status.sides:
        counts = Counter(one.side for one in status.sides)
        found["gpus"] = {(side.value,): counts[side.value] for side in Side}
    if status.drivers:
        found["dra_driver_registered"] = {(one.name,): one.registered for one in status.drivers}
        found["dra_driver_published"] = {(one.name,): not one.unpublished for one in status.drivers}
        found["dra_driver_devices"] = {(one.name,): one.devices for one in status.drivers}
        found["dra_driver_claims"] = {(one.name,): one.claims for one in status.drivers}
    if status.ledger.written_s is not None:
        found["ledger_written_age_seconds"] = {(): status.ledger.written_s}
    if status.configuration is not None:
        found["config_last_reload_successful"] = {(): not status.configuration.error}
        if status.configuration.accepted_s is not None:
            found["config_last_reload_success_age_seconds"] = {(): status.configuration.accepted_s}
    for resource in status.resources:
        for family, labels, value in _gauges_of(resource, device_ids=device_ids):
            if value is not None:
                found.setdefault(family, {})[labels] = value
    return found


def _gauges_of(resource: ResourceStatus, *, device_ids: bool) -> Iterator[tuple[str, tuple[str, ...], float | None]]:
    """Yield one resource's gauges: family, labels and value. If labels repeat, the last value is in force."""
    name = (resource.name,)
    state = resource.verdict.state
    yield "serving", name, None if state == VerdictState.STANDBY else state == VerdictState.SERVED
    for phase in Phase:
        yield "registration_phase", (*name, phase.name.lower()), resource.phase == phase.value
    if resource.api:
        yield "registration_info", (*name, resource.api, resource.kubelets), 1
    yield "stream_age_seconds", name, resource.stream_s
    if resource.behind is not None:
        yield "bridged_plugin_up", name, resource.behind.state == _LIVE
    for count in resource.states:
        yield "devices", (*name, count.state, count.kind), count.devices
    yield "healthy_devices", name, resource.healthy
    yield "allocatable_devices", name, resource.allocatable
    yield "held_devices", name, resource.held
    yield "free_devices", name, resource.free
    for kind in drift.MismatchKind:
        yield "drift_devices", (*name, kind.value), 0
    for finding in resource.drift:
        yield "drift_devices", (*name, finding.kind), finding.devices
    for device in resource.devices:
        if device_ids or device.state != State.PRESENT.value or device.health != Health.HEALTHY.value:
            numa = ",".join(map(str, device.numa))
            holder = device.holder if device_ids and device.holder else ""
            yield "device_info", (*name, device.id, device.state, device.kind, numa, holder), 1


def _counters(status: GatewayStatus, counted: tally.Tally) -> dict[str, Mapping[tuple[str, ...], int]]:
    """Return the counters of the tally. Counters of a resource begin at 0."""
    names = [resource.name for resource in status.resources]
    bridged = {(resource.name,): resource.behind for resource in status.resources if resource.behind is not None}
    return {
        "bridged_absences_total": {name: one.absences for name, one in bridged.items()},
        "bridged_registrations_total": {name: one.registrations for name, one in bridged.items()},
        "bridged_repeated_answers_total": {name: one.repeated for name, one in bridged.items()},
        "registrations_total": _from_zero(product(names, (why.value for why in tally.Cause)), counted.registrations),
        "register_errors_total": counted.register_errors,
        "registration_checks_total": _from_zero(
            product(names, (one.value for one in tally.Confirmation)), counted.checks
        ),
        "calls_total": _from_zero(product(names, CALLS, CODES), counted.calls),
        "lost_fields_total": counted.lost_fields,
        "ledger_writes_total": {(): status.ledger.writes},
    }


def _from_zero(labels: Iterable[tuple[str, ...]], counts: Mapping[tuple[str, ...], int]) -> dict[tuple[str, ...], int]:
    return {**dict.fromkeys(labels, 0), **counts}
