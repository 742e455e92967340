"""The daemon's own words for gRPC."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.wires import rpc


async def test_a_closed_channel_says_so(folder: Path) -> None:
    channel = rpc.Channel(folder / "nobody.sock")
    await channel.close()
    with pytest.raises(rpc.ClosedError):
        await channel.call("/v1beta1.DevicePlugin/Allocate", seconds=20)
    with pytest.raises(rpc.ClosedError):
        channel.stream("/v1beta1.DevicePlugin/ListAndWatch")
