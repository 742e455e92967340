"""``gateway plan --to dra``: which kubelets let GPUs move to claims, what pods may suffer there, and who goes when."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.cli import crossover, fleet
from gateway.cli.advice import kubelet
from gateway.cli.crossover import CrossingPlan
from gateway.cli.fleet import Node
from gateway.cli.main import gateway
from gateway.sides.table import ANNOTATION
from tests.unit.test_fleet import FACTS, GPU, listed


def node(name: str, version: str, devices: int = 8, move_to: str = "") -> Node:
    return Node(name, version, {GPU: devices} if devices else {}, move_to)


def made(*nodes: Node) -> CrossingPlan:
    return crossover.plan(FACTS, nodes)


def call(*arguments: str, nodes: str = "", columns: int = 100) -> Result:
    return CliRunner().invoke(gateway, ["plan", "--to", "dra", *arguments], input=nodes, env={"COLUMNS": str(columns)})


def item(name: str, version: str, annotations: Mapping[str, str] | None = None) -> dict[str, Any]:
    status = {"capacity": {GPU: "8"}, "nodeInfo": {"kubeletVersion": version}}
    return {"metadata": {"name": name, "annotations": annotations or {}}, "status": status}


KUBELETS = {
    "1.8": ("no", "no", {"claims-unknown"}),
    "1.31.14": ("no", "no", {"claims-unknown"}),
    "1.32.0": ("gate", "no", {"claims-off", "name-without-gpu", "one-driver-at-a-time"}),
    "1.32": ("gate", "no", {"claims-off", "name-without-gpu", "one-driver-at-a-time"}),
    "1.33.6": ("gate", "no", {"claims-off", "name-without-gpu"}),
    "1.34": ("yes", "gate", {"name-without-gpu"}),
    "1.35.4": ("yes", "gate", {"name-without-gpu"}),
    "1.36.0": ("yes", "yes", {"names-in-part"}),
    "1.37": ("yes", "yes", {"names-in-part"}),
}
"""What each kubelet takes by the facts, and the rows besides those of all that take claims."""
ALWAYS = {"names-wait", "starts-in-mid-way", "asked-again-late"}


@pytest.mark.parametrize("version", KUBELETS)
def test_each_kubelet_takes_what_was_seen_of_it(version: str) -> None:
    claims, names, rows = KUBELETS[version]
    [group] = crossover.plan_of(FACTS, kubelet(version, FACTS)).groups
    assert (group.claims, group.names) == (claims, names)
    assert set(group.rows) == rows | (ALWAYS if claims != "no" else set())
    assert (group.step is None) is (claims == "no")


def test_the_rows_are_in_order_and_nothing_is_said_twice() -> None:
    since = [kubelet(one.since, FACTS).release for one in FACTS.claims]
    assert since == sorted(set(since))
    assert since[0] == kubelet(FACTS.first, FACTS).release
    for one, after in pairwise(FACTS.claims):
        assert (one.claims, one.names) != (after.claims, after.names)


@pytest.mark.parametrize("minor", range(8, 38))
def test_who_may_run_a_pod_without_its_gpu_is_never_said_to_know_names(minor: int) -> None:
    """The two are said of versions in two places: a version between them would be told that all is well."""
    found = crossover.plan_of(FACTS, kubelet(f"1.{minor}", FACTS))
    can = found.groups[0].claims != "no"
    assert ("name-without-gpu" in found.rows) is (can and found.groups[0].names != "yes")


ORDERS: Mapping[str, tuple[tuple[Node, ...], list[tuple[int | None, str, tuple[str, ...]]]]] = {
    "the newest first, and who can't stays": (
        (node("a", "v1.31.1"), node("b", "v1.36.3"), node("c", "v1.37.1"), node("d", "v1.32.13")),
        [(1, "1.37.1", ("c",)), (2, "1.36.3", ("b",)), (3, "1.32.13", ("d",)), (None, "1.31.1", ("a",))],
    ),
    "the fewest devices first": (
        (node("big", "v1.37.1"), node("z", "v1.37.1", 1), node("y", "v1.37.1", 1)),
        [(1, "1.37.1", ("y", "z", "big"))],
    ),
    "vendors' words don't matter": (
        (node("a", "v1.36.3-gke.1"), node("b", "v1.36.3-eks-2")),
        [(1, "1.36.3", ("a", "b"))],
    ),
    "none that can": ((node("a", "v1.28.15"),), [(None, "1.28.15", ("a",))]),
}


@pytest.mark.parametrize("name", ORDERS)
def test_nodes_cross_in_an_order(name: str) -> None:
    nodes, wanted = ORDERS[name]
    assert [(group.step, group.version, group.nodes) for group in made(*nodes).groups] == wanted


NAMES = {
    "all know them": (("1.36", "1.37"), "yes"),
    "one needs a gate": (("1.35", "1.37"), "gate"),
    "one doesn't": (("1.32", "1.35", "1.37"), "no"),
    "who can't cross doesn't count": (("1.28", "1.37"), "yes"),
    "nobody can cross": (("1.28",), "no"),
}


@pytest.mark.parametrize("name", NAMES)
def test_one_kubelet_decides_about_the_class_of_all(name: str) -> None:
    versions, wanted = NAMES[name]
    found = made(*(node(version, version) for version in versions))
    assert found.names == wanted
    classes = " ".join(line for line in found.first if "DeviceClass" in line)
    assert ("without extendedResourceName" in classes) is (wanted != "yes" and bool(found.first))


def test_only_kubelets_with_a_gate_ask_for_the_older_api() -> None:
    assert any("v1beta1" in line for line in made(node("a", "1.33"), node("b", "1.37")).first)
    assert not any("v1beta1" in line or "DynamicResourceAllocation" in line for line in made(node("b", "1.34")).first)


def test_where_nobody_can_cross_nothing_is_advised() -> None:
    found = made(node("a", "1.31"))
    assert (found.first, found.each, found.back) == ((), (), ())
    assert list(found.rows) == ["claims-unknown"]


def test_the_way_back_names_what_an_older_kubelet_ends() -> None:
    assert any("below 1.36" in line for line in made(node("a", "1.37")).back)


def test_who_is_left_out_and_who_cant_be_judged() -> None:
    found = made(node("a", "1.37"), node("b", "1.37", 0), node("c", "odd"), node("d", "v1.99.0"))
    assert (found.nodes, found.without, found.devices) == (3, 1, 8)
    assert [one.node for one in found.unknown] == ["c", "d"]


def test_nodes_whose_annotation_sends_them_are_told_apart() -> None:
    content = listed(
        item("a", "v1.37.1", {ANNOTATION: "dra"}), item("b", "v1.37.1", {ANNOTATION: "plugin"}), item("c", "v1.37.1")
    )
    [group] = crossover.plan(FACTS, fleet.read(content.encode())).groups
    assert group.told == ("a",)


def test_a_person_reads_a_table() -> None:
    nodes = listed(item("n1", "v1.37.1", {ANNOTATION: "dra"}), item("n2", "v1.32.13"), item("n3", "v1.28.15"))
    text = call("--nodes", "-", nodes=nodes).output
    assert "3 nodes with 24 devices, to claims (DRA)." in text
    assert "2 nodes can move." in text
    assert "1 node left with the device plugin API" in text
    assert "WITHOUT A GPU" in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "1 1.37.1 1 8 yes yes 1 n1" in rows
    assert "2 1.32.13 1 8 with a gate NO 0 n2" in rows
    assert "- 1.28.15 1 8 no - 0 n3" in rows
    assert "name-without-gpu (kubelet 1.32.13)" in text


@pytest.mark.parametrize("version", KUBELETS)
def test_one_kubelet_has_its_own_page(version: str) -> None:
    result = call("--from", version, columns=60)
    assert result.exit_code == 0, result.output
    takes = KUBELETS[version][0] != "no"
    assert ("can move" in " ".join(result.output.split())) is takes
    assert ("WITHOUT A GPU" in " ".join(result.output.split())) is (takes and KUBELETS[version][1] != "yes")


def test_a_program_reads_json() -> None:
    found = json.loads(call("--nodes", "-", "--json", nodes=listed(item("n1", "v1.34.2"))).output)
    assert (found["schema"], found["to"], found["names"]) == (1, "dra", "gate")
    [group] = found["groups"]
    assert (group["step"], group["nodes"], group["claims"]) == (1, ["n1"], "yes")
    assert "1.32.13" in found["rows"]["name-without-gpu"]["source"]


REFUSED = {
    "neither": ([], "Give either --from, for one node, or --nodes, for many"),
    "a jump": (["--from", "1.37", "--direct"], "because no kubelet changes"),
    "no nodes": (["--nodes", "-"], "kubectl get nodes -o json"),
    "an unknown kubelet": (["--from", "1.99"], "a newer gateway may know it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_planned_is_refused(name: str) -> None:
    arguments, reason = REFUSED[name]
    done = call(*arguments)
    assert done.exit_code == 2
    assert reason in " ".join(done.output.split())


def test_a_name_cannot_steer_the_terminal() -> None:
    nodes = listed(item("n\x1b[2J", "v1.37.9"), item("m\x1b[2J", "x"))
    assert "\x1b" not in call("--nodes", "-", nodes=nodes).output
