"""The declaration of a setting, and functions that check and convert a value. Pure.

Each function raises ValueError; the message says what is wrong and what is allowed.
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

# The words that Go's strconv.ParseBool accepts.
TRUTH: Final[Mapping[str, bool]] = dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True) | dict.fromkeys(
    ("0", "f", "F", "FALSE", "false", "False"), False
)
_MAX_S: Final = 30 * 86_400
_HOOKS: Final = (
    "all, chmod, create-soname-symlinks, create-symlinks, disable-device-node-modification, enable-cuda-compat, "
    "update-application-profile, update-ldcache"
)
"""The CDI hooks of NVIDIA's Container Toolkit (pkg/nvcdi), including those that the gateway never uses."""
_ADDRESS: Final = re.compile(r"(?:(?:(?P<host>[^\s:\[\]]*)|\[(?P<v6>[0-9A-Fa-f:.]+(?:%\w+)?)\]):)?(?P<port>[0-9]{1,5})")
_LOOPBACK: Final = "127.0.0.1"
_DRIVER: Final = r"(?=.{1,63}\Z)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
"""A DRA driver's name: a DNS subdomain of at most 63 characters (DriverNameMaxLength of k8s.io/api/resource/v1)."""


class FlagKind(Enum):
    """The kind of a flag's value. Its own value is the word for people."""

    SWITCH = "true or false"
    TEXT = "text"
    LIST = "a list of texts"
    NAMES = "a list of texts and whole numbers"
    NUMBERS = "a list of whole numbers"
    SECONDS = "a number of seconds"


class Flag(Struct, frozen=True):
    """One setting.

    ``key`` is its path in the configuration file. ``take`` converts a value of its kind for its field. A setting without
    ``option`` is only a variable or a key. An ``inert`` setting is accepted and has no effect, because existing files have it.
    """

    name: str
    meaning: str = ""
    prefix: str = "GATEWAY_"
    """The prefix of its variable. The rest is the flag's name: ``--socket-dir`` is ``GATEWAY_SOCKET_DIR``."""
    named: tuple[str, ...] = ()
    """Its variables, if their names don't follow from the flag. The first one that is set is used."""
    key: tuple[str, ...] = ()
    sets: str = ""
    """The field that it sets, if that has another name than the flag."""
    kind: FlagKind = FlagKind.TEXT
    otherwise: str = ""
    """Its default in words, if the field's own doesn't say it."""
    form: str = ""
    """The placeholder for its value, or the allowed words if ``take`` doesn't list them."""
    take: Callable[[Any], Any] = lambda value: value
    refused: str = ""
    """A further sentence for the error about a word that is not allowed."""
    aliases: tuple[str, ...] = ()
    option: bool = True
    inert: bool = False

    @property
    def variables(self) -> tuple[str, ...]:
        """Its environment variables, in order of precedence."""
        return self.named or ((f"{self.prefix}{self.parameter.upper()}",) if self.option else ())

    @property
    def field(self) -> str:
        """The field of ``Settings``, ``Choice`` or ``Policy`` that it sets; if it sets none, no field has this name."""
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
        """The allowed words, with ``|`` between them, or the placeholder."""
        listed: Mapping[str, Enum] = getattr(self.take, "__members__", {})
        return self.form or "|".join(one.value for one in listed.values())

    def judge(self, value: Any) -> Any:
        """Convert a value of its kind for its field.

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
        """Convert the texts of the command line or of a variable to a value. The last text is used; a list has all of them.

        Raises:
            ConfigError: the value is not of its kind.
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
                return Given(TRUTH.get(texts[-1], False), source)  # An empty variable means false.
            case FlagKind.NUMBERS:
                wrong = [
                    part for part in parts if part and not (part.isascii() and part.isdecimal() and len(part) < 10)
                ]
                if wrong:
                    raise ConfigError(f"{source}: {wrong[0]!r:.80} is not a whole number. Separate numbers with commas")
                return Given(tuple(int(part) for part in parts if part), source)


def unknown(text: str, allowed: Iterable[str]) -> str:
    """Return the error for a word that is not allowed, with the allowed words and the one that is probably meant."""
    from difflib import get_close_matches  # noqa: PLC0415 - needed only for a wrong word

    words = [*allowed]
    meant = "".join(f" (did you mean {near!r}?)" for near in get_close_matches(text, words, 1))
    return f"unknown value {text!r:.80}{meant}. Allowed: {', '.join(words)}"


