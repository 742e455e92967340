"""The dialects there are, newest first: the order in which an unknown kubelet is tried. A new API version is one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adapters.v0_1 import V0_1
from adapters.v1alpha2 import V1ALPHA2
from adapters.v1beta1 import V1BETA1

if TYPE_CHECKING:
    from adapters.dialect import Dialect

DIALECTS: tuple[Dialect, ...] = (V1BETA1, V1ALPHA2, V0_1)


def by_name(name: str) -> Dialect:
    """Find the dialect that Register calls ``name``.

    Raises:
        ValueError: there is none; the message lists those that there are.
    """
    for dialect in DIALECTS:
        if dialect.name == name:
            return dialect
    known = ", ".join(dialect.name for dialect in DIALECTS)
    message = f"unknown device plugin API version {name[:64]!r}. Allowed: {known}"
    raise ValueError(message)
