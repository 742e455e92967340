"""When to have a kubelet write its checkpoint anew: it names pods that have ended, and their GPUs would wait for that for ever.

From 1.15 on pod-resources List makes a kubelet free what ended pods held; its checkpoint is written with the next Allocate, or with the next
list of devices. Where all GPUs wait for what only the checkpoint names, there is no Allocate: then a list is sent once more (run on 1.37.1).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gateway.kubelet.view import View

AGAIN: Final = 30.0
"""Seconds until a list is sent again for the same names: of an init container's devices the checkpoint is right to name it."""


class Outdated:
    """Tells when a checkpoint may be out of date: when pods came or went beside those that only it names, and now and then."""

    def __init__(self) -> None:
        self._seen: object = None
        self._at = -math.inf

    def is_due(self, view: View, now: float) -> bool:
        """Say whether a list is to be sent once more, after a look at ``now`` (monotonic seconds)."""
        if view.source != "pod-resources" or not any((view.remembered or {}).values()):
            return False
        seen = view.remembered, view.pods
        if seen == self._seen and now < self._at + AGAIN:
            return False
        self._seen, self._at = seen, now
        return True
