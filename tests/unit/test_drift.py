"""What differs between the kubelet's books and ours: one row, one promise."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.model import Device, Health, PreferredRequest
from gateway.drift import BOOKED_AFTER, DRIFT_FOR, ILL_FOR, REBOOKED_AFTER, Drift, Kind, steer
from gateway.kubelet_view import View

R = "nvidia.com/gpu"


def devices(text: str) -> list[Device]:
    """A letter a device; capitals are ill."""
    return [Device(x.lower(), Health.HEALTHY if x.islower() else Health.UNHEALTHY) for x in text]


def seen(held: str | None = None, remembered: str | None = "", allocatable: str | None = None) -> View:
    def holders(ids: str | None) -> Mapping[str, Mapping[str, str]] | None:
        return None if ids is None else {R: {device_id: f"ns/pod-{device_id}/main" for device_id in ids}}

    return View(holders(held), holders(remembered), None if allocatable is None else {R: frozenset(allocatable)})


def found(drift: Drift) -> dict[Kind, str]:
    return {finding.kind: "".join(finding.device_ids) for finding in drift.findings}


def restarted(before: View, after: View, listed: str = "abcd") -> Drift:
    """A kubelet's start at 100 s, and the first look after it at 101 s."""
    return Drift(R).listed(devices(listed), 0).look(before, 99).restarted(100).look(after, 101)


@pytest.mark.parametrize(
    ("before", "after", "forgotten"),
    [
        pytest.param(seen("ab"), seen("ab"), "", id="remembered"),
        pytest.param(seen("ab"), seen(""), "ab", id="lost or unreadable: the books are empty"),
        pytest.param(seen("ab"), seen("ac"), "b", id="lost, and a device is given again"),
        pytest.param(seen("ab"), seen("", "ab"), "", id="List has no pods yet, the checkpoint has"),
        pytest.param(seen("ab"), seen("", None), "", id="List has no pods yet, and the checkpoint can't be read"),
        pytest.param(seen("ab"), seen(None, None), "", id="nothing is known, nothing is claimed"),
        pytest.param(seen("a", "b"), seen("a"), "", id="an ended pod's, freed at last"),
        pytest.param(seen(None, None), seen(""), "", id="never seen before"),
        pytest.param(seen("az"), seen("a"), "", id="a device that we don't list"),
    ],
)
def test_what_a_kubelet_forgot(before: View, after: View, forgotten: str) -> None:
    assert "".join(sorted(restarted(before, after).forgotten)) == forgotten


def test_without_a_restart_a_pod_has_ended() -> None:
    assert not Drift(R).listed(devices("ab"), 0).look(seen("ab"), 10).look(seen(""), 20).findings


def test_the_old_file_is_no_proof_of_memory() -> None:
    """The kubelet writes its checkpoint with our first list: until then its predecessor's is there."""
    early = restarted(seen("ab"), seen("ab"))
    assert found(early.look(seen(""), 102)) == {Kind.FORGOTTEN: "ab"}
    late = early.look(seen("ab"), 100 + REBOOKED_AFTER)
    assert not late.look(seen(""), 200).findings, "a pod that ends later has ended"


def test_twenty_kubelets_in_a_row_are_compared_with_what_was_held_before_them() -> None:
    drift = Drift(R).listed(devices("ab"), 0).look(seen("ab"), 99)
    for second in range(20):
        drift = drift.restarted(100 + second)
    assert found(drift.look(seen(""), 120)) == {Kind.FORGOTTEN: "ab"}


FORGOT = restarted(seen("ab"), seen(""))


@pytest.mark.parametrize(
    ("drift", "left"),
    [
        pytest.param(FORGOT.look(seen(""), 200), "ab", id="goes on"),
        pytest.param(FORGOT.look(seen(None, None), 200), "ab", id="goes on while nothing is known"),
        pytest.param(FORGOT.look(seen("a"), 200), "b", id="held again"),
        pytest.param(FORGOT.look(seen("", "a"), 200), "b", id="held again by the checkpoint"),
        pytest.param(FORGOT.listed(devices("bcd"), 200), "b", id="listed no more"),
        pytest.param(FORGOT.forget("a"), "b", id="an operator says so"),
        pytest.param(FORGOT.forget("a").look(seen(""), 102), "b", id="and it isn't found again"),
        pytest.param(FORGOT.look(seen(""), 101 + DRIFT_FOR - 1), "ab", id="almost a day"),
        pytest.param(FORGOT.look(seen(""), 101 + DRIFT_FOR), "", id="a day"),
    ],
)
def test_when_it_ends(drift: Drift, left: str) -> None:
    assert found(drift).get(Kind.FORGOTTEN, "") == left


@pytest.mark.parametrize(
    ("listed", "view", "differs"),
    [
        pytest.param("abC", seen("a", allocatable="ab"), {}, id="as it should be"),
        pytest.param("ab", seen("ay"), {Kind.UNLISTED: "y"}, id="held and not listed"),
        pytest.param("ab", seen("a", "y"), {}, id="an ended pod's may be listed no more"),
        pytest.param("abc", seen(allocatable="a"), {Kind.WITHHELD: "bc"}, id="healthy, and not to be given"),
        pytest.param("ab", seen(allocatable=""), {Kind.WITHHELD: "ab"}, id="the endpoint is stopped"),
        pytest.param("aB", seen(allocatable="abz"), {Kind.SURPLUS: "bz"}, id="to be given, and not healthy"),
        pytest.param("ab", seen(allocatable=None), {}, id="a kubelet that can't say"),
    ],
)
def test_what_differs(listed: str, view: View, differs: dict[Kind, str]) -> None:
    assert found(Drift(R).listed(devices(listed), 0).look(view, BOOKED_AFTER)) == differs


