"""NVIDIA: what its errors mean, what ends them, and how NVML is watched."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "X1": "an Xid means what NVIDIA's catalogue says, and what its plugin ignores is ignored; the operator's word wins",
    "X2": "an Xid with an instance marks that partition, one without marks the GPU and everything on it",
    "X3": "what takes a reset ends by evidence of one that is newer than the trouble, by an operator's word, and by nothing else",
    "X4": "what only wants its application restarted ends by quiet; where recovery is off, nothing ends by itself",
    "X7": "NVML never blocks the loop, another GPU's errors, or the end; and nothing of it is left",
}

_HEALTH = "tests/unit/test_gpu_health.py"
_NVIDIA = "tests/unit/test_gpu_nvidia.py"

MUTANTS = (
    Mutant(
        "X7",
        "as many GPUs are looked for as the library says",
        "devices/gpu/nvidia/nvml.py",
        'min(int(_ask("nvmlDeviceGetCount")), _MOST_GPUS)',
        'int(_ask("nvmlDeviceGetCount"))',
        f"{_NVIDIA}::test_it_counts_no_more_gpus_than_a_node_can_have",
    ),
    Mutant(
        "X3",
        "an operator's word ends what is on the GPU's partitions no more",
        "devices/gpu/nvidia/health.py",
        "for one in (uuid, *health.looks[uuid].partitions.values())}\n    ills",
        "for one in (uuid,)}\n    ills",
        f"{_HEALTH}::test_an_operators_word_ends_what_is_known",
    ),
    Mutant(
        "X1",
        "without health checks a GPU that can't be looked at has recovered",
        "devices/gpu/nvidia/health.py",
        'if cause == "unreachable" or (counts and not checks.none):',
        "if counts and not checks.none:",
        f"{_HEALTH}::test_one_that_can_not_be_looked_at_stays_so_where_nothing_is_checked",
    ),
    Mutant(
        "X1",
        "other settings leave what was judged by those before",
        "devices/gpu/nvidia/health.py",
        "trouble = ill.trouble if ill.xid is None else judged(ill.xid, checks)",
        "trouble = ill.trouble",
        f"{_HEALTH}::test_what_counts_no_longer_has_recovered",
    ),
    Mutant(
        "X1",
        "only what the operator disables is ignored",
        "devices/gpu/nvidia/health.py",
        "dict.fromkeys(off | IGNORED, True)",
        "dict.fromkeys(off, True)",
        f"{_HEALTH}::test_what_is_checked",
    ),
    Mutant(
        "X1",
        "what is disabled wins over what is enabled",
        "devices/gpu/nvidia/health.py",
        "marks = dict.fromkeys(off | IGNORED, True) | dict.fromkeys(on, False)",
        "marks = dict.fromkeys(on, False) | dict.fromkeys(off | IGNORED, True)",
        f"{_HEALTH}::test_what_is_checked",
    ),
    Mutant(
        "X1",
        "what the catalogue doesn't cure is an application's",
        "devices/gpu/nvidia/health.py",
        "kind = _KINDS.get(action, TroubleKind.UNKNOWN)",
        "kind = _KINDS.get(action, TroubleKind.APPLICATION)",
        f"{_HEALTH}::test_what_an_xid_takes",
    ),
    Mutant(
        "X2",
        "an Xid of an instance marks the whole GPU",
        "devices/gpu/nvidia/health.py",
        "if instance == happened.gpu_instance and happened.compute_instance in {None, compute}",
        "if False",
        f"{_HEALTH}::test_whom_an_error_marks",
    ),
    Mutant(
        "X3",
        "any look that goes well is evidence",
        "devices/gpu/nvidia/health.py",
        "    return (\n        before.lost\n",
        "    return (\n        True\n",
        f"{_HEALTH}::test_what_a_reset_ends",
    ),
    Mutant(
        "X3",
        "a reset ends what came after it",
        "devices/gpu/nvidia/health.py",
        "if ill.at > until}",
        "if False}",
        f"{_HEALTH}::test_what_a_reset_ends",
    ),
    Mutant(
        "X3",
        "a driver that doesn't say any more has reset the GPU",
        "devices/gpu/nvidia/health.py",
        "wanted in _AFTER_RESET and look.action == 0)",
        "wanted in _AFTER_RESET and not look.action)",
        f"{_HEALTH}::test_what_a_reset_ends",
    ),
    Mutant(
        "X3",
        "a GPU that fell ill again counts as recovered",
        "devices/gpu/nvidia/health.py",
        "return replace(health, ills=ills, recovered=health.recovered - on_it)",
        "return replace(health, ills=ills)",
        f"{_HEALTH}::test_what_a_reset_ends",
    ),
    Mutant(
        "X4",
        "time ends every error",
        "devices/gpu/nvidia/health.py",
        "return ill.xid is not None and ill.trouble.kind is TroubleKind.RESTART_APP",
        "return ill.xid is not None",
        f"{_HEALTH}::test_restart_app_ends_by_quiet_and_nothing_else_does",
    ),
    Mutant(
        "X4",
        "a reset counts although recovery is off",
        "devices/gpu/nvidia/health.py",
        "if reset and recovery is Recovery.SAFE:",
        "if reset:",
        f"{_HEALTH}::test_nothing_recovers_by_itself_where_that_is_off",
    ),
)
