"""Which source the settings and the hardware of the node lead to."""

from __future__ import annotations

from pathlib import Path

import pytest

from devices.policy import Globbed, Policy
from gateway.compose import hardware, source
from gateway.configuration.settings import Settings

FUSE = Policy(globbed=(Globbed("example.com/fuse", ("/dev/fuse",)),))


def pci(sys: Path, *functions: tuple[str, str]) -> Path:
    for number, (vendor, kind) in enumerate(functions):
        folder = sys / "bus" / "pci" / "devices" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    return sys


@pytest.mark.parametrize(
    ("functions", "found"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([("0x10de", "0x030200")], ["nvidia"], id="a 3D controller of NVIDIA"),
        pytest.param([("0x10de", "0x030000"), ("0x10de", "0x030200")], ["nvidia"], id="two of them"),
        pytest.param([("0x1002", "0x120000")], ["amd"], id="an accelerator of AMD"),
        pytest.param([("0x1002", "0x030000"), ("0x10de", "0x030200")], ["nvidia", "amd"], id="both vendors"),
        pytest.param([("0x10de", "0x040300"), ("0x10de", "0x068000")], [], id="a sound card, a switch"),
        pytest.param([("0x8086", "0x030000")], [], id="another vendor's"),
    ],
)
def test_what_the_node_has(tmp_path: Path, functions: list[tuple[str, str]], found: list[str]) -> None:
    assert hardware(pci(tmp_path, *functions)) == found


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        pytest.param(Settings(backend="simulated"), "simulated", id="as it is said"),
        pytest.param(Settings(backend="amd"), "amd", id="amd, although there is none yet"),
        pytest.param(Settings(backend="nvidia"), "nvidia", id="nvidia, although there is none yet"),
        pytest.param(Settings(policy=FUSE), "generic", id="only devices of the configuration file"),
        pytest.param(Settings(backend="none", policy=FUSE), "generic", id="and no GPUs, although there may be some"),
        pytest.param(Settings(backend="simulated", policy=FUSE), "simulated+generic", id="both"),
        pytest.param(
            Settings(backend="simulated", config_file=Path("c.yaml")), "simulated+generic", id="rules may come later"
        ),
    ],
)
def test_which_source(settings: Settings, name: str, tmp_path: Path) -> None:
    assert source(settings, tmp_path).name == name


def test_a_function_that_cannot_be_read_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [tmp_path / "gone", *pci(tmp_path, ("0x10de", "0x030200")).glob("bus/pci/devices/*")]
    monkeypatch.setattr(Path, "glob", lambda *_: found)
    assert hardware(tmp_path) == ["nvidia"]


@pytest.mark.parametrize("file", [None, Path("c.yaml")])
def test_who_wants_none_is_told_what_else_there_is(file: Path | None, tmp_path: Path) -> None:
    """No look for hardware can help there, nor a restart."""
    with pytest.raises(ValueError, match="--backend none: there are no other devices"):
        source(Settings(backend="none", config_file=file), tmp_path)
