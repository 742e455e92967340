"""What becomes of the GPU pods of a whole node, by what the kubelet's records, the API server and their own logs say."""

import asyncio
import datetime as dt
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.kubelet.view import View
from gateway_lab.node import Node
from gateway_lab.node.api import Access, Api
from gateway_lab.node.installed import IDS
from gateway_lab.node.pods import Account
from gateway_lab.node.stage import BARE, DEPLOYED, KINDS, STATIC, Stage, Standing, now
from gateway_lab.node.watch import ContainerSeen, PodSeen, Recorder
from gateway_lab.trials.scenarios import RESOURCE

RUNS = {"main": ContainerSeen("c", 0, "running", "", ready=True)}


def pod(name: str, phase: str = "Running", app: str = "") -> PodSeen:
    return PodSeen(0, f"uid-{name}", "default", name, app, phase, "", "", ready=True, containers=RUNS)


def write_log(node: Node, pod: str, uid: str, *texts: str) -> None:
    """Write what a container says just now."""
    log = node.root / f"var/log/pods/default_{pod}_{uid}/main/0.log"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"{now()}000Z stdout F {text}\n" for text in texts))


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    api = Api(Access("http://localhost", ""))
    return Stage(Node(tmp_path), api, Recorder(api), 0)


STANDING = Standing(pod(BARE), "u", frozenset({"GPU-0"}), Account(frozenset(), frozenset(), "", (), "t0"))


@pytest.mark.parametrize(
    ("after", "said"),
    [
        pytest.param(STANDING, "kept", id="as it was"),
        pytest.param(None, "failed", id="gone"),
        pytest.param(replace(STANDING, devices=frozenset()), "kept, another GPU", id="its GPU was taken"),
        pytest.param(
            replace(STANDING, account=replace(STANDING.account, began="t1")), "restarted, the same GPU", id="restarted"
        ),
        pytest.param(replace(STANDING, uid="v"), "replaced, the same GPU", id="another pod"),
        pytest.param(
            replace(STANDING, uid="v", devices=frozenset({"GPU-1"})), "replaced, another GPU", id="with another GPU"
        ),
    ],
)
def test_the_fate_of_a_pod(stage: Stage, after: Standing | None, said: str) -> None:
    assert stage._fate(STANDING, after) == said


def test_pods_that_run_are_found_with_what_they_hold(stage: Stage) -> None:
    write_log(stage.node, BARE, "uid-bare", f"told {IDS[0]}", "open /dev/nvidia0")
    stage.seen.pods = {one.uid: one for one in (pod(BARE), pod("other", app="other"))}
    stage.view = View({RESOURCE: {IDS[0]: "default/bare/main", IDS[1]: "default/other/main"}})
    found = stage.standing()
    assert {kind: (one.uid, one.devices) for kind, one in found.items()} == {BARE: ("uid-bare", frozenset({IDS[0]}))}
    assert stage._mistold(found) == []


def test_a_static_pod_runs_when_it_says_so_whatever_the_api_server_knows(stage: Stage) -> None:
    write_log(stage.node, "static-node-1", "kubelets-own", f"told {IDS[2]}", "open /dev/nvidia2")
    mirror = replace(pod("static-node-1", "Pending", app=STATIC), containers={})
    stage.seen.pods = {mirror.uid: mirror}
    assert stage.standing()[STATIC].uid == "kubelets-own"
    log = stage.node.root / "var/log/pods/default_static-node-1_kubelets-own/main/0.log"
    old = (dt.datetime.now(dt.UTC) - dt.timedelta(seconds=9)).strftime("%Y-%m-%dT%H:%M:%S.%f")
    log.write_text(f"{old}000Z stdout F open /dev/nvidia2\n")
    assert stage.standing() == {}


async def test_a_static_pod_that_is_silent_for_a_moment_is_awaited(stage: Stage) -> None:
    for name in (BARE, DEPLOYED):
        write_log(stage.node, name, f"uid-{name}", "told", "open /dev/nvidia0")
    stage.seen.pods = {one.uid: one for one in map(pod, (BARE, DEPLOYED, STATIC))}
    awaited = asyncio.create_task(stage.settled())
    await asyncio.sleep(0)
    assert not awaited.done()
    write_log(stage.node, STATIC, "uid-static", "told", "open /dev/nvidia1")
    assert (await awaited).keys() == {*KINDS}


async def test_a_pod_that_has_failed_is_not_awaited(stage: Stage) -> None:
    stage.seen.pods = {one.uid: one for one in (pod(BARE), pod(DEPLOYED), pod(STATIC, "Failed"))}
    assert (await stage.settled()).keys() == {BARE, DEPLOYED}


def test_what_a_pod_was_told_is_held_against_the_records(stage: Stage) -> None:
    told = Account(frozenset({IDS[1]}), frozenset({"/dev/nvidia1"}), "", ())
    one = Standing(pod(BARE), "u", frozenset({IDS[0]}), told)
    [said] = stage._mistold({BARE: one})
    assert said.startswith(f"pod bare holds ['{IDS[0]}'] by the kubelet's records, was told ['{IDS[1]}']")
    right = replace(one, devices=frozenset({IDS[1]}))
    assert stage._mistold({BARE: right, STATIC: right}) == [f"{IDS[1]} is given to both bare and static"]
