"""What a hostile node and network can do to a gateway, all at once: ``python -m gateway_lab.trials.attack --minutes 10``.

A gateway with 8 simulated GPUs runs in a memory cgroup of 256 MiB where this machine has one to give (root), and listens for
metrics and probes on loopback. A legitimate emulated kubelet gives pods GPUs and takes them back, is restarted now and then,
and ``/healthz`` is asked as a kubelet does, four times a second within one second. Meanwhile another process strikes, on
loopback and on the gateway's own sockets alone, each kind in turn and several at once, until its time is over.

Ends with 0 when all of these were kept: it lives, each probe and each pod was answered, in the end its descriptors are within
10 of those at the start, and in the second half of the time its memory grew by less than 10 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

import grpc
import grpc.aio

from gateway.wires.rpc import target
from gateway_lab.bench.footprint import footprint
from gateway_lab.gatewayproc import GatewayProcess, gateway_command
from gateway_lab.kubelets.kubelet import Kubelet, KubeletError
from gateway_lab.spawned import Spawned, spawn
from gateway_lab.trials.faults import descriptors
from gateway_lab.wire.calls import PREFACE

RESOURCE: Final = "nvidia.com/gpu"
LIMIT_MIB: Final = 256
"""What the manifests give the pod."""
PROBE_EVERY: Final = 0.25
PROBE_WITHIN: Final = 1.0
"""Seconds; a kubelet's own default for a probe's timeout."""
POD_EVERY: Final = 0.3
RESTART_EVERY: Final = 15.0
SETTLE: Final = 8.0
"""Seconds after the attack: every connection's time is over by then."""
MOST_DESCRIPTORS: Final = 10
MOST_GROWTH_MIB: Final = 10.0
_SERVICE: Final = "/v1beta1.DevicePlugin"
_MIB: Final = 1024 * 1024


# The attack. It runs in a process of its own, and each strike is short.


@dataclass(frozen=True)
class Target:
    """Where the gateway listens: TCP ports of loopback, the resource's socket, and the control socket."""

    ports: tuple[int, ...]
    plugin: Path
    control: Path


@contextlib.contextmanager
def _connections(family: int, address: tuple[str, int] | str, count: int) -> Iterator[list[socket.socket]]:
    """Begin so many connections at once; those that can't be had are left out."""
    with contextlib.ExitStack() as opened:
        begun = []
        for _ in range(count):
            one = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            one.settimeout(0)
            with contextlib.suppress(OSError):
                one.connect(address)
            begun.append(one)
        yield begun


async def _say(connections: Sequence[socket.socket], data: bytes, seconds: float) -> None:
    """Send the same on each, as far as it is taken at once, and stay for a while."""
    await asyncio.sleep(0.05)
    for one in connections:
        with contextlib.suppress(OSError):
            one.send(data)
    await asyncio.sleep(seconds)


async def _http(at: Target, data: bytes, count: int, seconds: float) -> None:
    for port in at.ports:
        with _connections(socket.AF_INET, ("127.0.0.1", port), count) as begun:
            await _say(begun, data, seconds)


async def _local(path: Path, data: bytes, count: int, seconds: float) -> None:
    with _connections(socket.AF_UNIX, os.fspath(path), count) as begun:
        await _say(begun, data, seconds)


async def _call(at: Target, method: str, request: bytes, count: int = 4) -> None:
    async with grpc.aio.insecure_channel(target(at.plugin), options=[("grpc.max_send_message_length", -1)]) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"{_SERVICE}/{method}")
        await asyncio.gather(*(call(request, timeout=3) for _ in range(count)), return_exceptions=True)


async def _silent_calls(at: Target) -> None:
    """Calls that never say what they want, on several connections."""
    async with contextlib.AsyncExitStack() as opened:
        calls = []
        for number in range(4):
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.primary_user_agent", str(number))]
            channel = await opened.enter_async_context(grpc.aio.insecure_channel(target(at.plugin), options=options))
            silent: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(f"{_SERVICE}/Allocate")
            calls += [silent(timeout=2) for _ in range(30)]
        await asyncio.sleep(1.0)
        for call in calls:
            call.cancel()


