"""``gateway doctor``: what it names, and what it doesn't."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "DOC1": "what can't be seen from here is no finding, and isn't called well",
    "DOC2": "a fault is named by its own code, and by no other",
    "DOC3": "a gateway's process is told from whatever else has its number",
    "DOC4": "the driver is asked within bounds",
    "DOC5": "the exit status says how bad it is",
}

_CHECKS = "gateway/doctor/checks.py"
_COLLECT = "gateway/doctor/collect.py"
_SERVER = "gateway/doctor/server.py"
_CONTAINERS = "gateway/doctor/containers.py"
_DRIVERS = "gateway/doctor/drivers.py"
_KUBELETS = "gateway/doctor/kubelets.py"
_GATEWAYS = "gateway/doctor/gateways.py"
_RUNTIMES = "gateway/doctor/runtimes.py"
_CLUSTER = "gateway/doctor/cluster.py"
_CLAIMS = "gateway/doctor/claims.py"
_COMMAND = "gateway/cli/doctor.py"
_TEST = "tests/unit/test_doctor.py"
_NODES = "tests/unit/test_doctor_nodes.py"
_OWN = f"{_TEST}::test_a_fault_is_named_by_its_own_code"
_QUIET = f"{_TEST}::test_what_is_no_fault_is_not_named"

_HEALTHY = f"{_NODES}::test_nothing_is_found_on_a_healthy_node"

MUTANTS = (
    Mutant(
        "DOC2",
        "containerd 2 doesn't merge what it imports",
        _CONTAINERS,
        "if version >= _MERGES else next(",
        "if not version else next(",
        _HEALTHY,
    ),
    Mutant(
        "DOC2",
        "containerd 2 has CDI off where nothing is said",
        _CONTAINERS,
        'section.get("enable_cdi", version >= _MERGES)',
        'section.get("enable_cdi", False)',
        _HEALTHY,
    ),
    Mutant(
        "DOC1",
        "a containerd of an unknown version is one of before 2.0",
        _CONTAINERS,
        "else ())\n    return _containerd(",
        "else _HAS_CDI)\n    return _containerd(",
        f"{_NODES}::test_a_runtime_whose_version_is_unknown_is_not_seen",
    ),
    Mutant(
        "DOC2",
        "the gateway's own CDI file is judged",
        _COLLECT,
        " and not name.startswith(_OWN_CDI)",
        "",
        f"{_NODES}::test_the_gateways_own_cdi_file_is_not_judged",
    ),
    Mutant(
        "DOC2",
        "deleted rights are a kubelet's refusal, too",
        _CLAIMS,
        "if _no_registry(seen) or _rights(seen):",
        "if _no_registry(seen):",
        f"{_NODES}::test_deleted_rights_are_one_finding_without_advice_about_a_feature_gate",
    ),
    Mutant(
        "DOC4",
        "a command asks the API server and NVIDIA's library itself",
        _COMMAND,
        "    if answered is None or (kubeconfig and not cluster.asked_for):\n",
        "    if True:\n",
        f"{_TEST}::test_a_gateway_reports_what_nvml_does",
    ),
    Mutant(
        "DOC2",
        "what a runtime's configuration imports isn't read",
        _CONTAINERS,
        "[content, *_imported(root, path, content)]",
        "[content]",
        f"{_QUIET}[NVIDIA's runtime in a file of its own]",
    ),
    Mutant(
        "DOC2",
        "of several sections of a runtime's plugin the first counts",
        _CONTAINERS,
        "else next(reversed(sections), {})",
        "else next(iter(sections), {})",
        f"{_QUIET}[NVIDIA's runtime in a file of its own]",
    ),
    Mutant(
        "DOC2",
        "a damaged CDI specification ends the look",
        _COLLECT,
        'for node in listed(table(one, "containerEdits").get("deviceNodes"))',
        'for node in table(one, "containerEdits").get("deviceNodes") or ()',
        f"{_TEST}::test_other_forms_of_a_fault_have_the_same_code",
    ),
    Mutant(
        "DOC2",
        "how containers are told their GPUs is known by doctor's own settings alone",
        _COMMAND,
        "            told[\"strategies\"] = theirs  # A gateway's own flags aren't known here.\n",
        "            pass\n",
        f"{_TEST}::test_what_a_gateway_was_told_by_flags_is_asked_of_it",
    ),
    Mutant(
        "DOC2",
        "a gateway that doesn't say how containers are told their GPUs counts as one that tells them nothing",
        _COMMAND,
        "        if theirs := frozenset(one for status in answers.read for one in status.list_strategies):\n",
        "        if (theirs := frozenset(one for status in answers.read for one in status.list_strategies)) or True:\n",
        f"{_TEST}::test_what_a_gateway_was_told_by_flags_is_asked_of_it",
    ),
    Mutant(
        "DOC1",
        "a state directory is judged that isn't the gateway's",
        "gateway/doctor/snapshot.py",
        "if self.state_dir.there and not self.elsewhere else None",
        "if self.state_dir.there else None",
        _OWN,
    ),
    Mutant(
        "DOC1",
        "unseen is well",
        _CHECKS,
        'yield CheckResult(**said, outcome="unseen")',
        'yield CheckResult(**said, outcome="ok")',
        f"{_TEST}::test_what_cannot_be_seen_is_no_finding_and_is_not_called_well",
    ),
    Mutant(
        "DOC1",
        "a kubelet's folder that isn't there is well",
        "gateway/doctor/snapshot.py",
        'return self.socket_dir if self.socket_dir.state == "there" else None',
        "return self.socket_dir",
        f"{_TEST}::test_what_cannot_be_seen_is_no_finding_and_is_not_called_well",
    ),
    Mutant(
        "DOC2",
        "a resource with a GPU to give has none",
        _GATEWAYS,
        "if not one.healthy",
        "if one.listed",
        _QUIET,
    ),
    Mutant(
        "DOC2",
        "what DRA gives is what nobody gives",
        _GATEWAYS,
        "if each.state in _CLOSED and",
        'if each.state != "present" and',
        _QUIET,
    ),
    Mutant(
        "DOC2",
        "a kubelet that is down lacks its pod-resources API, too",
        _KUBELETS,
        "or seen.sockets is None or silent(seen)",
        "or seen.sockets is None",
        f"{_TEST}::test_other_forms_of_a_fault_have_the_same_code",
    ),
    Mutant(
        "DOC2",
        "a stale folder is there",
        _COLLECT,
        "if not info.st_nlink:",
        "if info.st_nlink < 0:",
        _OWN,
    ),
    Mutant(
        "DOC2",
        "a library that lacks a right is missing, too",
        _DRIVERS,
        'nvml.state == "missing" and not _unwatchable(seen)',
        'nvml.state == "missing"',
        _OWN,
    ),
    Mutant(
        "DOC2",
        "the registry has no kubelet, too",
        _KUBELETS,
        'folder.state != "there" or _registry(seen) or',
        'folder.state != "there" or',
        _OWN,
    ),
    Mutant(
        "DOC2",
        "what another gateway serves counts against this one",
        "gateway/telling/unserved.py",
        "one.name not in served and not one.standing_by_for",
        "one.name not in served",
        _QUIET,
    ),
    Mutant(
        "DOC2",
        "a kubelet that is down is two findings",
        _GATEWAYS,
        '"" if silent(seen) else ',
        "",
        f"{_TEST}::test_other_forms_of_a_fault_have_the_same_code",
    ),
    Mutant(
        "DOC2",
        "what DRA offers isn't served",
        "gateway/telling/unserved.py",
        "one.phase == Phase.SERVING.value or _is_claimed(one)",
        "one.phase == Phase.SERVING.value",
        _QUIET,
    ),
    Mutant(
        "DOC2",
        "a driver that no kubelet took is served",
        "gateway/telling/unserved.py",
        " and _NOT_YET not in one.trouble",
        "",
        f"{_TEST}::test_other_forms_of_a_fault_have_the_same_code",
    ),
    Mutant(
        "DOC2",
        "an application's failure waits for hands",
        _GATEWAYS,
        "device.state == State.UNHEALTHY.value and device.kind in _HANDS",
        "device.state == State.UNHEALTHY.value",
        _QUIET,
    ),
    Mutant(
        "DOC2",
        "links of device nodes matter with CDI",
        _RUNTIMES,
        '    if seen.strategies & _CDI:\n        return ""\n    unlinked',
        "    unlinked",
        _QUIET,
    ),
    Mutant(
        "DOC2",
        "any name that no gateway offers is dead",
        _CLUSTER,
        "if not count and name.startswith(_VENDORS)",
        "if name.startswith(_VENDORS)",
        _QUIET,
    ),
    Mutant(
        "DOC3",
        "whatever has the number",
        _COLLECT,
        'return any(part.rpartition("/")[2] in _GATEWAYS for part in',
        "return any(True for part in",
        f"{_TEST}::test_a_gateway_in_a_pod_is_known_by_its_number_there",
    ),
    Mutant(
        "DOC4",
        "a library that hangs is waited for",
        _SERVER,
        "thread.join(_NVML_WITHIN)",
        "thread.join()",
        f"{_TEST}::test_a_library_that_hangs_is_not_waited_for",
    ),
    Mutant(
        "DOC5",
        "a warning is an error",
        _COMMAND,
        'sys.exit(2 if outcomes["error"] else 1',
        'sys.exit(2 if outcomes["error"] or outcomes["warning"] else 1',
        f"{_TEST}::test_the_exit_status_says_how_bad_it_is",
    ),
    Mutant(
        "DOC2",
        "what crosses is behind at the API server, too",
        _CLAIMS,
        "or not sides or any(one.side in _MOVING for one in sides)",
        "or not sides",
        _QUIET,
    ),
    Mutant(
        "DOC2",
        "a GPU that has just left is long on its way",
        _CLAIMS,
        "if one.moving_s is not None and one.moving_s >= _LONG",
        "if one.moving_s is not None",
        _QUIET,
    ),
    Mutant(
        "DOC2",
        "a class without selectors takes nothing",
        _CLAIMS,
        "one.name in text or not text for",
        "one.name in text for",
        _QUIET,
    ),
    Mutant(
        "DOC2",
        "a folder that isn't there is a kubelet's refusal, too",
        _CLAIMS,
        "if _no_registry(seen) or _rights(seen):",
        "if _rights(seen):",
        _OWN,
    ),
    Mutant(
        "DOC2",
        "a lowered allocatable is the kubelet's fault, too",
        _CLUSTER,
        "if seen.own_node is None or any(status.sides for status in seen.statuses):",
        "if seen.own_node is None:",
        _OWN,
    ),
    Mutant(
        "DOC1",
        "a right that isn't asked for is had",
        _SERVER,
        "None if found is None else bool(found.status.allowed)",
        "True",
        f"{_TEST}::test_the_api_server_is_asked_for_what_claims_need",
    ),
)
