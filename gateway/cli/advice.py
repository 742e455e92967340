"""What a GPU node goes through when its kubelet becomes another version: facts about kubelets in, advice out.

The facts are rows of ``advice.yaml``, each with its source: the APIs, the formats of the kubelet's checkpoint with their
readers, what happens once at a version (crossings) and what a version does again and again (bugs). All else here follows from
them and from nothing else: which hops there are, what each changes, which patch release is early enough, whether to drain.
(What a version makes of claims is there, too: ``crossover`` goes by it.)

A version without a patch release means the newest one of that minor version.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import msgspec.yaml
from packaging.version import Version

NEWEST: Final = 10**6
"""Stands for the newest patch release."""
_MOST_SKEW: Final = 3
"""How many minor versions a kubelet may be older than its API server (Kubernetes' version skew policy)."""
_SUFFIX: Final = re.compile(r"[-+]")
"""What a vendor's words begin with: v1.27.3-gke.100, v1.28.3+k3s1."""
_WORDS: Final = re.compile(r"[0-9A-Za-z.+-]{0,64}", re.ASCII)
_PLAIN: Final = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3}){1,2}", re.ASCII)


class PlanError(ValueError):
    """No plan can be made. The message says what was expected, what came, and what to do."""


class Kubelet(NamedTuple):
    """A version of the kubelet: ``1.28`` or, where ``patch`` is known, ``1.28.15``."""

    minor: int
    patch: int | None = None

    @property
    def release(self) -> tuple[int, int]:
        """What versions are compared by."""
        return self.minor, NEWEST if self.patch is None else self.patch

    def __str__(self) -> str:
        return f"1.{self.minor}" + ("" if self.patch is None else f".{self.patch}")


# The facts, as advice.yaml has them.

_Release = Annotated[str, msgspec.Meta(pattern=r"^1\.\d{1,3}\.\d{1,3}$")]
_Text = Annotated[str, msgspec.Meta(min_length=1)]
Evidence = Literal["run", "read", "inferred"]
Drain = Literal["required", "advised", "not needed"]
Way = Literal["up", "down"]
Support = Literal["no", "gate", "yes"]
"""Whether a kubelet does something; ``gate``: with a feature gate that is off by default."""


class Interval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The releases from ``since`` to before ``until``; without that one, to the newest."""

    since: _Release
    until: _Release | None = None

    def __contains__(self, kubelet: Kubelet) -> bool:
        return _release(self.since) <= kubelet.release and (
            self.until is None or kubelet.release < _release(self.until)
        )

    def patches(self, minor: int) -> str | None:
        """Name the releases of one minor version that are in here; None where there are none."""
        first, last = _release(self.since), (NEWEST, 0) if self.until is None else _release(self.until)
        low, high = max(first, (minor, 0)), min(last, (minor + 1, 0))
        if low >= high:
            return None
        if high[0] > minor:
            return f"1.{minor}" if low[1] == 0 else f"1.{minor}.{low[1]} and later"
        return f"1.{minor}.{low[1]}" + (f" to 1.{minor}.{high[1] - 1}" if high[1] - 1 > low[1] else "")


class _Sourced(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    source: _Text
    """Issues, pull requests, and the versions that were run or read."""
    evidence: Evidence
    checked_by: tuple[str, ...] = ()
    """The scenarios of the laboratory that show it, or show that the way out holds."""


class Api(_Sourced, frozen=True, kw_only=True):
    """The one version string that kubelets accept from ``since`` on."""

    name: _Text
    since: _Release


class CheckpointFormat(_Sourced, frozen=True, kw_only=True):
    """A format of the kubelet's checkpoint, written from ``since`` on."""

    id: _Text
    what: _Text
    since: _Release
    readers: tuple[Interval, ...]


class Hazard(_Sourced, frozen=True, kw_only=True):
    """Something that GPU pods may suffer, and the way out."""

    id: _Text
    title: _Text
    suffers: _Text
    way_out: _Text
    drain: Literal["required", "advised"] | None = None


