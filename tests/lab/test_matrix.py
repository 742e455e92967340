"""What the matrix runs and how it judges; and a real run with one failure in it, told in every form."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Coroutine
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.cli import compat, lab_options, main
from gateway_lab.gatewayproc import GatewayError
from gateway_lab.kubelets import build
from gateway_lab.matrix import run as matrix
from gateway_lab.matrix import witness
from gateway_lab.matrix.report import counted
from gateway_lab.matrix.run import Matrix
from gateway_lab.trials import hops, scenarios
from gateway_lab.trials.scenarios import SCENARIOS, Node, Scenario, must

ALL = ("1.8", "1.9", "1.10", "1.11", "1.12", "1.13", "1.16", "1.18", "1.20", "1.24", "1.25", "1.26", "1.28", "1.32", "1.36", "1.37")  # fmt: skip


@pytest.mark.parametrize(
    ("api", "version", "scenario", "words"),
    [
        ("auto", "1.8", "register", ""),
        ("v1beta1", "1.28", "register", ""),
        ("v1beta1", "1.9", "register", "--api v1beta1 doesn't speak v1alpha2"),
        ("v1alpha", "1.9", "register", ""),
        ("v1alpha", "1.10", "kubelet-crash", "--api v1alpha doesn't speak v1beta1"),
        ("v1beta1", "1.9", "wrong-version", ""),
    ],
)
def test_what_a_forced_api_rules_out(api: str, version: str, scenario: str, words: str) -> None:
    found = Matrix((version,), {}, api=api).why_not(SCENARIOS[scenario], version)
    assert (words in found, bool(found)) == (True, bool(words))


@pytest.mark.parametrize(
    ("versions", "paths"),
    [
        ((), []),
        (("1.28",), []),
        (("1.28", "1.32"), [("1.28", "1.32"), ("1.32", "1.28")]),
        (("1.9", "1.20", "1.24"), [("1.9", "1.20", "1.24"), ("1.24", "1.20", "1.9")]),
        (
            ("1.24", "1.26", "1.28", "1.32"),
            [("1.24", "1.26", "1.28", "1.32"), ("1.32", "1.28", "1.26", "1.24"), ("1.24", "1.28")],
        ),
    ],
)
def test_walks(versions: tuple[str, ...], paths: list[tuple[str, ...]]) -> None:
    assert hops.walks(versions) == paths


def test_the_walks_of_all_kubelets_make_every_hop_once() -> None:
    made = [hop for path in hops.walks(ALL) for hop in pairwise(path)]
    assert len(made) == len(set(made))
    neighbours = [*pairwise(ALL)]
    long = {("1.20", "1.24"), ("1.24", "1.28"), ("1.28", "1.32"), ("1.32", "1.37")}
    assert set(made) == {*neighbours, *((new, old) for old, new in neighbours), *long}


@pytest.mark.parametrize(
    ("span", "minor", "within"),
    [
        ("1.26 to 1.28", 25, False),
        ("1.26 to 1.28", 26, True),
        ("1.26 to 1.28", 28, True),
        ("1.26 to 1.28", 29, False),
        ("1.37 and later", 36, False),
        ("1.37 and later", 40, True),
        ("1.9", 9, True),
        ("1.9", 10, False),
        ("", 9, True),
    ],
)
def test_whether_a_kubelet_is_one_that_it_is_taken_for(span: str, minor: int, *, within: bool) -> None:
    assert hops.covers(span, minor) is within


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        (["short"], ("short",)),
        (["x" * 5000], ("x" * witness.COLUMNS + "… (5000 characters)",)),
    ],
)
def test_a_transcript_is_bounded_in_columns(lines: list[str], kept: tuple[str, ...]) -> None:
    assert witness.bounded(lines) == kept


def test_a_transcript_is_bounded_in_lines() -> None:
    found = witness.bounded(map(str, range(10_000)))
    assert len(found) == witness.LINES + 1
    assert (found[0], found[-1]) == ("0", "9999")
    assert f"… {10_000 - witness.LINES} lines left out" in found


# Runs.


async def _breaks(node: Node, version: str) -> None:
    await node.start_kubelet(version)
    gateway = await node.start_gateway()
    await node.served()
    await gateway.wait_for("registered")
    must([f"{node.root} is not as promised"])


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all scenarios only one that is kept, and one that isn't."""
    one = Scenario("broken", "what is promised is kept", _breaks)
    monkeypatch.setattr(scenarios, "SCENARIOS", {"register": SCENARIOS["register"], "broken": one})


def _call(*arguments: str) -> Result:
    return _run("compat", *arguments)


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(main.gateway, arguments)


