"""A profile as YAML: values with the lines that they stand in, so that an error says where it is."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from functools import reduce
from typing import Any, Final, NoReturn

import msgspec
import yaml

from devices import yamltree
from devices.gpu.model import Way
from devices.model import TroubleKind
from devices.yamltree import Language, Plain, YamlError

MAX_NODE: Final = 1023
"""Linux numbers at most 1024 NUMA nodes (CONFIG_NODES_SHIFT)."""


_WORDS: Final[Mapping[str, bool | None]] = {"": None, "~": None, "null": None, "true": True, "false": False}
_INTEGER: Final = re.compile(r"[-+]?[0-9]{1,18}", re.ASCII)
_DECIMAL: Final = re.compile(r"[-+]?([0-9]+\.?|[0-9]*\.[0-9]+)([eE][-+]?[0-9]+)?", re.ASCII)
_TYPES: Final[Mapping[str, str]] = {
    "array": "a list",
    "bool": "true or false",
    "float": "a decimal number",
    "int": "a whole number",
    "null": "nothing",
    "object": "a mapping",
    "str": "text",
}
_ADVICE: Final[Mapping[str, str]] = {
    "": "Write 'resources:' and beneath it resource names, such as nvidia.com/gpu",
    "resources": "Write resource names, and beneath each 'gpus:' and, where wanted, 'numa:', 'unhealthy:', 'recovered:', "
    "'released:', 'withdrawn:', 'cdi:', 'pre_start:', 'links:', 'partitions:', 'mig:', 'product:' and 'memory:'",
    "gpus": "Write how many, such as 'gpus: 8', or a list with uuid, numa, health, reason and device_nodes of each",
    "numa": f"Write the number of a NUMA node, 0 to {MAX_NODE}, for each GPU, or null for no known place",
    "unhealthy": "Write index or UUID and the reason in 1 to 256 characters, such as '3: fell off the bus', or as "
    "'3: {reason: fell off the bus, kind: reset-required}'",
    "kind": f"Write {', '.join(kind.value for kind in TroubleKind)}",
    "recovered": "Write indices or UUIDs, such as [3]",
    "released": "Write indices or UUIDs, such as [3]",
    "withdrawn": "Write indices or UUIDs, such as [3]",
    "uuid": "Write 1 to 63 letters, digits, '.', '_', ':' and '-', in quotes if it looks like a number",
    "health": "Write Healthy or Unhealthy",
    "reason": "Write 1 to 256 characters of text",
    "device_nodes": "Write a list of paths below /dev, such as [/dev/null]",
    "cdi": "Write the kind that a CDI specification has, such as vendor.com/gpu",
    "pre_start": "Write true or false",
    "links": "Write a list such as [{between: [0, 1], by: nvlink, lanes: 2}]",
    "between": "Write 2 to 64 indices or UUIDs of different GPUs",
    "by": f"Write {', '.join(way.value for way in Way)}",
    "lanes": "Write how many such links there are side by side, 1 to 64, for nvlink and xgmi alone",
    "mig": "Write for each GPU in MIG mode its instances' profiles, such as '0: [1g.10gb, 2g.20gb]'",
    "product": "Write 1 to 64 characters, such as NVIDIA H100 80GB HBM3",
    "memory": "Write GiB of each GPU, 1 to 4096",
    "partitions": "Write how many in a row are partitions of one GPU, 2 to 1024",
}
_CHOICES: Final[Mapping[str, str]] = {
    "kind": "a kind of trouble",
    "health": "a state of health",
    "by": "a way between GPUs",
}


class ProfileError(ValueError):
    """A profile that can't be used. The message names file and line, what is wrong and what to do."""


