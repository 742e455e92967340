"""The DRA manager of a real kubelet, another driver of our name as a process, and a gateway beside it as a process.

The built kubelets have no DRA manager. So this one is a program of its own: ``dramanager/README.md`` says how to build it. Then

    DRA_MANAGER=PATH .venv/bin/pytest -o junit_family=xunit1 --junit-xml=seen.xml tests/compat/test_dra_rivals.py
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway_lab.gatewayproc import GatewayProcess, gateway_command
from gateway_lab.kubelets.behaviour import behaviour
from gateway_lab.kubelets.devicemanager import DeviceManager
from gateway_lab.waiting import until
from tests.compat.test_dra_storm import _RUN, NODE
from tests.fakes.apiserver import Answer, ApiServer, Request
from tests.unit.draplace import API, PROFILE, SLICE
from tests.unit.kubernetes import authority, server

__all__ = ["authority", "server"]
MANAGER = os.environ.get("DRA_MANAGER", "")
pytestmark = pytest.mark.skipif(
    not MANAGER, reason="expected $DRA_MANAGER: tests/compat/dramanager/README.md builds it"
)
NAME = "gpu.nvidia.com"
THEIRS = f"{API}/resourceslices/n1-{NAME}-x7k2p"
CLAIMS = f"{API}/namespaces/ns/resourceclaims"
PREPARED, UPDATES = 50, 20
LONG = 120.0
Record = Callable[[str, object], None]
"""Writes a figure into pytest's XML report."""


class Process:
    """A process that is asked by lines of JSON."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self._ids = process, itertools.count()
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            self._waiting.pop(answer["id"]).set_result(answer["error"])

    async def ask(self, op: str, claim: str) -> str:
        """Have a claim prepared or unprepared; give the kubelet's error, '' for none."""
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": number, "op": op, "claim": claim}).encode() + b"\n")
        return await self._waiting[number]

    async def until(self, op: str, claim: str) -> None:
        """Ask until it works, as a kubelet does."""
        async with asyncio.timeout(LONG):
            while await self.ask(op, claim):  # noqa: ASYNC110 - it is a question to another
                await asyncio.sleep(0.2)

    async def end(self) -> None:
        self._process.kill()
        await self._process.wait()
        await self._reading


class Scene:
    """A node with a real DRA manager, and another driver."""

    def __init__(self, folder: Path, server: ApiServer) -> None:
        self.folder, self.server, self.registry = folder, server, folder / "plugins_registry"
        self.socket, self.record = self.registry / f"{NAME}-reg.sock", folder / "record.json"
        for one in (self.registry, folder / "dp", folder / "state", folder / "dra"):
            one.mkdir()
        (folder / "profile.yaml").write_text(PROFILE)
        server.put("/apis/resource.k8s.io", versions=[{"version": "v1"}])
        server.put(NODE, metadata={"uid": "node-uid"}, status={"nodeInfo": {"kubeletVersion": "v1.37.1"}})
        server.put(f"{API}/resourceslices/other", spec={"driver": "x", "nodeName": "n2"})
        server.put(f"{API}/namespaces/x/resourceclaims/other")
        server.kubeconfig(folder / "kubeconfig")
        server.always = self.answer
        self.other: asyncio.subprocess.Process
        self.kubelet: Process

    async def answer(self, answer: Answer, request: Request) -> None:
        """Answer as an API server does, which also deletes all slices of a node and a driver at once."""
        if request.method == "DELETE" and request.path == f"{API}/resourceslices":
            wanted = dict(one.split("=") for one in request.query["fieldSelector"].split(","))
            for path, found in [*self.server.objects.items()]:
                if path.startswith(f"{API}/resourceslices/") and (
                    found["spec"].get("nodeName") == wanted["spec.nodeName"]
                    and wanted.get("spec.driver", found["spec"]["driver"]) == found["spec"]["driver"]
                ):
                    self.server.remove(path)
            await answer.json(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})
        else:
            await self.server.answer(answer, request)

    def publish(self) -> None:
        """Have the other driver's slice there, as its process would."""
        devices = [
            {"name": f"gpu-{number}", "attributes": {"uuid": {"string": f"GPU-{letter}"}}}
            for number, letter in enumerate("ab")
        ]
        pool = {"name": "n1", "generation": 1, "resourceSliceCount": 1}
        self.server.put(THEIRS, spec={"driver": NAME, "nodeName": "n1", "pool": pool, "devices": devices})

    async def start_other(self) -> None:
        command = [sys.executable, "-m", "tests.fakes.dradriver", str(self.socket), NAME, str(self.record)]
        self.other = await asyncio.create_subprocess_exec(*command)
        await until(self.socket.exists, LONG)

    async def end_other(self) -> None:
        self.other.send_signal(signal.SIGTERM)
        await self.other.wait()

    async def start_kubelet(self) -> None:
        command = [MANAGER, str(self.folder / "dra"), str(self.registry), "n1", str(self.folder / "kubeconfig")]
        pipe = asyncio.subprocess.PIPE
        with (self.folder / "kubelet.log").open("ab") as log:
            self.kubelet = Process(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=log))

    def claim(self, name: str) -> str:
        """Have a claim that the scheduler allocated from the other's slice."""
        result = {"request": "gpu", "driver": NAME, "pool": "n1", "device": "gpu-0"}
        reserved = [{"resource": "pods", "name": name, "uid": f"pod-{name}"}]
        spec = {"devices": {"requests": [{"name": "gpu"}]}}
        status = {"allocation": {"devices": {"results": [result]}}, "reservedFor": reserved}
        about = {"name": name, "uid": f"uid-{name}", "namespace": "ns"}
        self.server.put(f"{CLAIMS}/{name}", metadata=about, spec=spec, status=status)
        return name

    @property
    def recorded(self) -> set[str]:
        """What the other driver has prepared by its own record."""
        return set(json.loads(self.record.read_text()))

    @contextlib.asynccontextmanager
    async def gateway(self, dra: str) -> AsyncIterator[GatewayProcess]:
        options = ["--dra", dra, "--node-name", "n1", "--kubeconfig", str(self.folder / "kubeconfig")]
        command = gateway_command(
            self.folder / "dp", self.folder / "state", self.folder / "profile.yaml", options=options
        )
        command = [sys.executable, "-c", _RUN, str(self.folder / "cdi"), *command[3:]]
        async with await GatewayProcess.launch(command, self.folder / "gateway.log") as process:
            await process.wait_for("another process has the name of this DRA driver", seconds=LONG)
            yield process

    def events(self, process: GatewayProcess, *names: str) -> list[Any]:
        return [line for name in names for line in process.lines(name)]


