"""The stand-in for gRPC does what gRPC does, wherever this project would notice."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from typing import Any

import pytest

from gateway.wires import rpc
from tests.contract import grpccases
from tests.contract.clock import Process
from tests.contract.grpccases import CASES, Service, Words
from tests.contract.node import Node


@pytest.fixture(scope="module")
def with_grpc() -> dict[str, Words]:
    """What each case returned over real sockets. They are played again if the machine was too busy for one of them."""
    found: dict[str, Words] = {}
    for _ in range(3):
        with tempfile.TemporaryDirectory(prefix="dpg-") as folder:
            command = (sys.executable, "-m", grpccases.__name__, folder)
            told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        found = json.loads(told.stdout)
        if ["TimeoutError()"] not in found.values():
            break
    return found


class _Killed:
    def __init__(self, process: Process) -> None:
        self._process = process

    async def kill(self) -> None:
        self._process.kill()


class _Moved:
    def __init__(self, node: Node) -> None:
        self.folder = node.folder
        self.grpc: Any = vars(rpc)["grpc"]

    @staticmethod
    async def killable(path: Any) -> _Killed:
        process = Process("server")

        async def serve() -> None:
            serving = grpccases.server(path, Service())
            await serving.start()
            await asyncio.get_running_loop().create_future()
            await serving.stop(0)

        _ = process.run(serve())
        while not path.is_socket():  # noqa: ASYNC110 - simulated time
            await asyncio.sleep(0.001)
        return _Killed(process)


@pytest.mark.parametrize("name", CASES)
async def test_a_call_is_as_with_grpc(node: Node, name: str, with_grpc: dict[str, Words]) -> None:
    found = await CASES[name](_Moved(node))
    assert json.loads(json.dumps(found)) == with_grpc[name]
