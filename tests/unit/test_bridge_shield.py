"""What the kubelet is told of a plugin that is away: rows of one rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from adapters.pluginregistration import PluginInfo
from devices.model import ContainerAnswer, Device, Health, Options
from gateway.bridge import judge, shield
from gateway.bridge.judge import placed
from gateway.bridge.peer import CPU_SHARE, OWED_REST_S, SEND_FACTOR, SEND_S, ListPace
from gateway.bridge.shield import Cover, Limits, Word

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


def test_the_lists_of_all_plugins_share_a_tenth_of_a_processor() -> None:
    """Each sends a list of 10 000 new devices whenever one may be read."""
    pace, read, cost = ListPace(), Counter[str](), 0.05
    for tenth in range(6000):
        for name in "abc":
            if pace.rests(name, tenth / 10) <= 0:
                pace.spent(name, cost, tenth / 10)
                read[name] += 1
    in_all = read.total() * (SEND_FACTOR * cost + SEND_S)
    assert 0.9 * CPU_SHARE * 600 < in_all < CPU_SHARE * (600 + 4 * OWED_REST_S)
    assert max(read.values()) - min(read.values()) <= 2


def test_who_has_sent_little_waits_for_nobody() -> None:
    pace = ListPace()
    pace.spent("a", 60.0, 0.0)
    assert pace.rests("a", 0.0) > 1000
    assert pace.rests("b", 0.0) <= 0
    pace.spent("b", 0.05, 0.0)
    assert pace.rests("b", 0.0) <= 0, "three more of 10 000 are read at once"


def test_one_that_is_away_already_is_away_since_then() -> None:
    assert shield.went(AWAY, "again", 2000.0).away_since == 1000.0


def test_nothing_is_announced_of_one_that_never_told_of_devices() -> None:
    assert shield.listing(Word(), LIMITS, 0) is None


@pytest.mark.parametrize(
    ("devices", "others", "words"),
    [
        (("0" * judge.MAX_ID_CHARS,), 0, None),
        (("0" * (judge.MAX_ID_CHARS + 1),), 0, "1 to 253 printable"),
        (map(str, range(judge.MAX_DEVICES)), judge.MAX_DEVICES_IN_ALL - judge.MAX_DEVICES, None),
        (
            map(str, range(judge.MAX_DEVICES)),
            judge.MAX_DEVICES_IN_ALL - judge.MAX_DEVICES + 1,
            "devices of all plugins",
        ),
    ],
    ids=["the longest ID", "a longer one", "the most devices", "more in all"],
)
def test_a_list_is_as_long_as_it_may_be(devices: Iterable[str], others: int, words: str | None) -> None:
    problem = judge.list_error([Device(one) for one in devices], others)
    assert problem is None if words is None else words in (problem or "")


def test_an_answer_and_a_path_are_as_long_as_they_may_be() -> None:
    parts = tuple(map(str, range(judge.MAX_PARTS)))
    assert judge.answer_error([ContainerAnswer(cdi_devices=parts)]) is None
    assert "Allowed: 4096" in (judge.answer_error([ContainerAnswer(cdi_devices=(*parts, "more"))]) or "")
    assert judge.endpoint_error("x" * 102, "/run") is None
    assert "Linux allows 107 bytes" in (judge.endpoint_error("é" * 52, "/run") or "")
    assert "is the gateway's own socket" in (judge.endpoint_error("kubelet.sock", "/run") or "")
    assert judge.numa_nodes((-1, 0, 1023, 1024)) == (0, 1023)


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
        (PluginInfo("DevicePlugin", "v.example/n", "", ("v1alpha1",)), "is for v1beta1 only"),
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
