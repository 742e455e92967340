"""An update must not lose a node: real gateways, one after the other or beside each other, on an emulated kubelet."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from gateway.telling.status import ResourceStatus
from gateway.telling.unserved import unschedulable
from gateway.wires import control
from gateway_lab.gatewayproc import GatewayProcess, gateway_command
from gateway_lab.kubelets.kubelet import KubeletError
from gateway_lab.trials.scenarios import RESOURCE, Node, node
from gateway_lab.waiting import until
from tests.fakes.nvml import World, dgx
from tests.unit.test_probes import get

NO_PERMISSION, NOT_LOADED, LOST = 4, 9, 15
PATIENCE = 30
"""Seconds for what must come."""

SHARED = f"version: v1\nsharing: {{timeSlicing: {{renameByDefault: true, resources: [{{name: {RESOURCE}, replicas: 2}}]}}}}\n"

PROBES = ("--probe-address", "127.0.0.1:0")

Change = Callable[[World], Any]
ALL = range(4)


def handles(*gpus: int, code: int = NO_PERMISSION) -> Change:
    """Let NVML give no handle of these GPUs."""

    def change(world: World) -> None:
        for one in gpus:
            world.fails("nvmlDeviceGetHandleByIndex", code, one)

    return change


SEES_NONE: dict[str, Change] = {
    "no permission for any handle": handles(*ALL),
    "all are lost": handles(*ALL, code=LOST),
    "it counts none": lambda world: world.gpus.clear(),
    "the driver says that it isn't loaded": lambda world: world.fails("nvmlInit", NOT_LOADED),
    "NVML fails": lambda world: world.fails("nvmlInit", 999),
}


class Gateways:
    """A node whose gateways each have a driver of their own."""

    def __init__(self, made: Node) -> None:
        self.made, self.kubelet = made, made.the_kubelet

    def world(self, name: str, *changes: Change) -> World:
        """Let a gateway's driver be changed."""
        world = dgx(self.made.root / name, 4)
        for change in changes:
            change(world)
        world.write()
        return world

    @asynccontextmanager
    async def start(self, world: World, *options: str) -> AsyncIterator[Gateway]:
        """Start a gateway on a driver, and end it."""
        given = [f"{name}={value}" for name, value in world.env().items()]
        every = ("--backend", "nvidia", "--fail-on-init-error=false", *PROBES, *options)
        command = gateway_command(self.made.socket_dir, self.made.root / "state", options=every)
        async with launched(["env", *given, *command]) as one:
            yield one


class Gateway:
    """One of them."""

    def __init__(self, process: GatewayProcess, port: int) -> None:
        self.process, self._port = process, port

    async def ready(self) -> tuple[int, str]:
        """Ask whether an update may go on."""
        status, lines = await get(self._port, "/readyz")
        return status, "\n".join(lines)

    async def becomes(self, status: int, *words: str) -> None:
        """Wait until it answers so."""

        async def so() -> bool:
            found, text = await self.ready()
            return found == status and all(one in text for one in words)

        try:
            await until(so, PATIENCE, every=0.1)
        except TimeoutError:
            raise AssertionError(f"{await self.ready()}\n{self.process.log(40)}") from None


@asynccontextmanager
async def launched(command: Sequence[str]) -> AsyncIterator[Gateway]:
    async with await GatewayProcess.launch(command) as process:
        yield Gateway(process, int((await process.wait_for("listening", what="probes"))["port"]))


@pytest.fixture
async def gateways() -> AsyncIterator[Gateways]:
    async with node(gpus={RESOURCE: 4}) as made:
        await made.start_kubelet("1.34")
        yield Gateways(made)


# maxSurge 1: both run.


async def test_beside_one_that_serves_the_new_gateway_waits_and_takes_nothing(gateways: Gateways) -> None:
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(gateways.start(gateways.world("old")))
        for name, change in SEES_NONE.items():
            await gateways.kubelet.wait(RESOURCE, 4)
            registers = await gateways.kubelet.registers()
            new = await stack.enter_async_context(gateways.start(gateways.world(f"new {name}", change)))
            await new.becomes(503, f"none of the 4 usable devices of {RESOURCE}")
            assert (await gateways.kubelet.totals()).allocatable[RESOURCE] == 4, name
            assert await gateways.kubelet.registers() == registers, name
            assert (await old.ready())[0] == 200, name
            await old.process.kill()  # By hand: no update ends it. The new one says what it sees, and stays as it is.
            await gateways.kubelet.wait(RESOURCE, 0)
            await new.becomes(503, "the gateway before this one served them")
            old = await stack.enter_async_context(gateways.start(gateways.world(f"after {name}")))
            await gateways.kubelet.wait(RESOURCE, 4)
            await old.becomes(200)
            await new.process.terminate()


async def test_what_the_new_gateway_may_not_look_at_it_does_not_take_over(gateways: Gateways) -> None:
    """It lists all of them, each with its reason."""
    made = gateways.made
    await made.start_gateway()
    await gateways.kubelet.wait(RESOURCE, 4)
    profile = made.root / "new.yaml"
    made.set_health({RESOURCE: ALL})
    made.profile_path.rename(profile)
    made.set_health({})
    command = gateway_command(made.socket_dir, made.root / "state", profile, options=PROBES)
    async with launched(command) as new:
        await new.becomes(503, f"none of the 4 usable devices of {RESOURCE}")
        assert (await gateways.kubelet.totals()).allocatable[RESOURCE] == 4
        made.set_health({})
        made.profile_path.rename(profile)
        await new.becomes(200)


