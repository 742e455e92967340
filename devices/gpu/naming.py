"""Under which resource name each GPU and partition of a node is offered: the vendors' own rules.

NVIDIA's by the MIG strategy, as its device plugin has them (internal/rm/device_map.go of 0.17 to 0.20): a GPU in MIG mode is
offered whole, by its instances under the GPUs' name (``single``), or by its instances under a name for each profile
(``mixed``). AMD's by partition, as its own has them (cmd/k8s-device-plugin/main.go). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from devices.gpu.model import GPU
from devices.model import Kind, Trouble
from devices.policy import MigStrategy, Naming, Policy

_NVIDIA: Final = "nvidia.com/"
_AMD: Final = "amd.com/"
_SEVERITY: Final = tuple(Kind)
"""The kinds of trouble, the worst last."""


class NamingError(ValueError):
    """What is on the node has no name under this policy. The message says what was expected, what came and what to do."""


def named(gpus: Iterable[GPU], policy: Policy) -> dict[str, tuple[GPU, ...]]:
    """Sort GPUs and partitions by the names under which they are offered; those that aren't offered are left out.

    What is wrong with a GPU is wrong with its partitions, too; one that is offered whole has the worst trouble of those on it.

    Raises:
        NamingError: the strategy ``single`` was chosen, and the devices are not alike.
    """
    gpus = tuple(gpus)
    around: dict[str, list[GPU]] = {}
    for gpu in gpus:
        around.setdefault(gpu.board, []).append(gpu)
    found: dict[str, list[GPU]] = {}
    for gpu in gpus:
        if (name := name_of(gpu, policy)) is not None:
            found.setdefault(name, []).append(_judged(gpu, around[gpu.board]))
    if policy.mig_strategy is MigStrategy.SINGLE:
        _check_mig(gpus)
    if policy.resource_naming is Naming.SINGLE:
        _check_alike([gpu for gpu in gpus if gpu.resource.startswith(_AMD)])
    return {name: tuple(there) for name, there in found.items()}


def name_of(gpu: GPU, policy: Policy) -> str | None:
    """Say under which name a GPU or partition is offered; None where it isn't."""
    if gpu.resource.startswith(_NVIDIA):
        mig = policy.mig_strategy
        if not (gpu.parent and gpu.profile):  # no MIG instance
            whole = not gpu.partitioned or mig is MigStrategy.NONE
            return _by_pattern(gpu.product, policy.gpu_names, gpu.resource) if whole else None
        if mig is MigStrategy.MIXED:
            return _by_pattern(gpu.profile, policy.mig_names, f"{_NVIDIA}mig-{gpu.profile.replace('+', '.')}")
        return _by_pattern(gpu.profile, policy.mig_names, gpu.resource) if mig is MigStrategy.SINGLE else None
    if gpu.partitioned:
        return None
    mixed = policy.resource_naming is Naming.MIXED and gpu.profile and gpu.resource.startswith(_AMD)
    return f"{_AMD}{gpu.profile}" if mixed else gpu.resource


def _judged(gpu: GPU, around: Iterable[GPU]) -> GPU:
    """Give a GPU or partition the worst trouble of itself, its GPU and its partitions; ``around`` are all of one GPU."""
    troubles = [one.trouble for one in around if not gpu.parent or one.uuid in {gpu.uuid, gpu.parent}]
    if gpu.lacks:
        troubles.append(Trouble(gpu.lacks))
    worst = max(filter(None, troubles), key=lambda trouble: _SEVERITY.index(trouble.kind), default=None)
    return gpu if worst == gpu.trouble else replace(gpu, trouble=worst)


def claimed(resource: str, vendor: str, policy: Policy) -> bool:
    """Whether GPUs of a vendor (``nvidia``, ``amd``; any other: all of them) could be offered under this name.

    A name that a path rule has is that rule's.
    """
    if any(rule.resource == resource for rule in policy.globbed):
        return False
    prefix = {"nvidia": _NVIDIA, "amd": _AMD}.get(vendor, "")
    given = {name for _, name in (*policy.gpu_names, *policy.mig_names)} if prefix == _NVIDIA else set()
    sliced = [one for name, one in policy.slices.items() if name.startswith(prefix) or name in given]
    shown: set[str] = set().union(*(one.names for one in sliced))
    return resource.startswith(prefix) or resource in given | shown


def _by_pattern(word: str, names: Sequence[tuple[str, str]], usual: str) -> str | None:
    """Find the name of the first pattern that matches; ``usual`` where there are no patterns."""
    if not names:
        return usual
    return next((name for pattern, name in names if _matches(word, pattern)), None)


def _matches(word: str, pattern: str) -> bool:
    """Whether ``pattern``, in which ``*`` is anything and all else itself, is all of ``word``."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), word) is not None


def _check_mig(gpus: Iterable[GPU]) -> None:
    """Refuse what ``single`` can't mean: GPUs with MIG beside others, MIG without instances, or with several profiles."""
    ours = [gpu for gpu in gpus if gpu.resource.startswith(_NVIDIA)]
    split = {gpu.uuid: gpu for gpu in ours if gpu.partitioned}
    if not split:
        return
    whole = [gpu for gpu in ours if not gpu.parent and not gpu.partitioned]
    empty = split.keys() - {gpu.parent for gpu in ours}
    profiles = sorted({gpu.profile for gpu in ours if gpu.parent in split})
    if whole:
        problem = f"{len(split)} GPUs in MIG mode and {len(whole)} that aren't ({_places(whole)})"
    elif empty:
        problem = f"no MIG instance on GPU {_places([split[uuid] for uuid in empty])}"
    elif len(profiles) > 1:
        problem = f"instances of several profiles ({', '.join(profiles[:8])})"
    else:
        return
    raise NamingError(
        "the MIG strategy 'single' expects every GPU of the node in MIG mode, all with instances of one profile; got "
        f"{problem}: configure them alike, or use the strategy 'mixed'"
    )


def _check_alike(gpus: Iterable[GPU]) -> None:
    profiles: Mapping[str, None] = dict.fromkeys(gpu.profile for gpu in gpus if not gpu.partitioned and gpu.profile)
    if len(profiles) > 1:
        raise NamingError(
            "the resource naming strategy 'single' expects GPUs that are all partitioned alike; got "
            f"{', '.join(sorted(profiles)[:8])}: partition them alike, or use the strategy 'mixed'"
        )


def _places(gpus: Iterable[GPU]) -> str:
    return ", ".join(str(gpu.index) for gpu in sorted(gpus, key=lambda gpu: gpu.index)[:8])
