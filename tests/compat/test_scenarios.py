"""Every scenario of the lab on every kubelet it applies to: emulated ones of each behaviour class, and genuine ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet

from gateway.lab.scenarios import SCENARIOS, VERSIONS, Scenario
from tests.compat.conftest import GENUINE, Job, Recordings

FEWER: dict[str, tuple[str, ...]] = {
    # Ten seconds each, so only where a second Register means something else.
    "two-gateways": ("1.9", "1.10", "1.20", "1.32", "1.37"),
    # Ten seconds each as well: without a limit on messages, with one, and today's.
    "many-devices": ("1.8", "1.10", "1.37"),
}
PLUGIN_SIDE = {"stale-socket", "wrong-version", "never-announced", "name-deleted", "directory-replaced"}
"""What the gateway does on its own, whatever the kubelet: one emulated kubelet of each dialect, and all genuine ones."""
ONE_OF_EACH_DIALECT = ("1.8", "1.9", "1.37")
EMULATED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(PLUGIN_SIDE, ONE_OF_EACH_DIALECT),
    # Where the behaviour begins, and today's.
    "init-containers": ("1.9", "1.37"),
    "preferred-allocation": ("1.20", "1.37"),
    "pre-start": ("1.10", "1.37"),
    "topology": ("1.20", "1.37"),
}
"""On which emulated kubelets a scenario is run, where not on all; it is run on all genuine ones."""


def _versions(kind: str, scenario: Scenario) -> list[str]:
    chosen: tuple[str, ...] = EMULATED.get(scenario.name, VERSIONS) if kind == "emulated" else GENUINE
    wanted = FEWER.get(scenario.name, chosen)
    return [version for version in chosen if version in wanted and not scenario.applies(version)]


def _rows() -> Iterator[ParameterSet]:
    # The longest first: they wait while the others run.
    for scenario in sorted(SCENARIOS.values(), key=lambda one: one.name != "two-gateways"):
        for version in _versions("emulated", scenario):
            yield pytest.param((Job("emulated", scenario.name, version),), id=f"{scenario.name}-emulated-{version}")
        for version in _versions("genuine", scenario):
            job = Job("genuine", scenario.name, version)
            yield pytest.param((job,), id=f"{scenario.name}-genuine-{version}", marks=pytest.mark.genuine)


@pytest.mark.parametrize("jobs", [*_rows()])
def test_scenario(jobs: tuple[Job, ...], recordings: Recordings) -> None:
    """Its promise is in ``SCENARIOS``; what breaks it is raised."""
    for job in jobs:
        recordings(job)
