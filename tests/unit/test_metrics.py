"""The metrics: every family has a sample somewhere, labels stay bounded, and what people build on it is really there."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from devices.life import states
from devices.life.states import State
from devices.model import Device
from devices.source import Behind, Hindrance, Unusable
from gateway.registration.events import Phase
from gateway.tally import Tally
from gateway.telling import metrics
from gateway.telling.metrics import FAMILIES, PREFIX, Metrics
from gateway.telling.status import Configuration, GatewayStatus, ResourceFacts
from tests.unit import documents
from tests.unit.documents import FULL, IDS, REFUSED, RESOURCE, STANDBY, TROUBLED, document

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "observability.md"
RULES = ROOT / "deploy" / "alerts" / "device-plugin-gateway.rules.yaml"

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


BEHIND = Behind(resource="a", endpoint="b", folder="c", api="v1beta1", state="live", state_s=1)


def text(status: GatewayStatus, tally: Tally | None = None, *, device_ids: bool = False) -> str:
    told = Metrics(lambda _: lambda: status, tally or documents.counted(), device_ids=device_ids)
    told.take()
    return told.exposition().decode()


def samples(status: GatewayStatus, tally: Tally | None = None, *, device_ids: bool = False) -> Samples:
    """Read the exposition back: values by name (without the prefix) and labels."""
    families = text_string_to_metric_families(text(status, tally, device_ids=device_ids))
    return {
        (sample.name.removeprefix(PREFIX), frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_rejected_configuration_file_is_seen() -> None:
    assert (
        samples(document(configuration=Configuration(path="/c", error="line 3")))[key("config_last_reload_successful")]
        == 0
    )
    assert key("config_last_reload_successful") not in samples(document(configuration=None))


CROSSING = document(sides=documents.SIDES)
UNUSABLE = Unusable("nvidia", "GPU is lost", "3", "0000:4c:00.0")
HINDERED = replace(FULL, hindrances=(Hindrance(source="simulated", reason="profile rejected"),), unusable=(UNUSABLE,))


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("build_info", {"version": "0.1.0", "python": "3.11.7", "grpcio": "1.85.1", "protobuf": "7.36.2"}, 1),
        ("kubelet_present", {}, 1),
        ("serving", {"resource": RESOURCE}, 1),
        ("serving", {"resource": REFUSED.name}, 0),
        ("registration_phase", {"resource": RESOURCE, "phase": "serving"}, 1),
        ("registration_phase", {"resource": RESOURCE, "phase": "waiting"}, 0),
        ("registration_info", {"resource": RESOURCE, "api": "v1beta1", "kubelets": "1.29 and later"}, 1),
        ("stream_age_seconds", {"resource": RESOURCE}, 7800),
        ("registrations_total", {"resource": RESOURCE, "cause": "kubelet start"}, 2),
        ("registrations_total", {"resource": RESOURCE, "cause": "books"}, 0),
        ("register_errors_total", {"resource": REFUSED.name, "code": "UNKNOWN"}, 1),
        ("restart_gap_seconds_bucket", {"resource": RESOURCE, "le": "0.002"}, 0),
        ("restart_gap_seconds_bucket", {"resource": RESOURCE, "le": "0.005"}, 1),
        ("restart_gap_seconds_bucket", {"resource": RESOURCE, "le": "+Inf"}, 1),
        ("restart_gap_seconds_sum", {"resource": RESOURCE}, 0.0042),
        ("registration_checks_total", {"resource": RESOURCE, "result": "held"}, 1),
        ("registration_checks_total", {"resource": RESOURCE, "result": "lacking"}, 0),
        ("calls_total", {"resource": RESOURCE, "call": "Allocate", "code": "FAILED_PRECONDITION"}, 3),
        ("calls_total", {"resource": RESOURCE, "call": "Allocate", "code": "NOT_FOUND"}, 0),
        ("call_duration_seconds_count", {"resource": RESOURCE, "call": "Allocate"}, 412),
        ("devices", {"resource": RESOURCE, "state": "unhealthy", "kind": "reset-required"}, 1),
        ("devices", {"resource": RESOURCE, "state": "healthy", "kind": ""}, 4),
        ("healthy_devices", {"resource": REFUSED.name}, 1),
        ("allocatable_devices", {"resource": REFUSED.name}, 0),
        ("held_devices", {"resource": RESOURCE}, 3),
        ("free_devices", {"resource": RESOURCE}, 2),
        ("config_last_reload_successful", {}, 1),
        ("config_last_reload_success_age_seconds", {}, 60),
        ("drift_devices", {"resource": RESOURCE, "kind": "doubled"}, 0),
        ("drift_devices", {"resource": RESOURCE, "kind": "forgotten"}, 1),
        ("drift_devices", {"resource": RESOURCE, "kind": "surplus"}, 0),
        ("ledger_writable", {}, 0),
        ("ledger_pending_changes", {}, 2),
        ("ledger_writes_total", {}, 12),
        ("ledger_written_age_seconds", {}, 185.2),
        ("books_info", {"source": "pod-resources"}, 1),
        ("lost_fields_total", {"api": "v1alpha2", "field": "topology"}, 1),
        ("loop_lag_seconds", {}, 0.0021),
    ],
)
def test_a_sample(name: str, labels: dict[str, str], value: float) -> None:
    assert samples(FULL)[key(name, **labels)] == value


UNKNOWN = {
    "no stream": (document(REFUSED), "stream_age_seconds"),
    "no records": (document(REFUSED), "held_devices"),
    "another gateway serves it": (document(STANDBY), "serving"),
    "it is stopped": (document(replace(TROUBLED, state=documents.state(Phase.STOPPED))), "serving"),
    "never written": (document(ledger=replace(documents.GOOD_LEDGER, written_s=None)), "ledger_written_age_seconds"),
    "all devices are healthy, and nobody asked for their IDs": (document(REFUSED), "device_info"),
}


@pytest.mark.parametrize(("status", "name"), UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_known_has_no_sample(status: GatewayStatus, name: str) -> None:
    assert [found for found, _ in samples(status) if found == name] == []


def test_what_keeps_a_source_from_telling_is_counted() -> None:
    assert samples(HINDERED)[key("source_hindrances", source="simulated")] == 1
    assert "source_hindrances" not in {name for name, _ in samples(FULL)}


def test_a_gpu_that_no_resource_lists_is_named_with_its_reason() -> None:
    labels = {"source": "nvidia", "index": "3", "pci": "0000:4c:00.0", "reason": "GPU is lost"}
    assert samples(HINDERED)[key("unusable_gpu_info", **labels)] == 1


def test_gpus_are_counted_by_side_where_both_apis_are_served() -> None:
    found = {dict(labels)["side"]: value for (name, labels), value in samples(CROSSING).items() if name == "gpus"}
    assert found == {"plugin": 1, "to-dra": 1, "dra": 2, "to-plugin": 0, "reclaimed": 0, "foreign": 0}
    assert "gpus" not in {name for name, _ in samples(FULL)}


def test_each_dra_driver_says_how_it_stands() -> None:
    found = samples(document(drivers=documents.DRIVERS))
    told = {
        driver: [
            found[key(f"dra_driver_{what}", driver=driver)] for what in ("registered", "published", "devices", "claims")
        ]
        for driver in ("gpu.nvidia.com", "gpu.amd.com")
    }
    assert told == {"gpu.nvidia.com": [1, 1, 2, 1], "gpu.amd.com": [0, 0, 1, 0]}
    assert not {name for name, _ in samples(FULL) if name.startswith("dra_")}


def test_a_driver_that_the_kubelet_has_may_be_unpublished() -> None:
    driver = replace(documents.DRIVERS[0], registered=True, unpublished="403 Forbidden")
    found = samples(document(drivers=(driver,)))
    told = [found[key(f"dra_driver_{name}", driver=driver.name)] for name in ("registered", "published")]
    assert told == [1, 0]


def test_every_family_has_a_sample_when_all_is_filled_in() -> None:
    full = replace(
        HINDERED,
        sides=CROSSING.sides,
        drivers=documents.DRIVERS,
        resources=(replace(FULL.resources[0], behind=BEHIND), *FULL.resources[1:]),
    )
    found = {name for name, _ in samples(full, device_ids=True)}
    suffixes = {"histogram": ("_bucket", "_count", "_sum"), "gauge": ("",), "counter": ("",)}
    expected = {name + suffix for name, family in FAMILIES.items() for suffix in suffixes[family.kind]}
    assert expected == {name for name in found if not name.startswith("process_")}
    assert found >= {"process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds_total"}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_family_is_named_as_prometheus_wants(family: metrics.Family) -> None:
    assert family.name.endswith("_total") == (family.kind == "counter")
    assert "seconds" in family.name or family.kind != "histogram"
    assert family.help.endswith(".")


def _many(count: int) -> ResourceFacts:
    entries = {f"GPU-{number}": states.Entry(Device(f"GPU-{number}"), State.PRESENT) for number in range(count)}
    return replace(TROUBLED, entries=entries, holders={f"GPU-{number}": f"a/b-{number}/c" for number in range(count)})


def test_many_devices_are_no_more_samples() -> None:
    few, many = (samples(document(_many(count), tally=documents.counted())) for count in (8, 2000))
    assert few.keys() == many.keys()


def test_a_device_is_named_if_it_is_not_healthy_or_all_were_asked_for() -> None:
    assert IDS[0] not in text(FULL)
    labels = {"resource": RESOURCE, "device": IDS[2], "state": "unhealthy", "kind": "reset-required", "numa": "0"}
    assert samples(FULL)[key("device_info", **labels, holder="")] == 1
    assert samples(FULL, device_ids=True)[key("device_info", **labels, holder="default/training-1/main")] == 1


@pytest.mark.parametrize("device_ids", [False, True])
def test_all_rows_are_made_only_where_they_are_wanted(*, device_ids: bool) -> None:
    asked: list[bool] = []

    def status(few: bool) -> Callable[[], GatewayStatus]:
        asked.append(few)
        return lambda: FULL

    Metrics(status, Tally(), device_ids=device_ids).take()
    assert asked == [not device_ids]


@pytest.mark.parametrize("evil", ['a"b', "a\\b", "a\nb", "\U0001f525", ""])
def test_a_label_may_hold_anything(evil: str) -> None:
    status = document(replace(TROUBLED, name=evil))
    assert samples(status)[key("healthy_devices", resource=evil)] == 4


# What is built on it.


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(RULES.read_text())["groups"]
    return list(group["rules"])


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_is_there(rule: dict[str, Any]) -> None:
    """Its metrics exist, with the labels and the label values that it picks."""
    found = samples(replace(FULL, sides=CROSSING.sides))
    assert "$labels.node" in rule["annotations"]["summary"]
    names = re.findall(rf"{PREFIX}(\w+)", rule["expr"])
    assert names
    for name in names:
        assert name in {there for there, _ in found}
    for name, picked in re.findall(rf"{PREFIX}(\w+)\{{([^}}]*)\}}", rule["expr"]):
        for label, operator, value in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', picked):
            values = {dict(labels).get(label) for there, labels in found if there == name}
            wanted = set(value.split("|")) if operator == "=~" else {value}
            assert wanted <= values, f"{name}: {label}"


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor in {heading.lower().replace(" ", "-") for heading in headings}
    assert anchor == rule["alert"].lower()


def test_the_page_names_no_metric_that_is_not_there() -> None:
    named = set(re.findall(rf"{PREFIX}\w+", PAGE.read_text()))
    histograms = {name for name, family in FAMILIES.items() if family.kind == "histogram"}
    there = {PREFIX + name for name in FAMILIES} | {f"{PREFIX}{name}_bucket" for name in histograms}
    assert named <= there
