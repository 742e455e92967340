"""A node of a row with nothing replaced: gateways and kubelets are processes, gRPC goes over sockets, and the clock is the machine's.

The kubelet is an emulated one, or the real kubelet code of a release. Rows with the mark ``also_real`` run here, too
(``tests/compat/test_contract.py``): what they see on the moved clock is what is so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from gateway_lab.gatewayproc import GatewayProcess, gateway_command
from gateway_lab.kubelets import kubelet as lab
from gateway_lab.kubelets.behaviour import behaviour
from gateway_lab.kubelets.kubelet import Admission, Demand, Faults, Held, KubeletError, Running, Totals
from gateway_lab.kubelets.pluginclient import PluginClient
from tests.contract.clock import Clock
from tests.contract.node import GPU, BrokenError, Gateway, Node, Plugin

_LOOK_S: Final = 0.02
"""Seconds between two looks at the kubelet."""
_MOST_S: Final = 1.0
"""The most real seconds that a row waits where it lets time pass."""


class RealGateway(Gateway):
    """A gateway in a process of its own."""

    def __init__(self, node: RealNode, options: Sequence[str], environment: Mapping[str, str]) -> None:
        self._node = node
        self.process: Any = self
        self.stopped = self._killed = False
        self._spawned: GatewayProcess | None = None
        self._control = ""
        profile = node.profile if node.profile.exists() else None
        ports = ["--metrics-address", "127.0.0.1:0", "--probe-address", "127.0.0.1:0"]
        command = gateway_command(node.sockets, node.state, profile, options=[*ports, *options])
        if environment:
            command = ["env", *(f"{name}={value}" for name, value in environment.items()), *command]
        node.begin(self._launch(command))

    async def _launch(self, command: Sequence[str]) -> None:
        self._spawned = await GatewayProcess.launch(command)
        if self._killed:
            await self._spawned.kill()

    async def close(self) -> None:
        """End it for sure."""
        if self._spawned is not None:
            await self._spawned.kill()

    @property
    def log(self) -> list[dict[str, Any]]:
        """What it wrote."""
        return [] if self._spawned is None else [dict(line) for line in self._spawned._lines]

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return not self._killed and (self._spawned is None or self._spawned.alive)

    def said(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the lines of its log about an event."""
        return [] if self._spawned is None else [dict(line) for line in self._spawned.lines(event, **fields)]

    def kill(self) -> None:
        """Kill it: -9."""
        self._killed = True
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """Stop it, as SIGSTOP does."""
        self.stopped = True
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on, as SIGCONT does."""
        self.stopped = False
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._spawned is not None and self._spawned.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._spawned.pid, number)

    async def terminate(self) -> int:
        """End it by SIGTERM; return its exit status."""
        await self._node.until(lambda: self.said("starting device-plugin-gateway"), "its first word")
        assert self._spawned is not None
        return await self._spawned.terminate()

    @property
    def control_socket(self) -> str:
        """Where its control socket is; empty while there is none. It serves sockets in the kubelet's folder under the same name."""
        tokens = {one.get("endpoint", "").partition("-")[0] for one in self.said("registered")}
        found = [
            path for path in self._node.state.glob("*.sock") if path.stem in tokens or len(self._node.gateways) == 1
        ]
        return str(found[0]) if found else ""


class RealKubelet:
    """A kubelet in a process of its own, and what was seen of it last."""

    def __init__(self, node: RealNode, version: str, handle: lab.Kubelet, log: Path) -> None:
        self.version, self.behaviour, self.handle = version, behaviour(version), handle
        self.manager = self
        self._node, self._log = node, log
        self._before = Counter(node.registers)
        self._seen = Totals({}, {})
        self._held: Held = {}
        self._looking = asyncio.ensure_future(self._look_on())

    async def look(self) -> None:
        """Look at its records now."""
        self._seen, self._held = await self.handle.totals(), await self.handle.pods()
        self._node.registers = self._before + Counter(await self.handle.registers())

    async def _look_on(self) -> None:
        with contextlib.suppress(KubeletError):
            while True:
                await self.look()
                await asyncio.sleep(_LOOK_S)

    @property
    def notes(self) -> list[str]:
        """The lines of its log, without the time."""
        return [line.partition(" ")[2] for line in self._log.read_text().splitlines()]

    def totals(self) -> Totals:
        """Return how many devices it gives out."""
        return self._seen

    def pods(self) -> Held:
        """Return what its records say."""
        return self._held

    def cut(self, resource: str) -> None:
        """Break the stream of lists, from its side."""
        self._node.begin(self.handle.cut(resource))

    def remove(self, pod: str) -> None:
        """End a pod."""
        self._node.begin(self.handle.remove(pod))

    def kill(self) -> None:
        """End it."""
        self._looking.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.handle.pid, signal.SIGKILL)


