"""A schedule: what happens on a node and when, made from a seed and nothing else, and played under simulated time."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from devices.model import Device, Health
from gateway.lab.simulation.kubelet import CLASSES, KUBELETS, SHOWS
from gateway.lab.simulation.node import BrokenError, Node
from gateway.registration.events import NameLost, Phase, Renew

AFTERWARDS: Final = (3.0, 20.0, 60.0, 120.0, 300.0, 700.0)
"""Seconds after the last fault at which the node is looked at; it must be right at the last."""
STOOD_STILL: Final = 12.0
"""Seconds in which another gateway takes over from one that stands still as the kubelet starts anew. A new kubelet may be seen 5 s late."""
APARTS: Final = 0.15
"""The share of gateways with a state directory of their own: nobody can talk to them."""

HIGHEST: Final = 0.999999
"""The highest ``how``: it picks one of several, and one that is rounded up to 1 would pick one too many."""


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that happens ``at`` a time (simulated seconds); ``how`` tells its kind apart, ``lasts`` how long it lasts."""

    at: float
    do: str
    how: float = 0.0
    lasts: float = 0.0


class Schedule(msgspec.Struct, frozen=True, omit_defaults=True):
    """What happens, on a node that begins with a kubelet of ``kubelet`` and one gateway."""

    seed: int
    kubelet: str
    steps: tuple[Step, ...]


WEIGHTS: Final[Mapping[str, float]] = {
    "kubelet": 4,
    "hop": 1,
    "kill": 3,
    "term": 1,
    "start": 3,
    "roll": 4,
    "freeze": 2,
    "power": 1,
    "cut": 2,
    "error": 1,
    "hang": 1,
    "lose": 0.3,
    "mute": 0.5,
    "late": 1,
    "ill": 1,
    "new": 1,
    "admit": 4,
    "remove": 2,
    "cordon": 1,
    "uncordon": 0.7,
    "full": 0.5,
    "writing": 1.5,
    "lie": 0.2,
    "names": 0.5,
    "renew": 0.5,
    "stranger": 0.5,
}
"""What may happen, and how often by comparison."""
_DOINGS, _WEIGHTS = tuple(WEIGHTS), tuple(accumulate(WEIGHTS.values()))
_FAULTS: Final = {"error": "error", "hang": "hangs", "lose": "loses", "mute": "mute", "late": "reports_late"}


def schedule(seed: int) -> Schedule:
    """Make a schedule from a seed: the same one always."""
    chance = random.Random(seed)
    kubelet = chance.choice(chance.choice(CLASSES))
    at, steps = 1.5, []
    for do in chance.choices(_DOINGS, cum_weights=_WEIGHTS, k=chance.choice((2, 3, 4, 5, 7))):
        at += chance.choice((0.0, 0.001, 0.01, 0.05, 0.3, 1.0, 5.0)) * chance.random()
        lasts = chance.choice((0.05, 0.3, 1.0, 4.0, 17.0)) * chance.random()
        steps.append(Step(round(at, 6), do, min(round(chance.random(), 6), HIGHEST), round(lasts, 6)))
    return Schedule(seed, kubelet, tuple(steps))


