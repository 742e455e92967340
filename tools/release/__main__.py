"""Make a release: ``python -m tools.release`` (``make release-dry-run``), from the project's root.

Leaves in dist/release: image, chart, wheel, sdist, bills of materials, release notes, SHA256SUMS, and release.json, which lists all
of them with their digests. With --push, image and chart go to the registry. Nothing is signed here.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gateway import VERSION
from tools.image import archive, build, debian, python, sbom
from tools.image.contents import ImageError
from tools.release import chart

CHART = Path("deploy/chart")
_IMAGE = f"{build.NAME}-{VERSION}.oci.tar"
_CHART = f"{build.NAME}-chart-{VERSION}.oci.tar"


def main() -> None:
    """Make the release, or end with 1 and a message."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="The dry run makes a release for a registry on loopback, pushes it there, and installs it on a whole node by digest. "
        "It needs root, and docker-registry and skopeo of Debian.",
    )
    parser.add_argument("--out", type=Path, default=Path("dist/release"), help="where to (%(default)s)")
    parser.add_argument(
        "--repository",
        metavar="HOST/PATH",
        help="where image and chart are published; the dry run finds a free port on loopback",
    )
    parser.add_argument("--tag", help=f"the git tag of the release; an error if it is not v{VERSION}")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--push", action="store_true", help="only push what --out has to --repository, by skopeo")
    mode.add_argument("--dry-run", action="store_true", help="then install it on a whole node from a registry there")
    arguments = parser.parse_args()
    if not (arguments.repository or arguments.dry_run):
        parser.error("--repository is missing: name where image and chart are published, or use --dry-run")
    repository = (arguments.repository or _free_port()).lower()
    began = time.monotonic()

    def progress(text: str) -> None:
        print(f"release: {text}   ({time.monotonic() - began:.0f} s)", flush=True)

    try:
        if arguments.tag not in (None, f"v{VERSION}"):
            raise ImageError(f"the tag is {arguments.tag}, but gateway/__init__.py says {VERSION}")  # noqa: TRY301
        if arguments.push:
            push(arguments.out, repository)
            return
        make(arguments.out, repository, progress)
        if arguments.dry_run:
            progress("installing it on a whole node")
            _install(arguments.out)
        progress(f"done: {arguments.out}/release.json")
    except ImageError as error:
        sys.exit(f"release: {error}")


