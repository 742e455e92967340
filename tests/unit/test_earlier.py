"""Which pods of an earlier kubelet may still hold a device: one row, one promise."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from gateway.kubelet import drift, earlier
from gateway.kubelet.drift import MismatchKind
from gateway.kubelet.earlier import GONE_AFTER, MOST_EARLIER, RECORDED_WITHIN, WRITTEN_AFTER, Absences, Earlier
from gateway.kubelet.records import Records
from gateway.memory.ledger import Ledger
from tests.unit.test_drift import R, seen


class History:
    """A resource's rows of the state file, and what happens to them; each time is one of both clocks."""

    def __init__(self, held: str = "", pods: tuple[Earlier, ...] = ()) -> None:
        self.rows = Ledger(Path("nowhere"))
        self.rows.set_earlier(R, {"a": pods} if pods else {})
        self.absences, self.last, self.started = Absences(), Records(), -WRITTEN_AFTER
        if held:
            self.look(seen(held), 99)

    def allocated(self, device_id: str, at: float) -> History:
        self.rows.hand_out(R, [device_id], "v1beta1", at)
        return self

    def look(self, records: Records, at: float) -> History:
        rows, given = self.rows.earlier(R), self.rows.handed_out(R)
        self.absences = self.absences.looked(earlier.pods(rows), records.pods, at)
        settled = at - self.started >= WRITTEN_AFTER
        self.rows.set_earlier(R, earlier.looked(R, rows, given, records, self.absences, at, settled=settled))
        if records.held is not None:
            self.last = records
            asked = earlier.in_question(self.rows.earlier(R))
            held = {one: given[one].names for one in asked if one in given}
            held |= {one: records.names_of(R, one) for one in records.holders(R)}
            self.rows.rebuild_handed_out(R, held, at - RECORDED_WITHIN, at)
        return self

    def restarted(self, at: float) -> History:
        self.rows.set_earlier(R, earlier.restarted(self.rows.earlier(R), self.rows.handed_out(R)))
        self.absences, self.started = Absences(), at
        return self

    def forget(self, device_id: str) -> History:
        self.rows.set_earlier(R, {one: row for one, row in self.rows.earlier(R).items() if one != device_id})
        return self

    @property
    def forgotten(self) -> dict[str, tuple[Earlier, ...]]:
        return earlier.forgotten(self.rows.earlier(R))

    @property
    def found(self) -> dict[MismatchKind, str]:
        rows, given = self.rows.earlier(R), self.rows.handed_out(R)
        told = drift.forgotten(R, rows, given, self.last.holders(R))
        return {finding.kind: "".join(finding.device_ids) for finding in told}


def forgot() -> History:
    """A kubelet's start at 100 s that forgot pods a and b, and the first look after it at 101 s."""
    return History("ab").restarted(100).look(seen(""), 101)


NO_PODS, STATIC = "", "s"


def looks(*pods: str | None, every: float = GONE_AFTER, held: str = "") -> History:
    """The looks after such a start, each with the pods that List names."""
    history = forgot()
    for number, named in enumerate(pods):
        history.look(seen(held, pods=named), 101 + every * (number + 1))
    return history


@pytest.mark.parametrize(
    ("history", "left"),
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
        pytest.param(History(pods=(Earlier(("ns/pod-a/main", "uid-a/main"), 0, forgotten=True),)).look(seen("", pods="axy"), 200).look(seen("", pods="axy"), 300), "a", id="the pod is there, and List never names its UID"),
    ],
)  # fmt: skip
def test_a_pod_is_gone_when_list_shows_it(history: History, left: str) -> None:
    assert "".join(sorted(history.forgotten)) == left


def start() -> History:
    return History("ab").restarted(100)


