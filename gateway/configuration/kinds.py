"""What a flag is and takes: its kind, and functions from a value of its kind to one for the policy. Pure.

Each of them raises ValueError, with what is wrong and what is allowed, where a value can't be taken.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final

from msgspec import Struct

from devices.policy import ListStrategy, Policy
from gateway.configuration.settings import ConfigError, Given

# What Go's strconv.ParseBool takes.
TRUTH: Final[Mapping[str, bool]] = dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True) | dict.fromkeys(
    ("0", "f", "F", "FALSE", "false", "False"), False
)
_LONGEST: Final = 30 * 86_400
_HOOKS: Final = (
    "all, chmod, create-soname-symlinks, create-symlinks, disable-device-node-modification, enable-cuda-compat, "
    "update-application-profile, update-ldcache"
)
"""Of NVIDIA's Container Toolkit (pkg/nvcdi), with those that are never made here."""


class FlagKind(Enum):
    """What a flag takes; the value is a person's word for it."""

    SWITCH = "true or false"
    TEXT = "text"
    LIST = "a list of texts"
    NAMES = "a list of texts and whole numbers"
    NUMBERS = "a list of whole numbers"
    SECONDS = "a number of seconds"


class Flag(Struct, frozen=True):
    """One setting. ``key`` is its path in the configuration file; ``variables`` are asked in this order.

    ``take`` turns a value of its kind into one for ``Policy.<field>`` and raises ValueError where that can't be. One that has
    no ``option`` is a variable only. One that is ``inert`` is accepted because people bring it along, and does nothing here.
    """

    name: str
    meaning: str = ""
    variables: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    field: str = ""
    kind: FlagKind = FlagKind.TEXT
    default: str = ""
    values: str = ""
    take: Callable[[Any], Any] = lambda value: value
    aliases: tuple[str, ...] = ()
    option: bool = True
    inert: bool = False

    @property
    def parameter(self) -> str:
        """Its name as a Python identifier."""
        return self.name.replace("-", "_")

    def read(self, texts: Sequence[str], source: str) -> Given:
        """Turn what the command line or a variable says into a value; of several texts the last counts, or all of a list.

        Raises:
            ConfigError: it is no value of its kind.
        """
        parts = tuple(part.strip() for text in texts for part in text.split(","))
        match self.kind:
            case FlagKind.TEXT | FlagKind.SECONDS:
                return Given(texts[-1], source)
            case FlagKind.LIST | FlagKind.NAMES:
                return Given(parts, source)
            case FlagKind.SWITCH:
                if texts[-1] and texts[-1] not in TRUTH:
                    raise ConfigError(f"{source}: {unknown(texts[-1], ('true', 'false'))}")
                return Given(TRUTH.get(texts[-1], False), source)  # a variable that is empty means false
            case FlagKind.NUMBERS:
                wrong = [
                    part for part in parts if part and not (part.isascii() and part.isdecimal() and len(part) < 10)
                ]
                if wrong:
                    raise ConfigError(f"{source}: {wrong[0]!r:.80} is not a whole number. Separate numbers with commas")
                return Given(tuple(int(part) for part in parts if part), source)


def unknown(text: str, allowed: Iterable[str]) -> str:
    """Say that a word is not allowed, which ones are, and which one may be meant."""
    from difflib import get_close_matches  # noqa: PLC0415 - needed where a word is wrong, and nowhere else

    words = [*allowed]
    meant = "".join(f" (did you mean {near!r}?)" for near in get_close_matches(text, words, 1))
    return f"unknown value {text!r:.80}{meant}. Allowed: {', '.join(words)}"


def one_of(choices: type[Enum]) -> Callable[[str], Enum]:
    """Take one of these words."""

    def take(text: str) -> Enum:
        try:
            return choices(text)
        except ValueError:
            raise ValueError(unknown(text, _words(choices))) from None

    return take


def _words(choices: type[Enum]) -> list[str]:
    return [str(choice.value) for choice in choices]


def strategies(texts: Sequence[str]) -> frozenset[ListStrategy]:
    """Take what DEVICE_LIST_STRATEGY names."""
    if not texts:
        raise ValueError(f"the list is empty. Allowed: {', '.join(_words(ListStrategy))}")
    take = one_of(ListStrategy)
    return frozenset(ListStrategy(take(text)) for text in texts)


def discovery(text: str) -> str:
    """Take what works here."""
    if text == "tegra":
        raise ValueError("tegra (the GPUs of Jetson boards) is not supported here: keep NVIDIA's plugin on such a node")
    if text not in {"auto", "nvml"}:
        raise ValueError(unknown(text, ("auto", "nvml")))
    return text


def driver(text: str) -> str:
    """Take what works here; '' leaves it to the plugin."""
    if text not in {"", "container"}:
        raise ValueError(f"{unknown(text, ('container',))}. Only GPUs for containers are offered here")
    return text


def channels(numbers: Sequence[int]) -> tuple[int, ...]:
    """Take no IMEX channel, or the first one, as NVIDIA's plugin does."""
    if tuple(numbers) not in {(), (0,)}:
        raise ValueError(f"{list(numbers)!r:.80}: only IMEX channel 0 can be given to containers. Allowed: [] or [0]")
    return tuple(numbers)


def path(text: str) -> str:
    """Take a path as it is written."""
    if not text.isprintable():
        raise ValueError(f"control characters in the path {text!r:.80}")
    return text


def root(text: str) -> str:
    """Take a path from the root on."""
    return posixpath.normpath("/" + path(text).strip("/"))


def root_or_none(text: str) -> str:
    """Take a path from the root on, or nothing."""
    return root(text) if text else ""


def path_or_default(text: str) -> str:
    """Take a path; without one it is NVIDIA's."""
    return path(text) or Policy().cdi_hook_path


def folder_or_none(text: str) -> str:
    """Take an absolute path, or nothing."""
    if text and not text.startswith("/"):
        raise ValueError(f"{path(text)!r:.80} is not an absolute path")
    return posixpath.normpath(path(text)) if text else ""


def seconds(text: str) -> float:
    """Take 0 s to 30 days."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _LONGEST:
        raise ValueError(f"{text!r:.80} is not a number from 0 to {_LONGEST} (seconds, without a unit)")
    return seconds


def patterns(texts: Sequence[str]) -> tuple[str, ...]:
    """Take patterns, each once; an empty one is none."""
    found = tuple(dict.fromkeys(filter(None, texts)))
    for text in found:
        if not text.isprintable():
            raise ValueError(
                f"unprintable characters in {text!r:.80}. Name a GPU by UUID, index, PCI address or product"
            )
    return found


def hooks(texts: Sequence[str]) -> frozenset[str]:
    """Take names of CDI hooks, those of a later toolkit, too, as NVIDIA's plugin does; an empty one is none."""
    return frozenset(texts) - {""}


def unknown_hooks(policy: Policy) -> list[str]:
    """Say which hooks are to be left out that are never made here, for who misspelt one."""
    strange = ", ".join(sorted(policy.cdi_disabled_hooks - {*_HOOKS.split(", ")}))
    words = f"cdi-disable-hooks: {strange!r:.80} isn't known, and changes nothing: the known hooks are {_HOOKS}"
    return [words] if strange else []
