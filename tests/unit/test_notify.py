"""What a service manager is told, on a socket that is listened to as it does."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.wires import notify

GUARD = 30.0
"""Seconds after which a test that waits for ever is told so."""


@contextlib.contextmanager
def manager(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)
        listener.setblocking(False)
        yield listener


def test_a_word_reaches_a_manager_by_path_or_by_an_abstract_name(folder: Path) -> None:
    with manager(str(folder / "n")) as by_path, manager(f"\0{folder}/n") as by_name:
        notify.tell(notify.READY, {"NOTIFY_SOCKET": str(folder / "n")})
        notify.tell(notify.ALIVE, {"NOTIFY_SOCKET": f"@{folder}/n"})
        assert (by_path.recv(100), by_name.recv(100)) == (b"READY=1", b"WATCHDOG=1")


def test_a_manager_that_does_not_read_is_not_waited_for(folder: Path) -> None:
    with manager(str(folder / "n")):
        for _ in range(1000):
            notify.tell(notify.ALIVE, {"NOTIFY_SOCKET": str(folder / "n")})


@pytest.mark.parametrize("name", [None, "", "/nowhere/n", "@nobody", "x" * 200])
def test_without_a_manager_nothing_happens(name: str | None) -> None:
    notify.tell(notify.READY, {} if name is None else {"NOTIFY_SOCKET": name})


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "00"}, None),
        ({"WATCHDOG_USEC": "1"}, 0.05),
        ({"WATCHDOG_USEC": "-1"}, None),
        ({"WATCHDOG_USEC": "1.5"}, None),
        ({"WATCHDOG_USEC": "٣٠٠٠٠٠٠٠"}, None),
        ({"WATCHDOG_USEC": "9" * 15}, 999999999999999 / 2e6),
        ({"WATCHDOG_USEC": "9" * 400}, None),
        ({"WATCHDOG_USEC": "9" * 5000}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_how_often_it_wants_a_sign_of_life(environment: dict[str, str], seconds: float | None) -> None:
    assert notify.watchdog(environment) == seconds
