"""A pair that serves claims, too: whoever of it dies, one decides, and what is asked for meanwhile is answered by who does."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from adapters import pluginregistration
from adapters.dra.plugin import V1
from devices.claims import Answer, ClaimName, Prepared, Refused
from devices.model import RefusedError
from gateway import daemon
from gateway.age import Age
from gateway.dra import cdi, sockets
from gateway.dra.service import Service
from gateway.handover.alone import LOCK, STANDS_BY, Alone
from gateway.lab.gatewayproc import GatewayProcess, gateway_command
from gateway.lab.kubelets.behaviour import behaviour
from gateway.lab.kubelets.devicemanager import DeviceManager
from gateway.memory import file
from gateway.memory.ledger import Ledger
from gateway.memory.scribe import Scribe
from gateway.pair.flight import Flight
from gateway.pair.parent import END_TIME
from gateway.pair.pulse import Pulse
from gateway.pair.role import Role
from gateway.wires import control
from gateway.wires.unix import listens
from tests.fakes.apiserver import ApiServer
from tests.unit.draplace import GPU, SLICE, Kubelet, Place
from tests.unit.kubernetes import authority, server, until
from tests.unit.test_pair import children, descriptors, ready

__all__ = ["authority", "server"]
DRIVER = "gpu.nvidia.com"


def came(socket: Path) -> int:
    """Say when a socket came; of one that went again, that it came first."""
    try:
        return socket.stat().st_ctime_ns
    except FileNotFoundError:
        return 0


class Node:
    """A node with a pair of gateways, a kubelet's device manager and its plugin manager, and the API server."""

    def __init__(self, place: Place) -> None:
        self.place, self.registry = place, place.folder / "plugins_registry"
        (place.plugins / "kubelet_internal_checkpoint").unlink(missing_ok=True)
        place.server.put("/apis/resource.k8s.io/v1/namespaces/x/resourceclaims/other")
        self.manager = DeviceManager(behaviour("1.37"), place.plugins)
        self._known: dict[Path, Kubelet] = {}
        """The registered instances of the driver, the newest last."""

    @contextlib.asynccontextmanager
    async def pair(self, dra: str = "on", program: str = "", *, standby: bool = True) -> AsyncIterator[GatewayProcess]:
        """Have a pair. The kubelet registers each socket as it comes, and forgets it when it is removed."""
        folder = self.place.folder
        config = self.place.server.kubeconfig(folder / "kubeconfig")
        options = [*(["--standby"] * standby), "--dra", dra, "--node-name", "n1", "--kubeconfig", str(config)]
        command = gateway_command(self.place.plugins, folder / "state", self.place.profile, options=options)
        adapted = f"""
from pathlib import Path
from devices.gpu import cdi_files
from gateway.dra import cdi, crossing
from gateway.kubernetes import allocatable
cdi_files.FOLDER = cdi.FOLDER = Path({str(folder / "cdi")!r})  # Where an ordinary user may write.
allocatable.SETTLE, crossing.ADMITS, crossing.WAIT = 0.0, 0.0, 0.05
{program}
from gateway.cli.main import gateway; gateway()
"""
        registering = asyncio.ensure_future(self._register())
        try:
            async with await GatewayProcess.launch([command[0], "-c", adapted, *command[3:]]) as process:
                yield process
        finally:
            registering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await registering

    async def _register(self) -> None:
        while True:
            for path in sorted(self.registry.iterdir(), key=came):
                if path not in self._known and listens(path):
                    self._known[path] = one = Kubelet(path)
                    with contextlib.suppress(grpc.aio.AioRpcError):  # It is killed in this moment.
                        await one.call(pluginregistration.NOTIFY, pluginregistration.encode_status(""))
            await asyncio.sleep(0.01)

    async def registered(self, count: int) -> list[Kubelet]:
        """Give the instances that live, the one that came last first: it is called."""
        await until(lambda: len(self.living()) == count)
        return self.living()

    def living(self) -> list[Kubelet]:
        return [one for path, one in reversed(self._known.items()) if listens(path)]

    async def stand(self, **sides: str) -> None:
        wanted = {f"GPU-{name}": side for name, side in sides.items()}

        async with asyncio.timeout(15):
            while await self.cross("dra", dry_run=True) != wanted:  # noqa: ASYNC110 - it is a question to another
                await asyncio.sleep(0.02)

    async def parted(self) -> None:
        """Have the second GPU go to DRA, and wait until it is on offer there."""
        await self.cross("dra", "GPU-b")
        await self.stand(a="plugin", b="dra")
        await until(lambda: list(self.place.published) == ["gpu-1"])

    async def one_waits(self, front: Kubelet) -> tuple[ClaimName, asyncio.Task[Any]]:
        """Have a claim prepared that has the second GPU, and another one wait for it; give the first, and the call that waits."""
        await self.parted()
        first, waits = self.place.claim("c", "uid-c", "gpu-1"), self.place.claim("w", "uid-w", "gpu-1")
        assert isinstance((await front.prepare(V1, first))["uid-c"], tuple)
        waiting = asyncio.ensure_future(front.prepare(V1, waits))
        await until(lambda: any(one.path.endswith("/w") for one in self.place.server.requests))
        return first, waiting

    async def order(self, op: str, device: str) -> None:
        [path] = control.sockets(self.place.folder / "state")
        await control.ask(path, {"op": op, "id": device, "reason": "it hums"}, 10)

    async def cross(self, to: str, *ids: str, dry_run: bool = False) -> dict[str, str]:
        [path] = control.sockets(self.place.folder / "state")
        answer = await control.ask(path, {"op": "cross", "to": to, "ids": list(ids), "dry_run": dry_run}, 10)
        return {row["id"]: row["side"] for row in answer["boards"]}


