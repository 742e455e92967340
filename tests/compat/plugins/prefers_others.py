"""Chooses without those that must be included."""

import asyncio
from collections.abc import Sequence

from tests.compat.plugins.small import serve


def first(available: Sequence[str], _must: Sequence[str], size: int) -> Sequence[str]:
    """Choose the first ones."""
    return sorted(available)[:size]


if __name__ == "__main__":
    asyncio.run(serve(prefer=first))
