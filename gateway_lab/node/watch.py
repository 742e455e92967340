"""What a client of the API server saw of a node and its pods: every change, with its time, and what follows from that.

The recorder hears two watches and keeps what matters of each object; the rest is pure. Times are CLOCK_MONOTONIC in
nanoseconds, taken when the line of the change had come. What happened while the API server was away shows as one change
when it is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from gateway_lab.node.api import Api, Event, Object
from gateway_lab.node.machine import HOSTNAME

NODES = "/api/v1/nodes"
PODS = "/api/v1/pods"


class UnseenError(Exception):
    """What was waited for did not show at the API server. The message ends with what showed last."""


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """A node's status. Only resources with a vendor's name are in ``capacity`` and ``allocatable``."""

    monotonic_ns: int
    capacity: Mapping[str, int]
    allocatable: Mapping[str, int]
    ready: str
    kubelet: str


@dataclass(frozen=True, slots=True)
class ContainerSeen:
    """A container's status: ``state`` is running, waiting or terminated, ``why`` its reason."""

    id: str
    restarts: int
    state: str
    why: str
    ready: bool
    health: Mapping[str, str] = field(default_factory=dict)
    """Health by device ID (kubelet 1.31 and later, where it says so)."""


@dataclass(frozen=True, slots=True)
class PodSeen:
    """A pod's status. ``phase`` is the API's, or ``Gone``."""

    monotonic_ns: int
    uid: str
    namespace: str
    name: str
    app: str
    phase: str
    reason: str
    message: str
    ready: bool
    containers: Mapping[str, ContainerSeen]
    ending: bool = False

    @property
    def runs(self) -> bool:
        """Whether it runs and all its containers do."""
        return (
            self.phase == "Running"
            and bool(self.containers)
            and all(one.state == "running" for one in self.containers.values())
        )


@dataclass(frozen=True, slots=True)
class Drop:
    """A time in which fewer devices were allocatable than there should be; ``ms`` is infinite while it lasts."""

    began_ns: int
    ms: float


def node_seen(at: int, found: Object) -> NodeSeen:
    """Read a Node."""
    status = found.get("status", {})
    ready = next((one["status"] for one in status.get("conditions", ()) if one["type"] == "Ready"), "Unknown")
    return NodeSeen(
        at,
        _devices(status.get("capacity", {})),
        _devices(status.get("allocatable", {})),
        ready,
        status.get("nodeInfo", {}).get("kubeletVersion", ""),
    )


def pod_seen(at: int, found: Object, *, gone: bool = False) -> PodSeen:
    """Read a Pod."""
    about, status = found["metadata"], found.get("status", {})
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions", ()))
    return PodSeen(
        at,
        about["uid"],
        about["namespace"],
        about["name"],
        about.get("labels", {}).get("app", ""),
        "Gone" if gone else status.get("phase", "Pending"),
        status.get("reason", ""),
        status.get("message", ""),
        ready,
        {one["name"]: _container(one) for one in status.get("containerStatuses", ())},
        "deletionTimestamp" in about,
    )


def _container(found: Object) -> ContainerSeen:
    states: Object = found.get("state") or {"waiting": {}}
    state, details = next(iter(states.items()))
    health = {
        one["resourceID"]: one.get("health", "")
        for resource in found.get("allocatedResourcesStatus", ())
        for one in resource.get("resources", ())
    }
    return ContainerSeen(
        found.get("containerID", ""),
        found.get("restartCount", 0),
        state,
        details.get("reason", ""),
        found.get("ready", False),
        health,
    )


def _devices(quantities: Mapping[str, str]) -> dict[str, int]:
    return {name: int(count) for name, count in quantities.items() if "/" in name}


def drops(history: Sequence[NodeSeen], resource: str, expected: int, since_ns: int = 0) -> list[Drop]:
    """Find when fewer than ``expected`` of a resource were allocatable, as far as that was after ``since_ns``."""
    found: list[Drop] = []
    began = None
    for seen in history:
        count = seen.allocatable.get(resource, 0)
        if began is not None and count >= expected:
            if seen.monotonic_ns > since_ns:
                found.append(Drop(began, (seen.monotonic_ns - max(began, since_ns)) / 1e6))
            began = None
        elif count < expected:
            began = seen.monotonic_ns if began is None else began
    return [*found, *([] if began is None else [Drop(began, float("inf"))])]


def failed(history: Sequence[PodSeen], since_ns: int) -> list[str]:
    """Say which pods failed after ``since_ns``, those that are gone again too."""
    said: dict[str, str] = {}
    for pod in history:
        if pod.monotonic_ns > since_ns and pod.phase == "Failed":
            said.setdefault(pod.uid, f"pod {pod.name} failed: {pod.reason}: {pod.message}")
    return [*said.values()]


class Recorder:
    """Everything that the watches of one API server told so far. ``async with``."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.nodes: list[NodeSeen] = []
        """One node's history: each entry differs from the one before."""
        self.history: list[PodSeen] = []
        """All pods' history, as it came."""
        self.pods: dict[str, PodSeen] = {}
        """Each pod that is there now, by UID."""
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._watches = (self._api.watch(NODES, self._node), self._api.watch(PODS, self._pod))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(watch.close() for watch in self._watches))

    @property
    def node(self) -> NodeSeen:
        """The node as it was seen last."""
        return self.nodes[-1] if self.nodes else NodeSeen(0, {}, {}, "Unknown", "")

    def named(self, name: str) -> list[PodSeen]:
        """Give the pods that are there now with this name, or this ``app`` label."""
        return [pod for pod in self.pods.values() if name in {pod.name, pod.app}]

    async def until(self, holds: Callable[[Recorder], bool], what: str, seconds: float = 60) -> None:
        """Wait until something shows.

        Raises:
            UnseenError: it didn't within ``seconds``.
        """
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: holds(self))
        except TimeoutError:
            raise UnseenError(f"expected {what} within {seconds:g} s; the API server shows:\n{self._told()}") from None

    def _told(self) -> str:
        pods = [
            f"{pod.namespace}/{pod.name} {pod.phase} {pod.reason} {pod.message} "
            + " ".join(f"{one.state} {one.why} restarts={one.restarts}" for one in pod.containers.values())
            for pod in self.pods.values()
        ]
        return "\n".join([str(self.node), *pods])

    def _node(self, event: Event) -> None:
        # A test may make other nodes.
        if event.object is not None and not event.gone and event.object["metadata"]["name"] == HOSTNAME:
            seen = node_seen(event.monotonic_ns, event.object)
            if not self.nodes or _rest(seen) != _rest(self.nodes[-1]):
                self.nodes.append(seen)
                self._tell()

    def _pod(self, event: Event) -> None:
        if event.object is not None:
            pod = pod_seen(event.monotonic_ns, event.object, gone=event.gone)
            self.history.append(pod)
            self.pods.pop(pod.uid, None) if event.gone else self.pods.update({pod.uid: pod})
        elif event.uids is not None:
            self.pods = {uid: pod for uid, pod in self.pods.items() if uid in event.uids}
        self._tell()

    def _tell(self) -> None:
        task = asyncio.ensure_future(self._notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _rest(seen: NodeSeen) -> tuple[object, ...]:
    return (seen.capacity, seen.allocatable, seen.ready, seen.kubelet)
