"""ResourceSlices on an API server: written, watched, written again; and what is left alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from gateway.dra import publisher, slices
from gateway.dra.claims import ResourceClaim
from gateway.dra.offer import Ailment, Offer
from gateway.dra.publisher import Current, Publisher, Server
from gateway.dra.serving import rivals
from gateway.dra.serving.announced import Announced
from gateway.dra.serving.rivals import Rival
from gateway.dra.slices import Pool
from gateway.kubernetes.client import Client, KubernetesError
from tests.fakes.apiserver import ApiServer, Request
from tests.unit.kubernetes import api, authority, server, until
from tests.unit.test_dra_decisions import gpu

__all__ = ["api", "authority", "server"]
PATH = "/apis/resource.k8s.io/v1/resourceslices"
OURS = f"{PATH}/n1-gpu.nvidia.com-0"


class Published:
    """A publisher at work, and what it has to offer."""

    def __init__(self, server: ApiServer, client: Client) -> None:
        self.server, self.devices, self.leave, self.ready = server, [gpu(0), gpu(1)], False, True
        self.met: list[bool] = []
        # The stand-in answers 404 for a collection that never had an object.
        server.put("/apis/resource.k8s.io", versions=[{"version": "v1"}])
        server.put(f"{PATH}/other", spec={"driver": "x", "nodeName": "n2"})
        self.publisher = Publisher(
            client,
            Current(client),
            "n1",
            "uid",
            lambda: {"gpu.nvidia.com": self.devices},
            lambda _: self.leave,
            lambda _: self.ready,
            lambda: self.met.append(True),
            lambda _: self.rival,
            self.noticed,
        )
        name, nobody = "gpu.nvidia.com", Announced(Path("/nonexistent"))
        others, changed = (lambda: self.publisher.others(name)), self.publisher.changed
        self.rival = Rival(name, nobody, others, self.claims, lambda _: False, changed)
        self.publisher.changed()
        self.task = asyncio.ensure_future(self.run())

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.rival.run())
            group.create_task(self.publisher.watch())
            group.create_task(self.publisher.run())

    def noticed(self) -> None:
        self.rival.noticed()

    async def claims(self) -> list[ResourceClaim]:
        return []

    def now(self, *devices: Offer) -> None:
        self.devices = list(devices)
        self.publisher.changed()

    @property
    def names(self) -> list[str]:
        spec = self.server.objects.get(OURS, {}).get("spec", {})
        return [one["name"] for one in spec.get("devices", ())]

    @property
    def generation(self) -> int:
        return int(self.server.objects[OURS]["spec"]["pool"]["generation"])

    def writes(self) -> list[Request]:
        return self.server.asked("PATCH")


@pytest.fixture
async def published(server: ApiServer, api: Client) -> AsyncIterator[Published]:
    one = Published(server, api)
    yield one
    one.task.cancel()
    await asyncio.gather(one.task, return_exceptions=True)


async def test_what_is_offered_is_published_by_apply(published: Published) -> None:
    await until(lambda: published.names == ["gpu-0", "gpu-1"])
    [write] = published.writes()
    assert write.query == {"fieldManager": "test", "force": "true"}
    assert write.body["metadata"]["ownerReferences"][0]["uid"] == "uid"


async def test_it_is_told_once_that_no_other_driver_offers_anything(published: Published) -> None:
    """Without its state file a gateway waits for that."""
    await until(lambda: published.names == ["gpu-0", "gpu-1"])
    published.now(gpu(0))
    await until(lambda: published.names == ["gpu-0"])
    assert published.met == [True]


async def test_a_deleted_slice_is_there_again_and_newer(published: Published, server: ApiServer) -> None:
    await until(lambda: published.names)
    server.remove(OURS)
    await until(lambda: published.names == ["gpu-0", "gpu-1"])
    assert published.generation == 2


async def test_a_change_is_published_and_nothing_twice(published: Published, server: ApiServer) -> None:
    await until(lambda: published.names)
    published.now(gpu(0), gpu(1))
    published.now(gpu(0, ailment=Ailment.CORDONED), gpu(1))
    await until(lambda: published.generation == 2)
    published.now(gpu(0))
    await until(lambda: published.names == ["gpu-0"])
    assert len(published.writes()) == 3


async def test_nothing_more_is_offered_before_a_kubelet_took_the_driver(published: Published) -> None:
    await until(lambda: published.names)
    published.now(gpu(0), gpu(1, ailment=Ailment.CORDONED), gpu(2))
    await until(lambda: published.generation == 2)
    published.ready = False
    published.now(gpu(0, ailment=Ailment.UNHEALTHY), gpu(1), gpu(2), gpu(3))  # The second was to be offered again.
    await until(lambda: published.generation == 3)
    assert published.names == ["gpu-0", "gpu-2"]
    published.ready = True
    published.publisher.changed()
    await until(lambda: published.names == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"])


async def test_what_somebody_wrote_over_is_put_right(published: Published, server: ApiServer) -> None:
    await until(lambda: published.names)
    server.change(OURS, lambda one: one["spec"].update(devices=[]))
    await until(lambda: published.names == ["gpu-0", "gpu-1"])


async def test_one_slice_of_another_shape_hides_no_other(published: Published, server: ApiServer) -> None:
    device = {"name": "d", "attributes": {"x.example.com/uuid": {"string": "GPU-1"}}}
    server.put(f"{PATH}/x", spec={"driver": "x", "nodeName": "n1", "devices": [{**device, "taints": ["all"]}]})
    await until(lambda: published.names == ["gpu-0"])
    server.change(OURS, lambda one: one["spec"]["devices"][0].update(taints=["all"]))
    await until(lambda: "taints" not in server.objects[OURS]["spec"]["devices"][0])


async def test_a_pool_that_shrinks_loses_its_slices(published: Published, server: ApiServer) -> None:
    published.now(*map(gpu, range(130)))
    await until(lambda: f"{PATH}/n1-gpu.nvidia.com-1" in server.objects)
    published.now(gpu(0))
    await until(lambda: f"{PATH}/n1-gpu.nvidia.com-1" not in server.objects and published.names == ["gpu-0"])


async def test_an_api_server_that_was_away_is_told_all(published: Published, server: ApiServer) -> None:
    await until(lambda: published.names)
    await server.stop()
    published.now(gpu(5))
    await server.start()
    await until(lambda: published.names == ["gpu-5"])


async def test_slices_are_left_to_a_newer_instance(
    published: Published, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_PACE", 0.01)
    await until(lambda: published.names)
    published.leave = True
    server.change(OURS, lambda one: one["spec"].update(devices=[{"name": "young"}]))
    published.now(gpu(7))
    await asyncio.sleep(0.05)
    assert published.names == ["young"]
    published.leave = False
    await until(lambda: published.names == ["gpu-7"])


async def test_two_that_write_one_pool_do_so_seldom(published: Published, server: ApiServer) -> None:
    await until(lambda: published.names)
    for _ in range(40):
        server.change(OURS, lambda one: one["spec"].update(devices=[]))
        await asyncio.sleep(0.005)
    assert len(published.writes()) <= publisher._AT_ONCE + 3
    await until(lambda: published.names == ["gpu-0", "gpu-1"])


async def test_what_changes_here_is_written_however_often(published: Published) -> None:
    pools = [Pool("gpu.nvidia.com", "n1", (gpu(number),)) for number in range(publisher._AT_ONCE + 2)]
    assert not any(published.publisher._too_often("gpu.nvidia.com", one) for one in pools)
    again = [published.publisher._too_often("gpu.nvidia.com", pools[-1]) for _ in pools]
    assert again[-1]
    assert not again[0]


async def test_what_the_watch_told_meanwhile_is_newer_than_what_was_written(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: published.names == ["gpu-0", "gpu-1"])
    one = published.publisher
    pool = Pool("gpu.nvidia.com", "n1", (gpu(0),))
    [written] = slices.changes(pool, {}, 7)
    [newer] = slices.changes(pool, {}, 9)

    async def patch(*_: object) -> None:
        assert one._there is not None
        one._there[newer.name] = msgspec.convert(newer.body, slices.Slice)

    monkeypatch.setattr(one._api, "patch", patch)
    await one._carry_out(Server("v1"), "gpu.nvidia.com", [written])
    assert one._there is not None
    assert one._there[newer.name].generation == 10


async def test_what_another_driver_offers_is_not_offered(
    published: Published, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: published.names == ["gpu-0", "gpu-1"])
    theirs: dict[str, Any] = {
        "driver": "dra.example.com",
        "nodeName": "n1",
        "devices": [{"name": "x", "attributes": {"uuid": {"string": "GPU-1"}}}],
    }
    server.put(f"{PATH}/theirs", spec=theirs)
    await until(lambda: published.names == ["gpu-0"])
    for one in (f"{PATH}/theirs", OURS):  # A kubelet starts; they publish theirs again in a moment.
        server.remove(one)
    await until(lambda: published.names and published.generation == 3)
    assert published.names == ["gpu-0"]
    monkeypatch.setattr(publisher, "LINGERS", 0.2)
    published.publisher._met_at = dict.fromkeys(published.publisher._met_at, asyncio.get_running_loop().time())
    published.publisher.changed()  # Nothing else happens until it is over.
    await until(lambda: published.names == ["gpu-0", "gpu-1"])


PCI = {"resource.kubernetes.io/pciBusID": {"string": "0000:01:00.0"}}
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a part of our GPU": ({"uuid": "GPU-1"}, {"uuid": {"string": "MIG-7"}, "parentUUID": {"string": "GPU-1"}}),
    "the GPU that ours is a part of": ({"uuid": "MIG-7", "parentUUID": "GPU-1"}, {"uuid": {"string": "GPU-1"}}),
    "a driver that says no UUID": ({"uuid": "GPU-1", "pcieBusID": "00000000:01:00.0"}, PCI),
}


@pytest.mark.parametrize("name", SAME)
async def test_the_same_hardware_is_not_offered_under_another_name(
    name: str, published: Published, server: ApiServer
) -> None:
    ours, theirs = SAME[name]
    published.now(gpu(0), replace(gpu(1), attributes=ours))
    await until(lambda: published.names == ["gpu-0", "gpu-1"])
    devices = [{"name": "x", "attributes": theirs}]
    server.put(f"{PATH}/theirs", spec={"driver": "dra.example.com", "nodeName": "n1", "devices": devices})
    await until(lambda: published.names == ["gpu-0"])
    assert published.publisher.stranger(ours) == "dra.example.com offers it as x in theirs"
    assert not published.publisher.stranger({"uuid": "GPU-0"})


async def test_it_says_why_slices_are_not_what_they_should_be(published: Published, server: ApiServer) -> None:
    await until(lambda: published.names and not published.publisher.trouble("gpu.nvidia.com"))
    server.forbidden = "resourceslices"
    published.now(gpu(0))
    await until(lambda: "403" in published.publisher.trouble("gpu.nvidia.com"))
    server.forbidden = ""
    await until(lambda: published.names == ["gpu-0"] and not published.publisher.trouble("gpu.nvidia.com"))
    server.put(f"{PATH}/nvidias", spec={"driver": "gpu.nvidia.com", "nodeName": "n1", "devices": []})
    await until(lambda: "another process" in published.publisher.trouble("gpu.nvidia.com"))


async def test_a_namesakes_pool_is_left_alone(server: ApiServer, api: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "_PACE", 0.01)
    monkeypatch.setattr(rivals, "LOOK_S", 0.01)
    server.put(f"{PATH}/nvidias", spec={"driver": "gpu.nvidia.com", "nodeName": "n1", "devices": []})
    one = Published(server, api)
    await until(lambda: server.asked("GET", watch=True))
    await asyncio.sleep(0.05)
    assert not published_by(server)
    server.remove(f"{PATH}/nvidias")
    monkeypatch.setattr(rivals, "AWAY_S", 0.0)
    await until(lambda: one.names == ["gpu-0", "gpu-1"])
    one.task.cancel()
    await asyncio.gather(one.task, return_exceptions=True)


def published_by(server: ApiServer) -> bool:
    return OURS in server.objects


async def test_where_the_server_drops_taints_the_ill_are_left_out(
    published: Published, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: published.names)
    put: Callable[..., dict[str, Any]] = server.put

    def dropping(path: str, **content: Any) -> dict[str, Any]:
        for device in content.get("spec", {}).get("devices", ()):
            device.pop("taints", None)
        return put(path, **content)

    monkeypatch.setattr(server, "put", dropping)
    published.now(gpu(0, ailment=Ailment.UNHEALTHY), gpu(1))
    await until(lambda: published.names == ["gpu-1"])


@pytest.mark.parametrize(
    ("versions", "best"),
    [(["v1beta1", "v1", "v1beta2"], "v1"), (["v1beta1", "v1beta2"], "v1beta2"), (["v1beta1"], "v1beta1")],
)
async def test_the_best_version_is_spoken(server: ApiServer, api: Client, versions: list[str], best: str) -> None:
    server.put("/apis/resource.k8s.io", versions=[{"version": one} for one in versions])
    found = await publisher.ask(api)
    assert (found.version, found.path) == (best, f"/apis/resource.k8s.io/{best}")


async def test_a_server_of_another_release_is_told_in_its_version(published: Published, server: ApiServer) -> None:
    """And back: an upgrade may be taken back."""
    await until(lambda: published.names == ["gpu-0", "gpu-1"])
    devices = [{"name": "x", "attributes": {"uuid": {"string": "GPU-1"}}}]
    server.put(f"{PATH}/theirs", spec={"driver": "dra.example.com", "nodeName": "n1", "devices": devices})
    await until(lambda: published.names == ["gpu-0"])
    for version in ("v1beta1", "v1"):
        server.hidden = "resourceslices"  # For a while it says of no slice that it is there.
        await server.upgrade(version)
        number = {"v1beta1": 2, "v1": 3}[version]
        published.now(gpu(0), gpu(1), gpu(number))
        path = f"/apis/resource.k8s.io/{version}/resourceslices/n1-gpu.nvidia.com-0"
        wanted = ["gpu-0", f"gpu-{number}"]
        await until(lambda: [one["name"] for one in server.objects[path]["spec"]["devices"]] == wanted)  # noqa: B023
        assert server.asked("PATCH")[-1].body["apiVersion"] == f"resource.k8s.io/{version}"
        server.hidden = ""
        server.remove(path)
        await until(lambda: path in server.objects)  # noqa: B023


async def test_it_is_seen_what_a_server_of_another_release_has(published: Published, server: ApiServer) -> None:
    await until(lambda: published.names == ["gpu-0", "gpu-1"])
    await server.upgrade("v1beta1")
    path = "/apis/resource.k8s.io/v1beta1/resourceslices"
    devices = [{"name": "x", "basic": {"attributes": {"uuid": {"string": "GPU-1"}}}}]
    server.put(f"{path}/theirs", spec={"driver": "dra.example.com", "nodeName": "n1", "devices": devices})
    await until(lambda: len(server.objects[f"{path}/n1-gpu.nvidia.com-0"]["spec"]["devices"]) == 1)


async def test_a_question_to_a_server_of_another_release_is_asked_again_at_once(
    server: ApiServer, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that is prepared, and was allocated anew, has one try."""
    monkeypatch.setattr(publisher, "_ASK_AGAIN", 0.0)
    server.put("/apis/resource.k8s.io", versions=[{"version": "v1beta1"}])
    server.put("/apis/resource.k8s.io/v1beta1/namespaces/ns/resourceclaims/c", kind="it")
    current = Current(api)

    async def get(there: Server) -> object:
        return (await api.get(f"{there.path}/namespaces/ns/resourceclaims/c", dict[str, object]))["kind"]

    assert await current.at(get) == "it"
    await server.upgrade("v1")
    assert await current.at(get) == "it"


