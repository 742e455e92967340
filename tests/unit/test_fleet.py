"""``gateway plan --nodes``: which nodes go through what, in which order, and what a change board reads of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.cli import fleet, fleettext
from gateway.cli.advice import PlanError, kubelet, load
from gateway.cli.fleet import Fleet, Node
from gateway.cli.main import gateway

FACTS = load()
GPU = "nvidia.com/gpu"


def node(name: str, version: str, **capacity: int) -> Node:
    return Node(name, version, {GPU: 8} | capacity)


def made(*nodes: Node, to: str = "1.28", direct: bool = False) -> Fleet:
    return fleet.plan(FACTS, nodes, kubelet(to, FACTS), direct=direct)


def hops(found: Fleet) -> list[tuple[int, str, str, int]]:
    return [(step.number, step.hop.old, step.hop.new, step.nodes) for step in found.steps]


def listed(*nodes: Mapping[str, Any]) -> str:
    return json.dumps({"kind": "List", "items": nodes})


def item(name: str, version: str, capacity: Mapping[str, str] | None = None) -> dict[str, Any]:
    status = {
        "capacity": {"cpu": "16", GPU: "8"} if capacity is None else capacity,
        "nodeInfo": {"kubeletVersion": version},
    }
    return {"metadata": {"name": name, "labels": {"a": "b"}}, "spec": {"taints": []}, "status": status}


def call(text: str, *arguments: str) -> Result:
    return CliRunner().invoke(gateway, ["plan", "--nodes", "-", *arguments], input=text)


ORDERS: Mapping[str, tuple[tuple[Node, ...], str, list[tuple[int, str, str, int]]]] = {
    "the oldest first, and all meet": (
        (node("b", "v1.27.9"), node("a", "v1.26.15"), node("c", "v1.26.15")),
        "1.28",
        [(1, "1.26.15", "1.27", 2), (2, "1.27", "1.28", 2), (2, "1.27.9", "1.28", 1)],
    ),
    "nodes that go through the same together": (
        (node("a", "v1.25.16"), node("b", "v1.26.15")),
        "1.28",
        [(1, "1.25.16", "1.26", 1), (2, "1.26", "1.27", 1), (2, "1.26.15", "1.27", 1), (3, "1.27", "1.28", 2)],
    ),
    "vendors' words don't matter": (
        (node("a", "v1.27.3-gke.100"), node("b", "v1.27.3-eks-1a2b"), node("c", "v1.27.3+k3s1")),
        "1.28",
        [(1, "1.27.3", "1.28", 3)],
    ),
    "a way back begins with the newest": (
        (node("a", "v1.28.15"), node("b", "v1.27.9")),
        "1.26",
        [(1, "1.28.15", "1.27", 1), (2, "1.27", "1.26", 1), (2, "1.27.9", "1.26", 1)],
    ),
    "who is there stays": ((node("a", "v1.28.3"), node("b", "v1.27.9")), "1.28", [(1, "1.27.9", "1.28", 1)]),
    "but not below a patch release": ((node("a", "v1.28.3"),), "1.28.15", [(1, "1.28.3", "1.28.15", 1)]),
}


@pytest.mark.parametrize("name", ORDERS)
def test_the_steps_are_in_an_order_that_works(name: str) -> None:
    nodes, goal, wanted = ORDERS[name]
    assert hops(made(*nodes, to=goal)) == wanted


def test_a_direct_plan_is_one_hop() -> None:
    assert hops(made(node("a", "v1.24.17"), to="1.28", direct=True)) == [(1, "1.24.17", "1.28", 1)]


def test_nodes_count_once_by_the_strictest_of_their_steps() -> None:
    found = made(node("a", "v1.10.13"), node("b", "v1.9.11"), node("c", "v1.28.15"), to="1.28")
    assert found.drained == {"required": 2, "advised": 0, "not needed": 0}
    assert sum(len(group.nodes) for group in found.groups if group.plan is None) == 1


def test_what_to_do_before_the_first_step_is_said_where_there_is_one() -> None:
    moves, stays = node("a", "v1.27.9"), node("b", "v1.28.15")
    found = made(moves, stays, to="1.28")
    (plan,) = (group.plan for group in found.groups if group.plan)
    assert found.first == plan.first != ()
    assert made(stays, to="1.28").first == ()


def test_nodes_without_devices_are_left_out() -> None:
    found = made(node("a", "v1.27.9"), Node("b", "v1.10.13"))
    assert (found.nodes, found.without, found.devices) == (1, 1, 8)


def test_what_cannot_be_judged_is_named_with_the_reason() -> None:
    found = made(
        node("a", "v1.27.9"), node("b", "weird"), node("c", "v1.99.0"), node("d", ""), node("e", "v1." + 5000 * "9")
    )
    assert [one.node for one in found.unknown] == ["b", "c", "d", "e"]
    assert "a newer gateway may know it" in found.unknown[1].why


def test_the_nodes_with_the_fewest_devices_come_first() -> None:
    (group,) = made(
        Node("big", "v1.27.9", {GPU: 8}), Node("z", "v1.27.9", {GPU: 1}), Node("a", "v1.27.9", {GPU: 1})
    ).groups
    assert group.nodes == ("a", "z", "big")


def test_the_list_of_nodes_says_how_it_is_sorted() -> None:
    old, new = Node("old", "v1.26.9", {GPU: 8}), Node("new", "v1.27.9", {GPU: 1})
    lines = list(fleettext.render(made(new, old)))
    rows = lines[lines.index("Nodes by kubelet version, then by number of devices") :]
    assert [row.split()[-1] for row in rows if "1.2" in row][:2] == ["old", "new"]


CAPACITIES = {
    "a GPU": ({GPU: "8", "cpu": "16"}, {GPU: 8}),
    "a vendor of its own": ({"example.com/fpga": "2"}, {"example.com/fpga": 2}),
    "none that is healthy or left": ({GPU: "0"}, {}),
    "pages, volumes": ({"hugepages-1Gi": "0", "attachable-volumes-aws/ebs": "25", "memory": "1Gi"}, {}),
    "no number": ({GPU: "8Gi"}, {}),
    "a number that is no count": (
        {GPU: "9" * 9, "example.com/fpga": "9" * 10, "example.com/nic": "9" * 5000},
        {GPU: 999_999_999},
    ),
}


@pytest.mark.parametrize("name", CAPACITIES)
def test_devices_are_what_has_a_domain(name: str) -> None:
    capacity, wanted = CAPACITIES[name]
    (found,) = fleet.read(listed(item("a", "v1.27.9", capacity)).encode())
    assert found.devices == wanted


@pytest.mark.parametrize("text", ["", "[]", '{"items": [1]}', '{"kind": "Node"}', "[" * 10_000])
def test_what_is_no_list_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="kubectl get nodes -o json"):
        fleet.read(text.encode())


def test_a_change_board_reads_a_table() -> None:
    text = call(listed(item("n1", "v1.27.3-gke.100"), item("n2", "v1.10.13"), item("n3", "no")), "--to", "1.28").output
    assert "3 nodes with 24 devices, to kubelet 1.28." in text
    assert "1 node must be drained" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["STEP", "FROM", "TO", "AT", "LEAST", "NODES", "DEVICES", "DRAIN", "CHECKPOINT"] in rows
    assert any(row[:3] == ["1", "1.10.13", "1.11"] and "DRAIN" in row and "LOST" in " ".join(row) for row in rows)
    assert "1.27.3 (1 node): A kubelet restart kills running GPU pods; fixed in 1.27.6" in text
    assert "n3: '" in text


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("v1.10.13", "must be drained at one step or more"),
        ("v1.27.3", "can go without a drain"),
        ("v1.28.15", "already there: nothing to do"),
    ],
)
def test_a_sentence_fits_one_node_and_several(version: str, words: str) -> None:
    for count, nodes in ((1, "1 node"), (2, "2 nodes")):
        names = [item(f"n{number}", version) for number in range(count)]
        assert f"  {nodes} {words}." in call(listed(*names), "--to", "1.28").output


def test_a_program_reads_json() -> None:
    found = json.loads(call(listed(item("n1", "v1.27.9")), "--to", "1.28", "--json").output)
    assert found["goal"] == "1.28"
    assert found["steps"][0]["hop"]["new"] == "1.28"
    assert found["groups"][0]["nodes"] == ["n1"]
    assert found["groups"][0]["plan"]["rows"]


REFUSED = {
    "neither": (["--to", "1.28"], "Give either --from, for one node, or --nodes, for many"),
    "both": (
        ["--from", "1.27", "--nodes", "-", "--to", "1.28"],
        "Give either --from, for one node, or --nodes, for many",
    ),
    "no nodes": (["--nodes", "-", "--to", "1.28"], "kubectl get nodes -o json"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_planned_is_refused(name: str) -> None:
    arguments, reason = REFUSED[name]
    done = CliRunner().invoke(gateway, ["plan", *arguments], input="")
    assert done.exit_code == 2
    assert reason in done.output


def test_where_no_node_has_devices_it_says_so() -> None:
    output = call(listed(), "--to", "1.28").output
    assert "nothing to plan" in output
    assert "NAMES" not in output


def test_a_name_cannot_steer_the_terminal() -> None:
    assert "\x1b" not in call(listed(item("n\x1b[2J", "v1.27.9"), item("m\x1b[2J", "x")), "--to", "1.28").output


def test_the_page_has_a_row_for_each_version_and_a_column_for_each_step() -> None:
    text = listed(item("a", "v1.25.16"), item("<b>", "v1.26.15"), item("c", "v1.28.15"))
    page = call(text, "--to", "1.28", "-o", "html").output
    heads = re.findall(r"<th>([^<]+)", page)
    assert heads == ["kubelet today", "step 1", "step 2", "step 3", "1.25.16", "1.26.15", "1.28.15"]
    assert re.findall(r'<td class="(\w+)">', page)
    assert len(re.findall(r"<td[ >]", page)) == 9
    assert "&lt;b&gt;" in page
    assert "<b>" not in page


@pytest.mark.parametrize("arguments", [["--nodes", "-", "--to", "dra"], ["--from", "1.27", "--to", "1.28"]])
def test_only_the_steps_of_many_nodes_are_drawn(arguments: list[str]) -> None:
    result = CliRunner().invoke(gateway, ["plan", *arguments, "-o", "html"], input=listed())
    assert (result.exit_code, "-o html needs --nodes" in result.output) == (2, True)
