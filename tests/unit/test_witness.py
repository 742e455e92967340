"""A state file that is put back is known by a second file, and nothing that gateways do to it makes it look so."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.memory import ledger as module
from gateway.memory import mend, witness
from gateway.memory.claimed import Claimed
from gateway.memory.file import LedgerError
from gateway.memory.ledger import Ledger
from gateway.memory.rows import Cordon
from gateway.sides.side import Side
from tests.unit.test_ledger import salvaged, write

ONE, TWO, HUMS = Claimed("ns", "one", "d", 1.0), Claimed("ns", "two", "d", 2.0), Cordon("hums", 1.0)
GPU = "nvidia.com/gpu"


class Node:
    """The state directory, and the kubelet's folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.state, self.second = root, root / "state", root / witness.PATH
        self.path = self.state / "ledger.json"

    def gateway(self) -> Ledger:
        """A gateway that has read nothing yet."""
        return Ledger(self.state, socket_dir=self.root)

    def started(self) -> Ledger:
        one = self.gateway()
        one.load()
        return one

    def older(self) -> bytes:
        """Have a claim and an owner that the state file, which is given, doesn't have."""
        one = self.gateway()
        one.set_side("", Side.PLUGIN)
        one.cordon("GPU-a", HUMS)
        one.set_claim("one", ONE)
        before = write(one).path.read_bytes()
        one.uncordon("GPU-a")
        one.set_side("GPU-a", Side.DRA)
        one.set_claim("one", None)
        one.set_claim("two", TWO)
        write(one)
        return before


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_what_an_older_file_says_of_owners_is_lost_but_no_claim_is(node: Node) -> None:
    older = node.older()
    node.path.write_bytes(older)
    one = node.gateway()
    assert "it is older than the one that a gateway wrote last" in salvaged(one)
    assert one.claims == {"one": ONE, "two": TWO}
    assert (one.sides, one.cordons) == ({}, {"GPU-a": HUMS})
    assert (node.state / one.aside).read_bytes() == older
    write(one)
    assert node.started().claims == {"one": ONE, "two": TWO}


def test_an_older_file_under_a_gateway_changes_nothing_of_what_it_knows(node: Node) -> None:
    node.older()
    one = node.started()
    known = one.claims, one.sides
    older = json.loads(node.path.read_bytes()) | {"claims": {}, "sides": {"": "plugin"}, "generation": 1}
    node.path.write_text(json.dumps(older))
    assert "it was put back" in salvaged(one)
    assert (one.claims, one.sides) == known
    node.path.write_text(json.dumps(older))
    one.set_side("GPU-b", Side.DRA)
    write(one)
    after = node.started()
    assert (after.claims, after.sides) == (known[0], {**known[1], "GPU-b": Side.DRA})


def test_the_second_file_has_what_another_gateway_prepared(node: Node) -> None:
    one, another = node.started(), node.started()
    one.set_claim("one", ONE)
    before = write(one).path.read_bytes()
    another.set_claim("two", TWO)
    write(another)
    node.path.write_bytes(before)
    salvaged(after := node.gateway())
    assert after.claims == {"one": ONE, "two": TWO}
    node.path.unlink()
    salvaged(after := node.gateway())
    assert after.claims == {"one": ONE, "two": TWO}


def test_a_number_never_falls(node: Node) -> None:
    older = node.older()
    knows_less, another = node.started(), node.started()
    another.set_claim("three", ONE)
    newest = json.loads(write(another).path.read_bytes())["generation"]
    node.path.write_bytes(older)
    knows_less.cordon("GPU-b", HUMS)
    assert json.loads(write(knows_less).path.read_bytes())["generation"] == newest
    knows_all = node.started()
    node.path.write_bytes(older)
    node.second.unlink()
    knows_all.set_claim("four", ONE)
    assert json.loads(write(knows_all).path.read_bytes())["generation"] == newest + 1
    node.path.write_bytes(older)
    node.second.unlink()
    knows_all.load()
    knows_all.set_claim("five", ONE)
    assert json.loads(write(knows_all).path.read_bytes())["generation"] == newest + 2


def test_a_file_that_is_deleted_under_a_gateway_with_claims_is_written_again(node: Node) -> None:
    node.older()
    one = node.started()
    node.path.unlink()
    one.set_claim("three", ONE)
    write(one)
    assert node.started().claims == {"two": TWO, "three": ONE}


def test_a_write_that_changes_no_owner_leaves_the_second_file_alone(node: Node) -> None:
    node.older()
    one = node.started()
    one.set_claim("three", ONE)
    write(one)
    before = node.second.stat().st_ino
    one.accept("v1beta1")
    write(one)
    assert node.second.stat().st_ino == before


def test_what_a_crash_left_beside_the_second_file_is_swept(node: Node) -> None:
    node.older()
    leftover = node.second.with_name(".claims.json.0123abcd.new")
    leftover.write_text("half")
    os.utime(leftover, (0, 0))
    node.started()
    assert not leftover.exists()


def test_a_file_of_a_release_that_did_not_number_it_is_older(node: Node) -> None:
    node.older()
    node.path.write_text(json.dumps({"format": 1, "sides": {"": "plugin"}}))
    one = node.gateway()
    salvaged(one)
    assert (one.claims, one.sides) == ({"two": TWO}, {})


