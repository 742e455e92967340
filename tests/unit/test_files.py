"""Files: what is written whole, what is read of them, and what a crash may leave."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from devices import files
from devices.files import NotPlainError, read_plain


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "profile.yaml"
    found.write_text("a")
    return found


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
