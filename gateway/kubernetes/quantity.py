"""Whole numbers in Kubernetes' notation for quantities: 2000 is ``2k``, 2048 is ``2Ki``. Pure."""

from __future__ import annotations

import re
from typing import Final

_UNITS: Final = {"Ti": 2**40, "Gi": 2**30, "Mi": 2**20, "Ki": 2**10, "T": 10**12, "G": 10**9, "M": 10**6, "k": 10**3}
_QUANTITY: Final = re.compile(r"([0-9]{1,18})([TGM]i?|Ki|k|)")


def written(count: int) -> str:
    """Write a number as the API server does: in the largest unit of which it is a whole multiple."""
    for suffix, unit in _UNITS.items():
        if count and count % unit == 0:
            return f"{count // unit}{suffix}"
    return str(count)


def read(text: object) -> int | None:
    """Read a whole number in this notation; None if it isn't one."""
    match = _QUANTITY.fullmatch(str(text))
    return None if match is None else int(match[1]) * _UNITS.get(match[2], 1)
