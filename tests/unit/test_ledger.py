"""The ledger: it survives every damage, every damage survives it, and two gateways can keep it together."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource as limits
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.life.merging import Sticky
from devices.model import Device, Health, Trouble, TroubleKind
from gateway.kubelet.drift import Earlier
from gateway.memory import file, mend
from gateway.memory import ledger as module
from gateway.memory.claimed import Claimed
from gateway.memory.file import LedgerError
from gateway.memory.ledger import Ledger, boot_id
from gateway.memory.rows import FORMAT, Cordon, HandedOut
from gateway.sides.side import Side

GPU = "nvidia.com/gpu"
WELL, ILL = Device("GPU-1", Health.HEALTHY, (0,)), Device("GPU-1", Health.UNHEALTHY, (0,))
OTHER = Device("GPU-2")
SMELLS, HUMS = Cordon("smells", 1.0), Cordon("hums", 2.0)
XID = Sticky(Trouble("Xid 79", TroubleKind.RESET_REQUIRED), 3.0, "boot-1")
ROW = {"health": "Healthy", "numa": [0]}


def content(**changed: Any) -> dict[str, Any]:
    """A sound file, spelled out, with some of it changed."""
    return {
        "format": FORMAT,
        "cordons": {"GPU-1": {"reason": "smells", "at": 1.0}},
        "accepted": "v1beta1",
        "resources": {
            GPU: {
                "announced": {"GPU-1": ROW, "GPU-2": ROW},
                "sticky": {"GPU-2": {"reason": "Xid 79", "kind": "reset-required", "at": 3.0, "boot_id": "boot-1"}},
                "lost": {"GPU-2": {"since": 5}},
                "handed_out": {"GPU-2": {"dialect": "v1beta1", "at": 4.0}},
            }
        },
    } | changed


def placed(folder: Path, file: object) -> Ledger:
    """A ledger over a file that is there already; not loaded."""
    data = file if isinstance(file, bytes) else (file if isinstance(file, str) else json.dumps(file)).encode()
    (folder / "ledger.json").write_bytes(data)
    return Ledger(folder)


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
    ledger.set_sticky(GPU, {"GPU-2": XID})
    ledger.set_lost_since(GPU, {"GPU-2": 5.0})
    ledger.hand_out(GPU, ["GPU-1"], "0.1", 4.0)
    return ledger


def everything(ledger: Ledger) -> dict[str, Any]:
    return {
        "accepted": ledger.accepted,
        "cordons": ledger.cordons,
        "announced": {name: ledger.announced(name) for name in ledger.resources()},
        "sticky": {name: ledger.sticky(name) for name in ledger.resources()},
        "lost": {name: ledger.lost_since(name) for name in ledger.resources()},
        "handed out": {name: ledger.handed_out(name) for name in ledger.resources()},
    }


# What is remembered.


def test_what_was_noted_is_read_back(tmp_path: Path) -> None:
    write(filled(tmp_path / "new"))
    assert everything(loaded(tmp_path / "new")) == {
        "accepted": "v1alpha2",
        "cordons": {"GPU-1": SMELLS},
        "announced": {GPU: {"GPU-1": WELL, "GPU-2": OTHER}},
        "sticky": {GPU: {"GPU-2": XID}},
        "lost": {GPU: {"GPU-2": 5.0}},
        "handed out": {GPU: {"GPU-1": HandedOut("0.1", 4.0)}},
    }


@pytest.mark.parametrize(
    ("note", "news"),
    [
        pytest.param(lambda ledger: ledger.announce(GPU, (Device("GPU-3"),)), True, id="a new ID"),
        pytest.param(lambda ledger: ledger.announce(GPU, (WELL, OTHER)), False, id="the same list"),
        pytest.param(lambda ledger: ledger.announce(GPU, (ILL, OTHER)), True, id="another health"),
        pytest.param(
            lambda ledger: ledger.announce(GPU, (Device("GPU-2", numa_nodes=(1,)),)), True, id="another place"
        ),
        pytest.param(lambda ledger: ledger.announce(GPU, (WELL,)), False, id="an ID less: it stays known"),
        pytest.param(lambda ledger: ledger.withdraw(GPU, ["GPU-1"]), True, id="an ID withdrawn"),
        pytest.param(lambda ledger: ledger.withdraw(GPU, ["GPU-9"]), False, id="an unknown ID withdrawn"),
        pytest.param(lambda ledger: ledger.accept("v1beta1"), True, id="another dialect"),
        pytest.param(lambda ledger: ledger.accept("v1alpha2"), False, id="the same dialect"),
        pytest.param(lambda ledger: ledger.set_sticky(GPU, {"GPU-2": XID}), False, id="the same illness"),
        pytest.param(lambda ledger: ledger.set_sticky(GPU, {"GPU-1": XID, "GPU-2": XID}), True, id="an illness"),
        pytest.param(lambda ledger: ledger.set_sticky(GPU, {}), True, id="a recovery"),
        pytest.param(lambda ledger: ledger.set_lost_since(GPU, {"GPU-2": 5.0}), False, id="lost as before"),
        pytest.param(
            lambda ledger: ledger.set_lost_since(GPU, {"GPU-1": 6.0, "GPU-2": 5.0}), True, id="one more is lost"
        ),
        pytest.param(lambda ledger: ledger.set_lost_since(GPU, {}), True, id="a lost one is back"),
        pytest.param(lambda ledger: ledger.uncordon("GPU-1"), True, id="a cordon lifted"),
        pytest.param(lambda ledger: ledger.uncordon("GPU-2"), False, id="no cordon to lift"),
        pytest.param(lambda ledger: ledger.rebuild_handed_out(GPU, {"GPU-1": ""}, 9.0), False, id="the kubelet agrees"),
        pytest.param(lambda ledger: ledger.rebuild_handed_out(GPU, {}, 9.0), True, id="the kubelet has it back"),
        pytest.param(
            lambda ledger: ledger.rebuild_handed_out(GPU, {}, 4.0), False, id="handed out since the kubelet said"
        ),
        pytest.param(
            lambda ledger: ledger.rebuild_handed_out(GPU, {"GPU-1": "", "GPU-2": ""}, 9.0), True, id="a record was lost"
        ),
    ],
)
def test_what_is_news(tmp_path: Path, note: Callable[[Ledger], bool], news: bool) -> None:
    ledger = write(filled(tmp_path))
    before = everything(ledger)
    assert note(ledger) is news
    assert (everything(ledger) != before) is news
    write(ledger)
    assert everything(loaded(tmp_path)) == everything(ledger)


def test_names_are_kept_within_what_a_file_can_hold(tmp_path: Path) -> None:
    ledger = filled(tmp_path)
    ledger.set_forgotten(GPU, {"GPU-1": (Earlier(("x" * 10_000, "\ud800"), 7.0),)})
    write(ledger)
    [found] = loaded(tmp_path).forgotten(GPU)["GPU-1"]
    assert (len(found.names[0]), found.names[1]) == (1024, "?")


def test_a_reason_is_kept_within_what_a_file_can_hold(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.cordon("GPU-1", Cordon("\ud800" + "x" * 5000, 1.0))
    write(ledger)
    assert loaded(tmp_path).cordons["GPU-1"].reason == "?" + "x" * 1023


@pytest.mark.parametrize("file", [pytest.param(None, id="missing"), pytest.param(b"\xff", id="no text")])
def test_a_boot_without_a_name_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: bytes | None) -> None:
    if file is not None:
        (tmp_path / "boot_id").write_bytes(file)
    monkeypatch.setattr(module, "_BOOT_ID", tmp_path / "boot_id")
    assert boot_id() == ""


# Releases before and after.

VERSION_0_1_0 = (
    '{"format":1,"resources":{"nvidia.com/gpu":{"announced":{"GPU-1":{"health":"Healthy","numa":[0]},'
    '"GPU-2":{"health":"Unhealthy","numa":[]}}}},"accepted":"v1beta1"}'
)
"""A file as the release before this one wrote it."""


def read_by_version_0_1_0(data: bytes) -> dict[str, Any]:
    """The rules by which the release before this one reads a file; what doesn't obey them, it puts aside."""
    decoded = msgspec.json.decode(data)
    assert isinstance(decoded, dict)
    assert isinstance(decoded.get("format"), int)
    assert decoded["format"] <= 1
    resources = decoded.get("resources", {})
    assert isinstance(resources, dict)
    for resource in resources.values():
        assert isinstance(resource, dict)
        assert isinstance(resource.get("announced", {}), dict)
        for row in resource.get("announced", {}).values():
            assert isinstance(row, dict)
            assert row.get("health") in {"Healthy", "Unhealthy"}
            assert isinstance(row.get("numa"), list)
            assert all(isinstance(node, int) for node in row["numa"])
    return decoded


