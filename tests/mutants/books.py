"""The kubelet's books: what is read in them, and what is done where they say something else than we do."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "K1": "the kubelet's checkpoint is read in each of its formats, bounded, and with types checked",
    "K2": "List says who holds what; what only the checkpoint names may be held too, and is for those who must not err",
    "K3": "pod-resources v1 is asked first, v1alpha1 only where v1 isn't there",
    "K4": "a kubelet that is asked too often is asked again: it is no answer",
    "K5": "what a kubelet forgot at its start is noticed as soon as its own books show it, and not without them",
    "K6": "drift ends: held again, listed no more, an operator says so, or a day",
    "K7": "drifted and ill devices are given last, and no request fails of that",
    "K8": "only healthy devices are allocatable in pod-resources (1.23 and later, kubernetes #104123)",
}

_VIEW = "tests/unit/test_kubelet_view.py"
_DRIFT = "tests/unit/test_drift.py"
_CHECKPOINT = "tests/unit/test_checkpoint_reader.py"
_LOOK = "tests/unit/test_podresources.py"

MUTANTS = (
    Mutant(
        "K1",
        "the checksummed formats are not unwrapped",
        "adapters/checkpoint.py",
        "data = whole if whole.data is msgspec.UNSET else whole.data",
        "data = whole",
        _CHECKPOINT,
    ),
    Mutant(
        "K1",
        "any number of strings is decoded",
        "adapters/checkpoint.py",
        """ or content.count(b'"') > 2 * _MAX_STRINGS""",
        "",
        f"{_CHECKPOINT}::test_what_is_none",
    ),
    Mutant(
        "K2",
        "the checkpoint's word wins over List's",
        "gateway/kubelet_view.py",
        "return {**(self.remembered or {}).get(resource, {}), **(self.held or {}).get(resource, {})}",
        "return {**(self.held or {}).get(resource, {}), **(self.remembered or {}).get(resource, {})}",
        f"{_VIEW}::test_who_must_not_err_takes_both",
    ),
    Mutant(
        "K2",
        "what only the checkpoint names is dropped",
        "gateway/kubelet_view.py",
        'return View(listed, only_written, allocatable, "pod-resources")',
        'return View(listed, {}, allocatable, "pod-resources")',
        f"{_LOOK}::test_until_all_pods_are_known_none_has_ended",
    ),
    Mutant(
        "K3",
        "v1alpha1 is asked after any failure",
        "gateway/kubelet_view.py",
        "if error.code() is not grpc.StatusCode.UNIMPLEMENTED:",
        "if error.code() is grpc.StatusCode.OK:",
        f"{_VIEW}::test_a_look",
    ),
    Mutant(
        "K4",
        "a rate limit ends the look",
        "gateway/kubelet_view.py",
        '"rate limit" in (error.details() or "")',
        '"rate limit" in ""',
        _VIEW,
    ),
    Mutant(
        "K5",
        "the first look after a start settles it, whoever wrote the file",
        "gateway/drift.py",
        "before = {} if now - self._started >= REBOOKED_AFTER else before",
        "before = {}",
        f"{_DRIFT}::test_the_old_file_is_no_proof_of_memory",
    ),
    Mutant(
        "K5",
        "a List alone is believed after a start",
        "gateway/drift.py",
        "if view.held is not None and view.remembered is not None:",
        "if view.held is not None:",
        f"{_DRIFT}::test_what_a_kubelet_forgot",
    ),
    Mutant(
        "K5",
        "of several starts only the last counts",
        "gateway/drift.py",
        "_before={**self._before, **self._held}, _started=now",
        "_before={}, _started=now",
        f"{_DRIFT}::test_twenty_kubelets_in_a_row_are_compared_with_what_was_held_before_them",
    ),
    Mutant(
        "K6",
        "a device that is held again stays forgotten",
        "gateway/drift.py",
        "and device_id not in holders and now - known.since < DRIFT_FOR",
        "and now - known.since < DRIFT_FOR",
        f"{_DRIFT}::test_when_it_ends",
    ),
    Mutant(
        "K7",
        "what must be included is avoided",
        "gateway/drift.py",
        "kept = set(available.difference(avoid) | (available & must))",
        "kept = set(available.difference(avoid))",
        f"{_DRIFT}::test_steering",
    ),
    Mutant(
        "K7",
        "too few devices are left",
        "gateway/drift.py",
        "kept.update(others[: max(0, request.size - len(kept))])",
        "kept.update(())",
        f"{_DRIFT}::test_steering_never_makes_a_request_fail",
    ),
    Mutant(
        "K8",
        "an ill device is allocatable",
        "gateway/lab/books.py",
        "[device for name, device in self._devices[resource].items() if name in healthy]",
        "[device for name, device in self._devices[resource].items() if name in healthy or device]",
        f"{_LOOK}::test_a_look_at_each_kubelet",
    ),
)
