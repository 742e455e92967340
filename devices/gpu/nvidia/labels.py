"""The labels that NVIDIA's GPU Feature Discovery 0.19 gives a node, except its timestamp.

The rules are those of internal/lm of NVIDIA/k8s-device-plugin. Imported only if an operator wants labels.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from devices.gpu.backend import Sight
from devices.gpu.model import GPU
from devices.gpu.nvidia.kernel import read
from devices.gpu.nvidia.vendor import PREFIX
from devices.policy import MigStrategy, Policy, Slices

_GPU: Final = f"{PREFIX}gpu"
_VENDOR: Final = "0x10de"
_MODES: Final = {"0x030000": "graphics", "0x030200": "compute"}
"""By PCI class."""
_FAMILIES: Final = dict(
    enumerate(("tesla", "fermi", "kepler", "", "maxwell", "pascal", "volta", "ampere", "hopper", "blackwell"), start=1)
) | {12: "blackwell", 13: "rubin"}
"""By the first number of the compute capability; Rubin is known since 0.20."""
_LATER: Final = {7: (5, "turing"), 8: (9, "ada-lovelace")}
"""From this second number of the compute capability on, it is another family."""
_ENGINES: Final = {
    "multiprocessors": "multiprocessors",
    "copyEngines": "engines.copy",
    "decoders": "engines.decoder",
    "encoders": "engines.encoder",
    "jpegEngines": "engines.jpeg",
    "ofaEngines": "engines.ofa",
}
"""The labels of a MIG instance's capacities."""
_SLICES: Final = re.compile(r"(?:(?P<compute>\d+)c\.)?(?P<gpu>\d+)g\.")
_CONFIG_BYTES: Final = 256
"""Bytes of a PCI device's configuration. Without CAP_SYS_ADMIN the kernel shows 64."""


def labels(sight: Sight, policy: Policy, sys: Path = Path("/sys")) -> Mapping[str, str]:
    """Return the labels of a node, by name. It reads files of sysfs: call it in a thread."""
    boards = [gpu for gpu in sight.gpus if not gpu.parent]
    found = dict(_vgpu(sys))
    if not boards:
        return found
    instances = [gpu for gpu in sight.gpus if gpu.parent]
    found |= {
        f"{_GPU}.machine": _machine(sys),
        f"{PREFIX}mig.capable": str(any(one.partitionable or one.partitioned for one in boards)).lower(),
        f"{PREFIX}mps.capable": "false",
        f"{_GPU}.mode": _mode(boards, sys),
    }
    found |= _versions(sight.driver_version, dict(boards[0].traits).get("cudaDriverVersion", ""))
    found |= _whole(boards, policy)
    if policy.mig_strategy is not MigStrategy.NONE:
        found[f"{PREFIX}mig.strategy"] = policy.mig_strategy.value
        make = _single if policy.mig_strategy is MigStrategy.SINGLE else _mixed
        found |= make(boards, instances, policy)
    cliques = {one.clique for one in boards if one.clique}
    if len(cliques) == 1:
        found[f"{_GPU}.clique"] = cliques.pop()
    return found


def _versions(driver: str, cuda: str) -> Iterator[tuple[str, str]]:
    if 2 <= len(parts := driver.split(".")) <= 3:
        major, minor, revision = (*parts, "")[:3]
        for name, old, value in (("major", "major", major), ("minor", "minor", minor), ("revision", "rev", revision)):
            yield f"{PREFIX}cuda.driver-version.{name}", value
            yield f"{PREFIX}cuda.driver.{old}", value
        yield f"{PREFIX}cuda.driver-version.full", driver
    if cuda:
        for name, value in zip(("major", "minor"), cuda.split("."), strict=True):
            yield f"{PREFIX}cuda.runtime-version.{name}", value
            yield f"{PREFIX}cuda.runtime.{name}", value
        yield f"{PREFIX}cuda.runtime-version.full", cuda


def _whole(boards: Sequence[GPU], policy: Policy) -> Iterator[tuple[str, str]]:
    """Return the labels of whole GPUs: of the most frequent product, without GPUs in MIG mode."""
    counts = Counter(one.product for one in boards)
    one = max(boards, key=lambda one: (not one.partitioned, counts[one.product], -one.index))
    yield from _base(_GPU, (one.product,), counts[one.product], None if one.partitioned else policy.slices.get(_GPU))
    if one.partitioned:
        yield f"{_GPU}.replicas", "0"
    if one.memory:
        yield f"{_GPU}.memory", str(one.memory >> 20)
    if capability := dict(one.traits).get("cudaComputeCapability"):
        major, minor = map(int, capability.split("."))
        since, family = _LATER.get(major, (0, ""))
        yield f"{_GPU}.family", family if family and minor >= since else _FAMILIES.get(major) or "undefined"
        yield f"{_GPU}.compute.major", str(major)
        yield f"{_GPU}.compute.minor", str(minor)


