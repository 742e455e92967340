"""Plain text for a person, in paragraphs and lists."""

from __future__ import annotations

import textwrap


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
