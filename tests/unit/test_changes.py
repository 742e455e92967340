"""What the log says of devices that are in another state than before: one row, one promise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from devices.life.states import Entry, State
from devices.model import Device, Health, TroubleKind
from gateway.telling.changes import MAX_LINES, tell

WELL = Entry(Device("g"), State.PRESENT)
UNSEEN = Entry(Device("g"), State.NOT_LOOKED_YET, "announced before a restart")
ILL = Entry(Device("g", Health.UNHEALTHY), State.UNHEALTHY, "Xid 79", kind=TroubleKind.RESET_REQUIRED)
WORSE = Entry(Device("g", Health.UNHEALTHY), State.UNHEALTHY, "Xid 48", kind=TroubleKind.RESET_REQUIRED)
OTHER = Entry(Device("h"), State.PRESENT)
AWAY = Entry(Device("g", Health.UNHEALTHY), State.ELSEWHERE, "offered by DRA")


def told(before: Mapping[str, Entry], after: Mapping[str, Entry]) -> list[Any]:
    with capture_logs() as lines:
        tell("example.com/gpu", before, after)
    return [
        (one["log_level"], one["was"], one["now"], one.get("reason", "")) if "was" in one else one["devices"]
        for one in lines
    ]


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        pytest.param({"g": WELL}, {"g": WELL}, [], id="nothing"),
        pytest.param({"g": WELL}, {"g": ILL}, [("warning", "healthy", "unhealthy", "Xid 79")], id="it falls ill"),
        pytest.param({"g": ILL}, {"g": WELL}, [("info", "unhealthy", "healthy", "")], id="it is well again"),
        pytest.param({"g": ILL}, {"g": WORSE}, [("warning", "unhealthy", "unhealthy", "Xid 48")], id="for another reason"),
        pytest.param({"g": WELL}, {"g": AWAY}, [("info", "healthy", "dra", "offered by DRA")], id="another API has it"),
        pytest.param({"g": WELL}, {}, [("info", "healthy", "not listed", "")], id="it goes"),
        pytest.param({"h": OTHER}, {"h": OTHER, "g": WELL}, [("info", "not listed", "healthy", "")], id="it comes"),
        pytest.param({}, {"g": WELL}, [], id="the first list"),
        pytest.param({}, {"g": ILL}, [("warning", "not listed", "unhealthy", "Xid 79")], id="ill from the start"),
        pytest.param({}, {"g": UNSEEN}, [], id="from memory"),
        pytest.param({"g": UNSEEN}, {"g": WELL}, [], id="found again after a restart"),
        pytest.param({"g": UNSEEN}, {"g": ILL}, [("warning", "not checked yet", "unhealthy", "Xid 79")], id="found ill"),
    ],
)  # fmt: skip
def test_each_change_is_a_line(before: Mapping[str, Entry], after: Mapping[str, Entry], lines: list[Any]) -> None:
    assert told(before, after) == lines


@pytest.mark.parametrize(("more", "rest"), [(0, []), (1, [1]), (9_000, [9_000])])
def test_of_many_some_are_told(more: int, rest: list[int]) -> None:
    names = [f"g{number}" for number in range(MAX_LINES + more)]
    lines = told(dict.fromkeys(names, WELL), dict.fromkeys(names, ILL))
    assert lines == [("warning", "healthy", "unhealthy", "Xid 79")] * MAX_LINES + rest
