"""Follows the configuration file: an edit or SIGHUP brings a new policy, and nothing but the policy changes.

A file that is wrong, or gone, leaves the last good one in force, and is complained of once. What is decided at start only (the
backend, folders, addresses: flags and variables all) needs a restart anyway.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog
from msgspec.structs import fields, replace

from devices.filewatch import FileWatch
from devices.policy import Policy
from gateway.configuration.settings import ConfigError, Settings

_AT_START: Final = ("fail_on_init_error", "container_driver_root", "bridge")
"""What a backend goes by while it starts."""

_log = structlog.get_logger()


class Fate:
    """What became of the configuration file the last time that it was looked at, for people and metrics."""

    def __init__(self) -> None:
        self.error = ""
        """Why it was rejected, so that what it said before stays in force; empty where it wasn't."""
        self.accepted_at: float | None = None
        """When it was found good last (monotonic seconds)."""


async def follow(settings: Settings, adopt: Callable[[Policy], None], fate: Fate) -> None:
    """Call ``adopt`` with each new policy, for ever. Without a file, SIGHUP only gets an answer in the log."""
    loop = asyncio.get_running_loop()
    hangup = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    try:
        if settings.config_file is None:
            while True:
                await hangup.wait()
                hangup.clear()
                _log.info("SIGHUP, but there is nothing to reload: no --config-file was given")
        current = _Current(settings, settings.config_file, adopt, fate)
        asked = False
        with FileWatch(settings.config_file) as watch:
            while True:
                if not current.look(asked=asked):
                    watch.look_again()
                await watch.changed_or(hangup)
                asked = hangup.is_set()
                hangup.clear()
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # It would end the gateway that is ending in order.


class _Current:
    """The policy in force, and the text that it came from."""

    def __init__(self, settings: Settings, path: Path, adopt: Callable[[Policy], None], fate: Fate) -> None:
        self._settings, self._path, self._adopt, self._fate = settings, path, adopt, fate
        self._policy = settings.policy
        self._content: bytes | None = None
        self._missed = 0
        self._fault = ""
        """What is wrong with the text."""

    def look(self, *, asked: bool) -> bool:
        """Go by the file as it is now, if it is to be used; False where it could not be read. ``asked``: say what came of it."""
        from gateway.configuration import file as config  # noqa: PLC0415 - who has no file needn't pay for YAML

        settings, first = self._settings, self._content is None
        try:
            content = config.read(self._path)
            self._missed = 0
            if content == self._content and not asked:
                self._fate.error = self._fault  # It may have been gone in between.
                return True
            self._content, self._fault = content, ""
            file = config.parse(content, str(self._path), strict=settings.strict_config)
            policy = config.policy(file, settings.given, settings.backend)
        except config.UnreadableError as error:
            self._missed += 1
            # NVIDIA's config-manager takes the file away before it puts another there: only the second time means something.
            if asked or self._missed == 2:
                self._reject(error)
            return False
        except ConfigError as error:
            self._fault = str(error)
            self._reject(error)
            return True
        self._fate.error, self._fate.accepted_at = "", time.monotonic()
        self._take(policy, file.warnings, aloud=asked or not first)
        return True

    def _reject(self, error: ConfigError) -> None:
        self._fate.error = str(error)
        _log.error("configuration rejected: the last good one stays in force", reason=str(error))

    def _take(self, policy: Policy, warnings: tuple[str, ...], *, aloud: bool) -> None:
        changed = [one.name for one in fields(Policy) if getattr(policy, one.name) != getattr(self._policy, one.name)]
        fixed = {name: getattr(self._policy, name) for name in _AT_START if name in changed}
        if aloud or changed:
            for warning in warnings:
                _log.warning("configuration", note=warning)
        if fixed:
            _log.warning("configuration: this changes only when the gateway is started anew", settings=list(fixed))
        if len(changed) > len(fixed):
            self._policy = replace(policy, **fixed)
            self._adopt(self._policy)
            _log.info("configuration adopted", changed=[name for name in changed if name not in fixed])
        elif aloud:
            _log.info("configuration read: nothing changed")
