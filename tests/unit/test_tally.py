"""What is counted: the cause of each registration, and that nothing that is counted can grow without bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import tally
from gateway.kubelet.identity import KubeletId
from gateway.registration import machine as registration
from gateway.registration.events import (
    Event,
    Fired,
    KubeletUp,
    Reached,
    Renew,
    Replied,
    Resume,
    SendRegister,
    StandBy,
    StreamEnded,
    StreamOpened,
    Timer,
    Verified,
    Withhold,
)
from gateway.tally import Cause, Counts, Histogram, Histograms, Tally

K1, K2 = KubeletId(1, 1, 1), KubeletId(1, 2, 2)
RETRY = Fired(Timer.RETRY)
SERVING: tuple[Event, ...] = (KubeletUp(K1), Reached(1, K1), Replied(1, "OK"), StreamOpened(1))
RENEWED = (*SERVING, Renew("options"), RETRY, Reached(2, K1), Replied(2, "OK"), StreamOpened(2))


CAUSES = {
    "the first kubelet": ((KubeletUp(K1),), Cause.FIRST),
    "the next one came before it was reached": ((KubeletUp(K1), Reached(1, K2)), Cause.FIRST),
    "it calls once it has answered": (SERVING, Cause.FIRST),
    "another dialect is no other cause": ((KubeletUp(K1), Replied(1, "UNIMPLEMENTED")), Cause.FIRST),
    "a kubelet starts": ((*SERVING, KubeletUp(K2)), Cause.KUBELET_START),
    "a kubelet restarts": ((*SERVING, StreamEnded(1), KubeletUp(K2)), Cause.KUBELET_START),
    "a kubelet that nobody told of": ((*SERVING, StreamEnded(1), RETRY, Reached(2, K2)), Cause.KUBELET_START),
    "the stream is cut": ((*SERVING, StreamEnded(1), RETRY), Cause.STREAM_ENDED),
    "who called and left was not the kubelet": (
        (KubeletUp(K1), Reached(1, K1), StreamOpened(1), StreamEnded(1), Replied(1, "UNIMPLEMENTED")),
        Cause.FIRST,
    ),
    "a look that ends after the stream": ((*SERVING, StreamEnded(1), Verified(held=False), RETRY), Cause.STREAM_ENDED),
    "a poll sees the known kubelet": ((*SERVING, StreamEnded(1), KubeletUp(K1), RETRY), Cause.STREAM_ENDED),
    "the stream is cut before Register answers": (
        (KubeletUp(K1), Reached(1, K1), StreamOpened(1), StreamEnded(1), Replied(1, "OK"), RETRY),
        Cause.STREAM_ENDED,
    ),
    "no answer": ((KubeletUp(K1), Replied(1, "DEADLINE_EXCEEDED"), RETRY), Cause.ERROR),
    "no answer, but it called": (
        (KubeletUp(K1), Reached(1, K1), StreamOpened(1), Replied(1, "DEADLINE_EXCEEDED")),
        Cause.FIRST,
    ),
    "refused": ((KubeletUp(K1), Replied(1, "UNKNOWN", "no"), RETRY), Cause.ERROR),
    "never called": ((*SERVING[:3], Fired(Timer.CALL), RETRY), Cause.NEVER_CALLED),
    "the records lack us": ((*SERVING, Verified(held=False), RETRY), Cause.RECORDS),
    "our own end of a stream is no cut": ((*SERVING, Verified(held=False), StreamEnded(1), RETRY), Cause.RECORDS),
    "other options": ((*SERVING, Renew("options"), RETRY), Cause.OPTIONS),
    "other options while a Register is in flight": (
        (KubeletUp(K1), Reached(1, K1), Renew("options"), Replied(1, "OK"), StreamOpened(1), RETRY),
        Cause.OPTIONS,
    ),
    "and the kubelet had called before it answered": (
        (KubeletUp(K1), Reached(1, K1), StreamOpened(1), Renew("options"), Replied(1, "OK"), RETRY),
        Cause.OPTIONS,
    ),
    "a cut before it is time for other options": (
        (*RENEWED, Renew("again"), StreamEnded(2), RETRY),
        Cause.STREAM_ENDED,
    ),
    "it is time for other options": ((*RENEWED, Renew("again"), Fired(Timer.RENEW), RETRY), Cause.OPTIONS),
    "it is time for other options, after a cut": (
        (*RENEWED, Renew("again"), StreamEnded(2), Fired(Timer.RENEW), RETRY),
        Cause.STREAM_ENDED,
    ),
    "the other gateway is gone": ((*SERVING, StandBy(), Resume(), RETRY), Cause.HANDOVER),
    "a kubelet came while another gateway served": (
        (*SERVING, StandBy(), KubeletUp(K2), Resume(), RETRY),
        Cause.HANDOVER,
    ),
    "the list fits again": ((*SERVING, Withhold("too large"), Resume(), RETRY), Cause.OFFERED),
}


@pytest.mark.parametrize(("events", "why"), CAUSES.values(), ids=CAUSES)
def test_the_cause_of_a_registration(events: tuple[Event, ...], why: Cause) -> None:
    state, offered = registration.start("t", "auto", ""), None
    for event in events:
        state, actions = registration.step(state, event)
        offered = state.why if any(isinstance(action, SendRegister) for action in actions) else offered
    assert state.why is why
    assert offered is not None  # a registration came of it


@pytest.mark.parametrize(
    "event", [StreamEnded(9), Fired(Timer.CALL), Verified(held=True), Resume(), Fired(Timer.VERIFY)]
)
def test_what_changes_nothing_is_no_cause(event: Event) -> None:
    state = registration.start("t", "auto", "")
    for before in SERVING:
        state, _ = registration.step(state, before)
    after, _ = registration.step(state, event)
    assert (after.phase, after.why) == (state.phase, state.why)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 20).map(str)), max_size=60))
def test_counts_lose_nothing_and_stay_small(labels: list[tuple[str, str]]) -> None:
    counts = Counts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tally, "MOST_LABELS", 8)
        for some in labels:
            counts.add(*some)
    assert sum(counts.values()) == len(labels)
    assert len(counts) <= 8 + 1


def test_what_is_too_many_is_counted_as_other() -> None:
    counts, histograms = Counts(), Histograms(tally.GAP_BOUNDS)
    for number in range(tally.MOST_LABELS + 3):
        counts.add("resource", str(number))
        histograms.add(0.5, str(number))
    assert counts[tally.OTHER, tally.OTHER] == 3
    assert len(histograms) == tally.MOST_HISTOGRAMS + 1
    assert sum(histograms[tally.OTHER,].counts) == tally.MOST_LABELS + 3 - tally.MOST_HISTOGRAMS


@given(st.lists(st.floats(0, 100), max_size=50))
def test_a_histogram_counts_each_value_below_its_bound(values: list[float]) -> None:
    histogram = Histogram(tally.GAP_BOUNDS)
    for value in values:
        histogram.add(value)
    at_most = [sum(histogram.counts[: place + 1]) for place in range(len(tally.GAP_BOUNDS))]
    assert at_most == [sum(value <= bound for value in values) for bound in tally.GAP_BOUNDS]
    assert sum(histogram.counts) == len(values)
    assert histogram.sum == pytest.approx(sum(values))


@pytest.mark.parametrize(
    ("late", "asked", "worst"),
    [
        ([], 10, 0),
        ([(0.3, 10), (0.1, 20)], 30, 0.3),
        ([(0.3, 59), (0.1, 61)], 100, 0.3),
        ([(0.3, 59)], 119, 0.3),
        ([(0.3, 59), (0.1, 61)], 125, 0.1),
        ([(0.3, 59)], 125, 0),
        ([(0.3, 59)], 100_000, 0),
    ],
)
def test_the_worst_lag_is_remembered_for_a_minute_or_two(
    late: list[tuple[float, float]], asked: float, worst: float
) -> None:
    counted = Tally()
    for seconds, now in late:
        counted.late(seconds, now)
    assert counted.lag(asked) == worst


def test_the_last_gaps_of_so_many_resources_are_kept_and_of_no_more() -> None:
    counted = Tally()
    for number in range(tally.MOST_HISTOGRAMS + 3):
        counted.restart_gap(f"r{number}", 0.1)
    counted.restart_gap("r0", 0.2)
    assert (len(counted.last_gaps), counted.last_gaps["r0"]) == (tally.MOST_HISTOGRAMS, 0.2)
