"""Answers Allocate for device IDs that it never announced."""

import asyncio

from tests.compat.plugins.small import serve

if __name__ == "__main__":
    asyncio.run(serve(anything=True))
