"""What the project needs of gRPC, as a table of small cases: each returns words, the same ones with gRPC itself and with ``wire``.

``python -m tests.contract.grpccases FOLDER`` runs them over real sockets and prints what each returned, as JSON.
``python -m tests.contract.grpccases serve PATH`` is a server to be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from gateway.wires import rpc

Words = list[object]
SOON_S: Final = 0.15
"""Seconds of a deadline that passes."""
_FLOOD: Final = 200
"""Messages of 64 KiB, more than any reader's end takes unread."""
LONG_S: Final = 20.0
"""Seconds of a deadline that doesn't."""


class Killed(Protocol):
    """A server in a process of its own."""

    async def kill(self) -> None:
        """Kill that process."""


class World(Protocol):
    """Where a case runs: a folder, the module ``grpc``, and servers that can be killed."""

    folder: Path
    grpc: Any

    async def killable(self, path: Path, /) -> Killed:
        """Start a server of ``Service`` in a process of its own; return once it serves."""


class Service:
    """The methods that cases call, and what their handlers saw."""

    def __init__(self) -> None:
        self.seen: Words = []
        self.gate = asyncio.Event()
        self.written = 0

    def find(self, path: str) -> rpc.Method | None:
        """Find a method by its path."""
        return {
            "/s/Echo": rpc.unary(self._echo),
            "/s/Read": rpc.reading(self._read),
            "/s/Agent": rpc.unary(self._agent),
            "/s/Left": rpc.unary(self._left),
            "/s/Hang": rpc.reading(self._hang),
            "/s/Gate": rpc.unary(self._wait),
            "/s/Abort": rpc.reading(self._abort),
            "/s/Raise": rpc.unary(self._raise),
            "/s/Big": rpc.unary(self._big),
            "/s/Three": rpc.writing(self._three),
            "/s/Broken": rpc.writing(self._broken),
            "/s/Watch": rpc.writing(self._watch),
            "/s/Flood": rpc.writing(self._flood),
        }.get(path)

    @contextlib.contextmanager
    def _noting(self, name: str) -> Any:
        try:
            yield
        except asyncio.CancelledError:
            self.seen.append(f"{name} cancelled")
            raise
        else:
            self.seen.append(f"{name} ended")

    @staticmethod
    async def _echo(request: bytes, _call: rpc.Call) -> bytes:
        return b"echo " + request

    async def _read(self, call: rpc.Call) -> bytes:
        first, second = await call.read(), await call.read()
        return b"read " + bytes(first) + (b" and more" if isinstance(second, bytes) else b" and no more")

    @staticmethod
    async def _agent(_request: bytes, call: rpc.Call) -> bytes:
        return (call.user_agent or "").split()[0].encode()

    @staticmethod
    async def _left(_request: bytes, call: rpc.Call) -> bytes:
        left = call.seconds_left
        return b"for ever" if left is None else b"%d" % round(left / 10)

    async def _hang(self, call: rpc.Call) -> bytes:
        with self._noting("Hang"):
            await call.read()
            await asyncio.get_running_loop().create_future()
        return b""

    async def _wait(self, _request: bytes, _call: rpc.Call) -> bytes:
        self.seen.append("waits")
        with self._noting("Gate"):
            await self.gate.wait()
        return b"through"

    @staticmethod
    async def _abort(call: rpc.Call) -> bytes:
        await call.abort(rpc.code((await call.read()).decode()), "in these words")

    @staticmethod
    async def _raise(_request: bytes, _call: rpc.Call) -> bytes:
        raise ValueError("boom")

    @staticmethod
    async def _big(request: bytes, _call: rpc.Call) -> bytes:
        return bytes(int(request))

    @staticmethod
    async def _three(call: rpc.Call) -> None:
        for number in range(3):
            await call.write(b"%d" % number)

    @staticmethod
    async def _broken(call: rpc.Call) -> None:
        await call.write(b"first")
        await call.abort(rpc.Code.RESOURCE_EXHAUSTED, "no more")

    async def _watch(self, call: rpc.Call) -> None:
        with self._noting("Watch"):
            await call.write(b"first")
            await self.gate.wait()

    async def _flood(self, call: rpc.Call) -> None:
        with self._noting("Flood"):
            for _ in range(_FLOOD):
                await call.write(bytes(64 * 1024))
                self.written += 1


