"""The CDI specification of one claim: what containers with its devices get. Some functions are pure, the others use the disk.

A container gets the devices of the requests that it names, so each device has its own edits. Devices of the node's own
specifications (NVIDIA's driver files) are used by their names. A claim that adds nothing has no file.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from devices.files import NotPlainError, read_plain, replace
from devices.model import ContainerAnswer

FOLDER: Final = Path("/var/run/cdi")
_CLASS: Final = "claim"
_VERSION: Final = "0.5.0"
"""The first version in which a device's name may begin with a digit, as a UID may."""
_OURS: Final = re.compile(
    r"(?P<new>\.)?(?P<driver>.+)-claim-(?P<uid>[A-Za-z0-9-]{1,63})\.json(?(new)\.[0-9a-f]{8}\.new)", re.ASCII
)
_BEING_PREPARED_S: Final = 60.0
"""Seconds for which a file may belong to a claim that another gateway is preparing."""


def edits(answer: ContainerAnswer) -> dict[str, Any]:
    """Return a device as CDI container edits; empty if it needs only CDI names."""
    mounts = [
        {
            "hostPath": mount.host_path,
            "containerPath": mount.container_path,
            "options": ["rbind", "rprivate", "nosuid", "nodev", "ro" if mount.read_only else "rw"],
        }
        for mount in answer.mounts
    ]
    nodes = [
        {"path": node.container_path, "hostPath": node.host_path, "permissions": node.permissions}
        for node in answer.device_nodes
    ]
    whole = {"env": [f"{name}={value}" for name, value in answer.envs.items()], "deviceNodes": nodes, "mounts": mounts}
    return {key: value for key, value in whole.items() if value}


def specification(driver: str, uid: str, devices: Mapping[str, ContainerAnswer]) -> dict[str, Any] | None:
    """Return the specification of a claim; None if it needs none."""
    all_edits = {device: edits(answer) for device, answer in devices.items()}
    rows = [{"name": f"{uid}-{device}", "containerEdits": one} for device, one in all_edits.items() if one]
    return {"cdiVersion": _VERSION, "kind": f"{driver}/{_CLASS}", "devices": rows} if rows else None


def names(driver: str, uid: str, device: str, answer: ContainerAnswer) -> tuple[str, ...]:
    """Return a device's CDI names: those in the answer, and the claim's own name if the device has edits."""
    own = (f"{driver}/{_CLASS}={uid}-{device}",) if edits(answer) else ()
    return (*answer.cdi_devices, *own)


def path_of(driver: str, uid: str, folder: Path = FOLDER) -> Path:
    """Return the path of a claim's specification."""
    return folder / f"{driver}-{_CLASS}-{uid}.json"


def write(driver: str, uid: str, wanted: Mapping[str, Any], folder: Path = FOLDER) -> None:
    """Write a specification atomically. It blocks: call it in a thread.

    Raises:
        OSError: it can't be written.
    """
    path, data = path_of(driver, uid, folder), msgspec.json.format(msgspec.json.encode(wanted), indent=1)
    with contextlib.suppress(OSError, NotPlainError):
        if read_plain(path, len(data)) == data:
            return
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    replace(path, data, 0o644, durable=False)  # A boot empties the folder, and the gateway writes it again.


def remove(driver: str, uid: str, folder: Path = FOLDER) -> None:
    """Remove a claim's specification. It blocks: call it in a thread.

    Raises:
        OSError: it can't be removed.
    """
    path_of(driver, uid, folder).unlink(missing_ok=True)


def sweep(drivers: Collection[str], uids: Collection[str], folder: Path = FOLDER) -> list[str]:
    """Remove our drivers' specifications of claims that are not prepared; return their names. It blocks: call it in a thread."""
    removed, files = [], list[Path]()
    with contextlib.suppress(OSError):
        files = list(folder.iterdir())
    for path in files:
        match = _OURS.fullmatch(path.name)
        if match is None or match["driver"] not in drivers:
            continue
        with contextlib.suppress(OSError):  # It may be a folder.
            old = time.time() - path.lstat().st_mtime > _BEING_PREPARED_S
            if old and (match["new"] or match["uid"] not in uids):
                path.unlink(missing_ok=True)
                removed.append(path.name)
    return removed