@pytest.fixture
async def scene(folder: Path, server: ApiServer) -> AsyncIterator[Scene]:
    one = Scene(folder, server)
    manager = DeviceManager(behaviour("1.37"), folder / "dp")
    await manager.start()
    await one.start_kubelet()
    await one.start_other()
    one.publish()
    yield one
    with contextlib.suppress(ProcessLookupError):
        one.other.kill()
    await one.other.wait()
    await one.kubelet.end()
    await manager.stop()


@pytest.mark.parametrize("dra", ["only", "on"])
async def test_a_driver_that_lives_or_is_updated_keeps_all_its_claims(scene: Scene, dra: str) -> None:
    names = [scene.claim(f"c{number}") for number in range(PREPARED)]
    await asyncio.gather(*(scene.kubelet.until("prepare", one) for one in names))
    there = scene.server.objects[THEIRS]
    uids = {f"uid-{one}" for one in names}
    assert scene.recorded == uids
    async with scene.gateway(dra) as gateway:
        for number in range(10):
            await scene.kubelet.until("prepare", scene.claim(f"new{number}"))
        assert scene.recorded == uids | {f"uid-new{number}" for number in range(10)}
        for number in range(10):
            await scene.kubelet.until("unprepare", f"new{number}")
        assert scene.recorded == uids
        for number in range(UPDATES):
            await scene.end_other()
            await asyncio.sleep(random.uniform(0.1, 2.0))  # noqa: S311 - no secret
            await scene.start_other()
            name = scene.claim(f"update{number}")
            await scene.kubelet.until("prepare", name)
            uids.add(f"uid-{name}")
            assert scene.recorded == uids
            if number % 5 == 4:  # The kubelet starts anew, and deletes the slices; their driver writes them again.
                await scene.kubelet.end()
                await scene.start_kubelet()
                await until(lambda: THEIRS not in scene.server.objects, LONG)
                scene.publish()
                there = scene.server.objects[THEIRS]
        assert scene.server.objects[THEIRS] == there
        assert {one.name for one in scene.registry.iterdir()} == {scene.socket.name}
        assert not scene.events(gateway, "DRA driver registered", "claim prepared", "claim refused", "claim unprepared")
        names = [one.removeprefix("uid-") for one in uids]
        await asyncio.gather(*(scene.kubelet.until("unprepare", one) for one in names))
        assert scene.recorded == set()


async def test_a_driver_that_stays_away_is_followed_within_70_s(scene: Scene, record_property: Record) -> None:
    """No constant is changed here: this takes a minute."""
    names = [scene.claim(f"c{number}") for number in range(5)]
    await asyncio.gather(*(scene.kubelet.until("prepare", one) for one in names))
    async with scene.gateway("only"):
        for one in names:
            await scene.kubelet.until("unprepare", one)
            scene.server.remove(f"{CLAIMS}/{one}")
        began = time.monotonic()  # It takes its socket away, and then ends.
        await scene.end_other()
        await until(lambda: SLICE in scene.server.objects, LONG)
        took = time.monotonic() - began
        record_property("published_s", round(took, 1))
        assert 60 <= took <= 70
        await scene.kubelet.until("prepare", scene.claim("ours"))
        assert scene.recorded == set()


async def test_pods_of_a_driver_that_stays_away_end_and_then_it_is_followed(
    scene: Scene, record_property: Record
) -> None:
    names = [scene.claim(f"c{number}") for number in range(PREPARED)]
    await asyncio.gather(*(scene.kubelet.until("prepare", one) for one in names))
    async with scene.gateway("only") as gateway:
        began = time.monotonic()  # It takes its socket away, and then ends.
        await scene.end_other()
        await gateway.wait_for("DRA driver registered", seconds=LONG)
        registered = time.monotonic() - began
        assert SLICE not in scene.server.objects
        for one in names:
            await scene.kubelet.until("unprepare", one)
            assert SLICE not in scene.server.objects
            scene.server.remove(f"{CLAIMS}/{one}")
        ended = time.monotonic()
        await until(lambda: SLICE in scene.server.objects, LONG)
        record_property("registered_s", round(registered, 1))
        record_property("published_after_the_last_claim_s", round(time.monotonic() - ended, 1))