def server(path: Path, service: Service, most: int = 100, **options: int) -> rpc.UnixServer:
    """Bind a server of a service."""
    return rpc.UnixServer(path, service.find, [(f"grpc.{name}", value) for name, value in options.items()], most)


def connection(path: Path, **options: int | str) -> rpc.Channel:
    """Make a connection of one's own, as the gateway does."""
    return rpc.Channel(
        path, [("grpc.use_local_subchannel_pool", 1), *((f"grpc.{name}", value) for name, value in options.items())]
    )


@contextlib.asynccontextmanager
async def served(path: Path, most: int = 100, **options: int) -> AsyncIterator[tuple[Service, rpc.Channel]]:
    """Serve a service and connect to it."""
    service = Service()
    serving = server(path, service, most, **options)
    await serving.start()
    try:
        async with connection(path) as channel:
            yield service, channel
    finally:
        await serving.stop(0)


async def outcome(work: Awaitable[object]) -> Words:
    """Return what came of a call: its answer, or its code and what is said of it."""
    try:
        found = await work
    except rpc.CallError as error:
        # Where nobody could be reached gRPC says more, and names the socket.
        return [error.code.name, error.details if error.code is not rpc.Code.UNAVAILABLE else ""]
    except rpc.ClosedError:
        return ["closed"]
    except asyncio.CancelledError:
        return ["cancelled"]
    return [
        found.decode()
        if isinstance(found, bytes) and len(found) < 100
        else len(found)
        if isinstance(found, bytes)
        else found
    ]


async def until(found: Callable[[], object]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(LONG_S):
        while not found():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)


# The cases.


async def answers(world: World) -> Words:
    """Answers, with the user agent and the deadline that the handler sees."""
    path = world.folder / "s"
    serving = server(path, Service())
    await serving.start()
    found: Words = []
    async with connection(path, primary_user_agent="grpc-go/1.2.3") as channel:
        for method in ("Echo", "Read", "Agent", "Left", "Nothing"):
            found += await outcome(channel.call(f"/s/{method}", b"me", seconds=LONG_S))
        found += await outcome(channel.stream("/s/Agent").read())
        found += await outcome(channel.stream("/s/Left").read())
    await serving.stop(0)
    return found


async def errors(world: World) -> Words:
    """A handler that ends a call with a code, or breaks."""
    async with served(world.folder / "s") as (_, channel):
        found: Words = []
        for code in rpc.Code:
            if code is not rpc.Code.OK:
                found += await outcome(channel.call("/s/Abort", code.name.encode(), seconds=LONG_S))
        return found + await outcome(channel.call("/s/Raise", seconds=LONG_S))


async def deadlines(world: World) -> Words:
    """A deadline that passes in the handler, and in front of a server that is bound and doesn't serve yet."""
    async with served(world.folder / "s") as (service, channel):
        found = await outcome(channel.call("/s/Hang", seconds=SOON_S))
        await until(lambda: service.seen)
        found += [*service.seen, *await outcome(channel.call("/s/Echo", b"next", seconds=LONG_S))]
    silent = server(world.folder / "t", Service())
    async with connection(world.folder / "t") as channel:
        found += await outcome(channel.call("/s/Echo", seconds=SOON_S))
        waiting = asyncio.create_task(channel.call("/s/Echo", b"late", seconds=LONG_S))
        await asyncio.sleep(SOON_S)
        await silent.start()
        found += await outcome(waiting)
    await silent.stop(0)
    return found


