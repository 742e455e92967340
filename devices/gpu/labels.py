"""Write a node's labels to a file, from which Node Feature Discovery (NFD) labels the node.

NFD's worker reads every file of a folder, except hidden and large ones, and removes labels that are in no file any more
(source/local/local.go of 0.18). So the file is replaced atomically, and removed when the setting is off.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from devices import files

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from devices.gpu.backend import Sight
    from devices.policy import Policy

PATH: Final = Path("/etc/kubernetes/node-feature-discovery/features.d/device-plugin-gateway")
_log = structlog.get_logger()


class FeatureFile:
    """The file with the labels, which the leader writes. It blocks: call it in a thread. ``labels`` makes the labels of a ``Sight``."""

    def __init__(self, labels: Callable[[Sight, Policy], Mapping[str, str]], path: Path = PATH) -> None:
        self._labels, self._path = labels, path
        self._written = b""
        self._as: tuple[int, int] | None = None
        """The inode and time (ns) of the file that this gateway wrote; None: it wrote none."""
        self.trouble = ""
        """Why the file isn't up to date; empty if it is."""

    def keep(self, sight: Sight, policy: Policy) -> None:
        """Write the labels if they changed. If the setting is off, remove the file."""
        try:
            if not policy.node_features:
                self._path.unlink(missing_ok=True)
            else:
                labels = sorted(self._labels(sight, policy).items())
                text = "".join(f"{name}={value}\n" for name, value in labels if value.isprintable()).encode()
                if text != self._written or not self._is_ours():
                    files.sweep(self._path.parent, self._path.name)
                    self._as = _known_by(files.replace(self._path, text, 0o644))
                    self._written = text
                    _log.info("node labels written", path=str(self._path), labels=text.count(b"\n"))
            self.trouble = ""
        except OSError as error:
            before = self.trouble
            self.trouble = (
                f"the node's labels can't be written to {self._path}: {error.strerror}. Is Node Feature Discovery installed? "
                "In a pod, mount its folder"
            )
            if self.trouble != before:
                _log.warning("node labels not written", reason=self.trouble)

    def withdraw(self) -> None:
        """Remove the file, unless another gateway has written it since."""
        try:
            if self._is_ours():
                self._path.unlink()
        except OSError as error:
            _log.warning("node labels not removed", path=str(self._path), reason=str(error))

    def _is_ours(self) -> bool:
        try:
            return self._as == _known_by(self._path.lstat())
        except FileNotFoundError:
            return False


def _known_by(found: os.stat_result) -> tuple[int, int]:
    return found.st_ino, found.st_mtime_ns
