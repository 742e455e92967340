"""Print docs/compared.md out of conformance/reports: ``python -m tools.compared [--check] [FILE]``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from packaging.version import InvalidVersion, Version

from gateway_lab.conformance.report import LEVELS, Level, PluginReport, count, from_yaml
from gateway_lab.trials.conformance import RULES
from tools.pages import main, table

ROOT: Final = Path(__file__).resolve().parents[1]
REPORTS: Final = "conformance/reports"
_BEGIN: Final = """# Device plugins compared

This page shows which [rules](conformance.md) device plugins keep. We ran `gateway conformance` on each plugin. `make docs` writes the table from `{reports}`.

*Broken* means that the plugin broke the rule on at least one of these kubelets. NVIDIA's plugin used a fake NVML with eight H100s. We did not examine NVIDIA's v0.20.0
and AMD's plugin, because the Go module proxy refuses their modules.

"""
_PLAIN: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z._:/+-]{0,99}", re.ASCII)
"""What stands in the page as it is: a name, a version, a date."""


def page() -> str:
    """Write the page."""
    reports = [_read(path) for path in sorted((ROOT / REPORTS).glob("*/*.yaml"), key=_order)]
    rows = ((_link(one), *(_counts(one, name) for name in LEVELS), _kubelets(one), _found(one)) for one in reports)
    return "".join([_BEGIN.format(reports=REPORTS), *table(("plugin", *LEVELS, "kubelets", "found"), rows)])


def _read(path: Path) -> PluginReport:
    """Read a report, which anybody may have written.

    Raises:
        ValueError: something in it would be more than text in the page.
    """
    told = from_yaml(path.read_bytes())
    names = {name for found in told.resources.values() for name in found}
    for name in (told.plugin, told.version, told.date, told.examined_with, *told.kubelets, *sorted(names)):
        if not _PLAIN.fullmatch(name):
            raise ValueError(f"{path}: expected letters, digits and ._:/+-, at most 100, got {name[:100]!r}")
    for text in (told.command, told.change, told.notes.replace("<", "\n")):  # The notes are no code.
        if not text.isprintable():
            raise ValueError(f"{path}: expected one line, and in notes no <, got {text[:100]!r}")
    return told


def _order(path: Path) -> tuple[str, Version]:
    """Give plugins by name, and the versions of one from old to new."""
    try:
        return path.parent.name, Version(path.stem)
    except InvalidVersion:
        return path.parent.name, Version("0")


def _link(told: PluginReport) -> str:
    return f"[{told.plugin} {told.version}](../{REPORTS}/{told.plugin}/{told.version}.yaml)"


def _counts(told: PluginReport, name: Level) -> str:
    if told.unexamined:
        return "not examined"
    kept, broken = count(told, name, "kept"), count(told, name, "broken")
    return f"{kept} kept" + (f", {broken} broken" if broken else "")


def _kubelets(told: PluginReport) -> str:
    return ", ".join(f"{version} ({kind})" for version, kind in told.kubelets.items())


def _found(told: PluginReport) -> str:
    """Say why it could not be examined, or which rules it breaks; and how it keeps the others."""
    if told.unexamined:
        return "; ".join(map(_cell, dict.fromkeys(told.unexamined.values())))
    broken = [rule.id for rule in RULES if rule.id in told.rules and told.rules[rule.id].result == "broken"]
    links = ", ".join(f"[{rule}](conformance.md#{rule})" for rule in broken)
    return f"{_cell(told.process)}" + (f"; broken: {links}" if links else "")


def _cell(text: str) -> str:
    """Keep a text of a process from ending a cell, or from being read as HTML or Markdown."""
    line = " ".join(text.split())
    return f"`{line.replace('`', chr(39)).replace('|', '/')}`" if set(line) & set("<>|*_`[") else line


if __name__ == "__main__":
    main(page, __doc__, f"{REPORTS} say")
