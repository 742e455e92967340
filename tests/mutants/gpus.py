"""The GPU model: names, replicas, what became of a device, and which source there is."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "U1": "GPUs and partitions are named by MIG_STRATEGY and resource_naming_strategy, and what these can't mean changes nothing",
    "U2": "a shared GPU is offered as replicas, and what is true of it is true of each",
    "U3": "a device that went by itself is lost; one that is offered differently, or was replaced, is withdrawn",
    "U4": "released GPUs stay listed, and all that is on one is released with it",
    "U5": "auto takes the hardware that the PCI bus shows, never a simulation",
    "U6": "a list that says nothing new isn't sent again",
    "U7": "a source that gives up ends the gateway with its status",
}

_NAMES = "tests/unit/test_gpu_names.py"
_SOURCE = "tests/unit/test_gpu_source.py"
_COMPOSE = "tests/unit/test_compose.py"
_SERVE = "tests/unit/test_serve.py"

MUTANTS = (
    Mutant(
        "U1",
        "GPUs in MIG mode are offered whole beside their instances",
        "devices/gpu/naming.py",
        "whole = not gpu.partitioned or mig is MigStrategy.NONE",
        "whole = True",
        f"{_NAMES}::test_names_by_mig_strategy",
    ),
    Mutant(
        "U1",
        "a plus stays in a resource name",
        "devices/gpu/naming.py",
        "{gpu.profile.replace('+', '.')}",
        "{gpu.profile}",
        f"{_NAMES}::test_names_by_mig_strategy",
    ),
    Mutant(
        "U1",
        "single takes what comes",
        "devices/gpu/naming.py",
        "    elif len(profiles) > 1:",
        "    elif False:",
        f"{_NAMES}::test_what_single_can_not_mean_is_said",
    ),
    Mutant(
        "U1",
        "what can't be named empties the list",
        "devices/gpu/source.py",
        "            self._unnamed = str(error)\n            return\n",
        "            self._unnamed = str(error)\n            self._offers = {}\n",
        f"{_SOURCE}::test_what_can_not_be_named_changes_nothing",
    ),
    Mutant(
        "U1",
        "a partition on an ill GPU is well",
        "devices/gpu/naming.py",
        "            gpu = replace(gpu, trouble=parent.trouble)",
        "            gpu = replace(gpu, trouble=None)",
        f"{_NAMES}::test_a_gpus_trouble_is_that_of_its_partitions",
    ),
    Mutant(
        "U1",
        "a pattern matches a part of a name",
        "devices/gpu/naming.py",
        "re.fullmatch(",
        "re.search(",
        f"{_NAMES}::test_names_by_pattern",
    ),
    Mutant(
        "U2",
        "one replica too few",
        "devices/gpu/sharing.py",
        "for number in range(self.replicas):",
        "for number in range(self.replicas - 1):",
        f"{_NAMES}::test_how_often_a_gpu_is_offered",
    ),
    Mutant(
        "U2",
        "only the first replica is ill",
        "devices/gpu/sharing.py",
        "device_id: gpu.trouble for gpu in gpus if gpu.trouble is not None for device_id in offer.ids(gpu.uuid)",
        "next(offer.ids(gpu.uuid)): gpu.trouble for gpu in gpus if gpu.trouble is not None",
        f"{_NAMES}::test_what_is_true_of_a_gpu_is_true_of_all_that_is_on_it",
    ),
    Mutant(
        "U2",
        "two resources are shown as one",
        "devices/gpu/sharing.py",
        "        if shown in offers:",
        "        if False:",
        f"{_NAMES}::test_two_resources_can_not_be_shown_as_one",
    ),
    Mutant(
        "U3",
        "a replaced GPU is a ghost",
        "devices/gpu/source.py",
        "replaced = bool(known.pci) and",
        "replaced = False and",
        f"{_SOURCE}::test_what_became_of_a_device",
    ),
    Mutant(
        "U3",
        "a destroyed instance is a ghost",
        "devices/gpu/source.py",
        "known.parent in there or",
        "False or",
        f"{_SOURCE}::test_what_became_of_a_device",
    ),
    Mutant(
        "U3",
        "a GPU that fell off the bus is dropped",
        "devices/gpu/source.py",
        "            return Fate.WITHDRAWN\n        return Fate.LOST\n",
        "            return Fate.WITHDRAWN\n        return Fate.WITHDRAWN\n",
        f"{_SOURCE}::test_what_became_of_a_device",
    ),
    Mutant(
        "U4",
        "released GPUs leave the list",
        "devices/gpu/source.py",
        "kept = [gpu for gpu in before if gpu.board in sight.released and gpu.uuid not in there]",
        "kept: list[GPU] = []",
        f"{_SOURCE}::test_released_gpus_stay_listed_with_what_is_on_them",
    ),
    Mutant(
        "U4",
        "a partition's GPU is released without the others on it",
        "devices/gpu/sharing.py",
        "if gpu.uuid in uuids or gpu.parent in uuids",
        "if gpu.uuid in uuids",
        f"{_SOURCE}::test_released_gpus_stay_listed_with_what_is_on_them",
    ),
    Mutant(
        "U4",
        "an unknown device means all",
        "devices/gpu/source.py",
        "        if boards or not device_ids:\n            await self._backend.release(boards if device_ids else ())",
        "        if True:\n            await self._backend.release(boards)",
        f"{_SOURCE}::test_nobody_is_asked_to_let_go_of_what_is_not_there",
    ),
    Mutant(
        "U5",
        "any PCI device of a vendor is a GPU",
        "gateway/compose.py",
        "if vendor in _VENDORS and kind.startswith(_DISPLAY):",
        "if vendor in _VENDORS:",
        f"{_COMPOSE}::test_what_the_node_has",
    ),
    Mutant(
        "U6",
        "every inventory is a new list",
        "gateway/serve.py",
        "        if self.devices == before:\n            return\n",
        "",
        f"{_SERVE}::test_a_list_that_says_nothing_new_is_not_sent",
    ),
    Mutant(
        "U7",
        "a source that gave up is asked again",
        "gateway/shell.py",
        "                self._end(error.status)\n",
        "",
        f"{_SERVE}::test_a_source_that_gives_up_ends_the_gateway",
    ),
)
