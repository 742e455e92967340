"""The attack: what it does is seen, and what was seen is judged."""

from __future__ import annotations

import os

import pytest

from gateway_lab.trials import attack
from gateway_lab.trials.attack import LIMIT_MIB, Seen, memory_cgroup

SOUND = Seen(probes=[0.01], pods=1, descriptors=(20, 20), memory=[50.0, 60.0, 60.0, 60.0])


async def test_what_a_strike_does_is_seen() -> None:
    """One strike for some seconds: what all of them do to probes and memory depends on the machine, and is for people to look at."""
    seen = await attack.attack(3, at_once=1, only="grpc: too large")
    assert seen.alive, seen
    assert seen.probes, seen
    assert seen.pods, seen
    assert not seen.pods_failed, seen
    assert len(seen.memory) > 1, seen
    assert max(seen.memory) < LIMIT_MIB, seen
    assert seen.log_bytes, seen


def test_what_was_seen_is_judged() -> None:
    assert SOUND.broken() == []


@pytest.mark.parametrize(
    ("field", "value", "broken"),
    [
        ("alive", False, "it lives"),
        ("probes", [], "each probe is answered within a second"),
        ("probes_failed", ["late"], "each probe is answered within a second"),
        ("pods", 0, "each pod gets its GPU"),
        ("pods_failed", ["none"], "each pod gets its GPU"),
        ("descriptors", (20, 31), "descriptors come back within 10"),
        ("memory", [50.0, 60.0, 60.0, 70.0], "memory grows by less than 10 MiB"),
        ("memory", [50.0, 256.0, 256.0, 256.0], "memory stays below 256 MiB"),
    ],
)
def test_a_promise_that_was_not_kept_is_named(field: str, value: object, broken: str) -> None:
    seen = Seen(**{**vars(SOUND), field: value})
    assert seen.broken() == [broken]
    assert str(seen)


def test_a_peak_is_no_growth() -> None:
    level = [50.0, *[60.0] * 11]
    assert Seen(memory=[*level[:-1], 90.0]).growth == 0
    assert Seen(memory=[*level[:-2], 90.0, 90.0]).growth == 30


def test_a_cgroup_is_made_and_removed() -> None:
    with memory_cgroup(64) as group:
        if group is None:
            pytest.skip("this machine gives no memory cgroup")
        assert (group / "cgroup.procs").exists()
        assert str(os.getpid()) in group.name
    assert not group.exists()
