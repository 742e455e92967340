"""``gateway doctor``: each fault of a node is named by its own code and no other, and a node that is well by none."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pynvml
import pytest
import yaml
from click.testing import CliRunner, Result
from msgspec.structs import replace

from devices.source import Hindrance, Unusable
from gateway.cli.doctor import release
from gateway.cli.main import gateway
from gateway.doctor import checks, collect, drivers
from gateway.doctor import server as asking
from gateway.doctor.look import Places, look
from gateway.doctor.server import asked, needed
from gateway.doctor.snapshot import (
    ApiNode,
    Cluster,
    DeviceNodeSeen,
    DoctorAnswer,
    GatewayFacts,
    GatewayProcess,
    KubeletProcess,
    NodeFacts,
    NvmlSeen,
    Pci,
    Release,
    Runtime,
    SocketDir,
    StateDir,
)
from gateway.leader.instance import Instance
from gateway.memory.rows import FileState
from gateway.registration.events import Phase
from gateway.telling.served import verdict
from gateway.telling.sides import ByNameStatus, DriverStatus, SideStatus
from gateway.telling.status import (
    Configuration,
    DeviceStatus,
    GatewayStatus,
    MismatchStatus,
    ResourceStatus,
)
from tests.fakes.apiserver import ApiServer
from tests.fakes.nvml import dgx
from tests.unit.answering import By, gateways
from tests.unit.documents import SERVING, WAITING, document
from tests.unit.kubernetes import authority, server

ROOT = Path(__file__).resolve().parents[2]
CODES = {check.code: check for category in checks.categories() for check in category.checks}
GPU = "nvidia.com/gpu"
__all__ = ["authority", "server"]
DEVICES = tuple(DeviceStatus(id=f"GPU-{number}", health="Healthy", state="healthy") for number in range(2))
SERVED = ResourceStatus(
    name=GPU, phase="serving", verdict=verdict(Phase.SERVING), listed=2, healthy=2, allocatable=2, devices=DEVICES
)
STATUS = document(resources=(SERVED,), uptime_s=60.0)
CONTAINERD = """
version = 2
[plugins."io.containerd.grpc.v1.cri"]
enable_cdi = true
[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "nvidia"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
BinaryName = "/usr/bin/nvidia-container-runtime"
"""
CHECKPOINT = '{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{"nvidia.com/gpu":["GPU-0"]}},"Checksum":1}'
CDI: dict[str, Any] = {
    "cdiVersion": "0.6.0",
    "kind": "nvidia.com/gpu",
    "devices": [{"name": "0", "containerEdits": {}}],
}


DRIVER = DriverStatus(name="gpu.nvidia.com", devices=2, registered=True)
WAITS = "it goes to DRA as soon as nobody holds it: held by ns/q/main"
STAYS = (
    SideStatus(id="GPU-0", side="plugin", words="offered by the device plugin API"),
    SideStatus(id="GPU-1", side="dra", words="offered by DRA"),
)
MOVES = (STAYS[0], SideStatus(id="GPU-1", side="to-dra", holder="ns/q/main", words=WAITS, moving_s=7300.0))


@dataclass
class Fake:
    """A node with two NVIDIA GPUs: its file system below ``root``, and what others say."""

    root: Path
    stack: ExitStack
    status: GatewayStatus = STATUS
    others: list[GatewayStatus] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)
    node: ApiNode = field(
        default_factory=lambda: ApiNode("v1.36.3", {GPU: 2}, {GPU: 2}, "containerd://1.7.27", "3e1a-boot")
    )
    missing: bool = False
    classes: frozenset[str] = frozenset({"nvidia"})
    device_classes: dict[str, str] = field(default_factory=lambda: {"gpu": "device.driver == 'gpu.nvidia.com'"})
    rights: dict[str, bool] = field(default_factory=lambda: {"list resourceslices": True, "patch nodes/status": True})
    nvml: NvmlSeen = field(default_factory=lambda: NvmlSeen("well", gpu_count=2))
    changed: dict[str, Any] = field(default_factory=dict)

    @property
    def sockets(self) -> Path:
        return self.root / "var/lib/kubelet/device-plugins"

    @property
    def state(self) -> Path:
        return self.root / "var/lib/device-plugin-gateway"

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def listen(self, path: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        listener = self.stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(os.fspath(file))
        listener.listen()

    def gpu(self, number: int, vendor: str = "0x10de", driver: str = "nvidia") -> None:
        device = f"sys/bus/pci/devices/0000:0{number}:00.0"
        self.write(f"{device}/vendor", f"{vendor}\n")
        self.write(f"{device}/class", "0x030200\n")
        link = self.root / device / "driver"
        link.unlink(missing_ok=True)
        if driver:
            link.symlink_to(f"../../drivers/{driver}")

    def resource(self, **changes: Any) -> None:
        self.status = replace(self.status, resources=(replace(SERVED, **changes),))

    def led_by(self, token: str, **changes: Any) -> None:
        self.resource(**changes)
        self.status = replace(self.status, led_by=token)

    def look(self) -> NodeFacts:
        places = Places(
            root=self.root,
            socket_dir=self.sockets,
            state_dir=self.state,
            pod_resources=self.sockets.parent / "pod-resources/kubelet.sock",
        )
        told = GatewayFacts(**{"statuses": (self.status, *self.others)} | self.told)
        node = None if self.missing else self.node
        said = Cluster(node, self.classes, self.device_classes, self.rights, "node-1", self.missing)
        seen = look(places, told, said, release, lambda: self.nvml)
        return replace(seen, **self.changed)

    def codes(self) -> set[str]:
        return {result.code for result in checks.judged(self.look()) if result.seen}


@pytest.fixture
def well(folder: Path) -> Iterator[Fake]:
    with ExitStack() as stack:
        fake = Fake(folder, stack)
        fake.listen("var/lib/kubelet/device-plugins/kubelet.sock")
        fake.listen("var/lib/kubelet/pod-resources/kubelet.sock")
        fake.write("var/lib/kubelet/device-plugins/kubelet_internal_checkpoint", CHECKPOINT)
        (fake.root / "var/lib/kubelet/plugins_registry").mkdir()
        fake.write("var/lib/device-plugin-gateway/ledger.json", '{"format":1}')
        fake.write("proc/812/comm", "kubelet\n")
        fake.write("proc/812/cmdline", "/usr/bin/kubelet\0--config=/etc/kubelet.yaml\0")
        fake.write("proc/4711/cmdline", "/opt/venv/bin/python\0/opt/venv/bin/gateway\0")
        fake.write("proc/1/cmdline", "/sbin/init\0")
        fake.write("proc/4711/status", "NSpid:\t4711\nCapEff:\t0000000000000000\n")
        fake.write("proc/4711/limits", "Max open files            65536                65536                files\n")
        fake.write("proc/4711/cgroup", "0::/kubepods/gateway\n")
        fake.write("proc/4711/attr/current", "system_u:system_r:spc_t:s0\n")
        (fake.root / "proc/4711/fd").mkdir()
        fake.write("sys/fs/cgroup/kubepods/gateway/cpu.max", "max 100000\n")
        fake.write("sys/fs/cgroup/kubepods/gateway/cpu.stat", "usage_usec 1\nnr_throttled 0\n")
        fake.write("sys/fs/cgroup/kubepods/gateway/memory.events", "oom 0\noom_kill 0\n")
        fake.write("proc/sys/fs/inotify/max_user_instances", "128\n")
        fake.write("sys/fs/selinux/enforce", "1")
        fake.write("proc/sys/kernel/random/boot_id", "3e1a-boot\n")
        (fake.root / "sys/devices/system/node/node0").mkdir(parents=True)
        for module in ("nvidia", "amdgpu"):
            (fake.root / "sys/module" / module).mkdir(parents=True)
        for name in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"):
            fake.write(f"dev/{name}", "")
        fake.write("sys/class/kfd/kfd/topology/nodes/0/properties", "cpu_cores_count 8\nsimd_count 0\n")
        fake.write("sys/class/kfd/kfd/topology/nodes/1/properties", "simd_count 256\n")
        for number in (1, 2):
            fake.gpu(number)
        fake.write("etc/containerd/config.toml", CONTAINERD)
        fake.write("etc/cdi/nvidia.yaml", yaml.safe_dump(CDI))
        yield fake


def node_of(**changes: Any) -> Callable[[Fake], None]:
    def change(fake: Fake) -> None:
        fake.node = replace(fake.node, **changes)

    return change


def status_of(**changes: Any) -> Callable[[Fake], None]:
    def change(fake: Fake) -> None:
        fake.status = replace(fake.status, **changes)

    return change


def seen_as(**changes: Any) -> Callable[[Fake], None]:
    """What no file can be made to say here."""
    return lambda fake: fake.changed.update(changes)


def written(path: str, text: str) -> Callable[[Fake], None]:
    return lambda fake: fake.write(path, text)


def gone(path: str) -> Callable[[Fake], None]:
    def change(fake: Fake) -> None:
        found = fake.root / path
        shutil.rmtree(found) if found.is_dir() and not found.is_symlink() else found.unlink()

    return change


def both(*faults: Callable[[Fake], None]) -> Callable[[Fake], None]:
    def change(fake: Fake) -> None:
        for fault in faults:
            fault(fake)

    return change


def kubelet_with(*arguments: str) -> Callable[[Fake], None]:
    return written("proc/812/cmdline", "\0".join(("/usr/bin/kubelet", *arguments, "")))


def stale(fake: Fake) -> None:
    shutil.rmtree(fake.sockets)
    fake.sockets.mkdir()
    descriptor = os.open(fake.sockets, os.O_RDONLY)
    fake.stack.callback(os.close, descriptor)
    fake.sockets.rmdir()
    fake.sockets.symlink_to(f"/proc/self/fd/{descriptor}")


def elsewhere(fake: Fake) -> None:
    kubelet_with("--root-dir", "/var/lib/k0s/kubelet")(fake)
    gone("var/lib/kubelet/pod-resources")(fake)


def registry(fake: Fake) -> None:
    gone("var/lib/kubelet/device-plugins")(fake)
    fake.listen("var/lib/kubelet/device-plugins/csi.example.com-reg.sock")


def switched_off(fake: Fake) -> None:
    node_of(kubelet="v1.9.11")(fake)
    fake.changed["release"] = Release(9)


def nothing_runs(fake: Fake) -> None:
    fake.told["statuses"] = ()


def hangs(fake: Fake) -> None:
    fake.told.update(statuses=(), unreachable={f"/state/{SERVING}.sock": "no answer within 5 s"})


def apart(fake: Fake) -> None:
    """Another gateway lives by its lock, and has no control socket here."""
    other = Instance(fake.sockets)
    other.create()
    fake.stack.callback(other.remove)


def throttled(fake: Fake) -> None:
    fake.write("sys/fs/cgroup/kubepods/gateway/cpu.max", "20000 100000\n")
    fake.write("sys/fs/cgroup/kubepods/gateway/cpu.stat", "nr_throttled 17\n")


def from_the_future(fake: Fake) -> None:
    later = time.time() + 10 * 86_400
    os.utime(fake.state / "ledger.json", (later, later))


def inotify_used_up(fake: Fake) -> None:
    for number in range(120):
        (fake.root / "proc/4711/fd" / str(number)).symlink_to("anon_inode:inotify")


def descriptors_used_up(fake: Fake) -> None:
    fake.write("proc/4711/limits", "Max open files            1024                 1024                 files\n")


def unwatchable(fake: Fake) -> None:
    fake.told["monitors_mig"] = True
    fake.nvml = NvmlSeen("missing", "NVML: Library Not Found")


def unloaded(fake: Fake) -> None:
    gone("sys/module/nvidia")(fake)
    for number in (1, 2):
        fake.gpu(number, driver="")


def nouveau(fake: Fake) -> None:
    gone("sys/module/nvidia")(fake)
    for number in (1, 2):
        fake.gpu(number, driver="nouveau")


def amd_unloaded(fake: Fake) -> None:
    fake.gpu(3, "0x1002", "")
    gone("sys/module/amdgpu")(fake)


def amd_hidden(fake: Fake) -> None:
    fake.gpu(3, "0x1002", "amdgpu")
    gone("sys/class/kfd/kfd/topology/nodes/1")(fake)


def virtual(fake: Fake) -> None:
    fake.gpu(2, driver="vfio-pci")
    fake.nvml = NvmlSeen("well", gpu_count=1)


def nodes_of(**changes: bool) -> Callable[[Fake], None]:
    def change(fake: Fake) -> None:
        fake.changed["device_nodes"] = tuple(replace(one, **changes) for one in fake.look().device_nodes or ())

    return change


def nvml(state: Any, message: str) -> Callable[[Fake], None]:
    def change(fake: Fake) -> None:
        fake.nvml = NvmlSeen(state, message)

    return change


def by_cdi(then: Callable[[Fake], None]) -> Callable[[Fake], None]:
    def change(fake: Fake) -> None:
        fake.told["strategies"] = frozenset({"cdi-cri"})
        then(fake)

    return change


def no_default(fake: Fake) -> None:
    fake.write("etc/containerd/config.toml", CONTAINERD.replace('default_runtime_name = "nvidia"', ""))
    fake.classes = frozenset({"kata"})


def nvswitch(fake: Fake) -> None:
    fake.write("sys/bus/pci/devices/0000:a0:00.0/vendor", "0x10de\n")
    fake.write("sys/bus/pci/devices/0000:a0:00.0/class", "0x068000\n")


CLAIM = {"namespace": "ns", "name": "c", "driver": "gpu.nvidia.com", "at": 1.0}
NO_CDI = CONTAINERD.replace("enable_cdi = true", "")
OTHER_DIR = CONTAINERD.replace("enable_cdi = true", 'enable_cdi = true\ncdi_spec_dirs = ["/etc/cdi"]')
NO_NVIDIA = 'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]\n'
GONE_NODE = CDI | {"containerEdits": {"deviceNodes": [{"path": "/dev/nvidia7"}]}}
FAULTS: Mapping[str, Callable[[Fake], None]] = {
    "DPG0101": gone("var/lib/kubelet/device-plugins"),
    "DPG0102": stale,
    "DPG0103": gone("var/lib/kubelet/device-plugins/kubelet.sock"),
    "DPG0104": elsewhere,
    "DPG0105": registry,
    "DPG0106": lambda fake: fake.listen("var/lib/kubelet/device-plugins/nvidia-gpu.sock"),
    "DPG0107": gone("var/lib/kubelet/pod-resources"),
    "DPG0108": written("var/lib/kubelet/device-plugins/kubelet_internal_checkpoint", '{"Data": [1'),
    "DPG0109": node_of(kubelet="v1.10.13"),
    "DPG0110": node_of(kubelet="v1.27.3-gke.100"),
    "DPG0111": node_of(kubelet="v1.99.0"),
    "DPG0112": switched_off,
    "DPG0113": lambda fake: fake.resource(devices=(replace(DEVICES[0], numa=(1,)), DEVICES[1])),
    "DPG0201": nothing_runs,
    "DPG0202": hangs,
    "DPG0203": lambda fake: fake.resource(verdict=verdict(Phase.WAITING, trouble="refused"), allocatable=0),
    "DPG0204": lambda fake: fake.changed.update(state_dir=replace(fake.look().state_dir, writable=False)),
    "DPG0205": lambda fake: fake.changed.update(state_dir=replace(fake.look().state_dir, free_bytes=4096)),
    "DPG0206": written("var/lib/device-plugin-gateway/ledger.json", '{"format": 1, "cord'),
    "DPG0207": apart,
    "DPG0208": status_of(ledger=FileState(path="/l", writable=False, error="No space left on device")),
    "DPG0209": lambda fake: fake.told.update(settings_error="MIG_STRATEGY: expected none, single or mixed, got 'both'"),
    "DPG0210": status_of(configuration=Configuration(path="/c.yaml", error="/c.yaml, line 3: no key migStrategi")),
    "DPG0211": lambda fake: fake.resource(
        drift=(MismatchStatus(kind="doubled", devices=1, words="'GPU-0': a, then b"),)
    ),
    "DPG0212": lambda fake: fake.resource(
        drift=(MismatchStatus(kind="forgotten", devices=1, words="the kubelet lost"),)
    ),
    "DPG0213": lambda fake: fake.resource(devices=(replace(DEVICES[0], state="lost", reason="it is gone"),)),
    "DPG0214": inotify_used_up,
    "DPG0215": descriptors_used_up,
    "DPG0216": throttled,
    "DPG0217": written("sys/fs/cgroup/kubepods/gateway/memory.events", "oom 2\noom_kill 2\n"),
    "DPG0218": from_the_future,
    "DPG0219": status_of(hindrances=(Hindrance(source="nvidia", reason="NVML: Driver Not Loaded"),)),
    "DPG0220": status_of(lag_s=0.4),
    "DPG0221": lambda fake: fake.resource(
        healthy=0, devices=(replace(DEVICES[0], state="cordoned", reason="ticket 4711"), DEVICES[1])
    ),
    # What is found in another state directory says nothing of the gateway's.
    "DPG0222": both(nothing_runs, apart, written("var/lib/device-plugin-gateway/ledger.json", "[]")),
    # Two GPUs, one held and cordoned: one is allocatable, one is requested.
    "DPG0223": lambda fake: fake.resource(
        healthy=1,
        allocatable=1,
        held=1,
        free=1,
        devices=(replace(DEVICES[0], health="Unhealthy", state="cordoned", holder="default/p/main"), DEVICES[1]),
    ),
    "DPG0301": unloaded,
    "DPG0302": nvml("missing", "NVML: Library Not Found"),
    "DPG0303": nvml("mismatch", "NVML: RM has detected an NVML/RM version mismatch"),
    "DPG0304": unwatchable,
    "DPG0305": nvml("silent", "NVML has not answered for 10 s"),
    "DPG0306": gone("dev/nvidiactl"),
    "DPG0307": nodes_of(refused=True),
    "DPG0308": lambda fake: setattr(fake, "nvml", NvmlSeen("well", gpu_count=1)),
    "DPG0309": nouveau,
    "DPG0310": amd_unloaded,
    "DPG0311": amd_hidden,
    "DPG0312": virtual,
    "DPG0313": written("dev/dxg", ""),
    "DPG0314": written("etc/nv_tegra_release", "# R36"),
    "DPG0315": nvswitch,
    "DPG0401": written("etc/containerd/config.toml", NO_NVIDIA),
    "DPG0402": by_cdi(written("etc/containerd/config.toml", NO_CDI)),
    "DPG0403": by_cdi(written("etc/containerd/config.toml", OTHER_DIR)),
    "DPG0404": written("etc/cdi/nvidia.yaml", yaml.safe_dump(GONE_NODE)),
    "DPG0405": nodes_of(linked=False),
    "DPG0406": written("proc/4711/attr/current", "system_u:system_r:container_t:s0:c1,c2\n"),
    "DPG0501": lambda fake: fake.listen("var/lib/kubelet/plugins_registry/gpu.nvidia.com-reg.sock"),
    "DPG0502": node_of(capacity={GPU: 2, "nvidia.com/mig-1g.5gb": 0}),
    "DPG0503": node_of(allocatable={GPU: 0}),
    "DPG0504": no_default,
    "DPG0505": lambda fake: setattr(fake, "missing", True),
    "DPG0506": both(
        lambda fake: fake.told.update(imex=True),
        lambda fake: fake.listen("var/lib/kubelet/plugins_registry/compute-domain.nvidia.com-reg.sock"),
    ),
    "DPG0601": lambda fake: fake.resource(
        devices=(replace(DEVICES[0], stranger="dra.example.com offers it as x in theirs"), DEVICES[1])
    ),
    "DPG0602": status_of(sides=MOVES),
    "DPG0603": both(status_of(sides=STAYS), node_of(allocatable={GPU: 0})),
    "DPG0604": both(status_of(drivers=(DRIVER,)), lambda fake: fake.device_classes.update(gpu="device.driver == 'x'")),
    "DPG0605": status_of(drivers=(replace(DRIVER, unpublished="PATCH /apis/x: 403 Forbidden: it is forbidden"),)),
    "DPG0606": both(status_of(drivers=(DRIVER,)), lambda fake: fake.rights.update({"patch nodes/status": False})),
    "DPG0607": both(status_of(drivers=(replace(DRIVER, registered=False),)), gone("var/lib/kubelet/plugins_registry")),
    "DPG0608": status_of(drivers=(replace(DRIVER, registered=False),)),
    "DPG0609": status_of(crossing="device-plugin-gateway.io/move-to: unknown value 'dar'. Allowed: dra, plugin"),
    "DPG0610": status_of(by_name=ByNameStatus(overlooked="kubelet 1.35 would run pods without their GPU")),
    "DPG0611": status_of(
        by_name=ByNameStatus(waiting="no DeviceClass has the extendedResourceName nvidia.com/gpu any more")
    ),
    "DPG0612": status_of(drivers=(replace(DRIVER, registered=False, rival="another process has the driver"),)),
    "DPG0613": written("var/lib/device-plugin-gateway/ledger.json", json.dumps({"format": 1, "claims": {"u": CLAIM}})),
    "DPG0614": status_of(drivers=(replace(DRIVER, refused=("claim ns/c: Cannot use the parameters",)),)),
}


def test_a_node_that_is_well_has_no_finding_and_every_check_judges_it(well: Fake) -> None:
    by_dra = {check.code for check in CODES.values() if check.needs in {"own_drivers", "sides"}}
    off = {result.code: result.outcome for result in checks.judged(well.look())}
    assert off == dict.fromkeys(CODES, "ok") | dict.fromkeys(by_dra, "unseen")
    status_of(drivers=(DRIVER,), sides=STAYS)(well)
    written("etc/containerd/config.toml", CONTAINERD)(well)
    assert {result.code: result.outcome for result in checks.judged(well.look())} == dict.fromkeys(CODES, "ok")


@pytest.mark.parametrize("code", FAULTS)
def test_a_fault_is_named_by_its_own_code(code: str, well: Fake) -> None:
    FAULTS[code](well)
    assert well.codes() == {code}


def test_a_pod_with_a_claim_keeps_no_free_gpu_from_the_scheduler(well: Fake) -> None:
    held = replace(DEVICES[0], health="Unhealthy", state="withheld", holder="claim default/c (pod p)", by_claim=True)
    well.resource(healthy=1, allocatable=1, held=1, free=1, devices=(held, DEVICES[1]))
    assert "DPG0223" not in well.codes()


def test_there_is_a_fault_a_judge_and_a_row_for_each_code() -> None:
    assert list(FAULTS) == list(CODES) == list(checks.JUDGES)


MORE: Mapping[str, tuple[str, Callable[[Fake], None]]] = {
    "a damaged specification": ("DPG0404", written("etc/cdi/other.json", "{")),
    "no specification": ("DPG0404", written("etc/cdi/other.json", "{}")),
    "a specification that names a device node beside one that it counts": (
        "DPG0404",
        written(
            "etc/cdi/other.json", yaml.safe_dump(GONE_NODE | {"devices": [{"containerEdits": {"deviceNodes": 5}}]})
        ),
    ),
    "a state file of another kind": ("DPG0206", written("var/lib/device-plugin-gateway/ledger.json", "[]")),
    "a file put aside": ("DPG0206", status_of(ledger=FileState(path="/l", put_aside="/l.broken"))),
    "few inodes": (
        "DPG0205",
        lambda fake: fake.changed.update(state_dir=replace(fake.look().state_dir, free_inodes=3)),
    ),
    "many files open": (
        "DPG0215",
        lambda fake: fake.changed.update(
            processes=tuple(replace(one, open_files=65_000) for one in fake.look().processes)
        ),
    ),
    "a clock before the program": ("DPG0218", seen_as(now=1_000.0)),
    "AMD's plugin": ("DPG0106", lambda fake: fake.listen("var/lib/kubelet/device-plugins/amd.com_gpu")),
    "an illness that needs a reset": (
        "DPG0213",
        lambda fake: fake.resource(devices=(replace(DEVICES[0], state="unhealthy", kind="reset-required"),)),
    ),
    "all GPUs wait for who uses them": (
        "DPG0221",
        lambda fake: fake.resource(healthy=0, devices=(replace(DEVICES[0], state="unhealthy", kind="restart-app"),)),
    ),
    "a kubelet that is down, with all of its sockets": (
        "DPG0103",
        both(
            gone("var/lib/kubelet/device-plugins/kubelet.sock"),
            gone("var/lib/kubelet/pod-resources"),
            lambda fake: fake.resource(verdict=verdict(Phase.ABSENT, kubelet_s=None), allocatable=0),
        ),
    ),
    "a driver that no kubelet took": (
        "DPG0203",
        lambda fake: fake.resource(
            verdict=verdict(Phase.STANDBY, driver=replace(DRIVER, registered=False, trouble="no kubelet took it")),
            allocatable=0,
        ),
    ),
    "a library that fails": ("DPG0305", nvml("failed", "NVML: Unknown Error")),
    "a driver that the kubelet refused": (
        "DPG0608",
        both(
            status_of(drivers=(replace(DRIVER, registered=False, trouble="no such version"),)),
            node_of(kubelet="v1.33.6", capacity={GPU: 2}),
            seen_as(release=Release(33)),
        ),
    ),
    "a driver that cannot ask the API server, and so does not register": (
        "DPG0605",
        status_of(drivers=(replace(DRIVER, registered=False, unpublished="GET /api/v1/nodes/n: 404"),)),
    ),
    "a node of another machine, which has fewer GPUs": (
        "DPG0505",
        both(status_of(sides=STAYS), node_of(allocatable={GPU: 0}, boot="77aa-boot")),
    ),
    "another process with the driver's name": (
        "DPG0605",
        status_of(drivers=(replace(DRIVER, unpublished="another process publishes devices of gpu.nvidia.com: y"),)),
    ),
    "allocatable that is lowered for a resource that isn't there": (
        "DPG0603",
        both(status_of(sides=STAYS), node_of(allocatable={})),
    ),
    "a checkpoint that is no file": (
        "DPG0108",
        both(
            gone("var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"),
            lambda fake: (fake.sockets / "kubelet_internal_checkpoint").mkdir(),
        ),
    ),
}


@pytest.mark.parametrize("name", MORE)
def test_other_forms_of_a_fault_have_the_same_code(name: str, well: Fake) -> None:
    code, fault = MORE[name]
    fault(well)
    assert well.codes() == {code}


QUIET: Mapping[str, Callable[[Fake], None]] = {
    "an application's failure ends by itself": lambda fake: fake.resource(
        devices=(replace(DEVICES[0], state="unhealthy", kind="application"),)
    ),
    "one GPU of two is cordoned": lambda fake: fake.resource(
        healthy=1, devices=(replace(DEVICES[0], state="cordoned"), DEVICES[1])
    ),
    "all GPUs have gone to DRA": lambda fake: fake.resource(healthy=0, devices=(replace(DEVICES[0], state="dra"),)),
    "who stands by says nothing of a resource": lambda fake: fake.led_by(
        WAITING, verdict=verdict(Phase.STANDBY, leader=WAITING), allocatable=0
    ),
    "devices are offered by DRA alone": lambda fake: fake.resource(
        verdict=verdict(Phase.STANDBY, driver=DRIVER), allocatable=0
    ),
    "a name of another plugin that has devices is no dead one": node_of(capacity={GPU: 2, "nvidia.com/other": 3}),
    "a resource without devices need not be served": lambda fake: fake.resource(
        verdict=verdict(Phase.ABSENT, kubelet_s=None), listed=0, healthy=0, allocatable=0, devices=()
    ),
    "kubelets before 1.13 have no pod-resources": both(
        node_of(kubelet="v1.12.10"), gone("var/lib/kubelet/pod-resources"), seen_as(release=Release(12))
    ),
    "another root directory that is mounted": kubelet_with("--root-dir=/var/lib/k0s/kubelet"),
    "device nodes without links, by CDI": by_cdi(nodes_of(linked=False)),
    "imports that are none": written(
        "etc/containerd/config.toml", f'imports = [5, "/etc/*", "a\\u0000b"]\n{CONTAINERD.strip()}'
    ),
    "a version that is none": written("etc/containerd/config.toml", CONTAINERD.replace("version = 2", 'version = "2"')),
    "a node that offers by both APIs, with nothing on its way": both(
        status_of(drivers=(DRIVER,), sides=STAYS, resources=(replace(SERVED, allocatable=1),)),
        node_of(allocatable={GPU: 1}),
    ),
    "GPUs that have just begun to go, though the API server is behind": both(
        status_of(drivers=(DRIVER,), sides=(STAYS[0], replace(MOVES[1], moving_s=30.0))), node_of(allocatable={GPU: 0})
    ),
    "a class that takes devices of any driver": both(
        status_of(drivers=(DRIVER,)), lambda fake: fake.device_classes.update(gpu="")
    ),
    "classes and folders of claims where no gateway has any": both(
        lambda fake: fake.device_classes.update(gpu="device.driver == 'x'"), gone("var/lib/kubelet/plugins_registry")
    ),
    "a limit that never held it": written("sys/fs/cgroup/kubepods/gateway/cpu.max", "20000 100000\n"),
    "SELinux that only warns": both(
        written("sys/fs/selinux/enforce", "0"), written("proc/4711/attr/current", "system_u:system_r:container_t:s0\n")
    ),
    "compute domains beside a gateway that gives out no channel": lambda fake: fake.listen(
        "var/lib/kubelet/plugins_registry/compute-domain.nvidia.com-reg.sock"
    ),
    "MIG watched with the right to": both(
        lambda fake: fake.told.update(monitors_mig=True),
        written("proc/4711/status", "NSpid:\t4711\nCapEff:\t0000000000200000\n"),
    ),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_is_no_fault_is_not_named(name: str, well: Fake) -> None:
    QUIET[name](well)
    assert well.codes() == set()


def seen(**changes: Any) -> NodeFacts:
    """What a look saw: a node without GPUs, on which a gateway runs."""
    folder = SocketDir("/sockets", listening=frozenset({"kubelet.sock"}), names=frozenset({"kubelet.sock"}))
    whole: dict[str, Any] = {"now": 2e9, "socket_dir": folder, "state_dir": StateDir("/state"), "statuses": (STATUS,)}
    return NodeFacts(**(whole | changes))


ON_BUS: dict[str, Any] = {"gpus": (Pci("0000:07:00.0", "0x10de", "nvidia"),), "kernel_modules": frozenset({"nvidia"})}
CARD = DeviceNodeSeen("/dev/nvidia0")
EDGES: Mapping[str, tuple[NodeFacts, set[str]]] = {
    "simulated GPUs are on no NUMA node of this kernel": (
        seen(gpus=(), numa_nodes=frozenset({0}), statuses=(replace(STATUS, resources=(replace(SERVED, devices=(replace(DEVICES[0], numa=(1,)),)),)),)),
        set(),
    ),
    "one that lives and can't be asked": (seen(statuses=(), live_tokens=frozenset({WAITING})), {"DPG0222"}),
    "one that hangs lives here": (seen(unreachable={f"/state/{WAITING}.sock": "no answer"}, live_tokens=frozenset({WAITING})), {"DPG0202"}),
    "no state directory can't be written to": (seen(state_dir=StateDir("/state", exists=False, writable=False)), set()),
    "as many bytes as are needed": (seen(state_dir=StateDir("/state", free_bytes=16 << 20, free_inodes=64)), set()),
    "neither can another one than the gateway's be judged": (
        seen(statuses=(), live_tokens=frozenset({WAITING}), state_dir=StateDir("/state", writable=False, free_bytes=0)), {"DPG0222"}
    ),
    "fewer": (seen(state_dir=StateDir("/state", free_bytes=(16 << 20) - 1)), {"DPG0205"}),
    "a clock that is an hour behind": (seen(state_dir=StateDir("/state", written_at=2e9 + 3600)), set()),
    "inotify is nearly used up": (seen(max_inotify_instances=10, processes=(GatewayProcess(1, inotify_instances=9),)), {"DPG0214"}),
    "inotify is used": (seen(max_inotify_instances=10, processes=(GatewayProcess(1, inotify_instances=8),)), set()),
    "a process without a label": (seen(selinux_enforcing=True, processes=(GatewayProcess(1),)), set()),
    "late": (seen(statuses=(replace(STATUS, lag_s=0.1),)), {"DPG0220"}),
    "no pod-resources from 1.13 on": (seen(has_pod_resources=False, release=Release(13)), {"DPG0107"}),
    "a root directory as a word of its own": (
        seen(has_pod_resources=False, kubelets=(KubeletProcess(1, ("kubelet", "--root-dir", "/x")),)), {"DPG0104"}
    ),
    "a gate as a word of its own": (
        seen(release=Release(9), kubelets=(KubeletProcess(1, ("kubelet", "--feature-gates", "DevicePlugins=true")),)), set()
    ),
    "nobody knows whether plugins are on": (seen(release=Release(0), kubelets=(KubeletProcess(1, ("kubelet",)),)), set()),
    "another registry beside the kubelet's socket": (
        seen(socket_dir=SocketDir("/sockets", listening=frozenset({"kubelet.sock"}), names=frozenset({"kubelet.sock", "x-reg.sock"}))),
        set(),
    ),
    "a GPU that is passed through": (seen(gpus=(Pci("a", "0x10de", "vfio-pci"),), kernel_modules=frozenset()), {"DPG0312"}),
    "a GPU that no driver has is none that NVML lost": (
        seen(**ON_BUS | {"gpus": (*ON_BUS["gpus"], Pci("b", "0x10de"))}, nvml=NvmlSeen("well", gpu_count=1)), set()
    ),
    "NVML fails because nodes are closed": (
        seen(**ON_BUS, nvml=NvmlSeen("failed", "no"), device_nodes=(replace(CARD, refused=True),)), {"DPG0307"}
    ),
    "a node that is missing has no link": (seen(**ON_BUS, device_nodes=(replace(CARD, exists=False, linked=False),)), {"DPG0306"}),
    "nodes of a driver that isn't loaded": (
        seen(**ON_BUS | {"kernel_modules": frozenset()}, device_nodes=(replace(CARD, exists=False),)), {"DPG0301"}
    ),
    "nobody knows what KFD shows": (seen(gpus=(Pci("a", "0x1002", "amdgpu"),), kernel_modules=frozenset({"amdgpu"})), set()),
    "a folder with a stroke at its end": (
        seen(runtime=Runtime("/c", cdi_dirs=("/var/run/cdi/",)), strategies=frozenset({"cdi-cri"})), set()
    ),
    "a dead name of another kind": (seen(node=ApiNode(capacity={"example.com/x": 0}, allocatable={GPU: 2})), set()),
    "an hour on its way": (seen(statuses=(replace(STATUS, sides=(replace(MOVES[1], moving_s=3600.0),)),)), {"DPG0602"}),
    "less than an hour": (seen(statuses=(replace(STATUS, sides=(replace(MOVES[1], moving_s=3599.0),)),)), set()),
    "more is allocatable than is known of": (
        seen(statuses=(replace(STATUS, sides=STAYS),), node=ApiNode(allocatable={GPU: 3})), set()
    ),
    "the kubelet has no folder for drivers, and there is none": (seen(has_registry=False), set()),
    "all GPUs need a reset, which is said once": (
        seen(statuses=(replace(STATUS, resources=(replace(SERVED, healthy=0, devices=(replace(DEVICES[0], state="unhealthy", kind="reset-required"),)),)),)),
        {"DPG0213"},
    ),
    "NVML can't be loaded for the lack of a right": (
        seen(**ON_BUS, nvml=NvmlSeen("missing", "no"), monitors_mig=True, processes=(GatewayProcess(1, capabilities=0),)), {"DPG0304"}
    ),
    "a DRA driver beside a resource of which nothing is left": (
        seen(statuses=(replace(STATUS, resources=(replace(SERVED, allocatable=0),)),), dra_drivers=frozenset({"gpu.nvidia.com"})),
        set(),
    ),
    "a runtime that is the default needs no class": (
        seen(runtime=Runtime("/c", nvidia=True, nvidia_is_default=True), runtime_classes=frozenset()), set()
    ),
    "one that isn't does": (seen(runtime=Runtime("/c", nvidia=True), runtime_classes=frozenset()), {"DPG0504"}),
}  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
def test_a_check_begins_where_it_should(name: str) -> None:
    one, codes = EDGES[name]
    assert {code for code, judge in checks.JUDGES.items() if judge(one)} == codes


def test_what_cannot_be_seen_is_no_finding_and_is_not_called_well(folder: Path) -> None:
    with ExitStack() as stack:
        fake = Fake(folder, stack)
        fake.told["statuses"] = ()
        places = Places(root=folder, socket_dir=fake.sockets, state_dir=fake.state, pod_resources=folder / "none")
        results = list(checks.judged(look(places, GatewayFacts(), Cluster(), release)))
    assert {result.code for result in results if result.seen} == {"DPG0101", "DPG0201"}
    assert {result.code for result in results if result.outcome == "unseen"} >= {
        *("DPG0102", "DPG0103", "DPG0105", "DPG0106", "DPG0110"),
        *("DPG0204", "DPG0205", "DPG0206", "DPG0302", "DPG0504"),
    }


@pytest.mark.parametrize(("spaces", "found"), [("4711\t1", True), ("4711", False)])
def test_a_gateway_in_a_pod_is_known_by_its_number_there(spaces: str, found: bool, well: Fake) -> None:
    """Seen from the host its number is another, and that number there is the host's own first process."""
    well.write("proc/4711/status", f"NSpid:\t{spaces}\nCapEff:\t0000000000000000\n")
    well.status = replace(STATUS, pid=1)
    assert [one.pid for one in well.look().processes] == ([4711] if found else [])


def test_an_ignored_check_is_left_out(well: Fake) -> None:
    FAULTS["DPG0103"](well)
    assert "DPG0103" not in {result.code for result in checks.judged(well.look(), ["DPG0103"])}


OUTSIDE = ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "GATEWAY_STATE_DIR", "GATEWAY_SOCKET_DIR")
"""Variables by which a command would ask others than the node's gateways."""


