"""Orders: the control socket, and the commands over it."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "C1": "on the control socket only our own user and root are heard, by the kernel's word",
    "C2": "the control socket bounds lines, connections, pace, idle time and write time",
    "C3": "on the control socket an unknown field is ignored, an unknown op or version answered with an error",
    "C4": "a control socket is found only when it is ours alone and listens; a dead one is removed, a living one never",
    "C5": "a cordon is told to every living gateway, and where none lives to the ledger",
    "C10": "a control socket that can't be made at the start is made as soon as it can, unless it is closed before",
    "C9": "however many devices are told of, the event loop goes on meanwhile, one is told at a time, and orders go by what holds then",
    "C8": "a short name stands for one device or for none, and all are meant only where that is said",
}

_CONTROL = "tests/unit/test_control.py"
_CORDON = "tests/unit/test_cli_cordon.py"
_HANDLED = "tests/unit/test_cli_devices.py"

_TOLD = f"{_CONTROL}::test_many_devices_are_told_of_beside_the_loop_and_to_one_at_a_time"

_LATER = f"{_CONTROL}::test_a_control_socket_that_could_not_be_made_at_the_start"

MUTANTS = (
    Mutant(
        "C10",
        "a control socket that couldn't be made at the start is missing for ever",
        "gateway/telling/listeners.py",
        "            self._opening = self._tasks.start(_open_later(server))\n",
        "",
        _LATER,
    ),
    Mutant(
        "C10",
        "a control socket that was closed before it could be made is made after all",
        "gateway/telling/listeners.py",
        "            self._opening.cancel()",
        "            pass",
        _LATER,
    ),
    Mutant(
        "C9",
        "the status of many devices is put together on the loop",
        "gateway/telling/commands.py",
        "await asyncio.to_thread(make, taken) if many else",
        "await asyncio.to_thread(make, taken) if False else",
        _TOLD,
    ),
    Mutant(
        "C9",
        "the status of many devices is put together for all who ask at once",
        "gateway/telling/commands.py",
        "        async with self._turn:\n",
        "        if True:\n",
        _TOLD,
    ),
    Mutant(
        "C9",
        "a long answer is written at once",
        "gateway/wires/control.py",
        "line[start : start + PIECE]",
        "line[start:]",
        f"{_CONTROL}::test_a_long_message_is_written_a_piece_at_a_time",
    ),
    Mutant(
        "C9",
        "a scrape's counts are put together on the loop",
        "gateway/telling/metrics.py",
        "self._taken = self._document(self._device_ids), copy",
        "self._taken = (lambda it: lambda: it)(self._document(self._device_ids)()), copy",
        "tests/unit/test_metrics.py::test_of_many_scrapes_at_once_one_is_made_beside_the_event_loop",
    ),
    Mutant(
        "C9",
        "hardware is let go of by the lists of before",
        "gateway/telling/commands.py",
        "while ids and before != (before := [",
        "while ids and before is None and (before := [",
        f"{_CONTROL}::test_of_many_devices_those_are_let_go_of_that_are_there_when_it_is_carried_out",
    ),
    Mutant(
        "C9",
        "a list that threads read is changed",
        "gateway/registration/devicelist.py",
        "self.entries = {known: entry for known, entry in self.entries.items() if known != device_id}",
        "self.entries.pop(device_id, None)",
        f"{_CONTROL}::test_what_is_told_of_a_list_is_what_it_was_when_that_was_taken",
    ),
    Mutant(
        "C1",
        "everybody is heard",
        "gateway/wires/control.py",
        "if user in {0, os.geteuid()}:",
        "if user >= 0:",
        f"{_CONTROL}::test_who_is_heard",
    ),
    Mutant(
        "C2",
        "everybody together has no pace",
        "gateway/wires/control.py",
        "            await own.turn()\n            await self._pace.turn()\n",
        "            await own.turn()\n",
        f"{_CONTROL}::test_each_message_takes_its_turn",
    ),
    Mutant(
        "C2",
        "any number of connections is served",
        "gateway/wires/control.py",
        "len(self._open) >= MAX_CONNECTIONS",
        "len(self._open) >= 10**6",
        f"{_CONTROL}::test_of_a_hundred_connections_sixteen_are_served",
    ),
    Mutant(
        "C2",
        "a line may be of any length",
        "gateway/wires/control.py",
        "sock=listener, limit=REQUEST_LIMIT)",
        "sock=listener, limit=2**30)",
        f"{_CONTROL}::test_request",
    ),
    Mutant(
        "C3",
        "an unknown op closes the connection",
        "gateway/wires/control.py",
        '            except ControlError as error:\n                await connection.send({"error": str(error)})\n',
        '            except ControlError as error:\n                await connection.send({"error": str(error)})\n'
        "                return\n",
        f"{_CONTROL}::test_request",
    ),
    Mutant(
        "C3",
        "nesting without end is a defect",
        "gateway/wires/control.py",
        "except (ValueError, RecursionError):",
        "except ValueError:",
        f"{_CONTROL}::test_request",
    ),
    Mutant(
        "C4",
        "the umask decides who may connect",
        "gateway/wires/control.py",
        "                hidden.chmod(0o600)\n",
        "",
        f"{_CONTROL}::test_it_is_ours_alone_before_it_can_be_found",
    ),
    Mutant(
        "C4",
        "a living gateway's socket is removed",
        "gateway/wires/control.py",
        "and not making and not listens(path)",
        "and not making",
        f"{_CONTROL}::test_what_dead_gateways_left_is_removed",
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
