"""A YAML text as Go's sigs.k8s.io/yaml sees it, which reads NVIDIA's configuration files: what that accepts, this accepts.

The first document counts, and of a key that is given twice the last. Anchors, aliases and ``<<`` work, in the order in which
they are written. A plain scalar is what go-yaml v2 takes it for (its resolve.go): ``yes``, ``on`` and ``y`` are booleans,
``0o17`` and ``017`` are 15, ``1:30`` is text. One thing Go takes and libyaml doesn't: a colon before a bracket, ``[a:]``.

Each value knows its line. Pure; bytes, depth and values are bounded, the latter as they are after aliases were unfolded, so
that a short text can't become a huge one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import yaml
from msgspec import Struct
from msgspec.structs import replace

from gateway.configuration.settings import ConfigError

MAX_BYTES: Final = 1024 * 1024
"""The most that a ConfigMap can hold."""
MAX_NODES: Final = 50_000
MAX_DEPTH: Final = 32
# go-yaml is a port of libyaml. PyYAML's own parser, where it was built without that, is slower and refuses tabs.
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_WORDS: Final[Mapping[str, bool | None]] = (
    dict.fromkeys(("", "~", "null", "Null", "NULL"), None)
    | dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"), True)
    | dict.fromkeys(("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"), False)
)
_INTEGER: Final = re.compile(r"([-+]?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO]?[0-7]+|0|[1-9][0-9]*)", re.ASCII)
_DECIMAL: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_LONGEST_NUMBER: Final = 64
_MERGE: Final = "<<"
_RESOLVED: Final = frozenset(f"tag:yaml.org,2002:{name}" for name in ("bool", "float", "int", "null"))

Plain = str | int | float | bool | None


class YamlNode(Struct, frozen=True):
    """A value of the text: a scalar, a list or a mapping, and its line from 1 (in a mapping: its key's).

    ``count`` is how many values it holds, itself among them, and ``height`` how many levels of them.
    """

    value: Plain | tuple[YamlNode, ...] | Mapping[str, YamlNode]
    line: int
    count: int = 1
    height: int = 1


def read(content: bytes, name: str) -> YamlNode:
    """Turn a text into its value; an empty one is null. ``name`` is what its errors call it.

    Raises:
        ConfigError: it is no YAML, or more of it than is read.
    """
    return _Reader(content, name).document()


def fault(name: str, line: int, problem: str) -> ConfigError:
    """Make the error that says what is wrong on a line."""
    return ConfigError(f"{name}, line {line}: {problem}")


class _Reader:
    """Builds values from the parser's events: nothing here goes deeper than the bound, whatever the text does."""

    def __init__(self, content: bytes, name: str) -> None:
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{name}: more than {MAX_BYTES} bytes. Leave out what is no configuration")
        self._name = name
        self._anchors: dict[str, YamlNode | None] = {}
        self._events: Iterator[yaml.Event] = yaml.parse(content, Loader=_LOADER)
        self._count = 0

    def document(self) -> YamlNode:
        """Build the first document's value."""
        try:
            for event in self._events:
                if isinstance(event, yaml.DocumentStartEvent):
                    return self._value(next(self._events), 1)
        except yaml.MarkedYAMLError as error:
            line = 1 if error.problem_mark is None else error.problem_mark.line + 1
            problem = f"not YAML ({error.problem}). Correct this line or the one before"
            raise fault(self._name, line, problem) from error
        except ConfigError:
            raise
        except (yaml.YAMLError, OverflowError, ValueError) as error:  # PyYAML without libyaml trips over some escapes
            problem = str(error).partition("\n")[0]
            problem = f"not YAML ({problem}). Write plain text in UTF-8"
            raise fault(self._name, 1, problem) from error
        return YamlNode(None, 1)

    def _value(self, event: yaml.Event, depth: int) -> YamlNode:
        """Build the value that begins with ``event``, and use up its events."""
        line = _line(event)
        if depth > MAX_DEPTH:
            raise fault(self._name, line, f"more than {MAX_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent):
            node = self._anchors.get(str(event.anchor))
            if node is None:
                raise fault(
                    self._name,
                    line,
                    "no value above has the name after '*'. Write the value out",
                )
            if depth + node.height - 1 > MAX_DEPTH:
                raise fault(self._name, line, f"more than {MAX_DEPTH} levels. Write the value out")
            self._add(node.count, line)
            return node
        self._add(1, line)
        anchor: str | None = getattr(event, "anchor", None)
        if anchor is not None:
            self._anchors[anchor] = None  # until it is whole: a value can't hold itself
        node = self._plain(event, line, depth)
        if anchor is not None and self._anchors[anchor] is None:  # unless something in it took the name
            self._anchors[anchor] = node
        return node

    def _plain(self, event: yaml.Event, line: int, depth: int) -> YamlNode:
        before = self._count
        value: Plain | tuple[YamlNode, ...] | Mapping[str, YamlNode]
        height = 1
        if isinstance(event, yaml.ScalarEvent):
            value = _scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
                items.append(self._value(event, depth + 1))
            value = tuple(items)
            height += max((item.height for item in items), default=0)
        else:
            value = members = self._mapping(depth)
            height += max((member.height for member in members.values()), default=0)
        return YamlNode(value, line, self._count - before + 1, height)

    def _mapping(self, depth: int) -> Mapping[str, YamlNode]:
        members: dict[str, YamlNode] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            line = _line(event)
            key = self._value(event, depth + 1)
            member = self._value(next(self._events), depth + 1)
            if isinstance(key.value, tuple | Mapping):
                raise fault(self._name, line, "a key must be a word, not a list or a mapping")
            if key.value == _MERGE and isinstance(event, yaml.ScalarEvent) and event.implicit[0]:
                members.update(self._merged(member, line))
            else:
                members[key.value if isinstance(key.value, str) else str(key.value).lower()] = replace(
                    member, line=line
                )
        return members

    def _merged(self, node: YamlNode, line: int) -> Iterator[tuple[str, YamlNode]]:
        """Yield what ``<<`` brings: of several mappings the first counts."""
        for one in reversed(node.value) if isinstance(node.value, tuple) else (node,):
            if not isinstance(one.value, Mapping):
                raise fault(self._name, line, "only a mapping can be merged, or a list of them: '<<: *name'")
            yield from one.value.items()

    def _add(self, count: int, line: int) -> None:
        self._count += count
        if self._count > MAX_NODES:
            raise fault(self._name, line, f"more than {MAX_NODES} values, aliases unfolded")


def _line(event: yaml.Event) -> int:
    return 1 if event.start_mark is None else event.start_mark.line + 1


def _scalar(event: yaml.ScalarEvent) -> Plain:
    text: str = event.value
    plain = event.implicit[0] and event.tag is None
    return _resolved(text) if plain or event.tag in _RESOLVED else text


def _resolved(text: str) -> Plain:
    if text in _WORDS:
        return _WORDS[text]
    number = text.replace("_", "") if text[0] in "+-0123456789" else text
    if len(number) > _LONGEST_NUMBER:
        return text
    if found := _INTEGER.fullmatch(number):
        digits = found[2]
        octal = digits[0] == "0" and digits.isdigit()
        return int(found[1] + digits, 8 if octal else 0)
    return float(number) if _DECIMAL.fullmatch(number) and math.isfinite(float(number)) else text
