"""One resource on this node: its state machine and its device plugin, and the timers, tasks and sockets that they need.

``Resource`` carries out the actions of ``gateway.registration.machine``: it sends Registers, sets timers, names the bound
socket and reads the kubelet's records.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING

import structlog

from adapters.dialect import UnsayableError
from adapters.registry import by_name
from devices.model import Health, Registration
from gateway.kubelet import records as kubelet_records
from gateway.kubelet.identity import kubelet_id
from gateway.registration import events
from gateway.registration import machine as registration
from gateway.registration.events import Phase, Timer
from gateway.registration.negotiate import NOBODY, UNFIT
from gateway.registration.serve import DevicePlugin, Node
from gateway.tally import Confirmation
from gateway.tasks import Background
from gateway.wires import rpc
from gateway.wires.unix import listens

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from devices.life import states
    from devices.source import Listing
    from gateway.kubelet.identity import KubeletId
    from gateway.kubelet.reader import Look

REGISTER_DEADLINE_S = 15.0
"""Seconds for one Register. During it, kubelets 1.25 and later connect to us, for up to 10 s; 1.35 and later stop that at our
deadline."""
RECORDS_WAIT_S, RECORDS_WAIT_PER_DEVICE_S = 1.0, 0.001
"""Seconds that a kubelet may take to record a list, and the seconds to add per device. (A real 1.32 on a busy node needs 2.5 s
for 5,000.) Four times as long after each failure, because a repeated list makes a slow kubelet slower."""
RECORDED_S = 1.2
"""Seconds after the start of a stream until the kubelet's records certainly have its list."""

CALL_FIRST_S = 0.002
"""Seconds to wait after an accepted Register: the kubelet's ListAndWatch arrives at the same time, and should be handled first."""
WARM_UP_S = 0.2
"""Most seconds for the first connection to the kubelet, which only makes later ones faster."""

# Without retries. Otherwise gRPC would send a Register to the next kubelet if the first one died during the call.
_CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
SERVED = frozenset({Phase.SERVING, Phase.STANDBY})
"""Phases in which this gateway or another one serves the resource."""
_AT_REST = SERVED | {Phase.OUT}
"""Phases in which no Register will be sent soon."""
_LEVELS = logging.getLevelNamesMapping()
_log = structlog.get_logger()


async def warm_up(socket: Path) -> None:
    """Connect to the kubelet once. The first channel of a process takes milliseconds longer than the next ones.

    The same is true for its first handler of calls.
    """
    rpc.writing(lambda _: asyncio.sleep(0))
    channel = rpc.Channel(socket, _CHANNEL_OPTIONS)
    try:
        async with asyncio.timeout(WARM_UP_S):
            await channel.ready()
    except TimeoutError:
        pass
    finally:
        await channel.close()


def spread(seconds: float) -> float:
    """Add up to a quarter to the seconds, at random, so that resources whose streams end together don't register together."""
    return seconds * (1 + os.urandom(1)[0] / 1024)


def any_registers(resources: Iterable[Resource]) -> bool:
    """Return True if a Register is in flight, or was accepted and waits for the kubelet's call."""
    return any(one.state.phase in {Phase.OFFERING, Phase.ACCEPTED} for one in resources)