class Crossing(Hazard, frozen=True, kw_only=True):
    """What happens once, when a hop passes ``at``; without that, at each change of the minor version."""

    at: _Release | None = None
    ways: tuple[Way, ...] = ("up", "down")

    def hits(self, old: Kubelet, new: Kubelet) -> bool:
        """Whether it happens between these two."""
        if ("up" if new.release > old.release else "down") not in self.ways:
            return False
        if self.at is None:
            return old.minor != new.minor
        return (old.release < _release(self.at)) != (new.release < _release(self.at))


class Bug(Hazard, frozen=True, kw_only=True):
    """What kubelets of these versions do again and again."""

    when: Literal["restart", "reboot", "register", "admission"]
    affected: tuple[Interval, ...]

    def hits(self, kubelet: Kubelet) -> bool:
        """Whether this kubelet has it."""
        return any(kubelet in interval for interval in self.affected)

    def fixed(self, kubelet: Kubelet) -> tuple[str, ...]:
        """The first releases without it: of this minor version, and after it. One that gets it again doesn't count."""
        until = next((interval.until for interval in self.affected if kubelet in interval), None)
        if until is None:
            return ()
        minor = _release(until)[0]
        if self.hits(Kubelet(minor)):
            return self.fixed(Kubelet(minor))
        later = Kubelet(minor + 1, 0)
        return (until, str(later)) if minor == kubelet.minor and not self.hits(later) else (until,)


class ClaimSupport(_Sourced, frozen=True, kw_only=True):
    """What kubelets make of claims from ``since`` on: of a pod's own, and of those for pods that ask by a resource name (``names``)."""

    since: _Release
    claims: Support
    names: Support


class Crossover(Hazard, frozen=True, kw_only=True):
    """What pods may suffer on kubelets of these versions while GPUs move to claims, or back."""

    affected: tuple[Interval, ...]

    def hits(self, kubelet: Kubelet) -> bool:
        """Whether it may happen on this kubelet."""
        return any(kubelet in interval for interval in self.affected)


class Advice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of advice.yaml. ``first`` and ``last`` bound the versions that anything is known of."""

    first: _Release
    last: _Release
    apis: tuple[Api, ...]
    checkpoints: tuple[CheckpointFormat, ...]
    crossings: tuple[Crossing, ...]
    bugs: tuple[Bug, ...]
    claims: tuple[ClaimSupport, ...]
    crossovers: tuple[Crossover, ...]

    def api(self, kubelet: Kubelet) -> str:
        """The version string that this kubelet accepts."""
        return next(api.name for api in reversed(self.apis) if _release(api.since) <= kubelet.release)

    def takes(self, kubelet: Kubelet) -> ClaimSupport:
        """What this kubelet makes of claims."""
        return next(one for one in reversed(self.claims) if _release(one.since) <= kubelet.release)

    def writes(self, kubelet: Kubelet) -> CheckpointFormat:
        """The format in which this kubelet keeps its records."""
        return next(one for one in reversed(self.checkpoints) if _release(one.since) <= kubelet.release)

    def keeps(self, old: Kubelet, new: Kubelet) -> bool:
        """Whether ``new`` can read the checkpoint that ``old`` has written."""
        return any(new in interval for interval in self.writes(old).readers)


def read(content: bytes) -> Advice:
    """Read facts from YAML.

    Raises:
        PlanError: it is not of the form above.
    """
    try:
        return msgspec.yaml.decode(content, type=Advice)
    except msgspec.DecodeError as error:
        raise PlanError(f"advice.yaml cannot be read: {error}") from error


def load() -> Advice:
    """Read the facts that come with the gateway."""
    return read(Path(__file__).with_suffix(".yaml").read_bytes())


# The advice.


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """One replacement of the kubelet. Crossings and bugs are ids of ``Plan.rows``."""

    old: str
    new: str
    at_least: str | None
    """The first patch release of ``new`` that is free of what a later one fixed; None where all are alike."""
    api_before: str
    api_after: str
    checkpoint_kept: bool
    checkpoint: str
    """Id of the format that the old kubelet has written."""
    stop_at: str | None
    """A version between the two; with a stop there the checkpoint is kept."""
    drain: Drain
    drain_because: tuple[str, ...]
    crossings: tuple[str, ...]
    new_bugs: tuple[str, ...]
    """Bugs of the new kubelet that the old one doesn't have."""
    still: tuple[str, ...]
    """Bugs of both."""
    gone: tuple[str, ...]
    """Bugs of the old kubelet that the new one doesn't have."""
    avoided: Mapping[str, str]
    """What early patch releases of the new version get wrong: id of a bug or checkpoint, and which releases those are."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What ``gateway plan`` says, without the words around it."""

    start: str
    goal: str
    way: Way
    now: Mapping[str, tuple[str, ...]]
    """Bugs of the kubelet at the start, and the first releases without each."""
    first: tuple[str, ...]
    """What to do before the first hop."""
    each: tuple[str, ...]
    """What to do at each hop."""
    hops: tuple[Hop, ...]
    then: tuple[str, ...]
    """Bugs of the kubelet at the goal."""
    rows: Mapping[str, Crossing | Bug | CheckpointFormat]
    """Every row that the hops name, by id."""


