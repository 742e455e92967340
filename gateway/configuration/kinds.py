"""What a setting is, and functions from a value of its kind to the one that the gateway uses. Pure.

Each of them raises ValueError, with what is wrong and what is allowed, if it can't use a value.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from adapters.levels import minor_version
from devices.policy import ListStrategy, Policy
from gateway.configuration.settings import ConfigError, Given, Settings

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
_ADDRESS: Final = re.compile(r"(?:(?:(?P<host>[^\s:\[\]]*)|\[(?P<v6>[0-9A-Fa-f:.]+(?:%\w+)?)\]):)?(?P<port>[0-9]{1,5})")
_LOOPBACK: Final = "127.0.0.1"
_DRIVER: Final = r"(?=.{1,63}\Z)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
"""A DRA driver's name: a DNS subdomain of at most 63 characters (DriverNameMaxLength of k8s.io/api/resource/v1)."""


class FlagKind(Enum):
    """What a flag takes; the value is a person's word for it."""

    SWITCH = "true or false"
    TEXT = "text"
    LIST = "a list of texts"
    NAMES = "a list of texts and whole numbers"
    NUMBERS = "a list of whole numbers"
    SECONDS = "a number of seconds"


class Flag(Struct, frozen=True):
    """One setting.

    ``key`` is its path in the configuration file. ``take`` turns a value of its kind into one for its field. A setting without
    ``option`` is a variable or a key only. One that is ``inert`` is accepted, because people bring it along, and does nothing here.
    """

    name: str
    meaning: str = ""
    prefix: str = "GATEWAY_"
    """What its variable's name begins with. The rest is the flag's name: ``--socket-dir`` is ``GATEWAY_SOCKET_DIR``."""
    named: tuple[str, ...] = ()
    """Its variables, if they are others than that one: the first one that is set counts."""
    key: tuple[str, ...] = ()
    sets: str = ""
    """The field that it sets, if that has another name."""
    kind: FlagKind = FlagKind.TEXT
    otherwise: str = ""
    """Its default in words, if the field's own doesn't say it."""
    form: str = ""
    """A name for what is written, or the words that are allowed, if ``take`` doesn't list them."""
    take: Callable[[Any], Any] = lambda value: value
    refused: str = ""
    """What else an error says of a word that is not allowed."""
    aliases: tuple[str, ...] = ()
    option: bool = True
    inert: bool = False

    @property
    def variables(self) -> tuple[str, ...]:
        """Its environment variables, in the order in which they are asked."""
        return self.named or ((f"{self.prefix}{self.parameter.upper()}",) if self.option else ())

    @property
    def field(self) -> str:
        """The field of ``Settings``, ``Choice`` or ``Policy`` that it sets; another word if it sets none."""
        return self.sets or self.parameter

    @property
    def default(self) -> str:
        """Its default, in words."""
        value = next((getattr(one, self.field) for one in (Settings(), Policy()) if hasattr(one, self.field)), None)
        if isinstance(value, frozenset):
            value = next(iter(value), None)
        found = value.value if isinstance(value, Enum) else f"{value:g}" if isinstance(value, float) else value
        return self.otherwise or (str(found).lower() if found or found is False else "none")

    @property
    def values(self) -> str:
        """The words that are allowed, with ``|`` between them, or a name for what is written."""
        listed: Mapping[str, Enum] = getattr(self.take, "__members__", {})
        return self.form or "|".join(one.value for one in listed.values())

    def judge(self, value: Any) -> Any:
        """Turn a value of its kind into one for its field.

        Raises:
            ValueError: it can't be used.
        """
        words, texts = self.values.split("|"), (value,) if isinstance(value, str) else value
        if len(words) > 1:
            if self.default != "none" and not texts:
                raise ValueError(f"the list is empty. Allowed: {', '.join(words)}")
            for text in texts:
                if text not in words and (text or self.default != "none"):
                    raise ValueError(unknown(text, words) + (self.refused and f". {self.refused}"))
        return self.take(value)

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


def strategies(texts: Sequence[str]) -> frozenset[ListStrategy]:
    """Take what DEVICE_LIST_STRATEGY names."""
    return frozenset(map(ListStrategy, texts))


def written(texts: Sequence[str]) -> tuple[str, ...]:
    """Take the texts that are not empty."""
    return tuple(filter(None, texts))


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


def seconds(text: str, most: int = _LONGEST) -> float:
    """Take 0 s to so many."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= most:
        raise ValueError(f"{text!r:.80} is not a number from 0 to {most} (seconds, without a unit)")
    return seconds


def whole_path(text: str) -> Path:
    """Take a path; an empty one would mean this folder."""
    if not text:
        raise ValueError("the value is empty. Write a path, or leave it out")
    return Path(text)


def optional(take: Callable[[str], Any]) -> Callable[[str], Any]:
    """Take what ``take`` does, or nothing."""
    return lambda text: take(text) if text else None


def kubelet_minor(text: str) -> int:
    """Take a kubelet's version, such as ``1.28`` or ``v1.28.15``."""
    if (minor := minor_version(text)) < 8:
        raise ValueError(f"kubelet {text} has no device plugins. The first that has is 1.8")
    return minor


def address(text: str) -> tuple[str, int]:
    """Take where to listen: ``HOST:PORT``, ``[IPV6]:PORT``, ``:PORT`` (every address), or ``PORT`` alone (this machine only).

    Port 0 is any free one; the host of ``:PORT`` is empty.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ValueError(
            f"{text[:80]!r} is not HOST:PORT or PORT, such as 10.1.2.3:9400, :9400 (every address) or 9400 (this machine only)"
        )
    host = match["host"] if match["host"] is not None else match["v6"]
    return _LOOPBACK if host is None else host, int(match["port"])


def taint_key(text: str) -> str:
    """Take a taint's key, or nothing."""
    if not {*text}.isdisjoint("=: "):
        raise ValueError(
            f"{text!r:.80} is not a taint's key. Write it without value and effect, such as example.com/starting"
        )
    return text


def drivers(texts: Sequence[str]) -> dict[str, str]:
    """Take DRA drivers' names by the domain of resources."""
    found = {}
    for text in texts:
        domain, equals, driver = text.partition("=")
        if not equals or not domain or not re.fullmatch(_DRIVER, driver):
            raise ValueError(
                f"{text!r:.80} is not DOMAIN=DRIVER, such as example.com=devices.example.com. A driver's name is a DNS name "
                "in lower case, of at most 63 characters"
            )
        found[domain] = driver
    return found


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
