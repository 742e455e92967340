"""Which configuration file counts on a node: what NVIDIA's config-manager would choose, and what happens where it would end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from devices.policy import MigStrategy, Policy
from gateway.configuration import choice as choosing
from gateway.configuration import reload
from gateway.configuration.choice import ChoiceError, Label, choose, locate, remember, remembered
from gateway.configuration.flags import NODE_LABEL
from gateway.configuration.settings import Choice, ConfigError, Settings
from tests.unit.test_reload import MIXED, SINGLE, Said, put, said

__all__ = ["said"]

FOLDER = Path("/available-configs")


def rule(*fallbacks: str, default: str = "", folder: Path = FOLDER) -> Choice:
    return Choice(folder, NODE_LABEL, default, fallbacks)


@pytest.mark.parametrize(
    ("choice", "label", "names", "chosen"),
    [
        (rule(), "a100", ["a100", "default"], "a100"),
        (rule(default="t4"), "a100", ["a100", "t4"], "a100"),
        (rule(default="t4"), "", ["a100", "t4", "default"], "t4"),
        (rule("named"), "", ["default", "other"], "default"),
        (rule("named", "single"), "", ["only"], "only"),
        (rule("single", "named"), "", ["default", "other"], "default"),
        (rule("named", "single", "empty"), "", ["one", "two"], None),
        (rule("empty", "named"), "", ["default"], None),
        (rule("empty"), "", [], None),
    ],
)
def test_the_label_chooses_then_the_default_then_the_strategies_in_their_order(
    choice: Choice, label: str, names: list[str], chosen: str | None
) -> None:
    assert choose(choice, label, names) == chosen


@pytest.mark.parametrize(
    ("choice", "label", "names", "told"),
    [
        (rule(), "", ["a"], "no fallback strategy fits (none is given"),
        (rule("named"), "", ["a"], "has 'a'"),
        (rule("single"), "", ["a", "b"], "'a', 'b'"),
        (rule("single"), "", [], "no file"),
        (rule("named", "empty", default="b"), "a", ["b", "default"], f"{NODE_LABEL}=a names the configuration 'a'"),
        (rule("named", "empty", default="b"), "", ["default"], "the default configuration names the configuration 'b'"),
        (rule("single"), "", [f"name-{number}" for number in range(99)], "'name-15', ..."),
    ],
)
def test_where_nothing_is_chosen_the_reason_says_what_to_do(
    choice: Choice, label: str, names: list[str], told: str
) -> None:
    with pytest.raises(ChoiceError) as caught:
        choose(choice, label, names)
    assert told in str(caught.value)
    assert not caught.value.lasting, "a start of later may go well"


def test_a_mounted_config_map_has_files_and_the_links_of_its_volume(tmp_path: Path) -> None:
    (tmp_path / "..2026_11_22").mkdir()
    (tmp_path / "..2026_11_22" / "a100").write_text("version: v1")
    (tmp_path / "..data").symlink_to("..2026_11_22")
    (tmp_path / "a100").symlink_to("..data/a100")
    (tmp_path / "..of the volume").touch()
    (tmp_path / "folder").mkdir()
    assert locate(rule("single", folder=tmp_path), "") == tmp_path / "a100"


def test_a_label_reaches_no_other_folder(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "secret").touch()
    with pytest.raises(ChoiceError, match="names the configuration"):
        locate(rule(folder=tmp_path / "here"), "../secret")


def test_a_folder_that_isnt_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ChoiceError, match=f"{tmp_path}/x: expected a folder"):
        locate(rule(folder=tmp_path / "x"), "")


@pytest.mark.parametrize("text", ["first", "Named", " named"])
def test_another_strategy_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="FALLBACK_STRATEGIES: expected named, single, empty, got"):
        choosing.strategies(["named", text], "FALLBACK_STRATEGIES")


def test_a_label_is_remembered(tmp_path: Path) -> None:
    assert remembered(rule(), tmp_path) is None
    remember(rule(), tmp_path, "a100")
    assert remembered(rule(), tmp_path) == "a100"
    assert [path.name for path in tmp_path.iterdir()] == [choosing.MEMORY]
    remember(rule(), tmp_path, "")
    assert remembered(rule(), tmp_path) == ""
    assert remembered(replace(rule(), label="another"), tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[1]", b"{" + b" " * 10_000])
def test_a_memory_that_is_none_is_forgotten(tmp_path: Path, content: bytes) -> None:
    (tmp_path / choosing.MEMORY).write_bytes(content)
    assert remembered(rule(), tmp_path) is None


# While the gateway runs.


@asynccontextmanager
async def following(folder: Path, label: Label, *fallbacks: str) -> AsyncIterator[tuple[list[Policy], reload.FileFate]]:
    """A gateway that began with the folder's file ``mixed``."""
    adopted, fate = list[Policy](), reload.FileFate()
    policy = Policy(mig_strategy=MigStrategy.MIXED)
    settings = Settings(choice=rule(*fallbacks, folder=folder), policy=policy, state_dir=folder.parent)
    task = asyncio.create_task(reload.follow(settings, adopted.append, fate, label))
    await asyncio.sleep(0)
    try:
        yield adopted, fate
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "mixed").write_text(MIXED)
    (folder / "single").write_text(SINGLE)
    return folder


