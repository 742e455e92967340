"""Files: what is written whole, what a crash may leave, and what counts as a change of one that is watched."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from devices import files, inotify
from devices.files import FileWatch, NotPlainError, read_plain
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
        async with asyncio.timeout(files._POLL_S * 0.9):  # by an event, not by the poll
            await waiting


async def test_what_is_beside_the_file_is_no_change(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a poll that finds it as it was when the watch began."""
    polls: list[object] = []
    fingerprint = files._fingerprint
    several = asyncio.Event()

    def counted(of: Path) -> tuple[int, int, int, int] | None:
        polls.append(of)
        if len(polls) == 4:
            several.set()
        return fingerprint(of)

    monkeypatch.setattr(files, "_POLL_S", 0.01)
    monkeypatch.setattr(files, "_fingerprint", counted)
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
    monkeypatch.setattr(files, "_POLL_ALONE_S", 0.01)
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
    monkeypatch.setattr(files, "_POLL_ALONE_S", 0.01)
    with FileWatch(path) as watch:
        watch.look_again()
        async with asyncio.timeout(files._POLL_S * 0.9):
            await watch.changed()


def test_only_so_much_of_a_file_is_read_and_only_of_a_file(path: Path, tmp_path: Path) -> None:
    path.write_text("x" * 100)
    assert [len(read_plain(path, most)) for most in (10, 99, 100, 200)] == [11, 100, 100, 100]
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(NotPlainError):
        read_plain(fifo, 10)


# Written as a whole.


@pytest.mark.parametrize(("mode", "mask"), [(0o600, 0o000), (0o644, 0o022), (0o644, 0o077)])
@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_for_whom_it_is_meant(path: Path, mode: int, mask: int, durable: bool) -> None:
    before = os.umask(mask)
    try:
        written = files.replace(path, b"new", mode, durable=durable)
    finally:
        os.umask(before)
    assert written == path.stat()  # Before it is read, which may change one of its times.
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", mode)
    assert os.listdir(path.parent) == [path.name]  # noqa: PTH208 - nothing was left behind


def test_a_file_is_whole_though_the_system_takes_it_in_pieces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    files.replace(path, b"0123456789")
    assert path.read_bytes() == b"0123456789"


def test_a_link_is_replaced_and_not_followed(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    files.replace(link, b"new")
    assert (link.is_symlink(), link.read_bytes(), path.read_bytes()) == (False, b"new", b"a")


def test_what_reads_the_file_meanwhile_has_the_old_one_whole(path: Path) -> None:
    with path.open("rb") as reader:
        files.replace(path, b"new")
        assert (reader.read(), path.read_bytes()) == (b"a", b"new")


@pytest.mark.parametrize(("call", "flushed"), [("write", []), ("fchmod", []), ("fsync", []), ("replace", ["file"])])
def test_a_write_that_fails_leaves_the_file_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str, flushed: list[str]
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda _: seen.append("file"))

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(OSError, match="No space left"):
        files.replace(path, b"new")
    monkeypatch.undo()
    assert (path.read_bytes(), seen) == (b"a", flushed)
    assert os.listdir(path.parent) == [path.name]  # noqa: PTH208 - as above


@pytest.mark.parametrize(("durable", "flushes"), [(True, ["file", "replace", "file"]), (False, ["replace"])])
def test_a_durable_file_is_on_disk_before_its_name_is(
    path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool, flushes: list[str]
) -> None:
    seen: list[str] = []
    replace = os.replace

    def named(old: Path, new: Path) -> None:
        seen.append("replace")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", lambda _: seen.append("file"))
    monkeypatch.setattr(os, "replace", named)
    files.replace(path, b"new", durable=durable)
    assert seen == flushes


@pytest.mark.parametrize(
    ("name", "age_s", "goes"),
    [
        (".profile.yaml.0123abcd.new", 61, True),
        (".profile.yaml.0123abcd.new", 5, False),
        (".other.yaml.0123abcd.new", 61, False),
        (".profile.yaml.0123abc.new", 61, False),
        (".profile.yaml.0123abcx.new", 61, False),
        ("profile.yaml.0123abcd.new", 61, False),
        (".profile.yaml.0123abcd.tmp", 61, False),
    ],
)
def test_what_a_crash_left_is_swept(path: Path, name: str, age_s: float, goes: bool) -> None:
    leftover = path.with_name(name)
    leftover.write_text("half")
    os.utime(leftover, (time.time() - age_s,) * 2)
    files.sweep(path.parent, path.name)
    assert leftover.exists() is not goes
    files.sweep(path.parent / "none")


def test_what_another_user_left_is_not_swept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leftover = path.with_name(".profile.yaml.0123abcd.new")
    leftover.touch()
    os.utime(leftover, (0, 0))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    files.sweep(path.parent)
    assert leftover.exists()


@pytest.mark.parametrize("make", [Path.mkdir, lambda leftover: leftover.symlink_to("/")])
def test_what_is_no_file_is_not_swept(path: Path, make: Callable[[Path], None]) -> None:
    leftover = path.with_name(".profile.yaml.0123abcd.new")
    make(leftover)
    os.utime(leftover, (0, 0), follow_symlinks=False)
    files.sweep(path.parent)
    assert os.path.lexists(leftover)
