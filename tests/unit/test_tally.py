"""What is counted: the cause of each registration, and that nothing that is counted can grow without bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import tally
from gateway.kubelet.watch import KubeletId
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


@pytest.mark.parametrize(
    ("events", "why"),
    [
        pytest.param((KubeletUp(K1),), Cause.FIRST, id="the first kubelet"),
        pytest.param((KubeletUp(K1), Reached(1, K2)), Cause.FIRST, id="the next one came before it was reached"),
        pytest.param(SERVING, Cause.FIRST, id="it calls once it has answered"),
        pytest.param((KubeletUp(K1), Replied(1, "UNIMPLEMENTED")), Cause.FIRST, id="another dialect is no other cause"),
        pytest.param((*SERVING, KubeletUp(K2)), Cause.KUBELET_START, id="a kubelet starts"),
        pytest.param((*SERVING, StreamEnded(1), KubeletUp(K2)), Cause.KUBELET_START, id="a kubelet restarts"),
        pytest.param(
            (*SERVING, StreamEnded(1), RETRY, Reached(2, K2)), Cause.KUBELET_START, id="a kubelet that nobody told of"
        ),
        pytest.param((*SERVING, StreamEnded(1), RETRY), Cause.STREAM_ENDED, id="the stream is cut"),
        pytest.param(
            (KubeletUp(K1), Reached(1, K1), StreamOpened(1), StreamEnded(1), Replied(1, "UNIMPLEMENTED")),
            Cause.FIRST,
            id="who called and left was not the kubelet",
        ),
        pytest.param(
            (*SERVING, StreamEnded(1), Verified(held=False), RETRY),
            Cause.STREAM_ENDED,
            id="a look that ends after the stream",
        ),
        pytest.param(
            (*SERVING, StreamEnded(1), KubeletUp(K1), RETRY), Cause.STREAM_ENDED, id="a poll sees the known kubelet"
        ),
        pytest.param(
            (KubeletUp(K1), Reached(1, K1), StreamOpened(1), StreamEnded(1), Replied(1, "OK"), RETRY),
            Cause.STREAM_ENDED,
            id="the stream is cut before Register answers",
        ),
        pytest.param((KubeletUp(K1), Replied(1, "DEADLINE_EXCEEDED"), RETRY), Cause.ERROR, id="no answer"),
        pytest.param(
            (KubeletUp(K1), Reached(1, K1), StreamOpened(1), Replied(1, "DEADLINE_EXCEEDED")),
            Cause.FIRST,
            id="no answer, but it called",
        ),
        pytest.param((KubeletUp(K1), Replied(1, "UNKNOWN", "no"), RETRY), Cause.ERROR, id="refused"),
        pytest.param((*SERVING[:3], Fired(Timer.CALL), RETRY), Cause.NEVER_CALLED, id="never called"),
        pytest.param((*SERVING, Verified(held=False), RETRY), Cause.RECORDS, id="the records lack us"),
        pytest.param(
            (*SERVING, Verified(held=False), StreamEnded(1), RETRY),
            Cause.RECORDS,
            id="our own end of a stream is no cut",
        ),
        pytest.param((*SERVING, Renew("options"), RETRY), Cause.OPTIONS, id="other options"),
        pytest.param(
            (KubeletUp(K1), Reached(1, K1), Renew("options"), Replied(1, "OK"), StreamOpened(1), RETRY),
            Cause.OPTIONS,
            id="other options while a Register is in flight",
        ),
        pytest.param(
            (KubeletUp(K1), Reached(1, K1), StreamOpened(1), Renew("options"), Replied(1, "OK"), RETRY),
            Cause.OPTIONS,
            id="and the kubelet had called before it answered",
        ),
        pytest.param(
            (*RENEWED, Renew("again"), StreamEnded(2), RETRY),
            Cause.STREAM_ENDED,
            id="a cut before it is time for other options",
        ),
        pytest.param(
            (*RENEWED, Renew("again"), Fired(Timer.RENEW), RETRY),
            Cause.OPTIONS,
            id="it is time for other options",
        ),
        pytest.param(
            (*RENEWED, Renew("again"), StreamEnded(2), Fired(Timer.RENEW), RETRY),
            Cause.STREAM_ENDED,
            id="it is time for other options, after a cut",
        ),
        pytest.param((*SERVING, StandBy(), Resume(), RETRY), Cause.HANDOVER, id="the other gateway is gone"),
        pytest.param(
            (*SERVING, StandBy(), KubeletUp(K2), Resume(), RETRY),
            Cause.HANDOVER,
            id="a kubelet came while another gateway served",
        ),
        pytest.param((*SERVING, Withhold("too large"), Resume(), RETRY), Cause.OFFERED, id="the list fits again"),
    ],
)
def test_the_cause_of_a_registration(events: tuple[Event, ...], why: Cause) -> None:
    state, found, offered = registration.start("t", "auto", ""), None, None
    for event in events:
        found = registration.cause(state, event) or found
        state, actions = registration.step(state, event)
        offered = found if any(isinstance(action, SendRegister) for action in actions) else offered
    assert found is why
    assert offered is not None  # a registration came of it


@pytest.mark.parametrize(
    "event", [StreamEnded(9), Fired(Timer.CALL), Verified(held=True), Resume(), Fired(Timer.VERIFY)]
)
def test_what_changes_nothing_is_no_cause(event: Event) -> None:
    state = registration.start("t", "auto", "")
    for before in SERVING:
        state, _ = registration.step(state, before)
    assert registration.cause(state, event) is None
    assert registration.step(state, event)[0].phase is state.phase


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
