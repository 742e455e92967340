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
    rests_at,
    vouched,
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


def test_words_that_are_no_xid_are_told() -> None:
    assert Checks.of("48, x,-1 ", "y").malformed == ("x", "-1", "y")


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
        (8, TroubleKind.RESTART_APP),
        (69, TroubleKind.RESTART_APP),
        (94, TroubleKind.RESTART_APP),
        (48, TroubleKind.RESET_REQUIRED),
        (62, TroubleKind.RESET_REQUIRED),
        (64, TroubleKind.RESET_REQUIRED),
        (74, TroubleKind.RESET_REQUIRED),
        (79, TroubleKind.RESET_REQUIRED),
        (95, TroubleKind.RESET_REQUIRED),
        (119, TroubleKind.RESET_REQUIRED),
        (140, TroubleKind.RESET_REQUIRED),
        (151, TroubleKind.RESET_REQUIRED),
        (145, TroubleKind.UNKNOWN),
        (54, TroubleKind.UNKNOWN),
        (171, TroubleKind.UNKNOWN),
        (2**64 - 1, TroubleKind.UNKNOWN),
    ],
)
def test_what_an_xid_takes(number: int, kind: TroubleKind) -> None:
    assert judged(number, CHECKS).kind is kind


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (43, TroubleKind.RESTART_APP),
        (63, TroubleKind.RESTART_APP),
        (109, TroubleKind.RESET_REQUIRED),
        (999, TroubleKind.UNKNOWN),
    ],
)
def test_what_is_enabled_by_name_is_an_illness(number: int, kind: TroubleKind) -> None:
    assert judged(number, Checks.of("all", str(number))).kind is kind


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
        (xid(79, 2), {G}),
        (xid(79, 2, gi=1, ci=0), {M}),
        (xid(79, 2, gi=1), {M}),
        (xid(79, 2, gi=7, ci=0), {G}),
        (xid(79, 2, gi=1, ci=3), {G}),
        (xid(79, 2, uuid=H, gi=1, ci=0), {H}),
        (xid(13, 2), set()),
        (xid(13, 2, gi=1, ci=0), set()),
        (ecc(2), {G}),
    ],
    ids=[
        "an xid of the gpu",
        "of an instance",
        "of a gpu instance",
        "of an instance that nobody knows",
        "of a compute instance that nobody knows",
        "of another gpu's instance",
        "an application's",
        "an application's on an instance",
        "a double bit error",
    ],
)
def test_whom_an_error_marks(happened: Callable[[NodeHealth], NodeHealth], ill: set[str]) -> None:
    assert after(WITH_PARTS, happened).ills.keys() == ill


def test_a_gpu_instance_is_all_its_compute_instances() -> None:
    parts = {(1, 0): M, (1, 1): N, (2, 0): "MIG-o"}
    assert after(seen(1, partitions=parts), xid(79, 2, gi=1)).ills.keys() == {M, N}


def test_the_worst_counts() -> None:
    health = after(WITH_PARTS, xid(94, 2), xid(79, 3, gi=1, ci=0), xid(8, 4))
    assert kinds(health, G, M, N) == [TroubleKind.RESTART_APP, TroubleKind.RESET_REQUIRED, None]
    worst = health.trouble(M, G)
    assert worst is not None
    assert "Xid 79" in worst.reason


