"""Decide if this gateway leads on its node, as a pure state machine: events in, the next state and actions out.

The gateway that holds the locks leads. All others stand by, connected to the leader's control socket. The newest asks it to yield as
soon as it could lead itself. Age is the pod's, so that a restarted container doesn't ask a gateway of its own pod.
Waiting is a state, not a sleep: ``SetAlarm`` asks for a ``Rung``, and each step replaces the wait before.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from gateway.age import Age

AT_ONCE = 0.001
"""Seconds between two tries to take the locks while their holder dies or yields."""
AGAIN = 1.0
"""The same while another gateway holds them. A gateway that could not lead waits so much longer."""
HURRY = 2.0
"""Seconds for which the locks are tried without a pause."""
ASK_TIME = 15.0
"""Seconds within which a leader must yield: a Register in flight takes up to 11."""
REPORT = 2.0
"""Seconds within which a new leader must report that it serves."""
HOLDS_BACK, HOLDS_BACK_MAX = 30.0, 900.0
"""Seconds for which a gateway is refused that took over in vain. They double each time in a row, up to the second value."""
SERVED = 600.0
"""Seconds after which a gateway that took over has led: a kubelet, too, forgets after as many that a container ended."""
STARTING = "it is still starting"


class Stage(Enum):
    """A gateway's part on its node. The values are for people."""

    PREPARING = "preparing"
    STANDBY = "standing by"
    ASKING = "asking the leader to yield"
    TAKING = "taking over"
    LEADING = "leading"
    YIELDING = "yielding"
    YIELDED = "yielded"


class Able(Struct, frozen=True):
    """This gateway could lead, or ``reason`` is why it couldn't."""

    reason: str = ""


class Locked(Struct, frozen=True):
    """This gateway has the locks."""


class HeldElsewhere(Struct, frozen=True):
    """Another gateway holds the locks. ``leader`` is its age; None if it can't be talked to, and ``why`` not.

    ``unable`` is why this gateway couldn't lead instead; None: nothing new is known. ``leaving``: the other one has ended or yielded.
    """

    leader: Age | None = None
    why: str = ""
    unable: str | None = None
    leaving: bool = False


class Gone(Struct, frozen=True):
    """The gateway with this token closed its connection, leads no longer, or no longer asks to lead."""

    token: str


class Yours(Struct, frozen=True):
    """The leader has yielded."""


class No(Struct, frozen=True):
    """The leader doesn't yield for so many seconds."""

    reason: str
    seconds: float = AGAIN


class Took(Struct, frozen=True):
    """The state file is read, and the lists are ready."""


class RoomWanted(Struct, frozen=True):
    """Another gateway asks to lead, at ``now`` (monotonic seconds)."""

    age: Age
    now: float


class Ending(Struct, frozen=True):
    """This gateway is about to end."""


class Invited(Struct, frozen=True):
    """The leader is about to end, and yields to any gateway that asks."""


class Drained(Struct, frozen=True):
    """All that was promised is on disk, or ``reason`` is why it isn't."""

    reason: str = ""


class Serving(Struct, frozen=True):
    """The new leader reports that it serves."""


class Lost(Struct, frozen=True):
    """Another file has the name of a lock."""

    reason: str


class Rung(Struct, frozen=True):
    """The wait has ended, at ``now`` (monotonic seconds)."""

    now: float


Event = (
    Able
    | Locked
    | HeldElsewhere
    | Gone
    | Yours
    | No
    | Took
    | RoomWanted
    | Ending
    | Invited
    | Drained
    | Serving
    | Lost
    | Rung
)


class Try(Struct, frozen=True):
    """Try to take the locks."""


class Ask(Struct, frozen=True):
    """Ask the leader to yield."""


class Withdraw(Struct, frozen=True):
    """No longer ask the leader to yield."""


class Take(Struct, frozen=True):
    """Read the state file, and make the lists ready."""


class Lead(Struct, frozen=True):
    """Register, and answer calls."""


class Invite(Struct, frozen=True):
    """Tell the standbys that this gateway yields to any that asks."""


class Drain(Struct, frozen=True):
    """Prepare to yield: send nothing new, write what was promised."""


class Reply(Struct, frozen=True):
    """Answer the gateway that asked: yes, or why this one doesn't yield for so many seconds."""

    to: Age
    reason: str = ""
    seconds: float = 0.0


