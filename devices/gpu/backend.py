"""What stands beneath the GPU model: a backend finds GPUs, watches them and knows their device nodes, nothing else.

Names of resources, replicas, answers and choices are made above it, once for every vendor (``devices.gpu.source``). A
vendor is one module with one class that fits ``Backend``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from typing import Protocol

from msgspec import Struct

from devices.gpu.model import GPU
from devices.source import Hindrance, Unusable


class Sight(Struct, frozen=True):
    """All GPUs of a node as one look found them; always whole: what isn't in it is not there.

    ``gpus`` holds physical GPUs and, after each, its partitions. A GPU in ``recovered`` (UUIDs) was reset since it fell ill;
    one in ``released`` can't be looked at now, and needn't be in ``gpus``; one in ``withdrawn`` was taken away on purpose.
    ``control_nodes`` are device nodes that a container with any of the GPUs needs besides theirs, as far as they exist.
    ``resources`` are names that are offered although they may have no GPU now. ``driver`` is the driver's version, for
    people, '' where it isn't known. ``unusable`` are GPUs that the driver or the kernel has and that aren't in ``gpus``.
    ``missing`` are device nodes that aren't there: programs that need one of them fail.
    ``imex``: containers get IMEX channel 0.
    """

    gpus: tuple[GPU, ...]
    recovered: frozenset[str] = frozenset()
    released: frozenset[str] = frozenset()
    withdrawn: frozenset[str] = frozenset()
    control_nodes: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()
    driver: str = ""
    unusable: tuple[Unusable, ...] = ()
    missing: tuple[str, ...] = ()
    imex: bool = False


class Backend(Protocol):
    """One kind of GPU. Its methods run on the event loop and must not block it: hardware calls live in threads."""

    name: str

    @property
    def hindrance(self) -> Hindrance | None:
        """Why it sees no hardware yet, or doesn't use its profile; None if nothing is wrong. Must not block."""

    def watch(self) -> AsyncGenerator[Sight]:
        """Yield what is there as soon as it is known, and again, whole, after each change; for ever.

        It is closed (``aclose``) when it is no longer wanted, and then lets go of what it holds: threads, handles, files.
        A backend that can't see its hardware now (a driver still loading) yields nothing yet and keeps trying; one that
        could, and can't any more, yields what it saw last with troubles that say so.

        Raises:
            GiveUpError: this process can't go on, for a reason that a person must read.
        """

    async def release(self, uuids: Collection[str]) -> None:
        """Let go of these GPUs (UUIDs of physical ones; none means all), so that they can be reset or partitioned.

        They are ``released`` from now on. Doing it twice does no harm.
        """

    async def acquire(self, uuids: Collection[str]) -> None:
        """Look at these GPUs again (none means all), and say so."""
