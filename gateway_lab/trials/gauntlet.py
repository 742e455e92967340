"""The gauntlet: each fault alone, then all of them mixed by chance for as long as one likes: ``make gauntlet``.

First every fault is struck on an emulated and on a genuine kubelet (the versions take turns; ``--every``: on all of them).
Then the soak: a script of rounds, made from a seed and nothing else. In a round some faults are struck, one while the other
lasts, pods come and go, kubelets are replaced by others; then all that was wrong ends, and the node must be right within the
sum of the bounds. All along no device may be in two living pods and no pod may lose one, the gateway may not end by itself,
and it may not grow. A script that fails is made shorter as long as it still fails, and written to a file for ``--replay``.

Ends with 0 when all promises were kept, with 1 when one was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from adapters.levels import minor_version
from gateway_lab.bench.footprint import footprint
from gateway_lab.gatewayproc import GatewayProcess
from gateway_lab.kubelets import build
from gateway_lab.kubelets.kubelet import Demand, Kubelet, KubeletError
from gateway_lab.matrix.witness import logs
from gateway_lab.namespaces import Namespaces, NamespacesError
from gateway_lab.trials.faults import FAILURES, FAULTS, Fault, Ground, Outcome, alone, descriptors, ground
from gateway_lab.trials.insider import TASKS
from gateway_lab.trials.invariants import Holding, broken, given_twice, holdings, may_be_an_accident
from gateway_lab.trials.scenarios import RESOURCE, forgets, mistold, must

KUBELETS: Final = ("1.9", "1.20", "1.28", "1.37")
"""One of each kind of registration."""
SOAK_MINUTES: Final = 1.0
SHRINK_MINUTES: Final = 5.0
ACCIDENTS: Final = 4
"""So many faults that fail alone may be a busy machine's doing, and are struck once more, nothing beside; more never are."""
TRIES: Final = 3
"""How often the end of a script that failed is played before more of it is."""
AT_ONCE: Final = 1 + (os.cpu_count() or 1)
ROUNDS: Final = 5000
"""How long a script is at most; a soak plays as much of it as it has time for."""
MOST_PODS: Final = 3
RARE: Final[Mapping[str, float]] = {
    **dict.fromkeys(("restart-storm", "gateway-killed", "gateway-restarted", "gateway-absent"), 0.1),
    **dict.fromkeys(("gateway-rolled-out", "gateway-rolled-back", "leader-killed", "standby-killed"), 0.2),
    **dict.fromkeys(("register-lost", "never-calls"), 0.2),
    "several-at-once": 0.5,
}
"""How often a fault is chosen, where that isn't 1: what takes long, and what ends the gateway that is watched for growth."""
LASTING: Final = ((0.0, 50), (0.2, 25), (1.0, 15), (3.0, 8), (17.0, 1))
"""How many seconds a fault may last, and how often: mostly short ones, at times one longer than every deadline."""
RIVALS: Final = frozenset({"half-open", "two-kubelets", "two-kubelets-younger-ends"})
"""Two kubelets write one checkpoint: pods that come meanwhile may be lost by the kubelets themselves."""
WARM_UP: Final = 8
"""How many rounds a gateway lives before it is watched for growth."""
ENOUGH: Final = 18
"""How many rounds are watched at least."""


# The script.


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One thing that happens in round ``at``: a fault by its name, or ``kubelet``, ``admit`` or ``remove``."""

    at: int
    do: str
    pick: int = 0
    """Chooses among devices, pods, or the ways that a fault has."""
    lasts: float = 0.0
    """How many seconds a fault lasts at least."""
    kubelet: str = ""
    """For ``kubelet``: which one takes over, such as ``1.20 genuine``."""


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is written to a file for ``--replay``."""

    seed: int
    steps: tuple[Step, ...]
    broke: str = ""