async def _readers(at: Target) -> None:
    """Strangers' ListAndWatch streams: a hundred, some of which end at once."""
    async with grpc.aio.insecure_channel(target(at.plugin)) as channel:
        watch: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"{_SERVICE}/ListAndWatch")
        streams = [watch(b"", timeout=2) for _ in range(100)]
        for stream in streams[::2]:
            stream.cancel()
        await asyncio.sleep(0.5)
        for stream in streams[1::2]:
            stream.cancel()


# HTTP/2 by hand (RFC 9113), for what no library sends. Header lists are in HPACK's literal form (RFC 7541, section 6.2).

_DATA, _HEADERS, _SETTINGS, _WINDOW_UPDATE = 0, 1, 4, 8
_END_HEADERS: Final = 4


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _literal(name: str, value: str, *, kept: bool = False) -> bytes:
    def text(one: str) -> bytes:
        length, prefix = len(one), b""
        if length < 127:
            return bytes([length]) + one.encode()
        prefix, length = b"\x7f", length - 127
        while length >= 128:
            prefix, length = prefix + bytes([length % 128 + 128]), length // 128
        return prefix + bytes([length]) + one.encode()

    return (b"\x40" if kept else b"\x00") + text(name) + text(value)


def _call_headers(method: str) -> bytes:
    said = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"{_SERVICE}/{method}",
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return b"".join(_literal(name, value) for name, value in said.items())


async def _drain(reader: asyncio.StreamReader, seconds: float) -> None:
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(seconds):
            while await reader.read(65536):
                pass


@contextlib.asynccontextmanager
async def _http2(at: Target) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_unix_connection(at.plugin)
    try:
        writer.write(PREFACE + _frame(_SETTINGS, 0, 0, b""))
        yield reader, writer
    finally:
        writer.transport.abort()


async def _bomb(at: Target) -> None:
    """A header of 3 kB once, and a byte for each time that it is said again: 16 MB of metadata in 16 kB."""
    async with _http2(at) as (reader, writer):
        writer.write(
            _frame(_HEADERS, _END_HEADERS, 1, _call_headers("Allocate") + _literal("x", "y" * 3000, kept=True))
        )
        for stream in range(3, 203, 2):
            writer.write(_frame(_HEADERS, _END_HEADERS, stream, _call_headers("Allocate") + b"\xbe" * 5000))
        await _drain(reader, 1.0)


async def _half_requests(at: Target) -> None:
    """Messages of which the last byte never comes, as much of them as the gateway takes."""
    await asyncio.gather(*(_half_requests_of_one(at) for _ in range(4)))


async def _half_requests_of_one(at: Target) -> None:
    streams = range(1, 33, 2)
    async with _http2(at) as (reader, writer):
        for stream in streams:
            writer.write(_frame(_HEADERS, _END_HEADERS, stream, _call_headers("Allocate")))
            length = (4 * _MIB).to_bytes(4, "big")
            writer.write(_frame(_DATA, 0, stream, b"\x00" + length + b"\x0a" * 4000))
        with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
            async with asyncio.timeout(2.0):
                await _fill_windows(reader, writer, streams)


async def _fill_windows(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, streams: Iterable[int]) -> None:
    """Send on these streams whatever the other end's flow control (RFC 9113, 5.2) lets through, for ever."""
    windows, window = Counter(streams), 0
    while True:
        head = await reader.readexactly(9)
        payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
        if head[3] != _WINDOW_UPDATE:
            continue
        more, stream = int.from_bytes(payload, "big"), int.from_bytes(head[5:9], "big")
        if stream:
            windows[stream] += more
        else:
            window += more
        for one in windows:
            while windows[one] >= 16384 <= window:
                writer.write(_frame(_DATA, 0, one, b"\x0a" * 16384))
                windows[one], window = windows[one] - 16384, window - 16384


