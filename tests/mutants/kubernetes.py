"""The API server's client, and what goes by it."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "U1": "the token and the CA are read again, and nothing is sent without who we are and who they are",
    "U2": "an answer of the API server is bounded in bytes and time, and so is how many are under way",
    "U3": "a watch goes on where it was; all is listed anew only where the server has forgotten that",
    "U4": "a server is left alone as it wants, and found soon when it returns",
    "U5": "what may have been created isn't created again",
}

_ACCESS = "gateway/kubernetes/access.py"
_CLIENT = "gateway/kubernetes/client.py"
_WATCH = "gateway/kubernetes/watch.py"
_TEST_ACCESS = "tests/unit/test_kubernetes_access.py"
_TEST_CLIENT = "tests/unit/test_kubernetes_client.py"
_TEST_WATCH = "tests/unit/test_kubernetes_watch.py"

MUTANTS = (
    Mutant(
        "U1",
        "the first CA counts for ever",
        _ACCESS,
        "if found != self._of:",
        "if not self._of:",
        f"{_TEST_CLIENT}::test_a_renewed_ca_counts_from_the_next_connection_on",
    ),
    Mutant(
        "U1",
        "the server's name doesn't matter",
        _ACCESS,
        "context.minimum_version = ssl.TLSVersion.TLSv1_2",
        "context.check_hostname = False",
        f"{_TEST_CLIENT}::test_a_certificate_of_another_name_is_refused",
    ),
    Mutant(
        "U1",
        "an empty token is sent",
        _ACCESS,
        "            if isinstance(self.token, Path):\n                raise",
        "            if False:\n                raise",
        f"{_TEST_CLIENT}::test_a_token_that_is_none_is_sent_to_nobody",
    ),
    Mutant(
        "U2",
        "a body may have no end",
        _CLIENT,
        "if len(found) > MOST:",
        "if False:",
        f"{_TEST_CLIENT}::test_every_fault_is_an_error_that_says_what_came",
    ),
    Mutant(
        "U2",
        "an event may have no end",
        _WATCH,
        "if len(rest) > client.MOST:",
        "if False:",
        f"{_TEST_WATCH}::test_after_each_fault_it_goes_on",
    ),
    Mutant(
        "U2",
        "a list may have no end",
        _CLIENT,
        "for _ in range(PAGES):",
        "for _ in range(10**9):",
        f"{_TEST_CLIENT}::test_a_list_without_an_end_is_refused",
    ),
    Mutant(
        "U2",
        "any number of requests is under way",
        _CLIENT,
        "async with _within(seconds, what), self._turn:",
        "async with _within(seconds, what):",
        f"{_TEST_CLIENT}::test_so_many_requests_are_under_way_and_no_more",
    ),
    Mutant(
        "U3",
        "after a gap all is listed anew",
        _WATCH,
        "if error.status == _GONE:",
        "if True:",
        f"{_TEST_WATCH}::test_a_watch_that_broke_goes_on_where_it_was",
    ),
    Mutant(
        "U3",
        "a version that is gone is asked for again and again",
        _WATCH,
        "if error.status == _GONE:",
        "if False:",
        f"{_TEST_WATCH}::test_where_the_server_has_forgotten_all_is_listed_anew",
    ),
    Mutant(
        "U3",
        "a bookmark tells nothing",
        _WATCH,
        '        self._version = seen or self._version\n        if event.type == "BOOKMARK":\n            return None\n',
        '        if event.type == "BOOKMARK":\n            return None\n        self._version = seen or self._version\n',
        f"{_TEST_WATCH}::test_a_bookmark_moves_the_place_where_it_goes_on",
    ),
    Mutant(
        "U3",
        "an event without a version forgets where the watch is",
        _WATCH,
        "self._version = seen or self._version",
        "self._version = seen",
        f"{_TEST_WATCH}::test_after_each_fault_it_goes_on",
    ),
    Mutant(
        "U4",
        "who returns pays for having been away",
        _WATCH,
        "self._failures, self._away = 0, error.away",
        "self._away = error.away",
        f"{_TEST_WATCH}::test_a_server_that_returns_is_asked_again_soon",
    ),
    Mutant(
        "U4",
        "Retry-After is not heeded",
        _WATCH,
        "if error is not None and error.retry_after:",
        "if False and error is not None and error.retry_after:",
        f"{_TEST_WATCH}::test_how_long_the_server_is_left_alone",
    ),
    Mutant(
        "U5",
        "a create goes over a kept connection, and again over another",
        _CLIENT,
        'if method != "POST" and (kept',
        "if (kept",
        f"{_TEST_CLIENT}::test_what_is_created_is_created_on_a_connection_of_its_own",
    ),
)
