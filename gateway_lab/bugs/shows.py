"""How each bug is shown: a plain plugin on a kubelet, and what becomes of it. No gateway takes part."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import grpc

from devices.model import Device
from gateway.kubelet import records
from gateway.kubelet.identity import CHECKPOINT, KUBELET_SOCKET
from gateway_lab.kubelets.behaviour import behaviour
from gateway_lab.kubelets.kubelet import Demand, Kubelet, KubeletError, Running
from gateway_lab.plugins.played import PlayedPlugin
from gateway_lab.waiting import until

RESOURCE: Final = "vendor.example/nic"
SOON: Final = 2.0
"""Seconds within which a kubelet does what it does."""
POD: Final = "pod-a"


class Stage:
    """A socket directory, a kubelet on it, and the plugins that were started there.

    Args:
        directory: an empty folder with a short path, in one that is no one else's: the pod-resources API is served beside it.
        version: the kubelet that is looked at.
        binary: finds the genuine kubelet of a version; None: it is emulated.
    """

    def __init__(self, directory: Path, version: str, binary: Callable[[str], Path | None]) -> None:
        self._directory, self.version, self._binary = directory, version, binary
        self._plugins: list[PlayedPlugin] = []
        self._kubelet: Kubelet | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end_kubelet()
        for plugin in self._plugins:
            await plugin.stop()

    @property
    def kubelet(self) -> Kubelet:
        """The kubelet that runs."""
        assert self._kubelet is not None
        return self._kubelet

    async def boot(self, version: str = "", pods: Sequence[Demand] = (), **how: Any) -> Kubelet:
        """Start a kubelet, as ``Kubelet.start`` does; one that runs is killed."""
        await self._end_kubelet()
        version = version or self.version
        self._kubelet = await Kubelet.launch(version, self._directory, genuine=self._binary(version))
        await self._kubelet.start(pods, **how)
        return self._kubelet

    async def _end_kubelet(self) -> None:
        kubelet, self._kubelet = self._kubelet, None
        if kubelet is not None:
            await kubelet.kill()
            await kubelet.close()

    def plugin(self, count: int, version: str = "", **how: Any) -> PlayedPlugin:
        """Make a plugin with so many devices, which isn't started yet."""
        api = behaviour(version or self.version).dialect
        devices = tuple(Device(f"{len(self._plugins)}-{number}") for number in range(count))
        endpoint = f"p{len(self._plugins)}.sock"
        one = PlayedPlugin(
            folder=self._directory, resource=RESOURCE, devices=devices, api=api, endpoint=endpoint, **how
        )
        self._plugins.append(one)
        return one

    async def served(self, count: int, version: str = "") -> PlayedPlugin:
        """Start a plugin with so many devices, and wait until the kubelet gives them out."""
        one = self.plugin(count, version)
        await one.start()
        await self.kubelet.wait(RESOURCE, count)
        return one

    async def allocatable(self) -> int:
        """Count the devices that the kubelet gives out."""
        return (await self.kubelet.totals()).allocatable.get(RESOURCE, 0)

    @property
    def checkpoint(self) -> Path:
        """Where the kubelet writes down who has what."""
        return self._directory / CHECKPOINT

    async def read_records(self) -> None:
        """Read the kubelet's pod-resources API, as an exporter of metrics does; nothing where there is none."""
        await records.look(self._directory.parent / "pod-resources" / KUBELET_SOCKET, self._directory / "none")

    async def doubled(self) -> str:
        """Name a device that two pods hold by the kubelet's own records; empty where none is."""
        held = [
            device_id
            for pod in (await self.kubelet.pods()).values()
            for ids in pod.values()
            for device_id in ids[RESOURCE]
        ]
        return next((device_id for device_id in held if held.count(device_id) > 1), "")

    async def becomes(self, count: int, seconds: float = SOON) -> bool:
        """Wait until the kubelet gives out just so many devices; False where it doesn't."""
        try:
            await self.kubelet.wait(RESOURCE, count, seconds)
        except KubeletError:
            return False
        return True


Show = Callable[[Stage], Awaitable[str]]
"""Returns what was seen of the bug, empty where the kubelet is right."""


async def old_end_disconnects_new(stage: Stage) -> str:
    """A new plugin registers beside the old one, as a rolling update with maxSurge has it; then the old one ends."""
    await stage.boot()
    old = await stage.served(4)
    new = stage.plugin(2)
    await new.start()
    await stage.kubelet.wait(RESOURCE, 2)
    await old.stop()
    if await stage.becomes(0):
        return "the old plugin ended, and none of the new one's 2 devices is allocatable"
    return ""


async def old_list_overwrites_new(stage: Stage) -> str:
    """The old plugin's stream stays open, and it sends a list."""
    await stage.boot()
    old = await stage.served(4)
    new = stage.plugin(2)
    await new.start()
    await stage.kubelet.wait(RESOURCE, 2)
    await old.change(old.devices[:3])
    if await stage.becomes(3):
        return "the new plugin has 2 devices, and 3 of the old one's are allocatable"
    return ""


async def phantoms(stage: Stage) -> str:
    """A new plugin registers with other devices."""
    await stage.boot()
    await stage.served(4)
    new = stage.plugin(2)
    await new.start()
    if await stage.becomes(6):
        return "the new plugin has 2 devices, and 6 are allocatable: 4 of a plugin that is gone"
    return ""


