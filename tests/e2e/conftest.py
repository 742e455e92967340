"""The whole genuine node that these tests share, in one event loop: ``make e2e`` brings it, and the order of the tests is a walk on it.

KUBELETS names the node's kubelets, oldest first (all by default). REPEAT says how often the walk is made (1). OUTCOMES names a file that
gets a line of JSON for each scenario, for ``python -m gateway_lab.node.page``. SETTLE is how many seconds each scenario looks on for
what must not happen. IMAGES is the folder of the gateway's images (build/e2e), made before: there is no network here.
"""

import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from gateway_lab.node import Node, build
from gateway_lab.node.stage import Outcome, Stage
from gateway_lab.node.stage import stage as make_stage

KUBELETS = os.environ.get("KUBELETS", "").split() or [*build.versions()]
REPEAT = int(os.environ.get("REPEAT", "1"))
IMAGES = Path(os.environ.get("IMAGES", "build/e2e"))
SETTLE = float(os.environ.get("SETTLE", "1"))


@pytest.fixture(scope="session")
def images() -> list[Path]:
    found = sorted(IMAGES.glob("*.oci.tar"))
    assert found, (
        f"expected the gateway's images in {IMAGES.absolute()}: `make e2e` makes them before it makes the node"
    )
    return found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stage(images: list[Path]) -> AsyncIterator[Stage]:
    node = Node.here()
    for archive in images:
        await node.import_image(archive)
    async with make_stage(node, SETTLE) as made:
        yield made


@pytest.fixture(scope="session")
def keep() -> Iterator[Callable[[Outcome], None]]:
    path = os.environ.get("OUTCOMES")
    with Path(path or os.devnull).open("ab") as file:

        def write(outcome: Outcome) -> None:
            file.write(msgspec.json.encode(outcome) + b"\n")
            file.flush()

        yield write
