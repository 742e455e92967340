"""The track record: its table is whole, its page is made from it, and what it shows is seen on emulated kubelets, too."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from gateway.cli.main import gateway
from gateway_lab.bugs.run import Sight, look, versions
from gateway_lab.bugs.table import BUGS, Bug
from gateway_lab.kubelets.behaviour import behaviour


@pytest.mark.parametrize(("name", "bug"), BUGS.items())
def test_each_bug_is_shown_or_says_why_not(name: str, bug: Bug) -> None:
    assert (bug.show is None) is bool(bug.why_not), name
    assert (bug.bad != "") is (bug.show is not None)
    assert [bug.befalls(behaviour(version).minor) for version in versions(name)] == [True, False][: len(versions(name))]


@pytest.mark.parametrize(
    ("name", "version", "seen"),
    [
        pytest.param("issue-127803", "1.36", True, id="it is there"),
        pytest.param("issue-127803", "1.37", False, id="it is fixed"),
        pytest.param("checkpoint-1.11", "1.11", True, id="a hop"),
        pytest.param("readmission", "1.24", False, id="and not where it isn't"),
        pytest.param("forgotten-in-flight", "1.37", True, id="what is in flight"),
        pytest.param("issue-138446", "1.37", True, id="an init container that ended"),
        pytest.param("checkpoint-in-place", "1.9", True, id="a file that is written over"),
        pytest.param("checkpoint-in-place", "1.10", False, id="a file that is replaced"),
    ],
)
async def test_a_bug_is_shown(name: str, version: str, seen: bool) -> None:
    sight = await look(name, version, lambda _: None)
    assert (bool(sight.seen), sight.expected, sight.genuine) == (seen, True, False), str(sight)


def test_what_isnt_as_the_table_says_is_told() -> None:
    sight = Sight("phantoms", "1.8", genuine=True, seen="")
    assert not sight.expected
    assert str(sight).endswith("doesn't have it. NOT AS EXPECTED")


@pytest.mark.parametrize(
    ("names", "status", "words"),
    [
        pytest.param(["phantoms"], 0, ["1.8 (emulated) has it", "1.9 (emulated) doesn't have it"], id="shown"),
        pytest.param(["issue-102880"], 2, ["can't be shown", "1.20.15"], id="not to be shown"),
        pytest.param(["phantoms", "register"], 2, ["unknown value register. Allowed: issue-127803"], id="no bug"),
        pytest.param([], 0, ["issue-127803 when an old plugin's stream ends"], id="a list"),
    ],
)
def test_the_command(names: list[str], status: int, words: list[str]) -> None:
    result = CliRunner().invoke(gateway, ["bugs", "--genuine", "no", *names])
    assert result.exit_code == status, result.output
    for word in words:
        assert word in " ".join(result.output.split())
