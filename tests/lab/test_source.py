"""A kubelet out of a checkout, and a release that is added, as far as it is decided without a compiler."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway_lab.kubelets import build, source
from gateway_lab.kubelets.build import BuildError
from tests.lab.test_build import go, sources

__all__ = ["go", "sources"]

BASE = """module kubelet

require (
	k8s.io/api v0.37.1
	k8s.io/kubernetes v1.37.1
)

replace k8s.io/cri-api => k8s.io/cri-api v0.37.1

replace (
	k8s.io/api => k8s.io/api v0.37.1
	k8s.io/api-machine => k8s.io/api-machine v0.37.1
	vbom.ml/util v0.0.0 => ./standin/util
)
"""


def replaces(text: str) -> dict[str, str]:
    """What stands for each module, by its name."""
    pairs = (line.split(" => ") for line in text.splitlines() if " => " in line)
    return {before.removeprefix("replace").strip(): after for before, after in pairs}


def test_a_checkout_takes_the_place_of_a_release() -> None:
    text = source.module_file(BASE, Path("/my checkout"), ["api", "cri-api"], "v1.38.0-rc.0")
    assert "k8s.io/kubernetes v1.38.0-rc.0\n" in text
    assert replaces(text) == {
        "k8s.io/kubernetes": '"/my checkout"',
        "k8s.io/api": '"/my checkout/staging/src/k8s.io/api"',
        "k8s.io/cri-api": '"/my checkout/staging/src/k8s.io/cri-api"',
        "k8s.io/api-machine": "k8s.io/api-machine v0.37.1",
        "vbom.ml/util v0.0.0": "./standin/util",
    }


def test_a_source_without_staging_rests_on_the_releases() -> None:
    text = source.module_file(BASE, Path("/source"), [], "v1.37.0-source")
    assert replaces(text) == replaces(BASE) | {"k8s.io/kubernetes": '"/source"'}


def test_a_newer_release_brings_its_own_staging_modules() -> None:
    text = source.newer_file(BASE, "v1.37.1", "v1.38.0-rc.1")
    assert "k8s.io/kubernetes v1.38.0-rc.1\n" in text
    assert "37" not in text
    assert text.count(" v0.38.0-rc.1\n") == 4


def checkout(folder: Path, module: str = "k8s.io/kubernetes") -> Path:
    (folder / "staging/src/k8s.io/api").mkdir(parents=True)
    (folder / "staging/src/k8s.io/api/go.mod").write_text("module k8s.io/api\n")
    (folder / "go.mod").write_text(f"module {module}\n\ngo 1.26\n")
    return folder


def test_a_checkout_is_built_with_the_driver_of_its_minor(
    sources: Path, go: Callable[[str], Path], tmp_path: Path
) -> None:
    compiler = go("1.26.8")
    made = source.build_from(checkout(tmp_path / "source"), "1.37", progress=lambda _: None)
    assert made.read_text() == "kubelet\n"
    called = (compiler / "calls").read_text()
    assert (compiler / "modfile").read_text() == source.module_file(
        (sources / "mods/k1.37.mod").read_text(), tmp_path / "source", ["api"], "v1.37.0-source"
    )
    assert "-mod=mod" in called
    assert "k8s1.37" in called
    assert source.build_from(tmp_path / "source", "1.37", progress=lambda _: None) == made
    assert len((compiler / "calls").read_text().splitlines()) == 2, "what is in it may have changed"
    assert build.built("1.37") is None, "the release isn't what was built"


@pytest.mark.parametrize(
    ("module", "version", "said"),
    [
        pytest.param("k8s.io/api", "1.37", "it is another one", id="another module"),
        pytest.param(None, "1.37", "expected a checkout of k8s.io/kubernetes", id="no module"),
        pytest.param("k8s.io/kubernetes", "1.36", "expected a version out of 1.8, 1.9, 1.37", id="no driver"),
    ],
)
def test_what_is_no_checkout_is_refused(
    sources: Path, go: Callable[[str], Path], tmp_path: Path, module: str | None, version: str, said: str
) -> None:
    go("1.26.8")
    folder = checkout(tmp_path / "source", module or "")
    if module is None:
        (folder / "go.mod").unlink()
    with pytest.raises(BuildError, match=said):
        source.build_from(folder, version, progress=lambda _: None)


def test_a_release_is_added(sources: Path, go: Callable[[str], Path]) -> None:
    go("1.26.8")
    (sources / "mods/k1.37.mod").write_text(BASE)
    assert source.add("v1.38.0", progress=lambda _: None) == "1.38"
    rows = json.loads((sources / "versions.json").read_text())
    assert list(rows) == ["1.8", "1.9", "1.37", "1.38"]
    assert rows["1.38"] == {"kubernetes": "v1.38.0"}
    assert (sources / "mods/k1.38.mod").read_text() == source.newer_file(BASE, "v1.37.1", "v1.38.0")
    assert (sources / "mods/k1.38.sum").read_text() == (sources / "mods/k1.37.sum").read_text()
    assert (sources / "mods/k1.37.mod").read_text() == BASE


def test_another_patch_of_a_minor_takes_its_place(sources: Path, go: Callable[[str], Path]) -> None:
    go("1.26.8")
    (sources / "mods/k1.37.mod").write_text(BASE)
    assert source.add("v1.37.4", progress=lambda _: None) == "1.37"
    assert json.loads((sources / "versions.json").read_text())["1.37"] == {"default": True, "kubernetes": "v1.37.4"}


@pytest.mark.parametrize("release", ["1.38.0", "v1.38", "v2.0.0", "v1.36.1"])
def test_what_cannot_be_added_changes_nothing(sources: Path, go: Callable[[str], Path], release: str) -> None:
    go("1.26.8")
    before = (sources / "versions.json").read_text()
    with pytest.raises(BuildError, match="expected a"):
        source.add(release, progress=lambda _: None)
    assert (sources / "versions.json").read_text() == before
