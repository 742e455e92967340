"""A second file, by which a state file that is older than the newest one is known: it lacks the claims that were prepared since.

It is in the kubelet's folder, which no backup of the state directory brings back, and counts in the boot in which it was written: no
container lives longer. The gateway that leads writes it after the state file, and all read it before that. So it is never ahead of a state file
that only gateways wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Final

import msgspec

from devices import files
from gateway.memory import mend
from gateway.memory.claimed import Claimed
from gateway.memory.file import ReadFile
from gateway.memory.rows import Content

PATH: Final = Path("gateway-state", "claims.json")
"""Where it is in the kubelet's folder: in a folder of its own, because a kubelet deletes files, and gateways watch their other one."""
_GENERATION: Final = "generation"
_OWNERS: Final = frozenset({"claims", "sides"})
"""What of a state file gives a GPU twice where it is out of date."""


class Last(msgspec.Struct, frozen=True):
    """What was written last: the number of the state file, which grows with each change of owners, and its claims."""

    boot_id: str = ""
    generation: Annotated[int, msgspec.Meta(ge=0, lt=2**62)] = 0
    claims: dict[str, Claimed] = {}


def generation_of(content: Content, touched: Collection[str]) -> int:
    """Number a state file of which some fields are ``touched``; 0 while it never said anything of owners."""
    before: int = content.get(_GENERATION, 0)
    return before + (not _OWNERS.isdisjoint(touched))


def judged(found: ReadFile | None, last: Last) -> ReadFile | None:
    """Take what an older file says of owners for lost. Claims are those of both: one too many is forgotten once the API server lacks it."""
    content: Content = {} if found is None else found.content
    if content.get(_GENERATION, 0) >= last.generation:
        return found
    known = {key: row for key, row in content.items() if key != "sides"}
    known["claims"] = content.get("claims", {}) | msgspec.to_builtins(last.claims)
    known[_GENERATION] = last.generation
    if found is None:
        return ReadFile(None, known, "it is gone")
    return ReadFile(
        found.identity, known, found.complaint or "it is older than the one that a gateway wrote last: it was put back"
    )


class Witness:
    """The second file.

    Args:
        socket_dir: the kubelet's folder; None: there is no such file.
        boot_id: what this boot is called; empty where nobody knows, and so nothing can be said.
    """

    def __init__(self, socket_dir: Path | None, boot_id: str) -> None:
        self._path, self._boot_id = socket_dir / PATH if socket_dir and boot_id else None, boot_id
        self._written = 0

    def held_against(self, read: Callable[[], ReadFile | None]) -> ReadFile | None:
        """Read the state file, and hold it against this one. It blocks: for a thread."""
        last = self._read()
        return judged(read(), last)

    def write(self, generation: int, claims: Content) -> None:
        """Say what was written. It blocks: for a thread.

        Raises:
            OSError: it can't be written.
        """
        if self._path is None or generation == self._written:
            return
        last = {"boot_id": self._boot_id, _GENERATION: generation, "claims": claims}
        try:
            self._path.parent.mkdir(mode=0o750, exist_ok=True)
            files.replace(self._path, msgspec.json.encode(last), durable=False)  # It counts in this boot alone.
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}: {self._path}") from error
        self._written = generation

    def _read(self) -> Last:
        if self._path is None:
            return Last()
        files.sweep(self._path.parent)
        try:
            last = msgspec.json.decode(files.read_plain(self._path, mend.MAX_BYTES), type=Last)
        except (OSError, files.NotPlainError, ValueError, RecursionError):
            return Last()
        return last if last.boot_id == self._boot_id else Last()
