"""Who leads, explored: gateways that come, die, hang on to nothing, and ask each other, in every order until no state is new.

The model has the two locks as one, links that carry messages in order, and waits that end at any time. Nothing is timed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from random import Random

import pytest
from msgspec import Struct
from msgspec.structs import replace

from gateway.age import Age
from gateway.leader import machine
from gateway.leader.machine import Stage
from gateway_lab.trials.explore import uncollected

SOON, LATER = 1.0, 1_000_000.0
"""Two moments at which a gateway asks: at the second one, that room was made before is forgotten."""


MOST_MAIL = 2
"""Messages of one and to one that are not read yet, from which on no wait of it ends: else there were states without end."""


class One(Struct, frozen=True, cache_hash=True):
    """A gateway that lives, and what its shell is at."""

    state: machine.State
    waits: bool = False
    takes: bool = False
    drains: bool = False


class World(Struct, frozen=True, cache_hash=True):
    """The gateways (None: not there), who has the locks, what is under way, and what may go wrong still."""

    gateways: tuple[One | None, ...]
    lock: int = -1
    signed: int = -1
    links: frozenset[tuple[int, int]] = frozenset()
    mail: tuple[tuple[int, int, object], ...] = ()
    deaths: int = 1
    changes: int = 1


def born(number: int) -> Age:
    return Age(number + 1, f"{number:08x}")


def fed(world: World, number: int, event: machine.Event) -> World:
    """Let one take an event, and do what follows."""
    one = world.gateways[number]
    if one is None:
        return world
    state, actions = machine.step(one.state, event)
    state = replace(state, hurry=min(state.hurry, 1))
    world = put(world, number, replace(one, state=state))
    for action in actions:
        world = done(world, number, action)
    return world


def put(world: World, number: int, one: One | None) -> World:
    return replace(world, gateways=(*world.gateways[:number], one, *world.gateways[number + 1 :]))


def sent(world: World, source: int, target: int, message: object) -> World:
    linked = (source, target) in world.links or (target, source) in world.links
    return replace(world, mail=(*world.mail, (source, target, message))) if linked else world


def done(world: World, number: int, action: machine.Action) -> World:
    one = world.gateways[number]
    assert one is not None
    match action:
        case machine.TryLocks():
            return tried(world, number, one)
        case machine.Ask() | machine.Withdraw() if one.state.leader is not None:
            return sent(world, number, int(one.state.leader.token, 16), action)
        case machine.PrepareLists():
            return put(world, number, replace(one, takes=True))
        case machine.Invite():
            for other in range(len(world.gateways)):
                world = sent(world, number, other, machine.Invited())
            return world
        case machine.Drain():
            return put(world, number, replace(one, drains=True))
        case machine.Reply(to, reason):
            return sent(
                world, number, int(to.token, 16), machine.LeaderRefused(reason) if reason else machine.LeaderYielded()
            )
        case machine.Free():
            return replace(world, lock=-1 if world.lock == number else world.lock)
        case machine.StopServing(by):
            for other in range(len(world.gateways)):
                if by is None or other != int(by.token, 16):
                    world = sent(world, number, other, machine.Gone(born(number).token))
            return world
        case machine.Lead() if one.state.stage is Stage.LEADING:
            return told_that_it_serves(world, number)
        case machine.SetAlarm(seconds):
            return put(world, number, replace(one, waits=seconds is not None))
        case _:
            return world


def told_that_it_serves(world: World, number: int) -> World:
    for other, there in enumerate(world.gateways):
        if there is not None and there.state.stage is Stage.YIELDED and there.state.other == born(number):
            world = sent(world, number, other, machine.Serving())
    return world


def tried(world: World, number: int, one: One) -> World:
    if one.state.ending:
        return world
    if world.lock in {-1, number}:
        return fed(replace(world, lock=number, signed=number), number, machine.Locked())
    holder = world.gateways[world.signed]
    if one.state.hurry and one.state.left == born(world.signed).token:
        return fed(world, number, machine.HeldElsewhere(leaving=True))
    if holder is None or holder.state.stage not in {Stage.TAKING, Stage.LEADING, Stage.YIELDING}:
        return fed(world, number, machine.HeldElsewhere(why="it doesn't say that it leads"))
    world = replace(world, links=world.links | {(number, world.signed)})
    return fed(world, number, machine.HeldElsewhere(born(world.signed)))


def moves(world: World) -> Iterator[tuple[bool, World]]:
    """Give what can happen next, and whether it is something that goes wrong."""
    for at, (source, target, message) in enumerate(world.mail):
        if any(one[:2] == (source, target) for one in world.mail[:at]):
            continue  # In order.
        left = replace(world, mail=(*world.mail[:at], *world.mail[at + 1 :]))
        match message:
            case machine.Ask():
                for now in (SOON, LATER):
                    yield False, fed(left, target, machine.LeadWanted(born(source), now))
            case machine.Withdraw():
                yield False, fed(left, target, machine.Gone(born(source).token))
            case _:
                yield False, fed(left, target, message)  # type: ignore[arg-type]
    for number, one in enumerate(world.gateways):
        if one is None:
            if world.signed >= 0 and number >= world.signed and world.deaths:  # The newest to come.
                yield True, put(world, number, One(machine.start(born(number))))
            continue
        if one.state.unable == machine.STARTING:
            yield False, fed(world, number, machine.Able())
        elif world.changes:
            change = machine.Able("" if one.state.unable else "no device")
            yield True, fed(replace(world, changes=world.changes - 1), number, change)
            if not one.state.ending:
                yield True, fed(replace(world, changes=world.changes - 1), number, machine.Ending())
        if one.state.ending:
            yield False, died(world, number)
        if one.waits and sum(number in (source, target) for source, target, _ in world.mail) < MOST_MAIL:
            yield False, fed(put(world, number, replace(one, waits=False)), number, machine.AlarmRang(SOON))
        if one.takes:
            yield False, fed(put(world, number, replace(one, takes=False)), number, machine.ListsReady())
        if one.drains:
            for reason in ("", "the disk is full"):
                yield bool(reason), fed(put(world, number, replace(one, drains=False)), number, machine.Drained(reason))
        if world.deaths:
            yield True, died(replace(world, deaths=world.deaths - 1), number)


def died(world: World, number: int) -> World:
    others = [other for pair in world.links if number in pair for other in pair if other != number]
    world = replace(put(world, number, None), lock=-1 if world.lock == number else world.lock)
    mail = tuple(one for one in world.mail if one[1] != number)
    gone = tuple((number, other, machine.Gone(born(number).token)) for other in others)
    return replace(world, mail=(*mail, *gone), links=frozenset(pair for pair in world.links if number not in pair))


def broken(world: World) -> str:
    for number, one in enumerate(world.gateways):
        if one is None:
            continue
        if one.state.stage in {Stage.LEADING, Stage.YIELDING} and world.lock != number:
            return f"{number} leads without the locks"
        if world.lock == number and one.state.stage not in {Stage.TAKING, Stage.LEADING, Stage.YIELDING}:
            return f"{number} has the locks and doesn't lead"
    return ""


def leads(world: World) -> bool:
    return any(one is not None and one.state.stage is Stage.LEADING for one in world.gateways)


def stays(world: World) -> bool:
    return any(one is not None and not one.state.ending for one in world.gateways)


@uncollected()
def test_of_two_one_leads_at_most_and_one_can_always_lead_again() -> None:
    start = World((One(machine.start(born(0))), One(machine.start(born(1)))), deaths=2)
    found, frontier = {start}, [start]
    before: defaultdict[World, list[World]] = defaultdict(list)
    while frontier:
        world = frontier.pop()
        assert not broken(world), world
        for goes_wrong, after in moves(world):
            if not goes_wrong:
                before[after].append(world)
            if after not in found:
                found.add(after)
                frontier.append(after)
    reached = [one for one in found if leads(one)]
    good = set(reached)
    while reached:
        for one in before[reached.pop()]:
            if one not in good:
                good.add(one)
                reached.append(one)
    stuck = [one for one in found - good if stays(one)]
    assert not stuck, (len(stuck), len(found), min(stuck, key=lambda one: len(one.mail)))


@pytest.mark.parametrize("count", [3, 4])
def test_of_more_one_leads_at_most_and_one_leads_again(count: int) -> None:
    for seed in range(200):
        random = Random(seed)  # noqa: S311 - no secret
        there = [One(machine.start(born(number))) if number < count - 1 else None for number in range(count)]
        world = World(tuple(there), deaths=3, changes=3)
        for _ in range(100):
            _, world = random.choice([*moves(world), (False, world)])
            assert not broken(world), (seed, world)
        for _ in range(400):
            if leads(world) or not stays(world):
                break
            world = random.choice([after for goes_wrong, after in moves(world) if not goes_wrong])
            assert not broken(world), (seed, world)
        assert leads(world) or not stays(world), (seed, world)