@pytest.mark.parametrize(
    ("drift", "differs"),
    [
        pytest.param(Drift(R).listed(devices("ab"), 10), {}, id="a list that was just sent"),
        pytest.param(Drift(R).listed(devices("ab"), 0).listed(devices("ab"), 10), {Kind.WITHHELD: "ab"}, id="the same list, sent again"),
        pytest.param(Drift(R).listed(devices("aB"), 0).listed(devices("ab"), 10), {}, id="a device that just came back"),
        pytest.param(Drift(R).listed(devices("ab"), 0).restarted(10), {}, id="a kubelet that just started"),
    ],
)  # fmt: skip
def test_a_kubelet_takes_a_moment_to_book(drift: Drift, differs: dict[Kind, str]) -> None:
    assert found(drift.look(seen(allocatable=""), 10.9)) == differs
    assert found(drift.look(seen(allocatable=""), 11)) == {Kind.WITHHELD: "ab"}


def test_words_for_a_person() -> None:
    drift = restarted(seen("abcd"), seen("y"), "abcd")
    forgotten, unlisted = (finding.words for finding in drift.findings)
    assert "devices of nvidia.com/gpu" in forgotten
    assert "'a' (then held by 'ns/pod-a/main')" in forgotten
    assert "1 more. " in forgotten
    assert "'d'" not in forgotten
    assert "'y' (held by 'ns/pod-y/main'; not given by this gateway)" in unlisted
    assert "; given by this gateway" in drift.look(seen("y"), 102, frozenset("y")).findings[1].words


def test_words_stay_short() -> None:
    """Names from outside can be of any length, and hold anything."""
    long = "x" * 10_000 + "\n"
    drift = Drift(R).listed(devices("a"), 0).look(View({R: {long: long}}, {}), 10)
    assert len(drift.findings[0].words) < 500
    assert "\n" not in drift.findings[0].words


@pytest.mark.parametrize(
    ("drift", "now", "avoid"),
    [
        pytest.param(Drift(R).listed(devices("abc"), 0), 0, "", id="all are well"),
        pytest.param(Drift(R).listed(devices("aBc"), 0), 10 * ILL_FOR, "b", id="ill for long"),
        pytest.param(Drift(R).listed(devices("aBc"), 0).listed(devices("abc"), 700), 701, "b", id="ill of late"),
        pytest.param(Drift(R).listed(devices("aBc"), 0).listed(devices("abc"), 0), ILL_FOR, "", id="ill some time ago"),
        pytest.param(Drift(R).listed(devices("aBc"), 0).listed(devices("ac"), 1), 2, "", id="ill and gone"),
        pytest.param(FORGOT, 102, "ab", id="forgotten"),
        pytest.param(Drift(R).listed(devices("aB"), 0).look(seen(allocatable="abz"), 10), 10, "bz", id="not listed as well"),
        pytest.param(FORGOT.listed(devices("abcD"), 102).listed(devices("aBcd"), 103), 103, "dab", id="the least bad first"),
    ],
)  # fmt: skip
def test_what_is_given_last(drift: Drift, now: float, avoid: str) -> None:
    assert "".join(drift.avoid(now)) == avoid


@pytest.mark.parametrize(
    ("available", "must", "size", "avoid", "offered"),
    [
        pytest.param("abcd", "", 2, "", "abcd", id="nothing to avoid"),
        pytest.param("abcd", "", 2, "ab", "cd", id="enough others"),
        pytest.param("dcba", "", 1, "b", "dca", id="in the order that came"),
        pytest.param("abcd", "a", 2, "ab", "acd", id="what must be included stays"),
        pytest.param("abcd", "a", 1, "abcd", "a", id="and is all that it takes"),
        pytest.param("abcd", "", 3, "bca", "bcd", id="the least bad of the others, no more than it takes"),
        pytest.param("ab", "", 2, "ab", "ab", id="nothing else is there"),
        pytest.param("ab", "", 3, "ab", "ab", id="too few, as before"),
        pytest.param("ab", "z", 1, "z", "ab", id="a wrong request stays as wrong"),
    ],
)
def test_steering(available: str, must: str, size: int, avoid: str, offered: str) -> None:
    request = PreferredRequest(tuple(available), tuple(must), size)
    assert steer(request, tuple(avoid)) == PreferredRequest(tuple(offered), tuple(must), size)


ids = st.lists(st.sampled_from("abcdefgh"), unique=True).map(tuple)


@given(ids, st.data(), ids)
def test_steering_never_makes_a_request_fail(
    available: tuple[str, ...], data: st.DataObject, avoid: tuple[str, ...]
) -> None:
    must = data.draw(st.lists(st.sampled_from(available), unique=True).map(tuple) if available else st.just(()))
    size = data.draw(st.integers(len(must), len(available)))
    offered = frozenset(steer(PreferredRequest(available, must, size), avoid).available)
    assert offered <= frozenset(available)
    assert offered >= frozenset(must)
    assert len(offered) >= size
    needed = max(0, size - len(frozenset(available) - frozenset(avoid) | frozenset(must)))
    assert len(offered & frozenset(avoid) - frozenset(must)) == needed
