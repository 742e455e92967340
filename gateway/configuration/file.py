"""The configuration file of NVIDIA's device plugin, with our own keys under ``gateway:``.

Every file that NVIDIA's plugin 0.20 accepts has the same meaning here (its api/config/v1, decoded by sigs.k8s.io/yaml and
encoding/json). Keys may be in upper or lower case, except those of ``sharing.timeSlicing``. null means not given. Types are strict.
Settings that 0.20 ignores are ignored with a warning. Settings that only 0.20 supports are refused, with the line. Pure, except
``read``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from devices.files import NotPlainError, read_plain
from devices.naming import resource_name_error
from devices.policy import Bridging, Globbed, Policy, Portion, Slices
from devices.yamltree import YamlNode
from gateway.configuration import commandline, document
from gateway.configuration.flags import FLAGS
from gateway.configuration.kinds import Flag, FlagKind
from gateway.configuration.settings import ConfigError, Given

MAX_REPLICAS: Final = 65_536
_MAX_KEYS: Final = 20
_MAX_DEADLINE_S: Final = 600
_MAX_WARNINGS: Final = 20
_KEY_CHARS: Final = 64
_NVIDIA: Final = "nvidia.com/"
_SHARED: Final = ".shared"

KeyPath = tuple[str, ...]


class UnreadableConfigError(ConfigError):
    """The file can't be read now. The reason may pass (such as no free descriptor)."""

    lasting = False


class File(Struct, frozen=True):
    """The content of a configuration file. ``given`` is by flag name; ``warnings`` are sentences for the file's author.

    ``gpu_names`` and ``mig_names`` are pairs: a pattern for products or MIG profiles (``*`` matches any text), and the resource
    name of those that match. They are empty unless ``honourResourceNames`` is set.
    """

    given: Mapping[str, Given] = field(default_factory=dict)
    slices: Mapping[str, Slices] = field(default_factory=dict)
    fail_requests_greater_than_one: bool = False
    globbed: tuple[Globbed, ...] = ()
    bridging: Bridging = Bridging()
    gpu_names: tuple[tuple[str, str], ...] = ()
    mig_names: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()


def read(path: Path) -> bytes:
    """Return the file's text, up to one byte more than is allowed.

    Raises:
        UnreadableConfigError: the file can't be read now.
        ConfigError: it is no plain file.
    """
    try:
        return read_plain(path, document.MAX_BYTES)
    except NotPlainError:
        raise ConfigError(f"{path}: not a plain file") from None
    except OSError as error:
        raise UnreadableConfigError(
            f"{path}: the configuration file can't be read ({error.strerror}). Write it, or correct its mode"
        ) from error


def parse(content: bytes, name: str, *, strict: bool = False) -> File:
    """Return the content of a configuration file; ``name`` is its name in errors, ``strict`` makes unknown keys errors.

    Raises:
        ConfigError: the text can't be used; the message names line and key.
    """
    return _Reading(name, strict=strict).file(document.read(content, name))


def policy(file: File, said: Mapping[str, Given], backend: str) -> Policy:
    """Return the policy of a file and of command line and environment (``said``), which win over the file.

    Raises:
        ConfigError: a setting that wins can't be used.
    """
    of_file_alone = {name: getattr(file, name) for name in {*File.__struct_fields__} & {*Policy.__struct_fields__}}
    return replace(commandline.make_policy({**file.given, **said}, backend), **of_file_alone)


_TOP: Final = ("version", "flags", "resources", "sharing", "imex", "gateway")
_MANIFEST: Final = "this is a Kubernetes object, not a configuration. Mount the ConfigMap, and name a mounted file"
_NAME_IT: Final = "Is it the configuration file? Name that one with --config-file or CONFIG_FILE"


