"""Whose each GPU is where both APIs are served: the table of owners."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "OWN1": "a GPU belongs to one API at a time, and is given by the other to nobody",
    "OWN2": "it crosses when nobody has it, and not while that isn't known",
    "OWN3": "every crossing can end, and a claim of before gets what nobody holds",
}

_TABLE = "gateway/sides/table.py"
_RULES = "tests/unit/test_sides.py"
_MOVES = f"{_RULES}::test_a_board_moves_on_when_nobody_has_it"

MUTANTS = (
    Mutant(
        "OWN1",
        "what is prepared for a claim is the plugin's again",
        _TABLE,
        "    if not claimed or side in _OF_DRA:",
        "    if True:",
        f"{_RULES}::test_no_gpu_is_given_twice_and_every_crossing_can_end",
    ),
    Mutant(
        "OWN1",
        "the plugin gives what comes back",
        _TABLE,
        "    if side is Side.PLUGIN:\n        return None",
        "    if side in {Side.PLUGIN, Side.TO_PLUGIN}:\n        return None",
        f"{_RULES}::test_one_api_at_most_gives_a_board_away",
    ),
    Mutant(
        "OWN1",
        "DRA offers before the list says that it is elsewhere",
        _TABLE,
        "if shown is not State.ELSEWHERE or side",
        "if side",
        f"{_RULES}::test_no_gpu_is_given_twice_and_every_crossing_can_end",
    ),
    Mutant(
        "OWN1",
        "DRA offers what nobody looked for",
        _TABLE,
        ' or pod != "":\n        return Offered.NOT',
        " or pod:\n        return Offered.NOT",
        f"{_RULES}::test_one_api_at_most_gives_a_board_away",
    ),
    Mutant(
        "OWN1",
        "the plugin gives to pods what the kubelet's checkpoint names, though it is DRA's",
        "devices/life/states.py",
        """    State.ELSEWHERE: Consequence(
        Health.UNHEALTHY,
        Fault.FAILED_PRECONDITION,
""",
        """    State.ELSEWHERE: Consequence(
        Health.UNHEALTHY,
        Fault.FAILED_PRECONDITION,
        held=True,
""",
        "tests/unit/test_life.py",
    ),
    Mutant("OWN2", "a pod is overlooked", _TABLE, 'case Side.TO_DRA if seen.pod == "":', "case Side.TO_DRA:", _MOVES),
    Mutant(
        "OWN2",
        "nobody knows, so nobody has it",
        _TABLE,
        'case Side.TO_DRA if seen.pod == "":',
        "case Side.TO_DRA if not seen.pod:",
        _MOVES,
    ),
    Mutant(
        "OWN2",
        "a prepared claim is overlooked",
        _TABLE,
        'case Side.TO_PLUGIN if not seen.claim and seen.allocated == "":',
        'case Side.TO_PLUGIN if seen.allocated == "":',
        _MOVES,
    ),
    Mutant(
        "OWN2",
        "an allocated claim is overlooked",
        _TABLE,
        'case Side.TO_PLUGIN if not seen.claim and seen.allocated == "":',
        "case Side.TO_PLUGIN if not seen.claim:",
        _MOVES,
    ),
    Mutant(
        "OWN2",
        "what a pod holds is called back",
        _TABLE,
        'if side is Side.PLUGIN and seen.pod == ""',
        "if side is Side.PLUGIN",
        f"{_RULES}::test_a_late_claim_calls_back_what_nobody_holds",
    ),
    Mutant(
        "OWN3",
        "what comes back isn't prepared for a claim of before",
        _TABLE,
        "if shown is not State.ELSEWHERE or side not in _OF_DRA or",
        "if shown is not State.ELSEWHERE or side is not Side.DRA or",
        f"{_RULES}::test_one_api_at_most_gives_a_board_away",
    ),
    Mutant(
        "OWN3",
        "a late claim waits for ever",
        _TABLE,
        "return Side.RECLAIMED if side",
        "return side if side",
        f"{_RULES}::test_no_gpu_is_given_twice_and_every_crossing_can_end",
    ),
    Mutant(
        "OWN3",
        "what is called back and held stays away",
        _TABLE,
        "            return Side.PLUGIN\n        case Side.TO_PLUGIN if",
        "            return side\n        case Side.TO_PLUGIN if",
        _MOVES,
    ),
)
