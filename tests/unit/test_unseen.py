"""Which devices worked until now and aren't seen by this gateway: a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from devices.generic import GenericSource
from devices.model import Device, Health
from devices.policy import Globbed, Policy
from devices.source import Inventory, Listing
from gateway import unseen as module
from gateway.memory.ledger import Ledger
from gateway.unseen import Unseen, hindrances, unseen

NVIDIA, MIG, AMD = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "amd.com/gpu"


def listed(well: str = "", ill: str = "") -> Listing:
    return Listing((*map(Device, well), *(Device(one, Health.UNHEALTHY) for one in ill)))


def source(resource: str) -> str:
    return resource.partition(".")[0]


@pytest.mark.parametrize(
    ("usable", "inventory", "missing"),
    [
        pytest.param({NVIDIA: "ab"}, None, {NVIDIA}, id="nobody looked yet"),
        pytest.param({NVIDIA: "ab"}, {}, {NVIDIA}, id="it sees nothing"),
        pytest.param({NVIDIA: "ab"}, {NVIDIA: listed()}, {NVIDIA}, id="it offers the name without devices"),
        pytest.param({NVIDIA: "ab"}, {NVIDIA: listed(ill="ab")}, {NVIDIA}, id="it may not look at what it sees"),
        pytest.param({NVIDIA: "ab"}, {NVIDIA: listed("cd")}, {NVIDIA}, id="it sees others"),
        pytest.param({NVIDIA: "ab"}, {NVIDIA: listed("b")}, set(), id="it sees some: the others are lost"),
        pytest.param({NVIDIA: "ab", MIG: "m"}, {NVIDIA: listed("a")}, set(), id="one profile's GPU is lost"),
        pytest.param({NVIDIA: "ab", MIG: "m"}, {NVIDIA: listed(ill="ab")}, {NVIDIA, MIG}, id="all of a source"),
        pytest.param({NVIDIA: "ab", AMD: "x"}, {NVIDIA: listed("ab")}, {AMD}, id="each source by itself"),
        pytest.param({NVIDIA: ""}, {}, set(), id="none was usable before"),
        pytest.param({}, {}, set(), id="nothing was there before"),
    ],
)
def test_what_worked_until_now_and_is_not_seen(
    usable: Mapping[str, str], inventory: Inventory | None, missing: set[str]
) -> None:
    found = unseen(usable, usable, inventory, source)
    assert found == {name: source(name) for name in missing}
    assert [one.source for one in hindrances(found, usable)] == list(dict.fromkeys(found.values()))
    assert all(one.held_up for one in hindrances(found, usable))


def test_a_person_is_told_what_to_do() -> None:
    [one] = hindrances({NVIDIA: "nvidia", MIG: "nvidia"}, {NVIDIA: "ab", MIG: "m"})
    assert f"it sees none of the 3 usable devices of {NVIDIA}, {MIG}; " in one.reason
    assert "gateway forget ID" in one.reason


@pytest.mark.parametrize(
    ("numa", "there", "waits"),
    [
        pytest.param((0,), True, True, id="the kernel has it"),
        pytest.param((0,), False, False, id="the kernel has it no longer"),
        pytest.param((), False, True, id="nobody knows whether the kernel ever had it"),
    ],
)
def test_a_gpu_that_the_kernel_no_longer_has_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numa: tuple[int, ...], there: bool, waits: bool
) -> None:
    monkeypatch.setattr(module, "PCI", tmp_path)
    if there:
        (tmp_path / "0000:19:00.0").mkdir()
    ledger = Ledger(tmp_path / "state")
    ledger.announce(NVIDIA, (Device("/dev/a", Health.HEALTHY, numa, pci="0000:19:00.0"),))
    one = Unseen(ledger, GenericSource(Policy(globbed=(Globbed(NVIDIA, ("/dev/a",)),))))
    one.look({})
    assert bool(one.names) is waits
