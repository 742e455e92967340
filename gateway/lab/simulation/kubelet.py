"""A kubelet's device manager under simulated time, of any version: what ``devicemanager`` does, without a socket.

The records are the emulated kubelet's own (``DeviceRecords``), the differences between versions its ``Behaviour``. What is left
to say here is when each step of a registration happens, and what becomes of the registration before it. ``transcripts`` hold
it to what the genuine kubelets said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from adapters.dialect import Dialect, Level
from adapters.levels import Evidence, level
from devices.model import ContainerAnswer, Device, Health
from gateway.kubelet.identity import KubeletId
from gateway.lab.kubelets.behaviour import (
    DIAL_SECONDS,
    ENDPOINT_GRACE_SECONDS,
    Behaviour,
    Checkpoint,
    Dial,
    SecondRegister,
    behaviour,
)
from gateway.lab.kubelets.checkpoint import Memory
from gateway.lab.kubelets.kubelet import Demand, KubeletError
from gateway.lab.kubelets.records import DeviceRecords

if TYPE_CHECKING:
    from gateway.lab.simulation.node import Node


RESOURCE: Final = "nvidia.com/gpu"
SHOWS: Final = 23
"""The first kubelet, 1.23, that tells which devices it would give out."""
CLASSES: Final = (
    ("1.8",),
    ("1.9",),
    ("1.10", "1.11"),
    ("1.12", "1.18", "1.20", "1.24"),
    ("1.25", "1.28", "1.32", "1.36"),
    ("1.37",),
)
"""By class, the versions that differ in a way that counts here: the checkpoint, the dial, what Register waits for."""

KUBELETS: Final = {version: behaviour(version) for versions in CLASSES for version in versions}
_ANSWER: Final = ContainerAnswer()
REDIAL: Final = 0.5
"""Seconds until a kubelet that found nobody under a name dials again, within ``DIAL_SECONDS``."""

ALLOCATE_SECONDS: Final = 5.0
"""Seconds that a plugin which doesn't answer holds an admission up."""

Reply = Callable[[str, str], None]
Admitted = Callable[[frozenset[str] | None, str], None]


@lru_cache(maxsize=64)
def level_of(dialect: Dialect, kubelet: Behaviour) -> Level:
    """Tell what a gateway knows of a kubelet by its calls."""
    return level(dialect, Evidence(f"grpc-go/{kubelet.grpc_go}", kubelet.asks_options))


def remembers(before: Behaviour, after: Behaviour) -> bool:
    """Tell whether a kubelet reads what the one before it wrote."""
    return (
        before.checkpoint in {after.checkpoint, after.also_reads}
        and Checkpoint.ENTRIES
        not in {
            before.checkpoint,
            after.checkpoint,
        }
    ) or before.checkpoint is after.checkpoint


@dataclass(slots=True, eq=False)
class Client:
    """The kubelet's side of one registration. ``server`` is the gateway behind its name."""

    name: str
    server: Any = None
    stream: int = 0
    """The number of its stream at the gateway, 0 before it calls."""
    open: bool = False
    devices: dict[str, Device] | None = None
    stopped: float | None = None
    heard_by: float = 0.0
    """When the last list arrives: messages keep their order."""

    def listed(self) -> dict[str, Device]:
        """What it listed last."""
        return self.devices if self.devices is not None else {}


@dataclass(slots=True)
class Faults:
    """What is wrong with the kubelet at present."""

    error: bool = False
    hangs: bool = False
    loses: bool = False
    mute: bool = False
    reports_late: bool = False