def strategies(policies: list[Policy]) -> list[MigStrategy]:
    return [policy.mig_strategy for policy in policies]


async def test_another_label_is_like_an_edit(folder: Path, said: Said) -> None:
    label = Label("mixed")
    async with following(folder, label) as (adopted, fate):
        label.say("single")
        await said.until("configuration adopted")
        assert (strategies(adopted), fate.path) == ([MigStrategy.SINGLE], folder / "single")


async def test_a_label_that_says_the_same_is_no_change() -> None:
    label = Label("mixed")
    label.say("mixed")
    assert not label.changed.is_set()


async def test_an_edit_of_the_chosen_file_counts_and_one_of_another_doesnt(folder: Path, said: Said) -> None:
    label = Label("mixed")
    async with following(folder, label) as (adopted, _):
        label.say("single")
        await said.until("configuration adopted")
        put(folder / "mixed", "flags: {migStrategy: none}")
        put(folder / "single", "flags: {migStrategy: mixed}")
        await said.until("configuration adopted", 2)
        assert strategies(adopted) == [MigStrategy.SINGLE, MigStrategy.MIXED]


async def test_after_another_label_an_edit_of_its_file_alone_counts(folder: Path, said: Said) -> None:
    label = Label("mixed")
    async with following(folder, label) as (adopted, _):
        label.say("single")
        await said.until("configuration adopted")
        put(folder / "single", MIXED)
        await said.until("configuration adopted", 2)
        assert strategies(adopted) == [MigStrategy.SINGLE, MigStrategy.MIXED]


async def test_a_label_without_a_file_leaves_what_counts_until_the_file_is_there(folder: Path, said: Said) -> None:
    label = Label("mixed")
    async with following(folder, label) as (adopted, fate):
        label.say("later")
        await said.until("configuration rejected")
        assert "'later'" in fate.error
        put(folder / "later", SINGLE)
        await said.until("configuration adopted")
        assert (strategies(adopted), fate.error) == ([MigStrategy.SINGLE], "")
    assert said.times("configuration rejected") == 1


async def test_sighup_answers_here_too(folder: Path, said: Said) -> None:
    async with following(folder, Label("mixed")):
        os.kill(os.getpid(), signal.SIGHUP)
        await said.until("configuration read: nothing changed")


def test_that_nothing_is_chosen_is_complained_of_once(said: Said) -> None:
    current = reload._Current(Settings(), None, lambda _: None, reload.FileFate())
    for asked in (False, False, True, False):
        current.choose_nothing(ChoiceError("why"), asked=asked)
    assert said.times("configuration rejected") == 2  # and again when asked


async def test_a_label_that_is_taken_away_falls_back(folder: Path, said: Said) -> None:
    label = Label("mixed")
    async with following(folder, label, "named", "empty") as (adopted, fate):
        label.say("")
        await said.until("configuration adopted")
        assert (strategies(adopted), fate.path) == ([MigStrategy.NONE], None)


async def test_only_a_label_with_a_good_file_is_remembered(
    folder: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []
    monkeypatch.setattr(choosing, "remember", lambda _choice, _folder, value: kept.append(value))
    (folder / "bad").write_text("flags: [")
    label = Label("mixed")
    async with following(folder, label):
        label.say("bad")
        await said.until("configuration rejected")
        label.say("single")
        await said.until("configuration adopted")
        label.say("mixed")
        await said.until("configuration adopted", 2)
    assert "bad" not in kept
    assert kept[:2] == ["mixed", "single"]


async def test_a_state_directory_that_cant_be_written_doesnt_matter(folder: Path, said: Said) -> None:
    label = Label("mixed")
    (folder.parent / choosing.MEMORY).mkdir()
    async with following(folder, label) as (adopted, _):
        label.say("single")
        await said.until("configuration adopted")
        assert said.times("the node's label can't be remembered")
        assert strategies(adopted) == [MigStrategy.SINGLE]
