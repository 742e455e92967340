"""Profiles: the GPUs of a simulated node, in a YAML file that a person writes and edits.

    resources:
      nvidia.com/gpu:
        gpus: 8                            # so many, or a list of {uuid, numa, health, reason, device_nodes}
        numa: [0, 0, 0, 0, 1, 1, 1, 1]     # the NUMA node of each, by index; null: no known place
        unhealthy: {3: fell off the bus}   # by index or UUID, with the reason: the part to edit at run time;
                                           # or {reason: fell off the bus, kind: reset-required}: see devices.model.TroubleKind
        recovered: [3]                     # it was reset: what had to be remembered of its troubles ends
        released: [3]                      # closed for a reset: no new pod gets it
        withdrawn: [3]                     # not offered any more, on purpose; a GPU beyond "gpus" is lost instead
        links:                             # how GPUs reach each other, by index or UUID: each of a list each other;
        - {between: [0, 1, 2, 3], by: nvlink, lanes: 2}     # nvlink, xgmi (with lanes), pix, pxb, phb, node or sys
        mig: {0: [1g.10gb, 2g.20gb]}       # GPU 0 is in MIG mode, with these instances; by index or UUID
        product: NVIDIA H100 80GB HBM3     # what DRA's slices say of each, for claims that choose by it
        memory: 80                         # the same in GiB; MIG instances have what their profile says
        partitions: 8                      # every 8 in a row are partitions of one GPU; links are between their GPUs
        cdi: vendor.com/gpu                # containers are told vendor.com/gpu=<UUID> (CDI names), and nothing else
        pre_start: true                    # the kubelet calls PreStartContainer, which fails while a GPU is not well

An error names file, line and key, what is wrong and what to do: somebody watches a node follow the edit. A root daemon reads the
file, so its size, depth and numbers are bounded, and YAML's anchors (which can unfold without end) are refused.
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
from devices.gpu.model import GPU, Link, Way
from devices.gpu.simulated.document import MAX_NODE, Document, ProfileError, Where
from devices.model import Health, Trouble, TroubleKind
from devices.naming import resource_name_error

MAX_BYTES: Final = 8 * 1024 * 1024
MAX_GPUS: Final = 200_000
_MAX_RESOURCES: Final = 256
_GIB: Final = 1024**3
_MAX_PAIRS: Final = 4096  # linked GPUs of a resource: all of 64 are 2 016
_SHIPPED: Final = Path(__file__).parent / "profiles"
_NAMESPACE: Final = uuid.UUID("6d1c6f3e-5d55-4be1-8d1a-2f0d5a1f6a51")
# Part of a comma-separated environment variable and of a JSON file; 63 is what the kubelet's API asks of a device ID.
_UUID: Final = r"[A-Za-z0-9][A-Za-z0-9._:-]{0,62}"
# What the CDI specification asks of a kind; a UUID is a device name of it if it ends like one.
_CDI_KIND: Final = r"[A-Za-z]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?/[A-Za-z]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"


_Reason = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Numa = Annotated[int, msgspec.Meta(ge=0, le=MAX_NODE)] | None
_Instances = Annotated[
    tuple[Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,2}(c\.[0-9]{1,2})?g\.[0-9]{1,4}gb(\+[a-z.]{1,16})?\Z")], ...],
    msgspec.Meta(max_length=16),
]
_Some = Annotated[tuple[int | str, ...], msgspec.Meta(max_length=MAX_GPUS)] | None


class UnreadableProfileError(ProfileError):
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
    kind: TroubleKind = TroubleKind.RESTART_APP


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
    product: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = "Simulated GPU"
    memory: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 80


class _Profile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The whole file; the values are looked at one by one, because only then an error knows its resource."""

    resources: Annotated[dict[str, object], msgspec.Meta(max_length=_MAX_RESOURCES)]


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
            f"no profile {profile!r}: neither a file nor a shipped one. Write the file, or use one of {', '.join(shipped())}"
        )
    return path, True


def read(path: Path) -> bytes:
    """Read a profile's text.

    Raises:
        UnreadableProfileError: it can't be read now.
        ProfileError: it isn't a plain file, or is bigger than 8 MiB.
    """
    try:
        content = read_plain(path, MAX_BYTES)
    except NotPlainError:
        raise ProfileError(f"{path}: not a plain file. Put the profile's text there") from None
    except OSError as error:
        raise UnreadableProfileError(
            f"{path}: the profile can't be read ({error.strerror}). Write it, or correct its mode"
        ) from error
    if len(content) > MAX_BYTES:
        raise ProfileError(f"{path}: more than {MAX_BYTES} bytes. Write 'gpus: 10000' instead of a list")
    return content


def parse(content: bytes, name: str) -> Mapping[str, Described]:
    """Turn a profile's text into what it says of each resource name; ``name`` is what its errors call it.

    A GPU without a UUID gets one made of its resource name and index: the same at each start and on each node.

    Raises:
        ProfileError: as its name says.
    """
    document = Document(content, name)
    document.require("resources")
    profile: _Profile = document.convert((), _Profile)
    found: dict[str, Described] = {}
    for resource in profile.resources:
        path: Where = ("resources", resource)
        problem = resource_name_error(resource)
        if problem is not None:
            document.refuse(path, problem)
        found[resource] = _described(document, path, resource)
        total = sum(len(described.gpus) for described in found.values())
        if total > MAX_GPUS:
            document.refuse(path, f"{total} GPUs on a node. Allowed: at most {MAX_GPUS}")
    return found


