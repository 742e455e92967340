"""The interface of a GPU backend: it finds GPUs, watches them and knows their device nodes.

``devices.gpu.source`` does the rest for every vendor: resource names, replicas, answers and choices. A vendor's backend is one
class that fits ``Backend``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from typing import Protocol

from msgspec import Struct

from devices.gpu.model import GPU
from devices.source import Hindrance, Unusable


class Sight(Struct, frozen=True):
    """All GPUs of a node at one moment. It is complete: a GPU that isn't in it doesn't exist.

    ``gpus`` has the physical GPUs, each followed by its partitions. GPUs (UUIDs) in ``recovered`` were reset since they became
    unhealthy. GPUs in ``released`` are closed now, and may be missing in ``gpus``. GPUs in ``withdrawn`` were removed on
    purpose. ``control_nodes`` are the existing device nodes that every container with a GPU needs. ``resources`` are names that
    are offered even without a GPU. ``driver`` is the driver's version, '' if unknown. ``unusable`` are GPUs that the driver or
    the kernel reports but that aren't in ``gpus``. ``missing`` are device nodes that programs need and that don't exist.
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
    """One kind of GPU. Its methods run on the event loop and must not block it: hardware calls belong into threads."""

    name: str

    @property
    def hindrance(self) -> Hindrance | None:
        """Why it sees no hardware yet, or can't use its profile; None if nothing is wrong. Must not block."""

    def watch(self) -> AsyncGenerator[Sight]:
        """Yield the whole ``Sight`` once it is known, and again after each change. Never ends by itself.

        It is closed (``aclose``) when it is no longer needed, and then frees its threads, handles and files. If it can't see
        its hardware yet (a driver still loads), it yields nothing and keeps trying. If it can't see it any more, it yields the
        last GPUs, each with a trouble.

        Raises:
            GiveUpError: this process can't go on. The message is for a person.
        """

    async def release(self, uuids: Collection[str]) -> None:
        """Release these GPUs (UUIDs of physical ones; none means all), so that they can be reset or partitioned.

        They are ``released`` from now on. A second call changes nothing.
        """

    async def acquire(self, uuids: Collection[str]) -> None:
        """Use these GPUs again (none means all)."""
