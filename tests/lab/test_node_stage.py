"""What becomes of the GPU pods of a whole node, by what the kubelet's records, the API server and their own logs say."""

from dataclasses import replace
from pathlib import Path

import pytest

from gateway_lab.node import Node
from gateway_lab.node.api import Access, Api
from gateway_lab.node.installed import IDS
from gateway_lab.node.pods import Account
from gateway_lab.node.stage import BARE, STATIC, Stage, Standing
from gateway_lab.node.watch import ContainerSeen, PodSeen, Recorder

RUNS = {"main": ContainerSeen("c", 0, "running", "", ready=True)}


def pod(name: str, phase: str = "Running", app: str = "") -> PodSeen:
    return PodSeen(0, f"uid-{name}", "default", name, app, phase, "", "", ready=True, containers=RUNS)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    api = Api(Access("http://localhost", ""))
    return Stage(Node(tmp_path), api, Recorder(api), 0)


STANDING = Standing(pod(BARE), "u", frozenset({"GPU-0"}), Account(frozenset(), frozenset(), "", (), "t0"))


FATES = {
    "as it was": (STANDING, "kept"),
    "gone": (None, "failed"),
    "its GPU was taken": (replace(STANDING, devices=frozenset()), "kept, another GPU"),
    "restarted": (replace(STANDING, account=replace(STANDING.account, began="t1")), "restarted, the same GPU"),
    "another pod": (replace(STANDING, uid="v"), "replaced, the same GPU"),
    "with another GPU": (replace(STANDING, uid="v", devices=frozenset({"GPU-1"})), "replaced, another GPU"),
}


@pytest.mark.parametrize(("after", "said"), FATES.values(), ids=FATES)
def test_the_fate_of_a_pod(stage: Stage, after: Standing | None, said: str) -> None:
    assert stage._fate(STANDING, after) == said


def test_what_a_pod_was_told_is_held_against_the_records(stage: Stage) -> None:
    told = Account(frozenset({IDS[1]}), frozenset({"/dev/nvidia1"}), "", ())
    one = Standing(pod(BARE), "u", frozenset({IDS[0]}), told)
    [said] = stage._mistold({BARE: one})
    assert said.startswith(f"pod bare holds ['{IDS[0]}'] by the kubelet's records, was told ['{IDS[1]}']")
    right = replace(one, devices=frozenset({IDS[1]}))
    assert stage._mistold({BARE: right, STATIC: right}) == [f"{IDS[1]} is given to both bare and static"]
