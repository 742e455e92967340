"""What the bridge remembers of its plugins over its own restart: where each was served, and what it said last.

One JSON file in the state directory. Nothing relies on it: where it can't be read, the plugins register anew, and
until they do the ledger keeps their devices' IDs. A damaged file is put aside.
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
from devices.model import ContainerAnswer
from gateway.bridge.judge import MOST_DEVICES, MOST_PLUGINS
from gateway.kubelet.watch import SocketId

NAME: Final = "bridge.json"
FORMAT: Final = 1
_MAX_BYTES: Final = 32 * 1024 * 1024
SAVE_WITHIN: Final = 1.0
"""Seconds between two writes of what is remembered."""
SAVE_SOON: Final = 0.01
"""The same, where a Register waits for it."""
SAVE_TIME: Final = 2.0
"""Seconds that a Register waits, and the end of the gateway: a plugin isn't lost because a disk is slow."""
PluginFolder = Literal["device-plugins", "plugins_registry"]
Api = Annotated[str, Meta(pattern=rf"\A(?:{'|'.join(re.escape(dialect.name) for dialect in DIALECTS)})\Z")]
"""A dialect that there is."""
_Text = Annotated[str, Meta(max_length=4096)]
_Name = Annotated[str, Meta(min_length=1, max_length=512)]

_log = structlog.get_logger()


class DeviceRow(Struct, frozen=True):
    """One device: its ID, whether it was well, and its NUMA nodes."""

    id: _Name
    well: bool
    numa: tuple[int, ...] = ()


class EarlierAnswer(Struct, frozen=True):
    """What a container with these devices was given."""

    devices: Annotated[tuple[str, ...], Meta(max_length=MOST_DEVICES)]
    given: ContainerAnswer


class Plugin(Struct, frozen=True, rename={"folder": "door"}):
    """One resource: where its plugin was served, what it spoke, asked and said.

    ``away_since`` is in unix seconds, None where it was there. ``socket`` is the one that it registered. ``listed`` is whether it
    has said yet which devices it has.
    """

    resource: _Name
    folder: PluginFolder
    endpoint: _Name
    api: Api
    devices: Annotated[tuple[DeviceRow, ...], Meta(max_length=MOST_DEVICES)]
    pre_start: bool = False
    preferred: bool = False
    away_since: float | None = None
    why: _Text = ""
    answers: tuple[EarlierAnswer, ...] = ()
    socket: SocketId | None = None
    listed: bool = True


class SavedPlugins(Struct, frozen=True):
    """The whole file."""

    format: Literal[1]
    plugins: Annotated[tuple[Plugin, ...], Meta(max_length=MOST_PLUGINS)]


def written(folder: Path) -> object:
    """Tell one write of the file from another; None: it can't be told. Blocks."""
    try:
        found = (folder / NAME).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def load(folder: Path, *, aside: bool = True) -> tuple[tuple[Plugin, ...], str]:
    """Read what is remembered, and say what was wrong with it (empty: nothing); put it ``aside`` then. Blocks."""
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
        return msgspec.json.decode(content, type=SavedPlugins).plugins, ""
    except (ValueError, RecursionError) as error:
        if aside:
            with contextlib.suppress(OSError):
                path.replace(path.with_suffix(".damaged"))
        return (), f"{path} is damaged ({error}): plugins are known again once they register"


def save(folder: Path, plugins: tuple[Plugin, ...]) -> None:
    """Write it as a whole: a crash leaves the old file or the new one. Blocks.

    Answers that are repeated stay out where the file would be too large to be read back: plugins can be asked anew.

    Raises:
        OSError: it can't be written.
    """
    content = msgspec.json.encode(SavedPlugins(FORMAT, plugins))
    if len(content) > _MAX_BYTES:
        content = msgspec.json.encode(SavedPlugins(FORMAT, tuple(structs.replace(one, answers=()) for one in plugins)))
    replace(folder / NAME, content)


class PluginsFile:
    """Writes what is known of plugins when it changed: some register once, also where the gateway is killed.

    Args:
        state_dir: where it is written.
        remembered: says what there is to write.
    """

    def __init__(self, state_dir: Path, remembered: Callable[[], tuple[Plugin, ...]]) -> None:
        self._state_dir, self._remembered = state_dir, remembered
        self._unsaved, self._urgent, self._saved = asyncio.Event(), asyncio.Event(), asyncio.Event()
        """That there is something to write, that somebody waits for it, and that the write after this one is over."""

    def changed(self) -> None:
        """Have it written soon."""
        self._unsaved.set()

    async def durable(self) -> None:
        """Wait until what is known now was written: who is told that it is registered may never say so again."""
        saved = self._saved
        self._unsaved.set()
        self._urgent.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SAVE_TIME):
                await saved.wait()

    async def run(self) -> None:
        """Write, for ever."""
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
                    _log.error("what plugins said can't be written down for the next start", reason=str(error))
                failed = str(error)
            saved.set()
            await asyncio.sleep(SAVE_SOON)
            if all(row.listed for row in rows):  # Else the first list, which comes soon, would wait for its turn.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SAVE_WITHIN - SAVE_SOON):
                        await self._urgent.wait()
