"""Another plugin's node becomes ours, and is given back, with pods that hold GPUs all the time."""

from collections.abc import Callable

import msgspec
import pytest

from gateway_lab.node.continuity import IMAGE, judge
from gateway_lab.node.installed import DaemonSet, HostService, Installed
from gateway_lab.node.migration import STEPS, Step, plugins, run
from gateway_lab.node.stage import Outcome, Stage
from tests.e2e.conftest import KUBELETS, REPEAT

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]
VERSION = "1.36" if "1.36" in KUBELETS else KUBELETS[-1]
"""1.36 is the newest kubelet with the disconnect bug (from 1.25 on): two plugins on one resource are hardest there."""


@pytest.fixture(scope="module")
def pairs(stage: Stage) -> dict[str, dict[str, Installed]]:
    return {way: plugins(stage, way, IMAGE) for way in (HostService.kind, DaemonSet.kind)}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
@pytest.mark.parametrize("number", range(1, REPEAT + 1))
@pytest.mark.parametrize("ours", [HostService.kind, DaemonSet.kind], ids=lambda kind: kind.replace(" ", "-"))
async def test_migration(
    stage: Stage,
    pairs: dict[str, dict[str, Installed]],
    keep: Callable[[Outcome], None],
    ours: str,
    number: int,
    step: Step,
) -> None:
    outcome = await run(stage, VERSION, step, pairs[ours])
    keep(msgspec.structs.replace(outcome, installed=ours))
    print(number, outcome)  # noqa: T201 - shown where it fails
    assert judge(outcome, step.promise) == []
