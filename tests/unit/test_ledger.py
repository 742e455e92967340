"""The ledger: what is news to it, what is kept of a damaged file, and what a disk may do to it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.life.merging import Sticky
from devices.model import Device, Health, Trouble, TroubleKind
from gateway.kubelet.earlier import Earlier
from gateway.memory import salvage
from gateway.memory.claimed import Claimed
from gateway.memory.file import LedgerError
from gateway.memory.ledger import Ledger
from gateway.memory.rows import FORMAT, Cordon
from gateway.sides.side import Side

GPU = "nvidia.com/gpu"
WELL, ILL = Device("GPU-1", Health.HEALTHY, (0,)), Device("GPU-1", Health.UNHEALTHY, (0,))
OTHER = Device("GPU-2")
SMELLS, HUMS = Cordon("smells", 1.0), Cordon("hums", 2.0)
XID = Sticky(Trouble("Xid 79", TroubleKind.RESET_REQUIRED), 3.0, "boot-1")
CLAIMED = Claimed("default", "one", "gpu.example.com", 1.0)
FORGOTTEN = Earlier(("ns/pod/main", "uid/main"), 4.0, forgotten=True)


def write(ledger: Ledger) -> Ledger:
    snapshot = ledger.snapshot()
    ledger.settle(snapshot, ledger.save(snapshot))
    return ledger


def loaded(folder: Path) -> Ledger:
    ledger = Ledger(folder)
    ledger.load()
    return ledger


def salvaged(ledger: Ledger) -> str:
    """Load a ledger that can't be read in full; return what was said."""
    before = ledger.revision
    with pytest.raises(LedgerError) as caught:
        ledger.load()
    assert ledger.pending >= ledger.revision - before > 0, "what was salvaged is written"
    return str(caught.value)


def filled(folder: Path) -> Ledger:
    """A ledger with something of everything, not written yet."""
    ledger = Ledger(folder)
    ledger.announce(GPU, (WELL, OTHER))
    ledger.accept("v1alpha2")
    ledger.cordon("GPU-1", SMELLS)
    ledger.set_claim("uid", CLAIMED)
    ledger.set_side("GPU-1", Side.DRA)
    ledger.set_sticky(GPU, {"GPU-2": XID})
    ledger.set_lost_since(GPU, {"GPU-2": 5.0})
    ledger.hand_out(GPU, ["GPU-1"], "0.1", 4.0)
    ledger.set_earlier(GPU, {"GPU-2": (FORGOTTEN,)})
    return ledger


def everything(ledger: Ledger) -> dict[str, Any]:
    return {
        "accepted": ledger.accepted,
        "cordons": ledger.cordons,
        "claims": ledger.claims,
        "sides": ledger.sides,
        "announced": {name: ledger.announced(name) for name in ledger.resources()},
        "sticky": {name: ledger.sticky(name) for name in ledger.resources()},
        "lost": {name: ledger.lost_since(name) for name in ledger.resources()},
        "handed out": {name: ledger.handed_out(name) for name in ledger.resources()},
        "earlier": {name: ledger.earlier(name) for name in ledger.resources()},
    }


# What is remembered.


