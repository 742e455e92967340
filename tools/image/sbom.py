"""The software bill of materials: CycloneDX 1.5, which scanners read, of what really was unpacked and installed."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

from tools.image.archive import stamp
from tools.image.debian import Package
from tools.image.python import Wheel

_NAMESPACE = uuid.UUID("6a1d8a5e-7a0f-5a39-9f0e-3c7a2b9d4c11")


Component = dict[str, Any]


def bill(subject: Component, components: Sequence[Component], when: int) -> bytes:
    """Write the bill of something that is shipped.

    Args:
        subject: what it is the bill of (``subject``).
        components: what is in it.
        when: its time, in seconds since 1970.
    """
    body: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"timestamp": stamp(when), "component": subject},
        "components": list(components),
    }
    body["serialNumber"] = f"urn:uuid:{uuid.uuid5(_NAMESPACE, json.dumps(body, sort_keys=True))}"
    return json.dumps(body, indent=1, sort_keys=True).encode() + b"\n"


def subject(kind: str, name: str, version: str) -> Component:
    """Describe what a bill is of; the kind is CycloneDX's: ``container``, ``library`` or ``application``."""
    return {"type": kind, "bom-ref": name, "name": name, "version": version}


def deb(package: Package, arch: str, distro: str) -> Component:
    """Describe a package of Debian; the architecture is Debian's word, the distribution as ``debian-13``."""
    purl = f"pkg:deb/debian/{quote(package.name)}@{quote(package.version, safe='.-~')}?arch={arch}&distro={distro}"
    return _component(purl, package.name, package.version, package.sha256, package.licences)


def pypi(wheel: Wheel) -> Component:
    """Describe a wheel."""
    purl = f"pkg:pypi/{wheel.name.lower().replace('_', '-')}@{quote(wheel.version)}"
    return _component(purl, wheel.name, wheel.version, wheel.sha256, [wheel.licence] if wheel.licence else [])


def oci(repository: str, digest: str, version: str) -> Component:
    """Describe an image in a registry."""
    name = repository.rpartition("/")[2]
    purl = f"pkg:oci/{name}@{quote(digest)}?repository_url={quote(repository, safe='')}"
    return {**_component(purl, name, version, digest.partition(":")[2], []), "type": "container"}


def _component(purl: str, name: str, version: str, sha256: str | None, licences: Iterable[str]) -> Component:
    component: Component = {"type": "library", "bom-ref": purl, "purl": purl, "name": name, "version": version}
    if sha256:
        component["hashes"] = [{"alg": "SHA-256", "content": sha256}]
    if named := [{"license": {"name": licence}} for licence in licences]:
        component["licenses"] = named
    return component
