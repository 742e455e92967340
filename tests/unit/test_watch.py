"""Watching a real directory with real sockets: each row is something that happens to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from devices import inotify
from gateway.kubelet import watch
from gateway.kubelet.identity import KubeletId
from gateway.kubelet.watch import FolderWatch, is_pinned, kubelet_id
from gateway.wires.unix import listens


class Seen:
    """What a watch called back with, awaitable."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: asyncio.Queue[tuple[str, object]] = asyncio.Queue()
        self.watch = FolderWatch(
            folder,
            folder / "gateway",
            lambda: ("x.sock", "y.sock"),
            kubelet_up=lambda kubelet: self.calls.put_nowait(("kubelet", kubelet)),
            name_lost=lambda name: self.calls.put_nowait(("lost", name)),
            peers_changed=lambda came: self.calls.put_nowait(("peers", came)),
            replaced=lambda: self.calls.put_nowait(("replaced", None)),
        )

    async def next(self, kind: str) -> object:
        async with asyncio.timeout(10):
            while True:
                found, value = await self.calls.get()
                if found == kind:
                    return value


def told(seen: Seen, kind: str) -> bool:
    """Whether that was told and not taken yet."""
    return any(seen.calls.get_nowait()[0] == kind for _ in range(seen.calls.qsize()))


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "dp" / "gateway").mkdir(parents=True)
    return folder / "dp"


@pytest.fixture(params=["inotify", "poll"])
async def seen(folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Seen]:
    if request.param == "poll":

        def refuse(**_: object) -> None:
            raise OSError(24, "inotify instance limit reached")

        monkeypatch.setattr(inotify, "INotify", refuse)
    # A poll tells in time only where it must: else what inotify doesn't tell would not be missed.
    monkeypatch.setattr(watch, "POLL_WITHOUT_INOTIFY", 0.01 if request.param == "poll" else 3600)
    one = Seen(folder)
    task = asyncio.ensure_future(one.watch.run())
    await asyncio.sleep(0)
    yield one
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as kubelet:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        kubelet.bind(str(path))
        kubelet.listen()
        yield kubelet


async def test_a_kubelet_is_told_once_it_listens(seen: Seen) -> None:
    path = seen.folder / "kubelet.sock"
    with socket.socket(socket.AF_UNIX) as kubelet:
        kubelet.bind(str(path))
        bound = kubelet_id(path)
        await asyncio.sleep(0.02)  # not awaited for its length: bound and not listening is told at no time
        assert seen.calls.empty()
        kubelet.listen()
        assert await seen.next("kubelet") == bound


async def test_a_kubelet_of_which_could_not_be_told_is_told_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "POLL", 0.01)
    one = Seen(folder)
    failures, tell = [ZeroDivisionError(), ZeroDivisionError()], one.watch._kubelet_up

    def once(kubelet: KubeletId) -> None:
        if failures:
            raise failures.pop()
        tell(kubelet)

    monkeypatch.setattr(one.watch, "_kubelet_up", once)
    asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
    task = asyncio.ensure_future(one.watch.run())
    await asyncio.sleep(0)
    with listening(folder / "kubelet.sock"):
        assert await one.next("kubelet") == kubelet_id(folder / "kubelet.sock")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _link(path: Path) -> None:
    os.link(path, path.with_name("another-name"))


def _mode(path: Path) -> None:
    path.chmod(0o600)


def _owner(path: Path) -> None:
    os.chown(path, os.getuid(), os.getgid())


@pytest.mark.parametrize("touch", [_mode, _owner, _link])
async def test_a_kubelet_socket_that_is_touched_is_no_new_one(seen: Seen, touch: Callable[[Path], None]) -> None:
    path = seen.folder / "kubelet.sock"
    with listening(path):
        first = await seen.next("kubelet")
        before = path.stat().st_ctime_ns
        while path.stat().st_ctime_ns == before:  # The clock of files ticks every few milliseconds.
            touch(path)
            path.with_name("another-name").unlink(missing_ok=True)
        seen.watch.look_now()
        assert not told(seen, "kubelet")
    with listening(path):
        assert await seen.next("kubelet") != first


