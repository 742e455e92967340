"""What becomes of what a whole node saw: how outcomes are judged."""

from collections.abc import Sequence

import msgspec
import pytest

from gateway_lab.node.continuity import INF, Promise, judge
from gateway_lab.node.stage import Outcome

ALL_KEPT = {"bare": "kept", "deployed": "kept", "static": "kept"}
SEEN = Outcome("kubelet-term", "host service", "1.37", 0, 0.0, 0.0, ALL_KEPT, [], [])


def seen(**facts: object) -> Outcome:
    return msgspec.structs.replace(SEEN, **facts)


OUTCOMES = {
    "all well": (SEEN, Promise(), []),
    "a drop": (
        seen(drops=1, drop_ms=10_100.0),
        Promise(),
        ["the API server saw fewer GPUs for 10100 ms, expected at most 0"],
    ),
    "a drop that is allowed": (seen(drops=1, drop_ms=900.0), Promise(drop_ms=1000), []),
    "a gap": (
        seen(gap_ms=2_100.0),
        Promise(gap_ms=2_000),
        ["the kubelet's records had fewer GPUs for 2100 ms, expected at most 2000"],
    ),
    "another GPU": (
        seen(fates={"bare": "kept, another GPU"}),
        Promise(),
        ["pod bare was kept, another GPU, expected: kept"],
    ),
    "static pods are another matter": (
        seen(fates={"bare": "kept", "static": "replaced, another GPU"}),
        Promise(static=frozenset({"replaced, another GPU"})),
        [],
    ),
    "and only they": (
        seen(fates={"bare": "replaced, another GPU", "static": "kept"}),
        Promise(static=frozenset({"replaced, another GPU"})),
        [
            "pod bare was replaced, another GPU, expected: kept",
            "pod static was kept, expected: replaced, another GPU",
        ],
    ),
    "static pods may fail where that is said": (
        seen(fates={"static": "failed"}, failed=["pod static-node-1 failed", "pod bare failed"]),
        Promise(static=frozenset({"kept", "failed"})),
        ["pod bare failed"],
    ),
    "no promise to pods": (seen(fates={"bare": "failed"}), Promise(fates=frozenset()), []),
    "a pod failed": (seen(failed=["pod x failed"]), Promise(), ["pod x failed"]),
    "as it may": (seen(failed=["pod x failed"]), Promise(failed=True), []),
    "a GPU could not be opened": (seen(lost=["pod y"]), Promise(drop_ms=INF, failed=True), ["pod y"]),
}


@pytest.mark.parametrize(("outcome", "promise", "said"), OUTCOMES.values(), ids=OUTCOMES)
def test_outcomes_are_judged(outcome: Outcome, promise: Promise, said: Sequence[str]) -> None:
    assert judge(outcome, promise) == said