@pytest.fixture
async def node(server: ApiServer) -> AsyncIterator[Node]:
    folder = Path(tempfile.mkdtemp(prefix="duo-"))
    one = Node(Place(folder, server))
    await one.manager.start()
    yield one
    await one.manager.stop()
    shutil.rmtree(folder)


async def test_whoever_of_the_pair_dies_both_apis_are_served(node: Node) -> None:
    async with node.pair() as process:
        serves, stands_by = await ready(process)
        await node.manager.wait(GPU, 2)
        front, _ = await node.registered(2)
        await node.parted()
        written = node.place.server.objects[SLICE]["metadata"]["resourceVersion"]
        first = node.place.claim("c", "uid-c", "gpu-1")
        prepared = (await front.prepare(V1, first))["uid-c"]
        assert isinstance(prepared, tuple)
        await process.wait_for("claim prepared")
        assert len(process.lines("claim prepared")) == 1, "by the one that decides, and by no other"
        waits = node.place.claim("w", "uid-w", "gpu-1")
        waiting = asyncio.ensure_future(front.prepare(V1, waits))  # Passed on, and waiting for the GPU.
        await until(lambda: any(one.path.endswith("/w") for one in node.place.server.requests))
        mark = process.seen
        os.kill(serves, signal.SIGKILL)
        again = asyncio.ensure_future(front.prepare(V1, first))
        await process.wait_for("registered", since=mark)
        await node.manager.wait(GPU, 1)
        assert (await again)["uid-c"] == prepared
        assert (await front.unprepare(V1, first))["uid-c"] is None
        assert isinstance((await waiting)["uid-w"], tuple), "asked of one that died, and answered by the next"
        assert await ready(process, mark) == (stands_by, (await process.wait_for("ready", since=mark))["gateway"])
        await node.stand(a="plugin", b="dra")
        assert node.place.server.objects[SLICE]["metadata"]["resourceVersion"] == written, "no slice is written for it"
        new, _ = await node.registered(2)
        assert (await new.unprepare(V1, waits))["uid-w"] is None
        await node.manager.admit("p1", {GPU: 1})


