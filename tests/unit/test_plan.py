"""``gateway plan``: rows that are sound, that agree with the laboratory, and that become the right advice."""

from __future__ import annotations

import json
import re
from itertools import pairwise, permutations

import msgspec
import pytest
from click.testing import CliRunner, Result

from gateway.cli.advice import Hop, Interval, Kubelet, Plan, PlanError, kubelet, load, plan, read, route
from gateway.cli.main import gateway
from gateway_lab.kubelets.behaviour import SecondRegister, behaviour
from gateway_lab.trials.scenarios import SCENARIOS, dialect, forgets

BUILT = [f"1.{minor}" for minor in (8, 9, 10, 11, 12, 13, 16, 18, 20, 24, 25, 26, 28, 32, 36, 37)]
"""The versions whose genuine device managers the matrix runs."""
ALL = [f"1.{minor}" for minor in range(8, 38)]
FACTS = load()
BUGS = {bug.id: bug for bug in FACTS.bugs}
CROSSINGS = {row.id: row for row in FACTS.crossings}
CROSSOVERS = {row.id: row for row in FACTS.crossovers}
ROWS = [*FACTS.apis, *FACTS.checkpoints, *FACTS.crossings, *FACTS.bugs, *FACTS.crossovers, *FACTS.claims]


def made(start: str, goal: str, *, direct: bool = False) -> Plan:
    return plan(FACTS, kubelet(start, FACTS), kubelet(goal, FACTS), direct=direct)


def the_hop(start: str, goal: str) -> Hop:
    [hop] = made(start, goal, direct=True).hops
    return hop


def call(*arguments: str, columns: int = 80) -> Result:
    return CliRunner().invoke(gateway, ["plan", *arguments], env={"COLUMNS": str(columns)})


def said(*arguments: str) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def release(text: str) -> tuple[int, int]:
    return kubelet(text, FACTS).release


# The data.


@pytest.mark.parametrize("row", ROWS, ids=lambda row: getattr(row, "id", None) or getattr(row, "name", row.source))
def test_a_row_says_how_it_is_known(row: msgspec.Struct) -> None:
    source, evidence = row.source, row.evidence  # type: ignore[attr-defined]
    assert re.search(r"#\d{5,6}|1\.\d+\.\d+|on a whole node", source), "no issue, no version"
    if evidence == "run":
        assert re.search(r"\brun\b", source, re.IGNORECASE), "which versions was it run on?"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: getattr(row, "id", None) or getattr(row, "name", row.source))
def test_what_checks_a_row_is_a_scenario(row: msgspec.Struct) -> None:
    assert set(row.checked_by) <= {*SCENARIOS, "hops"}  # type: ignore[attr-defined]


def test_ids_are_unique_and_rows_are_in_order() -> None:
    ids = [*(one.id for one in FACTS.checkpoints), *CROSSINGS, *BUGS, *CROSSOVERS]
    assert len(ids) == len(set(ids)) == len(ROWS) - len(FACTS.apis) - len(FACTS.claims)
    for orders in (
        [release(one.since) for one in FACTS.apis],
        [release(one.since) for one in FACTS.checkpoints],
        [release(one.at or FACTS.first) for one in FACTS.crossings],
        [release(one.affected[0].since) for one in FACTS.bugs],
        [release(one.affected[0].since) for one in FACTS.crossovers],
        [release(one.since) for one in FACTS.claims],
    ):
        assert orders == sorted(orders)


@pytest.mark.parametrize(
    "intervals",
    [one.affected for one in FACTS.bugs]
    + [one.readers for one in FACTS.checkpoints]
    + [one.affected for one in FACTS.crossovers],
    ids=[*BUGS, *(one.id for one in FACTS.checkpoints), *CROSSOVERS],
)
def test_intervals_are_in_order_and_apart(intervals: tuple[Interval, ...]) -> None:
    assert intervals
    for interval in intervals:
        assert interval.until is None or release(interval.since) < release(interval.until)
    for one, next_one in pairwise(intervals):
        assert one.until is not None
        assert release(one.until) < release(next_one.since), "these are one interval, or in the wrong order"


