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
    "O7": "ready is who has done its part: only our own failure towards a running kubelet is none, and the loop alone is life",
    "O8": "a service manager is told of the life of the event loop, and of readiness when a kubelet can be served",
}

_TALLY = "tests/unit/test_tally.py"
_HTTP = "tests/unit/test_http.py"
_METRICS = "tests/unit/test_metrics.py"
_STATUS = "tests/unit/test_status.py"
_CLI = "tests/unit/test_cli_status.py"
_READY = "tests/unit/test_readiness.py"

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
        "if len(self._open) >= MAX_CONNECTIONS:",
        "if False:",
        f"{_HTTP}::test_so_many_connections_and_no_more",
    ),
    Mutant(
        "O3",
        "whoever holds all connections keeps the next one away",
        "gateway/http.py",
        "            oldest = next(iter(self._open))\n",
        "            oldest = task = asyncio.ensure_future(asyncio.sleep(0))\n            writer.transport.abort()\n            self._open[task] = None\n",
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
    Mutant(
        "O7",
        "ready before the kubelet's books were looked into",
        "gateway/readiness.py",
        "return it.stream_s >= PATIENCE, ",
        "return True, ",
        f"{_READY}::test_a_resource",
    ),
    Mutant(
        "O7",
        "no kubelet is our failure",
        "gateway/readiness.py",
        '        return True, "not served: no kubelet"',
        '        return False, "not served: no kubelet"',
        f"{_READY}::test_a_resource",
    ),
    Mutant(
        "O7",
        "a registration that the kubelet's books lack is ready",
        "gateway/readiness.py",
        "    if it.checked is Check.LACKING:",
        "    if False:",
        f"{_READY}::test_a_resource",
    ),
    Mutant(
        "O7",
        "registering for ever is ready",
        "gateway/readiness.py",
        " and waited < PATIENCE, words",
        ", words",
        f"{_READY}::test_a_resource",
    ),
    Mutant(
        "O7",
        "a restart of the kubelet shows at once",
        "gateway/readiness.py",
        "    waited = min(it.unserved_s, kubelet_s)",
        "    waited = max(it.unserved_s, kubelet_s)",
        f"{_READY}::test_a_resource",
    ),
    Mutant(
        "O7",
        "who stands by is not ready",
        "gateway/readiness.py",
        "    if it.phase is Phase.STANDBY or it.standing_by_for:\n        return True,",
        "    if it.phase is Phase.STANDBY or it.standing_by_for:\n        return False,",
        f"{_READY}::test_a_resource",
    ),
    Mutant(
        "O7",
        "without the kubelet's folder nobody is told that it lives",
        "gateway/shell.py",
        "        self._open_probes()\n        await self._wait_for_folder()\n",
        "        await self._wait_for_folder()\n        self._open_probes()\n",
        "tests/unit/test_probes.py::test_before_the_socket_directory_is_there_it_lives",
    ),
    Mutant(
        "O8",
        "no sign of life is given",
        "gateway/shell.py",
        '            self._spawn("watchdog", notify.keep_alive(seconds))',
        "            pass",
        "tests/unit/test_notify.py::test_a_gateway_tells_that_it_is_ready_lives_and_ends",
    ),
    Mutant(
        "O8",
        "another process's watchdog is taken for ours",
        "gateway/notify.py",
        'process not in {"", str(os.getpid())}',
        "False",
        "tests/unit/test_notify.py::test_how_often_it_wants_a_sign_of_life",
    ),
)