class Document:
    """A YAML text as plain values, that can say on which line each of them stands.

    Only what the format needs. Plain scalars mean what YAML 1.2 says (null, true, numbers, else text: ``no`` is a word and ``1:30``
    no number), which differs from NVIDIA's configuration files (``gateway.configuration.document``).
    """

    def __init__(self, content: bytes, name: str) -> None:
        self._name = name
        try:
            content.decode()
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            self._fail(line, f"not UTF-8 (the byte 0x{content[error.start]:02x}). Save it as UTF-8")
        try:
            self._node = yamltree.read(content, LANGUAGE)
        except YamlError as error:
            self._fail(error.line, str(error))
        if self._node.value is None:
            self._fail(1, f"the file is empty. {_ADVICE['']}")
        self._root: Any = self._node.plain()

    def require(self, key: str) -> None:
        """Refuse a document without ``key``, before anything in it is quoted: it may be another file, such as one of secrets."""
        if not isinstance(self._root, dict):
            self.refuse((), "must be a mapping", "")
        if key not in self._root:
            self.refuse((), f"the key '{key}' is missing", "")

    def convert(self, path: Where, kind: Any) -> Any:
        """Give the value at ``path`` its type, or refuse it."""
        value: Any = reduce(operator.getitem, path, self._root)
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            problem, _, place = str(error).partition(" - at ")
            for field, index in re.findall(r"\.(\w+)|\[(\d+)\]", place):
                key = field or int(index)
                path, value = (*path, key), value[key]
            self._refuse_type(path, value, problem, of_key=place.startswith("`key`"))

    def refuse(self, path: Where, problem: str, field: str | None = None) -> NoReturn:
        """Say what is wrong at ``path``, with the advice for ``field``."""
        where = "".join(
            f".{key:.80}" if isinstance(key, str) and key.isidentifier() else f"[{key!r:.80}]" for key in path
        )
        advice = "" if field is None else f". {_ADVICE[field]}"
        self._fail(self._line(path), f"{where[1:] or 'the profile'}: {problem}{advice}")

    def _refuse_type(self, path: Where, value: object, problem: str, *, of_key: bool) -> NoReturn:
        """Put a type error into the words of a YAML file."""
        field = next((key for key in reversed(path) if key in _ADVICE), "")
        if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem, re.DOTALL):
            self.refuse((*path, unknown[1]), "this key is unknown", str(field))
        if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
            self.refuse(path, f"the key '{missing[1]}' is missing", str(field))
        expected, _, got = problem.replace("Expected ", "").partition(", got ")
        if expected.startswith("Invalid enum value"):
            expected = _CHOICES[str(field)]
        if of_key:
            expected, got = f"a mapping whose keys are {expected}", got or "something else"
        elif isinstance(value, dict | list):
            got = got or f"{len(value)}"
        else:
            got = "nothing" if value is None else f"{value!r:.80}"
        self.refuse(path, f"must be {_in_words(expected)}, not {_in_words(got)}", str(field))

    def _line(self, path: Where) -> int:
        """Find the line on which the value at ``path`` stands, or its key; as far as the path exists."""
        node = self._node
        for key in path:
            if not isinstance(node.value, tuple | dict):
                break
            try:
                node = node.value[key]  # type: ignore[index]
            except (LookupError, TypeError):
                break
        return node.line

    def _fail(self, line: int, problem: str) -> NoReturn:
        raise ProfileError(f"{self._name}, line {line}: {problem}")


def _scalar(event: yaml.ScalarEvent) -> Plain:
    text: str = event.value
    if not event.implicit[0]:  # quoted, or a block: text, whatever it looks like
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _DECIMAL.fullmatch(text) else text


LANGUAGE: Final = Language(_scalar, levels=9, values=2_000_000, strict=True)


def _in_words(types: str) -> str:
    """Turn a type checker's names into a person's: "`int | array`" is "a whole number or a list"."""
    return re.sub(
        r"`([^`]*)`", lambda match: " or ".join(_TYPES.get(name, name) for name in match[1].split(" | ")), types
    )


Where = tuple[str | int, ...]
