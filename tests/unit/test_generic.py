"""Devices described by path globs: how many there are at most, which ones are preferred, and which rules are refused."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from contextlib import aclosing
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from devices import generic
from devices.generic import GenericSource, rule_error
from devices.model import Device, PreferredRequest
from devices.policy import Globbed, Policy
from devices.source import Inventory, Listing

PAGE = Path(__file__).parents[2] / "docs" / "devices.md"
FPGA = "example.com/fpga"
RULE = Globbed(FPGA, ("/dev/fpga*",))


def ids(inventory: Inventory, resource: str) -> list[str]:
    return [device.id for device in inventory[resource].devices]


async def test_so_many_devices_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generic, "MOST_FILES", 3)
    monkeypatch.setattr(generic, "MOST_DEVICES", 8)
    (tmp_path / "dev").mkdir()
    for number in range(9):
        (tmp_path / "dev" / f"fpga{number}").symlink_to("/dev/null")
    rules = RULE, Globbed("example.com/many", ("/dev/fpga*",), count=4)
    async with (
        aclosing(cast("Any", GenericSource(Policy(globbed=rules), tmp_path).watch())) as watch,
        asyncio.timeout(10),
    ):
        seen = await anext(watch)
    assert ids(seen, FPGA) == ["/dev/fpga0", "/dev/fpga1", "/dev/fpga2"]
    assert Counter(one.partition("::")[0] for one in ids(seen, "example.com/many")) == {
        "/dev/fpga0": 4,
        "/dev/fpga1": 4,
    }


# Which ones a container gets.


def known(places: dict[str, int | None], count: int = 1) -> dict[str, Device]:
    return {
        device_id: Device(device_id, numa_nodes=() if node is None else (node,))
        for path, node in places.items()
        for device_id in ([path] if count == 1 else [f"{path}::{number}" for number in range(count)])
    }


FOUR: dict[str, int | None] = {"a": 0, "b": 1, "c": 1, "d": None}


@pytest.mark.parametrize(
    ("devices", "available", "must", "size", "expected"),
    [
        pytest.param(known(FOUR), "a b c d", "", 2, "b c", id="on one NUMA node"),
        pytest.param(known(FOUR), "a b c d", "a", 2, "a d", id="what must be included is"),
        pytest.param(known(FOUR), "a b c d", "c", 2, "b c", id="where the container is anyway"),
        pytest.param(
            known({"a": 0, "b": 1, "c": 1, "d": 1}), "a b c d", "b", 2, "b c", id="though another has just enough"
        ),
        pytest.param(known(FOUR), "a b d", "", 1, "d", id="the node that has just enough, the first of equals"),
        pytest.param(known(FOUR), "a b c d", "", 4, "a b c d", id="all"),
        pytest.param(known(FOUR), "a x b", "", 2, "a b", id="one that isn't there comes last"),
        pytest.param(known(FOUR), "a x", "", 2, "a x", id="unless there is no other"),
        pytest.param(known({"a": 0, "b": 0}, 3), "a::0 a::1 b::0", "", 2, "a::0 b::0", id="of two files"),
        pytest.param(known({"a": 0, "b": 0}, 3), "a::0 a::1 b::0", "a::0", 2, "a::0 b::0", id="the other file"),
        pytest.param(known({"a": 0, "b": 0}, 3), "a::0 b::1 b::2", "", 1, "b::1", id="of the least used file"),
        pytest.param(known({"a": 0, "b": 1}, 3), "a::0 a::1 b::0", "", 2, "a::0 a::1", id="nearness before spread"),
        pytest.param(known({"a": 0}, 12), "a::10 a::2 a::9", "", 2, "a::2 a::9", id="by number"),
    ],
)
def test_prefer(devices: dict[str, Device], available: str, must: str, size: int, expected: str) -> None:
    request = PreferredRequest(tuple(available.split()), tuple(must.split()), size)
    assert generic._preferred(request, Listing(tuple(devices.values()))) == tuple(expected.split())


def nodes(choice: Any, devices: dict[str, Device]) -> int:
    return len({devices[one].numa_nodes for one in choice})


@given(st.lists(st.sampled_from([None, 0, 1, 2]), min_size=1, max_size=7), st.integers(1, 2), st.data())
def test_no_other_choice_is_on_fewer_numa_nodes(places: list[int | None], count: int, data: st.DataObject) -> None:
    devices = known({f"f{number}": place for number, place in enumerate(places)}, count)
    available = data.draw(st.lists(st.sampled_from(sorted(devices)), min_size=1, max_size=8, unique=True))
    must = data.draw(st.lists(st.sampled_from(available), max_size=3, unique=True))
    size = data.draw(st.integers(max(1, len(must)), len(available)))
    seen = Listing(tuple(devices.values()))
    chosen = generic._preferred(PreferredRequest(tuple(available), tuple(must), size), seen)
    again = generic._preferred(PreferredRequest(tuple(reversed(available)), tuple(must), size), seen)
    assert (len(set(chosen)), set(must) <= set(chosen) <= set(available), again) == (size, True, chosen)
    others = (one for one in combinations(available, size) if set(must) <= set(one))
    assert nodes(chosen, devices) == min(nodes(one, devices) for one in others)


# Rules.


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        pytest.param(RULE, None, id="a rule"),
        pytest.param(replace(RULE, shared=("/dev/a",), count=1000, permissions="mrw"), None, id="all of it"),
        pytest.param(replace(RULE, resource="fpga"), "has no domain", id="no resource name"),
        pytest.param(replace(RULE, resource="taken.com/x"), "taken.com/x has two rules", id="twice"),
        pytest.param(replace(RULE, paths=()), "has 0 paths. Allowed: 1 to 32", id="no path"),
        pytest.param(replace(RULE, paths=("/dev/a",) * 33), "has 33 paths", id="too many paths"),
        pytest.param(replace(RULE, paths=("dev/a",)), "below /dev", id="a relative path"),
        pytest.param(replace(RULE, paths=("/etc/*",)), "below /dev", id="elsewhere"),
        pytest.param(replace(RULE, paths=("/dev/../etc/*",)), "below /dev", id="elsewhere in disguise"),
        pytest.param(replace(RULE, paths=("/dev/",)), "below /dev", id="/dev itself"),
        pytest.param(replace(RULE, paths=("/dev/**/a",)), "'**'", id="all folders"),
        pytest.param(replace(RULE, shared=("/etc/shadow",)), "below /dev", id="a shared file elsewhere"),
        pytest.param(replace(RULE, paths=("/dev/a\n",)), "below /dev", id="two lines"),
        pytest.param(replace(RULE, paths=("/dev/" + "a" * 240,)), "at most 240", id="too long"),
        pytest.param(replace(RULE, count=0), "the count 0. Allowed: 1 to 1000", id="not even once"),
        pytest.param(replace(RULE, count=1001), "the count 1001. Allowed: 1 to 1000", id="too often"),
        pytest.param(replace(RULE, permissions=""), "permissions", id="no permission"),
        pytest.param(replace(RULE, permissions="rx"), "the permissions 'rx'", id="no such permission"),
        pytest.param(replace(RULE, permissions="rr"), "the permissions 'rr'", id="a permission twice"),
    ],
)
def test_rule(rule: Globbed, says: str | None) -> None:
    found = rule_error(rule, {"taken.com/x"})
    assert found is None if says is None else says in (found or "")


def test_the_page_has_rules() -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    rules = [msgspec.convert(one, Globbed) for one in yaml.safe_load(text)["gateway"]["devices"]]
    assert len(rules) == 3
    assert [rule_error(rule) for rule in rules] == [None] * 3
