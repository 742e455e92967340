"""An emulated kubelet as a process: JSON lines on stdin and stdout, the same as a genuine one speaks.

The protocol is described in ``gateway_lab/kubelets/driver/README.md``; two ops are for emulated kubelets alone:

- ``fault`` with ``faults``, a ``gateway_lab.kubelets.kubelet.Faults``: what goes wrong from now on (possible before ``start``).
- ``cut`` with ``resource``: the connection to its plugin breaks once, from the kubelet's side.

``python -m gateway_lab.kubelets.emulated --version 1.9 --dir DIR``. The log, one line per event, goes to stderr. The process ends
as a kubelet does: by TERM, ``quit`` or the end of stdin, and leaves its socket and its checkpoint behind.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

import msgspec
from msgspec.structs import asdict

from gateway_lab.kubelets.behaviour import NEWEST, Behaviour, behaviour
from gateway_lab.kubelets.devicemanager import DeviceManager
from gateway_lab.kubelets.kubelet import LINE_LIMIT, Admission, Demand, Faults, KubeletError, Running, Totals

__all__ = ["DeviceManager", "Session"]


class Measure(msgspec.Struct, forbid_unknown_fields=True):
    """What ``start`` is to wait for and measure."""

    resource: str
    count: int
    seconds: float = 10


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """Every op's fields in one record; each op looks at its own."""

    op: str
    id: Any = None
    pods: list[Demand] = []
    ready: bool = True
    running: list[Running] = []
    gates: str = ""
    numa: list[int] = []
    measure: Measure | None = None
    pod: str = ""
    container: str = "main"
    resource: str = ""
    count: int = 0
    limits: dict[str, int] = {}
    init: bool = False
    seconds: float = 10
    faults: Faults = Faults()


class Session:
    """What one kubelet process has: its directory, its counters, and a device manager between ``start`` and ``stop``."""

    def __init__(self, kubelet: Behaviour, directory: Path, log: TextIO) -> None:
        self._kubelet = kubelet
        self._directory = directory
        self._log = log
        self._registers: Counter[str] = Counter()
        self._faults = Faults()
        self._manager: DeviceManager | None = None

    def note(self, event: str) -> None:
        """Write one line of the log."""
        self._log.write(f"{time.strftime('%H:%M:%S')}.{time.time_ns() // 1000000 % 1000:03d} {event}\n")
        self._log.flush()

    async def carry_out(self, request: Request) -> dict[str, Any]:
        """Carry out one op and give the fields of its answer.

        Raises:
            KubeletError: it failed.
        """
        match request.op:
            case "version":
                return {
                    "kubernetes": f"v{self._kubelet.name}",
                    "go": f"python{platform.python_version()}",
                    "dir": str(self._directory),
                    "pid": os.getpid(),
                }
            case "registers":
                return {"registers": dict(self._registers)}
            case "fault":
                self._faults = request.faults
                if self._manager is not None:
                    self._manager.faults = self._faults
                return {}
            case "start":
                return await self._start(request)
            case _:
                pass
        manager = self._manager
        if manager is None:
            raise KubeletError(request.op, "not started")
        match request.op:
            case "ready":
                manager.ready(ready=request.ready)
            case "admit":
                limits = {**request.limits, **({request.resource: request.count} if request.resource else {})}
                return _admission(
                    await manager.admit(request.pod, limits, container=request.container, init=request.init)
                )
            case "restart_container":
                return _admission(await manager.restart_container(request.pod, request.container))
            case "remove":
                manager.remove(request.pod)
            case "pods":
                return {"pods": manager.pods()}
            case "capacity":
                return _totals(manager.totals())
            case "wait":
                seen = await manager.wait(request.resource, request.count, request.seconds)
                return {**_totals(seen.totals), "monotonic_ns": seen.monotonic_ns}
            case "cut":
                manager.cut(request.resource)
            case "stop":
                self._manager = None
                await manager.stop()
            case _:
                raise KubeletError(request.op, "unknown op")
        return {}

    async def _start(self, request: Request) -> dict[str, Any]:
        if self._manager is not None:
            raise KubeletError("start", "already started")
        self._manager = manager = DeviceManager(
            self._kubelet, self._directory, note=self.note, registers=self._registers, faults=self._faults
        )
        how: dict[str, Any] = {"ready": request.ready, "running": request.running, "gates": request.gates}
        if (measure := request.measure) is None:
            await manager.start(request.pods, **how)
            return {}
        gap = await manager.start_measured(measure.resource, measure.count, measure.seconds, request.pods, **how)
        return asdict(gap)


WAITING = frozenset({"admit", "restart_container", "wait"})
"""The ops that may wait for a plugin: answered when they are done. All others are carried out in their order."""


async def serve(session: Session) -> None:
    """Answer requests from stdin until it ends, or until ``quit``."""
    stdin = asyncio.StreamReader(limit=LINE_LIMIT)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    decoder = msgspec.json.Decoder(Request)
    tasks: set[asyncio.Task[None]] = set()
    while line := await stdin.readline():
        try:
            request = decoder.decode(line)
        except msgspec.DecodeError as error:
            _reply(_id_of(line), ok=False, error=str(error))
            continue
        if request.op == "quit":
            _reply(request.id, ok=True)
            return
        answering = _answer(session, request)
        if request.op in WAITING or request.measure is not None:
            task = asyncio.create_task(answering)
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        else:
            await answering


async def _answer(session: Session, request: Request) -> None:
    try:
        fields = await session.carry_out(request)
    except KubeletError as error:
        _reply(request.id, ok=False, error=error.message, **({"stage": error.stage} if error.stage else {}))
    except Exception as error:  # noqa: BLE001  a defect of an op is its answer, not the end of the kubelet
        _reply(request.id, ok=False, error=f"defect of the emulated kubelet: {error!r}")
    else:
        _reply(request.id, ok=True, **fields)


def _reply(number: Any, **fields: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.encode({"id": number, **fields}) + b"\n")
    sys.stdout.buffer.flush()


def _id_of(line: bytes) -> Any:
    """Find the id of a request that is wrong otherwise."""
    try:
        whole = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return whole.get("id") if isinstance(whole, dict) else None


def _totals(totals: Totals) -> dict[str, Any]:
    return {"capacity": totals.capacity, "allocatable": totals.allocatable}


def _admission(admission: Admission) -> dict[str, Any]:
    answer = admission.answer
    return {
        "devices": admission.devices,
        "options": {
            "envs": answer.envs,
            "mounts": [asdict(mount) for mount in answer.mounts],
            "devices": [asdict(node) for node in answer.device_nodes],
            "annotations": answer.annotations,
            "cdi_devices": answer.cdi_devices,
        },
    }


def _version(text: str) -> Behaviour:
    try:
        return behaviour(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main() -> None:
    """Run one kubelet process."""
    parser = argparse.ArgumentParser(
        prog="gateway_lab.kubelets.emulated", description="an emulated kubelet device manager"
    )
    parser.add_argument("--version", required=True, type=_version, help="the kubelet version, such as 1.28")
    parser.add_argument("--dir", required=True, type=Path, help="where kubelet.sock and the checkpoint live")
    arguments = parser.parse_args()
    session = Session(arguments.version, arguments.dir.absolute(), sys.stderr)
    if not arguments.version.certain:
        session.note(f"kubelet {arguments.version.name} is newer than any known here: taken to behave like 1.{NEWEST}")

    async def run() -> None:
        # A kubelet never closes anything when it ends: its socket stays, and its streams break.
        for ending in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(ending, os._exit, 0)
        await serve(session)
        os._exit(0)

    asyncio.run(run())


if __name__ == "__main__":
    main()
