"""What the benchmark does with its samples, what it writes of them, and whether its caller speaks HTTP/2. Nothing is timed here."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence

import pytest

from gateway_lab.bench.handovers import Looks
from gateway_lab.bench.measure import Bar, Report, counted, document, others, percentile, spread
from gateway_lab.kubelets.kubelet import Gap


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
    ("looks", "gap_ms"),
    [
        pytest.param([(1, 8), (2, 8), (3, 8)], 0, id="never gone"),
        pytest.param([(1, 8), (2, 0), (3, 8)], 2000, id="from the last look that had all to the first again"),
        pytest.param([(1, 8), (2, 7), (3, 0), (4, 3), (5, 8)], 4000, id="some are not all"),
        pytest.param([(1, 8), (2, 0), (4, 8), (5, 0), (6, 8)], 3000, id="the longest of several"),
        pytest.param([(1, 8), (2, 0)], 0, id="a gap that isn't over is none yet"),
    ],
)
def test_the_gap_of_a_handover(looks: Sequence[tuple[float, int]], gap_ms: float) -> None:
    seen = Looks(0.0)
    for at, count in looks:
        seen.saw(at, at, full=count == 8)
    assert seen.gap_ms == pytest.approx(gap_ms)


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
    report = Report([Bar("b", math.nan, 8, "ms")], {"never": {"max": math.inf}})
    report.keep("gap", "1.37", [1.00049, math.inf])
    found = json.loads(document(report), parse_constant=pytest.fail)
    assert (found["passed"], found["bars"][0]["measured"], found["bars"][0]["passed"]) == (False, None, False)
    assert found["figures"] == {"never": {"max": None}}
    assert found["samples"] == {"gap": {"1.37": [1.0, None]}}


def test_more_registers_than_one_are_told() -> None:
    assert others({1: 298, 2: 2}) == "2 times 2"
    assert others({1: 300, 2: 0}) == ""


# The yardstick.


def test_the_trivial_plugin_imports_nothing_of_the_gateway() -> None:
    """Or what the gateway costs beyond it would look smaller than it is."""
    code = "import sys, gateway_lab.trivial; print(*(name for name in sys.modules if name.startswith('gateway')))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["gateway_lab", "gateway_lab.trivial"]
