"""A stand-in for another vendor's DRA driver: it registers like one, prepares every claim, and records what it was asked.

As a process: ``python -m tests.fakes.dradriver SOCKET DRIVER RECORD``. It ends on SIGTERM and takes its socket away.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from devices.claims import Answer, ClaimName, DeviceHealth, Prepared, Refused
from gateway.dra.service import Service


class OtherDriver:
    """Another driver's claims (``service.Claims``). What it prepared is in its record, as in the checkpoint of NVIDIA's driver."""

    def __init__(self, name: str, record: Path) -> None:
        self.name, self._record = name, record
        self.news, self.decides = asyncio.Event(), asyncio.Event()
        self.decides.set()
        self.prepared: list[str] = json.loads(record.read_text()) if record.exists() else []

    def _keep(self) -> None:
        self._record.write_text(json.dumps(self.prepared))

    async def prepare(self, claim: ClaimName) -> Answer:
        if claim.uid not in self.prepared:
            self.prepared.append(claim.uid)
            self._keep()
        return (Prepared(("gpu",), "n1", "gpu-0", ("theirs.example.com/gpu=0",)),)

    async def unprepare(self, claim: ClaimName) -> Refused | None:
        if claim.uid in self.prepared:
            self.prepared.remove(claim.uid)
            self._keep()
        return None

    def health(self) -> Sequence[DeviceHealth]:
        return ()

    def answered(self, claim: ClaimName, refused: str) -> None:
        """Take note of why a claim's devices were refused."""

    def registered(self, reason: str) -> None:
        """Take note of what the kubelet made of the registration."""


async def _run(path: Path, name: str, record: Path) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    service = Service(OtherDriver(name, record))
    await service.start(path)
    await ended.wait()
    await service.stop()


if __name__ == "__main__":
    Path(sys.argv[1]).unlink(missing_ok=True)  # A process that was killed left it.
    asyncio.run(_run(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