@pytest.mark.parametrize(
    ("history", "kinds"),
    [
        pytest.param(start().allocated("a", 101).look(seen("ab", by="x"), 101.2), {MismatchKind.DOUBLED: "a"}, id="given before the first look, and to no one before"),
        pytest.param(start().look(seen("ab", by="x"), 101.2), {}, id="held without an Allocate: the kubelet remembers, our last look was too old"),
        pytest.param(start().allocated("a", 101).look(seen("b"), 101.2).look(seen("ab", by="x"), 102), {MismatchKind.DOUBLED: "a"}, id="not recorded at first"),
        pytest.param(start().allocated("a", 101).look(seen("ab"), 101.2).look(seen("ab"), 110), {}, id="its own pod asked again"),
        pytest.param(start().allocated("a", 101).look(seen("ab", by="x", pods="xy"), 101.2), {}, id="its own pod is absent: it ended before"),
        pytest.param(start().allocated("a", 101).look(seen("ab", by="x", pods="xy"), 101.2).look(seen("ab", by="x", pods="axy"), 110), {MismatchKind.DOUBLED: "a"}, id="no, it comes late"),
        pytest.param(start().allocated("a", 101).look(seen("ab", by="x", pods="xy"), 101.2).look(seen("ab", by="x", pods="xy"), 103).look(seen("ab", by="x", pods="axy"), 110), {MismatchKind.DOUBLED: "a"}, id="and later still"),
        pytest.param(History("ab").restarted(100).look(seen(""), 101), {MismatchKind.FORGOTTEN: "ab"}, id="the kubelet names none of them"),
        pytest.param(History("ab").look(seen(None, None), 99.5).restarted(100).look(seen(""), 101), {MismatchKind.FORGOTTEN: "ab"}, id="and its records could not be read at the last look before"),
        pytest.param(start().look(seen("", None), 101), {}, id="the checkpoint can't be read: that says nothing"),
        pytest.param(History().look(seen("ab", "ab"), 99).look(seen("", "ab", pods="xy"), 99.5).restarted(100).look(seen("", pods="xy"), 101).look(seen("", pods="xy"), 140), {}, id="ended, and only the checkpoint of the kubelet before still named them"),
        pytest.param(start().look(seen("", pods="xy"), 101).restarted(102).look(seen("", pods=""), 103), {MismatchKind.FORGOTTEN: "ab"}, id="one more kubelet, before that was known"),
        pytest.param(start().look(seen("", "ab", pods=""), 101).look(seen("", "ab", pods=""), 110).restarted(120).look(seen(""), 121), {MismatchKind.FORGOTTEN: "ab"}, id="one that kept its records and never reached the API server, then one that lost them"),
        pytest.param(start().look(seen("", pods="xy"), 101).look(seen("", pods="xy"), 110), {}, id="drained before: no word of it"),
        pytest.param(start().look(seen("", pods="xy"), 101).look(seen("", pods="xy"), 200).look(seen("", pods="abxy"), 300), {}, id="nor later"),
        pytest.param(start().forget("a").look(seen(""), 101), {MismatchKind.FORGOTTEN: "b"}, id="an operator says so before the first look"),
        pytest.param(start().look(seen("", pods="xy"), 101).look(seen("", pods="abxy"), 110), {MismatchKind.FORGOTTEN: "ab"}, id="not drained: the kubelet hears of it late"),
        pytest.param(History().allocated("a", 99).restarted(100).look(seen(""), 101), {MismatchKind.FORGOTTEN: "a"}, id="given just before the start"),
        pytest.param(History().allocated("a", 99).restarted(100).look(seen("a"), 101).look(seen("a"), 110).look(seen(""), 111), {}, id="given just before, and remembered"),
    ],
)  # fmt: skip
def test_what_happens_right_after_a_start(history: History, kinds: dict[MismatchKind, str]) -> None:
    assert history.found == kinds


def test_lost_again_and_again_stays_bounded() -> None:
    """Of those that aren't told apart, nothing can show that they are gone."""
    history = forgot()
    for number in range(2 * MOST_EARLIER):
        at = 200 + 10 * number
        history.look(seen("a", by=f"x{number}"), at).look(seen("a", by=f"x{number}"), at + 2)
        history.restarted(at + 3).look(seen(""), at + 4)
    assert len(history.forgotten["a"]) == MOST_EARLIER
    for at in (1000, 2000):
        history.look(seen("", pods="pq"), at)
    assert [one.names for one in history.forgotten["a"]] == [()]


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
    records = Records({R: {"a": listed}} if listed else {}, {R: {"a": written}} if written else {})
    history = History(pods=(Earlier(before, 0.0, forgotten=True),)).look(records, 100)
    assert bool(history.forgotten) is not same


