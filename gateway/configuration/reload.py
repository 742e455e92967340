"""Follow the configuration file: after an edit or SIGHUP, the gateway adopts the new policy. Nothing else changes.

If the node's label chooses the file, another label is like an edit. If the file is invalid or missing, the last valid content stays in
force, and one error is logged. Backend, folders, addresses and all flags and variables need a restart.
"""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
from msgspec.structs import fields, replace

from devices.files import FileWatch
from devices.policy import Policy
from gateway.configuration.kinds import unknown_hooks
from gateway.configuration.settings import ConfigError, Settings

if TYPE_CHECKING:
    from devices.source import DeviceSource
    from gateway.configuration.choice import Label
    from gateway.configuration.settings import Choice

_AT_START: Final = ("fail_on_init_error", "container_driver_root", "bridge")
"""Fields that a backend reads only while it starts."""

_log = structlog.get_logger()


class FileFate:
    """The result of the last look at the configuration file, for people and metrics."""

    def __init__(self) -> None:
        self.error = ""
        """Why the file was rejected (its last valid content stays in force); empty if it wasn't."""
        self.accepted_at: float | None = None
        """When the file was last accepted (monotonic seconds)."""
        self.path: Path | None = None
        """The current file, if the label has chosen one since the start."""
        self.policy: Policy | None = None
        """The current policy, if the file has changed it since the start."""


async def follow(
    settings: Settings,
    source: DeviceSource,
    fate: FileFate,
    label: Label | None = None,
) -> None:
    """Let ``source`` adopt each new policy, and keep ``fate`` up to date. Never returns. ``label`` chooses the file.

    Without a file, SIGHUP only writes a line to the log.
    """
    loop = asyncio.get_running_loop()
    hangup = asyncio.Event()

    def hung_up() -> None:
        hangup.set()
        if label is not None:
            label.changed.set()

    loop.add_signal_handler(signal.SIGHUP, hung_up)
    try:
        if settings.config_file is None:
            while True:
                await hangup.wait()
                hangup.clear()
                _log.info("SIGHUP, but there is nothing to reload: no --config-file was given")
        current = _Current(settings, settings.config_file, source, fate)
        await _follow_file(settings.config_file, settings.state_dir, label, current, hangup)
    finally:
        signal.signal(
            signal.SIGHUP, signal.SIG_IGN
        )  # Without a handler, SIGHUP would kill the process during its orderly end.


async def _follow_file(
    file: Path, state_dir: Path, label: Label | None, current: _Current, hangup: asyncio.Event
) -> None:
    """Follow the configuration file, and with a ``label`` also the choice of the file."""
    from gateway.configuration import choice as choosing  # noqa: PLC0415 - only with a configuration file

    watch: FileWatch | None = None
    watched: Path | None = None
    with ExitStack() as stack:
        while True:
            value, asked, fault, place = "", hangup.is_set(), None, file
            hangup.clear()
            if label is not None:
                value = label.value
                label.changed.clear()
                try:
                    current.path = choosing.locate(label.choice, value)
                except ConfigError as error:
                    fault = error
                place = label.choice.folder / choosing.NAMED if fault or current.path is None else current.path
            if watch is None or place != watched:
                stack.close()
                watch, watched = stack.enter_context(FileWatch(place)), place
            if fault is not None:
                current.choose_nothing(fault, asked=asked)
            if fault is not None or not await current.look(asked=asked):
                watch.look_again()
            elif label is not None and not current.fault:
                await _remember(label.choice, state_dir, value)
            await watch.changed_or(hangup if label is None else label.changed)


async def _remember(choice: Choice, state_dir: Path, label: str) -> None:
    from gateway.configuration import choice as choosing  # noqa: PLC0415 - see above

    try:
        await asyncio.to_thread(choosing.remember, choice, state_dir, label)
    except OSError as error:
        _log.warning("the node's label can't be remembered for the next start", reason=str(error))


class _Current:
    """The policy in force, and the file's content that it came from (empty without a ``path``)."""

    def __init__(
        self,
        settings: Settings,
        path: Path | None,
        source: DeviceSource,
        fate: FileFate,
    ) -> None:
        self._settings, self.path, self._source, self._fate = settings, path, source, fate
        self._policy = settings.policy
        self._content: bytes | None = None
        self._missed = 0
        self.fault = ""
        """Why the text was rejected; empty if it wasn't."""

    def choose_nothing(self, error: ConfigError, *, asked: bool) -> None:
        """Note that no file is chosen; the policy stays in force. ``asked`` logs the error again."""
        if asked or str(error) != self._fate.error:
            self._reject(error)

    async def look(self, *, asked: bool) -> bool:
        """Adopt the file's content, if it is valid. Return False if it can't be read. ``asked`` logs the result."""
        from gateway.configuration import file as config  # noqa: PLC0415 - without a file, no YAML is loaded

        settings, first = self._settings, self._content is None
        try:
            content = b"" if self.path is None else await asyncio.to_thread(config.read, self.path)
            if not content and self.path and self._content and not self._missed and not asked:
                self._missed = 1  # A program that writes in place empties it first. See below.
                return False
            self._missed, self._fate.path = 0, self.path
            if content == self._content and not asked:
                self._fate.error = self.fault  # The file may have been missing in between.
                return True
            self._content, self.fault = content, ""
            file = await asyncio.to_thread(config.parse, content, str(self.path), strict=settings.strict_config)
            policy = config.policy(file, settings.given, settings.backend)
        except config.UnreadableConfigError as error:
            self._missed += 1
            # NVIDIA's config-manager removes the file before it writes another, so only the second failure is an error.
            if asked or self._missed == 2:
                self._reject(error)
            return False
        except ConfigError as error:
            self.fault = str(error)
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
            for warning in (*warnings, *unknown_hooks(policy)):
                _log.warning("configuration", note=warning)
        if fixed:
            _log.warning("configuration: these settings change only at a restart of the gateway", settings=list(fixed))
        if len(changed) > len(fixed):
            self._policy = self._fate.policy = replace(policy, **fixed)
            self._source.adopt(self._policy)
            _log.info("configuration adopted", changed=[name for name in changed if name not in fixed])
        elif aloud:
            _log.info("configuration read: nothing changed")
