"""Following the configuration file: an edit and SIGHUP bring a new policy; a bad file brings none."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import structlog
from msgspec.structs import replace
from structlog.testing import capture_logs
from structlog.typing import EventDict

from devices.files import FileWatch
from devices.policy import MigStrategy, Policy
from gateway.configuration import file as config
from gateway.configuration import flags, reload
from gateway.configuration.settings import Given, Settings

MIXED, SINGLE = "flags: {migStrategy: mixed}", "flags: {migStrategy: single}"


class Said(list[EventDict]):
    """What was logged, and a way to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self._news = asyncio.Event()

    def append(self, line: EventDict) -> None:
        super().append(line)
        self._news.set()

    async def until(self, event: str, count: int = 1) -> None:
        """Wait until something was said so many times."""
        async with asyncio.timeout(10):
            while self.times(event) < count:
                self._news.clear()
                await self._news.wait()

    def times(self, event: str) -> int:
        return sum(one["event"].startswith(event) for one in self)


def put(file: Path, text: str) -> None:
    """Write a file as editors do: a new one in the old one's place."""
    new = file.with_name("new")
    new.write_text(text)
    new.replace(file)


def take_away(file: Path) -> None:
    """Leave nothing in its place."""
    file.unlink(missing_ok=True)


@pytest.fixture
def said() -> Iterator[Said]:
    with capture_logs():
        (capture,) = structlog.get_config()["processors"]
        capture.entries = lines = Said()
        yield lines


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


class Fate(reload.FileFate):
    """What became of a file, and whether it was looked at."""

    def __init__(self) -> None:
        self.looked = asyncio.Event()
        super().__init__()

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "accepted_at" and value is not None:
            self.looked.set()


@asynccontextmanager
async def following(settings: Settings) -> AsyncIterator[list[Policy]]:
    """The policies that are adopted, from when the file was looked at for the first time."""
    adopted: list[Policy] = []
    fate = Fate()
    task = asyncio.create_task(reload.follow(settings, adopted.append, fate))
    await (asyncio.sleep(0) if settings.config_file is None else fate.looked.wait())
    assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
    try:
        yield adopted
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, "SIGHUP would end a gateway that is ending"
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def started(file: Path, text: str) -> Settings:
    """What a gateway was started with that has this file."""
    put(file, text)
    return Settings(policy=config.policy(config.parse(text.encode(), str(file)), {}, "auto"), config_file=file)


async def test_an_edit_brings_a_new_policy(file: Path, said: Said) -> None:
    async with following(started(file, MIXED)) as adopted:
        put(file, SINGLE)
        await said.until("configuration adopted")
        assert adopted == [replace(Policy(), mig_strategy=MigStrategy.SINGLE)]
        assert [one["changed"] for one in said if one["event"] == "configuration adopted"] == [["mig_strategy"]]


async def test_an_edit_that_changes_nothing_is_answered(file: Path, said: Said) -> None:
    async with following(started(file, MIXED)) as adopted:
        put(file, MIXED + "\n# a word")
        await said.until("configuration read: nothing changed")
        assert adopted == []


async def test_an_edit_between_the_start_and_the_watch_is_seen(file: Path, said: Said) -> None:
    settings = started(file, MIXED)
    put(file, SINGLE)
    async with following(settings) as adopted:
        assert [policy.mig_strategy for policy in adopted] == [MigStrategy.SINGLE]


async def test_a_hangup_ends_it_at_no_moment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became, change = list[object](), signal.signal

    def note(number: int, to: signal.Handlers) -> object:
        became.append(to)
        return change(number, to)

    monkeypatch.setattr(signal, "signal", note)
    async with following(started(file, MIXED)):
        pass
    assert became.index(signal.SIG_IGN) < became.index(signal.SIG_DFL), "the default is the test's own end"


async def test_a_start_says_nothing_again(file: Path, said: Said) -> None:
    async with following(started(file, MIXED + "\nunknown: 1")):
        put(file, SINGLE + "\nunknown: 1")
        await said.until("configuration adopted")
    assert [one["event"] for one in said] == ["configuration", "configuration adopted"]


