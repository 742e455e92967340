"""The Helm chart as a package, as an OCI artifact, and as the index of a plain repository: the same bytes for the same inputs."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import yaml

from tools.image import archive, contents

_MEDIA = "application/vnd.cncf.helm"
_IMAGE = re.compile(r'^  image: ""$', re.MULTILINE)


def describe(folder: Path) -> dict[str, Any]:
    """Return what Chart.yaml says."""
    described: dict[str, Any] = yaml.safe_load((folder / "Chart.yaml").read_text())
    return described


def package(folder: Path, image: str, when: int) -> bytes:
    """Pack the chart as Helm does, with an image that its users need not name.

    Args:
        folder: the chart.
        image: the default of ``gateway.image``.
        when: the time of every file, in seconds since 1970.

    Raises:
        ImageError: values.yaml has no such default to replace.
    """
    name = describe(folder)["name"]
    files = {
        f"{name}/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    values, found = _IMAGE.subn(f"  image: {image}", files[f"{name}/values.yaml"].decode())
    if found != 1:
        raise contents.ImageError(f'{folder}/values.yaml: expected one line `  image: ""`, found {found}')
    files[f"{name}/values.yaml"] = values.encode()
    return archive.gzipped(archive.tar(files, when))


def artifact(folder: Path, packed: bytes, when: int) -> archive.Archive:
    """Put the packed chart into an OCI archive, as ``helm push`` would put it into a registry."""
    described = describe(folder)
    notes = {
        "org.opencontainers.image.created": archive.stamp(when),
        "org.opencontainers.image.description": described["description"],
        "org.opencontainers.image.title": described["name"],
        "org.opencontainers.image.version": described["version"],
    }
    return archive.artifact(
        (f"{_MEDIA}.config.v1+json", json.dumps(described, sort_keys=True).encode()),
        (f"{_MEDIA}.chart.content.v1.tar+gzip", packed),
        notes,
        tag=described["version"],
        when=when,
    )


def index(folder: Path, packed: bytes, file: str, when: int) -> str:
    """Write the index.yaml of a plain repository that has this package next to the index."""
    described = describe(folder)
    digest = hashlib.sha256(packed).hexdigest()
    entry = {**described, "created": archive.stamp(when), "digest": digest, "urls": [file]}
    listed = {"apiVersion": "v1", "entries": {described["name"]: [entry]}, "generated": archive.stamp(when)}
    return yaml.safe_dump(listed)
