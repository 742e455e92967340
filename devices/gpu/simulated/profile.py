"""Profiles describe the GPUs of a simulated node in YAML.

    resources:
      nvidia.com/gpu:
        gpus: 8                            # how many, or a list of {uuid, numa, health, reason, device_nodes}
        numa: [0, 0, 0, 0, 1, 1, 1, 1]     # the NUMA node of each, by index; null: unknown
        unhealthy: {3: fell off the bus}   # by index or UUID, with the reason;
                                           # or {reason: fell off the bus, kind: reset-required}: see devices.model.TroubleKind
        recovered: [3]                     # it was reset, so remembered troubles of it end
        released: [3]                      # released for a reset: no new pod gets it
        withdrawn: [3]                     # removed on purpose; if you lower "gpus" instead, a GPU is lost
        links:                             # the connections between GPUs, by index or UUID:
        - {between: [0, 1, 2, 3], by: nvlink, lanes: 2}     # nvlink, xgmi (with lanes), pix, pxb, phb, node or sys
        mig: {0: [1g.10gb, 2g.20gb]}       # GPU 0 is in MIG mode, with these instances; by index or UUID
        product: NVIDIA H100 80GB HBM3     # what ResourceSlices have for each GPU
        memory: 80                         # GiB of each GPU; MIG instances have what their profile says
        partitions: 8                      # every 8 in a row are partitions of one GPU; links are between their GPUs
        cdi: vendor.com/gpu                # containers get the CDI name vendor.com/gpu=<UUID> and nothing else
        pre_start: true                    # the kubelet calls PreStartContainer, which fails for unhealthy GPUs

An error names the file, the line and the key, then what is wrong and what to do. The gateway runs as root, so the file's size,
depth and number of values are bounded, and YAML's anchors, which can expand without end, are refused.
"""

from __future__ import annotations

import posixpath
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec.structs import replace

from devices.files import NotPlainError, read_plain
from devices.gpu.backend import Sight
from devices.gpu.model import GPU, Link, Way
from devices.gpu.simulated.document import MAX_NODE, Document, ProfileError, Where
from devices.model import Health, Trouble, TroubleKind
from devices.naming import resource_name_error

MAX_BYTES: Final = 8 * 1024 * 1024
MAX_GPUS: Final = 200_000
_MAX_RESOURCES: Final = 256
_GIB: Final = 1024**3
_MAX_PAIRS: Final = 4096  # Linked GPUs of a resource: 64 GPUs have 2,016 pairs.
_SHIPPED: Final = Path(__file__).parent / "profiles"
_NAMESPACE: Final = uuid.UUID("6d1c6f3e-5d55-4be1-8d1a-2f0d5a1f6a51")
# UUIDs are written to comma-separated variables and JSON. The kubelet allows 63 characters in a device ID.
_UUID: Final = r"[A-Za-z0-9][A-Za-z0-9._:-]{0,62}"
# The form that the CDI specification requires of a kind.
_CDI_KIND: Final = r"[A-Za-z]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?/[A-Za-z]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"


_Reason = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Numa = Annotated[int, msgspec.Meta(ge=0, le=MAX_NODE)] | None
_Instances = Annotated[
    tuple[Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,2}(c\.[0-9]{1,2})?g\.[0-9]{1,4}gb(\+[a-z.]{1,16})?\Z")], ...],
    msgspec.Meta(max_length=16),
]
_Some = Annotated[tuple[int | str, ...], msgspec.Meta(max_length=MAX_GPUS)] | None


class _Entry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One GPU of a list."""

    uuid: str | None = None
    numa: _Numa = None
    health: Health = Health.HEALTHY
    reason: _Reason | None = None
    device_nodes: tuple[str, ...] = ()


class _Trouble(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The trouble of a GPU, if it has a kind."""

    reason: _Reason
    kind: TroubleKind = TroubleKind.RESTART_APP


