"""Registers with the first kubelet that it finds, and never again."""

import asyncio

from tests.compat.plugins.small import serve

if __name__ == "__main__":
    asyncio.run(serve(again=False))