def strategies(texts: Sequence[str]) -> frozenset[ListStrategy]:
    """Return the strategies of DEVICE_LIST_STRATEGY."""
    return frozenset(map(ListStrategy, texts))


def written(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the texts that are not empty."""
    return tuple(filter(None, texts))


def driver(text: str) -> str:
    """Return the AMD driver type, if it is supported; '' means automatic detection."""
    if text not in {"", "container"}:
        raise ValueError(f"{unknown(text, ('container',))}. Only GPUs for containers are offered here")
    return text


def channels(numbers: Sequence[int]) -> tuple[int, ...]:
    """Return the IMEX channels: none, or channel 0, as in NVIDIA's plugin."""
    if tuple(numbers) not in {(), (0,)}:
        raise ValueError(f"{list(numbers)!r:.80}: only IMEX channel 0 can be given to containers. Allowed: [] or [0]")
    return tuple(numbers)


def path(text: str) -> str:
    """Return a path as it is written."""
    if not text.isprintable():
        raise ValueError(f"control characters in the path {text!r:.80}")
    return text


def root(text: str) -> str:
    """Return an absolute path."""
    return posixpath.normpath("/" + path(text).strip("/"))


def root_or_none(text: str) -> str:
    """Return an absolute path; '' if the text is empty."""
    return root(text) if text else ""


def path_or_default(text: str) -> str:
    """Return a path; NVIDIA's default if the text is empty."""
    return path(text) or Policy().cdi_hook_path


def folder_or_none(text: str) -> str:
    """Return a path that must be absolute; '' if the text is empty."""
    if text and not text.startswith("/"):
        raise ValueError(f"{path(text)!r:.80} is not an absolute path")
    return posixpath.normpath(path(text)) if text else ""


def seconds(text: str, most: int = _MAX_S) -> float:
    """Return a number of seconds from 0 to ``most``."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= most:
        raise ValueError(f"{text!r:.80} is not a number from 0 to {most} (seconds, without a unit)")
    return seconds


def whole_path(text: str) -> Path:
    """Return a path that is not empty: an empty one would mean the current folder."""
    if not text:
        raise ValueError("the value is empty. Write a path, or leave it out")
    return Path(text)


def optional(take: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a function that does what ``take`` does, and returns None for an empty text."""
    return lambda text: take(text) if text else None


def kubelet_minor(text: str) -> int:
    """Return the minor version of a kubelet's version such as ``1.28`` or ``v1.28.15``."""
    if (minor := minor_version(text)) < 8:
        raise ValueError(f"kubelet {text} has no device plugins. The first that has is 1.8")
    return minor


def address(text: str) -> tuple[str, int]:
    """Return the address to listen on: ``HOST:PORT``, ``[IPV6]:PORT``, ``:PORT`` (every address), or ``PORT`` (this machine only).

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
    """Return a taint's key; '' if the text is empty."""
    if not {*text}.isdisjoint("=: "):
        raise ValueError(
            f"{text!r:.80} is not a taint's key. Write it without value and effect, such as example.com/starting"
        )
    return text


def drivers(texts: Sequence[str]) -> dict[str, str]:
    """Return the names of DRA drivers, by the domain of their resources."""
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
    """Return patterns, each once, without empty ones."""
    found = tuple(dict.fromkeys(filter(None, texts)))
    for text in found:
        if not text.isprintable():
            raise ValueError(
                f"unprintable characters in {text!r:.80}. Name a GPU by UUID, index, PCI address or product"
            )
    return found


def hooks(texts: Sequence[str]) -> frozenset[str]:
    """Return names of CDI hooks. Unknown names are allowed, as in NVIDIA's plugin: a later toolkit may know them."""
    return frozenset(texts) - {""}


def unknown_hooks(policy: Policy) -> list[str]:
    """Return a sentence if a hook to leave out is unknown to this gateway."""
    strange = ", ".join(sorted(policy.cdi_disabled_hooks - {*_HOOKS.split(", ")}))
    words = f"cdi-disable-hooks: {strange!r:.80} isn't known, and has no effect. The known hooks are {_HOOKS}"
    return [words] if strange else []