def test_every_version_has_an_api_and_reads_its_own_checkpoint() -> None:
    for version in ALL:
        one = kubelet(version, FACTS)
        assert FACTS.api(one)
        assert FACTS.keeps_checkpoint(one, one)


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        (b"first: 1.8", ["advice.yaml"]),
        (b"first: [", ["advice.yaml"]),
        (b"first: '1.8'", ["regex", "$.first"]),
        (b"{first: 1.8.0, last: 1.37.0, apis: [], checkpoints: [], crossings: [], bugs: [], more: 1}", ["more"]),
        (b"{first: 1.8.0, last: 1.37.0, apis: [{name: a, since: 1.8.0, evidence: run}]}", ["source"]),
        (b"{first: 1.8.0, last: 1.37.0, apis: [{name: a, since: 1.8.0, evidence: felt, source: s}]}", ["felt"]),
    ],
)
def test_data_of_another_form_is_refused(yaml: bytes, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        read(yaml)
    assert [word for word in words if word not in str(caught.value)] == []


# Agreement with what the laboratory knows, which the matrix checks on genuine kubelets.


@pytest.mark.parametrize(("old", "new"), [*permutations(BUILT, 2)], ids=lambda version: version)
def test_checkpoints_are_kept_and_lost_as_the_matrix_sees_it(old: str, new: str) -> None:
    assert the_hop(old, new).checkpoint_kept is (forgets(old, new) is None)


@pytest.mark.parametrize("version", ALL)
def test_apis_are_the_laboratorys(version: str) -> None:
    assert FACTS.api(kubelet(version, FACTS)) == dialect(version)


@pytest.mark.parametrize(
    ("row", "kinds"),
    [
        ("second-plugin-phantoms", {SecondRegister.UNION}),
        ("second-plugin-race", {SecondRegister.CLOSE_OLD}),
        ("second-plugin-overwrites", {SecondRegister.OVERWRITE}),
        ("second-plugin-disconnects", {SecondRegister.DISCONNECT_NEW}),
    ],
)
def test_second_registers_are_the_emulated_kubelets(row: str, kinds: set[SecondRegister]) -> None:
    for version in ALL:
        assert BUGS[row].hits(kubelet(version, FACTS)) is (behaviour(version).second_register in kinds), version


def test_cdi_comes_where_the_emulated_kubelets_have_it() -> None:
    heard = [version for version in ALL if behaviour(version).cdi and behaviour(version).cdi_gate is not False]
    assert CROSSINGS["cdi-names-heard"].at == CROSSINGS["cdi-names-dropped"].at == f"{heard[0]}.0"


# Versions.


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1.28", Kubelet(28)),
        ("v1.28.15", Kubelet(28, 15)),
        ("1.8.0", Kubelet(8, 0)),
        ("v1.28.15-vendor.3", Kubelet(28, 15)),
        ("v1.37.1+build", Kubelet(37, 1)),
    ],
)
def test_versions_are_read(text: str, found: Kubelet) -> None:
    assert kubelet(text, FACTS) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1.7", ["1.8 to 1.37", "device plugins came with 1.8", "'1.7'"]),
        ("1.38", ["1.8 to 1.37", "a newer gateway", "'1.38'"]),
        ("newest", ["such as 1.28 or 1.28.15", "'newest'"]),
        ("1.28.x", ["such as 1.28"]),
        ("2.0", ["such as 1.28"]),
        ("", ["such as 1.28"]),
        ("1.28\n", ["such as 1.28"]),
    ],
)
def test_a_version_that_is_none_is_told_what_is_known(text: str, words: list[str]) -> None:
    result = call("--from", text, "--to", "1.30")
    output = re.sub(r"\s*│?\n│?\s*", " ", result.output)
    assert result.exit_code == 2
    assert [word for word in words if word not in output] == []


@pytest.mark.parametrize(
    ("start", "goal", "path"),
    [
        ("1.24", "1.27", "1.24 1.25 1.26 1.27"),
        ("1.27.3", "1.29.1", "1.27.3 1.28 1.29.1"),
        ("1.11", "1.8", "1.11 1.10 1.9 1.8"),
        ("1.27.3", "1.27.6", "1.27.3 1.27.6"),
        ("1.27", "1.28", "1.27 1.28"),
    ],
)
def test_a_route_goes_one_minor_version_at_a_time(start: str, goal: str, path: str) -> None:
    assert [str(one) for one in route(kubelet(start, FACTS), kubelet(goal, FACTS))] == path.split()


