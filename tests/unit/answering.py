"""Gateways that aren't there: control sockets that answer as a test says, for what the command line asks of a node."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gateway.wires import control

GUARD = 20.0
"""Seconds after which a test that waits for ever is told so."""
_ROUNDS = 5
"""Of the loop, in which a connection that came just before the end is taken: asyncio would lose it with the listener."""


@dataclass(frozen=True)
class By:
    """What a gateway says to each operation."""

    operation: Mapping[str, Any]


@contextlib.contextmanager
def gateways(folder: Path, says: Mapping[str, Any], *operations: str) -> Iterator[dict[str, dict[str, Any]]]:
    """Answer each of ``operations`` with what ``says`` has for a gateway's token; yield what each was asked last.

    They run in a thread with a loop of its own. A ``ControlError`` is raised, anything else is sent as JSON; ``By`` has an
    answer for each operation.
    """
    asked: dict[str, dict[str, Any]] = {}
    ready, loop, ended = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    def answer(token: str) -> control.Handler:
        async def handle(connection: control.ControlConnection, request: dict[str, Any]) -> None:
            asked[token] = request
            said = says[token].operation[request["op"]] if isinstance(says[token], By) else says[token]
            if isinstance(said, control.ControlError):
                raise said
            await connection.send(msgspec.to_builtins(said))

        return handle

    async def serve() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for token in says:
                handlers = dict.fromkeys(operations, answer(token))
                server = control.ControlServer(control.socket_path(folder, token), handlers)
                await server.start()
                stack.push_async_callback(server.close)
            ready.set()
            await ended.wait()
            for _ in range(_ROUNDS):
                await asyncio.sleep(0)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(GUARD)
        yield asked
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(GUARD)
        loop.close()
