"""Waits in plugins_registry, where that is, and keeps every promise."""

import asyncio

from tests.compat.plugins.small import serve

if __name__ == "__main__":
    asyncio.run(serve(found_as=["v1beta1"]))
