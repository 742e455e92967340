"""Handover: several gateways on one node, and who of them serves a resource. Pure: events in, actions out.

The newer of two living gateways serves, and the node's own service is newer than any pod (``Age``). (Two plugins that both
answer a cut stream by registering would take turns for ever: kubelets 1.8 to 1.11 end the first stream at the second
Register.) Every pod has PID 1 and a clock can jump, so age is the boot clock, then a random token. Where two gateways can
talk, the *older* one hands each resource over to the *newer* one:

- Kubelets 1.25 to 1.36 disconnect whoever is registered when an *old* stream ends (#127803). So the older one ends its
  streams first, says so, and then the newer one registers. From 1.37 on (#135437) the newer one registers first, and there
  is no gap at all.
- No stream is ended while a Register is in flight for its resource: in 1.25 to 1.28.14 such an end, once the endpoint has
  aged out, is a nil dereference in PluginDisconnected. So both sides wait for their own Register before they yield.
- Where both register all the same (the older one stood still, and a kubelet started meanwhile), the last one counts, and
  nobody knows which that is. So the older one says when its streams are over, and the newer one registers once more.
  (Kubelets 1.12 to 1.22 show it to nobody: the newer one's stream goes on, and no pod gets a device.) Who took it back does, too.
- The newer one reports the kubelet's ListAndWatch. One that doesn't in time is asked to give the resource back, and later,
  now and then, whether it still serves. It answers for itself, so that the two never register against each other; only
  silence is overruled.
- A newer one that failed asks again, ever more seldom, and an older one that took back is left in peace as long, if it can serve.
- A connection that ends, ends its leases: of the dead one the other takes over, among the living age decides.
- Nobody yields for ever to one that doesn't serve. A gateway that this kubelet refuses, or whose list fits no message, doesn't
  ask; whoever stands by looks into the kubelet's own records, and takes back what they lack (``Unserved``). One that stands by
  for a newer one still asks that one when an older one asks it: of those that answer, the newest takes over.

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
"""Seconds that the newer one is given to be called by the kubelet."""
BUSY_WAIT = 30.0
"""Seconds that a partner may have a Register in flight: longer than its deadline and the wait for the call together."""
BUSY_AGAIN = 0.3
"""Seconds after which one that says so is asked whether it still does: one that stands still says nothing any more."""
CHECK_WAIT = 30.0
"""Seconds after which a newer one that serves is asked whether it still does: one that was stopped holds its lease, too."""
REST = 5.0
"""Seconds before a handover that failed is tried again, doubled for each failure in a row."""
MOST_FAILURES = 7
"""Failures in a row that are counted: the longest rest is 320 s."""


_FREE = frozenset({Standing.IDLE, Standing.OUT, Standing.REFUSED})
_UNABLE = frozenset({Standing.OUT, Standing.REFUSED})


class Older(Enum):
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


class Newer(Enum):
    """Where a resource stands between us and an older gateway."""

    ASKING = "asking"
    WAITING = "waiting for its Register"
    TRYING = "registering"
    SERVED = "serving"
    GIVING = "asked back, registering"
    RETURNING = "giving back"
    RESTING = "given back"


DEFERRING: frozenset[Older | Newer] = frozenset(
    {Older.ENDING, Older.LENT, Older.CONFIRMED, Older.CHECKING, Older.REVOKING}
    | {Newer.ASKING, Newer.WAITING, Newer.RETURNING, Newer.RESTING}
)
"""The stages in which our own registration stands by."""
_SETTLED = frozenset({Older.APART, Older.CONFIRMED, Older.CHECKING, Older.RESTING, Newer.SERVED, Newer.RESTING})


class State(Struct, frozen=True):
    """One resource between us and one partner."""

    stage: Older | Newer
    standing: Standing
    failures: int = 0
    """Handovers in a row that did not come to an end, or not for long."""
    doubted: bool = False
    """Whether the kubelet's records lacked it once already, while the newer one says that it serves."""
    crossed: bool = False
    """Whether both registered: the newer one unasked, or although we took it back; or ours was in flight, or sent, after it was told to."""
    busy: bool = False
    """Whether the newer one's last word, when it was asked back, is that it registers."""
    asked: int = 0
    """How often it was asked whether it still does; or, resting, how often the rest was made longer."""

    @property
    def unsettled(self) -> bool:
        """Whether a handover is under way."""
        return self.stage not in _SETTLED


