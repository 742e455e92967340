"""The ledger: it survives every damage, and a damage survives it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from devices.model import Device, Health
from gateway.ledger import FORMAT, Ledger, LedgerError

GPU = "nvidia.com/gpu"
WELL, ILL = Device("GPU-1", Health.HEALTHY, (0,)), Device("GPU-1", Health.UNHEALTHY, (0,))
VALID = {"format": FORMAT, "resources": {GPU: {"announced": {"GPU-1": {"health": "Healthy", "numa": [0]}}}}}


def written(folder: Path, content: object) -> Ledger:
    (folder / "ledger.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return Ledger(folder)


def saved(folder: Path, *devices: Device, accepted: str = "") -> Ledger:
    ledger = Ledger(folder)
    ledger.announce(GPU, devices)
    ledger.accept(accepted)
    ledger.save(ledger.snapshot())
    again = Ledger(folder)
    again.load()
    return again


def test_what_was_announced_is_read_back(tmp_path: Path) -> None:
    ledger = saved(tmp_path / "new", ILL, Device("GPU-2"), accepted="v1alpha2")
    assert ledger.announced(GPU) == {"GPU-1": ILL, "GPU-2": Device("GPU-2")}
    assert (ledger.resources(), ledger.accepted) == ((GPU,), "v1alpha2")


def test_the_folder_and_file_are_for_root_alone(tmp_path: Path) -> None:
    ledger = saved(tmp_path / "new", WELL)
    assert (ledger.path.stat().st_mode & 0o777, ledger.path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize(
    ("before", "now", "news"),
    [
        pytest.param([], [WELL], True, id="a new ID"),
        pytest.param([WELL], [WELL], False, id="nothing new"),
        pytest.param([WELL], [ILL], True, id="another health"),
        pytest.param([WELL], [Device("GPU-1", Health.HEALTHY, (1,))], True, id="another place"),
        pytest.param([WELL, Device("GPU-2")], [WELL], False, id="an ID less: it stays known"),
    ],
)
def test_what_is_worth_saving(tmp_path: Path, before: list[Device], now: list[Device], news: bool) -> None:
    assert saved(tmp_path, *before).announce(GPU, tuple(now)) is news


def test_an_announced_id_is_never_forgotten(tmp_path: Path) -> None:
    ledger = saved(tmp_path, WELL)
    ledger.announce(GPU, (Device("GPU-2"),))
    assert set(ledger.announced(GPU)) == {"GPU-1", "GPU-2"}


def test_fields_of_a_later_release_are_kept(tmp_path: Path) -> None:
    later = json.loads(json.dumps(VALID)) | {"cordons": {"GPU-1": "smells"}}
    later["resources"][GPU]["announced"]["GPU-1"]["reason"] = "Xid 79"
    ledger = written(tmp_path, later)
    ledger.load()
    ledger.announce(GPU, (ILL,))
    again = json.loads(ledger.snapshot())
    assert (again["cordons"], again["resources"][GPU]["announced"]["GPU-1"]["reason"]) == (
        {"GPU-1": "smells"},
        "Xid 79",
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param("", "truncated", id="empty"),
        pytest.param('{"format": 1, "resou', "truncated", id="cut off"),
        pytest.param("[]", "no object with a format", id="another shape"),
        pytest.param({"resources": {}}, "no object with a format", id="no format"),
        pytest.param({"format": FORMAT + 1}, "newer gateway", id="a truly newer format"),
        pytest.param({"format": 1, "resources": []}, "resources", id="resources are no object"),
        pytest.param({"format": 1, "resources": {GPU: {"announced": []}}}, GPU, id="announced is no object"),
        pytest.param(
            {"format": 1, "resources": {GPU: {"announced": {"a": {"health": "so-so", "numa": []}}}}}, "a", id="health"
        ),
        pytest.param({"format": 1, "resources": {GPU: {"announced": {"a": {"health": "Healthy"}}}}}, "a", id="no numa"),
    ],
)
def test_a_damaged_file_is_put_aside_and_said(tmp_path: Path, content: object, words: str) -> None:
    ledger = written(tmp_path, content)
    damaged = ledger.path.read_bytes()
    with pytest.raises(LedgerError, match=words):
        ledger.load()
    [aside] = tmp_path.glob("ledger.damaged-*.json")
    assert (aside.read_bytes(), ledger.resources()) == (damaged, ())


def test_a_missing_file_is_an_empty_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "nowhere")
    ledger.load()
    assert ledger.resources() == ()


def test_a_crash_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, WELL)

    def crash(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    ledger = Ledger(tmp_path)
    ledger.announce(GPU, (ILL, Device("GPU-2")))
    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(LedgerError, match="No space left"):
        ledger.save(ledger.snapshot())
    again = Ledger(tmp_path)
    again.load()
    assert again.announced(GPU) == {"GPU-1": WELL}
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.json"]


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    state = tmp_path / "state"
    state.mkdir()
    (state / "ledger.tmp").symlink_to(victim)
    ledger = Ledger(state)
    with pytest.raises(LedgerError):
        ledger.save(ledger.snapshot())
    assert victim.read_text() == "precious"
