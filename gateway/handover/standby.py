"""Standing by, and watching: does the kubelet's own records show what another gateway is to serve?

Only what is stood by for is looked at, a few times a second until it is shown. After that a gateway that talks to us is
trusted until the kubelet starts anew (it says when it can't serve), and one that doesn't is looked after every second.
``Records`` decides when that was long enough; what follows then is the shell's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Final

import structlog
from msgspec.structs import replace

from devices.model import Health
from gateway.handover.records import LOOK, Records
from gateway.kubelet import view as kubelet_view
from gateway.kubelet.watch import listens
from gateway.registration.events import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from gateway.daemon import Gateway
    from gateway.handover.age import Age
    from gateway.registration.registrar import Plugin

_MOST_NAMES: Final = 4096
_log = structlog.get_logger()


class Standby:
    """The resources of one gateway that another one serves, and what the kubelet's records show of them."""

    def __init__(self, gateway: Gateway, checkpoint: Path) -> None:
        self._gateway, self._checkpoint = gateway, checkpoint
        self._records: dict[str, Records] = {}
        self._since_ns = 0
        self._failed = False
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Look, for ever, whenever there is something to look at."""
        while True:
            self._wake.clear()
            waits = [wait for plugin in self._gateway.plugins if (wait := self._wait(plugin)) is not None]
            if not self._gateway.kubelet_listens():
                waits = []  # The next one wakes us.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(waits, default=None)):
                    await self._wake.wait()
                    continue
            try:
                await self._look()
                self._failed = False
            except Exception:  # noqa: BLE001 - whatever it is, it is tried again
                if not self._failed:
                    _log.exception("the kubelet's records could not be looked at", retry_s=LOOK)
                self._failed = True
                await asyncio.sleep(LOOK)

    def began(self, resource: str) -> None:
        """Take notice that another gateway is to serve a resource from now on."""
        self._since_ns = time.time_ns()
        self._records[resource] = Records()
        self._wake.set()

    def kubelet_up(self, since_ns: int) -> None:
        """Take notice of a new kubelet, whose socket was made at ``since_ns`` (unix time): it knows nobody yet."""
        self._since_ns = since_ns
        self._records = dict.fromkeys(self._records, Records())
        self._wake.set()

    def lacking(self, resource: str, now: float) -> float:
        """Return for how many seconds the kubelet's records have lacked a resource that we stand by for."""
        since = self._records.get(resource, Records()).lacking_since
        return 0.0 if since is None else now - since

    def _wait(self, plugin: Plugin) -> float | None:
        """Return the seconds until the next look at a resource; None: there is nothing to look at."""
        name = plugin.resource.name
        if plugin.state.phase is not Phase.STANDBY:
            self._records.pop(name, None)
            return LOOK if self._gateway.doubts.get(name) else None
        return self._records.setdefault(name, Records()).again(talks=self._gateway.talks(plugin))

    async def _look(self) -> None:
        gateway, records = self._gateway, self._records
        shown = await kubelet_view.shown(gateway.pod_resources, self._checkpoint, self._since_ns)
        names = None if shown is not None or listens(gateway.pod_resources) else set(names_in(gateway))
        if records is not self._records:  # Another kubelet has come meanwhile.
            return
        now = time.monotonic()
        for plugin in gateway.plugins:
            name, other = plugin.resource.name, plugin.standing_by_for
            if other is None or name not in records:
                if gateway.doubts.get(name):
                    gateway.look()
                continue
            records[name] = records[name].look(now, shown=self._shown(plugin, other, shown, names))
            if records[name].unserved(now, len(plugin.entries)):
                records[name] = replace(records[name], told=now)
                gateway.unserved(plugin, other)

    def _shown(self, plugin: Plugin, other: Age, shown: frozenset[str] | None, names: set[str] | None) -> bool | None:
        if not any(device.health is Health.HEALTHY for device in plugin.resource.devices):
            return None  # Perhaps none of the other's is well, either: that can't be told from none.
        if shown is not None:
            return plugin.resource.name in shown
        # The kubelet tells nothing: whoever registered with it has a name in its folder, which it empties at its start.
        return bool(names_of(other, names)) if names is not None and not self._gateway.talks(plugin) else None


def names_in(gateway: Gateway) -> list[str]:
    """Return the names in the socket directory; none where it can't be read."""
    try:
        return [path.name for path, _ in zip(gateway.settings.socket_dir.iterdir(), range(_MOST_NAMES), strict=False)]
    except OSError:
        return []


def names_of(peer: Age, names: Iterable[str]) -> frozenset[str]:
    """Choose those under which a gateway registers its sockets."""
    return frozenset(name for name in names if name.startswith(f"{peer.token}-"))
