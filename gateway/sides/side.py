"""To which API a board belongs: all that the state file says of it, also in a gateway without DRA, which needs no more of the table."""

from __future__ import annotations

from enum import Enum


class Side(Enum):
    """Where a board is. The values stand in the state file."""

    PLUGIN = "plugin"
    """The device plugin API gives it away."""
    TO_DRA = "to-dra"
    """On its way: who holds it keeps it, nobody else gets it by either API."""
    DRA = "dra"
    """DRA gives it away."""
    TO_PLUGIN = "to-plugin"
    """On its way back: claims that were allocated get it, the scheduler is to allocate it to no other."""
    RECLAIMED = "reclaimed"
    """Called back from the device plugin API for a claim that was allocated by a ResourceSlice of before."""
    FOREIGN = "foreign"
    """Another DRA driver's ResourceSlices on this node offer it: who holds it keeps it, nobody else gets it here by either API."""