def _described(document: Document, path: Where, resource: str) -> Described:
    spec: _Resource = document.convert(path, _Resource)
    entries = (_Entry(),) * spec.gpus if isinstance(spec.gpus, int) else spec.gpus
    uuids: dict[str, int] = {}
    for index, entry in enumerate(entries):
        gpu_path = (*path, "gpus", index)
        _check_entry(document, gpu_path, entry, placed=spec.numa is not None)
        device_id = _derived_uuid(resource, index) if entry.uuid is None else entry.uuid
        if uuids.setdefault(device_id, index) != index:
            problem = f"the UUID {device_id!r} is here twice: GPU {uuids[device_id]} has it. Write another"
            document.refuse((*gpu_path, "uuid"), problem)
    numa = (entry.numa for entry in entries) if spec.numa is None else spec.numa
    if spec.numa is not None and len(spec.numa) != len(entries):
        problem = f"{len(entries)} GPUs, and {len(spec.numa)} of them with a NUMA node. Write one for each"
        document.refuse((*path, "numa"), problem)
    if spec.cdi is not None and not re.fullmatch(_CDI_KIND, spec.cdi):
        document.refuse((*path, "cdi"), f"no kind of CDI devices: {spec.cdi[:80]!r}", "cdi")
    unnamed = [device_id for device_id in uuids if spec.cdi is not None and not device_id[-1].isalnum()]
    if unnamed:
        problem = f"the UUID {unnamed[0]!r} is no CDI name, which ends with a letter or digit. Write another"
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
            product=spec.product,
            memory=spec.memory * _GIB // (spec.partitions or 1),
        )
        for (device_id, index), entry, node in zip(uuids.items(), entries, numa, strict=True)
        if device_id not in withdrawn
    ]
    gpus += (part for gpu in tuple(gpus) for part in _instances(gpu, split.get(gpu.uuid, ())))
    return Described(tuple(gpus), recovered, released, withdrawn)


def _split(document: Document, path: Where, spec: _Resource, uuids: Mapping[str, int]) -> Mapping[str, tuple[str, ...]]:
    given, known = spec.mig or {}, tuple(uuids)
    if given and spec.partitions is not None:
        document.refuse(path, "'mig' and 'partitions' do not go together. Remove one of them")
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
            memory=int(re.findall(r"([0-9]+)gb", profile)[0]) * _GIB,
        )


def _trouble(entry: _Entry) -> Trouble | None:
    return Trouble(entry.reason or "unhealthy in the profile") if entry.health is Health.UNHEALTHY else None


def _check_entry(document: Document, path: Where, entry: _Entry, *, placed: bool) -> None:
    """Refuse what types alone can't: bad IDs and paths, and facts that contradict each other."""
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


def _unhealthy(
    document: Document, path: Where, given: Mapping[int | str, object], uuids: Mapping[str, int]
) -> Mapping[str, Trouble]:
    known = tuple(uuids)
    troubles: dict[str, Trouble] = {}
    for key in given:
        device_id = _uuid(document, (*path, key), key, known, uuids)
        said: str | _Trouble = document.convert((*path, key), _Reason | _Trouble)
        troubles[device_id] = Trouble(said) if isinstance(said, str) else Trouble(said.reason, said.kind)
    return troubles


def _named(document: Document, path: Where, given: Iterable[int | str], uuids: Mapping[str, int]) -> frozenset[str]:
    known = tuple(uuids)
    return frozenset(_uuid(document, (*path, at), key, known, uuids) for at, key in enumerate(given))


def _boards(resource: str, uuids: Sequence[str], partitions: int | None) -> Sequence[str]:
    """Say on which physical GPU each is: its own UUID, or that of the one it is a partition of."""
    if partitions is None:
        return uuids
    return [_derived_uuid(resource, f"gpu/{index // partitions}") for index in range(len(uuids))]


def _links(
    document: Document, path: Where, given: Iterable[_Links], boards: Sequence[str], uuids: Mapping[str, int]
) -> Mapping[str, tuple[Link, ...]]:
    """Turn ``links`` into those of each physical GPU; where two are linked in several ways, into all of these."""
    known, pairs = tuple(uuids), 0
    links: dict[str, list[Link]] = {}
    for number, one in enumerate(given):
        here = (*path, number, "between")
        named = [boards[uuids[_uuid(document, (*here, at), key, known, uuids)]] for at, key in enumerate(one.between)]
        pairs += len(named) * (len(named) - 1) // 2
        if len(set(named)) < len(named):
            document.refuse(here, "a GPU is here twice, or two of its partitions", "between")
        if one.lanes > 1 and one.by not in {Way.NVLINK, Way.XGMI}:
            document.refuse((*path, number, "lanes"), f"{one.lanes} lanes, which {one.by.value} does not have", "lanes")
        if pairs > _MAX_PAIRS:
            problem = f"more than {_MAX_PAIRS} pairs of linked GPUs. Leave out the far ones"
            document.refuse((*path, number), problem)
        for a, b in combinations(named, 2):
            links.setdefault(a, []).append(Link(b, one.by, one.lanes))
            links.setdefault(b, []).append(Link(a, one.by, one.lanes))
    return {board: tuple(there) for board, there in links.items()}


def _uuid(document: Document, path: Where, key: int | str, known: Sequence[str], uuids: Mapping[str, int]) -> str:
    """Find the GPU that ``key`` means, its index or its UUID."""
    index = key if isinstance(key, int) else uuids.get(key, -1)
    if not 0 <= index < len(known):
        there = f"0 to {len(known) - 1}" if known else "there is none"
        document.refuse(path, f"{key!r:.80} is no GPU of this resource. Write a UUID or an index ({there})")
    return known[index]


def _derived_uuid(resource: str, index: int | str) -> str:
    return f"GPU-{uuid.uuid5(_NAMESPACE, f'{resource}/{index}')}"
