"""A page of docs/ that is printed out of what the code declares: written, or held against the file that is committed."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path


def main(page: Callable[[], str], description: str | None, declared_by: str) -> None:
    """Print, write or check the page, as the command line says; SystemExit 1 where the file isn't what the code declares."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("file", nargs="?", type=Path, help="where the page is; without it, it is printed")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    if arguments.file is None:
        sys.stdout.write(page())
    elif not arguments.check:
        arguments.file.write_text(page(), encoding="utf-8")
    elif difference := _difference(arguments.file, page()):
        sys.exit(f"{difference}\n{arguments.file} is not what {declared_by}; run `make docs` and commit it")


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Give the lines of a table in Markdown."""
    for row in (head, ("---",) * len(head), *rows):
        yield f"| {' | '.join(row)} |\n"


def _difference(file: Path, wanted: str) -> str:
    found = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return "\n".join(difflib.unified_diff(found, wanted.splitlines(), str(file), "declared", lineterm=""))
