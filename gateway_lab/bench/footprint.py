"""What a process costs its node while nothing happens: memory, CPU time and context switches, read from /proc.

Linux only. CPU time comes from schedstat, in nanoseconds, because an idle daemon uses less than the 10 ms tick of stat.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MIB = 1024.0
"""KiB in a MiB: /proc counts memory in KiB, and calls them kB."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """``pss`` and ``rss`` in MiB; ``cpu`` in ms and ``switches`` (voluntary or not) since the process began."""

    pss: float
    rss: float
    cpu: float
    switches: int

    def since(self, earlier: Footprint) -> Footprint:
        """Give the memory of now, and what was used since ``earlier``."""
        return Footprint(self.pss, self.rss, self.cpu - earlier.cpu, self.switches - earlier.switches)

    def over(self, other: Footprint) -> Footprint:
        """Give how much more this is than ``other``."""
        return Footprint(
            self.pss - other.pss, self.rss - other.rss, self.cpu - other.cpu, self.switches - other.switches
        )


def footprint(pid: int) -> Footprint:
    """Read what process ``pid`` costs, all its threads together.

    Raises:
        OSError: there is no such process, or it is another user's.
    """
    root = Path("/proc", str(pid))
    memory = _fields((root / "smaps_rollup").read_text().splitlines()[1:])
    cpu, switches = 0.0, 0
    for task in (root / "task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            cpu += int((task / "schedstat").read_text().split()[0]) / 1e6
            status = _fields((task / "status").read_text().splitlines())
            switches += status["voluntary_ctxt_switches"] + status["nonvoluntary_ctxt_switches"]
    return Footprint(memory["Pss"] / MIB, memory["Rss"] / MIB, cpu, switches)


def _fields(lines: Iterable[str]) -> dict[str, int]:
    """Read ``Name: number`` and ``Name: number kB`` lines; leave the others out."""
    pairs = (line.partition(":") for line in lines)
    words = ((name, value.split()) for name, _, value in pairs)
    return {name: int(value[0]) for name, value in words if value and value[0].isdigit()}