def script(seed: int, kubelets: Sequence[str], faults: Collection[str], length: int = ROUNDS) -> tuple[Step, ...]:
    """Make a script from a seed: the same one for the same arguments, whatever happens when it is played.

    Args:
        seed: chooses everything.
        kubelets: those that may come, such as ``1.20 genuine``.
        faults: the names of those that are possible here.
        length: how many rounds there are to be.
    """
    chance = random.Random(seed)
    possible = {
        emulated: [name for name in FAULTS if name in faults and (emulated or not FAULTS[name].emulated)]
        for emulated in (True, False)
    }
    seconds, often = zip(*LASTING, strict=True)
    kubelet = chance.choice(kubelets)
    steps = [Step(0, "kubelet", kubelet=kubelet)]
    for at in range(1, length + 1):
        if chance.random() < 0.25:
            kubelet = chance.choice(kubelets)
            steps.append(Step(at, "kubelet", kubelet=kubelet))
        for do, likely in (("remove", 0.3), ("admit", 0.5)):
            if chance.random() < likely:
                steps.append(Step(at, do, chance.randrange(1000)))
        if not (names := possible[kubelet.endswith("emulated")]):
            continue
        count = chance.choice((1, 1, 2, 2, 3, 4))
        struck = list(dict.fromkeys(chance.choices(names, [RARE.get(name, 1.0) for name in names], k=count)))
        lasting = chance.choices(seconds, often)[0]
        for name in struck:
            steps.append(Step(at, name, chance.randrange(1000), lasting))
            if chance.random() < 0.25 and not RIVALS & {*struck}:
                steps.append(Step(at, "admit", chance.randrange(1000)))
    return tuple(steps)


def tails(steps: Sequence[Step]) -> Iterator[tuple[Step, ...]]:
    """Give the last round, the last two, four and so on, each on the kubelet that it was played on; not all of them."""
    numbers = [number for number, _ in rounds(steps)]
    count = 1
    while count < len(numbers):
        first = numbers[-count]
        ran = [step for step in steps if step.do == "kubelet" and step.at < first][-1:]
        yield (*(msgspec.structs.replace(step, at=0) for step in ran), *(step for step in steps if step.at >= first))
        count *= 2


async def shrink(
    steps: Sequence[Step], fails: Callable[[Sequence[Step]], Awaitable[bool]], ends: float
) -> tuple[Step, ...]:
    """Leave steps out as long as the rest still fails (ddmin); stop at ``ends``, by the monotonic clock."""
    kept, parts = [*steps], 2
    while len(kept) > 1 and time.monotonic() < ends:
        size = -(-len(kept) // parts)
        for begin in range(0, len(kept), size):
            rest = [*kept[:begin], *kept[begin + size :]]
            if time.monotonic() < ends and await fails(rest):
                kept, parts = rest, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(kept))
    return tuple(kept)


# What may not grow.


@dataclass(frozen=True, slots=True)
class Sample:
    """What a gateway has at the end of a round: MiB of memory, and how many of the others."""

    memory: float
    threads: int
    descriptors: int
    tasks: int


MAY_GROW: Final[Mapping[str, float]] = {"memory": 4.0, "threads": 4, "descriptors": 6, "tasks": 6}
"""How much more, of each, is no growth: caches, connections that are about to be closed."""


async def sample(gateway: GatewayProcess) -> Sample:
    """Look at a gateway."""
    mark = gateway.seen
    os.kill(gateway.pid, signal.SIGUSR1)
    told = await gateway.wait_for(TASKS, since=mark)
    threads = sum(1 for _ in Path("/proc", str(gateway.pid), "task").iterdir())  # noqa: ASYNC240 - not a disk
    return Sample(footprint(gateway.pid).rss, threads, len(descriptors(gateway.pid)), told["count"])


def growth(samples: Sequence[Sample]) -> list[str]:
    """Say what grew over the life of one gateway: the medians of the first third, after a warm-up, and the last differ.

    A leak of one in a round is far over ``MAY_GROW`` then; a peak in a round isn't.
    """
    watched = samples[WARM_UP:]
    if len(watched) < ENOUGH:
        return []
    third = len(watched) // 3
    sentences = []
    for name, more in MAY_GROW.items():
        first, last = (
            statistics.median(getattr(one, name) for one in part) for part in (watched[:third], watched[-third:])
        )
        if last - first > more:
            sentences.append(f"the gateway's {name} grew from {first:g} to {last:g} in {len(watched)} rounds")
    return sentences


# Playing a script.


@dataclass(slots=True)
class Played:
    """What came of a script."""

    rounds: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)
    """The longest recovery by fault, in seconds, of rounds in which it was alone."""
    samples: list[Sample] = field(default_factory=list)
    """Of the gateway that lived longest."""
    broke: str = ""
    """The promise that was broken; '' for none."""
    grew: bool = False
    """Whether it is that of not growing, which a shorter script doesn't show."""
    log: Sequence[str] = ()


