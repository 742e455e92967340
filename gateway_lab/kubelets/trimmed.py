"""What is left out of k8s.io/kubernetes when a kubelet is built, because compiling it costs more than all the rest.

The device manager imports a few packages for a type or two, and each brings in hundreds of others (a scheduler, clients
of clouds). These packages are cut: some of their own files stay, or a stand-in in driver/kubernetes has the types. Every
other file is the module's own, byte for byte.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from zipfile import ZipFile

from adapters.levels import minor_version

__all__ = ["CUTS", "Cut", "cuts", "unpack"]

_NEWEST: Final = 10**6


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A package of k8s.io/kubernetes that is cut in the minor versions from ``first`` to ``last``.

    Those of its files that are named in ``stay`` remain; driver/kubernetes has what stands in for the others, if anything.
    """

    package: str
    first: int
    last: int = _NEWEST
    stay: tuple[str, ...] = ()


CUTS: Final = (
    Cut(package="pkg/kubelet/cm", first=8, last=8, stay=("device_plugin_handler.go",)),
    Cut(package="pkg/kubelet/config", first=9, stay=("defaults.go", "sources.go")),
    Cut(package="pkg/kubelet/container", first=9),
    Cut(package="pkg/kubelet/lifecycle", first=9, stay=("interfaces.go",)),
    Cut(package="pkg/kubelet/util", first=20, last=28, stay=("util.go", "util_unix.go")),
    Cut(package="pkg/scheduler/framework", first=20),
)


def cuts(version: str) -> tuple[Cut, ...]:
    """Return what is cut for a minor version ("1.37"). If nothing is, the module is built as it is."""
    return tuple(cut for cut in CUTS if cut.first <= minor_version(version) <= cut.last)


def unpack(module: Path, version: str, place: Path) -> str:
    """Unpack the zip of k8s.io/kubernetes without what is cut for a version.

    Returns:
        The checksum of the whole module, as in go.sum: "h1:..." (golang.org/x/mod/sumdb/dirhash).
    """
    stay = {cut.package: cut.stay for cut in cuts(version)}
    sums = ""
    with ZipFile(module) as archive:
        for name in sorted(archive.namelist()):
            content = archive.read(name)
            sums += f"{hashlib.sha256(content).hexdigest()}  {name}\n"
            path = place / name.split("/", 2)[2]  # k8s.io/kubernetes@v1.37.1/PATH
            if path.name in stay.get(str(path.parent.relative_to(place)), (path.name,)):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
    own = place / "go.mod"
    if not own.exists():  # before 1.15; Go makes up the same for the module
        own.write_text("module k8s.io/kubernetes\n")
    return f"h1:{base64.b64encode(hashlib.sha256(sums.encode()).digest()).decode()}"
