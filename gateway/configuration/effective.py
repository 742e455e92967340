"""The settings in force, with the value and the origin of each. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from devices.policy import Policy
from gateway.configuration.flags import FLAGS
from gateway.configuration.kinds import FlagKind
from gateway.configuration.settings import ConfigError

if TYPE_CHECKING:
    from devices.source import DeviceSource
    from gateway.configuration.settings import Given, Settings

DEFAULT: Final = "default"
_ONLY_IN_FILE: Final = {
    "sharing.timeSlicing.resources": "slices",
    "sharing.timeSlicing.failRequestsGreaterThanOne": "fail_requests_greater_than_one",
    "resources.gpus": "gpu_names",
    "resources.mig": "mig_names",
    "gateway.devices": "globbed",
    "gateway.bridge": "bridging",
}
"""Fields of the policy that only the configuration file sets, by key."""


_OF_ONE_VENDOR: Final = {
    "nvidia": {
        *("mig_strategy", "driver_root", "dev_root", "container_driver_root", "pass_device_specs", "id_strategy"),
        *("cdi_annotation_prefix", "cdi_hook_path", "cdi_disabled_hooks", "cdi_fallback", "gdrcopy", "gds", "mofed"),
        *("imex_channels", "imex_required"),
        *("disabled_health_checks", "enabled_health_checks", "gpu_names", "mig_names", "node_features"),
    },
    "amd": {"resource_naming"},
}
"""Fields of the policy that do nothing for the GPUs of another vendor."""
_SETTING_NAMES: Final = {field: key for key, field in _ONLY_IN_FILE.items()} | {flag.field: flag.name for flag in FLAGS}


class Setting(Struct, frozen=True, rename={"source": "from"}):
    """One setting: its flag or key, its value as in JSON, and its source: a flag, a variable, a line of the file."""

    name: str
    value: Any
    source: str


def _with_note(one: Setting, field: str, backend: str) -> Setting:
    """Return the setting, with a note if it was set and has no effect with this backend."""
    if one.source == DEFAULT or backend not in {"nvidia", "amd"} or field not in _fields_without_effect({backend}):
        return one
    return replace(one, source=f"{one.source} (no effect with --backend {backend})")


def in_force(settings: Settings, said: Mapping[str, Given]) -> Iterable[Setting]:
    """Return each setting. ``said`` has the winning values of flags, variables and file, by name.

    Settings without an effect are left out, unless they were set.
    """
    for flag in FLAGS:
        given = said.get(flag.name)
        if (of := _struct_with(settings, flag.field)) is not None:
            value = getattr(of, flag.field)
        elif given is not None:
            value = given.value
        elif flag.inert:
            continue
        else:
            empty = {FlagKind.SWITCH: False, FlagKind.LIST: []}
            value = empty.get(flag.kind, None if flag.default == "none" else flag.default)
        one = setting(flag.name, value, DEFAULT if given is None else given.source)
        yield _with_note(one, flag.field, settings.backend)
    for key, field in _ONLY_IN_FILE.items():
        value = getattr(settings.policy, field)
        unsaid = value == getattr(Policy(), field)
        one = setting(key, value, DEFAULT if unsaid else str(settings.config_file))
        yield _with_note(one, field, settings.backend)


def _struct_with(settings: Settings, field: str) -> Settings | Policy | None:
    return next((one for one in (settings.policy, settings) if field in one.__struct_fields__), None)


def _fields_without_effect(backends: Collection[str]) -> frozenset[str]:
    """Return the fields of the policy that have no effect with these backends. A simulated node may have GPUs of any vendor."""
    return frozenset().union(
        *(fields for name, fields in _OF_ONE_VENDOR.items() if not {name, "simulated"} & {*backends})
    )


def settings_without_effect(policy: Policy, source: DeviceSource) -> tuple[str, ...]:
    """Return a sentence for each setting that has no effect here: it is for another vendor, or its pattern matches no GPU."""
    plain, backends = Policy(), source.name.split("+")
    words, matched = " and ".join(backends), {pattern for one in source.unusable() for pattern in one.patterns}
    idle = [one for one in sorted(_fields_without_effect(backends)) if getattr(policy, one) != getattr(plain, one)]
    return (
        *(f"{_SETTING_NAMES[field]} has no effect on this node, whose devices come from {words}" for field in idle),
        *(
            f"exclude-devices: {pattern!r} names no GPU that was found. `gateway devices` lists UUIDs, indexes and products"
            for pattern in policy.excluded
            if pattern not in matched
        ),
    )


def setting(name: str, value: Any, source: str) -> Setting:
    """Return the setting with its value as in JSON; a set becomes a sorted list.

    Raises:
        ConfigError: the value isn't UTF-8, so neither JSON nor gRPC can carry it.
    """
    try:
        found = msgspec.json.decode(msgspec.json.encode(value, enc_hook=str))
    except UnicodeEncodeError:
        raise ConfigError(f"{source}: {str(value)!r:.80} is not UTF-8") from None
    return Setting(name, sorted(found) if isinstance(value, frozenset) else found, source)