async def test_a_gateway_that_sees_some_takes_over_and_reports_the_rest(gateways: Gateways) -> None:
    async with gateways.start(gateways.world("old")):
        await gateways.kubelet.wait(RESOURCE, 4)
        async with gateways.start(gateways.world("new", handles(1, 3))) as new:
            await gateways.kubelet.wait(RESOURCE, 2)
            await new.becomes(200)
            assert (await gateways.kubelet.totals()).capacity[RESOURCE] == 4


async def test_what_the_new_gateway_sees_later_it_takes_over(gateways: Gateways) -> None:
    async with gateways.start(gateways.world("old")):
        await gateways.kubelet.wait(RESOURCE, 4)
        world = gateways.world("new", SEES_NONE["the driver says that it isn't loaded"])
        async with gateways.start(world) as new:
            await new.becomes(503, "none of the 4 usable devices")
            world.works("nvmlInit")
            world.write()
            await new.becomes(200, f"{RESOURCE}: served")
            await gateways.kubelet.wait(RESOURCE, 4)


# maxUnavailable 1: the old one is gone first.


async def test_after_one_that_served_the_new_gateway_is_not_ready_however_often_it_starts(gateways: Gateways) -> None:
    async def served() -> None:
        async with gateways.start(gateways.world("old")) as one:
            await one.becomes(200)
            await gateways.kubelet.wait(RESOURCE, 4)

    await served()
    for change in SEES_NONE.values():
        for _ in range(2):
            async with gateways.start(gateways.world("new", change)) as new:
                await new.becomes(
                    503, f"none of the 4 usable devices of {RESOURCE}; the gateway before this one served"
                )
        await served()


# A node that serves nothing must not stop the others' update.


@pytest.mark.parametrize("beside", [True, False], ids=["maxSurge 1", "maxUnavailable 1"])
async def test_a_node_that_served_nothing_stops_no_update(gateways: Gateways, *, beside: bool) -> None:
    world = gateways.world("old")
    async with gateways.start(world) as old:
        await gateways.kubelet.wait(RESOURCE, 4)
        handles(*ALL, code=LOST)(world)
        for one in ALL:
            world.event(one, 79)
        world.write()
        await gateways.kubelet.wait(RESOURCE, 0)
        if not beside:
            await old.process.terminate()
        for change in SEES_NONE.values():
            async with gateways.start(gateways.world("new", change)) as new:
                await new.becomes(200)


async def test_what_served_before_a_reboot_is_not_waited_for(gateways: Gateways) -> None:
    """Or a node whose driver never comes again would stop each update."""
    async with gateways.start(gateways.world("old")):
        await gateways.kubelet.wait(RESOURCE, 4)
    path = gateways.made.root / "state" / "ledger.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kubelet": "another-boot 1:2:3"}))
    async with gateways.start(gateways.world("new", handles(*ALL))) as new:
        await new.becomes(200, RESOURCE)


@pytest.mark.parametrize("beside", [True, False], ids=["maxSurge 1", "maxUnavailable 1"])
async def test_what_a_setting_withdrew_is_not_waited_for(gateways: Gateways, *, beside: bool) -> None:
    file = gateways.made.root / "config.yaml"
    file.write_text(SHARED)
    async with gateways.start(gateways.world("old")) as old:
        await gateways.kubelet.wait(RESOURCE, 4)
        if not beside:
            await old.process.terminate()
        async with gateways.start(gateways.world("new"), "--config-file", str(file)) as new:
            await new.becomes(200)
            if not beside:
                await gateways.kubelet.wait(f"{RESOURCE}.shared", 8)


async def test_what_an_operator_left_out_is_not_waited_for(gateways: Gateways) -> None:
    async with gateways.start(gateways.world("old")):
        await gateways.kubelet.wait(RESOURCE, 4)
        async with gateways.start(gateways.world("new"), "--exclude-devices", "0,1,2,3") as new:
            await new.becomes(200)


# Evidence counts for more than memory.


async def test_a_driver_that_says_that_it_is_not_loaded_gives_nothing_away(gateways: Gateways) -> None:
    made, world = gateways.made, gateways.world("world")
    async with gateways.start(world):
        await gateways.kubelet.wait(RESOURCE, 4)
    await gateways.kubelet.stop()
    await gateways.kubelet.start()
    world.fails("nvmlInit", NOT_LOADED)
    world.write()
    async with gateways.start(world) as again:
        await again.becomes(503, "none of the 4 usable devices", "NVML can't be used")
        await until(lambda: bool(again.process.lines("registered")), PATIENCE)
        assert (await gateways.kubelet.wait(RESOURCE, 0)).totals.capacity[RESOURCE] == 4
        with pytest.raises(KubeletError):
            await made.the_kubelet.admit("p", RESOURCE, 1)
        world.works("nvmlInit")
        world.write()
        await gateways.kubelet.wait(RESOURCE, 4)
        await again.becomes(200)


# A held device that is not allocatable keeps a free one from being scheduled (kubernetes#92592).


async def test_a_held_gpu_that_is_cordoned_is_told_with_what_it_blocks(gateways: Gateways) -> None:
    async with gateways.start(gateways.world("world", lambda world: world.gpus.__delitem__(slice(2, None)))):
        await gateways.kubelet.wait(RESOURCE, 2)
        [held] = (await gateways.kubelet.admit("p", RESOURCE, 1)).devices[RESOURCE]
        [path] = control.sockets(gateways.made.root / "state")
        await control.ask(path, {"op": "cordon", "id": held, "reason": "RMA"}, PATIENCE)
        await gateways.kubelet.wait(RESOURCE, 1)

        async def told() -> bool:
            [resource] = (await control.ask(path, {"op": "status"}, PATIENCE))["status"]["resources"]
            return bool(unschedulable(msgspec.convert(resource, ResourceStatus)) == 1)

        await until(told, PATIENCE, every=0.1)
