"""The plan of a fleet, and what a node's bundle gives away."""

from __future__ import annotations

from tests.mutants.table import Mutant

RULES = {
    "FL1": "the oldest nodes go first, and nobody overtakes",
    "FL2": "a vendor's version is what it is built of, and what is none is named",
    "FL3": "what isn't a device, or can't be judged, doesn't count",
    "FL4": "no plan lets a kubelet run a pod that asks by name without its GPU",
    "SB1": "a bundle gives no secret and no name away",
    "SB2": "a script is told ready only where every resource is served",
}

_ADVICE = "gateway/cli/advice.py"
_FLEET = "gateway/cli/fleet.py"
_CROSSOVER = "gateway/cli/crossover.py"
_TEST_CROSSOVER = "tests/unit/test_crossover.py"
_BUNDLE = "gateway/cli/bundle.py"
_STATUS = "gateway/cli/status.py"
_TEST_FLEET = "tests/unit/test_fleet.py"
_TEST_BUNDLE = "tests/unit/test_cli_bundle.py"
_ORDER = f"{_TEST_FLEET}::test_the_steps_are_in_an_order_that_works"

MUTANTS = (
    Mutant(
        "FL1",
        "a way back begins with the oldest",
        _FLEET,
        'targets = sorted({minor_version(hop.new) for hop, _ in hops}, reverse=way == "down")',
        "targets = sorted({minor_version(hop.new) for hop, _ in hops})",
        _ORDER,
    ),
    Mutant(
        "FL1",
        "each group for itself",
        _FLEET,
        "alike[msgspec.json.encode(hop)].append((hop, group))",
        "alike[group.version.encode()].append((hop, group))",
        _ORDER,
    ),
    Mutant(
        "FL1",
        "who is there goes, too",
        _FLEET,
        "return version == goal or (goal.patch is None and version.minor == goal.minor)",
        "return version == goal",
        _ORDER,
    ),
    Mutant(
        "FL2",
        "a vendor's words spoil the version",
        _ADVICE,
        '_SUFFIX.split(text.removeprefix("v"), maxsplit=1)',
        '[text.removeprefix("v")]',
        _ORDER,
    ),
    Mutant(
        "FL2",
        "one bad version ends the plan",
        _FLEET,
        "        except PlanError as error:\n            unknown.append(",
        "        except LookupError as error:\n            unknown.append(",
        f"{_TEST_FLEET}::test_what_cannot_be_judged_is_named_with_the_reason",
    ),
    Mutant(
        "FL3",
        "volumes are devices",
        _FLEET,
        'if "/" in name and not name.startswith(_NATIVE) and',
        'if "/" in name and',
        f"{_TEST_FLEET}::test_devices_are_what_has_a_domain",
    ),
    Mutant(
        "FL3",
        "a node's mildest step counts",
        _FLEET,
        "found[next(level for level in _STRICTEST if level in levels)]",
        "found[next(level for level in reversed(_STRICTEST) if level in levels)]",
        f"{_TEST_FLEET}::test_nodes_count_once_by_the_strictest_of_their_steps",
    ),
    Mutant(
        "FL4",
        "the best kubelet decides about the class of all",
        _CROSSOVER,
        "names=next((level for level in _WORST if",
        "names=next((level for level in reversed(_WORST) if",
        f"{_TEST_CROSSOVER}::test_one_kubelet_decides_about_the_class_of_all",
    ),
    Mutant(
        "FL4",
        "a gate is as good as none needed",
        _CROSSOVER,
        'if any(one.names != "yes" for one in takes)',
        'if any(one.names == "no" for one in takes)',
        f"{_TEST_CROSSOVER}::test_one_kubelet_decides_about_the_class_of_all",
    ),
    Mutant(
        "FL4",
        "1.35 is taken for fixed",
        "gateway/cli/advice.yaml",
        "    affected:\n      - {since: 1.32.0, until: 1.36.0}\n",
        "    affected:\n      - {since: 1.32.0, until: 1.35.0}\n",
        f"{_TEST_CROSSOVER}::test_who_may_run_a_pod_without_its_gpu_is_never_said_to_know_names",
    ),
    Mutant(
        "FL4",
        "nobody says that a kubelet before 1.36 ends pods that have DRA's GPUs by name",
        "gateway/cli/advice.yaml",
        "    at: 1.36.0\n    ways: [down]\n",
        "    at: 1.36.0\n    ways: [up]\n",
        "tests/unit/test_plan.py::test_what_a_hop_crosses",
    ),
    Mutant(
        "FL4",
        "the oldest kubelets cross first",
        _CROSSOVER,
        "newest = sorted(by_version.items(), key=lambda item: item[0].release, reverse=True)",
        "newest = sorted(by_version.items(), key=lambda item: item[0].release)",
        f"{_TEST_CROSSOVER}::test_nodes_cross_in_an_order",
    ),
    Mutant(
        "FL4",
        "a kubelet without claims has a turn",
        _CROSSOVER,
        'if facts.takes(version).claims != "no"]',
        "if facts.takes(version)]",
        f"{_TEST_CROSSOVER}::test_nodes_cross_in_an_order",
    ),
    Mutant(
        "SB1",
        "tokens stay",
        _BUNDLE,
        '_JWT.sub("REDACTED", text)',
        "text",
        f"{_TEST_BUNDLE}::test_names_and_secrets_are_not_given_away",
    ),
    Mutant(
        "SB1",
        "what containers were told stays",
        _BUNDLE,
        'entry.pop("AllocResp", None)',
        'entry.get("AllocResp")',
        f"{_TEST_BUNDLE}::test_names_and_secrets_are_not_given_away",
    ),
    Mutant(
        "SB1",
        "any variable is told",
        _BUNDLE,
        "        if _OURS.match(name)\n",
        "        if name\n",
        f"{_TEST_BUNDLE}::test_variables_that_look_like_secrets_are_left_out",
    ),
    Mutant(
        "SB1",
        "names within names are replaced",
        _BUNDLE,
        r'rf"(?<![\w.-]){re.escape(name)}(?![\w.-])"',
        "re.escape(name)",
        f"{_TEST_BUNDLE}::test_a_name_is_replaced_where_it_stands_alone",
    ),
    Mutant(
        "SB2",
        "who doesn't answer is ready",
        _STATUS,
        "lacking |= {Path(path).stem: why for path, why in found.silent.items()}",
        "lacking |= {}",
        f"{_TEST_BUNDLE}::test_a_gateway_that_does_not_answer_is_not_ready",
    ),
    Mutant(
        "SB2",
        "none is not ready",
        _STATUS,
        "sys.exit(2 if not found.read else",
        "sys.exit(1 if not found.read else",
        f"{_TEST_BUNDLE}::test_where_none_answers_it_is_neither",
    ),
)
