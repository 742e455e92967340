"""Print docs/machines.md out of the two state machines: ``python -m tools.machines [--check] [FILE]``.

Each machine is followed through every state that it can reach from its beginnings, with every event in each of them; what is
counted or timed is cut off where the machine makes no more difference.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from devices.life.states import State as DeviceState
from gateway.age import Age
from gateway.bridge.shield import Cover
from gateway.kubelet.identity import KubeletId
from gateway.leader import machine as leader
from gateway.leader.machine import Stage
from gateway.registration import events as told
from gateway.registration import machine as registration
from gateway.registration.events import Phase, Timer
from gateway.sides.side import Side
from tools.pages import main, table

INTRODUCTION: Final = """\
<!-- Generated from the state machines by `make docs`. Do not edit. -->
# The state machines

The gateway's decisions are pure: a state and an event give the next state and what to do. `gateway/daemon.py` carries it out.
The parts around them: [architecture.md](architecture.md).

```mermaid
flowchart LR
  socket["kubelet.sock"] -- "a new kubelet" --> registration["registration<br>one for each resource"]
  leader["leader<br>one for each gateway"] -- "stand by, resume" --> registration
  registration -- "it serves, or could" --> leader
  life["device<br>one for each device"] -- "the list" --> registration
  records["the kubelet's records"] -- "it has the resource, it lacks it" --> registration
  records -- "holders" --> life
  records -- "holders" --> side["side<br>one for each board, with --dra on"]
  side -- "given by DRA" --> life
  plugin["shield<br>one for each bridged plugin"] -- "devices and their health" --> life
  leader -- "may write" --> state["state file"]
```

"""
STATES: Final = """
The tables of *registration* and *leader* below are printed from the code. If an event is not listed for a state, nothing happens. They leave out
timers that are set or cancelled, and what is only logged. *Sometimes* and *or*: it depends on more than the name of the state;
the rules at the head of the module say on what.
"""
REGISTRATION: Final = """
## Registration of one resource

"""
LEADER: Final = """
## Which gateway leads

"It" is this gateway.