class Free(Struct, frozen=True):
    """Free the locks."""


class Rest(Struct, frozen=True):
    """Serve nothing any more, because ``by`` leads (None: none is known to)."""

    by: Age | None


class SetAlarm(Struct, frozen=True):
    """Send ``Rung`` after so many seconds; None: there is nothing to wait for."""

    seconds: float | None


Action = Try | Ask | Withdraw | Take | Lead | Invite | Drain | Reply | Free | Rest | SetAlarm


class State(Struct, frozen=True):
    """What this gateway knows of who leads."""

    own: Age
    stage: Stage = Stage.PREPARING
    unable: str = STARTING
    leader: Age | None = None
    """The other gateway that leads, if this one is connected to it."""
    other: Age | None = None
    """The gateway that this one yields to, or yielded to."""
    refused: str = ""
    """Why the leader doesn't yield or can't be asked."""
    hurry: int = 0
    """How many tries follow without a pause."""
    left: str = ""
    """The token of the last leader, if it ended or yielded: if it still holds the locks, they will be free in a moment."""
    made_at: float = 0.0
    """When this gateway yielded last (monotonic seconds)."""
    vain: int = 0
    """How often in a row it yielded in vain."""
    ending: bool = False
    """True if this gateway is about to end."""


Step = tuple[State, tuple[Action, ...]]
_HURRY = int(HURRY / AT_ONCE)
_WAITS = frozenset({Stage.PREPARING, Stage.STANDBY})
_LEADS = frozenset({Stage.LEADING, Stage.YIELDING})


def start(own: Age) -> State:
    """Return the first state. The locks are tried as soon as it is known that this gateway could lead."""
    return State(own)


def held_back(vain: int) -> float:
    """Return for how many seconds a gateway doesn't yield that yielded so often in vain."""
    return min(HOLDS_BACK * 2.0 ** min(vain - 1, 20), HOLDS_BACK_MAX) if vain else 0.0


def step(state: State, event: Event) -> Step:
    """Return the next state and the actions. Total: every event is used or ignored in every stage."""
    match event:
        case Able(reason):
            return _able(state, reason)
        case Locked() if state.stage in _LEADS:
            return state, ()
        case Locked():
            return _to(state, Stage.TAKING), (SetAlarm(None), Take())
        case HeldElsewhere():
            return _held(state, event)
        case Gone(token):
            return _gone(state, token)
        case Yours() if state.stage is Stage.ASKING:
            left = "" if state.leader is None else state.leader.token
            return replace(_to(state, Stage.TAKING), hurry=_HURRY, left=left), (Try(),)
        case No(reason, seconds) if state.stage is Stage.ASKING:
            return replace(_wait(state), refused=reason), (SetAlarm(max(seconds, AGAIN)),)
        case Took() if state.stage is Stage.TAKING:
            return replace(_to(state, Stage.LEADING), leader=None, refused="", other=None), (Lead(),)
        case RoomWanted(age, now):
            return _asked(state, age, now)
        case Ending() if state.stage is Stage.LEADING:
            return replace(state, ending=True), (Invite(),)
        case Ending() if state.stage is Stage.ASKING:
            return replace(_wait(state), ending=True), (Withdraw(),)
        case Ending():
            return replace(state, ending=True), ()
        case Invited() if state.stage is Stage.STANDBY and state.leader is not None and not state.ending:
            return _to(state, Stage.ASKING), (Ask(), SetAlarm(ASK_TIME))
        case Drained(reason) if state.stage is Stage.YIELDING and state.other is not None:
            if reason:
                return _made_none(state), (Reply(state.other, reason, AGAIN), Lead())
            return _to(state, Stage.YIELDED), (Reply(state.other), Free(), SetAlarm(REPORT))
        case Serving() if state.stage is Stage.YIELDED:
            return replace(_wait(state), leader=state.other), (Rest(state.other), SetAlarm(None))
        case Lost() if state.stage in {*_LEADS, Stage.TAKING}:
            state = replace(_wait(state), leader=None, other=None)
            return state, (Rest(None), Free(), SetAlarm(AGAIN))
        case Rung():
            return _waited(state)
        case _:
            return state, ()


