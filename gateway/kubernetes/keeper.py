"""Keeps the node's condition, its start-up taint and its events up to date at the API server.

Nothing here is urgent. After a failed write, the state at the time of the next try is written.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import structlog

from devices.model import Health
from gateway.kubelet.drift import MismatchKind
from gateway.kubernetes import events, node, ready, watch
from gateway.kubernetes.client import KubernetesError, Patch
from gateway.kubernetes.events import Queue
from gateway.tasks import first_of
from gateway.telling.served import verdicts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from devices.life.states import Entry
    from gateway.kubelet.drift import Finding
    from gateway.kubernetes.client import Client
    from gateway.kubernetes.node import NodeObject, OwnNode
    from gateway.kubernetes.ready import NodeReadiness, NodeResource
    from gateway.telling.subject import Subject

LOOK_S: Final = 2.0
"""Seconds between two checks."""
_UNTELLABLE: Final = frozenset({400, 404, 409, 413, 422})
"""HTTP statuses after which an event is dropped: a later try would fail also."""
UNREADY_S = 10.0
"""Seconds for which a node must be unready before that is written, so that a kubelet's restart doesn't show."""

_log = structlog.get_logger()


class Keeper:
    """Keeps the condition, the taint and the events of one gateway's node."""

    def __init__(self, gateway: Subject, api: Client, own: OwnNode) -> None:
        self._gateway, self._api, self._own = gateway, api, own
        self._settings = gateway.settings
        self._path = node.path(self._settings)
        self._unready_since: float | None = None
        self._queue = Queue()
        self._entries: dict[str, Mapping[str, Entry]] = {}
        self._findings: dict[str, tuple[Finding, ...]] = {}
        self._told_dropped = 0
        self._failed: dict[str, tuple[watch.Retries, str, float]] = {}
        """By failed step: its retries, the last reason, and when it is due again (monotonic seconds)."""
        self._wrote = False

    async def run(self) -> None:
        """Keep them up to date. Never returns. A failed step doesn't affect the others."""
        changed = asyncio.Event()
        self._own.told.append(lambda _: changed.set())
        while True:
            self._wrote = False
            for step in self._steps():
                await self._attempt(step)
            changed.clear()
            if self._wrote:  # Another client may undo it at once.
                await asyncio.sleep(LOOK_S)
            await first_of(changed, seconds=LOOK_S)
            if changed.is_set():
                await asyncio.sleep(watch.RETRY_S)  # Handle several changes in a row at once.

    def _steps(self) -> Iterator[Callable[[], Awaitable[None]]]:
        if self._settings.node_events:
            yield self._tell
        if self._settings.node_condition:
            yield self._say_ready
        if self._settings.startup_taint:
            yield self._untaint

    async def _attempt(self, step: Callable[[], Awaitable[None]]) -> None:
        """Take a step, unless it failed a moment ago."""
        retries, fault, due = self._failed.get(step.__name__, (watch.Retries(), "", 0.0))
        if time.monotonic() < due:
            return
        try:
            await step()
        except KubernetesError as error:
            said = f"{error.status} {error.reason}"
            if said != fault:
                advice = (
                    "apply the rights of deploy/kustomize/components/node-readiness"
                    if error.status == 403
                    else "what serves the kubelet goes on; trying again"
                )
                _log.warning("the node can't be written at the API server", reason=str(error), advice=advice)
            self._failed[step.__name__] = retries, said, time.monotonic() + retries.wait(error)
        else:
            self._failed.pop(step.__name__, None)

    def _verdict(self, own: NodeObject, *, was: bool) -> NodeReadiness | None:
        """Return the verdict on the node; None if another gateway leads, because that one writes it."""
        if self._gateway.lead.led_by is not None:
            return None
        standings = list(self._standings())
        if any(one.withheld or ready.allocatable(own, one.name) < one.healthy for one in standings):
            self._gateway.holdings.reader.look_within(
                LOOK_S
            )  # The kubelet may be late, or another plugin may serve the resource.
        return ready.judge(standings, own, hindrance=self._hindrance(), was=was)

    async def _say_ready(self) -> None:
        if (own := self._own.last) is None:
            return
        before = ready.current(own)
        was = before is not None and before.status == "True"
        verdict = self._verdict(own, was=was)
        if verdict is None or not self._counts(verdict, was=was):
            return
        if (patch := ready.condition(own, verdict, time.time())) is not None:
            self._wrote = True
            await self._api.patch(f"{self._path}/status", patch, Patch.STRATEGIC)
            _log.info("node condition written", condition=ready.CONDITION, status=verdict.ready, reason=verdict.reason)

    async def _untaint(self) -> None:
        own, key = self._own.last, self._settings.startup_taint
        if own is None or not (taints := ready.untaint(own, key)):
            return
        verdict = self._verdict(own, was=False)
        if verdict is not None and verdict.ready:
            self._wrote = True
            await self._api.patch(self._path, taints, Patch.JSON)
            _log.info("start-up taint removed", key=key)

    def _counts(self, verdict: NodeReadiness, *, was: bool) -> bool:
        """Return True if the verdict should be written; unreadiness only if it has lasted for ``UNREADY_S``."""
        now = time.monotonic()
        if verdict.ready:
            self._unready_since = None
            return True
        self._unready_since = self._unready_since or now
        return not was or now - self._unready_since >= UNREADY_S

    def _standings(self) -> Iterator[NodeResource]:
        judged = verdicts(self._gateway, time.monotonic())
        for resource in self._gateway.resources.values():
            entries = resource.entries
            healthy = {one for one, entry in entries.items() if entry.device.health is Health.HEALTHY}
            findings = self._gateway.holdings.reader.findings(resource.name)
            yield ready.NodeResource(
                resource.name,
                len(entries),
                len(healthy),
                judged[resource.name],
                withheld=sum(
                    len(healthy.intersection(one.device_ids)) for one in findings if one.kind is MismatchKind.WITHHELD
                ),
            )

    def _hindrance(self) -> str:
        return "; ".join(f"{one.source}: {one.reason}" for one in self._gateway.hindrances() if one.held_up)

    # Events.

    def _take_news(self) -> None:
        now, unix = time.monotonic(), time.time()
        for resource in self._gateway.resources.values():
            name, entries = resource.name, resource.entries
            if self._gateway.lead.led_by is not None:
                self._entries.pop(name, None)
                continue
            findings = self._gateway.holdings.reader.findings(name)
            if (before := self._entries.get(name)) is not None:  # The state at the start is no event.
                for news in events.of_devices(name, before, entries, unix):
                    self._queue.add(news, now)
                for news in events.of_findings(name, self._findings.get(name, ()), findings, unix):
                    self._queue.add(news, now)
            self._entries[name], self._findings[name] = dict(entries), findings
        if self._queue.dropped > self._told_dropped:
            _log.warning("too many events: some were left out", events=self._queue.dropped - self._told_dropped)
            self._told_dropped = self._queue.dropped

    async def _tell(self) -> None:
        self._take_news()
        while self._queue.waiting:
            news = self._queue.waiting[0]
            try:
                await self._api.create(
                    events.PATH, events.body(news, self._settings.node_name, self._gateway.instance.token)
                )
            except KubernetesError as error:
                if error.status not in _UNTELLABLE:
                    raise
                _log.warning("an event can't be written at the API server", event_reason=news.reason, reason=str(error))
            if self._queue.waiting and self._queue.waiting[0] is news:
                self._queue.waiting.popleft()
