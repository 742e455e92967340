"""The fakes that backends are tested on: they must be what they stand for."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "N1": "the fake NVML answers as NVML's reference has it: lost GPUs, ended handles, events, errors of its own choice",
    "N2": "a kubelet out of a checkout is built of that checkout and its staging modules, of whatever it holds at that moment",
}

_FAKE = "tests/fakes/nvml.c"
_FAKE_TEST = "tests/lab/test_fake_nvml.py"
_SOURCE_TEST = "tests/lab/test_source.py"

MUTANTS = (
    Mutant(
        "N1",
        "a lost GPU is well again without an initialisation",
        _FAKE,
        "if (gpu == NULL || gpu->lost) boards[i].lost = 1;",
        "boards[i].lost = gpu == NULL || gpu->lost;",
        f"{_FAKE_TEST}::test_a_gpu_that_returns_is_there_after_an_initialisation",
    ),
    Mutant(
        "N1",
        "a GPU that is gone doesn't end a wait",
        _FAKE,
        "if ((*set)->types[i] && boards[i].lost) return GPU_IS_LOST;",
        "if ((*set)->types[i] && boards[i].lost) return TIMEOUT;",
        f"{_FAKE_TEST}::test_the_last_event_of_a_lost_gpu_is_still_told",
    ),
    Mutant(
        "N1",
        "a set is told what happened before a GPU was registered",
        _FAKE,
        "(*set)->since[at.board] = end;",
        "(*set)->since[at.board] = end - end;",
        f"{_FAKE_TEST}::test_events_from_before_the_registration_are_not_told",
    ),
    Mutant(
        "N1",
        "the handle of a destroyed MIG device lives on",
        _FAKE,
        "if (result != SUCCESS) result = INVALID_ARGUMENT;",
        "result = SUCCESS;",
        f"{_FAKE_TEST}::test_a_mig_device_that_was_destroyed_has_no_handle",
    ),
    Mutant(
        "N1",
        "a handle lives on after a shutdown",
        _FAKE,
        "int known = number >> 32 == initialisation && board < board_count",
        "int known = board < board_count",
        f"{_FAKE_TEST}::test_handles_end_with_a_shutdown",
    ),
    Mutant(
        "N1",
        "a failure for one GPU hits all",
        _FAKE,
        "(world.rule[i].gpu < 0 || world.rule[i].gpu == board)",
        "(world.rule[i].gpu < 0 || board >= 0)",
        f"{_FAKE_TEST}::test_a_function_fails_for_one_gpu_or_for_all",
    ),
    Mutant(
        "N1",
        "a type that isn't supported is registered in silence",
        _FAKE,
        "if (types & ~at.gpu.events) return NOT_SUPPORTED;",
        "",
        f"{_FAKE_TEST}::test_a_type_that_is_not_supported_registers_none",
    ),
    Mutant(
        "N1",
        "an unfreed set isn't counted",
        _FAKE,
        "to->event_sets += sets[i] != NULL;",
        "to->event_sets += 0;",
        f"{_FAKE_TEST}::test_a_set_that_is_not_freed_is_counted",
    ),
    Mutant(
        "N2",
        "a checkout rests on the staging modules of a release",
        "gateway/lab/kubelets/source.py",
        "for name in staged}}\n",
        "for name in ()}}\n",
        f"{_SOURCE_TEST}::test_a_checkout_takes_the_place_of_a_release",
    ),
    Mutant(
        "N2",
        "the release stays beside the checkout",
        "gateway/lab/kubelets/source.py",
        "        modules.write_text(module_file(",
        "        modules.write_text(base.read_text() or module_file(",
        f"{_SOURCE_TEST}::test_a_checkout_is_built_with_the_driver_of_its_minor",
    ),
    Mutant(
        "N2",
        "what is no checkout is built all the same",
        "gateway/lab/kubelets/source.py",
        "    if not _MODULE.search(own):",
        "    if False:",
        f"{_SOURCE_TEST}::test_what_is_no_checkout_is_refused",
    ),
)
