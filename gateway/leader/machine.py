"""Decide if this gateway leads on its node, as a pure state machine: events in, the next state and actions out.

The gateway that holds the locks leads. All others stand by, connected to the leader's control socket. The newest asks it to yield as
soon as it could lead itself. The age is the pod's, so a restarted container doesn't ask a gateway of its own pod.
This module never sleeps: after ``SetAlarm`` it gets ``AlarmRang``. A new ``SetAlarm`` replaces the one before.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from gateway.age import Age

LOCK_POLL_S = 0.001
"""Seconds between two tries to take the locks while their holder dies or yields."""
RETRY_S = 1.0
"""Seconds between two tries while another gateway holds the locks. If the leader ends, a gateway that could not lead also waits
this long before it tries."""
HURRY_S = 2.0
"""Seconds for which the locks are tried every ``LOCK_POLL_S``."""
ASK_S = 15.0
"""Seconds within which a leader must yield: a Register in flight takes up to 11."""
REPORT_S = 2.0
"""Seconds within which a new leader must report that it serves."""
REFUSAL_S, REFUSAL_MAX_S = 30.0, 900.0
"""Seconds for which the leader refuses to yield after a failed handover; doubled with each failure in a row, up to the maximum."""
SUCCESS_AFTER_S = 600.0
"""Seconds after which a handover counts as a success. A kubelet also resets a container's crash back-off after this time."""
STARTING = "it is still starting"


class Stage(Enum):
    """A gateway's state in the handover. The values are shown to people."""

    PREPARING = "preparing"
    STANDBY = "standing by"
    ASKING = "asking the leader to yield"
    TAKING = "taking over"
    LEADING = "leading"
    YIELDING = "yielding"
    YIELDED = "yielded"


class Able(Struct, frozen=True):
    """This gateway could lead if ``reason`` is empty; otherwise ``reason`` is why it couldn't."""

    reason: str = ""


class Locked(Struct, frozen=True):
    """This gateway has the locks."""


class HeldElsewhere(Struct, frozen=True):
    """Another gateway holds the locks. ``leader`` is its age. If it can't be reached, ``leader`` is None and ``why`` is the reason.

    ``unable`` is why this gateway couldn't lead (None: unchanged). ``leaving`` is True if the holder has ended or
    yielded.
    """

    leader: Age | None = None
    why: str = ""
    unable: str | None = None
    leaving: bool = False


class Gone(Struct, frozen=True):
    """The gateway with this token closed its connection, leads no longer, or no longer asks to lead."""

    token: str


class LeaderYielded(Struct, frozen=True):
    """The leader has yielded."""


class LeaderRefused(Struct, frozen=True):
    """The leader refuses to yield for this number of seconds."""

    reason: str
    seconds: float = RETRY_S


class ListsReady(Struct, frozen=True):
    """The state file is read, and the lists are ready."""


class LeadWanted(Struct, frozen=True):
    """Another gateway asks to lead, at ``now`` (monotonic seconds)."""

    age: Age
    now: float


class Ending(Struct, frozen=True):
    """This gateway is about to end."""


class Invited(Struct, frozen=True):
    """The leader is about to end, and yields to any gateway that asks."""


class Drained(Struct, frozen=True):
    """Everything that the leader promised is on disk if ``reason`` is empty; otherwise ``reason`` is why not."""

    reason: str = ""


class Serving(Struct, frozen=True):
    """The new leader reports that it serves."""


class Lost(Struct, frozen=True):
    """A lock file was replaced by another file."""

    reason: str


class AlarmRang(Struct, frozen=True):
    """The time of ``SetAlarm`` has passed, at ``now`` (monotonic seconds)."""

    now: float


Event = (
    Able
    | Locked
    | HeldElsewhere
    | Gone
    | LeaderYielded
    | LeaderRefused
    | ListsReady
    | LeadWanted
    | Ending
    | Invited
    | Drained
    | Serving
    | Lost
    | AlarmRang
)


class TryLocks(Struct, frozen=True):
    """Try to take the locks."""


class Ask(Struct, frozen=True):
    """Ask the leader to yield."""


class Withdraw(Struct, frozen=True):
    """No longer ask the leader to yield."""


class PrepareLists(Struct, frozen=True):
    """Read the state file, and make the lists ready."""


