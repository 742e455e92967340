"""Orders: the control socket, and the commands over it."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "C1": "on the control socket only our own user and root are heard, by the kernel's word",
    "C5": "a cordon is told to every living gateway, and where none lives to the ledger",
    "C8": "a short name stands for one device or for none, and all are meant only where that is said",
}

_CONTROL = "tests/unit/test_control.py"
_CORDON = "tests/unit/test_cli_cordon.py"
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
        "C5",
        "only one gateway is told",
        "gateway/cli/cordon.py",
        "asyncio.run(_tell(order, paths))\n        if not answers",
        "asyncio.run(_tell(order, paths[:1]))\n        if not answers",
        f"{_CORDON}::test_every_living_gateway_is_told",
    ),
    Mutant(
        "C5",
        "an index is taken for an ID where no gateway runs",
        "gateway/cli/cordon.py",
        "if order.device_id.isdecimal() and",
        "if False and",
        f"{_CORDON}::test_short_names_without_a_gateway",
    ),
    Mutant(
        "C5",
        "a cordon isn't saved where no gateway runs",
        "gateway/cli/cordon.py",
        "            ledger.save(ledger.snapshot())\n",
        "            ledger.snapshot()\n",
        f"{_CORDON}::test_the_ledger_is_told",
    ),
    Mutant(
        "C8",
        "the first of several is taken",
        "gateway/cli/named.py",
        "    if len(found) > 1:",
        "    if False:",
        f"{_CORDON}::test_a_name_that_is_short_for_several_does_nothing",
    ),
    Mutant(
        "C8",
        "an index may be the beginning of an ID",
        "gateway/cli/named.py",
        "found = by_index or [",
        "found = by_index + [",
        f"{_HANDLED}::test_an_index_is_no_beginning_of_an_id",
    ),
    Mutant(
        "C8",
        "no name means all",
        "gateway/cli/devices.py",
        "    if bool(names) is every:",
        "    if names and every:",
        f"{_HANDLED}::test_handled",
    ),
    Mutant(
        "C8",
        "of two orders the first counts",
        "gateway/cli/devices.py",
        "    if release and acquire:",
        "    if False:",
        f"{_HANDLED}::test_handled",
    ),
    Mutant(
        "C8",
        "an empty name is a name",
        "gateway/cli/devices.py",
        "    if not all(names):",
        "    if False:",
        f"{_HANDLED}::test_handled",
    ),
)