async def never_reconnects(stage: Stage) -> str:
    """A plugin's server starts anew under the same name, and doesn't register again."""
    await stage.boot()
    plugin = await stage.served(4)
    await plugin.stop()
    await stage.kubelet.wait(RESOURCE, 0)
    await plugin.serve()
    if not await stage.becomes(4):
        return f"the plugin listens again, and nobody has called it for {SOON:g} s"
    return ""


async def register_proves_nothing(stage: Stage) -> str:
    """A plugin registers and doesn't listen."""
    await stage.boot()
    try:
        await stage.plugin(4).register(seconds=15)
    except grpc.aio.AioRpcError:
        return ""
    return "Register of a socket that isn't there was answered OK"


async def early_is_never_called(stage: Stage) -> str:
    """A plugin registers, and listens a moment later."""
    await stage.boot()
    plugin = stage.plugin(4)
    registering = asyncio.ensure_future(plugin.register())
    await asyncio.sleep(0.3)  # Longer than any kubelet takes to dial for the first time.
    await plugin.serve()
    with contextlib.suppress(grpc.aio.AioRpcError):
        await registering
    if not await stage.becomes(4, 4.0):
        return "the plugin listened 0.3 s after its Register, and was never called"
    return ""


async def empty_answer_ends_kubelet(stage: Stage) -> str:
    """A plugin answers Allocate without an answer for any container."""
    await stage.boot()
    plugin = await stage.served(4)
    plugin.raw_answer = b""
    try:
        await stage.kubelet.admit(POD, RESOURCE, 1)
    except KubeletError as error:
        return f"an empty AllocateResponse: {error.message.splitlines()[0]}" if "panic" in error.message else ""
    return ""


async def admitted_without_a_plugin(stage: Stage) -> str:
    """The kubelet starts anew, and a pod with devices is admitted again before their plugin is back."""
    await _pod_over_a_start(stage)
    try:
        await stage.kubelet.admit(POD, RESOURCE, 2)
    except KubeletError:
        return ""
    return "nobody serves its devices, and the pod is started with them"


async def readmission_fails(stage: Stage) -> str:
    """The same; what is allocated must be healthy by then."""
    await _pod_over_a_start(stage)
    try:
        await stage.kubelet.admit(POD, RESOURCE, 2)
    except KubeletError as error:
        return f"the pod has failed for good: {error.message}"
    return ""


async def ended_init_container_is_refused(stage: Stage) -> str:
    """The kubelet starts anew beside a pod that runs, and whose init container ended; their plugin isn't back yet."""
    await stage.boot()
    plugin = await stage.served(4)
    await stage.kubelet.admit(POD, RESOURCE, 2, container="first", init=True)
    await stage.kubelet.admit(POD, RESOURCE, 2)
    await plugin.stop()
    pods = [Demand(POD, RESOURCE, 2, "first", init=True), Demand(POD, RESOURCE, 2)]
    await stage.boot(pods=pods, ready=False, running=[Running(POD)])
    try:
        await stage.kubelet.admit(POD, RESOURCE, 2, container="first", init=True)
    except KubeletError as error:
        return f"the pod runs, and has failed because of its init container, which ended: {error.message}"
    return ""


async def checkpoint_is_overwritten(stage: Stage) -> str:
    """Another pod is admitted, while the checkpoint has a second name."""
    await stage.boot()
    await stage.served(4)
    await stage.kubelet.admit(POD, RESOURCE, 1)
    other = stage.checkpoint.with_name("other-name")
    other.hardlink_to(stage.checkpoint)
    await stage.kubelet.admit("pod-b", RESOURCE, 1)
    if other.samefile(stage.checkpoint):
        return "the checkpoint was written into the file that was there: who reads meanwhile, or starts after a crash, finds a part of it"
    return ""


async def _pod_over_a_start(stage: Stage) -> None:
    await stage.boot()
    plugin = await stage.served(4)
    await stage.kubelet.admit(POD, RESOURCE, 2)
    await plugin.stop()
    await stage.boot(pods=[Demand(POD, RESOURCE, 2)])


async def in_flight_is_forgotten(stage: Stage) -> str:
    """Pod-resources is read while an Allocate is open and another pod has ended; then two more pods come."""
    await stage.boot()
    plugin = await stage.served(2)
    await stage.kubelet.admit(POD, RESOURCE, 1)
    plugin.free.clear()
    waiting = asyncio.create_task(stage.kubelet.admit("pod-b", RESOURCE, 1))
    await until(lambda: len(plugin.allocated) == 2, SOON)
    await stage.kubelet.remove(POD)
    await stage.read_records()
    plugin.free.set()
    await waiting
    with contextlib.suppress(KubeletError):  # The second one can't have any.
        for pod in ("pod-c", "pod-d"):
            await stage.kubelet.admit(pod, RESOURCE, 1)
    if doubled := await stage.doubled():
        return f"device {doubled} is held by two pods"
    return ""


def forgets(before: str) -> Show:
    """Show that a kubelet can't read what the one before it wrote."""

    async def show(stage: Stage) -> str:
        await stage.boot(before)
        plugin = await stage.served(4, before)
        await stage.kubelet.admit(POD, RESOURCE, 2)
        await plugin.stop()
        await stage.boot(pods=[Demand(POD, RESOURCE, 2)])
        held = (await stage.kubelet.pods()).get(POD)
        return "" if held else f"a pod got 2 devices from kubelet {before}, and this one knows nothing of it"

    return show