class Player:
    """Plays scripts on nodes of their own. ``say`` is told of each round."""

    def __init__(self, genuine: Mapping[str, Path], say: Callable[[str], None]) -> None:
        self._genuine, self._say = genuine, say

    def lookup(self, kubelet: str) -> tuple[str, Callable[[str], Path | None]]:
        """Read ``1.20 genuine``: the version, and where it is."""
        version, _, kind = kubelet.partition(" ")
        if kind == "genuine" and version not in self._genuine:
            raise KubeletError(
                "launch",
                f"this script needs the genuine kubelet {version}: python -m gateway_lab.kubelets.build {version}",
            )
        return version, (self._genuine.get if kind == "genuine" else lambda _: None)

    async def play(self, steps: Sequence[Step], ends: float = float("inf")) -> Played:
        """Play rounds until ``ends``, by the monotonic clock, or until a promise is broken."""
        played = Played()
        first = next((step.kubelet for step in steps if step.do == "kubelet"), f"{KUBELETS[-1]} emulated")
        try:
            version, genuine = self.lookup(first)
            async with ground(version, genuine) as g:
                try:
                    for number, part in rounds(steps):
                        if time.monotonic() >= ends:
                            break
                        await self._round(g, number, part, played)
                    self._grown(played)
                except FAILURES as error:
                    played.broke = f"{error}".replace(str(g.node.root), "<node>") or "it took too long"
                    played.log = logs(g.node)
        except FAILURES as error:
            played.broke = played.broke or f"the node could not be set up or taken down: {error}"
        return played

    async def _round(self, g: Ground, number: int, steps: Sequence[Step], played: Played) -> None:
        gateway = g.node.gateway
        struck: list[Fault] = []
        begin = time.monotonic()
        async with _Admissions(g, number) as pods, AsyncExitStack() as lasting:
            for step in steps:
                if step.do == "kubelet":
                    await self._replace(g, step)
                elif step.do == "remove":
                    await _remove(g, step)
                elif step.do == "admit":
                    await pods.admit(step.pick, at_once=not struck)
                elif not FAULTS[step.do].why_not(
                    "genuine" if g.node.genuine(g.version) else "emulated", g.no_namespaces
                ):
                    struck.append(FAULTS[step.do])
                    await lasting.enter_async_context(FAULTS[step.do].strike(g, step.pick))
                await _unharmed(g)
            await asyncio.sleep(max((step.lasts for step in steps), default=0))
            await _unharmed(g)
        lasted = time.monotonic() - begin
        took = await g.right(sum(fault.promised(lasted) for fault in struck) or FAULTS["kubelet-killed"].bound)
        played.rounds += 1
        played.struck.update(fault.name for fault in struck)
        if len(struck) == 1:
            name = struck[0].name
            played.worst[name] = max(took, played.worst.get(name, 0))
        if g.node.gateway is not gateway:
            self._grown(played)
            played.samples = []
        played.samples.append(await sample(g.node.gateway))
        names = ", ".join(f"{step.do}{f' {step.kubelet}' if step.kubelet else ''}" for step in steps)
        self._say(f"  round {number}, {g.version}: {names}: right after {took:.2f} s")

    @staticmethod
    def _grown(played: Played) -> None:
        found = growth(played.samples)
        played.grew = bool(found)
        must(found)

    async def _replace(self, g: Ground, step: Step) -> None:
        version, genuine = self.lookup(step.kubelet)
        if forgets(g.version, version):
            await g.node.drain()
        await g.end_kubelet(crash=False)
        g.version, g.node.genuine = version, genuine
        await g.start_kubelet()
        await g.right(FAULTS["kubelet-restarted"].bound)


def rounds(steps: Sequence[Step]) -> Iterator[tuple[int, list[Step]]]:
    """Give the steps of each round that has any."""
    parts: dict[int, list[Step]] = {}
    for step in steps:
        parts.setdefault(step.at, []).append(step)
    yield from sorted(parts.items())


async def _unharmed(g: Ground) -> None:
    """Check the promises to pods in the kubelet's records as they are now, where there are any."""
    kubelet = g.answering
    if kubelet is not None:
        now = holdings(await kubelet.pods())
        must([*broken(g.node.held, [one for one in now if one.pod in g.node.pods], ()), *given_twice(now)])


async def _remove(g: Ground, step: Step) -> None:
    kubelet, pods = g.answering, sorted(g.node.pods)
    if kubelet is None or not pods:
        return
    pod = pods[step.pick % len(pods)]
    await kubelet.remove(pod)
    del g.node.pods[pod]
    g.node.held = tuple(one for one in g.node.held if one.pod != pod)


