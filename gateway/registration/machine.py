"""The registration of one resource, as a pure state machine: events in, the next state and actions out.

Rules (each is a row in the tests; the kubelet's behaviour behind it is cited where the rule is applied):

- A kubelet is new, and of unknown version, each time kubelet.sock is created: negotiate again, always.
- After each kubelet start, exactly one Register is accepted. Never register while the kubelet has a stream of ours.
- An accepted Register is no proof of a registration (kubelets up to 1.24 answer before they connect). ListAndWatch is.
- The kubelet never reconnects. If its stream ends unasked, wait a little, then register once. Never register *at once*:
  kubelets 1.25 to 1.36 close the connection first, and disconnect the resource by name afterwards.
- A stream is no full proof. If the kubelet's records lack our list, register again.
- Any process that reaches our socket may call ListAndWatch. The kubelet calls once for each Register. Any further caller is
  another process, so its call and its end don't affect the kubelet's stream.
- Waiting is a state, not a sleep: this module asks for timers, and the registrar reports when they fire.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from gateway.kubelet.identity import KubeletId
from gateway.registration import negotiate
from gateway.registration.events import (
    Action,
    CancelRegister,
    CancelTimer,
    EndStreams,
    Event,
    Fired,
    Heed,
    KubeletUp,
    Lacking,
    LinkSocket,
    NameLost,
    Phase,
    Reached,
    Renew,
    Replied,
    Report,
    Resume,
    SendRegister,
    SetTimer,
    StandBy,
    Stop,
    StreamEnded,
    StreamOpened,
    Timer,
    UnlinkSocket,
    Verified,
    Verify,
    Withhold,
)
from gateway.registration.negotiate import AnswerKind, Negotiation
from gateway.tally import Cause

CUT_WAIT_S = 0.005
"""Seconds between the end of a stream and the next Register, doubled for each cut in a row. (Run on 1.32.13: after
0.3 ms 11 of 400 registrations stuck, after 1 ms 1 of 550, after 2 ms none of 400.)"""
ERROR_WAIT_S = 0.05
"""Seconds until a failed Register is tried again, doubled for each failure in a row."""
REFUSED_WAIT_S = 15.0
"""Seconds until a kubelet that speaks none of our versions is asked again. Its answer changes only with a restart."""
MAX_WAIT_S = 10.0
"""Most seconds of a doubled wait."""
CALL_WAIT_S = 11.0
"""Seconds to wait for ListAndWatch after an accepted Register. The kubelet's dial time-out is 10 s, so two of its connections
never race."""
CONNECTED_CALL_WAIT_S = 2.0
"""The same, if the kubelet connected before it answered (1.25 and later). Such a kubelet may never call (#127803)."""
UNLIKELY_WAIT_S = 1.0
"""Least seconds from the end of a stream that was probably not the kubelet's to the next Register. The kubelet's own call may
still come."""
SETTLED_S = 10.0
"""Seconds that a stream must last until earlier cuts and errors are forgotten."""
RENEW_WAIT_S = 1.0
"""Least seconds between two Registers for new options: each makes the devices unavailable for a moment."""
VERIFY_AFTER_S = (0.1, 1.0, 315.0)
"""Seconds after the start of a stream at which the kubelet's records are read. If the kubelet drops the resource between its
connection and our first list, the resource looks registered for 5 minutes, and vanishes at the kubelet's next report, at most 10 s
later (read in 1.34.2)."""
FIRST_READS = 2
"""How many of these reads decide if the registration is in force."""
REREAD_S = 1.0
"""Seconds until the records are read again if there is evidence that the kubelet lost the resource."""
HEAL_WAIT_S = 0.1
"""If the kubelet's records lack the resource, seconds from the end of the stream to the next Register; four times as long after
each such Register in a row. Kubelets 1.25 to 1.36 remove a lost resource late, and would remove a new registration with it."""
QUICK_HEALS = 3
"""How many such Registers in a row use that wait. Later ones are errors: they wait ``MAX_WAIT_S``, doubled each time."""
MAX_HEALS = 8
"""The Register in a row after which the wait is no longer doubled."""


class State(Struct, frozen=True):
    """The state of one resource's registration. ``attempt`` numbers the Registers, from 1."""

    token: str
    """A part of every socket name, unique for this registration and process: 1.37 refuses a path that it knows."""
    negotiation: Negotiation
    phase: Phase = Phase.ABSENT
    kubelet: KubeletId | None = None
    """The kubelet that was reached or reported last."""
    attempt: int = 0
    name: str = ""
    """The socket's name in the last Register."""
    dialect: str = ""
    """The dialect on offer, or accepted."""
    accepted: str = ""
    """The dialect that a kubelet accepted last."""
    reached: bool = False
    """True if the current Register was sent. Until then, a call answers an earlier Register."""
    told: KubeletId | None = None
    """The kubelet that got the last Register."""
    stream: int | None = None
    """The stream that is treated as the kubelet's."""
    likely: bool = True
    """True if the caller of ``stream`` may be a kubelet. If it can't be one, a likely stream replaces ``stream``."""
    others: frozenset[int] = frozenset()
    """Other open streams whose callers may be a kubelet: one of them may answer an earlier Register."""
    called: bool = False
    """True if the kubelet has called ListAndWatch since the last Register."""
    cuts: int = 0
    errors: int = 0
    heals: int = 0
    verified: int = 0
    """How many reads of ``VERIFY_AFTER_S`` were made for this stream."""
    stale: str = ""
    """Why the options of the last Register are out of date; empty if they are up to date."""
    renewed: bool = False
    """True if it was sent again for that reason within ``RENEW_WAIT_S``."""
    refused: bool = False
    """True if the kubelet refused the last Register."""
    why: Cause = Cause.FIRST
    """The cause of the next Register."""


def start(token: str, choice: str, last_accepted: str) -> State:
    """Return the first state of one resource. ``token`` is random, for this process and resource; ``choice`` is one of ``CHOICES``."""
    return State(token=token, negotiation=negotiate.begin(choice, last_accepted or None), accepted=last_accepted)


Step = tuple[State, tuple[Action, ...]]

_HELD_BACK = frozenset({Phase.STANDBY, Phase.OUT, Phase.STOPPED})
_UNASKED = frozenset({Phase.WAITING, Phase.ABSENT})
"""Phases in which no Register waits for a call. A caller answers an earlier Register then, or is no kubelet."""
_NONE: frozenset[int] = frozenset()
_CANCEL_ALL: tuple[Action, ...] = tuple(CancelTimer(timer) for timer in Timer)
_QUIET: tuple[Action, ...] = tuple(CancelTimer(timer) for timer in Timer if timer is not Timer.RENEW)


def step(state: State, event: Event) -> Step:
    """Return the next state and the actions. Total: every event is used or ignored in every state."""
    if state.phase is Phase.STOPPED:
        return state, ()
    match event:
        case KubeletUp(kubelet):
            return _kubelet_up(state, kubelet)
        case Reached(attempt, kubelet):
            return (_reached(state, kubelet) if attempt == state.attempt else state), ()
        case Replied():
            return _replied(state, event)
        case StreamOpened(stream, likely):
            return _stream_opened(state, stream, likely=likely)
        case StreamEnded(stream):
            return _stream_ended(state, stream)
        case Fired(timer):
            return _fired(state, timer)
        case NameLost(name):
            # The kubelet keeps its connection. Registering again would end it (facts, trap 4).
            return state, ((LinkSocket(name),) if name == state.name and state.stream is not None else ())
        case Verified(held):
            return _verified(state, held=held)
        case Lacking():
            return _look_again(state)
        case Withhold(reason):
            return _hold_back(state, Phase.OUT, Report("error", "not offered", reason))
        case Renew(reason):
            state = replace(state, stale=reason)
            return _renew(state) if state.phase is Phase.SERVING else (state, ())
        case StandBy():
            return _hold_back(state, Phase.STANDBY, Report("info", "standing by"))
        case Resume(waited):
            return _resume(state, waited)
        case Stop():
            return _hold_back(state, Phase.STOPPED, None)


def _kubelet_up(state: State, kubelet: KubeletId) -> Step:
    if kubelet == state.kubelet and state.phase is not Phase.ABSENT:
        return state, ()
    state = replace(
        state,
        kubelet=kubelet,
        why=Cause.KUBELET_START if state.attempt else Cause.FIRST,
        negotiation=negotiate.begin(state.negotiation.choice, state.accepted or None),
        errors=0,
        cuts=0,
        heals=0,
    )
    if state.phase is Phase.STANDBY:
        return state, ()
    gone: tuple[Action, ...] = (CancelRegister(),) if state.phase is Phase.OFFERING else ()
    state, actions = _offer(state)
    return state, (*gone, *actions)


def _reached(state: State, kubelet: KubeletId) -> State:
    """Note that the Register goes to this kubelet. A new kubelet has refused nothing yet, so start the negotiation again."""
    state = replace(state, reached=True, told=kubelet, stale="")
    if kubelet == state.kubelet:
        return state
    anew = negotiate.begin(state.negotiation.choice, state.dialect)
    why = Cause.KUBELET_START if state.attempt > 1 else state.why
    return replace(state, kubelet=kubelet, negotiation=anew, errors=0, cuts=0, heals=0, why=why)


def _offer(state: State) -> Step:
    """Send the next Register, or report that no dialect is left."""
    dialect = state.negotiation.offer
    if dialect is None:
        # Only a new kubelet can change this. Try again, slowly, because the watch may have missed a new one.
        said, drop = negotiate.failure(state.negotiation), _drop(state)
        unfit = any(answer.kind is AnswerKind.UNFIT for _, answer in state.negotiation.refused)
        fresh = negotiate.begin(state.negotiation.choice, state.accepted or None)
        state = replace(state, phase=Phase.WAITING, negotiation=fresh)
        if unfit:
            return _hold_back(state, Phase.OUT, Report("error", "not offered", said))
        report = Report("error", "no common version", said)
        state = replace(state, stream=None, others=_NONE, name="", refused=True)
        return state, (*_QUIET, *drop, report, SetTimer(Timer.RETRY, REFUSED_WAIT_S))
    attempt = state.attempt + 1
    name, drop = f"{state.token}-{attempt}.sock", _drop(state)
    state = replace(
        state,
        phase=Phase.OFFERING,
        attempt=attempt,
        name=name,
        dialect=dialect,
        stream=None,
        others=_NONE,
        called=False,
        reached=False,
        refused=False,
    )
    return state, (*_QUIET, *drop, SendRegister(attempt, dialect, name))


def _drop(state: State) -> tuple[Action, ...]:
    """Drop the stream and the socket's name. They belong to an earlier kubelet, or to one that called and then refused us."""
    ends: tuple[Action, ...] = (EndStreams(),) if state.stream is not None else ()
    return (*ends, UnlinkSocket(state.name)) if state.name else ends


def _replied(state: State, reply: Replied) -> Step:
    if state.phase is not Phase.OFFERING or reply.attempt != state.attempt:
        return state, ()
    answer = negotiate.classify(reply.code, reply.details)
    match answer.kind:
        case AnswerKind.ACCEPTED:
            state = replace(state, accepted=state.dialect)
            report = Report("info", "registered")
            if state.stream is not None:
                state, actions = _serving(state)
                return state, (report, *actions)
            if state.called:
                return _wait_after_cut(state, Report("info", "stream ended", "while it registered"))
            wait = CONNECTED_CALL_WAIT_S if reply.connected else CALL_WAIT_S
            return replace(state, phase=Phase.ACCEPTED), (report, SetTimer(Timer.CALL, wait))
        case AnswerKind.OTHER_VERSION | AnswerKind.NO_SERVICE | AnswerKind.UNFIT:
            return _offer(replace(state, negotiation=negotiate.refuse(state.negotiation, answer)))
        case AnswerKind.NOBODY:
            # The watch reports a new kubelet. The timer is for one that it missed.
            seconds, errors = _after_error(state)
            state = replace(state, phase=Phase.ABSENT, errors=errors)
            return state, (Report("info", "waiting for a kubelet", answer.details), SetTimer(Timer.RETRY, seconds))
        case AnswerKind.NO_ANSWER:
            if state.stream is not None:  # It never answered Register, but it called, which proves more.
                return _serving(replace(state, accepted=state.dialect))
            return _wait_after_error(state, Report("warning", "no answer to Register", answer.details))
        case AnswerKind.REPORTED:
            if state.stream is not None:  # It refused, but its call answers an earlier Register.
                return _serving(state)
            refused = replace(state, refused=True)
            return _wait_after_error(refused, Report("error", "Register was refused", answer.details))


def _wait_after_error(state: State, report: Report, why: Cause = Cause.ERROR) -> Step:
    seconds, errors = _after_error(state)
    return replace(state, phase=Phase.WAITING, errors=errors, why=why), (report, SetTimer(Timer.RETRY, seconds))


def _after_error(state: State) -> tuple[float, int]:
    """Return the seconds to wait now, and the count of errors, which makes the next wait longer."""
    return min(ERROR_WAIT_S * 2.0 ** min(state.errors, 20), MAX_WAIT_S), state.errors + 1


def _stream_opened(state: State, stream: int, *, likely: bool) -> Step:
    if state.phase in _HELD_BACK:
        return state, (EndStreams(),)
    early = state.phase is Phase.OFFERING and not state.reached
    if not likely and (early or state.stream is not None or state.phase in _UNASKED):
        return state, ()
    if early and state.told != state.kubelet:  # The earlier kubelet calls late, for another dialect.
        return state, (EndStreams(),)
    if state.stream is not None and state.likely:
        return replace(state, others=state.others | {stream}), ()
    state = replace(state, stream=stream, likely=likely, called=state.called or likely, verified=0)
    if state.phase is Phase.OFFERING and not early:  # 1.8 and 1.9 call before Register returns.
        return state, (Heed(stream),)
    state, actions = _serving(state)
    # If it is early, the call answers an earlier Register.
    return state, (Heed(stream), *((CancelRegister(),) if early else ()), *actions)


def _serving(state: State) -> Step:
    later = MAX_WAIT_S * 2.0 ** (state.heals - QUICK_HEALS)
    state = replace(state, phase=Phase.SERVING)
    actions: tuple[Action, ...] = (
        CancelTimer(Timer.CALL),
        CancelTimer(Timer.RETRY),
        SetTimer(Timer.SETTLED, SETTLED_S),
        SetTimer(Timer.VERIFY, VERIFY_AFTER_S[0] if state.heals < QUICK_HEALS else later),
    )
    if not state.stale:
        return state, actions
    state, renewal = _renew(state)
    return state, (*actions, *renewal)


def _renew(state: State) -> Step:
    """Register again because the options changed; but later, if that was done within ``RENEW_WAIT_S``."""
    if state.renewed:
        return state, ()
    cuts, report = state.cuts, Report("info", "registering anew", state.stale)
    state, actions = _again(replace(state, renewed=True, cuts=0), report, Cause.OPTIONS)
    return replace(state, cuts=cuts), (*actions, SetTimer(Timer.RENEW, RENEW_WAIT_S))


def _stream_ended(state: State, stream: int) -> Step:
    if stream in state.others:  # It may have been the kubelet's, whose devices ended with it.
        return _look_again(replace(state, others=state.others - {stream}))
    if stream != state.stream:
        return state, ()
    ends: tuple[Action, ...] = (EndStreams(),) if state.others else ()
    state = replace(state, stream=None, others=_NONE)
    if state.phase is not Phase.SERVING:
        return state, ends
    state, actions = _wait_after_cut(state, Report("info", "stream ended"), 0.0 if state.likely else UNLIKELY_WAIT_S)
    return state, (*ends, *actions)


def _look_again(state: State) -> Step:
    """Read the records once more, unless the first reads of a new stream are still to come."""
    if state.phase is not Phase.SERVING or state.verified < FIRST_READS:
        return state, ()
    return replace(state, verified=FIRST_READS - 1), (SetTimer(Timer.VERIFY, REREAD_S),)


def _wait_after_cut(state: State, report: Report, at_least: float = 0.0, why: Cause = Cause.STREAM_ENDED) -> Step:
    seconds = max(at_least, min(CUT_WAIT_S * 2.0 ** min(state.cuts, 20), MAX_WAIT_S))
    state = replace(state, phase=Phase.WAITING, cuts=state.cuts + 1, why=why)
    return state, (
        report,
        CancelTimer(Timer.SETTLED),
        CancelTimer(Timer.VERIFY),
        SetTimer(Timer.RETRY, seconds),
    )


def _fired(state: State, timer: Timer) -> Step:
    match timer:
        case Timer.RETRY if state.phase in {Phase.WAITING, Phase.ABSENT}:
            return _offer(state)
        case Timer.CALL if state.phase is Phase.ACCEPTED:
            report = Report("warning", "registered but never called", "no ListAndWatch in time")
            return _wait_after_error(state, report, Cause.NEVER_CALLED)
        case Timer.SETTLED if state.phase is Phase.SERVING:
            return replace(state, cuts=0, errors=0), ()
        case Timer.VERIFY if state.phase is Phase.SERVING:
            done = state.verified + 1
            again = VERIFY_AFTER_S[done:]
            later = (SetTimer(Timer.VERIFY, again[0] - VERIFY_AFTER_S[done - 1]),) if again else ()
            return replace(state, verified=done), (Verify(), *later)
        case Timer.RENEW:
            state = replace(state, renewed=False)
            return _renew(state) if state.stale and state.phase is Phase.SERVING else (state, ())
        case _:
            return state, ()


def _verified(state: State, *, held: bool) -> Step:
    if state.phase is not Phase.SERVING:
        return state, ()
    if held:
        return (replace(state, heals=0) if state.verified >= FIRST_READS else state), ()
    level = "warning" if state.heals < QUICK_HEALS else "error"
    report = Report(level, "the kubelet doesn't hold this resource", "ending the stream and registering once more")
    seconds = HEAL_WAIT_S * 4.0 ** min(state.heals, QUICK_HEALS - 1)
    return _again(replace(state, heals=min(state.heals + 1, MAX_HEALS)), report, Cause.RECORDS, seconds)


def _again(state: State, report: Report, why: Cause, seconds: float = 0.0) -> Step:
    """End the stream and register again after ``seconds``, or after the wait for a cut if that is longer."""
    state, actions = _wait_after_cut(replace(state, stream=None, others=_NONE), report, seconds, why)
    return state, (EndStreams(), *actions)


def _hold_back(state: State, phase: Phase, report: Report | None) -> Step:
    if state.phase is phase:
        return state, ()
    actions: list[Action] = [*_CANCEL_ALL]
    if state.phase is Phase.OFFERING:
        actions.append(CancelRegister())
    actions.append(EndStreams())
    if state.name:
        actions.append(UnlinkSocket(state.name))
    if report is not None:
        actions.append(report)
    return replace(state, phase=phase, stream=None, others=_NONE, name="", renewed=False), tuple(actions)


def _resume(state: State, waited: float) -> Step:
    if state.phase not in {Phase.STANDBY, Phase.OUT}:
        return state, ()
    state = replace(state, why=Cause.HANDOVER if state.phase is Phase.STANDBY else Cause.OFFERED)
    if state.kubelet is None:
        return replace(state, phase=Phase.ABSENT), ()
    fresh = negotiate.begin(state.negotiation.choice, state.accepted or None)
    state = replace(state, phase=Phase.WAITING, negotiation=fresh, refused=False)
    return state, (SetTimer(Timer.RETRY, max(CUT_WAIT_S - waited, 0.0)),)
