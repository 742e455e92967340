"""A folder as one layer, and that layer as an OCI image archive (image-spec 1.0), which every container runtime loads."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import stat
import tarfile
from collections.abc import Mapping
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
    tar = _tar(root, when)
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=packed, mtime=0) as file:
        file.write(tar)
    return Layer(diff=_digest(tar), data=packed.getvalue())


def _tar(root: Path, when: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            info = tarfile.TarInfo(name)
            info.mtime = when
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, str(path.readlink()), 0o777
                tar.addfile(info)
            elif stat.S_ISDIR(mode):
                info.type, info.mode = tarfile.DIRTYPE, 0o1777 if name in _STICKY else 0o755
                tar.addfile(info)
            else:
                info.size, info.mode = path.lstat().st_size, 0o755 if mode & stat.S_IXUSR else 0o644
                with path.open("rb") as file:
                    tar.addfile(info, file)
    return out.getvalue()


def archive(layer: Layer, *, name: str, tag: str, architecture: str, when: int, config: Mapping[str, Any]) -> bytes:
    """Write the archive of an image of one layer.

    Args:
        layer: its files.
        name: what runtimes call it, with the registry: ``docker.io/library/device-plugin-gateway``.
        tag: the tag of it.
        architecture: OCI's word, as ``amd64``.
        when: when it was made, in seconds since 1970.
        config: how it is run: ``Entrypoint``, ``Env``, ``Labels``... of OCI's image configuration.
    """
    blobs: dict[str, bytes] = {}

    def put(kind: str, data: bytes) -> dict[str, Any]:
        digest = _digest(data)
        blobs[digest.removeprefix("sha256:")] = data
        return {"mediaType": f"{_MEDIA}.{kind}", "digest": digest, "size": len(data)}

    created = datetime.fromtimestamp(when, UTC).isoformat().replace("+00:00", "Z")
    files = put("layer.v1.tar+gzip", layer.data)
    image = {
        "created": created,
        "architecture": architecture,
        "os": "linux",
        "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": [layer.diff]},
        "history": [{"created": created, "created_by": "make image"}],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_MEDIA}.manifest.v1+json",
        "config": put("config.v1+json", _json(image)),
        "layers": [files],
    }
    entry = put("manifest.v1+json", _json(manifest))
    entry["platform"] = {"architecture": architecture, "os": "linux"}
    # containerd takes the first as the image's name, others the second as its tag.
    entry["annotations"] = {"io.containerd.image.name": f"{name}:{tag}", "org.opencontainers.image.ref.name": tag}
    index = {"schemaVersion": 2, "mediaType": f"{_MEDIA}.index.v1+json", "manifests": [entry]}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        named = {"oci-layout": _json({"imageLayoutVersion": "1.0.0"}), "index.json": _json(index)}
        for file, data in {**named, **{f"blobs/sha256/{digest}": blobs[digest] for digest in sorted(blobs)}}.items():
            info = tarfile.TarInfo(file)
            info.size, info.mtime, info.mode = len(data), when, 0o644
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