def test_the_same_version_twice_is_no_plan() -> None:
    result = call("--from", "1.27", "--to", "v1.27")
    assert result.exit_code == 2
    assert "is the version that runs already" in result.output


# Advice.


@pytest.mark.parametrize(
    ("start", "goal", "drain", "at_least", "stop"),
    [
        ("1.8", "1.9", "required", "1.9.8", None),  # the checkpoint is lost
        ("1.9", "1.10", "not needed", "1.10.3", None),
        ("1.10", "1.11", "required", None, None),
        ("1.11", "1.12", "not needed", None, None),
        ("1.15", "1.16", "advised", None, None),  # containers restart
        ("1.19", "1.20", "not needed", "1.20.15", None),
        ("1.19", "1.20.5", "required", "1.20.15", None),  # too early
        ("1.19", "1.20.15", "not needed", "1.20.15", None),
        ("1.16", "1.21.7", "required", "1.21.8", "1.20"),
        ("1.19", "1.22.4", "required", "1.22.5", "1.21"),
        ("1.20", "1.21", "not needed", None, None),
        ("1.23", "1.24", "advised", None, None),  # Docker
        ("1.24", "1.25", "not needed", "1.25.14", None),
        ("1.25", "1.26.6", "required", "1.26.9", None),  # kills running pods
        ("1.27.1", "1.27.3", "required", "1.27.6", None),
        ("1.27.3", "1.27.6", "not needed", "1.27.6", None),
        ("1.27.3", "1.28", "not needed", None, None),
        ("1.30", "1.31", "advised", None, None),
        ("1.33", "1.34", "not needed", "1.34.7", None),
        ("1.34", "1.35", "not needed", "1.35.4", None),
        ("1.18", "1.32", "required", None, "1.30"),
        ("1.18", "1.28", "advised", None, None),
        ("1.20", "1.18", "required", None, None),
        ("1.29", "1.28", "advised", None, None),  # CDI
        ("1.36", "1.35", "advised", "1.35.4", None),  # pods that have DRA's GPUs by name
        ("1.37", "1.36", "not needed", None, None),
        ("1.35", "1.34", "not needed", "1.34.7", None),
        ("1.11", "1.10", "required", "1.10.3", None),
        ("1.37", "1.18", "required", None, None),
    ],
)
def test_a_hop(start: str, goal: str, drain: str, at_least: str | None, stop: str | None) -> None:
    hop = the_hop(start, goal)
    assert (hop.drain, hop.at_least, hop.stop_at) == (drain, at_least, stop)
    assert bool(hop.drain_because) is (drain != "not needed")


@pytest.mark.parametrize(
    ("start", "goal", "new", "gone", "avoided"),
    [
        (
            "1.24",
            "1.25",
            {
                "panic-at-disconnect",
                "second-plugin-disconnects",
                "init-containers-killed",
                "reboot-rejects",
                "restarted-containers-killed",
            },
            {"unchecked-recovery", "second-plugin-overwrites"},
            {"unchecked-recovery": "1.25.0 to 1.25.9", "killed-on-restart": "1.25.10 to 1.25.13"},
        ),
        (
            "1.24",
            "1.25.9",
            {"panic-at-disconnect", "second-plugin-disconnects"},
            {"second-plugin-overwrites"},
            {},
        ),
        ("1.27.3", "1.27.6", {"restarted-containers-killed"}, {"killed-on-restart"}, {}),
        ("1.19", "1.20", set(), set(), {"checkpoint-list": "1.20.0 to 1.20.14"}),
        ("1.20", "1.21", set(), set(), {}),
        ("1.28", "1.29", set(), {"panic-at-disconnect"}, {}),
        ("1.34", "1.35", set(), set(), {"restarted-containers-killed": "1.35.0 to 1.35.3"}),
        ("1.35", "1.36", set(), {"numa-stall"}, {}),
        ("1.36", "1.37", set(), {"second-plugin-disconnects"}, {}),
        ("1.37", "1.36", {"second-plugin-disconnects"}, set(), {}),
        ("1.9", "1.8", {"second-plugin-phantoms"}, {"unchecked-recovery", "second-plugin-race"}, {}),
    ],
)
def test_the_bugs_of_a_hop(start: str, goal: str, new: set[str], gone: set[str], avoided: dict[str, str]) -> None:
    hop = the_hop(start, goal)
    assert (set(hop.new_bugs), set(hop.gone), dict(hop.avoided)) == (new, gone, avoided)


