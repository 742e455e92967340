"""The life of a device: what its states mean, and when they end."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "L1": "a trouble that needs a reset is remembered for as long as the node has not rebooted, and ends by evidence of a reset",
    "L2": "a withdrawn device is dropped at once, unless a container holds it; while nobody can tell, for a bounded time",
    "L3": "a lost device stays on the list until 30 days have passed in which nobody held it",
    "L4": "a cordon wins over health, spares those who hold the device, and hides nothing",
    "L5": "what nobody may look at stays on the list as it was",
    "L6": "an application's own trouble takes no device away",
    "L7": "a device that keeps falling ill is held back, longer each time",
    "L8": "the first discovery is bounded; while it lasts PreStartContainer is refused, not the admission",
}

_LIFE = "tests/unit/test_life.py"

MUTANTS = (
    Mutant(
        "L1",
        "a trouble outlives a reboot",
        "devices/life.py",
        " if row.boot_id == known.boot_id}",
        "}",
        _LIFE,
    ),
    Mutant(
        "L1",
        "a trouble ends when the backend has forgotten it",
        "devices/life.py",
        "    if row is not None:\n        return _still(row, spells)\n    trouble =",
        "    trouble =",
        _LIFE,
    ),
    Mutant(
        "L2",
        "a held device is dropped with its configuration",
        "devices/life.py",
        "    free = known.held is not None and device_id not in known.held\n",
        "    free = known.held is not None\n",
        _LIFE,
    ),
    Mutant(
        "L2",
        "a ghost stays for ever where nobody can tell who holds it",
        "devices/life.py",
        "free=clock.now >= until)",
        "free=False)",
        _LIFE,
    ),
    Mutant(
        "L3",
        "a lost device is forgotten though nobody knows who holds it",
        "devices/life.py",
        "    if free and clock.unix - known",
        "    if device_id not in (known.held or ()) and clock.unix - known",
        _LIFE,
    ),
    Mutant(
        "L3",
        "each restart begins the 30 days anew",
        "devices/life.py",
        "lost_since[device_id] = known.lost_since.get(device_id, clock.unix)",
        "lost_since[device_id] = clock.unix",
        _LIFE,
    ),
    Mutant(
        "L4",
        "a cordon takes a device from those who hold it",
        "devices/life.py",
        "        elif entry.device.id in held and row.held:",
        "        elif False:",
        _LIFE,
    ),
    Mutant(
        "L4",
        "who holds a cordoned device is served, ill or not",
        "devices/life.py",
        "        yield entry\n        entry = entry.beneath",
        "        yield entry\n        entry = None",
        _LIFE,
    ),
    Mutant(
        "L5",
        "a released device is judged by what nobody can see",
        "devices/life.py",
        "if listing is not None and device_id in listing.released:",
        "if False and listing is not None:",
        _LIFE,
    ),
    Mutant(
        "L6",
        "a program's failure makes the device ill",
        "devices/life.py",
        "    ill = trouble is not None and trouble.kind is not Kind.APPLICATION\n",
        "    ill = trouble is not None\n",
        _LIFE,
    ),
    Mutant(
        "L7",
        "whoever is well comes back at once",
        "devices/life.py",
        "    if back is not None and now < back:",
        "    if False and back is not None:",
        _LIFE,
    ),
    Mutant(
        "L8",
        "a backend that never reports is waited for",
        "devices/life.py",
        "        if clock.now < limit:\n",
        "        if True:\n",
        _LIFE,
    ),
    Mutant(
        "L8",
        "a container starts before its device is found",
        "devices/life.py",
        "State.NOT_LOOKED_YET: Row(None, pre_start=Fault.FAILED_PRECONDITION, ",
        "State.NOT_LOOKED_YET: Row(None, ",
        _LIFE,
    ),
)
