"""Keeps what the node says of its GPUs at the API server: a condition, a start-up taint that goes, events. By looking, now and then.

Nothing here is urgent, and nothing waits for it: what can't be written now is written later, as it is then.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Final

import structlog

from devices.model import Health
from gateway.kubernetes import events, node, ready, watch
from gateway.kubernetes.client import KubernetesError, Patch
from gateway.kubernetes.events import Queue
from gateway.registration.events import Phase
from gateway.tally import Check

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from devices.life.states import Entry
    from gateway.daemon import Gateway
    from gateway.kubelet.drift import Finding
    from gateway.kubernetes.client import Client
    from gateway.kubernetes.node import Node, OwnNode
    from gateway.kubernetes.ready import Standing, Verdict

LOOK: Final = 2.0
"""Seconds between two looks at what the gateway knows."""
PATIENCE = 10.0
"""Seconds for which a node that was ready may not be before that is said: a kubelet's restart is none of anybody's business."""

_log = structlog.get_logger()


class Keeper:
    """The condition, the taint and the events of one gateway's node."""

    def __init__(self, gateway: Gateway, api: Client, own: OwnNode) -> None:
        self._gateway, self._api, self._own = gateway, api, own
        self._settings = gateway.settings
        self._path = node.path(self._settings)
        self._unready_since: float | None = None
        self._queue = Queue()
        self._entries: dict[str, Mapping[str, Entry]] = {}
        self._findings: dict[str, tuple[Finding, ...]] = {}
        self._told_dropped = 0
        self._failures, self._fault = 0, ""

    async def run(self) -> None:
        """Keep them, for ever."""
        changed = asyncio.Event()
        self._own.told.append(lambda _: changed.set())
        while True:
            wait = LOOK
            try:
                if self._settings.node_events:
                    self._take_news()
                    await self._tell()
                if self._own.last is not None and (self._settings.node_condition or self._settings.startup_taint):
                    await self._keep(self._own.last)
                self._failures, self._fault = 0, ""
            except KubernetesError as error:
                wait = max(wait, self._failed(error))
            changed.clear()
            try:
                async with asyncio.timeout(wait):
                    await changed.wait()
            except TimeoutError:
                pass
            else:
                await asyncio.sleep(min(wait, watch.FIRST))  # Several changes in a row are looked at once.

    async def _keep(self, own: Node) -> None:
        standings = list(self._standings())
        if standings and all(one.elsewhere for one in standings):
            return  # Another gateway serves, and says so.
        before = ready.current(own)
        was = before is not None and before.status == "True"
        verdict = ready.judge(standings, own, hindrance=self._hindrance(), was=was)
        if self._settings.node_condition and self._counts(verdict, was=was):
            patch = ready.condition(own, verdict, time.time())
            if patch is not None:
                await self._api.patch(f"{self._path}/status", patch, Patch.STRATEGIC)
                _log.info(
                    "node condition written", condition=ready.CONDITION, status=verdict.ready, reason=verdict.reason
                )
        if self._settings.startup_taint and verdict.ready:
            taints = ready.untaint(own, self._settings.startup_taint)
            if taints:
                await self._api.patch(self._path, taints, Patch.JSON)
                _log.info("start-up taint removed", key=self._settings.startup_taint)

    def _counts(self, verdict: Verdict, *, was: bool) -> bool:
        """Say whether the verdict is to be written: one that takes readiness away, once it has been so for a while."""
        now = time.monotonic()
        if verdict.ready:
            self._unready_since = None
            return True
        self._unready_since = self._unready_since or now
        return not was or now - self._unready_since >= PATIENCE

    def _standings(self) -> Iterator[Standing]:
        for plugin in self._gateway.plugins:
            entries = plugin.entries
            yield ready.Standing(
                plugin.resource.name,
                len(entries),
                sum(entry.device.health is Health.HEALTHY for entry in entries.values()),
                served=plugin.state.phase is Phase.SERVING,
                looked=plugin.checked is not None,
                lacking=plugin.checked is Check.LACKING,
                elsewhere=plugin.standing_by_for is not None,
            )

    def _hindrance(self) -> str:
        return "; ".join(f"{one.source}: {one.reason}" for one in self._gateway.hindrances() if one.held_up)

    # Events.

    def _take_news(self) -> None:
        now, unix = time.monotonic(), time.time()
        for plugin in self._gateway.plugins:
            name, entries = plugin.resource.name, plugin.entries
            if plugin.standing_by_for is not None:
                self._entries.pop(name, None)
                continue
            findings = tuple(self._gateway.beliefs.findings(name))
            if (before := self._entries.get(name)) is not None:  # What is so at the start is no news.
                for news in events.of_devices(name, before, entries, unix):
                    self._queue.add(news, now)
                for news in events.of_findings(name, self._findings.get(name, ()), findings, unix):
                    self._queue.add(news, now)
            self._entries[name], self._findings[name] = dict(entries), findings
        if self._queue.dropped > self._told_dropped:
            _log.warning("events left out: there were too many", events=self._queue.dropped - self._told_dropped)
            self._told_dropped = self._queue.dropped

    async def _tell(self) -> None:
        while self._queue.waiting:
            news = self._queue.waiting[0]
            await self._api.create(events.PATH, events.body(news, self._settings.node_name, self._gateway.token))
            if self._queue.waiting and self._queue.waiting[0] is news:
                self._queue.waiting.popleft()

    def _failed(self, error: KubernetesError) -> float:
        """Say so, once; return the seconds until the next try."""
        if (said := f"{error.status} {error.reason}") != self._fault:
            advice = (
                "apply the rights of deploy/kustomize/components/node-readiness"
                if error.status == 403
                else "what serves the kubelet goes on; trying again"
            )
            _log.warning("the node can't be written at the API server", reason=str(error), advice=advice)
        self._fault = said
        self._failures += 1
        return watch.pause(error, self._failures, random.random())  # noqa: S311 - no secret
