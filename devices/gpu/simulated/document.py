"""Read a profile's YAML, and report errors in it with their lines."""

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
"""The highest number of a NUMA node: Linux has at most 1024 (CONFIG_NODES_SHIFT)."""


_WORDS: Final[Mapping[str, bool | None]] = {"": None, "~": None, "null": None, "true": True, "false": False}
_INTEGER: Final = re.compile(r"[-+]?[0-9]{1,18}", re.ASCII)
_DECIMAL: Final = re.compile(r"[-+]?([0-9]+\.?|[0-9]*\.[0-9]+)([eE][-+]?[0-9]+)?", re.ASCII)
_ADVICE: Final[Mapping[str, str]] = {
    "": "Write 'resources:' and beneath it resource names, such as nvidia.com/gpu",
    "resources": "Write resource names, and beneath each 'gpus:' and, where wanted, 'numa:', 'unhealthy:', 'recovered:', "
    "'released:', 'withdrawn:', 'cdi:', 'pre_start:', 'links:', 'partitions:', 'mig:', 'product:' and 'memory:'",
    "gpus": "Write how many, such as 'gpus: 8', or a list with uuid, numa, health, reason and device_nodes of each",
    "numa": f"Write the number of a NUMA node, 0 to {MAX_NODE}, for each GPU, or null if it is unknown",
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


class ProfileError(ValueError):
    """A profile can't be used. The message names the file and the line, what is wrong and what to do."""


class Document:
    """A profile's YAML text as plain values that know their lines.

    Plain scalars mean what YAML 1.2 says: null, true, numbers, else text. So ``no`` is a word and ``1:30`` not a number, unlike in
    NVIDIA's configuration files (``gateway.configuration.document``).
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
        # Before anything of it is quoted: it may be another file, such as one with secrets.
        if not isinstance(self._root, dict) or "resources" not in self._root:
            self.refuse((), "the key 'resources' is missing", "")

    def convert(self, path: Where, kind: Any) -> Any:
        """Return the value at ``path`` as a ``kind``, or refuse it."""
        value: Any = reduce(operator.getitem, path, self._root)
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            problem, _, place = str(error).partition(" - at ")
            path = (*path, *(key or int(index) for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", place)))
            advice = next((key for key in reversed(path) if key in _ADVICE), "")
            if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem, re.DOTALL):
                path, problem = (*path, unknown[1]), "this key is unknown"
            self.refuse(path, f"{problem} as a key" if place.startswith("`key`") else problem, str(advice))

    def refuse(self, path: Where, problem: str, field: str | None = None) -> NoReturn:
        """Raise a ``ProfileError`` that says what is wrong at ``path``, with the advice for ``field``."""
        where = "".join(
            f".{key:.80}" if isinstance(key, str) and key.isidentifier() else f"[{key!r:.80}]" for key in path
        )
        advice = "" if field is None else f". {_ADVICE[field]}"
        self._fail(self._line(path), f"{where[1:] or 'the profile'}: {problem}{advice}")

    def _line(self, path: Where) -> int:
        """Return the line of the value at ``path``, or of the last part of the path that exists."""
        node: Any = self._node
        for key in path:
            try:
                node = node.value[key]
            except (LookupError, TypeError):
                break
        line: int = node.line
        return line

    def _fail(self, line: int, problem: str) -> NoReturn:
        raise ProfileError(f"{self._name}, line {line}: {problem}")


def _scalar(event: yaml.ScalarEvent) -> Plain:
    text: str = event.value
    if not event.implicit[0]:  # Quoted, or a block: always text.
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _DECIMAL.fullmatch(text) else text


LANGUAGE: Final = Language(_scalar, levels=9, values=2_000_000, strict=True)


Where = tuple[str | int, ...]
