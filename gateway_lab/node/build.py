"""Builds the genuine Kubernetes of the node: kubelets, and the control plane of the newest one's version.

``kubernetes/MINOR/go.mod`` names the release, all its modules (``go.sum`` their content) and, as Go's ``tool`` lines, the
commands that are built. The binaries are kept outside the tree, as the device managers of ``gateway_lab.kubelets.build`` are:
$XDG_CACHE_HOME/device-plugin-gateway/kubernetes/MINOR-HASH/. Cold, all of it takes about 10 minutes of two processors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from packaging.version import Version

from gateway_lab.kubelets.build import (
    GO_PIN,
    BuildError,
    Go,
    cache,
    go_build,
    go_fingerprint,
    locked,
    machine_go,
    pinned_go,
)

__all__ = ["binaries", "newest", "versions"]

_SOURCES = Path(__file__).parent / "kubernetes"
_RELEASE = re.compile(r"^(?:require)?\s*k8s\.io/kubernetes (v[\d.]+)", re.MULTILINE)


def versions() -> tuple[str, ...]:
    """The minor versions whose kubelet there is, oldest first.

    Raises:
        BuildError: Their go.mod files aren't there.
    """
    found = sorted((path.parent.name for path in _SOURCES.glob("*/go.mod")), key=Version)
    if not found:
        raise BuildError(f"expected {_SOURCES}/MINOR/go.mod, found none: run this from a checkout of the repository")
    return tuple(found)


def newest() -> str:
    """The minor version that has a control plane, too: no kubelet may be newer than its API server."""
    return versions()[-1]


def binaries(wanted: Collection[str], *, progress: Callable[[str], None]) -> Mapping[str, Path]:
    """Builds what isn't built yet, and says by minor version in which folder the binaries are.

    Args:
        wanted: Minor versions of kubelets. The newest one comes with them: it has the control plane.
        progress: Is given one line of text at a time, at least every 20 seconds while something is built.

    Raises:
        BuildError: There is no Go and none can be had, or Go failed.
    """
    go = machine_go()
    folders = {
        version: _folder(version, go.version if go else f"go{GO_PIN}")
        for version in versions()
        if version in {*wanted, newest()}
    }
    if all(folder.is_dir() for folder in folders.values()):
        return folders
    with locked(cache() / "kubernetes", progress):
        go = go or pinned_go(progress)
        for number, version in enumerate(folders, start=1):
            if not folders[version].is_dir():
                _build(version, go, folders[version], f"Kubernetes {version} ({number} of {len(folders)})", progress)
    return folders


def _build(version: str, go: Go, folder: Path, name: str, progress: Callable[[str], None]) -> None:
    progress(f"{name}: {_release(version)}, building with {go.version}")
    arguments = ("-ldflags", _ldflags(version), "tool")
    go_build(go, _SOURCES / version, folder / "kubelet", arguments, name=name, progress=progress)


def _folder(version: str, go_version: str) -> Path:
    files = ((name, (_SOURCES / version / name).read_bytes()) for name in ("go.mod", "go.sum"))
    return cache() / "kubernetes" / f"{version}-{go_fingerprint(go_version, '', _ldflags(version), files)}"


def _ldflags(version: str) -> str:
    """The release as the binaries tell it: the API server refuses a kubelet that calls itself v0.0.0."""
    return f"-s -w -X k8s.io/component-base/version.gitVersion={_release(version)}"


def _release(version: str) -> str:
    found = _RELEASE.search((_SOURCES / version / "go.mod").read_text())
    if found is None:
        raise BuildError(f"expected {_SOURCES / version}/go.mod to require k8s.io/kubernetes, but it doesn't")
    return found[1]
