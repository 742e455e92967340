"""What command line and environment say of the flags, and the policy that it means together with the configuration file.

The command line beats the environment, that beats the file, and only what wins is judged. Flags are spelled as with Go:
``-x=true``, and a list by commas or by repetition (urfave/cli v2). Pure.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from devices.policy import Policy
from gateway.configuration.flags import FLAGS
from gateway.configuration.kinds import TRUTH, Flag, FlagKind
from gateway.configuration.settings import ConfigError, Given

_PREFIX: Final = "GATEWAY_"
_MAX_STRANGE: Final = 20
_OF_A_SERVICE: Final = r"_SERVICE_(HOST|PORT)(_|$)|_PORT_\d+_(TCP|UDP|SCTP)(_|$)"
"""Variables that Kubernetes makes for Services ("Accessing the Service" of its documentation)."""
_BY_OPTION: Final[Mapping[str, Flag]] = {
    name: flag for flag in FLAGS if flag.option for name in (flag.name, *flag.aliases)
}


def spelled(arguments: Sequence[str], valued: Collection[str]) -> list[str]:
    """Spell flags of the table as ``--name=value``, up to a command's name, as Go's flag package understands them.

    That takes one dash or two, and of a switch nothing but ``=``: NVIDIA's plugin takes ``--x false`` for ``--x`` and ignores
    all that follows. ``valued`` are the other options that take a value.

    Raises:
        ConfigError: a switch has its value beside it.
    """
    left, done = deque(arguments), list[str]()
    while left:
        word = left.popleft()
        if word in {"-", "--"} or not word.startswith("-"):
            return [*done, word, *left]
        name, joined, value = word.removeprefix("-").removeprefix("-").partition("=")
        flag = _BY_OPTION.get(name)
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
                raise ConfigError(f"--{name} {left[0]}: a switch takes its value behind '='. Write --{name}={left[0]}")
            done.append(f"--{name}=true")
        else:
            done.append(f"--{name}={left.popleft()}" if left else f"--{name}")
    return done


def given(arguments: MutableMapping[str, Any], environment: Mapping[str, str]) -> dict[str, Given]:
    """Take the table's flags out of ``arguments`` (texts by ``Flag.parameter``), the rest from variables; by flag name.

    Raises:
        ConfigError: one is no value of its kind.
    """
    found = {}
    for flag in FLAGS:
        texts = arguments.pop(flag.parameter, ())
        variable = next((name for name in flag.variables if name in environment), None)
        if texts:
            found[flag.name] = flag.read(texts, f"--{flag.name}")
        elif variable is not None:
            found[flag.name] = flag.read((environment[variable],), variable)
    return found


def settle(said: Mapping[str, Given], backend: str) -> Policy:
    """Make the policy that these settings (by flag name) mean for a backend.

    Raises:
        ConfigError: one of them can't be used.
    """
    values: dict[str, Any] = {"fail_on_init_error": backend == "nvidia"}
    for flag in FLAGS:
        one = said.get(flag.name)
        if one is None or flag.inert:
            continue
        try:
            value = flag.take(one.value)
        except ValueError as error:
            raise ConfigError(f"{one.source}: {error}") from error
        if flag.field:
            values[flag.field] = value
    return replace(Policy(), **values)


def inert(said: Mapping[str, Given]) -> list[str]:
    """Name the settings that have no effect here."""
    return [said[flag.name].source for flag in FLAGS if flag.inert and flag.name in said]


def unknown_variables(environment: Mapping[str, str], options: Iterable[str], commands: Iterable[str]) -> list[str]:
    """Say which variables look like settings of the gateway and are none, with the one that may be meant; never a value.

    What Kubernetes sets for a Service whose name begins with "gateway" is none of them.

    Args:
        environment: all that there is.
        options: the daemon's own variables, besides those of the table.
        commands: the names of the commands, whose options have variables, too.
    """
    known = {*options, *(name for flag in FLAGS for name in flag.variables)}
    of_commands = tuple(f"{_PREFIX}{name.upper()}_" for name in commands)
    strange = [
        name
        for name, value in sorted(environment.items())
        if name.startswith(_PREFIX) and not name.startswith(of_commands) and name not in known
        if not re.search(_OF_A_SERVICE, name) and "://" not in value
    ]
    if not strange:
        return []
    from difflib import get_close_matches  # noqa: PLC0415 - needed where a name is wrong, and nowhere else

    plain = {name.removeprefix(_PREFIX): name for name in known}  # a shared prefix is no likeness
    near = {name: get_close_matches(name.removeprefix(_PREFIX), plain, 1) for name in strange}
    return [
        f"{name:.80} isn't a setting of the gateway, and is ignored"
        + (f"; did you mean {plain[near[name][0]]}?" if near[name] else "")
        for name in strange[:_MAX_STRANGE]
    ]
