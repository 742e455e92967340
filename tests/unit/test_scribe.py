"""The scribe: what is promised to be on disk is, in as few writes as possible, and no disk holds the gateway up."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from devices.model import Device
from gateway.memory import scribe as module
from gateway.memory.file import LedgerError, ReadFile
from gateway.memory.ledger import Ledger, LedgerSnapshot, Written
from gateway.memory.rows import Cordon
from gateway.memory.scribe import Scribe

GPU = "nvidia.com/gpu"
SMELLS = Cordon("smells", 1.0)


class Disk(Ledger):
    """A ledger whose writes can be held up, made to fail, counted and awaited."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.loop = asyncio.get_running_loop()
        self.begun: asyncio.Queue[int] = asyncio.Queue()
        """One entry, the thread, for each write that has begun."""
        self.ended: asyncio.Queue[bool] = asyncio.Queue()
        """One entry for each write that has ended: whether it succeeded."""
        self.settled = asyncio.Event()
        self.answers = threading.Event()
        self.answers.set()
        self.once = False
        """Whether ``answers`` lets one write through, not all that follow."""
        self.trouble: Exception | None = None

    def save(self, snapshot: LedgerSnapshot) -> Written:
        self.loop.call_soon_threadsafe(self.begun.put_nowait, threading.get_ident())
        self.answers.wait(timeout=60)
        if self.once:
            self.answers.clear()
        try:
            if self.trouble is not None:
                raise self.trouble
            return super().save(snapshot)
        finally:
            self.loop.call_soon_threadsafe(self.ended.put_nowait, self.trouble is None)

    def settle(self, snapshot: LedgerSnapshot, written: Written) -> None:
        super().settle(snapshot, written)
        self.settled.set()

    def on_disk(self) -> set[str]:
        fresh = Ledger(self.path.parent)
        fresh.load()
        return set(fresh.cordons)


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[Disk]:
    one = Disk(tmp_path)
    yield one
    one.once = False
    one.answers.set()  # No thread of a test that failed waits on, and the end of the loop for it.


async def next_of(queue: asyncio.Queue[int] | asyncio.Queue[bool]) -> int:
    async with asyncio.timeout(10):
        return await queue.get()


async def test_durable_is_on_disk(disk: Disk) -> None:
    scribe = Scribe(disk)
    disk.cordon("GPU-1", SMELLS)
    assert await scribe.durable()
    assert disk.on_disk() == {"GPU-1"}
    assert await next_of(disk.begun) != threading.get_ident()  # The loop has better things to do.


async def test_nothing_new_is_no_write(disk: Disk) -> None:
    scribe = Scribe(disk)
    disk.cordon("GPU-1", SMELLS)
    assert await scribe.durable()
    assert await scribe.durable()
    await scribe.close()
    assert scribe.state.writes == 1


async def test_who_comes_during_a_write_shares_the_next(disk: Disk) -> None:
    scribe = Scribe(disk)
    disk.answers.clear()
    disk.once = True

    async def change(name: str) -> bool:
        disk.cordon(name, SMELLS)
        return await scribe.durable() and name in disk.on_disk()

    first = asyncio.ensure_future(change("GPU-0"))
    await next_of(disk.begun)
    others = [asyncio.ensure_future(change(f"GPU-{n}")) for n in range(1, 9)]
    await asyncio.sleep(0)  # They are waiting now.
    disk.answers.set()
    assert await first  # Whoever takes that write for its own looks at the disk now, before the next one.
    begun = asyncio.ensure_future(next_of(disk.begun))
    await asyncio.wait({begun, *others}, return_when=asyncio.FIRST_COMPLETED)
    assert not any(one.done() for one in others)
    await begun
    disk.answers.set()
    assert await asyncio.gather(*others) == [True] * 8
    assert scribe.state.writes == 2


async def test_soon_is_one_write_for_all_that_comes_meanwhile(disk: Disk) -> None:
    scribe = Scribe(disk)
    for name in ("GPU-1", "GPU-2", "GPU-3"):
        disk.hand_out(GPU, [name], "v1beta1", 1.0)
        scribe.soon()
    assert (scribe.state.pending, scribe.state.writes, scribe.state.written_s) == (3, 0, None)
    await next_of(disk.ended)
    assert await scribe.durable()
    assert (scribe.state.pending, scribe.state.writes, scribe.state.written_s is not None) == (0, 1, True)


