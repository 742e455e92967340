"""Return why the next Register is sent, from the event that led to it."""

from __future__ import annotations

from gateway.registration import events, negotiate
from gateway.registration import machine as registration
from gateway.registration.events import Phase, Timer
from gateway.tally import Cause


def cause(state: registration.State, event: events.Event) -> Cause | None:
    """Return why the next Register will be sent after ``event`` in ``state``; None: as before this event."""
    match event:
        case events.KubeletUp(kubelet):
            if kubelet == state.kubelet and state.phase is not Phase.ABSENT:
                return None
            return Cause.KUBELET_START if state.attempt else Cause.FIRST
        case events.Reached(attempt, kubelet):
            news = attempt == state.attempt > 1 and kubelet != state.kubelet
            return Cause.KUBELET_START if news else None
        case events.Replied(_, code, details):
            match negotiate.classify(code, details).kind:
                case negotiate.AnswerKind.REPORTED:
                    return Cause.ERROR
                case negotiate.AnswerKind.NO_ANSWER if state.stream is None:  # Otherwise it called, and that counts.
                    return Cause.ERROR
                case negotiate.AnswerKind.ACCEPTED if state.called and state.stream is None:
                    return Cause.STREAM_ENDED
                case negotiate.AnswerKind.ACCEPTED if state.stale:
                    return Cause.OPTIONS
                case _:
                    return None
        case events.StreamOpened(likely=True) if state.phase is Phase.ACCEPTED and state.stale:
            return Cause.OPTIONS
        case events.StreamEnded(stream):
            return Cause.STREAM_ENDED if stream == state.stream and state.phase is Phase.SERVING else None
        case events.Fired(Timer.CALL):
            return Cause.NEVER_CALLED if state.phase is Phase.ACCEPTED else None
        case events.Verified(held=False):
            return Cause.RECORDS if state.phase is Phase.SERVING else None
        case events.Renew():
            return Cause.OPTIONS if state.phase is Phase.SERVING else None
        case events.Fired(Timer.RENEW):
            return Cause.OPTIONS if state.phase is Phase.SERVING and state.stale else None
        case events.Resume():
            return {Phase.STANDBY: Cause.HANDOVER, Phase.OUT: Cause.OFFERED}.get(state.phase)
        case _:
            return None
