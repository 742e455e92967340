"""The image of one architecture: its root laid out, packed as a layer, and listed in a bill of materials."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway import VERSION
from tools.image import archive, contents, debian, python, sbom

NAME = "device-plugin-gateway"
ENTRYPOINT = ["/usr/bin/gateway"]
ENVIRONMENT = {
    "PATH": "/usr/bin",
    # Where NVIDIA's container runtime is the default one, it brings NVML (utility) of all GPUs into the container: as NVIDIA's
    # own image asks for it.
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "utility",
}
CONTENTS = Path("deploy/image.toml")
LOCK = Path("deploy/image.lock")
_FILES = {
    "etc/passwd": "root:x:0:0:root:/:/\n",
    "etc/group": "root:x:0:\n",
    "etc/nsswitch.conf": "hosts: files dns\n",
}
_FOLDERS = ("dev", "proc", "run", "sys", "tmp", "var/lib/kubelet/device-plugins", "var/lib/device-plugin-gateway")


@dataclass(frozen=True, kw_only=True)
class Built:
    """What came of a build: the layer, its bill of materials, and the wheels in it."""

    architecture: str
    layer: archive.Layer
    bill: bytes
    wheels: Sequence[python.Wheel]


def cache() -> Path:
    """Return the folder that keeps Debian's packages."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / NAME / "image"


def build(architecture: str, *, newest: bool, when: int, progress: debian.Progress) -> Built:
    """Build the image of an architecture.

    Args:
        architecture: Debian's and OCI's word, as ``amd64``.
        newest: take Debian's newest packages, not those of deploy/image.lock.
        when: the time of every file, in seconds since 1970.
        progress: gets one line of text at a time.

    Raises:
        ImageError: it can't be built; the message says why.
    """
    wanted, here = contents.read(CONTENTS), debian.architecture()

    def unpacked(one: str, into: Path) -> list[debian.Package]:
        pins = None if newest else contents.lock(LOCK, one, wanted)
        into.mkdir()
        return debian.unpack(debian.fetch(wanted, pins, one, cache(), progress), into)

    with tempfile.TemporaryDirectory(prefix="dpg-image-") as folder:
        scratch = Path(folder)
        root = interpreter = scratch / "root"
        packages = unpacked(architecture, root)
        progress(f"{architecture}: {len(packages)} Debian packages unpacked, now the wheels")
        own = python.build(scratch, when)
        wheels = python.install(Path("locks/run.txt"), own, root, wanted.python, debian.TRIPLES[architecture])
        _leave_out(wanted, root)
        progress(f"{architecture}: {len(wheels)} wheels installed, now the byte code")
        if architecture != here:  # byte code is the same for each architecture, and an emulator needs minutes for it
            interpreter = scratch / here
            unpacked(here, interpreter)
        python.compile_all(root, wanted.python, interpreter)
        if missing := debian.unresolved(root, architecture):
            raise contents.ImageError(
                "expected every library that something in the root wants to be in it: add its package to deploy/image.toml, or "
                "leave out what wants it:\n" + "\n".join(missing)
            )
        distro = "debian-" + _version_id(root)
        parts = [*(sbom.deb(one, architecture, distro) for one in packages), *(sbom.pypi(one) for one in wheels)]
        bill = sbom.bill(sbom.subject("container", NAME, VERSION), parts, when)
        _complete(root, packages, bill)
        progress(f"{architecture}: packing the layer")
        return Built(architecture=architecture, layer=archive.layer(root, when), bill=bill, wheels=wheels)


def config(tag: str) -> dict[str, Any]:
    """Return OCI's image configuration: how a container of the image runs."""
    revision = git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return {
        "Entrypoint": ENTRYPOINT,
        "Env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
        "Labels": {
            "org.opencontainers.image.title": NAME,
            "org.opencontainers.image.description": "A Kubernetes device plugin that speaks every kubelet's device plugin API",
            "org.opencontainers.image.version": tag,
            "org.opencontainers.image.licenses": "Apache-2.0",
            **({"org.opencontainers.image.revision": revision} if revision else {}),
        },
        "StopSignal": "SIGTERM",
        "User": "0:0",
        "WorkingDir": "/",
    }


def when() -> int:
    """Return the image's time in seconds since 1970: SOURCE_DATE_EPOCH, else that of the last commit.

    Raises:
        ImageError: SOURCE_DATE_EPOCH is no number.
    """
    said = os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct") or "0"
    if not said.isdecimal():
        raise contents.ImageError(f"SOURCE_DATE_EPOCH: expected seconds since 1970, got {said!r}")
    return int(said)


def git(*arguments: str) -> str:
    """Return what a command of git prints, or nothing if there is no git or no checkout."""
    if shutil.which("git") is None:
        return ""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()


def _leave_out(wanted: contents.Contents, root: Path) -> None:
    """Remove what isn't wanted, and the folders that are empty then."""
    for path in sorted(root.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif wanted.leaves_out(path.relative_to(root).as_posix()):
            path.unlink()


def _complete(root: Path, packages: list[debian.Package], bill: bytes) -> None:
    """Add what no package brings: users, mount points, the bill, and the packages' control files where scanners look for them."""
    for name in _FOLDERS:
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "var/run").unlink(missing_ok=True)
    (root / "var/run").symlink_to("../run")
    status = {f"var/lib/dpkg/status.d/{package.name}": package.control for package in packages}
    for name, text in {**_FILES, **status, "usr/share/sbom/device-plugin-gateway.cdx.json": bill.decode()}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def _version_id(root: Path) -> str:
    found = re.search(r'^VERSION_ID="?([\d.]+)"?$', (root / "usr/lib/os-release").read_text(), re.MULTILINE)
    return found[1] if found else "unknown"
