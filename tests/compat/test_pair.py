"""What a killed gateway of a pair left unanswered, and what a genuine kubelet's gRPC makes of that."""

from __future__ import annotations

import pytest

from gateway.lab.kubelets.build import built
from tests.unit.test_pair_held import CALLS, next_one_answers


@pytest.mark.genuine
@pytest.mark.parametrize("call", CALLS)
async def test_a_call_that_a_killed_gateway_left_unanswered_is_answered_by_the_next_one(call: str) -> None:
    assert built("1.37"), "kubelet 1.37 is not built: make kubelets"
    await next_one_answers(call, built)
