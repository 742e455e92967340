"""The ways to install a plugin on a whole node, as far as they need no node."""

from pathlib import Path
from typing import Any, cast

import pytest

from devices.gpu.simulated import profile
from gateway_lab.node import Node
from gateway_lab.node.api import Access, Api
from gateway_lab.node.installed import CDI_RESOURCE, DEVICES, GPUS, IDS, DaemonSet, InstallError, _path, write_profile
from gateway_lab.node.watch import Recorder
from gateway_lab.trials.scenarios import RESOURCE


def test_the_profile_names_the_device_node_of_each_gpu_and_the_ill_ones(tmp_path: Path) -> None:
    path = write_profile(Node(tmp_path), ill=[2], cdi=True)
    found = profile.parse(path.read_bytes(), path.name)
    gpus = found[RESOURCE].gpus
    assert [(gpu.uuid, gpu.device_nodes) for gpu in gpus] == [(uuid, (DEVICES[uuid],)) for uuid in IDS]
    assert [gpu.index for gpu in gpus if gpu.trouble] == [2]
    assert [gpu.cdi_name for gpu in found[CDI_RESOURCE].gpus] == ["example.com/gpu=cdi-0"]
    assert path.is_relative_to(tmp_path / "root")
    again = profile.parse(write_profile(Node(tmp_path)).read_bytes(), path.name)
    assert [gpu.trouble for gpu in again[RESOURCE].gpus] == [None] * GPUS


def test_a_daemonset_takes_its_profile_from_the_node(tmp_path: Path) -> None:
    seen = cast("Recorder", None)
    made = DaemonSet(Node(tmp_path), Api(Access("http://localhost", "")), seen, "gateway:2")
    volumes = [{"name": "profile", "configMap": {"name": "x"}}, {"name": "state", "hostPath": {"path": "/x"}}]
    wanted: dict[str, Any] = {
        "kind": "DaemonSet",
        "spec": {"template": {"spec": {"containers": [{"name": "gateway", "image": "gateway:1"}], "volumes": volumes}}},
    }
    spec = made._fitted(wanted)["spec"]["template"]["spec"]
    assert spec["containers"] == [{"name": "gateway", "image": "gateway:2"}]
    assert spec["volumes"] == [
        {"name": "profile", "hostPath": {"path": "/etc/device-plugin-gateway", "type": "Directory"}},
        {"name": "state", "hostPath": {"path": "/x"}},
    ]


def test_what_is_rendered_goes_to_its_place() -> None:
    about = {"namespace": "n", "name": "x"}
    assert _path({"kind": "Namespace", "metadata": {"name": "x"}}) == "/api/v1/namespaces/x"
    assert _path({"kind": "DaemonSet", "metadata": about}) == "/apis/apps/v1/namespaces/n/daemonsets/x"
    with pytest.raises(InstallError, match="found a Secret"):
        _path({"kind": "Secret", "metadata": about})