class Kubelet:
    """One kubelet process, from its start to its death."""

    def __init__(self, node: Node, behaviour: Behaviour, number: int) -> None:
        self.node, self.clock, self.behaviour = node, node.clock, behaviour
        self.id = KubeletId(1, 1, number)
        self.started_at = self.clock.now
        self.alive, self.frozen = True, False
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.faults = node.faults
        self.clean = node.settled
        """Whether nothing went wrong since its start that may cost a second Register."""
        self.accepted = 0
        self.records = DeviceRecords(behaviour)
        self.endpoint: Client | None = None
        """Who is allocated from."""
        self.clients: list[Client] = []
        """1.25 and later: who is registered."""
        self.connected: dict[str, Client] = {}
        """1.37 and later: endpoints by name."""
        self.streams: set[Client] = set()
        self._hung: list[tuple[Any, ...]] = []
        self._second = behaviour.second_register
        memory = node.checkpoint_for(behaviour)
        self.records.expect([Demand(pod, RESOURCE, len(ids)) for pod, ids in node.pods.items()], ())
        if memory is not None:
            self.records.recall(memory)
            if memory.registered:
                self.endpoint = Client("", stopped=self.clock.now)
        node.names.clear()

    def die(self) -> None:
        """End at once: what is connected hears of it."""
        self.alive = False
        for client in self.streams:
            if client.open:
                client.open = False
                client.server.later(self.clock.latency(), client.server.plugin.stream_over, client.stream)
        self.streams.clear()

    def _later(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self.clock.by(self, seconds, call, args)

    # Registration.

    def register(self, server: Any, name: str, dialect: str, reply: Reply, given_up: Callable[[], bool]) -> None:
        """Take a Register; ``reply`` is called with its gRPC status, ``given_up`` tells whether the plugin still waits."""
        if not self.alive:
            reply("UNAVAILABLE", "")
            return
        faults = self.faults
        if faults.hangs or faults.loses:
            self.clean = False
            if faults.hangs:
                self._hung.append((server, name, dialect, reply, given_up))
            return
        if faults.error:
            self.clean = False
            reply("UNKNOWN", "busy")
            return
        speaks = self.behaviour.dialect
        if dialect != speaks:
            if (dialect == "v1beta1") is not (speaks == "v1beta1"):
                reply("UNIMPLEMENTED", "unknown service")
            else:
                reply("UNKNOWN", self.behaviour.refuse_version(dialect))
            return
        self.accepted += 1
        self.clock.tell(f"kubelet {self.behaviour.name} accepts", name, "of", server.label)
        if faults.mute:
            self.clean = False
            reply("OK", "")
            return
        client = Client(name)
        if not self.behaviour.sync_register:
            reply("OK", "")
            self._later(self.clock.latency(), self._add, client, self._old(), self.clock.now)
            return
        if self._second is not SecondRegister.PER_SOCKET:
            self.clients = []
        self.clients.append(client)
        self._later(self.clock.latency(), self._connect, client, reply, given_up, self.clock.now)

    def healed(self) -> None:
        """Go on with what hung."""
        hung, self._hung = self._hung, []
        for server, name, dialect, reply, given_up in hung:
            if given_up() and self.behaviour.register_cancels_dial:
                continue
            self._later(self.clock.latency(), self.register, server, name, dialect, reply, given_up)

    def _old(self) -> Client | None:
        """Whoever is registered when a Register comes; 1.9 to 1.11 take over its devices, unhealthy."""
        return self.endpoint

    def _reach(self, client: Client) -> bool:
        client.server = self.node.behind(client.name)
        return client.server is not None

    def _add(self, client: Client, old: Client | None, since: float) -> None:
        """Kubelets up to 1.24: connect, and call."""
        if not self._reach(client):
            if self.behaviour.dial is Dial.BLOCKING and self.clock.now < since + DIAL_SECONDS:
                self._later(REDIAL, self._add, client, old, since)
            return
        if self._second is SecondRegister.CLOSE_OLD:
            if old is not None and old.devices:
                client.devices = {one: replace(device, health=Health.UNHEALTHY) for one, device in old.devices.items()}
            if self.endpoint is not old:
                self.clock.met["of two racing registrations the later is dropped"] += 1
                return
            if old is not None:
                old.stopped = self.clock.now
                self._cancel(old)
        if self._second is not SecondRegister.UNION:
            self._look_at_second(client)
            self.endpoint = client
        self._call(client)

    def _connect(self, client: Client, reply: Reply, given_up: Callable[[], bool], since: float) -> None:
        """Kubelets from 1.25: connect and ask for the options before Register is answered."""
        if self.behaviour.register_cancels_dial and given_up():
            self._unregister(client)
            return
        if not self._reach(client):
            if self.clock.now < since + DIAL_SECONDS:
                self._later(REDIAL, self._connect, client, reply, given_up, since)
            else:
                self.clean = False
                self._unregister(client)
                reply("UNKNOWN", "failed to dial device plugin")
            return
        if self._second is SecondRegister.PER_SOCKET:
            if client.name in self.connected:
                reply("UNKNOWN", "device plugin already connected")
                return
            self.connected[client.name] = client
        self._look_at_second(client)
        self.endpoint = client
        client.server.plugin.connected = True
        reply("OK", "")
        self._later(self.clock.latency(), self._call, client)

    def _look_at_second(self, client: Client) -> None:
        if self.endpoint is not None and self.endpoint.open and self.endpoint is not client:
            self.clock.met["a Register while the stream before lives"] += 1

    # Streams.

    def _call(self, client: Client) -> None:
        if not client.server.listens:
            self._ended(client)
            return
        client.open = True
        self.streams.add(client)
        client.stream = self.node.next_stream()
        self.clock.after(self.clock.latency(), self._arrives, client)

    def _arrives(self, client: Client) -> None:
        if self.alive and client.server.alive:
            client.server.later(0.0, client.server.plugin.called, client.stream, client, self)
        else:
            self.hear_end(client)

    def hear_list(self, client: Client, devices: Sequence[Device]) -> None:
        """Take a list that a gateway sent."""
        if self.alive and client.open:
            client.devices = self.records.enter_list(RESOURCE, client.listed(), devices)
            self.node.listed(self, devices)
            if self._second is SecondRegister.UNION and self.endpoint is not client:
                old, self.endpoint = self.endpoint, client
                if old is not None:
                    self._cancel(old)
            self.node.write_checkpoint(self)

    def hear_end(self, client: Client) -> None:
        """Take notice that a stream was ended, by the gateway or by its death."""
        if self.alive and client.open:
            client.open = False
            self.streams.discard(client)
            self._ended(client)

    def _cancel(self, client: Client) -> None:
        """End a stream from the kubelet's side."""
        if client.open:
            client.open = False
            self.streams.discard(client)
            client.server.later(self.clock.latency(), client.server.plugin.stream_over, client.stream)
            self._ended(client)

    def cut(self) -> bool:
        """Break the present plugin's stream, as a lost connection does; False where there is none."""
        if self.endpoint is None or not self.endpoint.open:
            return False
        self._cancel(self.endpoint)
        return True

    def _ended(self, client: Client) -> None:
        if self.behaviour.sync_register:
            current = self._registered_as(client)
            if current is None:
                return
            self._unregister(current)
            if current is not client and not (current.stream and not current.open):
                self.clock.met["the end of an old stream disconnects the new plugin (#127803)"] += 1
            self._cancel(current)
            late = 0.3 * self.clock.random() if self.faults.reports_late else self.clock.latency() * 0.2
            self._later(late, self._disconnected, current)
        elif self.endpoint is client:
            if self._second is SecondRegister.UNION:
                self.endpoint = None
                self.records.drop(RESOURCE, client.listed())
            else:
                client.stopped = self.clock.now
                self.records.mark_unhealthy(RESOURCE)

    def _registered_as(self, client: Client) -> Client | None:
        for one in self.clients:
            if self._second is not SecondRegister.PER_SOCKET or one.name == client.name:
                return one
        return None

    def _unregister(self, client: Client) -> None:
        if self._second is SecondRegister.PER_SOCKET:
            self.clients = [one for one in self.clients if one.name != client.name]
        else:
            self.clients = []

    def _disconnected(self, client: Client) -> None:
        """Take out of the records who has gone: whoever is there now, from 1.37 on only the client itself."""
        if self._second is not SecondRegister.PER_SOCKET:
            endpoint = self.endpoint
        else:
            endpoint = self.connected.pop(client.name, None)
        if endpoint is None:
            return
        endpoint.stopped = self.clock.now
        if self.connected:
            self.endpoint = next(iter(self.connected.values()))
            return
        self.records.mark_unhealthy(RESOURCE)
        if endpoint.open and self._second is not SecondRegister.PER_SOCKET:
            self.clock.met["a live stream on an endpoint that the kubelet has stopped"] += 1

    # What it tells.

    def allocatable(self) -> frozenset[str] | None:
        """Tell which devices it would give out; None for a resource that it doesn't know (any longer)."""
        endpoint = self.endpoint
        gone = endpoint is None or (
            endpoint.stopped is not None and self.clock.now > endpoint.stopped + ENDPOINT_GRACE_SECONDS
        )
        if gone and self.behaviour.minor > 8 and RESOURCE in self.records.resources:
            self.endpoint = None
            self.records.forget(RESOURCE)
            self.clock.met["the kubelet forgets a resource after five minutes"] += 1
        listed = self.records.allocatable().get(RESOURCE)
        return None if listed is None else frozenset(device.id for device in listed)

    @property
    def serves(self) -> Client | None:
        """The registration that pods get devices by: None where it was stopped or has no stream."""
        endpoint = self.endpoint
        return endpoint if endpoint is not None and endpoint.open and endpoint.stopped is None else None

    # Pods.

    def admit(self, pod: str, count: int, done: Admitted) -> None:
        """Admit a pod that asks for so many devices; ``done`` is told which it got, or None and why."""
        self.records.activate(pod, "main", {RESOURCE: count}, init=False)
        self.records.free_inactive()
        if self.behaviour.allocates_at_start and RESOURCE not in self.records.resources:
            self._refused(pod, "no such resource", done)
            return
        try:
            if self.behaviour.allocates_at_start:
                ids = frozenset(self.records.claim_at_start(pod, "main", RESOURCE, count))
            else:
                claim = self.records.claim(pod, "main", RESOURCE, count)
                if claim is None:
                    done(self.records.ids(pod, "main", RESOURCE), "")
                    return
                claim.take(sorted(sorted(claim.available - claim.taken), key=lambda _: self.clock.random()))
                ids = frozenset(claim.taken)
        except KubeletError as error:
            self._refused(pod, error.message, done)
            return
        self.records.reserve(RESOURCE, ids)
        plugin = self.endpoint
        if plugin is None or not plugin.server or not plugin.server.listens or plugin.stopped is not None:
            self._refused(pod, "nobody to allocate from", done)
            return
        waiting = self.clock.by(self, ALLOCATE_SECONDS, self._refused, (pod, "no answer", done))

        def answered(error: str) -> None:
            if waiting[2] is not None:
                waiting[2] = None
                self._later(self.clock.latency(), self._answered, pod, ids, error, done)

        plugin.server.later(self.clock.latency(), plugin.server.plugin.allocate, ids, answered)

    def _answered(self, pod: str, ids: frozenset[str], error: str, done: Admitted) -> None:
        if error:
            self._refused(pod, error, done)
            return
        self.records.allot(pod, "main", RESOURCE, sorted(ids), _ANSWER)
        self.node.write_checkpoint(self)
        done(ids, "")

    def _refused(self, pod: str, why: str, done: Admitted) -> None:
        self.records.release()
        self.records.deactivate(pod)
        self.records.free_inactive()
        done(None, why)

    def memory(self) -> Memory:
        """Give what is to be remembered over a restart."""
        return self.records.memory()