Step = tuple[State, tuple[Action, ...]]


def older(own: Standing) -> State:
    """Begin with a newer gateway, which may ask for the resource."""
    return State(Older.APART, own)


def newer(own: Standing) -> Step:
    """Begin with an older gateway: ask it for the resource, or say that it comes too late for that."""
    state = State(Newer.ASKING, own)
    match own:
        case Standing.IDLE:
            return _to(state, Newer.ASKING, Say.ASK)
        case Standing.OUT | Standing.REFUSED:
            return _to(state, Newer.RESTING)
        case Standing.SERVING:
            return _to(state, Newer.SERVED, Say.SERVING)
        case Standing.BUSY | Standing.LEAVING:
            return _to(state, Newer.TRYING, Say.GOING)


def register_first(level: Level | None, *, late: bool) -> bool:
    """Whether the newer one registers before the older one's streams end: the kubelet is surely 1.37, or it does anyway.

    An ask that was read too late (the older one stalled) comes from one that has gone on: its Register may be in flight.
    """
    return late or (level is not None and level.reaches(REGISTER_FIRST) is True)


def could_serve(own: State, others: Iterable[State], *, kubelet: bool) -> bool:
    """Whether anything but this partner keeps us from serving.

    As the older one we could unless another newer one is known to serve, or we stand by for one that is older still; as the
    newer one, unless a newer gateway has the resource from us. ``others``: the same resource between us and the other partners.
    """
    if not kubelet or own.standing in _UNABLE:
        return False
    if isinstance(own.stage, Newer):
        return not any(isinstance(other.stage, Older) and other.stage in DEFERRING for other in others)
    return not any(
        other.stage in {Older.CONFIRMED, Older.CHECKING}
        or (isinstance(other.stage, Newer) and other.stage in DEFERRING)
        for other in others
    )


def step(state: State, event: Event) -> Step:
    """Take one event. Total: every event is meaningful, or ignored, in every state."""
    if isinstance(event, Stood):
        state = replace(state, standing=event.standing)
    if isinstance(event, Unserved) and state.standing in _UNABLE:
        return state, ()
    if isinstance(state.stage, Newer):
        return _newer(state, event)
    state, actions = _older(state, event)
    if state.stage is Older.PROMISED and state.standing is Standing.BUSY:
        state = replace(state, crossed=True)
    return state, actions


def _to(state: State, stage: Older | Newer, *says: Say, note: HandoverOutcome | None = None) -> Step:
    """Enter a stage: each has its own wait."""
    if stage not in {Older.CONFIRMED, Older.CHECKING}:
        state = replace(state, doubted=False, crossed=state.crossed and stage is Older.PROMISED)
    if stage is Older.CONFIRMED:
        state = replace(state, failures=0)
    elif stage is Newer.RESTING and state.stage in {Newer.ASKING, Newer.WAITING}:  # Nothing was tried.
        state = replace(state, failures=max(state.failures, 1))
    elif stage in {Older.TAKEN, Newer.RESTING} or (stage is Older.RESTING and state.stage is not Older.TAKEN):
        state = replace(state, failures=min(state.failures + 1, MOST_FAILURES))
    state = replace(state, stage=stage, busy=False, asked=0)
    noted = (Note(note),) if note is not None else ()
    return state, (SetWait(_patience(state)), *(Tell(say) for say in says), *noted)


def _patience(state: State) -> float | None:
    match state.stage:
        case Older.CHECKING if state.doubted:
            return ANSWER_WAIT
        case Older.ENDING | Older.PROMISED | Older.LENT | Older.CHECKING | Older.TAKEN:
            return REPORT_WAIT
        case Older.CONFIRMED:
            return CHECK_WAIT
        case Newer.SERVED if state.failures:
            return CHECK_WAIT
        case Older.REVOKING | Newer.ASKING:
            return ANSWER_WAIT
        case Newer.WAITING:
            return BUSY_WAIT
        case Older.RESTING | Newer.RESTING:
            # The older one's is the shorter one, so that the newer one's next ask finds it over.
            return (REST if state.stage is Newer.RESTING else 0.8 * REST) * 2.0 ** (state.failures - 1)
        case _:
            return None


# The older one.


