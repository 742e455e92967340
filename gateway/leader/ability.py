"""Whether the kubelet that runs would take a resource from this gateway: asked before anything is taken from another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adapters.registry import by_name
from gateway.kubelet.watch import kubelet_id
from gateway.registration.negotiate import CHOICES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.kubelet.identity import KubeletId
    from gateway.kubelet.presence import Presence
    from gateway.registration.registrar import Resource

PROBE_TIME = 1.0
"""Seconds within which a kubelet must say which API it speaks, before anything is taken from another gateway."""


class Ability:
    """What this gateway could serve, by its choice of APIs (``--api``)."""

    def __init__(self, api: str, presence: Presence, resources: Mapping[str, Resource]) -> None:
        self._api, self._presence, self._resources = api, presence, resources
        self._speaks: tuple[KubeletId, str | None] | None = None
        """Which kubelet said that it speaks which of our dialects (None: none), where it was asked."""

    async def unable(self) -> str:
        """Say why no resource of this gateway could be served by the kubelet that runs; empty where one could, or none runs."""
        if not self._presence.listens():
            return ""
        if reason := await self.probe():
            return reason
        unfit = [self.unfit(resource) for resource in self._resources.values()]
        return "" if None in unfit else next((reason for reason in unfit if reason), "")

    async def probe(self) -> str:
        """Ask the kubelet which API it speaks, once for each kubelet; return why that can't be known now."""
        kubelet = kubelet_id(self._presence.socket)
        if kubelet is None or (self._speaks is not None and self._speaks[0] == kubelet):
            return ""
        from gateway.registration import api as kubelet_api  # noqa: PLC0415 - paid where there is another gateway

        found = await kubelet_api.ask(self._presence.socket, PROBE_TIME)
        if not found.answered:
            return f"the kubelet did not answer a Register within {PROBE_TIME:g} s: {found.says}"
        if found.api is not None:  # Of what it says else, nobody knows what it means: a Register will show.
            self._speaks = (kubelet, found.api if found.api in CHOICES[self._api] else None)
        return ""

    def unfit(self, resource: Resource) -> str | None:
        """Say why a resource could not be served by the kubelet that runs; None where it could, as far as that is known."""
        if self._speaks is None or self._speaks[0] != kubelet_id(self._presence.socket):
            return None
        api = self._speaks[1]
        if api is None:
            return f"this kubelet speaks none of the APIs that --api {self._api} allows: use --api auto"
        return resource.plugin.list.too_large(by_name(api))
