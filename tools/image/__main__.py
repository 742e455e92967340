"""Make the image: ``python -m tools.image`` (``make image``), from the project's root.

Leaves in dist/image: the OCI archive (one for each tag), the bill of materials, and the layer for deploy/Containerfile.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gateway import VERSION
from tools.image import archive, contents, debian, python, sbom

NAME = "device-plugin-gateway"
REGISTRY = "docker.io/library"  # what container runtimes put before a name that has no registry
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
ENTRYPOINT = ["/usr/bin/gateway"]
ENVIRONMENT = {
    "PATH": "/usr/bin",
    # Where NVIDIA's container runtime is the default one, it brings NVML (utility) of all GPUs into the container: as NVIDIA's
    # own image asks for it.
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "utility",
}
_FILES = {
    "etc/passwd": "root:x:0:0:root:/:/\n",
    "etc/group": "root:x:0:\n",
    "etc/nsswitch.conf": "hosts: files dns\n",
}
_FOLDERS = ("dev", "proc", "run", "sys", "tmp", "var/lib/kubelet/device-plugins", "var/lib/device-plugin-gateway")


def main() -> None:
    """Make the image, or end with 1 and a message."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tag", action="append", help="the image's tag, or several: an archive for each (the version)")
    parser.add_argument("--out", type=Path, default=Path("dist/image"), help="where to (%(default)s)")
    arguments = parser.parse_args()
    began = time.monotonic()

    def progress(text: str) -> None:
        print(f"image: {text}   ({time.monotonic() - began:.0f} s)", flush=True)

    try:
        tags = arguments.tag or [VERSION]
        if wrong := [tag for tag in tags if not _TAG.fullmatch(tag)]:
            raise contents.ImageError(f"expected a tag of letters, digits, '_', '.' and '-', got {wrong[0]!r}")  # noqa: TRY301
        with tempfile.TemporaryDirectory(prefix="dpg-image-") as scratch:
            _make(Path(scratch), arguments.out, tags, progress)
    except contents.ImageError as error:
        sys.exit(f"image: {error}")


def _make(scratch: Path, out: Path, tags: list[str], progress: debian.Progress) -> None:
    wanted = contents.read(Path("deploy/image.toml"))
    architecture = debian.architecture()
    when, revision = _when(), _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / NAME / "image"
    root = scratch / "root"
    root.mkdir()

    packages = debian.unpack(debian.fetch(wanted, cache, progress), root)
    progress(f"{len(packages)} Debian packages unpacked, now the wheels")
    own = python.build(scratch)
    wheels = python.install(Path("locks/run.txt"), own, root, wanted.python, debian.TRIPLES[architecture])
    _leave_out(wanted, root)
    progress(f"{len(wheels)} wheels installed, now the byte code")
    python.compile_all(root, wanted.python)
    if missing := debian.unresolved(root):
        raise contents.ImageError(
            "expected every library that something in the root wants to be in it: add its package to deploy/image.toml, or "
            "leave out what wants it:\n" + "\n".join(missing)
        )
    distro = "debian-" + _version_id(root)
    bill = sbom.bill(packages, wheels, name=NAME, version=VERSION, when=when, arch=architecture, distro=distro)
    _complete(root, packages, bill)

    progress("packing the layer")
    layer = archive.layer(root, when)
    out.mkdir(parents=True, exist_ok=True)
    (out / "root.tar.gz").write_bytes(layer.data)
    (out / "sbom.cdx.json").write_bytes(bill)
    for tag in tags:
        labels = {
            "org.opencontainers.image.title": NAME,
            "org.opencontainers.image.description": "A Kubernetes device plugin that speaks every kubelet's device plugin API",
            "org.opencontainers.image.version": tag,
            "org.opencontainers.image.licenses": "Apache-2.0",
            **({"org.opencontainers.image.revision": revision} if revision else {}),
        }
        config = {
            "Entrypoint": ENTRYPOINT,
            "Env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
            "Labels": labels,
            "StopSignal": "SIGTERM",
            "User": "0:0",
            "WorkingDir": "/",
        }
        name = f"{REGISTRY}/{NAME}"
        data = archive.archive(layer, name=name, tag=tag, architecture=architecture, when=when, config=config)
        path = out / f"{NAME}-{tag}-{architecture}.oci.tar"
        path.write_bytes(data)
        progress(f"{path}: {name}:{tag}, {len(data) / 1e6:.1f} MB")


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


def _when() -> int:
    """The image's time: SOURCE_DATE_EPOCH, else that of the last commit, in seconds since 1970."""
    said = os.environ.get("SOURCE_DATE_EPOCH") or _git("log", "-1", "--format=%ct") or "0"
    if not said.isdecimal():
        raise contents.ImageError(f"SOURCE_DATE_EPOCH: expected seconds since 1970, got {said!r}")
    return int(said)


def _git(*arguments: str) -> str:
    if shutil.which("git") is None:
        return ""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
