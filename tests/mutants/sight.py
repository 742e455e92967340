"""Sight: what is counted, shown and alerted on."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "O1": "a registration is counted once, with its cause",
    "O2": "what is counted stays bounded, and device IDs are opt-in",
    "O3": "who asks over the network is bounded in bytes, time and connections",
    "O4": "nothing is said that isn't known: no sample, no allocatable device that isn't served",
    "O5": "a terminal is safe from what others wrote, and a script gets each document as it came",
    "O6": "an alert asks for metrics that are there, from 0 on",
}

_TALLY = "tests/unit/test_tally.py"
_HTTP = "tests/unit/test_http.py"
_METRICS = "tests/unit/test_metrics.py"
_STATUS = "tests/unit/test_status.py"
_CLI = "tests/unit/test_cli_status.py"

MUTANTS = (
    Mutant(
        "O1",
        "a poll that sees the known kubelet counts as a new one",
        "gateway/tally.py",
        "if state.phase is Phase.STANDBY or (kubelet == state.kubelet and state.phase is not Phase.ABSENT):",
        "if state.phase is Phase.STANDBY:",
        f"{_TALLY}::test_the_cause_of_a_registration",
    ),
    Mutant(
        "O1",
        "our own end of a stream counts as a cut",
        "gateway/tally.py",
        "return Cause.STREAM_ENDED if stream == state.stream and state.phase is Phase.SERVING else None",
        "return Cause.STREAM_ENDED",
        f"{_TALLY}::test_the_cause_of_a_registration",
    ),
    Mutant(
        "O2",
        "labels are counted without end",
        "gateway/tally.py",
        "if len(self) >= MOST_LABELS:",
        "if False:",
        f"{_TALLY}::test_counts_lose_nothing_and_stay_small",
    ),
    Mutant(
        "O2",
        "every device has a sample",
        "gateway/metrics.py",
        "for device in resource.devices if device_ids else ():",
        "for device in resource.devices:",
        f"{_METRICS}::test_a_device_is_named_only_where_it_was_asked_for",
    ),
    Mutant(
        "O3",
        "connections are taken without end",
        "gateway/http.py",
        "if self._server is None or len(self._open) >= MAX_CONNECTIONS:",
        "if self._server is None:",
        f"{_HTTP}::test_so_many_connections_and_no_more",
    ),
    Mutant(
        "O3",
        "a defect's text goes to who asked",
        "gateway/http.py",
        "        except Exception:  # noqa: BLE001 - one request's defect is no other's\n            _log",
        "        except ZeroDivisionError:\n            _log",
        f"{_HTTP}::test_a_defect_is_logged_and_nobody_else_sees_it",
    ),
    Mutant(
        "O4",
        "healthy devices count as allocatable while nobody serves them",
        "gateway/status.py",
        "allocatable=healthy if serving else 0,",
        "allocatable=healthy,",
        f"{_STATUS}::test_nothing_is_allocatable_that_is_not_served",
    ),
    Mutant(
        "O4",
        "a gateway that stands by looks as if it failed",
        "gateway/metrics.py",
        "None if resource.phase in _ELSEWHERE else resource.phase == Phase.SERVING.value",
        "resource.phase == Phase.SERVING.value",
        f"{_METRICS}::test_what_is_not_known_has_no_sample",
    ),
    Mutant(
        "O5",
        "control characters reach the terminal",
        "gateway/cli/status.py",
        'return "".join(one if one.isprintable() else "?" for one in text)',
        "return text",
        f"{_CLI}::test_what_others_wrote_does_not_steer_the_terminal",
    ),
    Mutant(
        "O5",
        "--json drops what only a newer gateway knows",
        "gateway/cli/status.py",
        'found.raw.append(answer["status"])',
        "found.raw.append(msgspec.to_builtins(found.read[-1]))",
        f"{_CLI}::test_for_a_script_it_is_the_documents_as_they_came",
    ),
    Mutant(
        "O6",
        "the first refused Allocate is no increase",
        "gateway/metrics.py",
        '"calls_total": _from_zero(product(names, CALLS, CODES), counted.calls),',
        '"calls_total": counted.calls,',
        f"{_METRICS}::test_a_sample",
    ),
    Mutant(
        "O6",
        "an alert asks for a metric that was renamed",
        "gateway/metrics.py",
        '        Family("ledger_writable", "gauge"',
        '        Family("ledger_is_writable", "gauge"',
        f"{_METRICS}::test_an_alert_asks_for_what_is_there",
    ),
)
