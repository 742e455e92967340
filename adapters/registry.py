"""All dialects, newest first; with an unknown kubelet they are tried in this order. To add an API version, add one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adapters.alpha import V0_1, V1ALPHA2
from adapters.v1beta1 import V1BETA1

if TYPE_CHECKING:
    from adapters.dialect import Dialect

DIALECTS: tuple[Dialect, ...] = (V1BETA1, V1ALPHA2, V0_1)


def by_name(name: str) -> Dialect:
    """Return the dialect of a version string in Register.

    Raises:
        ValueError: it is unknown; the message lists the known ones.
    """
    for dialect in DIALECTS:
        if dialect.name == name:
            return dialect
    known = ", ".join(dialect.name for dialect in DIALECTS)
    raise ValueError(f"unknown device plugin API version {name[:64]!r}. Allowed: {known}")
