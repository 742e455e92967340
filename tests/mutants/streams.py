"""ListAndWatch: whose stream is the kubelet's, what it shows, and when a list goes out."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "J1": "whoever else calls ListAndWatch, or ends, costs the kubelet's stream nothing, and shows nothing of the kubelet",
    "J2": "a kubelet that was told what is no longer true is told anew, once a second at most, and that is no cut",
}

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
        '        return _again(state, Report("warning", "called twice"), Cause.ERROR)\n',
        _EXPLORED,
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
)
