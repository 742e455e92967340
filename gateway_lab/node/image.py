"""The images that every node has, made from the static busybox of its own root: no registry, nothing to build.

``PAUSE`` holds a pod's namespaces; ``BUSYBOX`` is for test pods, with all of busybox's commands.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BUSYBOX = "localhost/busybox:1"
PAUSE = "localhost/pause:1"

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_COMMANDS = {BUSYBOX: ["/bin/sh"], PAUSE: ["/bin/sleep", "2147483647"]}  # in seconds: 68 years


def busybox(program: Path, name: str, archive: Path) -> None:
    """Writes the archive of ``BUSYBOX`` or ``PAUSE``, as ``docker save`` does.

    Args:
        program: A static busybox.
        name: Which of the two.
        archive: Where to.
    """
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for folder in ("bin", "etc", "tmp"):
            tar.addfile(_entry(folder, tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755))
        _add(tar, "bin/busybox", program.read_bytes(), 0o755)
        _add(tar, "etc/passwd", b"root:x:0:0:root:/:/bin/sh\n", 0o644)
        listed = subprocess.run([program, "--list"], check=True, capture_output=True, text=True).stdout.split()
        for command in sorted(set(listed) - {"busybox"}):
            entry = _entry(f"bin/{command}", tarfile.SYMTYPE, 0o777)
            entry.linkname = "busybox"
            tar.addfile(entry)
    files = layer.getvalue()
    config: Mapping[str, Any] = {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Cmd": _COMMANDS[name], "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(files).hexdigest()}"]},
    }
    with tarfile.open(archive, mode="w") as tar:
        _add(tar, "layer.tar", files, 0o644)
        _add(tar, "config.json", json.dumps(config).encode(), 0o644)
        manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
        _add(tar, "manifest.json", json.dumps(manifest).encode(), 0o644)


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    entry = _entry(name, tarfile.REGTYPE, mode)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def _entry(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = kind, mode
    return entry
