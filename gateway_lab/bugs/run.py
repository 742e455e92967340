"""Shows bugs on kubelets, and holds what is seen against the table: ``make track-record`` shows all on genuine ones.

Ends with 0 when each was seen on the kubelet that has it, and not on the one that hasn't.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway_lab.bugs.shows import Stage
from gateway_lab.bugs.table import BUGS
from gateway_lab.kubelets import build
from gateway_lab.kubelets.behaviour import behaviour


@dataclass(frozen=True, slots=True)
class Sight:
    """What one kubelet showed of one bug; ``seen`` is empty where it didn't."""

    bug: str
    version: str
    genuine: bool
    seen: str

    @property
    def expected(self) -> bool:
        """Whether the table says the same."""
        return bool(self.seen) is BUGS[self.bug].befalls(behaviour(self.version).minor)

    def __str__(self) -> str:
        kind = "genuine" if self.genuine else "emulated"
        told = f"has it: {self.seen}" if self.seen else "doesn't have it"
        return f"{self.bug}: kubelet {self.version} ({kind}) {told}" + ("" if self.expected else ". NOT AS EXPECTED")


def versions(name: str) -> tuple[str, ...]:
    """Give the kubelets on which a bug is shown when none is named: one with it, and one without."""
    return tuple(filter(None, (BUGS[name].bad, BUGS[name].good)))


async def look(name: str, version: str, binary: Callable[[str], Path | None]) -> Sight:
    """Show one bug on one kubelet.

    Raises:
        ValueError: no command shows it; the message says why.
        KubeletError: the kubelet doesn't run as it must for that.
    """
    bug = BUGS[name]
    if bug.show is None:
        raise ValueError(f"{name} can't be shown: {bug.why_not}")
    with tempfile.TemporaryDirectory(prefix="dpg-", dir="/tmp") as folder:
        directory = Path(folder) / "device-plugins"
        directory.mkdir()
        async with Stage(directory, version, binary) as stage:
            seen = await bug.show(stage)
    return Sight(name, version, binary(version) is not None, seen)


async def look_all(
    names: Sequence[str],
    asked: Sequence[str],
    binary: Callable[[str], Path | None],
    say: Callable[[str], None],
) -> list[Sight]:
    """Show bugs one after another, each on the kubelets that were asked for, or on its own two."""
    sights = []
    for name in names:
        for version in asked or versions(name):
            sights.append(await look(name, version, binary))
            say(str(sights[-1]))
    return sights


def main() -> int:
    """Show each bug that a command shows, on genuine kubelets alone."""
    shown = [name for name, bug in BUGS.items() if bug.show is not None]
    wanted = {version for name in shown for version in versions(name)}
    binaries = build.build(sorted(wanted), progress=lambda line: print(line, flush=True))
    sights = asyncio.run(look_all(shown, (), binaries.get, lambda line: print(line, flush=True)))
    for name, bug in BUGS.items():
        if bug.show is None:
            print(f"{name}: no command shows it: {bug.why_not}")
    return int(not all(sight.expected for sight in sights))


if __name__ == "__main__":
    sys.exit(main())
