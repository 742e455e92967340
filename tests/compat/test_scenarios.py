"""Every scenario of the lab on every kubelet it applies to: emulated ones of each behaviour class, and genuine ones."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from gateway.lab.scenarios import SCENARIOS, VERSIONS
from tests.compat.conftest import GENUINE, Job, Recordings

TWO_GATEWAYS = ("1.9", "1.10", "1.20", "1.32", "1.37")
"""Ten seconds each, so only where a second Register means something else."""


def _rows() -> list[ParameterSet]:
    rows = []
    # The longest first: they wait while the others run.
    for scenario in sorted(SCENARIOS.values(), key=lambda one: one.name != "two-gateways"):
        for kind, versions in (("emulated", VERSIONS), ("genuine", GENUINE)):
            for version in versions:
                if scenario.applies(version) or (scenario.name == "two-gateways" and version not in TWO_GATEWAYS):
                    continue
                job = Job(kind, scenario.name, version)  # type: ignore[arg-type]
                marks = [pytest.mark.genuine] if kind == "genuine" else []
                rows.append(pytest.param((job,), id=f"{scenario.name}-{kind}-{version}", marks=marks))
    return rows


@pytest.mark.parametrize("jobs", _rows())
def test_scenario(jobs: tuple[Job, ...], recordings: Recordings) -> None:
    """Its promise is in ``SCENARIOS``; what breaks it is raised."""
    for job in jobs:
        recordings(job)
