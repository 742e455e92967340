"""Time-slice intervals of GPUs: set for claims that ask for one, and put back when no such claim is left.

The state file names a GPU from before its interval is set until the default is set again. So after a crash the next gateway
knows which GPUs to put back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import structlog

from gateway.memory.claimed import held_devices

if TYPE_CHECKING:
    from gateway.memory.claimed import Claimed
    from gateway.memory.ledger import Ledger
    from gateway.memory.scribe import Scribe

_DEFAULT: Final = "Default"
_log = structlog.get_logger()


def sliced(claims: Mapping[str, Claimed]) -> dict[str, str]:
    """Return the time-slice interval that claims set for each GPU (UUID), except the default."""
    return {one.board: one.interval for _, _, one in held_devices(claims) if one.interval}


class TimeSlices:
    """The intervals of a node's GPUs.

    Args:
        ledger: has the claims, and remembers intervals.
        scribe: writes the ledger.
        set_one: sets the interval of a GPU (UUID), and returns why that failed. Without arguments, it returns why it could set
            no interval. It blocks.
    """

    def __init__(self, ledger: Ledger, scribe: Scribe, set_one: Callable[..., str]) -> None:
        self._ledger, self._scribe, self._set_one = ledger, scribe, set_one
        self._turn = asyncio.Lock()

    async def note(self, row: Claimed) -> str:
        """Note the intervals that a claim needs, or return why they can't be set. The note must be on disk before ``set``."""
        wanted = sliced({"@": row})
        reason = await asyncio.to_thread(self._set_one) if wanted else ""
        if reason:
            return f"cannot set the time-slice interval of {', '.join(wanted)}: {reason}"
        for uuid, interval in wanted.items():
            self._ledger.set_time_slice(uuid, interval)
        return ""

    async def set(self, row: Claimed) -> str:
        """Set the intervals that a claim asks for; return why that failed."""
        if not (wanted := sliced({"@": row})):
            return ""
        async with self._turn:
            failed = await self._set(wanted)
        return "; ".join(f"cannot set the time-slice interval of {uuid}: {reason}" for uuid, reason in failed.items())

    async def put_back(self) -> None:
        """Set the default again for GPUs that no claim sets an interval for. The next call tries failed GPUs again."""
        async with self._turn:
            left = self._ledger.time_slices.keys() - sliced(self._ledger.claims)
            failed = await self._set(dict.fromkeys(left, _DEFAULT))
            for uuid in left - failed.keys() - sliced(self._ledger.claims).keys():
                self._ledger.set_time_slice(uuid, None)
                _log.info("time-slice interval put back", gpu=uuid)
        for uuid, reason in failed.items():
            _log.error("time-slice interval not put back: it is tried again", gpu=uuid, reason=reason)
        if left:
            self._scribe.soon()

    async def _set(self, wanted: Mapping[str, str]) -> dict[str, str]:
        """Set intervals by UUID; return why some could not be set."""
        said = await asyncio.gather(*(asyncio.to_thread(self._set_one, *one) for one in wanted.items()))
        return {uuid: reason for uuid, reason in zip(wanted, said, strict=True) if reason}
