"""Whatever happens to a node: its GPUs stay allocatable and its pods keep theirs, as far as is promised for each way to install."""

from collections.abc import Callable

import pytest

from gateway_lab.node.continuity import IMAGE, Scenario, judge, run, walk
from gateway_lab.node.installed import DaemonSet, HostService, Installed
from gateway_lab.node.stage import Outcome, Stage
from tests.e2e.conftest import KUBELETS, REPEAT

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]
WALK = [
    pytest.param(installed, version, scenario, id=f"{number}-{installed.replace(' ', '-')}-{version}-{scenario.name}")
    for installed in (HostService.kind, DaemonSet.kind)
    for number in range(1, REPEAT + 1)
    for version, scenario in walk(KUBELETS, installed)
]


@pytest.fixture(scope="module")
def installs(stage: Stage) -> dict[str, Installed]:
    """Each way to install; only one of them is on the node at a time."""
    return {
        HostService.kind: HostService(stage.node),
        DaemonSet.kind: DaemonSet(stage.node, stage.api, stage.seen, IMAGE),
    }


@pytest.mark.parametrize(("installed", "version", "scenario"), WALK)
async def test_continuity(
    stage: Stage,
    installs: dict[str, Installed],
    keep: Callable[[Outcome], None],
    installed: str,
    version: str,
    scenario: Scenario,
) -> None:
    await stage.install(installs[installed])
    outcome = await run(stage, version, scenario)
    keep(outcome)
    print(outcome)  # noqa: T201 - shown where it fails
    assert judge(outcome, scenario.promises[installed]) == []