def make(out: Path, repository: str, progress: debian.Progress) -> None:
    """Make all files of a release.

    Raises:
        ImageError: something can't be made; the message says what and why.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    when, notes = build.when(), changes(Path("CHANGELOG.md").read_text(), VERSION)
    image_name, chart_name = f"{repository}/{build.NAME}", f"{repository}/charts/{build.NAME}"

    images = [build.build(one, newest=False, when=when, progress=progress) for one in debian.TRIPLES]
    config = build.config(VERSION)
    packed = archive.archive(
        [archive.Image(architecture=one.architecture, layer=one.layer, config=config) for one in images],
        name=image_name,
        tag=VERSION,
        when=when,
    )
    (out / _IMAGE).write_bytes(packed.data)
    for one in images:
        (out / f"image-{one.architecture}.cdx.json").write_bytes(one.bill)

    progress("wheel and sdist")
    with tempfile.TemporaryDirectory(prefix="dpg-release-") as folder:
        wheel, sdist = python.build(Path(folder), when), python.sdist(Path(folder), when)
        shutil.copy(wheel, out)
        (out / sdist.name).write_bytes(archive.repacked(sdist.read_bytes(), when))
    # The hashes are of one architecture's wheels; the versions are those of all.
    needed = [dataclasses.replace(one, sha256=None) for one in images[0].wheels if one.name != build.NAME]
    bill = sbom.bill(sbom.subject("library", build.NAME, VERSION), [sbom.pypi(one) for one in needed], when)
    (out / "wheel.cdx.json").write_bytes(bill)

    progress("chart")
    data = chart.package(CHART, f"{image_name}@{packed.digest}", when)
    file = f"{build.NAME}-{VERSION}.tgz"
    (out / file).write_bytes(data)
    (out / "index.yaml").write_text(chart.index(CHART, data, file, when))
    as_artifact = chart.artifact(CHART, data, when)
    (out / _CHART).write_bytes(as_artifact.data)
    inside = [sbom.oci(image_name, packed.digest, VERSION)]
    (out / "chart.cdx.json").write_bytes(sbom.bill(sbom.subject("application", build.NAME, VERSION), inside, when))

    (out / "release-notes.md").write_text(notes)
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())}
    (out / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    listed = {
        "version": VERSION,
        "commit": build.git("rev-parse", "HEAD"),
        "image": f"{image_name}@{packed.digest}",
        "chart": f"{chart_name}@{as_artifact.digest}",
        "files": {name: {"sha256": digest, "bytes": (out / name).stat().st_size} for name, digest in sums.items()},
    }
    (out / "release.json").write_text(json.dumps(listed, indent=1) + "\n")


def changes(changelog: str, version: str) -> str:
    """Return what the changelog says of a version.

    Raises:
        ImageError: nothing.
    """
    found = re.search(rf"^## {re.escape(version)}\b[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        raise ImageError(f"CHANGELOG.md has no section `## {version}`. Write it before the release")
    return found[1].strip() + "\n"


def push(out: Path, repository: str, *options: str) -> None:
    """Push image and chart, and see that the registry has the digests of release.json.

    Raises:
        ImageError: there is no skopeo, or it failed; or the registry has other digests.
    """
    listed = json.loads((out / "release.json").read_text())
    for kind, file in (("image", _IMAGE), ("chart", _CHART)):
        name, _, digest = listed[kind].partition("@")
        if not name.startswith(f"{repository}/"):
            raise ImageError(f"{out} was made for {name}, not for {repository}. Make it again with this --repository")
        # The digest is that of what is copied: without this, skopeo may write the manifest again.
        copy = ["copy", "--quiet", "--all", "--preserve-digests", *(f"--dest-{one}" for one in options)]
        _skopeo(*copy, f"oci-archive:{out / file}", f"docker://{name}:{VERSION}")
        raw = _skopeo("inspect", "--raw", *(f"--{one}" for one in options), f"docker://{name}:{VERSION}")
        if (got := f"sha256:{hashlib.sha256(raw).hexdigest()}") != digest:
            raise ImageError(f"the registry has {name}:{VERSION} as {got}, but it was made as {digest}")
        print(f"release: pushed {listed[kind]}", flush=True)


def _skopeo(*arguments: str) -> bytes:
    if shutil.which("skopeo") is None:
        raise ImageError("skopeo is not on the PATH, and it pushes to the registry. Install it")
    done = subprocess.run(["skopeo", *arguments], capture_output=True, check=False)
    if done.returncode:
        raise ImageError(f"skopeo {arguments[0]} {arguments[-1]} failed: {done.stderr.decode().strip()}")
    return done.stdout


def _free_port() -> str:
    """Return an address on loopback where nothing listens: the registry on the node will."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return f"127.0.0.1:{one.getsockname()[1]}"


def _install(out: Path) -> None:
    node = [sys.executable, "-m", "gateway_lab.node", "--kubelet", "1.37", "--"]
    tests = [sys.executable, "-m", "pytest", "-m", "e2e", "--timeout=600", "tests/e2e/test_release.py"]
    for tool in ("docker-registry", "skopeo", "mmdebstrap"):
        if shutil.which(tool) is None:
            raise ImageError(f"{tool} is not on the PATH, and the dry run needs it. Install it: apt-get install {tool}")
    done = subprocess.run([*node, "env", f"RELEASE={out}", *tests], check=False)
    if done.returncode:
        raise ImageError("the node did not run what was released; see above")


if __name__ == "__main__":
    main()
