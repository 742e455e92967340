"""Read a YAML text as Go's sigs.k8s.io/yaml does, because that reads NVIDIA's configuration files.

Only the first document is read. If a key is given twice, the last one wins. Anchors, aliases and ``<<`` work, in the order in
which they are written. Plain scalars are as in go-yaml v2 (its resolve.go): ``yes``, ``on`` and ``y`` are booleans, ``0o17``
and ``017`` are 15, ``1:30`` is text. There is one difference: Go accepts a colon before a bracket, ``[a:]``, and libyaml doesn't.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

import yaml

from devices import yamltree
from devices.yamltree import Language, Plain, YamlError, YamlNode
from gateway.configuration.settings import ConfigError

MAX_BYTES: Final = 1024 * 1024
"""Most bytes of a text: a ConfigMap can't hold more."""
_WORDS: Final[Mapping[str, bool | None]] = (
    dict.fromkeys(("", "~", "null", "Null", "NULL"), None)
    | dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"), True)
    | dict.fromkeys(("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"), False)
)
_INTEGER: Final = re.compile(r"([-+]?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO]?[0-7]+|0|[1-9][0-9]*)", re.ASCII)
_DECIMAL: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_NUMBER_CHARS: Final = 64
_RESOLVED: Final = frozenset(f"tag:yaml.org,2002:{name}" for name in ("bool", "float", "int", "null"))


def read(content: bytes, name: str) -> YamlNode:
    """Return the value of a text; null if it is empty. ``name`` is its name in errors.

    Raises:
        ConfigError: it is not YAML, or too long, too deep or too large.
    """
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{name}: more than {MAX_BYTES} bytes. Is it the configuration file?")
    try:
        return yamltree.read(content, GO)
    except YamlError as error:
        raise fault(name, error.line, str(error)) from error


def fault(name: str, line: int, problem: str) -> ConfigError:
    """Return the error for a problem on a line."""
    return ConfigError(f"{name}, line {line}: {problem}")


def _scalar(event: yaml.ScalarEvent) -> Plain:
    text: str = event.value
    plain = event.implicit[0] and event.tag is None
    return _resolved(text) if plain or event.tag in _RESOLVED else text


def _resolved(text: str) -> Plain:
    if text in _WORDS:
        return _WORDS[text]
    number = text.replace("_", "") if text[0] in "+-0123456789" else text
    if len(number) > _NUMBER_CHARS:
        return text
    if found := _INTEGER.fullmatch(number):
        digits = found[2]
        octal = digits[0] == "0" and digits.isdigit()
        return int(found[1] + digits, 8 if octal else 0)
    return float(number) if _DECIMAL.fullmatch(number) and math.isfinite(float(number)) else text


GO: Final = Language(_scalar, levels=32, values=50_000)
