"""What the tests that need an API server share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import trustme

from gateway.kubernetes import watch
from gateway.kubernetes.client import Client
from tests.fakes.apiserver import ApiServer


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    """Who signs the stand-ins' certificates: made once, it costs some milliseconds."""
    return trustme.CA()


@pytest.fixture
async def server(authority: trustme.CA, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    monkeypatch.setattr(watch, "RETRY_S", 0.01)
    async with ApiServer(authority) as one:
        yield one


@pytest.fixture
async def api(server: ApiServer) -> AsyncIterator[Client]:
    client = Client(server.access(), manager="test")
    yield client
    client.close()


def node(labels: dict[str, str] | None = None, **more: str) -> dict[str, Any]:
    return {"metadata": {"labels": {**(labels or {}), **more}}}


async def until(true: Callable[[], object]) -> None:
    """Wait until something is true that tells nobody."""
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.005)
