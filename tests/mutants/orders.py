"""Orders: the control socket, and the commands over it."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "C1": "on the control socket only our own user and root are heard, by the kernel's word",
    "C8": "a short name stands for one device or for none, and all are meant only where that is said",
}

_CONTROL = "tests/unit/test_control.py"
_HANDLED = "tests/unit/test_cli_devices.py"


MUTANTS = (
    Mutant(
        "C1",
        "everybody is heard",
        "gateway/wires/control.py",
        "if user in {0, os.geteuid()}:",
        "if user >= 0:",
        f"{_CONTROL}::test_who_is_heard",
    ),
    Mutant(
        "C8",
        "an index may be the beginning of an ID",
        "gateway/cli/named.py",
        "found = by_index or [",
        "found = by_index + [",
        f"{_HANDLED}::test_an_index_is_no_beginning_of_an_id",
    ),
)