class Lead(Struct, frozen=True):
    """Register, and answer calls."""


class Invite(Struct, frozen=True):
    """Tell the standbys that this gateway yields to the first one that asks."""


class Drain(Struct, frozen=True):
    """Prepare to yield: send nothing new, and write everything that was promised to disk."""


class Reply(Struct, frozen=True):
    """Answer the gateway ``to``: this gateway yields, or refuses for this ``reason`` and number of seconds."""

    to: Age
    reason: str = ""
    seconds: float = 0.0


class Free(Struct, frozen=True):
    """Free the locks."""


class StopServing(Struct, frozen=True):
    """Stop serving, because ``by`` leads (None: the leader is unknown)."""

    by: Age | None


class SetAlarm(Struct, frozen=True):
    """Send ``AlarmRang`` after this number of seconds; None: cancel it."""

    seconds: float | None


Action = TryLocks | Ask | Withdraw | PrepareLists | Lead | Invite | Drain | Reply | Free | StopServing | SetAlarm


class State(Struct, frozen=True):
    """What this gateway knows about the leader."""

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
    """The number of tries left that wait only ``LOCK_POLL_S``."""
    left: str = ""
    """The token of the last leader, if it ended or yielded. If it still holds the locks, they will be free in a moment."""
    yielded_at: float = 0.0
    """When this gateway yielded last (monotonic seconds)."""
    failed_handovers: int = 0
    """How many handovers in a row failed: the gateway that it yielded to ended."""
    ending: bool = False
    """True if this gateway is about to end."""


Step = tuple[State, tuple[Action, ...]]
_HURRY = int(HURRY_S / LOCK_POLL_S)
_WAITS = frozenset({Stage.PREPARING, Stage.STANDBY})
_LEADS = frozenset({Stage.LEADING, Stage.YIELDING})


def start(own: Age) -> State:
    """Return the first state. The locks are tried as soon as it is known that this gateway could lead."""
    return State(own)


def refusal_s(failed_handovers: int) -> float:
    """Return for how many seconds the leader refuses to yield, by the number of failed handovers in a row."""
    return min(REFUSAL_S * 2.0 ** min(failed_handovers - 1, 20), REFUSAL_MAX_S) if failed_handovers else 0.0


def step(state: State, event: Event) -> Step:
    """Return the next state and the actions. Every event is allowed in every stage; some are ignored."""
    match event:
        case Able(reason):
            return _able(state, reason)
        case Locked() if state.stage in _LEADS:
            return state, ()
        case Locked():
            return _to(state, Stage.TAKING), (SetAlarm(None), PrepareLists())
        case HeldElsewhere():
            return _held(state, event)
        case Gone(token):
            return _gone(state, token)
        case LeaderYielded() if state.stage is Stage.ASKING:
            left = "" if state.leader is None else state.leader.token
            return replace(_to(state, Stage.TAKING), hurry=_HURRY, left=left), (TryLocks(),)
        case LeaderRefused(reason, seconds) if state.stage is Stage.ASKING:
            return replace(_wait(state), refused=reason), (SetAlarm(max(seconds, RETRY_S)),)
        case ListsReady() if state.stage is Stage.TAKING:
            return replace(_to(state, Stage.LEADING), leader=None, refused="", other=None), (Lead(),)
        case LeadWanted(age, now):
            return _asked_to_yield(state, age, now)
        case Ending() if state.stage is Stage.LEADING:
            return replace(state, ending=True), (Invite(),)
        case Ending() if state.stage is Stage.ASKING:
            return replace(_wait(state), ending=True), (Withdraw(),)
        case Ending():
            return replace(state, ending=True), ()
        case Invited() if state.stage is Stage.STANDBY and state.leader is not None and not state.ending:
            return _to(state, Stage.ASKING), (Ask(), SetAlarm(ASK_S))
        case Drained(reason) if state.stage is Stage.YIELDING and state.other is not None:
            if reason:
                return _abort_handover(state), (Reply(state.other, reason, RETRY_S), Lead())
            return _to(state, Stage.YIELDED), (Reply(state.other), Free(), SetAlarm(REPORT_S))
        case Serving() if state.stage is Stage.YIELDED:
            return replace(_wait(state), leader=state.other), (StopServing(state.other), SetAlarm(None))
        case Lost() if state.stage in {*_LEADS, Stage.TAKING}:
            state = replace(_wait(state), leader=None, other=None)
            return state, (StopServing(None), Free(), SetAlarm(RETRY_S))
        case AlarmRang():
            return _alarm_rang(state)
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
    return _ask_or_stay(state) if state.leader is not None else (state, (TryLocks(),))


