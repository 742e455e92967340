"""Claims that ask for a time-slice interval: set by the driver's nvidia-smi, and put back, whenever a gateway dies."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from gateway_lab.kubelets.kubelet import KubeletError
from tests.contract.claiming import A, B, driver, simulate, started
from tests.contract.clock import patches
from tests.contract.cluster import Claim, Cluster
from tests.contract.node import GPU, Gateway, Node

KILLS = 20
NUMBERS = {"Short": "1", "Medium": "2", "Long": "3"}
PROGRAM = """#!/bin/sh
# What it is told to do, and what it is to do: see below.
echo "$LD_PRELOAD|$*" >> {folder}/calls
[ -e {folder}/fails ] && cat {folder}/fails && exit 4
[ "$1 $2 $4" = "compute-policy -i --set-timeslice" ] && [ $# = 5 ] && echo "$5" > {folder}/$3
"""


class Driver:
    """The driver's root, with a stand-in for its nvidia-smi that notes what it sets."""

    def __init__(self, node: Node) -> None:
        self.folder, self.root, self._node = node.folder, node.folder / "driver", node
        # Nothing else of the node runs while the loop waits for a program, and no simulated time passes.
        wait: Any = subprocess.Popen._wait  # type: ignore[attr-defined]
        patches.setattr(subprocess.Popen, "_wait", lambda one, timeout: wait(one, timeout=None))  # noqa: ARG005
        self.program = self.root / "usr/bin/nvidia-smi"
        self.program.parent.mkdir(parents=True)
        self.program.write_text(PROGRAM.format(folder=self.folder))
        self.program.chmod(0o755)
        self.options = "--container-driver-root", str(self.root), "--nvidia-driver-root", str(node.folder / "none")

    def slice(self, uuid: str = A) -> str:
        """Return the time slice that a GPU has; the default is 0."""
        path = self.folder / uuid
        return path.read_text().strip() if path.exists() else "0"

    @property
    def calls(self) -> list[str]:
        """With what it was called."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def noted(self) -> dict[str, str]:
        """What the state file says of GPUs whose interval is to be put back."""
        found: dict[str, Any] = json.loads((self._node.state / "ledger.json").read_text())
        return dict(found.get("time_slices", {}))


def asking(cluster: Cluster, claim: Claim, interval: str, **more: Any) -> Claim:
    """Have the claim ask for an interval."""
    sharing = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": interval}}
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": sharing}
    config = [{"source": "FromClaim", "opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}]

    def ask(one: dict[str, Any]) -> None:
        one["status"]["allocation"]["devices"].update(config=config)
        for result in one["status"]["allocation"]["devices"]["results"]:
            result.update(more)

    cluster.server.change(claim.path, ask)
    return claim


async def refused(cluster: Cluster, claim: Claim) -> str:
    """See that a claim is refused, and return the reason."""
    with pytest.raises(KubeletError) as error:
        await cluster.prepare(claim)
    return str(error.value)


@pytest.mark.parametrize("interval", NUMBERS)
async def test_an_interval_is_set_for_a_claim_and_put_back_at_its_end(node: Node, interval: str) -> None:
    there = Driver(node)
    async with Cluster(node) as cluster:
        await started(cluster, "1.34", *there.options)
        claim = asking(cluster, cluster.claim("claim", "gpu-0"), interval)
        assert (await cluster.prepare(claim)).gpus == {A}
        assert (there.slice(), there.slice(B), there.noted) == (NUMBERS[interval], "0", {A: interval})
        assert (await cluster.prepare(cluster.claim("other", "gpu-1"))).gpus == {B}
        await cluster.end(claim)
        assert (there.slice(), there.noted) == ("0", {})
        assert there.calls == [f"|compute-policy -i {A} --set-timeslice {one}" for one in (NUMBERS[interval], "0")]


async def test_the_drivers_own_nvml_is_used_where_the_program_is_of_another_root(node: Node) -> None:
    there = Driver(node)
    library = there.root / "usr/lib64/libnvidia-ml.so.1"
    library.parent.mkdir()
    library.symlink_to("/dev/null")
    target = there.root / "opt/smi"
    target.parent.mkdir()
    there.program.rename(target)
    there.program.symlink_to("/opt/smi")  # As a process with that root sees it.
    async with Cluster(node) as cluster:
        await started(cluster, "1.34", *there.options)
        await cluster.prepare(asking(cluster, cluster.claim("claim", "gpu-0"), "Long"))
        assert there.slice() == "3"
        assert there.calls[0].startswith(f"{library}|")


async def test_a_claim_of_several_gpus_has_its_interval_on_each(node: Node) -> None:
    there = Driver(node)
    async with Cluster(node) as cluster:
        await started(cluster, "1.34", *there.options)
        claim = asking(cluster, cluster.allocate("claim", "gpu-0", "gpu-1"), "Short")
        await cluster.prepare(claim)
        assert (there.slice(A), there.slice(B)) == ("1", "1")
        await cluster.unprepare(claim)
        assert (there.slice(A), there.slice(B)) == ("0", "0")


async def killed_at(cluster: Cluster, gateway: Gateway, turn: int, call: Any) -> bool:
    """Kill a gateway so many turns after a call to it began; return whether the call was answered."""
    gateway.process.dies_at = gateway.process.turns + turn
    try:
        await call
    except KubeletError:
        return False
    return True


@pytest.mark.parametrize("call", ["prepare", "unprepare"])
async def test_whenever_a_gateway_is_killed_the_interval_is_put_back(node: Node, call: str) -> None:
    there = Driver(node)
    async with Cluster(node) as cluster:
        one = await started(cluster, "1.34", *there.options)
        seen = set[tuple[str, bool]]()
        turns = 0
        for kill in range(KILLS + 1):
            claim = asking(cluster, cluster.claim(f"claim-{kill}", "gpu-0"), "Long")
            if call == "unprepare":
                await cluster.prepare(claim)
            work = getattr(cluster, call)(claim)
            if not kill:
                before = one.process.turns
                await work
                turns = one.process.turns - before
                await cluster.end(claim)
                continue
            await killed_at(cluster, one, max(1, turns * kill // KILLS), work)
            seen.add((there.slice(), A in there.noted))
            one.kill()
            one = cluster.gateway("--dra", "only", *there.options)
            await cluster.connected()
            await cluster.end(claim)
            assert (there.slice(), there.noted) == ("0", {}), f"kill {kill} at turn {turns * kill // KILLS} of {turns}"
        assert ("3", False) not in seen  # On disk before it is done, and until it is undone.
        assert ("3", True) in seen


async def test_what_a_claim_left_that_is_gone_is_put_back_at_the_next_start(node: Node) -> None:
    there = Driver(node)
    async with Cluster(node) as cluster:
        one = await started(cluster, "1.34", *there.options)
        claim = asking(cluster, cluster.claim("claim", "gpu-0"), "Medium")
        await cluster.prepare(claim)
        (there.folder / "fails").write_text("Insufficient Permissions")
        await cluster.end(claim)  # No pod hangs because of it.
        assert (there.slice(), there.noted) == ("2", {A: "Medium"})
        [said] = one.said("time-slice interval not put back: it is tried again")
        assert "ended with 4: Insufficient Permissions" in said["reason"]
        one.kill()
        (there.folder / "fails").unlink()
        cluster.gateway("--dra", "only", *there.options)
        await node.until(lambda: there.slice() == "0" and not there.noted, "the interval to be put back")


async def test_what_could_not_be_put_back_is_tried_again(node: Node) -> None:
    there = Driver(node)
    async with Cluster(node) as cluster:
        await started(cluster, "1.34", *there.options)
        claim = asking(cluster, cluster.claim("claim", "gpu-0"), "Medium")
        await cluster.prepare(claim)
        (there.folder / "fails").write_text("")
        await cluster.end(claim)
        (there.folder / "fails").unlink()
        await node.until(lambda: there.slice() == "0" and not there.noted, "the interval to be put back", 400)


@pytest.mark.parametrize("missing", [True, False])
async def test_a_claim_is_refused_by_name_where_its_interval_cannot_be_set(node: Node, *, missing: bool) -> None:
    there = Driver(node)
    async with Cluster(node) as cluster:
        await started(cluster, "1.34", *there.options)
        if missing:
            there.program.rename(there.folder / "aside")
        else:
            (there.folder / "fails").write_text("Not Supported")
        claim = asking(cluster, cluster.claim("claim", "gpu-0"), "Long")
        reason = await refused(cluster, claim)
        words = f"nvidia-smi is missing below {there.root}" if missing else "ended with 4: Not Supported"
        assert f"cannot set the time-slice interval of {A}: " in reason
        assert words in reason
        [told] = (await driver(cluster))["refused"]
        assert words in told
        cluster.forget(claim)
        assert (await cluster.prepare(cluster.claim("next", "gpu-0"))).gpus == {A}


def share(node: Node) -> tuple[str, ...]:
    """Give the node one GPU in two replicas; return the gateway's options for that."""
    file = node.folder / "config.json"
    sharing = {"timeSlicing": {"resources": [{"name": GPU, "replicas": 2}]}}
    file.write_text(json.dumps({"version": "v1", "sharing": sharing}))
    node.shared = (GPU,)
    simulate(node, A)
    return "--config-file", str(file)


async def test_who_has_an_interval_has_the_gpu_alone(node: Node) -> None:
    there, shared = Driver(node), share(node)
    async with Cluster(node) as cluster:
        await cluster.start_kubelet()
        cluster.gateway("--dra", "only", *shared, *there.options)
        await node.until(lambda: len(cluster.published()) == 2, "both replicas to be offered")
        first, second = (
            cluster.claim(f"claim-{number}", name) for number, name in enumerate(sorted(cluster.published()))
        )
        await cluster.prepare(first)
        asking(cluster, second, "Long")
        reason = await refused(cluster, second)
        assert "the time-slice interval Long is set only for a claim that has the GPU alone: still held" in reason
        assert "by claim default/claim-0" in reason
        await cluster.unprepare(first)
        await cluster.prepare(second)
        assert there.slice() == "3"
        reason = await refused(cluster, first)
        assert "by claim default/claim-1 (pod claim-1), with the time-slice interval Long" in reason
        await cluster.unprepare(second)
        node.claims.clear()
        assert (await cluster.prepare(first)).gpus == {A}
        assert there.slice() == "0"


async def test_no_interval_is_set_under_a_pod_that_has_a_replica_by_name(node: Node) -> None:
    there, shared = Driver(node), share(node)
    async with Cluster(node) as cluster:
        await cluster.start_kubelet()
        one = node.gateway(*shared)
        await node.allocatable_is(2)
        await node.admit("pod")
        one.kill()
        cluster.gateway("--dra", "only", *shared, *there.options)
        await node.until(lambda: len(cluster.published()) == 1, "the other replica to be offered")
        claim = asking(cluster, cluster.claim("claim"), "Long")
        reason = await refused(cluster, claim)
        assert "the time-slice interval Long is set only for a claim that has the GPU alone: still held as" in reason
        assert there.calls == []


async def test_an_administrators_claim_sets_no_interval(node: Node) -> None:
    there = Driver(node)
    async with Cluster(node) as cluster:
        await started(cluster, "1.34", *there.options)
        claim = asking(cluster, cluster.claim("claim", "gpu-0"), "Long", adminAccess=True)
        assert "a request with adminAccess sets no time-slice interval" in await refused(cluster, claim)
        assert there.calls == []
