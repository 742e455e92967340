"""The software bill of materials: CycloneDX 1.5, which scanners read, of what really was unpacked and installed."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from tools.image.debian import Package
from tools.image.python import Wheel

_NAMESPACE = uuid.UUID("6a1d8a5e-7a0f-5a39-9f0e-3c7a2b9d4c11")


def bill(
    packages: Sequence[Package], wheels: Sequence[Wheel], *, name: str, version: str, when: int, arch: str, distro: str
) -> bytes:
    """Write the bill of an image.

    Args:
        packages: Debian's.
        wheels: Python's.
        name: the image's name.
        version: the image's version.
        when: the image's time, in seconds since 1970.
        arch: Debian's word for the architecture.
        distro: as ``debian-13``.
    """
    components = [
        *(
            _component(
                f"pkg:deb/debian/{quote(package.name)}@{quote(package.version, safe='.-~')}?arch={arch}&distro={distro}",
                package.name,
                package.version,
                package.sha256,
                package.licences,
            )
            for package in packages
        ),
        *(
            _component(
                f"pkg:pypi/{wheel.name.lower().replace('_', '-')}@{quote(wheel.version)}",
                wheel.name,
                wheel.version,
                wheel.sha256,
                [wheel.licence] if wheel.licence else [],
            )
            for wheel in wheels
        ),
    ]
    body: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(when, UTC).isoformat().replace("+00:00", "Z"),
            "component": {"type": "container", "bom-ref": name, "name": name, "version": version},
        },
        "components": components,
    }
    body["serialNumber"] = f"urn:uuid:{uuid.uuid5(_NAMESPACE, json.dumps(body, sort_keys=True))}"
    return json.dumps(body, indent=1, sort_keys=True).encode() + b"\n"


def _component(purl: str, name: str, version: str, sha256: str | None, licences: Iterable[str]) -> dict[str, Any]:
    component: dict[str, Any] = {"type": "library", "bom-ref": purl, "purl": purl, "name": name, "version": version}
    if sha256:
        component["hashes"] = [{"alg": "SHA-256", "content": sha256}]
    if named := [{"license": {"name": licence}} for licence in licences]:
        component["licenses"] = named
    return component
