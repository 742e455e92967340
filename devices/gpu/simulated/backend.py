"""The simulated backend: a profile describes the GPUs of a node, and they change when a person edits it.

It is for trying the gateway without a GPU, and for tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Final

import structlog

from devices.files import FileWatch
from devices.gpu.amd.vendor import AMD
from devices.gpu.asked import Asked
from devices.gpu.backend import Sight
from devices.gpu.nvidia.vendor import NVIDIA
from devices.gpu.simulated.document import ProfileError
from devices.gpu.simulated.profile import find, parse, read
from devices.gpu.vendor import Vendor
from devices.model import ContainerAnswer
from devices.source import Hindrance


class _Others(Vendor):
    """Simulated GPUs of any other vendor: a container gets their device nodes, if the profile has any."""

    name = "simulated"

    def answer(self, asked: Asked) -> ContainerAnswer:
        asked.require_known("device nodes")
        return super().answer(asked) if any(gpu.device_nodes for gpu in asked.known) else ContainerAnswer()

    again = answer


VENDORS: Final[Sequence[Vendor]] = (NVIDIA, AMD, _Others())
"""The vendors whose GPUs a profile can describe."""

_log = structlog.get_logger()


class SimulatedBackend:
    """A ``Backend`` over a profile: a shipped one, or a file that people edit.

    If the profile is wrong or missing, the GPUs stay as before, "profile rejected" is logged, and ``hindrance`` has the reason.

    Args:
        profile: its name or path.

    Raises:
        ProfileError: there is neither such a shipped profile nor such a file.
    """

    name = "simulated"

    def __init__(self, profile: str = "default") -> None:
        self._path = find(profile)
        self._content: bytes | None = None
        self._rejected = ""
        self._profile: Mapping[str, Sight] | None = None
        self._released: frozenset[str] = frozenset()
        self._news = asyncio.Event()

    @property
    def hindrance(self) -> Hindrance | None:
        """Why the profile isn't used, and what is used instead; None if it is used."""
        if not self._rejected:
            return None
        before = (
            "there are no devices" if self._profile is None else "until it is corrected the one before stays in force"
        )
        return Hindrance(self.name, f"profile rejected, {before}: {self._rejected}")

    async def watch(self) -> AsyncGenerator[Sight]:
        """Yield the GPUs of the profile, and again after each edit that changes them."""
        last: Sight | None = None
        with FileWatch(self._path) as file:
            while True:
                self._look()
                if self._rejected:
                    file.look_again()
                sight = None if self._profile is None else self._sight()
                if sight is not None and sight != last:
                    last = sight
                    yield sight
                await file.changed_or(self._news)
                self._news.clear()

    async def release(self, uuids: Collection[str]) -> None:
        """Report these GPUs (none means all) as released."""
        self._released |= frozenset(uuids) or frozenset(gpu.board for gpu in self._sight().gpus)
        self._news.set()

    async def acquire(self, uuids: Collection[str]) -> None:
        """Report these GPUs (none means all) as the profile describes them again."""
        self._released -= frozenset(uuids) or self._released
        self._news.set()

    def _sight(self) -> Sight:
        described = self._profile or {}
        return Sight(
            gpus=tuple(gpu for one in described.values() for gpu in one.gpus),
            recovered=frozenset().union(*(one.recovered for one in described.values())),
            released=self._released.union(*(one.released for one in described.values())),
            withdrawn=frozenset().union(*(one.withdrawn for one in described.values())),
            resources=tuple(described),
        )

    def _look(self) -> None:
        """Read the profile; use it if it is valid."""
        try:
            content = read(self._path)
            if content == self._content:
                return
            self._profile = parse(content, str(self._path))
        except ProfileError as error:
            self._content = None
            if str(error) != self._rejected:
                _log.warning("profile rejected", path=str(self._path), reason=str(error), kept=self._counts())
            self._rejected = str(error)
            return
        self._content, self._rejected = content, ""
        _log.info("profile read", path=str(self._path), gpus=self._counts())

    def _counts(self) -> dict[str, int]:
        return {resource: len(one.gpus) for resource, one in (self._profile or {}).items()}
