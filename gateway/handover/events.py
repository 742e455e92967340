"""What the handover of one resource is told, and what it asks for: its events, its actions, and the words that two gateways say."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from gateway.registration.events import Phase


class Standing(Enum):
    """Where a resource's own registration stands, as far as another gateway is concerned."""

    IDLE = "idle"
    BUSY = "busy"
    """A Register is in flight, or was accepted and the kubelet hasn't called yet."""
    SERVING = "serving"
    LEAVING = "leaving"
    """Held back or about to register anew, with a stream that isn't over yet."""
    OUT = "out"
    """It can't be offered (it has no devices, its list is too large), or the gateway ends."""
    REFUSED = "refused"
    """This kubelet refused our last Register; the next one may succeed."""


def standing(phase: Phase, *, streams: bool, refused: bool = False) -> Standing:
    """Sum up a registration: its phase, whether ListAndWatch streams of ours are open, and whether the kubelet refused it."""
    match phase:
        case Phase.OFFERING | Phase.ACCEPTED:
            return Standing.BUSY
        case Phase.SERVING:
            return Standing.SERVING
        case _ if streams:
            return Standing.LEAVING
        case Phase.OUT | Phase.STOPPED:
            return Standing.OUT
        case Phase.WAITING if refused:
            return Standing.REFUSED
        case Phase.ABSENT | Phase.WAITING | Phase.STANDBY:
            return Standing.IDLE


class Say(Enum):
    """What two gateways say to each other about a resource. The values are what goes over the socket."""

    ASK = "ask"
    """The newer one: let me serve it; I wait for your answer until the time that the message names."""
    GOING = "going"
    """The newer one: you did not answer in time; I register."""
    SERVING = "serving"
    """The newer one: the kubelet has called ListAndWatch."""
    BUSY = "busy"
    """The newer one, asked to give it back: a Register of mine is in flight; you will be told what became of it."""
    RELEASED = "released"
    """The newer one: I have no stream and no Register in flight, and send none."""
    WAIT = "wait"
    """The older one: a Register of mine is in flight; you will be told."""
    FIRST = "first"
    """The older one: register; I end my streams when you serve."""
    YOURS = "yours"
    """The older one: my streams are over; register."""
    REVOKE = "revoke"
    """The older one: you did not report in time; how do you stand?"""
    MINE = "mine"
    """The older one: I serve it; stand by."""
    ANEW = "anew"
    """The older one: a Register of mine crossed yours, and my streams are over; register once more."""


# Events.


class Wanted(Struct, frozen=True):
    """The newer one wants the resource. ``first``: it may register, or does, before our streams have ended.

    ``could_serve``: as in ``WaitOver``.
    """

    first: bool
    could_serve: bool


class Heard(Struct, frozen=True):
    """The partner said something else. ``soon``: asked back, we have asked a newer one still, and serve if that one is silent."""

    say: Say
    soon: bool = False


class Stood(Struct, frozen=True):
    """Our own registration stands so now."""

    standing: Standing


class WaitOver(Struct, frozen=True):
    """The wait is over. ``could_serve``: we could, were it not for this partner (``could_serve`` below)."""

    could_serve: bool


class Unserved(Struct, frozen=True):
    """The kubelet's records have lacked the resource for a while, although the partner is to serve it and we could."""


Event = Wanted | Heard | Stood | WaitOver | Unserved


# Actions.


class Tell(Struct, frozen=True):
    """Say it to the partner."""

    say: Say


class SetWait(Struct, frozen=True):
    """Send ``WaitOver`` after so many seconds; forget an earlier wait. None: don't."""

    seconds: float | None


class HandoverOutcome(Enum):
    """How a handover of a resource went, to be counted. The values are what people read."""

    DONE = "done"
    """The newer one serves, and has said so."""
    ALONE = "no answer"
    """The newer one: the older one did not answer in time; we went on without."""
    BACK = "back"
    """The older one serves again: the newer one was silent, failed or gave it up."""
    LOST = "connection lost"
    """The partner went, or broke off, before it was done."""


class Note(Struct, frozen=True):
    """Count and log it."""

    outcome: HandoverOutcome


class RegisterAgain(Struct, frozen=True):
    """Register once more."""


Action = Tell | SetWait | Note | RegisterAgain