async def test_sighup_answers_even_if_nothing_changed(file: Path, said: Said) -> None:
    async with following(started(file, MIXED)) as adopted:
        os.kill(os.getpid(), signal.SIGHUP)
        await said.until("configuration read: nothing changed")
        assert adopted == []


async def test_sighup_takes_what_inotify_missed(file: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileWatch, "changed", lambda _: asyncio.Event().wait())
    async with following(started(file, MIXED)) as adopted:
        put(file, SINGLE)
        os.kill(os.getpid(), signal.SIGHUP)
        await said.until("configuration adopted")
        assert [policy.mig_strategy for policy in adopted] == [MigStrategy.SINGLE]


async def test_a_bad_file_leaves_the_last_good_one_and_a_later_good_one_is_taken(file: Path, said: Said) -> None:
    async with following(started(file, MIXED)) as adopted:
        put(file, "flags: {migStrategy: both}")
        await said.until("configuration rejected")
        assert adopted == []
        put(file, "flags: [")
        await said.until("configuration rejected", 2)
        put(file, SINGLE)
        await said.until("configuration adopted")
    assert [policy.mig_strategy for policy in adopted] == [MigStrategy.SINGLE]
    assert said.times("configuration rejected") == 2
    assert ["line 1: flags.migStrategy" in one["reason"] for one in said if "reason" in one] == [True, False]


async def test_a_bad_file_is_complained_of_once(file: Path, said: Said) -> None:
    put(file, "flags: [")
    current = reload._Current(Settings(), file, lambda _: None, reload.FileFate())
    assert [await current.look(asked=asked) for asked in (False, False, True, False)] == [True] * 4
    assert [one["event"] for one in said].count(said[0]["event"]) == len(said) == 2  # and again when asked


async def test_a_file_that_is_replaced_by_way_of_nothing_is_no_fault(file: Path, said: Said) -> None:
    policies: list[Policy] = []
    fate = reload.FileFate()
    current = reload._Current(Settings(), file, policies.append, fate)
    assert not await current.look(asked=False)
    assert said == []
    assert [await current.look(asked=False) for _ in range(3)] == [False] * 3
    assert [one["event"][:22] for one in said] == ["configuration rejected"]
    put(file, SINGLE)
    assert await current.look(asked=False)
    assert [policy.mig_strategy for policy in (*policies, fate.policy) if policy] == [MigStrategy.SINGLE] * 2


async def test_a_file_that_is_emptied_before_it_is_written_is_no_edit(file: Path, said: Said) -> None:
    policies: list[Policy] = []
    put(file, SINGLE)
    current = reload._Current(Settings(), file, policies.append, reload.FileFate())
    assert await current.look(asked=False)
    for text, looked in (("", False), (SINGLE, True), ("", False)):
        put(file, text)
        assert (await current.look(asked=False), len(policies)) == (looked, 1)
    assert await current.look(asked=False), "it stays empty, and that is a configuration"
    assert policies[1:] == [Policy()]


async def test_an_empty_file_counts_at_once_where_somebody_asks(file: Path, said: Said) -> None:
    policies: list[Policy] = []
    put(file, SINGLE)
    current = reload._Current(Settings(), file, policies.append, reload.FileFate())
    assert await current.look(asked=False)
    put(file, "")
    assert await current.look(asked=True)
    assert policies[1:] == [Policy()]


