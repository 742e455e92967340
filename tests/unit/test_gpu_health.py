"""What an Xid, an ECC error and a state of the driver mean for a GPU, and what ends it: one row, one rule."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from devices.gpu.nvidia.health import (
    CATALOGUE,
    IGNORED,
    QUIET_S,
    Checks,
    Event,
    Looked,
    NodeHealth,
    event,
    judged,
    looked,
    rejudged,
    rested,
)
from devices.model import Trouble, TroubleKind
from devices.policy import Recovery

G, H, M, N = "GPU-g", "GPU-h", "MIG-m", "MIG-n"
PARTS = {(1, 0): M, (2, 0): N}
CHECKS = Checks.of()
LOSS = Trouble("gone", TroubleKind.RESET_REQUIRED)


def seen(at: float, **of_g: object) -> Callable[[NodeHealth], NodeHealth]:
    """A look at G (as given) and at H, which is well."""
    return scanned(at, {G: Looked(at, **of_g), H: Looked(at)})  # type: ignore[arg-type]  # a row's fields of Looked


def scanned(
    at: float,
    looks: dict[str, Looked],
    *,
    recovery: Recovery = Recovery.SAFE,
    reloaded: float | None = None,
    released: str = "",
) -> Callable[[NodeHealth], NodeHealth]:
    released_ones = {released} - {""}
    return lambda health: looked(health, looks, CHECKS, recovery, now=at, reloaded=reloaded, released=released_ones)


def xid(
    number: int, at: float, uuid: str = G, gi: int | None = None, ci: int | None = None
) -> Callable[[NodeHealth], NodeHealth]:
    return lambda health: event(health, Event(uuid, number, gi, ci), CHECKS, at)


def ecc(at: float) -> Callable[[NodeHealth], NodeHealth]:
    return lambda health: event(health, Event(G, None), CHECKS, at)


def after(*steps: Callable[[NodeHealth], NodeHealth]) -> NodeHealth:
    health = NodeHealth()
    for step in steps:
        health = step(health)
    return health


def kinds(health: NodeHealth, *uuids: str) -> list[TroubleKind | None]:
    troubles = [health.trouble(uuid) for uuid in uuids or (G,)]
    return [None if one is None else one.kind for one in troubles]


@pytest.mark.parametrize(
    ("disabled", "enabled", "counting", "ignored"),
    [
        ("", "", {48, 63, 79, 0, 2**64 - 1}, IGNORED),
        ("all", "", set(), {13, 48, 79, 999}),
        ("xids", "", set(), {48, 79}),
        (" ALL ", "", set(), {48}),
        ("48,Xids,62", "", set(), {48, 79}),
        ("0", "", set(), {48, 79}),
        ("48, 79", "", {62}, {48, 79, *IGNORED}),
        ("48,x,-1,+62,1e3,,", "", {62, 1}, {48, *IGNORED}),
        ("", "13", {13, 48}, IGNORED - {13}),
        ("48", "48", {48}, IGNORED),
        ("all", "79", {79}, {48, 13}),
        ("all", "all", {13, 48, 79}, set()),
        ("48", "xids", {13, 48}, set()),
    ],
)
def test_what_is_checked(disabled: str, enabled: str, counting: set[int], ignored: set[int]) -> None:
    checks = Checks.of(disabled, enabled)
    assert {one for one in counting | ignored if checks.ignores(one)} == ignored


@given(
    disabled=st.text("al,xids0123456789 \n-", max_size=40), enabled=st.text(max_size=40), number=st.integers(1, 2**64)
)
def test_any_text_says_something(disabled: str, enabled: str, number: int) -> None:
    assert judged(number, Checks.of(disabled, enabled)).kind in TroubleKind


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        *((number, TroubleKind.APPLICATION) for number in sorted(IGNORED)),
        (63, TroubleKind.APPLICATION),
        (154, TroubleKind.APPLICATION),
        (171, TroubleKind.UNKNOWN),
        (2**64 - 1, TroubleKind.UNKNOWN),
    ],
)
def test_what_an_xid_takes(number: int, kind: TroubleKind) -> None:
    """Those of the catalogue are in the docs: ``test_the_docs_show_the_catalogue``."""
    assert judged(number, CHECKS).kind is kind


def test_the_catalogue_names_an_xid_once() -> None:
    every = [number for rows in CATALOGUE.values() for number in rows]
    assert len(every) == len(set(every))


def test_the_docs_show_the_catalogue() -> None:
    text = (Path(__file__).parents[2] / "docs/gpu-health.md").read_text()
    rows = re.findall(r"^\| ([A-Z_0-9]+) \| ([a-z-]+) \| ([0-9, -]+) \|$", text, re.MULTILINE)
    shown = {}
    for action, kind, xids in rows:
        ends = [[int(end) for end in part.split("-")] for part in xids.split(", ")]
        shown[action] = (kind, {number for one in ends for number in range(one[0], one[-1] + 1)})
    plain = Checks({})
    assert shown == {
        action: (judged(min(numbers), plain).kind.value, set(numbers)) for action, numbers in CATALOGUE.items()
    }


WITH_PARTS = seen(1, partitions=PARTS)


@pytest.mark.parametrize(
    ("happened", "ill"),
    [
        pytest.param(xid(79, 2), {G}, id="an xid of the gpu"),
        pytest.param(xid(79, 2, gi=1, ci=0), {M}, id="of an instance"),
        pytest.param(xid(79, 2, gi=1), {M}, id="of a gpu instance"),
        pytest.param(xid(79, 2, gi=7, ci=0), {G}, id="of an instance that nobody knows"),
        pytest.param(xid(79, 2, gi=1, ci=3), {G}, id="of a compute instance that nobody knows"),
        pytest.param(xid(79, 2, uuid=H, gi=1, ci=0), {H}, id="of another gpu's instance"),
        pytest.param(xid(13, 2), set(), id="an application's"),
        pytest.param(xid(13, 2, gi=1, ci=0), set(), id="an application's on an instance"),
        pytest.param(ecc(2), {G}, id="a double bit error"),
    ],
)  # fmt: skip
def test_whom_an_error_marks(happened: Callable[[NodeHealth], NodeHealth], ill: set[str]) -> None:
    assert after(WITH_PARTS, happened).ills.keys() == ill


@pytest.mark.parametrize(
    ("steps", "left", "recovered"),
    [
        pytest.param((seen(1), xid(79, 2), seen(3), seen(4)), TroubleKind.RESET_REQUIRED, set(), id="looks alone prove nothing"),
        pytest.param((seen(1), xid(79, 2), seen(3, failed=LOSS, lost=True), seen(4)), None, {G}, id="lost and back"),
        pytest.param((seen(1), xid(79, 2), seen(3, failed=LOSS, lost=True), seen(4, failed=LOSS), seen(5)), None, {G}, id="lost, failing, and back"),
        pytest.param((seen(1), xid(79, 2), seen(3, failed=replace(LOSS, kind=TroubleKind.RESTART_APP)), seen(4)), TroubleKind.RESET_REQUIRED, set(), id="failing and back is no reset"),
        pytest.param((seen(1), xid(79, 2), scanned(3, {H: Looked(3)}), seen(4)), None, {G}, id="gone and back"),
        pytest.param((seen(1), xid(79, 2), scanned(3, {H: Looked(3)}, released=G), seen(4)), TroubleKind.RESET_REQUIRED, set(), id="released and back is no reset"),
        pytest.param((seen(1), xid(79, 2), seen(3, action=1), seen(4, action=0)), None, {G}, id="a wanted reset that isn't any more"),
        pytest.param((seen(1), xid(79, 2), seen(3, action=1), seen(4, action=None)), TroubleKind.RESET_REQUIRED, set(), id="a driver that doesn't say any more"),
        pytest.param((seen(1), xid(79, 2), seen(3, action=1), seen(4, action=2)), TroubleKind.RESET_REQUIRED, set(), id="another wish"),
        pytest.param((seen(1), xid(79, 2), seen(3, action=3), seen(4, action=0)), TroubleKind.RESET_REQUIRED, set(), id="peer-to-peer traffic that ended"),
        pytest.param((seen(1), xid(79, 2), seen(3, remap_pending=True), seen(4, remap_pending=False)), None, {G}, id="a remap that was done"),
        pytest.param((seen(1), xid(79, 2), seen(3, remap_pending=True), seen(4)), TroubleKind.RESET_REQUIRED, set(), id="a remap that isn't told any more"),
        pytest.param((seen(1), seen(3, action=1), xid(79, 3.5), seen(4, action=0)), TroubleKind.RESET_REQUIRED, set(), id="an error after the last look may be newer than the reset"),
        pytest.param((seen(1), xid(999, 2), seen(3, action=1), seen(4, action=0)), None, {G}, id="an unknown error"),
        pytest.param((seen(1), ecc(2), seen(3, action=4), seen(4, action=0)), None, {G}, id="a double bit error"),
        pytest.param((seen(1), xid(79, 2), scanned(4, {G: Looked(4), H: Looked(4)}, reloaded=3)), None, {G, H}, id="a new load of the driver"),
        pytest.param((seen(1), xid(79, 3.5), scanned(4, {G: Looked(4), H: Looked(4)}, reloaded=3)), TroubleKind.RESET_REQUIRED, {H}, id="an error after the old driver was let go of"),
        pytest.param((seen(1), xid(79, 3.5), seen(3.7), scanned(5, {G: Looked(5), H: Looked(5)}, reloaded=3)), None, {G, H}, id="an error before the last look, which a load that is told late ended all the same"),
        pytest.param((seen(1), xid(79, 2), seen(3, action=1), xid(94, 3.5), seen(4, action=0)), TroubleKind.RESTART_APP, {G}, id="what only an application's end cures, and came after the last look, doesn't hide the reset"),
        pytest.param((seen(1), xid(79, 2), seen(3, action=1), seen(4, action=0), xid(79, 5)), TroubleKind.RESET_REQUIRED, set(), id="ill again"),
        pytest.param((seen(1), xid(79, 2), seen(3, action=1), seen(4, action=0), xid(94, 5)), TroubleKind.RESTART_APP, set(), id="ill again, less"),
        pytest.param((seen(1), xid(79, 2), seen(3, action=1), seen(4, action=0), xid(13, 5)), None, {G}, id="an application's error is no illness"),
    ],
)  # fmt: skip
def test_what_a_reset_ends(
    steps: tuple[Callable[[NodeHealth], NodeHealth], ...], left: TroubleKind | None, recovered: set[str]
) -> None:
    health = after(*steps)
    assert kinds(health) == [left]
    assert health.recovered == recovered


@pytest.mark.parametrize(
    ("of_g", "kind"),
    [
        ({"failed": LOSS}, TroubleKind.RESET_REQUIRED),
        ({"action": 0}, None),
        ({"action": 1}, TroubleKind.RESET_REQUIRED),
        ({"action": 2}, TroubleKind.RESET_REQUIRED),
        ({"action": 3}, TroubleKind.RESTART_APP),
        ({"action": 4}, TroubleKind.RESET_REQUIRED),
        ({"action": 77}, TroubleKind.UNKNOWN),
        ({"remap_pending": True}, TroubleKind.APPLICATION),
        ({"remap_failed": True}, TroubleKind.UNKNOWN),
        ({"remap_failed": False, "remap_pending": False}, None),
    ],
    ids=str,
)
def test_a_state_is_a_trouble_as_long_as_it_lasts(of_g: dict[str, object], kind: TroubleKind | None) -> None:
    health = after(seen(1), seen(2, **of_g))
    assert kinds(health) == [kind]
    assert kinds(seen(3, action=0, remap_pending=False, remap_failed=False)(health)) == [None]


def test_restart_app_ends_by_quiet_and_nothing_else_does() -> None:
    health = after(WITH_PARTS, xid(94, 2), xid(8, 10), xid(79, 3, gi=1, ci=0))
    assert kinds(rested(health, 9 + QUIET_S, Recovery.SAFE), G, M) == [
        TroubleKind.RESTART_APP,
        TroubleKind.RESET_REQUIRED,
    ]
    health = rested(health, 10 + QUIET_S, Recovery.SAFE)
    assert kinds(health, G, M) == [None, TroubleKind.RESET_REQUIRED]


def test_what_counts_no_longer_has_recovered() -> None:
    health = after(WITH_PARTS, xid(62, 2), xid(79, 2, gi=1, ci=0), xid(62, 2, uuid=H), ecc(3))
    health = rejudged(health, Checks.of("62,79"))
    assert kinds(health, G, M, H) == [TroubleKind.RESET_REQUIRED, None, None]
    assert health.recovered == {M, H}
    assert kinds(rejudged(health, Checks.of("all"))) == [None]


def test_a_storm_of_different_errors_stays_small() -> None:
    health = after(seen(1), *(xid(200 + number, 2 + number) for number in range(500)))
    assert len(health.ills[G]) == 32
    trouble = health.trouble(G)
    assert trouble is not None
    assert "Xid 699" in trouble.reason


def test_gpus_that_went_are_forgotten_in_the_end() -> None:
    health = NodeHealth()
    for number in range(600):
        health = scanned(number, {f"GPU-{number}": Looked(number)})(health)
    assert len(health.looks) <= 257
