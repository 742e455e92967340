"""What the benchmark does with its samples. Nothing is timed here."""

from __future__ import annotations

import json
import math
import os

import pytest

from gateway.lab.bench.measure import Bar, Report, counted, document, percentile, spread
from gateway.lab.footprint import Footprint, footprint
from gateway.lab.kubelet import Gap


@pytest.mark.parametrize(
    ("percent", "value"),
    [
        pytest.param(0, 1, id="0: the least"),
        pytest.param(50, 50, id="50: the middle"),
        pytest.param(99, 99, id="99"),
        pytest.param(100, 100, id="100: the most"),
    ],
)
def test_percentiles_are_samples(percent: float, value: float) -> None:
    assert percentile(range(100, 0, -1), percent) == value


def test_no_samples_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        percentile([], 50)


def test_the_spread_of_samples() -> None:
    assert spread([1, 2, 3, 10]) == {"min": 1, "median": 2.5, "p99": 10, "max": 10, "n": 4}


@pytest.mark.parametrize(
    ("gap", "late", "counts"),
    [
        pytest.param(5, 0, True, id="short"),
        pytest.param(5, 50, True, id="short, whatever the timer did"),
        pytest.param(61, 20, True, id="long, and the timer was in time"),
        pytest.param(61, 60, True, id="long, and the timer was almost as late"),
        pytest.param(61, 61, False, id="long, and the timer was as late: the machine's fault"),
    ],
)
def test_which_gaps_count(gap: float, late: float, *, counts: bool) -> None:
    assert counted([Gap(gap, late)], 60) == ([gap] if counts else [])


@pytest.mark.parametrize(
    ("bar", "passed"),
    [
        pytest.param(Bar("b", 7.9, 8, "ms"), True, id="below"),
        pytest.param(Bar("b", 8, 8, "ms"), False, id="at the bar is not below it"),
        pytest.param(Bar("b", math.inf, 8, "ms"), False, id="never"),
        pytest.param(Bar("b", math.nan, 8, "ms"), False, id="what wasn't measured wasn't kept"),
        pytest.param(Bar("b", 1, 1, "", exact=True), True, id="exactly"),
        pytest.param(Bar("b", 0, 1, "", exact=True), False, id="not exactly"),
    ],
)
def test_when_a_bar_is_kept(bar: Bar, *, passed: bool) -> None:
    assert bar.passed is passed
    assert Report([bar]).passed is passed


def test_a_report_without_bars_proves_nothing() -> None:
    assert not Report().passed


def test_the_document_is_strict_json() -> None:
    found = json.loads(document(Report([Bar("b", math.nan, 8, "ms")])), parse_constant=pytest.fail)
    assert (found["passed"], found["bars"][0]["measured"], found["bars"][0]["passed"]) == (False, None, False)


def test_the_footprint_of_a_process() -> None:
    before = footprint(os.getpid())
    now = footprint(os.getpid())
    assert 0 < now.pss <= now.rss
    assert now.since(before).cpu >= 0
    assert now.since(before).switches >= 0


def test_footprints_are_compared() -> None:
    mine, other = Footprint(30, 40, 6, 130), Footprint(20, 35, 5, 150)
    assert mine.over(other) == Footprint(10, 5, 1, -20)
    assert mine.since(other) == Footprint(30, 40, 1, -20)
