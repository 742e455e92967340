"""A whole gateway with --dra only, and one with --dra off where claims are held: who offers what, and never twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from msgspec.structs import replace
from structlog.typing import EventDict

from adapters import pluginregistration
from adapters.dra.plugin import V1
from devices.claims import ClaimName
from devices.gpu.nvidia.cdi import DriverFiles
from devices.gpu.nvidia.survey import keep
from devices.gpu.simulated.backend import VENDORS, SimulatedBackend
from devices.gpu.source import GPUSource
from devices.life.states import State
from devices.policy import ListStrategy, Policy
from gateway.configuration.settings import Settings
from gateway.daemon import Gateway
from gateway.dra import cdi, driver, drivers, publisher, service, sockets
from gateway.kubelet.watch import CHECKPOINT, KUBELET_SOCKET
from gateway.kubernetes import access, watch
from gateway.lab.gatewayproc import BEGUN
from gateway.memory.ledger import Ledger
from gateway.memory.rows import Cordon
from gateway.registration.events import Phase
from gateway.telling import probes
from gateway.telling.commands import Commands
from gateway.wires import control
from gateway.wires.control import ControlError
from tests.fakes.apiserver import ApiServer
from tests.unit.kubernetes import authority, server, until
from tests.unit.test_dra_driver import Kubelet, listening

__all__ = ["authority", "server"]
GPU = "nvidia.com/gpu"
API = "/apis/resource.k8s.io/v1"
SLICE = f"{API}/resourceslices/n1-gpu.nvidia.com-0"
PROFILE = """
resources:
  nvidia.com/gpu:
    gpus:
    - {uuid: GPU-a, device_nodes: [/dev/nvidia0]}
    - {uuid: GPU-b, device_nodes: [/dev/nvidia1]}
"""


class Place:
    """A node's folders, and gateways on it."""

    def __init__(self, folder: Path, server: ApiServer, plugins: str = "dp") -> None:
        self.folder, self.server, self.plugins = folder, server, folder / plugins
        (folder / "plugins_registry").mkdir()
        self.profile = folder / "profile.yaml"
        if not self.plugins.exists():  # There is no kubelet, which would have made it.
            self.plugins.mkdir()
            self.profile.write_text(PROFILE)
            self.holds()
        server.put("/apis/resource.k8s.io", versions=[{"version": "v1"}])
        server.put("/api/v1/nodes/n1", metadata={"uid": "node-uid"}, status={"nodeInfo": {"kubeletVersion": "v1.37.1"}})
        server.put(f"{API}/resourceslices/other", spec={"driver": "x", "nodeName": "n2"})

    def holds(self, *device_ids: str) -> None:
        """Have pods hold devices, by the kubelet's checkpoint."""
        entry = {
            "PodUID": "u",
            "ContainerName": "main",
            "ResourceName": GPU,
            "DeviceIDs": list(device_ids),
            "AllocResp": "",
        }
        found = {"PodDeviceEntries": [entry] if device_ids else [], "RegisteredDevices": {}}
        (self.plugins / CHECKPOINT).write_bytes(msgspec.json.encode(found))

    def claim(self, name: str, uid: str, device: str, api: str = API) -> ClaimName:
        result = {"request": "gpu", "driver": "gpu.nvidia.com", "pool": "n1", "device": device}
        path, reserved = (
            f"{api}/namespaces/ns/resourceclaims/{name}",
            [{"resource": "pods", "name": "p", "uid": "uid-p"}],
        )
        self.server.put(
            path,
            metadata={"uid": uid, "namespace": "ns"},
            status={"allocation": {"devices": {"results": [result]}}, "reservedFor": reserved},
        )
        return ClaimName("ns", name, uid)

    def made(self, dra: str, before: Sequence[int] = ()) -> Gateway:
        """Make a gateway."""
        policy = Policy(list_strategies=frozenset({ListStrategy.CDI_CRI if dra == "only" else ListStrategy.ENVVAR}))
        settings = Settings(
            socket_dir=self.plugins,
            state_dir=self.folder / "state",
            policy=policy,
            dra=dra,
            node_name="n1",
        )
        survey = partial(keep, driver=DriverFiles(()), folder=self.folder / "cdi")
        source = GPUSource(SimulatedBackend(str(self.profile)), policy, VENDORS, survey)
        return Gateway(settings, source, before=before)

    @contextlib.asynccontextmanager
    async def gateway(
        self, dra: str, *, registers: bool = True, status: int = 0, seconds: float = 20
    ) -> AsyncIterator[Gateway]:
        """Have a gateway for so many seconds that ends with a status; ``registers``: a kubelet takes its driver as soon as that is there."""
        serving = asyncio.Event()

        def heard(_logger: object, _level: str, event: EventDict) -> EventDict:
            if event["event"] in BEGUN:
                serving.set()
            raise structlog.DropEvent

        structlog.configure(processors=[heard])
        one = self.made(dra)
        run = asyncio.ensure_future(one.run())
        registering = asyncio.ensure_future(self._register(one) if registers else asyncio.sleep(0))
        try:
            async with asyncio.timeout(seconds):
                await serving.wait()
                yield one
        finally:
            registering.cancel()
            one._end(0)
            async with asyncio.timeout(20):
                assert await run == status
            with contextlib.suppress(asyncio.CancelledError):
                await registering
            structlog.reset_defaults()

    async def _register(self, one: Gateway) -> None:
        path = sockets.path_of(self.folder / "plugins_registry", "gpu.nvidia.com", one.age.token)
        await until(path.exists)
        kubelet = Kubelet(path)
        async with kubelet.channel:
            await kubelet.call(pluginregistration.NOTIFY, pluginregistration.encode_status(""))

    @property
    def published(self) -> dict[str, list[str]]:
        return self.published_at(API)

    def published_at(self, api: str) -> dict[str, list[str]]:
        path = SLICE.replace(API, api)
        devices = self.server.objects.get(path, {}).get("spec", {}).get("devices", ())
        return {one["name"]: [taint["key"] for taint in one.get("taints", ())] for one in devices}

    async def kubelet(self) -> Kubelet:
        registry = self.folder / "plugins_registry"
        await until(lambda: list(registry.iterdir()))
        [path] = registry.iterdir()
        return Kubelet(path)


