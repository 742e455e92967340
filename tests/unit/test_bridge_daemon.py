"""The bridge in a daemon of its own, before an emulated kubelet: what nobody is to see when a plugin ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

import pytest

from devices.model import Device, Options
from gateway.lab.gatewayproc import GatewayProcess, gateway_command
from gateway.lab.kubelets.kubelet import Faults, Kubelet, KubeletError
from tests.unit.bridging import NIC, play_forgotten_in_flight, plugin


@pytest.mark.parametrize(
    ("version", "api"), [("1.8", "v1beta1"), ("1.9", "0.1"), ("1.28", "v1alpha2"), ("1.37", "v1beta1")]
)
async def test_a_plugins_restart_is_seen_by_nobody(folder: Path, version: str, api: str) -> None:
    sockets, state = folder / "k" / "device-plugins", folder / "state"
    sockets.mkdir(parents=True)
    options = ("--backend", "none", "--bridge", str(folder))
    async with (
        await Kubelet.launch(version, sockets) as kubelet,
        await GatewayProcess.launch(gateway_command(sockets, state, options=options)) as gateway,
    ):
        await kubelet.start()
        await gateway.wait_for("plugins can register here")
        async with plugin(folder, api=api) as played:
            await kubelet.wait(NIC, 2)
            await kubelet.admit("before", NIC, 1)
            assert len(played.allocated) == 1
        await gateway.wait_for("the plugin is away")
        seen = Counter[int]()
        watching = asyncio.create_task(_watch(kubelet, seen))
        meanwhile = asyncio.create_task(kubelet.admit("meanwhile", NIC, 1))
        async with plugin(folder, api=api) as again:
            assert len((await meanwhile).devices[NIC]) == 1
            assert len(again.allocated) == 1
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert set(seen) == {2}
        with contextlib.suppress(KubeletError):  # There are only two.
            await kubelet.admit("third", NIC, 1)
            pytest.fail("three pods have two devices")


async def test_one_that_only_bridges_and_ends_while_a_newer_one_registers_is_missed_by_nobody(folder: Path) -> None:
    sockets, state = folder / "k" / "device-plugins", folder / "state"
    sockets.mkdir(parents=True)
    options = ("--backend", "none", "--bridge", str(folder), "--log-level", "debug")
    command = gateway_command(sockets, state, options=options)
    async with (
        await Kubelet.launch("1.37", sockets) as kubelet,
        await GatewayProcess.launch(command) as older,
    ):
        await kubelet.start()
        await older.wait_for("plugins can register here")
        async with plugin(folder):
            await kubelet.wait(NIC, 2)
            await kubelet.fault(Faults(register_late_ms=300))
            async with await GatewayProcess.launch(command) as newer:
                seen = Counter[int]()
                watching = asyncio.create_task(_watch(kubelet, seen, every=0.001))
                await newer.wait_for("phase", phase="registering")
                await older.terminate()
                await newer.wait_for("registered")
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                assert set(seen) == {2}


async def test_a_plugin_that_came_when_a_newer_one_had_looked_already_is_served_by_that_one(folder: Path) -> None:
    sockets, state = folder / "k" / "device-plugins", folder / "state"
    sockets.mkdir(parents=True)
    command = gateway_command(sockets, state, options=("--backend", "none", "--bridge", str(folder)))
    async with (
        await Kubelet.launch("1.37", sockets) as kubelet,
        await GatewayProcess.launch(command) as older,
    ):
        await kubelet.start()
        await older.wait_for("plugins can register here")
        async with await GatewayProcess.launch(command) as newer:
            await newer.wait_for("plugins can't register here")
            async with plugin(folder) as played:
                await kubelet.wait(NIC, 2)
                await older.terminate()
                await newer.wait_for("registered", resource=NIC)
                await kubelet.wait(NIC, 2)
                await kubelet.admit("after", NIC, 1)
                assert len(played.allocated) == 1


async def test_one_that_registers_once_outlives_a_gateway_that_is_killed_at_once(folder: Path) -> None:
    sockets, state = folder / "k" / "device-plugins", folder / "state"
    sockets.mkdir(parents=True)
    command = gateway_command(sockets, state, options=("--backend", "none", "--bridge", str(folder)))
    async with await Kubelet.launch("1.37", sockets) as kubelet:
        await kubelet.start()
        async with await GatewayProcess.launch(command) as killed:
            await killed.wait_for("plugins can register here")
            async with plugin(folder, resource=f"{NIC}-before", endpoint="before.sock"), plugin(folder) as played:
                await killed.kill()
                async with await GatewayProcess.launch(command):
                    await kubelet.wait(NIC, 2)
                    await kubelet.admit("after", NIC, 1)
                    assert len(played.allocated) == 1


async def test_a_device_that_the_kubelet_forgot_while_it_waited_goes_to_no_second_pod(folder: Path) -> None:
    held, came = await play_forgotten_in_flight(folder, "1.37")
    assert held == ["a", "b"]
    assert len(came) == 1


@pytest.mark.parametrize("version", ["1.28", "1.37"])
async def test_no_pod_is_refused_for_that_while_another_device_is_free(folder: Path, version: str) -> None:
    options, devices = Options(preferred_allocation=True), [Device(one) for one in "abc"]
    held, came = await play_forgotten_in_flight(folder, version, options=options, devices=devices)
    assert (held, came) == (["a", "b", "c"], ["pod-c", "pod-d"])


async def _watch(kubelet: Kubelet, seen: Counter[int], every: float = 0.01) -> None:
    while True:
        seen[(await kubelet.totals()).allocatable.get(NIC, 0)] += 1
        await asyncio.sleep(every)
