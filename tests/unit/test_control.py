"""The control socket: who is heard by the kernel's word, and how many sockets a command looks at."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.wires import control
from gateway.wires.control import ControlConnection, ControlError, ControlServer

OWN = 4711
GUARD_S = 10.0
"""Seconds after which a test that waits for ever is told so."""


async def _ping(connection: ControlConnection, _request: Mapping[str, Any]) -> None:
    await connection.send({"pong": True})


@pytest.mark.parametrize(
    ("user", "heard"),
    [
        pytest.param(OWN, True, id="our own user"),
        pytest.param(0, True, id="root"),
        pytest.param(OWN + 1, False, id="another user"),
    ],
)
async def test_the_kernels_word_decides(
    folder: Path, monkeypatch: pytest.MonkeyPatch, user: int, *, heard: bool
) -> None:
    asked = socket.socket.getsockopt

    def word(self: socket.socket, *what: int) -> Any:
        if what[:2] == (socket.SOL_SOCKET, socket.SO_PEERCRED):
            return struct.pack("iII", 1, user, user)
        return asked(self, *what)

    monkeypatch.setattr(os, "geteuid", lambda: OWN)
    monkeypatch.setattr(socket.socket, "getsockopt", word)
    server = ControlServer(control.socket_path(folder, "0123abcd"), {"ping": _ping})
    await server.start()
    try:
        answer = await control.ask(server.path, {"op": "ping"}, GUARD_S)
        assert (answer["pong"], heard) == (True, True)
    except ControlError:
        assert not heard
    finally:
        await server.close()


def test_so_many_sockets_are_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_MAX_SOCKETS", 2)
    with ExitStack() as open_sockets:
        for number in range(3):
            one = open_sockets.enter_context(socket.socket(socket.AF_UNIX))
            one.bind(str(folder / f"0000000{number}.sock"))
            one.listen()
        assert [path.name for path in control.sockets(folder)] == ["00000000.sock", "00000001.sock"]
