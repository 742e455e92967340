"""One GPU, one pod: hardware that is held under an ID of before an edit is given to nobody under another."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "H1": "an ID that is offered no longer and is held claims its hardware, whatever the name of what else is offered there",
    "H3": "replicas of one GPU are shared by those who hold them, and by nobody more than are offered",
    "H6": "what is needed to judge outlives the process, and what only another gateway serves counts",
    "H7": "two pods on one GPU are seen by the lab, under whichever IDs",
    "H10": "whom the kubelet forgot claims hardware as a holder does, until an operator says otherwise under any of its names",
    "H12": "a cordon is the hardware's: another name or number of devices lifts none",
    "H9": "of two that offer a GPU under different names one leaves it to the other, whoever's ledger knows of it",
}

_BOARDS = "tests/unit/test_boards.py"

MUTANTS = (
    Mutant(
        "H12",
        "what is cordoned and offered no longer can't be uncordoned",
        "gateway/cli/cordon.py",
        '        if order.op == "uncordon":  # It',
        "        if False:  # It",
        "tests/unit/test_cli_cordon.py::test_what_is_cordoned_is_uncordoned_by_its_id_whatever_is_offered_now",
    ),
    Mutant(
        "H9",
        "what a pod holds is free where the same hardware was given out",
        "devices/boards.py",
        "        if not claim.offer or not any(",
        "        if not any(",
        f"{_BOARDS}::test_what_a_pod_holds_is_claimed_whatever_is_given_out_beside_it",
    ),
    Mutant(
        "H1",
        "GPUs that can't be named yet count as withdrawn",
        "devices/gpu/source.py",
        "if sight is None or self._inventory is None:",
        "if sight is None:",
        "tests/unit/test_gpu_source.py::test_a_node_that_can_not_be_named_says_so_until_it_can",
    ),
    Mutant(
        "H1",
        "GPUs of a complete backend that can't be named yet are lost",
        "devices/gpu/source.py",
        "self._sight.resources and self._inventory is not None:",
        "self._sight.resources:",
        "tests/unit/test_gpu_source.py::test_a_complete_backend_may_have_any_resource_until_its_devices_can_be_named",
    ),
    Mutant(
        "H1",
        "a replica is of no GPU",
        "devices/boards.py",
        "    return Place(shared)\n",
        "    return Place(device.id)\n",
        _BOARDS,
    ),
    Mutant(
        "H3",
        "who shares a GPU loses it when there are fewer replicas",
        "devices/boards.py",
        " and not (device.id in held and are_shared(device.id, claim.device_id))",
        "",
        _BOARDS,
    ),
    Mutant(
        "H3",
        "a pod more may share a GPU than replicas are offered",
        "devices/boards.py",
        "not (device.id in held and are_shared(device.id, claim.device_id))",
        "not are_shared(device.id, claim.device_id)",
        _BOARDS,
    ),
    Mutant(
        "H3",
        "who has a GPU for himself shares it",
        "devices/boards.py",
        "    return len(shared) == 1 and shared.isdisjoint(device_ids)\n",
        "    return len(shared) == 1\n",
        _BOARDS,
    ),
    Mutant(
        "H6",
        "the IDs of older drivers name no GPU",
        "devices/boards.py",
        "    if shared.startswith(_OLD_MIG):",
        "    if False:",
        _BOARDS,
    ),
    Mutant(
        "H6",
        "what another gateway's pods hold is free",
        "gateway/memory/owners.py",
        "            yield from self._of(name, (devices[one]",
        "            () and self._of(name, (devices[one]",
        _BOARDS,
    ),
    Mutant(
        "H6",
        "what another gateway gives out is free",
        "gateway/memory/owners.py",
        "            for one in sorted(ids - offered",
        "            for one in () and sorted(ids - offered",
        _BOARDS,
    ),
    Mutant(
        "H7",
        "the lab judges IDs",
        "gateway/lab/trials/invariants.py",
        "            if not apart and",
        "            if False and",
        "tests/unit/test_invariants.py",
    ),
    Mutant(
        "H7",
        "the lab takes time-slicing for a mistake",
        "gateway/lab/trials/invariants.py",
        "apart = are_shared(one, other) or not",
        "apart = not",
        "tests/unit/test_invariants.py",
    ),
    Mutant(
        "H10",
        "what was held before a kubelet's start counts only once it is known to be forgotten",
        "gateway/kubelet/drift.py",
        "            **{device_id: one.words for device_id, one in self._before.items()},\n",
        "",
        "tests/unit/test_drift.py::test_what_an_allocate_should_be_looked_at_for",
    ),
)
