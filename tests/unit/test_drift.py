"""What differs between the kubelet's records and ours: one row, one promise."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.model import Device, Health, PreferredRequest
from gateway.kubelet.drift import (
    ILL_FOR,
    RECORDED_AFTER,
    Drift,
    MismatchKind,
    steer,
)
from gateway.kubelet.records import Records

R = "nvidia.com/gpu"


def devices(text: str) -> list[Device]:
    """A letter a device; capitals are ill."""
    return [Device(x.lower(), Health.HEALTHY if x.islower() else Health.UNHEALTHY) for x in text]


def seen(
    held: str | None = None,
    written: str | None = "",
    allocatable: str | None = None,
    *,
    by: str = "",
    pods: str | None = None,
) -> Records:
    """A look: who holds what by List and by the checkpoint (``by`` one pod, or by one for each device); which pods there are."""

    def holders(ids: str | None, name: str) -> Mapping[str, Mapping[str, str]] | None:
        return None if ids is None else {R: {device_id: name.format(by or device_id) for device_id in ids}}

    return Records(
        holders(held, "ns/pod-{}/main"),
        holders(written, "uid-{}/main"),
        None if allocatable is None else {R: frozenset(allocatable)},
        pods=None if pods is None else frozenset(f"ns/pod-{name}" for name in pods),
    )


def found(drift: Drift) -> dict[MismatchKind, str]:
    return {finding.kind: "".join(finding.device_ids) for finding in drift.differs}


@pytest.mark.parametrize(
    ("listed", "records", "differs"),
    [
        pytest.param("abC", seen("a", allocatable="ab"), {}, id="as it should be"),
        pytest.param("ab", seen("ay"), {MismatchKind.UNLISTED: "y"}, id="held and not listed"),
        pytest.param("ab", seen("a", "y"), {}, id="an ended pod's may be listed no more"),
        pytest.param("abc", seen(allocatable="a"), {MismatchKind.WITHHELD: "bc"}, id="healthy, and not to be given"),
        pytest.param("ab", seen(allocatable=""), {MismatchKind.WITHHELD: "ab"}, id="the endpoint is stopped"),
        pytest.param("aB", seen(allocatable="abz"), {MismatchKind.SURPLUS: "bz"}, id="to be given, and not healthy"),
        pytest.param("ab", seen(allocatable=None), {}, id="a kubelet that can't say"),
    ],
)
def test_what_differs(listed: str, records: Records, differs: dict[MismatchKind, str]) -> None:
    assert found(Drift(R).listed(devices(listed), 0).looked(records, RECORDED_AFTER)) == differs


@pytest.mark.parametrize(
    ("drift", "differs"),
    [
        pytest.param(Drift(R).listed(devices("ab"), 10), {}, id="a list that was just sent"),
        pytest.param(Drift(R).listed(devices("ab"), 0).listed(devices("ab"), 10), {MismatchKind.WITHHELD: "ab"}, id="the same list, sent again"),
        pytest.param(Drift(R).listed(devices("aB"), 0).listed(devices("ab"), 10), {}, id="a device that just came back"),
        pytest.param(Drift(R).listed(devices("ab"), 0).restarted(10), {}, id="a kubelet that just started"),
    ],
)  # fmt: skip
def test_a_kubelet_takes_a_moment_to_record(drift: Drift, differs: dict[MismatchKind, str]) -> None:
    assert found(drift.looked(seen(allocatable=""), 10.9)) == differs
    assert found(drift.looked(seen(allocatable=""), 11)) == {MismatchKind.WITHHELD: "ab"}


def test_words_stay_short() -> None:
    """Names from outside can be of any length, and hold anything."""
    long = "x" * 10_000 + "\n"
    drift = Drift(R).listed(devices("a"), 0).looked(Records({R: {long: long}}, {}), 10)
    assert len(drift.differs[0].words) < 500
    assert "\n" not in drift.differs[0].words


def test_words_are_made_of_what_is_named_alone() -> None:
    """A kubelet may tell of hundreds of thousands of devices, and the event loop waits for the words."""
    made = []

    class Holder(str):
        __slots__ = ()

        def __repr__(self) -> str:
            made.append(self)
            return "'a holder'"

    Drift(R).listed(devices("a"), 0).looked(Records({R: {str(one): Holder() for one in range(10)}}, {}), 10)
    assert len(made) == 3


@pytest.mark.parametrize(
    ("drift", "now", "forgotten", "avoid"),
    [
        pytest.param(Drift(R).listed(devices("abc"), 0), 0, "", "", id="all are well"),
        pytest.param(Drift(R).listed(devices("aBc"), 0), 10 * ILL_FOR, "", "b", id="ill for long"),
        pytest.param(Drift(R).listed(devices("aBc"), 0).listed(devices("abc"), 700), 701, "", "b", id="ill of late"),
        pytest.param(Drift(R).listed(devices("aBc"), 0).listed(devices("abc"), 0), ILL_FOR, "", "", id="ill some time ago"),
        pytest.param(Drift(R).listed(devices("aBc"), 0).listed(devices("ac"), 1), 2, "", "", id="ill and gone"),
        pytest.param(Drift(R).listed(devices("abc"), 0), 102, "ab", "ab", id="forgotten"),
        pytest.param(Drift(R).listed(devices("aB"), 0).looked(seen(allocatable="abz"), 10), 10, "", "bz", id="not listed as well"),
        pytest.param(Drift(R).listed(devices("abcD"), 102).listed(devices("aBcd"), 103), 103, "ab", "dab", id="the least bad first"),
    ],
)  # fmt: skip
def test_what_is_given_last(drift: Drift, now: float, forgotten: str, avoid: str) -> None:
    assert "".join(drift.avoid(now, frozenset(forgotten))) == avoid


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