@pytest.mark.parametrize(
    ("steps", "left", "recovered"),
    [
        ((seen(1), xid(79, 2), seen(3), seen(4)), TroubleKind.RESET_REQUIRED, set()),
        ((seen(1), xid(79, 2), seen(3, failed=LOSS, lost=True), seen(4)), None, {G}),
        ((seen(1), xid(79, 2), seen(3, failed=LOSS, lost=True), seen(4, failed=LOSS), seen(5)), None, {G}),
        (
            (seen(1), xid(79, 2), seen(3, failed=replace(LOSS, kind=TroubleKind.RESTART_APP)), seen(4)),
            TroubleKind.RESET_REQUIRED,
            set(),
        ),
        ((seen(1), xid(79, 2), scanned(3, {H: Looked(3)}), seen(4)), None, {G}),
        ((seen(1), xid(79, 2), scanned(3, {H: Looked(3)}, released=G), seen(4)), TroubleKind.RESET_REQUIRED, set()),
        ((seen(1), xid(79, 2), seen(3, action=1), seen(4, action=0)), None, {G}),
        ((seen(1), xid(79, 2), seen(3, action=1), seen(4, action=None)), TroubleKind.RESET_REQUIRED, set()),
        ((seen(1), xid(79, 2), seen(3, action=1), seen(4, action=2)), TroubleKind.RESET_REQUIRED, set()),
        ((seen(1), xid(79, 2), seen(3, action=3), seen(4, action=0)), TroubleKind.RESET_REQUIRED, set()),
        ((seen(1), xid(79, 2), seen(3, remap_pending=True), seen(4, remap_pending=False)), None, {G}),
        ((seen(1), xid(79, 2), seen(3, remap_pending=True), seen(4)), TroubleKind.RESET_REQUIRED, set()),
        ((seen(1), seen(3, action=1), xid(79, 3.5), seen(4, action=0)), TroubleKind.RESET_REQUIRED, set()),
        ((seen(1), xid(999, 2), seen(3, action=1), seen(4, action=0)), None, {G}),
        ((seen(1), ecc(2), seen(3, action=4), seen(4, action=0)), None, {G}),
        ((seen(1), xid(79, 2), scanned(4, {G: Looked(4), H: Looked(4)}, reloaded=3)), None, {G, H}),
        (
            (seen(1), xid(79, 3.5), scanned(4, {G: Looked(4), H: Looked(4)}, reloaded=3)),
            TroubleKind.RESET_REQUIRED,
            {H},
        ),
        ((seen(1), xid(79, 3.5), seen(3.7), scanned(5, {G: Looked(5), H: Looked(5)}, reloaded=3)), None, {G, H}),
        ((seen(1), xid(79, 2), seen(3, action=1), xid(94, 3.5), seen(4, action=0)), TroubleKind.RESTART_APP, {G}),
        ((seen(1), xid(79, 2), seen(3, action=1), seen(4, action=0), xid(79, 5)), TroubleKind.RESET_REQUIRED, set()),
        ((seen(1), xid(79, 2), seen(3, action=1), seen(4, action=0), xid(94, 5)), TroubleKind.RESTART_APP, set()),
        ((seen(1), xid(79, 2), seen(3, action=1), seen(4, action=0), xid(13, 5)), None, {G}),
    ],
    ids=[
        "looks alone prove nothing",
        "lost and back",
        "lost, failing, and back",
        "failing and back is no reset",
        "gone and back",
        "released and back is no reset",
        "a wanted reset that isn't any more",
        "a driver that doesn't say any more",
        "another wish",
        "peer-to-peer traffic that ended",
        "a remap that was done",
        "a remap that isn't told any more",
        "an error after the last look may be newer than the reset",
        "an unknown error",
        "a double bit error",
        "a new load of the driver",
        "an error after the old driver was let go of",
        "an error before the last look, which a load that is told late ended all the same",
        "what only an application's end cures, and came after the last look, doesn't hide the reset",
        "ill again",
        "ill again, less",
        "an application's error is no illness",
    ],
)
def test_what_a_reset_ends(
    steps: tuple[Callable[[NodeHealth], NodeHealth], ...], left: TroubleKind | None, recovered: set[str]
) -> None:
    health = after(*steps)
    assert kinds(health) == [left]
    assert health.recovered == recovered


def test_a_reset_is_one_of_everything_on_the_gpu() -> None:
    health = after(
        WITH_PARTS, xid(79, 2, gi=1, ci=0), seen(3, partitions=PARTS, action=1), seen(4, partitions=PARTS, action=0)
    )
    assert kinds(health, G, M, N) == [None, None, None]
    assert health.recovered == {G, M, N}
    assert after(lambda _: health, xid(79, 5)).recovered == set()
    assert after(lambda _: health, xid(79, 5, gi=1, ci=0)).recovered == {G, N}


def test_a_partition_that_is_gone_leaves_nothing() -> None:
    health = after(WITH_PARTS, xid(79, 2, gi=1, ci=0), seen(3, partitions={(1, 0): "MIG-other"}))
    assert kinds(health, M, "MIG-other", G) == [None, None, None]


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


