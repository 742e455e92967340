"""Make the image: ``python -m tools.image`` (``make image``), from the project's root.

Leaves in dist/image: the OCI archive (one for each tag), the bill of materials, and the layer for deploy/Containerfile.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

from gateway import VERSION
from tools.image import archive, build, contents, debian

REGISTRY = "docker.io/library"  # what container runtimes put before a name that has no registry
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)


def main() -> None:
    """Make the image, or end with 1 and a message."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tag", action="append", help="the image's tag, or several: an archive for each (the version)")
    parser.add_argument("--out", type=Path, default=Path("dist/image"), help="where to (%(default)s)")
    parser.add_argument("--architecture", choices=debian.TRIPLES, help="for which machines (this one's)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--newest", action="store_true", help=f"take the newest packages, not those of {build.LOCK}")
    mode.add_argument("--lock", action="store_true", help=f"write the newest packages into {build.LOCK}; make no image")
    arguments = parser.parse_args()
    began = time.monotonic()

    def progress(text: str) -> None:
        print(f"image: {text}   ({time.monotonic() - began:.0f} s)", flush=True)

    try:
        tags = arguments.tag or [VERSION]
        if wrong := [tag for tag in tags if not _TAG.fullmatch(tag)]:
            raise contents.ImageError(f"expected a tag of letters, digits, '_', '.' and '-', got {wrong[0]!r}")  # noqa: TRY301
        if arguments.lock:
            _lock(progress)
        else:
            architecture = arguments.architecture or debian.architecture()
            made = build.build(architecture, newest=arguments.newest, when=build.when(), progress=progress)
            _write(made, arguments.out, tags, progress)
    except contents.ImageError as error:
        sys.exit(f"image: {error}")


def _lock(progress: debian.Progress) -> None:
    wanted = contents.read(build.CONTENTS)
    pins = {
        architecture: [contents.pin(path) for path in debian.fetch(wanted, None, architecture, build.cache(), progress)]
        for architecture in debian.TRIPLES
    }
    build.LOCK.write_text(contents.locked(pins))
    progress(f"{build.LOCK}: {sum(map(len, pins.values()))} packages")


def _write(made: build.Built, out: Path, tags: list[str], progress: debian.Progress) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "root.tar.gz").write_bytes(made.layer.data)
    (out / "sbom.cdx.json").write_bytes(made.bill)
    for tag in tags:
        name = f"{REGISTRY}/{build.NAME}"
        image = archive.Image(architecture=made.architecture, layer=made.layer, config=build.config(tag))
        packed = archive.archive([image], name=name, tag=tag, when=build.when())
        path = out / f"{build.NAME}-{tag}-{made.architecture}.oci.tar"
        path.write_bytes(packed.data)
        progress(f"{path}: {name}:{tag}, {len(packed.data) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