async def test_the_death_of_the_one_that_stands_by_changes_nothing(node: Node) -> None:
    async with node.pair() as process:
        serves, stands_by = await ready(process)
        await node.manager.wait(GPU, 2)
        await node.registered(2)
        mark = process.seen
        (written := cdi.path_of(DRIVER, "u", node.place.folder / "cdi")).parent.mkdir(exist_ok=True)
        written.touch()
        os.utime(written, (0, 0))  # Long ago, for a claim that no state file has.
        os.kill(stands_by, signal.SIGKILL)
        assert (await ready(process, mark))[0] == serves
        front, _ = await node.registered(2)
        assert written.exists(), "who decides writes specifications, and removes them"
        await node.cross("dra")
        await node.stand(a="dra", b="dra")
        await until(lambda: len(node.place.published) == 2)
        assert isinstance((await front.prepare(V1, node.place.claim("c", "uid-c", "gpu-0")))["uid-c"], tuple)
        assert not process.lines("registered", mark)


@pytest.mark.parametrize("later", [0.0, 0.004, 0.01, 0.03], ids=lambda one: f"{1e3 * one:g} ms")
async def test_both_die_and_what_was_promised_is_kept(node: Node, later: float) -> None:
    async with node.pair() as process:
        serves, stands_by = await ready(process)
        await node.manager.wait(GPU, 2)
        front, _ = await node.registered(2)
        await node.parted()
        asked = node.place.claim("c", "uid-c", "gpu-1")
        prepared = (await front.prepare(V1, asked))["uid-c"]
        assert isinstance(prepared, tuple)
        mark = process.seen
        os.kill(serves, signal.SIGKILL)
        await asyncio.sleep(later)  # The other one is in the midst of taking over.
        os.kill(stands_by, signal.SIGKILL)
        await ready(process, mark)
        await node.manager.wait(GPU, 1)
        await node.stand(a="plugin", b="dra")
        for one in await node.registered(2):
            assert (await one.prepare(V1, asked))["uid-c"] == prepared
        assert list(node.place.published) == ["gpu-1"]
        await node.manager.admit("p1", {GPU: 1})


async def test_what_an_operator_says_of_a_device_is_known_to_the_next_one_at_once(node: Node) -> None:
    async with node.pair() as process:
        mark = 0
        for op, left in (("cordon", 1), ("uncordon", 2)):
            serves, _ = await ready(process, mark)
            await node.manager.wait(GPU, 3 - left)
            mark = process.seen
            await node.order(op, "GPU-a")  # The one that stands by takes no orders.
            os.kill(serves, signal.SIGKILL)
            await process.wait_for("registered", since=mark)
            await node.manager.wait(GPU, left)
        assert not process.lines("cordons lifted by a changed state file")


async def test_a_pair_of_claims_alone(node: Node) -> None:
    async with node.pair("only") as process:
        serves, _ = await ready(process)
        front, _ = await node.registered(2)
        await until(lambda: len(node.place.published) == 2)
        node.place.server.remove(SLICE)
        await until(lambda: len(node.place.published) == 2)  # By the one that decides, though another one came later.
        asked = node.place.claim("c", "uid-c", "gpu-0")
        prepared = (await front.prepare(V1, asked))["uid-c"]
        assert isinstance(prepared, tuple)
        os.kill(serves, signal.SIGKILL)
        assert (await front.prepare(V1, asked))["uid-c"] == prepared
        other = node.place.claim("d", "uid-d", "gpu-1")
        assert isinstance((await front.prepare(V1, other))["uid-d"], tuple)


async def test_a_pair_of_claims_alone_takes_over_from_one_without_a_lock(node: Node) -> None:
    async with node.pair("only", standby=False) as old:
        await node.registered(1)
        await until(lambda: len(node.place.published) == 2)
        async with node.pair("only") as new:
            await ready(new)
            await node.registered(3)
            assert await old.terminate() == 0
            front, _ = await node.registered(2)
            asked = node.place.claim("c", "uid-c", "gpu-0")
            assert isinstance((await front.prepare(V1, asked))["uid-c"], tuple)
            assert len(node.place.published) == 2