async def test_which_version_there_is_is_asked_seldom_where_it_goes_on_to_be_missing(
    server: ApiServer, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_ASK_AGAIN", 600.0)
    server.put("/apis/resource.k8s.io", versions=[{"version": "v1"}])
    server.removed = "/apis/resource.k8s.io/v1/"
    current = Current(api)

    async def get(there: Server) -> object:
        return await api.get(f"{there.path}/namespaces/ns/resourceclaims/c", dict[str, object])

    for _ in range(3):
        with pytest.raises(KubernetesError, match="404: 404 page not found"):
            await current.at(get)
    assert [one.path for one in server.requests].count("/apis/resource.k8s.io") == 1


async def test_a_server_without_dra_is_named(server: ApiServer, api: Client) -> None:
    server.put("/apis/resource.k8s.io", versions=[{"version": "v1alpha3"}])
    with pytest.raises(
        KubernetesError, match=r"expected one of v1, v1beta2, v1beta1, got v1alpha3: DRA needs Kubernetes 1\.34"
    ):
        await publisher.ask(api)


async def test_a_kubelet_that_starts_again_and_again_is_no_reason_to_wait(
    published: Published, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_WHILE", 0.01)
    monkeypatch.setattr(publisher, "_PACE", 600.0)
    await until(lambda: published.names)
    for number in range(3 * publisher._AT_ONCE):
        await asyncio.sleep(0.02)
        server.remove(OURS)
        await until(lambda: published.names)
        assert published.generation == number + 2
