"""What every resource of a gateway has around it: the node, its kubelet, and what the gateway remembers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.handover import instance
from gateway.kubelet.beliefs import CHECKPOINT
from gateway.registration.events import Phase
from gateway.registration.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

    from devices.source import DeviceSource
    from gateway.configuration.settings import Settings
    from gateway.handover.instance import Instance
    from gateway.handover.peers import Peers
    from gateway.memory.holdings import Holdings, Memory
    from gateway.registration.registrar import Resource
    from gateway.tally import Tally


class Surroundings:
    """What a resource has around it (a ``registrar.Node``); ``guard`` is laid around each answer of a gateway in a pair."""

    def __init__(
        self,
        settings: Settings,
        source: DeviceSource,
        own: Instance,
        holdings: Holdings,
        others: Peers,
        tally: Tally,
        guard: Callable[..., Any] | None,
    ) -> None:
        self.settings, self.source, self.tally, self.guard = settings, source, tally, guard
        self.turns = Turns(settings.socket_dir / CHECKPOINT)
        self.token, self.kubelet_socket = own.token, holdings.presence.socket
        self.pod_resources = settings.pod_resources_socket
        self._instance, self._holdings, self._others = own, holdings, others

    def accepted(self, dialect: str) -> None:
        """Remember, for the next start, which dialect the kubelet accepted."""
        if self._holdings.ledger.accept(dialect):
            self._holdings.scribe.soon()

    def stood(self, resource: Resource) -> None:
        """Take note that a resource's registration may stand elsewhere now."""
        if resource.state.phase is Phase.ABSENT:
            self._holdings.presence.check()
        elif resource.state.phase in {Phase.ACCEPTED, Phase.SERVING}:
            self._holdings.presence.found(anew=False)
        self._others.stood(resource)

    def look_within(self, seconds: float) -> None:
        """Look into the kubelet's books ``seconds`` from now at the latest."""
        self._holdings.beliefs.look_within(seconds)

    def memory(self, resource: str) -> Memory:
        """Return what is known and remembered of a resource's devices, beyond its list."""
        return self._holdings.memory(resource)

    def own_socket(self, resource: str) -> Path:
        """The socket that the resource's server is bound on."""
        return self._instance.folder / instance.socket_name(resource)