async def limits(world: World) -> Words:
    """Messages as large as may be, and one byte larger, both ways."""
    path, found = world.folder / "s", Words()
    serving = server(path, Service(), max_receive_message_length=1000)
    await serving.start()
    async with connection(path) as plain, connection(path, max_receive_message_length=10) as small:
        for size in (995, 1000, 1001):
            found += await outcome(plain.call("/s/Echo", bytes(size), seconds=LONG_S))
            found += await outcome(plain.call("/s/Read", bytes(size), seconds=LONG_S))
        for number in (10, 11):
            found += await outcome(small.call("/s/Big", b"%d" % number, seconds=LONG_S))
            found += await outcome(small.stream("/s/Big", b"%d" % number).read())
        found += await outcome(plain.call("/s/Big", b"%d" % (4 << 20), seconds=LONG_S))
        found += await outcome(plain.call("/s/Big", b"%d" % ((4 << 20) + 1), seconds=LONG_S))
        async with connection(path, max_receive_message_length=-1) as large:
            found += await outcome(large.call("/s/Big", b"%d" % (5 << 20), seconds=LONG_S))
    await serving.stop(0)
    return found


async def many(world: World) -> Words:
    """More calls than a server has at once; those of one connection beyond its streams wait."""
    async with served(world.folder / "s", most=2) as (service, channel):
        open_ones = [asyncio.create_task(channel.call("/s/Gate", seconds=LONG_S)) for _ in range(2)]
        await until(lambda: service.seen == ["waits"] * 2)
        found = await outcome(channel.call("/s/Echo", seconds=LONG_S))
        found += await outcome(channel.stream("/s/Watch").read())
        service.gate.set()
        for one in open_ones:
            found += await outcome(one)
        found += await outcome(channel.call("/s/Echo", seconds=LONG_S))
    async with served(world.folder / "t", max_concurrent_streams=2) as (service, channel):
        open_ones = [asyncio.create_task(channel.call("/s/Gate", seconds=LONG_S)) for _ in range(2)]
        await until(lambda: service.seen == ["waits"] * 2)
        third = asyncio.create_task(channel.call("/s/Echo", b"third", seconds=LONG_S))
        await asyncio.sleep(SOON_S)
        found += [third.done(), *await outcome(channel.call("/s/Echo", b"late", seconds=SOON_S))]
        service.gate.set()
        for one in [third, *open_ones]:
            found += await outcome(one)
    return found


async def cancels(world: World) -> Words:
    """A caller that gives up: by cancelling its task, its stream, or by closing the channel."""
    async with served(world.folder / "s") as (service, channel):
        task = asyncio.create_task(channel.call("/s/Hang", seconds=LONG_S))
        await asyncio.sleep(SOON_S)
        task.cancel()
        found = await outcome(task)
        await until(lambda: len(service.seen) == 1)
        stream = channel.stream("/s/Watch")
        found += await outcome(stream.read())
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(SOON_S)
        stream.cancel()
        found += await outcome(reading)
        await until(lambda: len(service.seen) == 2)
        stream = channel.stream("/s/Watch")
        found += await outcome(stream.read())
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(SOON_S)
        reading.cancel()
        found += await outcome(reading)
        await until(lambda: len(service.seen) == 3)
        found += await outcome(channel.stream("/s/Watch").read())
        task, reading = (
            asyncio.create_task(channel.call("/s/Hang", seconds=LONG_S)),
            asyncio.create_task(channel.stream("/s/Watch").read()),
        )
        found += await outcome(reading)
        await asyncio.sleep(SOON_S)
        await channel.close()
        found += await outcome(task)
        await until(lambda: len(service.seen) == 6)
        found += [*sorted(map(str, service.seen)), *await outcome(channel.call("/s/Echo", seconds=LONG_S))]
    return found


async def streams(world: World) -> Words:
    """Streams that end, break, and are read again after their end."""
    async with served(world.folder / "s") as (_, channel):
        found: Words = []
        for method, count in (("Three", 5), ("Broken", 3), ("Nothing", 2)):
            stream = channel.stream(f"/s/{method}")
            for _ in range(count):
                found += await outcome(stream.read())
        return found


