"""The kubelet's connections, which the parent of a pair keeps open a moment longer than the gateway that had them lives.

A kubelet has no device of ours from the end of a connection until another gateway's list comes. One that takes a Register while
an earlier stream lives (1.37 and later) needn't see that end before. A living gateway ends its connections as ever: gRPC shuts
them down before it closes them.

Nobody answers what the kubelet calls over them meanwhile. When another gateway serves, the path that the kubelet calls leads to that
one, and a GOAWAY tells the kubelet's gRPC which calls weren't processed: it makes them again, there. Where the dead gateway had sent
half of a frame, the GOAWAY is taken for the rest of it, and those calls fail as the connection ends.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from gateway.wires import notify

LONGER: Final = 1.0
"""Seconds for which connections outlive their gateway: another one serves after some 25 ms, on a busy node after hundreds. A call that is
still open when they have passed fails."""
MOST: Final = 8
"""Connections of one resource that are kept. The kubelet has one; where strangers have more, none is."""
WORD: Final = "X_CONNECTIONS="
"""How the word begins with which they come; the resource's name and the path that the kubelet calls follow."""
LISTS: Final = 3
"""The number of a kubelet's ListAndWatch among the streams of its connection: it asks for the options before."""
GOAWAY: Final = struct.pack(">HBBBIII", 0, 8, 7, 0, 0, LISTS, 0)
"""The HTTP/2 frame (RFC 9113, 6.8): streams with a higher number weren't processed; the others go on."""
_ITEM: Final = array.array("i").itemsize
SPACE: Final = socket.CMSG_SPACE(MOST * _ITEM)
"""Bytes of what comes beside the word."""


def lend(resource: str, endpoint: Path, address: str) -> None:
    """Give the parent the connections accepted at a Unix socket's ``address``, instead of those it has of ``resource``. Never raises.

    Its kubelet calls it at ``endpoint``.
    """
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(one) for one in accepted(address)]
        few = [one.fileno() for one in found] if len(found) <= MOST else []
        notify.tell(f"{WORD}{resource} {endpoint}", descriptors=few)


def accepted(address: str) -> list[socket.socket]:
    """Give this process's connections that were accepted at a Unix socket's address, each with a descriptor of its own."""
    found: dict[int, socket.socket] = {}
    for entry in Path("/proc/self/fd").iterdir():
        # What read the folder is listed, too, and its number may be that of a copy by now.
        if (number := int(entry.name)) not in found and (one := _copied(number, address)):
            found[one.fileno()] = one
    return [*found.values()]


def _copied(number: int, address: str) -> socket.socket | None:
    try:
        copy = os.dup(number)
    except OSError:  # It was closed meanwhile.
        return None
    try:
        one = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    with contextlib.suppress(OSError):
        if one.getsockname() == address:
            one.getpeername()  # Who listens has none.
            return one
    one.close()
    return None


def received(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """Give the descriptors that came with a word."""
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data)
    return found.tolist()


class Connections:
    """The connections of one gateway, as its parent has them."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[Path, list[int]]] = {}
        self._led: set[str] = set()

    def take(self, word: str, descriptors: list[int]) -> None:
        """Keep what came with a word, instead of what came of the same resource before."""
        resource, _, endpoint = word.removeprefix(WORD).partition(" ")
        close(self._of.pop(resource, (None, ()))[1])
        self._of[resource] = Path(endpoint), descriptors

    def lead_to(self, other: Connections) -> None:
        """Have calls that nobody answered made again, to the gateway that has connections of the same resource now. Once for each."""
        for resource in (self._of.keys() & other._of.keys()) - self._led:
            self._led.add(resource)
            endpoint, descriptors = self._of[resource]
            with contextlib.suppress(OSError):  # Its name is gone, or it had none of its own.
                endpoint.unlink()
                os.link(other._of[resource][0], endpoint)
                for one in descriptors:
                    with contextlib.suppress(OSError):  # Its other end is gone.
                        os.write(one, GOAWAY)

    def close(self) -> None:
        """Have them end."""
        for resource in [*self._of]:
            close(self._of.pop(resource)[1])


def close(descriptors: Iterable[int]) -> None:
    """Close descriptors."""
    for one in descriptors:
        os.close(one)
