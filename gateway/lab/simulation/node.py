"""A node: its kubelet, its gateways, its pods and its disks, and what must hold on it at every moment and in the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from devices.model import Device, Health
from gateway.age import Age
from gateway.handover.events import Standing
from gateway.lab.kubelets.behaviour import Behaviour
from gateway.lab.kubelets.checkpoint import Memory
from gateway.lab.simulation.clock import Clock
from gateway.lab.simulation.disk import Disk
from gateway.lab.simulation.gateway import Gateway
from gateway.lab.simulation.kubelet import RESOURCE, Faults, Kubelet, remembers
from gateway.registration.events import Phase

DEVICES: Final = 3
FOUND_WITHIN, FOUND_LATE, POLL = 0.004, 0.05, 5.0
"""Seconds within which the watch sees a new kubelet, how often it misses it, and when it looks all the same, in seconds
(``gateway.kubelet.watch``)."""


_AT_REST: Final = (Phase.SERVING, Phase.STANDBY, Phase.OUT)


class BrokenError(Exception):
    """A promise is broken."""


class Node:
    """One node, from its first boot on."""

    def __init__(self, seed: int) -> None:
        self.clock = Clock(seed)
        self.disks = {talks: Disk(self.clock.random, self._day) for talks in (True, False)}
        """The state directory, and that of a gateway that has its own."""
        self.faults = Faults()
        self.names: dict[str, Gateway] = {}
        """The names of sockets in the kubelet's directory."""
        self.gateways: list[Gateway] = []
        self._alive: list[Gateway] = []
        """The living ones; another list after each start and death, so that whoever goes through one may kill."""
        self.pods: dict[str, frozenset[str]] = {}
        """The living pods, and what they were given."""
        self.ended: set[str] = set()
        self.devices = [Device(f"GPU-{number}") for number in range(DEVICES)]
        self.kubelet: Kubelet
        self._checkpoint: tuple[Behaviour, Memory, float] | None = None
        self._stream = self._kubelets = self._pod = 0
        self._admitting = False
        self._heard_by = 0.0
        self.cordoned: dict[tuple[bool, str], bool] = {}
        """By state directory and device, what an operator was told is on disk: cordoned, or not."""
        self._announced: dict[bool, set[str]] = {True: set(), False: set()}
        """What kubelets were told of by gateways of each state directory."""
        self.lied = False
        """Whether a disk has lied: what it forgot is not the ledger's doing."""

    def _day(self) -> float:
        """The time of day, in seconds since 1970."""
        return 1.7e9 + self.clock.now

    # Kubelets.

    def start_kubelet(self, behaviour: Behaviour) -> None:
        """Start a kubelet where none runs."""
        self._kubelets += 1
        self.clock.tell("kubelet", behaviour.name, "starts")
        self.kubelet = kubelet = Kubelet(self, behaviour, self._kubelets)
        for gateway in self.alive():
            missed = self.clock.random() < FOUND_LATE
            within = POLL if missed else FOUND_WITHIN
            self.clock.met["a new kubelet is seen late"] += missed
            gateway.later(within * self.clock.random() + 0.001, self._found, gateway, kubelet)

    def _found(self, gateway: Gateway, kubelet: Kubelet) -> None:
        if kubelet.alive:
            gateway.kubelet_up(kubelet)

    def stop_kubelet(self) -> None:
        """End the kubelet at once."""
        if self.kubelet.alive:
            self.clock.tell("kubelet dies")
            self.judge_registers()
            self.kubelet.die()
            for gateway in self._alive:
                gateway.plugin.hung_up(self.kubelet)
            self._admitting = False
            self.pods = {pod: ids for pod, ids in self.pods.items() if ids}

    def judge_registers(self) -> None:
        """Exactly one Register is accepted in a kubelet's life during which nothing goes wrong."""
        if self.kubelet.clean and self.kubelet.accepted > 1:
            self.broken(f"nothing went wrong, and one kubelet accepted {self.kubelet.accepted} Registers of a resource")

    def checkpoint_for(self, behaviour: Behaviour) -> Memory | None:
        """Give what a kubelet that starts remembers; where it can't read that, a node is drained first."""
        if self._checkpoint is None:
            return None
        before, found, _ = self._checkpoint
        if remembers(before, behaviour):
            return found
        for pod in [*self.pods]:
            self.remove(pod)
        self._checkpoint = None
        return None

    def write_checkpoint(self, kubelet: Kubelet) -> None:
        """Keep what a kubelet remembers."""
        self._checkpoint = (kubelet.behaviour, kubelet.memory(), self.clock.now)

    def registered_since(self, since: float) -> bool | None:
        """Tell whether the checkpoint names devices, if it was written since; None where it shows nothing."""
        if self._checkpoint is None or not self._checkpoint[1].registered:
            return None
        return bool(self._checkpoint[1].registered.get(RESOURCE)) if self._checkpoint[2] >= since else False

    def listed(self, kubelet: Kubelet, devices: Sequence[Device]) -> None:
        """Take note of what a kubelet was told of."""
        endpoint = kubelet.endpoint
        if endpoint is not None and endpoint.server is not None:
            self._announced[endpoint.server.talks].update(device.id for device in devices)

    def behind(self, name: str) -> Gateway | None:
        """Find the gateway that a socket's name leads to."""
        gateway = self.names.get(name)
        return gateway if gateway is not None and gateway.listens else None

    def next_stream(self) -> int:
        """Number a stream."""
        self._stream += 1
        return self._stream

    # Gateways.

    @property
    def settled(self) -> bool:
        """Whether all gateways are done with their start, those that are several can talk, and no end is unheard of.

        A Register that the kubelet before accepted, and never called for, is still waited for as the next one starts.
        """
        if self.clock.now < self._heard_by:
            return False
        alive = self.alive()
        at_rest = all(one.begun and not one.stopping and not one.frozen and one.handover.settled for one in alive)
        return at_rest and (
            len(alive) < 2
            or all(one.talks and one.api == "auto" and one.plugin.standing is not Standing.BUSY for one in alive)
        )

    def start_gateway(self, **how: Any) -> Gateway:
        """Start one more gateway."""
        gateway = Gateway(self, len(self.gateways) + 1, **how)
        self.gateways.append(gateway)
        self._alive = [*self._alive, gateway]
        if others := self.others(gateway):
            self.clock.met["two gateways live"] += 1
            self.kubelet.clean = False
            self.clock.met["three gateways live"] += len(others) > 1
        return gateway

    def heard(self, by: float) -> None:
        """Take note that somebody hears of a gateway's end ``by`` then, and of all that it said before."""
        self._heard_by = max(self._heard_by, by)

    def alive(self) -> list[Gateway]:
        """List the living gateways."""
        return self._alive

    def others(self, gateway: Gateway) -> list[Gateway]:
        """List the other living gateways."""
        return [one for one in self._alive if one is not gateway]

    def peers(self, gateway: Gateway) -> list[Age]:
        """List the other gateways that have published their folder."""
        return [one.age for one in self._alive if one.published and one is not gateway]

    def by_age(self, age: Age) -> Any:
        """Find a gateway."""
        return next((one for one in self.gateways if one.age == age), None)

    def died(self, gateway: Gateway) -> None:
        """Take a dead gateway's names away when the next one sweeps; who looks at folders hears of it."""
        self.kubelet.clean = False
        self._alive = self.others(gateway)
        for one in self._alive:
            one.died(gateway.age)

    def names_of(self, age: Age) -> frozenset[str]:
        """Give a gateway's names in the socket directory."""
        return frozenset(name for name in self.names if name.startswith(f"{age.token}-"))

    def hardware(self) -> tuple[Device, ...]:
        """Give what a source sees."""
        return tuple(self.devices)

    def damaged(self, gateway: Gateway) -> None:
        """Take note that a ledger couldn't be read in full."""
        if not self.lied:
            self.broken(f"{gateway.label} finds a damaged state file, and no disk has lied")

    # Pods.

    def admit(self, count: int) -> None:
        """Let a pod come; pods are admitted one by one."""
        if self._admitting or not self.kubelet.alive:
            return
        self._pod += 1
        pod, kubelet = f"pod-{self._pod}", self.kubelet
        self._admitting = True
        self.pods[pod] = frozenset()

        def done(ids: frozenset[str] | None, why: str) -> None:
            if kubelet is not self.kubelet:
                return
            self._admitting = False
            self.clock.tell(pod, sorted(ids) if ids is not None else why)
            if ids is None:
                self.pods.pop(pod, None)
                self.clock.met["a pod is refused"] += 1
            elif pod in self.pods:
                self.pods[pod] = ids
                self.clock.met["a pod gets devices"] += 1
                self.judge_pods()

        kubelet.admit(pod, count, done)

    def remove(self, pod: str) -> None:
        """End a pod."""
        self.pods.pop(pod, None)
        self.kubelet.records.deactivate(pod)

    def judge_pods(self) -> None:
        """No device may be in two living pods."""
        holders: dict[str, str] = {}
        for pod, ids in self.pods.items():
            for device_id in ids:
                if device_id in holders:
                    self.broken(f"{device_id} is given to both {holders[device_id]} and {pod}")
                holders[device_id] = pod

    # Power.

    def power_cut(self) -> None:
        """Everything dies at once, and disks keep what was flushed."""
        self.clock.tell("the power is cut")
        self.kubelet.clean = False
        self.stop_kubelet()
        for gateway in self.alive():
            gateway.die()
        for disk in self.disks.values():
            disk.power_cut()
        self.clock.met["the power is cut"] += 1

    def judge_ledger(self, gateway: Gateway) -> None:
        """What a kubelet was told of, and what an operator was told, is remembered."""
        if self.lied:
            return
        talks = gateway.talks
        forgotten = self._announced[talks] - gateway.scribe.ledger.announced(RESOURCE).keys()
        if forgotten:
            self.broken(f"{gateway.label} has no memory of {', '.join(sorted(forgotten))}, which a kubelet was told of")
        for (where, device_id), cordoned in self.cordoned.items():
            if where is talks and (device_id in gateway.scribe.ledger.cordons) is not cordoned:
                if cordoned:
                    self.broken(f"a cordon that was acknowledged is lost: {device_id}, by {gateway.label}")
                self.broken(f"a cordon that was lifted is back: {device_id}, by {gateway.label}")

    # In the end.

    def lacks(self) -> str:
        """Say which devices the kubelet should give out, and which it would; empty where they are the same."""
        healthy = frozenset(device.id for device in self.devices if device.health is Health.HEALTHY)
        if (found := self.kubelet.allocatable()) == healthy:
            return ""
        return f"the kubelet would give out {sorted(found or ())}, and {sorted(healthy)} are there"

    def wrong(self) -> str:
        """Say what isn't right on a node on which nothing goes wrong any more; empty where all is."""
        kubelet = self.kubelet
        if lacks := self.lacks():
            return lacks
        if not all(gateway.talks for gateway in self.alive()):
            return ""  # No kubelet's records show whose devices they are: of those that can't talk, several may serve.
        serving = [gateway.label for gateway in self.alive() if gateway.plugin.machine.phase is Phase.SERVING]
        if len(serving) != 1:
            return f"one gateway is to serve, and these do: {', '.join(serving) or 'none'}"
        client = kubelet.serves
        if client is None or client.server.label != serving[0]:
            return f"the kubelet allocates from {client and client.server.label}, and {serving[0]} serves"
        if rest := [one for one in self.alive() if one.begun and one.able and one.plugin.machine.phase not in _AT_REST]:
            return f"{rest[0].label} doesn't come to rest: it is {rest[0].plugin.machine.phase.value}"
        return ""

    def take_apart(self) -> None:
        """End: rings of objects would be left to the garbage collector, at a tenth of a schedule's cost."""
        for gateway in self.gateways:
            gateway.take_apart()
        self.clock.due.clear()
        vars(self).clear()

    @staticmethod
    def broken(promise: str) -> None:
        """Tell that a promise is broken."""
        raise BrokenError(promise)
