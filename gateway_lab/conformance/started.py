"""Why a device plugin can't be examined: it never became one, or has no devices here. That breaks no rule, and is told apart from it."""

from __future__ import annotations

import errno
import platform
import re
import shutil
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

import msgspec

Kind: TypeAlias = Literal["not executable", "another architecture", "other arguments", "ended by itself", "no devices"]

CANNOT_EXECUTE: Final = 126
"""The exit status of a shell, and of ``gateway_lab.inplace``, for what is there and can't be executed."""
_MACHINES: Final = {
    3: "i386",
    8: "mips",
    20: "ppc",
    21: "ppc64",
    22: "s390x",
    40: "arm",
    62: "x86_64",
    183: "aarch64",
    243: "riscv64",
    258: "loongarch64",
}
"""``e_machine`` of an ELF file, as linux/elf-em.h numbers it; the names are those of ``uname -m``."""
_ARGUMENTS: Final = re.compile(
    r"^usage\b"
    r"|flag provided but not defined"
    r"|(unknown|unrecognized|unexpected|invalid) (shorthand )?(flag|option|argument|command)"
    r"|(flag|option|argument|parameter|variable)s?\b.*\b(required|missing|must be|not set|not provided|no value)"
    r"|\b(required|missing|specify|needs|expected)\b.*\b(flag|option|argument|parameter|environment variable)",
    re.IGNORECASE | re.MULTILINE,
)
"""What programs say that lack an argument, a flag or a variable: Go's flag, cobra and pflag, argparse, click, clap."""


class Unexamined(msgspec.Struct, frozen=True):
    """A plugin that can't be examined."""

    kind: Kind
    why: str
    """What was seen, and what to do."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}"


def not_started(program: str, error: OSError) -> Unexamined:
    """Say why a program could not be executed, by its first bytes."""
    path = Path(shutil.which(program) or program)
    try:
        with path.open("rb") as file:
            head = file.read(256)
    except OSError:
        head = b""
    if (built_for := machine(head)) and error.errno == errno.ENOEXEC and built_for != platform.machine():
        why = f"{path.name} is built for {built_for}, and this machine is {platform.machine()}: build it for this one"
        return Unexamined("another architecture", why)
    if head.startswith(b"#!") and error.errno == errno.ENOENT:
        return Unexamined(
            "not executable", f"{path.name} wants {head[2:].splitlines()[0].decode(errors='replace').strip()!r}"
        )
    if error.errno == errno.ENOEXEC:
        return Unexamined("not executable", f"{path.name} is no program for this machine: {error.strerror}")
    return Unexamined("not executable", f"{path.name}: {error.strerror}")


def machine(head: bytes) -> str:
    """Tell by the first bytes of a file which machine it is built for; '' where it is no ELF file."""
    if not head.startswith(b"\x7fELF") or len(head) < 20:
        return ""
    number = int.from_bytes(head[18:20], "big" if head[5] == 2 else "little")
    return _MACHINES.get(number, f"ELF machine {number}")


def ended(status: int, log: str) -> Unexamined:
    """Say why a plugin ended by itself before it registered: pure.

    Args:
        status: its exit status; negative for a signal, as Python has it.
        log: the end of what it said.
    """
    if status == CANNOT_EXECUTE:
        kind, _, why = log.strip().rpartition("\n")[2].partition(": ")
        for known in get_args(Kind):
            if kind == known:
                return Unexamined(known, why)
    how = f"it was ended by {_signal(-status)}" if status < 0 else f"it ended by itself with status {status}"
    said = (
        f"; it last said: {log.strip().rpartition(chr(10))[2]}; its log ends:\n{log}"
        if log.strip()
        else ", and said nothing"
    )
    if status >= 0 and _ARGUMENTS.search(log):
        return Unexamined("other arguments", f"{how}, and asks for other arguments, flags or variables{said}")
    return Unexamined("ended by itself", f"{how} before it registered{said}")


def without_devices(names: Collection[str]) -> Unexamined:
    """Say that all that a plugin lists is empty."""
    return Unexamined(
        "no devices",
        f"it registered {', '.join(sorted(names))} and listed no device: give it one, or what it takes for one",
    )


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
