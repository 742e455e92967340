"""What it costs a real process to follow its node's label and to say at the API server how the node is."""

from __future__ import annotations

from gateway.configuration.flags import NODE_LABEL
from gateway_lab.bench.footprint import footprint
from gateway_lab.trials.scenarios import RESOURCE, node
from tests.fakes.apiserver import ApiServer
from tests.unit.kubernetes import authority, server
from tests.unit.kubernetes import node as labelled

__all__ = ["authority", "server"]
TWICE = f"sharing: {{timeSlicing: {{resources: [{{name: {RESOURCE}, replicas: 2}}]}}}}"
TELLS = ("--node-condition", "--node-events", "--startup-taint", "a/b")


async def test_the_label_and_what_the_node_says_cost_less_than_15_mib(server: ApiServer) -> None:
    server.put("/api/v1/nodes/n1", **labelled({NODE_LABEL: "twice"}))
    cost = []
    for asked in (False, True):
        async with node(gpus={RESOURCE: 2}) as made:
            configs = made.root / "configs"
            configs.mkdir()
            (configs / "twice").write_text(TWICE)
            kubeconfig = server.kubeconfig(made.root / "kubeconfig")
            chosen = ("--config-file-srcdir", str(configs), "--kubeconfig", str(kubeconfig), "--node-name", "n1")
            made.options = (*chosen, *TELLS) if asked else ()
            kubelet = await made.start_kubelet("1.37")
            gateway = await made.start_gateway()
            await kubelet.wait(RESOURCE, 4 if asked else 2)
            if asked:
                await gateway.wait_for("node condition written")
            cost.append(footprint(gateway.pid).rss)
    off, on = cost
    print(f"off {off:.1f} MiB, on {on:.1f} MiB")  # noqa: T201 - pytest -rP shows it
    assert on - off < 15
