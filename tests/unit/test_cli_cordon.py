"""``gateway cordon``: what gateways of other releases answer, and what a person is told of that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gateway.cli.main import gateway
from gateway.telling import orders
from gateway.telling.orders import FoundDevice, OrderOutcome
from gateway.wires.control import ControlError
from tests.unit.answering import gateways

OLDER, NEWER = "00000001", "00000002"
GPU = "nvidia.com/gpu"
FREE = OrderOutcome(changed=True, found=(FoundDevice(GPU, "healthy", "cordoned"),))

Says = OrderOutcome | ControlError | dict[str, Any]


@pytest.mark.parametrize(
    ("says", "status", "expected"),
    [
        pytest.param(
            {OLDER: FREE, NEWER: ControlError("unknown op 'cordon'")},
            1,
            [
                "GPU-1 is cordoned: ECC",
                f"gateway {OLDER}: {GPU}: was healthy, is cordoned",
                f"gateway {NEWER}: unknown op 'cordon'",
            ],
            id="one of two gateways refuses",
        ),
        pytest.param(
            {OLDER: {"changed": True, "later": "field", "found": []}},
            0,
            [
                "GPU-1 is cordoned: ECC",
                "No resource has a device of this ID now: is it spelled right? The cordon counts once there is one.",
            ],
            id="a field of a later release",
        ),
        pytest.param(
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
def test_what_a_person_is_told(folder: Path, says: Mapping[str, Says], status: int, expected: list[str]) -> None:
    with gateways(folder, says, *orders.ORDERS):
        words = ("cordon", "GPU-1", "--reason", "ECC")
        result = CliRunner().invoke(gateway, words, env={"GATEWAY_STATE_DIR": str(folder)})
    assert (result.output.splitlines(), result.exit_code) == (expected, status)
