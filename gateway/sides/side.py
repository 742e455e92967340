"""The API to which a board belongs. It is in the state file, so a gateway without DRA reads it also."""

from __future__ import annotations

from enum import Enum


class Side(Enum):
    """The side of a board. The values are those of the state file."""

    PLUGIN = "plugin"
    """The device plugin API may give it."""
    TO_DRA = "to-dra"
    """It moves to DRA: its holder keeps it, and neither API gives it to others."""
    DRA = "dra"
    """DRA may give it."""
    TO_PLUGIN = "to-plugin"
    """It moves back to the device plugin API: claims to which it is allocated still get it, new claims don't."""
    RECLAIMED = "reclaimed"
    """It moves from the device plugin API to a claim to which the scheduler allocated it from an old ResourceSlice."""
    FOREIGN = "foreign"
    """Another DRA driver on this node offers it: its holder keeps it, and neither API of the gateway gives it to others."""
