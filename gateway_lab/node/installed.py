"""The ways in which a device plugin is on a node: ours as a host service or as a DaemonSet's pod, or another one in its place.

Each has the verbs that a scenario needs; what keeps it alive (systemd's ``Restart=``, the kubelet) is part of it. The simulated
GPUs of all of them are written in one profile on the node, so that each finds the same.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml

from gateway_lab.gatewayproc import GatewayProcess, gateway_command
from gateway_lab.node import Node
from gateway_lab.node.api import Api, Object
from gateway_lab.node.otherplugin import SOCKET
from gateway_lab.node.watch import PodSeen, Recorder
from gateway_lab.trials.scenarios import RESOURCE, device_ids

GPUS = 6
IDS = device_ids({RESOURCE: GPUS})[RESOURCE]
"""The UUIDs of the simulated GPUs, by index."""
DEVICES = {uuid: f"/dev/nvidia{index}" for index, uuid in enumerate(IDS)}
"""The device node of each."""
CDI_RESOURCE, CDI_KIND, CDI_ID = "example.com/gpu", "example.com/gpu", "cdi-0"
"""A resource whose one device is told by its CDI name alone."""

FOLDER = "etc/device-plugin-gateway"
"""Where the profile is, below the node's root."""
STATE = "var/lib/device-plugin-gateway"
RESTART_SECONDS = 0.1
"""RestartSec of the unit, see deploy/systemd."""
START_SECONDS = 10.0
"""TimeoutStartSec of the unit."""
NAMESPACE = "device-plugin-gateway"
_KUSTOMIZE = Path(__file__).parents[2] / "deploy" / "kustomize"
OVERLAY, COMPONENTS = _KUSTOMIZE / "overlays" / "simulated", _KUSTOMIZE / "components"
DAEMONSETS = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets"


class InstallError(Exception):
    """The plugin could not be put on the node, or isn't what it should be."""


class Installed(Protocol):
    """A device plugin on a node."""

    kind: str
    """What it is called in a table."""

    async def start(self) -> None:
        """Install it; it need not be ready when this returns."""
        ...

    async def stop(self) -> None:
        """Remove it in an orderly way; return when it is gone."""
        ...

    async def kill(self) -> None:
        """Kill its process (KILL); what keeps it alive starts it again."""
        ...

    async def roll(self, image: str) -> None:
        """Replace it by another one, whose image is ``image`` where it has one; return when that was done."""
        ...

    async def off(self) -> None:
        """Do what the power cut does to it, beyond the containers."""
        ...

    async def on(self) -> None:
        """Do what the boot does for it before the kubelet is started."""
        ...


def write_profile(
    node: Node, ill: Collection[int] = (), *, cdi: bool = False, devices: Mapping[str, str] = DEVICES
) -> Path:
    """Write the node's GPUs down, which the plugin follows; those in ``ill`` (by index) are unhealthy."""
    resources: dict[str, Any] = {
        RESOURCE: {
            "gpus": [{"uuid": uuid, "device_nodes": [path]} for uuid, path in devices.items()],
            "unhealthy": dict.fromkeys(sorted(ill), "the scenario made it unhealthy"),
        }
    }
    if cdi:
        resources[CDI_RESOURCE] = {"gpus": [{"uuid": CDI_ID}], "cdi": CDI_KIND}
    folder = node.root / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path, new = folder / "profile.yaml", folder / "profile.new"
    new.write_text(yaml.safe_dump({"resources": resources}))
    return new.replace(path)


