"""Many schedules on all processors: ``make simulation``, or ``python -m gateway.lab.simulation.run``.

Each is made from its number and nothing else, played under simulated time and judged. One that breaks a promise is made
shorter as long as it still breaks one, told with what happened, and played again by ``--replay NUMBER`` or, made shorter, by
``--script``. In the end it is told how often each rare state was met; one that never was is a failure, too, where enough
schedules were played: a search that can't reach it shows nothing about it.

Ends with 0 when every promise was kept, with 1 when one was broken or a state was never met.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import msgspec

from gateway.lab.simulation import disk, opening
from gateway.lab.simulation.schedule import WEIGHTS, Player, Schedule, Step, schedule

SCHEDULES: Final = 1_000_000
ENOUGH: Final = 100_000
"""From so many schedules on, each of ``SOMETIMES`` must have been met."""
BATCH: Final = 100
MOST_BROKEN: Final = 5
"""How many broken schedules are told; then the rest isn't played."""
TOLD: Final = 20
"""How often a search says how far it is."""
LONGEST_TRACE: Final = 200

SOMETIMES: Final = (
    *(f"step: {step}" for step in WEIGHTS),
    "two gateways live",
    "three gateways live",
    "a pod gets devices",
    "a pod is refused",
    "the power is cut",
    "killed while it writes the state file",
    "the state file can't be written",
    "a write takes in what another gateway wrote",
    "two gateways write the state file at once",
    "a write waits for another gateway's",
    "the state file is read in the middle of a write",
    "a new kubelet is seen late",
    "a gateway without devices leaves all to another",
    "a gateway that this kubelet would refuse asks for nothing",
    "what was held back at the start is remembered before it is sent",
    "an ask is read too late",
    "a handover ends: done",
    "a handover ends: no answer",
    "a handover ends: back",
    "a handover ends: connection lost",
    "of two Registers that crossed, the newer gateway's is sent once more",
    "one that couldn't talk has gone: registered once more",
    "a Register while the stream before lives",
    "of two racing registrations the later is dropped",
    "the end of an old stream disconnects the new plugin (#127803)",
    "a live stream on an endpoint that the kubelet has stopped",
    "the kubelet's records lack what a live stream serves",
    "what another gateway is to serve is lacking in the kubelet's records",
    "the kubelet forgets a resource after five minutes",
    "who serves is killed, and another one takes over",
    "who serves stands still as the kubelet starts anew, and another one takes over",
    "said: no common version",
    "said: Register was refused",
)
"""What a schedule may meet, and some must."""


class Found(msgspec.Struct):
    """What a batch of schedules met, which broke a promise (by number, the promise), and how many were played."""

    met: Counter[str]
    broken: dict[int, str]
    played: int = 0


def play(numbers: Sequence[int]) -> Found:
    """Play schedules by number."""
    met: defaultdict[str, int] = defaultdict(int)
    broken = {}
    for number in numbers:
        script = schedule(number)
        node = opening.copied(script.kubelet, script.seed)
        node.clock.met = met
        if promise := Player(script, node).play():
            broken[number] = promise
        node.take_apart()
    return Found(Counter(met), broken, len(numbers))


def shrink(script: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """Leave steps out, and let the others last no longer, as long as the rest still fails."""
    smaller = True
    while smaller:
        smaller = False
        for rest in _smaller(script.steps):
            shorter = msgspec.structs.replace(script, steps=rest)
            if fails(shorter):
                script, smaller = shorter, True
                break
    return script


def _smaller(steps: tuple[Step, ...]) -> Iterator[tuple[Step, ...]]:
    for at, step in enumerate(steps):
        yield (*steps[:at], *steps[at + 1 :])
        if step.lasts:
            yield (*steps[:at], msgspec.structs.replace(step, lasts=0.0), *steps[at + 1 :])


def _fails(script: Schedule) -> bool:
    return bool(Player(script, opening.played(script.kubelet, script.seed)).play())


def tell(script: Schedule) -> str:
    """Play one schedule, print all that happens, and return the promise that it breaks."""
    player = Player(script, opening.played(script.kubelet, script.seed, []))
    broken = player.play()
    print(msgspec.json.encode(script).decode())
    trace = player.clock.trace or []
    print(*trace[:LONGEST_TRACE], sep="\n")
    if len(trace) > LONGEST_TRACE:
        print(f"... and {len(trace) - LONGEST_TRACE} more")
    print(f"BROKEN: {broken}" if broken else "every promise was kept")
    return broken


def _batches(first: int, count: int) -> Iterator[range]:
    for start in range(first, first + count, BATCH):
        yield range(start, min(start + BATCH, first + count))


def _begin(niceness: int) -> None:
    os.nice(niceness)
    disk.install()
    gc.set_threshold(100_000)  # A schedule is taken apart when it is over: hardly a ring of objects is left.
    gc.freeze()


def search(first: int, count: int, jobs: int) -> Found:
    """Play so many schedules, several at once; stop early where too many break a promise."""
    found = Found(Counter(), {})
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(jobs, partial(_begin, 5)) as pool:
        for one in pool.imap_unordered(play, _batches(first, count)):
            found.met.update(one.met)
            found.broken |= one.broken
            found.played += one.played
            if found.played % (count // TOLD or 1) < one.played:
                print(
                    f"{found.played} of {count} schedules, {time.monotonic() - began:.0f} s, {len(found.broken)} broke a promise",
                    file=sys.stderr,
                )
            if len(found.broken) >= MOST_BROKEN:
                pool.terminate()
                break
    return found


def main() -> int:
    """Play schedules; say what was met and what was broken."""
    parser = argparse.ArgumentParser(
        prog="python -m gateway.lab.simulation.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--schedules", type=int, default=SCHEDULES, help="how many to play (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at once")
    parser.add_argument("--replay", type=int, metavar="NUMBER", help="play this one alone, and tell all")
    parser.add_argument("--script", metavar="JSON", help="play this one, as it was told when it was made shorter")
    arguments = parser.parse_args()
    disk.install()
    if arguments.script or arguments.replay is not None:
        made = schedule(arguments.replay or 0)
        return int(bool(tell(msgspec.json.decode(arguments.script, type=Schedule) if arguments.script else made)))
    began = time.monotonic()
    found = search(arguments.first, arguments.schedules, arguments.jobs)
    seconds = time.monotonic() - began
    for number, broken in sorted(found.broken.items())[:MOST_BROKEN]:
        print(f"\nschedule {number} breaks a promise: {broken}\nmade shorter:")
        tell(shrink(schedule(number), _fails))
    print(
        f"\n{found.played} of {arguments.schedules} schedules in {seconds:.0f} s, {len(found.broken)} of them broke a promise. Met:"
    )
    for name in sorted({*found.met, *SOMETIMES}):
        print(f"{found.met[name]:>10}  {name}")
    never = [name for name in SOMETIMES if not found.met[name]] if arguments.schedules >= ENOUGH else []
    if never:
        print("never met, so that nothing is known about it:", *never, sep="\n  - ")
    return int(bool(found.broken or never))


if __name__ == "__main__":
    sys.exit(main())