CRASHES = """
import os
from gateway.dra.driver import ClaimsOf
async def crash(*_): os.abort()
ClaimsOf._take = crash
"""


async def test_a_claim_that_ends_a_gateway_does_not_end_the_next_one(node: Node) -> None:
    async with node.pair("only", CRASHES) as process:
        _, stood_by = await ready(process)
        front, _ = await node.registered(2)
        await until(lambda: len(node.place.published) == 2)
        asked = node.place.claim("c", "uid-c", "gpu-0")
        answer = (await front.prepare(V1, asked))["uid-c"]
        assert isinstance(answer, Refused)
        assert "crashed while it answered this very request" in answer.reason
        assert (await process.wait_for("a gateway of the pair died"))["status"] == -signal.SIGABRT
        assert stood_by in children(process.pid)


async def test_a_pair_makes_room_for_a_newer_pair_and_serves_again_when_that_ends(node: Node) -> None:
    async with node.pair() as old:
        await ready(old)
        await node.manager.wait(GPU, 2)
        await node.cross("dra", "GPU-b")
        await node.stand(a="plugin", b="dra")
        async with node.pair() as new:
            await ready(new)
            await old.wait_for("making room for a newer gateway")
            await node.manager.wait(GPU, 1)
            await node.stand(a="plugin", b="dra")
            front, *_ = node.living()
            asked = node.place.claim("c", "uid-c", "gpu-1")
            assert isinstance((await front.prepare(V1, asked))["uid-c"], tuple)
            await new.wait_for("claim prepared")
            mark = old.seen
        await old.wait_for("registered", since=mark)
        await node.stand(a="plugin", b="dra")
        await node.manager.wait(GPU, 1)
        assert await old.terminate() == 0
        assert list(node.registry.iterdir()) == []


async def test_a_claim_that_waits_while_a_pair_makes_room_is_answered_by_the_newer_one(node: Node) -> None:
    async with node.pair("on") as old:
        await ready(old)
        await node.manager.wait(GPU, 2)
        front, _ = await node.registered(2)
        first, waiting = await node.one_waits(front)
        async with node.pair("on") as new:
            await old.wait_for("making room for a newer gateway")
            async with asyncio.timeout(END_TIME / 2):
                await new.wait_for("registered")
            newer, *_ = node.living()
            assert (await newer.unprepare(V1, first))["uid-c"] is None
            assert isinstance((await waiting)["uid-w"], tuple)
            await new.wait_for("claim prepared")


async def test_who_is_told_to_end_while_a_claim_waits_in_it_keeps_nobody_from_serving(node: Node) -> None:
    async with node.pair() as process:
        serves, _ = await ready(process)
        await node.manager.wait(GPU, 2)
        front, _ = await node.registered(2)
        first, waiting = await node.one_waits(front)
        mark = process.seen
        os.kill(serves, signal.SIGTERM)  # By hand: the parent would have ended the other one first.
        await process.wait_for("registered", since=mark)
        assert not waiting.done()
        assert (await front.unprepare(V1, first))["uid-c"] is None
        assert isinstance((await waiting)["uid-w"], tuple)
        await ready(process, mark)


KEEPS = "from gateway.handover import alone; alone.KEEPS = 0.05"


async def test_an_emptied_state_directory_keeps_no_claim_from_its_gpu(node: Node) -> None:
    async with node.pair(program=KEEPS) as process:
        serves, _ = await ready(process)
        await node.manager.wait(GPU, 2)
        front, _ = await node.registered(2)
        await node.parted()
        for path in (node.place.folder / "state").iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        asked = node.place.claim("c", "uid-c", "gpu-1")
        prepared = (await front.prepare(V1, asked))["uid-c"]
        assert isinstance(prepared, tuple)
        os.kill(serves, signal.SIGKILL)
        assert (await front.prepare(V1, asked))["uid-c"] == prepared