@pytest.mark.usefixtures("broken")
def test_a_failing_cell_is_red_and_ends_the_run_with_1(folder: Path) -> None:
    out = folder / "out"
    result = _call("--kubelets", "1.9,1.37", "--genuine", "no", "--no-hops", "--out", str(out))
    assert result.exit_code == 1, result.output
    assert "FAILED: 2 of 6 runs" in result.output
    found = json.loads((out / "report.json").read_text())
    statuses = {(one["scenario"], one["version"]): one["status"] for one in found["cells"]}
    assert statuses == {
        ("register", "1.9"): "passed",
        ("register", "1.37"): "passed",
        ("broken", "1.9"): "failed",
        ("broken", "1.37"): "failed",
    }
    cell = found["cells"][-1]
    assert cell["reason"] == "<node> is not as promised"
    assert cell["registers"] == {"nvidia.com/gpu": 1}
    assert any("/v1beta1.Registration/Register: OK" in line for line in cell["transcript"])
    assert any("registered" in line for line in cell["transcript"])
    page = (out / "index.html").read_text()
    assert 'href="#broken-1.37"' in page
    assert "2 of 6 runs failed" in page
    assert 'failures="1"' in (out / "junit.xml").read_text()


@pytest.mark.parametrize(
    ("first", "second", "status", "tries"),
    [
        pytest.param("not right in time", "", "passed", 2, id="the second time it passes"),
        pytest.param("not right in time", "nor then", "failed", 2, id="it fails twice"),
        pytest.param("pod a lost GPU-1: it holds nothing now", "", "failed", 1, id="a pod's devices are no accident"),
        pytest.param("the gateway ended by itself, with exit status 1", "", "failed", 1, id="nor is a crash"),
    ],
)
async def test_what_fails_runs_once_more(first: str, second: str, status: str, tries: int) -> None:
    reasons, said = [first, second], list[str]()

    async def promise(_node: Node, _version: str) -> None:
        if reason := reasons.pop(0):
            must([reason])

    job = Matrix(("1.37",), {}, {"1.37": "no Go"}, (Scenario("late", "it is in time", promise),), with_hops=False)
    [cell] = await matrix._cells(job, said.append)
    again = tries == 2
    assert (cell.status, cell.first) == (status, first if again else "")
    assert len(reasons) == 2 - tries
    assert (
        any(line.startswith(f"late on kubelet 1.37 (emulated): {status} at the second try") for line in said) is again
    )


async def test_many_that_fail_are_no_accident() -> None:
    tries = []

    async def promise(_node: Node, version: str) -> None:
        tries.append(version)
        must(["not right in time"])

    rows = tuple(Scenario(f"late-{number}", "", promise) for number in range(matrix.ACCIDENTS + 1))
    cells = await matrix._cells(Matrix(("1.37",), {}, {}, rows), lambda _: None)
    assert (len(tries), {cell.status for cell in cells}) == (len(rows), {"failed"})


async def test_a_hop_that_fails_runs_once_more_on_another_node(monkeypatch: pytest.MonkeyPatch) -> None:
    served, nodes = Node.served, []

    async def late(node: Node, *arguments: object) -> None:
        if node not in nodes:
            nodes.append(node)
        if len(nodes) == 1:
            must(["not right in time"])
        await served(node, *arguments)

    monkeypatch.setattr(Node, "served", late)
    found = await matrix._hops(Matrix(("1.36", "1.37"), {}), lambda _: None)
    assert [(hop.status, hop.first) for hop in found] == [("passed", "not right in time"), ("passed", "")]


@pytest.mark.usefixtures("broken")
def test_a_passing_run_ends_with_0_and_can_be_put_on_a_page(folder: Path) -> None:
    page = folder / "page.md"
    page.write_text("# Ours\n<!-- the last full run: begin -->\n<!-- the last full run: end -->\n")
    options = ("--kubelets", "v1.37.1,1.36", "--genuine", "no", "--only", "register", "--only", "hops")
    result = _call(*options, "--out", str(folder / "out"), "--page", str(page))
    assert result.exit_code == 0, result.output
    assert "2 emulated (1.36, 1.37)" in result.output
    assert "- 2 hops: 2 passed\n" in page.read_text()


@pytest.mark.usefixtures("broken")
def test_a_profile_is_a_scenario_of_its_own(folder: Path) -> None:
    profile = folder / "gpus.yaml"
    profile.write_text("resources:\n  example.com/gpu:\n    gpus: 3\n    unhealthy: {1: it fell off the bus}\n")
    options = ("--kubelets", "1.8,1.37", "--genuine", "no", "--only", matrix.PROFILE, "--simulate", str(profile))
    result = _call(*options, "--out", str(folder / "out"))
    assert result.exit_code == 0, result.output
    assert "your-profile: 2 passed" in result.output


@pytest.mark.usefixtures("broken")
def test_a_configuration_is_a_scenario_of_its_own(folder: Path) -> None:
    config = folder / "config.yaml"
    config.write_text(
        "version: v1\nsharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 3}]}}\n"
    )
    options = ("--kubelets", "1.37", "--genuine", "no", "--only", matrix.PROFILE, "--config-file", str(config))
    result = _call(*options, "--out", str(folder / "out"))
    assert result.exit_code == 0, result.output
    assert matrix.own_profile("default", config).gpus == {"nvidia.com/gpu.shared": 24}
    assert "your-profile: 1 passed" in result.output