def call(folder: Path, *arguments: str) -> Result:
    return CliRunner(env=dict.fromkeys(OUTSIDE)).invoke(gateway, ["doctor", "--host-root", str(folder), *arguments])


@pytest.fixture
def alone(well: Fake) -> Iterator[Fake]:
    """A node that the command line looks at: its gateway answers, and there is no API server."""
    with gateways(well.state, {SERVING: {"status": STATUS}}, "status"):
        yield well


EXITS = {"nothing": (None, 0), "an error": ("DPG0103", 2), "a warning": ("DPG0312", 1)}


@pytest.mark.parametrize("name", EXITS)
def test_the_exit_status_says_how_bad_it_is(name: str, alone: Fake) -> None:
    code, status = EXITS[name]
    if code:
        FAULTS[code](alone)
    done = call(alone.root, "--json")
    assert done.exit_code == status, done.output
    found = [one["code"] for one in json.loads(done.output)["checks"] if one["outcome"] in {"warning", "error"}]
    assert found == ([code] if code else [])


def test_the_folder_is_that_of_the_gateway_that_runs(well: Fake) -> None:
    well.sockets.parent.rename(well.root / "opt")
    elsewhere = replace(STATUS, socket_dir="/opt/device-plugins")
    with gateways(well.state, {SERVING: {"status": elsewhere}}, "status"):
        done = call(well.root)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("theirs", "own", "status"),
    [
        pytest.param(("cdi-cri",), "envvar", 0, id="CDI"),
        pytest.param(("envvar",), "cdi-cri", 2, id="envvar"),
        pytest.param((), "cdi-cri", 0, id="an older gateway doesn't say"),
    ],
)
def test_what_a_gateway_was_told_by_flags_is_asked_of_it(
    theirs: tuple[str, ...], own: str, status: int, well: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEVICE_LIST_STRATEGY", own)
    well.write("etc/containerd/config.toml", "version = 3\n")  # Without an API server this alone tells its version.
    with gateways(well.state, {SERVING: {"status": replace(STATUS, list_strategies=theirs)}}, "status"):
        done = call(well.root)
    assert done.exit_code == status, done.output
    assert ("DPG0401" in done.output) is bool(status)


def by_gateway(found: Fake, backend: str, **changes: Any) -> dict[str, str]:
    """What doctor finds where a gateway answers for its libraries: the words, by code."""
    cluster = Cluster(ApiNode("v1.27.3", {GPU: 2}, {GPU: 2}), frozenset({"nvidia"}), node_name="node-1")
    says = By({"status": {"status": replace(STATUS, **changes)}, "doctor": DoctorAnswer(cluster, backend)})
    with gateways(found.state, {SERVING: says}, "status", "doctor"):
        results = json.loads(call(found.root, "--json").output)["checks"]
    assert {one["outcome"] for one in results if one["code"] == "DPG0308"} <= (
        {"ok", "warning"} if "nvidia" in backend else {"unseen"}
    )
    return {one["code"]: one["seen"] for one in results if one.get("seen")}


DOWN = "NVML can't be used: "
REPORTED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "no library": ("DPG0302", {"hindrances": (Hindrance("nvidia", f"{DOWN}no", cause="no-library"),)}),
    "a mismatch": ("DPG0303", {"hindrances": (Hindrance("nvidia", f"{DOWN}no", cause="library-mismatch"),)}),
    "a failure": ("DPG0305", {"hindrances": (Hindrance("nvidia", f"{DOWN}no", cause="library-failed"),)}),
    "a library that hangs": (
        "DPG0305",
        {"hindrances": (Hindrance("nvidia", f"{DOWN}it hangs", cause="library-silent"),)},
    ),
    "a lost GPU": (
        "DPG0308",
        {"unusable": (Unusable("nvidia", "no answer by NVML", "1", "0000:02:00.0", cause="library-failed"),)},
    ),
}