# Its parts.


def role(*, first: bool) -> tuple[Role, int]:
    reading, writing = os.pipe()
    flight, pulse = Flight(), Pulse()
    return Role(flight, pulse, reading, 1, first=first), writing


def alone(state: Path, born_ns: int, one: Role | None) -> Alone:
    return Alone(Age(born_ns, f"{born_ns:08x}"), state, dict, lambda: None, Scribe(Ledger(state)), role=one)


async def test_who_stands_by_takes_no_lock_before_the_other_one_dies(tmp_path: Path) -> None:
    serves = alone(tmp_path, 2, None)
    assert not await serves.begin()
    its, pipe = role(first=False)
    its.attach()
    one = alone(tmp_path, 1, its)
    assert await one.begin()
    assert (serves.decider(), one.decider()) == ("", f"{2:08x}")
    waiting = asyncio.ensure_future(one.succeed(lambda: ""))
    await until(lambda: one.waits_for == STANDS_BY)
    serves.close()  # It makes room for a newer one: that one gets it.
    await asyncio.sleep(0.05)
    newer = alone(tmp_path, 3, None)
    async with asyncio.timeout(10):
        assert not await newer.begin()
    newer.close()
    assert not waiting.done()
    os.write(pipe, b"1")
    await waiting
    assert one.decider() == ""
    assert alone(tmp_path, 4, None).decider() == f"{1:08x}"
    one.close()
    os.close(pipe)


async def test_who_takes_over_goes_back_to_waiting_where_a_newer_gateway_has_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer, (its, pipe), resigned = alone(tmp_path, 3, None), role(first=False), list[int]()
    monkeypatch.setattr(its, "resign", resigned.append)
    assert not await newer.begin()
    its.attach()
    others = {Age(3, f"{3:08x}"): None}
    one = Alone(Age(1, f"{1:08x}"), tmp_path, lambda: others, lambda: None, Scribe(Ledger(tmp_path)), role=its)
    waiting = asyncio.ensure_future(one.succeed(lambda: ""))
    os.write(pipe, b"1")  # The other one of the pair has died.
    await until(lambda: bool(resigned))
    waiting.cancel()
    newer.close()
    os.close(pipe)


async def test_a_lock_that_was_removed_is_made_anew_where_nobody_else_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.handover.alone.KEEPS", 0.01)
    resigned = asyncio.Event()
    one = Alone(Age(1, f"{1:08x}"), tmp_path, dict, resigned.set, Scribe(Ledger(tmp_path)))
    assert not await one.begin()
    keeping = asyncio.ensure_future(one.keep())
    lock, other = tmp_path / LOCK, alone(tmp_path, 2, None)
    open_before, failed = descriptors(os.getpid()).keys(), list[Path]()

    def fail(path: Path) -> int:
        failed.append(path)
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as disk:
        disk.setattr(file, "hold", fail)
        lock.unlink()
        await until(lambda: len(failed) > 1)
    await until(lock.exists)
    await until(lambda: other.decider() == f"{1:08x}")
    assert one.decider() == "", "it is this one"
    assert file.hold(lock) < 0
    assert len(descriptors(os.getpid())) == len(open_before)
    assert not resigned.is_set()
    lock.unlink()
    taken = file.hold(lock)
    assert taken >= 0
    async with asyncio.timeout(30):
        await resigned.wait()
    keeping.cancel()
    os.close(taken)
    assert other.decider() == ""