@pytest.mark.usefixtures("broken")
def test_a_configuration_that_is_wrong_is_said(folder: Path) -> None:
    config = folder / "config.yaml"
    config.write_text("version: v2\n")
    result = _call("--kubelets", "1.37", "--genuine", "no", "--config-file", str(config))
    assert result.exit_code == 2
    assert "--config-file" in result.output


def _run_nothing(work: Coroutine[object, object, object]) -> None:
    work.close()
    raise AssertionError("it was to be refused, and it runs")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compat", "--kubelets", "1.7"], ["1.8 on", "'1.7'"]),
        (["compat", "--kubelets", "new"], ["such as 1.28"]),
        (["compat", "--kubelets", "1.28,1.99", "--genuine", "no"], ["kubelet 1.99 is unknown. Known: 1.8 to 1.37"]),
        (["conformance", "true {socket_dir}", "--kubelets", "1.99"], ["kubelet 1.99 is unknown"]),
        (
            ["compat", "--kubelets", "1.28,1.21", "--genuine", "built"],
            ["kubelet 1.21 is not built. Built: 1.28."],
        ),
        (["compat", "--only", "dance"], ["register", "hops", "cluster", "unknown value dance"]),
        (["compat", "--simulate", "no-such"], ["--simulate", "no-such"]),
        (["conformance", "true"], ["COMMAND", "{socket_dir}"]),
        (["conformance", "true {socket_dir}", "--only", "dance"], ["--only", "registers", "unknown value dance"]),
    ],
)
def test_a_wrong_option_is_told_what_was_expected(
    arguments: list[str], words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "built", lambda version: Path("kubelet") if version == "1.28" else None)
    monkeypatch.setattr(asyncio, "run", _run_nothing)  # It would take minutes to tell that nothing was refused.
    name, *options = arguments
    result = _run(name, "--genuine", "no", *options, "--out", str(folder / "out"))
    text = " ".join(result.output.split())
    assert result.exit_code == 2
    assert [word for word in words if word not in text] == []


async def _breaks_first(_node: Node) -> None:
    raise GatewayError("it is no gateway")


@pytest.mark.parametrize(
    ("module", "name", "lie", "reason"),
    [
        pytest.param(
            matrix, "dialect", lambda _version: "0.1", "expected the API 0.1, it is v1beta1", id="another API"
        ),
        pytest.param(Node, "start_gateway", _breaks_first, "it is no gateway", id="what came first is told"),
    ],
)
async def test_a_node_of_the_cluster_is_judged(
    module: object, name: str, lie: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, lie)
    found = await matrix._cluster(Matrix(("1.37",), {}, {"1.37": "no Go"}, ()), lambda _line: None)
    assert [(one.version, one.status, one.reason) for one in found.nodes] == [("1.37", "failed", reason)]


async def test_the_cluster_has_no_node_whose_api_is_not_spoken() -> None:
    job = Matrix(("1.8", "1.9"), {}, {"1.8": "no Go", "1.9": "no Go"}, (), api="v1beta1")
    assert (await matrix._cluster(job, lambda _line: None)).nodes == ()


@pytest.mark.parametrize("command", [["compat"], ["conformance", "true {socket_dir}"]], ids=["the gateway", "a plugin"])
def test_a_report_that_cannot_be_kept_is_told_before_the_run(
    folder: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab_options, "prepare_kubelets", None)
    (folder / "file").touch()
    result = _run(*command, "--kubelets", "1.37", "--genuine", "no", "--out", str(folder / "file" / "out"))
    assert (result.exit_code, "so nothing was run" in result.output) == (1, True), result.output
    assert "Name another folder with --out" in result.output


@pytest.mark.parametrize("content", ["# Ours\n", "<!-- the last full run: end --><!-- the last full run: begin -->"])
def test_a_page_without_a_place_is_told_before_the_run(
    folder: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab_options, "prepare_kubelets", None)
    (page := folder / "page.md").write_text(content)
    result = _call("--kubelets", "1.37", "--genuine", "no", "--out", str(folder / "out"), "--page", str(page))
    assert (result.exit_code, "nothing was run: expected a line" in result.output) == (1, True), result.output
    assert page.read_text() == content


@pytest.mark.parametrize(("count", "words"), [(0, "0 runs"), (1, "1 run"), (2, "2 runs")])
def test_one_run_is_no_runs(count: int, words: str) -> None:
    assert counted(count, "run") == words


def test_what_a_plugin_breaks_is_named_and_ends_the_run_with_1(folder: Path) -> None:
    command = f"{sys.executable} -m tests.compat.plugins.allocates_anything {{socket_dir}}"
    options = ("--kubelets", "1.37", "--genuine", "no", "--only", "unknown-device", "--out", str(folder / "out"))
    result = _run("conformance", command, *options)
    assert result.exit_code == 1, result.output
    assert "broken: unknown-device" in result.output
    assert json.loads((folder / "out" / "plugin.json").read_text())["broken"] == ["unknown-device"]
    assert "unknown-device:\n    level: core\n    result: broken" in (folder / "out" / "plugin-report.yaml").read_text()


def test_the_daemons_options_are_the_daemons() -> None:
    own = {option.name for option in compat.compat.params}
    assert set(compat.PASSED_ON) < own
