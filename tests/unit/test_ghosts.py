"""Devices whose pods ended around a kubelet's restart or a gateway's end are offered again, whatever the configuration makes of them."""

from __future__ import annotations

import pytest

from gateway_lab.trials import ghosts


@pytest.mark.parametrize("pod_resources", [True, False], ids=["with pod-resources", "without"])
@pytest.mark.parametrize("name", ghosts.SEQUENCES)
async def test_what_nobody_holds_is_offered(name: str, pod_resources: bool) -> None:
    await ghosts.run(name, "1.37", lambda _: None, pod_resources=pod_resources)
