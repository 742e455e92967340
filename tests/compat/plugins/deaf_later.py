"""Tells of a device that falls ill in its first registration, and in no other one."""

import asyncio

from tests.compat.plugins.small import serve

if __name__ == "__main__":
    asyncio.run(serve(deaf_later=True))