_STRIKES: Final[dict[str, Callable[[Target], Awaitable[None]]]] = {
    "http: silent": lambda at: _http(at, b"", 1000, 0.2),
    "http: half a request": lambda at: _http(at, b"GET /metrics HTTP/1.1\r\nHost: n\r\n", 400, 0.5),
    "http: answers not taken": lambda at: _http(at, b"GET /metrics HTTP/1.1\r\nHost: n\r\n\r\n", 100, 0.5),
    "http: requests": lambda at: _http(at, b"GET /readyz HTTP/1.1\r\nHost: n\r\n\r\n", 300, 0.1),
    "http: much": lambda at: _http(at, os.urandom(20_000), 100, 0.1),
    "grpc: silent connections": lambda at: _local(at.plugin, b"", 500, 1.0),
    "grpc: no HTTP/2": lambda at: _local(at.plugin, os.urandom(4000), 100, 0.1),
    "grpc: empty containers": lambda at: _call(at, "GetPreferredAllocation", b"\x0a\x00" * (2 * _MIB - 10)),
    "grpc: empty devices": lambda at: _call(at, "Allocate", b"\x0a\xfc\xff\xff\x01" + b"\x0a\x00" * (2 * _MIB - 10)),
    "grpc: unknown devices": lambda at: _call(
        at, "Allocate", b"\x0a" + b"\xe0\xd4\x03" + b"".join(b"\x0a\x04%04d" % one for one in range(10_000))
    ),
    "grpc: unknown devices preferred": lambda at: _call(
        at,
        "GetPreferredAllocation",
        b"\x0a" + b"\xe0\xd4\x03" + b"".join(b"\x0a\x04%04d" % one for one in range(10_000)),
    ),
    "grpc: containers": lambda at: _call(at, "Allocate", b"\x0a\x07\x0a\x05GPU-1" * 1024),
    "grpc: too large": lambda at: _call(at, "Allocate", bytes(20 * _MIB), 2),
    "grpc: garbage": lambda at: _call(at, "PreStartContainer", os.urandom(100_000), 20),
    "grpc: silent calls": _silent_calls,
    "grpc: readers": _readers,
    "grpc: metadata": _bomb,
    "grpc: half a request": _half_requests,
    "control: silent": lambda at: _local(at.control, b"", 100, 0.3),
    "control: garbage": lambda at: _local(at.control, os.urandom(30_000) + b"\n", 20, 0.1),
    "control: depth": lambda at: _local(at.control, b"[" * 60_000 + b"\n", 20, 0.1),
    "control: status": lambda at: _local(at.control, b'{"v": 1, "op": "status"}\n' * 100, 8, 0.5),
}


async def strike(at: Target, seconds: float, at_once: int, seed: int, only: str = "") -> Counter[str]:
    """Strike for so long, ``at_once`` strikes at a time, those with ``only`` in their name; count them by name."""
    names = [name for name in _STRIKES if only in name]
    end, chance, struck = time.monotonic() + seconds, random.Random(seed), Counter[str]()

    async def one() -> None:
        order: list[str] = []
        while time.monotonic() < end:
            if not order:
                order = chance.sample(names, len(names))
            name = order.pop()
            with contextlib.suppress(OSError, grpc.aio.AioRpcError, TimeoutError):
                async with asyncio.timeout(10):
                    await _STRIKES[name](at)
            struck[name] += 1
            await asyncio.sleep(0.05)

    await asyncio.gather(*(one() for _ in range(at_once)))
    return struck


# The node meanwhile.


@contextlib.contextmanager
def memory_cgroup(mib: int) -> Iterator[Path | None]:
    """Make a memory cgroup with a limit, and remove it; None where this machine has none to give."""
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"attack-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(mib * _MIB))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield group
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
        return
    yield None