class _Links(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """GPUs that are all connected in one way."""

    between: Annotated[tuple[int | str, ...], msgspec.Meta(min_length=2, max_length=64)]
    by: Way
    lanes: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1


class _Resource(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The value of a resource name."""

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
    product: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = "Simulated GPU"
    memory: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 80


class _Profile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The whole file. Its values are converted one by one, because only then an error knows its resource."""

    resources: Annotated[dict[str, object], msgspec.Meta(max_length=_MAX_RESOURCES)]


def shipped() -> tuple[str, ...]:
    """Return the names of the profiles that come with the gateway."""
    return tuple(sorted(path.stem for path in _SHIPPED.glob("*.yaml")))


def find(profile: str) -> Path:
    """Return the file of a profile, given by a shipped profile's name or a path.

    Raises:
        ProfileError: there is neither such a shipped profile nor such a file.
    """
    if profile in shipped():
        return _SHIPPED / f"{profile}.yaml"
    path = Path(profile)
    if not path.is_file():
        raise ProfileError(
            f"no profile {profile!r}: neither a file nor a shipped one. Write the file, or use one of {', '.join(shipped())}"
        )
    return path


def read(path: Path) -> bytes:
    """Read a profile's text.

    Raises:
        ProfileError: it can't be read now, isn't a plain file, or is larger than 8 MiB.
    """
    try:
        content = read_plain(path, MAX_BYTES)
    except NotPlainError:
        raise ProfileError(f"{path}: not a plain file. Put the profile's text there") from None
    except OSError as error:
        raise ProfileError(
            f"{path}: cannot read the profile ({error.strerror}). Write it, or correct its mode"
        ) from error
    if len(content) > MAX_BYTES:
        raise ProfileError(f"{path}: more than {MAX_BYTES} bytes. Write 'gpus: 10000' instead of a list")
    return content


def parse(content: bytes, name: str) -> Mapping[str, Sight]:
    """Return the GPUs that a profile's text describes, by resource name; ``name`` is the text's name in errors.

    A GPU without a UUID gets one from its resource name and index: the same at each start and on each node.

    Raises:
        ProfileError: the text isn't a profile.
    """
    document = Document(content, name)
    profile: _Profile = document.convert((), _Profile)
    found: dict[str, Sight] = {}
    for resource in profile.resources:
        path: Where = ("resources", resource)
        if problem := resource_name_error(resource):
            document.refuse(path, problem)
        found[resource] = _described(document, path, resource)
        total = sum(len(described.gpus) for described in found.values())
        if total > MAX_GPUS:
            document.refuse(path, f"{total} GPUs on a node. Allowed: at most {MAX_GPUS}")
    return found


class _Names:
    """The GPUs of a resource by UUID, and the document in which others name them, by UUID or index."""

    def __init__(self, document: Document, path: Where, resource: str, entries: Sequence[_Entry]) -> None:
        self.document = document
        self.indexes: dict[str, int] = {}
        for index, entry in enumerate(entries):
            one = _derived_uuid(resource, index) if entry.uuid is None else entry.uuid
            if self.indexes.setdefault(one, index) != index:
                problem = f"the UUID {one!r} is here twice: GPU {self.indexes[one]} has it. Write another"
                document.refuse((*path, "gpus", index, "uuid"), problem)
        self._uuids = tuple(self.indexes)

    def uuid(self, path: Where, key: int | str) -> str:
        """Return the UUID of the GPU that ``key`` at ``path`` names."""
        index = key if isinstance(key, int) else self.indexes.get(key, -1)
        if not 0 <= index < len(self._uuids):
            there = f"0 to {len(self._uuids) - 1}" if self._uuids else "there is none"
            self.document.refuse(path, f"{key!r:.80} is no GPU of this resource. Write a UUID or an index ({there})")
        return self._uuids[index]

    def uuids(self, path: Where, keys: Iterable[int | str] | None) -> list[str]:
        """Return the UUIDs of the GPUs that the list at ``path`` names."""
        return [self.uuid((*path, at), key) for at, key in enumerate(keys or ())]


def _described(document: Document, path: Where, resource: str) -> Sight:
    spec: _Resource = document.convert(path, _Resource)
    entries = (_Entry(),) * spec.gpus if isinstance(spec.gpus, int) else spec.gpus
    for index, entry in enumerate(entries):
        _check_entry(document, (*path, "gpus", index), entry, placed=spec.numa is not None)
    names = _Names(document, path, resource, entries)
    numa = (entry.numa for entry in entries) if spec.numa is None else spec.numa
    if spec.numa is not None and len(spec.numa) != len(entries):
        problem = f"{len(entries)} GPUs, and {len(spec.numa)} of them with a NUMA node. Write one for each"
        document.refuse((*path, "numa"), problem)
    if spec.cdi is not None and not re.fullmatch(_CDI_KIND, spec.cdi):
        document.refuse((*path, "cdi"), f"no kind of CDI devices: {spec.cdi[:80]!r}", "cdi")
    if spec.mig and spec.partitions is not None:
        document.refuse((*path, "mig"), "'mig' and 'partitions' do not go together. Remove one of them")
    unnamed = [one for one in names.indexes if spec.cdi is not None and not one[-1].isalnum()]
    if unnamed:
        problem = f"the UUID {unnamed[0]!r} is no CDI name, which ends with a letter or digit. Write another"
        document.refuse((*path, "gpus", names.indexes[unnamed[0]]), problem)
    unhealthy = _unhealthy(names, (*path, "unhealthy"), spec.unhealthy or {})
    recovered, released, withdrawn = (
        frozenset(names.uuids((*path, field), getattr(spec, field))) for field in ("recovered", "released", "withdrawn")
    )
    # The physical GPU of each: itself, or the one that it is a partition of.
    boards: Sequence[str] = tuple(names.indexes)
    if spec.partitions is not None:
        boards = [_derived_uuid(resource, f"gpu/{index // spec.partitions}") for index in range(len(entries))]
    links = _links(names, (*path, "links"), spec.links or (), boards)
    split = {names.uuid((*path, "mig", key), key): profiles for key, profiles in (spec.mig or {}).items()}
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
            product=spec.product,
            memory=spec.memory * _GIB // (spec.partitions or 1),
        )
        for (device_id, index), entry, node in zip(names.indexes.items(), entries, numa, strict=True)
        if device_id not in withdrawn
    ]
    gpus += (part for gpu in tuple(gpus) for part in _instances(gpu, split.get(gpu.uuid, ())))
    return Sight(tuple(gpus), recovered, released, withdrawn)