@pytest.mark.parametrize("name", REPORTED)
def test_a_gateway_reports_what_nvml_does(name: str, well: Fake) -> None:
    code, changes = REPORTED[name]
    found = by_gateway(well, "nvidia+bridge", **changes)
    assert found.keys() == {code, "DPG0110"}
    assert "NVML" in found[code]


@pytest.mark.parametrize(
    ("backend", "reason"), [("simulated", ""), ("nvidia", "it is in MIG mode and has no MIG instances: create some")]
)
def test_what_says_nothing_of_nvml_is_no_finding(backend: str, reason: str, well: Fake) -> None:
    unusable = (Unusable("nvidia", reason, "1", "0000:02:00.0"),) if reason else ()
    assert by_gateway(well, backend, unusable=unusable).keys() == {"DPG0110"}


def test_on_a_narrow_terminal_every_line_is_wrapped(alone: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["DPG0106"](alone)
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, call(alone.root).output.splitlines())) <= 50


def test_a_person_sees_the_code_what_was_seen_what_follows_and_what_to_do(alone: Fake) -> None:
    FAULTS["DPG0106"](alone)
    text = call(alone.root).output
    assert "✗ another plugin serves the same GPUs  DPG0106" in text
    assert re.search(r"seen +a process listens on nvidia-gpu\.sock", text)
    assert re.search(r"do +End the other plugin", text)
    assert "docs/migration.md" in text
    assert "1 error;" in text
    assert "DPG0106" not in call(alone.root, "--ignore", "DPG0106").output


