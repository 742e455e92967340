"""A folder as one layer, and that layer as an OCI image archive (image-spec 1.0), which every container runtime loads."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import stat
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_MEDIA = "application/vnd.oci.image"
_STICKY = {"tmp", "var/tmp"}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer: the digest of its tar, and that tar compressed by gzip, which every runtime knows."""

    diff: str
    data: bytes


def layer(root: Path, when: int) -> Layer:
    """Make a layer of a folder: sorted, of root's, with one time for all, and no modes but "may be run" or not.

    Args:
        root: the folder.
        when: the time of every file, in seconds since 1970.
    """
    packed = _tar(root, when)
    return Layer(diff=_digest(packed), data=gzipped(packed))


def gzipped(data: bytes) -> bytes:
    """Compress by gzip, without a name and a time."""
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=packed, mtime=0) as file:
        file.write(data)
    return packed.getvalue()


def tar(files: Mapping[str, bytes], when: int) -> bytes:
    """Write a tar of files in their order, all of them readable, none of them to be run."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as opened:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.mode = len(data), when, 0o644
            opened.addfile(info, io.BytesIO(data))
    return out.getvalue()


def repacked(data: bytes, when: int) -> bytes:
    """Write the files of a compressed tar again: sorted, with one time for all and one owner."""
    with tarfile.open(fileobj=io.BytesIO(data)) as opened:
        files = {info.name: file.read() for info in opened if (file := opened.extractfile(info))}
    return gzipped(tar(dict(sorted(files.items())), when))


def _tar(root: Path, when: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as opened:
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            info = tarfile.TarInfo(name)
            info.mtime = when
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, str(path.readlink()), 0o777
                opened.addfile(info)
            elif stat.S_ISDIR(mode):
                info.type, info.mode = tarfile.DIRTYPE, 0o1777 if name in _STICKY else 0o755
                opened.addfile(info)
            else:
                info.size, info.mode = path.lstat().st_size, 0o755 if mode & stat.S_IXUSR else 0o644
                with path.open("rb") as file:
                    opened.addfile(info, file)
    return out.getvalue()


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image of one layer for one architecture (OCI's word, as ``amd64``), and how it is run: OCI's image configuration."""

    architecture: str
    layer: Layer
    config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Archive:
    """An OCI archive, and the digest by which a registry gives what is in it."""

    digest: str
    data: bytes


class _Blobs(dict[str, bytes]):
    """The blobs of an archive by digest."""

    def put(self, media: str, data: bytes) -> dict[str, Any]:
        """Add a blob; return its descriptor."""
        digest = _digest(data)
        self[digest] = data
        return {"mediaType": media, "digest": digest, "size": len(data)}


def archive(images: Sequence[Image], *, name: str, tag: str, when: int) -> Archive:
    """Write the archive of an image: its manifest for one architecture, an index of manifests for several.

    Args:
        images: one for each architecture.
        name: what runtimes call it, with the registry: ``docker.io/library/device-plugin-gateway``.
        tag: the tag of it.
        when: when it was made, in seconds since 1970.
    """
    blobs = _Blobs()
    entries = [_image(one, blobs, when) for one in images]
    entry = entries[0] if len(entries) == 1 else blobs.put(f"{_MEDIA}.index.v1+json", _json(_index(entries)))
    # containerd takes the first as the image's name, others the second as its tag.
    named = {"io.containerd.image.name": f"{name}:{tag}", "org.opencontainers.image.ref.name": tag}
    return _archive(blobs, entry, named, when)


def artifact(
    config: tuple[str, bytes], content: tuple[str, bytes], notes: Mapping[str, str], *, tag: str, when: int
) -> Archive:
    """Write the archive of something that is no image: a configuration and a content, each with its media type.

    Args:
        config: what the content is.
        content: the content.
        notes: the manifest's annotations.
        tag: the tag of it.
        when: the time of the archive's files, in seconds since 1970.
    """
    blobs = _Blobs()
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_MEDIA}.manifest.v1+json",
        "config": blobs.put(*config),
        "layers": [blobs.put(*content)],
        "annotations": dict(notes),
    }
    entry = blobs.put(f"{_MEDIA}.manifest.v1+json", _json(manifest))
    return _archive(blobs, entry, {"org.opencontainers.image.ref.name": tag}, when)


def stamp(when: int) -> str:
    """Return a time as OCI writes it."""
    return datetime.fromtimestamp(when, UTC).isoformat().replace("+00:00", "Z")


def _image(image: Image, blobs: _Blobs, when: int) -> dict[str, Any]:
    """Add an image's blobs; return the entry of its manifest."""
    described = {
        "created": stamp(when),
        "architecture": image.architecture,
        "os": "linux",
        "config": dict(image.config),
        "rootfs": {"type": "layers", "diff_ids": [image.layer.diff]},
        "history": [{"created": stamp(when), "created_by": "make image"}],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_MEDIA}.manifest.v1+json",
        "config": blobs.put(f"{_MEDIA}.config.v1+json", _json(described)),
        "layers": [blobs.put(f"{_MEDIA}.layer.v1.tar+gzip", image.layer.data)],
    }
    entry = blobs.put(f"{_MEDIA}.manifest.v1+json", _json(manifest))
    return {**entry, "platform": {"architecture": image.architecture, "os": "linux"}}


def _index(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"schemaVersion": 2, "mediaType": f"{_MEDIA}.index.v1+json", "manifests": list(entries)}


def _archive(blobs: _Blobs, entry: Mapping[str, Any], notes: Mapping[str, str], when: int) -> Archive:
    named = {
        "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
        "index.json": _json(_index([{**entry, "annotations": dict(notes)}])),
    }
    files = {f"blobs/{digest.replace(':', '/')}": blobs[digest] for digest in sorted(blobs)}
    return Archive(digest=entry["digest"], data=tar({**named, **files}, when))


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
