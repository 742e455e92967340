"""Print docs/machines.md out of the two state machines: ``python -m tools.machines [--check] [FILE]``.

Each machine is followed through every state that it can reach from its beginnings, with every event in each of them; what is
counted or timed is cut off where the machine makes no more difference.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from gateway.age import Age
from gateway.kubelet.identity import KubeletId
from gateway.leader import machine as leader
from gateway.leader.machine import Stage
from gateway.registration import events as told
from gateway.registration import machine as registration
from gateway.registration.events import Phase, Timer
from tools.pages import main, table

INTRODUCTION: Final = """\
<!-- Generated from the state machines by `make docs`. Do not edit. -->
# The two state machines

What decides is pure: `step(state, event)` gives the next state and what is to be done. These tables are printed from that code: every
state that can be reached, with every event in it. An event that is not listed in a state changes nothing there and does nothing.
A timer that is set or cancelled, and what is only logged, is left out. *Sometimes* means that it depends on more than the state's name:
the rules at the head of each module say on what. [architecture.md](architecture.md) says where the machines stand.
"""
REGISTRATION: Final = """
## Registration of one resource

`gateway/registration/machine.py`: one for each resource.

"""
LEADER: Final = """
## Which gateway leads

`gateway/leader/machine.py`: one for each gateway. "It" is this gateway, and "the other one" is the gateway that it is connected to.

"""

State = TypeVar("State", bound=Hashable)
Step = tuple[State, tuple[Any, ...]]
Followed = dict[tuple[Enum, str, Enum], list[frozenset[str]]]


def page() -> str:
    """Write the whole page, in Markdown."""
    parts = [
        INTRODUCTION,
        REGISTRATION,
        *table(("it is", "what happens", "then it is", "what is done"), _registration(list(Phase))),
        LEADER,
        *table(("it is", "what happens", "then it is", "what is done"), _leader(list(Stage))),
    ]
    return "".join(parts)


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
        "a new kubelet.sock": told.KubeletUp(KubeletId(0, 0, 2)),
        "its Register is sent": told.Reached(number, KubeletId(0, 0, 0)),
        "Register: accepted": told.Replied(number, "OK"),
        "Register: another version": told.Replied(number, "UNKNOWN", other),
        "Register: no such service": told.Replied(number, "UNIMPLEMENTED"),
        "Register: no answer": told.Replied(number, "UNAVAILABLE"),
        "Register: refused for another reason": told.Replied(number, "UNKNOWN", "the ResourceName is invalid"),
        "Register: the dialect can't carry it": told.Replied(number, "UNFIT"),
        "Register: nobody listens": told.Replied(number, "NOBODY"),
        "ListAndWatch, by a kubelet": told.StreamOpened(2 if state.stream else 1),
        "ListAndWatch, by somebody else": told.StreamOpened(3, likely=False),
        "its stream ends": told.StreamEnded(1),
        "another stream ends": told.StreamEnded(2),
        **{f"timer: {timer.value}": told.Fired(timer) for timer in Timer},
        "its name is deleted": told.NameLost(state.name),
        "the kubelet's records have it": told.Verified(held=True),
        "the kubelet's records lack it": told.Verified(held=False),
        "its options change": told.Renew("options"),
        "it can't be offered": told.Withhold("too large"),
        "another gateway leads": told.StandBy(),
        "nothing holds it back any more": told.Resume(),
        "the gateway ends": told.Stop(),
    }


def _leader(stages: list[Enum]) -> Iterator[tuple[str, ...]]:
    beginning = _simple(leader.start(_OWN))
    return _rows(_followed([beginning], _leader_events, leader.step, _simple, lambda state: state.stage), stages)


_OLDER, _OWN, _NEWER = Age(1, "older"), Age(2, "own"), Age(3, "newer")


def _leader_events(state: leader.State) -> Mapping[str, Any]:
    other = state.leader or state.other
    return {
        "it could lead": leader.Able(),
        "it could not lead": leader.Able("it has no devices"),
        "it took the locks": leader.Locked(),
        "an older gateway has the locks": leader.HeldElsewhere(_OLDER),
        "a newer gateway has the locks": leader.HeldElsewhere(_NEWER),
        "a gateway that can't be talked to has the locks": leader.HeldElsewhere(why="it doesn't answer"),
        "the other one still has the locks, and is about to release them": leader.HeldElsewhere(leaving=True),
        "the other one ends": leader.Gone("" if other is None else other.token),
        "the other one yields": leader.Yours(),
        "the other one refuses": leader.No("it is newer"),
        "the other one is about to end": leader.Invited(),
        "the other one serves": leader.Serving(),
        "it has read what the leader before left": leader.Took(),
        "a newer gateway asks it to yield": leader.RoomWanted(_NEWER, 1e4),
        "a newer gateway asks it to yield soon after another one": leader.RoomWanted(_NEWER, 1.0),
        "an older gateway asks it to yield": leader.RoomWanted(_OLDER, 1e4),
        "what was promised is on disk": leader.Drained(),
        "what was promised can't be written": leader.Drained("the disk is full"),
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
    """Give the rows of these states; events share one where they have the same result."""
    for stage in stages:
        alike: dict[tuple[str, str], list[str]] = {}
        for (before, event, then), ways in found.items():
            if before is stage:
                alike.setdefault(("" if then is stage else then.value, _joined(ways)), []).append(event)
        for (after, done), events in alike.items():
            yield stage.value, "; ".join(events), after, done


_DONE: Final[Mapping[type, str]] = {
    told.CancelRegister: "give up the Register in flight",
    told.EndStreams: "end its streams",
    told.UnlinkSocket: "delete its name",
    told.LinkSocket: "give the socket its name again",
    told.SendRegister: "register",
    told.Verify: "look into the kubelet's records",
    leader.Try: "try to take the locks",
    leader.Ask: "ask the other one to yield",
    leader.Withdraw: "take the question back",
    leader.Take: "read what the leader before left",
    leader.Lead: "register and answer",
    leader.Invite: "tell the others to ask",
    leader.Drain: "write what was promised",
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
