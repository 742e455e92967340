"""The gateway's node at the API server: one watch for all features that need it."""

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
    """The metadata of a node."""

    name: str = ""
    uid: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)


class Taint(Struct, frozen=True, omit_defaults=True):
    """A taint with all its fields: a patch of the list would drop fields that are missing here."""

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
    """The spec of a node."""

    taints: tuple[Taint, ...] = ()


class NodeInfo(Struct, frozen=True):
    """The nodeInfo of a node: its kubelet's version, such as v1.37.1."""

    kubelet: str = field(default="", name="kubeletVersion")


class NodeConditions(Struct, frozen=True):
    """The status of a node."""

    allocatable: dict[str, str] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    info: NodeInfo = field(default_factory=NodeInfo, name="nodeInfo")


class NodeObject(Struct, frozen=True):
    """The fields of a node that are read."""

    metadata: NodeMetadata
    spec: NodeSpec = NodeSpec()
    status: NodeConditions = NodeConditions()

    @property
    def kubelet(self) -> int | None:
        """The minor version N of its kubelet 1.N; None if unknown."""
        try:
            return minor_version(self.status.info.kubelet)
        except ValueError:
            return None


def client(settings: Settings) -> Client:
    """Make the client.

    Raises:
        AccessError: the API server can't be configured.
    """
    return Client(access.find(settings.kubeconfig), manager=MANAGER)


def path(settings: Settings) -> str:
    """Return the node's path at the API server."""
    return f"{NODES}/{settings.node_name}"


async def label(settings: Settings, name: str, seconds: float) -> str:
    """Return the value of a label of the node, empty if it has none; after errors, try again until ``seconds`` have passed.

    Raises:
        AccessError: the API server can't be configured.
        KubernetesError: it didn't answer.
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
    """Watches the node, and calls each function in ``told`` after each change.

    ``last`` is the node as last seen, also after its deletion; None until it is known.
    """

    def __init__(self, api: Client, settings: Settings) -> None:
        self.watch = Watch(api, NODES, NodeObject, name=settings.node_name)
        self.last: NodeObject | None = None
        self.told: list[Callable[[NodeObject], None]] = []

    async def run(self) -> None:
        """Watch the node. Never returns."""
        async with contextlib.aclosing(self.watch.changes()) as changes:
            async for change in changes:
                if change.kind is not ChangeKind.DELETED and change.objects:
                    self.last = change.objects[-1]
                    for tell in self.told:
                        tell(self.last)
