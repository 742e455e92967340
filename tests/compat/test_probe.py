"""``gateway probe`` on every kubelet: what it finds, and that it leaves nothing behind but its trace in the count."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.registration.api import ask
from gateway_lab.kubelets.build import built
from gateway_lab.kubelets.kubelet import Faults, Kubelet
from gateway_lab.trials.scenarios import VERSIONS, dialect
from tests.compat.conftest import GENUINE


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("kind", "version"),
    [
        *(pytest.param("emulated", version, id=f"emulated-{version}") for version in VERSIONS),
        *(pytest.param("genuine", version, id=f"genuine-{version}", marks=pytest.mark.genuine) for version in GENUINE),
    ],
)
async def test_the_api_is_found(folder: Path, kind: str, version: str) -> None:
    genuine = built(version) if kind == "genuine" else None
    assert genuine is not None or kind == "emulated", f"kubelet {version} is not built: make kubelets"
    async with await Kubelet.launch(version, folder, genuine=genuine) as kubelet:
        await kubelet.start()
        before = names(folder)
        found = await ask(folder / "kubelet.sock")
        assert found.api == dialect(version)
        assert names(folder) == before
        assert (await kubelet.totals()).capacity == {}


async def test_a_kubelet_newer_than_all_is_reported(folder: Path) -> None:
    async with await Kubelet.launch("1.37", folder) as kubelet:
        await kubelet.start()
        await kubelet.fault(Faults(supports_only="v1"))
        found = await ask(folder / "kubelet.sock")
        assert (found.api, "it speaks v1" in found.kubelets) == (None, True)
