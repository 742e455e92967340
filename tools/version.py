"""Write the version of gateway/__init__.py into the files that name a release: the chart, the manifests, the pages' commands.

``python -m tools.version [--check]``; with --check they are compared with what is there (exit status 1 if they differ).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from gateway import VERSION
from tools import pages

ROOT: Final = Path(__file__).resolve().parents[1]
_NAMED: Final = re.compile(
    r"(device-plugin-gateway[:-]|newTag: |^ +version=|^version: |^appVersion: \"|\*\*Status: )\d+\.\d+\.\d+\b",
    re.MULTILINE,
)


def _files() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("*.md"))
    for folder in ("chart", "kustomize", "manifests"):
        yield from sorted((ROOT / "deploy" / folder).rglob("*.yaml"))


def named(text: str, version: str) -> str:
    """Give the text with this version where it names a release."""
    return _NAMED.sub(rf"\g<1>{version}", text)


def _written() -> Mapping[Path, str]:
    return {path: named(path.read_text(encoding="utf-8"), VERSION) for path in _files()}


if __name__ == "__main__":
    pages.several(_written, __doc__, "gateway/__init__.py declares")
