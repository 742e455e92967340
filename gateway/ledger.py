"""The ledger: what this node has been promised, on disk, so that the promise outlives the gateway.

One JSON file in ``--state-dir`` (0700, root only). It holds, by resource name, every device ID that was ever announced
and how it was announced last, and the dialect that the kubelet last accepted. An ID is durable before the first list
that names it is sent. The file is replaced as a whole (write, fsync, rename, fsync of the folder), so that a crash at
any moment leaves the old one or the new one. Fields that this release doesn't know are kept. A file that can't be read
is put aside, never deleted, and nothing about it stops the gateway: the kubelet's devices come first.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from devices.model import Device, Health

FORMAT = 1
_MAX_BYTES = 64 * 1024 * 1024


class LedgerError(Exception):
    """The ledger could not be read or written. The message says what became of it and what to do."""


class Ledger:
    """The ledger in memory, over one file. Not thread-safe; ``save`` blocks for as long as the disk takes."""

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / "ledger.json"
        self._content: dict[str, Any] = {"format": FORMAT}

    def load(self) -> None:
        """Read the file; a missing one is an empty ledger.

        Raises:
            LedgerError: it is unreadable, damaged or of a newer format; it was put aside, and the ledger is empty.
        """
        try:
            with self.path.open("rb") as file:
                content = _read(file.read(_MAX_BYTES + 1))
        except FileNotFoundError:
            return
        except (OSError, ValueError, msgspec.DecodeError) as error:
            raise LedgerError(
                f"expected a ledger of format {FORMAT} in {self.path}: {error}; {self._put_aside()}"
            ) from error
        self._content = content

    def announced(self, resource: str) -> dict[str, Device]:
        """Return the devices ever announced for ``resource``, by ID, as they were announced last."""
        return {
            device_id: Device(device_id, Health(row["health"]), tuple(row["numa"]))
            for device_id, row in self._announced(resource).items()
        }

    def resources(self) -> tuple[str, ...]:
        """Return the resource names that were ever announced."""
        return tuple(self._content.get("resources", {}))

    @property
    def accepted(self) -> str:
        """The dialect that a kubelet accepted last; empty where none is known."""
        return str(self._content.get("accepted", ""))

    def accept(self, dialect: str) -> bool:
        """Note the dialect that the kubelet accepted; True where that is news worth saving."""
        if self.accepted == dialect:
            return False
        self._content["accepted"] = dialect
        return True

    def announce(self, resource: str, devices: tuple[Device, ...]) -> bool:
        """Note a list that is about to be sent; True where it names an ID or a health that isn't on disk yet."""
        rows = self._announced(resource)
        news = False
        for device in devices:
            row = rows.get(device.id)
            if row is None:
                row = rows[device.id] = {}
            if row.get("health") != device.health.value or row.get("numa") != list(device.numa_nodes):
                row["health"] = device.health.value
                row["numa"] = list(device.numa_nodes)
                news = True
        return news

    def snapshot(self) -> bytes:
        """Return the file's next content, so that it can be written elsewhere than on the event loop."""
        return msgspec.json.encode(self._content)

    def save(self, data: bytes) -> None:
        """Replace the file by ``data`` (a ``snapshot``), durably. Blocks: about 0.4 ms on a good disk.

        Raises:
            LedgerError: the disk is full, the folder read-only or gone; the file is as it was.
        """
        temporary = self.path.with_suffix(".tmp")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise LedgerError(
                f"could not write {self.path}: {error}. Devices are served all the same, but a device that vanishes while "
                "the gateway is down will not be remembered: make the state directory writable"
            ) from error

    def _announced(self, resource: str) -> dict[str, Any]:
        rows: dict[str, Any] = (
            self._content.setdefault("resources", {}).setdefault(resource, {}).setdefault("announced", {})
        )
        return rows

    def _put_aside(self) -> str:
        aside = self.path.with_name(f"ledger.damaged-{time.time_ns()}.json")
        try:
            self.path.rename(aside)
        except OSError as error:
            return f"it could not be put aside ({error}) and will be overwritten"
        return f"it was put aside as {aside.name}, and a new ledger begun"


def _read(data: bytes) -> dict[str, Any]:
    """Decode a ledger, or raise ValueError (as msgspec does) where it isn't what ``FORMAT`` promises."""
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES} bytes")
    content = msgspec.json.decode(data)
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise ValueError("it holds no object with a format number")  # noqa: TRY004 - one kind of damage
    if content["format"] > FORMAT:
        raise ValueError(f"it is of format {content['format']}, written by a newer gateway")
    resources = content.get("resources", {})
    if not isinstance(resources, dict):
        raise ValueError("resources: expected an object")  # noqa: TRY004 - one kind of damage
    for name, resource in resources.items():
        if not isinstance(resource, dict) or not isinstance(resource.get("announced", {}), dict):
            raise ValueError(f"resources.{name}: expected an object with the announced IDs")  # noqa: TRY004 - as above
        for device_id, row in resource.get("announced", {}).items():
            valid = (
                isinstance(row, dict)
                and row.get("health") in {health.value for health in Health}
                and isinstance(row.get("numa"), list)
                and all(isinstance(node, int) for node in row["numa"])
            )
            if not valid:
                raise ValueError(f"resources.{name}.announced.{device_id}: expected health and numa")
    return content