def _older(state: State, event: Event) -> Step:
    match event:
        case Wanted(could_serve=True) if state.stage in {Older.TAKEN, Older.RESTING}:
            return state, (Tell(Say.MINE),)
        case Wanted(first):
            return _asked(state, first=first)
        case Heard(Say.GOING):
            return _going(state)
        case Heard(Say.SERVING):
            if state.stage is Older.CONFIRMED:
                return state, ()
            if state.stage in {Older.TAKEN, Older.RESTING}:
                return _mine(state)
            # Both serve: nobody knows whose list counts, and kubelets 1.12 to 1.24 end both when the older one's stream ends.
            if state.stage is Older.APART and state.standing is Standing.SERVING:
                state = replace(state, crossed=True)
            return _to(state, Older.CONFIRMED, note=None if state.stage is Older.CHECKING else HandoverOutcome.DONE)
        case Heard(Say.RELEASED):
            if state.stage in {Older.APART, Older.RESTING}:
                return state, ()
            again = (RegisterAgain(),) if state.stage is Older.TAKEN and state.crossed else ()
            state, actions = _to(
                state, Older.RESTING, note=None if state.stage is Older.TAKEN else HandoverOutcome.BACK
            )
            return state, (*actions, *again)
        case Heard(Say.BUSY) if state.stage in {Older.REVOKING, Older.CHECKING}:
            return replace(state, busy=True), (SetWait(BUSY_AGAIN),)
        case Heard(Say.BUSY) if state.stage is Older.TAKEN:
            return replace(state, crossed=True), ()
        case Heard():
            return state, ()
        case Stood(now):
            if state.stage is Older.PROMISED and now not in {Standing.SERVING, Standing.BUSY}:
                return _yield(state)  # Our stream is lost: nothing is gained by holding on.
            if state.stage is Older.ENDING and now in _FREE:
                return _to(state, Older.LENT, Say.YOURS)
            if state.crossed and state.stage in {Older.CONFIRMED, Older.CHECKING} and now in _FREE:
                return replace(state, crossed=False), (Tell(Say.ANEW),)
            return state, ()
        case WaitOver():
            return _older_waited(state, could_serve=event.could_serve)
        case Unserved():
            if state.stage is not Older.CONFIRMED:
                return state, ()
            if state.doubted:  # It said that it serves, and the records say the same as before.
                return _to(state, Older.TAKEN, Say.MINE, note=HandoverOutcome.BACK)
            return _to(replace(state, doubted=True), Older.CHECKING, Say.REVOKE)


def _asked(state: State, *, first: bool) -> Step:
    live = state.standing in {Standing.SERVING, Standing.BUSY}
    if first and live and state.stage in {Older.APART, Older.PROMISED}:
        return _to(state, Older.PROMISED, Say.FIRST)
    return _yield(state)


def _yield(state: State) -> Step:
    if state.standing in _FREE:
        return _to(state, Older.LENT, Say.YOURS)
    return _to(state, Older.ENDING, *((Say.WAIT,) if state.standing is Standing.BUSY else ()))


def _going(state: State) -> Step:
    """The newer one registers already: what isn't ended by now stays until it serves."""
    match state.stage:
        case Older.APART:
            return _asked(state, first=True)
        case Older.ENDING if state.standing is Standing.BUSY:
            return _to(state, Older.PROMISED)
        case Older.TAKEN | Older.RESTING:
            return _mine(state)
        case _:
            return state, ()


def _mine(state: State) -> Step:
    """It was taken back, and the newer one serves or registers all the same."""
    actions: tuple[Action, ...] = (Tell(Say.MINE),)
    if state.stage is not Older.TAKEN:
        state, actions = _to(state, Older.TAKEN, Say.MINE)
    return replace(state, crossed=True), actions