class Resource:
    """One resource: its state machine and its device plugin."""

    def __init__(self, node: Node, name: str, last_accepted: str) -> None:
        self._node = node
        self._log = _log.bind(resource=name)
        settings = node.settings
        self.plugin = DevicePlugin(name, node, self.feed)
        self.state = registration.start(f"{node.token}-{os.urandom(2).hex()}", settings.api, last_accepted)
        self.trouble = ""
        """The last error of the registration."""
        self.checked: Confirmation | None = None
        """What the last read of the kubelet's records found about the registration."""
        self.stream_since: float | None = None
        """When the open stream was opened (monotonic seconds)."""
        self.since = time.monotonic()
        """When the resource's serving state last changed: served here, by another gateway, or neither (monotonic seconds)."""
        self._without_since: float | None = None
        """Since when the kubelet has had no stream of ours: since it was found, or since the last stream ended. None while it has one."""
        self._timers: dict[Timer, asyncio.TimerHandle] = {}
        self._offer_task: asyncio.Task[None] | None = None
        self._last_report: events.Report | None = None
        self._tasks = Background(self._log)
        self._ahead: tuple[KubeletId, rpc.Channel] | None = None
        """A channel to a kubelet for the next Register (``approach``). It is closed after that, because an idle channel would
        double the gateway's context switches."""

    @property
    def name(self) -> str:
        """The resource name."""
        return self.plugin.name

    @property
    def endpoint(self) -> Path:
        """The endpoint in the last Register."""
        return self._node.settings.socket_dir / self.state.name

    @property
    def entries(self) -> dict[str, states.Entry]:
        """Its devices with their states, by ID."""
        return self.plugin.list.entries

    async def bind(self) -> None:
        """Bind the socket, on a new server.

        Raises:
            OSError: the folder was removed, or this process has no file descriptor left.
            RuntimeError: gRPC can't bind the path.
        """
        path = self._node.own_socket(self.name)
        made = path.with_suffix(
            ".made"
        )  # When a server ends, gRPC removes the name that it bound, whoever has it then.
        await self.plugin.bind(made)
        made.rename(path)

    def publish(self, listing: Listing | None, entries: tuple[states.Entry, ...]) -> None:
        """Send a new list to the kubelet. Register again if the options changed."""
        asked = self.plugin.list.options
        self.plugin.publish(listing, entries)
        if self.plugin.list.options != asked and self.plugin.says_options:
            self.feed(events.Renew("the resource's options have changed"))
        if self.state.phase is Phase.OUT:  # The new list may fit.
            self.feed(events.Resume())

    def approach(self, kubelet: KubeletId) -> None:
        """Start to connect to a kubelet, so that the Register can be sent sooner."""
        channel = self._channel_to(kubelet)
        channel.connect()
        self._ahead = kubelet, channel

    def _channel_to(self, kubelet: KubeletId) -> rpc.Channel:
        """Return the channel that was made in advance, or a new one if that channel leads to another kubelet."""
        if self._ahead is not None and self._ahead[0] == kubelet:
            (_, channel), self._ahead = self._ahead, None
            return channel
        self._drop_ahead()
        return rpc.Channel(self._node.presence.socket, _CHANNEL_OPTIONS)

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._tasks.background(self._ahead[1].close())
            self._ahead = None

    def feed(self, event: events.Event) -> None:
        """Pass an event to the state machine, and carry out its actions."""
        before = self.state
        self.state, actions = registration.step(self.state, event)
        if self.state.phase is not before.phase:
            self._log.debug("phase", phase=self.state.phase.value)
            if not {before.phase, self.state.phase}.isdisjoint(SERVED):
                self.since = time.monotonic()
            if self.state.phase is Phase.SERVING:
                self._node.reader.look_within(RECORDED_S)
        self._keep_time(before, event)
        for action in actions:
            self._act(action)
        if self.state.phase is Phase.ABSENT:
            self._node.presence.check()
        elif self.state.phase in {Phase.ACCEPTED, Phase.SERVING}:
            self._node.presence.found(anew=False)
        self._node.moved.set()
        if self.state.phase in _AT_REST:
            self._drop_ahead()

    def _keep_time(self, before: registration.State, event: events.Event) -> None:
        """Measure how long the kubelet was without our stream."""
        now, state = time.monotonic(), self.state
        if state.stream is None:
            self.stream_since = None
        elif state.stream != before.stream:
            self.stream_since = now
            if self._without_since is not None:
                self._node.tally.restart_gap(self.name, now - self._without_since)
            self._without_since = None
        found = isinstance(event, events.KubeletUp) and state.kubelet != before.kubelet
        resumed = (
            before.phase is Phase.STANDBY and state.phase is not Phase.STANDBY
        )  # Another gateway served until then.
        if found or resumed or (before.stream is not None and state.stream is None):
            self._without_since = now

    def _act(self, action: events.Action) -> None:
        match action:
            case events.SendRegister():
                self._offer_task = self._tasks.start(self._offer(action))
            case events.CancelRegister():
                if self._offer_task is not None:
                    self._offer_task.cancel()
            case events.SetTimer(timer, seconds):
                self._cancel(timer)
                fires = events.Fired(timer)
                self._timers[timer] = asyncio.get_running_loop().call_later(spread(seconds), self.feed, fires)
            case events.CancelTimer(timer):
                self._cancel(timer)
            case events.Heed(stream):
                self.plugin.heed(stream)
            case events.EndStreams():
                self.plugin.end_streams()
            case events.LinkSocket(name):
                with contextlib.suppress(OSError):  # The folder may be gone; then the watch reports it.
                    os.link(self._node.own_socket(self.name), self._node.settings.socket_dir / name)
                    self._log.info("put our socket's name back", name=name)
            case events.UnlinkSocket(name):
                with contextlib.suppress(OSError):
                    (self._node.settings.socket_dir / name).unlink()
            case events.Verify():
                self._tasks.background(self._verify())
            case events.Report():
                self._report(action)

    async def _offer(self, offer: events.SendRegister) -> None:
        """Send one Register. Always pass its result to the state machine, which waits for it."""
        try:
            code, details = await self._register(offer)
        except Exception as error:  # noqa: BLE001 - see above
            self._log.exception("Register failed because of a defect in the gateway")
            code, details = "INTERNAL", repr(error)
        why = self.state.why  # The answer may change the cause of the next Register.
        self.feed(events.Replied(offer.attempt, code, details, connected=bool(self.plugin.asked_options)))
        if code != "OK":
            self._node.tally.register_errors.add(self.name, code)
        else:
            self._node.tally.registrations.add(self.name, why.value)
            await self.plugin.drop_earlier_servers()

    async def _register(self, offer: events.SendRegister) -> tuple[str, str]:
        dialect = by_name(offer.dialect)
        await self.plugin.list.spell(dialect)
        if reason := self.plugin.list.too_large(dialect):
            return UNFIT, reason
        if (wait := self._node.lead.register_at() - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        socket = self._node.presence.socket
        kubelet = kubelet_id(socket)
        # The second look finds a kubelet that started in between.
        if kubelet is None or not listens(socket) or kubelet_id(socket) != kubelet:
            return NOBODY, f"no process accepts connections on {socket}"
        own = self._node.own_socket(self.name)
        if not own.is_socket():
            return NOBODY, f"our own socket {own} is gone: the folder was replaced"
        self.feed(events.Reached(offer.attempt, kubelet))
        endpoint = self._link(offer.name)
        try:
            wire = dialect.encode_register(Registration(dialect.name, endpoint, self.name, self.plugin.list.options))
        except UnsayableError as error:
            return UNFIT, str(error)
        self.plugin.offer(dialect)
        channel = self._channel_to(kubelet)
        try:
            method = f"/{dialect.registration_service}/Register"
            await channel.call(method, wire.data, seconds=REGISTER_DEADLINE_S)
            self._node.accepted(offer.dialect)
            await asyncio.sleep(CALL_FIRST_S)
        except rpc.CallError as error:
            return error.code.name, error.details
        finally:
            self._tasks.background(channel.close())
        return "OK", ""

    def _link(self, name: str) -> str:
        """Link the bound socket under a new name in the kubelet's folder; return the endpoint to register."""
        own, folder = self._node.own_socket(self.name), self._node.settings.socket_dir
        try:
            os.link(own, folder / name)
        except OSError as error:
            # No hard links here (another mount, SELinux). Kubelets join the endpoint to their folder, so a path below it works.
            # But it is the same for each registration.
            self._log.warning("cannot link our socket: registering its own path", error=str(error))
            return str(own.relative_to(folder))
        return name

    async def _verify(self) -> None:
        """Read the kubelet's records, if possible; again if the list changed during the read.

        If the stream changed during the read, the result is dropped: the new stream gets its own read.
        """
        stream, listed, held = self.state.stream, None, None
        pod_resources = self._node.settings.pod_resources_socket
        while listed != self.plugin.devices:
            listed = self.plugin.devices
            patience = (RECORDS_WAIT_S + len(listed) * RECORDS_WAIT_PER_DEVICE_S) * 4.0**self.state.heals
            held = await kubelet_records.holds(pod_resources, self.name, listed, patience)
            if self.state.stream != stream:
                return
        self.checked = Confirmation.UNKNOWN if held is None else Confirmation.HELD if held else Confirmation.LACKING
        self._node.tally.checks.add(self.name, self.checked.value)
        if held is not None:
            self.feed(events.Verified(held))

    def looked(self, look: Look) -> None:
        """Check the resource in the kubelet's records, which were read for the whole node."""
        allocatable, since = look.records.allocatable, self.stream_since
        if allocatable is None or since is None or look.at < since or allocatable.get(self.name):
            return
        if any(device.health is Health.HEALTHY for device in self.plugin.devices):
            self.feed(events.Lacking())

    def _report(self, report: events.Report) -> None:
        """Log a report. If the same error comes again, log it at debug level."""
        state = self.state
        told = {"api": state.dialect, "details": report.details} if report.details else {"api": state.dialect}
        if report.what == "registered":
            told["endpoint"] = state.name
        if report.level != "info":
            self.trouble = f"{report.what}: {report.details}" if report.details else report.what
        repeated = report == self._last_report and report.what != "registered"
        self._last_report = report
        self._log.log(_LEVELS[("debug" if repeated else report.level).upper()], report.what, **told)

    def _cancel(self, timer: Timer) -> None:
        if handle := self._timers.pop(timer, None):
            handle.cancel()

    async def close(self) -> None:
        """End everything of this resource. Call it after ``Stop``."""
        await self._tasks.close()
        if self._ahead is not None:
            await self._ahead[1].close()
        await self.plugin.close()
