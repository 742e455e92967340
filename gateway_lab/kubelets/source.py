"""A kubelet out of a checkout of k8s.io/kubernetes, and a new release among those that are built.

A checkout (a release candidate, a private fork) is built with the driver of a known minor, whose module file names all that
the kubelet rests on: here the checkout takes the place of ``k8s.io/kubernetes``, and what it has in ``staging`` that of each
of those modules. Go looks up by itself what it needs besides.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from gateway_lab.kubelets import build
from gateway_lab.kubelets.build import BuildError

__all__ = ["add", "build_from", "module_file", "newer_file"]

_MODULE: Final = re.compile(r"^module\s+k8s\.io/kubernetes\s*$", re.MULTILINE)
_RELEASE: Final = re.compile(r"v1\.(\d+)\.(\d+(?:-[0-9A-Za-z.-]+)?)")
_DESCRIBED: Final = re.compile(r"v1\.\d+\.\d+[0-9A-Za-z.-]*")


def build_from(folder: Path, version: str, *, progress: Callable[[str], None]) -> Path:
    """Build the kubelet of a checkout, each time anew: what is compiled already Go remembers.

    Args:
        folder: the checkout.
        version: the minor version ("1.37") whose driver fits it.
        progress: is given one line of text at a time, at least every 20 seconds.

    Returns:
        Where the kubelet is, until another one is built of that folder.

    Raises:
        BuildError: it is no checkout, there is no driver for the version, or Go failed.
    """
    folder = folder.resolve()
    try:
        own = (folder / "go.mod").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(
            f"expected a checkout of k8s.io/kubernetes (1.16 or later) in {folder}, but its go.mod can't be read: {error.strerror if isinstance(error, OSError) else error}"
        ) from error
    if not _MODULE.search(own):
        raise BuildError(f"expected the module k8s.io/kubernetes in {folder / 'go.mod'}, and it is another one")
    base, sums = _modules(version)
    staged = sorted(path.parent.name for path in folder.glob("staging/src/k8s.io/*/go.mod"))
    go = build.machine_go() or build.pinned_go(progress)
    name = f"kubelet {version} of {folder}"
    place = build.cache() / "kubelets" / f"source-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}" / "kubelet"
    with build.locked(build.cache() / "kubelets", progress), tempfile.TemporaryDirectory(prefix="dpg-") as made:
        modules = Path(made, "kubelet.mod")
        modules.write_text(module_file(base.read_text(), folder, staged, _described(folder, version)))
        modules.with_suffix(".sum").write_bytes(sums.read_bytes())
        progress(f"{name}: building with {go.version}")
        options = ("-mod=mod", f"-modfile={modules}", *build.flags(version))
        build.go_build(go, base.parents[1], place, (*options, "."), name=name, progress=progress)
    return place


def module_file(base: str, folder: Path, staged: Collection[str], described: str) -> str:
    """Put a checkout in the place of a release: pure.

    Args:
        base: the module file of a release.
        folder: the checkout.
        staged: the modules that it has in ``staging``, without ``k8s.io/``.
        described: which version it calls itself.
    """
    names = "|".join(map(re.escape, ("kubernetes", *staged)))
    rest = re.sub(rf"^(?:replace)?\s+k8s\.io/(?:{names})(?: v\S+)? => .*\n", "", base, flags=re.MULTILINE)
    rest = re.sub(r"^(\s*(?:require )?k8s\.io/kubernetes) v\S+", rf"\1 {described}", rest, flags=re.MULTILINE)
    places = {"kubernetes": folder, **{name: folder / "staging/src/k8s.io" / name for name in staged}}
    lines = "".join(f"\tk8s.io/{name} => {json.dumps(str(place))}\n" for name, place in places.items())
    return f"{rest}\nreplace (\n{lines})\n"


def _described(folder: Path, version: str) -> str:
    """Say which version a checkout is: as git describes it, else of this minor and nothing more."""
    asked = ["git", "-C", str(folder), "describe", "--tags", "--match", "v1.*"]
    done = subprocess.run(asked, check=False, capture_output=True, text=True) if (folder / ".git").exists() else None
    said = "" if done is None or done.returncode else done.stdout.strip()
    return said if _DESCRIBED.fullmatch(said) else f"v{version}.0-source"


def _modules(version: str) -> tuple[Path, Path]:
    if version not in build.available():
        raise BuildError(f"expected a version out of {', '.join(build.available())}, got {version!r}")
    modules = build.sources() / "mods" / f"k{version}.mod"
    return modules, modules.with_suffix(".sum")


# A release that is new among those that are built.


def add(release: str, *, progress: Callable[[str], None]) -> str:
    """Add a release to those that are built, or name another patch of one: its row and its module files.

    Args:
        release: such as ``v1.38.0``. Its driver begins as that of the newest minor that is there.
        progress: is given one line of text at a time.

    Returns:
        Its minor version.

    Raises:
        BuildError: it is no release, or Go can't find it or compile against it.
    """
    found = _RELEASE.fullmatch(release)
    if found is None:
        raise BuildError(f"expected a release such as v1.38.0, got {release!r}")
    version, folder = f"1.{found[1]}", build.sources()
    rows = json.loads((folder / "versions.json").read_text())
    like = version if version in rows else max(rows, key=_minor)
    if _minor(version) < _minor(like):
        raise BuildError(f"expected a minor newer than {like}, or one of {', '.join(rows)}; got {version}")
    base, sums = _modules(like)
    text = newer_file(base.read_text(), rows[like]["kubernetes"], release)
    before = sums.read_bytes()
    go = build.machine_go() or build.pinned_go(progress)
    with tempfile.TemporaryDirectory(prefix="dpg-") as made:
        modules = Path(made, "kubelet.mod")
        modules.write_text(text)
        modules.with_suffix(".sum").write_bytes(before)
        progress(f"kubelet {version}: looking up what {release} rests on")
        build.go_run(go, folder, ("list", "-mod=mod", f"-modfile={modules}", *build.flags(version)[:2], "-deps", "."))
        (folder / "mods" / f"k{version}.mod").write_text(modules.read_text())
        (folder / "mods" / f"k{version}.sum").write_bytes(modules.with_suffix(".sum").read_bytes())
    rows[version] = {**rows.get(version, {}), "kubernetes": release}
    ordered = sorted(rows, key=_minor)
    lines = ",\n".join(f"  {json.dumps(one)}: {json.dumps(rows[one])}" for one in ordered)
    (folder / "versions.json").write_text(f"{{\n{lines}\n}}\n")
    return version


def newer_file(base: str, before: str, release: str) -> str:
    """Name another release, and its staging modules, in a module file: pure."""
    staging, newer = (f"v0{one.removeprefix('v1')}" for one in (before, release))
    return base.replace(f"k8s.io/kubernetes {before}", f"k8s.io/kubernetes {release}").replace(
        f" {staging}", f" {newer}"
    )


def _minor(version: str) -> int:
    return int(version.partition(".")[2])