@pytest.fixture
async def place(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    folder = Path(tempfile.mkdtemp(prefix="dra-"))
    monkeypatch.setattr(access, "find", lambda _: server.access())
    monkeypatch.setattr(cdi, "FOLDER", folder / "cdi")
    yield Place(folder, server)
    shutil.rmtree(folder)


def states(gateway: Gateway) -> dict[str, State]:
    return {device_id: one.state for plugin in gateway.resources for device_id, one in plugin.entries.items()}


async def test_a_status_says_how_containers_are_told_their_gpus_now(place: Place) -> None:
    async with place.gateway("only") as one:
        assert Commands(one).taken(rows=False)().list_strategies == ("cdi-cri",)
        both = frozenset({ListStrategy.ENVVAR, ListStrategy.CDI_ANNOTATIONS})
        one.config.policy = replace(one.settings.policy, list_strategies=both)
        assert Commands(one).taken(rows=False)().list_strategies == ("cdi-annotations", "envvar")


async def test_slices_are_written_soon_after_an_outage_of_the_api_server(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers with an error at first, as one does that is still starting."""
    monkeypatch.setattr(watch, "AWAY", 0.02)
    monkeypatch.setattr(watch, "FIRST", 0.2)
    monkeypatch.setattr(publisher, "_WHILE", 0.0)
    pause, paused = watch.pause, []

    def count(*args: Any) -> float:
        paused.append(pause(*args))
        return paused[-1]

    monkeypatch.setattr(watch, "pause", count)
    async with place.gateway("only") as one:
        await until(lambda: place.published == {"gpu-0": [], "gpu-1": []})
        await place.server.stop()
        one.ledger.cordon("GPU-a", Cordon("repair", 1.0))
        await one.update()
        await until(lambda: len(paused) > 100)
        place.server.forbidden = "resourceslices"
        await place.server.start()
        await until(lambda: [one for one in place.server.requests if one.method == "PATCH"][1:])
        place.server.forbidden = ""
        await until(lambda: any(place.published.values()))


async def test_devices_are_offered_by_dra_alone(place: Place) -> None:
    left = place.folder / "cdi" / "gpu.nvidia.com-claim-old.json"
    left.parent.mkdir()
    left.write_text("{}")
    os.utime(left, (0, 0))
    async with place.gateway("only") as one:
        await until(lambda: place.published == {"gpu-0": [], "gpu-1": []})
        assert [plugin.state.phase for plugin in one.resources] == [Phase.STANDBY]
        assert not list((place.folder / "dp").glob("*.sock"))
        kubelet = await place.kubelet()
        assert not left.exists()
        asked = place.claim("c", "uid-c", "gpu-1")
        answers = await kubelet.prepare(V1, asked)
        [prepared] = answers["uid-c"]
        assert (prepared.device, prepared.cdi_names) == ("gpu-1", ("k8s.device-plugin.nvidia.com/gpu=GPU-b",))
        assert Ledger(place.folder / "state").claims == {}  # another object, not read yet
        [told] = Commands(one).taken(rows=True)().resources
        assert {row.id: row.holder for row in told.devices} == {"GPU-a": None, "GPU-b": "claim ns/c (pod p)"}
        assert told.trouble == "offered by DRA: the driver gpu.nvidia.com is registered"
        assert [(driver.devices, driver.claims) for driver in Commands(one).taken(rows=True)().drivers] == [(2, 1)]
        assert await kubelet.unprepare(V1, asked) == {"uid-c": None}
        await kubelet.channel.close()
    assert not list((place.folder / "plugins_registry").iterdir())


async def test_who_sees_no_gpu_leaves_the_slices_to_the_gateway_that_lives(place: Place) -> None:
    async with place.gateway("only") as old:
        await until(lambda: place.published == {"gpu-0": [], "gpu-1": []})
        assert await old.scribe.durable()
        place.profile = place.folder / "new.yaml"
        place.profile.write_text("resources: {nvidia.com/gpu: {gpus: []}}")
        async with place.gateway("only", registers=False) as new:
            assert (probes.look(old).ready, probes.look(new).ready) == (True, False)
            publishes = asyncio.ensure_future(until(lambda: place.published != {"gpu-0": [], "gpu-1": []}))
            await asyncio.wait({publishes}, timeout=0.2)  # nothing must happen
            assert not publishes.done()
            publishes.cancel()
            place.profile.write_text(PROFILE)
            await until(lambda: not new.hindrances())


async def test_who_stands_by_publishes_nothing_until_it_decides(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would offer is what it knew when it came."""
    decide = drivers.Drivers.decide
    monkeypatch.setattr(drivers.Drivers, "decide", lambda _: None)
    async with place.gateway("only") as one:
        made = one.drivers
        assert made is not None
        await until(lambda: made._current.server is not None and [row.registered for row in made.standings()] == [True])
        publishes = asyncio.ensure_future(until(lambda: place.published))
        await asyncio.wait({publishes}, timeout=0.2)  # nothing must happen
        assert not publishes.done()
        decide(made)
        await publishes


@pytest.mark.parametrize("dra", ["off", "only"])
async def test_where_one_api_alone_is_served_nothing_crosses(place: Place, dra: str) -> None:
    async with place.gateway(dra, registers=dra == "only"):
        [path] = control.sockets(place.folder / "state")
        with pytest.raises(ControlError, match=f"--dra {dra}.*with --dra on"):
            await control.ask(path, {"op": "cross", "to": "dra", "ids": []}, 10)


async def test_what_a_pod_holds_by_the_other_api_is_offered_when_it_ended(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "_LOOK_AGAIN", 0.02)
    place.holds("GPU-a")
    async with place.gateway("only"):
        await until(lambda: place.published == {"gpu-1": []})
        place.holds()
        await until(lambda: place.published == {"gpu-0": [], "gpu-1": []})


async def test_nothing_is_offered_before_the_kubelets_records_are_read(place: Place) -> None:
    (place.folder / "dp" / CHECKPOINT).unlink()
    async with place.gateway("only") as one:
        await until(lambda: place.server.asked("GET", watch=True))
        await one.update()
        assert SLICE not in place.server.objects
        place.holds()
        one.beliefs.look_within(0)
        await until(lambda: len(place.published) == 2)
        (place.folder / "dp" / CHECKPOINT).unlink()
        await one.beliefs.look()
        await one.update()
        assert one.drivers is not None
        assert list(one.drivers.offers("gpu.nvidia.com")) == ["gpu-0", "gpu-1"]


async def test_a_cordon_and_an_illness_are_taints(place: Place) -> None:
    async with place.gateway("only") as one:
        await until(lambda: len(place.published) == 2)
        one.ledger.cordon("GPU-a", Cordon("repair", 1.0))
        await one.update()
        await until(lambda: place.published["gpu-0"] == ["device-plugin-gateway.io/cordoned"])
        place.profile.write_text(PROFILE + "    unhealthy: {GPU-b: XID 79}\n")
        await until(lambda: place.published["gpu-1"] == ["device-plugin-gateway.io/unhealthy"])


async def test_a_gpu_that_a_setting_leaves_out_is_not_published(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that has it keeps it."""
    monkeypatch.setattr(drivers, "_LOOK_AGAIN", 0.02)
    async with place.gateway("only") as one:
        await until(lambda: len(place.published) == 2)
        kubelet = await place.kubelet()
        asked = place.claim("c", "uid-c", "gpu-0")
        prepared = await kubelet.prepare(V1, asked)
        one.source.adopt(replace(one.settings.policy, excluded=("0",)))
        await until(lambda: place.published == {"gpu-1": []})
        assert await kubelet.prepare(V1, asked) == prepared
        assert await kubelet.unprepare(V1, asked) == {"uid-c": None}
        assert place.published == {"gpu-1": []}
        await kubelet.channel.close()


async def test_without_dra_a_claims_gpu_is_given_to_nobody(place: Place) -> None:
    async with place.gateway("only"):
        kubelet = await place.kubelet()
        await kubelet.prepare(V1, place.claim("c", "uid-c", "gpu-0"))
        await kubelet.channel.close()
    async with place.gateway("off") as one:
        await until(lambda: states(one) == {"GPU-a": State.WITHHELD, "GPU-b": State.PRESENT})
        [plugin] = one.resources
        assert "prepared by DRA for claim ns/c (pod p)" in plugin.entries["GPU-a"].reason


async def test_without_dra_a_claims_gpu_is_given_to_nobody_before_the_first_look_either(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with place.gateway("off"):
        pass  # Its devices are announced.
    async with place.gateway("only"):
        kubelet = await place.kubelet()
        await kubelet.prepare(V1, place.claim("c", "uid-c", "gpu-0"))
        await kubelet.channel.close()
    place.profile.write_text("no profile")
    async with place.gateway("off") as one:
        assert states(one) == {"GPU-a": State.WITHHELD, "GPU-b": State.NOT_LOOKED_YET}


@pytest.mark.parametrize("dra", ["off", "only"])
async def test_a_claim_that_an_older_state_file_lacks_keeps_its_gpu(place: Place, dra: str) -> None:
    path = place.folder / "state" / "ledger.json"
    async with place.gateway("only"):
        kubelet = await place.kubelet()
        await kubelet.prepare(V1, place.claim("b", "uid-b", "gpu-1"))
        older = path.read_bytes()
        await kubelet.prepare(V1, place.claim("c", "uid-c", "gpu-0"))
        await kubelet.channel.close()
    path.write_bytes(older)
    async with place.gateway(dra) as one:
        assert {row.name for row in one.ledger.claims.values()} == {"b", "c"}
        assert Commands(one).taken(rows=True)().ledger.put_aside
        if dra == "off":
            await until(lambda: states(one) == {"GPU-a": State.WITHHELD, "GPU-b": State.WITHHELD})


def _is_idle(gateway: Gateway) -> bool:
    """Whether its publisher knows what there is, and waits for news."""
    found = None if gateway.drivers is None else gateway.drivers._publisher
    return found is not None and found._there is not None and bool(found._wake._waiters)


async def test_readiness_is_the_registration(place: Place) -> None:
    async with place.gateway("only", registers=False) as one:
        kubelet = await place.kubelet()
        assert "gpu.nvidia.com: not registered" in probes.look(one).text
        await until(lambda: _is_idle(one))
        assert place.published == {}
        await kubelet.call(pluginregistration.NOTIFY, pluginregistration.encode_status(""))
        assert "gpu.nvidia.com: registered, 2 devices" in probes.look(one).text
        await until(lambda: len(place.published) == 2)
        await kubelet.channel.close()


@pytest.mark.parametrize(("version", "waits"), [("v1.32.13", True), ("v1.33.0", False)])
async def test_a_kubelet_that_takes_one_instance_gets_one(
    place: Place, version: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int | None] = []
    others = sockets.others

    def look(registry: Path, name: str, token: str) -> list[Path]:
        assert gateway.drivers is not None
        looks.append(gateway.drivers._kubelet)
        return others(registry, name, token)

    monkeypatch.setattr(sockets, "others", look)
    monkeypatch.setattr(service, "BIND_AGAIN", 0.02)
    place.server.change("/api/v1/nodes/n1", lambda one: one["status"]["nodeInfo"].update(kubeletVersion=version))
    registry = place.folder / "plugins_registry"
    older = sockets.path_of(registry, "gpu.nvidia.com", "0" * 8)
    with listening(older):
        async with place.gateway("only") as one:
            gateway = one
            await until(lambda: one.drivers is not None and len(one.drivers.offers("gpu.nvidia.com")) == 2)
            await until(lambda: looks.count(32) > 1 if waits else len(place.published) == 2)
            assert len(list(registry.iterdir())) == 1 + (not waits)
            older.unlink()
            await until(lambda: list(registry.iterdir()))
            assert one.drivers is not None


async def test_claims_that_are_no_more_are_forgotten_at_the_second_look(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "OVER_AGAIN", 0.02)
    with listening(place.plugins / KUBELET_SOCKET):
        await _forgets_at_the_second_look(place)


async def _forgets_at_the_second_look(place: Place) -> None:
    async with place.gateway("only") as one:
        kubelet = await place.kubelet()
        kept, gone, renewed = (place.claim(name, f"uid-{name}", f"gpu-{number}") for number, name in enumerate("abc"))
        for asked in (kept, gone):
            assert isinstance((await kubelet.prepare(V1, asked))[asked.uid], tuple)
        await place.server.stop()
        before = len(place.server.requests)
        await asyncio.sleep(0.1)
        assert len(one.ledger.claims) == 2
        await place.server.start()
        place.server.remove(f"{API}/namespaces/ns/resourceclaims/b")
        await until(lambda: list(one.ledger.claims) == ["uid-a@gpu.nvidia.com"])
        assert len([1 for ask in place.server.requests[before:] if ask.path.endswith("/resourceclaims/b")]) >= 2
        assert isinstance((await kubelet.prepare(V1, place.claim("c", "uid-c", "gpu-1")))["uid-c"], tuple)
        place.claim("c", "uid-other", "gpu-1")
        await until(lambda: list(one.ledger.claims) == ["uid-a@gpu.nvidia.com"])
        assert renewed.uid == "uid-c"
        await kubelet.channel.close()


async def test_without_an_api_server_the_driver_is_there_and_claims_wait(place: Place) -> None:
    async with place.gateway("only"):
        kubelet = await place.kubelet()
        assert isinstance((await kubelet.prepare(V1, place.claim("had", "uid-had", "gpu-1")))["uid-had"], tuple)
        await kubelet.channel.close()
    await place.server.stop()
    async with place.gateway("only"):
        kubelet = await place.kubelet()
        asked = place.claim("c", "uid-c", "gpu-0")
        preparing = asyncio.ensure_future(kubelet.prepare(V1, asked))
        await asyncio.sleep(0.05)
        assert not preparing.done()
        await place.server.start()
        assert isinstance((await preparing)["uid-c"], tuple)
        await until(lambda: len(place.published) == 2)
        await kubelet.channel.close()


async def test_a_kubelet_of_which_nothing_is_known_gets_one_instance(place: Place) -> None:
    await place.server.stop()
    registry = place.folder / "plugins_registry"
    older = sockets.path_of(registry, "gpu.nvidia.com", "0" * 8)
    with listening(older):
        async with place.gateway("only") as one:
            await until(lambda: one.drivers is not None and len(one.drivers.offers("gpu.nvidia.com")) == 2)
            await asyncio.sleep(0.05)
            assert list(registry.iterdir()) == [older]