def _instances(gpu: GPU, profiles: Iterable[str]) -> Iterator[GPU]:
    """Yield the MIG instances of a GPU. The same profile in the same place always has the same UUID."""
    for number, profile in enumerate(profiles):
        yield replace(
            gpu,
            uuid=f"MIG-{uuid.uuid5(_NAMESPACE, f'{gpu.uuid}/{number}/{profile}')}",
            trouble=None,
            parent=gpu.uuid,
            profile=profile,
            partitioned=False,
            place=f"{gpu.index}:{number}",
            memory=int(re.findall(r"([0-9]+)gb", profile)[0]) * _GIB,
        )


def _trouble(entry: _Entry) -> Trouble | None:
    return Trouble(entry.reason or "unhealthy in the profile") if entry.health is Health.UNHEALTHY else None


def _check_entry(document: Document, path: Where, entry: _Entry, *, placed: bool) -> None:
    """Refuse bad IDs and paths, and values that contradict each other."""
    if entry.uuid is not None and not re.fullmatch(_UUID, entry.uuid):
        document.refuse((*path, "uuid"), f"no device ID: {entry.uuid[:80]!r}", "uuid")
    if entry.reason is not None and entry.health is Health.HEALTHY:
        problem = "a healthy GPU has no reason. Write 'health: Unhealthy' also, or no reason"
        document.refuse((*path, "reason"), problem)
    if placed and entry.numa is not None:
        problem = "the GPU's NUMA node is here and in the resource's 'numa'. Remove one of them"
        document.refuse((*path, "numa"), problem)
    for number, node in enumerate(entry.device_nodes):
        plain = node.startswith("/dev/") and node.isprintable() and len(node) <= 255
        if not plain or posixpath.normpath(node) != node:
            document.refuse((*path, "device_nodes", number), f"no path of a device node: {node[:80]!r}", "device_nodes")


def _unhealthy(names: _Names, path: Where, given: Iterable[int | str]) -> Mapping[str, Trouble]:
    troubles: dict[str, Trouble] = {}
    for key in given:
        device_id = names.uuid((*path, key), key)
        value: str | _Trouble = names.document.convert((*path, key), _Reason | _Trouble)
        troubles[device_id] = Trouble(value) if isinstance(value, str) else Trouble(value.reason, value.kind)
    return troubles


def _links(
    names: _Names, path: Where, given: Iterable[_Links], boards: Sequence[str]
) -> Mapping[str, tuple[Link, ...]]:
    """Return the links of each physical GPU. Two GPUs that are linked in several ways have all of these."""
    pairs = 0
    links: dict[str, list[Link]] = {}
    for number, one in enumerate(given):
        here = (*path, number, "between")
        named = [boards[names.indexes[uuid]] for uuid in names.uuids(here, one.between)]
        pairs += len(named) * (len(named) - 1) // 2
        if len(set(named)) < len(named):
            names.document.refuse(here, "a GPU is here twice, or two of its partitions", "between")
        if one.lanes > 1 and one.by not in {Way.NVLINK, Way.XGMI}:
            problem = f"{one.lanes} lanes, which {one.by.value} does not have"
            names.document.refuse((*path, number, "lanes"), problem, "lanes")
        if pairs > _MAX_PAIRS:
            problem = f"more than {_MAX_PAIRS} pairs of linked GPUs. Leave out the far ones"
            names.document.refuse((*path, number), problem)
        for a, b in combinations(named, 2):
            links.setdefault(a, []).append(Link(b, one.by, one.lanes))
            links.setdefault(b, []).append(Link(a, one.by, one.lanes))
    return {board: tuple(there) for board, there in links.items()}


def _derived_uuid(resource: str, index: int | str) -> str:
    return f"GPU-{uuid.uuid5(_NAMESPACE, f'{resource}/{index}')}"
