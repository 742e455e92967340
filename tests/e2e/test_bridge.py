"""A plugin behind the gateway ends, crashes and is upgraded, and its kubelet is, too: at the API server all devices stay allocatable."""

from collections.abc import Callable

import pytest

from gateway_lab.node.bridged import Bridged, walk
from gateway_lab.node.continuity import Scenario, judge, run
from gateway_lab.node.installed import Installed
from gateway_lab.node.stage import Outcome, Stage
from tests.e2e.conftest import REPEAT

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]
WALK = [
    pytest.param(version, scenario, id=f"{number}-{version}-{scenario.name}")
    for number in range(1, REPEAT + 1)
    for version, scenario in walk("1.36", "1.37")
]


@pytest.fixture(scope="module")
def bridged(stage: Stage) -> Installed:
    return Bridged(stage.node)


@pytest.mark.parametrize(("version", "scenario"), WALK)
async def test_bridge(
    stage: Stage, bridged: Installed, keep: Callable[[Outcome], None], version: str, scenario: Scenario
) -> None:
    await stage.install(bridged)
    outcome = await run(stage, version, scenario)
    keep(outcome)
    print(outcome)  # noqa: T201 - shown where it fails
    assert judge(outcome, scenario.promises[Bridged.kind]) == []
