"""``plugin-report.yaml`` and its badge: what is told of an examined plugin is what was found, level by level."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from gateway_lab.conformance.report import CORE, PluginReport, badge, from_yaml, level, report, to_yaml
from gateway_lab.conformance.started import Unexamined
from gateway_lab.trials.conformance import RULES, Finding, Findings, Verdict

ROOT = Path(__file__).parents[2]
KEPT = sorted(ROOT.glob("conformance/reports/*/*.yaml"))


def finding(rule: str, verdict: Verdict, kubelet: str = "1.28", seen: str = "") -> Finding:
    return Finding(rule=rule, kubelet=kubelet, kind="genuine", verdict=verdict, seen=seen)


def made(*findings: Finding, **more: Unexamined) -> PluginReport:
    unexamined = {f"1.{minor.removeprefix('on_')}": why for minor, why in more.items()}
    found = Findings(
        command="./plugin {socket_dir}", cap_seconds=10, resources={}, findings=findings, unexamined=unexamined
    )
    return report(found, plugin="plugin", version="v1.2.3", date="2026-11-22")


def told(*findings: Finding) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(to_yaml(made(*findings)))
    return read


def test_the_core_rules_are_rules() -> None:
    assert {rule.id for rule in RULES} > CORE


LEVELS = {
    "only what was looked at": ([finding("registers", "kept")], {"core": "kept"}),
    "a level is broken by one of its own rules": (
        [finding("registers", "kept"), finding("stream-cut", "broken", seen="never")],
        {"core": "kept", "extended": "broken"},
    ),
    "broken on one kubelet is broken": (
        [finding("registers", "kept"), finding("registers", "broken", "1.37", "0 devices")],
        {"core": "broken"},
    ),
    "what can't be looked at breaks nothing": (
        [finding("registers", "kept"), finding("allocate", "not applicable")],
        {"core": "kept"},
    ),
    "and a level of that is not kept": ([finding("allocate", "not applicable")], {"core": "not applicable"}),
}


@pytest.mark.parametrize(("findings", "levels"), LEVELS.values(), ids=LEVELS)
def test_levels(findings: list[Finding], levels: dict[str, str]) -> None:
    assert told(*findings)["levels"] == levels


def test_a_broken_rule_says_where_and_what_was_seen() -> None:
    found = told(
        finding("stream-cut", "broken", "1.28", "no Register in 10 s\nits log"), finding("stream-cut", "kept", "1.37")
    )
    assert found["rules"] == {
        "stream-cut": {
            "level": level("stream-cut"),
            "result": "broken",
            "kubelet": "genuine",
            "broken_on": {"1.28": "no Register in 10 s"},
        }
    }
    assert found["kubelets"] == {"1.28": "genuine", "1.37": "genuine"}
    assert (found["plugin"], found["version"], found["command"]) == ("plugin", "v1.2.3", "./plugin {socket_dir}")


def test_a_report_is_read_as_it_was_written() -> None:
    one = made(finding("registers", "kept"), finding("allocate", "broken", seen="lost"))
    assert from_yaml(to_yaml(one)) == one
    with pytest.raises(msgspec.ValidationError, match="stranger"):
        from_yaml(to_yaml(one) + b"stranger: 1\n")


@pytest.mark.parametrize(
    ("one", "message", "colour"),
    [
        pytest.param(made(finding("registers", "kept")), "core kept", "brightgreen", id="kept"),
        pytest.param(
            made(finding("registers", "kept"), finding("stream-cut", "broken")),
            "core kept, extended 1 broken",
            "yellow",
            id="only the extended level is broken",
        ),
        pytest.param(
            made(finding("registers", "broken"), finding("allocate", "broken"), finding("stream-cut", "kept")),
            "core 2 broken, extended kept",
            "red",
            id="the core is broken",
        ),
        pytest.param(
            made(finding("registers", "not applicable"), on_28=Unexamined("ended by itself", "status 1")),
            "not examined",
            "lightgrey",
            id="not examined",
        ),
    ],
)
def test_the_badge(one: PluginReport, message: str, colour: str) -> None:
    shown = json.loads(badge(one))
    assert (shown["schemaVersion"], shown["message"], shown["color"]) == (1, message, colour)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_reports_that_are_kept(path: Path) -> None:
    one = from_yaml(path.read_bytes())
    assert (one.plugin, one.version) == (path.parent.name, path.stem)
    assert {*one.rules} == {rule.id for rule in RULES}, "a rule came or went: make compared"
    assert {rule: found.level for rule, found in one.rules.items()} == {rule: level(rule) for rule in one.rules}
    assert {*one.kubelets.values()} == {"genuine"}
    assert set(one.unexamined) <= set(one.kubelets)
    assert "/" not in one.command.split()[0], "a report names no folder of the machine"
