"""How much of GPUs is remembered at most: nothing outside shows it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, cast

import pytest

from devices.gpu import source
from devices.gpu.backend import Sight
from devices.gpu.model import GPU
from devices.gpu.simulated.backend import VENDORS
from devices.gpu.source import GPUSource
from devices.policy import Policy
from devices.source import Absence

NVIDIA = "nvidia.com/gpu"


class Watched:
    """A source over a backend whose sights a test sets."""

    name, hindrance = "test", None

    def __init__(self) -> None:
        self.sights: asyncio.Queue[Sight] = asyncio.Queue()
        self.source = GPUSource(cast("Any", self), Policy(), VENDORS)
        self.inventories: AsyncIterator[Any] = self.source.watch()

    async def watch(self) -> AsyncGenerator[Sight]:
        while True:
            yield await self.sights.get()

    async def sees(self, *gpus: GPU) -> None:
        self.sights.put_nowait(Sight(gpus))
        async with asyncio.timeout(10):
            await anext(self.inventories)


def gpu(index: int) -> GPU:
    return GPU(f"GPU-{index}", index, index, resource=NVIDIA, pci=f"0000:0{index}:00.0")


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    one = Watched()
    async with aclosing(cast("Any", one.inventories)):
        yield one


async def test_what_is_remembered_of_gpus_that_went_is_bounded(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latest are, and one that was seen again is one of these."""
    monkeypatch.setattr(source, "_MAX_REMEMBERED", 3)
    for there in ([gpu(0), gpu(1)], [gpu(0), gpu(2)], [gpu(3)]):
        await watched.sees(*there)
    assert [*watched.source._known] == ["GPU-0", "GPU-2", "GPU-3"]
    assert watched.source.absence("old.com/name", "GPU-0") is Absence.WITHDRAWN
    assert watched.source.absence("old.com/name", "GPU-1") is Absence.UNKNOWN
