"""Read a YAML text into values that know their lines, for error messages. Pure.

A ``Language`` says what a scalar means, and what may be written. Depth and number of values are bounded, after aliases are
expanded, so that a short text can't become a huge one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import yaml
from msgspec import Struct
from msgspec.structs import replace

# go-yaml is a port of libyaml. PyYAML's own parser is ten times as slow and refuses tabs.
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE: Final = "<<"

Plain = str | int | float | bool | None


class YamlError(ValueError):
    """A text can't be read. ``line`` counts from 1."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line = line


class Language(Struct, frozen=True):
    """What a text may contain, and what a scalar means. ``levels`` and ``values`` are the most of each."""

    scalar: Callable[[yaml.ScalarEvent], Plain]
    levels: int
    values: int
    strict: bool = False
    """Refuse aliases, tags, repeated keys and further documents; keep keys as they are, instead of converting them to texts."""


class YamlNode(Struct, frozen=True):
    """A value of the text: a scalar, a list or a mapping, and its line from 1 (of a mapping: its key's line).

    ``count`` is the number of values in it, with itself, and ``height`` the number of levels.
    """

    value: Plain | tuple[YamlNode, ...] | Mapping[Any, YamlNode]
    line: int
    count: int = 1
    height: int = 1

    def plain(self) -> Any:
        """Return the value without lines."""
        if isinstance(self.value, tuple):
            return [item.plain() for item in self.value]
        return {key: one.plain() for key, one in self.value.items()} if isinstance(self.value, Mapping) else self.value


def read(content: bytes, language: Language) -> YamlNode:
    """Return the value of a text's first document; null if it is empty.

    Raises:
        YamlError: it is not YAML, or too deep or too large.
    """
    try:
        return _Reader(content, language).document()
    except yaml.MarkedYAMLError as error:
        line = 1 if error.problem_mark is None else error.problem_mark.line + 1
        raise YamlError(line, f"not YAML ({error.problem}). Correct this line or the one before") from error
    except YamlError:
        raise
    except (yaml.YAMLError, OverflowError, ValueError) as error:  # PyYAML without libyaml fails on some escapes.
        problem = str(error).partition("\n")[0]
        raise YamlError(1, f"not YAML ({problem}). Write plain text in UTF-8") from error


class _Reader:
    """Builds values from the parser's events, no deeper than the bound."""

    def __init__(self, content: bytes, language: Language) -> None:
        self._language = language
        self._anchors: dict[str, YamlNode | None] = {}
        self._events: Iterator[yaml.Event] = yaml.parse(content, Loader=_LOADER)
        self._count = 0

    def document(self) -> YamlNode:
        """Build the first document's value."""
        found: YamlNode | None = None
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if found is not None:
                    raise YamlError(_line(next(self._events)), "another document. Remove it and its '---'")
                found = self._value(next(self._events), 1)
                if not self._language.strict:
                    break
        return found or YamlNode(None, 1)

    def _value(self, event: yaml.Event, depth: int) -> YamlNode:
        """Build the value that begins with ``event``, and consume its events."""
        line, anchor = _line(event), getattr(event, "anchor", None)
        if depth > self._language.levels:
            raise YamlError(line, f"more than {self._language.levels} levels")
        if self._language.strict and anchor is not None:
            raise YamlError(line, "anchors ('&') and aliases ('*') are not allowed. Write the value out")
        if self._language.strict and getattr(event, "tag", None) is not None:
            raise YamlError(line, "tags are not allowed. Remove it")
        if isinstance(event, yaml.AliasEvent):
            node = self._anchors.get(str(event.anchor))
            if node is None:
                raise YamlError(line, "no value above has the name after '*'. Write the value out")
            if depth + node.height - 1 > self._language.levels:
                raise YamlError(line, f"more than {self._language.levels} levels. Write the value out")
            self._add(node.count, line)
            return node
        self._add(1, line)
        if anchor is not None:
            self._anchors[anchor] = None  # Until it is whole: a value can't contain itself.
        node = self._plain(event, line, depth)
        if anchor is not None and self._anchors[anchor] is None:  # Unless a value in it took the name.
            self._anchors[anchor] = node
        return node

    def _plain(self, event: yaml.Event, line: int, depth: int) -> YamlNode:
        if isinstance(event, yaml.ScalarEvent):
            return YamlNode(self._language.scalar(event), line)
        before, items = self._count, list[YamlNode]()
        value: tuple[YamlNode, ...] | Mapping[Any, YamlNode]
        if isinstance(event, yaml.SequenceStartEvent):
            while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
                items.append(self._value(event, depth + 1))
            value = tuple(items)
        else:
            value = self._mapping(depth)
            items.extend(value.values())
        height = 1 + max((item.height for item in items), default=0)
        return YamlNode(value, line, self._count - before + 1, height)

    def _mapping(self, depth: int) -> Mapping[Any, YamlNode]:
        members: dict[Any, YamlNode] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            line = _line(event)
            key = self._value(event, depth + 1).value
            if isinstance(key, tuple | Mapping):
                raise YamlError(line, "a key must be a word, not a list or a mapping")
            member = self._value(next(self._events), depth + 1)
            if self._language.strict:
                if key in members:
                    which = (
                        f"the key {key!r:.80}" if depth > 1 else "a key"
                    )  # The first level shows what kind of file it is.
                    raise YamlError(line, f"{which} is here twice. Remove one of them")
                members[key] = replace(member, line=line)
            elif key == _MERGE and isinstance(event, yaml.ScalarEvent) and event.implicit[0]:
                members.update(_merged(member, line))
            else:
                members[key if isinstance(key, str) else str(key).lower()] = replace(member, line=line)
        return members

    def _add(self, count: int, line: int) -> None:
        self._count += count
        if self._count > self._language.values:
            raise YamlError(line, f"more than {self._language.values} values, aliases unfolded")


def _merged(node: YamlNode, line: int) -> Iterator[tuple[Any, YamlNode]]:
    """Yield what ``<<`` adds. Of several mappings the first one wins."""
    for one in reversed(node.value) if isinstance(node.value, tuple) else (node,):
        if not isinstance(one.value, Mapping):
            raise YamlError(line, "only a mapping can be merged, or a list of them: '<<: *name'")
        yield from one.value.items()


def _line(event: yaml.Event) -> int:
    return 1 if event.start_mark is None else event.start_mark.line + 1
