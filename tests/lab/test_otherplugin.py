"""The other device plugin, that migrations start from, is one that kubelets are content with."""

import sys

import pytest

from gateway_lab.kubelets.kubelet import Demand
from gateway_lab.trials.scenarios import RESOURCE, SCENARIOS, device_ids, node

IDS = device_ids({RESOURCE: 4})[RESOURCE]
DEVICES = tuple(f"{uuid}=/dev/nvidia{index}" for index, uuid in enumerate(IDS))
PLUGIN = (sys.executable, "-m", "gateway_lab.node.otherplugin", "--socket-dir", "{socket_dir}", *DEVICES)


@pytest.mark.parametrize("name", ["register", "allocate", "kubelet-crash", "kubelet-restart"])
async def test_kubelets_are_served(name: str) -> None:
    async with node(plugin=PLUGIN) as made:
        await SCENARIOS[name].run(made, "1.37")


async def test_its_answers_are_the_gpus_uuids_and_nodes() -> None:
    async with node(plugin=PLUGIN) as made:
        await made.start_kubelet("1.37")
        await made.start_gateway()
        await made.served()
        admission = await made.admit(Demand("a", RESOURCE, 2))
        got = admission.devices[RESOURCE]
        assert set(admission.answer.envs["NVIDIA_VISIBLE_DEVICES"].split(",")) == set(got)
        assert {one.host_path for one in admission.answer.device_nodes} == {
            f"/dev/nvidia{IDS.index(uuid)}" for uuid in got
        }
        assert [path.name for path in made.socket_dir.glob("nvidia*")] == ["nvidia-gpu.sock"]