async def floods(world: World) -> Words:
    """A stream that nobody reads: what is written waits on the writer's side. Its reader goes on later, or cancels."""
    async with served(world.folder / "s") as (service, channel):
        stream = channel.stream("/s/Flood")
        found = await outcome(stream.read())
        await asyncio.sleep(3 * SOON_S)
        found += ["all written" if service.written == _FLOOD else "waits"]
        for _ in range(_FLOOD - 1):
            await stream.read()
        found += await outcome(stream.read())
        await until(lambda: service.seen)
        stream = channel.stream("/s/Flood")
        await stream.read()
        await asyncio.sleep(SOON_S)
        stream.cancel()
        await until(lambda: len(service.seen) == 2)
        return [*found, *service.seen]


async def stops(world: World) -> Words:
    """A server that stops: with calls under way, with grace, and what becomes of its socket and its client."""
    path, service = world.folder / "s", Service()
    serving = server(path, service)
    await serving.start()
    async with connection(path) as channel:
        stream = channel.stream("/s/Watch")
        found = await outcome(stream.read())
        call = asyncio.create_task(channel.call("/s/Hang", seconds=LONG_S))
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(SOON_S)
        await serving.stop(0)
        found += [*await outcome(reading), *await outcome(call), *sorted(map(str, service.seen)), path.exists()]
        await until(lambda: not channel.is_ready)
        found += await outcome(channel.call("/s/Echo", seconds=SOON_S))
    serving = server(path, service := Service())
    await serving.start()
    async with connection(path) as channel:
        call = asyncio.create_task(channel.call("/s/Gate", seconds=LONG_S))
        await until(lambda: service.seen)
        stopping = asyncio.create_task(serving.stop(LONG_S))
        await asyncio.sleep(SOON_S)
        found += [path.exists(), stopping.done(), *await outcome(channel.call("/s/Echo", seconds=LONG_S))]
        service.gate.set()
        found += await outcome(call)
        await stopping
    return found


async def is_killed(world: World) -> Words:
    """A server's process that is killed: its calls, its socket's name, and the client that goes on with the next one."""
    path, found = world.folder / "s", Words()
    killed = await world.killable(path)
    async with connection(path, initial_reconnect_backoff_ms=100, min_reconnect_backoff_ms=100) as channel:
        stream = channel.stream("/s/Watch")
        found += await outcome(stream.read())
        call, reading = asyncio.create_task(channel.call("/s/Hang", seconds=LONG_S)), asyncio.create_task(stream.read())
        await asyncio.sleep(SOON_S)
        await killed.kill()
        found += [*await outcome(reading), *await outcome(call), path.is_socket()]
        await until(lambda: not channel.is_ready)
        found += [
            *await outcome(channel.call("/s/Echo", seconds=LONG_S)),
            *await outcome(channel.call("/s/Echo", seconds=LONG_S)),
        ]
        ready = asyncio.create_task(channel.ready())
        await asyncio.sleep(SOON_S)
        serving = server(path, Service())
        await serving.start()
        await ready
        found += [channel.is_ready, *await outcome(channel.call("/s/Echo", b"anew", seconds=LONG_S))]
        await serving.stop(0)
    return found


async def replaced(world: World) -> Words:
    """A socket's name that another server takes: who is connected stays; who stops last removes whatever socket has the name."""
    path, first, second = world.folder / "s", Service(), Service()
    older = server(path, first)
    await older.start()
    async with connection(path) as channel:
        call = asyncio.create_task(channel.call("/s/Gate", seconds=LONG_S))
        await until(lambda: first.seen)
        newer = server(path, second)
        await newer.start()
        first.gate.set()
        found = [
            *await outcome(call),
            *await outcome(channel.call("/s/Gate", seconds=LONG_S)),
            len(first.seen),
            len(second.seen),
        ]
        async with connection(path) as other:
            second.gate.set()
            found += [*await outcome(other.call("/s/Gate", seconds=LONG_S)), len(second.seen)]
        (world.folder / "link").hardlink_to(path)
        async with connection(world.folder / "link") as other:
            found += await outcome(other.call("/s/Echo", seconds=LONG_S))
        await older.stop(0)
        found += [path.exists(), (world.folder / "link").exists()]
        async with connection(world.folder / "link") as other:
            found += await outcome(other.call("/s/Echo", seconds=LONG_S))
        await newer.stop(0)
        found += [(world.folder / "link").exists()]
    return found