@dataclass
class Seen:
    """What was seen from beside the gateway. Times are in seconds, memory in MiB."""

    limited: bool = False
    alive: bool = True
    probes: list[float] = field(default_factory=list)
    probes_failed: list[str] = field(default_factory=list)
    pods: int = 0
    pods_failed: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    descriptors: tuple[int, int] = (0, 0)
    memory: list[float] = field(default_factory=list)
    """Resident, each second; the first before the attack."""
    log_bytes: int = 0

    @property
    def growth(self) -> float:
        """How much more memory there was mostly in the last quarter of the time than in the second.

        The most there was says less: several of the largest strikes at once take tens of MiB for a moment, in whichever quarter.
        """
        quarter = max(1, len(self.memory) // 4)
        return median(self.memory[-quarter:]) - median(self.memory[quarter : 2 * quarter] or self.memory)

    def broken(self) -> list[str]:
        """Name the promises that were not kept."""
        first, last = self.descriptors
        kept = {
            "it lives": self.alive,
            "each probe is answered within a second": bool(self.probes) and not self.probes_failed,
            "each pod gets its GPU": self.pods > 0 and not self.pods_failed,
            f"descriptors come back within {MOST_DESCRIPTORS}": abs(last - first) <= MOST_DESCRIPTORS,
            f"memory grows by less than {MOST_GROWTH_MIB:g} MiB": self.growth < MOST_GROWTH_MIB,
            f"memory stays below {LIMIT_MIB} MiB": max(self.memory) < LIMIT_MIB,
        }
        return [promise for promise, held in kept.items() if not held]

    def __str__(self) -> str:
        worst = max(self.probes, default=0.0)
        quarter = max(1, len(self.memory) // 4)
        quarters = [part for at in range(0, 4 * quarter, quarter) if (part := self.memory[at : at + quarter])]
        mostly, peaks = (", ".join(f"{of(part):.1f}" for part in quarters) for of in (median, max))
        return "\n".join(
            (
                f"memory limit     {f'{LIMIT_MIB} MiB, by a cgroup' if self.limited else 'none: this machine gives no cgroup'}",
                f"/healthz         {len(self.probes)} answered, {len(self.probes_failed)} not; slowest {worst * 1000:.0f} ms",
                f"pods             {self.pods} got their GPU, {len(self.pods_failed)} not",
                f"kubelet restarts {len(self.gaps)}; slowest until all GPUs are allocatable {max(self.gaps, default=0.0):.0f} ms",
                f"descriptors      {self.descriptors[0]} before, {self.descriptors[1]} after",
                f"memory (MiB)     {self.memory[0]:.1f} before; {mostly} mostly and {peaks} at most by quarters; {self.memory[-1]:.1f} after",
                f"log              {self.log_bytes} bytes",
                *(f"  {one}" for one in [*self.probes_failed[:5], *self.pods_failed[:5]]),
            )
        )


async def _probe(port: int, seen: Seen) -> None:
    while True:
        began = time.monotonic()
        try:
            async with asyncio.timeout(PROBE_WITHIN):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(b"GET /healthz HTTP/1.1\r\nHost: node\r\n\r\n")
                    if not (await reader.read()).startswith(b"HTTP/1.1 200 "):
                        raise ConnectionResetError("no answer")
                finally:
                    writer.transport.abort()
            seen.probes.append(time.monotonic() - began)
        except OSError as error:
            seen.probes_failed.append(f"/healthz after {time.monotonic() - began:.2f} s: {error!r}")
        await asyncio.sleep(PROBE_EVERY)


async def _pods(kubelet: Kubelet, seen: Seen) -> None:
    began = time.monotonic()
    for number in range(10**9):
        try:
            await kubelet.admit(f"pod-{number}", RESOURCE, 1)
            seen.pods += 1
            await kubelet.remove(f"pod-{number}")
            if time.monotonic() - began > RESTART_EVERY:
                began = time.monotonic()
                await kubelet.stop()
                gap = await kubelet.start_measured(RESOURCE, 8)
                seen.gaps.append(gap.gap_ms or 0.0)
        except KubeletError as error:
            seen.pods_failed.append(str(error)[:300])
        await asyncio.sleep(POD_EVERY)


async def _measure(pid: int, seen: Seen) -> None:
    while True:
        seen.memory.append(footprint(pid).rss)
        await asyncio.sleep(1)


async def attack(seconds: float, at_once: int = 4, seed: int = 1, only: str = "") -> Seen:
    """Run a gateway and its node, strike for so long, and say what was seen."""
    seen = Seen()
    async with contextlib.AsyncExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atk-")))
        sockets, state = root / "device-plugins", root / "state"
        sockets.mkdir()
        group = stack.enter_context(memory_cgroup(LIMIT_MIB))
        seen.limited = group is not None
        kubelet = await stack.enter_async_context(await Kubelet.launch("1.32", sockets))
        await kubelet.start()
        options = ["--probe-address", "127.0.0.1:0", "--metrics-address", "127.0.0.1:0", "--metrics-device-ids"]
        command = gateway_command(sockets, state, options=options)
        if group is not None:
            command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]
        log = root / "log"
        gateway = await stack.enter_async_context(await GatewayProcess.launch(command, log))
        ports = [(await gateway.wait_for("listening", what=what))["port"] for what in ("probes", "metrics")]
        await kubelet.wait(RESOURCE, 8, 30)
        await asyncio.sleep(2)
        [plugin] = (path for path in sockets.glob("gateway/*/*.sock"))
        [control] = state.glob("*.sock")
        first = len(descriptors(gateway.pid))
        beside = [
            asyncio.ensure_future(work)
            for work in (_measure(gateway.pid, seen), _probe(ports[0], seen), _pods(kubelet, seen))
        ]
        try:
            how = ("--strike", str(seconds), "--at-once", str(at_once), "--seed", str(seed), "--only", only)
            attacker = (
                sys.executable,
                "-m",
                "gateway_lab.trials.attack",
                *how,
                *map(str, ports),
                str(plugin),
                str(control),
            )
            async with Spawned(await spawn(attacker)) as striker:
                async with asyncio.timeout(seconds + 60):
                    await striker.exited()
            await asyncio.sleep(SETTLE)
        except OSError as error:
            seen.pods_failed.append(str(error))
        finally:
            for task in beside:
                task.cancel()
            ended = await asyncio.gather(*beside, return_exceptions=True)
        seen.pods_failed += [repr(one) for one in ended if not isinstance(one, asyncio.CancelledError)]
        seen.alive = gateway.alive
        seen.descriptors = first, len(descriptors(gateway.pid)) if gateway.alive else 0
        seen.log_bytes = log.stat().st_size
    return seen


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--at-once", type=int, default=4, help="how many strikes there are at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="only strikes with this in their name, such as grpc")
    parser.add_argument("--strike", type=float, help=argparse.SUPPRESS)
    parser.add_argument("at", nargs="*", help=argparse.SUPPRESS)
    said = parser.parse_args()
    if said.strike:
        *ports, plugin, control = said.at
        struck = asyncio.run(
            strike(
                Target(tuple(map(int, ports)), Path(plugin), Path(control)),
                said.strike,
                said.at_once,
                said.seed,
                said.only,
            )
        )
        print(*(f"{count:6} {name}" for name, count in sorted(struck.items())), sep="\n")
        return 0
    seen = asyncio.run(attack(said.minutes * 60, said.at_once, said.seed, said.only))
    broken = seen.broken()
    print(seen, *(f"BROKEN: {one}" for one in broken), "kept" if not broken else "not kept", sep="\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