"""

_HEAD: Final = ("what happens", "in which state", "then it is", "what it does")
State = TypeVar("State", bound=Hashable)
Step = tuple[State, tuple[Any, ...]]
Followed = dict[tuple[Enum, str, Enum], list[frozenset[str]]]


def page() -> str:
    """Write the whole page, in Markdown."""
    parts = [
        INTRODUCTION,
        *table(("machine", "states", "code"), _machines()),
        STATES,
        REGISTRATION,
        *table(_HEAD, _registration(list(Phase))),
        LEADER,
        *table(_HEAD, _leader(list(Stage))),
    ]
    return "".join(parts)


def _machines() -> Iterator[tuple[str, str, str]]:
    for name, states, code in (
        ("registration", Phase, "gateway/registration/machine.py"),
        ("leader", Stage, "gateway/leader/machine.py"),
        ("device", DeviceState, "devices/life/states.py"),
        ("side", Side, "gateway/sides/table.py"),
        ("shield", Cover, "gateway/bridge/shield.py"),
    ):
        yield name, ", ".join(str(one.value) for one in states), f"`{code}`"


def _registration(phases: list[Enum]) -> Iterator[tuple[str, ...]]:
    beginning = _same(registration.start("t", "v1alpha", ""))
    return _rows(
        _followed([beginning], _registration_events, registration.step, _same, lambda state: state.phase), phases
    )


def _same(state: registration.State) -> registration.State:
    """Give the state that counts for this one and all that differ from it in a number only."""
    return replace(
        state,
        attempt=min(state.attempt, 1),
        name=state.name and "name",
        stream=None if state.stream is None else 1,
        others=frozenset({2}) if state.others else frozenset(),
        cuts=0,
        errors=0,
        heals=0,
        verified=0 if state.verified < registration.FIRST_LOOKS else registration.FIRST_LOOKS,
        accepted="",
        told=state.told and KubeletId(0, 0, 0 if state.told == state.kubelet else 1),
        kubelet=state.kubelet and KubeletId(0, 0, 0),
        negotiation=replace(state.negotiation, refused=()),
    )


def _registration_events(state: registration.State) -> Mapping[str, Any]:
    number = state.attempt
    other = 'requested API version "v1" is not supported by kubelet. Supported version is "v1alpha2"'
    return {
        "new kubelet.sock": told.KubeletUp(KubeletId(0, 0, 2)),
        "Register is sent": told.Reached(number, KubeletId(0, 0, 0)),
        "Register: accepted": told.Replied(number, "OK"),
        "Register: another version": told.Replied(number, "UNKNOWN", other),
        "Register: no such service": told.Replied(number, "UNIMPLEMENTED"),
        "Register: no answer": told.Replied(number, "UNAVAILABLE"),
        "Register: other error": told.Replied(number, "UNKNOWN", "the ResourceName is invalid"),
        "Register: the dialect can't carry it": told.Replied(number, "UNFIT"),
        "Register: nobody listens": told.Replied(number, "NOBODY"),
        "ListAndWatch by a kubelet": told.StreamOpened(2 if state.stream else 1),
        "ListAndWatch by another caller": told.StreamOpened(3, likely=False),
        "the stream ends": told.StreamEnded(1),
        "another stream ends": told.StreamEnded(2),
        **{f"timer: {timer.value}": told.Fired(timer) for timer in Timer},
        "the socket's name is deleted": told.NameLost(state.name),
        "the kubelet's records have it": told.Verified(held=True),
        "the kubelet's records lack it": told.Verified(held=False),
        "the options change": told.Renew("options"),
        "the resource can't be offered": told.Withhold("too large"),
        "another gateway leads": told.StandBy(),
        "the resource may be offered again": told.Resume(),
        "the gateway ends": told.Stop(),
    }


def _leader(stages: list[Enum]) -> Iterator[tuple[str, ...]]:
    beginning = _simple(leader.start(_OWN))
    return _rows(_followed([beginning], _leader_events, leader.step, _simple, lambda state: state.stage), stages)


_OLDER, _OWN, _NEWER = Age(1, "older"), Age(2, "own"), Age(3, "newer")


def _leader_events(state: leader.State) -> Mapping[str, Any]:
    other = state.leader or state.other
    return {
        "it can lead": leader.Able(),
        "it can't lead": leader.Able("it has no devices"),
        "it has the locks": leader.Locked(),
        "an older gateway has the locks": leader.HeldElsewhere(_OLDER),
        "a newer gateway has the locks": leader.HeldElsewhere(_NEWER),
        "an unreachable gateway has the locks": leader.HeldElsewhere(why="it doesn't answer"),
        "the locks are about to be free": leader.HeldElsewhere(leaving=True),
        "the other gateway ends": leader.Gone("" if other is None else other.token),
        "the leader yields": leader.Yours(),
        "the leader refuses": leader.No("it is newer"),
        "the leader is about to end": leader.Invited(),
        "the new leader serves": leader.Serving(),
        "its lists are ready": leader.Took(),
        "a newer gateway asks": leader.RoomWanted(_NEWER, 1e4),
        "a newer gateway asks soon after a yield in vain": leader.RoomWanted(_NEWER, 1.0),
        "an older gateway asks": leader.RoomWanted(_OLDER, 1e4),
        "its promises are on disk": leader.Drained(),
        "its promises can't be written": leader.Drained("the disk is full"),
        "a lock is replaced": leader.Lost("it is another file"),
        "the wait is over": leader.Rung(1.0),
        "it is about to end": leader.Ending(),
    }


def _simple(state: leader.State) -> leader.State:
    return replace(
        state,
        refused="",
        hurry=min(state.hurry, 1),
        left="",
        made_at=min(state.made_at, 1.0),
        vain=min(state.vain, 1),
    )


def _followed(
    beginnings: Iterable[State],
    events: Callable[[State], Mapping[str, Any]],
    step: Callable[[State, Any], Step[State]],
    alike: Callable[[State], State],
    named: Callable[[State], Enum],
) -> Followed:
    """Give what is done, by the name of the state, the event and the name of the next state: once for each way in which that goes."""
    found: Followed = {}
    left = list(dict.fromkeys(map(alike, beginnings)))
    seen = set(left)
    while left:
        state = left.pop()
        for event, value in events(state).items():
            after, actions = step(state, value)
            done = frozenset(filter(None, map(_said, actions)))
            if named(after) is not named(state) or done:
                found.setdefault((named(state), event, named(after)), []).append(done)
            if (new := alike(after)) not in seen:
                seen.add(new)
                left.append(new)
    order = list(events(next(iter(seen))))
    return {key: found[key] for key in sorted(found, key=lambda key: order.index(key[1]))}


def _rows(found: Followed, stages: list[Enum]) -> Iterator[tuple[str, ...]]:
    """Give a row for each event and what follows; states share one, and so do events that do the same in the same states."""
    ways: dict[tuple[str, Enum | None], dict[Enum, list[frozenset[str]]]] = {}
    for (before, event, then), done in found.items():
        ways.setdefault((event, None if then is before else then), {})[before] = done
    nexts: dict[tuple[str, str, str], list[str]] = {}
    for (event, after), by_state in ways.items():
        row = event, _named(by_state, after, stages), _joined([one for done in by_state.values() for one in done])
        nexts.setdefault(row, []).append(after.value if after else "the same")
    alike: dict[tuple[str, str, str], list[str]] = {}
    for (event, named, does), then_is in nexts.items():
        alike.setdefault((named, " or ".join(then_is), does), []).append(event)
    for (named, then_it_is, does), events in alike.items():
        yield "; ".join(events), named, then_it_is, does


def _named(states: Container[Enum], then: Enum | None, stages: list[Enum]) -> str:
    """Name these states, in the machine's order."""
    found = [one for one in stages if one in states]
    others = [one for one in stages if one is not then and one is not Phase.STOPPED]
    return "any" if found == others else "; ".join(one.value for one in found)


_DONE: Final[Mapping[type, str]] = {
    told.CancelRegister: "cancel Register",
    told.EndStreams: "end its streams",
    told.UnlinkSocket: "delete the socket's name",
    told.LinkSocket: "restore the name",
    told.SendRegister: "register",
    told.Verify: "read the kubelet's records",
    leader.Try: "try the locks",
    leader.Ask: "ask the leader to yield",
    leader.Withdraw: "withdraw the question",
    leader.Take: "read the state file",
    leader.Lead: "register and respond",
    leader.Invite: "tell the others to ask",
    leader.Drain: "write its promises",
    leader.Free: "release the locks",
    leader.Rest: "stop serving",
}


def _said(action: Any) -> str:
    if isinstance(action, leader.Reply):
        return "refuse" if action.reason else "yield"
    return _DONE.get(type(action), "")


def _joined(ways: list[frozenset[str]]) -> str:
    always = frozenset.intersection(*ways)
    sometimes = frozenset.union(*ways) - always
    said = ", ".join(_ordered(always))
    if not sometimes:
        return said
    return f"{said}{'; ' if said else ''}sometimes {', '.join(_ordered(sometimes))}"


def _ordered(done: Iterable[str]) -> list[str]:
    order = list(_DONE.values())
    return sorted(done, key=lambda one: (order.index(one) if one in order else -1, one))


if __name__ == "__main__":
    main(page, __doc__, "the state machines say")
