"""The forms of a report: what each must say of a run, and that text of a process can't break any of them."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree as ET

import msgspec
import pytest

from gateway_lab.matrix import record, report
from gateway_lab.matrix.record import About, Cell, Cluster, Hop, KubeletFact, NodeFact, PodFact, Promise, Report

EVIL = 'lost </pre><script>alert("x")</script> | `a`\n\x00\x1b[31m & more'

FACTS = (
    KubeletFact(version="1.9", kind="genuine", api="v1alpha2", kubernetes="v1.9.11", runtime="go1.26.6"),
    KubeletFact(
        version="1.28", kind="emulated", api="v1beta1", kubernetes="v1.28", runtime="python3.11", why_emulated="no Go"
    ),
)
ABOUT = About(
    started="2026-01-02T03:04:05+00:00",
    seconds=12.5,
    gateway="0.1.0",
    python="3.11.7",
    grpcio="1.80.0",
    protobuf="6.30.0",
    go="go1.26.6",
    host="Linux 6.1 x86_64, 2 processors",
    kubelets=FACTS,
)


def _cell(version: str, status: record.Status, **more: Any) -> Cell:
    kind = next(one.kind for one in FACTS if one.version == version)
    return Cell(scenario="register", version=version, kind=kind, status=status, **more)


def _report(*cells: Cell, hops: tuple[Hop, ...] = (), cluster: Cluster | None = None) -> Report:
    promise = Promise(name="register", promise="a kubelet finds every device")
    return Report(about=ABOUT, scenarios=(promise,), cells=cells, hops=hops, cluster=cluster)


UP = Hop(
    old="1.9",
    new="1.28",
    kind="emulated",
    status="passed",
    checkpoint_kept=True,
    api_before="v1alpha2",
    api_after="v1beta1",
    pods=(PodFact(pod="a", before=("G1", "G2"), after=("G2", "G1")),),
    gap_ms=6.4,
    registers={"nvidia.com/gpu": 1},
)
DOWN = Hop(old="1.28", new="1.9", kind="emulated", status="passed", forgets="1.9 can't read it", gap_ms=4.0)
GREEN = _report(
    _cell("1.9", "not applicable", reason="it has no such thing"),
    _cell("1.28", "passed", registers={"nvidia.com/gpu": 1}, witness="wire", transcript=("call 1, Register: OK",)),
    hops=(UP, DOWN),
    cluster=Cluster(nodes=(NodeFact(version="1.9", kind="genuine", status="passed", api="v1alpha2"),)),
)
RED = _report(_cell("1.9", "failed", reason=EVIL, transcript=(EVIL,)), _cell("1.28", "passed"))


@pytest.mark.parametrize(
    ("statuses", "passed"),
    [
        (["passed"], True),
        (["passed", "not applicable"], True),
        (["passed", "failed"], False),
        (["not applicable"], False),
        ([], False),
    ],
)
def test_a_run_passes_when_something_passed_and_nothing_failed(statuses: list[record.Status], *, passed: bool) -> None:
    assert _report(*(_cell("1.9", status) for status in statuses)).passed is passed


@pytest.mark.parametrize(
    "red",
    [
        _report(_cell("1.9", "passed"), hops=(msgspec.structs.replace(UP, status="failed", reason="why"),)),
        _report(
            _cell("1.9", "passed"), cluster=Cluster(nodes=(NodeFact(version="1.9", kind="genuine", status="failed"),))
        ),
    ],
    ids=["hop", "node"],
)
def test_one_failure_anywhere_fails_the_run(red: Report) -> None:
    assert not red.passed
    assert report.summary(red).splitlines()[-1].startswith("FAILED: 1 of 2 runs")
    assert "1 of 2 runs failed" in report.html(red)


@pytest.mark.parametrize("one", [GREEN, RED], ids=["green", "red"])
def test_the_records_come_back_from_json(one: Report) -> None:
    assert record.load(record.dump(one)) == one


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cells": [{"scenario": "register"}]}, "version"),
        ({"surprise": 1}, "surprise"),
        ({"hops": [{"old": "1.9", "new": "1.10", "kind": "real", "status": "passed"}]}, "real"),
    ],
)
def test_what_the_schema_does_not_know_is_no_report(change: dict[str, Any], words: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=words):
        record.load(json.dumps({**json.loads(record.dump(GREEN)), **change}).encode())


def test_the_summary_says_which_kubelets_were_genuine_and_ends_with_the_verdict() -> None:
    lines = report.summary(GREEN).splitlines()
    assert lines[0] == "kubelets: 1 genuine (1.9); 1 emulated (1.28)"
    assert "2 hops: 2 passed (on 1 the kubelet forgets its pods: drained first)" in lines
    assert lines[-1] == "PASSED: 4 runs in 12 s"
    assert report.summary(RED).splitlines()[-1] == "FAILED: 1 of 2 runs in 12 s"
    assert any(
        line.startswith("  register on kubelet 1.9 (genuine): lost") for line in report.summary(RED).splitlines()
    )


def test_a_run_in_which_nothing_ran_is_no_success() -> None:
    idle = _report(_cell("1.9", "not applicable", reason="--api rules it out"))
    assert report.summary(idle).splitlines()[-1] == "FAILED: nothing could be run (the report says why) in 12 s"


def test_the_summary_names_what_failed_and_nothing_else() -> None:
    evil = _cell("1.9", "failed", reason="first\nsecond")
    red = _report(evil, _cell("1.28", "passed"), hops=(UP, UP, DOWN))
    lines = report.summary(red).splitlines()
    assert [line for line in lines if line.startswith("  ")] == ["  register on kubelet 1.9 (genuine): first"]
    assert "second" not in lines
    assert lines[-1] == "FAILED: 1 of 5 runs in 12 s"
    assert "3 hops: 3 passed (on 1 the kubelet forgets its pods: drained first)" in lines


def test_what_passed_at_the_second_try_only_is_said_in_every_form() -> None:
    twice = _report(
        _cell("1.9", "passed", first="not right within 5 s\nand more"),
        _cell("1.28", "failed", first="one way", reason="another"),
        hops=(msgspec.structs.replace(UP, first="no kubelet"),),
    )
    assert [line for line in report.summary(twice).splitlines() if "second try" in line] == [
        "passed at the second try: register on kubelet 1.9 (genuine); at first: not right within 5 s",
        "passed at the second try: hop 1.9 -> 1.28 (emulated); at first: no kubelet",
    ]
    assert "| register | a kubelet finds every device | 1.9² | *1.28*² |" in report.markdown(twice)
    assert "- hop 1.9 -> 1.28 (emulated); at first: no kubelet" in report.markdown(twice)
    assert "✓²</a>" in report.html(twice)
    assert "6²</a>" in report.html(twice)
    assert "<dt>at the first try</dt><dd>not right within 5 s\nand more</dd>" in report.html(twice)
    assert report.junit(twice).count(b"<system-out>this is the second try; at the first: ") == 3


def test_a_checkpoint_that_nobody_looked_at_is_not_lost() -> None:
    unseen = msgspec.structs.replace(UP, checkpoint_kept=None)
    assert "| records lost |" not in report.markdown(_report(_cell("1.9", "passed"), hops=(unseen,)))
    assert "| records lost |" in report.markdown(
        _report(_cell("1.9", "passed"), hops=(msgspec.structs.replace(UP, checkpoint_kept=False),))
    )


@pytest.mark.parametrize(
    "words",
    [
        "| scenario | promise | passed | not applicable |",
        "| register | a kubelet finds every device | *1.28* | 1.9 |",
        "register on 1.9: it has no such thing",
        "kubelet *1.28* is emulated: no Go",
        "| 1.9 → *1.28* | ✅ |  | the same (1 pod) | 6 ms | 1 |",
        "| drained first | 4 ms |",
        "| 1.9 | v1alpha2 |  | ✅ |",
        "| Go | go1.26.6 |",
        "| host | Linux 6.1 x86_64, 2 processors |",
    ],
)
def test_the_markdown_says(words: str) -> None:
    assert words in report.markdown(GREEN)


def test_a_run_is_put_into_a_page_in_place_of_the_last_one() -> None:
    page = f"# Title\n{report.BEGIN}\nold\n{report.END}\nthe rest\n"
    once = report.place(page, GREEN)
    assert once.startswith("# Title\n")
    assert once.endswith("\nthe rest\n")
    assert "old" not in once
    assert report.place(once, GREEN) == once


@pytest.mark.parametrize("page", ["", report.BEGIN, f"{report.END}\n{report.BEGIN}"])
def test_a_page_without_a_place_is_refused(page: str) -> None:
    with pytest.raises(report.NoPlaceError, match="the last full run"):
        report.place(page, GREEN)


def test_junit_has_a_suite_for_each_kubelet_and_counts_right() -> None:
    suites = {suite.attrib["name"]: suite for suite in ET.fromstring(report.junit(GREEN))}  # noqa: S314  our own
    assert {
        name: tuple(suite.attrib[key] for key in ("tests", "failures", "skipped")) for name, suite in suites.items()
    } == {
        "kubelet 1.9 (genuine)": ("1", "0", "1"),
        "kubelet 1.28 (emulated)": ("1", "0", "0"),
        "hops": ("2", "0", "0"),
        "mixed cluster": ("1", "0", "0"),
    }
    skipped = suites["kubelet 1.9 (genuine)"].find("testcase/skipped")
    assert skipped is not None
    assert skipped.attrib["message"] == "not applicable: it has no such thing"


def test_junit_holds_what_no_xml_can() -> None:
    failure = ET.fromstring(report.junit(RED)).find("testsuite/testcase/failure")  # noqa: S314  our own
    assert failure is not None
    assert '<script>alert("x")</script>' in str(failure.text)
    assert "\N{REPLACEMENT CHARACTER}[31m" in str(failure.text)


class _Page(HTMLParser):
    """Tags, targets and links of a page."""

    VOID = frozenset({"meta", "br", "link", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.links: list[tuple[str, str]] = []
        self.outside: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        if "id" in found:
            assert found["id"] not in self.ids, found["id"]
            self.ids.add(found["id"])
        if "href" in found:
            self.links.append((found["href"], found.get("class", "")))
        self.outside += [found[name] for name in ("src", "srcset", "data", "action") if name in found]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("one", [GREEN, RED], ids=["green", "red"])
def test_the_page_is_whole_and_needs_nothing_from_outside(one: Report) -> None:
    text = report.html(one)
    page = _Page(text)
    assert page.open == []
    assert page.outside == []
    assert [link for link, _ in page.links if link.removeprefix("#") not in page.ids or not link.startswith("#")] == []
    assert not re.search(r"@import|url\(|https?:", text)
    assert page.tags.count("script") == 1


@pytest.mark.parametrize(
    ("one", "target", "classes"),
    [
        (GREEN, "register-1.9", "na"),
        (GREEN, "register-1.28", "ok emu"),
        (GREEN, "hop-1.9-1.28", "ok emu"),
        (GREEN, "hop-1.28-1.9", "forgets ok emu"),
        (GREEN, "node-1.9", "ok"),
        (RED, "register-1.9", "bad"),
    ],
)
def test_a_cell_of_the_page_shows_its_status_and_kind(one: Report, target: str, classes: str) -> None:
    assert (f"#{target}", classes) in _Page(report.html(one)).links


def test_the_page_has_the_reason_and_the_transcript() -> None:
    text = report.html(GREEN)
    assert 'title="register on kubelet 1.9 (genuine): not applicable. it has no such thing"' in text
    assert "call 1, Register: OK" in text
    assert "lost &lt;/pre&gt;&lt;script&gt;" in report.html(RED)


def test_every_form_is_written() -> None:
    found = report.files(GREEN)
    assert sorted(found) == ["index.html", "junit.xml", "report.json", "report.md"]
    assert all(found.values())
