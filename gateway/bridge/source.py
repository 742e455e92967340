"""The bridge as a ``DeviceSource``: each plugin's resource beside the others, whichever API the plugin speaks.

To a plugin it is a good kubelet (``sockets``, ``peer``), to the gateway a source that never loses a device because a plugin went
(``shield``, ``plugin``). It is imported where ``--bridge`` is set, and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Collection
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import structlog

from devices.model import (
    ContainerAnswer,
    ContainerRequest,
    PreferredRequest,
    Sayable,
)
from devices.policy import Policy
from devices.source import Behind, DeviceSource, Facts, Fate, Hindrance, Inventory, unclaimed
from gateway.bridge import judge, memory, shield
from gateway.bridge.admission import Admission
from gateway.bridge.calls import BridgedResource
from gateway.bridge.pace import ListPace
from gateway.bridge.plugin import DEADLINE
from gateway.bridge.recall import answers_of, recalled, remembered
from gateway.bridge.sockets import LOOK_EVERY, REGISTRATION, Sockets

FIRST_CALLS: Final = 2.0
"""Seconds that remembered plugins get to answer before the socket is opened, which makes every plugin register anew."""

_log = structlog.get_logger()


class Bridge(DeviceSource):
    """A ``DeviceSource`` over the plugins that register in a folder.

    Args:
        folder: ``--bridge DIR``.
        state_dir: where it remembers them.
        policy: what the operator decided.
        taken: whether another source of this gateway has a resource.
    """

    name = "bridge"

    def __init__(
        self,
        folder: Path,
        state_dir: Path,
        policy: Policy,
        taken: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._state_dir = state_dir
        self.plugins: dict[str, BridgedResource] = {}
        """By the name that the plugin registered."""
        self._taken, self._pace = taken, ListPace()
        self._keeper = memory.PluginsFile(state_dir, lambda: self._sockets.is_ours, self._remembered)
        self._admission = Admission(self.plugins, self._bridged, self._occupied, self._keeper.durable)
        self._sockets = Sockets(folder, self._admission, self._kept)
        self._lent: dict[str, memory.Plugin] = {}
        """What another gateway remembers, where it has the folder."""
        self._news = asyncio.Event()
        self._hinders = ""
        self.adopt(policy)

    @property
    def counted(self) -> Collection[str]:
        """The names by which Registers are counted."""
        return self._admission.counted

    @property
    def is_open(self) -> bool:
        """Whether plugins can register."""
        return self._sockets.is_open

    # What is announced.

    async def watch(self) -> AsyncGenerator[Inventory]:
        """Yield what is remembered, and the inventory again after each change."""
        tasks: list[asyncio.Future[Any]] = []
        try:
            with contextlib.suppress(OSError):
                self._sockets.hinders()  # From now on nobody else writes of plugins, or what they wrote is read again.
            await self._recall()
            tasks += map(asyncio.ensure_future, (self._keep_sockets(), self._keeper.run()))
            while True:
                self._news.clear()
                inventory = self._inventory()
                await asyncio.sleep(0)  # Of many plugins it takes milliseconds, and so does what is made of it.
                yield inventory
                waits = asyncio.ensure_future(self._news.wait())
                await asyncio.wait({waits, *tasks}, timeout=self._until_change(), return_when=asyncio.FIRST_COMPLETED)
                waits.cancel()
                for task in tasks:
                    if task.done():
                        task.result()
                        raise RuntimeError("a task of the bridge ended, but none may end by itself")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._sockets.is_ours:
                with contextlib.suppress(OSError):  # TimeoutError is one.
                    async with asyncio.timeout(memory.SAVE_TIME):
                        await asyncio.to_thread(memory.save, self._state_dir, self._remembered())
            await self._sockets.close()
            await asyncio.gather(*(one.close() for one in self.plugins.values()))

    def _inventory(self) -> Inventory:
        now, allow = time.monotonic(), self._policy.bridging.allow
        shown = (
            (self._shown(name), shield.listing(one.word, one.limits, now))
            for name, one in self.plugins.items()
            if judge.resource_error(name, allow) is None and not self._occupied(name)
        )
        return {name: listing for name, listing in shown if listing is not None}

    def _until_change(self) -> float | None:
        """Seconds until the shield says something else by itself."""
        now = time.monotonic()
        moments = [shield.changes_at(one.word, one.limits, now) for one in self.plugins.values()]
        first = min((moment for moment in moments if moment is not None), default=None)
        return None if first is None else max(0.0, first - now) + 0.001

    def _shown(self, resource: str) -> str:
        return self._policy.bridging.renames.get(resource, resource)

    def _of(self, shown: str) -> BridgedResource | None:
        if shown in self.plugins and self._shown(shown) == shown:
            return self.plugins[shown]
        return next((one for name, one in self.plugins.items() if self._shown(name) == shown), None)

    def _occupied(self, resource: str) -> str:
        """Say whose the name already is under which a plugin's resource would be shown; empty: nobody else's.

        A registration is refused for it. It may also come later: by an edit of the configuration, or at a start by what is
        remembered.
        """
        shown = self._shown(resource)
        if self._taken(shown):
            return f"{shown} is offered by this gateway itself: give one of them another name (bridge.rename), or end the plugin"
        other = self._of(shown)
        if other is not None and other.resource != resource:
            return f"{shown} is the name of what {other.endpoint} offers as {other.resource}: give one of them another name (bridge.rename)"
        return ""

    # The sockets and the memory.

    async def _recall(self) -> None:
        plugins, problem = await asyncio.to_thread(memory.load, self._state_dir)
        if problem:
            _log.warning("what was remembered of plugins can't be read", reason=problem)
        for row in plugins:
            if (
                row.resource not in self.plugins
                and judge.resource_error(row.resource, self._policy.bridging.allow) is None
            ):
                one = self.plugins[row.resource] = self._bridged(row.resource)
                one.recall(recalled(row), self._sockets.folder / row.folder / row.endpoint, row)
                one.answers.update(answers_of(row))

    async def _keep_sockets(self) -> None:
        """Open the sockets, and keep them open, for ever. Plugins that are remembered are called first.

        While another gateway has the folder, its plugins are called on its behalf.
        """
        called, waited = False, not self._sockets.is_ours
        while True:
            try:
                hinders = self._sockets.hinders()
                if not hinders and not called:
                    called = True
                    if waited:  # What the one that ended wrote last.
                        await self._borrow()
                    await self._call_remembered()
                if not hinders:
                    await self._sockets.keep_open()
                    self._sockets.registry.look()
            except (OSError, RuntimeError) as error:
                hinders = f"{self._sockets.socket} can't be bound: {error}"
            if hinders and hinders != self._hinders:
                _log.warning("plugins can't register here", reason=hinders)
            self._hinders = hinders
            if not self._sockets.is_ours:
                await self._borrow()
            await asyncio.sleep(LOOK_EVERY)

    async def _call_remembered(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_CALLS):
                await asyncio.gather(*(one.call() for one in self.plugins.values() if one.peer is None or one.is_lent))
        for one in self.plugins.values():
            if one.peer is None or one.is_lent:
                one.went(one.word.why or "the gateway was started anew")

    def _kept(self) -> Collection[Path]:
        found = (one.keep() for one in self.plugins.values() if one.folder == REGISTRATION)
        return [path for path in found if path is not None]

    async def _borrow(self) -> None:
        """Serve what another gateway has, by what it remembers: it may be about to end, or to leave the resources to this one."""
        plugins, _ = await asyncio.to_thread(memory.load, self._state_dir)
        for row in plugins:
            if judge.resource_error(row.resource, self._policy.bridging.allow) is None:
                one = self.plugins.get(row.resource) or self._bridged(row.resource)
                self.plugins[row.resource] = one
                path = self._sockets.folder / row.folder / row.endpoint
                again, self._lent[row.resource] = self._lent.get(row.resource) == row, row
                await one.borrow(recalled(row, lent=True), path, row, again=again)

    def _remembered(self) -> tuple[memory.Plugin, ...]:
        return tuple(row for one in self.plugins.values() if (row := remembered(one)) is not None)

    def _changed(self) -> None:
        self._news.set()
        self._keeper.changed()

    def _bridged(self, resource: str) -> BridgedResource:
        one = BridgedResource(resource, self._changed, self._limits, self.plugins.values, self._pace)
        self._settle(one)
        return one

    def _settle(self, one: BridgedResource) -> None:
        bridging = self._policy.bridging
        one.limits = self._limits
        one.repeats = any(fnmatchcase(one.resource, pattern) for pattern in bridging.repeat)
        found = (seconds for pattern, seconds in bridging.deadlines if fnmatchcase(one.resource, pattern))
        one.deadline = next(found, DEADLINE)

    # The calls.

    async def answer(self, resource: str, request: ContainerRequest, sayable: Sayable) -> ContainerAnswer:  # noqa: ARG002
        """Let the plugin answer. What can't be said to this kubelet, its dialect leaves out or refuses."""
        return await self._asked_of(resource).allocate(request)

    async def prefer(self, resource: str, request: PreferredRequest) -> tuple[str, ...]:
        """Let the plugin choose."""
        return await self._asked_of(resource).prefer(request)

    async def prepare(self, resource: str, device_ids: tuple[str, ...]) -> None:
        """Let the plugin make its devices ready."""
        await self._asked_of(resource).prepare(device_ids)

    def _asked_of(self, resource: str) -> BridgedResource:
        one = self._of(resource)
        if one is None:
            raise unclaimed(resource)
        return one

    # What else a source is asked.

    def fate(self, resource: str, device_id: str) -> Fate:  # noqa: ARG002 - the protocol's
        """Of a plugin that is there, what it doesn't list it doesn't offer; so it is with one that never came back."""
        one = self._of(resource)
        if one is None or one.word.devices is None:
            return Fate.UNKNOWN
        return Fate.WITHDRAWN

    def claims(self, resource: str) -> bool:
        """Whether a plugin has registered it, in this process or before."""
        return self._of(resource) is not None

    def hindrances(self) -> tuple[Hindrance, ...]:
        """Say what keeps plugins from registering, and what is wrong with each."""
        found = [Hindrance(self.name, self._hinders)] if self._hinders else []
        for name, one in self.plugins.items():
            stands = shield.cover(one.word, one.limits, time.monotonic())
            if stands not in {shield.Cover.LIVE, shield.Cover.SHIELDED}:
                found.append(Hindrance(f"{self.name} {name}", f"its plugin is away ({one.word.why}): {stands.value}"))
            if problem := one.trouble or self._occupied(name):
                found.append(Hindrance(f"{self.name} {name}", problem))
        return tuple(found)

    def facts(self, resource: str) -> Callable[[str], Facts]:
        """Tell which plugin it is of."""
        one = self._of(resource)
        known = Facts() if one is None else Facts(product=f"{one.resource} ({one.endpoint})")
        return lambda _: known

    def behind(self, resource: str) -> Behind | None:
        """Say how its plugin is."""
        one = self._of(resource)
        if one is None:
            return None
        now = time.monotonic()
        state, state_s = shield.cover(one.word, one.limits, now).value, round(max(0.0, now - one.since), 3)
        reason = "; ".join(part for part in (one.word.why, one.trouble) if part)
        counts = (one.registrations, one.absences, one.repeated)
        return Behind(one.resource, one.endpoint, one.folder, one.api, state, state_s, reason, *counts)

    def adopt(self, policy: Policy) -> None:
        """Go by what an operator decides now."""
        self._policy, self._admission.allow = policy, policy.bridging.allow
        self._limits = shield.Limits(policy.bridge_grace, policy.bridge_withdraw)
        for one in self.plugins.values():
            self._settle(one)
        self._news.set()
