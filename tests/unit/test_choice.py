"""Which configuration file counts on a node: what NVIDIA's config-manager would choose, and what happens where it would end."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.configuration import commandline
from gateway.configuration.choice import ChoiceError, choose, locate, remember, remembered
from gateway.configuration.flags import NODE_LABEL
from gateway.configuration.settings import Choice, ConfigError, Given

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
        (rule("named", "empty", default="b"), "a", ["b", "default"], f"{NODE_LABEL}=a: no configuration 'a'"),
        (rule("named", "empty", default="b"), "", ["default"], "the default configuration: no configuration 'b'"),
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
    with pytest.raises(ChoiceError, match="no configuration"):
        locate(rule(folder=tmp_path / "here"), "../secret")


def test_a_folder_that_isnt_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ChoiceError, match=f"{tmp_path}/x: the folder of configuration files"):
        locate(rule(folder=tmp_path / "x"), "")


@pytest.mark.parametrize("text", ["first", "Named", " named"])
def test_another_strategy_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="FALLBACK_STRATEGIES: unknown value"):
        commandline.make_choice({"fallback-strategies": Given(("named", text), "FALLBACK_STRATEGIES")})


def test_that_there_is_no_label_is_remembered_as_well(tmp_path: Path) -> None:
    remember(rule(), tmp_path, "a100")
    remember(rule(), tmp_path, "")
    assert remembered(rule(), tmp_path) == ""
