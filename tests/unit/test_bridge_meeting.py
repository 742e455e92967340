"""Where the bridge meets what else happens on a node: rivals, renames, own devices, a second gateway, a relabelled folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from devices.model import Device, Options
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


@pytest.mark.parametrize("wrong", ["", "x" * 254, "a\n"])
def test_saved_devices_that_no_list_may_have_make_the_file_damaged(folder: Path, wrong: str) -> None:
    for device_id, is_known in (("a", True), (wrong, False)):
        one = memory.Plugin("x.y/z", "device-plugins", "z.sock", "v1beta1", (Device(device_id),), Options())
        memory.save(folder, (one,))
        plugins, fault = memory.load(folder)
        assert (plugins == (one,), "is damaged" in fault) == (is_known, not is_known)
