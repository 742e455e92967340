"""Other gateways on a node that don't serve: what each costs the kubelet's records, measured.

A rival is a gateway that this kubelet refuses, whose list fits no message, that stands still or crashes again and again, or
something that only looks like a gateway. Each is put beside a gateway that serves, and for how long the kubelet's records
lack devices meanwhile is what counts: at most ``MOST`` seconds, once.

``python -m gateway.lab.trials.rivals --kubelets 1.10,1.28`` measures each on emulated kubelets, and on genuine ones where they are built.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

from gateway.handover import instance
from gateway.lab.gatewayproc import GatewayError, GatewayProcess, gateway_command
from gateway.lab.kubelets import build
from gateway.lab.kubelets.kubelet import KubeletError
from gateway.lab.trials.scenarios import RESOURCE, BrokenPromiseError, Node, dialect, must, node
from gateway.lab.waiting import until

MOST: Final = 3.0
"""Seconds for which the kubelet's records may lack devices, once, whatever another gateway does."""
SECONDS: Final = 8.0
"""How long a rival is watched."""
AFTER: Final = 2.0
"""How long the kubelet's records are watched once it has ended: kubelets 1.12 to 1.24 may lose the resource with it."""
MOST_TAKEN: Final = 3
"""How often a resource may be taken back from one rival while it is watched: ever more seldom."""
TAKEN_BACK: Final = (
    "taking a resource back: another gateway is to serve it, and the kubelet's records show no device of it"
)
_EVERY: Final = 0.02
_START: Final = 10.0
_START_LARGE: Final = 20.0
"""Seconds that a busy machine may take to put a list of 80,000 devices together."""
_REPLICAS: Final = """\
version: v1
sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 10000}]}}
"""

Rival = Callable[[Node], AbstractAsyncContextManager[None]]


def _command(made: Node, *, elsewhere: bool, api: str = "auto", options: Sequence[str] = ()) -> list[str]:
    state = made.root / ("elsewhere" if elsewhere else "state")
    return gateway_command(made.socket_dir, state, made.profile_path, api, options)


@asynccontextmanager
async def _launched(command: Sequence[str]) -> AsyncIterator[GatewayProcess]:
    process = await GatewayProcess.launch(command)
    try:
        yield process
    finally:
        await process.kill()  # One that stands still, too: it must not go on before, and register.


@asynccontextmanager
async def _refused(made: Node, *, elsewhere: bool) -> AsyncIterator[None]:
    """A gateway that may speak only what this kubelet doesn't."""
    wrong = "v1alpha" if dialect(made.the_kubelet.version) == "v1beta1" else "v1beta1"
    async with _launched(_command(made, elsewhere=elsewhere, api=wrong)):
        yield


@asynccontextmanager
async def _too_large(made: Node, *, elsewhere: bool) -> AsyncIterator[None]:
    """A gateway whose list is larger than any kubelet is sent."""
    config = made.root / "replicas.yaml"
    config.write_text(_REPLICAS)
    says = "waiting: another gateway serves, and this one could not"
    async with _launched(_command(made, elsewhere=elsewhere, options=("--config-file", str(config)))) as process:
        with contextlib.suppress(GatewayError):  # What it asks for in vain costs something, too.
            await process.wait_for(says, seconds=_START_LARGE)
        yield


@asynccontextmanager
async def _stopped(made: Node, *, elsewhere: bool) -> AsyncIterator[None]:
    """A gateway that stands still from the moment at which the others see it."""
    shared = made.socket_dir / instance.FOLDER
    before = set(shared.iterdir())

    def seen() -> bool:
        return any(not new.name.startswith(".") for new in set(shared.iterdir()) - before)

    async with _launched(_command(made, elsewhere=elsewhere)) as process:
        with contextlib.suppress(TimeoutError):  # One that may not ask isn't seen.
            await until(seen, _START, every=0.001)
        os.kill(process.pid, signal.SIGSTOP)
        yield


@asynccontextmanager
async def _stopped_later(made: Node, *, elsewhere: bool) -> AsyncIterator[None]:
    """A gateway that takes over and serves, then stands still; and then the kubelet starts anew."""
    async with _launched(_command(made, elsewhere=elsewhere)) as process:
        await process.wait_for("registered")
        await asyncio.sleep(2)
        os.kill(process.pid, signal.SIGSTOP)
        await made.start_kubelet(made.the_kubelet.version)
        yield


@asynccontextmanager
async def _crashes(made: Node, *, elsewhere: bool) -> AsyncIterator[None]:
    """A gateway that is started and killed again and again, a second after it serves."""

    async def crash() -> None:
        while True:
            async with _launched(_command(made, elsewhere=elsewhere)) as process:
                await process.begun()
                await asyncio.sleep(1)

    crashing = asyncio.create_task(crash())
    try:
        yield
    finally:
        crashing.cancel()
        await asyncio.gather(crashing, return_exceptions=True)


@asynccontextmanager
async def _planted(made: Node, *, says: bytes | None, number: int = 0) -> AsyncIterator[None]:
    """A folder with a lock that is held, and a socket: nobody accepts there, or somebody says something."""
    folder = made.socket_dir / instance.FOLDER / f"5eed5ee{number}"
    hidden = folder.with_name(f".{folder.name}")
    hidden.mkdir(mode=0o750)
    lock = os.open(hidden / "lock", os.O_RDWR | os.O_CREAT, 0o640)
    server: asyncio.Server | None = None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, f"{time.clock_gettime_ns(time.CLOCK_BOOTTIME)}\n".encode())
        listener.bind(str(hidden / instance.socket_name(RESOURCE)))
        listener.listen()
        if says is not None:

            async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(says)

            server = await asyncio.start_unix_server(speak, sock=listener)
        hidden.rename(folder)
        yield
    finally:
        if server is not None:
            server.close()
        listener.close()
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def _several_planted(made: Node) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for number in range(3):
            await stack.enter_async_context(_planted(made, says=None, number=number))
        yield


