"""A watch on one file: what counts as a change, and what doesn't."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from devices import filewatch, inotify
from devices.filewatch import FileWatch, NotPlainError, read_plain
from devices.inotify import FolderEvent

GUARD_S = 10.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "profile.yaml"
    found.write_text("a")
    return found


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_text("b")
    other.rename(path)


def made(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("b")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda path: path.write_text("b"), id="written"),
        pytest.param(lambda path: path.unlink(), id="removed"),
        pytest.param(replaced, id="replaced"),
    ],
)
async def test_a_change_is_told(path: Path, change: Callable[[Path], object]) -> None:
    with FileWatch(path) as watch:
        waiting = asyncio.ensure_future(watch.changed())
        await asyncio.sleep(0)
        change(path)
        async with asyncio.timeout(filewatch._POLL_S * 0.9):  # by an event, not by the poll
            await waiting


async def test_what_is_beside_the_file_is_no_change(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a poll that finds it as it was when the watch began."""
    polls: list[object] = []
    fingerprint = filewatch._fingerprint
    several = asyncio.Event()

    def counted(of: Path) -> tuple[int, int, int, int] | None:
        polls.append(of)
        if len(polls) == 4:
            several.set()
        return fingerprint(of)

    monkeypatch.setattr(filewatch, "_POLL_S", 0.01)
    monkeypatch.setattr(filewatch, "_fingerprint", counted)
    with FileWatch(path) as watch:
        waiting = asyncio.ensure_future(watch.changed())
        path.with_name("other").write_text("b")
        async with asyncio.timeout(GUARD_S):
            await several.wait()
        assert not waiting.done()
        waiting.cancel()


class Told:
    """An inotify that says what a test wants."""

    def __init__(self, *events: FolderEvent) -> None:
        self.events, self.closed = events, False

    def read(self) -> tuple[FolderEvent, ...]:
        return self.events

    def fileno(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("mask", "name", "change"),
    [
        pytest.param(inotify.CLOSE_WRITE, "profile.yaml", True, id="the file"),
        pytest.param(inotify.CLOSE_WRITE, "other", False, id="another"),
        pytest.param(inotify.MOVED_TO, "..data", True, id="the link that the kubelet swaps"),
        pytest.param(inotify.Q_OVERFLOW, "", True, id="more events than fit: it may be any"),
        pytest.param(inotify.MOVE_SELF, "", True, id="the folder was renamed"),
        pytest.param(inotify.IGNORED, "", True, id="the folder is gone"),
    ],
)
async def test_what_an_event_means(path: Path, mask: int, name: str, change: bool) -> None:
    with FileWatch(path) as watch:
        watch._detach()
        watch._inotify = told = Told(FolderEvent(1, mask, name))
        watch._read()
        assert watch._changed.is_set() is change
        assert told.closed is (name == "" and mask != inotify.Q_OVERFLOW)  # A folder that is gone is watched anew.


async def test_a_folder_that_is_made_anew_is_watched_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filewatch, "_POLL_ALONE_S", 0.01)
    with FileWatch(path) as watch:
        path.parent.rename(path.parent.with_name("away"))
        async with asyncio.timeout(GUARD_S):
            await watch.changed()
            waiting = asyncio.ensure_future(watch.changed())
            made(path)
            await waiting
            pending = asyncio.ensure_future(watch.changed())
            while watch._inotify is None:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.005)
            pending.cancel()


@pytest.mark.parametrize("ordered", [True, False])
async def test_who_waits_for_a_change_or_an_order_leaves_nothing_behind(path: Path, ordered: bool) -> None:
    order = asyncio.Event()
    with FileWatch(path) as watch:
        before = asyncio.all_tasks()
        waiting = asyncio.ensure_future(watch.changed_or(order))
        await asyncio.sleep(0)
        if ordered:
            order.set()
        else:
            replaced(path)
        async with asyncio.timeout(GUARD_S):
            await waiting
            while asyncio.all_tasks() - before:  # noqa: ASYNC110 - they end on their own
                await asyncio.sleep(0)


async def test_what_could_not_be_read_is_looked_at_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filewatch, "_POLL_ALONE_S", 0.01)
    with FileWatch(path) as watch:
        watch.look_again()
        async with asyncio.timeout(filewatch._POLL_S * 0.9):
            await watch.changed()


def test_only_so_much_of_a_file_is_read_and_only_of_a_file(path: Path, tmp_path: Path) -> None:
    path.write_text("x" * 100)
    assert [len(read_plain(path, most)) for most in (10, 99, 100, 200)] == [11, 100, 100, 100]
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(NotPlainError):
        read_plain(fifo, 10)
