"""A state file that is put back is known by a second file, and nothing that gateways do to it makes it look so."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.memory import ledger as module
from gateway.memory import salvage, witness
from gateway.memory.claimed import Claimed
from gateway.memory.file import LedgerError
from gateway.memory.ledger import Ledger
from gateway.memory.rows import FORMAT, Cordon
from gateway.sides.side import Side
from tests.unit.test_ledger import salvaged, write

ONE, TWO, HUMS = Claimed("ns", "one", "d", 1.0), Claimed("ns", "two", "d", 2.0), Cordon("hums", 1.0)
SIDES = {"": Side.PLUGIN, "GPU-a": Side.DRA}


class Node:
    """The state directory, and the kubelet's folder. A gateway had claim one, then claim two; ``older`` is the file with one."""

    def __init__(self, root: Path) -> None:
        self.root, self.path, self.second = root, root / "state" / "ledger.json", root / witness.PATH
        one = self.gateway()
        one.set_side("", Side.PLUGIN)
        one.cordon("GPU-a", HUMS)
        one.set_claim("one", ONE)
        self.older = write(one).path.read_bytes()
        one.uncordon("GPU-a")
        one.set_side("GPU-a", Side.DRA)
        one.set_claim("one", None)
        one.set_claim("two", TWO)
        self.newest = write(one).path.read_bytes()

    def gateway(self) -> Ledger:
        """A gateway that has read nothing yet."""
        return Ledger(self.root / "state", socket_dir=self.root)

    def started(self) -> Ledger:
        one = self.gateway()
        one.load()
        return one


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


CLAIMS = {"one": ONE, "two": TWO}
NO_NUMBER = b'{"format":%d,"sides":{"":"plugin"}}' % FORMAT


@pytest.mark.parametrize(
    ("spoil", "words", "claims", "sides"),
    [
        pytest.param(lambda node: node.older, "older than the one that a gateway wrote", CLAIMS, {}, id="older"),
        pytest.param(lambda _: None, "it is gone; the gateway continues", {"two": TWO}, {}, id="gone"),
        pytest.param(lambda _: b"{", "truncated", {"two": TWO}, {}, id="damaged"),
        pytest.param(lambda node: node.newest[:-1], "truncated", {"two": TWO}, SIDES, id="damaged behind the owners"),
        pytest.param(lambda _: NO_NUMBER, "it was put back", {"two": TWO}, {}, id="without a number"),
    ],
)
def test_what_another_file_says_of_owners_is_lost_but_no_claim_is(
    node: Node, spoil: Callable[[Node], bytes | None], words: str, claims: Mapping[str, Claimed], sides: Any
) -> None:
    node.path.unlink()
    if (data := spoil(node)) is not None:
        node.path.write_bytes(data)
    one = node.gateway()
    assert words in salvaged(one)
    assert (one.claims, one.sides) == (claims, sides)
    assert data is None or node.path.with_name(one.aside).read_bytes() == data
    write(one)
    assert (node.started().claims, node.started().sides) == (claims, sides)


def test_an_older_file_under_a_gateway_that_stands_by_changes_nothing_of_what_it_knows(node: Node) -> None:
    one = node.started()
    node.path.write_bytes(node.older)
    salvaged(one)
    assert (one.claims, one.sides) == ({"one": ONE, "two": TWO}, SIDES)


def test_a_write_while_it_is_read_is_none_that_was_put_back(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    leads, decode = node.started(), salvage.decode

    def slowly(data: bytes) -> tuple[dict[str, Any], str]:
        leads.set_claim("two", None)
        write(leads)
        return decode(data)

    monkeypatch.setattr(salvage, "decode", slowly)
    assert node.started().claims == {"two": TWO}


def test_a_write_that_changes_no_owner_leaves_the_second_file_alone(node: Node) -> None:
    one = node.started()
    one.set_claim("three", ONE)
    write(one)
    before = node.second.stat().st_ino
    one.accept("v1beta1")
    write(one)
    assert node.second.stat().st_ino == before


def test_it_counts_in_its_boot_and_any_write_in_another_one_has_the_file_known_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_boot_id", lambda: "another boot")
    node.path.write_bytes(node.older)
    assert node.started().claims == {"one": ONE}  # No container of before lives.
    node.path.write_bytes(node.newest)
    one = node.started()
    one.accept("v1beta1")
    write(one)
    node.path.write_bytes(node.older)
    salvaged(one := node.gateway())
    assert one.claims == {"one": ONE, "two": TWO}


def test_where_nothing_is_said_of_owners_or_no_boot_is_named_there_is_no_second_file(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.second.unlink()
    node.path.unlink()
    one = node.gateway()
    one.cordon("GPU-a", HUMS)
    assert "generation" not in json.loads(write(one).path.read_bytes())
    assert not node.second.exists()
    monkeypatch.setattr(module, "_boot_id", lambda: "")
    one = node.gateway()
    one.set_claim("one", ONE)
    write(one)
    assert not node.second.exists()


def test_what_cannot_be_known_again_is_not_written_down(node: Node) -> None:
    one = node.started()
    node.second.unlink()
    node.second.parent.rmdir()
    node.second.parent.write_text("in the way")
    one.set_claim("one", ONE)
    with pytest.raises(LedgerError, match="gateway-state/claims"):
        write(one)
    assert one.pending
    node.second.parent.unlink()
    assert not write(one).pending
    assert node.second.exists()
