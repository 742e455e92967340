"""Whether a device whose Allocate took long may be given again: no kubelet's forgetting puts it into two pods."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from devices.model import Fault
from gateway.bridge.doubt import BOOKED, QUICK, Doubts, refusal

LONG = QUICK


@pytest.mark.parametrize(
    ("before", "took", "doubted"),
    [
        pytest.param((), 0.001, (), id="answered at once"),
        pytest.param((), LONG, ("a",), id="it took long"),
        pytest.param(("a",), 0.001, ("a",), id="it was looked up while its Allocate was open"),
        pytest.param(("b",), 0.001, ("b",), id="another one's doubt"),
    ],
)
def test_what_is_in_doubt_after_an_allocate(before: tuple[str, ...], took: float, doubted: tuple[str, ...]) -> None:
    doubts = Doubts()
    doubts.given(before, LONG, 0)
    doubts.given(("a",), took, 100)
    assert doubts.among(("a", "b")) == set(doubted)


@pytest.mark.parametrize(
    ("held", "at", "doubted"),
    [
        pytest.param((), 100 + BOOKED, False, id="nobody holds it"),
        pytest.param(("a",), 1000, True, id="somebody holds it"),
        pytest.param((), 100, True, id="the kubelet may not have written it down"),
    ],
)
def test_a_doubt_is_over_when_nobody_holds_the_device(held: tuple[str, ...], at: float, *, doubted: bool) -> None:
    doubts = Doubts()
    doubts.given(("a",), LONG, 100)
    assert doubts.seen(held, at) is not doubted
    assert bool(doubts.among(("a",))) is doubted


def test_what_was_given_again_is_in_doubt_from_then_on() -> None:
    doubts = Doubts()
    doubts.given(("a",), LONG, 0)
    doubts.given(("a",), 0.001, 100)
    assert not doubts.seen((), 100)


@pytest.mark.parametrize(
    ("holders", "fault"),
    [
        pytest.param({}, None, id="free"),
        pytest.param({"b": "ns/pod/main"}, None, id="another one is held"),
        pytest.param({"a": "ns/pod/main"}, Fault.FAILED_PRECONDITION, id="held"),
        pytest.param(None, Fault.UNAVAILABLE, id="nobody says"),
    ],
)
def test_what_is_refused(holders: Mapping[str, str] | None, fault: Fault | None) -> None:
    refused = refusal("vendor.example/nic", ("a",), holders)
    assert (refused.fault if refused is not None else None) is fault
    assert holders is None or refused is None or "ns/pod/main" in str(refused)