@pytest.mark.parametrize("records", [None, seen(None, None)], ids=["no look since", "a look that knew nothing"])
def test_who_was_given_it_since_the_last_look_is_unknown(records: Records | None) -> None:
    """Who had it at that look has ended."""
    history = History().look(seen("a"), 9).allocated("a", 9.5)
    if records is not None:
        history.look(records, 10)
    assert history.restarted(11).look(seen(""), 12).forgotten["a"] == (Earlier((), 9.5, forgotten=True),)


def test_the_same_pod_forgotten_twice_is_one() -> None:
    before = Earlier(("ns/pod-a/main",), 5.0, forgotten=True)
    history = History(pods=(before,)).allocated("a", 6.0)
    history.rows.rebuild_handed_out(R, {"a": before.names}, 7.0)
    assert history.restarted(10).look(seen(""), 11).forgotten == {"a": (Earlier(before.names, 6.0, forgotten=True),)}


def test_it_ends_by_an_operator_s_word_and_not_with_the_list() -> None:
    assert forgot().forget("a").forgotten.keys() == {"b"}
    history = forgot()
    history.rows.withdraw(R, ["a", "b"])  # Their containers go on when a device isn't offered.
    assert history.forgotten.keys() == {"a", "b"}


class World:
    """Pods on four devices, and a kubelet that restarts, with or without its records, and hears of its pods late."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)  # noqa: S311 - no secret
        self.history, self.now, self.pods = History(), 1000.0, 0
        self.has: dict[str, str] = {}
        """The device of each pod that runs."""
        self.records: dict[str, str] = {}
        """The kubelet's records: the pod of each device."""
        self.heard = True

    def step(self) -> None:
        self.now += self.chance.choice([0.3, 2, 7, 40])
        match self.chance.choice(["admit", "end", "look", "look", "restart", "hear"]):
            case "admit" if free := [one for one in "abcd" if one not in self.records]:
                self.pods += 1
                pod, device_id = f"{self.pods}", self.chance.choice(free)
                self.has[pod] = self.records[device_id] = device_id
                self.records[device_id] = pod
                self.heard = True  # The API server's pods come together.
                self.history.allocated(device_id, self.now)
            case "end" if self.has:
                pod = self.chance.choice(sorted(self.has))
                if self.records.get(device_id := self.has.pop(pod)) == pod:
                    del self.records[device_id]
            case "look":
                self.look()
            case "restart":
                self.look()  # A gateway looks after each event; a kubelet that dies before that is a row above.
                self.now += 2
                if self.chance.random() < 0.5:
                    self.records.clear()
                self.heard = False
                self.history.restarted(self.now)
            case _:
                self.heard = True

    def look(self) -> None:
        known = {*self.has} if self.heard else set()
        self.history.look(
            Records(
                {R: {one: f"ns/pod-{pod}/main" for one, pod in self.records.items() if pod in known}},
                {R: {one: f"uid-{pod}/main" for one, pod in self.records.items()}},
                pods=frozenset(f"ns/pod-{pod}" for pod in known)
                | (frozenset({"ns/x-1", "ns/y-2"}) if self.heard else set()),
            ),
            self.now,
        )

    @property
    def lost(self) -> set[str]:
        """The pods that neither the kubelet's records nor the state file's rows have."""
        doubtful = self.history.rows.earlier(R).keys()
        return {pod for pod, one in self.has.items() if self.records.get(one) != pod and one not in doubtful}


@pytest.mark.parametrize("seed", range(40))
def test_no_holder_is_lost_and_none_stays_for_ever(seed: int) -> None:
    world = World(seed)
    for _ in range(60):
        world.step()
        assert not world.lost
    world.heard = True
    for pod in [*world.has]:
        world.records.pop(world.has.pop(pod), None)
    for _ in range(4):
        world.now += GONE_AFTER
        world.look()
    left = [one for rows in world.history.rows.earlier(R).values() for one in rows]
    assert not [
        one for one in left if one.names and one.names[0].startswith("ns/")
    ]  # List never shows that a UID is gone.
