"""Output of commands: text for a person in paragraphs, lists and tables, and JSON for a program."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator

import click

from gateway.wires.log import escaped


class Page:
    """Wraps text to a width, at one of three depths."""

    def __init__(self, width: int) -> None:
        self._width = width

    def text(self, text: str) -> list[str]:
        """At the margin."""
        return self._wrap(text, "", "  ")

    def line(self, text: str) -> list[str]:
        """Below a heading."""
        return self._wrap(text, "  ", "    ")

    def item(self, text: str) -> list[str]:
        """As an item of a list."""
        return self._wrap(text, "  - ", "    ")

    def under(self, text: str) -> list[str]:
        """Below such an item."""
        return self._wrap(text, "    ", "    ")

    def _wrap(self, text: str, first: str, rest: str) -> list[str]:
        return textwrap.wrap(
            text,
            self._width,
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Write a table, each column as wide as it must be."""
    cells = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield ("  " + "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True))).rstrip()


def columns(widest: int, narrowest: int = 40) -> int:
    """Return the width of the terminal, within these bounds."""
    return min(max(shutil.get_terminal_size().columns, narrowest), widest)


def print_json(document: object, indent: int = 0) -> None:
    """Print a document as JSON: on one line, or with this indentation."""
    import msgspec

    encoded = msgspec.json.encode(document, enc_hook=str)
    click.echo(escaped(msgspec.json.format(encoded, indent=indent).decode()))


def count(number: int, word: str) -> str:
    """Say how many there are of something."""
    return f"{number} {word}{'' if number == 1 else 's'}"
