"""The simulated backend: a node whose GPUs are written in a profile, and change when someone edits it.

It is how everything else can be tried without a GPU: users meet it first, tests and the laboratory use it too.
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
from devices.gpu.simulated.profile import Described, UnreadableProfileError, find, parse, read
from devices.gpu.vendor import Vendor
from devices.model import ContainerAnswer
from devices.source import Hindrance


class _Others(Vendor):
    """Simulated GPUs of any other vendor: a container starts with their device nodes, where the profile says some."""

    name = "simulated"

    def answer(self, asked: Asked) -> ContainerAnswer:
        asked.require_known("device nodes")
        return super().answer(asked) if any(gpu.device_nodes for gpu in asked.known) else ContainerAnswer()

    again = answer


VENDORS: Final[Sequence[Vendor]] = (NVIDIA, AMD, _Others())
"""Whose GPUs a profile can describe."""

_log = structlog.get_logger()


class SimulatedBackend:
    """A ``Backend`` over a profile: a shipped one's name, which stays as it is, or the path of one to be edited.

    A profile that is wrong, or gone, is logged as "profile rejected" with the reason, which ``hindrance`` says, too, and what was known
    before stays (at first: nothing).

    Args:
        profile: its name or path.

    Raises:
        ProfileError: there is neither such a shipped profile nor such a file.
    """

    name = "simulated"

    def __init__(self, profile: str = "default") -> None:
        self._path, self._edited = find(profile)
        self._content: bytes | None = None
        self._rejected = ""
        self._profile: Mapping[str, Described] | None = None
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
        """Yield what the profile says, and again after each edit that changes it."""
        if not self._edited:
            self._look()
            while True:
                yield self._sight()
                await self._news.wait()
                self._news.clear()
        last: Sight | None = None
        with FileWatch(self._path) as file:
            while True:
                if not self._look():
                    file.look_again()
                sight = None if self._profile is None else self._sight()
                if sight is not None and sight != last:
                    last = sight
                    yield sight
                await file.changed_or(self._news)
                self._news.clear()

    async def release(self, uuids: Collection[str]) -> None:
        """Do as if nobody could look at these GPUs."""
        self._released |= frozenset(uuids) or frozenset(gpu.board for gpu in self._sight().gpus)
        self._news.set()

    async def acquire(self, uuids: Collection[str]) -> None:
        """Look at these GPUs again."""
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

    def _look(self) -> bool:
        """Take over the profile as it is now, if it is to be used; False where it could not be read."""
        try:
            content = read(self._path)
            if content == self._content:
                return True
            self._content = content
            self._profile = parse(content, str(self._path))
        except ProfileError as error:
            self._content = None
            if str(error) != self._rejected:
                _log.warning("profile rejected", path=str(self._path), reason=str(error), kept=self._counts())
            self._rejected = str(error)
            return not isinstance(error, UnreadableProfileError)
        self._rejected = ""
        _log.info("profile read", path=str(self._path), gpus=self._counts())
        return True

    def _counts(self) -> dict[str, int]:
        return {resource: len(one.gpus) for resource, one in (self._profile or {}).items()}
