"""The API server's client, and what goes by it."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "KA1": "the token and the CA are read again, and nothing is sent without who we are and who they are",
    "KA2": "an answer of the API server is bounded in bytes and time, and so is how many are under way",
    "KA3": "a watch goes on where it was; all is listed anew only where the server has forgotten that",
    "KA4": "a server is left alone as it wants, and found soon when it returns",
    "KA5": "what may have been created isn't created again",
    "KA6": "the node's label chooses as with NVIDIA's config-manager, and is followed",
    "KA7": "without the API server, and without a good file, the choice of before counts",
}

_ACCESS = "gateway/kubernetes/access.py"
_CLIENT = "gateway/kubernetes/client.py"
_WATCH = "gateway/kubernetes/watch.py"
_TEST_ACCESS = "tests/unit/test_kubernetes_access.py"
_TEST_CLIENT = "tests/unit/test_kubernetes_client.py"
_CHOICE = "gateway/configuration/choice.py"
_RELOAD = "gateway/configuration/reload.py"
_NODECONFIG = "gateway/cli/nodeconfig.py"
_TEST_CHOICE = "tests/unit/test_choice.py"
_TEST_NODECONFIG = "tests/unit/test_nodeconfig.py"
_TEST_WATCH = "tests/unit/test_kubernetes_watch.py"

MUTANTS = (
    Mutant(
        "KA1",
        "the first CA counts for ever",
        _ACCESS,
        "if found != self._of:",
        "if not self._of:",
        f"{_TEST_CLIENT}::test_a_renewed_ca_counts_from_the_next_connection_on",
    ),
    Mutant(
        "KA1",
        "the server's name doesn't matter",
        _ACCESS,
        "context.minimum_version = ssl.TLSVersion.TLSv1_2",
        "context.check_hostname = False",
        f"{_TEST_CLIENT}::test_a_certificate_of_another_name_is_refused",
    ),
    Mutant(
        "KA1",
        "an empty token is sent",
        _ACCESS,
        "            if isinstance(self.token, Path):\n                raise",
        "            if False:\n                raise",
        f"{_TEST_CLIENT}::test_a_token_that_is_none_is_sent_to_nobody",
    ),
    Mutant(
        "KA2",
        "a body may have no end",
        _CLIENT,
        "if len(found) > MOST:",
        "if False:",
        f"{_TEST_CLIENT}::test_every_fault_is_an_error_that_says_what_came",
    ),
    Mutant(
        "KA2",
        "an event may have no end",
        _WATCH,
        "if len(rest) > client.MOST:",
        "if False:",
        f"{_TEST_WATCH}::test_after_each_fault_it_goes_on",
    ),
    Mutant(
        "KA2",
        "a list may have no end",
        _CLIENT,
        "for _ in range(PAGES):",
        "for _ in range(10**9):",
        f"{_TEST_CLIENT}::test_a_list_without_an_end_is_refused",
    ),
    Mutant(
        "KA2",
        "any number of requests is under way",
        _CLIENT,
        "async with _within(seconds, what), self._turn:",
        "async with _within(seconds, what):",
        f"{_TEST_CLIENT}::test_so_many_requests_are_under_way_and_no_more",
    ),
    Mutant(
        "KA3",
        "after a gap all is listed anew",
        _WATCH,
        "if error.status == _GONE:",
        "if True:",
        f"{_TEST_WATCH}::test_a_watch_that_broke_goes_on_where_it_was",
    ),
    Mutant(
        "KA3",
        "a version that is gone is asked for again and again",
        _WATCH,
        "if error.status == _GONE:",
        "if False:",
        f"{_TEST_WATCH}::test_where_the_server_has_forgotten_all_is_listed_anew",
    ),
    Mutant(
        "KA3",
        "a bookmark tells nothing",
        _WATCH,
        '        self._version = seen or self._version\n        if event.type == "BOOKMARK":\n            return None\n',
        '        if event.type == "BOOKMARK":\n            return None\n        self._version = seen or self._version\n',
        f"{_TEST_WATCH}::test_a_bookmark_moves_the_place_where_it_goes_on",
    ),
    Mutant(
        "KA3",
        "an event without a version forgets where the watch is",
        _WATCH,
        "self._version = seen or self._version",
        "self._version = seen",
        f"{_TEST_WATCH}::test_after_each_fault_it_goes_on",
    ),
    Mutant(
        "KA4",
        "who returns pays for having been away",
        _WATCH,
        "self._failures, self._away = 0, error.away",
        "self._away = error.away",
        f"{_TEST_WATCH}::test_a_server_that_returns_is_asked_again_soon",
    ),
    Mutant(
        "KA4",
        "Retry-After is not heeded",
        _WATCH,
        "if error is not None and error.retry_after:",
        "if False and error is not None and error.retry_after:",
        f"{_TEST_WATCH}::test_how_long_the_server_is_left_alone",
    ),
    Mutant(
        "KA5",
        "a create goes over a kept connection, and again over another",
        _CLIENT,
        'if method != "POST" and (kept',
        "if (kept",
        f"{_TEST_CLIENT}::test_what_is_created_is_created_on_a_connection_of_its_own",
    ),
    Mutant(
        "KA6",
        "the default beats the label",
        _CHOICE,
        "name = label or choice.default",
        "name = choice.default or label",
        f"{_TEST_CHOICE}::test_the_label_chooses_then_the_default_then_the_strategies_in_their_order",
    ),
    Mutant(
        "KA6",
        "a label without a file falls back",
        _CHOICE,
        "if label or choice.default:",
        "if label in names or choice.default in names:",
        f"{_TEST_CHOICE}::test_where_nothing_is_chosen_the_reason_says_what_to_do",
    ),
    Mutant(
        "KA6",
        "a volume's own links are configurations",
        _CHOICE,
        'if not entry.name.startswith("..") and not entry.is_dir()',
        "if not entry.is_dir()",
        f"{_TEST_CHOICE}::test_a_mounted_config_map_has_files_and_the_links_of_its_volume",
    ),
    Mutant(
        "KA6",
        "another label is no news",
        _CHOICE,
        "            self.changed.set()",
        "            pass",
        f"{_TEST_CHOICE}::test_another_label_is_like_an_edit",
    ),
    Mutant(
        "KA6",
        "a file that comes later is not seen",
        _RELOAD,
        "                current.choose_nothing(fault, asked=asked)\n                watch.look_again()",
        "                current.choose_nothing(fault, asked=asked)",
        f"{_TEST_CHOICE}::test_a_label_without_a_file_leaves_what_counts_until_the_file_is_there",
    ),
    Mutant(
        "KA7",
        "a label with a bad file is remembered, too",
        _RELOAD,
        "elif not current.fault:",
        "else:",
        f"{_TEST_CHOICE}::test_only_a_label_with_a_good_file_is_remembered",
    ),
    Mutant(
        "KA7",
        "without the server there is no label",
        _NODECONFIG,
        "[one for one in (now, before) if one is not None]",
        "[one for one in (now,) if one is not None]",
        f"{_TEST_NODECONFIG}::test_without_the_server_the_label_of_before_counts",
    ),
    Mutant(
        "KA7",
        "a wrong label ends a node that has served",
        _NODECONFIG,
        "for label in dict.fromkeys(candidates):",
        "for label in candidates[:1]:",
        f"{_TEST_NODECONFIG}::test_where_the_label_has_no_file_the_one_of_before_counts",
    ),
)
