"""Every scenario of the lab on every genuine kubelet that is built by default, and on a few emulated ones beside them.

`make compat` runs them all on all; what emulated kubelets are worth is shown by ``test_transcripts``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet

from gateway_lab.matrix.run import WATCHING
from gateway_lab.trials.scenarios import SCENARIOS, Scenario
from tests.compat.conftest import GENUINE, Job, Recordings

ONE_OF_EACH_DIALECT = ("1.8", "1.9", "1.37")
PLUGIN_SIDE = {"stale-socket", "wrong-version", "directory-replaced"}
"""What the gateway does on its own, whatever the kubelet: one kubelet of each dialect, of either kind."""
FEWER: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(PLUGIN_SIDE, ONE_OF_EACH_DIALECT),
    # Ten seconds each, so only where a second Register means something else.
    "two-gateways": ("1.9", "1.10", "1.20", "1.32", "1.37"),
    # Ten seconds each as well: without a limit on messages, with one, and today's.
    "many-devices": ("1.8", "1.10", "1.37"),
}
ALPHA_CLASSIC_TODAY = ("1.9", "1.32", "1.37")
EMULATED: dict[str, tuple[str, ...]] = {
    # Unsure, certain, and never.
    "cdi-names": ("1.9", "1.28", "1.32", "1.37"),
    **dict.fromkeys(PLUGIN_SIDE, ONE_OF_EACH_DIALECT),
    # Where the behaviour begins, and today's.
    "init-containers": ("1.9", "1.37"),
    "preferred-allocation": ("1.20", "1.37"),
    "pre-start": ("1.10", "1.37"),
    "topology": ("1.20", "1.37"),
    # They take long: only kubelets that `make test` doesn't build.
    "many-devices": ("1.10",),
    "two-gateways": ("1.32",),
}
"""On which emulated kubelets a scenario is run, where not on ``ALPHA_CLASSIC_TODAY``."""


def _versions(kind: str, scenario: Scenario) -> list[str]:
    chosen: tuple[str, ...] = EMULATED.get(scenario.name, ALPHA_CLASSIC_TODAY) if kind == "emulated" else GENUINE
    wanted = FEWER.get(scenario.name, chosen)
    return [version for version in chosen if version in wanted and not scenario.applies(version)]


def _rows() -> Iterator[ParameterSet]:
    # The longest first: they wait while the others run.
    for scenario in sorted(SCENARIOS.values(), key=lambda one: one.name not in WATCHING):
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
