"""Dynamic resource allocation: how claims are spelled, named, prepared and published."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "DR1": "a claim's answer is spelled as the kubelet's own types do, refused or not, with nothing left out",
    "DR2": "what can't be said to a kubelet is refused, not left out",
    "DR3": "what a peer can make us hold is bounded",
}

_SPELLED = "tests/unit/test_dra_adapters.py"
_PLUGIN = "adapters/dra/plugin.py"

MUTANTS = (
    Mutant(
        "DR1",
        "an answer without devices is left out",
        _PLUGIN,
        """            one.SetInParent()
            if isinstance(answer, Refused):""",
        """            if not answer:
                del message.claims[uid]
                continue
            if isinstance(answer, Refused):""",
        f"{_SPELLED}::test_a_prepare_answer",
    ),
    Mutant(
        "DR1",
        "a refusal is left out",
        _PLUGIN,
        "one.error = answer.reason",
        "one.error = ''",
        f"{_SPELLED}::test_a_prepare_answer",
    ),
    Mutant(
        "DR1",
        "health and illness are swapped",
        "adapters/dra/health.py",
        "{True: pb.HEALTHY, False: pb.UNHEALTHY,",
        "{False: pb.HEALTHY, True: pb.UNHEALTHY,",
        f"{_SPELLED}::test_health",
    ),
    Mutant(
        "DR1",
        "the reason of a refused registration is lost",
        "adapters/dra/registration.py",
        'message.error or "it gave no reason"',
        '"it gave no reason"',
        f"{_SPELLED}::test_what_became_of_a_registration",
    ),
    Mutant(
        "DR2",
        "v1beta1 drops a share in silence",
        _PLUGIN,
        "            if not self.says_share:",
        "            if False:",
        f"{_SPELLED}::test_a_share_is_said_by_v1_alone",
    ),
    Mutant(
        "DR3",
        "any number of claims is taken",
        _PLUGIN,
        "if len(message.claims) > MAX_CLAIMS:",
        "if False:",
        f"{_SPELLED}::test_requests_are_bounded",
    ),
    Mutant(
        "DR3",
        "a request of any size is taken",
        "adapters/dra/spelling.py",
        "if len(data) > MAX_BYTES:",
        "if False:",
        f"{_SPELLED}::test_requests_are_bounded",
    ),
)