def kubelet(text: str, facts: Advice) -> Kubelet:
    """Read a version such as ``1.28`` or ``v1.28.15`` (a vendor's suffix plays no part).

    Raises:
        PlanError: it is no kubelet version, or one that nothing is known of.
    """
    number, *vendors = _SUFFIX.split(text.removeprefix("v"), maxsplit=1)
    try:
        said = Version(number)
    except ValueError:  # InvalidVersion, and a number of over 4300 digits.
        said = None
    plain = _PLAIN.fullmatch(number) is not None and all(_WORDS.fullmatch(words) for words in vendors)
    if said is None or not plain or said.major != 1 or len(said.release) not in {2, 3}:
        raise PlanError(f"{text[:64]!r} is not a kubelet version such as 1.28 or 1.28.15")
    found = Kubelet(said.minor, said.micro if len(said.release) == 3 else None)
    first, last = _release(facts.first)[0], _release(facts.last)[0]
    if not first <= found.minor <= last:
        raise PlanError(
            f"kubelet {text[:64]!r} is not known here. Known are 1.{first} to 1.{last}: "
            + ("device plugins came with 1.8" if found.minor < first else "a newer gateway may know it")
        )
    return found


def plan(facts: Advice, start: Kubelet, goal: Kubelet, *, direct: bool = False) -> Plan:
    """Make the plan from ``start`` to ``goal``: one minor version at a time, or (``direct``) in one hop.

    Raises:
        PlanError: the two are the same version.
    """
    if start == goal:
        raise PlanError(f"{start} is the version that runs already. Name another with --to")
    path = (start, goal) if direct else route(start, goal)
    hops = tuple(_hop(facts, old, new) for old, new in itertools.pairwise(path))
    every: tuple[Crossing | Bug | CheckpointFormat, ...] = (*facts.checkpoints, *facts.crossings, *facts.bugs)
    now = {bug.id: bug.fixed(start) for bug in facts.bugs if bug.hits(start)}
    named = {*now}.union(
        *([hop.checkpoint, *hop.crossings, *hop.new_bugs, *hop.still, *hop.gone, *hop.avoided] for hop in hops)
    )
    return Plan(
        start=str(start),
        goal=str(goal),
        way="up" if goal.release > start.release else "down",
        now=now,
        first=tuple(_first(start, goal, direct=direct)),
        each=_EACH,
        hops=hops,
        then=tuple(bug.id for bug in facts.bugs if bug.hits(goal)),
        rows={row.id: row for row in every if row.id in named},
    )


def route(start: Kubelet, goal: Kubelet) -> tuple[Kubelet, ...]:
    """All versions from one to the other, one minor version at a time."""
    step = 1 if goal.minor >= start.minor else -1
    between = [Kubelet(minor) for minor in range(start.minor + step, goal.minor, step)]
    return (start, *between, goal)


_EACH: Final = (
    "Where the plan says drain: drain the node.",
    "Replace the kubelet and start it, one node first.",
    "Before the next hop, wait for the node's allocatable GPUs (kubectl describe node NODE): only then is the checkpoint new.",
)


