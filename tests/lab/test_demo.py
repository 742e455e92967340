"""The demo's verdict must notice each broken promise, and its story must be told to the end whatever watches it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace
from rich.console import Console

from gateway.cli.demo import demo
from gateway_lab.demo import story, view
from gateway_lab.demo.run import SLOW, Scene, counting, describe, document, logged, read
from gateway_lab.demo.story import RESOURCE, Hop, Look, Run, Verdict, judge
from gateway_lab.kubelets.kubelet import Gap
from gateway_lab.trials.invariants import Holding

GPUS = ("a", "b", "c", "d")
STORY = (Hop("1.8"), Run("p", 2), Hop("1.28"))


def held(pod: str, *device_ids: str) -> Holding:
    return Holding(pod, "main", RESOURCE, device_ids)


def look(step: str, *holding: Holding, free: tuple[str, ...] = (), **more: object) -> Look:
    plain = Look(
        step, "1.28", "emulated", api="v1beta1", expected=4, capacity=4, allocatable=4, held=holding, free=free
    )
    return replace(plain, **more)


BEFORE = look("kubelet 1.8", free=GPUS)
RUNNING = look("pod p", held("p-1", "a", "b"), free=("c", "d"), told=(held("p-1", "a", "b"),))


def after(*holding: Holding, **more: object) -> list[Look]:
    return [BEFORE, RUNNING, look("kubelet 1.28", *holding, **more)]  # type: ignore[arg-type]


VERDICTS = {
    "all is as it was": (after(held("p-1", "a", "b"), free=("c", "d")), []),
    "a drained pod may get others": (after(held("p-2", "c", "d"), free=("a", "b"), drained=("p-1",)), []),
    "an unhealthy GPU isn't lost": (
        after(held("p-1", "a", "b"), free=("d",), ill=("c",), expected=3, allocatable=3),
        [],
    ),
    "a pod's GPU was exchanged": (
        after(held("p-1", "a", "c"), free=("b", "d")),
        ["pod p-1 lost b: it holds a, c now", "pod p-1 got c unasked: it holds a, c now"],
    ),
    "a pod was forgotten without a drain": (
        after(free=GPUS),
        ["pod p-1 lost a: it holds nothing now", "pod p-1 lost b: it holds nothing now"],
    ),
    "an ID changed on upgrade": (
        after(held("p-1", "a", "b"), free=("c", "x")),
        [
            "the kubelet offers x, which is no GPU of this node: a device ID changed",
            "d is lost: no pod holds it, and the kubelet doesn't offer it",
        ],
    ),
    "a GPU that is held is offered again": (
        after(held("p-1", "a", "b"), free=("b", "c")),
        [
            "b is given twice: a pod holds it already",
            "d is lost: no pod holds it, and the kubelet doesn't offer it",
        ],
    ),
    "a GPU in two pods": (
        after(held("p-1", "a", "b"), held("q-1", "b", "c"), free=("d",)),
        ["b is given to both p-1 and q-1"],
    ),
    "a container is told to use another pod's GPU": (
        after(held("p-1", "a", "b"), held("q-1", "c"), free=("d",), told=(held("p-1", "a", "b"), held("q-1", "a"))),
        [
            "pod q-1 is told to use a, but the kubelet's records give it c",
            "a is given twice: told to both p-1 and q-1",
        ],
    ),
    "a restarted container is told nothing": (
        after(held("p-1", "a", "b"), free=("c", "d"), told=(held("p-1"),)),
        ["pod p-1 is told to use nothing, but the kubelet's records give it a, b"],
    ),
    "an unhealthy GPU is offered": (
        after(held("p-1", "a", "b"), free=("c", "d"), ill=("d",)),
        ["d is offered, although it is unhealthy"],
    ),
    "the kubelet miscounts": (
        after(held("p-1", "a", "b"), free=("c", "d"), allocatable=3),
        ["expected 4 GPUs allocatable, the kubelet's records show 3"],
    ),
    "trouble speaks for itself": (
        after(held("p-1", "a", "b"), allocatable=0, trouble=("the GPUs are not back",)),
        ["the GPUs are not back"],
    ),
}


@pytest.mark.parametrize(("looks", "problems"), VERDICTS.values(), ids=VERDICTS)
def test_the_verdict_names_what_is_not_as_promised(looks: list[Look], problems: list[str]) -> None:
    verdict = judge(STORY, looks, GPUS)
    assert verdict.problems == tuple(f"kubelet 1.28: {problem}" for problem in problems)
    assert verdict.passed is not bool(problems)


def test_the_verdict_counts_the_pods_that_came_after_a_drain_too() -> None:
    looks = after(held("p-2", "c", "d"), free=("a", "b"), drained=("p-1",))
    assert "each of 2 pods" in judge(STORY, looks, GPUS).sentence


def test_what_went_wrong_once_is_said_once() -> None:
    looks = [BEFORE, replace(RUNNING, free=("c",)), replace(after(held("p-1", "a", "b"), free=("c",))[2])]
    assert judge(STORY, looks, GPUS).problems == (
        "pod p: d is lost: no pod holds it, and the kubelet doesn't offer it",
    )


def test_a_story_that_breaks_off_has_failed() -> None:
    verdict = judge(STORY, [BEFORE, RUNNING], GPUS)
    assert (verdict.passed, verdict.problems) == (False, ("the story broke off after 2 of 3 steps",))


def test_strays_fail_a_story_that_went_well() -> None:
    verdict = judge(STORY, after(held("p-1", "a", "b"), free=("c", "d")), GPUS, ["thread: ValueError()"])
    assert (verdict.passed, verdict.problems) == (False, ("thread: ValueError()",))


def test_the_story_goes_up_to_the_newest_kubelet_and_a_step_back() -> None:
    hops = [step.version for step in story.STORY if isinstance(step, Hop)]
    assert hops == ["1.8", "1.9", "1.10", "1.20", "1.28", "1.37", "1.28"]
    assert [step.version for step in story.STORY if isinstance(step, Hop) and step.drain] == ["1.9", "1.20"]


WROTE = "a library wrote to standard error"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ({"event": "serving", "level": "info"}, []),
        ({"event": "refused", "level": "warning", "reason": "r"}, []),
        (
            {"event": "not offered", "level": "error", "details": "too large"},
            ["the gateway logged an error: not offered too large"],
        ),
        ({"event": "Exception ignored in: f"}, ["the gateway wrote: Exception ignored in: f"]),
        ({"event": "Executing <Task pending name='t'> took 0.113 seconds"}, []),
        ({"event": WROTE, "level": "error", "text": "Executing <Task pending name='t'> took 0.113 seconds"}, []),
        (
            {"event": WROTE, "level": "error", "text": "Exception ignored in: f"},
            [f"the gateway logged an error: {WROTE} Exception ignored in: f"],
        ),
    ],
)
def test_what_the_daemon_must_not_log(line: dict[str, str], found: list[str]) -> None:
    assert logged([json.dumps(line)]) == found


def test_exceptions_that_nobody_can_raise_are_counted() -> None:
    class Bad:
        def __del__(self) -> None:
            raise ValueError("lost")

    def fail() -> None:
        raise KeyError("thread")

    hooks = sys.unraisablehook, threading.excepthook
    with counting() as found:
        Bad()
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
    assert [one.partition(":")[0] for one in found] == ["unraisable", "thread"]
    assert (sys.unraisablehook, threading.excepthook) == hooks


def test_the_demo_s_profile_is_one() -> None:
    gpus = read(describe({3: "fell off the bus"}))
    assert [(gpu.index, gpu.trouble.reason) for gpu in gpus if gpu.trouble] == [(3, "fell off the bus")]
    assert [gpu.uuid for gpu in gpus] == [gpu.uuid for gpu in read(describe({}))]


SCENE = Scene(
    gpus=read(describe({7: "fell off the bus"})),
    looks=(replace(BEFORE, hop=True, gap=Gap(4.2, 0.1)),),
    upcoming=("1.37",),
    kubelet="1.28",
    kind="emulated",
    api="v1beta1",
    capacity=8,
    allocatable=7,
    holders={read(describe({}))[0].uuid: "training-1"},
)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_person_sees_it_in_a_terminal_of_any_width(width: int) -> None:
    file = io.StringIO()
    console = Console(file=file, width=width, height=50, force_terminal=True, no_color=True, _environ={})
    with view.live(console) as show:
        show(SCENE, "something happened")
        show(replace(SCENE, verdict=Verdict(passed=False, sentence="FAILED: 1", problems=("one GPU",) * 20)), "")
    shown = file.getvalue()
    for expected in (
        "1.28",
        "v1beta1",
        "fell off",
        "training-1",
        "4 ms",
        "something happened",
        "FAILED: 1",
        "and 12 more",
    ):
        assert expected in shown
    assert "\x1b[3" not in shown  # no_color, which NO_COLOR sets


def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    picture, pace = view.choose()
    with picture as show:
        show(SCENE, "pod training-1 gets GPU 0")
        show(replace(SCENE, verdict=Verdict(passed=True, sentence="PASSED: all")), "")
    assert pace == 0
    assert capsys.readouterr().out.splitlines() == [
        "  pod training-1 gets GPU 0",
        "",
        "kubelet            API       GPUs are back after",
        "1.28   emulated    v1beta1   4.2 ms",
        "",
        "PASSED: all",
    ]


def test_the_document_holds_steps_and_verdict() -> None:
    found = json.loads(document([RUNNING], Verdict(passed=True, sentence="PASSED")))
    assert found["verdict"] == {"passed": True, "sentence": "PASSED", "problems": []}
    assert found["steps"][0]["held"] == [
        {"pod": "p-1", "container": "main", "resource": RESOURCE, "device_ids": ["a", "b"]}
    ]


def test_help_has_examples() -> None:
    result = CliRunner().invoke(demo, ["--help"])
    assert result.exit_code == 0
    assert "gateway demo --json" in result.output


async def test_the_whole_demo_keeps_every_promise() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-X", "dev", "-W", "error", "-m", "gateway", "demo", "--json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    found = json.loads(output)
    said = [line for line in errors.decode().splitlines() if not SLOW.fullmatch(line)]
    assert (found["verdict"]["problems"], said, process.returncode) == ([], [], 0)
    assert [step["api"] for step in found["steps"] if step["hop"]] == ["0.1", "v1alpha2", *["v1beta1"] * 5]


@pytest.fixture
def heeded() -> Iterator[None]:
    """Signals that this process was started to ignore (under nohup, in the background) are ignored by its children too."""
    ignored = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_whoever_had_enough_leaves_nothing_behind(heeded: None, end: signal.Signals) -> None:
    # Short: a socket's path may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="dpg-") as folder:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway", "demo", "--pace", "60"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "TMPDIR": folder},
        )
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                if line.startswith(b"kubelet 1.8"):
                    break
            assert len(processes_that_name(folder)) == 2  # a gateway and a kubelet
            process.send_signal(end)
            _, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert (process.returncode, b"stopped" in errors, entries(folder)) == (130, True, [])
        assert processes_that_name(folder) == []


def entries(folder: str) -> list[str]:
    return [path.name for path in Path(folder).iterdir()]


def processes_that_name(folder: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if folder.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found
