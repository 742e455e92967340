"""Find the keys of a configuration file and check the types of their values; an error has the line. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from devices.yamltree import YamlNode
from gateway.configuration import document
from gateway.configuration.flags import FLAGS
from gateway.configuration.settings import ConfigError

_MAX_WARNINGS: Final = 20
_LONGEST_KEY: Final = 64

KeyPath = tuple[str, ...]


class Reader:
    """Reads one document: finds known keys, checks the types of values, and collects warnings."""

    def __init__(self, name: str, *, strict: bool) -> None:
        self._name, self._strict = name, strict
        self._warnings: list[str] = []
        self._more = 0

    def warnings(self) -> tuple[str, ...]:
        """Return sentences for the author: the first ones, and how many more there were."""
        more = (f"{self._name}: and {self._more} more of this kind",) if self._more else ()
        return (*self._warnings, *more)

    def _members(
        self, node: YamlNode | None, path: KeyPath, known: Sequence[str], *, fold: bool = True
    ) -> Mapping[str, YamlNode]:
        """Return the known keys (of several spellings the last in the alphabet, as with Go); warn of the others."""
        if node is None or node.value is None:
            return {}
        if not isinstance(node.value, Mapping):
            raise self._expected(node, path, "a mapping")
        names = {key.casefold() if fold else key: key for key in known}
        found: dict[str, YamlNode] = {}
        for key in sorted(node.value):
            name = names.get(key.casefold() if fold else key)
            if name is None:
                self._unknown(node.value[key].line, (*path, key), known)
            else:
                found[name] = node.value[key]
        return found

    def _items(self, node: YamlNode | None, path: KeyPath) -> list[tuple[KeyPath, YamlNode]]:
        """Return the items of a list, each with its path."""
        if node is None or node.value is None:
            return []
        if not isinstance(node.value, tuple):
            raise self._expected(node, path, "a list")
        return [((*path[:-1], f"{path[-1]}[{number}]"), item) for number, item in enumerate(node.value)]

    def _required(self, found: Mapping[str, YamlNode], item: YamlNode, path: KeyPath, key: str) -> YamlNode:
        if key not in found:
            raise self._fault(item, path, f"the key '{key}' is missing")
        return found[key]

    def _switch(self, found: Mapping[str, YamlNode], path: KeyPath) -> bool:
        node = found.get(path[-1])
        if node is None or node.value is None:
            return False
        if not isinstance(node.value, bool):
            raise self._expected(node, path, "true or false")
        return node.value

    def _text(self, node: YamlNode, path: KeyPath) -> str:
        if not isinstance(node.value, str):
            raise self._expected(node, path, "text")
        return node.value

    def _texts(self, node: YamlNode, path: KeyPath) -> tuple[str, ...]:
        return tuple("" if item.value is None else self._text(item, at) for at, item in self._items(node, path))

    def _number(self, node: YamlNode, path: KeyPath) -> int:
        value = node.value
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # JSON has one kind of number
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._expected(node, path, "a whole number")
        return value

    # Warnings and errors.

    def _unknown(self, line: int, path: KeyPath, known: Sequence[str]) -> None:
        place, near = _PLACES.get(path[-1].casefold()), nearest(path, known)
        advice = f"; it belongs at {'.'.join(place)}" if place else f"; did you mean {near}?" if near else ""
        if self._strict:
            raise document.fault(self._name, line, f"{_dotted(path)}: unknown key{advice}")
        self._warn(line, path, f"unknown key, ignored{advice}")

    def _warn(self, line: int, path: KeyPath, problem: str) -> None:
        if len(self._warnings) < _MAX_WARNINGS:
            self._warnings.append(f"{self._name}, line {line}: {_dotted(path) or 'the file'}: {problem}")
        else:
            self._more += 1

    def _expected(self, node: YamlNode, path: KeyPath, what: str) -> ConfigError:
        return self._fault(node, path, f"must be {what}, not {shown(node)}")

    def _fault(self, node: YamlNode, path: KeyPath, problem: str) -> ConfigError:
        return document.fault(self._name, node.line, f"{_dotted(path) or 'the file'}: {problem}")


def _dotted(path: KeyPath) -> str:
    return ".".join(key if len(key) <= _LONGEST_KEY else f"{key[:_LONGEST_KEY]}…" for key in path)


def nearest(path: KeyPath, known: Sequence[str]) -> str:
    """Return the known key that may be meant: one of the same level, or a flag's of another level; '' for none."""
    from difflib import get_close_matches  # noqa: PLC0415 - needed where a key is wrong, and nowhere else

    key = path[-1].casefold()
    if len(key) > _LONGEST_KEY:
        return ""
    for candidates in ({name.casefold(): (*path[:-1], name) for name in known}, _PLACES):
        if near := get_close_matches(key, candidates, 1):
            return ".".join(candidates[near[0]])
    return ""


_SLICING: Final = ("sharing", "timeSlicing")
_KEYS: Final = (
    *((*_SLICING, "renameByDefault"), (*_SLICING, "failRequestsGreaterThanOne"), ("gateway", "devices")),
    *(flag.key for flag in FLAGS),
)
_PLACES: Final[Mapping[str, KeyPath]] = {
    key[end - 1].casefold(): key[:end] for key in _KEYS for end in range(1, len(key) + 1)
}


def shown(node: YamlNode) -> str:
    """Return a value in words."""
    match node.value:
        case None:
            return "nothing"
        case bool(value):
            return str(value).lower()
        case str(value):
            return f"{value!r:.80}"
        case int(value) | float(value):
            return f"the number {value}"
        case tuple():
            return "a list"
        case _:
            return "a mapping"
