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
from gateway.handover import machine as handover
from gateway.handover.events import Heard, RegisterAgain, Say, Standing, Stood, Tell, Unserved, WaitOver, Wanted
from gateway.handover.machine import Newer, Older
from gateway.kubelet.identity import KubeletId
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
HANDOVER: Final = """
## Handover of one resource

`gateway/handover/machine.py`: one for each resource and each other gateway on the node. The words in quotes are what the gateways say
to each other.

"""
SIDES: Final = {Older: "### On the side of the older gateway\n\n", Newer: "\n### On the side of the newer gateway\n\n"}

State = TypeVar("State", bound=Hashable)
Step = tuple[State, tuple[Any, ...]]
Followed = dict[tuple[Enum, str, Enum], list[frozenset[str]]]


def page() -> str:
    """Write the whole page, in Markdown."""
    parts = [
        INTRODUCTION,
        REGISTRATION,
        *table(("it is", "what happens", "then it is", "what is done"), _registration(list(Phase))),
        HANDOVER,
    ]
    for side, head in SIDES.items():
        parts += [head, *table(("it is", "what happens", "then it is", "what it says and does"), _handover(list(side)))]
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
        standing_by_for=None,
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
        "another gateway serves it": told.StandBy(Age(1, "peer")),
        "that gateway is gone": told.Ours(),
        "nothing holds it back any more": told.Resume(),
        "the gateway ends": told.Stop(),
    }


def _handover(stages: list[Enum]) -> Iterator[tuple[str, ...]]:
    beginnings = [handover.older(own) for own in Standing] + [handover.newer(own)[0] for own in Standing]
    events: dict[str, Any] = {
        "it asks for the resource": Wanted(first=False, could_serve=True),
        "it asks, and we couldn't serve": Wanted(first=False, could_serve=False),
        "it asks, and registers first": Wanted(first=True, could_serve=True),
        **{f'it says "{say.value}"': Heard(say) for say in Say if say is not Say.ASK},
        'it says "revoke", and we ask a newer one still': Heard(Say.REVOKE, soon=True),
        **{f"our registration is {own.value}": Stood(own) for own in Standing},
        "the wait is over, and we could serve": WaitOver(could_serve=True),
        "the wait is over, and we couldn't serve": WaitOver(could_serve=False),
        "the kubelet's records lack the resource": Unserved(),
    }
    return _rows(_followed(beginnings, lambda _: events, handover.step, _alike, lambda state: state.stage), stages)


def _alike(state: handover.State) -> handover.State:
    return replace(
        state,
        failures=min(state.failures, 1),
        asked=0 if state.asked * handover.BUSY_AGAIN < handover.BUSY_WAIT else 1000,
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
    RegisterAgain: "register once more",
}


def _said(action: Any) -> str:
    if isinstance(action, Tell):
        return f'"{action.say.value}"'
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
