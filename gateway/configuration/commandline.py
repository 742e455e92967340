"""Turn the command line and the environment into settings.

The command line wins over the environment, and the environment over the configuration file. Only the value that wins is checked.
Flags follow Go's syntax: ``-x=true``. A list is separated by commas, or its flag is repeated (urfave/cli v2). Pure.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from devices.policy import Policy
from gateway.configuration.flags import FLAGS, NODE_LABEL
from gateway.configuration.kinds import TRUTH, Flag, FlagKind
from gateway.configuration.settings import Choice, ConfigError, Given, Settings

_PREFIX: Final = "GATEWAY_"
_KUBELET_SOCKET: Final = "kubelet.sock"
_DEVICE_LIST_STRATEGY: Final = "device-list-strategy"
_CDI_CRI: Final = "cdi-cri"
_MAX_UNKNOWN: Final = 20
_SERVICE_VARIABLE: Final = r"_SERVICE_(HOST|PORT)(_|$)|_PORT_\d+_(TCP|UDP|SCTP)(_|$)"
"""The pattern of variables that Kubernetes sets for Services ("Accessing the Service" of its documentation)."""
_FLAGS_BY_OPTION: Final[Mapping[str, Flag]] = {
    name: flag for flag in FLAGS if flag.option for name in (flag.name, *flag.aliases)
}


def normalize_flags(arguments: Sequence[str], valued: Collection[str]) -> list[str]:
    """Rewrite known flags as ``--name=value``, up to the command's name.

    Go's flag package allows one dash or two, and the value of a switch follows ``=``. NVIDIA's plugin reads ``--x false`` as ``--x``
    and ignores the rest of the line, so that is an error here. ``valued`` are the other options that have a value.

    Raises:
        ConfigError: a switch has its value in the next word.
    """
    left, done = deque(arguments), list[str]()
    while left:
        word = left.popleft()
        if word in {"-", "--"} or not word.startswith("-"):
            return [*done, word, *left]
        name, joined, value = word.removeprefix("-").removeprefix("-").partition("=")
        flag = _FLAGS_BY_OPTION.get(name)
        if word == "-v" and not (left and left[0].isdecimal()):
            done.append("--version")
        elif flag is None:
            done.append(word)
            if word in valued and left:
                done.append(left.popleft())
        elif joined:
            done.append(f"--{name}={value}")
        elif flag.kind is FlagKind.SWITCH:
            if left and left[0] in TRUTH:
                raise ConfigError(
                    f"--{name} {left[0]}: the value of a switch must follow '='. Write --{name}={left[0]}"
                )
            done.append(f"--{name}=true")
        else:
            done.append(f"--{name}={left.popleft()}" if left else f"--{name}")
    return done


def read_sources(texts: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Given]:
    """Return the values that options and environment variables set, by the setting's name. Options win.

    Args:
        texts: the options' texts, by ``Flag.parameter``.
        environment: the environment variables.

    Raises:
        ConfigError: a value is not of its setting's kind.
    """
    found = {}
    for flag in FLAGS:
        variable = next((name for name in flag.variables if name in environment), None)
        if texts.get(flag.parameter):
            found[flag.name] = flag.read(texts[flag.parameter], f"--{flag.name}")
        elif variable is not None:
            found[flag.name] = flag.read((environment[variable],), variable)
    return found


def make_settings(given: MutableMapping[str, Given]) -> Settings:
    """Return the settings that no configuration file can change.

    Two settings decide others. NVIDIA's --kubelet-socket names the socket directory. With --dra, containers always get NVIDIA's GPUs
    by CDI names: the CDI names of several claims add up, but one environment variable replaces another.

    Raises:
        ConfigError: a setting can't be used.
    """
    _follow_kubelet_socket(given)
    settings = Settings(**_checked_values(given, Settings))
    if settings.dra != "off":
        source = given["dra"].source
        if not settings.node_name:
            raise ConfigError(f"{source}: needs the node's name. Set --node-name, or NODE_NAME from spec.nodeName")
        strategy = given.get(_DEVICE_LIST_STRATEGY)
        if strategy is not None and _CDI_CRI not in (strategy.value if isinstance(strategy.value, tuple) else ()):
            raise ConfigError(
                f"{strategy.source}: needs {_CDI_CRI} with {source}, because claims' devices reach containers by CDI. Remove it"
            )
        given[_DEVICE_LIST_STRATEGY] = Given((_CDI_CRI,), source)
    of_devices = {flag.name for flag in FLAGS if flag.key or flag.field in Policy.__struct_fields__}
    return replace(settings, given={name: one for name, one in given.items() if name in of_devices})


def make_choice(given: Mapping[str, Given]) -> Choice | None:
    """Return how the node's label chooses the configuration file; None without a folder of files.

    Raises:
        ConfigError: a setting can't be used.
    """
    values = _checked_values(given, Choice)
    return Choice(**{"label": NODE_LABEL, **values}) if values.get("folder") else None


def make_policy(given: Mapping[str, Given], backend: str) -> Policy:
    """Return the policy for a backend from these settings (by name).

    Raises:
        ConfigError: a setting can't be used.
    """
    return replace(Policy(), **{"fail_on_init_error": backend == "nvidia", **_checked_values(given, Policy)})


def _checked_values(given: Mapping[str, Given], struct: type[Settings | Choice | Policy]) -> dict[str, Any]:
    """Check the settings that belong to ``struct``, and return their values by field. Settings without a field belong to ``Policy``."""
    values = {}
    for flag in FLAGS:
        one, field = given.get(flag.name), flag.field
        if one is None or flag.inert:
            continue
        if next((kind for kind in (Settings, Choice) if field in kind.__struct_fields__), Policy) is not struct:
            continue
        try:
            value = flag.judge(one.value)
        except ValueError as error:
            raise ConfigError(f"{one.source}: {error}") from error
        if field in struct.__struct_fields__:
            values[field] = value
    return values


def _follow_kubelet_socket(given: MutableMapping[str, Given]) -> None:
    """Set the socket directory to the folder of --kubelet-socket, unless --socket-dir wins."""
    socket, ours = given.get("kubelet-socket"), given.get("socket-dir")
    if socket is None:
        return
    path = Path(str(socket.value))
    if path.name != _KUBELET_SOCKET:
        raise ConfigError(f"{socket.source}: {str(socket.value)!r} is not the path of a {_KUBELET_SOCKET}")
    if ours is not None and (by_option := ours.source.startswith("--")) == socket.source.startswith("--"):
        if Path(str(ours.value)) != path.parent:
            raise ConfigError(
                f"{socket.source}: its folder {path.parent} is not --socket-dir {ours.value}. Leave one of them out",
                "socket-dir",
            )
    elif ours is None or not by_option:
        given["socket-dir"] = Given(str(path.parent), socket.source)


def sources_without_effect(given: Mapping[str, Given]) -> list[str]:
    """Return the sources of the settings that have no effect."""
    return [given[flag.name].source for flag in FLAGS if flag.inert and flag.name in given]


def unknown_variables(environment: Mapping[str, str], commands: Iterable[str]) -> list[str]:
    """Return a sentence, without the value, for each variable that looks like a setting of the gateway and is unknown.

    It skips the variables of Services whose name begins with "gateway", and those of the options of ``commands``.
    """
    known = {name for flag in FLAGS for name in flag.variables}
    of_commands = tuple(f"{_PREFIX}{name.upper()}_" for name in commands)
    strange = [
        name
        for name, value in sorted(environment.items())
        if name.startswith(_PREFIX) and not name.startswith(of_commands) and name not in known
        if not re.search(_SERVICE_VARIABLE, name) and "://" not in value
    ]
    if not strange:
        return []
    from difflib import get_close_matches  # noqa: PLC0415 - only wrong names need it

    plain = {name.removeprefix(_PREFIX): name for name in known}  # All names share the prefix.
    near = {name: get_close_matches(name.removeprefix(_PREFIX), plain, 1) for name in strange}
    return [
        f"{name:.80} isn't a setting of the gateway, and is ignored"
        + (f"; did you mean {plain[near[name][0]]}?" if near[name] else "")
        for name in strange[:_MAX_UNKNOWN]
    ]
