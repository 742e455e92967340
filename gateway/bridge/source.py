"""The bridge as a ``DeviceSource``: it lists the devices of other vendors' plugins, for any version of the plugin API.

To a plugin it looks like a kubelet (``sockets``, ``peer``). To the gateway it is a source that keeps its devices while a plugin is
away (``shield``, ``plugin``). It is imported only with ``--bridge``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import structlog

from adapters.dialect import Dialect
from devices.model import ContainerAnswer, ContainerRequest, Fault, Options, PreferredRequest, RefusedError, Sendable
from devices.policy import Policy
from devices.source import Absence, Behind, DeviceSource, Facts, Hindrance, Inventory, not_offered
from gateway.bridge import judge, memory, shield
from gateway.bridge.judge import REGISTRATION, REGISTRY
from gateway.bridge.peer import AwayError, ListPace, Peer
from gateway.bridge.plugin import ALLOCATE_S, Bridged
from gateway.bridge.sockets import LOOK_PERIOD_S, Sockets
from gateway.kubelet.identity import socket_id
from gateway.tasks import first_of
from gateway.wires.log import Seldom

FIRST_CALLS_S: Final = 2.0
"""Seconds that remembered plugins have to answer. After that the socket is opened, which makes every plugin register again."""
RIVAL_ENDS_S: Final = 1.0
"""Seconds for which a second plugin of a resource waits for the first one to end its stream. After that it is refused."""
REGISTERS_PER_MINUTE = 600
"""Most Registers of one resource per minute."""

_log = structlog.get_logger()


class Bridge(DeviceSource):
    """A ``DeviceSource`` over the plugins that register in a folder.

    Args:
        folder: ``--bridge DIR``.
        state_dir: the folder of the plugins' file.
        policy: the operator's settings.
        taken: returns True if another source of this gateway has a resource.
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
        self.plugins: dict[str, Bridged] = {}
        """The plugins, by the name that each registered."""
        self._taken, self._pace = taken, ListPace()
        self._keeper = memory.PluginsFile(state_dir, self._remembered)
        self._sockets = Sockets(folder, self.register, self._kept)
        self._registers = Seldom(times=REGISTERS_PER_MINUTE)
        self._closing: asyncio.Future[None] | None = None
        self._news, self._told = asyncio.Event(), asyncio.Event()
        """``_news`` is set if there is something to announce, ``_told`` once the next inventory was taken."""
        self._told.set()
        self._leads = False
        """True if this gateway leads."""
        self._began: bool | None = None
        """True if the running tasks are a leader's, False if a standby's; None: none run."""
        self._tasks: list[asyncio.Future[Any]] = []
        self._written: object = None
        """What identifies the version of the plugins' file that was read last."""
        self._hinders = ""
        self.adopt(policy)

    @property
    def is_open(self) -> bool:
        """True if plugins can register."""
        return self._sockets.is_open

    # The inventory.

    async def watch(self) -> AsyncGenerator[Inventory]:
        """Yield the remembered devices; after each change, yield the inventory again."""
        told = asyncio.Event()
        try:
            while True:
                self._news.clear()
                told, self._told = self._told, asyncio.Event()
                if self._began is not self._leads:
                    await self._change()
                if not self._leads:
                    told.set()  # All connections are closed.
                inventory = self._inventory()
                await asyncio.sleep(0)  # For many plugins both this and the next step take milliseconds.
                yield inventory
                told.set()
                waits = asyncio.ensure_future(self._news.wait())
                await asyncio.wait(
                    {waits, *self._tasks}, timeout=self._until_change(), return_when=asyncio.FIRST_COMPLETED
                )
                waits.cancel()
                for task in self._tasks:
                    if task.done():
                        task.result()
                        raise RuntimeError("a task of the bridge ended, but none may end by itself")
        finally:
            await self._close()
            told.set()
            self._told.set()

    async def lead(self) -> None:
        """Let plugins register here. Return once the devices from the earlier leader's file are announced."""
        await self._become(leads=True)

    async def rest(self) -> None:
        """Close all plugins, and announce the devices that the leader writes."""
        await self._become(leads=False)

    async def _become(self, *, leads: bool) -> None:
        self._leads = leads
        if self._began is not leads:
            told = self._told
            self._news.set()
            await told.wait()

    async def _change(self) -> None:
        """Begin to lead or to stand by."""
        await self._close()
        leads = self._leads
        await self._read(leads=leads)
        for one in self.plugins.values() if leads else ():
            one.word = shield.went(one.word, one.word.why or "not reached since this gateway leads", time.monotonic())
        work = (self._keep_sockets(), self._keeper.run()) if leads else (self._follow(),)
        self._tasks = [asyncio.ensure_future(one) for one in work]
        self._began = leads

    async def _close(self) -> None:
        """Close all plugins. If this gateway led, write the plugins' file."""
        led, self._began, self._hinders = self._began, None, ""
        tasks, self._tasks = self._tasks, []
        try:
            await _end(tasks[:1])
            await self._sockets.close()
            await asyncio.gather(*(one.close() for one in self.plugins.values()))
            if led:
                await self._keeper.durable()
        finally:
            await _end(tasks)

    def _inventory(self) -> Inventory:
        now, allow = time.monotonic(), self._policy.bridging.allow
        shown = (
            (self._shown(name), shield.listing(one.word, one.limits, now))
            for name, one in self.plugins.items()
            if judge.resource_error(name, allow) is None and not self._occupied(name)
        )
        return {name: listing for name, listing in shown if listing is not None}

    def _until_change(self) -> float | None:
        """Return the seconds until the state of a plugin's devices changes by itself; None: never."""
        now = time.monotonic()
        moments = [shield.changes_at(one.word, one.limits, now) for one in self.plugins.values()]
        first = min((moment for moment in moments if moment is not None), default=None)
        return None if first is None else max(0.0, first - now) + 0.001

    def _shown(self, resource: str) -> str:
        return self._policy.bridging.renames.get(resource, resource)

    def _of(self, shown: str) -> Bridged | None:
        if shown in self.plugins and self._shown(shown) == shown:
            return self.plugins[shown]
        return next((one for name, one in self.plugins.items() if self._shown(name) == shown), None)

    def _occupied(self, resource: str) -> str:
        """Return which other source or plugin has the name under which a plugin's resource is shown; '' if none has.

        It can happen when a plugin registers, and also after an edit of the configuration or at a start.
        """
        shown = self._shown(resource)
        if self._taken(shown):
            return f"{shown} is offered by this gateway itself: give one of them another name (bridge.rename), or end the plugin"
        other = self._of(shown)
        if other is not None and other.resource != resource:
            return f"{shown} is also the name of {other.resource} of {other.endpoint}: give one of them another name (bridge.rename)"
        return ""

    # The sockets and the memory.

    async def _follow(self) -> None:
        """Follow the plugins' file that the leader writes. Never returns."""
        while True:
            await asyncio.sleep(LOOK_PERIOD_S)
            if await asyncio.to_thread(memory.written, self._state_dir) != self._written:
                await self._read(leads=False)
                self._news.set()

    async def _read(self, *, leads: bool) -> None:
        self._written = await asyncio.to_thread(memory.written, self._state_dir)
        rows, problem = await asyncio.to_thread(memory.load, self._state_dir, aside=leads)
        if problem and leads:
            _log.warning("the plugins' file can't be read", reason=problem)
        known = {
            one.resource: one for one in rows if judge.resource_error(one.resource, self._policy.bridging.allow) is None
        }
        for name in self.plugins.keys() - known.keys() if rows else ():
            del self.plugins[name]
        for name, row in known.items():
            one = self.plugins.get(name) or self._bridged(name)
            self.plugins[name] = one
            one.recall(self._sockets.folder / row.folder / row.endpoint, row)

    async def _keep_sockets(self) -> None:
        """Connect to the remembered plugins, then open the sockets, and keep them open. Never returns."""
        called = False
        while True:
            try:
                hinders = self._sockets.hinders()
                if not hinders:
                    if not called:
                        called = True
                        await self._call_remembered()
                    await self._sockets.keep_open()
                    self._sockets.registry.look()
            except (OSError, RuntimeError) as error:
                hinders = f"{self._sockets.socket} can't be bound: {error}"
            if hinders and hinders != self._hinders:
                _log.warning("plugins can't register here", reason=hinders)
            self._hinders = hinders
            await asyncio.sleep(LOOK_PERIOD_S)

    async def _call_remembered(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_CALLS_S):
                await asyncio.gather(*(one.call() for one in self.plugins.values()))
        for one in self.plugins.values():
            if one.peer is None:
                one.went(one.word.why)

    def _kept(self) -> Collection[Path]:
        found = (one.keep() for one in self.plugins.values() if one.folder == REGISTRATION)
        return [path for path in found if path is not None]

    def _remembered(self) -> tuple[memory.Plugin, ...]:
        return tuple(row for one in self.plugins.values() if (row := one.remembered()) is not None)

    def _changed(self) -> None:
        self._news.set()
        self._keeper.changed()

    def _bridged(self, resource: str) -> Bridged:
        one = Bridged(resource, self._changed, self.plugins.values, self._pace)
        self._settle(one)
        return one

    def _settle(self, one: Bridged) -> None:
        bridging = self._policy.bridging
        one.limits = self._limits
        one.repeats = any(fnmatchcase(one.resource, pattern) for pattern in bridging.repeat)
        found = (seconds for pattern, seconds in bridging.deadlines if fnmatchcase(one.resource, pattern))
        one.deadline = next(found, ALLOCATE_S)

    # The plugins that register. A refusal's message is for the plugin's author.

    async def register(
        self, path: Path, dialect: Dialect, resource: str, options: Options, folder: memory.PluginFolder
    ) -> None:
        """Accept a plugin.

        Raises:
            RefusedError: it is refused.
        """
        if problem := judge.resource_error(resource, self._policy.bridging.allow):
            raise RefusedError(Fault.INVALID_ARGUMENT, problem)
        if self._registers.tell(resource if resource in self.plugins else "") is None:
            raise RefusedError(
                Fault.RESOURCE_EXHAUSTED,
                f"{resource} was registered more than {REGISTERS_PER_MINUTE} times in a minute. Register once "
                "for each kubelet.sock",
            )
        self._require_socket(path, resource)
        one = self.plugins.get(resource) or self._bridged(resource)
        living = one.peer
        if folder == REGISTRY and living is not None and living.path == path and living.identity == socket_id(path):
            return  # It was found again after a restart of the bridge, and its stream is open.
        if problem := self._occupied(resource):
            raise RefusedError(Fault.ALREADY_EXISTS, problem)
        peer = Peer(path, dialect, options)
        try:
            await peer.dial()
            await peer.ask_options()
            await self._require_no_rival(resource, path)
            self._require_socket(path, resource)
            self._require_room(resource)  # The last check, because many plugins may register at once.
        except AwayError as error:
            raise RefusedError(
                Fault.UNAVAILABLE, f"failed to dial device plugin: {error}: serve the socket before registering it"
            ) from error
        except (RefusedError, asyncio.CancelledError):
            await peer.close()
            raise
        one = self.plugins.setdefault(resource, one)
        before = (one.folder, one.path, one.api, one.registered_on)
        one.folder = folder
        one.follow(peer)
        _log.info("a plugin registered", resource=resource, endpoint=path.name, api=dialect.name, folder=folder)
        if before != (one.folder, one.path, one.api, one.registered_on):
            await self._keeper.durable()

    def _require_socket(self, path: Path, resource: str) -> None:
        """Refuse an endpoint that isn't a socket, or is another plugin's."""
        found = socket_id(path)
        if found is None:
            raise RefusedError(
                Fault.INVALID_ARGUMENT,
                f"there is no socket at {path.parent.name}/{path.name} (links aren't followed). Bind it "
                "there before registering it",
            )
        for name, one in self.plugins.items():
            if name == resource or one.peer is None or one.peer.identity != found:
                continue
            if one.registered_on != found:  # The bridge reconnected by an old socket name, and another plugin answered.
                one.give_way(f"its socket is {resource}'s now")
            else:
                raise RefusedError(
                    Fault.ALREADY_EXISTS,
                    f"the socket {path.name} serves {name} already. Bind another one for {resource}",
                )

    async def _require_no_rival(self, resource: str, path: Path) -> None:
        """Refuse a second plugin for a resource while the first one lives. A restarted plugin is no second plugin."""
        dead = None
        while (one := self.plugins.get(resource)) is not None:
            peer = one.peer
            if peer is None or peer is dead or peer.path == path:
                return
            await first_of(peer.ended, seconds=RIVAL_ENDS_S)
            if peer is one.peer and not peer.ended.is_set() and await peer.answers():
                raise RefusedError(
                    Fault.ALREADY_EXISTS,
                    f"{resource} is offered by the plugin on {peer.path.name}, which still runs: end that one first, or give one of "
                    "them another resource name",
                )
            dead = peer

    def _require_room(self, resource: str) -> None:
        """Refuse one more resource if there are too many, unless one can be dropped: its plugin is away and it offers no devices."""
        if resource in self.plugins or len(self.plugins) < judge.MAX_PLUGINS:
            return
        now = time.monotonic()
        idle = next(
            (
                name
                for name, one in self.plugins.items()
                if one.peer is None
                and (not one.word.devices or shield.cover(one.word, one.limits, now) is shield.Cover.WITHDRAWN)
            ),
            None,
        )
        if idle is None:
            raise RefusedError(
                Fault.RESOURCE_EXHAUSTED,
                f"more than {judge.MAX_PLUGINS} resources behind the bridge. End a plugin",
            )
        gone = self.plugins.pop(idle)
        self._closing = asyncio.ensure_future(gone.close())

    # The calls.

    async def answer(self, resource: str, request: ContainerRequest, sendable: Sendable) -> ContainerAnswer:  # noqa: ARG002
        """Let the plugin answer. The kubelet's dialect drops or refuses fields that it can't carry."""
        return await self._asked_of(resource).allocate(request)

    async def prefer(self, resource: str, request: PreferredRequest) -> tuple[str, ...]:
        """Let the plugin choose."""
        return await self._asked_of(resource).prefer(request)

    async def prepare(self, resource: str, device_ids: tuple[str, ...]) -> None:
        """Let the plugin prepare its devices."""
        await self._asked_of(resource).prepare(device_ids)

    def _asked_of(self, resource: str) -> Bridged:
        one = self._of(resource)
        if one is None:
            raise not_offered(resource)
        return one

    # The other methods of a source.

    def absence(self, resource: str, device_id: str) -> Absence:  # noqa: ARG002 - the protocol's
        """Return WITHDRAWN for a device that its plugin no longer lists, or whose plugin never came back."""
        one = self._of(resource)
        if one is None or one.word.devices is None:
            return Absence.UNKNOWN
        return Absence.WITHDRAWN

    def claims(self, resource: str) -> bool:
        """Return True if a plugin registered the resource, in this process or before."""
        return self._of(resource) is not None

    def hindrances(self) -> tuple[Hindrance, ...]:
        """Return why plugins can't register, and the faults of plugins."""
        found = [Hindrance(self.name, self._hinders)] if self._hinders else []
        for name, one in self.plugins.items():
            stands = shield.cover(one.word, one.limits, time.monotonic())
            if stands not in {shield.Cover.LIVE, shield.Cover.SHIELDED}:
                found.append(Hindrance(f"{self.name} {name}", f"its plugin is away ({one.word.why}): {stands.value}"))
            if problem := one.trouble or self._occupied(name):
                found.append(Hindrance(f"{self.name} {name}", problem))
        return tuple(found)

    def facts(self, resource: str) -> Callable[[str], Facts]:
        """Return a function that names the plugin of a device."""
        one = self._of(resource)
        known = Facts() if one is None else Facts(product=f"{one.resource} ({one.endpoint})")
        return lambda _: known

    def behind(self, resource: str) -> Behind | None:
        """Return the state of a resource's plugin."""
        one = self._of(resource)
        if one is None:
            return None
        now = time.monotonic()
        state, state_s = shield.cover(one.word, one.limits, now).value, round(max(0.0, now - one.since), 3)
        reason = "; ".join(part for part in (one.word.why, one.trouble) if part)
        counts = (one.registrations, one.absences, one.repeated)
        return Behind(one.resource, one.endpoint, one.folder, one.api, state, state_s, reason, *counts)

    def adopt(self, policy: Policy) -> None:
        """Use new settings."""
        self._policy = policy
        self._limits = shield.Limits(policy.bridge_grace, policy.bridge_withdraw)
        for one in self.plugins.values():
            self._settle(one)
        self._news.set()


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