def _to(state: State, stage: Stage) -> State:
    return replace(state, stage=stage, hurry=0)


def _wait(state: State) -> State:
    return _to(state, Stage.PREPARING if state.unable else Stage.STANDBY)


def _able(state: State, reason: str) -> Step:
    before, state = state.unable, replace(state, unable=reason)
    if state.stage is Stage.ASKING and reason:
        return _wait(state), (Withdraw(), SetAlarm(None))
    if state.stage not in _WAITS:
        return state, ()
    state = _wait(state)
    if state.hurry or reason == before or (reason and before != STARTING):
        return state, ()
    return _ask_or_stay(state) if state.leader is not None else (state, (Try(),))


def _ask_or_stay(state: State) -> Step:
    """Ask the leader to yield, if this gateway is newer, could lead, and isn't about to end."""
    if state.leader is None or state.unable or state.ending or not state.own.is_newer_than(state.leader):
        return state, (SetAlarm(None),)
    return _to(state, Stage.ASKING), (Ask(), SetAlarm(ASK_TIME))


def _held(state: State, event: HeldElsewhere) -> Step:
    if state.stage in _LEADS:
        return state, ()
    if event.leaving and state.hurry:
        return replace(state, hurry=state.hurry - 1), (SetAlarm(AT_ONCE),)
    rest: tuple[Action, ...] = ()
    if state.stage is Stage.YIELDED:
        # Our streams go on until the new leader serves or ends.
        if event.leader is None or event.leader == state.other:
            return state, (SetAlarm(REPORT),)
        rest = (Rest(event.leader),)
    if event.unable is not None:
        state = replace(state, unable=event.unable)
    state = replace(_wait(state), leader=event.leader, refused=event.why)
    if event.leader is None:
        return state, (*rest, SetAlarm(AGAIN))
    state, actions = _ask_or_stay(state)
    return state, (*rest, *actions)


def _gone(state: State, token: str) -> Step:
    if state.stage is Stage.YIELDING and state.other is not None and state.other.token == token:
        return _made_none(state), (Lead(),)
    known = {one.token for one in (state.leader, state.other) if one is not None}
    if token not in known or state.stage in {*_LEADS, Stage.TAKING}:
        return state, ()
    stage = state.stage if state.stage is Stage.YIELDED else _wait(state).stage
    state = replace(state, stage=stage, leader=None)
    # A gateway that could not lead lets those that can try first, for a second.
    if state.unable and stage is not Stage.YIELDED:
        return replace(state, hurry=0), (SetAlarm(AGAIN),)
    return replace(state, hurry=_HURRY, left=token), (Try(),)


def _made_none(state: State) -> State:
    """Go on leading: a handover that was not completed doesn't count."""
    made_at = state.made_at if state.vain else 0.0
    return replace(_to(state, Stage.LEADING), vain=max(state.vain - 1, 0), made_at=made_at)


def _asked(state: State, age: Age, now: float) -> Step:
    if state.stage is not Stage.LEADING:
        return state, (Reply(age, STARTING, AGAIN),)
    if state.ending:
        return replace(_to(state, Stage.YIELDING), other=age), (Drain(),)
    if not age.is_newer_than(state.own):
        return state, (Reply(age, "the gateway that leads is as new", SERVED),)
    vain = state.vain + 1 if state.made_at and now - state.made_at < SERVED else 0
    if vain and (left := state.made_at + held_back(vain) - now) > 0:
        times = "once" if vain == 1 else f"{vain} times"
        why = f"the leader yielded {times} to one that ended again, and yields next in {left:.0f} s: see why it ended"
        return state, (Reply(age, why, left),)
    return replace(_to(state, Stage.YIELDING), other=age, made_at=now, vain=vain), (Drain(),)


def _waited(state: State) -> Step:
    match state.stage:
        case Stage.ASKING:  # The leader hangs. Its end frees the locks.
            refused = f"the gateway that leads did not answer within {ASK_TIME:g} s"
            return replace(_wait(state), refused=refused), (Withdraw(), SetAlarm(AGAIN))
        case Stage.PREPARING | Stage.STANDBY if state.leader is not None:
            return _ask_or_stay(state)
        case Stage.PREPARING | Stage.STANDBY | Stage.TAKING | Stage.YIELDED:
            return state, (Try(),)
        case _:
            return state, ()