class Player:
    """Plays one schedule, on a node that has its opening behind it (``opening``)."""

    def __init__(self, script: Schedule, node: Node) -> None:
        self.script, self.node = script, node
        self.clock = self.node.clock
        self._orders = self._done = 0
        """How many orders an operator gave, and how many were carried out: of two at once, nobody knows which is the last."""

    def play(self) -> str:
        """Play it; return the promise that was broken, empty where all were kept."""
        try:
            self._play()
        except BrokenError as error:
            return str(error)
        return ""

    def _play(self) -> None:
        node, clock = self.node, self.clock
        for step in self.script.steps:
            clock.after(step.at - clock.now, self._do, step)
        end = max((step.at + step.lasts for step in self.script.steps), default=0.0)
        clock.run(end + 0.001)
        self._heal()
        self._settle()
        self._one_more_fails()
        node.judge_pods()
        node.judge_registers()
        for gateway in node.alive():
            if gateway.plugin.machine.phase is Phase.SERVING:
                gateway.scribe.load()
                node.judge_ledger(gateway)

    def _settle(self) -> None:
        """Let time pass until the node is right."""
        wrong, began = "", self.clock.now
        for seconds in AFTERWARDS:
            self.clock.run(began + seconds)
            wrong = self.node.wrong()
            if not wrong:
                return
            self.clock.met[f"not right {seconds:g} s after the last fault"] += 1
        self.node.broken(wrong)

    def _one_more_fails(self) -> None:
        """Kill whoever serves, or have it stand still as the kubelet starts anew, where somebody stands by who could know of it."""
        node, client = self.node, self.node.kubelet.serves
        shows = node.kubelet.behaviour.minor >= SHOWS or all(gateway.talks for gateway in node.alive())
        others = [one for one in node.alive() if client is not None and one is not client.server and one.able]
        if client is None or not shows or not others:
            return
        node.kubelet.clean = False
        ready = all(one.begun for one in others) and any(one.health is Health.HEALTHY for one in node.devices)
        if self.script.seed % 2 or not ready:
            self.clock.met["who serves is killed, and another one takes over"] += 1
            client.server.die()
        else:
            self.clock.met["who serves stands still as the kubelet starts anew, and another one takes over"] += 1
            client.server.freeze()
            self._kubelet(Step(self.clock.now, "kubelet"))
            self.clock.run(self.clock.now + STOOD_STILL)
            if wrong := node.lacks():
                node.broken(f"{client.server.label} stands still, and nobody takes over: {wrong}")
            client.server.thaw()
        self._settle()

    def _heal(self) -> None:
        """End all that is wrong."""
        node = self.node
        node.faults.error = node.faults.hangs = node.faults.loses = node.faults.mute = node.faults.reports_late = False
        node.kubelet.healed()
        for disk in node.disks.values():
            disk.full, disk.spares = False, -1
        for gateway in node.gateways:
            if gateway.frozen:
                gateway.thaw()
        if not node.kubelet.alive:
            node.start_kubelet(node.kubelet.behaviour)
        if not any(not gateway.stopping and gateway.api == "auto" for gateway in node.alive()):
            node.start_gateway(looks=0.1)

    # What happens.

    def _do(self, step: Step) -> None:
        self.clock.tell("*", step.do, step.how, step.lasts)
        self.clock.met[f"step: {step.do}"] += 1
        getattr(self, f"_{step.do}")(step)

    def _pick(self, how: float) -> Any:
        alive = [gateway for gateway in self.node.alive() if not gateway.stopping]
        return alive[int(how * len(alive))] if alive else None

    def _kubelet(self, step: Step, version: str = "") -> None:
        node = self.node
        behaviour = KUBELETS[version] if version else node.kubelet.behaviour
        node.stop_kubelet()
        gap = 0.02 + min(step.lasts, 2.0) * 0.2

        def start() -> None:
            if not node.kubelet.alive:
                node.start_kubelet(behaviour)

        self.clock.after(gap, start)

    def _hop(self, step: Step) -> None:
        versions = [version for versions in CLASSES for version in versions]
        self._kubelet(step, versions[int(step.how * len(versions))])

    def _kill(self, step: Step) -> None:
        gateway = self._pick(step.how)
        if gateway is not None:
            gateway.die()
            if step.lasts > 0.01:
                self.clock.after(step.lasts, self._start_if_none)

    def _start_if_none(self) -> None:
        if not self.node.alive():
            self._started(0.3)

    def _started(self, how: float) -> None:
        chance = self.clock.random
        api = "auto" if chance() < 0.9 else ("v1beta1", "v1alpha2", "v1alpha")[int(chance() * 3)]
        looks = (0.01, 0.1, 0.8, 2.5)[int(how * 4)]
        self.node.start_gateway(looks=looks, api=api, talks=chance() >= APARTS, host_service=chance() < 0.05)
        if api != "auto":  # Somebody who can must be there in the end.
            self.clock.after(0.5, self._start_able)

    def _start_able(self) -> None:
        self.node.start_gateway(looks=0.05)

    def _start(self, step: Step) -> None:
        if len(self.node.alive()) < 3:
            self._started(step.how)

    def _term(self, step: Step) -> None:
        gateway = self._pick(step.how)
        if gateway is not None:
            gateway.end()
            self.clock.after(step.lasts + 0.5, self._start_if_none)

    def _roll(self, step: Step) -> None:
        """A new gateway beside the old one, which is told to end a while later."""
        old = self._pick(0.0)
        if len(self.node.alive()) < 3:
            self._started(step.how)
            if old is not None:
                self.clock.after(step.lasts, self._end_old, old)

    def _end_old(self, old: Any) -> None:
        if any(gateway is not old and not gateway.stopping for gateway in self.node.alive()):
            old.end()

    def _freeze(self, step: Step) -> None:
        gateway = self._pick(step.how)
        if gateway is not None and not gateway.frozen:
            gateway.freeze()
            self._spoil()
            self.clock.after(step.lasts, gateway.thaw)

    def _power(self, step: Step) -> None:
        node, behaviour = self.node, self.node.kubelet.behaviour
        node.power_cut()
        self.clock.after(0.1, lambda: None if node.kubelet.alive else node.start_kubelet(behaviour))
        self.clock.after(0.1 + min(step.lasts, 1.0), self._start_if_none)

    def _cut(self, _: Step) -> None:
        if self.node.kubelet.alive:
            self._spoil()
            self.node.kubelet.cut()

    def _fault(self, step: Step) -> None:
        name = _FAULTS[step.do]
        setattr(self.node.faults, name, True)
        self._spoil()

        def over() -> None:
            setattr(self.node.faults, name, False)
            self.node.kubelet.healed()

        self.clock.after(step.lasts, over)

    _error = _hang = _lose = _mute = _late = _fault

    def _ill(self, step: Step) -> None:
        number = int(step.how * len(self.node.devices))
        device = self.node.devices[number]
        health = Health.UNHEALTHY if device.health is Health.HEALTHY else Health.HEALTHY
        self.node.devices[number] = replace(device, health=health)
        self._tell_hardware()

    def _new(self, _: Step) -> None:
        if len(self.node.devices) < 5:
            self.node.devices.append(Device(f"GPU-{len(self.node.devices)}"))
            self._tell_hardware()

    def _tell_hardware(self) -> None:
        for gateway in self.node.alive():
            gateway.later(self.clock.latency(), gateway.hardware_changed)

    def _admit(self, step: Step) -> None:
        self.node.admit(1 + int(step.how * 2))

    def _remove(self, step: Step) -> None:
        pods = [pod for pod, ids in self.node.pods.items() if ids]
        if pods:
            self.node.remove(pods[int(step.how * len(pods))])

    def _cordon(self, step: Step, *, cordon: bool = True) -> None:
        gateway = self._pick(step.how)
        if gateway is None:
            return
        where = (gateway.talks, "GPU-0")
        self.node.cordoned.pop(where, None)  # Until it is acknowledged, either may be.
        alone = self._done == self._orders
        self._orders += 1
        order = self._orders

        def done() -> None:
            if gateway.scribe.ledger.pending == 0 and alone and order == self._orders:
                self.node.cordoned[where] = cordon
            self._done += 1

        (gateway.scribe.cordon if cordon else gateway.scribe.uncordon)("GPU-0", done)

    def _uncordon(self, step: Step) -> None:
        self._cordon(step, cordon=False)

    def _full(self, step: Step) -> None:
        disk = self.node.disks[True]
        disk.full = True
        self.node.lied = True  # What can't be written isn't remembered.

        def over() -> None:
            disk.full = False

        self.clock.after(step.lasts, over)

    def _writing(self, step: Step) -> None:
        """Whoever writes next dies in the middle of it."""
        self.node.disks[True].spares = int(step.how * 12)
        self.clock.after(step.lasts + 0.2, self._start_if_none)

    def _lie(self, step: Step) -> None:
        disk = self.node.disks[True]
        disk.lies = self.node.lied = True

        def over() -> None:
            disk.lies = False

        self.clock.after(step.lasts, over)

    def _names(self, _: Step) -> None:
        self._spoil()
        lost, self.node.names = self.node.names, {}
        for name, gateway in lost.items():
            gateway.later(self.clock.latency(), self._name_lost, gateway, name)

    @staticmethod
    def _name_lost(gateway: Any, name: str) -> None:
        gateway.plugin.feed(NameLost(name))

    def _renew(self, step: Step) -> None:
        gateway = self._pick(step.how)
        if gateway is not None:
            self._spoil()
            gateway.plugin.feed(Renew("options"))

    def _stranger(self, step: Step) -> None:
        gateway = self._pick(step.how)
        if gateway is not None and gateway.listens:
            number = self.node.next_stream()
            gateway.plugin.called(number, None, None)
            gateway.later(step.lasts, gateway.plugin.stream_over, number)

    def _spoil(self) -> None:
        self.node.kubelet.clean = False