@pytest.mark.parametrize(
    ("note", "news"),
    [
        pytest.param(lambda one: one.announce(GPU, (Device("GPU-3"),)), True, id="a new ID"),
        pytest.param(lambda one: one.announce(GPU, (WELL,)), False, id="an ID less: it stays known"),
        pytest.param(lambda one: one.announce(GPU, (ILL, OTHER)), True, id="another health"),
        pytest.param(lambda one: one.announce(GPU, (Device("GPU-2", numa_nodes=(1,)),)), True, id="another place"),
        pytest.param(lambda one: one.withdraw(GPU, ["GPU-1"]), True, id="an ID withdrawn"),
        pytest.param(lambda one: one.withdraw(GPU, ["GPU-9"]), False, id="an unknown ID withdrawn"),
        pytest.param(lambda one: one.accept("v1beta1"), True, id="another dialect"),
        pytest.param(lambda one: one.accept("v1alpha2"), False, id="the same dialect"),
        pytest.param(lambda one: one.set_sticky(GPU, {"GPU-2": XID}), False, id="the same illness"),
        pytest.param(lambda one: one.set_sticky(GPU, {"GPU-1": XID, "GPU-2": XID}), True, id="an illness"),
        pytest.param(lambda one: one.set_sticky(GPU, {}), True, id="a recovery"),
        pytest.param(lambda one: one.set_lost_since(GPU, {"GPU-2": 5.0}), False, id="lost as before"),
        pytest.param(lambda one: one.set_lost_since(GPU, {"GPU-1": 6.0, "GPU-2": 5.0}), True, id="one more is lost"),
        pytest.param(lambda one: one.set_lost_since(GPU, {}), True, id="a lost one is back"),
        pytest.param(lambda one: one.uncordon("GPU-1"), True, id="a cordon lifted"),
        pytest.param(lambda one: one.uncordon("GPU-2"), False, id="no cordon to lift"),
        pytest.param(lambda one: one.set_counted(GPU, ["GPU-1"]), True, id="the kubelet counts it"),
        pytest.param(lambda one: one.set_earlier(GPU, {"GPU-2": (FORGOTTEN,)}), False, id="forgotten as before"),
        pytest.param(lambda one: one.set_earlier(GPU, {}), True, id="forgotten no longer"),
        pytest.param(lambda one: one.rebuild_handed_out(GPU, {"GPU-1": ()}, 9.0), False, id="the kubelet agrees"),
        pytest.param(lambda one: one.rebuild_handed_out(GPU, {}, 9.0), True, id="the kubelet has it back"),
        pytest.param(lambda one: one.rebuild_handed_out(GPU, {}, 4.0), False, id="handed out since the kubelet said"),
        pytest.param(lambda one: one.rebuild_handed_out(GPU, {"GPU-2": ()}, 4.0), True, id="a record was lost"),
    ],
)
def test_what_is_news_and_read_back(tmp_path: Path, note: Callable[[Ledger], bool], news: bool) -> None:
    ledger = write(filled(tmp_path))
    before = everything(ledger)
    assert note(ledger) is news
    assert (everything(ledger) != before) is news
    assert everything(loaded(write(ledger).path.parent)) == everything(ledger)


def test_texts_are_kept_within_what_a_file_can_hold(tmp_path: Path) -> None:
    ledger, illness = Ledger(tmp_path), Sticky(Trouble("x" * 5000, TroubleKind.UNKNOWN), 5.0, "")
    ledger.set_earlier(GPU, {"GPU-1": (Earlier(("x" * 10_000, "\ud800"), 7.0),)})
    ledger.cordon("GPU-1", Cordon("\ud800" + "x" * 5000, 1.0))
    assert [ledger.set_sticky(GPU, {"GPU-1": illness}) for _ in range(2)] == [True, False]
    after = loaded(write(ledger).path.parent)
    [found] = after.earlier(GPU)["GPU-1"]
    assert (len(found.names[0]), found.names[1]) == (1024, "?")
    assert after.cordons["GPU-1"].reason == "?" + "x" * 1023
    assert not after.set_sticky(GPU, {"GPU-1": illness})


# Damage.

ROW = {"health": "Healthy", "numa": [0]}
TWO = {"GPU-1", "GPU-2"}
CORDONED = {"GPU-1": SMELLS}
LOST = Cordon("its reason was lost with a damaged state file", 0.0)


def content(rows: Mapping[str, object] = {}, **changed: Any) -> dict[str, Any]:
    """A sound file, spelled out, with some of it or of its resource's rows changed."""
    announced = {"announced": {"GPU-1": ROW, "GPU-2": ROW}}
    sound = {"format": FORMAT, "cordons": {"GPU-1": {"reason": "smells", "at": 1.0}}, "accepted": "v1beta1"}
    return sound | {"resources": {GPU: announced | dict(rows)}} | changed