@pytest.mark.parametrize(
    ("bug", "version", "releases"),
    [
        ("killed-on-restart", "1.27.3", ("1.27.6", "1.28.0")),
        ("killed-on-restart", "1.27.1", ()),
        ("killed-on-restart", "1.27", ()),
        ("restarted-containers-killed", "1.34.6", ("1.34.7",)),  # 1.35.0 has it again
        ("restarted-containers-killed", "1.30", ("1.34.7",)),
        ("restarted-containers-killed", "1.26", ("1.34.7",)),  # 1.27.0 is without it, 1.27.6 has it again
        ("gone-after-register", "1.9.3", ("1.9.8",)),  # 1.10.0 has it again
        ("second-plugin-disconnects", "1.32.13", ("1.37.0",)),
        ("reboot-rejects", "1.26", ()),  # 1.27.0 is without it, 1.27.2 has it again
        ("reboot-rejects", "1.37.1", ()),
    ],
)
def test_where_a_bug_is_fixed(bug: str, version: str, releases: tuple[str, ...]) -> None:
    assert BUGS[bug].fixed(kubelet(version, FACTS)) == releases


@pytest.mark.parametrize(
    ("start", "goal", "crossed"),
    [
        ("1.27", "1.28", {"gate-device-plugins-gone"}),
        ("1.28", "1.27", {"gate-cdi-unknown"}),
        ("1.28", "1.29", {"cdi-names-heard"}),
        ("1.29", "1.28", {"cdi-names-dropped"}),
        ("1.30", "1.31", {"containers-restart-1.31"}),
        ("1.31", "1.30", {"containers-restart-1.31"}),
        ("1.33", "1.34", {"gate-cdi-gone"}),
        ("1.23", "1.24", {"dockershim-gone"}),
        ("1.24", "1.23", set()),
        ("1.36", "1.35", {"by-name-ended"}),
        ("1.37", "1.32", {"by-name-ended"}),
        ("1.37", "1.36", set()),
        ("1.35", "1.36", set()),
        ("1.10", "1.9", {"gate-of-1.8-and-1.9"}),
        ("1.24", "1.33", {"gate-device-plugins-gone", "cdi-names-heard", "containers-restart-1.31"}),
    ],
)
def test_what_a_hop_crosses(start: str, goal: str, crossed: set[str]) -> None:
    assert set(the_hop(start, goal).crossings) == {"static-pods-again", *crossed}


def test_a_new_patch_release_crosses_nothing() -> None:
    assert the_hop("1.28.3", "1.28.15").crossings == ()


@pytest.mark.parametrize(("start", "goal"), [*permutations(["1.8", "1.10", "1.19", "1.24", "1.33", "1.37"], 2)])
def test_every_plan_holds_together(start: str, goal: str) -> None:
    found = made(start, goal)
    assert (found.hops[0].old, found.hops[-1].new) == (start, goal)
    assert all(one.new == other.old and one.api_after == other.api_before for one, other in pairwise(found.hops))
    alive = set(found.now)
    for hop in found.hops:
        assert alive == {*hop.still, *hop.gone}
        alive = {*hop.still, *hop.new_bugs}
    assert alive == set(found.then)
    named = {name for hop in found.hops for name in (*hop.crossings, *hop.new_bugs, *hop.avoided)}
    assert named <= set(found.rows)


