"""Plan a change of the kubelet's version on a GPU node, from the facts in ``advice.yaml``.

Each fact has its source. The facts are: the device plugin APIs, the formats of the kubelet's checkpoint and which kubelets read them,
what happens once when an upgrade passes a version (crossings), and what a version does repeatedly (bugs). The plan follows from them
alone: the hops, what each hop changes, the first safe patch release, and whether to drain. ``crossover`` uses the facts about claims.

A version without a patch number stands for the newest patch release of that minor version.
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
"""The patch number that stands for the newest patch release."""
_MOST_SKEW: Final = 3
"""How many minor versions a kubelet may be older than its API server (Kubernetes' version skew policy)."""
_VERSION: Final = re.compile(
    r"v?1\.(?P<minor>[0-9]{1,3})(\.(?P<patch>[0-9]{1,3}))?([-+][0-9A-Za-z.+-]{0,64})?", re.ASCII
)
"""A kubelet's version, with a vendor's suffix such as ``-gke.100`` or ``+k3s1``."""


class PlanError(ValueError):
    """No plan can be made. The message says why, and what to do."""


class Kubelet(NamedTuple):
    """A version of the kubelet: ``1.28``, or ``1.28.15`` if ``patch`` is known."""

    minor: int
    patch: int | None = None

    @property
    def release(self) -> tuple[int, int]:
        """The key for comparing versions."""
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
"""Whether a kubelet supports something. ``gate``: only with a feature gate that is off by default."""


class Interval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The releases from ``since`` on and before ``until``; without ``until``, all from ``since`` on."""

    since: _Release
    until: _Release | None = None

    def __contains__(self, kubelet: Kubelet) -> bool:
        return _release(self.since) <= kubelet.release and (
            self.until is None or kubelet.release < _release(self.until)
        )

    def patches(self, minor: int) -> str | None:
        """Return the patch releases of a minor version that are in the interval, in words; None if there are none."""
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
    """The scenarios of the laboratory that show the fact, or that the way out works."""


class Api(_Sourced, frozen=True, kw_only=True):
    """The API version that kubelets accept from ``since`` on."""

    name: _Text
    since: _Release


class CheckpointFormat(_Sourced, frozen=True, kw_only=True):
    """A format of the kubelet's checkpoint that kubelets write from ``since`` on. ``readers`` can read it."""

    id: _Text
    what: _Text
    since: _Release
    readers: tuple[Interval, ...]


class Hazard(_Sourced, frozen=True, kw_only=True):
    """A problem of GPU pods, and the way out."""

    id: _Text
    title: _Text
    suffers: _Text
    way_out: _Text
    drain: Literal["required", "advised"] | None = None


class Crossing(Hazard, frozen=True, kw_only=True):
    """A problem that happens once, when a hop passes ``at``; without ``at``, at each change of the minor version."""

    at: _Release | None = None
    ways: tuple[Way, ...] = ("up", "down")

    def hits(self, old: Kubelet, new: Kubelet) -> bool:
        """Return True if it happens when ``new`` replaces ``old``."""
        if ("up" if new.release > old.release else "down") not in self.ways:
            return False
        if self.at is None:
            return old.minor != new.minor
        return (old.release < _release(self.at)) != (new.release < _release(self.at))


class _Lasting(Hazard, frozen=True, kw_only=True):
    affected: tuple[Interval, ...]

    def hits(self, kubelet: Kubelet) -> bool:
        """Return True if a kubelet has the problem."""
        return any(kubelet in interval for interval in self.affected)


class Bug(_Lasting, frozen=True, kw_only=True):
    """A problem that these kubelets have repeatedly: ``when`` it happens."""

    when: Literal["restart", "reboot", "register", "admission"]

    def fixed(self, kubelet: Kubelet) -> tuple[str, ...]:
        """Return the first releases without the bug: of this minor version, and of a later one. A release that gets it again doesn't count."""
        until = next((interval.until for interval in self.affected if kubelet in interval), None)
        if until is None:
            return ()
        minor = _release(until)[0]
        if self.hits(Kubelet(minor)):
            return self.fixed(Kubelet(minor))
        later = Kubelet(minor + 1, 0)
        return (until, str(later)) if minor == kubelet.minor and not self.hits(later) else (until,)


class ClaimSupport(_Sourced, frozen=True, kw_only=True):
    """How kubelets support claims from ``since`` on. ``names``: claims for pods that request GPUs by resource name."""

    since: _Release
    claims: Support
    names: Support


class Crossover(_Lasting, frozen=True, kw_only=True):
    """A problem that pods may have on these kubelets while GPUs move to claims, or back."""


class Advice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of advice.yaml, for kubelets from ``first`` to ``last``."""

    first: _Release
    last: _Release
    apis: tuple[Api, ...]
    checkpoints: tuple[CheckpointFormat, ...]
    crossings: tuple[Crossing, ...]
    bugs: tuple[Bug, ...]
    claims: tuple[ClaimSupport, ...]
    crossovers: tuple[Crossover, ...]

    def api(self, kubelet: Kubelet) -> str:
        """Return the API version that a kubelet accepts."""
        return next(api.name for api in reversed(self.apis) if _release(api.since) <= kubelet.release)

    def claim_support(self, kubelet: Kubelet) -> ClaimSupport:
        """Return how a kubelet supports claims."""
        return next(one for one in reversed(self.claims) if _release(one.since) <= kubelet.release)

    def checkpoint(self, kubelet: Kubelet) -> CheckpointFormat:
        """Return the format of a kubelet's checkpoint."""
        return next(one for one in reversed(self.checkpoints) if _release(one.since) <= kubelet.release)

    def keeps_checkpoint(self, old: Kubelet, new: Kubelet) -> bool:
        """Return True if ``new`` can read the checkpoint that ``old`` wrote."""
        return any(new in interval for interval in self.checkpoint(old).readers)


def read(content: bytes) -> Advice:
    """Read the facts from the text of advice.yaml.

    Raises:
        PlanError: the text is not of this form.
    """
    try:
        return msgspec.yaml.decode(content, type=Advice)
    except msgspec.DecodeError as error:
        raise PlanError(f"advice.yaml cannot be read: {error}") from error


def load() -> Advice:
    """Read the advice.yaml that comes with the gateway."""
    return read(Path(__file__).with_suffix(".yaml").read_bytes())


# The advice.


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """One replacement of the kubelet. Crossings and bugs are IDs in ``Plan.rows``."""

    old: str
    new: str
    at_least: str | None
    """The first patch release of ``new`` that has all fixes; None if there is no difference."""
    api_before: str
    api_after: str
    checkpoint_kept: bool
    checkpoint: str
    """The ID of the format that the old kubelet wrote."""
    stop_at: str | None
    """A version between the two. A stop there keeps the checkpoint."""
    drain: Drain
    drain_because: tuple[str, ...]
    crossings: tuple[str, ...]
    new_bugs: tuple[str, ...]
    """Bugs of the new kubelet alone."""
    still: tuple[str, ...]
    """Bugs of both kubelets."""
    gone: tuple[str, ...]
    """Bugs of the old kubelet alone."""
    avoided: Mapping[str, str]
    """Patch releases of the new version that have a bug or can't read the checkpoint, by the ID of the bug or format."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``gateway plan --json``."""

    start: str
    goal: str
    way: Way
    now: Mapping[str, tuple[str, ...]]
    """Bugs of the first kubelet, and the first releases without each."""
    first: tuple[str, ...]
    """Steps before the first hop."""
    each: tuple[str, ...]
    """Steps at each hop."""
    hops: tuple[Hop, ...]
    then: tuple[str, ...]
    """Bugs of the last kubelet."""
    rows: Mapping[str, Crossing | Bug | CheckpointFormat]
    """The facts that the hops name, by ID."""


def kubelet(text: str, facts: Advice) -> Kubelet:
    """Read a version such as ``1.28`` or ``v1.28.15``. A vendor's suffix is ignored.

    Raises:
        PlanError: the text is no kubelet version, or nothing is known of that version.
    """
    if (match := _VERSION.fullmatch(text)) is None:
        raise PlanError(f"{text[:64]!r} is not a kubelet version such as 1.28 or 1.28.15")
    found = Kubelet(int(match["minor"]), int(match["patch"]) if match["patch"] else None)
    first, last = _release(facts.first)[0], _release(facts.last)[0]
    if not first <= found.minor <= last:
        raise PlanError(
            f"kubelet {text[:64]!r} is not known here. Known are 1.{first} to 1.{last}: "
            + ("device plugins came with 1.8" if found.minor < first else "a newer gateway may know it")
        )
    return found


def plan(facts: Advice, start: Kubelet, goal: Kubelet, *, direct: bool = False) -> Plan:
    """Return the plan from ``start`` to ``goal``: one minor version at a time, or in one hop (``direct``).

    Raises:
        PlanError: both are the same version.
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
    """Return the versions from ``start`` to ``goal``, one minor version at a time."""
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
    kept = facts.keeps_checkpoint(old, new)
    stop = None if kept else _stop(facts, old, new)
    because = [(row.drain, _in_a_sentence(row.title)) for row in (*crossings, *bugs) if row.drain]
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
        checkpoint=facts.checkpoint(old).id,
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
    """Return the first patch release of ``new`` that has all fixes and reads the checkpoint; None if all have and do."""
    ends = [interval.until for bug in facts.bugs for interval in bug.affected if interval.until]
    begins = [interval.since for interval in facts.checkpoint(old).readers]
    patches = [patch for minor, patch in map(_release, (*ends, *begins)) if minor == new.minor and patch]
    return str(Kubelet(new.minor, max(patches))) if patches else None


def _avoided(facts: Advice, old: Kubelet, new: Kubelet) -> dict[str, str]:
    """Return which early patch releases of ``new`` have bugs that the newest one doesn't, or can't read the checkpoint."""
    wrong = {bug.id: bug.affected for bug in facts.bugs if not bug.hits(new)}
    checkpoint = facts.checkpoint(old)
    if facts.keeps_checkpoint(old, new):
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
    """Return the newest version between the two that reads the old checkpoint and writes one that ``new`` reads; None if there is none."""
    low, high = sorted((old.minor, new.minor))
    between = (Kubelet(minor) for minor in range(high - 1, low, -1))
    return next(
        (stop for stop in between if facts.keeps_checkpoint(old, stop) and facts.keeps_checkpoint(stop, new)), None
    )


def _in_a_sentence(title: str) -> str:
    """Return a title with a small first letter, unless it begins with an abbreviation such as ``CDI``."""
    return title if title[1].isupper() else title[0].lower() + title[1:]


def _release(text: str) -> tuple[int, int]:
    _, minor, patch = Version(text).release
    return minor, patch
