"""Plugins of each API behind the bridge, on genuine kubelets of both sides of each change of the API.

`make compat-bridge` runs every scenario with each API on every kubelet.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway_lab.kubelets.build import built
from tests.compat.conftest import Job, Recordings
from tests.unit.bridging import play_forgotten_in_flight

ROWS = [
    ("kubelet-restart", "v1beta1", "1.8"),
    ("kubelet-restart", "v1beta1", "1.9"),
    ("kubelet-restart", "v1alpha2", "1.8"),
    ("kubelet-restart", "0.1", "1.9"),
    ("kubelet-restart", "0.1", "1.37"),
    ("kubelet-restart", "v1alpha2", "1.37"),
    ("health", "v1beta1", "1.20"),
    ("gateway-crash", "v1beta1", "1.28"),
    ("cdi-names", "v1beta1", "1.28"),
    ("cdi-names", "v1beta1", "1.37"),
    ("two-gateways", "v1beta1", "1.37"),
]


@pytest.mark.genuine
@pytest.mark.parametrize(
    "jobs",
    [
        pytest.param((Job("genuine", scenario, version, behind=api),), id=f"{scenario}-{api}-behind-{version}")
        for scenario, api, version in ROWS
    ],
)
def test_a_scenario_through_the_bridge(jobs: tuple[Job, ...], recordings: Recordings) -> None:
    """Its promise is in ``SCENARIOS``; what breaks it is raised."""
    for job in jobs:
        recordings(job)


@pytest.mark.genuine
@pytest.mark.parametrize("version", ["1.20", "1.28", "1.37"])
async def test_a_device_forgotten_in_an_allocate_goes_to_no_other(folder: Path, version: str) -> None:
    binary = built(version)
    assert binary is not None, f"kubelet {version} is not built: make kubelets"
    held, came = await play_forgotten_in_flight(folder, version, binary)
    assert held == ["a", "b"]
    assert len(came) == 1
