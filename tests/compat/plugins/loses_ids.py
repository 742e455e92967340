"""Has new device IDs at each start."""

import asyncio
import uuid

from tests.compat.plugins.small import serve

if __name__ == "__main__":
    asyncio.run(serve([str(uuid.uuid4()) for _ in range(4)]))