def _first(start: Kubelet, goal: Kubelet, *, direct: bool) -> Iterator[str]:
    up = goal.release > start.release
    if start.minor != goal.minor:
        yield (
            "Control plane first: a kubelet must not be newer than its API server."
            if up
            else "Kubelets first, then the control plane: a kubelet must not be newer than its API server."
        )
    yield (
        "Install or upgrade the gateway, and remove any other plugin of the same resources from the node. It serves every "
        "kubelet on the way and stays as it is at each hop."
        if up
        else "Have the gateway running, as new as it is, and no other plugin of the same resources. It serves every kubelet "
        "on the way back; only the kubelet is replaced."
    )
    if start.minor != goal.minor:
        yield (
            'Kubernetes itself supports a change of the kubelet\'s minor version on a drained node only. "No drain" below '
            "means that nothing is known which would take GPUs from running pods at that hop."
        )
    if direct and abs(goal.minor - start.minor) > _MOST_SKEW:
        yield (
            f"A jump over {abs(goal.minor - start.minor)} minor versions is more than the version skew policy allows between "
            f"kubelet and API server ({_MOST_SKEW}; 2 before 1.25): without --direct this plan goes one at a time."
        )


def _hop(facts: Advice, old: Kubelet, new: Kubelet) -> Hop:
    crossings = [row for row in facts.crossings if row.hits(old, new)]
    bugs = [row for row in facts.bugs if row.hits(new)]
    kept = facts.keeps(old, new)
    stop = None if kept else _stop(facts, old, new)
    because = [(row.drain, _inside(row.title)) for row in (*crossings, *bugs) if row.drain]
    if not kept:
        because.insert(0, ("required", f"kubelet {new} can't read the checkpoint of {old}"))
    verdict: Drain = "not needed"
    if because:
        verdict = "required" if any(level == "required" for level, _ in because) else "advised"
    return Hop(
        old=str(old),
        new=str(new),
        at_least=_at_least(facts, old, new),
        api_before=facts.api(old),
        api_after=facts.api(new),
        checkpoint_kept=kept,
        checkpoint=facts.writes(old).id,
        stop_at=None if stop is None else str(stop),
        drain=verdict,
        drain_because=tuple(reason for _, reason in because),
        crossings=tuple(row.id for row in crossings),
        new_bugs=tuple(row.id for row in bugs if not row.hits(old)),
        still=tuple(row.id for row in bugs if row.hits(old)),
        gone=tuple(row.id for row in facts.bugs if row.hits(old) and not row.hits(new)),
        avoided={} if new.patch is not None else _avoided(facts, old, new),
    )


def _at_least(facts: Advice, old: Kubelet, new: Kubelet) -> str | None:
    """Find the first patch release of a minor version after which no bug ends and every reader is one."""
    ends = [interval.until for bug in facts.bugs for interval in bug.affected if interval.until]
    begins = [interval.since for interval in facts.writes(old).readers]
    patches = [patch for minor, patch in map(_release, (*ends, *begins)) if minor == new.minor and patch]
    return str(Kubelet(new.minor, max(patches))) if patches else None


def _avoided(facts: Advice, old: Kubelet, new: Kubelet) -> dict[str, str]:
    """Find what early patch releases get wrong and the newest one doesn't."""
    wrong = {bug.id: bug.affected for bug in facts.bugs if not bug.hits(new)}
    checkpoint = facts.writes(old)
    if facts.keeps(old, new):
        wrong[checkpoint.id] = tuple(
            Interval(f"1.{new.minor}.0", reader.since)
            for reader in checkpoint.readers
            if _release(reader.since)[0] == new.minor
        )
    early = {
        name: [found for one in intervals if (found := one.patches(new.minor))] for name, intervals in wrong.items()
    }
    return {name: ", ".join(patches) for name, patches in early.items() if patches}


def _stop(facts: Advice, old: Kubelet, new: Kubelet) -> Kubelet | None:
    """Find the newest version between two with which the checkpoint gets from one to the other."""
    low, high = sorted((old.minor, new.minor))
    between = (Kubelet(minor) for minor in range(high - 1, low, -1))
    return next((stop for stop in between if facts.keeps(old, stop) and facts.keeps(stop, new)), None)


def _inside(title: str) -> str:
    """Write a title as the inside of a sentence: ``CDI names`` stay as they are."""
    return title if title[1].isupper() else title[0].lower() + title[1:]


def _release(text: str) -> tuple[int, int]:
    _, minor, patch = Version(text).release
    return minor, patch