def _single(boards: Sequence[GPU], instances: Sequence[GPU], policy: Policy) -> Iterator[tuple[str, str]]:
    """Return the labels of MIG instances that are offered as GPUs: they have one profile on every GPU, else none can be offered."""
    split = [one for one in boards if one.partitioned]
    if not split:
        return
    if len(split) == len(boards) == len({one.parent for one in instances}) and len(_kinds(instances)) == 1:
        yield from _instances(_GPU, instances, boards, policy)
        return
    yield f"{_GPU}.product", f"{_sanitised(split[0].product)}-MIG-INVALID"
    yield f"{_GPU}.sharing-strategy", ""
    for name in ("count", "replicas", "memory"):
        yield f"{_GPU}.{name}", "0"


def _mixed(boards: Sequence[GPU], instances: Sequence[GPU], policy: Policy) -> Iterator[tuple[str, str]]:
    for kind, found in _kinds(instances).items():
        yield from _instances(f"{PREFIX}mig-{kind}", found, boards, policy)


def _kinds(instances: Sequence[GPU]) -> Mapping[str, Sequence[GPU]]:
    """Return the instances by profile."""
    names = dict.fromkeys(one.profile for one in instances)
    return {name.replace("+", "."): [one for one in instances if one.profile == name] for name in names}


def _instances(
    resource: str, instances: Sequence[GPU], boards: Sequence[GPU], policy: Policy
) -> Iterator[tuple[str, str]]:
    """Return the labels of the MIG instances of one profile."""
    one = instances[0]
    product = next((board.product for board in boards if board.uuid == one.parent), "")
    parts = product, "MIG", one.profile.replace("+", ".")
    yield from _base(resource, parts, len(instances), policy.slices.get(resource))
    yield f"{resource}.memory", str(one.memory >> 20)
    if slices := _SLICES.match(one.profile):
        yield f"{resource}.slices.gi", slices["gpu"]
        yield f"{resource}.slices.ci", slices["compute"] or slices["gpu"]
    for name, count in one.capacities:
        if name in _ENGINES:
            yield f"{resource}.{_ENGINES[name]}", str(count)


def _base(resource: str, parts: Sequence[str], count: int, slices: Slices | None) -> Iterator[tuple[str, str]]:
    replicas = slices.replicas if slices is not None else 0
    shared = ("SHARED",) if slices is not None and replicas > 1 and slices.shown_as == resource else ()
    yield f"{resource}.product", "-".join((*(_sanitised(part) for part in parts if part), *shared))
    yield f"{resource}.count", str(count)
    yield f"{resource}.replicas", str(replicas or 1)
    yield f"{resource}.sharing-strategy", "time-slicing" if replicas > 1 else "none"


def _sanitised(text: str) -> str:
    return "-".join(re.sub(r"[^A-Za-z0-9_. -]", "", text).split())


def _machine(sys: Path) -> str:
    try:
        return _sanitised((sys / "class/dmi/id/product_name").read_text(errors="replace").strip())
    except OSError:
        return "unknown"


def _mode(boards: Sequence[GPU], sys: Path) -> str:
    classes = {read(sys / "bus/pci/devices" / one.pci / "class", 64).strip() for one in boards}
    return _MODES.get(classes.pop(), "unknown") if len(classes) == 1 else "unknown"


def _vgpu(sys: Path) -> Iterator[tuple[str, str]]:
    """Return if this machine is a guest with a vGPU, and the release of its host's driver; empty if that can't be read."""
    host = None
    for device in sorted((sys / "bus/pci/devices").glob("*")):
        if read(device / "vendor", 64).strip() != _VENDOR:
            continue
        try:
            config = (device / "config").read_bytes()
        except OSError:
            return
        if len(config) < _CONFIG_BYTES:
            return
        host = _host_driver(_vendor_capability(config)) or host
    yield f"{PREFIX}vgpu.present", str(host is not None).lower()
    if host is not None:
        yield f"{PREFIX}vgpu.host-driver-version", host[0]
        yield f"{PREFIX}vgpu.host-driver-branch", host[1]


def _vendor_capability(config: bytes) -> bytes:
    """Return the vendor-specific capability of a PCI device; empty if it has none."""
    at, seen = config[0x34] if config[6] & 0x10 else 0, set[int]()
    while at and at not in seen and at + 2 < _CONFIG_BYTES and config[at] != 0xFF:
        if config[at] == 9:
            return config[at : at + config[at + 2]]
        seen.add(at)
        at = config[at + 1]
    return b""


def _host_driver(capability: bytes) -> tuple[str, str] | None:
    """Return release and branch of the host's driver, from the first record with number 0 of a vGPU's capability; None: no vGPU."""
    if capability[3:5] != b"VF":
        return None
    at = 5
    while at + 1 < len(capability) and capability[at]:
        at += capability[at + 1] or len(capability)
    texts = capability[at + 2 : at + 12], capability[at + 12 : at + 22]
    version, branch = (text.strip(b"\0").decode("latin-1") for text in texts)
    return version, branch
