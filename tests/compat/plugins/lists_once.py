"""Sends its list to the first ListAndWatch of a registration, and to no other one."""

import asyncio

from tests.compat.plugins.small import serve

if __name__ == "__main__":
    asyncio.run(serve(lists_once=True))
