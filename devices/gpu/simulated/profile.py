"""Profiles: the GPUs of a simulated node, in a YAML file that a person writes and edits.

    resources:
      nvidia.com/gpu:
        gpus: 8                            # so many, or a list of {uuid, numa, health, reason, device_nodes}
        numa: [0, 0, 0, 0, 1, 1, 1, 1]     # the NUMA node of each, by index; null: no known place
        unhealthy: {3: fell off the bus}   # by index or UUID, with the reason: the part to edit at run time;
                                           # or {reason: fell off the bus, kind: reset-required}: see devices.model.Kind
        recovered: [3]                     # it was reset: what had to be remembered of its troubles ends
        released: [3]                      # closed for a reset: no new pod gets it
        withdrawn: [3]                     # not offered any more, on purpose; a GPU beyond "gpus" is lost instead
        links:                             # how GPUs reach each other, by index or UUID: each of a list each other;
        - {between: [0, 1, 2, 3], by: nvlink, lanes: 2}     # nvlink, xgmi (with lanes), pix, pxb, phb, node or sys
        mig: {0: [1g.10gb, 2g.20gb]}       # GPU 0 is in MIG mode, with these instances; by index or UUID
        partitions: 8                      # every 8 in a row are partitions of one GPU; links are between their GPUs
        cdi: vendor.com/gpu                # containers are told vendor.com/gpu=<UUID> (CDI names), and nothing else
        pre_start: true                    # the kubelet calls PreStartContainer, which fails while a GPU is not well

A mistake in it is worth a good answer, because someone is watching a node follow the edit: file, line, key, what was
expected, what came, what to do. And it is read by a root daemon: its size, depth and numbers are bounded, and YAML's
anchors (which can unfold without end) are refused.
"""

from __future__ import annotations

import operator
import posixpath
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import msgspec
import yaml
from msgspec.structs import replace

from devices.filewatch import NotPlainError, read_plain
from devices.gpu.model import GPU, Link, Way
from devices.model import Health, Kind, Trouble
from devices.naming import resource_name_error

MAX_BYTES: Final = 8 * 1024 * 1024
MAX_GPUS: Final = 200_000
_MAX_RESOURCES: Final = 256
_MAX_DEPTH: Final = 8
_MAX_PAIRS: Final = 4096  # linked GPUs of a resource: all of 64 are 2 016
_MAX_NODE: Final = 1023  # Linux numbers at most 1024 NUMA nodes (CONFIG_NODES_SHIFT)
_SHIPPED: Final = Path(__file__).parent / "profiles"
_NAMESPACE: Final = uuid.UUID("6d1c6f3e-5d55-4be1-8d1a-2f0d5a1f6a51")
# Part of a comma-separated environment variable and of a JSON file; 63 is what the kubelet's API asks of a device ID.
_UUID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,62}")
# What the CDI specification asks of a kind; a UUID is a device name of it if it ends like one.
_CDI_KIND: Final = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?/[A-Za-z]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?")
# libyaml where PyYAML was built with it: ten times as fast.
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_WORDS: Final[Mapping[str, bool | None]] = {"": None, "~": None, "null": None, "true": True, "false": False}
_INTEGER: Final = re.compile(r"[-+]?[0-9]{1,18}", re.ASCII)
_DECIMAL: Final = re.compile(r"[-+]?([0-9]+\.?|[0-9]*\.[0-9]+)([eE][-+]?[0-9]+)?", re.ASCII)
_TYPES: Final[Mapping[str, str]] = {
    "array": "a list",
    "bool": "true or false",
    "float": "a decimal number",
    "int": "a whole number",
    "null": "nothing",
    "object": "a mapping",
    "str": "text",
}

_Path = tuple[str | int, ...]
_Reason = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Numa = Annotated[int, msgspec.Meta(ge=0, le=_MAX_NODE)] | None
_Instances = Annotated[
    tuple[Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,2}(c\.[0-9]{1,2})?g\.[0-9]{1,4}gb(\+[a-z.]{1,16})?$")], ...],
    msgspec.Meta(max_length=16),
]
_Some = Annotated[tuple[int | str, ...], msgspec.Meta(max_length=MAX_GPUS)] | None


class ProfileError(ValueError):
    """A profile that can't be used. The message names file and line, what was expected, what came and what to do."""


class UnreadableError(ProfileError):
    """The profile can't be read now; what is wrong may be elsewhere (no descriptor left), so it may well be later."""


