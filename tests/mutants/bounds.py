"""Bounds: what others send is bounded in bytes, number and time, and whoever says nothing makes room."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "Z1": "a request to a resource is bounded in bytes, and in devices and containers before it is decoded",
    "Z2": "a call that doesn't say what it wants makes room for one that does",
}

_REQUESTS = "tests/unit/test_requests.py"

MUTANTS = (
    Mutant(
        "Z1",
        "a request has twice the bytes",
        "gateway/serve.py",
        '("grpc.max_receive_message_length", REQUEST_LIMIT),',
        '("grpc.max_receive_message_length", 2 * REQUEST_LIMIT),',
        f"{_REQUESTS}::test_a_request_has_so_many_bytes_at_most",
    ),
    Mutant(
        "Z1",
        "the largest request of a kubelet is refused",
        "adapters/spelling.py",
        "MAX_NAMES: Final = 200_000",
        "MAX_NAMES: Final = 20_000",
        f"{_REQUESTS}::test_the_largest_requests_of_a_kubelet_fit",
    ),
    Mutant(
        "Z1",
        "only fields in their shortest spelling count",
        "adapters/spelling.py",
        '_BEGINNINGS: Final = (b"\\x0a", b"\\x12", b"\\x8a", b"\\x92")',
        '_BEGINNINGS: Final = (b"\\x0a", b"\\x12")',
        f"{_REQUESTS}::test_devices_are_counted_before_they_are_decoded",
    ),
    Mutant(
        "Z1",
        "an alpha's devices are counted when they are decoded",
        "adapters/alpha.py",
        "        require_bounded(data, containers=False)\n",
        "",
        f"{_REQUESTS}::test_devices_of_an_alpha_are_counted_before_they_are_decoded",
    ),
    Mutant(
        "Z1",
        "one container more is taken",
        "adapters/spelling.py",
        "if count > most:",
        "if count > most + 1:",
        f"{_REQUESTS}::test_containers_are_counted_before_they_are_decoded",
    ),
    Mutant(
        "Z1",
        "one container fewer is taken",
        "adapters/spelling.py",
        "if count > most:",
        "if count >= most:",
        f"{_REQUESTS}::test_as_many_containers_as_may_be_are_read",
    ),
    Mutant(
        "Z1",
        "a group hides what is behind it",
        "adapters/spelling.py",
        "            case _:  # A group begins or ends, which has no length: what is in it is counted, too.\n                pass\n",
        "            case _:\n                return False\n",
        f"{_REQUESTS}::test_containers_are_counted_before_they_are_decoded",
    ),
    Mutant(
        "Z2",
        "any number of calls waits",
        "gateway/serve.py",
        "if len(self._waiting) >= MAX_WAITING:",
        "if False:",
        f"{_REQUESTS}::test_who_asks_for_nothing_keeps_nobody_away",
    ),
    Mutant(
        "Z2",
        "the newest call makes room",
        "gateway/serve.py",
        "oldest = next(iter(self._waiting))",
        "oldest = next(reversed(self._waiting))",
        f"{_REQUESTS}::test_who_asks_for_nothing_keeps_nobody_away",
    ),
    Mutant(
        "Z2",
        "a request may take for ever",
        "gateway/serve.py",
        "limit = asyncio.timeout(REQUEST_TIME)",
        "limit = asyncio.timeout(None)",
        f"{_REQUESTS}::test_a_request_has_its_time_and_no_more",
    ),
    Mutant(
        "Z2",
        "each refusal is logged",
        "gateway/serve.py",
        "self._seldom = Seldom(REFUSALS_TOLD)",
        "self._seldom = Seldom(10**6)",
        f"{_REQUESTS}::test_refusals_are_told_up_to_a_number",
    ),
)