def test_a_code_that_is_none_is_refused(alone: Fake) -> None:
    done = call(alone.root, "--ignore", "DPG9999")
    assert done.exit_code == 2
    assert "unknown code DPG9999" in done.output


def test_settings_that_cannot_be_gone_by_are_a_finding(alone: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIG_STRATEGY", "both")
    found = json.loads(call(alone.root, "--json").output)["checks"]
    assert [one["code"] for one in found if one.get("seen")] == ["DPG0209"]


def test_a_device_cgroup_that_refuses_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EPERM is what the kernel says where the cgroup lacks the device; root can't be refused otherwise."""
    (tmp_path / "dev/char").mkdir(parents=True)
    (tmp_path / "dev/nvidiactl").symlink_to("/dev/null")
    assert collect.nodes(tmp_path, 0, tried=True) == (DeviceNodeSeen("/dev/nvidiactl", refused=False, linked=False),)

    def refuse(*_: Any) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "open", refuse)
    (node,) = collect.nodes(tmp_path, 0, tried=True) or ()
    assert node.refused


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        pytest.param({}, "", id="all answer"),
        pytest.param({3: 15}, "GPU 3 (0000:4c:00.0): GPU is lost", id="one is lost"),
        pytest.param({0: 999, 7: 4}, "GPU 0 (0000:19:00.0): Unknown Error; GPU 7 (0000:90:00.0)", id="two"),
        pytest.param(dict.fromkeys(range(8), 15), "GPU 7 (0000:90:00.0): GPU is lost", id="all are lost"),
    ],
)
def test_each_gpu_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: dict[int, int], words: str
) -> None:
    world = dgx(tmp_path / "world")
    for index, code in lost.items():
        world.fails("nvmlDeviceGetHandleByIndex", code, index)
    world.write()
    world.here(monkeypatch)
    bus = {**ON_BUS, "gpus": tuple(Pci(one.pci, "0x10de", "nvidia") for one in world.gpus)}
    found = drivers.CHECKS["DPG0308"](seen(**bus, nvml=asking.nvml()))
    assert words in found
    assert bool(found) is bool(lost)


