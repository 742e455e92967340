"""Succession: several gateways on one node, and who of them serves a resource. Pure: events in, actions out.

The newer of two living gateways serves, and the node's own service is newer than any pod (``Age``). (Two plugins that both answer a cut stream by registering would take turns for
ever: kubelets 1.8 to 1.11 end the first stream at the second Register.) Every pod has PID 1 and a clock can jump, so age
is the boot clock, then a random token. Where two gateways can talk, they hand each resource over, the *elder* to its
*heir*:

- Kubelets 1.25 to 1.36 disconnect whoever is registered when an *old* stream ends (#127803). So the elder ends its streams
  first, says so, and then the heir registers. From 1.37 on (#135437) the heir registers first, and there is no gap at all.
- No stream is ended while a Register is in flight for its resource: in 1.25 to 1.28.14 such an end, once the endpoint has
  aged out, is a nil dereference in PluginDisconnected. So both sides wait for their own Register before they yield.
- Where both register all the same (the elder stood still, and a kubelet started meanwhile), the last one counts, and nobody
  knows which that is. So the elder says when its streams are over, and the heir registers once more. (Kubelets 1.12 to 1.22
  show it to nobody: the heir's stream goes on, and no pod gets a device.)
- The heir reports the kubelet's ListAndWatch. One that doesn't in time is asked to give the resource back, and later, now
  and then, whether it still serves. It answers for itself, so that the two never register against each other; only
  silence is overruled.
- An heir that failed asks again, ever more seldom, and an elder that took back is left in peace as long.
- A connection that ends, ends its leases: of the dead one the other takes over, among the living age decides.
- Nobody yields for ever to one that doesn't serve. A gateway that this kubelet refuses, or whose list fits no message, doesn't
  ask; whoever stands by looks into the kubelet's own records, and takes back what they lack (``Unserved``, ``Doubt``).

One pair of machines for each resource and two gateways; with several, each gateway stands by while any pair says so.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from gateway.handover.events import (
    Action,
    Event,
    HandoverOutcome,
    Heard,
    Note,
    RegisterAgain,
    Say,
    SetWait,
    Standing,
    Stood,
    Tell,
    Unserved,
    WaitOver,
    Wanted,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from adapters.dialect import Level

REGISTER_FIRST = 37
"""From kubelet 1.37 on, the end of an old stream leaves a newer registration alone (#135437)."""
ANSWER_WAIT = 0.2
"""Seconds that a partner is given to answer."""
REPORT_WAIT = 2.0
"""Seconds that the heir is given to be called by the kubelet."""
BUSY_WAIT = 30.0
"""Seconds that a partner may have a Register in flight: longer than its deadline and the wait for the call together."""
BUSY_AGAIN = 0.3
"""Seconds after which an heir that says so is asked whether it still does: one that stands still says nothing any more."""
CHECK_WAIT = 30.0
"""Seconds after which an heir that serves is asked whether it still does: one that was stopped holds its lease, too."""
REST = 5.0
"""Seconds before a handover that failed is tried again, doubled for each failure in a row."""
MOST_FAILURES = 7
"""Failures in a row that are counted: the longest rest is 320 s."""


_FREE = frozenset({Standing.IDLE, Standing.OUT, Standing.REFUSED})
_UNABLE = frozenset({Standing.OUT, Standing.REFUSED})


class Elder(Enum):
    """Where a resource stands between us and a newer gateway."""

    APART = "apart"
    """Nothing was asked. We serve."""
    ENDING = "ending our streams"
    PROMISED = "lent, the newer gateway registers first"
    LENT = "lent"
    CONFIRMED = "handed over"
    REVOKING = "asked back"
    CHECKING = "handed over, asked whether it still serves"
    TAKEN = "taken back, not acknowledged"
    RESTING = "taken back"


class Heir(Enum):
    """Where a resource stands between us and an older gateway."""

    ASKING = "asking"
    WAITING = "waiting for its Register"
    TRYING = "registering"
    SERVED = "serving"
    GIVING = "asked back, registering"
    RETURNING = "giving back"
    RESTING = "given back"


DEFERRING: frozenset[Elder | Heir] = frozenset(
    {Elder.ENDING, Elder.LENT, Elder.CONFIRMED, Elder.CHECKING, Elder.REVOKING}
    | {Heir.ASKING, Heir.WAITING, Heir.RETURNING, Heir.RESTING}
)
"""The stages in which our own registration stands by."""
_SETTLED = frozenset({Elder.APART, Elder.CONFIRMED, Elder.CHECKING, Elder.RESTING, Heir.SERVED, Heir.RESTING})


class State(Struct, frozen=True):
    """One resource between us and one partner."""

    stage: Elder | Heir
    standing: Standing
    failures: int = 0
    """Handovers in a row that did not come to an end, or not for long."""
    doubted: bool = False
    """Whether the kubelet's records lacked it once already, while the heir says that it serves."""
    crossed: bool = False
    """Whether a Register of ours was in flight, or was sent, after the heir was told to register."""
    busy: bool = False
    """Whether the heir's last word, when it was asked back, is that it registers."""
    asked: int = 0
    """How often it was asked whether it still does."""

    @property
    def unsettled(self) -> bool:
        """Whether a handover is under way."""
        return self.stage not in _SETTLED


Step = tuple[State, tuple[Action, ...]]


def elder(own: Standing) -> State:
    """Begin with a newer gateway, which may ask for the resource."""
    return State(Elder.APART, own)


def heir(own: Standing) -> Step:
    """Begin with an older gateway: ask it for the resource, or say that it comes too late for that."""
    state = State(Heir.ASKING, own)
    match own:
        case Standing.IDLE:
            return _to(state, Heir.ASKING, Say.ASK)
        case Standing.OUT | Standing.REFUSED:
            return _to(state, Heir.RESTING)
        case Standing.SERVING:
            return _to(state, Heir.SERVED, Say.SERVING)
        case Standing.BUSY | Standing.LEAVING:
            return _to(state, Heir.TRYING, Say.GOING)


def register_first(level: Level | None, *, late: bool) -> bool:
    """Whether the heir registers before the elder's streams end: the kubelet is surely 1.37 or later, or it does anyway.

    An ask that was read too late (a stalled elder) comes from an heir that has gone on: its Register may be in flight.
    """
    return late or (level is not None and level.reaches(REGISTER_FIRST) is True)


def could_serve(own: State, others: Iterable[State], *, kubelet: bool) -> bool:
    """Whether anything but this partner keeps us from serving.

    As an elder we could unless another heir is known to serve, or we stand by for an elder of our own; as an heir, unless
    a newer gateway has the resource from us. ``others``: the same resource between us and the other partners.
    """
    if not kubelet or own.standing in _UNABLE:
        return False
    if isinstance(own.stage, Heir):
        return not any(isinstance(other.stage, Elder) and other.stage in DEFERRING for other in others)
    return not any(
        other.stage in {Elder.CONFIRMED, Elder.CHECKING} or (isinstance(other.stage, Heir) and other.stage in DEFERRING)
        for other in others
    )


def step(state: State, event: Event) -> Step:
    """Take one event. Total: every event is meaningful, or ignored, in every state."""
    if isinstance(event, Stood):
        state = replace(state, standing=event.standing)
    if isinstance(state.stage, Heir):
        return _heir(state, event)
    state, actions = _elder(state, event)
    if state.stage is Elder.PROMISED and state.standing is Standing.BUSY:
        state = replace(state, crossed=True)
    return state, actions


def _to(state: State, stage: Elder | Heir, *says: Say, note: HandoverOutcome | None = None) -> Step:
    """Enter a stage: each has its own wait."""
    if stage not in {Elder.CONFIRMED, Elder.CHECKING}:
        state = replace(state, doubted=False, crossed=state.crossed and stage is Elder.PROMISED)
    if stage is Elder.CONFIRMED:
        state = replace(state, failures=0)
    elif stage in {Elder.TAKEN, Heir.RESTING} or (stage is Elder.RESTING and state.stage is not Elder.TAKEN):
        state = replace(state, failures=min(state.failures + 1, MOST_FAILURES))
    state = replace(state, stage=stage, busy=False, asked=0)
    noted = (Note(note),) if note is not None else ()
    return state, (SetWait(_patience(state)), *(Tell(say) for say in says), *noted)


def _patience(state: State) -> float | None:
    match state.stage:
        case Elder.CHECKING if state.doubted:
            return ANSWER_WAIT
        case Elder.ENDING | Elder.PROMISED | Elder.LENT | Elder.CHECKING | Elder.TAKEN:
            return REPORT_WAIT
        case Elder.CONFIRMED:
            return CHECK_WAIT
        case Heir.SERVED if state.failures:
            return CHECK_WAIT
        case Elder.REVOKING | Heir.ASKING:
            return ANSWER_WAIT
        case Heir.WAITING:
            return BUSY_WAIT
        case Elder.RESTING | Heir.RESTING:
            # The elder's is the shorter one, so that the heir's next ask finds it over.
            return (REST if state.stage is Heir.RESTING else 0.8 * REST) * 2.0 ** (state.failures - 1)
        case _:
            return None


# The elder.


def _elder(state: State, event: Event) -> Step:
    match event:
        case Wanted(first):
            return _asked(state, first=first)
        case Heard(Say.GOING):
            return _going(state)
        case Heard(Say.SERVING):
            if state.stage is Elder.CONFIRMED:
                return state, ()
            if state.stage in {Elder.TAKEN, Elder.RESTING}:
                return _mine(state)
            return _to(state, Elder.CONFIRMED, note=None if state.stage is Elder.CHECKING else HandoverOutcome.DONE)
        case Heard(Say.RELEASED):
            if state.stage in {Elder.APART, Elder.RESTING}:
                return state, ()
            return _to(state, Elder.RESTING, note=None if state.stage is Elder.TAKEN else HandoverOutcome.BACK)
        case Heard(Say.BUSY) if state.stage in {Elder.REVOKING, Elder.CHECKING}:
            return replace(state, busy=True), (SetWait(BUSY_AGAIN),)
        case Heard():
            return state, ()
        case Stood(now):
            if state.stage is Elder.PROMISED and now not in {Standing.SERVING, Standing.BUSY}:
                return _yield(state)  # Our stream is lost: nothing is gained by holding on.
            if state.stage is Elder.ENDING and now in _FREE:
                return _to(state, Elder.LENT, Say.YOURS)
            if state.crossed and state.stage is not Elder.PROMISED and now in _FREE:
                return replace(state, crossed=False), (Tell(Say.ANEW),)
            return state, ()
        case WaitOver():
            return _elder_waited(state, could_serve=event.could_serve)
        case Unserved():
            if state.stage is not Elder.CONFIRMED:
                return state, ()
            if state.doubted:  # It said that it serves, and the records say the same as before.
                return _to(state, Elder.TAKEN, Say.MINE, note=HandoverOutcome.BACK)
            return _to(replace(state, doubted=True), Elder.CHECKING, Say.REVOKE)


def _asked(state: State, *, first: bool) -> Step:
    if state.stage in {Elder.TAKEN, Elder.RESTING}:
        return state, (Tell(Say.MINE),)
    live = state.standing in {Standing.SERVING, Standing.BUSY}
    if first and live and state.stage in {Elder.APART, Elder.PROMISED}:
        return _to(state, Elder.PROMISED, Say.FIRST)
    return _yield(state)


def _yield(state: State) -> Step:
    if state.standing in _FREE:
        return _to(state, Elder.LENT, Say.YOURS)
    return _to(state, Elder.ENDING, *((Say.WAIT,) if state.standing is Standing.BUSY else ()))


def _going(state: State) -> Step:
    """The heir registers already: what isn't ended by now stays until it serves."""
    match state.stage:
        case Elder.APART:
            return _asked(state, first=True)
        case Elder.ENDING if state.standing is Standing.BUSY:
            return _to(state, Elder.PROMISED)
        case Elder.TAKEN | Elder.RESTING:
            return _mine(state)
        case _:
            return state, ()


def _mine(state: State) -> Step:
    """It was taken back, and the heir serves or registers all the same."""
    if state.stage is Elder.TAKEN:
        return state, (Tell(Say.MINE),)
    return _to(state, Elder.TAKEN, Say.MINE)


def _elder_waited(state: State, *, could_serve: bool) -> Step:
    match state.stage:
        case Elder.ENDING if state.standing is not Standing.BUSY:  # A stream that doesn't end: nobody reads it.
            return _to(state, Elder.LENT, Say.YOURS)
        case Elder.PROMISED if state.standing is not Standing.BUSY:
            return _to(state, Elder.TAKEN, Say.MINE, note=HandoverOutcome.BACK)
        case Elder.LENT if could_serve:
            return _to(state, Elder.REVOKING, Say.REVOKE)
        case Elder.CONFIRMED if could_serve:
            return _to(replace(state, doubted=False), Elder.CHECKING, Say.REVOKE)
        case Elder.ENDING | Elder.PROMISED | Elder.LENT | Elder.CONFIRMED:
            return state, (SetWait(_patience(state)),)
        case Elder.REVOKING | Elder.CHECKING if state.busy and state.asked * BUSY_AGAIN < BUSY_WAIT:
            return replace(state, busy=False, asked=state.asked + 1), (SetWait(ANSWER_WAIT), Tell(Say.REVOKE))
        case Elder.REVOKING | Elder.CHECKING:
            return _to(state, Elder.TAKEN, Say.MINE, note=HandoverOutcome.BACK)
        case Elder.TAKEN:
            # Once more, and no more: what a stopped heir doesn't read would end the connection some day.
            return state, (Tell(Say.MINE), SetWait(None))
        case Elder.RESTING:
            return _to(state, Elder.APART)
        case _:
            return state, ()


# The heir.


def _heir(state: State, event: Event) -> Step:
    match event:
        case Heard(say):
            return _heir_heard(state, say)
        case Stood(now):
            return _heir_stood(state, now)
        case WaitOver(could_serve):
            if state.stage in {Heir.ASKING, Heir.WAITING}:
                return _to(state, Heir.TRYING, Say.GOING, note=HandoverOutcome.ALONE)
            if state.stage is Heir.SERVED:
                return replace(state, failures=0), ()
            if state.stage is not Heir.RESTING:
                return state, ()
            return _to(state, Heir.ASKING, Say.ASK) if could_serve else (state, (SetWait(_patience(state)),))
        case Unserved():
            if state.stage is Heir.WAITING:  # Its Register is in flight, or it hangs: nothing is ended for ours.
                return _to(state, Heir.TRYING, Say.GOING, note=HandoverOutcome.ALONE)
            return _to(state, Heir.ASKING, Say.ASK) if state.stage is Heir.RESTING else (state, ())
        case Wanted():
            return state, ()


def _heir_heard(state: State, say: Say) -> Step:
    asking = state.stage in {Heir.ASKING, Heir.WAITING}
    match say:
        case Say.WAIT if state.stage is Heir.ASKING:
            return _to(state, Heir.WAITING)
        case Say.FIRST | Say.YOURS if asking:
            return _to(state, Heir.TRYING)
        case Say.ANEW if state.stage is Heir.SERVED:
            return state, (RegisterAgain(),)
        case Say.MINE | Say.REVOKE if state.stage is Heir.RESTING:
            return state, (Tell(Say.RELEASED),)
        case Say.MINE if state.stage is not Heir.RETURNING:
            return _give_back(state)
        case Say.REVOKE if asking:
            return _give_back(state)
        case Say.REVOKE if state.stage is Heir.RETURNING:
            return state, (Tell(Say.BUSY),)
        case Say.REVOKE:
            if state.standing is Standing.SERVING:
                return _to(state, Heir.SERVED, Say.SERVING)
            return _give_back(state) if state.standing in _FREE else _to(state, Heir.GIVING, Say.BUSY)
        case _:
            return state, ()


def _heir_stood(state: State, now: Standing) -> Step:
    match state.stage:
        case Heir.TRYING | Heir.GIVING if now is Standing.SERVING:
            return _to(state, Heir.SERVED, Say.SERVING, note=HandoverOutcome.DONE)
        case Heir.TRYING | Heir.SERVED if now in _UNABLE:
            return _give_back(state)
        case Heir.GIVING | Heir.RETURNING if now in _FREE:
            return _to(state, Heir.RESTING, Say.RELEASED, note=HandoverOutcome.BACK)
        case _:
            return state, ()


def _give_back(state: State) -> Step:
    """Stand by, and say so when it is true."""
    if state.standing in _FREE:
        return _to(state, Heir.RESTING, Say.RELEASED, note=HandoverOutcome.BACK)
    return _to(state, Heir.RETURNING)