# The command.


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        (
            ["--from", "1.24", "--to", "1.33"],
            [
                "Kubelet 1.24 to 1.33 on a GPU node: 9 hops, 1 with a drain advised.",
                "Control plane first",
                "1.24 -> 1.25 (at least 1.25.14): no drain",
                "Avoid 1.25.10 to 1.25.13: A kubelet restart kills running GPU pods (read, #118559).",
                "1.30 -> 1.31: drain advised Because all containers restart.",
                "In the end, on 1.33",
            ],
        ),
        (
            ["--from", "1.27.3", "--to", "1.28"],
            ["Now, on 1.27.3", "killed-on-restart: ", "Fixed in 1.27.6 and 1.28.0.", "the GPUs need no drain"],
        ),
        (
            ["--from", "1.26", "--to", "1.27.3"],
            ["1.26 -> 1.27.3 (TOO EARLY: at least 1.27.6): DRAIN", "Because a kubelet restart kills running GPU pods."],
        ),
        (
            ["--from", "1.8", "--to", "1.10"],
            [
                "API: 0.1 becomes v1alpha2. The gateway changes over by itself.",
                "Checkpoint: LOST (run).",
                "Because kubelet 1.9 can't read the checkpoint of 1.8.",
                "API: v1alpha2 becomes v1beta1.",
            ],
        ),
        (
            ["--from", "1.18", "--to", "1.32", "--direct"],
            ["If you stop at 1.30 on the way, it is kept.", "A jump over 14 minor versions", "without --direct"],
        ),
        (
            ["--from", "1.19", "--to", "1.20"],
            ["Avoid 1.20.0 to 1.20.14: The checkpoint of 1.19 can't be read (run, #102880)."],
        ),
        (["--from", "1.29", "--to", "1.28"], ["Because CDI names are dropped in silence from here on."]),
        (["--from", "1.36", "--to", "1.32"], ["Kubelets first, then the control plane", "4 hops"]),
        (["--from", "1.26", "--to", "1.27.6"], ["1.26 -> 1.27.6: no drain"]),
        (["--from", "1.25.12", "--to", "1.27.3"], ["Again: killed-on-restart."]),
        (
            ["--from", "1.37", "--to", "1.35"],
            ["by-name-ended: ", "gateway move --to plugin", "Because running pods that asked by name"],
        ),
        (["--from", "1.36", "--to", "1.37"], ["1 hop,", "No longer: second-plugin-disconnects."]),
    ],
)
def test_a_person_is_told(arguments: list[str], sentences: list[str]) -> None:
    text = said(*arguments)
    assert [sentence for sentence in sentences if sentence not in text] == []


def test_each_row_is_explained_once() -> None:
    text = call("--from", "1.24", "--to", "1.37").output
    assert text.count("static-pods-again: ") == 1
    assert text.count("second-plugin-disconnects: ") == 1


@pytest.mark.parametrize("columns", [20, 40, 72, 80, 100, 200])
def test_lines_fit_the_terminal(columns: int) -> None:
    lines = call("--from", "1.8", "--to", "1.37", columns=columns).output.splitlines()
    assert max(map(len, lines)) <= min(max(columns, 60), 100)
    assert all(line == line.rstrip() for line in lines)


def test_json_holds_the_plan_and_its_sources() -> None:
    found = json.loads(call("--from", "1.24", "--to", "1.26", "--json").output)
    assert [hop["new"] for hop in found["hops"]] == ["1.25", "1.26"]
    assert found["hops"][0]["at_least"] == "1.25.14"
    assert found["rows"]["killed-on-restart"]["source"].startswith("#118559")
    assert found["rows"]["second-plugin-disconnects"]["affected"] == [{"since": "1.25.0", "until": "1.37.0"}]
    assert found["rows"]["second-plugin-disconnects"]["checked_by"]
    assert found["now"]["unchecked-recovery"] == ["1.25.10"]


def test_bugs_and_crossings_end_as_sentences() -> None:
    for row in (*FACTS.bugs, *FACTS.crossings):
        assert row.suffers.endswith("."), row.id
        assert row.way_out.endswith("."), row.id
        assert not row.title.endswith("."), row.id


@pytest.mark.parametrize(("goal", "skewed"), [("1.31", False), ("1.32", True)], ids=["allowed", "one too many"])
def test_a_jump_beyond_the_skew_policy_is_said(goal: str, skewed: bool) -> None:
    """A kubelet may be three minor versions older than its API server, since 1.28."""
    assert any("version skew policy" in sentence for sentence in made("1.28", goal, direct=True).first) is skewed