class RealNode(Node):
    """One node, as rows know it. ``version`` is a row's kubelet if it names none.

    ``binary`` finds the real kubelet code of a version; None: it is emulated.
    """

    def __init__(self, folder: Path, version: str, binary: Callable[[str], Path | None]) -> None:
        super().__init__(folder, Clock())
        self._version, self._binary = version, binary
        self._begun: set[asyncio.Future[Any]] = set()
        self._kubelets: list[RealKubelet] = []

    async def __aexit__(self, *_: object) -> None:
        for one in self.gateways:
            await cast("RealGateway", one).close()
        for kubelet in self._kubelets:
            kubelet.kill()
            await kubelet.handle.close()

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """Begin something that rows don't wait for; what comes after it does."""
        self._begun.add(asyncio.ensure_future(work))

    async def _there(self) -> RealKubelet:
        begun, self._begun = self._begun, set()
        await asyncio.gather(*begun)
        return cast("RealKubelet", self._kubelet)

    async def start_kubelet(self, version: str = "", *, ready: bool = True, hears: bool = True, **differs: Any) -> Any:
        """Start a kubelet, which finds the pods that run; one that runs is killed first."""
        assert hears, "only an emulated kubelet is deaf"
        assert not differs, "only an emulated kubelet differs from its release"
        self.kill_kubelet()
        version = version or self._version
        log = self.folder / f"kubelet-{len(self._kubelets)}.log"
        handle = await lab.Kubelet.launch(version, self.sockets, genuine=self._binary(version), log=log)
        if handle.kind == "emulated":
            await handle.fault(self.faults)
        pods = [demand for demand, _ in self._running.values()]
        await handle.start(pods, ready=ready, running=[Running(pod, container) for pod, container in self._running])
        kubelet = RealKubelet(self, version, handle, log)
        self._kubelets.append(kubelet)
        self._kubelet = cast("Any", kubelet)
        return kubelet

    def fault(self, **what: Any) -> None:
        """Make things go wrong at the kubelet from now on; only an emulated one can."""
        self.faults = Faults(**what)
        if self._kubelet is not None:
            self.begin(cast("Any", self._kubelet).handle.fault(self.faults))

    async def admit(self, pod: str, resource: str = GPU, count: int = 1, container: str = "main") -> Admission:
        """Admit a pod with one container.

        Raises:
            KubeletError: the kubelet refused it.
        """
        kubelet = await self._there()
        given = await kubelet.handle.admit(pod, resource, count, container=container)
        self._running[pod, container] = Demand(pod, resource, count, container), given
        await kubelet.look()
        self.check()
        return given

    async def refused(self, pod: str, resource: str = GPU, count: int = 1) -> str:
        """See that a pod is refused, and return the kubelet's reason."""
        try:
            given = await (await self._there()).handle.admit(pod, resource, count)
        except KubeletError as error:
            return error.message
        raise BrokenError(f"{pod} was to be refused, and was given {dict(given.devices)}")

    async def restart_container(self, pod: str, container: str = "main") -> Admission:
        """Start a pod's container again."""
        return await (await self._there()).handle.restart_container(pod, container)

    def gateway(self, *options: str, environment: Mapping[str, str] = {}) -> Gateway:
        """Start a gateway."""
        one = RealGateway(self, options, environment)
        self.gateways.append(one)
        return one

    def plugin(self, resource: str = GPU) -> Plugin:
        """Connect to the socket of the gateway that registered last, as the kubelet does."""
        kubelet = cast("RealKubelet", self._kubelet)
        named = [line for one in self.gateways for line in one.said("registered", resource=resource)]
        last = max(named, key=lambda line: str(line["timestamp"]))
        return Plugin(PluginClient(resource, str(self.sockets / last["endpoint"]), kubelet.behaviour))

    async def pass_time(self, seconds: float) -> None:
        """Let time pass, but not for longer than ``_MOST_S``."""
        await self._there()
        await asyncio.sleep(min(seconds, _MOST_S))
        self.check()
