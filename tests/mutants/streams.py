"""ListAndWatch: whose stream is the kubelet's, what it shows, and when a list goes out."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "J1": "whoever else calls ListAndWatch, or ends, costs the kubelet's stream nothing, and shows nothing of the kubelet",
    "J2": "a kubelet that was told what is no longer true is told anew, once a second at most, and that is no cut",
    "J5": "records that lack a resource later begin the looks again, and those never follow each other at once",
    "J6": "a list that changes while one is sent is sent, too, and a long one keeps no call waiting",
}

_REGISTRATION = "tests/unit/test_registration.py"
_EXPLORED = "tests/unit/test_explored.py::test_every_promise_holds_in_every_state"

MUTANTS = (
    Mutant(
        "J1",
        "who names another program first is taken for a kubelet",
        "adapters/levels.py",
        "_USER_AGENT.match(user_agent",
        "_USER_AGENT.search(user_agent",
        "tests/unit/test_adapters_levels.py::test_who_may_be_a_kubelet",
    ),
    Mutant(
        "J1",
        "a second stream ends both",
        "gateway/registration/machine.py",
        "        return replace(state, others=state.others | {stream}), ()\n",
        '        return _again(state, Report("warning", "called twice"))\n',
        _EXPLORED,
    ),
    Mutant(
        "J1",
        "a stranger's call answers a Register that isn't sent",
        "gateway/registration/machine.py",
        "    if not likely and (early or state.stream is not None or state.phase in _UNASKED):\n",
        "    if not likely and state.stream is not None:\n",
        f"{_REGISTRATION}::test_rule",
    ),
    Mutant(
        "J1",
        "the kubelet doesn't take the place of a stranger",
        "gateway/registration/machine.py",
        "    if state.stream is not None and state.likely:\n",
        "    if state.stream is not None:\n",
        f"{_REGISTRATION}::test_rule",
    ),
    Mutant(
        "J2",
        "other options while a Register is in flight are forgotten",
        "gateway/registration/machine.py",
        "    if not state.stale:\n        return state, actions\n",
        "    if True:\n        return state, actions\n",
        _EXPLORED,
        says="what is no longer true",
    ),
    Mutant(
        "J2",
        "what the next Register says is said again",
        "gateway/registration/machine.py",
        'told=kubelet, stale="")',
        "told=kubelet)",
        f"{_REGISTRATION}::test_rule",
    ),
    Mutant(
        "J2",
        "each change of the options takes the devices away",
        "gateway/registration/machine.py",
        "    if state.renewed:\n        return state, ()\n",
        "",
        f"{_REGISTRATION}::test_rule",
    ),
    Mutant(
        "J2",
        "other options are a cut",
        "gateway/registration/machine.py",
        "    return replace(state, cuts=cuts), (*actions",
        "    return state, (*actions",
        f"{_REGISTRATION}::test_waiting",
    ),
    Mutant(
        "J5",
        "each look that lacks a resource begins another one",
        "gateway/registration/machine.py",
        " or state.verified < FIRST_LOOKS:",
        ":",
        f"{_REGISTRATION}::test_nothing_is_done",
    ),
    Mutant(
        "J5",
        "nobody looks when a stopped registration is deleted",
        "gateway/registration/machine.py",
        "VERIFY_AFTER = (0.1, 1.0, 330.0)",
        "VERIFY_AFTER = (0.1, 1.0)",
        f"{_REGISTRATION}::test_waiting",
    ),
    Mutant(
        "J6",
        "a call that is waited for no more is registered for, beside the gateway that serves",
        "gateway/registration/machine.py",
        "case Timer.CALL if state.phase is Phase.ACCEPTED:",
        "case Timer.CALL:",
        f"{_REGISTRATION}::test_a_timer_that_fires_while_another_gateway_serves_begins_nothing",
    ),
)
