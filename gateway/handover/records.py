"""What the kubelet's own records show of a resource that stands by, and when to look again. Pure."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

LOOK, LOOK_CLOSELY = 1.0, 0.25
"""Seconds between two looks into the kubelet's records while they show what another gateway serves, and while they don't: doubled
for each look in a row at which they can't be read."""
LACKING, LACKING_EACH = 1.4, 0.001
"""Seconds for which they may lack a resource, and more for each of its devices: a kubelet of 1.32 on a busy node takes 2.5 s
for 5 000."""
LACKING_STILL = 0.6
"""The same for the next time: whoever said meanwhile that it serves has been called by the kubelet already."""
_MOST_TAKEN = 7
"""How often LACKING is doubled at most, from the third time on. Up to kubelet 1.22 the checkpoint is all there is: a list that was
written before we saw that another gateway registers isn't told from ours. Up to 1.11 each Register ends the other's stream: who takes
the resource back at the same pace for ever costs the kubelet its devices for some milliseconds each time."""
_MOST_UNKNOWN = 7
"""Looks in a row that showed nothing at all, as far as they are counted: the longest pause is 32 s."""


class RecordsSeen(Struct, frozen=True):
    """What the kubelet's own records showed of a resource that we stand by for. Times are in monotonic seconds."""

    lacking_since: float | None = None
    """Since when every look found no device; None: the last look found some, or nothing is known."""
    seen: bool = False
    """Whether any look since the kubelet's start, or since we stand by, found some."""
    told: float = 0.0
    """When that was told last."""
    unknown: int = 0
    """How many looks in a row showed nothing at all."""

    def look(self, now: float, *, shown: bool | None) -> RecordsSeen:
        """Take what one look showed; None: nothing could be known."""
        if shown is None:
            return replace(self, unknown=min(self.unknown + 1, _MOST_UNKNOWN))
        if shown:
            return RecordsSeen(seen=True)
        return replace(self, lacking_since=now if self.lacking_since is None else self.lacking_since, unknown=0)

    def unserved(self, now: float, devices: int, taken: int = 0) -> bool:
        """Whether a resource of so many devices was lacking for too long for a Register that is under way.

        ``taken``: how often it was taken back from the same gateway already, which registered after all.
        """
        if self.lacking_since is None:
            return False
        if self.told > self.lacking_since:
            return now - self.told >= LACKING_STILL + LACKING_EACH * devices
        return now - self.lacking_since >= LACKING * 2.0 ** min(max(taken - 1, 0), _MOST_TAKEN) + LACKING_EACH * devices

    def again(self, *, talks: bool) -> float | None:
        """Return in how many seconds to look again; None: not before the kubelet starts anew.

        Of one that talks we hear at once when it can't serve any more.
        """
        if self.seen and self.lacking_since is None:
            return None if talks else LOOK
        return LOOK_CLOSELY * 2.0**self.unknown
