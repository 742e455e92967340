"""A look into the kubelet's books: real sockets, a pod-resources server of our own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from adapters.pb.podresources import v1_pb2 as pb
from devices.model import Device, Health
from gateway import kubelet_view

GPU = "nvidia.com/gpu"
ANSWERS: list[bytes | None] = []
"""What the server answers, one after the other, the last one for ever; None: it fails."""


@pytest.fixture
async def socket() -> AsyncIterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="dpg-"))

    async def answer(_request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        data = ANSWERS.pop(0) if len(ANSWERS) > 1 else ANSWERS[0]
        if data is None:
            await context.abort(grpc.StatusCode.UNKNOWN, "the API is off")
        return data or b""

    server = grpc.aio.server()
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "GetAllocatableResources": grpc.unary_unary_rpc_method_handler(answer)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1.PodResourcesLister", handlers),))
    server.add_insecure_port(f"unix:{folder / 'k.sock'}")
    await server.start()
    yield folder / "k.sock"
    await server.stop(grace=0)
    shutil.rmtree(folder)


def books(resource: str, *ids: str) -> bytes:
    devices = [pb.ContainerDevices(resource_name=resource, device_ids=[one]) for one in ids]
    return pb.AllocatableResourcesResponse(devices=devices).SerializeToString()


@pytest.mark.parametrize(
    ("answers", "held"),
    [
        pytest.param([books(GPU, "a", "b")], True, id="just the healthy ones"),
        pytest.param([books(GPU, "a")], False, id="one is missing"),
        pytest.param([books(GPU, "a", "b", "ill")], False, id="an ill one would be given out"),
        pytest.param([books("amd.com/gpu", "a", "b")], False, id="another resource's"),
        pytest.param([books(GPU)], False, id="the endpoint is stopped"),
        pytest.param([books(GPU), books(GPU, "a", "b")], True, id="booked a moment later"),
        pytest.param([None], None, id="the API is off: nothing is claimed"),
        pytest.param([b"\xff\xff"], None, id="no such message: nothing is claimed"),
    ],
)
async def test_what_the_kubelet_holds(socket: Path, answers: list[bytes | None], held: bool | None) -> None:
    ANSWERS[:] = answers
    devices = [Device("a"), Device("b"), Device("ill", Health.UNHEALTHY)]
    assert await kubelet_view.holds(socket, GPU, devices) is held


async def test_no_kubelet_to_ask(tmp_path: Path) -> None:
    assert await kubelet_view.holds(tmp_path / "none.sock", GPU, [Device("a")]) is None