class _Admissions:
    """The pods that come in one round: at once, or beside what goes wrong; all are decided when the context ends."""

    def __init__(self, g: Ground, number: int) -> None:
        self._ground, self._number = g, number
        self._tasks: list[asyncio.Task[None]] = []
        self._refused: list[str] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            return
        await asyncio.gather(*self._tasks)
        for pod in self._refused:
            await self._ground.node.the_kubelet.remove(pod)

    async def admit(self, pick: int, *, at_once: bool) -> None:
        """Start a pod, where it leaves a device free to look with. Only at once it can't be refused."""
        made, kubelet, ailing = self._ground.node, self._ground.answering, self._ground.ailing()
        demand = Demand(f"pod-{self._number}-{pick}", RESOURCE, 1 + pick % 2)
        taken = sum(one not in ailing for held in made.held for one in held.device_ids) + 2 * len(self._tasks)
        free = made.gpus[RESOURCE] - len(ailing) - taken
        if kubelet is None or free <= demand.count or len(made.pods) >= MOST_PODS or demand.pod in made.pods:
            return
        if (
            not at_once and minor_version(kubelet.version) == 9
        ):  # Ended while it writes its checkpoint, it loses every pod.
            return
        if at_once:
            await self._admit(kubelet, demand)
            must([f"pod {pod} was refused although the node was right" for pod in self._refused])
        else:
            self._tasks.append(asyncio.create_task(self._admit(kubelet, demand)))

    async def _admit(self, kubelet: Kubelet, demand: Demand) -> None:
        made = self._ground.node
        try:
            admission = await kubelet.admit(demand.pod, RESOURCE, demand.count)
        except KubeletError:
            self._refused.append(demand.pod)
            return
        got = admission.devices.get(RESOURCE, ())
        if not got and minor_version(kubelet.version) == 8:  # It has just started, and has never heard of the resource.
            self._refused.append(demand.pod)
            return
        must([] if len(got) == demand.count else [f"pod {demand.pod} asked for {demand.count}, it got {len(got)}"])
        must(mistold(demand.pod, RESOURCE, got, admission))
        made.pods[demand.pod] = demand
        holding = Holding(demand.pod, demand.container, RESOURCE, got)
        made.held = (*made.held, holding)
        if not await made.written(
            lists=False
        ):  # A 1.9 that ended before it wrote that down has never heard of the pod.
            made.held = tuple(one for one in made.held if one is not holding)
            del made.pods[demand.pod]
            self._refused.append(demand.pod)


# All of it.


@dataclass(slots=True)
class Result:
    """What a run found."""

    seed: int
    outcomes: list[Outcome] = field(default_factory=list)
    soaked_seconds: float = 0.0
    seeds: list[int] = field(default_factory=list)
    rounds: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)
    broke: list[str] = field(default_factory=list)
    """A paragraph for each promise that was broken in the soak."""

    @property
    def passed(self) -> bool:
        """Whether something was run and no promise was broken."""
        failed = any(outcome.status == "failed" for outcome in self.outcomes)
        ran = self.rounds or any(outcome.status == "passed" for outcome in self.outcomes)
        return bool(ran) and not failed and not self.broke

    def take(self, played: Played) -> None:
        """Add what came of a script."""
        self.rounds += played.rounds
        self.struck.update(played.struck)
        for name, seconds in played.worst.items():
            self.worst[name] = max(seconds, self.worst.get(name, 0))


def pairs(
    kubelets: Sequence[str], genuine: Collection[str], faults: Sequence[Fault], *, every: bool
) -> list[tuple[Fault, str, bool]]:
    """Say which fault is struck alone on which kubelet, and whether that is a genuine one.

    Each on one emulated and one genuine kubelet, the versions taking turns; with ``every`` on all of them.
    """
    real = [version for version in kubelets or genuine if version in genuine]
    chosen = []
    for number, fault in enumerate(faults):
        for versions, is_genuine in ((kubelets, False), (real, True)):
            turn = versions if every or not versions else [versions[number % len(versions)]]
            chosen += [(fault, version, is_genuine) for version in turn]
    return chosen


