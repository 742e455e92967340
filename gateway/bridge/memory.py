"""The plugins that the bridge knew before its restart: the socket of each, and its last report.

They are in one JSON file in the state directory. The bridge works without it: the plugins register again, and the state file has
their device IDs until then. A damaged file is put aside.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import structlog
from msgspec import Meta, Struct, structs

from adapters.registry import DIALECTS
from devices.files import NotPlainError, read_plain, replace
from devices.model import ContainerAnswer, Device, Options
from gateway.bridge.judge import MAX_DEVICES, MAX_PLUGINS, list_error
from gateway.kubelet.identity import SocketId
from gateway.tasks import first_of

NAME: Final = "bridge.json"
FORMAT: Final = 1
_MAX_BYTES: Final = 32 * 1024 * 1024
SAVE_PERIOD_S: Final = 1.0
"""Seconds between two writes."""
SAVE_SOON_S: Final = 0.01
"""Seconds between two writes if a Register waits for the second one."""
SAVE_WAIT_S: Final = 2.0
"""Most seconds that a Register, or the end of the gateway, waits for a slow disk."""
PluginFolder = Literal["device-plugins", "plugins_registry"]
Api = Annotated[str, Meta(pattern=rf"\A(?:{'|'.join(re.escape(dialect.name) for dialect in DIALECTS)})\Z")]
"""The name of a dialect."""
_Text = Annotated[str, Meta(max_length=4096)]
_Name = Annotated[str, Meta(min_length=1, max_length=512)]

_log = structlog.get_logger()


class EarlierAnswer(Struct, frozen=True):
    """The response that a container with these devices got."""

    devices: Annotated[tuple[str, ...], Meta(max_length=MAX_DEVICES)]
    given: ContainerAnswer


class Plugin(Struct, frozen=True):
    """A resource and its plugin: folder and name of its socket, its dialect, options, devices and responses.

    ``devices`` is None if it has not sent its first list. ``away_since`` is in Unix seconds, None if the plugin was connected.
    ``socket`` is the one that it registered.
    """

    resource: _Name
    folder: PluginFolder
    endpoint: _Name
    api: Api
    devices: Annotated[tuple[Device, ...], Meta(max_length=MAX_DEVICES)] | None
    options: Options
    away_since: float | None = None
    why: _Text = ""
    answers: tuple[EarlierAnswer, ...] = ()
    socket: SocketId | None = None


class SavedPlugins(Struct, frozen=True):
    """The whole file."""

    format: Literal[1]
    plugins: Annotated[tuple[Plugin, ...], Meta(max_length=MAX_PLUGINS)]


def written(folder: Path) -> object:
    """Return what identifies the file's current version; None if it is unknown. Blocks."""
    try:
        found = (folder / NAME).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def load(folder: Path, *, aside: bool = True) -> tuple[tuple[Plugin, ...], str]:
    """Read the plugins; return them, and the file's fault ('' for none). With ``aside``, put a damaged file aside. Blocks."""
    path = folder / NAME
    try:
        content = read_plain(path, _MAX_BYTES)
    except FileNotFoundError:
        return (), ""
    except (OSError, NotPlainError) as error:
        return (), f"{path} can't be read ({error}): plugins are known again once they register"
    try:
        if len(content) > _MAX_BYTES:
            raise ValueError("it is too large")  # noqa: TRY301 - one way out for all that is wrong with it
        plugins = msgspec.json.decode(content, type=SavedPlugins).plugins
        if problem := next(filter(None, (list_error(one.devices or ()) for one in plugins)), None):
            raise ValueError(problem)  # noqa: TRY301 - as above
    except (ValueError, RecursionError) as error:
        if aside:
            with contextlib.suppress(OSError):
                path.replace(path.with_suffix(".damaged"))
        return (), f"{path} is damaged ({error}): plugins are known again once they register"
    return plugins, ""


def save(folder: Path, plugins: tuple[Plugin, ...]) -> None:
    """Replace the file: after a crash, either the old or the new one is there. Blocks.

    If the file would be too large to be read, the responses are left out.

    Raises:
        OSError: it can't be written.
    """
    content = msgspec.json.encode(SavedPlugins(FORMAT, plugins))
    if len(content) > _MAX_BYTES:
        content = msgspec.json.encode(SavedPlugins(FORMAT, tuple(structs.replace(one, answers=()) for one in plugins)))
    replace(folder / NAME, content)


class PluginsFile:
    """Writes the plugins' file after each change, because some plugins register only once, and the gateway may be killed.

    Args:
        state_dir: the folder of the file.
        remembered: returns the rows to write.
    """

    def __init__(self, state_dir: Path, remembered: Callable[[], tuple[Plugin, ...]]) -> None:
        self._state_dir, self._remembered = state_dir, remembered
        self._unsaved, self._urgent, self._saved = asyncio.Event(), asyncio.Event(), asyncio.Event()
        """Set if there is something to write; if a caller waits for the write; and when the next write has ended."""

    def changed(self) -> None:
        """Write the plugins soon."""
        self._unsaved.set()

    async def durable(self) -> None:
        """Wait until the current plugins are on disk, at most ``SAVE_WAIT_S``: a registered plugin may not register again."""
        saved = self._saved
        self._unsaved.set()
        self._urgent.set()
        await first_of(saved, seconds=SAVE_WAIT_S)

    async def run(self) -> None:
        """Write. Never returns."""
        failed = ""
        while True:
            await self._unsaved.wait()
            self._unsaved.clear()
            saved, self._saved = self._saved, asyncio.Event()
            self._urgent.clear()
            rows = self._remembered()
            try:
                await asyncio.to_thread(save, self._state_dir, rows)
                failed = ""
            except OSError as error:
                if str(error) != failed:
                    _log.error("the plugins' file can't be written for the next start", reason=str(error))
                failed = str(error)
            saved.set()
            await asyncio.sleep(SAVE_SOON_S)
            if all(row.devices is not None for row in rows):  # Otherwise the first list, which comes soon, would wait.
                await first_of(self._urgent, seconds=SAVE_PERIOD_S - SAVE_SOON_S)
