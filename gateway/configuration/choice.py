"""Choose one of several configuration files by the node's label, as NVIDIA's config-manager does.

Label, default and fallback strategies have the same meaning (cmd/config-manager of k8s-device-plugin 0.20). If no file fits,
NVIDIA's program ends with an error. The gateway keeps its last valid configuration, also after a restart: it remembers the last
label with a valid configuration next to the state file.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping
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
_MAX_BYTES: Final = 4096


class ChoiceError(ConfigError):
    """No file fits. Another label or another file may come later."""

    lasting = False


class _Memory(Struct):
    name: str
    value: str


class Label:
    """The value of the node's label that chooses the file. ``changed`` is set when it changes."""

    def __init__(self, choice: Choice, value: str) -> None:
        self.choice, self.value = choice, value
        self.changed = asyncio.Event()

    def read(self, labels: Mapping[str, str]) -> None:
        """Set the value from the node's labels; empty if the node has no such label."""
        if (value := labels.get(self.choice.label, "")) != self.value:
            self.value = value
            self.changed.set()


def choose(choice: Choice, label: str, names: Collection[str]) -> str | None:
    """Return the name of the file that the label chooses; None is the empty configuration. Pure.

    Raises:
        ChoiceError: no file is chosen.
    """
    if label or choice.default:
        said = f"the label {choice.label}={label}" if label else "the default configuration"
        name = label or choice.default
        if name not in names:
            raise ChoiceError(
                f"{said}: no configuration {name!r:.80} in {choice.folder}, which has {_list(names)}. Correct the "
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
        f"({', '.join(choice.fallbacks) or 'none is given'}; {choice.folder} has {_list(names)}). Set the label or a default"
    )


def locate(choice: Choice, label: str) -> Path | None:
    """Return the path of the file that the label chooses; None is the empty configuration.

    Raises:
        ChoiceError: no file is chosen, or the folder can't be read.
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
    """Return the last label that had a good configuration, if one is known."""
    try:
        found = msgspec.json.decode(files.read_plain(state_dir / MEMORY, _MAX_BYTES), type=_Memory)
    except (OSError, files.NotPlainError, ValueError, RecursionError):
        return None
    return found.value if found.name == choice.label else None


def remember(choice: Choice, state_dir: Path, label: str) -> None:
    """Write the label into the state directory, unless it is there.

    Raises:
        OSError: the file can't be written.
    """
    if remembered(choice, state_dir) == label:
        return
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.replace(state_dir / MEMORY, msgspec.json.encode(_Memory(choice.label, label)))


def _list(names: Collection[str]) -> str:
    shown = sorted(names)[:8]
    return ", ".join(repr(name)[:80] for name in shown) + (", ..." if len(names) > len(shown) else "") or "no file"