async def each_alone(
    chosen: Sequence[tuple[Fault, str, bool]],
    genuine: Mapping[str, Path],
    say: Callable[[str], None],
) -> list[Outcome]:
    """Strike each fault alone, a few nodes at a time; the longest first. What fails is tried once more when the others are over."""
    busy = asyncio.Semaphore(AT_ONCE)

    async def one(fault: Fault, version: str, *, is_genuine: bool) -> Outcome:
        async with busy:
            outcome = await alone(fault, version, genuine.get if is_genuine else lambda _: None)
        over = f", promised {fault.bound:g} s" if outcome.seconds > fault.bound else ""
        detail = f"right after {outcome.seconds:.2f} s{over}" if outcome.status == "passed" else outcome.reason
        say(f"  {outcome.status}: {outcome.fault} on {outcome.kind} {outcome.version}: {detail}")
        if outcome.status == "failed":
            say("\n".join(f"    {line}" for line in outcome.log))
        return outcome

    longest_first = sorted(chosen, key=lambda row: -(row[0].lasts + row[0].bound))
    outcomes = await asyncio.gather(
        *(one(fault, version, is_genuine=is_genuine) for fault, version, is_genuine in longest_first)
    )
    failed = [at for at, it in enumerate(outcomes) if it.status == "failed" and may_be_an_accident(it.reason)]
    for at in failed if len(failed) <= ACCIDENTS else ():
        fault, version, is_genuine = longest_first[at]
        say(f"{fault.name} on {outcomes[at].kind} {version} once more:")
        second = await one(fault, version, is_genuine=is_genuine)
        outcomes[at] = replace(second, first=outcomes[at].reason)
    return outcomes


async def soak(
    result: Result,
    player: Player,
    kubelets: Sequence[str],
    faults: Collection[str],
    seeds: int,
    minutes: float,
    say: Callable[[str], None],
) -> None:
    """Play a script for each seed, sharing the time; what fails is made shorter and written to a file."""
    for number in range(seeds):
        seed = result.seed + number
        result.seeds.append(seed)
        share = minutes * 60 / seeds
        say(f"soak, seed {seed}, for {share:.0f} s:")
        steps, began = script(seed, kubelets, faults), time.monotonic()
        played = await player.play(steps, began + share)
        result.take(played)
        result.soaked_seconds += time.monotonic() - began
        if played.broke:
            reached = [step for step in steps if step.at <= _last_round(steps, played.rounds)]
            result.broke.append(await _shrunk(player, seed, reached, played, say))


def _last_round(steps: Sequence[Step], well: int) -> int:
    """Give the number of the round after ``well`` ones that went well."""
    numbers = [number for number, _ in rounds(steps)]
    return numbers[min(well, len(numbers) - 1)]


async def _shrunk(player: Player, seed: int, steps: Sequence[Step], played: Played, say: Callable[[str], None]) -> str:
    """Make a script that failed shorter, write it down, and say what broke and how to see it again."""
    said, whole = "\n".join([played.broke, *played.log]), len(steps)
    say(f"BROKEN with seed {seed}: {said}")
    say("" if played.grew else f"looking for a shorter script, for {SHRINK_MINUTES:g} minutes at most")
    broke = played.broke

    async def fails(rest: Sequence[Step]) -> bool:
        nonlocal broke
        again = await player.play(rest)
        say(f"  {len(rest)} steps: {'still broken' if again.broke else 'all right'}")
        broke = again.broke or broke
        return bool(again.broke)

    ends = time.monotonic() + 60 * SHRINK_MINUTES
    kept = tuple(steps)
    for part in [] if played.grew else [part for part in tails(steps) for _ in range(TRIES)]:
        if time.monotonic() < ends and await fails(part):
            kept = await shrink(part, fails, ends)
            break
    path = Path(f"gauntlet-{seed}.json")
    script_text = msgspec.json.format(msgspec.json.encode(Script(seed, kept, broke)), indent=1)
    path.write_bytes(script_text)  # noqa: ASYNC240 - nothing else runs
    return f"seed {seed}: {broke}\n{len(kept)} of {whole} steps are left; again: --replay {path}"