class _Reading:
    """Reads one file: finds known keys, checks the types of values, and collects warnings."""

    def __init__(self, name: str, *, strict: bool) -> None:
        self._name, self._strict = name, strict
        self._warnings: list[str] = []
        self._more = 0
        self._given: dict[str, Given] = {}

    def file(self, root: YamlNode) -> File:
        top = self._members(self._configuration(root), (), _TOP)
        self._version(top.get("version"))
        ours = self._section(top.get("gateway"), ("gateway",), ("devices", "bridge"))
        honour = bool(self._given.get("gateway.honourResourceNames", Given(value=False, source="")).value)
        # useNodeFeatureAPI and all of gfd are GPU Feature Discovery's, which shares the file.
        common = self._section(top.get("flags"), ("flags",), ("plugin", "gfd", "useNodeFeatureAPI"))
        self._section(common.get("plugin"), ("flags", "plugin"), ("cdiFeatureFlags", "kubeletSocket"))
        self._section(top.get("imex"), ("imex",))
        gpu_names, mig_names = self._names(top.get("resources"), honour=honour)
        slices, fail = self._sharing(top.get("sharing"), honour=honour)
        globbed = self._devices(ours.get("devices"))
        bridging = self._bridging(ours.get("bridge"))
        return File(self._given, slices, fail, globbed, bridging, gpu_names, mig_names, self._all_warnings())

    def _configuration(self, root: YamlNode) -> YamlNode:
        """Refuse a file that is no configuration, before an error quotes its content: it may contain secrets."""
        if root.value is None:
            return root
        if not isinstance(root.value, Mapping):
            raise self._fault(root, (), f"must be a mapping with keys such as {', '.join(_TOP)}. {_NAME_IT}")
        if {"kind", "metadata"} <= root.value.keys():
            return self._not_ours(root, _MANIFEST)
        if root.value and not any(
            key.casefold() in _TOP or nearest((key,), _TOP) for key in islice(root.value, _MAX_KEYS)
        ):
            problem = f"only unknown keys ({len(root.value)}). Known are {', '.join(_TOP)}. {_NAME_IT}"
            return self._not_ours(root, problem)
        return root

    def _not_ours(self, root: YamlNode, problem: str) -> YamlNode:
        """Refuse the whole file if unknown keys are errors; otherwise warn, and read an empty one."""
        if self._strict:
            raise self._fault(root, (), problem)
        self._warn(root.line, (), problem)
        return replace(root, value=None)

    def _version(self, node: YamlNode | None) -> None:
        if node is not None and node.value not in (None, "", "v1"):
            raise self._fault(node, ("version",), f"must be v1, not {shown(node)}")

    def _section(self, node: YamlNode | None, path: KeyPath, others: Iterable[str] = ()) -> Mapping[str, YamlNode]:
        """Read the flags of one level, and return its other known keys."""
        here = {flag.key[-1]: flag for flag in FLAGS if flag.key[:-1] == path and flag.key}
        found = self._members(node, path, (*here, *others))
        for key, flag in here.items():
            if key in found and found[key].value is not None:
                where = (*path, key)
                source = f"{self._name}, line {found[key].line}: {'.'.join(where)}"
                self._given[flag.name] = Given(self._typed(found[key], where, flag), source)
        return found

    def _typed(self, node: YamlNode, path: KeyPath, flag: Flag) -> bool | str | tuple[str, ...] | tuple[int, ...]:
        match flag.kind, node.value:
            case (FlagKind.SWITCH, bool(value)):
                return value
            case (FlagKind.TEXT, str(value)):
                return value
            case (FlagKind.SECONDS, int(value) | float(value)) if not isinstance(value, bool):
                return str(value)
            case (FlagKind.TEXT, False) if "off" in flag.values.split("|"):
                return "off"  # which YAML 1.1 takes for false
            case (FlagKind.LIST, str(value)):
                return (value,)
            case (FlagKind.NAMES, _):
                return self._name_list(node, path, flag)
            case (FlagKind.LIST, tuple()):
                return self._texts(node, path)
            case (FlagKind.NUMBERS, tuple(items)):
                return tuple(self._number(item, path) for item in items)
            case _:
                raise self._expected(node, path, flag.kind.value)

    def _name_list(self, node: YamlNode, path: KeyPath, flag: Flag) -> tuple[str, ...]:
        """Read one name or a list of names. A name may be a number."""
        items = node.value if isinstance(node.value, tuple) else (node,)
        if not all(isinstance(item.value, str | int) and not isinstance(item.value, bool) for item in items):
            raise self._expected(node, path, flag.kind.value)
        return tuple(str(item.value) for item in items)

    def _names(
        self, node: YamlNode | None, *, honour: bool
    ) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
        """Read ``resources``: names by product or MIG profile."""
        if node is None or node.value is None:
            return (), ()
        if not honour:
            if any(one.value for one in (node.value.values() if isinstance(node.value, Mapping) else (node,))):
                self._ignored(node, ("resources",))
            return (), ()
        found = self._members(node, ("resources",), ("gpus", "mig"))
        return self._patterns(found.get("gpus"), "gpus"), self._patterns(found.get("mig"), "mig")

    def _patterns(self, node: YamlNode | None, key: str) -> tuple[tuple[str, str], ...]:
        pairs = []
        for path, item in self._items(node, ("resources", key)):
            found = self._members(item, path, ("pattern", "name"), fold=False)
            pattern = self._required(found, item, path, "pattern")
            name = self._required(found, item, path, "name")
            pairs.append((self._text(pattern, (*path, "pattern")), self._resource(name, (*path, "name"))))
        return tuple(pairs)

    def _sharing(self, node: YamlNode | None, *, honour: bool) -> tuple[Mapping[str, Slices], bool]:
        found = self._members(node, ("sharing",), ("timeSlicing", "mps"))
        mps, slicing = found.get("mps"), found.get("timeSlicing")
        if mps is not None and mps.value is not None:
            problem = "MPS is not supported here. Use sharing.timeSlicing, or keep NVIDIA's plugin on this node"
            raise self._fault(mps, ("sharing", "mps"), problem)
        return ({}, False) if slicing is None else self._time_slicing(slicing, honour=honour)

    def _time_slicing(self, node: YamlNode, *, honour: bool) -> tuple[Mapping[str, Slices], bool]:
        path = ("sharing", "timeSlicing")
        keys = ("renameByDefault", "failRequestsGreaterThanOne", "resources")
        found = self._members(node, path, keys, fold=False)
        renamed = self._switch(found, (*path, "renameByDefault"))
        fail = self._switch(found, (*path, "failRequestsGreaterThanOne"))
        items = self._items(found.get("resources"), (*path, "resources"))
        if not items:
            raise self._fault(node, path, "'resources:' is missing or empty. Write one, or leave it all out")
        slices: dict[str, Slices] = {}
        for here, item in items:
            name, one = self._sliced(here, item, renamed=renamed, honour=honour)
            before = slices.get(name, Slices(0, name))
            if isinstance(one, Portion):
                one = replace(before, portions=(*before.portions, one))
            elif before.replicas:  # NVIDIA's plugin also makes replicas of both.
                self._warn(item.line, here, f"{name} is here twice; the larger number is in force")
                one = Slices(max(one.replicas, before.replicas), one.shown_as, before.portions)
            else:
                one = replace(one, portions=before.portions)
            slices[name] = one
        shown = [name for one in slices.values() for name in one.names]
        if twice := next((name for name in shown if shown.count(name) > 1), None):
            raise self._fault(node, path, f"two resources have the name {twice}. Rename one of them")
        return slices, fail

    def _sliced(self, path: KeyPath, item: YamlNode, *, renamed: bool, honour: bool) -> tuple[str, Slices | Portion]:
        found = self._members(item, path, ("name", "replicas", "rename", "devices"), fold=False)
        name = self._resource(self._required(found, item, path, "name"), (*path, "name"))
        replicas = self._number(self._required(found, item, path, "replicas"), (*path, "replicas"))
        if not 2 <= replicas <= MAX_REPLICAS:
            problem = f"must be 2 to {MAX_REPLICAS}, not {replicas}. To have the resource unshared, leave it out"
            raise self._fault(found["replicas"], (*path, "replicas"), problem)
        shown = name + _SHARED if renamed else name
        if (rename := found.get("rename")) is not None:
            wanted = self._resource(rename, (*path, "rename"))
            if honour:
                shown = wanted
            elif wanted != shown:
                self._ignored(rename, (*path, "rename"))
        if (why := resource_name_error(shown)) is not None:
            raise self._fault(item, path, why)
        devices = found.get("devices")
        some = None if devices is None else self._some(devices, (*path, "devices"))
        if devices is None or some is None:
            return name, Slices(replicas, shown)
        if not honour:
            self._ignored(devices, (*path, "devices"))
            return name, Slices(replicas, shown)
        return name, Portion(some, replicas, shown)

    def _some(self, node: YamlNode, path: KeyPath) -> tuple[str, ...] | int | None:
        """Read ``devices``: a list of indexes and UUIDs, a count (the first ones), or all (None)."""
        match node.value:
            case "all":
                return None
            case bool():
                pass
            case int(count) if count > 0:
                return count
            case tuple(items) if all(isinstance(item.value, int | str) for item in items):
                return tuple(str(item.value) for item in items)
        raise self._expected(node, path, "all, a count, or a list of indexes and UUIDs")

    def _devices(self, node: YamlNode | None) -> tuple[Globbed, ...]:
        items = self._items(node, ("gateway", "devices"))
        if not items:
            return ()
        from devices.generic import rule_error  # noqa: PLC0415 - who has no such devices needn't pay for them

        rules: dict[str, Globbed] = {}
        for path, item in items:
            found = self._members(item, path, ("resource", "paths", "shared", "count", "permissions"))
            resource = self._text(self._required(found, item, path, "resource"), (*path, "resource"))
            rule = Globbed(resource, self._texts(self._required(found, item, path, "paths"), (*path, "paths")))
            if (shared := found.get("shared")) is not None:
                rule = replace(rule, shared=self._texts(shared, (*path, "shared")))
            if (count := found.get("count")) is not None:
                rule = replace(rule, count=self._number(count, (*path, "count")))
            if (permissions := found.get("permissions")) is not None:
                rule = replace(rule, permissions=self._text(permissions, (*path, "permissions")))
            if problem := rule_error(rule, rules):
                raise self._fault(item, path, problem)
            rules[resource] = rule
        return tuple(rules.values())

    def _bridging(self, node: YamlNode | None) -> Bridging:
        """Read ``gateway.bridge``: rules for single resources of other vendors' plugins."""
        path = ("gateway", "bridge")
        found = self._section(node, path, ("allow", "repeat", "rename", "deadlines"))
        allow, repeat = (self._texts(found[key], (*path, key)) if key in found else () for key in ("allow", "repeat"))
        renames: dict[str, str] = {}
        for at, item in self._items(found.get("rename"), (*path, "rename")):
            pair = self._members(item, at, ("resource", "name"))
            plain = self._text(self._required(pair, item, at, "resource"), (*at, "resource"))
            named = self._text(self._required(pair, item, at, "name"), (*at, "name"))
            if problem := resource_name_error(named):
                raise self._fault(item, at, problem)
            if plain in renames or named in renames.values():
                raise self._fault(item, at, f"{plain} or the name {named} is here twice")
            renames[plain] = named
        deadlines = []
        for at, item in self._items(found.get("deadlines"), (*path, "deadlines")):
            pair = self._members(item, at, ("resource", "seconds"))
            pattern = self._text(self._required(pair, item, at, "resource"), (*at, "resource"))
            seconds = self._number(self._required(pair, item, at, "seconds"), (*at, "seconds"))
            if not 1 <= seconds <= _MAX_DEADLINE_S:
                raise self._fault(item, at, f"must be 1 to {_MAX_DEADLINE_S} seconds, not {seconds}")
            deadlines.append((pattern, float(seconds)))
        return Bridging(allow, repeat, renames, tuple(deadlines))

    def _resource(self, node: YamlNode, path: KeyPath) -> str:
        name = self._text(node, path)
        if "/" not in name:
            name = _NVIDIA + name
        if problem := resource_name_error(name):
            raise self._fault(node, path, problem)
        return name

    def _ignored(self, node: YamlNode, path: KeyPath) -> None:
        advice = "ignored, as by NVIDIA's plugin. To use it, set gateway.honourResourceNames: true"
        self._warn(node.line, path, advice)

    # Keys and types.

    def _all_warnings(self) -> tuple[str, ...]:
        """Return sentences for the author: the first ones, and how many more there were."""
        more = (f"{self._name}: and {self._more} more of this kind",) if self._more else ()
        return (*self._warnings, *more)

    def _members(
        self, node: YamlNode | None, path: KeyPath, known: Sequence[str], *, fold: bool = True
    ) -> Mapping[str, YamlNode]:
        """Return the known keys; warn of the others. Of several spellings of a key, the last in the alphabet wins, as with Go."""
        if node is None or node.value is None:
            return {}
        if not isinstance(node.value, Mapping):
            raise self._expected(node, path, "a mapping")
        names = {key.casefold() if fold else key: key for key in known}
        found: dict[str, YamlNode] = {}
        for key in sorted(node.value):
            name = names.get(key.casefold() if fold else key)
            if name is None:
                self._unknown(node.value[key].line, (*path, key), known)
            else:
                found[name] = node.value[key]
        return found

    def _items(self, node: YamlNode | None, path: KeyPath) -> list[tuple[KeyPath, YamlNode]]:
        """Return the items of a list, each with its path."""
        if node is None or node.value is None:
            return []
        if not isinstance(node.value, tuple):
            raise self._expected(node, path, "a list")
        return [((*path[:-1], f"{path[-1]}[{number}]"), item) for number, item in enumerate(node.value)]

    def _required(self, found: Mapping[str, YamlNode], item: YamlNode, path: KeyPath, key: str) -> YamlNode:
        if key not in found:
            raise self._fault(item, path, f"the key '{key}' is missing")
        return found[key]

    def _switch(self, found: Mapping[str, YamlNode], path: KeyPath) -> bool:
        node = found.get(path[-1])
        if node is None or node.value is None:
            return False
        if not isinstance(node.value, bool):
            raise self._expected(node, path, "true or false")
        return node.value

    def _text(self, node: YamlNode, path: KeyPath) -> str:
        if not isinstance(node.value, str):
            raise self._expected(node, path, "text")
        return node.value

    def _texts(self, node: YamlNode, path: KeyPath) -> tuple[str, ...]:
        return tuple("" if item.value is None else self._text(item, at) for at, item in self._items(node, path))

    def _number(self, node: YamlNode, path: KeyPath) -> int:
        value = node.value
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # JSON has one kind of number
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._expected(node, path, "a whole number")
        return value

    # Warnings and errors.

    def _unknown(self, line: int, path: KeyPath, known: Sequence[str]) -> None:
        place, near = _PLACES.get(path[-1].casefold()), nearest(path, known)
        advice = f"; it belongs at {'.'.join(place)}" if place else f"; did you mean {near}?" if near else ""
        if self._strict:
            raise document.fault(self._name, line, f"{_dotted(path)}: unknown key{advice}")
        self._warn(line, path, f"unknown key, ignored{advice}")

    def _warn(self, line: int, path: KeyPath, problem: str) -> None:
        if len(self._warnings) < _MAX_WARNINGS:
            self._warnings.append(f"{self._name}, line {line}: {_dotted(path) or 'the file'}: {problem}")
        else:
            self._more += 1

    def _expected(self, node: YamlNode, path: KeyPath, what: str) -> ConfigError:
        return self._fault(node, path, f"must be {what}, not {shown(node)}")

    def _fault(self, node: YamlNode, path: KeyPath, problem: str) -> ConfigError:
        return document.fault(self._name, node.line, f"{_dotted(path) or 'the file'}: {problem}")


