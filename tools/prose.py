"""Hold the pages against how this project writes: ``python -m tools.prose``.

A floor, not a judgement: words that are vague, odd or long-winded, and sentences that are too long. It exits with 1 and names what it found.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
LONGEST: Final = 25
"""Words of a sentence."""
SHARE: Final = 0.05
"""How many of all sentences may be longer."""
WORDS: Final = re.compile(
    r"\b(whoever|whichever|nobody new|anew|ever more|meanwhile|beside(?!\.md)|mostly|where there is|those that|the newer one|the older one|"
    r"is over|told|is to be|are to be|not un\w+)\b|, too\b",
    re.IGNORECASE,
)
"""Vague subjects, "where" for a condition, our own words, German particles, double negatives."""


def pages() -> list[Path]:
    """Name every page that people read."""
    return sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])


def sentences(text: str) -> Iterator[str]:
    """Give the sentences of a page in Markdown: no code, no table, no heading, no comment; a link by its text."""
    text = re.sub(r"^---$.*?^---$|```.*?```|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    paragraphs: list[list[str]] = [[]]
    for line in text.splitlines():
        begins = re.match(r"\s*([-*]|\d+\.) ", line)
        if not line.strip() or begins or line.startswith(("#", "|", "    ")):
            paragraphs.append([])
        if line.strip() and not line.startswith(("#", "|")) and not (line.startswith("    ") and not begins):
            paragraphs[-1].append(re.sub(r"^\s*([-*]|\d+\.) ", "", line).strip())
    for paragraph in paragraphs:
        spelled = re.sub(r"`[^`]*`", "CODE", " ".join(paragraph))
        yield from (one for one in re.split(r"(?<=[.!?:;])\s+", spelled) if one)


def main() -> None:
    """Check all pages."""
    found, long, count = [], [], 0
    for page in pages():
        name = page.relative_to(ROOT)
        for sentence in sentences(page.read_text(encoding="utf-8")):
            count += 1
            found += [f"{name}: {match[0].strip(', ')!r} in: {sentence}" for match in WORDS.finditer(sentence)]
            if len(sentence.split()) > LONGEST:
                long.append(f"{name}: {sentence}")
    if len(long) > SHARE * count:
        found += [f"{len(long)} of {count} sentences have more than {LONGEST} words:", *long]
    if found:
        sys.exit("\n".join(found))
    sys.stdout.write(f"prose: {count} sentences, {len(long)} with more than {LONGEST} words\n")


if __name__ == "__main__":
    main()
