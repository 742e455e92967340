"""AMD's GPUs: what sysfs and the metrics exporter say, and what they don't."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "V5": "no file of sysfs leads out of it, blocks or is too big",
    "V8": "only the exporter's word 'unhealthy' counts, for five minutes when it is away",
}

_TEST = "tests/unit/test_gpu_amd.py"
_SYSFS = "devices/gpu/amd/sysfs.py"
_EXPORTER = "devices/gpu/amd/exporter.py"

MUTANTS = (
    Mutant(
        "V5",
        "folders have no end",
        _SYSFS,
        "itertools.islice(fit, ENTRIES)",
        "itertools.islice(fit, None)",
        f"{_TEST}::test_more_entries_than_any_node_has_are_not_read",
    ),
    Mutant(
        "V8",
        "an unknown health is none",
        _EXPORTER,
        '.lower() == b"unhealthy"',
        '.lower() != b"healthy"',
        f"{_TEST}::test_an_answer_of_the_exporter_is_read",
    ),
)
