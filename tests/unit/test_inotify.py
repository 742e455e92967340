"""The kernel's news of a folder, read by our own hand: the events are the kernel's, nothing stands in for it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from devices import inotify
from devices.inotify import FolderEvent, INotify


@pytest.fixture
def watch() -> Iterator[INotify]:
    with closing(INotify()) as one:
        yield one


@pytest.mark.parametrize("name", ["a", "kubelet.sock", "ä\n", "n" * 255, os.fsdecode(b"\xff")])
def test_names_come_as_they_are(tmp_path: Path, watch: INotify, name: str) -> None:
    wd = watch.add_watch(tmp_path, inotify.CREATE | inotify.CLOSE_WRITE | inotify.DELETE | inotify.ONLYDIR)
    (tmp_path / name).write_text("")
    (tmp_path / name).unlink()
    told = [(event.wd, event.mask, event.name) for event in watch.read()]
    assert told == [(wd, mask, name) for mask in (inotify.CREATE, inotify.CLOSE_WRITE, inotify.DELETE)]
    assert watch.read() == []  # at once: nothing blocks


def test_a_move_has_two_ends(tmp_path: Path, watch: INotify) -> None:
    here, there = (tmp_path / name for name in ("here", "there"))
    here.mkdir()
    there.mkdir()
    (here / "a").write_text("")
    wds = [watch.add_watch(one, inotify.MOVED_FROM | inotify.MOVED_TO) for one in (here, there)]
    (here / "a").rename(there / "b")
    assert watch.read() == [FolderEvent(wds[0], inotify.MOVED_FROM, "a"), FolderEvent(wds[1], inotify.MOVED_TO, "b")]


def test_a_folder_that_goes_ends_its_watch(tmp_path: Path, watch: INotify) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    watch.add_watch(folder, inotify.DELETE_SELF | inotify.MOVE_SELF)
    folder.rename(tmp_path / "moved").rmdir()
    assert [event.mask for event in watch.read()] == [inotify.MOVE_SELF, inotify.DELETE_SELF, inotify.IGNORED]


def test_a_watch_that_was_removed_says_so_and_nothing_more(tmp_path: Path, watch: INotify) -> None:
    wd = watch.add_watch(tmp_path, inotify.CREATE)
    watch.rm_watch(wd)
    (tmp_path / "a").write_text("")
    assert watch.read() == [FolderEvent(wd, inotify.IGNORED, "")]


def test_many_events_take_several_reads_and_none_is_lost(tmp_path: Path, watch: INotify) -> None:
    watch.add_watch(tmp_path, inotify.CREATE)
    names = [f"{number:0200}" for number in range(400)]  # 216 bytes each: more than one read takes
    for name in names:
        (tmp_path / name).write_text("")
    reads = list(iter(watch.read, []))
    assert len(reads) > 1
    assert [event.name for events in reads for event in events] == names


def test_what_can_not_be_watched(tmp_path: Path, watch: INotify) -> None:
    with pytest.raises(FileNotFoundError):
        watch.add_watch(tmp_path / "none", inotify.CREATE)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        watch.add_watch(tmp_path / "file", inotify.CREATE | inotify.ONLYDIR)
    with pytest.raises(OSError, match="Invalid argument") as caught:
        watch.rm_watch(7)
    assert caught.value.errno == errno.EINVAL
