"""Every hop between two kubelets, up and down, under pods that hold devices; emulated kubelets keep and forget as genuine ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from gateway_lab.matrix.record import Hop
from gateway_lab.trials import hops
from gateway_lab.trials.scenarios import VERSIONS, dialect, forgets
from tests.compat.conftest import GENUINE, ONE_OF_EACH, _emulated, _genuine

Walked = dict[tuple[str, str], Hop]


@cache
def _walked(path: tuple[str, ...], genuine: Callable[[str], Path | None]) -> Walked:
    """Walk a path once, whichever of its hops is asked for first."""
    found: list[Hop] = []
    asyncio.run(hops.walk(path, genuine, found.append))
    return {(hop.old, hop.new): hop for hop in found}


def _rows(kind: str, versions: tuple[str, ...], title: str = "") -> Iterator[ParameterSet]:
    marks = [pytest.mark.genuine] if kind == "genuine" else []
    for path in hops.walks(versions):
        for old, new in pairwise(path):
            both = [pytest.mark.kubelet(version=version) for version in (old, new)]
            yield pytest.param(kind, path, old, new, id=f"{title or kind}-{old}-{new}", marks=[*marks, *both])


@pytest.mark.parametrize(
    ("kind", "path", "old", "new"),
    [
        *_rows("emulated", VERSIONS),
        *_rows("genuine", GENUINE),
        *_rows("genuine", ONE_OF_EACH, "one of each"),
    ],
)
def test_hop(kind: str, path: tuple[str, ...], old: str, new: str) -> None:
    hop = _walked(path, _genuine if kind == "genuine" else _emulated)[old, new]
    assert hop.status == "passed", f"{hop.reason}\n" + "\n".join(hop.transcript)
    kept = forgets(old, new) is None
    assert (hop.kind, hop.api_before, hop.api_after) == (kind, dialect(old), dialect(new))
    assert hop.level_after, "the gateway doesn't say which kubelet it takes this one for"
    assert (hop.checkpoint_kept, hop.forgets == "") == (kept, kept)
    assert {pod.pod: set(pod.before) == set(pod.after) for pod in hop.pods} == ({"a": True, "b": True} if kept else {})
