"""Where the bridge meets what else happens on a node: rivals, renames, own devices, a second gateway, a relabelled folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.bridge import memory


async def test_a_disk_that_fails_is_told_of_once_until_it_works_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = iter([OSError("full"), OSError("full"), OSError("read-only"), None, OSError("read-only")])

    def save(*_: object) -> None:
        if (error := next(written)) is not None:
            raise error

    monkeypatch.setattr(memory, "save", save)
    monkeypatch.setattr(memory, "SAVE_SOON_S", 0.0)
    one = memory.PluginsFile(folder, lambda: ())
    running = asyncio.ensure_future(one.run())
    with capture_logs() as told:
        for _ in range(5):
            await one.durable()
    running.cancel()
    assert [line["reason"] for line in told] == ["full", "read-only", "read-only"]
