"""Ends where it must register again, and leaves the rest to whoever starts it."""

import asyncio

from tests.compat.plugins.small import serve

if __name__ == "__main__":
    asyncio.run(serve(stay=False))
