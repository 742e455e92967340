"""What differs between the kubelet's records and ours: one row, one promise."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.model import Device, Health, PreferredRequest
from gateway.kubelet.drift import (
    GONE_AFTER,
    ILL_FOR,
    MOST_EARLIER,
    RECORDED_AFTER,
    Drift,
    Earlier,
    MismatchKind,
    steer,
)
from gateway.kubelet.view import View

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
) -> View:
    """A look: who holds what by List and by the checkpoint (``by`` one pod, or by one for each device); which pods there are."""

    def holders(ids: str | None, name: str) -> Mapping[str, Mapping[str, str]] | None:
        return None if ids is None else {R: {device_id: name.format(by or device_id) for device_id in ids}}

    return View(
        holders(held, "ns/pod-{}/main"),
        holders(written, "uid-{}/main"),
        None if allocatable is None else {R: frozenset(allocatable)},
        pods=None if pods is None else frozenset(f"ns/pod-{name}" for name in pods),
    )


def found(drift: Drift) -> dict[MismatchKind, str]:
    return {finding.kind: "".join(finding.device_ids) for finding in drift.findings}


def restarted(before: View, after: View, listed: str = "abcd") -> Drift:
    """A kubelet's start at 100 s, and the first look after it at 101 s."""
    return Drift(R).listed(devices(listed), 0).look(before, 99).restarted(100).look(after, 101)


FORGOT = restarted(seen("ab"), seen(""))


NO_PODS, STATIC = "", "s"


def looks(*pods: str | None, every: float = GONE_AFTER, held: str = "") -> Drift:
    """A kubelet's start that forgot pods a and b, and the looks after it, each with the pods that List names."""
    drift = FORGOT
    for number, named in enumerate(pods):
        drift = drift.look(seen(held, pods=named), 101 + every * (number + 1))
    return drift


@pytest.mark.parametrize(
    ("drift", "left"),
    [
        pytest.param(looks("bxy", "bxy"), "b", id="a pod is absent from a List that has the API server's pods"),
        pytest.param(looks("bxy"), "ab", id="absent once: the kubelet may be hearing of its pods just now"),
        pytest.param(looks("bxy", "bxy", every=GONE_AFTER / 2), "ab", id="not for long enough"),
        pytest.param(looks("bxy", "abxy", "bxy"), "ab", id="it was there in between"),
        pytest.param(looks(NO_PODS, NO_PODS), "ab", id="no pod at all: the API server is out of reach"),
        pytest.param(looks(STATIC, STATIC), "ab", id="one pod may be static"),
        pytest.param(looks("ab", "", ""), "", id="it was named before, and is no more"),
        pytest.param(looks("bxy", None, "bxy"), "b", id="List could not be read in between"),
        pytest.param(looks("bxy", None), "ab", id="List can't be read"),
        pytest.param(looks(None, None), "ab", id="there is no List"),
        pytest.param(looks("bxy").restarted(200).look(seen("", pods="bxy"), 201), "ab", id="a new kubelet has to hear of its pods first"),
        pytest.param(looks("ab").restarted(200).look(seen("", pods=""), 201).look(seen("", pods=""), 300), "ab", id="what another kubelet had named"),
        pytest.param(looks("abxy", "abxy", held="cd"), "ab", id="the pods are there"),
        pytest.param(Drift(R).load_saved({"a": (Earlier(("ns/pod-a/main", "uid-a/main"), 0),)}, {}).look(seen("", pods="axy"), 200).look(seen("", pods="axy"), 300), "a", id="the pod is there, and List never names its UID"),
    ],
)  # fmt: skip
def test_a_pod_is_gone_when_list_shows_it(drift: Drift, left: str) -> None:
    assert "".join(sorted(drift.forgotten)) == left


START = Drift(R).listed(devices("abcd"), 0).look(seen("ab"), 99).restarted(100)


