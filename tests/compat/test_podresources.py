"""The kubelet's records as the gateway reads them: its pod-resources API, served by the genuine code, and its checkpoint.

What the gateway's check of a registration rests on. Versions that aren't built by default are rows where they are built.
Of these, v1alpha1 List is there from kubelet 1.16, v1 List from 1.20, GetAllocatableResources from 1.24.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from adapters import podresources
from adapters.levels import minor_version
from devices.model import Device, Health
from gateway.cli import status
from gateway.kubelet.records import holds, look
from gateway_lab.kubelets.build import available, built
from gateway_lab.trials.scenarios import RESOURCE, Node, device_ids, node
from gateway_lab.waiting import until
from tests.compat.conftest import GENUINE

GATE = "KubeletPodResourcesGetAllocatable"


def versions(first: int, last: int = 99) -> list[str]:
    return [
        version
        for version in available()
        if first <= minor_version(version) <= last and (version in GENUINE or built(version) is not None)
    ]


def genuine(version: str) -> Path:
    path = built(version)
    assert path is not None, f"the genuine kubelet {version} isn't built: run `make kubelets`"
    return path


@asynccontextmanager
async def served(version: str, *, gates: str = "", numa: Sequence[int] = ()) -> AsyncIterator[Node]:
    """Run a node whose kubelet serves four GPUs, on as many NUMA nodes as are named."""
    async with node(genuine) as made:
        if numa:
            made.describe({RESOURCE: [f"numa: [{', '.join(str(numa[gpu % len(numa)]) for gpu in range(4))}]"]})
        await made.start_kubelet(version, gates=gates, numa=numa)
        await made.start_gateway()
        await made.served()
        yield made


def socket(made: Node) -> Path:
    return made.root / "pod-resources" / "kubelet.sock"


def devices(made: Node, ill: Collection[int] = ()) -> list[Device]:
    ids = device_ids(made.gpus)[RESOURCE]
    return [Device(one, Health.UNHEALTHY if index in ill else Health.HEALTHY) for index, one in enumerate(ids)]


def healthy(made: Node, ill: Collection[int] = ()) -> frozenset[str]:
    return frozenset(device.id for device in devices(made, ill) if device.health is Health.HEALTHY)


async def ask(made: Node, method: str) -> bytes:
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(f"unix:{socket(made)}", options=options) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
        return await call(b"", timeout=10)


async def allocatable(made: Node) -> frozenset[str]:
    found = podresources.decode_allocatable(await ask(made, podresources.GET_ALLOCATABLE))
    return found.get(RESOURCE, frozenset())


pytestmark = pytest.mark.genuine


@pytest.mark.parametrize("version", versions(24))
async def test_it_would_give_out_what_is_well(version: str) -> None:
    async with served(version, numa=[0, 1]) as made:
        ills: list[set[int]] = [set(), {1}, {0, 1, 2, 3}, {2, 3}, set()]
        for ill in ills:
            made.set_health({RESOURCE: ill})
            await made.served()
            assert await allocatable(made) == healthy(made, ill)
            assert await holds(socket(made), RESOURCE, devices(made, ill)) is True
            assert await holds(socket(made), RESOURCE, devices(made, ill ^ {0})) is False
        await made.run_pods()
        assert await allocatable(made) == healthy(made)


@pytest.mark.parametrize("version", versions(8))
async def test_it_tells_who_holds_what(version: str) -> None:
    async with served(version) as made:
        await made.run_pods()
        held = {one: f"default/{pod.pod}/{pod.container}" for pod in made.held for one in pod.device_ids}
        records = await look(socket(made), made.kubelet_dir / "kubelet_internal_checkpoint")
        assert records.source == ("checkpoint" if minor_version(version) < 16 else "pod-resources")
        assert set(records.holders(RESOURCE)) == set(held)
        assert records.allocatable == (None if minor_version(version) < 24 else {RESOURCE: healthy(made)})
        for first, method in ((16, podresources.LIST_V1ALPHA1), (20, podresources.LIST)):
            if first <= minor_version(version):
                listed = podresources.decode_list(await ask(made, method))
                assert listed.held == {RESOURCE: held}
                assert listed.pods == {f"default/{pod.pod}" for pod in made.held}


@pytest.mark.parametrize("version", versions(16))
async def test_it_frees_what_ended_pods_held_when_it_is_asked(version: str) -> None:
    async with served(version) as made:
        await made.run_pods()
        await made.the_kubelet.remove("a")
        found = podresources.decode_list(await ask(made, podresources.LIST_V1ALPHA1))
        assert set(found.held[RESOURCE].values()) == {"default/b/main"}
        assert set(await made.the_kubelet.pods()) == {"b"}


@pytest.mark.parametrize("version", versions(24))
async def test_a_cut_stream_shows(version: str) -> None:
    async with served(version) as made:
        await made.gateway.kill()
        await made.unserved()
        assert await holds(socket(made), RESOURCE, devices(made)) is False
        await made.start_gateway()
        await made.served()
        assert await holds(socket(made), RESOURCE, devices(made)) is True


@pytest.mark.parametrize("version", versions(24))
async def test_a_kubelet_that_is_gone_says_nothing_and_the_next_one_does(version: str) -> None:
    async with served(version) as made:
        await made.the_kubelet.kill()
        assert socket(made).is_socket()
        assert await holds(socket(made), RESOURCE, devices(made)) is None
        await made.start_kubelet(version)
        await made.served()
        assert await holds(socket(made), RESOURCE, devices(made)) is True
        await made.the_kubelet.stop()
        assert not socket(made).exists()


@pytest.mark.parametrize("version", versions(24))
async def test_the_gateway_finds_its_registration_there(version: str) -> None:
    async with served(version) as made:
        found = ""

        async def checked() -> bool:
            nonlocal found
            [gateway] = (await status.look(made.root / "state")).read
            found = gateway.resources[0].checked
            return bool(found)

        await until(checked, made.patience, every=0.05)
        assert found == "held"
        await made.finish(1)


@pytest.mark.parametrize(
    ("version", "gates"),
    [
        *(pytest.param(version, "", id=f"{version}-has-no-such-call") for version in versions(16, 20)),
        *(pytest.param(version, f"{GATE}=false", id=f"{version}-has-it-off") for version in versions(24, 26)),
    ],
)
async def test_where_it_does_not_tell_nothing_is_claimed(version: str, gates: str) -> None:
    async with served(version, gates=gates) as made:
        assert await holds(socket(made), RESOURCE, devices(made)) is None


@pytest.mark.parametrize(
    ("version", "mode"),
    [
        *(pytest.param(version, 0o700, id=f"{version}-has-no-such-api") for version in versions(8, 15)),
        # As /tmp is: the folder beside it could be another kubelet's.
        *(pytest.param(version, 0o1777, id=f"{version}-in-a-folder-of-everyone") for version in versions(37)),
    ],
)
async def test_where_there_is_none_no_folder_is_made(version: str, mode: int) -> None:
    async with node(genuine) as made:
        made.root.chmod(mode)
        await made.start_kubelet(version)
        assert not socket(made).parent.exists()
