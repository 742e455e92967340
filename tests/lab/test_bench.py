"""What the benchmark does with its samples, what it writes of them, and whether its caller speaks HTTP/2. Nothing is timed here."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import pytest

from gateway_lab.bench.against import UnfitError, command_for
from gateway_lab.bench.caller import Caller, CallError
from gateway_lab.bench.calls import in_turns
from gateway_lab.bench.footprint import Footprint, family, footprint
from gateway_lab.bench.handovers import Looks
from gateway_lab.bench.measure import Bar, Report, counted, document, others, percentile, spread
from gateway_lab.bench.node import file_system
from gateway_lab.bench.page import Row, curves, horizontal, write
from gateway_lab.bench.presence import by_package
from gateway_lab.gatewayproc import GatewayProcess
from gateway_lab.kubelets.kubelet import Gap, Kubelet


@pytest.mark.parametrize(
    ("percent", "value"),
    [
        pytest.param(0, 1, id="0: the least"),
        pytest.param(50, 50, id="50: the middle"),
        pytest.param(99, 99, id="99"),
        pytest.param(100, 100, id="100: the most"),
    ],
)
def test_percentiles_are_samples(percent: float, value: float) -> None:
    assert percentile(range(100, 0, -1), percent) == value


def test_no_samples_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        percentile([], 50)


def test_the_spread_of_samples() -> None:
    assert spread([1, 2, 3, 10]) == {"min": 1, "median": 2.5, "p99": 10, "max": 10, "n": 4}


@pytest.mark.parametrize(
    ("gap", "late", "counts"),
    [
        pytest.param(5, 0, True, id="short"),
        pytest.param(5, 50, True, id="short, whatever the timer did"),
        pytest.param(61, 20, True, id="long, and the timer was in time"),
        pytest.param(61, 60, True, id="long, and the timer was almost as late"),
        pytest.param(61, 61, False, id="long, and the timer was as late: the machine's fault"),
    ],
)
def test_which_gaps_count(gap: float, late: float, *, counts: bool) -> None:
    assert counted([Gap(gap, late)], 60) == ([gap] if counts else [])


@pytest.mark.parametrize(
    ("looks", "gap_ms"),
    [
        pytest.param([(1, 8), (2, 8), (3, 8)], 0, id="never gone"),
        pytest.param([(1, 8), (2, 0), (3, 8)], 2000, id="from the last look that had all to the first again"),
        pytest.param([(1, 8), (2, 7), (3, 0), (4, 3), (5, 8)], 4000, id="some are not all"),
        pytest.param([(1, 8), (2, 0), (4, 8), (5, 0), (6, 8)], 3000, id="the longest of several"),
        pytest.param([(1, 8), (2, 0)], 0, id="a gap that isn't over is none yet"),
    ],
)
def test_the_gap_of_a_handover(looks: Sequence[tuple[float, int]], gap_ms: float) -> None:
    seen = Looks(0.0)
    for at, count in looks:
        seen.saw(at, at, full=count == 8)
    assert seen.gap_ms == pytest.approx(gap_ms)


@pytest.mark.parametrize(
    ("bar", "passed"),
    [
        pytest.param(Bar("b", 7.9, 8, "ms"), True, id="below"),
        pytest.param(Bar("b", 8, 8, "ms"), False, id="at the bar is not below it"),
        pytest.param(Bar("b", math.inf, 8, "ms"), False, id="never"),
        pytest.param(Bar("b", math.nan, 8, "ms"), False, id="what wasn't measured wasn't kept"),
        pytest.param(Bar("b", 1, 1, "", exact=True), True, id="exactly"),
        pytest.param(Bar("b", 0, 1, "", exact=True), False, id="not exactly"),
    ],
)
def test_when_a_bar_is_kept(bar: Bar, *, passed: bool) -> None:
    assert bar.passed is passed
    assert Report([bar]).passed is passed


def test_a_report_without_bars_proves_nothing() -> None:
    assert not Report().passed


def test_the_document_is_strict_json() -> None:
    report = Report([Bar("b", math.nan, 8, "ms")], {"never": {"max": math.inf}})
    report.keep("gap", "1.37", [1.00049, math.inf])
    found = json.loads(document(report), parse_constant=pytest.fail)
    assert (found["passed"], found["bars"][0]["measured"], found["bars"][0]["passed"]) == (False, None, False)
    assert found["figures"] == {"never": {"max": None}}
    assert found["samples"] == {"gap": {"1.37": [1.0, None]}}


def test_more_registers_than_one_are_told() -> None:
    assert others({1: 298, 2: 2}) == "2 times 2"
    assert others({1: 300, 2: 0}) == ""


# /proc.


def test_the_footprint_of_a_process() -> None:
    before = footprint(os.getpid())
    now = footprint(os.getpid())
    assert 0 < now.pss <= now.rss
    assert now.since(before).cpu >= 0
    assert now.since(before).switches >= 0


def test_footprints_are_compared() -> None:
    mine, other = Footprint(30, 40, 6, 130), Footprint(20, 35, 5, 150)
    assert mine.over(other) == Footprint(10, 5, 1, -20)
    assert mine.plus(other) == Footprint(50, 75, 11, 280)
    assert mine.since(other) == Footprint(30, 40, 1, -20)


def test_what_a_plugin_starts_belongs_to_it() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(); input()'])"
    with subprocess.Popen(
        ["python3", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert family(process.pid).rss > footprint(process.pid).rss
        process.communicate(b"\n")


def test_the_file_system_of_a_folder() -> None:
    assert file_system(Path("/proc")) == "proc"
    assert file_system(Path("/proc/self")) == "proc"


def test_imports_are_summed_up_by_package() -> None:
    lines = [
        "import time: self [us] | cumulative | imported package",
        "import time:       500 |       1500 |   grpc.aio",
        "import time:      1000 |       1000 | grpc",
        "import time:        20 |         20 |       adapters.levels",
        "import time:        30 |         50 | gateway",
        '{"event": "serving"}',
    ]
    assert by_package(lines) == {"grpc": 1500, "the gateway's own": 50}


# The page.


def test_a_page_with_its_plots(tmp_path: Path) -> None:
    report = Report(
        [
            Bar("restart gap, genuine 1.37: median", 4.8, 6, "ms"),
            Bar("restart gap, genuine 1.32: median", math.nan, 6, "ms"),
            Bar("idle, metrics on: CPU more", 13, 12, "ms"),
        ],
        {"machine": {"cores": 2, "load average": [0.1, 0.2, 0.3]}, "against x": {"Allocate, 8 devices": {"p50": 3}}},
    )
    report.keep("restart gap (ms)", "1.37", [4.2, 4.8, 5.9, math.inf])
    write(report, tmp_path / "bench.md")
    page = (tmp_path / "bench.md").read_text()
    assert "- cores: 2\n- load average: 0.1, 0.2, 0.3\n" in page
    assert "|  | median < 6 |\n|---|---|\n| genuine 1.37 | 4.8 ms |\n| genuine 1.32 | **not measured** |\n" in page
    assert "|  | measured < 12 |\n|---|---|\n| metrics on: CPU more | **13 ms** |\n" in page
    assert "Allocate, 8 devices | 3 |" in page
    assert "## Handover" not in page
    plots = {plot.name for plot in (tmp_path / "bench").iterdir()}
    assert plots == {"restart-gap.svg", "idle.svg"}
    assert all(f"(bench/{plot})" in page for plot in plots)


@pytest.mark.parametrize(
    "svg",
    [
        pytest.param(horizontal([Row("a <b> & c", 3.0, 0, 5.0), Row("nothing", 0.0)], "ms"), id="bars"),
        pytest.param(horizontal([Row("nothing at all", 0.0)], "ms"), id="bars of nothing"),
        pytest.param(curves({"<1.37>": [3.0, 1.0, math.inf], "1.20": [2.0]}, "ms", (6,)), id="curves"),
        pytest.param(curves({"0": [0.0, 0.0]}, "ms"), id="curves of nothing"),
    ],
)
def test_plots_are_xml_with_numbers_that_are_some(svg: str) -> None:
    ET.fromstring(svg)  # noqa: S314  made here
    assert "nan" not in svg
    assert "inf" not in svg


def test_nothing_to_draw_is_no_plot() -> None:
    assert (horizontal([], "ms"), curves({"never": [math.inf]}, "ms")) == ("", "")


# Another plugin.


def test_where_another_plugin_is_told_to_register(tmp_path: Path) -> None:
    assert command_for("'my plugin' --dir={socket_dir}", tmp_path) == ["my plugin", f"--dir={tmp_path}"]


@pytest.mark.parametrize(
    "text",
    [pytest.param("plugin --dir /tmp", id="no place for it"), pytest.param("plugin '{socket_dir}", id="a quote")],
)
def test_what_is_no_command_line_for_a_plugin(text: str, tmp_path: Path) -> None:
    with pytest.raises(UnfitError, match="expected"):
        command_for(text, tmp_path)


# The caller, against a real server.

ECHO = "/test.Service/Echo"


@pytest.fixture
async def socket(tmp_path: Path) -> AsyncIterator[Path]:
    """A server that answers with the length of what it was sent, and refuses what begins with ``no``."""

    async def echo(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        if request.startswith(b"no"):
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such device")
        return str(len(request)).encode()

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Echo": handler}),))
    server.add_insecure_port(f"unix:{tmp_path / 's'}")
    await server.start()
    yield tmp_path / "s"
    await server.stop(None)


@pytest.mark.parametrize(
    ("requests", "times", "at_once"),
    [
        pytest.param([b"a"], 3, 1, id="one after another"),
        pytest.param([b"a", b"bb"], 40, 8, id="eight at once"),
        pytest.param([b""], 2, 1, id="an empty message"),
        pytest.param([b"x" * 300_000], 3, 2, id="messages larger than every window"),
        pytest.param([b"x"], 5000, 8, id="more answers than the connection's first window"),
    ],
)
async def test_calls_are_answered(socket: Path, requests: Sequence[bytes], times: int, at_once: int) -> None:
    def call() -> list[int]:
        with Caller(socket, ECHO, requests) as caller:
            return caller.call(times, at_once)

    taken = await asyncio.to_thread(call)
    assert len(taken) == times
    assert min(taken) > 0


@pytest.mark.parametrize(
    ("method", "request_"),
    [pytest.param(ECHO, b"no", id="refused"), pytest.param("/test.Service/Other", b"a", id="not there")],
)
async def test_a_call_that_is_refused_is_no_answer(socket: Path, method: str, request_: bytes) -> None:
    with Caller(socket, method, [request_]) as caller, pytest.raises(CallError, match="refused"):
        await asyncio.to_thread(caller.call, 1)


async def test_callers_take_turns(socket: Path) -> None:
    with Caller(socket, ECHO, [b"a"]) as one, Caller(socket, ECHO, [b"b"]) as other:
        taken = await asyncio.to_thread(in_turns, {"one": one, "other": other}, 100)
    assert {name: len(samples) for name, samples in taken.items()} == {"one": 100, "other": 100}


# The yardstick.


async def test_the_trivial_plugin_registers_with_each_kubelet(folder: Path) -> None:
    (folder / "dp").mkdir()
    command = [sys.executable, "-m", "gateway_lab.trivial", str(folder / "dp"), "--again"]
    async with await GatewayProcess.launch(command) as trivial:
        await trivial.wait_for("watching")
        for _ in range(2):
            async with await Kubelet.launch("1.28", folder / "dp") as kubelet:
                await kubelet.start()
                await kubelet.wait("nvidia.com/gpu", 8)


def test_the_trivial_plugin_imports_nothing_of_the_gateway() -> None:
    """Or what the gateway costs beyond it would look smaller than it is."""
    code = "import sys, gateway_lab.trivial; print(*(name for name in sys.modules if name.startswith('gateway')))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["gateway_lab", "gateway_lab.trivial"]