@pytest.mark.parametrize(
    ("drift", "kinds"),
    [
        pytest.param(START.allocated("a", 101, 0).look(seen("ab", by="x"), 101.2), {MismatchKind.DOUBLED: "a"}, id="given before the first look, and to no one before"),
        pytest.param(START.look(seen("ab", by="x"), 101.2), {}, id="held without an Allocate: the kubelet remembers, our last look was too old"),
        pytest.param(START.allocated("a", 101, 0).look(seen("b"), 101.2).look(seen("ab", by="x"), 102), {MismatchKind.DOUBLED: "a"}, id="not recorded at first"),
        pytest.param(START.allocated("a", 101, 0).look(seen("ab"), 101.2).look(seen("ab"), 110), {}, id="its own pod asked again"),
        pytest.param(START.allocated("a", 101, 0).look(seen("ab", by="x", pods="xy"), 101.2), {}, id="its own pod is absent: it ended before"),
        pytest.param(START.allocated("a", 101, 0).look(seen("ab", by="x", pods="xy"), 101.2).look(seen("ab", by="x", pods="axy"), 110), {MismatchKind.DOUBLED: "a"}, id="no, it comes late"),
        pytest.param(START.allocated("a", 101, 0).look(seen("ab", by="x", pods="xy"), 101.2).look(seen("ab", by="x", pods="xy"), 103).look(seen("ab", by="x", pods="axy"), 110), {MismatchKind.DOUBLED: "a"}, id="and later still"),
        pytest.param(Drift(R).listed(devices("ab"), 0).look(seen("ab"), 99, 50.0).restarted(100, 60.0).look(seen(""), 101), {MismatchKind.FORGOTTEN: "ab"}, id="seen before this kubelet was there"),
        pytest.param(Drift(R).listed(devices("ab"), 0).look(seen("ab"), 98).look(seen(None, None), 99).restarted(100).look(seen(""), 101), {MismatchKind.FORGOTTEN: "ab"}, id="and not to be read at the last look before it"),
        pytest.param(Drift(R).listed(devices("ab"), 0).look(seen("ab"), 99, 50.0).restarted(100, 40.0).look(seen(""), 101), {}, id="seen of this kubelet, before we knew of it"),
        pytest.param(START.look(seen("", pods="xy"), 101).restarted(102).look(seen("", pods=""), 103), {MismatchKind.FORGOTTEN: "ab"}, id="one more kubelet, before that was known"),
        pytest.param(START.look(seen("", pods="xy"), 101).look(seen("", pods="xy"), 110), {}, id="drained before: no word of it"),
        pytest.param(START.look(seen("", pods="xy"), 101).look(seen("", pods="xy"), 200).look(seen("", pods="abxy"), 300), {}, id="nor later"),
        pytest.param(START.forget("a").look(seen(""), 101), {MismatchKind.FORGOTTEN: "b"}, id="an operator says so before the first look"),
        pytest.param(START.look(seen("", pods="xy"), 101).look(seen("", pods="abxy"), 110), {MismatchKind.FORGOTTEN: "ab"}, id="not drained: the kubelet hears of it late"),
        pytest.param(Drift(R).listed(devices("ab"), 0).allocated("a", 99, 0).restarted(100).look(seen(""), 101), {MismatchKind.FORGOTTEN: "a"}, id="given just before the start"),
        pytest.param(Drift(R).listed(devices("ab"), 0).allocated("a", 99, 0).restarted(100).look(seen("a"), 101).look(seen("a"), 110).look(seen(""), 111), {}, id="given just before, and remembered"),
    ],
)  # fmt: skip
def test_what_happens_right_after_a_start(drift: Drift, kinds: dict[MismatchKind, str]) -> None:
    assert found(drift) == kinds


