"""``gateway cordon``, ``uncordon``, ``forget``: what running gateways are told, and what a person is told then."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from devices.model import Device
from gateway.cli.main import gateway
from gateway.memory.ledger import Ledger
from gateway.memory.rows import Cordon
from gateway.telling import orders
from gateway.telling.orders import FoundDevice, OrderOutcome
from gateway.wires.control import ControlError
from tests.unit.answering import By, gateways
from tests.unit.test_cli_devices import FULL, GPUS

OLDER, NEWER = "00000001", "00000002"
GPU = "nvidia.com/gpu"
FREE = OrderOutcome(changed=True, found=(FoundDevice(GPU, "present", "cordoned"),))
HELD = OrderOutcome(changed=True, found=(FoundDevice(GPU, "present", "cordoned", "default/train-0"),))
CORDON = ("cordon", "GPU-1", "--reason", "ECC")

Says = OrderOutcome | ControlError | dict[str, Any]


def call(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(gateway, arguments, env={"GATEWAY_STATE_DIR": str(folder)})


@pytest.mark.parametrize(
    ("arguments", "order"),
    [
        pytest.param(CORDON, orders.Order("cordon", "GPU-1", "ECC"), id="cordon"),
        pytest.param(("uncordon", "GPU-1"), orders.Order("uncordon", "GPU-1"), id="uncordon"),
        pytest.param(("forget", "GPU-1"), orders.Order("forget", "GPU-1"), id="forget"),
    ],
)
def test_every_living_gateway_is_told(folder: Path, arguments: tuple[str, ...], order: orders.Order) -> None:
    with gateways(folder, {OLDER: FREE, NEWER: FREE}, *orders.ORDERS) as told:
        assert call(folder, *arguments).exit_code == 0
    assert {token: orders.order(request) for token, request in told.items()} == {OLDER: order, NEWER: order}


@pytest.mark.parametrize(
    ("arguments", "says", "status", "expected"),
    [
        pytest.param(
            CORDON,
            {OLDER: FREE},
            0,
            ["GPU-1 is cordoned: ECC", f"gateway {OLDER}: {GPU}: was present, is cordoned"],
            id="cordoned",
        ),
        pytest.param(
            CORDON,
            {OLDER: HELD},
            0,
            [
                "GPU-1 is cordoned: ECC",
                f"gateway {OLDER}: {GPU}: was present, is cordoned, held by default/train-0",
                "Who holds it keeps it; nobody else gets it.",
            ],
            id="cordoned while a pod holds it",
        ),
        pytest.param(
            CORDON,
            {OLDER: OrderOutcome(changed=False, found=(FoundDevice(GPU, "cordoned", "cordoned"),))},
            0,
            ["GPU-1 was cordoned already: ECC", f"gateway {OLDER}: {GPU}: is cordoned, as before"],
            id="cordoned already",
        ),
        pytest.param(
            CORDON,
            {OLDER: OrderOutcome(changed=True)},
            0,
            [
                "GPU-1 is cordoned: ECC",
                "No resource has a device of this ID now: is it spelled right? The cordon counts once there is one.",
            ],
            id="an ID that no resource has",
        ),
        pytest.param(
            ("uncordon", "GPU-1"),
            {OLDER: OrderOutcome(changed=True, found=(FoundDevice(GPU, "cordoned", "unhealthy"),))},
            0,
            ["GPU-1 is no longer cordoned", f"gateway {OLDER}: {GPU}: was cordoned, is unhealthy"],
            id="uncordoned",
        ),
        pytest.param(
            ("uncordon", "GPU-1"),
            {OLDER: OrderOutcome(changed=True, found=(FoundDevice(GPU, "cordoned", "present", "default/train-0"),))},
            0,
            [
                "GPU-1 is no longer cordoned",
                f"gateway {OLDER}: {GPU}: was cordoned, is present, held by default/train-0",
            ],
            id="uncordoned while a pod holds it",
        ),
        pytest.param(
            ("uncordon", "GPU-1"),
            {OLDER: OrderOutcome(changed=False)},
            0,
            ["GPU-1 was not cordoned"],
            id="not cordoned",
        ),
        pytest.param(
            ("forget", "GPU-1"),
            {OLDER: OrderOutcome(changed=True, found=(FoundDevice(GPU, "lost", "forgotten"),))},
            0,
            ["what was remembered of GPU-1 is forgotten", f"gateway {OLDER}: {GPU}: was lost, is forgotten"],
            id="forgotten",
        ),
        pytest.param(
            ("forget", "GPU-1"),
            {OLDER: OrderOutcome(changed=False)},
            0,
            ["GPU-1 is on no list: nothing to forget"],
            id="nothing to forget",
        ),
        pytest.param(
            ("forget", "GPU-1"),
            {OLDER: ControlError("default/train-0 holds it")},
            1,
            [f"gateway {OLDER}: default/train-0 holds it"],
            id="refused",
        ),
        pytest.param(
            CORDON,
            {OLDER: FREE, NEWER: ControlError("unknown op 'cordon'")},
            1,
            [
                "GPU-1 is cordoned: ECC",
                f"gateway {OLDER}: {GPU}: was present, is cordoned",
                f"gateway {NEWER}: unknown op 'cordon'",
            ],
            id="one of two gateways refuses",
        ),
        pytest.param(
            CORDON,
            {OLDER: {"changed": True, "later": "field", "found": []}},
            0,
            [
                "GPU-1 is cordoned: ECC",
                "No resource has a device of this ID now: is it spelled right? The cordon counts once there is one.",
            ],
            id="a field of a later release",
        ),
        pytest.param(
            CORDON,
            {OLDER: {"done": True}},
            1,
            [
                (
                    f"gateway {OLDER}: its answer can't be read (Object missing required field `changed`), "
                    "so it is of another release: use that release's command"
                )
            ],
            id="an answer of another kind",
        ),
    ],
)
def test_what_a_person_is_told(
    folder: Path, arguments: tuple[str, ...], says: Mapping[str, Says], status: int, expected: list[str]
) -> None:
    with gateways(folder, says, *orders.ORDERS):
        result = call(folder, *arguments)
    assert (result.output.splitlines(), result.exit_code) == (expected, status)


@pytest.mark.parametrize("name", ["1", "GPU-1", GPUS[1]])
@pytest.mark.parametrize("op", orders.ORDERS)
def test_short_names_stand_for_whole_ids(folder: Path, op: str, name: str) -> None:
    reason = ["--reason", "ECC"] if op == "cordon" else []
    outcome = replace(FREE, changed=op != "uncordon")  # None is cordoned under the short name.
    with gateways(folder, {OLDER: By({"devices": FULL, op: outcome})}, "devices", op) as told:
        assert call(folder, op, name, *reason).exit_code == 0
    assert told[OLDER]["id"] == GPUS[1]


@pytest.mark.parametrize(
    "one",
    [
        pytest.param("/dev/fpga0", id="shared since, and short for several"),
        pytest.param(GPUS[1][:-1], id="on no list, and short for another"),
    ],
)
def test_what_is_cordoned_is_uncordoned_by_its_id_whatever_is_offered_now(folder: Path, one: str) -> None:
    with gateways(folder, {OLDER: By({"devices": FULL, "uncordon": FREE})}, "devices", "uncordon") as told:
        assert call(folder, "uncordon", one).exit_code == 0
    assert told[OLDER]["id"] == one


def test_a_name_that_is_short_for_several_does_nothing(folder: Path) -> None:
    with gateways(folder, {OLDER: By({"devices": FULL, "cordon": FREE})}, "devices", "cordon") as told:
        result = call(folder, "cordon", "GPU-", "--reason", "ECC")
    assert (result.exit_code, told[OLDER]["op"]) == (1, "devices")
    assert f"is short for 3 devices: {', '.join(GPUS[:3])}. Nothing was done" in result.output


def test_what_a_script_is_told(folder: Path) -> None:
    with gateways(folder, {OLDER: HELD, NEWER: ControlError("busy")}, *orders.ORDERS):
        result = call(folder, *CORDON, "--json")
    assert json.loads(result.output) == {
        "op": "cordon",
        "id": "GPU-1",
        "gateways": {
            OLDER: {
                "changed": True,
                "found": [{"resource": GPU, "before": "present", "now": "cordoned", "holder": "default/train-0"}],
            },
            NEWER: {"error": "busy"},
        },
        "ledger": None,
    }
    assert result.exit_code == 1


# Where no gateway runs.

OFFLINE = [
    pytest.param({}, CORDON, {"GPU-1": "ECC"}, "GPU-1 is cordoned: ECC", id="cordon"),
    pytest.param({"GPU-1": "ECC"}, CORDON, {"GPU-1": "ECC"}, "GPU-1 was cordoned already: ECC", id="cordon again"),
    pytest.param({"GPU-1": "old"}, CORDON, {"GPU-1": "ECC"}, "GPU-1 is cordoned: ECC", id="another reason"),
    pytest.param({"GPU-1": "ECC", "GPU-2": "fan"}, ("uncordon", "GPU-1"), {"GPU-2": "fan"}, "no longer", id="uncordon"),
    pytest.param({"GPU-2": "fan"}, ("uncordon", "GPU-1"), {"GPU-2": "fan"}, "was not cordoned", id="uncordon nothing"),
]


@pytest.mark.parametrize(
    ("announced", "cordoned", "arguments", "after", "says"),
    [
        (["GPU-1a", "GPU-2"], [], ("cordon", "GPU-1"), ["GPU-1a"], "GPU-1a is cordoned"),
        (["GPU-2"], ["GPU-1a"], ("uncordon", "GPU-1"), [], "GPU-1a is no longer cordoned"),
        (["GPU-1a", "GPU-1b"], [], ("cordon", "GPU-1"), [], "short for 2 devices: GPU-1a, GPU-1b. Nothing was done"),
        (["GPU-2"], [], ("cordon", "GPU-1"), ["GPU-1"], "never had a device of the ID GPU-1"),
        ([], [], ("cordon", "GPU-1"), ["GPU-1"], "GPU-1 is cordoned"),
        (
            ["GPU-1a"],
            [],
            ("cordon", "0"),
            [],
            "device has the index 0. Nothing was done: write the device's ID, one of GPU-1a,",
        ),
        (["GPU-1a"], ["GPU-1a"], ("uncordon", "0"), ["GPU-1a"], "device has the index 0. Nothing was done"),
        ([], ["0"], ("uncordon", "0"), [], "0 is no longer cordoned"),
    ],
    ids=[
        *("one of those announced", "one of those cordoned", "several", "a strange one", "a new node"),
        *("an index", "an index, uncordon", "an ID that looks like one"),
    ],
)
def test_short_names_without_a_gateway(
    folder: Path, announced: list[str], cordoned: list[str], arguments: tuple[str, ...], after: list[str], says: str
) -> None:
    ledger = Ledger(folder)
    ledger.announce(GPU, tuple(map(Device, announced)))
    ledger.save(ledger.snapshot())
    _write(folder, dict.fromkeys(cordoned, "ECC"))
    result = call(folder, *arguments, *(["--reason", "ECC"] if arguments[0] == "cordon" else []))
    assert (sorted(_cordons(folder)), says in result.output) == (after, True), result.output
    assert ("spelled right?" in result.output) is ("never had" in says)


@pytest.mark.parametrize(("before", "arguments", "after", "says"), OFFLINE)
def test_the_ledger_is_told(
    folder: Path, before: Mapping[str, str], arguments: tuple[str, ...], after: Mapping[str, str], says: str
) -> None:
    _write(folder, before)
    result = call(folder, *arguments)
    assert (_cordons(folder), result.exit_code) == (after, 0)
    assert says in result.output
    assert f"{folder}/ledger.json, and counts from the gateway's next start" in result.output


def test_the_ledger_in_json(folder: Path) -> None:
    result = call(folder, *CORDON, "--json")
    assert json.loads(result.output) == {
        "op": "cordon",
        "id": "GPU-1",
        "gateways": {},
        "ledger": {"path": f"{folder}/ledger.json", "changed": True},
    }


def test_a_damaged_ledger_is_put_aside_and_the_cordon_written(folder: Path) -> None:
    (folder / "ledger.json").write_text("{")
    result = call(folder, *CORDON)
    assert (_cordons(folder), result.exit_code) == ({"GPU-1": "ECC"}, 0)
    assert "put aside" in result.output


def test_nothing_is_forgotten_while_nobody_knows_who_holds_it(folder: Path) -> None:
    result = call(folder, "forget", "GPU-1")
    assert (result.exit_code, list(folder.iterdir())) == (1, [])
    assert "no gateway runs" in result.output


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        pytest.param(("cordon", "GPU-1"), 2, "Missing option '--reason'", id="no reason"),
        pytest.param(("cordon", "GPU-1", "--reason", " "), 2, "expected a reason", id="an empty reason"),
        pytest.param(("cordon", "GPU-1", "--reason", "a\nb"), 2, "expected a reason", id="a reason of two lines"),
        pytest.param(("cordon", "GPU\x1b", "--reason", "ECC"), 2, "expected a device ID", id="an ID nobody can print"),
        pytest.param(("uncordon",), 2, "Missing argument 'ID'", id="no ID"),
        pytest.param((*CORDON, "--state-dir", "/dev/null"), 1, "Not a directory. Correct --state-dir", id="no folder"),
        pytest.param(("uncordon", "GPU-1", "--state-dir", "/proc"), 0, "was not cordoned", id="nothing to write"),
        pytest.param((*CORDON, "--state-dir", "/proc"), 1, "could not write", id="a folder that can't be written"),
        pytest.param((*CORDON, "--state-dir", "/none"), 1, "no folder /none, so no gateway", id="a slip in the folder"),
        pytest.param(("uncordon", "GPU-1", "--state-dir", "/none"), 1, "correct --state-dir", id="a slip, uncordon"),
    ],
)
def test_a_wrong_call(folder: Path, arguments: tuple[str, ...], status: int, says: str) -> None:
    result = call(folder, *arguments)
    assert (result.exit_code, says in result.output) == (status, True), result.output


def _write(folder: Path, cordons: Mapping[str, str]) -> None:
    ledger = Ledger(folder)
    ledger.load()
    for device_id, reason in cordons.items():
        ledger.cordon(device_id, Cordon(reason, 1.0))
    ledger.save(ledger.snapshot())


def _cordons(folder: Path) -> dict[str, str]:
    ledger = Ledger(folder)
    ledger.load()
    return {device_id: cordon.reason for device_id, cordon in ledger.cordons.items()}
