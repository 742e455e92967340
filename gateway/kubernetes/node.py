"""The own node at the API server: one watch, for all that goes by it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from adapters.levels import minor_version
from gateway.kubernetes import access, watch
from gateway.kubernetes.client import Client, KubernetesError
from gateway.kubernetes.watch import ChangeKind, Watch

if TYPE_CHECKING:
    from gateway.configuration.settings import Settings

__all__ = ["Condition", "KubernetesError", "NodeObject", "Taint", "client", "label", "path"]

MANAGER: Final = "device-plugin-gateway"
NODES: Final = "/api/v1/nodes"


class NodeMetadata(Struct, frozen=True):
    """Of a node."""

    name: str = ""
    uid: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    resource_version: str = field(default="", name="resourceVersion")


class Taint(Struct, frozen=True, omit_defaults=True):
    """A taint, whole: what a patch of the list leaves out would be gone."""

    key: str
    effect: str
    value: str = ""
    time_added: str | None = field(default=None, name="timeAdded")


class Condition(Struct, frozen=True):
    """A condition of a node."""

    type: str
    status: str = ""
    reason: str = ""
    message: str = ""


class NodeSpec(Struct, frozen=True):
    """Of a node."""

    taints: tuple[Taint, ...] = ()


class NodeInfo(Struct, frozen=True):
    """Of a node: its kubelet's version, such as v1.37.1."""

    kubelet: str = field(default="", name="kubeletVersion")


class NodeConditions(Struct, frozen=True):
    """Of a node."""

    allocatable: dict[str, str] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    info: NodeInfo = field(default_factory=NodeInfo, name="nodeInfo")


class NodeObject(Struct, frozen=True):
    """What is wanted of a node."""

    metadata: NodeMetadata
    spec: NodeSpec = NodeSpec()
    status: NodeConditions = NodeConditions()

    @property
    def kubelet(self) -> int | None:
        """The minor version of its kubelet, N of 1.N; None where it doesn't say."""
        try:
            return minor_version(self.status.info.kubelet)
        except ValueError:
            return None


def client(settings: Settings) -> Client:
    """Make the client.

    Raises:
        AccessError: there is no way to the API server.
    """
    return Client(access.find(settings.kubeconfig), manager=MANAGER)


def path(settings: Settings) -> str:
    """Say where the own node is at the API server."""
    return f"{NODES}/{settings.node_name}"


async def label(settings: Settings, name: str, seconds: float) -> str:
    """Get the value of a label of the own node, empty where it has none; try again for so many seconds.

    Raises:
        AccessError: there is no way to the API server.
        KubernetesError: it didn't tell.
    """
    api, ends = client(settings), asyncio.get_running_loop().time() + seconds
    retries = watch.Retries()
    with contextlib.closing(api):
        while True:
            left = ends - asyncio.get_running_loop().time()
            try:
                found = await api.get(path(settings), NodeObject, seconds=max(left, 0.1))
                return found.metadata.labels.get(name, "")
            except KubernetesError as error:
                wait = retries.wait(error)
                if wait > ends - asyncio.get_running_loop().time():
                    raise
            await asyncio.sleep(wait)


class OwnNode:
    """The own node as the API server has it, and who is told of each change.

    ``last`` is None until it is known; a node that was deleted stays as it was, because it comes again.
    """

    def __init__(self, api: Client, settings: Settings) -> None:
        self.watch = Watch(api, NODES, NodeObject, name=settings.node_name)
        self.last: NodeObject | None = None
        self.told: list[Callable[[NodeObject], None]] = []

    async def run(self) -> None:
        """Follow it, for ever."""
        async with contextlib.aclosing(self.watch.changes()) as changes:
            async for change in changes:
                if change.kind is not ChangeKind.DELETED and change.objects:
                    self.last = change.objects[-1]
                    for tell in self.told:
                        tell(self.last)
