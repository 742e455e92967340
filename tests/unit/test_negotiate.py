"""Negotiation: one row per thing a kubelet was seen to say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.registration.negotiate import (
    CHOICES,
    NEWEST_FIRST,
    Answer,
    AnswerKind,
    begin,
    classify,
    failure,
    refuse,
)

REQUESTED = 'requested API version "v1beta1" is not supported by kubelet. '


@pytest.mark.parametrize(
    ("code", "details", "kind", "supported"),
    [
        ("OK", "", AnswerKind.ACCEPTED, ()),
        ("UNKNOWN", "unsupported API version by the Kubelet registry", AnswerKind.OTHER_VERSION, ()),  # 1.8
        ("UNKNOWN", REQUESTED + 'Supported version is "v1alpha2"', AnswerKind.OTHER_VERSION, ("v1alpha2",)),  # 1.9
        (
            "UNKNOWN",
            REQUESTED + 'Supported versions are ["v1beta1"]',
            AnswerKind.OTHER_VERSION,
            ("v1beta1",),
        ),  # 1.10, 1.11
        (
            "UNKNOWN",
            REQUESTED + 'Supported version is ["v1beta1"]',
            AnswerKind.OTHER_VERSION,
            ("v1beta1",),
        ),  # 1.12 to today
        ("UNKNOWN", REQUESTED + 'Supported version is ["v1" "v2"]', AnswerKind.OTHER_VERSION, ("v1", "v2")),  # one day
        ("UNIMPLEMENTED", "unknown service v1beta1.Registration", AnswerKind.NO_SERVICE, ()),
        ("UNIMPLEMENTED", "Method not found!", AnswerKind.NO_SERVICE, ()),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", AnswerKind.NO_ANSWER, ()),
        ("UNAVAILABLE", "connection reset by peer", AnswerKind.NO_ANSWER, ()),
        ("CANCELLED", "", AnswerKind.NO_ANSWER, ()),
        ("UNKNOWN", 'the ResourceName "gpu" is invalid', AnswerKind.REPORTED, ()),
        ("UNKNOWN", "failed to dial device plugin: context deadline exceeded", AnswerKind.REPORTED, ()),
        ("UNKNOWN", "device plugin already connected: /x/y.sock", AnswerKind.REPORTED, ()),
        ("UNKNOWN", "requested API version is a mystery", AnswerKind.REPORTED, ()),
        (
            "INTERNAL",
            "unsupported API version by the Kubelet registry",
            AnswerKind.REPORTED,
            (),
        ),  # the code belongs to it
        ("UNFIT", "too large", AnswerKind.UNFIT, ()),
        ("NOBODY", "nobody listens", AnswerKind.NOBODY, ()),
    ],
)
def test_what_an_answer_means(code: str, details: str, kind: AnswerKind, supported: tuple[str, ...]) -> None:
    answer = classify(code, details)
    assert (answer.kind, answer.supported) == (kind, supported)


def test_the_text_of_an_answer_is_bounded() -> None:
    assert len(classify("UNKNOWN", "x" * 10_000_000).details) <= 2048


@pytest.mark.parametrize(
    ("choice", "last_accepted", "offers"),
    [
        ("auto", None, ("v1beta1", "v1alpha2", "0.1")),
        ("auto", "v1alpha2", ("v1alpha2", "v1beta1", "0.1")),
        ("auto", "0.1", ("0.1", "v1beta1", "v1alpha2")),
        ("auto", "v7", ("v1beta1", "v1alpha2", "0.1")),
        ("v1alpha", None, ("v1alpha2", "0.1")),
        ("v1alpha", "0.1", ("0.1", "v1alpha2")),
        ("v1alpha", "v1beta1", ("v1alpha2", "0.1")),
        ("v1beta1", "0.1", ("v1beta1",)),
    ],
)
def test_the_order_of_offers(choice: str, last_accepted: str | None, offers: tuple[str, ...]) -> None:
    assert begin(choice, last_accepted).left == offers


NO_SERVICE = Answer(AnswerKind.NO_SERVICE)


@pytest.mark.parametrize(
    ("answers", "left"),
    [
        ([NO_SERVICE], ("v1alpha2", "0.1")),
        ([NO_SERVICE, Answer(AnswerKind.OTHER_VERSION)], ("0.1",)),  # 1.8 names no version
        ([NO_SERVICE, Answer(AnswerKind.OTHER_VERSION, ("0.1",))], ("0.1",)),
        ([Answer(AnswerKind.OTHER_VERSION, ("v1",))], ()),  # what it names is believed
        ([NO_SERVICE, NO_SERVICE, NO_SERVICE], ()),
    ],
)
def test_what_is_left_after_refusals(answers: list[Answer], left: tuple[str, ...]) -> None:
    negotiation = begin("auto", None)
    for answer in answers:
        negotiation = refuse(negotiation, answer)
    assert negotiation.left == left


@pytest.mark.parametrize(
    ("choice", "answers", "words"),
    [
        ("auto", [Answer(AnswerKind.OTHER_VERSION, ("v1",))], ["speaks only v1", "upgrade the gateway", "v1beta1"]),
        ("v1beta1", [NO_SERVICE], ["--api auto", "now: --api v1beta1", "kubelet 1.10 and later"]),
        ("v1alpha2", [Answer(AnswerKind.OTHER_VERSION, ("v1beta1",))], ["this kubelet speaks v1beta1", "--api auto"]),
        ("auto", [NO_SERVICE] * 3, ["is kubelet.sock really a kubelet's?"]),
        ("v1beta1", [Answer(AnswerKind.UNFIT, details="70 000 would fit")], ["may speak it, but 70 000 would fit"]),
    ],
)
def test_a_failure_names_both_sides_and_the_way_out(choice: str, answers: list[Answer], words: list[str]) -> None:
    negotiation = begin(choice, None)
    for answer in answers:
        negotiation = refuse(negotiation, answer)
    text = failure(negotiation)
    assert [word for word in words if word not in text] == []


@given(
    st.sampled_from(sorted(CHOICES)),
    st.sampled_from([None, *NEWEST_FIRST]),
    st.lists(
        st.sampled_from([NO_SERVICE, Answer(AnswerKind.OTHER_VERSION), Answer(AnswerKind.OTHER_VERSION, ("v1beta1",))])
    ),
)
def test_every_negotiation_ends_and_offers_nothing_twice(choice: str, last: str | None, answers: list[Answer]) -> None:
    negotiation, offered = begin(choice, last), []
    for answer in answers:
        if negotiation.offer is None:
            break
        offered.append(negotiation.offer)
        negotiation = refuse(negotiation, answer)
    assert len(offered) == len(set(offered))
    assert set(offered) <= set(CHOICES[choice])