def _older_waited(state: State, *, could_serve: bool) -> Step:
    match state.stage:
        case Older.ENDING if state.standing is not Standing.BUSY:  # A stream that doesn't end: nobody reads it.
            return _to(state, Older.LENT, Say.YOURS)
        case Older.PROMISED if state.standing is not Standing.BUSY:
            return _to(state, Older.TAKEN, Say.MINE, note=HandoverOutcome.BACK)
        case Older.LENT if could_serve:
            return _to(state, Older.REVOKING, Say.REVOKE)
        case Older.CONFIRMED if could_serve:
            return _to(replace(state, doubted=False), Older.CHECKING, Say.REVOKE)
        case Older.ENDING | Older.PROMISED | Older.LENT | Older.CONFIRMED:
            return state, (SetWait(_patience(state)),)
        case Older.REVOKING | Older.CHECKING if state.busy and state.asked * BUSY_AGAIN < BUSY_WAIT:
            return replace(state, busy=False, asked=state.asked + 1), (SetWait(ANSWER_WAIT), Tell(Say.REVOKE))
        case Older.REVOKING | Older.CHECKING:
            return _to(state, Older.TAKEN, Say.MINE, note=HandoverOutcome.BACK)
        case Older.TAKEN:
            # Once more, and no more: what a stopped newer one doesn't read would end the connection some day.
            return state, (Tell(Say.MINE), SetWait(None))
        case Older.RESTING if state.standing is Standing.BUSY and state.asked * BUSY_AGAIN < BUSY_WAIT:
            # The kubelet has not called us yet: to hand over again now would leave it without anybody for as long once more.
            return replace(state, asked=state.asked + 1), (SetWait(BUSY_AGAIN),)
        case Older.RESTING:
            return _to(state, Older.APART)
        case _:
            return state, ()


# The newer one.


def _newer(state: State, event: Event) -> Step:
    match event:
        case Heard(Say.REVOKE, soon=True) if state.stage in {Newer.TRYING, Newer.SERVED}:
            return state, (Tell(Say.BUSY),)
        case Heard(say):
            return _newer_heard(state, say)
        case Stood(now):
            return _newer_stood(state, now)
        case WaitOver(could_serve):
            if state.stage in {Newer.ASKING, Newer.WAITING}:
                return _to(state, Newer.TRYING, Say.GOING, note=HandoverOutcome.ALONE)
            if state.stage is Newer.SERVED:
                return replace(state, failures=0), ()
            if state.stage is not Newer.RESTING:
                return state, ()
            return _to(state, Newer.ASKING, Say.ASK) if could_serve else (state, (SetWait(_patience(state)),))
        case Unserved():
            if state.stage is Newer.WAITING:  # Its Register is in flight, or it hangs: nothing is ended for ours.
                return _to(state, Newer.TRYING, Say.GOING, note=HandoverOutcome.ALONE)
            return _to(state, Newer.ASKING, Say.ASK) if state.stage is Newer.RESTING else (state, ())
        case Wanted():
            return state, ()


def _newer_heard(state: State, say: Say) -> Step:
    asking = state.stage in {Newer.ASKING, Newer.WAITING}
    match say:
        case Say.WAIT if state.stage is Newer.ASKING:
            return _to(state, Newer.WAITING)
        case Say.FIRST | Say.YOURS if asking:
            return _to(state, Newer.TRYING)
        case Say.ANEW if state.stage is Newer.SERVED:
            return state, (RegisterAgain(),)
        case Say.MINE | Say.REVOKE if state.stage is Newer.RESTING:
            return state, (Tell(Say.RELEASED),)
        case Say.MINE if state.stage is not Newer.RETURNING:
            return _give_back(state)
        case Say.REVOKE if asking:
            return _give_back(state)
        case Say.REVOKE if state.stage is Newer.RETURNING:
            return state, (Tell(Say.BUSY),)
        case Say.REVOKE:
            if state.standing is Standing.SERVING:
                return _to(state, Newer.SERVED, Say.SERVING)
            return _give_back(state) if state.standing in _FREE else _to(state, Newer.GIVING, Say.BUSY)
        case _:
            return state, ()


def _newer_stood(state: State, now: Standing) -> Step:
    match state.stage:
        case Newer.TRYING | Newer.GIVING if now is Standing.SERVING:
            return _to(state, Newer.SERVED, Say.SERVING, note=HandoverOutcome.DONE)
        case Newer.TRYING | Newer.SERVED if now in _UNABLE:
            return _give_back(state)
        case Newer.GIVING | Newer.RETURNING if now in _FREE:
            return _to(state, Newer.RESTING, Say.RELEASED, note=HandoverOutcome.BACK)
        case _:
            return state, ()


def _give_back(state: State) -> Step:
    """Stand by, and say so when it is true."""
    if state.standing in _FREE:
        return _to(state, Newer.RESTING, Say.RELEASED, note=HandoverOutcome.BACK)
    return _to(state, Newer.RETURNING, Say.BUSY)
