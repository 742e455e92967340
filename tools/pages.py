"""Pages of docs/ that are printed out of what the code declares, or have a part that is: written, or held against the file."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
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


def part(page: Callable[[str], str], description: str | None, declared_by: str) -> None:
    """Write or check the part of a page that is declared elsewhere; SystemExit 1 where the file isn't what the code declares.

    Args:
        page: takes what the file holds, and gives what it is to hold (``between``).
        description: what ``--help`` says.
        declared_by: by whom, for the error.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("file", type=Path, help="where the page is")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    wanted = page(arguments.file.read_text(encoding="utf-8"))
    if not arguments.check:
        arguments.file.write_text(wanted, encoding="utf-8")
    elif difference := _difference(arguments.file, wanted):
        sys.exit(f"{difference}\n{arguments.file} is not what {declared_by}; run `make docs` and commit it")


def several(files: Callable[[], Mapping[Path, str]], description: str | None, declared_by: str) -> None:
    """Write or check files, each of which is declared elsewhere as a whole; SystemExit 1 where one isn't what the code declares."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    differing = {file: (text, found) for file, text in files().items() if (found := _difference(file, text))}
    for file, (text, difference) in differing.items():
        if check:
            print(f"{difference}\n{file} is not what {declared_by}; run `make docs` and commit it")
        else:
            file.write_text(text, encoding="utf-8")
    sys.exit(1 if check and differing else 0)


def between(text: str, begin: str, end: str, lines: Iterable[str]) -> str:
    """Put lines in their place in a page: between two others, which stay.

    Raises:
        ValueError: the page has no such place.
    """
    before, begun, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise ValueError(
            f"expected the lines {begin.strip()!r} and {end.strip()!r} in the page: write them where the part is to be"
        )
    return f"{before}{begin}{''.join(lines)}{end}{after}"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Give the lines of a table in Markdown."""
    for row in (head, ("---",) * len(head), *rows):
        yield f"| {' | '.join(row)} |\n"


def _difference(file: Path, wanted: str) -> str:
    found = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return "\n".join(difflib.unified_diff(found, wanted.splitlines(), str(file), "declared", lineterm=""))
