"""Another process on the node has the name of our DRA driver: it is left alone while it may come back, and ours follows when it ended."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from adapters import pluginregistration
from adapters.dra.plugin import V1
from devices.claims import ClaimName, Refused
from gateway.daemon import Gateway
from gateway.doctor.claims import CHECKS
from gateway.dra import crossing, publisher, sockets
from gateway.dra.service import Service
from gateway.dra.serving import announced as announcing
from gateway.dra.serving import rivals
from gateway.dra.serving.announced import Announced
from gateway.dra.serving.rivals import OtherProcess, Rival
from gateway.telling import probes
from gateway.telling.commands import Commands
from gateway.telling.sides import DriverStatus
from tests.fakes.dradriver import OtherDriver
from tests.unit.kubernetes import authority, server, until
from tests.unit.test_doctor import seen
from tests.unit.test_dra_daemon import API, Place, place
from tests.unit.test_dra_driver import Kubelet, listening
from tests.unit.test_dra_on import Node, node

__all__ = ["authority", "node", "place", "server"]
NAME = "gpu.nvidia.com"
SOCKET = f"{NAME}-reg.sock"
THEIRS = f"{API}/resourceslices/n1-{NAME}-x7k2p"

DRIVER = "gpu.example.com"
UNREGISTERED = "the API server has not said"


@pytest.mark.parametrize(
    ("known", "unregistered", "unpublished", "stale"),
    [
        (OtherProcess(DRIVER), "", "", False),
        (OtherProcess(DRIVER, slices=None), UNREGISTERED, UNREGISTERED, False),
        (OtherProcess(DRIVER, "a.sock", (), 0.0, None), "listens on a.sock", "listens on a.sock", False),
        (OtherProcess(DRIVER, "a.sock", ("s",), 99.0, ()), "and publishes s", "and publishes s", False),
        (OtherProcess(DRIVER, "a.sock", None, 99.0, ()), "listens on a.sock", "listens on a.sock", False),
        (
            OtherProcess(DRIVER, slices=("s",), away_s=59.9, claims=()),
            "less than 60 s ago",
            "less than 60 s ago",
            False,
        ),
        (OtherProcess(DRIVER, slices=(), away_s=59.9, claims=()), "less than 60 s ago", "less than 60 s ago", False),
        (
            OtherProcess(DRIVER, slices=("s",), away_s=60.0, claims=None),
            "does not say which",
            "does not say which",
            False,
        ),
        (OtherProcess(DRIVER, slices=("s",), away_s=60.0, claims=("n/c",)), "have devices of it: n/c", "n/c", False),
        (
            OtherProcess(DRIVER, slices=("s",), away_s=60.0, claims=()),
            "left ResourceSlices",
            "left ResourceSlices",
            True,
        ),
        (OtherProcess(DRIVER, slices=(), away_s=60.0, claims=None), "", "does not say which", False),
        (OtherProcess(DRIVER, slices=(), away_s=60.0, claims=("n/c",)), "", "n/c", False),
        (OtherProcess(DRIVER, slices=(), away_s=60.0, claims=()), "", "", False),
    ],
)
def test_what_may_be_done_beside_another_process(
    known: OtherProcess, unregistered: str, unpublished: str, *, stale: bool
) -> None:
    for said, wanted in ((known.unregistered, unregistered), (known.unpublished, unpublished)):
        assert (wanted in said) if wanted else not said
    assert known.is_stale is stale


# Who has the name.


@contextlib.asynccontextmanager
async def served(path: Path, name: str = NAME) -> AsyncIterator[OtherDriver]:
    """Have another driver's process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    other = OtherDriver(name, path.parent.parent / "record.json")
    service = Service(other)
    await service.start(path)
    try:
        yield other
    finally:
        await service.stop()


@pytest.mark.parametrize("name", [SOCKET, "x.sock", "nvidia", "folder/x.sock"])
async def test_a_driver_is_known_by_what_its_socket_announces(folder: Path, name: str) -> None:
    registry = folder / "registry"
    announced = Announced(registry)
    assert await announced.socket(NAME) == ""
    async with served(registry / name):
        assert await announced.socket(NAME) == name
        assert await announced.socket("gpu.amd.com") == ""
    assert await announced.socket(NAME) == ""


