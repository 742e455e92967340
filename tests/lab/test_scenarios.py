"""What the scenarios know of kubelets; that they are kept is shown in tests/compat."""

from __future__ import annotations

import pytest

from devices.model import ContainerAnswer
from gateway_lab.kubelets.kubelet import Admission
from gateway_lab.trials.scenarios import (
    RESOURCE,
    SCENARIOS,
    SECOND_RESOURCE,
    VERSIONS,
    mistold,
)


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