@pytest.mark.parametrize(
    ("capabilities", "devices", "there"),
    [
        pytest.param("all", "195 nvidia-uvm", False, id="the node is missing"),
        pytest.param("utility", "195 nvidia-uvm", None, id="the runtime keeps it from this container"),
        pytest.param("utility", "", False, id="its module isn't loaded"),
    ],
)
def test_a_missing_uvm_node_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capabilities: str, devices: str, there: bool | None
) -> None:
    monkeypatch.setenv("NVIDIA_DRIVER_CAPABILITIES", capabilities)
    for folder in ("dev", "proc"):
        (tmp_path / folder).mkdir()
    (tmp_path / "proc/devices").write_text(devices)
    found = {one.path: one.exists for one in collect.nodes(tmp_path, 1, tried=False) or ()}
    assert found.get("/dev/nvidia-uvm") is there


def test_a_library_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(asking, "_NVML_S", 0.01)
    monkeypatch.setattr(asking, "_nvml", lambda: go_on.wait(20) and NvmlSeen("well"))
    assert asking.nvml().state == "silent"
    go_on.set()


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "missing"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "mismatch"),
        (pynvml.NVML_ERROR_UNKNOWN, "failed"),
    ],
)
def test_what_the_library_says_is_told_apart(code: int, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin() -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlInit", begin)
    assert asking.nvml().state == state


async def test_the_api_server_is_asked_for_the_node_and_the_classes(server: ApiServer) -> None:
    server.put("/api/v1/nodes/node-1", **NODE)
    server.put("/apis/node.k8s.io/v1/runtimeclasses/nvidia")
    found = await asked(server.access(), "node-1")
    node = ApiNode("v1.36.3", {GPU: 8}, {GPU: 7}, "containerd://2.2.0", "3e1a-boot")
    assert found == Cluster(node, frozenset({"nvidia"}), node_name="node-1")


async def test_the_api_server_is_asked_for_what_claims_need(server: ApiServer) -> None:
    server.put("/api/v1/nodes/node-1", **NODE)
    selectors = [{"cel": {"expression": "device.driver == 'gpu.nvidia.com'"}}, {"cel": {"expression": "true"}}]
    server.put("/apis/resource.k8s.io/v1beta2/deviceclasses/gpu", spec={"selectors": selectors})
    server.denied = frozenset({"patch nodes/status", "list pods"})
    both_apis = replace(STATUS, drivers=(DRIVER,), sides=STAYS)
    found = await asked(server.access(), "node-1", needed([both_apis]))
    assert found.device_classes == {"gpu": "device.driver == 'gpu.nvidia.com' true"}
    assert {what for what, allowed in (found.rights or {}).items() if not allowed} == server.denied
    assert {"watch resourceslices", "list deviceclasses"} < (found.rights or {}).keys()


def test_rights_are_asked_for_where_a_gateway_needs_them() -> None:
    assert needed([STATUS]) == ()
    alone = needed([STATUS, replace(STATUS, drivers=(DRIVER,))])
    assert ("resource.k8s.io", "resourceslices", "patch") in alone
    assert ("", "nodes/status", "patch") not in alone
    assert set(alone) < set(needed([replace(STATUS, drivers=(DRIVER,), sides=STAYS)]))


async def test_what_the_manifests_allow_is_what_is_asked_for() -> None:
    """A right that no component has would be found missing on each node."""
    allowed = set()
    for name in ("api-server", "dra", "dra-on"):
        for file in (ROOT / "deploy/kustomize/components" / name).glob("*.yaml"):
            for one in yaml.safe_load_all(file.read_text(encoding="utf-8")):
                for rule in one.get("rules", ()) if one.get("kind") == "ClusterRole" else ():
                    allowed |= set(product(rule["apiGroups"], rule["resources"], rule["verbs"]))
    assert set(needed([replace(STATUS, drivers=(DRIVER,), sides=STAYS)])) <= allowed


async def test_a_gateway_without_a_name_for_its_node_misses_none(server: ApiServer) -> None:
    found = await asked(server.access(), "")
    assert (found.node, found.node_missing) == (None, False)


async def test_an_api_server_that_does_not_know_the_node_is_no_end(server: ApiServer) -> None:
    found = await asked(server.access(), "node-2")
    assert (found.node, found.node_name, found.node_missing) == (None, "node-2", True)


NODE = {
    "metadata": {"name": "node-1"},
    "status": {
        "capacity": {"cpu": "16", GPU: "8"},
        "allocatable": {"cpu": "15", GPU: "7"},
        "nodeInfo": {
            "kubeletVersion": "v1.36.3",
            "containerRuntimeVersion": "containerd://2.2.0",
            "bootID": "3e1a-boot",
        },
    },
}


@pytest.mark.parametrize("check", CODES.values(), ids=CODES)
def test_a_check_leads_to_a_page_that_is_there(check: checks.Check) -> None:
    name, _, anchor = check.page.partition("#")
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w -]", "", line.lstrip("# ")).strip().lower().replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("#")
    }
    assert not anchor or anchor in headings
    assert not check.needs or hasattr(NodeFacts, check.needs)
