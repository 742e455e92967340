"""Write the rules into docs/conformance.md: ``python -m tools.conformance [--check] FILE``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gateway.lab.conformance.report import LEVELS, Level, level
from gateway.lab.trials.conformance import RULES, Rule
from tools.pages import between, part, table

_BEGIN: Final = "<!-- rules: declared, begin -->\n"
_END: Final = "<!-- rules: declared, end -->\n"
_HEADS: Final[dict[Level, str]] = {
    "core": "Core: what every node meets",
    "extended": "Extended: what happens to one node of many",
}


def page(text: str) -> str:
    """Put the rules into the page."""
    return between(text, _BEGIN, _END, _rules())


def _rules() -> Iterator[str]:
    for name in LEVELS:
        yield f"\n## {_HEADS[name]}\n"
        for rule in RULES:
            if level(rule.id) == name:
                yield f"\n### {rule.id}\n\n"
                yield from table(("promise", rule.promise), _rows(rule))


def _rows(rule: Rule) -> Iterator[tuple[str, str]]:
    yield "rests on", rule.reference
    kubelet = "emulated: it must misbehave, or tell what it did" if rule.emulated else "genuine, where it is built"
    yield "kubelet", kubelet + (f"; from 1.{rule.since} on ({rule.why})" if rule.since else "")
    if rule.devices > 1:
        yield "devices", f"{rule.devices} healthy ones"
    if rule.changes:
        yield "wants", "`--change`"


if __name__ == "__main__":
    part(page, __doc__, "gateway/lab/trials/conformance.py says")
