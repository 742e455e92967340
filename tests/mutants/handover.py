"""Handover between two gateways on one node."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "S9": "handover up to kubelet 1.36: the elder's streams end before the heir registers; from 1.37 on it registers first",
    "S10": "no stream ends while a Register is in flight for it, the partner's included (PluginDisconnected, 1.25-1.28.14)",
    "S11": "what is lent and not reported is asked back, silence is overruled, and what failed is tried ever more seldom",
    "S12": "a lease ends with its connection: of the dead one the other takes over, among the living age decides",
    "S13": "a host service is younger than any pod, whoever came first, and a pod takes over when it is gone",
    "S14": "what knows no device leaves all to the gateway that serves",
}

_SUCCESSION = "tests/unit/test_succession.py"
_HANDOVER = "tests/unit/test_handover.py"

MUTANTS = (
    Mutant(
        "S9",
        "1.36 registers first, too",
        "gateway/succession.py",
        "REGISTER_FIRST = 37",
        "REGISTER_FIRST = 36",
        f"{_SUCCESSION}::test_who_registers_before_the_old_streams_end",
    ),
    Mutant(
        "S9",
        "it is lent before the streams are over",
        "gateway/succession.py",
        "    return _to(state, Elder.ENDING, *((Say.WAIT,) if state.standing is Standing.BUSY else ()))",
        "    return _to(state, Elder.LENT, Say.YOURS)",
        f"{_SUCCESSION}::test_never_both",
    ),
    Mutant(
        "S9",
        "no wait after the elder's streams",
        "gateway/shell.py",
        "asyncio.sleep(HANDED_OVER_WAIT if asked else 0)",
        "asyncio.sleep(0)",
        "tests/unit/test_serve.py::test_what_was_handed_over_is_registered_a_moment_later",
    ),
    Mutant(
        "S10",
        "an elder yields with its Register in flight",
        "gateway/handover.py",
        "        if self._standing(resource) is Standing.BUSY:\n            return None",
        "        if False:\n            return None",
        f"{_HANDOVER}::test_the_elders_register_is_waited_for",
    ),
    Mutant(
        "S10",
        "a late ask ends streams",
        "gateway/succession.py",
        "    return late or (level",
        "    return (level",
        f"{_HANDOVER}::test_a_late_ask_ends_no_stream",
    ),
    Mutant(
        "S11",
        "a silent heir keeps it",
        "gateway/succession.py",
        "        case Elder.REVOKING | Elder.CHECKING:\n            return _to(state, Elder.TAKEN, Say.MINE, note=Outcome.BACK)",
        "        case Elder.REVOKING | Elder.CHECKING:\n            return state, ()",
        f"{_SUCCESSION}::test_one_that_stays_stopped_is_replaced",
    ),
    Mutant(
        "S11",
        "an heir that failed never asks again",
        "gateway/succession.py",
        "            return _to(state, Heir.ASKING, Say.ASK) if could_serve else (state, (Wait(_patience(state)),))",
        "            return state, ()",
        f"{_SUCCESSION}::test_in_the_end_one_serves",
    ),
    Mutant(
        "S12",
        "a lost connection frees nobody",
        "gateway/handover.py",
        "            del self._partners[partner.age.token]",
        "            pass",
        f"{_HANDOVER}::test_an_heir_that_dies",
    ),
    Mutant(
        "S12",
        "a broken connection between the living starts a fight",
        "gateway/handover.py",
        '        self._remember(self._first_seen, partner.age, float("-inf"))\n',
        "",
        f"{_HANDOVER}::test_a_broken_connection_while_the_heir_stands_by_gives_it_its_turn",
    ),
    Mutant(
        "S13",
        "a host service is as old as it is",
        "gateway/instance.py",
        "    rank = HOST_SERVICE_NS if host_service else 0",
        "    rank = 0",
        "tests/unit/test_instance.py::test_a_host_service_is_younger_than_a_pod_that_came_after_it",
    ),
    Mutant(
        "S13",
        "the daemon keeps it to itself",
        "gateway/shell.py",
        "instance.begin(host_service=settings.host_service)",
        "instance.begin()",
        "tests/unit/test_probes.py::test_a_pod_beside_the_host_service",
    ),
    Mutant(
        "S13",
        "a service's rank is lost on its way to a pod",
        "gateway/handover.py",
        '"from": {"born_ns": self._age.born_ns, "token"',
        '"from": {"born_ns": self._age.born_ns % (1 << 62), "token"',
        f"{_HANDOVER}::test_pods_roll_beside_a_host_service",
    ),
    Mutant(
        "S12",
        "what another gateway served is served by nobody where the lists can't be brought up to date",
        "gateway/shell.py",
        "            self._update_again([time.monotonic() + SOURCE_RETRY])\n",
        "            return\n",
        "tests/unit/test_serve.py::test_what_another_gateway_served_is_served_whatever_fails",
    ),
    Mutant(
        "S14",
        "what only the ledger knows is taken from a gateway for other devices",
        "gateway/shell.py",
        "            if self._only_remembered() and self._peers():\n",
        "            if False:\n",
        "tests/unit/test_serve.py::test_a_gateway_for_other_devices_is_left_alone_while_it_lives",
    ),
    Mutant(
        "S14",
        "what only others served is not taken up when nobody is left to",
        "gateway/shell.py",
        "                self._refresh()\n\n    def _hold_lease",
        "                pass\n\n    def _hold_lease",
        "tests/unit/test_serve.py::test_a_gateway_for_other_devices_is_left_alone_while_it_lives",
    ),
    Mutant(
        "S14",
        "memory alone takes over",
        "gateway/shell.py",
        "        await self._unless_ended(self._know_devices(first))\n",
        "",
        "tests/unit/test_serve.py::test_what_knows_no_device_takes_nothing_over",
    ),
    Mutant(
        "S14",
        "without another gateway the devices are waited for",
        "gateway/shell.py",
        "        while self._inventory is None and self._peers():\n",
        "        while self._inventory is None:\n",
        "tests/unit/test_serve.py::test_what_knows_no_device_serves_by_its_memory_when_the_other_is_gone",
    ),
)
