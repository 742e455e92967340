"""What in the kubelet's folder is a kubelet that listens, and which one: real sockets, and the kernel's answers."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.kubelet.identity import kubelet_id
from gateway.wires.unix import listens


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "dp" / "gateway").mkdir(parents=True)
    return folder / "dp"


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as kubelet:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        kubelet.bind(str(path))
        kubelet.listen()
        yield kubelet


def test_without_a_descriptor_nobody_listens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with listening(folder / "kubelet.sock"):
        assert listens(folder / "kubelet.sock")
        monkeypatch.setattr(socket, "socket", refuse)
        assert not listens(folder / "kubelet.sock")


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
