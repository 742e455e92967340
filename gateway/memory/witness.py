"""A second file that shows if the state file is older than the last one, so that it lacks claims that were prepared since.

It is in the kubelet's folder, which no backup of the state directory restores. It is valid in the boot in which it was
written, because no container survives a boot. The leader writes it after the state file, and every gateway reads it before
that. So it is never newer than a state file that only gateways wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Final

import msgspec

from devices import files
from gateway.memory import salvage
from gateway.memory.claimed import Claimed
from gateway.memory.file import ReadFile
from gateway.memory.rows import Content

PATH: Final = Path("gateway-state", "claims.json")
"""Its place in the kubelet's folder. It has its own sub-folder, because a kubelet deletes files, and gateways watch their own one."""
_GENERATION: Final = "generation"
_OWNERS: Final = frozenset({"claims", "sides"})
"""The fields of a state file that cause a GPU to be given twice if they are out of date."""


class Last(msgspec.Struct, frozen=True):
    """What was written last: the generation of the state file, which grows when holders change, and its claims."""

    boot_id: str = ""
    generation: Annotated[int, msgspec.Meta(ge=0, lt=2**62)] = 0
    claims: dict[str, Claimed] = {}


def generation_of(content: Content, touched: Collection[str]) -> int:
    """Return the generation of a state file with these ``touched`` fields; 0 if it never had claims or sides."""
    before: int = content.get(_GENERATION, 0)
    return before + (not _OWNERS.isdisjoint(touched))


def judged(found: ReadFile | None, last: Last) -> ReadFile | None:
    """Drop the sides of an older file, and merge the claims of both files.

    A claim that has ended meanwhile is forgotten once the API server lacks it.
    """
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
        socket_dir: the kubelet's folder; None: there is no second file.
        boot_id: the ID of this boot; empty if unknown. Then nothing is compared.
    """

    def __init__(self, socket_dir: Path | None, boot_id: str) -> None:
        self._path, self._boot_id = socket_dir / PATH if socket_dir and boot_id else None, boot_id
        self._written = 0

    def held_against(self, read: Callable[[], ReadFile | None]) -> ReadFile | None:
        """Read the state file, and compare it with this one. Blocks: call it in a thread."""
        last = self._read()
        return judged(read(), last)

    def write(self, generation: int, claims: Content) -> None:
        """Write the file. Blocks: call it in a thread.

        Raises:
            OSError: it can't be written.
        """
        if self._path is None or generation == self._written:
            return
        last = {"boot_id": self._boot_id, _GENERATION: generation, "claims": claims}
        try:
            self._path.parent.mkdir(mode=0o750, exist_ok=True)
            files.replace(self._path, msgspec.json.encode(last), durable=False)  # It is valid in this boot only.
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}: {self._path}") from error
        self._written = generation

    def _read(self) -> Last:
        if self._path is None:
            return Last()
        files.sweep(self._path.parent)
        try:
            last = msgspec.json.decode(files.read_plain(self._path, salvage.MAX_BYTES), type=Last)
        except (OSError, files.NotPlainError, ValueError, RecursionError):
            return Last()
        return last if last.boot_id == self._boot_id else Last()
