"""An update must not lose a node, and what was seen counts for more than what is remembered."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "UPD1": "a gateway that sees none of the usable devices takes none over, isn't ready, and records nothing of them",
    "UPD2": "a node that served nothing before, or not since its boot, stops no update",
    "UPD3": "a driver that says that it isn't there was looked at; one that nobody could ask was not",
}

_ROLLS = "tests/unit/test_rolls.py"

MUTANTS = (
    Mutant(
        "UPD1",
        "what the new gateway may not look at is taken over",
        "gateway/lists.py",
        "in self.unseen.names.keys() - self._resources.keys() if beside else ():",
        "in ():",
        f"{_ROLLS}::test_what_the_new_gateway_may_not_look_at_it_does_not_take_over",
    ),
    Mutant(
        "UPD1",
        "a second start of a gateway that sees nothing is ready",
        "gateway/unseen.py",
        "        if resource not in self.names:\n",
        "        if True:\n",
        f"{_ROLLS}::test_after_one_that_served_the_new_gateway_is_not_ready_however_often_it_starts",
    ),
    Mutant(
        "UPD1",
        "one device of another source is enough",
        "gateway/unseen.py",
        "{name: source for name, source in sources.items() if source not in sighted}",
        "{name: source for name, source in sources.items() if not sighted}",
        "tests/unit/test_unseen.py",
    ),
    Mutant(
        "UPD1",
        "what can't be looked at is seen",
        "gateway/unseen.py",
        " for one in listing.devices if one.health is Health.HEALTHY)",
        " for one in listing.devices)",
        "tests/unit/test_unseen.py",
    ),
    Mutant(
        "UPD2",
        "what a gateway lost while it ran is waited for by the next one",
        "gateway/unseen.py",
        "        self._sighted |= healthy - set(self.names.values())\n",
        "",
        f"{_ROLLS}::test_a_node_that_served_nothing_stops_no_update",
    ),
    Mutant(
        "UPD2",
        "what served before a reboot is waited for",
        "gateway/unseen.py",
        'beside or self._served_in_boot in {"", self._boot_id}',
        "True",
        f"{_ROLLS}::test_what_served_before_a_reboot_is_not_waited_for",
    ),
    Mutant(
        "UPD2",
        "what a setting withdrew is waited for",
        "gateway/unseen.py",
        "if became[one.id] not in _BY_A_SETTING and not",
        "if not",
        f"{_ROLLS}::test_what_a_setting_withdrew_is_not_waited_for",
    ),
    Mutant(
        "UPD2",
        "a GPU that the kernel no longer has is waited for",
        "gateway/unseen.py",
        " and not is_removed(one)]",
        "]",
        "tests/unit/test_unseen.py::test_a_gpu_that_the_kernel_no_longer_has_is_not_waited_for",
    ),
    Mutant(
        "UPD2",
        "devices that nobody could serve are waited for",
        "gateway/handover/peers.py",
        "and not lists.unseen.none_before and",
        "and",
        f"{_ROLLS}::test_a_node_that_served_nothing_stops_no_update",
    ),
    Mutant(
        "UPD3",
        "an NVIDIA driver that isn't loaded is waited for",
        "devices/gpu/nvidia/backend.py",
        "return Sight(()) if unloaded else None",
        "return None",
        f"{_ROLLS}::test_a_driver_that_says_that_it_is_not_loaded_gives_nothing_away",
    ),
)