@asynccontextmanager
async def _older_stopped(made: Node, *, elsewhere: bool) -> AsyncIterator[None]:
    """The gateway that serves stands still while a newer one starts, and goes on afterwards."""
    older = made.gateway
    os.kill(older.pid, signal.SIGSTOP)
    try:
        async with _launched(_command(made, elsewhere=elsewhere)) as newer:
            await newer.wait_for("registered")
            await asyncio.sleep(1)
            os.kill(older.pid, signal.SIGCONT)
            yield
    finally:
        os.kill(older.pid, signal.SIGCONT)


RIVALS: Final[Mapping[str, Rival]] = {
    "refused": partial(_refused, elsewhere=False),
    "refused, its own state": partial(_refused, elsewhere=True),
    "list too large": partial(_too_large, elsewhere=False),
    "list too large, its own state": partial(_too_large, elsewhere=True),
    "stopped": partial(_stopped, elsewhere=False),
    "stopped, its own state": partial(_stopped, elsewhere=True),
    "stopped, kubelet restarts": partial(_stopped_later, elsewhere=False),
    "stopped, kubelet restarts, its own state": partial(_stopped_later, elsewhere=True),
    "crashes": partial(_crashes, elsewhere=False),
    "crashes, its own state": partial(_crashes, elsewhere=True),
    "planted, deaf": partial(_planted, says=None),
    "several planted, deaf": _several_planted,
    "planted, garbage": partial(_planted, says=b"\x00garbage\n" * 100),
    "older one stopped": partial(_older_stopped, elsewhere=False),
    "older one stopped, its own state": partial(_older_stopped, elsewhere=True),
}
"""By name; *its own state* is one that can't talk to the gateway that serves."""


async def lacks(made: Node, over: asyncio.Event) -> list[float]:
    """Watch the kubelet's records until it is ``over`` and they are whole; give for how many seconds each they weren't."""
    found: list[float] = []
    since: float | None = None
    while True:
        try:
            whole = (await made.the_kubelet.totals()).allocatable.get(RESOURCE, 0) >= made.healthy()
        except (KubeletError, AssertionError):  # It starts anew.
            whole = False
        now = time.monotonic()
        if whole and since is not None:
            found.append(now - since)
            since = None
        elif not whole and since is None:
            since = now
        if over.is_set() and (since is None or now - since > 2 * MOST):
            return found if since is None else [*found, now - since]
        await asyncio.sleep(_EVERY)


async def measure(name: str, made: Node, seconds: float = SECONDS) -> list[float]:
    """Put a rival beside the gateway that serves ``made``, and end it.

    Returns for how many seconds each the kubelet's records lacked devices, by its end, too.
    """
    over = asyncio.Event()
    watcher = asyncio.create_task(lacks(made, over))
    try:
        async with RIVALS[name](made):
            await asyncio.sleep(seconds)
        await asyncio.sleep(AFTER)
        over.set()
        return await watcher
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


async def alone(name: str, version: str, genuine: Callable[[str], Path | None]) -> list[float]:
    """Measure one rival on a node of its own."""
    async with node(genuine, gpus={RESOURCE: 8}) as made:
        await made.start_kubelet(version)
        await made.start_gateway()
        await made.served()
        found = await measure(name, made)
        await made.served()
        taken = Counter(line.get("peer") for line in made.gateway.lines(TAKEN_BACK))
        must([f"it was taken back from {peer} {times} times" for peer, times in taken.items() if times > MOST_TAKEN])
        return found


async def _all(names: Sequence[str], versions: Sequence[str], *, genuine: bool) -> bool:
    kept = True
    for version in versions:
        for kind, where in (("emulated", lambda _: None), ("genuine", build.built)):
            if kind == "genuine" and not (genuine and build.built(version)):
                continue
            for name in names:
                try:
                    found = await alone(name, version, where)
                except (BrokenPromiseError, KubeletError) as error:
                    found, told = [float("inf")], str(error).splitlines()[0]
                else:
                    told = ", ".join(f"{one:.2f}" for one in found if one > _EVERY) or "nothing"
                within = max(found, default=0) <= MOST and sum(one > 1 for one in found) <= 1
                kept = kept and within
                print(f"{kind} {version}  {name:41} lacked: {told} s{'' if within else '  BROKEN'}", flush=True)
    return kept


def main() -> int:
    """Measure each rival and print the times; 1 where one costs more than it may."""
    parser = argparse.ArgumentParser(
        prog="python -m gateway.lab.trials.rivals", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--kubelets", default="1.8,1.9,1.10,1.12,1.20,1.28,1.37", help="which versions")
    parser.add_argument(
        "--rivals", default=";".join(RIVALS), help=f"only these, with ; between them, of {'; '.join(RIVALS)}"
    )
    parser.add_argument("--no-genuine", action="store_true", help="emulated kubelets only")
    arguments = parser.parse_args()
    names = [name.strip() for name in arguments.rivals.split(";")]
    kept = asyncio.run(_all(names, arguments.kubelets.split(","), genuine=not arguments.no_genuine))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
