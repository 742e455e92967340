"""``plugin-report.yaml``: what is told of an examined plugin is what was found, level by level."""

from __future__ import annotations

import pytest
import yaml

from gateway.lab.conformance.report import CORE, level, to_yaml
from gateway.lab.trials.conformance import RULES, Finding, Findings, Verdict


def finding(rule: str, verdict: Verdict, kubelet: str = "1.28", seen: str = "") -> Finding:
    return Finding(rule=rule, kubelet=kubelet, kind="genuine", verdict=verdict, seen=seen)


def told(*findings: Finding) -> dict[str, object]:
    report = Findings(command="./plugin {socket_dir}", cap_seconds=10, resources={}, findings=findings)
    read: dict[str, object] = yaml.safe_load(to_yaml(report))
    return read


def test_the_core_rules_are_rules() -> None:
    assert {rule.id for rule in RULES} > CORE


@pytest.mark.parametrize(
    ("findings", "levels"),
    [
        pytest.param([finding("registers", "kept")], {"core": "kept"}, id="only what was looked at"),
        pytest.param(
            [finding("registers", "kept"), finding("stream-cut", "broken", seen="never")],
            {"core": "kept", "extended": "broken"},
            id="a level is broken by one of its own rules",
        ),
        pytest.param(
            [finding("registers", "kept"), finding("registers", "broken", "1.37", "0 devices")],
            {"core": "broken"},
            id="broken on one kubelet is broken",
        ),
        pytest.param(
            [finding("allocate", "not applicable")], {"core": "kept"}, id="what can't be looked at breaks nothing"
        ),
    ],
)
def test_levels(findings: list[Finding], levels: dict[str, str]) -> None:
    assert told(*findings)["levels"] == levels


def test_a_broken_rule_says_where_and_what_was_seen() -> None:
    report = told(finding("stream-cut", "broken", "1.28", "no Register in 10 s"), finding("stream-cut", "kept", "1.37"))
    assert report["rules"] == {
        "stream-cut": {"level": level("stream-cut"), "result": "broken", "broken_on": {"1.28": "no Register in 10 s"}}
    }
    assert report["kubelets"] == {"1.28": "genuine", "1.37": "genuine"}
    assert report["command"] == "./plugin {socket_dir}"