def summary(result: Result) -> str:
    """Spell a result for people."""
    counts = Counter(outcome.status for outcome in result.outcomes)
    lines = [
        f"each fault alone: {', '.join(f'{count} {status}' for status, count in sorted(counts.items())) or 'not run'}"
    ]
    if result.seeds:
        lines.append(
            f"soak: {result.rounds} rounds, {result.struck.total()} faults, {result.soaked_seconds / 60:.1f} minutes, "
            f"seeds {result.seeds[0]} to {result.seeds[-1]}"
        )
    lines.append(f"{'fault':28}{'alone':>7}{'mixed':>7}{'worst':>9}{'promised':>10}")
    for name, fault in FAULTS.items():
        alone_ones = [
            outcome.seconds for outcome in result.outcomes if outcome.fault == name and outcome.status == "passed"
        ]
        worst = max([*alone_ones, result.worst.get(name, 0.0)])
        if alone_ones or result.struck[name]:
            late = "  (over its bound)" if worst > fault.bound else ""
            count = result.struck[name]
            lines.append(f"{name:28}{len(alone_ones):7}{count:7}{worst:7.2f} s{fault.bound:8.2f} s{late}")
    for reason, names in sorted(_not_applicable(result).items()):
        lines.append(f"not applicable, {reason}: {', '.join(names)}")
    lines += [
        f"passed at the second try: {one.fault} on {one.kind} {one.version}; at first: {one.first.splitlines()[0]}"
        for one in result.outcomes
        if one.first and one.status == "passed"
    ]
    lines += [
        f"BROKEN: {one.fault} on {one.kind} {one.version}: {one.reason}"
        for one in result.outcomes
        if one.status == "failed"
    ]
    lines += [f"BROKEN: {one}" for one in result.broke]
    lines.append(f"seed {result.seed}: {'every promise was kept' if result.passed else 'NOT every promise was kept'}")
    return "\n".join(lines)


def _not_applicable(result: Result) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in result.outcomes:
        if one.status == "not applicable" and one.fault not in found.setdefault(one.reason, []):
            found[one.reason].append(one.fault)
    return found


async def _possible() -> list[str]:
    """Give the names of the faults that this machine lets us strike without a plugin behind the bridge."""
    no_namespaces = ""
    try:
        async with await Namespaces.open():
            pass
    except NamespacesError as error:
        no_namespaces = str(error)
    return [name for name, one in FAULTS.items() if not one.bridged and not one.why_not("emulated", no_namespaces)]


async def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> Result:
    """Run what the command line asks for."""
    genuine = _genuine(arguments.kubelets, arguments.genuine, say)
    result = Result(arguments.seed)
    player = Player(genuine, say)
    if arguments.replay is not None:
        found = msgspec.json.decode(arguments.replay.read_bytes(), type=Script)
        result.seed = found.seed
        result.seeds = [found.seed]
        played = await player.play(found.steps)
        result.take(played)
        result.broke = ["\n".join([played.broke, *played.log])] if played.broke else []
        return result
    chosen = [FAULTS[name] for name in arguments.faults]
    say(f"seed {result.seed}; each fault alone, {AT_ONCE} nodes at a time:")
    emulated = [] if arguments.genuine == "only" else arguments.kubelets
    struck = pairs(emulated, genuine, chosen, every=arguments.every)
    result.outcomes = await each_alone(struck, genuine, say)
    if arguments.minutes > 0:
        kinds = [f"{version} emulated" for version in emulated] + [f"{version} genuine" for version in genuine]
        names = [name for name in await _possible() if name in arguments.faults]
        await soak(result, player, kinds, names, arguments.seeds, arguments.minutes, say)
    return result


def _genuine(versions: Sequence[str], choice: str, say: Callable[[str], None]) -> dict[str, Path]:
    """Find the genuine kubelets; build them first where that was asked for."""
    if choice == "no":
        return {}
    if choice == "yes":
        return build.build(versions, progress=say)
    found = {version: path for version in versions if (path := build.built(version)) is not None}
    if missing := [version for version in versions if version not in found]:
        say(f"not built, so emulated only: kubelet {', '.join(missing)} (python -m gateway_lab.kubelets.build)")
    return found


def _parser() -> argparse.ArgumentParser:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(
        prog="gateway_lab.trials.gauntlet", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="what the soak is made from")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds share the minutes, from --seed on")
    parser.add_argument("--minutes", type=float, default=SOAK_MINUTES, help="how long the soak takes; 0: none")
    parser.add_argument("--kubelets", type=words, default=[*KUBELETS], metavar="1.9,1.28", help="which versions")
    parser.add_argument(
        "--genuine",
        choices=("yes", "no", "built", "only"),
        default="built",
        help="yes builds them first; only: nothing on emulated ones",
    )
    parser.add_argument("--faults", type=words, default=[*FAULTS], metavar="NAME,NAME", help="only these")
    parser.add_argument("--every", action="store_true", help="each fault alone on every kubelet")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="play a script that failed")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run the gauntlet; return the exit status."""
    parser = _parser()
    arguments = parser.parse_args(words)
    if unknown := [name for name in arguments.faults if name not in FAULTS]:
        parser.error(f"expected names of faults, got {', '.join(unknown)}; there are: {', '.join(FAULTS)}")

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        result = asyncio.run(run(arguments, say))
    except KeyboardInterrupt:
        say("stopped")
        return 130
    print(summary(result))
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