async def test_to_read_it_holds_nobody_up(file: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk may be slow, the text long, and the other gateway of a pair at it, which is waited for."""
    threads: list[int] = []

    def noting(real: Callable[..., object], *args: object, **more: object) -> object:
        threads.append(threading.get_ident())
        return real(*args, **more)

    for name in ("read", "parse"):
        monkeypatch.setattr(config, name, partial(noting, getattr(config, name)))
    put(file, SINGLE)
    assert await reload._Current(Settings(), file, lambda _: None, reload.FileFate()).look(asked=False)
    assert len(threads) == 2
    assert threading.get_ident() not in threads


async def test_what_became_of_the_file_is_known(file: Path) -> None:
    fate = reload.FileFate()
    current = reload._Current(Settings(), file, lambda _: None, fate)

    async def look(text: str | None) -> str:
        take_away(file)
        if text is not None:
            put(file, text)
        await current.look(asked=False)
        return fate.error

    assert (await look(SINGLE), fate.accepted_at is not None) == ("", True)
    accepted_at = fate.accepted_at
    assert "line 2" in (bad := await look("flags: ["))
    assert await look("flags: [") == bad
    assert fate.accepted_at == accepted_at
    assert await look(None) == bad, "it may be about to be replaced"
    assert await look(None) not in {"", bad}
    assert await look("flags: [") == bad, "it is back, and as bad as before"
    assert await look(SINGLE) == ""
    assert [await look(None), await look(None) == "", await look(SINGLE)] == ["", False, ""], (
        "it is back, and as good as before"
    )


async def test_a_file_that_comes_back_as_it_was_changes_nothing(file: Path, said: Said) -> None:
    policies: list[Policy] = []
    put(file, SINGLE)
    current = reload._Current(
        Settings(policy=Policy(mig_strategy=MigStrategy.SINGLE)), file, policies.append, reload.FileFate()
    )
    assert await current.look(asked=False)
    take_away(file)
    assert not await current.look(asked=False)
    put(file, SINGLE)
    assert await current.look(asked=False)
    take_away(file)
    assert not await current.look(asked=False)  # Once more, for the first time.
    assert (policies, said) == ([], [])


async def test_the_command_line_beats_every_edit(file: Path, said: Said) -> None:
    policies: list[Policy] = []
    given = {"mig-strategy": Given("none", "--mig-strategy")}
    put(file, "flags: {migStrategy: mixed, gdsEnabled: true}")
    assert await reload._Current(Settings(given=given), file, policies.append, reload.FileFate()).look(asked=False)
    assert policies == [Policy(gds=True)]


@pytest.mark.parametrize(
    ("text", "adopted", "fixed"),
    [
        ("flags: {failOnInitError: true}", [], ["fail_on_init_error"]),
        (
            "flags: {gdsEnabled: true, plugin: {containerDriverRoot: /host}}",
            [Policy(gds=True)],
            ["container_driver_root"],
        ),
        ("flags: {gdsEnabled: true}", [Policy(gds=True)], None),
    ],
)
async def test_what_counts_at_a_start_only_is_said_to_need_one(
    file: Path, said: Said, text: str, adopted: list[Policy], fixed: list[str] | None
) -> None:
    policies: list[Policy] = []
    put(file, text)
    assert await reload._Current(Settings(), file, policies.append, reload.FileFate()).look(asked=False)
    assert policies == adopted
    assert [one["settings"] for one in said if "started anew" in one["event"]] == ([fixed] if fixed else [])


async def test_an_unknown_key_is_refused_in_an_edit_too_where_that_is_wanted(file: Path, said: Said) -> None:
    policies: list[Policy] = []
    put(file, "flags: {gdsEnabled: true}\nunknown: 1")
    assert await reload._Current(Settings(strict_config=True), file, policies.append, reload.FileFate()).look(
        asked=False
    )
    assert (policies, len(said)) == ([], 1)
    assert await reload._Current(Settings(), file, policies.append, reload.FileFate()).look(asked=False)
    assert policies == [Policy(gds=True)]


async def test_without_a_file_sighup_has_nothing_to_reload(said: Said) -> None:
    async with following(Settings()) as adopted:
        for count in (1, 2):
            os.kill(os.getpid(), signal.SIGHUP)
            await said.until("SIGHUP, but there is nothing to reload", count)
        assert adopted == []


def test_every_field_that_a_backend_starts_by_is_a_policys() -> None:
    assert set(reload._AT_START) <= {flag.field for flag in flags.FLAGS}
