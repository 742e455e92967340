"""Ends when it is asked to choose among devices of which it never announced one."""

import asyncio
import os
from collections.abc import Sequence

from tests.compat.plugins.small import IDS, prefer, serve


def known(available: Sequence[str], must: Sequence[str], size: int) -> Sequence[str]:
    """Choose among its own devices."""
    if not {*available} <= {*IDS}:
        os._exit(2)
    return prefer(available, must, size)


if __name__ == "__main__":
    asyncio.run(serve(prefer=known))