def test_a_file_that_is_gone_leaves_the_claims(node: Node) -> None:
    node.older()
    node.path.unlink()
    one = node.gateway()
    assert "it is gone; what else is known of it is used" in salvaged(one)
    assert (one.claims, one.sides) == ({"two": TWO}, {})
    write(one)
    assert node.started().claims == {"two": TWO}


def test_a_damaged_file_leaves_the_claims(node: Node) -> None:
    node.older()
    node.path.write_text("{")
    one = node.gateway()
    assert "older" not in salvaged(one)
    assert one.claims == {"two": TWO}


def test_owners_are_kept_where_a_file_is_damaged_after_them(node: Node) -> None:
    node.older()
    one = node.started()
    one.accept("v1beta1")
    data = write(one).path.read_bytes()
    node.path.write_bytes(data[: data.index(b"v1beta1")])
    one = node.gateway()
    salvaged(one)
    assert one.sides == {"": Side.PLUGIN, "GPU-a": Side.DRA}


def test_after_a_boot_any_write_has_the_file_known_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    older = node.older()
    monkeypatch.setattr(module, "boot_id", lambda: "another boot")
    newest = node.path.read_bytes()
    node.path.write_bytes(older)
    assert node.started().claims == {"one": ONE}  # No container of before lives.
    node.path.write_bytes(newest)
    one = node.started()
    one.accept("v1beta1")
    write(one)
    node.path.write_bytes(older)
    salvaged(one := node.gateway())
    assert one.claims == {"one": ONE, "two": TWO}


def test_an_update_from_a_release_that_did_not_number_it_changes_nothing(node: Node) -> None:
    before = Ledger(node.state)
    before.set_side("", Side.PLUGIN)
    data = json.loads(write(before).path.read_bytes())
    del data["generation"]
    node.path.write_text(json.dumps(data))
    one = node.started()
    one.accept("v1beta1")
    write(one)
    assert node.started().sides == {"": Side.PLUGIN}
    node.path.write_text(json.dumps(data))
    assert "it was put back" in salvaged(node.gateway())


def test_a_gateway_of_such_a_release_in_between_changes_nothing(node: Node) -> None:
    node.older()
    data = json.loads(node.path.read_bytes())
    del data["claims"]["two"]
    node.path.write_text(json.dumps(data))
    assert node.started().claims == {}


def test_where_nothing_is_said_of_owners_there_is_no_second_file(node: Node) -> None:
    one = node.gateway()
    one.cordon("GPU-a", HUMS)
    write(one)
    assert not node.second.exists()
    assert "generation" not in json.loads(node.path.read_bytes())


def test_what_cannot_be_known_again_is_not_written_down(node: Node) -> None:
    node.second.parent.write_text("in the way")
    one = node.gateway()
    one.set_claim("one", ONE)
    with pytest.raises(LedgerError, match="gateway-state/claims"):
        write(one)
    assert one.pending
    node.second.parent.unlink()
    assert not write(one).pending
    assert node.second.exists()


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"generation": "x"}', b'{"generation": 9, "boot_id": "", "claims": {}}']
)
def test_a_second_file_that_says_nothing_sound_is_none(node: Node, data: bytes) -> None:
    node.older()
    node.second.write_bytes(data)
    assert node.started().claims == {"two": TWO}


def test_where_no_boot_is_named_there_is_none(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "boot_id", lambda: "")
    node.path.parent.mkdir()
    older = node.older()
    node.path.write_bytes(older)
    assert node.started().claims == {"one": ONE}


def test_a_write_while_it_is_read_is_none_that_was_put_back(node: Node) -> None:
    node.older()
    one, another = node.started(), node.started()

    def decode(data: bytes) -> tuple[dict[str, Any], str]:
        if another.claims:
            another.set_claim("two", None)
            write(another)
        return mend.decode(data)

    reads = Ledger(node.state, decode, node.root)
    reads.load()
    assert reads.claims == one.claims == {"two": TWO}


STEPS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["set", "drop", "cordon", "write", "load", "start"])))


@given(STEPS)
def test_two_gateways_never_take_the_others_file_for_an_older_one(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str]]
) -> None:
    node = Node(tmp_path_factory.mktemp("node"))
    ledgers, numbers = {"a": node.gateway(), "b": node.gateway()}, dict[int, Any]()
    for at, (who, step) in enumerate(steps):
        one = ledgers[who]
        if step == "set":
            one.set_claim(who, replace(ONE, at=float(at)))
        elif step == "drop":
            one.set_claim(who, None)
        elif step == "cordon":
            one.cordon("GPU-a", HUMS)
        elif step == "write":
            snapshot = one.snapshot()
            one.set_side(who, Side.DRA)  # What comes meanwhile is written next.
            one.settle(snapshot, one.save(snapshot))
            found = json.loads(node.path.read_bytes())
            owners, number = (found["claims"], found.get("sides", {})), found.get("generation", 0)
            assert numbers.setdefault(number, owners) == owners
            assert number == max(numbers), "no number comes twice"
            node.started()
        elif step == "load":
            one.load()
        else:
            ledgers[who] = node.started()
