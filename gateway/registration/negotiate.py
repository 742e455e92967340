"""Choose the dialect for a kubelet, from its answers to Register. Pure functions.

No call returns a kubelet's device plugin API, so the gateway sends real Registers. A Register in the wrong dialect
changes nothing in any version (run on 1.8 to 1.37). Rules:

- For each new kubelet.sock, offer the dialect that was accepted last, then the others, newest to oldest.
- Offer the next dialect only if the kubelet refuses this one: UNIMPLEMENTED (no such service), or one of the texts below. After
  a time-out or a lost connection, offer the same dialect again.
- If the text is unknown, report it, and offer the same dialect again later.
"""

from __future__ import annotations

import re
from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from adapters.dialect import span
from adapters.registry import DIALECTS

NEWEST_FIRST = tuple(dialect.name for dialect in DIALECTS)

CHOICES: dict[str, tuple[str, ...]] = {
    "auto": NEWEST_FIRST,
    **{name: (name,) for name in NEWEST_FIRST},
    **{one.family: tuple(other.name for other in DIALECTS if other.family == one.family) for one in DIALECTS},
}
"""The values of ``--api``, and the dialects that each allows."""

SPOKEN_BY = {dialect.name: f"kubelet {span(dialect.kubelets)}" for dialect in DIALECTS}

UNFIT = "UNFIT"
"""A status code of our own, next to gRPC's: the Register was not sent, because the dialect can't carry the resource."""
NOBODY = "NOBODY"
"""A status code of our own: the Register was not sent, because no process listens on kubelet.sock."""

_DETAILS_CHARS = 2048
_QUOTED = r'"([^"]{1,64})"'
_VERSION_REFUSALS = (
    # kubelet 1.8; names no version.
    r"unsupported API version by the Kubelet registry",
    # 1.9: is "v1alpha2"; 1.10 and 1.11: are ["v1beta1"]; 1.12 and later: is ["v1beta1"].
    r'requested API version "[^"]*" is not supported by kubelet\. Supported versions? (?:is|are) (?P<supported>.*)',
)


class AnswerKind(Enum):
    """The meaning of a kubelet's answer to Register."""

    ACCEPTED = "accepted"
    OTHER_VERSION = "the kubelet speaks another version"
    NO_SERVICE = "the kubelet has no such service"
    UNFIT = "this dialect cannot carry the resource"
    NOBODY = "no kubelet listens"
    NO_ANSWER = "no answer"
    REPORTED = "refused for a reason of the kubelet's own"


class Answer(Struct, frozen=True):
    """What an answer means. ``supported`` are the versions that the kubelet named, if any."""

    kind: AnswerKind
    supported: tuple[str, ...] = ()
    details: str = ""


def classify(code: str, details: str) -> Answer:
    """Return the meaning of a Register's gRPC status. ``code`` is the status name, such as ``UNKNOWN``.

    Kubelets refuse a version with UNKNOWN, and other things also, so its text decides. The text of UNIMPLEMENTED differs between gRPC
    libraries and is not read.
    """
    details = details[:_DETAILS_CHARS]
    if code == "OK":
        return Answer(AnswerKind.ACCEPTED)
    if code == "UNIMPLEMENTED":
        return Answer(AnswerKind.NO_SERVICE, details=details)
    if code == NOBODY:
        return Answer(AnswerKind.NOBODY, details=details)
    if code == UNFIT:
        return Answer(AnswerKind.UNFIT, details=details)
    if code in {"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"}:
        return Answer(AnswerKind.NO_ANSWER, details=details)
    if code == "UNKNOWN":
        for refusal in _VERSION_REFUSALS:
            if found := re.search(refusal, details):
                named = found.groupdict().get("supported") or ""
                return Answer(AnswerKind.OTHER_VERSION, tuple(re.findall(_QUOTED, named)), details)
    return Answer(AnswerKind.REPORTED, details=details)


class Negotiation(Struct, frozen=True):
    """The negotiation with one kubelet: the dialects that are left to offer, best first, and those that were refused."""

    choice: str
    left: tuple[str, ...]
    refused: tuple[tuple[str, Answer], ...] = ()

    @property
    def offer(self) -> str | None:
        """The dialect to offer now; None if none is left (``failure`` returns why)."""
        return self.left[0] if self.left else None


def begin(choice: str, last_accepted: str | None) -> Negotiation:
    """Return the negotiation with a kubelet of unknown version. ``choice`` is one of ``CHOICES``."""
    allowed = CHOICES[choice]
    first = (last_accepted,) if last_accepted in allowed else ()
    return Negotiation(choice, (*first, *(name for name in allowed if name not in first)))


def refuse(negotiation: Negotiation, answer: Answer) -> Negotiation:
    """Remove the dialect on offer, because of the refusal ``answer`` (OTHER_VERSION, NO_SERVICE or UNFIT).

    If the kubelet named its versions, only those dialects are left; perhaps none.
    """
    offered, *rest = negotiation.left
    if answer.supported:
        rest = [name for name in rest if name in answer.supported]
    return replace(negotiation, left=tuple(rest), refused=(*negotiation.refused, (offered, answer)))


def failure(negotiation: Negotiation) -> str:
    """Return why no dialect is left: the offers, the kubelet's answers, and what to do."""
    said = "; ".join(
        f"{name} ({SPOKEN_BY[name]}): {answer.details or answer.kind.value}" for name, answer in negotiation.refused
    )
    unfit = [answer for _, answer in negotiation.refused if answer.kind is AnswerKind.UNFIT]
    supported = sorted({version for _, answer in negotiation.refused for version in answer.supported})
    unknown = [version for version in supported if version not in NEWEST_FIRST]
    if unfit:
        advice = f"the kubelet may speak it, but {unfit[0].details}"
    elif unknown:
        advice = f"this kubelet speaks only {', '.join(unknown)}, which this gateway does not know: upgrade the gateway"
    elif negotiation.choice != "auto":
        speaks = f"this kubelet speaks {', '.join(supported)}" if supported else "this kubelet speaks another version"
        advice = f"{speaks}: use --api auto (now: --api {negotiation.choice})"
    else:
        advice = "this kubelet speaks no device plugin API known here: is kubelet.sock really a kubelet's?"
    return f"the kubelet accepts none of our API versions. {advice}. Offered: {said}"
