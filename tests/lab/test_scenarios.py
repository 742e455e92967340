"""What the scenarios know of kubelets; that they are kept is shown in tests/compat."""

from __future__ import annotations

from itertools import pairwise

import pytest

from devices.model import ContainerAnswer
from gateway_lab.kubelets.kubelet import Admission
from gateway_lab.trials.scenarios import (
    RESOURCE,
    SCENARIOS,
    SECOND_RESOURCE,
    VERSIONS,
    counted,
    dialect,
    forgets,
    mistold,
)


@pytest.mark.parametrize(
    ("hops", "kept"),
    [
        ("1.8 1.8", True),
        ("1.9 1.10", True),
        ("1.11 1.12 1.13 1.16", True),
        ("1.18 1.20 1.24 1.25 1.26 1.28 1.32 1.36 1.37", True),
        ("1.18 1.24", True),
        ("1.18 1.28", True),
        ("1.24 1.37", True),
        ("1.16 1.11", True),
        ("1.10 1.9", True),
        ("1.36 1.24", True),
        ("1.36 1.20", True),
        ("1.26 1.25", True),
        ("1.8 1.9", False),
        ("1.10 1.11", False),
        ("1.18 1.32", False),
        ("1.11 1.10", False),
        ("1.9 1.8", False),
        ("1.20 1.18", False),
        ("1.25 1.18", False),
        ("1.36 1.18", False),
    ],
)
def test_which_hops_a_kubelet_forgets_its_pods_on(hops: str, *, kept: bool) -> None:
    path = hops.split()
    for old, new in pairwise(path):
        assert (forgets(old, new) is None) is kept, (old, new)


@pytest.mark.parametrize(
    ("version", "accepted_before", "registers"),
    [
        ("1.8", "", 2),  # v1beta1 reaches nothing; v1alpha2 is refused; 0.1
        ("1.8", "v1alpha2", 2),
        ("1.8", "v1beta1", 2),
        ("1.8", "0.1", 1),
        ("1.9", "", 1),  # v1beta1 reaches nothing; v1alpha2
        ("1.9", "0.1", 2),  # 0.1 is refused
        ("1.9", "v1alpha2", 1),
        ("1.10", "", 1),
        ("1.10", "v1alpha2", 1),
        ("1.37", "0.1", 1),
        ("1.37", "v1beta1", 1),
    ],
)
def test_how_many_registers_a_kubelet_counts(version: str, accepted_before: str, registers: int) -> None:
    assert counted(version, accepted_before) == registers


@pytest.mark.parametrize(
    ("version", "name"),
    [("1.8", "0.1"), ("1.9", "v1alpha2"), ("1.10", "v1beta1"), ("1.37", "v1beta1"), ("1.40", "v1beta1")],
)
def test_what_a_kubelet_speaks(version: str, name: str) -> None:
    assert dialect(version) == name


@pytest.mark.parametrize(
    ("resource", "held", "told", "sentences"),
    [
        (RESOURCE, ["G0", "G1"], {"NVIDIA_VISIBLE_DEVICES": "G1,G0"}, []),
        (SECOND_RESOURCE, ["G0"], {"AMD_VISIBLE_DEVICES": "G0"}, []),
        (RESOURCE, ["G0"], {"NVIDIA_VISIBLE_DEVICES": "G1"}, ["pod a holds G0, its container is told G1"]),
        (RESOURCE, ["G0"], {}, ["pod a holds G0, its container is told nothing"]),
        (RESOURCE, [], {"NVIDIA_VISIBLE_DEVICES": "G1"}, ["pod a holds nothing, its container is told G1"]),
    ],
)
def test_what_a_container_is_told(resource: str, held: list[str], told: dict[str, str], sentences: list[str]) -> None:
    assert mistold("a", resource, held, Admission({}, ContainerAnswer(envs=told))) == sentences


def test_each_scenario_applies_somewhere_and_says_why_where_it_does_not() -> None:
    for name, scenario in SCENARIOS.items():
        reasons = [scenario.applies(version) for version in VERSIONS]
        assert None in reasons, name
        assert all(reason is None or len(reason) > 10 for reason in reasons), name
        assert scenario.name == name
        assert scenario.promise
