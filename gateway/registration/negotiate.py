"""Negotiation, as pure functions: what a kubelet said to a Register -> what to do next.

The kubelet has no call that tells its device plugin API, so the gateway finds out by registering for real: a Register
in the wrong dialect is inert in every version (run on 1.8 to 1.37). Rules:

- The dialect that was last accepted comes first, then the others, newest to oldest; anew for each kubelet.sock.
- Only the kubelet's own word moves on to another dialect: UNIMPLEMENTED (it has no such service), or a refusal of the
  version in one of the texts below. A time-out or a lost connection is no answer: the same dialect is tried again.
- A text that nobody has met yet is reported and the same dialect tried again later; it isn't guessed at.
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
"""What ``--api`` may say, and the dialects that it allows."""

SPOKEN_BY = {dialect.name: f"kubelet {span(dialect.kubelets)}" for dialect in DIALECTS}

UNFIT = "UNFIT"
"""Our own code, beside gRPC's: the Register was not even sent, because the dialect can't carry what is to be offered."""
NOBODY = "NOBODY"
"""Our own code, too: the Register was not sent, because nobody listens on kubelet.sock."""

_MAX_DETAILS = 2048
_QUOTED = r'"([^"]{1,64})"'
_VERSION_REFUSALS = (
    # kubelet 1.8; names no version.
    r"unsupported API version by the Kubelet registry",
    # 1.9: is "v1alpha2"; 1.10 and 1.11: are ["v1beta1"]; 1.12 and later: is ["v1beta1"].
    r'requested API version "[^"]*" is not supported by kubelet\. Supported versions? (?:is|are) (?P<supported>.*)',
)


class AnswerKind(Enum):
    """What a kubelet's answer to Register means."""

    ACCEPTED = "accepted"
    OTHER_VERSION = "the kubelet speaks another version"
    NO_SERVICE = "the kubelet has no such service"
    UNFIT = "this dialect cannot carry the resource"
    NOBODY = "no kubelet listens"
    NO_ANSWER = "no answer"
    REPORTED = "refused for a reason of the kubelet's own"


class Answer(Struct, frozen=True):
    """A classified answer; ``supported`` are the versions that the kubelet named, if it named any."""

    kind: AnswerKind
    supported: tuple[str, ...] = ()
    details: str = ""


def classify(code: str, details: str) -> Answer:
    """Tell what a Register's gRPC status means. ``code`` is gRPC's name for it, such as ``UNKNOWN``.

    A plain Go error always arrives as UNKNOWN; the text alone tells a version refusal from another one. The text of
    UNIMPLEMENTED differs between gRPC libraries and is never looked at.
    """
    details = details[:_MAX_DETAILS]
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
    """Where the negotiation with one kubelet stands: what is still worth an offer, best first, and what was refused."""

    choice: str
    left: tuple[str, ...]
    refused: tuple[tuple[str, Answer], ...] = ()

    @property
    def offer(self) -> str | None:
        """The dialect to offer now; None when none is left (``failure`` then says why)."""
        return self.left[0] if self.left else None


def begin(choice: str, last_accepted: str | None) -> Negotiation:
    """Open the negotiation with a kubelet of unknown version. ``choice`` is one of ``CHOICES``."""
    allowed = CHOICES[choice]
    first = (last_accepted,) if last_accepted in allowed else ()
    return Negotiation(choice, (*first, *(name for name in allowed if name not in first)))


def refuse(negotiation: Negotiation, answer: Answer) -> Negotiation:
    """Strike the dialect on offer, refused as ``answer`` says (OTHER_VERSION, NO_SERVICE or UNFIT).

    A kubelet that names the versions it speaks is believed: of the rest only those stay, and none may.
    """
    offered, *rest = negotiation.left
    if answer.supported:
        rest = [name for name in rest if name in answer.supported]
    return replace(negotiation, left=tuple(rest), refused=(*negotiation.refused, (offered, answer)))


def failure(negotiation: Negotiation) -> str:
    """Say why no dialect is left: what we offered, what the kubelet said, and what to do."""
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
