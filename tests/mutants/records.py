"""The kubelet's records: what is read in them, and what is done where they say something else than we do."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "K1": "the kubelet's checkpoint is read in each of its formats, bounded, and with types checked",
    "K2": "List says who holds what; what only the checkpoint names may be held too, and is for those who must not err",
    "K3": "pod-resources v1 is asked first, v1alpha1 only where v1 isn't there",
    "K4": "a kubelet that is asked too often is asked again: it is no answer",
    "K5": "what a kubelet forgot at its start is noticed as soon as its own records show it, and not without them",
    "K8": "only healthy devices are allocatable in pod-resources (1.23 and later, kubernetes #104123)",
    "K10": "a checkpoint that names pods which ended is written anew, so that no GPU waits for them for ever",
}

_VIEW = "tests/unit/test_kubelet_records.py"
_EARLIER = "tests/unit/test_earlier.py"
_CHECKPOINT = "tests/unit/test_checkpoint_reader.py"
_OUTDATED = "tests/unit/test_outdated.py"
_EDITED = "tests/contract/test_records.py"

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
        "what only the checkpoint names is dropped",
        "gateway/kubelet/records.py",
        'return Records(listed.held, found.written, allocatable, "pod-resources", listed.pods, *record)',
        'return Records(listed.held, {}, allocatable, "pod-resources", listed.pods, *record)',
        "tests/contract/test_records.py::test_an_older_checkpoint_that_is_put_back_shows_no_pod_s_end",
    ),
    Mutant(
        "K3",
        "v1alpha1 is asked after any failure",
        "gateway/kubelet/records.py",
        "if error.code is not rpc.Code.UNIMPLEMENTED:",
        "if error.code is rpc.Code.OK:",
        f"{_VIEW}::test_a_look",
    ),
    Mutant(
        "K4",
        "a rate limit ends the look",
        "gateway/kubelet/records.py",
        '"rate limit" in error.details',
        '"rate limit" in ""',
        _VIEW,
    ),
    Mutant(
        "K5",
        "records that can't be read for a moment take all that was seen with them",
        "gateway/kubelet/earlier.py",
        "    known = records.held is not None and records.written is not None",
        "    known = True",
        f"{_EARLIER}::test_what_happens_right_after_a_start",
    ),
    Mutant(
        "K5",
        "of several starts only the last counts",
        "gateway/kubelet/earlier.py",
        "            asked[device_id] = Earlier(row.names, row.at)\n    return _with(forgotten(rows), asked)",
        "            asked[device_id] = Earlier(row.names, row.at)\n    return _with({}, asked)",
        f"{_EARLIER}::test_a_pod_is_gone_when_list_shows_it",
    ),
    Mutant(
        "K8",
        "an ill device is allocatable",
        "gateway_lab/kubelets/records.py",
        "[device for name, device in self._devices[resource].items() if name in healthy]",
        "[device for name, device in self._devices[resource].items() if name in healthy or device]",
        "tests/contract/test_telling.py::test_held_unhealthy_and_cordoned_devices_count_where_they_are",
    ),
    Mutant(
        "K10",
        "a list is sent again with each look",
        "gateway/kubelet/records.py",
        "if seen == self._seen and now < self._at + SEND_AGAIN_S:",
        "if False:",
        _OUTDATED,
    ),
    Mutant(
        "K10",
        "a list is sent again once",
        "gateway/kubelet/records.py",
        "if seen == self._seen and now < self._at + SEND_AGAIN_S:",
        "if seen == self._seen:",
        _OUTDATED,
    ),
    Mutant(
        "K10",
        "a pod that went isn't noticed",
        "gateway/kubelet/records.py",
        "seen = only_written, records.pods",
        "seen = only_written",
        _OUTDATED,
    ),
    Mutant(
        "K10",
        "no list is sent again",
        "gateway/lists.py",
        "                    plugin.send_again()",
        "                    pass",
        f"{_EDITED}::test_a_gpu_under_a_new_name_stays_with_its_pod_of_the_old_one",
    ),
)
