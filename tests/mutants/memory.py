"""Memory: the ledger, and the scribe that writes it."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "M1": "a crash at any step of a write leaves the old ledger or the new one, and nothing that is in the way",
    "M2": "of two gateways on one ledger neither undoes what the other wrote",
    "M3": "cordons outlive damage, a newer format and a rollback",
    "M4": "a ledger that can't be read in full is put aside before it is replaced, never deleted",
    "M5": "fields of a later release are kept, and the release before reads this one's file",
    "M6": "the state directory is private, and no planted link is followed",
    "M7": "what is durable is on disk, and no disk holds the gateway up",
}

_LEDGER = "tests/unit/test_ledger.py"
_SCRIBE = "tests/unit/test_scribe.py"
_CRASH = "tests/unit/test_ledger_crash.py"

MUTANTS = (
    Mutant(
        "M1",
        "the file is written in place",
        "gateway/ledger.py",
        '    temporary = path.with_name(f"ledger-{secrets.token_hex(4)}.tmp")\n    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)\n',
        "    temporary = path\n    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)\n",
        f"{_CRASH}::test_killed_at_a_step_of_a_write",
    ),
    Mutant(
        "M1",
        "what another gateway is writing is swept",
        "gateway/ledger.py",
        "for leftover in leftovers if not unlocked else ():",
        "for leftover in leftovers:",
        f"{_LEDGER}::test_what_a_crash_left_is_swept",
    ),
    Mutant(
        "M2",
        "the file is replaced by what this gateway knows",
        "gateway/ledger.py",
        "if _identity_of(self.path) not in {None, snapshot.base} and (found",
        "if _identity_of(self.path) is None and (found",
        f"{_LEDGER}::test_neither_gateway_undoes_what_the_other_wrote",
    ),
    Mutant(
        "M2",
        "a change during a write counts as written",
        "gateway/ledger.py",
        "if at not in done or done[at] != row}",
        "if at not in done}",
        f"{_LEDGER}::test_what_changes_during_a_write_waits_for_the_next",
    ),
    Mutant(
        "M2",
        "no lock is taken",
        "gateway/ledger.py",
        "                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n                break\n",
        "                break\n",
        f"{_LEDGER}::test_writers_at_the_same_time_lose_nothing",
    ),
    Mutant(
        "M3",
        "cordons stand behind what is long",
        "gateway/ledger.py",
        '    first = {"format": FORMAT, "cordons": content.get("cordons", {})}\n    return msgspec.json.encode(first | {key: value for key, value in content.items() if key not in first})\n',
        '    first = {"format": FORMAT}\n    last = {"cordons": content.get("cordons", {})}\n    return msgspec.json.encode(first | {key: value for key, value in content.items() if key != "cordons"} | last)\n',
        f"{_LEDGER}::test_cordons_survive_a_cut_anywhere_behind_them",
    ),
    Mutant(
        "M3",
        "of a newer format nothing is kept",
        "gateway/ledger.py",
        'written by a newer gateway"\n        content = _only_cordons(content)\n',
        'written by a newer gateway"\n        content = {}\n',
        f"{_LEDGER}::test_what_is_sound_in_a_damaged_file_is_kept",
    ),
    Mutant(
        "M4",
        "a file that was damaged during service is overwritten",
        "gateway/ledger.py",
        "                aside = _put_aside(self.path)\n",
        "                aside = self.path.name\n",
        f"{_LEDGER}::test_a_file_that_others_damage_is_put_aside_before_it_is_replaced",
    ),
    Mutant(
        "M4",
        "a file that can't be opened for want of descriptors is damaged",
        "gateway/ledger.py",
        "        if error.errno in _NOT_NOW:\n            raise\n",
        "",
        f"{_LEDGER}::test_a_sound_file_that_cannot_be_opened_now_is_left_and_read_with_the_next_write",
    ),
    Mutant(
        "M5",
        "a row is replaced, with what isn't known in it",
        "gateway/ledger.py",
        "            trail[-1].setdefault(leaf, {}).update(row)\n",
        "            trail[-1][leaf] = dict(row)\n",
        f"{_LEDGER}::test_fields_of_a_later_release_are_kept_at_every_depth",
    ),
    Mutant(
        "M5",
        "the format number grows though the release before could read the file",
        "gateway/ledger.py",
        "FORMAT = 1\n",
        "FORMAT = 2\n",
        f"{_LEDGER}::test_the_release_before_reads_this_ones_file",
    ),
    Mutant(
        "M6",
        "a link is followed",
        "gateway/ledger.py",
        "_READ = os.O_RDONLY | os.O_NOFOLLOW | ",
        "_READ = os.O_RDONLY | ",
        f"{_LEDGER}::test_what_is_no_file_is_put_aside_unread",
    ),
    Mutant(
        "M6",
        "a folder that is open stays open",
        "gateway/ledger.py",
        "        folder.chmod(0o700)\n",
        "        folder.lstat()\n",
        f"{_LEDGER}::test_a_folder_with_wider_modes",
    ),
    Mutant(
        "M7",
        "a write that began before the change is taken for the one with it",
        "gateway/scribe.py",
        "                    if covered >= wanted:\n                        return on_disk\n",
        "                    return on_disk\n",
        f"{_SCRIBE}::test_who_comes_during_a_write_shares_the_next",
    ),
    Mutant(
        "M7",
        "what was handed out last is forgotten at the end",
        "gateway/serve.py",
        "        self._note_handed_out()\n        self.end_streams()\n",
        "        self.end_streams()\n",
        "tests/unit/test_serve.py::test_an_orderly_end_remembers_what_was_handed_out_last",
    ),
    Mutant(
        "M7",
        "a failed write isn't tried again",
        "gateway/scribe.py",
        "            self._timer = asyncio.get_running_loop().call_later(self._retry, self._on_time)\n",
        "",
        f"{_SCRIBE}::test_tries_grow_rarer_up_to_a_limit",
    ),
    Mutant(
        "M7",
        "what is left at the end is lost",
        "gateway/scribe.py",
        "            self._timer.cancel()\n        await self.durable()\n",
        "            self._timer.cancel()\n",
        f"{_SCRIBE}::test_close_writes_what_is_left_and_ends",
    ),
)