def test_lost_again_and_again_stays_bounded() -> None:
    """Of those that aren't told apart, nothing can show that they are gone."""
    drift = FORGOT
    for number in range(2 * MOST_EARLIER):
        drift = drift.look(seen("a", by=f"x{number}"), 200 + 10 * number).restarted(203 + 10 * number)
        drift = drift.look(seen(""), 204 + 10 * number)
    assert len(drift.forgotten["a"]) == MOST_EARLIER
    for at in (1000, 2000):
        drift = drift.look(seen("", pods="pq"), at)
    assert drift.forgotten["a"] == (Earlier((), drift.forgotten["a"][0].at),)


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        pytest.param(("ns/p/main",), ("ns/p/init",), True, id="another container of the pod"),
        pytest.param(("ns/p/main",), ("ns/q/main",), False, id="another pod"),
        pytest.param(("uid/main",), ("ns/p/main", "uid/main"), True, id="known by its UID alone"),
        pytest.param(("ns/p/main", "uid/main"), (None, "uid/main"), True, id="List hasn't heard of it yet"),
        pytest.param(("ns/p/main", "uid/main"), ("ns/q/main", "uid/main"), False, id="the checkpoint is older than List"),
        pytest.param((), ("ns/p/main",), False, id="nobody knows who it was"),
    ],
)  # fmt: skip
def test_whose_device_it_is(before: tuple[str, ...], after: tuple[str | None, ...], same: bool) -> None:
    listed, written = (*after, None)[:2]
    records = View({R: {"a": listed}} if listed else {}, {R: {"a": written}} if written else {})
    drift = Drift(R).listed(devices("a"), 0).load_saved({"a": (Earlier(before, 0.0),)}, {})
    assert not drift.look(records, 100).forgotten if same else drift.look(records, 100).forgotten


@pytest.mark.parametrize(
    ("listed", "view", "differs"),
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
def test_what_differs(listed: str, view: View, differs: dict[MismatchKind, str]) -> None:
    assert found(Drift(R).listed(devices(listed), 0).look(view, RECORDED_AFTER)) == differs


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
    assert found(drift.look(seen(allocatable=""), 10.9)) == differs
    assert found(drift.look(seen(allocatable=""), 11)) == {MismatchKind.WITHHELD: "ab"}


@pytest.mark.parametrize("views", [[], [seen(None, None)]], ids=["no look since", "a look that knew nothing"])
def test_who_was_given_it_since_the_last_look_is_unknown(views: list[View]) -> None:
    """Who had it at that look has ended."""
    drift = Drift(R).listed(devices("ab"), 0).look(seen("a"), 9, 9.0).allocated("a", 9.5, 9.5)
    for view in views:
        drift = drift.look(view, 10, 10.0)
    assert drift.restarted(11).look(seen(""), 12).forgotten["a"] == (Earlier((), 9.5),)


def test_the_same_pod_forgotten_twice_is_one() -> None:
    before, later = Earlier(("ns/pod-a/main",), 5.0), Earlier(("ns/pod-a/main",), 6.0)
    drift = Drift(R).listed(devices("a"), 0).load_saved({"a": (before,)}, {"a": later})
    assert drift.restarted(10).look(seen(""), 11).forgotten == {"a": (later,)}


def test_words_stay_short() -> None:
    """Names from outside can be of any length, and hold anything."""
    long = "x" * 10_000 + "\n"
    drift = Drift(R).listed(devices("a"), 0).look(View({R: {long: long}}, {}), 10)
    assert len(drift.findings[0].words) < 500
    assert "\n" not in drift.findings[0].words


def test_words_are_made_of_what_is_named_alone() -> None:
    """A kubelet may tell of hundreds of thousands of devices, and the event loop waits for the words."""
    made = []

    class Holder(str):
        __slots__ = ()

        def __repr__(self) -> str:
            made.append(self)
            return "'a holder'"

    Drift(R).listed(devices("a"), 0).look(View({R: {str(one): Holder() for one in range(10)}}, {}), 10)
    assert len(made) == 3


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