async def test_new_times_alone_make_no_new_kubelet_where_inotify_tells(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, path = Seen(folder), folder / "kubelet.sock"
    task = asyncio.ensure_future(one.watch.run())
    try:
        with listening(path):
            await one.next("kubelet")
            os.utime(path, ns=(1, 1))
            one.watch.look_now()
            assert not told(one, "kubelet")
            seen = one.watch._seen
            assert seen is not None
            assert not one.watch._touched(replace(seen, device=0))  # Another mount, the same inode number.
            one.watch._created = True  # As inotify says of a socket that got the old inode number.
            one.watch.look_now()
            assert await one.next("kubelet") == kubelet_id(path)
            os.utime(path, ns=(2, 2))
            overflow = inotify.FolderEvent(-1, inotify.Q_OVERFLOW, "")  # Whatever happened, nobody tells.
            monkeypatch.setattr(inotify.INotify, "read", lambda _: [overflow])
            one.watch._read()
            assert await one.next("kubelet") == kubelet_id(path)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_socket_that_is_moved_away_touched_and_moved_back_is_no_new_kubelet(folder: Path) -> None:
    one, path = Seen(folder), folder / "kubelet.sock"
    task = asyncio.ensure_future(one.watch.run())
    try:
        with listening(path):
            first = await one.next("kubelet")
            away = path.rename(folder.parent / f"{folder.name}.away")
            assert await one.next("lost") == path.name
            os.utime(away, ns=(1, 1))
            away.rename(path)
            (folder / "gateway" / "0123abcd").mkdir()
            await one.next("peers")  # What inotify says of the socket was read before.
            assert not told(one, "kubelet")
            path.unlink()
            assert await one.next("lost") == path.name
            again = socket.socket(socket.AF_UNIX)
            with again:
                again.bind(str(path))
                again.listen()
                assert await one.next("kubelet") == kubelet_id(path) != first
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_new_socket_that_is_moved_in_with_the_number_of_a_deleted_one_is_a_new_kubelet(folder: Path) -> None:
    one, path = Seen(folder), folder / "kubelet.sock"
    task = asyncio.ensure_future(one.watch.run())
    try:
        with listening(path):
            await one.next("kubelet")
            away = folder.parent / f"{folder.name}.away"
            os.link(path, away)  # Keeps the number.
            path.unlink()
            assert await one.next("lost") == path.name
            one.watch.look_now()  # A poll may come while there is none.
            os.utime(away, ns=(1, 1))
            away.rename(path)
            assert await one.next("kubelet") == kubelet_id(path)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_creation_that_is_told_late_is_that_of_the_socket_that_was_seen(folder: Path) -> None:
    one, path = Seen(folder), folder / "kubelet.sock"
    task = asyncio.ensure_future(one.watch.run())
    await asyncio.sleep(0)
    try:
        with listening(path):
            one.watch.look_now()
            await one.next("kubelet")
            (folder / "gateway" / "0123abcd").mkdir()
            await one.next("peers")  # What inotify says of the socket was read before.
            os.utime(path, ns=(1, 1))
            one.watch.look_now()
            assert not told(one, "kubelet")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_stale_socket_is_no_kubelet_and_the_next_one_is(seen: Seen) -> None:
    with listening(seen.folder / "kubelet.sock"):
        first = await seen.next("kubelet")
    assert not listens(seen.folder / "kubelet.sock")
    with listening(seen.folder / "kubelet.sock"):
        assert await seen.next("kubelet") != first


def test_a_socket_on_which_nobody_listens_is_tried_ever_more_rarely(folder: Path) -> None:
    with listening(folder / "kubelet.sock"):
        one = Seen(folder)
    waits = []
    for _ in range(12):
        one.watch._wait = one.watch._look_for_kubelet(1.0)
        waits.append(one.watch._wait)
    assert waits[:3] == [0.05, 0.1, 0.2]
    assert waits[-1] == one.watch._poll
    one.watch._urgent_until = 2.0
    assert one.watch._look_for_kubelet(1.0) < 0.05, "something was just created"


def test_a_kubelet_that_came_while_the_one_before_was_tried_is_not_taken_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, one = folder / "kubelet.sock", Seen(folder)
    with contextlib.ExitStack() as kubelets:

        def try_and_replace(tried: Path) -> bool:
            monkeypatch.setattr(watch, "listens", listens)
            kubelets.enter_context(listening(tried))
            return True

        monkeypatch.setattr(watch, "listens", try_and_replace)
        kubelets.enter_context(listening(path))
        one.watch._look_for_kubelet(0.0)
        assert one.calls.empty()
        one.watch._look_for_kubelet(0.0)
        assert one.calls.get_nowait() == ("kubelet", kubelet_id(path))


async def test_a_deleted_name_is_told(seen: Seen) -> None:
    names = {"x.sock", "y.sock"}
    for name in names:
        (seen.folder / name).touch()
    seen.watch._look_at_names()
    for name in names:
        (seen.folder / name).unlink()
    assert {await seen.next("lost") for _ in names} == names


def test_the_folder_may_hold_any_number_of_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked for the names that matter: to list 100 000 others takes most of a second, every five seconds."""
    one, listed = Seen(folder), list[Path]()
    really = os.listdir

    def list_(path: Path) -> list[str]:
        listed.append(path)
        return really(path)

    monkeypatch.setattr(os, "listdir", list_)
    one.watch._look_at_names()
    assert listed == [folder / "gateway"]


async def test_a_poll_that_somebody_held_up_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "POLL", 0.01)
    one = Seen(folder)
    monkeypatch.setattr(one.watch, "_late", lambda late, _now: one.calls.put_nowait(("late", late)))
    task = asyncio.ensure_future(one.watch.run())
    await one.next("late")
    asyncio.get_running_loop().call_soon(time.sleep, 0.1)  # the loop's time, and somebody takes it
    while (late := await one.next("late")) is not None and cast("float", late) < 0.05:
        pass
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_gateway_that_comes_or_goes_is_told(seen: Seen) -> None:
    (seen.folder / "gateway" / "0123abcd").mkdir()
    await seen.next("peers")
    seen.watch._look_at_names()
    (seen.folder / "gateway" / "0123abcd").rmdir()
    await seen.next("peers")


async def test_a_gateway_that_came_and_went_is_told_by_its_name(folder: Path) -> None:
    """While we stood still, as after a SIGSTOP: inotify keeps what happened."""
    one, tokens = Seen(folder), {"0123abcd", "4567cdef"}
    task = asyncio.ensure_future(one.watch.run())
    await asyncio.sleep(0)
    for token in tokens:
        unseen = folder / "gateway" / f".{token}"
        unseen.mkdir()
        unseen.rename(unseen.with_name(token)).rmdir()
    assert await one.next("peers") == tokens
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_gateway_that_comes_is_told_by_its_name_where_it_is_polled_for(seen: Seen) -> None:
    seen.watch._look_at_names()
    unseen = seen.folder / "gateway" / ".0123abcd"
    unseen.mkdir()
    unseen.rename(unseen.with_name("0123abcd"))
    while "0123abcd" not in cast("frozenset[str]", await seen.next("peers")):
        pass


def test_what_was_there_before_is_no_news_where_it_is_polled_for(folder: Path) -> None:
    (folder / "gateway" / "0123abcd").mkdir()
    one = Seen(folder)
    one.watch._look_at_names()
    assert one.calls.empty()


async def test_the_gateways_folder_is_watched_again_when_it_came_anew(folder: Path) -> None:
    one, shared = Seen(folder), folder / "gateway"
    task = asyncio.ensure_future(one.watch.run())
    await asyncio.sleep(0)
    shared.rmdir()
    await one.next("peers")
    assert one.watch._poll == watch.POLL_WITHOUT_INOTIFY
    shared.mkdir()
    one.watch.look_now()
    assert one.watch._poll == watch.POLL
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_without_a_watch_on_the_folder_it_is_polled_often(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = inotify.INotify.add_watch

    def only_the_parent(self: inotify.INotify, path: Path, mask: int) -> int:
        if path != folder.parent:
            raise OSError(28, "inotify watch limit reached")
        return int(add(self, path, mask))

    one = Seen(folder)
    with monkeypatch.context() as limited, capture_logs() as log:
        limited.setattr(inotify.INotify, "add_watch", only_the_parent)
        one.watch._open_inotify()
        one.watch._check_folder()
        assert one.watch._poll == watch.POLL_WITHOUT_INOTIFY
    assert [line["folder"] for line in log] == [str(folder), str(folder / "gateway")]  # each once, not with each poll
    one.watch._check_folder()
    assert one.watch._poll == watch.POLL
    with monkeypatch.context() as limited, capture_logs() as log:
        limited.setattr(inotify.INotify, "add_watch", only_the_parent)
        one.watch._rewatch()
    assert len(log) == 2  # It was cured in between.
    one.watch.close()


def test_without_a_descriptor_nobody_listens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with listening(folder / "kubelet.sock"):
        assert listens(folder / "kubelet.sock")
        monkeypatch.setattr(socket, "socket", refuse)
        assert not listens(folder / "kubelet.sock")


async def test_a_replaced_folder_is_told_and_its_kubelet_found(seen: Seen) -> None:
    seen.folder.rename(seen.folder.with_name("old"))
    seen.folder.mkdir()
    await seen.next("replaced")
    with listening(seen.folder / "kubelet.sock"):
        assert isinstance(await seen.next("kubelet"), KubeletId)


async def test_a_folder_that_went_and_came_is_told(seen: Seen) -> None:
    shutil.rmtree(seen.folder)
    await asyncio.sleep(0.02)
    seen.folder.mkdir()
    await seen.next("replaced")


def test_a_folder_that_came_with_the_number_of_the_one_before_is_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "folder_id", lambda path: (1, 2, False) if path.is_dir() else None)
    one = Seen(folder)
    shutil.rmtree(folder)
    one.watch._check_folder()
    folder.mkdir()
    one.watch._check_folder()
    assert one.calls.get_nowait() == ("replaced", None)


def plain(path: Path) -> None:
    path.touch()


def link(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def nothing(_path: Path) -> None:
    """Leave it absent."""


@pytest.mark.parametrize("make", [plain, link, nothing, Path.mkdir])
def test_what_is_no_socket_is_no_kubelet(folder: Path, make: Callable[[Path], None]) -> None:
    make(folder / "kubelet.sock")
    assert (kubelet_id(folder / "kubelet.sock"), listens(folder / "kubelet.sock")) == (None, False)


def test_a_new_socket_with_the_old_inode_is_another_kubelet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "kubelet.sock"
    with listening(path):
        first, inode = kubelet_id(path), path.stat().st_ino
    with listening(path):
        second = kubelet_id(path)
        assert first is not None
        assert second is not None
        assert (second.device, inode, second.mtime_ns) != (first.device, second.inode, first.mtime_ns)


def test_a_full_backlog_still_listens(folder: Path) -> None:
    path = folder / "kubelet.sock"
    with socket.socket(socket.AF_UNIX) as kubelet, contextlib.ExitStack() as clients:
        kubelet.bind(str(path))
        kubelet.listen(0)
        for _ in range(4):
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(str(path))
        assert listens(path)


def test_a_deleted_folder_that_is_still_held_is_pinned(folder: Path) -> None:
    held = os.open(folder, os.O_RDONLY)
    try:
        shutil.rmtree(folder)
        assert is_pinned(Path(f"/proc/self/fd/{held}"))
    finally:
        os.close(held)
    assert not is_pinned(folder.parent)
