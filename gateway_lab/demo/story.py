"""The demo's story as data, what can be seen of it, and the verdict: all of it pure.

``judge`` knows nothing of how a step was done. It compares what the kubelet's records and the containers' runtimes said after
each step, so that a promise which is broken anywhere between a profile and a container shows here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from msgspec import Struct

from gateway_lab.kubelets.kubelet import Gap
from gateway_lab.trials.invariants import Holding, broken, given_twice, unannounced

RESOURCE: Final = "nvidia.com/gpu"

# The story.


class Hop(Struct, frozen=True):
    """The kubelet is replaced by another version on the same directories; ``drain`` says why its pods must go first."""

    version: str
    drain: str = ""


class Run(Struct, frozen=True):
    """A pod arrives and asks for GPUs."""

    pod: str
    count: int


class Sicken(Struct, frozen=True):
    """A GPU that no pod holds becomes unhealthy."""

    reason: str


class Recover(Struct, frozen=True):
    """All GPUs are healthy again."""


Step = Hop | Run | Sicken | Recover

STORY: Final[tuple[Step, ...]] = (
    Hop("1.8"),
    Run("training", 2),
    Run("notebook", 1),
    Hop("1.9", drain="kubelet 1.9 can't read the checkpoint of 1.8 and forgets in silence which pod holds which GPU"),
    Run("rendering", 2),
    Hop("1.10"),
    Hop("1.20", drain="kubelets from 1.11 on call the checkpoint of 1.10 corrupt and begin with empty records"),
    Sicken("fell off the bus"),
    Hop("1.28"),
    Recover(),
    Run("batch", 2),
    Hop("1.37"),
    Hop("1.28"),
)


# What was seen.


class Look(Struct, frozen=True):
    """What the kubelet said after one step. ``None`` and empty values are things that nobody came to see."""

    step: str
    kubelet: str
    kind: Literal["emulated", "genuine"]
    hop: bool = False
    api: str = ""
    expected: int = 0
    capacity: int = 0
    allocatable: int = 0
    held: tuple[Holding, ...] = ()
    """The pods' devices by the kubelet's own records."""
    told: tuple[Holding, ...] = ()
    """The devices that containers were told to use when they were started (again) in this step."""
    free: tuple[str, ...] = ()
    """The devices that the kubelet gave to a pod which asked for all that was left."""
    ill: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()
    gap: Gap | None = None
    trouble: tuple[str, ...] = ()
    """What could not be done, in sentences."""


class Verdict(Struct, frozen=True):
    """``problems`` are sentences; none: the node kept its promise."""

    passed: bool
    sentence: str
    problems: tuple[str, ...] = ()


# The verdict.


def judge(story: Sequence[Step], looks: Sequence[Look], gpus: Sequence[str], strays: Sequence[str] = ()) -> Verdict:
    """Judge a node by what was seen: ``gpus`` are the IDs of its GPUs, ``strays`` what went wrong beside the story.

    Every pod that wasn't drained must hold what it held, by the records and by what its container is told; every GPU that
    is well must be there exactly once, under the ID it always had; and the kubelet must know how many there are.
    """
    problems: list[str] = []
    said: set[str] = set()
    before: tuple[Holding, ...] = ()
    for look in looks:
        found = [
            *(look.trouble or _miscounted(look)),
            *(broken(before, look.held, look.drained) or given_twice(look.held)),
            *unannounced(look.held, {RESOURCE: gpus}),
            *_renamed(look.free, gpus),
            *_offered_wrongly(look),
            *([] if look.trouble else _missing(look, gpus)),
            *_mistold(look),
        ]
        # What went wrong once stays wrong: each sentence is said where it was first true.
        problems += [f"{look.step}: {problem}" for problem in dict.fromkeys(found) if problem not in said]
        said.update(found)
        before = look.held
    if len(looks) < len(story):
        problems.append(f"the story broke off after {len(looks)} of {len(story)} steps")
    problems += strays
    if problems:
        count = "1 thing is" if len(problems) == 1 else f"{len(problems)} things are"
        return Verdict(passed=False, sentence=f"FAILED: {count} not as promised", problems=tuple(problems))
    hops = sum(isinstance(step, Hop) for step in story)
    pods = len({holding.pod for look in looks for holding in look.held})
    return Verdict(
        passed=True,
        sentence=f"PASSED: through {hops} kubelets, each of {pods} pods kept its GPUs until it was drained; no GPU was "
        "given twice, none was lost",
    )


def _miscounted(look: Look) -> list[str]:
    if look.allocatable == look.expected:
        return []
    return [f"expected {look.expected} GPUs allocatable, the kubelet's records show {look.allocatable}"]


def _renamed(free: Sequence[str], gpus: Sequence[str]) -> list[str]:
    return [
        f"the kubelet offers {device_id}, which is no GPU of this node: a device ID changed"
        for device_id in sorted(set(free) - set(gpus))
    ]


def _offered_wrongly(look: Look) -> list[str]:
    """Find GPUs that the kubelet gives away although they are unhealthy, or although a pod holds them."""
    held = {device_id for holding in look.held for device_id in holding.device_ids}
    return [
        *(f"{device_id} is offered, although it is unhealthy" for device_id in look.free if device_id in look.ill),
        *(f"{device_id} is given twice: a pod holds it already" for device_id in look.free if device_id in held),
    ]


def _missing(look: Look, gpus: Sequence[str]) -> list[str]:
    seen = {device_id for holding in look.held for device_id in holding.device_ids} | {*look.free, *look.ill}
    return [
        f"{device_id} is lost: no pod holds it, and the kubelet doesn't offer it"
        for device_id in gpus
        if device_id not in seen
    ]


def _mistold(look: Look) -> list[str]:
    """Compare what containers are told with the records: the records count for nothing if a container uses another GPU."""
    records = {holding.pod: set(holding.device_ids) for holding in look.held}
    wrong = [
        f"pod {told.pod} is told to use {', '.join(told.device_ids) or 'nothing'}, but the kubelet's records give it "
        f"{', '.join(sorted(records[told.pod])) or 'nothing'}"
        for told in look.told
        if told.pod in records and records[told.pod] != set(told.device_ids)
    ]
    return wrong + [sentence.replace("is given to", "is given twice: told to") for sentence in given_twice(look.told)]
