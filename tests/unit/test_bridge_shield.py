"""What the kubelet is told of a plugin that is away: rows of one rule."""

from __future__ import annotations

import pytest

from adapters.pluginregistration import PluginInfo
from devices.life import merging, states
from devices.model import Device, Health, Options
from gateway.bridge import judge, shield
from gateway.bridge.judge import placed
from gateway.bridge.shield import RETURNED_S, Cover, Limits, Word

LIMITS = Limits(grace=60, withdraw=600)
DEVICES = (Device("a"), Device("b", Health.UNHEALTHY))
OPTIONS = Options(preferred_allocation=True)
AWAY = Word(DEVICES, OPTIONS, 1000.0, "it ended its stream")


@pytest.mark.parametrize(
    ("now", "cover", "well", "changes_at", "left"),
    [
        pytest.param(1000, Cover.SHIELDED, {"a": True, "b": False}, 1060, 60, id="just gone"),
        pytest.param(1059, Cover.SHIELDED, {"a": True, "b": False}, 1060, 1, id="within the grace"),
        pytest.param(1060, Cover.UNHEALTHY, {"a": False, "b": False}, 1600, 0, id="after the grace"),
        pytest.param(1599, Cover.UNHEALTHY, {"a": False, "b": False}, 1600, 0, id="long after"),
        pytest.param(1600, Cover.WITHDRAWN, None, None, 0, id="not expected back"),
    ],
)
def test_a_plugin_that_is_away(
    now: float, cover: Cover, well: dict[str, bool] | None, changes_at: float | None, left: float
) -> None:
    listing = shield.listing(AWAY, LIMITS, now)
    assert shield.cover(AWAY, LIMITS, now) is cover
    assert (listing and {one.id: one.id not in listing.troubles for one in listing.devices}) == well
    assert listing is None or (listing.devices, listing.options) == (DEVICES, OPTIONS)
    assert shield.changes_at(AWAY, LIMITS, now) == changes_at
    assert shield.left(AWAY, LIMITS, now) == left


def test_a_grace_longer_than_the_withdrawal_withdraws_nothing_early() -> None:
    assert shield.cover(AWAY, Limits(grace=600, withdraw=60), 1500) is Cover.SHIELDED


def test_one_that_is_away_already_is_away_since_then() -> None:
    assert shield.went(AWAY, "again", 2000.0).away_since == 1000.0


def test_nothing_is_announced_of_one_that_never_told_of_devices() -> None:
    assert shield.listing(Word(), LIMITS, 0) is None


@pytest.mark.parametrize(
    ("back", "recovered"), [(1030.0, frozenset()), (1100.0, frozenset({"a"}))], ids=["within the grace", "after it"]
)
def test_what_the_shield_called_ill_is_well_at_once(back: float, recovered: frozenset[str]) -> None:
    word = shield.came(AWAY, DEVICES, OPTIONS, LIMITS, back)
    listing = shield.listing(word, LIMITS, back)
    assert listing is not None
    assert (listing.recovered, [*listing.troubles]) == (recovered, ["b"])
    again = shield.came(word, DEVICES, OPTIONS, LIMITS, back + RETURNED_S + 1)
    assert again.uncovered is None


def test_a_device_that_falls_ill_again_and_again_is_well_when_its_plugin_says_so() -> None:
    word, entries = Word(), dict[str, states.Entry]()
    for turn in range(20):
        now, health = float(turn), Health.UNHEALTHY if turn % 2 == 0 else Health.HEALTHY
        word = shield.came(word, (Device("a", health), Device("b")), OPTIONS, LIMITS, now)
        listing = shield.listing(word, LIMITS, now)
        merged = merging.merge(merging.Known({}), listing, entries, merging.Clock(now, now, 0.0))
        entries = {one.device.id: one for one in merged.entries}
        assert (entries["a"].device.health, entries["b"].device.health) == (health, Health.HEALTHY), turn
    assert word.mended == {"a"}


@pytest.mark.parametrize(
    ("endpoint", "where"),
    [
        ("", ("plugins_registry", "found.sock")),
        ("/var/lib/kubelet/plugins_registry/x.sock", ("plugins_registry", "x.sock")),
        ("/var/lib/kubelet/device-plugins/x.sock", ("device-plugins", "x.sock")),
        ("/elsewhere/x.sock", ("plugins_registry", "x.sock")),
        ("x.sock", ("plugins_registry", "x.sock")),
        ("/var/lib/kubelet/plugins_registry/..", ("plugins_registry", "..")),
    ],
)
def test_where_a_plugin_that_was_found_is_served(endpoint: str, where: tuple[str, str]) -> None:
    assert judge.endpoint_of(PluginInfo("DevicePlugin", "v.example/n", endpoint), "found.sock") == where


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (PluginInfo("CSIPlugin", "v.example/n", "", ("v1beta1",)), "of type DevicePlugin"),
        (PluginInfo("DevicePlugin", "v.example/n", "", ("v1alpha1",)), "speaks v1beta1"),
    ],
)
def test_what_is_no_device_plugin_of_today_is_left_alone(info: PluginInfo, words: str) -> None:
    assert words in (judge.info_error(info) or "")


@pytest.mark.parametrize(
    ("device_id", "board"),
    [("0", "v.example/n/0"), ("0::3", "v.example/n/0"), ("GPU-1", ""), ("MIG-1", "")],
)
def test_an_id_is_its_plugins_own_unless_it_is_the_hardwares(device_id: str, board: str) -> None:
    assert placed("v.example/n", Device(device_id)).part_of == board