async def binds(world: World) -> Words:
    """Where a server can be bound."""
    (world.folder / "file").write_text("")
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(world.folder / "dead"))
    dead.close()
    found: Words = []
    for name in ("file", "dead", "no/such", "%41 #?é", "x" * 120):
        try:
            serving = server(world.folder / name, Service())
        except RuntimeError:
            found += [name, "can't be bound"]
            continue
        await serving.start()
        async with connection(world.folder / name) as channel:
            found += [name, (world.folder / name).is_socket(), *await outcome(channel.call("/s/Echo", seconds=LONG_S))]
        await serving.stop(0)
        found += [(world.folder / name).exists()]
    return found


async def states(world: World) -> Words:
    """The states of a connection, one after another."""
    path, found = world.folder / "s", Words()
    channel = world.grpc.aio.insecure_channel(
        rpc.target(path),
        options=[
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 300),
            ("grpc.min_reconnect_backoff_ms", 300),
        ],
    )

    async def until_it_is(*wanted: str) -> None:
        async with asyncio.timeout(LONG_S):
            while (state := channel.get_state()).name not in wanted:
                await channel.wait_for_state_change(state)
        found.append(state.name)

    found.append(channel.get_state().name)
    found.append(channel.get_state(try_to_connect=True).name)
    await until_it_is("TRANSIENT_FAILURE")
    failing = connection(path)
    found += await outcome(failing.call("/s/Echo", seconds=LONG_S))
    await failing.close()
    serving = server(path, Service())
    await serving.start()
    await asyncio.sleep(2 * SOON_S)
    ready = asyncio.create_task(channel.channel_ready())
    await until_it_is("READY")
    await ready
    await serving.stop(0)
    await until_it_is("IDLE")
    killed = await world.killable(path)
    channel.get_state(try_to_connect=True)
    await until_it_is("READY")
    await killed.kill()
    await until_it_is("IDLE")
    await channel.close()
    found.append(channel.get_state().name)
    try:
        await channel.channel_ready()
    except world.grpc.aio.UsageError:
        found.append("UsageError")
    return found


async def silent(world: World) -> Words:
    """A listener that accepts, or only listens, and never speaks."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(world.folder / "s"))
    listener.listen(5)
    async with connection(world.folder / "s") as channel:
        ready = asyncio.create_task(channel.ready())
        found = await outcome(channel.call("/s/Echo", seconds=SOON_S))
        found += [ready.done(), channel.is_ready]
        ready.cancel()
        await asyncio.wait([ready])
    listener.close()
    return found


CASES: Final[Mapping[str, Callable[[World], Awaitable[Words]]]] = {
    case.__name__: case
    for case in (
        *(
            answers,
            errors,
            deadlines,
            limits,
            many,
            cancels,
            streams,
            floods,
            stops,
            is_killed,
            replaced,
            binds,
            states,
            silent,
        ),
    )
}


# Over real sockets.


class _Spawned:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()


class _Real:
    def __init__(self, folder: Path) -> None:
        self.folder: Path = folder
        self.grpc: Any = grpc
        folder.mkdir()

    @staticmethod
    async def killable(path: Path) -> Killed:
        command = (sys.executable, "-m", __spec__.name, "serve", str(path))
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        await process.stdout.readline()
        return _Spawned(process)


async def _serve(path: Path) -> None:
    serving = server(path, Service())
    await serving.start()
    sys.stdout.write("serves\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().create_future()
    await serving.stop(0)


async def _all(folder: Path) -> None:
    found = await asyncio.gather(*(case(_Real(folder / name)) for name, case in CASES.items()), return_exceptions=True)
    told = {
        name: [repr(one)] if isinstance(one, BaseException) else one for name, one in zip(CASES, found, strict=True)
    }
    sys.stdout.write(json.dumps(told))


def main(words: Sequence[str]) -> None:
    """Run the cases, or a server for them."""
    asyncio.run(_serve(Path(words[1])) if words[0] == "serve" else _all(Path(words[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