def _dotted(path: KeyPath) -> str:
    return ".".join(key if len(key) <= _KEY_CHARS else f"{key[:_KEY_CHARS]}…" for key in path)


def nearest(path: KeyPath, known: Sequence[str]) -> str:
    """Return the known key that is probably meant, of the same level or of another one; '' for none."""
    from difflib import get_close_matches  # noqa: PLC0415 - needed only for a wrong key

    key = path[-1].casefold()
    if len(key) > _KEY_CHARS:
        return ""
    for candidates in ({name.casefold(): (*path[:-1], name) for name in known}, _PLACES):
        if near := get_close_matches(key, candidates, 1):
            return ".".join(candidates[near[0]])
    return ""


_SLICING: Final = ("sharing", "timeSlicing")
_KEYS: Final = (
    *((*_SLICING, "renameByDefault"), (*_SLICING, "failRequestsGreaterThanOne"), ("gateway", "devices")),
    *(flag.key for flag in FLAGS),
)
_PLACES: Final[Mapping[str, KeyPath]] = {
    key[end - 1].casefold(): key[:end] for key in _KEYS for end in range(1, len(key) + 1)
}


def shown(node: YamlNode) -> str:
    """Return a value in words."""
    match node.value:
        case None:
            return "nothing"
        case bool(value):
            return str(value).lower()
        case str(value):
            return f"{value!r:.80}"
        case int(value) | float(value):
            return f"the number {value}"
        case tuple():
            return "a list"
        case _:
            return "a mapping"
