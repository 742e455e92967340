"""The simulation finds what breaks a rule of the machines and of the ledger, in some hundred schedules."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "SIM1": "a broken rule of registration breaks a promise in the simulation",
    "SIM2": "a broken rule of the ledger loses something in a simulated power cut, or between two gateways",
    "SIM3": "two who serve, one who never comes to rest, and a device in two pods are seen in the simulation",
    "SIM4": "a schedule's number tells all that happens in it",
}

_PLAYED = ("-m", "gateway.lab.simulation.run", "--jobs", "1", "--schedules", "1000")
_TEST = "tests/unit/test_simulation.py::test_schedules_keep_every_promise_and_meet_what_is_rare"

MUTANTS = (
    Mutant(
        "SIM1",
        "a stream's end isn't answered",
        "gateway/registration/machine.py",
        "    return state, (*ends, *actions)\n\n\ndef _look_again",
        "    return state, ends\n\n\ndef _look_again",
        _TEST,
        command=_PLAYED,
        says="the kubelet would give out []",
    ),
    Mutant(
        "SIM1",
        "it registers while it serves",
        "gateway/registration/machine.py",
        "            return replace(state, cuts=0, errors=0), ()",
        "            return _offer(replace(state, stream=None))",
        _TEST,
        command=_PLAYED,
        says="sends a Register while a stream of its own is live",
    ),
    Mutant(
        "SIM1",
        "a call that never comes is waited for",
        "gateway/registration/machine.py",
        "phase=Phase.ACCEPTED), (report, SetTimer(Timer.CALL, CALL_WAIT))",
        "phase=Phase.ACCEPTED), (report,)",
        _TEST,
        command=_PLAYED,
        says="breaks a promise",
    ),
    Mutant(
        "SIM1",
        "the call isn't waited for",
        "gateway/registration/machine.py",
        "CALL_WAIT = 11.0",
        "CALL_WAIT = 0.001",
        _TEST,
        command=_PLAYED,
        says="one kubelet accepted 2 Registers",
    ),
    Mutant(
        "SIM2",
        "the file isn't flushed",
        "gateway/memory/file.py",
        "        os.fsync(descriptor)\n        os.replace",
        "        os.replace",
        _TEST,
        command=_PLAYED,
        says="finds a damaged state file",
    ),
    Mutant(
        "SIM2",
        "the folder isn't flushed",
        "gateway/memory/file.py",
        "        os.fsync(folder)\n",
        "        pass\n",
        _TEST,
        command=_PLAYED,
        says="that was acknowledged is lost",
    ),
    Mutant(
        "SIM2",
        "a write undoes the other gateway's",
        "gateway/memory/ledger.py",
        "            file.identity_of(self.path) not in {None, snapshot.base}\n",
        "            False\n",
        _TEST,
        command=(*_PLAYED[:-1], "3000"),
        says="that was acknowledged is lost",
    ),
    Mutant(
        "SIM2",
        "the file is written in place",
        "gateway/memory/file.py",
        '    temporary = path.with_name(f"ledger-{os.urandom(4).hex()}.tmp")\n'
        "    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)",
        "    temporary = path\n"
        "    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)",
        _TEST,
        command=_PLAYED,
        says="finds a damaged state file",
    ),
    Mutant(
        "SIM2",
        "what is taken out of the state file stays in it",
        "gateway/memory/tables.py",
        "            trail[-1].pop(leaf, None)",
        "            pass",
        _TEST,
        command=_PLAYED,
        says="a cordon that was lifted is back",
    ),
    Mutant(
        "SIM2",
        "what a kubelet is told of isn't written",
        "gateway/memory/tables.py",
        "        changed = self.put(resource, table, {device_id: row(one) for device_id, one in news.items()})",
        "        changed = False",
        _TEST,
        command=_PLAYED,
        says="which a kubelet was told of",
    ),
    Mutant(
        "SIM4",
        "what may change is shared by the copies of an opening",
        "gateway/lab/simulation/opening.py",
        "    if value is None or isinstance(value, (str, ",
        "    if value is None or isinstance(value, (dict, str, ",
        "tests/unit/test_simulation.py::test_a_copy_of_an_opening_goes_on_as_the_opening_itself_does",
    ),
    Mutant(
        "SIM4",
        "the order of a set decides which device a pod gets",
        "gateway/lab/simulation/kubelet.py",
        "sorted(sorted(claim.available - claim.taken), key",
        "sorted(claim.available - claim.taken, key",
        "tests/unit/test_simulation.py::test_a_schedule_is_played_again_to_the_letter",
    ),
    Mutant(
        "SIM4",
        "the order of a set decides which device 1.8 gives a pod",
        "gateway/lab/kubelets/books.py",
        "*sorted(self._free(resource, more))[:more]",
        "*tuple(self._free(resource, more))[:more]",
        "tests/unit/test_simulation.py::test_a_schedule_is_played_again_to_the_letter",
    ),
    Mutant(
        "SIM3",
        "who handed over serves, too",
        "gateway/handover/machine.py",
        "{Elder.ENDING, Elder.LENT, Elder.CONFIRMED, Elder.CHECKING, Elder.REVOKING}",
        "{Elder.ENDING, Elder.LENT, Elder.REVOKING}",
        _TEST,
        command=_PLAYED,
        says="one gateway is to serve, and these do",
    ),
    Mutant(
        "SIM3",
        "who is told that it lost the resource goes on",
        "gateway/handover/machine.py",
        "        case Say.MINE if state.stage is not Heir.RETURNING:",
        "        case Say.MINE if False:",
        _TEST,
        command=_PLAYED,
        says="is waiting to register again",
    ),
    Mutant(
        "SIM3",
        "a kubelet gives out a device that is in use",
        "gateway/lab/kubelets/books.py",
        "free = self._healthy[resource] - self._allocated.get(resource, set())",
        "free = set(self._healthy[resource])",
        _TEST,
        command=_PLAYED,
        says="is given to both",
    ),
    Mutant(
        "SIM3",
        "who stands by says that a Register is in flight",
        "gateway/handover/events.py",
        "        case Phase.OFFERING | Phase.ACCEPTED:\n",
        "        case Phase.OFFERING | Phase.ACCEPTED | Phase.STANDBY:\n",
        _TEST,
        command=_PLAYED,
        says="goes round",
    ),
    Mutant(
        "SIM3",
        "who stands by keeps its stream",
        "gateway/registration/machine.py",
        "    actions.append(EndStreams())\n    if state.name:\n        actions.append(UnlinkSocket(state.name))\n"
        "    if report is not None:\n        actions.append(report)\n"
        '    return replace(state, phase=phase, stream=None, others=_NONE, name="", renewed=False), tuple(actions)',
        "    if phase is not Phase.STANDBY:\n        actions.append(EndStreams())\n"
        "    if state.name:\n        actions.append(UnlinkSocket(state.name))\n"
        "    if report is not None:\n        actions.append(report)\n"
        '    return replace(state, phase=phase, name="", renewed=False), tuple(actions)',
        _TEST,
        command=_PLAYED,
        says="the kubelet allocates from",
    ),
)