async def test_what_the_other_one_died_at_is_waited_for() -> None:
    flight, answered = Flight(), []

    async def answer(_: object, request: bytes, __: object) -> bytes:
        answered.append(request)
        return b""

    for status, refused in ((-signal.SIGSEGV, True), (-signal.SIGKILL, False)):
        request = b"%d" % status
        flight.take(1)
        flight.begin("Prepare", request)  # It dies at that.
        flight.take(0)
        answering = asyncio.ensure_future(flight.guard("Prepare", answer)(None, request, None))
        await asyncio.sleep(0.05)
        assert not answering.done()
        flight.landed(1, status)
        if refused:
            with pytest.raises(RefusedError):
                await answering
        else:
            await answering
    assert answered == [b"-9"]


async def test_who_takes_over_goes_by_what_the_other_one_remembered_last_before_it_decides() -> None:
    done: list[str] = []

    async def succeed(_: object) -> None:
        done.append("lock")

    async def update() -> None:
        done.append("lists")

    holdings = SimpleNamespace(recall=lambda *, fresh: done.append(f"recalled, {fresh=}"))
    gateway = SimpleNamespace(holdings=holdings, presence=SimpleNamespace(kubelet=None), update=update)
    drivers = SimpleNamespace(decide=lambda: done.append("decides"))
    await daemon._succeed(*cast("Any", (gateway, SimpleNamespace(succeed=succeed), drivers)))
    assert done == ["lock", "recalled, fresh=True", "decides", "lists"]