class _Process:
    """A plugin that is a process on the host, and is started again when it ends unasked, as systemd does."""

    kind = ""

    def __init__(self, node: Node, command: Sequence[str]) -> None:
        self._command = command
        self._process: GatewayProcess | None = None
        self._log = node.logs / "plugin.log"
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Launch it."""
        self._process = await GatewayProcess.launch(self._command, self._log)
        self._keeper = asyncio.create_task(self._keep(), name=f"keeper of the {self.kind}")

    async def said(self, event: str, since: int = 0) -> None:
        """Wait for a line of its log, written after a mark (``lines``)."""
        assert self._process is not None
        await self._process.wait_for(event, since=since)

    @property
    def lines(self) -> int:
        """How many lines its log has by now: a mark."""
        assert self._process is not None
        return self._process.seen

    async def stop(self) -> None:
        """Send TERM and wait."""
        await self._let_go()
        if self._process is not None:
            await self._process.terminate()

    async def kill(self) -> None:
        """Kill it; the keeper starts another one."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)

    async def roll(self, image: str) -> None:  # noqa: ARG002 - a host service has none
        """Start another one beside it, and end it when that one could lead: host services ask each other for nothing."""
        older = self._process
        await self._let_go()
        await self.start()
        assert self._process is not None
        await self._process.wait_for("serving")
        if older is not None:
            await older.terminate()
        await self._process.wait_for("registered")

    async def off(self) -> None:
        """Kill it for good."""
        await self._let_go()
        if self._process is not None:
            await self._process.kill()

    async def on(self) -> None:
        """Start it."""
        await self.start()

    async def _keep(self) -> None:
        while True:
            assert self._process is not None
            await self._process.exited()
            await asyncio.sleep(RESTART_SECONDS)
            self._process = await GatewayProcess.launch(self._command, self._log)

    async def _let_go(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])


class HostService(_Process):
    """Ours, as the unit in deploy/systemd runs it: beside the kubelet, before it at boot."""

    kind = "host service"

    def __init__(self, node: Node, source: Sequence[str] = ()) -> None:
        """``source``: the options that say where its devices are from; by default they are the simulated GPUs."""
        state = node.root / STATE
        state.mkdir(parents=True, exist_ok=True)
        profile = None if source else write_profile(node)
        command = gateway_command(node.plugins, state, profile, options=["--host-service", *source])
        self._notify = node.folder / "notify.sock"
        super().__init__(node, ["env", f"NOTIFY_SOCKET={self._notify}", *command])

    async def on(self) -> None:
        """Start it, and wait until it says that it is ready, as systemd does before it starts the kubelet."""
        self._notify.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.setblocking(False)  # noqa: FBT003
            notify.bind(str(self._notify))
            await self.start()
            async with asyncio.timeout(START_SECONDS):
                while b"READY=1" not in (await asyncio.get_running_loop().sock_recv(notify, 4096)).split(b"\n"):
                    pass


class OtherPlugin(_Process):
    """Another plugin of the same resource: ``otherplugin.py``."""

    kind = "other plugin"

    def __init__(self, node: Node, folder: Path | None = None, endpoint: str = SOCKET) -> None:
        program = (sys.executable, "-m", "gateway_lab.node.otherplugin", "--socket-dir", str(folder or node.plugins))
        devices = (f"{uuid}={path}" for uuid, path in DEVICES.items())
        super().__init__(node, [*program, "--endpoint", endpoint, *devices])