async def test_a_socket_of_this_name_that_gives_no_answer_counts_and_another_one_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcing, "INFO_S", 0.1)
    with listening(folder / "csi.sock"):
        assert await Announced(folder).socket(NAME) == ""
        with listening(folder / SOCKET):
            assert await Announced(folder).socket(NAME) == SOCKET


async def test_neither_a_dead_socket_nor_one_of_a_gateway_is_another_process(folder: Path) -> None:
    listening(folder / SOCKET).close()
    async with served(sockets.path_of(folder, NAME, "0" * 8)):
        assert await Announced(folder).socket(NAME) == ""
        async with served(folder / f".{SOCKET}"):
            assert await Announced(folder).socket(NAME) == "", "a kubelet takes no name with a dot"


# A whole gateway beside it.


def publishes(place: Place, *devices: str) -> None:
    """Have the other process publish devices."""
    place.server.put(f"{API}/namespaces/x/resourceclaims/other")  # The stand-in answers 404 for an empty collection.
    uuids = {"gpu-0": "GPU-a", "gpu-1": "GPU-b"}
    shown = [{"name": one, "attributes": {"uuid": {"string": uuids.get(one, one)}}} for one in devices]
    pool = {"name": "n1", "generation": 1, "resourceSliceCount": 1}
    place.server.put(THEIRS, spec={"driver": NAME, "nodeName": "n1", "pool": pool, "devices": shown})


def standing(one: Gateway) -> DriverStatus:
    [found] = Commands(one).taken(rows=True)().drivers
    return found


def rival(one: Gateway) -> str:
    return next((each.rival for each in Commands(one).taken(rows=True)().drivers), "")


def watched(one: Gateway) -> Rival:
    """Give what looks for another process."""
    found = None if one.drivers is None else one.drivers._rivals.of(NAME)
    assert found is not None
    return found


def registry(place: Place) -> set[str]:
    return {one.name for one in (place.folder / "plugins_registry").iterdir()}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often. A process that went is waited for until a test says otherwise."""
    monkeypatch.setattr(rivals, "LOOK_S", 0.02)
    monkeypatch.setattr(rivals, "LOOK_SELDOM_S", 0.02)
    monkeypatch.setattr(publisher, "_PACE", 0.02)


def time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the minute be over."""
    monkeypatch.setattr(rivals, "AWAY_S", 0.0)


def own(one: Gateway) -> str:
    return sockets.path_of(Path(), NAME, one.age.token).name


async def taken(place: Place, one: Gateway) -> Kubelet:
    """Have a kubelet take the gateway's driver, as soon as that is there."""
    path = place.folder / "plugins_registry" / own(one)
    await until(path.exists)
    kubelet = Kubelet(path)
    await kubelet.call(pluginregistration.NOTIFY, pluginregistration.encode_status(""))
    return kubelet


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("dra", ["only", "on"])
@pytest.mark.parametrize("has", ["socket", "silent", "slices", "both"])
async def test_a_name_that_another_process_has_is_not_registered(
    place: Place, dra: str, has: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcing, "INFO_S", 0.1)
    path = place.folder / "plugins_registry" / SOCKET
    if has in {"slices", "both"}:
        publishes(place, "gpu-0")
    async with contextlib.AsyncExitStack() as stack:
        if has == "silent":
            stack.enter_context(listening(path))
        elif has != "slices":
            await stack.enter_async_context(served(path))
        one = await stack.enter_async_context(place.gateway(dra, registers=False))
        await until(lambda: rival(one))
        for _ in range(3):
            news = watched(one)._news
            await news.wait()
        assert registry(place) <= {SOCKET}
        assert place.published == {}
        assert (SOCKET in rival(one)) is (has != "slices")
        assert ("x7k2p" in rival(one)) is (has in {"slices", "both"})
        if dra == "only":
            ready = probes.look(one)
            assert ready.ready, "another pod in its place would not change it"
            assert rival(one) in ready.text
        status = Commands(one).taken(rows=True)()
        assert CHECKS["DPG0612"](seen(statuses=(status,))) == rival(one)
        assert not CHECKS["DPG0605"](seen(statuses=(status,)))
        assert not CHECKS["DPG0608"](seen(statuses=(status,), registry=True))


