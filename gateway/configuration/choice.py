"""Which of several configuration files counts on this node: the node's label says so, as with NVIDIA's config-manager.

Label, default and fallback strategies mean what they mean there (cmd/config-manager of k8s-device-plugin 0.20). Where that
one ends with an error, what counted before goes on to count here, over a restart too: the last label whose configuration
was good is remembered beside the state file.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from devices import files
from gateway.configuration.settings import Choice, ConfigError

NAMED: Final = "default"
"""The configuration that the strategy ``named`` looks for."""
MEMORY: Final = "node-config.json"
"""The file in the state directory that remembers the label."""
_MOST: Final = 4096


class ChoiceError(ConfigError):
    """No file is chosen; another label or another file may well come."""

    lasting = False


class _Memory(Struct):
    name: str
    value: str


class Label:
    """The node's label as it is known now; ``changed`` is set when it became another one."""

    def __init__(self, value: str) -> None:
        self.value = value
        self.changed = asyncio.Event()

    def say(self, value: str) -> None:
        """Take the label's value; empty where the node has no such label."""
        if value != self.value:
            self.value = value
            self.changed.set()


def choose(choice: Choice, label: str, names: Collection[str]) -> str | None:
    """Say which of the folder's files counts; None: the empty configuration. Pure.

    Raises:
        ChoiceError: none does.
    """
    if label or choice.default:
        said = f"the label {choice.label}={label}" if label else "the default configuration"
        name = label or choice.default
        if name not in names:
            raise ChoiceError(
                f"{said} names the configuration {name!r:.80}, and {choice.folder} has {_list(names)}: correct the "
                f"{'label' if label else 'default'}, or add the file"
            )
        return name
    for strategy in choice.fallbacks:
        if strategy == "named" and NAMED in names:
            return NAMED
        if strategy == "single" and len(names) == 1:
            return next(iter(names))
        if strategy == "empty":
            return None
    raise ChoiceError(
        f"the node has no label {choice.label}, there is no default configuration, and no fallback strategy fits "
        f"({', '.join(choice.fallbacks) or 'none is given'}; {choice.folder} has {_list(names)}): set the label or a default"
    )


def locate(choice: Choice, label: str) -> Path | None:
    """Find the file that counts; None: the empty configuration.

    Raises:
        ChoiceError: there is none, or the folder can't be read.
    """
    try:
        with os.scandir(choice.folder) as entries:
            # A mounted ConfigMap has links of its own that begin with "..".
            names = [entry.name for entry in entries if not entry.name.startswith("..") and not entry.is_dir()]
    except OSError as error:
        raise ChoiceError(
            f"{choice.folder}: the folder of configuration files can't be read ({error.strerror}). Mount it"
        ) from error
    name = choose(choice, label, names)
    return None if name is None else choice.folder / name


def remembered(choice: Choice, state_dir: Path) -> str | None:
    """Return the last label that led to a good configuration; None where none is known."""
    try:
        found = msgspec.json.decode(files.read_plain(state_dir / MEMORY, _MOST), type=_Memory)
    except (OSError, files.NotPlainError, ValueError, RecursionError):
        return None
    return found.value if found.name == choice.label else None


def remember(choice: Choice, state_dir: Path, label: str) -> None:
    """Remember a label, if it isn't.

    Raises:
        OSError: it can't be written.
    """
    if remembered(choice, state_dir) == label:
        return
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.replace(state_dir / MEMORY, msgspec.json.encode(_Memory(choice.label, label)))


def _list(names: Collection[str]) -> str:
    shown = sorted(names)[:8]
    return ", ".join(repr(name)[:80] for name in shown) + (", ..." if len(names) > len(shown) else "") or "no file"
