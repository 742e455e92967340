"""What scenarios on a whole node promise, and how what was seen is written down."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from gateway_lab.node.continuity import INF, SCENARIOS, Promise, judge, walk
from gateway_lab.node.page import table, write
from gateway_lab.node.stage import Outcome

ALL_KEPT = {"bare": "kept", "deployed": "kept", "static": "kept"}
SEEN = Outcome("kubelet-term", "host service", "1.37", 0, 0.0, 0.0, ALL_KEPT, [], [])


def seen(**facts: object) -> Outcome:
    return msgspec.structs.replace(SEEN, **facts)


@pytest.mark.parametrize(
    ("outcome", "promise", "said"),
    [
        pytest.param(SEEN, Promise(), [], id="all well"),
        pytest.param(
            seen(drops=1, drop_ms=10_100.0),
            Promise(),
            ["the API server saw fewer GPUs for 10100 ms, expected at most 0"],
            id="a drop",
        ),
        pytest.param(seen(drops=1, drop_ms=900.0), Promise(drop_ms=1000), [], id="a drop that is allowed"),
        pytest.param(
            seen(gap_ms=2_100.0),
            Promise(gap_ms=2_000),
            ["the kubelet's records had fewer GPUs for 2100 ms, expected at most 2000"],
            id="a gap",
        ),
        pytest.param(
            seen(fates={"bare": "kept, another GPU"}),
            Promise(),
            ["pod bare was kept, another GPU, expected: kept"],
            id="another GPU",
        ),
        pytest.param(
            seen(fates={"bare": "kept", "static": "replaced, another GPU"}),
            Promise(static=frozenset({"replaced, another GPU"})),
            [],
            id="static pods are another matter",
        ),
        pytest.param(
            seen(fates={"bare": "replaced, another GPU", "static": "kept"}),
            Promise(static=frozenset({"replaced, another GPU"})),
            [
                "pod bare was replaced, another GPU, expected: kept",
                "pod static was kept, expected: replaced, another GPU",
            ],
            id="and only they",
        ),
        pytest.param(
            seen(fates={"static": "failed"}, failed=["pod static-node-1 failed", "pod bare failed"]),
            Promise(static=frozenset({"kept", "failed"})),
            ["pod bare failed"],
            id="static pods may fail where that is said",
        ),
        pytest.param(seen(fates={"bare": "failed"}), Promise(fates=frozenset()), [], id="no promise to pods"),
        pytest.param(seen(failed=["pod x failed"]), Promise(), ["pod x failed"], id="a pod failed"),
        pytest.param(seen(failed=["pod x failed"]), Promise(failed=True), [], id="as it may"),
        pytest.param(
            seen(lost=["pod y"]), Promise(drop_ms=INF, failed=True), ["pod y"], id="a GPU could not be opened"
        ),
    ],
)
def test_outcomes_are_judged(outcome: Outcome, promise: Promise, said: Sequence[str]) -> None:
    assert judge(outcome, promise) == said


def test_a_walk_goes_up_and_down_and_changes_the_kubelet_as_seldom_as_that_takes() -> None:
    steps = [(version, one.name) for version, one in walk(("1.32", "1.37"), "host service")]
    assert steps[:4] == [
        ("1.32", "kubelet-term"),
        ("1.32", "kubelet-kill"),
        ("1.32", "to-1.37"),
        ("1.37", "kubelet-term"),
    ]
    assert steps[-1] == ("1.37", "to-1.32")
    assert ("1.37", "pod-deleted") not in steps
    assert ("1.37", "pod-deleted") in [(version, one.name) for version, one in walk(("1.37",), "DaemonSet")]


def test_a_table_counts_what_was_seen() -> None:
    outcomes = [
        SEEN,
        seen(
            drops=1,
            drop_ms=10_040.0,
            gap_ms=300.0,
            fates={**ALL_KEPT, "static": "failed"},
            failed=["pod static failed"],
        ),
        seen(scenario="to-1.36", kubelet="1.37 -> 1.36"),
        seen(scenario="reboot", installed="DaemonSet", lost=["pod x could not open"], facts={"took, s": 3.5, "x": "a"}),
        seen(scenario="reboot", installed="DaemonSet", facts={"took, s": 1.0, "x": "b"}),
    ]
    words = {name: one.words for name, one in SCENARIOS.items()}
    assert table(outcomes, words).splitlines()[2:] == [
        "| the kubelet is replaced by another version (`to-1.36`) | 1.37 -> 1.36 | all (1) | kept | - | - |",
        (
            "| the kubelet is restarted (TERM) (`kubelet-term`) | 1.37 "
            "| fewer in 1 of 2, for 10.0 s "
            "| bare and deployed: kept; static: kept (1), failed (1) | - | - |"
        ),
        "| the node loses power and boots (`reboot`) | 1.37 | - | - | all (2) | kept; GPUs that could not be opened in 1 |",
        "",
        "- `reboot`, DaemonSet: took, s: 1 to 3.5; x: a, or b",
    ]


def test_a_page_is_written_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x: measured, begin -->\nold\n<!-- x: measured, end -->\nb\n")
    write(page, "x", "new\n")
    assert page.read_text() == "a\n<!-- x: measured, begin -->\nnew\n<!-- x: measured, end -->\nb\n"
    with pytest.raises(ValueError, match="write them around the table"):
        write(page, "y", "new\n")