@pytest.mark.usefixtures("quick")
async def test_ours_withdraws_for_another_process_and_is_back_when_that_ended(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.server.put(f"{API}/namespaces/x/resourceclaims/other")
    async with place.gateway("only") as one:
        await until(lambda: len(place.published) == 2)
        async with served(place.folder / "plugins_registry" / SOCKET):
            await until(lambda: registry(place) == {SOCKET} and not place.published)
            assert not standing(one).registered
        assert rival(one)
        time_passes(monkeypatch)
        kubelet = await taken(place, one)
        await until(lambda: len(place.published) == 2 and not rival(one))
        await kubelet.channel.close()


@pytest.mark.usefixtures("quick")
async def test_what_it_publishes_stays_through_its_updates(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    publishes(place, "gpu-0", "gpu-1")
    there = place.server.objects[THEIRS]
    for number in range(50):
        place.claim(f"c{number}", f"uid-{number}", "gpu-0")
    path = place.folder / "plugins_registry" / SOCKET
    async with place.gateway("only", registers=False) as one:
        for _ in range(20):
            async with served(path):
                await until(lambda: "listens on" in rival(one))
            await until(lambda: "may be updated now" in rival(one))
            assert registry(place) == set()
        assert place.server.objects[THEIRS] == there
        assert not [ask for ask in place.server.requests if ask.method in {"DELETE", "PATCH"}]
        time_passes(monkeypatch)
        await until(lambda: "ns/c0" in rival(one))
        assert registry(place) == set()
        assert place.server.objects[THEIRS] == there
        for number in range(50):
            place.server.remove(f"{API}/namespaces/ns/resourceclaims/c{number}")
        kubelet = await taken(place, one)
        await until(lambda: THEIRS not in place.server.objects and len(place.published) == 2)
        await kubelet.channel.close()


@pytest.mark.usefixtures("quick")
async def test_slices_that_are_written_show_that_their_process_lives(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket may be in another folder."""
    publishes(place, "gpu-0")
    async with place.gateway("only", registers=False) as one:
        await until(lambda: "may be updated now" in rival(one))
        before = watched(one)._seen_at
        place.server.change(THEIRS, lambda slice_: slice_["spec"]["pool"].update(generation=2))
        await until(lambda: watched(one)._seen_at != before)


@pytest.mark.usefixtures("quick")
async def test_without_slices_ours_registers_and_publishes_once_their_claims_are_gone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet deletes them half a minute after their driver went. Their pods can't end while no driver is registered."""
    monkeypatch.setattr(publisher, "LINGERS", 0.0)
    publishes(place, "gpu-0", "gpu-1")
    asked = place.claim("c", "uid-c", "gpu-0")
    path = place.folder / "plugins_registry" / SOCKET
    async with place.gateway("only", registers=False) as one:
        async with served(path):
            await until(lambda: SOCKET in rival(one) and "x7k2p" in rival(one))
        place.server.remove(THEIRS)
        await until(lambda: "may be updated now" in rival(one) and "x7k2p" not in rival(one))
        assert registry(place) == set()
        time_passes(monkeypatch)
        kubelet = await taken(place, one)
        await until(lambda: "ns/c" in rival(one))
        assert place.published == {}
        refused = (await kubelet.prepare(V1, asked))["uid-c"]
        assert isinstance(refused, Refused)
        assert "allocated from the ResourceSlices of another process" in refused.reason
        assert await kubelet.unprepare(V1, asked) == {"uid-c": None}
        place.server.remove(f"{API}/namespaces/ns/resourceclaims/c")
        await until(lambda: len(place.published) == 2)
        await kubelet.channel.close()


@pytest.mark.usefixtures("quick")
async def test_while_ours_has_claims_it_stays_and_leaves_theirs_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with place.gateway("only", registers=False) as one:
        kubelet = await taken(place, one)
        await until(lambda: len(place.published) == 2)
        mine = place.claim("mine", "uid-mine", "gpu-1")
        assert isinstance((await kubelet.prepare(V1, mine))["uid-mine"], tuple)
        async with served(place.folder / "plugins_registry" / SOCKET):
            publishes(place, "gpu-0")
            await until(lambda: SOCKET in rival(one) and "x7k2p" in rival(one) and not place.published)
            theirs = place.claim("theirs", "uid-theirs", "gpu-0")
            for answers in (await kubelet.prepare(V1, theirs), await kubelet.unprepare(V1, theirs)):
                refused = answers["uid-theirs"]
                assert isinstance(refused, Refused)
                assert SOCKET in refused.reason
            unknown = place.claim("unknown", "uid-unknown", "gpu-7")
            gone = ClaimName("ns", "gone", "uid-gone")
            for neither in (unknown, gone):
                assert await kubelet.unprepare(V1, neither) == {neither.uid: None}
            assert own(one) in registry(place)
            await place.server.stop()
            refused = (await kubelet.unprepare(V1, theirs))["uid-theirs"]
            assert isinstance(refused, Refused)
            assert "cannot read claim ns/theirs" in refused.reason
            await place.server.start()
            assert isinstance((await kubelet.prepare(V1, mine))["uid-mine"], tuple), "it is prepared by ours"
        assert await kubelet.unprepare(V1, theirs) == {"uid-theirs": None}, "nobody else can answer"
        async with served(place.folder / "plugins_registry" / SOCKET):
            await until(lambda: "listens on" in rival(one))
            assert await kubelet.unprepare(V1, mine) == {"uid-mine": None}
            await until(lambda: registry(place) == {SOCKET})
        await kubelet.channel.close()


@pytest.mark.usefixtures("quick")
async def test_without_an_api_server_ours_is_there_for_the_claims_that_it_prepared(place: Place) -> None:
    async with place.gateway("only") as one:
        kubelet = await place.kubelet()
        had = place.claim("c", "uid-c", "gpu-0")
        assert isinstance((await kubelet.prepare(V1, had))["uid-c"], tuple)
        await kubelet.channel.close()
    await place.server.stop()
    async with place.gateway("only"):
        kubelet = await place.kubelet()
        assert await kubelet.unprepare(V1, had) == {"uid-c": None}
        await kubelet.channel.close()
    async with place.gateway("only", registers=False) as one:
        await until(lambda: one.drivers is not None and one.drivers._rivals.of(NAME))
        await watched(one)._news.wait()
        assert registry(place) == set(), "nobody knows whose ResourceSlices there are"
        await place.server.start()
        await until(lambda: registry(place))


# Both APIs.


@pytest.mark.usefixtures("quick")
async def test_what_it_gave_to_pods_is_not_given_by_the_device_plugin_api(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when a kubelet deleted its slices, because its process went, and its pods run on."""
    for module, name in ((publisher, "LINGERS"), (crossing, "LINGERS"), (crossing, "LET_GO")):
        monkeypatch.setattr(module, name, 0.0)
    place = node.place
    async with node.gateway(known=False) as one:
        async with served(place.folder / "plugins_registry" / SOCKET):
            publishes(place, "gpu-0")
            await node.stand(a="foreign", b="plugin")
            place.claim("c", "uid-c", "gpu-0")
            await node.allocatable(1)
            with pytest.raises(Exception, match=f"{NAME} is not registered: another process"):
                await node.cross("dra")
        place.server.remove(THEIRS)
        time_passes(monkeypatch)
        await until(lambda: "claim ns/c may have it" in words(one))
        await node.stand(a="foreign", b="plugin")
        place.server.remove(f"{API}/namespaces/ns/resourceclaims/c")
        await node.stand(a="plugin", b="plugin")
        await node.allocatable(2)


def words(one: Gateway) -> str:
    return " ".join(row.words for row in one.drivers.stands()) if one.drivers is not None else ""