def test_calls_are_passed_on_to_the_instance_that_came_last(folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        for age, name in enumerate(("0000000b", "0000000c", "0000000a", "0000000d")):
            path = sockets.path_of(folder, DRIVER, name)
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.bind(str(path))
            if name != "0000000d":  # It ended.
                one.listen()
            os.utime(path, ns=(age, age))
        assert sockets.newest(folder, DRIVER, "0000000a") == sockets.path_of(folder, DRIVER, "0000000c")
        assert sockets.newest(folder, DRIVER, "0000000b") == sockets.path_of(folder, DRIVER, "0000000a")


async def test_what_no_gateway_wrote_names_nobody(tmp_path: Path) -> None:
    one = alone(tmp_path, 1, None)
    assert one.decider() == ""
    for said in (b"", b"../../etc", b"\xff" * 8):
        (tmp_path / "alone.lock").write_bytes(said)
        assert one.decider() == ""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose sockets have short names."""
    with tempfile.TemporaryDirectory(prefix="duo-") as path:
        yield Path(path)


class Claims:
    """Prepares all that it is asked for, and notes it."""

    def __init__(self, *, decides: bool) -> None:
        self.name, self.prepared, self.decides, self.news = DRIVER, list[str](), asyncio.Event(), asyncio.Event()
        self.hangs, self.left = asyncio.Event(), False
        if decides:
            self.decides.set()
        self.hangs.set()

    async def prepare(self, claim: ClaimName) -> Answer:
        self.prepared.append(claim.uid)
        try:
            await self.hangs.wait()
            await self.decides.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)  # What is being written is finished.
            self.left = True
            raise
        return (Prepared(("gpu",), "n1", "gpu-0", ()),)

    async def unprepare(self, claim: ClaimName) -> Refused | None:
        return Refused(f"by {'who decides' if self.decides.is_set() else 'another'}")

    def health(self) -> list[object]:
        return []

    def answered(self, claim: ClaimName, refused: str) -> None:
        pass

    def registered(self, reason: str) -> None:
        raise AssertionError(reason)


async def test_who_does_not_decide_passes_on_and_answers_only_when_it_does(folder: Path) -> None:
    serves, stands_by = Claims(decides=True), Claims(decides=False)
    decider = sockets.path_of(folder, DRIVER, "0000000a")
    one = Service(serves)  # type: ignore[arg-type]
    await one.start(decider)
    token = ["0000000a"]
    other = Service(stands_by, lambda: sockets.of_another(folder, DRIVER, lambda: token[0]))  # type: ignore[arg-type]
    await other.start(folder / "front.sock")
    kubelet, asked = Kubelet(folder / "front.sock"), ClaimName("ns", "c", "u")
    assert isinstance((await kubelet.prepare(V1, asked))["u"], tuple)
    assert (await kubelet.unprepare(V1, asked))["u"] == Refused("by who decides")
    health = kubelet.watch("v1")
    assert (serves.prepared, stands_by.prepared) == (["u"], [])
    serves.hangs.clear()
    waiting = asyncio.ensure_future(kubelet.prepare(V1, asked))
    await until(lambda: len(serves.prepared) == 2)
    assert one._server is not None
    await one._server.stop(0)  # It dies.
    await asyncio.sleep(0.05)
    assert (waiting.done(), stands_by.prepared) == (False, [])
    reading = asyncio.ensure_future(health.read())
    await asyncio.sleep(0.05)
    assert not reading.done(), "what it doesn't know it doesn't say"
    stands_by.decides.set()
    assert isinstance((await waiting)["u"], tuple)
    assert stands_by.prepared == ["u"]
    await reading
    health.cancel()
    await kubelet.channel.close()
    await other.stop()


async def test_what_waits_is_decided_here_no_more_and_answered_by_the_successor_however_late(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.dra.service.GRACE", 0.05)
    leaves, comes = Claims(decides=True), Claims(decides=True)
    leaves.hangs.clear()
    comes.hangs.clear()
    one, other = Service(leaves), Service(comes)  # type: ignore[arg-type]
    await one.start(folder / "a.sock")
    await other.start(folder / "b.sock")
    kubelet = Kubelet(folder / "a.sock")
    waiting = asyncio.ensure_future(kubelet.prepare(V1, ClaimName("ns", "c", "u")))
    await until(lambda: leaves.prepared == ["u"])
    async with asyncio.timeout(30):
        await one.stop(folder / "b.sock")
    assert leaves.left, "who comes decides from now on"
    await until(lambda: comes.prepared == ["u"])
    finishing = asyncio.ensure_future(one.finish())
    await asyncio.sleep(0.2)
    assert (waiting.done(), finishing.done()) == (False, False)
    comes.hangs.set()
    assert isinstance((await waiting)["u"], tuple)
    await finishing
    await kubelet.channel.close()
    await other.stop()


async def test_where_nobody_decides_a_call_is_answered_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.dra.service.PATIENCE", 0.0)
    one = Service(Claims(decides=False))  # type: ignore[arg-type]
    await one.start(folder / "a.sock")
    kubelet = Kubelet(folder / "a.sock")
    assert (await kubelet.unprepare(V1, ClaimName("ns", "c", "u")))["u"] == Refused("by another")
    await kubelet.channel.close()
    await one.stop()


async def test_an_error_of_who_decides_is_passed_back(folder: Path) -> None:
    async def refuse(_: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        raise await context.abort(grpc.StatusCode.INTERNAL, "no")

    decider = folder / "a.sock"
    serving = grpc.aio.server()
    handlers: dict[str, Any] = {"NodePrepareResources": grpc.unary_unary_rpc_method_handler(refuse)}
    serving.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1.service, handlers),))
    serving.add_insecure_port(f"unix:{decider}")
    await serving.start()
    other = Service(Claims(decides=False), lambda: decider)  # type: ignore[arg-type]
    await other.start(folder / "front.sock")
    kubelet = Kubelet(folder / "front.sock")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await kubelet.prepare(V1, ClaimName("ns", "c", "u"))
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, "no")
    await kubelet.channel.close()
    await other.stop()
    await serving.stop(0)


async def test_a_kubelet_that_takes_one_instance_gets_the_next_one_when_that_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "AGAIN", 3600.0)  # There is no next look.
    learned, decides, there = asyncio.Event(), asyncio.Event(), [Path("a")]
    learned.set()
    waiting = asyncio.ensure_future(
        sockets.until_alone(DRIVER, lambda: there, lambda: 32, lambda: "", learned, decides)
    )
    await asyncio.sleep(0.05)
    there.clear()
    decides.set()
    async with asyncio.timeout(30):
        await waiting
