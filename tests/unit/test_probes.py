"""Probes: what ``/healthz`` and ``/readyz`` answer while real gateways on one node come, serve, stand by and lose their kubelet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway_lab.gatewayproc import GatewayProcess
from gateway_lab.kubelets.kubelet import Demand, Faults
from gateway_lab.trials.scenarios import RESOURCE, Node, node

GUARD = 30.0
"""Seconds after which a test that waits for ever is told so."""


async def get(port: int, path: str) -> tuple[int, list[str]]:
    """Ask once; return the status and the lines."""
    async with asyncio.timeout(GUARD):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: node\r\n\r\n".encode())
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        writer.close()
    return int(head.split()[1]), body.splitlines()


async def until(port: int, status: int, line: str) -> None:
    """Ask until the answer is that: who asks over HTTP is told nothing unasked."""
    answer: tuple[int, list[str]] = (0, [])
    try:
        async with asyncio.timeout(GUARD):
            while answer[0] != status or not any(line in one for one in answer[1]):
                await asyncio.sleep(0.02)
                answer = await get(port, "/readyz")
    except TimeoutError:
        pytest.fail(f"expected {status} with {line!r}, the last answer was {answer}")


async def port_of(gateway: GatewayProcess) -> int:
    return int((await gateway.wait_for("listening", what="probes"))["port"])


@asynccontextmanager
async def probed() -> AsyncIterator[Node]:
    async with node(options=("--probe-address", "127.0.0.1:0"), demands=[Demand("a", RESOURCE, 1)]) as made:
        yield made


async def test_a_pod_beside_the_host_service() -> None:
    async with probed() as made:
        await made.start_kubelet("1.37")
        host = await made.start_gateway(host_service=True)
        await host.wait_for("registered")
        pod = await made.start_gateway()
        here, there = await port_of(host), await port_of(pod)
        await until(there, 200, "standby: host service leads")
        await until(here, 200, f"{RESOURCE}: served")
        await host.kill()
        await until(there, 200, f"{RESOURCE}: served")


async def test_an_update_to_one_that_can_not_serve_stops_there() -> None:
    """The kubelet has the older one's list still."""
    async with probed() as made:
        kubelet = await made.start_kubelet("1.37")
        await until(await port_of(await made.start_gateway()), 200, f"{RESOURCE}: served")
        await kubelet.fault(Faults(never_calls_back=True))
        newer = await port_of(await made.start_gateway())
        await until(newer, 503, f"{RESOURCE}: not served")
        await kubelet.fault(Faults())
        await until(newer, 200, f"{RESOURCE}: served")
