"""What the settings say of dynamic resource allocation, and what they can't say together. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from typing import Final

from gateway.configuration.kinds import unknown
from gateway.configuration.settings import ConfigError, Given

MODES: Final = ("off", "on", "only")
_DRIVER: Final = r"(?=.{1,63}\Z)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
"""A driver's name: a DNS subdomain of at most 63 characters (DriverNameMaxLength of k8s.io/api/resource/v1)."""
_STRATEGY: Final = "device-list-strategy"
_CDI: Final = "cdi-cri"


def taken(said: MutableMapping[str, Given], node_name: str) -> tuple[str, Mapping[str, str]]:
    """Take DRA's settings out of ``said`` (by flag name): whether it is on, and drivers' names by resources' domain.

    With it NVIDIA's GPUs are told by CDI names, whatever the configuration file says: what containers get of several claims
    adds up there, where one variable would replace another.

    Raises:
        ConfigError: they can't be used.
    """
    mode, names = said.pop("dra", None), said.pop("dra-drivers", None)
    drivers = _drivers(names) if names is not None else {}
    if mode is None or mode.value == "off":
        return "off", drivers
    if mode.value not in MODES:
        raise ConfigError(f"{mode.source}: {unknown(str(mode.value), ('off', 'on', 'only'))}")
    if not node_name:
        raise ConfigError(f"{mode.source}: needs the node's name. Set --node-name, or NODE_NAME from spec.nodeName.")
    strategy = said.get(_STRATEGY)
    if strategy is not None and _CDI not in (strategy.value if isinstance(strategy.value, tuple) else ()):
        raise ConfigError(
            f"{strategy.source}: needs {_CDI} with {mode.source}, because claims' devices reach containers by CDI. Leave it out"
        )
    said[_STRATEGY] = Given((_CDI,), mode.source)
    return str(mode.value), drivers


def _drivers(said: Given) -> dict[str, str]:
    found = {}
    for text in said.value if isinstance(said.value, tuple) else ():
        domain, equals, driver = str(text).partition("=")
        if not equals or not domain or not re.fullmatch(_DRIVER, driver):
            raise ConfigError(
                f"{said.source}: {str(text)!r:.80} is not DOMAIN=DRIVER, such as example.com=devices.example.com. A driver's name "
                "is a DNS name in lower case, of at most 63 characters"
            )
        found[domain] = driver
    return found
