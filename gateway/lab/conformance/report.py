"""``plugin-report.yaml``: a few lines of what a plugin keeps, rule by rule, to be kept and linked to.

Rules have two levels. Core is what every node meets in its first year: kubelets that start, crash and come late, plugins that are
replaced, pods that ask for devices. Extended is what happens to one node of many, and to each some day.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import yaml

from gateway.lab.trials.conformance import RULES, Finding, Findings

CORE: Final = frozenset(
    {
        "registers",
        "registers-once-per-start",
        "registers-again",
        "kubelet-crash",
        "kubelet-late",
        "stale-socket",
        "sigterm",
        "plugin-restart",
        "plugin-crash",
        "ids-stable",
        "allocate",
        "init-containers",
        "unknown-device",
        "no-device-ids",
    }
)
"""The rules of the core level, by id; all others are extended."""
LEVELS: Final = ("core", "extended")


def level(rule: str) -> str:
    """Return the level of a rule."""
    return "core" if rule in CORE else "extended"


def to_yaml(findings: Findings) -> bytes:
    """Spell the report: the command, the kubelets, each level's result, and each rule's, where it was looked at."""
    by_rule = {rule.id: [one for one in findings.findings if one.rule == rule.id] for rule in RULES}
    results = {rule: _result(found) for rule, found in by_rule.items() if found}
    told: dict[str, Any] = {
        "format": 1,
        "command": findings.command,
        "cap_seconds": findings.cap_seconds,
        "kubelets": _kubelets(findings.findings),
        "levels": {
            name: "broken" if any(results[rule] == "broken" for rule in results if level(rule) == name) else "kept"
            for name in LEVELS
            if any(level(rule) == name for rule in results)
        },
        "rules": {
            rule: {"level": level(rule), "result": result} | _where(by_rule[rule]) for rule, result in results.items()
        },
    }
    return yaml.safe_dump(told, sort_keys=False, allow_unicode=True, width=120).encode()


def _kubelets(findings: Sequence[Finding]) -> dict[str, str]:
    """Say of each kubelet whether it was genuine, by its version; a rule may need an emulated one all the same."""
    kinds: dict[str, set[str]] = {}
    for one in findings:
        kinds.setdefault(one.kubelet, set()).add(one.kind)
    return {version: "genuine" if "genuine" in kind else "emulated" for version, kind in kinds.items()}


def _result(found: Sequence[Finding]) -> str:
    """Sum a rule up over the kubelets: broken on one is broken."""
    verdicts = {one.verdict for one in found}
    return "broken" if "broken" in verdicts else "kept" if "kept" in verdicts else "not applicable"


def _where(found: Sequence[Finding]) -> dict[str, dict[str, str]]:
    """Say on which kubelets it is broken, and what was seen."""
    broken = {one.kubelet: one.seen for one in found if one.verdict == "broken"}
    return {"broken_on": broken} if broken else {}
