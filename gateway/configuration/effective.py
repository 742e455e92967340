"""The configuration in force: each setting, its value, and who said it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from devices.policy import Policy
from gateway.configuration.flags import FLAGS
from gateway.configuration.kinds import FlagKind
from gateway.configuration.settings import ConfigError

if TYPE_CHECKING:
    from gateway.configuration.settings import Given, Settings

DEFAULT: Final = "default"
_FILE_ALONE: Final = {
    "sharing.timeSlicing.resources": "slices",
    "sharing.timeSlicing.failRequestsGreaterThanOne": "fail_requests_greater_than_one",
    "resources.gpus": "gpu_names",
    "resources.mig": "mig_names",
    "gateway.devices": "globbed",
    "gateway.bridge": "bridging",
}
"""Fields of the policy that only the configuration file sets, by their key there."""


class Setting(Struct, frozen=True, rename={"source": "from"}):
    """One setting: its flag or key, its value as in JSON, and what said it: a flag, a variable, a line of the file."""

    name: str
    value: Any
    source: str


def of_devices(settings: Settings, said: Mapping[str, Given]) -> Iterable[Setting]:
    """Say what of devices is in force; ``said`` is what flags, variables and file said, by flag name, each the one that wins.

    Flags without an effect are left out, but where somebody said one.
    """
    for flag in FLAGS:
        given = said.get(flag.name)
        if flag.field:
            value = getattr(settings.policy, flag.field)
        elif given is not None:
            value = given.value
        elif flag.inert:
            continue
        else:
            value = False if flag.kind is FlagKind.SWITCH else flag.default if flag.default != "none" else None
        yield setting(flag.name, value, DEFAULT if given is None else given.source)
    for key, field in _FILE_ALONE.items():
        value = getattr(settings.policy, field)
        unsaid = value == getattr(Policy(), field)
        yield setting(key, value, DEFAULT if unsaid else str(settings.config_file))


def logged(found: Iterable[Setting]) -> dict[str, Any]:
    """Give the settings as two fields of a line of the log: all values, and who said those that are no defaults."""
    found = list(found)
    return {
        "settings": {one.name: one.value for one in found},
        "said_by": {one.name: one.source for one in found if one.source != DEFAULT},
    }


def setting(name: str, value: Any, source: str) -> Setting:
    """Turn a value into what JSON has; sets in order, so that equal ones look alike.

    Raises:
        ConfigError: it is no UTF-8: neither JSON nor gRPC can say it.
    """
    try:
        found = msgspec.json.decode(msgspec.json.encode(value, enc_hook=str))
    except UnicodeEncodeError:
        raise ConfigError(f"{name} ({source}): expected UTF-8, got {str(value)!r:.80}: write or rename it so") from None
    return Setting(name, sorted(found) if isinstance(value, frozenset) else found, source)