def test_the_release_before_reads_this_ones_file(tmp_path: Path) -> None:
    old = read_by_version_0_1_0(write(filled(tmp_path)).path.read_bytes())
    assert old["accepted"] == "v1alpha2"
    assert {name: set(resource["announced"]) for name, resource in old["resources"].items()} == {
        GPU: {"GPU-1", "GPU-2"}
    }


def test_the_file_of_the_release_before_is_read(tmp_path: Path) -> None:
    placed(tmp_path, VERSION_0_1_0)
    ledger = loaded(tmp_path)
    assert ledger.announced(GPU) == {"GPU-1": WELL, "GPU-2": Device("GPU-2", Health.UNHEALTHY)}
    assert ledger.accepted == "v1beta1"


def test_everything_survives_a_rollback_and_back(tmp_path: Path) -> None:
    now = everything(write(filled(tmp_path)))
    old = read_by_version_0_1_0((tmp_path / "ledger.json").read_bytes())
    old["accepted"] = "v1beta1"  # It changes what it knows, and keeps the rest as it was.
    (tmp_path / "ledger.json").write_bytes(msgspec.json.encode(old))
    assert everything(loaded(tmp_path)) == now | {"accepted": "v1beta1"}


NEW_NAMES = st.text(max_size=5).map(lambda name: f"later {name}")
SIMPLE = (
    st.none()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
LATER = st.dictionaries(
    NEW_NAMES, SIMPLE | st.lists(SIMPLE, max_size=2) | st.dictionaries(NEW_NAMES, SIMPLE, max_size=2), max_size=2
)
PLACES = (
    (),
    ("resources", GPU),
    ("resources", GPU, "announced", "GPU-1"),
    ("resources", GPU, "sticky", "GPU-2"),
    ("resources", GPU, "lost", "GPU-2"),
    ("resources", GPU, "handed_out", "GPU-2"),
    ("cordons", "GPU-1"),
)


def at(file: Any, place: tuple[str, ...]) -> Any:
    for key in place:
        file = file[key]
    return file


@given(st.tuples(*(LATER for _ in PLACES)))
def test_fields_of_a_later_release_are_kept_at_every_depth(later: tuple[dict[str, Any], ...]) -> None:
    file = json.loads(json.dumps(content()))
    for place, fields in zip(PLACES, later, strict=True):
        at(file, place).update(fields)
    with tempfile.TemporaryDirectory() as folder:
        placed(Path(folder), msgspec.json.encode(file))
        ledger = loaded(Path(folder))
        ledger.announce(GPU, (ILL,))
        ledger.cordon("GPU-1", HUMS)
        ledger.set_sticky(GPU, {"GPU-2": Sticky(Trouble("Xid 48", TroubleKind.UNKNOWN), 5.0, "")})
        ledger.hand_out(GPU, ["GPU-2"], "0.1", 6.0)
        written = msgspec.json.decode(ledger.snapshot().data)
    for place, fields in zip(PLACES, later, strict=True):
        assert at(written, place).items() >= fields.items()


# Damage.

DEEP = "[" * 40 + "]" * 40
TOO_DEEP = "[" * 100_000
TWO = {"GPU-1", "GPU-2"}
CORDONED = {"GPU-1": SMELLS}
CLAIMED = Claimed("default", "one", "gpu.example.com", 1.0)
LOST = "its reason was lost with a damaged state file"


def with_rows(table: str, rows: object) -> dict[str, Any]:
    file = content()
    file["resources"][GPU][table] = rows
    return file


@pytest.mark.parametrize(
    ("file", "words", "cordons", "announced"),
    [
        pytest.param("", "truncated", {}, set(), id="empty"),
        pytest.param(b"\0" * 4096, "invalid character", {}, set(), id="zeros, as after a power cut"),
        pytest.param(json.dumps(content())[:300] + "\0" * 4096, "malformed", CORDONED, set(), id="a tail of zeros"),
        pytest.param(json.dumps(content()) + "}", "trailing", CORDONED, TWO, id="something after the end"),
        pytest.param(json.dumps(content()).encode() .replace(b"Xid", b"\xff"), "utf-8", CORDONED, TWO, id="no text"),
        pytest.param(json.dumps(content()).replace("Xid", "\\ud800"), "", CORDONED, TWO, id="half a character"),
        pytest.param('{"format": 1, "cordons": {"GPU-1": {"reason": "smells", "at": 1.0', "truncated", {"GPU-1": Cordon(LOST, 0.0)}, set(), id="cut off in a cordon"),
        pytest.param('{"format": 1, "cordons": {"GPU-1": {"reason": "smells", "at": 1.0}, "GPU-2": {"reason": "}]}}\x01', "malformed", CORDONED | {"GPU-2": Cordon(LOST, 0.0)}, set(), id="cut off in a text that looks like an end"),
        pytest.param(json.dumps(dict(sorted(content(b="x" * 2**20).items(), key=lambda one: one[0] == "cordons"))) + "}", "trailing", {}, TWO, id="cordons behind a megabyte"),
        pytest.param("[]", "no object with a format", {}, set(), id="another shape"),
        pytest.param({"cordons": content()["cordons"]}, "no object with a format", CORDONED, set(), id="no format"),
        pytest.param(content(format="1"), "no object with a format", CORDONED, set(), id="the format is a text"),
        pytest.param(content(format=FORMAT + 1), "newer gateway", CORDONED, set(), id="a truly newer format"),
        pytest.param({"format": 2, "cordons": {"GPU-1": "smells"}}, "newer gateway", {"GPU-1": Cordon("smells", 0.0)}, set(), id="a newer cordon, known by its ID"),
        pytest.param({"format": 2, "cordons": {"GPU-1": {"reason": "smells", "at": 10**400}}}, "newer gateway", {"GPU-1": Cordon("smells", 0.0)}, set(), id="a newer cordon, of a time that no clock shows"),
        pytest.param({"format": 2, "cordons": ["GPU-1"]}, "newer gateway", {}, set(), id="newer cordons, unknown"),
        pytest.param(content(cordons={"GPU-1": {"reason": 7, "at": "noon"}}), "cordons.GPU-1", {"GPU-1": Cordon(LOST, 0.0)}, TWO, id="a cordon without its reason is a cordon"),
        pytest.param(content(cordons=[]), "cordons: expected an object", {}, TWO, id="cordons are no object"),
        pytest.param(content(accepted=1), "accepted", CORDONED, TWO, id="the dialect is no text"),
        pytest.param(content(resources=[]), "resources: expected an object", CORDONED, set(), id="resources are no object"),
        pytest.param(content(resources={GPU: 1}), GPU, CORDONED, set(), id="a resource is no object"),
        pytest.param(with_rows("announced", []), "announced: expected an object", CORDONED, set(), id="announced is no object"),
        pytest.param(with_rows("announced", {"GPU-1": {"health": "so-so", "numa": []}, "GPU-2": ROW}), "GPU-1", CORDONED, {"GPU-2"}, id="a health that is none"),
        pytest.param(with_rows("announced", {"GPU-1": {"health": "Healthy"}, "GPU-2": ROW}), "GPU-1", CORDONED, {"GPU-2"}, id="no place"),
        pytest.param(with_rows("announced", {"GPU-1": {"health": "Healthy", "numa": [2**63]}, "GPU-2": ROW}), "GPU-1", CORDONED, {"GPU-2"}, id="a place that no wire can say"),
        pytest.param(with_rows("announced", {f"GPU-{n}": 1 for n in range(3, 10)} | {"GPU-2": ROW}), "and 4 more", CORDONED, {"GPU-2"}, id="many rows"),
        pytest.param(with_rows("announced", {f"GPU-{n}": 1 for n in range(3, 1004)} | {"GPU-2": ROW}), "and 998 more", CORDONED, set(), id="more than are looked through"),
        pytest.param(with_rows("sticky", {"GPU-2": {"reason": "Xid 79"}}), "sticky.GPU-2", CORDONED, TWO, id="an illness without its kind"),
        pytest.param(with_rows("handed_out", {"GPU-2": {"dialect": 1, "at": 2}}), "handed_out.GPU-2", CORDONED, TWO, id="a record that is none"),
        pytest.param(with_rows("forgotten", {"GPU-2": {"boot_id": "b", "pods": []}}), "forgotten.GPU-2", CORDONED, TWO, id="nobody is forgotten"),
        pytest.param(with_rows("forgotten", {"GPU-2": {"boot_id": "b", "pods": [{"names": 1, "at": 2}]}}), "forgotten.GPU-2", CORDONED, TWO, id="a holder that is none"),
        pytest.param(content(kubelet=1), "kubelet", CORDONED, TWO, id="the kubelet is no text"),
        pytest.param(json.dumps(content()).replace("3.0", DEEP), "levels deep", CORDONED, set(), id="deeper than it may be"),
        pytest.param(TOO_DEEP, "recursion", {}, set(), id="deeper than can be read"),
        pytest.param(content(resources={**content()["resources"], "../../etc": {"announced": {"a": ROW}}}), "'../../etc' is no resource name", CORDONED, TWO, id="a resource that can have no socket"),
        pytest.param(content(resources={**content()["resources"], "etc": {}}), "'etc' is no resource name", CORDONED, TWO, id="a resource without a domain"),
        pytest.param(json.dumps(content(x=[[]] * 500_000)), "more than 500000 lists", CORDONED, TWO, id="more parts than it may have"),
        pytest.param(json.dumps(content())[:-1] + ',"x":' + '{"a":' * 10_000, "recursion", CORDONED, TWO, id="what follows is too deep"),
        pytest.param(json.dumps(content())[:-1] + f',"x":{"[" * 40}{"]" * 40},"broken', "truncated", CORDONED, TWO, id="deeper than it may be, before the end breaks off"),
        pytest.param(json.dumps(content())[:-1] + ',"x":1e999', "out of range", CORDONED, TWO, id="a number that is none follows"),
        pytest.param(json.dumps(content())[:-1] + ',"\\q":1', "malformed", CORDONED, TWO, id="a name that is none follows"),
        pytest.param(json.dumps(content())[:-1] + "," + "[" * 2**22, "more than 500000 lists", CORDONED, TWO, id="a salvage that ends"),
        pytest.param(json.dumps(content()) + " " * 2**24, "larger than", CORDONED, TWO, id="larger than it may be"),
    ],
)  # fmt: skip
def test_what_is_sound_in_a_damaged_file_is_kept(
    tmp_path: Path, file: object, words: str, cordons: Mapping[str, Cordon], announced: set[str]
) -> None:
    ledger = placed(tmp_path, file)
    damaged = ledger.path.read_bytes()
    assert words in salvaged(ledger)
    assert (ledger.cordons, set(ledger.announced(GPU))) == (cordons, announced)
    assert everything(loaded(write(ledger).path.parent)) == everything(ledger)  # What is written next is sound.
    assert (tmp_path / ledger.aside).read_bytes() == damaged


@pytest.mark.parametrize("row", [1, {"health": "x" * 2**20, "numa": []}], ids=["its ID", "its health, too"])
def test_what_is_wrong_with_a_file_is_said_in_few_words(tmp_path: Path, row: object) -> None:
    ledger = placed(tmp_path, with_rows("announced", {f"GPU-{number}{'x' * 2**20}": row for number in range(3)}))
    words = salvaged(ledger)
    assert words.count("announced.GPU-") == 3
    assert len(words) < 2000


def test_cordons_claims_and_sides_survive_a_cut_anywhere_behind_them(tmp_path: Path) -> None:
    filled_one = filled(tmp_path)
    filled_one.set_claim("uid", CLAIMED)
    filled_one.set_side("GPU-1", Side.DRA)
    whole = write(filled_one).path.read_bytes()
    behind = whole.index(b'"accepted"')
    for end in range(behind, len(whole)):
        ledger = placed(tmp_path, whole[:end])
        salvaged(ledger)
        assert (ledger.cordons, ledger.claims, ledger.sides) == (CORDONED, {"uid": CLAIMED}, {"GPU-1": Side.DRA})
        assert set(ledger.announced(GPU).values()) <= {WELL, OTHER}


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
def test_whatever_the_damage_there_is_a_ledger(damage: list[tuple[int, int]]) -> None:
    data = bytearray(json.dumps(content()).encode())
    for place, byte in damage:
        data[place % len(data)] = byte
    with tempfile.TemporaryDirectory() as folder:
        ledger = placed(Path(folder), bytes(data))
        with suppress(LedgerError):
            ledger.load()
        read_by_version_0_1_0(ledger.snapshot().data)
        assert everything(loaded(placed(Path(folder), ledger.snapshot().data).path.parent)) == everything(ledger)


@pytest.mark.parametrize("more", [',"x":' + "[" * 10_000, ',"x":1e999', ',"\\q":1', ',"x":"\\ud800"'])
def test_of_a_file_that_ended_a_gateway_the_cordons_can_be_read_and_written(more: str) -> None:
    found, _ = mend.cordons((json.dumps(content())[:-1] + more).encode())
    assert found["cordons"].keys() == CORDONED.keys()
    file.encode(found)


def test_a_damaged_file_that_can_not_be_put_aside_is_when_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    ledger = placed(tmp_path, "damaged")
    with monkeypatch.context() as limited:
        limited.setattr(file, "put_aside", refuse)
        assert "it could not be put aside (Read-only file system)" in salvaged(ledger)
    assert (tmp_path / write(ledger).aside).read_text() == "damaged"


def test_of_the_files_put_aside_the_newest_are_kept(tmp_path: Path) -> None:
    for number in range(12):
        write_after = placed(tmp_path, f"damage {number}")
        os.utime(write_after.path, ns=(number, 12 - number if number == 11 else number))
        salvaged(write_after)
        write(write_after)
    kept = {path.read_text() for path in tmp_path.glob("ledger.damaged-*")}
    assert kept == {f"damage {number}" for number in (4, 5, 6, 7, 8, 9, 10, 11)}


# Two gateways on one file.


@contextmanager
def lock_held(folder: Path) -> Iterator[None]:
    with (folder / "ledger.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_what_came_or_went_since_is_not_undone(tmp_path: Path) -> None:
    ledger = filled(tmp_path)
    since = ledger.sticky(GPU)
    ledger.set_sticky(GPU, {"GPU-1": XID})
    assert ledger.set_sticky(GPU, since, since) is False
    assert ledger.sticky(GPU) == {"GPU-1": XID}
    assert ledger.set_sticky(GPU, {"GPU-2": XID, "GPU-3": XID}, since) is True
    assert ledger.sticky(GPU) == {"GPU-1": XID, "GPU-3": XID}
    assert ledger.set_sticky(GPU, {}, ledger.sticky(GPU)) is True
    assert ledger.sticky(GPU) == {}


def test_a_reason_too_long_to_be_kept_whole_is_news_once(tmp_path: Path) -> None:
    ledger, illness = Ledger(tmp_path), Sticky(Trouble("x" * 5000, TroubleKind.UNKNOWN), 5.0, "")
    assert [ledger.set_sticky(GPU, {"GPU-1": illness}) for _ in range(2)] == [True, False]
    assert [loaded(write(ledger).path.parent).set_sticky(GPU, {"GPU-1": illness}) for _ in range(2)] == [False, False]


GATEWAYS = st.sampled_from(["old", "new"])
THINGS = st.sampled_from(["GPU-1", "GPU-2", "GPU-3"])
STEPS = st.lists(
    st.tuples(GATEWAYS, st.sampled_from(["well", "ill", "withdraw", "cordon", "uncordon", "write", "load"]), THINGS)
)


@given(STEPS)
def test_what_was_written_last_of_each_thing_stands(steps: list[tuple[str, str, str]]) -> None:
    """The model: a file of things, and for each gateway what it knows and what of it isn't written yet."""
    file: dict[str, str | None] = {}
    known: dict[str, dict[str, str | None]] = {"old": {}, "new": {}}
    unwritten: dict[str, dict[str, str | None]] = {"old": {}, "new": {}}
    with tempfile.TemporaryDirectory() as name:
        ledgers = {"old": Ledger(Path(name)), "new": Ledger(Path(name))}
        for who, verb, device_id in steps:
            ledger, change = ledgers[who], dict[str, str | None]()
            if verb == "write":
                write(ledger)
                file |= unwritten[who]
                known[who], unwritten[who] = dict(file), {}
                fresh = loaded(Path(name))
                assert {d: v.health.value for d, v in fresh.announced(GPU).items()} | {
                    f"cordon {d}": c.reason for d, c in fresh.cordons.items()
                } == {key: value for key, value in file.items() if value is not None}
            elif verb == "load":
                ledger.load()
                known[who] = (file | unwritten[who]) if ledger.path.exists() else known[who]
            elif verb == "cordon":
                ledger.cordon(device_id, Cordon(who, 1.0))
                change[f"cordon {device_id}"] = who
            elif verb == "uncordon":
                ledger.uncordon(device_id)
                change[f"cordon {device_id}"] = None
            elif verb == "withdraw":
                if ledger.withdraw(GPU, [device_id]):
                    change[device_id] = None
            else:
                health = Health.HEALTHY if verb == "well" else Health.UNHEALTHY
                if ledger.announce(GPU, (Device(device_id, health),)):
                    change[device_id] = health.value
            known[who] |= change
            unwritten[who] |= change
            assert {key: value for key, value in known[who].items() if value is not None} == {
                d: v.health.value for d, v in ledger.announced(GPU).items()
            } | {f"cordon {d}": c.reason for d, c in ledger.cordons.items()}


def test_a_lock_that_cannot_be_had_delays_and_is_said_but_what_matters_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.memory.file.LOCK_WAIT", 0.0)
    ledger = filled(tmp_path)
    with lock_held(tmp_path), pytest.raises(LedgerError, match=r"without its lock.*held by another process"):
        write(ledger)
    assert everything(loaded(tmp_path)) == everything(ledger)
    assert ledger.pending > 0
    assert write(ledger).pending == 0


def test_who_finds_a_lock_taken_keeps_nothing_open(tmp_path: Path) -> None:
    held = file.hold(tmp_path / "lock")
    before = sorted(Path("/proc/self/fd").iterdir())
    assert file.hold(tmp_path / "lock") < 0
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    os.close(held)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "ledger.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(LedgerError, match="without its lock"):
        write(filled(tmp_path))
    assert not (tmp_path / "victim").exists()


# The folder and the disk.


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("mode", "others", "after", "words"),
    [
        pytest.param(0o700, "", 0o700, "", id="as it should be"),
        pytest.param(0o755, "", 0o700, "", id="others may read: closed"),
        pytest.param(0o777, "", 0o700, "", id="others may write: closed"),
        pytest.param(0o755, "somebody's", 0o755, "others use it", id="others live there, as in /var/lib: left open"),
        pytest.param(0o1777, "", 0o1777, "others use it", id="the sticky bit, as on /tmp: left open"),
    ],
)
def test_a_folder_with_wider_modes(tmp_path: Path, mode: int, others: str, after: int, words: str) -> None:
    write(filled(tmp_path)).path.chmod(0o644)
    if others:
        (tmp_path / others).mkdir()
    tmp_path.chmod(mode)
    ledger = loaded(tmp_path)
    assert (mode_of(tmp_path), mode_of(ledger.path)) == (after, 0o600)
    assert (words in ledger.exposure) is True
    assert bool(ledger.exposure) is bool(words)


def test_a_folder_of_another_user_is_reported_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(filled(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    ledger = loaded(tmp_path)
    assert "chown" in ledger.exposure
    assert write(ledger).resources() == (GPU,)


def test_what_a_crash_left_is_swept(tmp_path: Path) -> None:
    write(filled(tmp_path))
    for name in ("ledger.json", "bridge.json", "node-config.json"):
        leftover = tmp_path / f".{name}.0123abcd.new"
        leftover.write_text("half")
        os.utime(leftover, (0, 0))
    loaded(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"ledger.json", "ledger.lock"}


def failing(call: str, code: int) -> Callable[[], AbstractContextManager[None]]:
    """A system call that fails."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    @contextmanager
    def trouble() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, call, fail)
            yield

    return trouble


@contextmanager
def no_descriptors() -> Iterator[None]:
    soft, hard = limits.getrlimit(limits.RLIMIT_NOFILE)
    limits.setrlimit(limits.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        limits.setrlimit(limits.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        pytest.param(failing("write", errno.ENOSPC), "No space left", id="disk full"),
        pytest.param(failing("write", errno.EDQUOT), "quota", id="quota exceeded"),
        pytest.param(failing("fsync", errno.EIO), "Input/output error", id="disk broken"),
        pytest.param(failing("replace", errno.ENOSPC), "No space left", id="no room in the folder"),
        pytest.param(failing("open", errno.EROFS), "Read-only", id="read-only"),
        pytest.param(no_descriptors, "Too many open files", id="descriptors exhausted"),
    ],
)
def test_a_write_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, trouble: Callable[[], AbstractContextManager[None]], words: str
) -> None:
    ledger = write(filled(tmp_path))
    before = ledger.path.read_bytes()
    ledger.cordon("GPU-2", HUMS)
    with trouble(), pytest.raises(LedgerError, match=words):
        write(ledger)
    assert ledger.path.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"ledger.json", "ledger.lock"}
    write(ledger)  # When the trouble is over, nothing is missing.
    assert loaded(tmp_path).cordons == CORDONED | {"GPU-2": HUMS}


def test_a_disk_that_takes_a_little_at_a_time_gets_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: whole(descriptor, data[:7]))
    ledger = write(filled(tmp_path))
    assert everything(loaded(tmp_path)) == everything(ledger)


def test_a_folder_that_cannot_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="make the state directory writable"):
        write(filled(tmp_path / "file" / "state"))


def test_a_ledger_too_large_to_be_read_again_is_not_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.announce(GPU, tuple(Device(f"{n}" + "x" * 2**20) for n in range(16)))
    with pytest.raises(LedgerError, match="expected at most"):
        write(ledger)


def test_a_sound_file_that_cannot_be_opened_now_is_left_and_read_with_the_next_write(tmp_path: Path) -> None:
    write(filled(tmp_path))
    ledger = Ledger(tmp_path)
    with no_descriptors():
        assert "It stays" in salvaged(ledger)
    ledger.cordon("GPU-2", HUMS)
    write(ledger)
    assert everything(ledger) == everything(filled(tmp_path)) | {"cordons": CORDONED | {"GPU-2": HUMS}}
    assert not list(tmp_path.glob("ledger.damaged-*"))


def test_a_damaged_file_of_any_depth_is_read() -> None:
    for depth in range(900, 1001):  # One may be decoded, and be too deep to be encoded again.
        mend.decode(b'{"format":1,"x":' + b"[" * depth + b"]" * depth + b',"broken')
