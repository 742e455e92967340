"""Which device a person means: by its ID, by its index, or by as much of its ID as no other begins with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.wires.control import ControlError

_MOST_NAMED: Final = 8


def meant(name: str, indexes: Mapping[str, str]) -> str:
    """Return the ID that ``name`` stands for; ``name`` itself where it stands for none of them.

    Args:
        name: what a person wrote.
        indexes: the index of each device that could be meant, by its ID; '' where it has none.

    Raises:
        ControlError: it could be several; the message names them.
    """
    if not name or name in indexes:
        return name
    by_index = [device_id for device_id, index in indexes.items() if index == name]
    found = by_index or [device_id for device_id in indexes if device_id.startswith(name)]
    if len(found) > 1:
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise ControlError(
            f"{name!r} is short for {len(found)} devices: {', '.join(found[:_MOST_NAMED])}{more}. Nothing was done: write more "
            "of the ID"
        )
    return found[0] if found else name