async def test_soon_during_a_write_is_written_next(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SOON", 0.0)
    scribe = Scribe(disk)
    disk.answers.clear()
    disk.cordon("GPU-1", SMELLS)
    scribe.soon()
    await next_of(disk.begun)
    disk.cordon("GPU-2", SMELLS)
    scribe.soon()
    disk.answers.set()
    await next_of(disk.ended)
    await next_of(disk.ended)
    assert disk.on_disk() == {"GPU-1", "GPU-2"}


async def test_a_caller_that_leaves_ends_no_write(disk: Disk) -> None:
    scribe = Scribe(disk)
    disk.answers.clear()
    disk.cordon("GPU-1", SMELLS)
    caller = asyncio.ensure_future(scribe.durable())
    await next_of(disk.begun)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    disk.answers.set()
    await next_of(disk.ended)
    assert await scribe.durable()
    assert (disk.on_disk(), scribe.state.writes) == ({"GPU-1"}, 1)


async def test_a_failure_is_said_once_for_each_reason_and_tried_again(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_FIRST", 0.001)
    monkeypatch.setattr(module, "RETRY_MAX", 0.004)
    scribe = Scribe(disk)
    disk.trouble = LedgerError("the disk is full")
    disk.cordon("GPU-1", SMELLS)
    with capture_logs() as logs:
        assert not await scribe.durable()
        assert not await scribe.durable()
        assert (scribe.state.writable, scribe.state.error) == (False, "the disk is full")
        for _ in range(5):
            await next_of(disk.ended)
        disk.trouble = LedgerError("the disk is read-only")
        while scribe.state.error != "the disk is read-only":
            await next_of(disk.begun)
        disk.trouble = None
        async with asyncio.timeout(30):
            await disk.settled.wait()
    assert [(log["event"], log.get("reason")) for log in logs] == [
        ("state file not written", "the disk is full"),
        ("state file not written", "the disk is read-only"),
        ("state file written again", None),
    ]
    assert disk.on_disk() == {"GPU-1"}
    assert (scribe.state.writable, scribe.state.error) == (True, "")


@pytest.fixture
async def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each call was to wait: it comes at once."""
    found: list[float] = []
    loop = asyncio.get_running_loop()

    def at_once(delay: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        found.append(delay)
        return loop.call_at(0, call)

    monkeypatch.setattr(loop, "call_later", at_once)
    return found


async def test_tries_grow_rarer_up_to_a_limit(disk: Disk, waits: list[float]) -> None:
    scribe = Scribe(disk)
    disk.trouble = LedgerError("the disk is full")
    disk.cordon("GPU-1", SMELLS)
    scribe.soon()
    for _ in range(12):
        await next_of(disk.ended)
    disk.trouble = None
    await scribe.close()
    assert waits[:11] == pytest.approx([0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30])


async def test_after_a_success_the_next_failure_is_tried_again_soon(disk: Disk, waits: list[float]) -> None:
    scribe = Scribe(disk)
    disk.trouble = LedgerError("the disk is full")
    disk.cordon("GPU-1", SMELLS)
    scribe.soon()
    for _ in range(3):
        await next_of(disk.ended)
    disk.trouble = None
    await disk.settled.wait()
    await asyncio.sleep(0)  # It goes on once it is settled.
    waits.clear()
    disk.trouble = LedgerError("the disk is full")
    disk.cordon("GPU-2", SMELLS)
    scribe.soon()
    while len(waits) < 3:
        await next_of(disk.ended)
        await asyncio.sleep(0)
    disk.trouble = None
    await scribe.close()
    assert waits[:3] == pytest.approx([0.075, 0.1, 0.2])


async def test_a_defect_is_a_failure_like_any(disk: Disk) -> None:
    scribe = Scribe(disk)
    disk.trouble = ZeroDivisionError("nobody thought of this")
    disk.cordon("GPU-1", SMELLS)
    with capture_logs() as logs:
        assert not await scribe.durable()
    assert [log["log_level"] for log in logs] == ["error", "error"]
    disk.trouble = None
    assert await scribe.durable()


async def test_a_real_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ledger = Ledger(tmp_path)
    scribe = Scribe(ledger)
    ledger.announce(GPU, (Device("GPU-1"),))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert not await scribe.durable()
    assert "No space left" in scribe.state.error
    assert await scribe.durable()
    assert scribe.state.writable


async def test_a_disk_that_does_not_answer_holds_nobody_up(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    scribe = Scribe(disk)
    disk.answers.clear()
    disk.cordon("GPU-1", SMELLS)
    monkeypatch.setattr(module, "PATIENCE", 0.01)
    assert not await scribe.durable()
    assert not scribe.state.writable
    disk.cordon("GPU-2", SMELLS)
    monkeypatch.setattr(module, "PATIENCE", 3600)
    async with asyncio.timeout(10):  # It is known by now: not waited for again.
        assert not await scribe.durable()
        await scribe.close()
    disk.answers.set()
    async with asyncio.timeout(30):
        await disk.settled.wait()
    assert await scribe.durable()
    assert (disk.on_disk(), scribe.state.writable) == ({"GPU-1", "GPU-2"}, True)


async def test_a_lock_that_somebody_keeps_is_said_until_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.memory.file.LOCK_WAIT", 0.0)
    disk = Disk(tmp_path)
    scribe = Scribe(disk)
    disk.cordon("GPU-1", SMELLS)
    with (tmp_path / "ledger.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not await scribe.durable()
        assert disk.on_disk() == {"GPU-1"}  # Written all the same, and once more when the lock is free.
        assert "without its lock" in scribe.state.error
    assert await scribe.durable()
    assert (scribe.state.writable, scribe.state.pending) == (True, 0)


async def test_close_writes_what_is_left_and_ends(disk: Disk) -> None:
    scribe = Scribe(disk)
    disk.hand_out(GPU, ["GPU-1"], "v1beta1", 1.0)
    scribe.soon()
    await scribe.close()
    assert (scribe.state.pending, scribe.state.writes) == (0, 1)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_close_does_not_wait_for_a_disk_to_recover(disk: Disk) -> None:
    scribe = Scribe(disk)
    disk.trouble = LedgerError("the disk is full")
    disk.cordon("GPU-1", SMELLS)
    await scribe.close()
    scribe.soon()
    assert (scribe.state.pending, disk.ended.qsize()) == (1, 1)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_after_the_close_nothing_is_written_by_itself(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    for wait in ("SOON", "RETRY_FIRST"):
        monkeypatch.setattr(module, wait, 0.001)
    scribe = Scribe(disk)
    disk.trouble = LedgerError("the disk is full")
    disk.cordon("GPU-1", SMELLS)
    await scribe.close()
    scribe.soon()
    await asyncio.sleep(0.05)  # It is the absence of events that is checked.
    assert disk.begun.qsize() == 1


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A state directory that isn't the gateway's alone, with a damaged ledger."""
    (tmp_path / "somebody's").mkdir()
    (tmp_path / "ledger.json").write_text("not json")
    tmp_path.chmod(0o755)
    return tmp_path


async def test_a_damaged_ledger_is_said_and_replaced(shared: Path) -> None:
    disk = Disk(shared)
    scribe = Scribe(disk)
    with capture_logs() as logs:
        await scribe.load()
    assert [log["event"] for log in logs] == ["state file not read in full", "the state directory is not private"]
    await next_of(disk.ended)
    assert await scribe.durable()
    assert disk.on_disk() == set()
    assert (shared / scribe.state.put_aside).read_text() == "not json"
    assert "--state-dir" in scribe.state.exposed


async def test_damage_by_others_during_service_is_said(disk: Disk) -> None:
    scribe = Scribe(disk)
    disk.cordon("GPU-1", SMELLS)
    assert await scribe.durable()
    disk.path.write_text("not json")
    disk.cordon("GPU-2", SMELLS)
    with capture_logs() as logs:
        assert await scribe.durable()
    assert [log["event"] for log in logs] == ["state file damaged by another program"]
    assert (disk.path.parent / scribe.state.put_aside).read_text() == "not json"
    assert disk.on_disk() == {"GPU-1", "GPU-2"}


@pytest.mark.parametrize("by_load", [False, True])
async def test_cordons_that_go_by_a_replaced_file_are_told(disk: Disk, *, by_load: bool) -> None:
    scribe = Scribe(disk)
    disk.cordon("GPU-1", SMELLS)
    disk.cordon("GPU-2", SMELLS)
    assert await scribe.durable()
    disk.uncordon("GPU-2")
    with capture_logs() as logs:
        assert await scribe.durable()
    assert logs == []  # That was an order.
    disk.path.write_text('{"format": 1}')
    with capture_logs() as logs:
        if by_load:
            await scribe.load()
        else:
            disk.accept("v1beta1")
            assert await scribe.durable()
    [line] = [line for line in logs if line["event"] == "cordons lifted by a changed state file"]
    assert line["devices"] == ["GPU-1"]
    await scribe.close()


async def test_a_state_file_that_nobody_wrote_is_looked_at_without_a_thread(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who takes over from a gateway that was killed asks for it while nobody serves."""
    scribe = Scribe(disk)
    disk.cordon("GPU-1", SMELLS)
    assert await scribe.durable()
    looked: list[object] = []
    monkeypatch.setattr(disk, "look", lambda: looked.append(None))
    await scribe.load()
    assert looked == []
    disk.path.write_text('{"format": 1}')
    await scribe.load()
    assert looked == [None]


async def test_what_is_written_while_the_file_is_read_is_newer(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.path.write_text('{"format": 1}')
    scribe, look = Scribe(disk), disk.look
    read, goes_on = asyncio.Event(), threading.Event()

    def look_slowly() -> ReadFile | OSError | None:
        found = look()
        disk.loop.call_soon_threadsafe(read.set)
        goes_on.wait(timeout=60)
        return found

    monkeypatch.setattr(disk, "look", look_slowly)
    loading = asyncio.create_task(scribe.load(patient=True))
    await read.wait()
    disk.cordon("GPU-1", SMELLS)
    assert await scribe.durable()
    goes_on.set()
    await loading
    assert (set(disk.cordons), disk.pending) == ({"GPU-1"}, 0)


async def test_a_state_directory_without_a_state_file_is_made_private(disk: Disk) -> None:
    folder = disk.path.parent
    folder.chmod(0o755)
    await Scribe(disk).load()
    assert folder.stat().st_mode & 0o777 == 0o700