def _ask_or_stay(state: State) -> Step:
    """Ask the leader to yield, if this gateway is newer, could lead, and isn't about to end."""
    if state.leader is None or state.unable or state.ending or not state.own.is_newer_than(state.leader):
        return state, (SetAlarm(None),)
    return _to(state, Stage.ASKING), (Ask(), SetAlarm(ASK_S))


def _held(state: State, event: HeldElsewhere) -> Step:
    if state.stage in _LEADS:
        return state, ()
    if event.leaving and state.hurry:
        return replace(state, hurry=state.hurry - 1), (SetAlarm(LOCK_POLL_S),)
    rest: tuple[Action, ...] = ()
    if state.stage is Stage.YIELDED:
        # Keep the kubelet's streams until the new leader serves or ends.
        if event.leader is None or event.leader == state.other:
            return state, (SetAlarm(REPORT_S),)
        rest = (StopServing(event.leader),)
    if event.unable is not None:
        state = replace(state, unable=event.unable)
    state = replace(_wait(state), leader=event.leader, refused=event.why)
    if event.leader is None:
        return state, (*rest, SetAlarm(RETRY_S))
    state, actions = _ask_or_stay(state)
    return state, (*rest, *actions)


def _gone(state: State, token: str) -> Step:
    if state.stage is Stage.YIELDING and state.other is not None and state.other.token == token:
        return _abort_handover(state), (Lead(),)
    known = {one.token for one in (state.leader, state.other) if one is not None}
    if token not in known or state.stage in {*_LEADS, Stage.TAKING}:
        return state, ()
    stage = state.stage if state.stage is Stage.YIELDED else _wait(state).stage
    state = replace(state, stage=stage, leader=None)
    # If this gateway could not lead, the others may try first, for a second.
    if state.unable and stage is not Stage.YIELDED:
        return replace(state, hurry=0), (SetAlarm(RETRY_S),)
    return replace(state, hurry=_HURRY, left=token), (TryLocks(),)


def _abort_handover(state: State) -> State:
    """Keep leading. A handover that was not completed doesn't count as a failed one."""
    yielded_at = state.yielded_at if state.failed_handovers else 0.0
    return replace(
        _to(state, Stage.LEADING), failed_handovers=max(state.failed_handovers - 1, 0), yielded_at=yielded_at
    )


def _asked_to_yield(state: State, age: Age, now: float) -> Step:
    if state.stage is not Stage.LEADING:
        return state, (Reply(age, STARTING, RETRY_S),)
    if state.ending:
        return replace(_to(state, Stage.YIELDING), other=age), (Drain(),)
    if not age.is_newer_than(state.own):
        return state, (Reply(age, "the leader is not older than this gateway", SUCCESS_AFTER_S),)
    failed_handovers = (
        state.failed_handovers + 1 if state.yielded_at and now - state.yielded_at < SUCCESS_AFTER_S else 0
    )
    if failed_handovers and (left := state.yielded_at + refusal_s(failed_handovers) - now) > 0:
        times = "once" if failed_handovers == 1 else f"{failed_handovers} times"
        why = f"the leader yielded {times} to a gateway that then ended. It yields again in {left:.0f} s. See that gateway's log"
        return state, (Reply(age, why, left),)
    return replace(_to(state, Stage.YIELDING), other=age, yielded_at=now, failed_handovers=failed_handovers), (Drain(),)


def _alarm_rang(state: State) -> Step:
    match state.stage:
        case Stage.ASKING:  # The leader hangs. Its end frees the locks.
            refused = f"the gateway that leads did not answer within {ASK_S:g} s"
            return replace(_wait(state), refused=refused), (Withdraw(), SetAlarm(RETRY_S))
        case Stage.PREPARING | Stage.STANDBY if state.leader is not None:
            return _ask_or_stay(state)
        case Stage.PREPARING | Stage.STANDBY | Stage.TAKING | Stage.YIELDED:
            return state, (TryLocks(),)
        case _:
            return state, ()