class Described(msgspec.Struct, frozen=True):
    """What a profile says of one resource name: its GPUs by index, and UUIDs as ``Listing`` and ``Fate`` mean them.

    The withdrawn ones aren't among the GPUs.
    """

    gpus: tuple[GPU, ...]
    recovered: frozenset[str] = frozenset()
    released: frozenset[str] = frozenset()
    withdrawn: frozenset[str] = frozenset()


class _Entry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One GPU of a list."""

    uuid: str | None = None
    numa: _Numa = None
    health: Health = Health.HEALTHY
    reason: _Reason | None = None
    device_nodes: tuple[str, ...] = ()


class _Trouble(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One GPU's trouble, in full."""

    reason: _Reason
    kind: Kind = Kind.RESTART_APP


class _Links(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """GPUs that all reach each other in one way."""

    between: Annotated[tuple[int | str, ...], msgspec.Meta(min_length=2, max_length=64)]
    by: Way
    lanes: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1


class _Resource(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What stands beneath a resource name."""

    gpus: (
        Annotated[int, msgspec.Meta(ge=0, le=MAX_GPUS)]
        | Annotated[tuple[_Entry, ...], msgspec.Meta(max_length=MAX_GPUS)]
    )
    numa: tuple[_Numa, ...] | None = None
    unhealthy: dict[int | str, object] | None = None
    recovered: _Some = ()
    released: _Some = ()
    withdrawn: _Some = ()
    cdi: str | None = None
    pre_start: bool = False
    links: Annotated[tuple[_Links, ...], msgspec.Meta(max_length=_MAX_PAIRS)] | None = ()
    partitions: Annotated[int, msgspec.Meta(ge=2, le=1024)] | None = None
    mig: dict[int | str, _Instances] | None = None


class _Profile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The whole file; the values are looked at one by one, because only then an error knows its resource."""

    resources: Annotated[dict[str, object], msgspec.Meta(max_length=_MAX_RESOURCES)]


_ADVICE: Final[Mapping[str, str]] = {
    "": "write 'resources:' and beneath it resource names, such as nvidia.com/gpu",
    "resources": "write resource names, and beneath each 'gpus:' and, where wanted, 'numa:', 'unhealthy:', 'recovered:', "
    "'released:', 'withdrawn:', 'cdi:', 'pre_start:', 'links:', 'partitions:' and 'mig:'",
    "gpus": "write how many, such as 'gpus: 8', or a list with uuid, numa, health, reason and device_nodes of each",
    "numa": f"write the number of a NUMA node, 0 to {_MAX_NODE}, for each GPU, or null for no known place",
    "unhealthy": "write index or UUID and the reason in 1 to 256 characters, such as '3: fell off the bus', or as "
    "'3: {reason: fell off the bus, kind: reset-required}'",
    "kind": f"write {', '.join(kind.value for kind in Kind)}",
    "recovered": "write indices or UUIDs, such as [3]",
    "released": "write indices or UUIDs, such as [3]",
    "withdrawn": "write indices or UUIDs, such as [3]",
    "uuid": "write 1 to 63 letters, digits, '.', '_', ':' and '-', in quotes if it looks like a number",
    "health": "write Healthy or Unhealthy",
    "reason": "write 1 to 256 characters of text",
    "device_nodes": "write a list of paths below /dev, such as [/dev/null]",
    "cdi": "write the kind that a CDI specification has, such as vendor.com/gpu",
    "pre_start": "write true or false",
    "links": "write a list such as [{between: [0, 1], by: nvlink, lanes: 2}]",
    "between": "write 2 to 64 indices or UUIDs of different GPUs",
    "by": f"write {', '.join(way.value for way in Way)}",
    "lanes": "write how many such links there are side by side, 1 to 64, for nvlink and xgmi alone",
    "mig": "write for each GPU in MIG mode its instances' profiles, such as '0: [1g.10gb, 2g.20gb]'",
    "partitions": "write how many in a row are partitions of one GPU, 2 to 1024",
}

_CHOICES: Final[Mapping[str, str]] = {
    "kind": "a kind of trouble",
    "health": "a state of health",
    "by": "a way between GPUs",
}


def shipped() -> tuple[str, ...]:
    """The names of the profiles that come with the gateway."""
    return tuple(sorted(path.stem for path in _SHIPPED.glob("*.yaml")))


def find(profile: str) -> tuple[Path, bool]:
    """Say which file ``profile`` means, a shipped profile's name or a path, and whether it is one that people edit.

    Raises:
        ProfileError: there is neither such a shipped profile nor such a file.
    """
    if profile in shipped():
        return _SHIPPED / f"{profile}.yaml", False
    path = Path(profile)
    if not path.is_file():
        raise ProfileError(
            f"expected the path of a profile or the name of a shipped one ({', '.join(shipped())}); got {profile!r}, which "
            "is no file: write one, or use one of those names"
        )
    return path, True


def read(path: Path) -> bytes:
    """Read a profile's text.

    Raises:
        UnreadableError: it can't be read now.
        ProfileError: it isn't a plain file, or is bigger than 8 MiB.
    """
    try:
        content = read_plain(path, MAX_BYTES)
    except NotPlainError:
        raise ProfileError(f"{path}: expected a plain file, got something else: put the profile's text there") from None
    except OSError as error:
        raise UnreadableError(
            f"{path}: the profile can't be read ({error.strerror}): write it, or correct its mode"
        ) from error
    if len(content) > MAX_BYTES:
        raise ProfileError(
            f"{path}: expected at most {MAX_BYTES} bytes, got more: write 'gpus: 10000' instead of a list"
        )
    return content


def parse(content: bytes, name: str) -> Mapping[str, Described]:
    """Turn a profile's text into what it says of each resource name; ``name`` is what its errors call it.

    A GPU without a UUID gets one made of its resource name and index: the same at each start and on each node.

    Raises:
        ProfileError: as its name says.
    """
    document = _Document(content, name)
    document.require("resources")
    profile: _Profile = document.convert((), _Profile)
    found: dict[str, Described] = {}
    for resource in profile.resources:
        path: _Path = ("resources", resource)
        problem = resource_name_error(resource)
        if problem is not None:
            document.refuse(path, problem)
        found[resource] = _described(document, path, resource)
        total = sum(len(described.gpus) for described in found.values())
        if total > MAX_GPUS:
            document.refuse(path, f"expected at most {MAX_GPUS} GPUs on a node, got {total}: write fewer")
    return found


def _described(document: _Document, path: _Path, resource: str) -> Described:
    """Build one resource's GPUs, and find those that it names."""
    spec: _Resource = document.convert(path, _Resource)
    entries = (_Entry(),) * spec.gpus if isinstance(spec.gpus, int) else spec.gpus
    uuids: dict[str, int] = {}
    for index, entry in enumerate(entries):
        gpu_path = (*path, "gpus", index)
        _check_entry(document, gpu_path, entry, placed=spec.numa is not None)
        device_id = _derived_uuid(resource, index) if entry.uuid is None else entry.uuid
        if uuids.setdefault(device_id, index) != index:
            problem = f"expected each UUID once, got {device_id!r} again (GPU {uuids[device_id]} has it): write another"
            document.refuse((*gpu_path, "uuid"), problem)
    numa = (entry.numa for entry in entries) if spec.numa is None else spec.numa
    if spec.numa is not None and len(spec.numa) != len(entries):
        problem = f"expected {len(entries)} NUMA nodes, one for each GPU, got {len(spec.numa)}: write one for each"
        document.refuse((*path, "numa"), problem)
    if spec.cdi is not None and not _CDI_KIND.fullmatch(spec.cdi):
        document.refuse((*path, "cdi"), f"no kind of CDI devices: {spec.cdi[:80]!r}", "cdi")
    unnamed = [device_id for device_id in uuids if spec.cdi is not None and not device_id[-1].isalnum()]
    if unnamed:
        problem = (
            f"expected a UUID that ends in a letter or digit, as a CDI name must, got {unnamed[0]!r}: write another"
        )
        document.refuse((*path, "gpus", uuids[unnamed[0]]), problem)
    unhealthy = _unhealthy(document, (*path, "unhealthy"), spec.unhealthy or {}, uuids)
    recovered = _named(document, (*path, "recovered"), spec.recovered or (), uuids)
    released = _named(document, (*path, "released"), spec.released or (), uuids)
    withdrawn = _named(document, (*path, "withdrawn"), spec.withdrawn or (), uuids)
    boards = _boards(resource, tuple(uuids), spec.partitions)
    links = _links(document, (*path, "links"), spec.links or (), boards, uuids)
    split = _split(document, (*path, "mig"), spec, uuids)
    gpus = [
        GPU(
            uuid=device_id,
            index=index,
            minor=index,
            numa_node=node,
            trouble=unhealthy.get(device_id) or _trouble(entry),
            device_nodes=entry.device_nodes,
            cdi_name="" if spec.cdi is None else f"{spec.cdi}={device_id}",
            pre_start=spec.pre_start,
            parent="" if spec.partitions is None else boards[index],
            links=links.get(boards[index], ()),
            spec_nodes=(f"/dev/nvidia{index}",) if resource.startswith("nvidia.com/") else (),
            resource=resource,
            partitioned=device_id in split,
        )
        for (device_id, index), entry, node in zip(uuids.items(), entries, numa, strict=True)
        if device_id not in withdrawn
    ]
    gpus += (part for gpu in tuple(gpus) for part in _instances(gpu, split.get(gpu.uuid, ())))
    return Described(tuple(gpus), recovered, released, withdrawn)


def _split(
    document: _Document, path: _Path, spec: _Resource, uuids: Mapping[str, int]
) -> Mapping[str, tuple[str, ...]]:
    """Turn ``mig`` into the profiles of each GPU's instances."""
    given, known = spec.mig or {}, tuple(uuids)
    if given and spec.partitions is not None:
        document.refuse(path, "expected either 'mig' or 'partitions', got both: remove one of them")
    return {_uuid(document, (*path, key), key, known, uuids): profiles for key, profiles in given.items()}


def _instances(gpu: GPU, profiles: Iterable[str]) -> Iterator[GPU]:
    """Make the MIG instances of a GPU: each UUID the same for the same profile in the same place."""
    for number, profile in enumerate(profiles):
        yield replace(
            gpu,
            uuid=f"MIG-{uuid.uuid5(_NAMESPACE, f'{gpu.uuid}/{number}/{profile}')}",
            trouble=None,
            parent=gpu.uuid,
            profile=profile,
            partitioned=False,
            place=f"{gpu.index}:{number}",
        )


def _trouble(entry: _Entry) -> Trouble | None:
    """The trouble of a GPU that the list calls unhealthy."""
    return Trouble(entry.reason or "unhealthy in the profile") if entry.health is Health.UNHEALTHY else None


def _check_entry(document: _Document, path: _Path, entry: _Entry, *, placed: bool) -> None:
    """Refuse what types alone can't: bad IDs and paths, and facts that contradict each other."""
    if entry.uuid is not None and not _UUID.fullmatch(entry.uuid):
        document.refuse((*path, "uuid"), f"no device ID: {entry.uuid[:80]!r}", "uuid")
    if entry.reason is not None and entry.health is Health.HEALTHY:
        problem = "expected a reason only for an unhealthy GPU: write 'health: Unhealthy' too, or no reason"
        document.refuse((*path, "reason"), problem)
    if placed and entry.numa is not None:
        problem = (
            "expected a GPU's NUMA node in one place, got it here and in the resource's 'numa': remove one of them"
        )
        document.refuse((*path, "numa"), problem)
    for number, node in enumerate(entry.device_nodes):
        if not node.startswith("/dev/") or posixpath.normpath(node) != node or len(node) > 255:
            document.refuse((*path, "device_nodes", number), f"no path of a device node: {node[:80]!r}", "device_nodes")


def _unhealthy(
    document: _Document, path: _Path, given: Mapping[int | str, object], uuids: Mapping[str, int]
) -> Mapping[str, Trouble]:
    """Turn the ``unhealthy`` mapping into troubles by UUID."""
    known = tuple(uuids)
    troubles: dict[str, Trouble] = {}
    for key in given:
        device_id = _uuid(document, (*path, key), key, known, uuids)
        said: str | _Trouble = document.convert((*path, key), _Reason | _Trouble)
        troubles[device_id] = Trouble(said) if isinstance(said, str) else Trouble(said.reason, said.kind)
    return troubles


def _named(document: _Document, path: _Path, given: Iterable[int | str], uuids: Mapping[str, int]) -> frozenset[str]:
    """Turn a list of indices and UUIDs into UUIDs."""
    known = tuple(uuids)
    return frozenset(_uuid(document, (*path, at), key, known, uuids) for at, key in enumerate(given))


def _boards(resource: str, uuids: Sequence[str], partitions: int | None) -> Sequence[str]:
    """Say on which physical GPU each is: its own UUID, or that of the one it is a partition of."""
    if partitions is None:
        return uuids
    return [_derived_uuid(resource, f"gpu/{index // partitions}") for index in range(len(uuids))]


def _links(
    document: _Document, path: _Path, given: Iterable[_Links], boards: Sequence[str], uuids: Mapping[str, int]
) -> Mapping[str, tuple[Link, ...]]:
    """Turn ``links`` into those of each physical GPU; where two are linked in several ways, into all of these."""
    known, pairs = tuple(uuids), 0
    links: dict[str, list[Link]] = {}
    for number, one in enumerate(given):
        here = (*path, number, "between")
        named = [boards[uuids[_uuid(document, (*here, at), key, known, uuids)]] for at, key in enumerate(one.between)]
        pairs += len(named) * (len(named) - 1) // 2
        if len(set(named)) < len(named):
            document.refuse(here, "expected each GPU once, got one twice, or two of its partitions", "between")
        if one.lanes > 1 and one.by not in {Way.NVLINK, Way.XGMI}:
            document.refuse((*path, number, "lanes"), f"expected none with {one.by.value}, got {one.lanes}", "lanes")
        if pairs > _MAX_PAIRS:
            problem = f"expected at most {_MAX_PAIRS} pairs of linked GPUs, got more: leave out the far ones"
            document.refuse((*path, number), problem)
        for a, b in combinations(named, 2):
            links.setdefault(a, []).append(Link(b, one.by, one.lanes))
            links.setdefault(b, []).append(Link(a, one.by, one.lanes))
    return {board: tuple(there) for board, there in links.items()}


def _uuid(document: _Document, path: _Path, key: int | str, known: Sequence[str], uuids: Mapping[str, int]) -> str:
    """Find the GPU that ``key`` means, its index or its UUID."""
    index = key if isinstance(key, int) else uuids.get(key, -1)
    if not 0 <= index < len(known):
        there = f"0 to {len(known) - 1}" if known else "there is none"
        document.refuse(path, f"expected the index ({there}) or UUID of a GPU of this resource, got {key!r:.80}")
    return known[index]


def _derived_uuid(resource: str, index: int | str) -> str:
    return f"GPU-{uuid.uuid5(_NAMESPACE, f'{resource}/{index}')}"


class _Document:
    """A YAML text as plain values, that can say on which line each of them stands.

    Only what the format needs: mappings, lists and scalars, read straight from the parser's events. Plain scalars mean
    what YAML 1.2 says (null, true, numbers, else text: ``no`` is a word and ``1:30`` no number). Anchors, tags, duplicate
    keys and further documents are refused.
    """

    def __init__(self, content: bytes, name: str) -> None:
        self._name = name
        try:
            self._text = content.decode()
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start)
            self._fail(line, f"expected UTF-8 text, got the byte 0x{content[error.start]:02x}: save it as UTF-8")
        try:
            self._root: Any = self._read()
        except yaml.MarkedYAMLError as error:
            line = 0 if error.problem_mark is None else error.problem_mark.line
            self._fail(
                line, f"expected YAML, got something else ({error.problem}): correct this line or the one before"
            )
        except yaml.YAMLError as error:
            self._fail(0, f"expected YAML, got something else ({str(error).splitlines()[0]}): write plain text")

    def require(self, key: str) -> None:
        """Refuse a document without ``key``, before anything in it is quoted: it may be another file, such as one of secrets."""
        if not isinstance(self._root, dict):
            self.refuse((), "expected a mapping, got something else", "")
        if key not in self._root:
            self.refuse((), f"expected the key '{key}', got none", "")

    def convert(self, path: _Path, kind: Any) -> Any:
        """Give the value at ``path`` its type, or refuse it."""
        value: Any = reduce(operator.getitem, path, self._root)
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            problem, _, place = str(error).partition(" - at ")
            for field, index in re.findall(r"\.(\w+)|\[(\d+)\]", place):
                key = field or int(index)
                path, value = (*path, key), value[key]
            self._refuse_type(path, value, problem, of_key=place.startswith("`key`"))

    def refuse(self, path: _Path, problem: str, field: str | None = None) -> NoReturn:
        """Say what is wrong at ``path``, with the advice for ``field``."""
        where = "".join(
            f".{key:.80}" if isinstance(key, str) and key.isidentifier() else f"[{key!r:.80}]" for key in path
        )
        advice = "" if field is None else f": {_ADVICE[field]}"
        self._fail(self._line(path), f"{where[1:] or 'the profile'}: {problem}{advice}")

    def _refuse_type(self, path: _Path, value: object, problem: str, *, of_key: bool) -> NoReturn:
        """Put a type error into the words of a YAML file."""
        field = next((key for key in reversed(path) if key in _ADVICE), "")
        if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem, re.DOTALL):
            self.refuse((*path, unknown[1]), "this key is unknown", str(field))
        if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
            self.refuse(path, f"expected the key '{missing[1]}', got none", str(field))
        expected, _, got = problem.replace("Expected ", "").partition(", got ")
        if expected.startswith("Invalid enum value"):
            expected = _CHOICES[str(field)]
        if of_key:
            expected, got = f"keys that are {expected}", got or "something else"
        elif isinstance(value, dict | list):
            got = got or f"{len(value)}"
        else:
            got = "nothing" if value is None else f"{value!r:.80}"
        self.refuse(path, f"expected {_in_words(expected)}, got {_in_words(got)}", str(field))

    def _read(self) -> object:
        """Build the document's value from the parser's events."""
        events = self._events()
        first = next(events, None)
        if first is None:
            self._fail(0, f"expected a profile, got an empty file: {_ADVICE['']}")
        value = self._value(first, events, 0)
        further = next(events, None)
        if further is not None:
            self._fail(_line_of(further), "expected one document, got another: remove it and its '---'")
        return value

    def _events(self) -> Iterator[yaml.Event]:
        """The parser's events, without the stream's and the documents' own."""
        frame = (yaml.StreamStartEvent, yaml.StreamEndEvent, yaml.DocumentStartEvent, yaml.DocumentEndEvent)
        return (event for event in yaml.parse(self._text, Loader=_LOADER) if not isinstance(event, frame))

    def _value(self, event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> object:
        """Build the value that begins with ``event``, and use up its events."""
        line = _line_of(event)
        if getattr(event, "anchor", None) is not None:
            self._fail(line, "expected no anchors ('&') and aliases ('*'), got one: write the value out")
        if getattr(event, "tag", None) is not None:
            self._fail(line, "expected no tags, got one: remove it")
        if isinstance(event, yaml.ScalarEvent):
            return _scalar(event)
        if depth == _MAX_DEPTH:
            self._fail(line, f"expected at most {_MAX_DEPTH} levels, got more: keep to the format")
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(event := next(events), yaml.SequenceEndEvent):
                items.append(self._value(event, events, depth + 1))
            return items
        members: dict[object, object] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            if isinstance(event, yaml.CollectionStartEvent):
                self._fail(_line_of(event), "expected a word or number as a key, got a list or mapping: write one")
            key = self._value(event, events, depth)
            if key in members:
                again = (
                    f"{key!r:.80}" if depth else "one"
                )  # The profile's own level shows whether it is a profile at all.
                self._fail(_line_of(event), f"expected each key once, got {again} again: remove one of them")
            members[key] = self._value(next(events), events, depth + 1)
        return members

    def _line(self, path: _Path) -> int:
        """Find the line, from 0, on which the value at ``path`` stands, or its key; as far as the path exists."""
        events = self._events()
        event = next(events, None)
        line = 0 if event is None else _line_of(event)
        for key in path:
            if isinstance(event, yaml.MappingStartEvent):
                while isinstance(event := next(events), yaml.ScalarEvent):
                    key_event, event = event, next(events)
                    if _scalar(key_event) == key:
                        line = _line_of(key_event)
                        break
                    self._value(event, events, 0)
            elif isinstance(event, yaml.SequenceStartEvent) and isinstance(key, int):
                for _ in range(key):
                    self._value(next(events), events, 0)
                event = next(events)
                line = _line_of(event)
        return line

    def _fail(self, line: int, problem: str) -> NoReturn:
        raise ProfileError(f"{self._name}, line {line + 1}: {problem}")


def _line_of(event: yaml.Event) -> int:
    return 0 if event.start_mark is None else event.start_mark.line


def _scalar(event: yaml.ScalarEvent) -> str | int | float | bool | None:
    text: str = event.value
    if not event.implicit[0]:  # quoted, or a block: text, whatever it looks like
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _DECIMAL.fullmatch(text) else text


def _in_words(types: str) -> str:
    """Turn a type checker's names into a person's: "`int | array`" is "a whole number or a list"."""
    return re.sub(
        r"`([^`]*)`", lambda match: " or ".join(_TYPES.get(name, name) for name in match[1].split(" | ")), types
    )