def placed(folder: Path, data: object) -> Ledger:
    """A ledger over a file that is there already; not loaded."""
    text = data if isinstance(data, (bytes, str)) else json.dumps(data)
    (folder / "ledger.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return Ledger(folder)


WHOLE = json.dumps(content())
OPEN = f'{{"format": {FORMAT}, "cordons": {{"GPU-1": {{"reason": "smells", "at": 1.0'


@pytest.mark.parametrize(
    ("data", "words", "cordons", "announced"),
    [
        pytest.param("", "truncated", {}, set(), id="empty"),
        pytest.param(WHOLE[:110] + "\0" * 4096, "malformed", CORDONED, set(), id="a tail of zeros, as after a power cut"),
        pytest.param(WHOLE.encode().replace(b"v1beta1", b"\xff"), "utf-8", CORDONED, TWO, id="no text"),
        pytest.param(WHOLE.replace("v1beta1", "\\ud800"), "", CORDONED, TWO, id="half a character"),
        pytest.param(OPEN, "truncated", {"GPU-1": LOST}, set(), id="cut off in a cordon"),
        pytest.param(OPEN + '}, "GPU-2": {"reason": "}]}}\x01', "malformed", CORDONED | {"GPU-2": LOST}, set(), id="cut off in a text that looks like an end"),
        pytest.param(content(format="1"), "no object with a format", CORDONED, set(), id="the format is a text"),
        pytest.param(content(format=FORMAT + 1, cordons={"GPU-1": "smells", "GPU-2": {"reason": "hums", "at": 10**400, "annotated": True}}), "newer gateway", {"GPU-1": Cordon("smells", 0.0), "GPU-2": Cordon("hums", 0.0, annotated=True)}, set(), id="newer cordons"),
        pytest.param(content(cordons={"GPU-1": {"reason": 7, "at": "noon"}}), "cordons.GPU-1", {"GPU-1": LOST}, TWO, id="a cordon without its reason"),
        pytest.param(content(accepted=1, kubelet=1), "accepted: not a string; kubelet: not a string", CORDONED, TWO, id="no strings"),
        pytest.param(content(cordons=[], resources={GPU: 1}), "cordons: not an object", {}, set(), id="no objects"),
        pytest.param(content({"announced": []}), "announced: not an object", CORDONED, set(), id="announced is no object"),
        pytest.param(content({"announced": {"a": {"health": "so-so", "numa": []}, "b": {"health": "Healthy"}, "c": {"health": "Healthy", "numa": [2**63]}, "GPU-2": ROW}}), "announced.c", CORDONED, {"GPU-2"}, id="no devices"),
        pytest.param(content({"announced": {f"{n}": 1 for n in range(7)} | {"GPU-2": ROW}}), "and 4 more", CORDONED, {"GPU-2"}, id="many rows"),
        pytest.param(content({"announced": {f"{n}": 1 for n in range(1001)} | {"GPU-2": ROW}}), "and 998 more", CORDONED, set(), id="more than are looked through"),
        pytest.param(content({"sticky": {"GPU-2": {"reason": "Xid 79"}}}), "sticky.GPU-2", CORDONED, TWO, id="an illness without its kind"),
        pytest.param(content({"earlier": {"GPU-2": {"boot_id": "b", "holders": []}}}), "earlier.GPU-2", CORDONED, TWO, id="an earlier holder is nobody"),
        pytest.param(content(resources=content()["resources"] | {"../../etc": {"announced": {"a": ROW}}}), "'../../etc' is no resource name", CORDONED, TWO, id="a resource that can have no socket"),
        pytest.param(WHOLE.replace('"v1beta1"', "[" * 40 + "]" * 40), "levels deep", CORDONED, set(), id="deeper than it may be"),
        pytest.param(WHOLE[:-1] + ',"x":' + '{"a":' * 10_000, "recursion", CORDONED, TWO, id="what follows is too deep"),
        pytest.param(WHOLE[:-1] + f',"x":{"[" * 40}{"]" * 40},"broken', "truncated", CORDONED, TWO, id="deeper than it may be, before the end breaks off"),
        pytest.param(WHOLE[:-1] + "," + "[" * 2**22, "more than 500000 lists", CORDONED, TWO, id="a salvage that ends"),
        pytest.param(WHOLE + " " * 2**24, "larger than", CORDONED, TWO, id="larger than it may be"),
    ],
)  # fmt: skip
def test_what_is_sound_in_a_damaged_file_is_kept(
    tmp_path: Path, data: object, words: str, cordons: Mapping[str, Cordon], announced: set[str]
) -> None:
    ledger = placed(tmp_path, data)
    damaged = ledger.path.read_bytes()
    assert words in salvaged(ledger)
    assert (ledger.cordons, set(ledger.announced(GPU))) == (cordons, announced)
    assert ledger.path.read_bytes() == damaged  # A crash before the next write loses nothing.
    assert everything(loaded(write(ledger).path.parent)) == everything(ledger)  # What is written next is sound.
    assert (tmp_path / ledger.aside).read_bytes() == damaged


@pytest.mark.parametrize("row", [1, {"health": "x" * 2**20, "numa": []}], ids=["its ID", "its health, too"])
def test_what_is_wrong_with_a_file_is_said_in_few_words(tmp_path: Path, row: object) -> None:
    ledger = placed(tmp_path, content({"announced": {f"GPU-{number}{'x' * 2**20}": row for number in range(3)}}))
    words = salvaged(ledger)
    assert words.count("announced.GPU-") == 3
    assert len(words) < 2000


def test_cordons_claims_and_sides_survive_a_cut_anywhere_behind_them(tmp_path: Path) -> None:
    whole = write(filled(tmp_path)).path.read_bytes()
    for end in range(whole.index(b'"accepted"'), len(whole)):
        ledger = placed(tmp_path, whole[:end])
        salvaged(ledger)
        assert (ledger.cordons, ledger.claims, ledger.sides) == (CORDONED, {"uid": CLAIMED}, {"GPU-1": Side.DRA})
        assert set(ledger.announced(GPU).values()) <= {WELL, OTHER}


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
def test_whatever_the_damage_there_is_a_ledger(damage: list[tuple[int, int]]) -> None:
    data = bytearray(WHOLE.encode())
    for place, byte in damage:
        data[place % len(data)] = byte
    with tempfile.TemporaryDirectory() as folder:
        ledger = placed(Path(folder), bytes(data))
        with suppress(LedgerError):
            ledger.load()
        assert everything(loaded(write(ledger).path.parent)) == everything(ledger)


def test_a_damaged_file_of_any_depth_is_read() -> None:
    for depth in range(900, 1001):  # One may be decoded, and be too deep to be encoded again.
        salvage.decode(b'{"format":2,"x":' + b"[" * depth + b"]" * depth + b',"broken')


# The folder and the disk.


def test_a_ledger_too_large_to_be_read_again_is_not_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.announce(GPU, tuple(Device(f"{n}" + "x" * 2**20) for n in range(16)))
    with pytest.raises(LedgerError, match="Allowed: "):
        write(ledger)


def test_what_is_known_is_laid_over_a_file_that_is_damaged_meanwhile(tmp_path: Path) -> None:
    ledger = write(filled(tmp_path))
    placed(tmp_path, content(cordons={"GPU-2": {"reason": "hums", "at": 2.0}}, accepted=1))
    before = everything(ledger)
    salvaged(ledger)
    assert everything(ledger) == before | {"cordons": CORDONED | {"GPU-2": HUMS}}
