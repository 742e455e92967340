"""``plugin-report.yaml``: what a plugin keeps, rule by rule, to be kept and linked to; and a badge of it.

Rules have two levels. Core is what every node meets in its first year: kubelets that start, crash and come late, plugins that are
replaced, pods that ask for devices. Extended is what happens to one node of many, and to each some day.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version as installed
from typing import Final, Literal, TypeAlias

import msgspec
import yaml

from gateway_lab.trials.conformance import RULES, Finding, Findings

Level: TypeAlias = Literal["core", "extended"]
Kind: TypeAlias = Literal["genuine", "emulated"]
Result: TypeAlias = Literal["kept", "broken", "not applicable"]

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
LEVELS: Final[tuple[Level, ...]] = ("core", "extended")
FORMAT: Final = 1
"""Rises when a field of the report changes its meaning or goes away."""
MOST_SEEN: Final = 400
"""The most characters of what was seen where a rule is broken: ``plugin.json`` has all."""


class RuleReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A rule, over all kubelets."""

    level: Level
    result: Result
    """Broken where it is broken on any kubelet, not applicable where it could be looked at on none."""
    kubelet: Kind
    """What it was looked at on: emulated kubelets, too, where the kubelet must misbehave or tell what it did."""
    broken_on: dict[str, str] = {}
    """What was seen where it is broken, by kubelet version."""
    why: str = ""
    """Why it isn't applicable."""


class PluginReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What was found of one version of one device plugin."""

    format: int = msgspec.field(default=FORMAT)
    """Rises when a field changes its meaning or goes away."""
    plugin: str
    version: str
    """Of the plugin, as who examined it said; empty where nobody did."""
    date: str
    """When it was examined, ISO 8601."""
    examined_with: str
    """The version of the device plugin gateway, whose rules they are."""
    command: str
    """How the plugin was started."""
    notes: str = ""
    """What a reader must know to judge the report, such as hardware that is simulated."""
    hard_wired: bool = False
    """Whether it ran in a mount namespace of its own, because it has the kubelet's path compiled in."""
    change: str = ""
    """The command that made a device unhealthy."""
    cap_seconds: float
    """How long was waited for what must come."""
    kubelets: dict[str, Kind]
    """The kubelets, by minor version. A rule may need an emulated one all the same."""
    resources: dict[str, dict[str, int]]
    """How many devices each resource had in the kubelet's records, by kubelet and resource name."""
    process: str
    """How it gets over things: in its process, or by ending and being started again."""
    result: Result
    levels: dict[Level, Result]
    """Broken where one of its rules is broken, not applicable where none of them could be looked at."""
    unexamined: dict[str, str] = {}
    """Where the plugin couldn't be examined, by kubelet version, and why: that breaks no rule."""
    rules: dict[str, RuleReport]
    """By id, each rule that was asked for: docs/conformance.md says what it promises, under that heading."""


def level(rule: str) -> Level:
    """Return the level of a rule."""
    return "core" if rule in CORE else "extended"


def report(
    findings: Findings,
    *,
    plugin: str,
    version: str,
    date: str,
    notes: str = "",
    hard_wired: bool = False,
    change: str = "",
) -> PluginReport:
    """Sum up what was found; the arguments are the report's fields."""
    by_rule = {rule.id: [one for one in findings.findings if one.rule == rule.id] for rule in RULES}
    rules = {rule: _rule(rule, found) for rule, found in by_rule.items() if found}
    return PluginReport(
        plugin=plugin,
        version=version,
        date=date,
        examined_with=installed("device-plugin-gateway"),
        command=findings.command,
        notes=notes,
        hard_wired=hard_wired,
        change=change,
        cap_seconds=findings.cap_seconds,
        kubelets=_kubelets(findings.findings),
        resources={version: dict(found) for version, found in findings.resources.items()},
        process=findings.watched,
        result=_sum(one.result for one in rules.values()),
        levels={
            name: _sum(one.result for one in rules.values() if one.level == name)
            for name in LEVELS
            if any(one.level == name for one in rules.values())
        },
        unexamined={
            one: _first(str(findings.unexamined[one]))
            for one in _kubelets(findings.findings)
            if one in findings.unexamined
        },
        rules=rules,
    )


def to_yaml(told: PluginReport) -> bytes:
    """Spell a report."""
    plain = msgspec.to_builtins(told)
    return yaml.safe_dump({"format": FORMAT, **plain}, sort_keys=False, allow_unicode=True, width=120).encode()


def from_yaml(data: bytes) -> PluginReport:
    """Read a report.

    Raises:
        msgspec.ValidationError: this is none; the message names the field.
    """
    return msgspec.convert(yaml.safe_load(data), type=PluginReport)


_COLOURS: Final[Mapping[Result, str]] = {"kept": "brightgreen", "broken": "red", "not applicable": "lightgrey"}


def badge(told: PluginReport) -> bytes:
    """Spell the badge, as shields.io reads it from an address (https://shields.io/badges/endpoint-badge)."""
    said = [f"{name} {_counted(told, name)}" for name in told.levels]
    only_extended = told.levels.get("core") == "kept" and told.result == "broken"
    message = "not examined" if told.unexamined else ", ".join(said)
    colour = _COLOURS["not applicable"] if told.unexamined else "yellow" if only_extended else _COLOURS[told.result]
    shown = {"schemaVersion": 1, "label": "device plugin conformance", "message": message, "color": colour}
    return json.dumps(shown).encode() + b"\n"


def count(told: PluginReport, name: Level, result: Result) -> int:
    """Count the rules of a level with one result."""
    return sum(one.result == result for one in told.rules.values() if one.level == name)


def _counted(told: PluginReport, name: Level) -> str:
    return f"{count(told, name, 'broken')} broken" if told.levels[name] == "broken" else told.levels[name]


def _kubelets(findings: Sequence[Finding]) -> dict[str, Kind]:
    """Say of each kubelet whether it was genuine, by its version."""
    kinds: dict[str, set[str]] = {}
    for one in findings:
        kinds.setdefault(one.kubelet, set()).add(one.kind)
    return {version: "genuine" if "genuine" in kind else "emulated" for version, kind in kinds.items()}


def _rule(rule: str, found: Sequence[Finding]) -> RuleReport:
    """Sum a rule up over the kubelets."""
    result = _sum(one.verdict for one in found)
    return RuleReport(
        level=level(rule),
        result=result,
        kubelet="genuine" if any(one.kind == "genuine" for one in found) else "emulated",
        broken_on={one.kubelet: _first(one.seen) for one in found if one.verdict == "broken"},
        why=_first(found[0].seen) if result == "not applicable" else "",
    )


def _sum(results: Iterable[Result]) -> Result:
    """Sum results up: broken once is broken."""
    seen = {*results}
    return "broken" if "broken" in seen else "kept" if "kept" in seen else "not applicable"


def _first(seen: str) -> str:
    return re.sub(r"; (its|the) log ends:$", "", seen.partition("\n")[0])[:MOST_SEEN]
