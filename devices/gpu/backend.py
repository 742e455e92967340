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
    """All GPUs of a node at one moment. The gateway treats a GPU that isn't in it as removed.

    ``gpus`` has the physical GPUs, each followed by its partitions. GPUs (UUIDs) in ``recovered`` were reset since they became
    unhealthy. The gateway has closed its handles of the GPUs in ``released``, so they may be missing in ``gpus``. GPUs in
    ``withdrawn`` were removed on purpose. ``control_nodes`` are the existing device nodes that every container with a GPU needs.
    ``resources`` are names that are offered even without a GPU. ``driver_version`` is '' if unknown. ``unusable`` are GPUs that
    the driver or the kernel reports but that aren't in ``gpus``. ``missing_nodes`` are device nodes that programs need and that
    don't exist.
    ``imex``: containers get IMEX channel 0.
    """

    gpus: tuple[GPU, ...]
    recovered: frozenset[str] = frozenset()
    released: frozenset[str] = frozenset()
    withdrawn: frozenset[str] = frozenset()
    control_nodes: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()
    driver_version: str = ""
    unusable: tuple[Unusable, ...] = ()
    missing_nodes: tuple[str, ...] = ()
    imex: bool = False


class Backend(Protocol):
    """One kind of GPU. Its methods run on the event loop and must not block it: hardware calls run in threads."""

    name: str

    @property
    def hindrance(self) -> Hindrance | None:
        """Why it sees no hardware yet, or can't use the file of simulated GPUs; None if nothing is wrong. Must not block."""

    def watch(self) -> AsyncGenerator[Sight]:
        """Yield the whole ``Sight`` once it is known, and again after each change. Never ends by itself.

        It is closed (``aclose``) when it is no longer needed, and then frees its threads, handles and files. If it can't see
        its hardware yet (a driver still loads), it yields nothing and keeps trying. If it loses sight of the hardware, it
        yields the last known GPUs, each marked unhealthy.

        Raises:
            GiveUpError: this process can't go on. The message is shown to the operator.
        """

    async def release(self, uuids: Collection[str]) -> None:
        """Release these GPUs (UUIDs of physical ones; none means all), so that they can be reset or partitioned.

        They are ``released`` from now on. A second call changes nothing.
        """

    async def acquire(self, uuids: Collection[str]) -> None:
        """Use these GPUs again (none means all)."""
