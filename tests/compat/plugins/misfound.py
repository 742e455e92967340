"""Waits in plugins_registry, and says there that it speaks what no kubelet takes."""

import asyncio

from tests.compat.plugins.small import serve

if __name__ == "__main__":
    asyncio.run(serve(found_as=["v1"]))
