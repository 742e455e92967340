"""The bytes that the adapters are held against are those that each genuine kubelet's own types make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway_lab.kubelets.build import built
from gateway_lab.kubelets.kubelet import Kubelet
from tests.compat.conftest import GENUINE

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.genuine
@pytest.mark.parametrize("version", GENUINE)
async def test_a_kubelet_makes_the_bytes_that_are_committed(folder: Path, version: str) -> None:
    genuine = built(version)
    assert genuine is not None, f"kubelet {version} is not built: make kubelets"
    async with await Kubelet.launch(version, folder, genuine=genuine) as kubelet:
        about, made = await kubelet.about(), await kubelet.ask("golden")
    committed = json.loads((GOLDEN / f"{version}.json").read_text())
    assert committed == {"kubernetes": about.kubernetes, "messages": made["messages"], "values": made["values"]}