class DaemonSet:
    """Ours, from its image, by deploy/kustomize/overlays/simulated."""

    kind = "DaemonSet"
    components: Sequence[str] = ()
    """Those of deploy/kustomize that it has besides, each of which adds a container of its name."""

    def __init__(self, node: Node, api: Api, seen: Recorder, image: str) -> None:
        self._node, self._api, self._seen, self._image = node, api, seen, image
        write_profile(node)

    async def start(self) -> None:
        """Apply the overlay, with the node's profile in the place of its ConfigMap's."""
        label = {"metadata": {"labels": {"device-plugin-gateway.io/simulated": "true"}}}
        await self._api.merge(f"/api/v1/nodes/{self._node.name}", label)
        for wanted in await asyncio.to_thread(self._rendered):
            await self._api.apply(_path(wanted), wanted)

    async def stop(self) -> None:
        """Delete it, and wait until its pods are gone."""
        await self._api.delete(f"{DAEMONSETS}/{await self._name()}")
        await self._seen.until(lambda seen: not self._pods(seen), "the gateway's pods to be gone")

    async def kill(self) -> None:
        """Kill the gateway's process in its container; the kubelet starts the container again."""
        await self._seen.until(lambda seen: [pod.runs for pod in self._pods(seen)] == [True], "one gateway that runs")
        [pod] = self._pods(self._seen)
        [container] = pod.containers.values()
        await self._node.ctr("tasks", "kill", "-s", "SIGKILL", container.id.removeprefix("containerd://"))

    async def delete_pod(self) -> None:
        """Delete the gateway's pod; the DaemonSet makes another one."""
        for pod in self._pods(self._seen):
            await self._api.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod.name}")

    async def roll(self, image: str) -> None:
        """Have another image rolled out, and wait until the last pod of the old one is gone."""
        self._image = image
        name = await self._name()
        containers = ("gateway", *self.components)
        images = [{"name": container, "image": image} for container in containers]
        change = {"spec": {"template": {"spec": {"containers": images}}}}
        old = {pod.uid for pod in self._pods(self._seen)}
        await self._api.strategic(f"{DAEMONSETS}/{name}", change)
        await self._seen.until(
            lambda seen: (
                bool(self._pods(seen))
                and all(pod.uid not in old and pod.ready and not pod.ending for pod in self._pods(seen))
            ),
            f"one gateway, of image {image}",
            120,
        )

    async def off(self) -> None:
        """Nothing: it is a container."""

    async def on(self) -> None:
        """Nothing: the kubelet starts it."""

    def _pods(self, seen: Recorder) -> list[PodSeen]:
        return [pod for pod in seen.pods.values() if pod.namespace == NAMESPACE]

    async def _name(self) -> str:
        found = await self._api.get(DAEMONSETS)
        names: list[str] = [one["metadata"]["name"] for one in found["items"]]
        if len(names) != 1:
            raise InstallError(f"expected one DaemonSet in {NAMESPACE}, found {names}")
        return names[0]

    def _rendered(self) -> list[Object]:
        with tempfile.TemporaryDirectory() as folder:
            wanted = {
                "resources": [os.path.relpath(OVERLAY, folder)],
                "components": [os.path.relpath(COMPONENTS / one, folder) for one in self.components],
            }
            Path(folder, "kustomization.yaml").write_text(yaml.safe_dump(wanted))
            done = subprocess.run(
                [self._node.kubectl, "kustomize", folder], check=True, stdout=subprocess.PIPE, text=True
            )
        return [self._fitted(one) for one in yaml.safe_load_all(done.stdout)]

    def _fitted(self, wanted: dict[str, Any]) -> Object:
        """Take the profile from the node's own disk (an edit of a ConfigMap arrives a minute later) and the image's name."""
        if wanted["kind"] == "DaemonSet":
            spec = wanted["spec"]["template"]["spec"]
            for volume in spec["volumes"]:
                if volume["name"] == "profile":
                    volume.pop("configMap", None)
                    volume["hostPath"] = {"path": f"/{FOLDER}", "type": "Directory"}
            for container in spec["containers"]:
                container["image"] = self._image
        return wanted


_PLACES: Mapping[str, Callable[[str], str]] = {
    "Namespace": lambda _: "/api/v1/namespaces",
    "ConfigMap": lambda namespace: f"/api/v1/namespaces/{namespace}/configmaps",
    "DaemonSet": lambda namespace: f"/apis/apps/v1/namespaces/{namespace}/daemonsets",
}


def _path(wanted: Object) -> str:
    about = wanted["metadata"]
    try:
        place = _PLACES[wanted["kind"]]
    except KeyError:
        raise InstallError(f"expected one of {', '.join(_PLACES)} in {OVERLAY}, found a {wanted['kind']}") from None
    return f"{place(about.get('namespace', ''))}/{about['name']}"
