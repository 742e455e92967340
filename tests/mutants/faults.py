"""Faults and the gauntlet; and what the search of all states and the genuine books found."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "G1": "every fault is survived in the same process, within its bound: the kubelet's own books, and a pod, are the judges",
    "G2": "what can't be looked at for want of a descriptor, or was missed by inotify, is looked at again",
    "G3": "a soak replays from its seed, is made shorter, and sees what grows",
}
_FAULT = "tests/compat/test_faults.py::test_a_node_is_right_again"
_GAUNTLET = "tests/unit/test_gauntlet.py"
_EXPLORED = "tests/unit/test_explored.py::test_every_promise_holds_in_every_state"
_WATCH = "tests/unit/test_watch.py"
MUTANTS = (
    Mutant(
        "G1",
        "never registers again after a cut",
        "gateway/registration.py",
        '    return _wait_after_cut(state, Report("info", "stream ended"))\n',
        '    return state, (Report("info", "stream ended"),)\n',
        f"{_FAULT}[stream-cut-1.9-emulated]",
        says="not right within",
    ),
    Mutant(
        "G1",
        "the ledger is forgotten at the start",
        "gateway/shell.py",
        "    async def _start(self) -> None:\n        self.scribe.load()\n",
        "    async def _start(self) -> None:\n",
        f"{_FAULT}[gateway-absent-1.37-emulated]",
        says="expected capacity 8, found 7",
    ),
    Mutant(
        "G2",
        "a resource that can't be bound ends the update for all",
        "gateway/shell.py",
        "except (OSError, RuntimeError) as error:  # No descriptor is left, or the folder went: the others go on.",
        "except ZeroDivisionError as error:",
        "tests/unit/test_serve.py::test_a_resource_that_can_not_be_bound_holds_up_no_other_and_is_bound_later",
    ),
    Mutant(
        "G2",
        "a resource that couldn't be bound is remembered as if it had been sent",
        "gateway/shell.py",
        "                    sent.remove(name)\n",
        "",
        "tests/unit/test_serve.py::test_a_resource_that_can_not_be_bound_holds_up_no_other_and_is_bound_later",
    ),
    Mutant(
        "G2",
        "a resource that couldn't be bound is not tried again",
        "gateway/shell.py",
        "                    again.append(time.monotonic() + SOURCE_RETRY)\n",
        "",
        "tests/unit/test_serve.py::test_a_resource_that_can_not_be_bound_holds_up_no_other_and_is_bound_later",
    ),
    Mutant(
        "G2",
        "no descriptor, no gateway",
        "gateway/watch.py",
        "        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)\n    except OSError:\n        return False\n",
        "        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)\n    except ValueError:\n        return False\n",
        f"{_WATCH}::test_without_a_descriptor_nobody_listens",
    ),
    Mutant(
        "G2",
        "any watch counts as a watch on the folder",
        "gateway/watch.py",
        "{self._folder, self._shared} <= {*self._watched.values()}",
        "self._watched",
        f"{_WATCH}::test_without_a_watch_on_the_folder_it_is_polled_often",
    ),
    Mutant(
        "G2",
        "a kubelet of which could not be told is forgotten",
        "gateway/watch.py",
        "            self._kubelet_up(found)\n            self._seen = found\n",
        "            self._seen = found\n            self._kubelet_up(found)\n",
        f"{_WATCH}::test_a_kubelet_of_which_could_not_be_told_is_told_again",
    ),
    Mutant(
        "G2",
        "names that nobody told of are never looked for",
        "gateway/watch.py",
        "        if self._wait >= POLL_WITHOUT_INOTIFY:\n            self._look_at_names()\n",
        "",
        f"{_WATCH}::test_a_deleted_name_is_told",
    ),
    Mutant(
        "G3",
        "a script is made of more than its seed",
        "gateway/lab/gauntlet.py",
        "    chance = random.Random(seed)\n",
        "    chance = random.Random()\n",
        f"{_GAUNTLET}::test_a_seed_gives_the_same_script_and_another_seed_another",
    ),
    Mutant(
        "G3",
        "growth is not seen",
        "gateway/lab/gauntlet.py",
        "        if last - first > more:\n",
        "        if last - first > 1000 * more:\n",
        f"{_GAUNTLET}::test_what_grows_is_named",
    ),
    Mutant(
        "G3",
        "a shorter script need not fail",
        "gateway/lab/gauntlet.py",
        "            if time.monotonic() < ends and await fails(rest):\n",
        "            if time.monotonic() < ends and (await fails(rest) or True):\n",
        f"{_GAUNTLET}::test_what_fails_is_made_as_short_as_it_can_be",
    ),
    Mutant(
        "S4",
        "a call that comes before our Register is sent is taken for its answer",
        "gateway/registration.py",
        "early = state.phase is Phase.OFFERING and not state.reached",
        "early = False",
        _EXPLORED,
        says="a Register is sent while a stream of ours is live",
    ),
    Mutant(
        "S4",
        "a second stream hides the first",
        "gateway/registration.py",
        "    if state.stream is not None:\n        # One of the two is a call",
        "    if state.stream is None and state.called is None:\n        # One of the two is a call",
        _EXPLORED,
    ),
    Mutant(
        "S4",
        "a refused Register counts for more than a stream that is open",
        "gateway/registration.py",
        "            if state.stream is not None:  # An earlier Register is answered by a call: that counts.\n"
        "                return _serving(state)\n",
        "",
        _EXPLORED,
        says="a Register is sent while a stream of ours is live",
    ),
    Mutant(
        "S5",
        "a name is left in the socket directory where no dialect can carry the list",
        "gateway/registration.py",
        '(*quiet, *drop, Report("error", "not offered", said))',
        '(*quiet, Report("error", "not offered", said))',
        _EXPLORED,
        says="our name is in the socket directory",
    ),
    Mutant(
        "T3",
        "nobody looks into a genuine kubelet's books",
        "gateway/plugin.py",
        "held = await kubelet_view.holds(self._gateway.pod_resources, self.resource.name, listed, patience)",
        "held = None",
        "tests/compat/test_podresources.py::test_the_gateway_finds_its_registration_there[1.37]",
    ),
    Mutant(
        "T3",
        "a kubelet that can't tell is a kubelet that lacks us",
        "gateway/kubelet_view.py",
        "return None if found is None else found.get(resource, frozenset()) == expected",
        "return found is not None and found.get(resource, frozenset()) == expected",
        "tests/compat/test_podresources.py::test_where_it_does_not_tell_nothing_is_claimed[1.20-has-no-such-call]",
    ),
)
