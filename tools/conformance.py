"""Write the rules into docs/conformance.md: ``python -m tools.conformance [--check] FILE``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gateway_lab.conformance.report import LEVELS, Level, level
from gateway_lab.trials.conformance import RULES, Rule
from tools.pages import between, part

_BEGIN: Final = "<!-- rules: declared, begin -->\n"
_END: Final = "<!-- rules: declared, end -->\n"
_HEADS: Final[dict[Level, str]] = {
    "core": "Core rules: every node needs them",
    "extended": "Extended rules: few nodes need them",
}


def page(text: str) -> str:
    """Put the rules into the page."""
    return between(text, _BEGIN, _END, _rules())


def _rules() -> Iterator[str]:
    for name in LEVELS:
        yield f"\n## {_HEADS[name]}\n"
        for rule in RULES:
            if level(rule.id) == name:
                yield f"\n### {rule.id}\n\n{_text(rule)}\n"


def _text(rule: Rule) -> str:
    said = [f"{rule.promise[0].upper()}{rule.promise[1:]}."]
    if rule.emulated:
        said.append("*Emulated.*")
    if rule.since:
        said.append(f"From kubelet 1.{rule.since} on: {rule.why}.")
    if rule.devices > 1:
        said.append(f"Needs {rule.devices} healthy devices.")
    if rule.changes:
        said.append("Needs `--change`.")
    return " ".join(said)


if __name__ == "__main__":
    part(page, __doc__, "gateway_lab/trials/conformance.py says")
