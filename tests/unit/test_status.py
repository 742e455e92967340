"""The status document: what a shell knows, said in words and numbers, and the schema that is published of it."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from devices.life.states import Entry, State
from devices.model import Device
from gateway.configuration.reload import FileFate
from gateway.kubelet.drift import Finding, MismatchKind
from gateway.registration.events import Phase
from gateway.telling import status
from gateway.telling.status import Configuration, Count, Gateways, GatewayStatus, ResourceFacts, ResourceStatus
from tests.unit import documents
from tests.unit.documents import FULL, IDS, RESOURCE, TROUBLED, document
from tools.schemas import schema


def _resource(plugin: ResourceFacts) -> ResourceStatus:
    [found] = document(plugin, tally=documents.counted()).resources
    return found


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("phase", "serving"),
        ("api", "v1beta1"),
        ("kubelets", "1.29 and later"),
        ("stream_s", 7800),
        ("registrations", {"first": 1, "kubelet start": 2}),
        ("last_gap_s", 0.0042),
        ("calls", {"Allocate": {"OK": 409, "FAILED_PRECONDITION": 3}, "GetPreferredAllocation": {"OK": 409}}),
        ("checked", "held"),
        ("listed", 8),
        ("healthy", 4),
        ("allocatable", 4),
        ("free", 2),
        ("held", 3),
        (
            "states",
            (
                Count(state="cordoned", kind="", devices=1),
                Count(state="healthy", kind="", devices=4),
                Count(state="lost", kind="", devices=1),
                Count(state="unhealthy", kind="reset-required", devices=1),
                Count(state="unhealthy", kind="unknown", devices=1),
            ),
        ),
    ],
)
def test_a_resource_in_words_and_numbers(field: str, value: object) -> None:
    assert getattr(_resource(TROUBLED), field) == value


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.SERVING])
def test_nothing_is_allocatable_that_is_not_served(phase: Phase) -> None:
    found = _resource(replace(TROUBLED, state=documents.state(phase), trouble="why"))
    assert (found.healthy, found.allocatable, found.free, found.trouble) == (4, 0, 0, "why")


@pytest.mark.parametrize(
    ("kind", "ids", "allocatable", "free"),
    [
        (MismatchKind.WITHHELD, (IDS[0], IDS[1]), 2, 1),
        (MismatchKind.WITHHELD, (IDS[5],), 4, 2),
        (MismatchKind.SURPLUS, ("theirs-0", "theirs-1"), 6, 4),
    ],
)
def test_what_is_allocatable_follows_the_kubelets_records(
    kind: MismatchKind, ids: tuple[str, ...], allocatable: int, free: int
) -> None:
    found = _resource(replace(TROUBLED, drift=[Finding(kind, ids, "")]))
    assert (found.healthy, found.allocatable, found.free) == (4, allocatable, free)


def test_what_another_plugin_offers_while_no_gateway_serves_is_allocatable() -> None:
    found = _resource(replace(TROUBLED, state=documents.state(Phase.WAITING), others=frozenset({"theirs", IDS[0]})))
    assert (found.allocatable, found.free) == (2, 1)


def test_what_is_wrong_with_the_configuration_file() -> None:
    fate = FileFate()
    fate.error, fate.accepted_at = "line 3", documents.NOW - 60
    said = Configuration(path="/c/config.yaml", error="line 3", accepted_s=60)
    assert status.configuration("/c/config.yaml", fate, documents.NOW) == said
    assert status.configuration("", fate, documents.NOW) is None


def test_what_is_free_is_unknown_where_nobody_knows_who_holds_what() -> None:
    found = _resource(replace(TROUBLED, holders=None))
    assert (found.held, found.free) == (None, None)


def test_a_resource_that_serves_has_no_trouble() -> None:
    assert _resource(replace(TROUBLED, trouble="of yesterday")).trouble == ""


def test_who_holds_what_is_unknown_without_the_records() -> None:
    found = _resource(replace(TROUBLED, holders=None))
    assert (found.held, {device.holder for device in found.devices}) == (None, {None})


def test_a_holder_of_what_is_not_listed_is_not_counted() -> None:
    assert _resource(replace(TROUBLED, holders={"elsewhere": "a/b/c"})).held == 0


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, ("Healthy", "healthy", "", "", (0,), "default/training-0/main", ())),
        (5, ("Unhealthy", "cordoned", "", "swap the riser, ticket 4711", (1,), None, ())),
        (6, ("Unhealthy", "unhealthy", "unknown", "double-bit ECC error", (1,), None, ())),
        (7, ("Healthy", "healthy", "", "", (1,), None, ("forgotten",))),
    ],
)
def test_a_device(number: int, expected: tuple[object, ...]) -> None:
    device = _resource(TROUBLED).devices[number]
    assert (device.id, *msgspec.structs.astuple(device)[1:-3], device.stranger) == (IDS[number], *expected, "")


def test_of_many_devices_a_person_is_told_of_those_that_there_is_something_to_say_of() -> None:
    facts = msgspec.structs.replace(TROUBLED, strangers={"3": "x"})
    few = status.resource(facts, documents.counted(), documents.NOW, few=True)
    assert [device.id for device in few.devices] == IDS
    well = {str(number): Entry(Device(str(number)), State.PRESENT) for number in range(1000)}
    whole = status.resource(
        many := msgspec.structs.replace(facts, entries={**facts.entries, **well}), documents.counted(), documents.NOW
    )
    few = status.resource(many, documents.counted(), documents.NOW, few=True)
    assert [device.id for device in few.devices] == [*(IDS[number] for number in (2, 3, 5, 6, 7)), "3"]
    assert set(few.devices) < set(whole.devices)
    assert msgspec.structs.replace(few, devices=()) == msgspec.structs.replace(whole, devices=())
    ill = {str(number): Entry(Device(str(number)), State.UNHEALTHY, "hot") for number in range(1000)}
    few = status.resource(msgspec.structs.replace(facts, entries=ill), documents.counted(), documents.NOW, few=True)
    assert len(few.devices) == status.FEW


@pytest.mark.parametrize(("moment", "seconds"), [(documents.NOW - 5, 5.0), (documents.NOW + 3600, 0.0)])
def test_an_age_is_never_negative(moment: float, seconds: float) -> None:
    assert status.age(moment, documents.NOW) == seconds


def test_counts_of_other_resources_are_theirs() -> None:
    [_, other] = FULL.resources
    assert (other.name != RESOURCE, other.registrations, other.calls, other.last_gap_s) == (True, {}, {}, None)


def test_a_document_of_another_release_is_read() -> None:
    """One field more than we know, and none of those that have a default."""
    theirs = msgspec.to_builtins(FULL) | {
        "surprise": 1,
        "resources": [{"name": "r", "phase": "a new phase", "more": []}],
    }
    assert msgspec.convert(theirs, GatewayStatus).resources == (ResourceStatus(name="r", phase="a new phase"),)


def test_the_versions_are_those_that_run() -> None:
    found = status.build()
    assert all(version and version[0].isdigit() for version in msgspec.structs.astuple(found))


def test_the_schema_describes_every_record() -> None:
    definitions = schema(Gateways)["$defs"]
    assert set(definitions) >= {Gateways.__name__, GatewayStatus.__name__, ResourceStatus.__name__}
    assert all(definition["description"] for definition in definitions.values())