def test_where_all_checks_are_disabled_only_what_can_not_be_reached_is_ill() -> None:
    none = Checks.of("all")
    bad = Looked(2, action=1, remap_failed=True, remap_pending=True)
    health = looked(after(seen(1)), {G: bad, H: Looked(2, failed=LOSS)}, none, Recovery.SAFE, now=2)
    health = event(event(health, Event(G, 79), none, 3), Event(G, None), none, 3)
    assert kinds(health, G, H) == [None, TroubleKind.RESET_REQUIRED]


def test_restart_app_ends_by_quiet_and_nothing_else_does() -> None:
    health = after(WITH_PARTS, xid(94, 2), xid(8, 10), xid(79, 3, gi=1, ci=0))
    assert rests_at(health, Recovery.SAFE) == 2 + QUIET_S
    assert kinds(rested(health, 9 + QUIET_S, Recovery.SAFE), G, M) == [
        TroubleKind.RESTART_APP,
        TroubleKind.RESET_REQUIRED,
    ]
    health = rested(health, 10 + QUIET_S, Recovery.SAFE)
    assert kinds(health, G, M) == [None, TroubleKind.RESET_REQUIRED]
    assert rests_at(health, Recovery.SAFE) is None


def test_the_same_error_again_begins_the_quiet_anew() -> None:
    health = after(seen(1), xid(94, 2), xid(94, 50))
    assert rests_at(health, Recovery.SAFE) == 50 + QUIET_S


@pytest.mark.parametrize(
    "then",
    [
        scanned(4, {G: Looked(4, action=0, remap_pending=False)}, recovery=Recovery.OFF),
        scanned(4, {G: Looked(4)}, recovery=Recovery.OFF, reloaded=3.5),
        lambda health: rested(health, 1e6, Recovery.OFF),
    ],
    ids=["a reset", "a new load of the driver", "time"],
)
def test_nothing_recovers_by_itself_where_that_is_off(then: Callable[[NodeHealth], NodeHealth]) -> None:
    before = after(seen(1), xid(94, 2), xid(79, 2), seen(3, action=1, failed=None))
    health = then(before)
    assert health.ills[G] == before.ills[G]
    assert not health.recovered
    assert rests_at(health, Recovery.OFF) is None


@pytest.mark.parametrize("recovery", Recovery)
@pytest.mark.parametrize("asked", [[G], []], ids=["it", "all"])
def test_an_operators_word_ends_what_is_known(asked: list[str], recovery: Recovery) -> None:
    """Of the GPU and of all on it; but what the next look shows of it is there again."""
    ill = after(seen(1, partitions=PARTS), xid(48, 2), xid(94, 3, gi=1, ci=0), xid(79, 3, H))
    well = vouched(ill, asked)
    assert kinds(well, G, M) == [None, None]
    assert well.recovered >= {G, M, N}
    assert (well.trouble(H) is None) is (not asked)
    shown = looked(well, {G: Looked(4, partitions=PARTS, action=1), H: Looked(4)}, CHECKS, recovery, now=4)
    assert shown.trouble(G) is not None
    assert G not in shown.recovered


def test_what_counts_no_longer_has_recovered() -> None:
    health = after(WITH_PARTS, xid(62, 2), xid(79, 2, gi=1, ci=0), xid(62, 2, uuid=H), ecc(3))
    health = rejudged(health, Checks.of("62,79"))
    assert kinds(health, G, M, H) == [TroubleKind.RESET_REQUIRED, None, None]
    assert health.recovered == {M, H}
    assert kinds(rejudged(health, Checks.of("all"))) == [None]


def test_an_error_that_counts_by_the_new_settings_too_stays() -> None:
    health = rejudged(after(seen(1), xid(79, 2)), Checks.of("62"))
    assert kinds(health) == kinds(after(seen(1), xid(79, 2))) != [None]
    assert not health.recovered


def test_one_that_can_not_be_looked_at_stays_so_where_nothing_is_checked() -> None:
    health = rejudged(after(seen(1), xid(62, 2), seen(3, failed=LOSS)), Checks.of("all"))
    assert health.trouble(G) == LOSS
    assert not health.recovered


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
