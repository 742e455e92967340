"""A driver's claims, its server and its sockets: what a kubelet gets to hear, and what stays on disk."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import msgspec
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from adapters import pluginregistration
from adapters.dra import health, plugin
from adapters.dra.plugin import APIS, V1, PluginApi
from devices.claims import Answer, ClaimName, DeviceHealth, Prepared, Refused
from devices.model import ContainerAnswer, ContainerRequest, DeviceNode, Fault, RefusedError, Sayable
from gateway.dra import cdi, claims, driver, records, service, sockets
from gateway.dra.claims import ResourceClaim
from gateway.dra.driver import ClaimsOf
from gateway.dra.offer import Ailment, Offer, Taken
from gateway.dra.records import Pod, Records
from gateway.dra.service import Service
from gateway.kubelet.beliefs import Beliefs, Look
from gateway.kubelet.view import View
from gateway.kubernetes import watch
from gateway.kubernetes.client import KubernetesError
from gateway.lab.waiting import until
from gateway.memory.file import LedgerError
from gateway.memory.ledger import Ledger
from gateway.memory.scribe import Scribe
from gateway.wires.rpc import target
from tests.unit import dracalls
from tests.unit.test_dra_decisions import GPU, claim, gpu

NAME, NODE = "gpu.nvidia.com", "n1"
ASKED = ClaimName("ns", "c", "u")


class Source:
    """Says how containers get devices: by a node each, and all of them in a variable."""

    refuses = False

    async def answer(self, resource: str, request: ContainerRequest, sayable: Sayable) -> ContainerAnswer:
        if self.refuses:
            raise RefusedError(Fault.FAILED_PRECONDITION, "nobody can say that")
        nodes = tuple(DeviceNode(f"/dev/{one}", f"/dev/{one}") for one in request.device_ids)
        return ContainerAnswer(envs={"VISIBLE": ",".join(request.device_ids)}, device_nodes=nodes)


class Stock:
    """What there is, and when that changes."""

    def __init__(self, *devices: Offer) -> None:
        self.news = asyncio.Event()
        self.decides = asyncio.Event()
        self.decides.set()
        self.found: dict[str, Offer] = {}
        self.waited: list[tuple[str, ...]] = []
        self.changes = 0
        self.back: list[str] = []
        self.put(*devices)

    def put(self, *devices: Offer) -> None:
        self.found = {one.name: one for one in devices}
        self.news.set()
        self.news = asyncio.Event()

    def offers(self, driver: str) -> Mapping[str, Offer]:
        return self.found

    def claimed(self) -> None:
        self.changes += 1

    async def given_back(self, _: ClaimName, had: Collection[str]) -> None:
        self.back += had

    def registered(self) -> None:
        pass

    def missed(self, driver: str, names: Iterable[str]) -> None:
        self.waited += [(driver, *names)]

    def why_not(self, driver: str) -> Mapping[str, str]:
        return {"gpu-9": "a pod holds it by the device plugin API"}


class Node:
    """A driver on a node, and the API server's claims."""

    def __init__(self, folder: Path, *devices: Offer, patience: float = 30.0) -> None:
        self.folder, self.patience = folder, patience
        self.stock, self.source = Stock(*(devices or (gpu(0), gpu(1)))), Source()
        self.claims: dict[str, ResourceClaim | KubernetesError] = {"c": claim({})}
        self.reads = 0
        self.together: asyncio.Barrier | None = None
        self.start()

    def start(self) -> None:
        """As a new process: what is remembered is on disk."""
        self.ledger = Ledger(self.folder / "state")
        self.scribe = Scribe(self.ledger)
        self.of = ClaimsOf(
            NAME,
            NODE,
            self.stock,
            self.source,
            self.ledger,
            self.scribe,
            self.read,
            self.folder / "cdi",
            self.patience,
        )

    async def read(self, asked: ClaimName) -> ResourceClaim:
        self.reads += 1
        if self.together is not None:
            await self.together.wait()  # Both are answered in one turn of the loop.
        await asyncio.sleep(0.01)  # An answer takes its time.
        found = self.claims.get(asked.name, KubernetesError("GET", 404, "not found", "NotFound"))
        if isinstance(found, KubernetesError):
            raise found
        return found

    @property
    def specified(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "cdi").glob("*"))

    def on_disk(self) -> dict[str, Any]:
        path = self.folder / "state" / "ledger.json"
        found: dict[str, Any] = json.loads(path.read_text()).get("claims", {}) if path.exists() else {}
        return found


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    one = Node(tmp_path)
    yield one
    await one.scribe.close()


def refusal(answer: Answer | None) -> str:
    assert isinstance(answer, Refused)
    return answer.reason


PREPARED = (Prepared(("gpu",), NODE, "gpu-0", (f"{NAME}/claim=u-gpu-0",)),)


async def test_a_prepared_claim_is_on_disk_and_specified_before_the_kubelet_hears(node: Node) -> None:
    assert await node.of.prepare(ASKED) == PREPARED
    assert list(node.on_disk()) == [claims.key(NAME, "u")]
    [name] = node.specified
    assert name == f"{NAME}-claim-u.json"
    found = json.loads((node.folder / "cdi" / name).read_text())
    assert found["devices"][0]["containerEdits"] == {
        "env": ["VISIBLE=GPU-0"],
        "deviceNodes": [{"path": "/dev/GPU-0", "hostPath": "/dev/GPU-0", "permissions": "rw"}],
    }


@pytest.mark.parametrize(("seconds", "told"), [(60.0, 0), (0.0, 1)])
async def test_the_lists_are_made_anew_when_the_kubelet_has_its_answer(
    node: Node, monkeypatch: pytest.MonkeyPatch, seconds: float, told: int
) -> None:
    """The answer doesn't wait for them, and they don't for ever."""
    monkeypatch.setattr(driver, "TELLS", seconds)
    assert not isinstance(await node.of.prepare(ASKED), Refused)
    assert node.stock.changes == told


@pytest.mark.parametrize(
    "found",
    [claim({}), claim({"request": "gpu/large"}), *(KubernetesError("GET", status, "no") for status in (0, 404, 500))],
)
async def test_asked_again_it_is_the_same_answer_also_without_the_api_server(
    node: Node, found: ResourceClaim | KubernetesError
) -> None:
    await node.of.prepare(ASKED)
    node.claims["c"] = found
    node.stock.put()
    (node.folder / "cdi" / node.specified[0]).unlink()
    assert await node.of.prepare(ASKED) == PREPARED
    assert node.specified == [f"{NAME}-claim-u.json"]
    assert node.reads == 2


async def test_an_api_server_that_hangs_holds_up_no_claim_that_is_prepared(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet that restarts asks again for every claim, and the containers of a running pod may wait for that."""
    monkeypatch.setattr(driver, "KNOWN", 0.01)
    await node.of.prepare(ASKED)
    node.together = asyncio.Barrier(2)  # Nobody else comes.
    async with asyncio.timeout(10):
        assert await node.of.prepare(ASKED) == PREPARED
        assert await node.of.unprepare(ASKED) is None


OTHER = ClaimName("ns", "d", "v")


@pytest.mark.parametrize("again", [False, True])
async def test_a_claim_that_was_allocated_anew_gets_that_and_keeps_what_it_had(tmp_path: Path, *, again: bool) -> None:
    """A pod that was deleted by force may still run with it."""
    node = Node(tmp_path, patience=0.05)
    assert await node.of.prepare(ASKED) == PREPARED
    node.claims |= {"c": claim({"device": "gpu-1", "request": "more"}), "d": claim({}, uid="v")}
    anew = (Prepared(("more",), NODE, "gpu-1", (f"{NAME}/claim=u-gpu-1",)),)
    assert await node.of.prepare(ASKED) == anew
    if again:
        node.start()
        assert await node.of.prepare(ASKED) == anew
    found = json.loads((node.folder / "cdi" / node.specified[0]).read_text())
    assert [one["name"] for one in found["devices"]] == ["u-gpu-1"]
    assert "claim ns/c has gpu-0" in refusal(await node.of.prepare(OTHER))
    node.claims["c"] = claim({})
    assert await node.of.prepare(ASKED) == PREPARED, "it may go back"
    kept = [(one.name, one.former) for one in node.of.rows()["u"].devices]
    assert kept == [("gpu-0", False), ("gpu-1", True)], "each device is there once"
    assert await node.of.unprepare(ASKED) is None
    node.claims["d"] = claim({}, {"device": "gpu-1"}, uid="v")
    assert isinstance(await node.of.prepare(OTHER), tuple)
    await node.scribe.close()


async def test_a_claim_keeps_what_it_had_though_another_instance_gave_away_what_it_was_allocated_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "KNOWN", 30.0)
    node, other = Node(tmp_path), Node(tmp_path)
    assert await node.of.prepare(ASKED) == PREPARED
    before = node.of.rows()
    other.claims["d"] = claim({"device": "gpu-1"}, uid="v")

    async def read(_: ClaimName) -> ResourceClaim:
        assert isinstance(await other.of.prepare(OTHER), tuple)
        return claim({"device": "gpu-1"})

    monkeypatch.setattr(node.of, "_read", read)
    assert "another gateway on this node gave its devices away" in refusal(await node.of.prepare(ASKED))
    assert node.of.rows()["u"] == before["u"]
    await node.scribe.close()
    await other.scribe.close()


async def test_a_claim_keeps_all_that_it_had_however_often_it_was_allocated_anew(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu(0), gpu(1), gpu(2), patience=0.05)
    for device in ("gpu-0", "gpu-1", "gpu-2"):
        node.claims["c"] = claim({"device": device})
        assert isinstance(await node.of.prepare(ASKED), tuple)
    node.claims["d"] = claim({"device": "gpu-0"}, uid="v")
    assert "claim ns/c has gpu-0" in refusal(await node.of.prepare(OTHER))
    await node.scribe.close()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (claim({"device": "gpu-1"}), "gpu-1 is still in use: claim ns/d has gpu-1"),
        (claim({"device": "gpu-2"}), "nobody can say that"),
        (msgspec.convert({"metadata": {"uid": "u"}}, ResourceClaim), "to be allocated, and it is not any more"),
    ],
)
async def test_a_claim_that_was_allocated_anew_and_cannot_have_that_keeps_what_it_had(
    tmp_path: Path, found: ResourceClaim, words: str
) -> None:
    node = Node(tmp_path, gpu(0), gpu(1), gpu(2), patience=0.05)
    node.claims["d"] = claim({"device": "gpu-1"}, uid="v")
    assert await node.of.prepare(ASKED) == PREPARED
    assert isinstance(await node.of.prepare(OTHER), tuple)
    node.claims["c"], node.source.refuses, before = found, True, dict(node.ledger.claims)
    assert words in refusal(await node.of.prepare(ASKED))
    assert dict(node.ledger.claims) == before
    await node.scribe.close()


async def test_what_was_prepared_is_known_to_the_next_process(node: Node) -> None:
    await node.of.prepare(ASKED)
    node.start()
    node.claims = {}
    assert await node.of.prepare(ASKED) == PREPARED
    assert await node.of.unprepare(ASKED) is None
    assert node.on_disk() == {}


async def test_what_another_instance_prepared_is_unprepared(node: Node, tmp_path: Path) -> None:
    other = Node(tmp_path)
    assert await node.of.prepare(ASKED) == PREPARED
    assert await other.of.unprepare(ASKED) is None
    assert (node.on_disk(), node.specified) == ({}, [])
    await other.scribe.close()


@pytest.mark.parametrize("other", [ClaimName("ns", "d", "u"), ClaimName("another", "c", "u")])
async def test_a_claim_of_another_name_gets_and_takes_nothing_by_a_prepared_ones_uid(
    node: Node, other: ClaimName
) -> None:
    await node.of.prepare(ASKED)
    node.claims["d"] = claim({})
    assert "which is prepared, got " in refusal(await node.of.prepare(other))
    assert "which is prepared, got " in refusal(await node.of.unprepare(other))
    assert await node.of.prepare(ASKED) == PREPARED


async def test_unprepared_it_is_free_and_gone(node: Node) -> None:
    await node.of.prepare(ASKED)
    assert await node.of.unprepare(ASKED) is None
    assert (node.on_disk(), node.specified) == ({}, [])
    assert await node.of.unprepare(ASKED) is None
    node.claims["d"] = claim({}, uid="v")
    assert isinstance(await node.of.prepare(ClaimName("ns", "d", "v")), tuple)


@pytest.mark.parametrize("by_name", [True, False])
async def test_what_a_pod_by_name_had_is_brought_back(node: Node, *, by_name: bool) -> None:
    """Another claim is still allocated to somebody."""
    one = claim({})
    one.metadata.annotations = claims.Annotations("true" if by_name else "")
    node.claims["c"] = one
    assert await node.of.prepare(ASKED) == PREPARED
    assert await node.of.unprepare(ASKED) is None
    assert node.stock.back == (["GPU-0"] if by_name else [])


async def test_a_device_in_use_is_waited_for(node: Node) -> None:
    await node.of.prepare(ASKED)
    node.claims["d"] = claim({}, uid="v")
    waiting = asyncio.ensure_future(node.of.prepare(ClaimName("ns", "d", "v")))
    await asyncio.wait({waiting}, timeout=0.05)  # nothing must happen
    assert not waiting.done()
    await node.of.unprepare(ASKED)
    answer = await waiting
    assert isinstance(answer, tuple)
    assert list(node.on_disk()) == [claims.key(NAME, "v")]


async def test_who_waits_looks_once_for_each_claim_that_ends(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "ASK_AGAIN", 60.0)
    second, third = ClaimName("ns", "d", "v"), ClaimName("ns", "e", "w")
    node.claims |= {"d": claim({"device": "gpu-1"}, uid="v"), "e": claim({}, uid="w")}
    assert isinstance(await node.of.prepare(ASKED), tuple)
    assert isinstance(await node.of.prepare(second), tuple)
    waiting = asyncio.ensure_future(node.of.prepare(third))
    await until(lambda: bool(node.stock.waited))
    await node.of.unprepare(second)
    await asyncio.wait({waiting}, timeout=0.1)  # nothing must happen
    assert node.stock.waited == [(NAME, "gpu-0")] * 2
    await node.of.unprepare(ASKED)
    async with asyncio.timeout(10):
        assert isinstance(await waiting, tuple)


async def test_a_device_that_comes_is_waited_for(node: Node) -> None:
    node.stock.put()
    waiting = asyncio.ensure_future(node.of.prepare(ASKED))
    while node.reads == 0:  # noqa: ASYNC110 - a stand-in tells nobody
        await asyncio.sleep(0)
    node.stock.put(gpu(0))
    assert await waiting == PREPARED


async def test_two_claims_never_get_one_device(tmp_path: Path) -> None:
    node = Node(tmp_path, patience=0.05)
    node.claims["d"] = claim({}, uid="v")
    node.together = asyncio.Barrier(2)
    answers = await asyncio.gather(node.of.prepare(ASKED), node.of.prepare(ClaimName("ns", "d", "v")))
    assert sorted(isinstance(one, tuple) for one in answers) == [False, True]
    [refused] = [one for one in answers if isinstance(one, Refused)]
    assert " has gpu-0; waited 0.05 s" in refused.reason
    await node.scribe.close()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (KubernetesError("GET", 404, "gone", "NotFound"), "the API server has none: delete the pod"),
        (KubernetesError("GET", 403, "no rights"), "expected to read claim ns/c: GET: 403"),
        (KubernetesError("GET", 0, "away", away=True), "expected to read claim ns/c: GET: no answer: away"),
        (claim({"device": "gpu-9"}), "gpu-9 can't be handed out: a pod holds it by the device plugin API"),
    ],
)
async def test_what_cannot_be_is_said_and_leaves_nothing(
    tmp_path: Path, found: ResourceClaim | KubernetesError, words: str
) -> None:
    node = Node(tmp_path, patience=0.05)
    node.claims["c"] = found
    assert words in refusal(await node.of.prepare(ASKED))
    assert (dict(node.ledger.claims), node.specified) == ({}, [])
    await node.scribe.close()


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_what_no_later_answer_would_change_is_said_at_once(node: Node, status: int) -> None:
    node.claims["c"] = KubernetesError("GET", status, "no", "NotFound")
    refusal(await node.of.prepare(ASKED))
    assert node.reads == 1


NO_API = KubernetesError("GET", 404, "404 page not found")
"""What a server says that doesn't have the API now, in this version: nothing of a claim."""


@pytest.mark.parametrize("error", [KubernetesError("GET", 0, "away", away=True), NO_API])
async def test_an_api_server_that_is_away_is_waited_for(
    node: Node, monkeypatch: pytest.MonkeyPatch, error: KubernetesError
) -> None:
    monkeypatch.setattr(driver, "ASK_AGAIN", 0.01)
    node.claims["c"] = error
    waiting = asyncio.ensure_future(node.of.prepare(ASKED))
    while node.reads < 2 and not waiting.done():  # noqa: ASYNC110 - a stand-in tells nobody
        await asyncio.sleep(0.001)
    node.claims["c"] = claim({})
    assert await waiting == PREPARED


async def test_a_device_that_cannot_be_told_is_not_taken(node: Node) -> None:
    node.source.refuses = True
    assert refusal(await node.of.prepare(ASKED)) == "nobody can say that"
    assert dict(node.ledger.claims) == {}
    node.source.refuses = False
    assert await node.of.prepare(ASKED) == PREPARED
    node.source.refuses = True
    assert refusal(await node.of.prepare(ASKED)) == "nobody can say that"
    assert list(node.ledger.claims) == [claims.key(NAME, "u")], "its pod may run"


async def test_a_disk_that_is_slow_to_answer_is_waited_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "ASK_AGAIN", 0.0)
    answers = iter((False, False, True))

    async def slow() -> bool:
        return next(answers)

    monkeypatch.setattr(node.scribe, "durable", slow)
    assert await node.of.prepare(ASKED) == PREPARED
    assert list(answers) == []


async def test_without_a_disk_nothing_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, patience=0.05)

    async def full() -> bool:
        return False

    monkeypatch.setattr(node.scribe, "durable", full)
    assert "could not be written down" in refusal(await node.of.prepare(ASKED))
    assert "could not be written down" in refusal(await node.of.unprepare(ASKED))


async def test_without_a_disk_an_unprepare_that_is_repeated_is_refused_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> None:
        raise LedgerError("no space left on device")

    await node.of.prepare(ASKED)
    with monkeypatch.context() as disk:
        disk.setattr(node.ledger, "save", full)
        for _ in range(3):
            assert "could not be written down" in refusal(await node.of.unprepare(ASKED))
    assert node.on_disk()
    assert await node.of.unprepare(ASKED) is None
    assert not node.on_disk()


async def test_a_folder_that_cannot_be_written_is_said(node: Node) -> None:
    (node.folder / "cdi").write_text("")
    assert "CDI specification into" in refusal(await node.of.prepare(ASKED))


async def test_all_devices_of_a_request_are_in_the_variable(node: Node) -> None:
    node.claims["c"] = claim({}, {"device": "gpu-1"}, {"device": "gpu-2", "request": "more"})
    node.stock.put(gpu(0), gpu(1), gpu(2))
    await node.of.prepare(ASKED)
    found = json.loads((node.folder / "cdi" / node.specified[0]).read_text())
    said = {
        one["name"]: (one["containerEdits"]["env"], len(one["containerEdits"]["deviceNodes"]))
        for one in found["devices"]
    }
    assert said == {
        "u-gpu-0": (["VISIBLE=GPU-0,GPU-1"], 1),
        "u-gpu-1": (["VISIBLE=GPU-0,GPU-1"], 1),
        "u-gpu-2": (["VISIBLE=GPU-2"], 1),
    }


async def test_a_boot_brings_specifications_back_and_sweeps_others(node: Node) -> None:
    await node.of.prepare(ASKED)
    folder = node.folder / "cdi"
    for path in folder.iterdir():
        path.unlink()
    left, old = (f".{NAME}-claim-u.json.0123456{number}.new" for number in range(2))
    stale, fresh = (f"{NAME}-claim-{uid}.json" for uid in ("old", "fresh"))
    for name in (stale, fresh, left, old, "x.example.com-claim-old.json", f"{NAME}.json"):
        (folder / name).write_text("{}")
    for name in (stale, old, "x.example.com-claim-old.json", f"{NAME}.json"):
        os.utime(folder / name, (0, 0))
    node.start()
    await node.of.restore()
    assert node.specified == sorted(
        [left, fresh, "x.example.com-claim-old.json", f"{NAME}.json", f"{NAME}-claim-u.json"]
    )


async def test_what_is_unprepared_while_all_is_specified_anew_stays_without(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who takes over does both at once."""
    node.claims["d"] = claim({"device": "gpu-1"}, uid="v")
    assert await node.of.prepare(ASKED) == PREPARED
    assert isinstance(await node.of.prepare(OTHER), tuple)
    begun, goes_on, answer = asyncio.Event(), asyncio.Event(), node.source.answer

    async def slow(*asked: Any) -> ContainerAnswer:
        begun.set()
        await goes_on.wait()
        return await answer(*asked)

    monkeypatch.setattr(node.source, "answer", slow)
    restoring = asyncio.ensure_future(node.of.restore())
    await begun.wait()
    over = [asyncio.ensure_future(node.of.unprepare(one)) for one in (ASKED, OTHER)]
    await asyncio.wait(over, timeout=0.1)
    goes_on.set()
    assert await asyncio.gather(*over) == [None, None]
    await restoring
    assert node.specified == []


async def test_what_a_running_pod_was_given_is_there_all_the_time(node: Node) -> None:
    await node.of.prepare(ASKED)
    path = node.folder / "cdi" / node.specified[0]
    os.utime(path, (0, 0))
    await node.of.restore()
    assert path.stat().st_mtime == 0, "it is the same file"


async def test_claims_that_are_over_are_forgotten(node: Node) -> None:
    await node.of.prepare(ASKED)
    told = node.stock.changes
    node.of.drop(["u"])
    assert (node.of.rows(), node.stock.changes) == ({}, told + 1)
    await until(lambda: not node.on_disk())


async def test_each_driver_has_its_own_claims(node: Node) -> None:
    await node.of.prepare(ASKED)
    others = replace(node.ledger.claims[claims.key(NAME, "u")], driver="gpu.amd.com")
    node.ledger.set_claim(claims.key("gpu.amd.com", "v"), others)
    assert (node.of.prepared, [*node.of.rows()]) == (1, ["u"])


async def test_a_claim_that_was_missing_twice_in_a_row_is_over(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "OVER_AGAIN", 0.0)
    assert await node.of.prepare(ASKED) == PREPARED
    os.utime(node.folder / "cdi" / node.specified[0], (0, 0))
    gone, away = KubernetesError("GET", 404, "gone", "NotFound"), KubernetesError("GET", 0, "away", away=True)
    answers: list[ResourceClaim | KubernetesError] = [gone, claim({}), gone, away, gone, NO_API, gone]
    away_now = [*[False] * len(answers), True]
    answers += [gone, claim({}, uid="another")]

    async def read(_: ClaimName) -> ResourceClaim:
        answer = answers.pop(0)
        if isinstance(answer, KubernetesError):
            raise answer
        return answer

    def is_away(_: float) -> bool:
        return bool(away_now) and away_now.pop(0)

    minding = asyncio.ensure_future(driver.mind_over({NAME: node.of}, read, is_away))
    await until(lambda: not node.specified)
    assert (node.of.rows(), answers) == ({}, [])
    minding.cancel()
    await asyncio.gather(minding, return_exceptions=True)


async def test_health_is_of_all_devices(node: Node) -> None:
    node.stock.put(gpu(0), replace(gpu(1), ailment=Ailment.UNHEALTHY, reason="XID 79"))
    assert [(one.device, one.well, one.words) for one in node.of.health()] == [
        ("gpu-0", True, ""),
        ("gpu-1", False, "XID 79"),
    ]


# The server.


class Kubelet:
    """Calls a driver as a kubelet does."""

    def __init__(self, path: Path, patience: float = 10.0) -> None:
        self.channel, self._patience = grpc.aio.insecure_channel(target(path)), patience

    async def call(self, where: str, data: bytes = b"") -> bytes:
        ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(where)
        return await ask(data, timeout=self._patience)

    def watch(self, version: str) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
        where = f"/{health.service(version)}/{health.WATCH}"
        ask: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self.channel.unary_stream(where)
        return ask(b"")

    async def prepare(self, api: PluginApi, *asked: ClaimName) -> Any:
        wire = await self.call(f"/{api.service}/{plugin.PREPARE}", dracalls.request(api, asked))
        return dracalls.prepare_answer(api, wire)

    async def unprepare(self, api: PluginApi, *asked: ClaimName) -> Any:
        wire = await self.call(f"/{api.service}/{plugin.UNPREPARE}", dracalls.request(api, asked))
        return dracalls.unprepare_answer(api, wire)


@pytest.fixture
async def served(node: Node, tmp_path: Path) -> AsyncIterator[Kubelet]:
    path = tmp_path / "reg.sock"
    one = Service(node.of)
    await one.start(path)
    kubelet = Kubelet(path)
    yield kubelet
    await kubelet.channel.close()
    await one.stop()
    assert not path.exists()


async def test_a_kubelet_finds_the_driver(served: Kubelet, node: Node) -> None:
    found = pluginregistration.decode_info(await served.call(pluginregistration.GET_INFO))
    assert (found.kind, found.name, found.endpoint) == ("DRAPlugin", NAME, "")
    assert found.versions == ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
    for reason in ("no such service", ""):
        await served.call(pluginregistration.NOTIFY, pluginregistration.encode_status(reason))
        assert (node.of.is_registered, node.of.trouble) == (not reason, reason)


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.version)
async def test_a_kubelets_claims(served: Kubelet, node: Node, api: PluginApi) -> None:
    gone = ClaimName("ns", "gone", "g")
    answers = await served.prepare(api, ASKED, gone)
    assert answers["u"] == PREPARED
    assert "the API server has none" in refusal(answers["g"])
    assert await served.unprepare(api, ASKED, gone) == {"u": None, "g": None}


async def test_a_defect_is_that_claims_trouble_alone(
    served: Kubelet, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare: Callable[[ClaimName], Awaitable[Answer]] = node.of.prepare

    async def broken(one: ClaimName) -> Answer:
        if one.uid == "b":
            raise ZeroDivisionError
        return await prepare(one)

    monkeypatch.setattr(node.of, "prepare", broken)
    monkeypatch.setattr(node.of, "unprepare", broken)
    bad = ClaimName("ns", "bad", "b")
    answers = await served.prepare(V1, ASKED, bad)
    assert answers["u"] == PREPARED
    assert "a defect in the gateway: ZeroDivisionError()" in refusal(answers["b"])
    assert "a defect in the gateway" in refusal((await served.unprepare(V1, bad))["b"])


async def test_a_share_that_cannot_be_said_is_refused_for_that_claim(served: Kubelet, node: Node) -> None:
    node.claims["c"] = claim({"shareID": "s"})
    answers = await served.prepare(APIS[1], ASKED)
    assert "can't say shares" in refusal(answers["u"])


@pytest.mark.parametrize("end", ["prepared", "unprepared"])
async def test_a_refused_claim_is_reported_until_its_end(served: Kubelet, node: Node, end: str) -> None:
    node.claims["c"] = claim(config=[{"opaque": {"driver": "gpu.nvidia.com", "parameters": {}}}])
    await served.prepare(V1, ASKED)
    [words] = node.of.refused
    assert "claim ns/c: expected no parameters" in words
    node.claims["c"] = claim({})
    await (served.prepare if end == "prepared" else served.unprepare)(V1, ASKED)
    assert node.of.refused == ()


async def test_what_is_no_request_is_refused(served: Kubelet) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.call(f"/{V1.service}/{plugin.PREPARE}", b"\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("where", [f"/{V1.service}/{plugin.PREPARE}", pluginregistration.NOTIFY])
async def test_a_request_that_is_too_large_is_not_read(served: Kubelet, where: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.call(where, bytes(plugin.MAX_BYTES + 1))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_calls_beyond_the_most_are_refused(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_CALLS", 1)
    one, kubelet = Service(node.of), Kubelet(tmp_path / "a.sock")
    await one.start(tmp_path / "a.sock")
    call = kubelet.watch("v1")
    await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await kubelet.call(pluginregistration.GET_INFO)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    call.cancel()
    await kubelet.channel.close()
    await one.stop()


async def test_pods_that_start_together_are_all_answered(served: Kubelet) -> None:
    asked = [ClaimName("ns", f"gone-{number}", f"g-{number}") for number in range(200)]
    answers = await asyncio.gather(*(served.prepare(V1, one) for one in asked))
    assert [refusal(found[one.uid]) for found, one in zip(answers, asked, strict=True)]


async def test_who_calls_without_end_fills_no_log(served: Kubelet) -> None:
    asked = [ClaimName("ns", f"gone-{number}", f"g-{number}") for number in range(service.TOLD * 2)]
    with capture_logs() as logs:
        await served.prepare(V1, *asked)
        await served.unprepare(V1, *asked)
    told = [line["event"] for line in logs]
    assert {what: told.count(what) for what in ("claim refused", "claim unprepared")} == {
        "claim refused": service.TOLD,
        "claim unprepared": service.TOLD,
    }


@pytest.mark.parametrize("version", health.VERSIONS)
async def test_health_is_streamed_and_told_anew(served: Kubelet, node: Node, version: str) -> None:
    call = served.watch(version)

    async def told() -> list[DeviceHealth]:
        async with asyncio.timeout(10):
            told = await call.read()
            assert isinstance(told, bytes)
            return list(dracalls.health_list(told))

    assert [one.well for one in await told()] == [True, True]
    node.stock.put(replace(gpu(0), ailment=Ailment.UNHEALTHY, reason="XID 79"))
    assert [(one.well, one.words) for one in await told()] == [(False, "XID 79")]
    call.cancel()


async def test_an_open_stream_does_not_hold_up_the_end(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "GRACE", 600.0)
    one, kubelet = Service(node.of), Kubelet(tmp_path / "a.sock")
    await one.start(tmp_path / "a.sock")
    call = kubelet.watch("v1")
    await call.read()
    async with asyncio.timeout(10):
        await one.stop()
        with contextlib.suppress(grpc.aio.AioRpcError):  # What gRPC still had to send met a connection that had ended.
            assert await call.read() is grpc.aio.EOF
    await kubelet.channel.close()


async def test_at_the_end_the_socket_goes_first_and_calls_are_finished(node: Node, tmp_path: Path) -> None:
    one, kubelet, path = Service(node.of), Kubelet(tmp_path / "a.sock"), tmp_path / "a.sock"
    await one.start(path)
    node.stock.put()
    asked = asyncio.ensure_future(kubelet.prepare(V1, ASKED))
    while node.reads == 0:  # noqa: ASYNC110 - a stand-in tells nobody
        await asyncio.sleep(0.001)
    end = asyncio.ensure_future(one.stop())
    await until(lambda: not path.exists(), 10)
    assert not asked.done()
    node.stock.put(gpu(0))
    assert await asked == {"u": PREPARED}
    await end
    await kubelet.channel.close()


# Sockets.


def listening(path: Path) -> socket.socket:
    one = socket.socket(socket.AF_UNIX)
    one.bind(str(path))
    one.listen()
    return one


def test_another_instance_is_one_that_listens_for_the_same_driver(folder: Path) -> None:
    mine, other, dead, stranger = (
        sockets.path_of(folder, driver, token)
        for driver, token in ((NAME, "0" * 8), (NAME, "1" * 8), (NAME, "2" * 8), ("gpu.nvidia.com.x", "3" * 8))
    )
    no_instance = mine.with_stem(mine.stem.removesuffix("0" * 8) + "mine")
    with listening(mine), listening(other), listening(stranger):
        for path in (dead, no_instance):
            listening(path).close()
        for age, path in enumerate((mine, other)):
            os.utime(path, ns=(age, age))
        assert sockets.others(folder, NAME, "0" * 8) == [other]
        assert sockets.has_newer(folder, NAME, "0" * 8)
        assert not sockets.has_newer(folder, NAME, "1" * 8)
        assert not sockets.has_newer(folder, NAME, "9" * 8)
        assert sockets.sweep(folder, NAME) == [dead.name]
        assert stranger.exists()
        assert no_instance.exists()
    assert sockets.others(folder, NAME, "0" * 8) == []
    assert sockets.sweep(folder / "none", NAME) == []


def test_a_long_name_fits_into_a_path() -> None:
    path = sockets.path_of(Path("/var/lib/kubelet/plugins_registry"), "x" * 63, "0" * 8)
    assert len(str(path)) <= 107
    assert path != sockets.path_of(path.parent, "x" * 62, "0" * 8)


def test_a_specification_that_is_there_is_left_alone(tmp_path: Path) -> None:
    before_mask = os.umask(0o077)
    try:
        cdi.write(NAME, "u", {"kind": "x"}, tmp_path)
    finally:
        os.umask(before_mask)
    path = cdi.path_of(NAME, "u", tmp_path)
    before = path.stat()
    cdi.write(NAME, "u", {"kind": "x"}, tmp_path)
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_mode & 0o777 == 0o644
    cdi.write(NAME, "u", {"kind": "y"}, tmp_path)
    assert msgspec.json.decode(path.read_bytes()) == {"kind": "y"}
    cdi.remove(NAME, "u", tmp_path)
    cdi.remove(NAME, "u", tmp_path)
    assert list(tmp_path.iterdir()) == []


# The kubelet's records.


class KubeletRecords:
    """The kubelet's records, as they were read last."""

    def __init__(self, **remembered: str) -> None:
        self.last: Look | None = None
        self.put(**remembered)

    def put(self, **remembered: str) -> None:
        shown = View(held={GPU: {}}, remembered={GPU: remembered}, source="pod-resources", allocatable={})
        self.last = Look(shown, 0.0, 0.0)

    def holders(self, resource: str) -> dict[str, str]:
        assert self.last is not None
        return self.last.view.holders(resource)

    def held(self, resource: str) -> frozenset[str]:
        return frozenset(self.holders(resource))


@pytest.mark.parametrize(
    ("spec", "status", "comes"),
    [
        ({"containers": [{}, {"resources": {"limits": {GPU: "1"}}}]}, {"phase": "Pending"}, True),
        ({"containers": [{}], "initContainers": [{"resources": {"limits": {GPU: "1"}}}]}, {}, True),
        ({"containers": [{"resources": {"limits": {"cpu": "1"}}}]}, {"phase": "Pending"}, False),
        ({"containers": [{"resources": {"limits": {GPU: "1"}}}]}, {"startTime": "2026-01-01T00:00:00Z"}, False),
        ({"containers": [{"resources": {"limits": {GPU: "1"}}}]}, {"phase": "Failed"}, False),
        ({"containers": [{"resources": {"limits": {GPU: "1"}}}]}, {"extendedResourceClaimStatus": {}}, False),
    ],
)
async def test_who_is_given_to_the_node_and_not_admitted_yet_is_arriving(
    spec: dict[str, Any], status: dict[str, Any], *, comes: bool
) -> None:
    async def ask() -> list[Pod]:
        return [msgspec.convert({"metadata": {"uid": "u"}, "spec": spec, "status": status}, Pod)]

    assert await records.arriving(ask, {GPU}) is comes


ONE, TWO = {"resources": {"limits": {GPU: "1"}}}, {"resources": {"limits": {GPU: "2"}}}
CLAIM: dict[str, Any] = {"extendedResourceClaimStatus": {}}


@pytest.mark.parametrize(
    ("pods", "count"),
    [
        ([({"containers": [ONE, TWO]}, {}), ({"containers": [ONE]}, CLAIM)], 4),
        ([({"containers": [ONE], "initContainers": [TWO, ONE]}, {}), ({"containers": [{}]}, CLAIM)], 2),
        ([({"containers": [ONE]}, {"phase": "Failed"}), ({"containers": [ONE]}, CLAIM)], 1),
        ([({"containers": [ONE]}, {}), ({"containers": [ONE]}, {**CLAIM, "phase": "Succeeded"})], 0),
        ([({"containers": [ONE]}, {})], 0),
    ],
    ids=["all containers", "init containers", "a pod that ended", "a claim that ended", "no claim"],
)
async def test_what_a_kubelet_counts_for_pods_beside_claims(pods: list[tuple[Any, Any]], count: int) -> None:
    async def ask() -> list[Pod]:
        return [msgspec.convert({"metadata": {"uid": "u"}, "spec": one, "status": said}, Pod) for one, said in pods]

    assert await records.counted(ask, GPU) == count


async def test_a_pod_that_the_checkpoint_alone_names_counts_while_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "ASK_FIRST", 0.0)
    monkeypatch.setattr(records, "ASK_AGAIN", 0.0)
    beliefs, pods, news = KubeletRecords(a="u/c"), {"u"}, asyncio.Event()
    answer: asyncio.Event = asyncio.Event()
    of = Records(cast("Beliefs", beliefs), beliefs.held, Ledger(Path("/none")), Path("/none"))

    async def ask() -> list[Pod]:
        await answer.wait()
        answer.clear()
        return [msgspec.convert({"metadata": {"uid": uid}}, Pod) for uid in pods]

    minding = asyncio.ensure_future(of.mind(ask, news.set))
    assert of.taken(GPU) == Taken(frozenset("a"))
    answer.set()
    await asyncio.sleep(0.01)
    assert of.taken(GPU) == Taken(frozenset("a"))
    pods.clear()
    beliefs.put(a="u/c", b="v/c")  # Another pod came after the question.
    await asyncio.sleep(0.01)
    beliefs.put(a="u/c", b="v/c", c="w/c")
    assert of.taken(GPU) == Taken(frozenset("abc"))
    answer.set()
    await news.wait()
    found = of.taken(GPU)
    assert found is not None
    assert "c" in found.held
    assert "a" not in found.held
    minding.cancel()
    await asyncio.gather(minding, return_exceptions=True)


async def test_that_the_api_server_does_not_say_which_claims_there_are_is_told_once() -> None:
    said = iter([False, False, True, False])

    async def ask() -> Any:
        if not next(said):
            raise KubernetesError("GET claims", 500, "no")

    asked = records.AskedClaims(ask)
    with capture_logs() as told:
        unsaid = [(await asked(), bool(asked.unsaid))[1] for _ in range(4)]
    assert (unsaid, len(told)) == ([True, True, False, True], 2)


async def test_a_pods_end_is_asked_for_again_where_the_api_server_fails_and_not_once_it_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records, "ASK_FIRST", 0.0)
    monkeypatch.setattr(watch, "pause", lambda *_: 0.0)
    beliefs, asked, news = KubeletRecords(a="u/c"), list[bool](), asyncio.Event()
    of = Records(cast("Beliefs", beliefs), beliefs.held, Ledger(Path("/none")), Path("/none"))

    async def ask() -> list[Pod]:
        asked.append(True)
        if len(asked) == 1:
            raise KubernetesError("GET /api/v1/pods", 500, "no")
        return []

    minding = asyncio.ensure_future(of.mind(ask, news.set))
    assert of.taken(GPU) == Taken(frozenset("a"))
    async with asyncio.timeout(30):
        await news.wait()
    assert of.taken(GPU) == Taken(frozenset())
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(asked) == 2
    of._ledger.hand_out(GPU, ["a"], "v1beta1", 10.0)
    assert of.taken(GPU) == Taken(frozenset("a")), "the records still name who had it before"
    minding.cancel()
    await asyncio.gather(minding, return_exceptions=True)


@pytest.mark.parametrize(("first", "comes"), [(0.01, {}), (60.0, {"b": "v/c"})])
async def test_a_pods_end_is_asked_for_until_it_is_known_and_at_once_for_another(
    monkeypatch: pytest.MonkeyPatch, first: float, comes: dict[str, str]
) -> None:
    monkeypatch.setattr(records, "ASK_FIRST", first)
    beliefs, pods, asked, news = KubeletRecords(a="u/c"), {"u"}, asyncio.Event(), asyncio.Event()
    of = Records(cast("Beliefs", beliefs), beliefs.held, Ledger(Path("/none")), Path("/none"))

    async def ask() -> list[Pod]:
        asked.set()
        return [msgspec.convert({"metadata": {"uid": uid}}, Pod) for uid in pods]

    minding = asyncio.ensure_future(of.mind(ask, news.set))
    assert of.taken(GPU) == Taken(frozenset("a"))
    await asked.wait()
    await asyncio.sleep(0)
    pods.clear()  # The API server heard of it.
    beliefs.put(a="u/c", **comes)
    of.taken(GPU)
    async with asyncio.timeout(30):
        await news.wait()
    assert of.taken(GPU) == Taken(frozenset())
    minding.cancel()
    await asyncio.gather(minding, return_exceptions=True)


async def test_a_pod_that_goes_on_not_to_end_is_asked_about_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "ASK_FIRST", 0.01)
    beliefs, asked = KubeletRecords(a="u/c"), list[bool]()
    of = Records(cast("Beliefs", beliefs), beliefs.held, Ledger(Path("/none")), Path("/none"))

    async def ask() -> list[Pod]:
        asked.append(True)
        return [msgspec.convert({"metadata": {"uid": "u"}}, Pod)]

    minding = asyncio.ensure_future(of.mind(ask, lambda: None))
    for _ in range(300):
        of.taken(GPU)
        await asyncio.sleep(0.001)
    assert 3 <= len(asked) <= 8
    minding.cancel()
    await asyncio.gather(minding, return_exceptions=True)


@pytest.mark.parametrize(
    ("source", "age", "known"),
    [("pod-resources", 3600.0, True), ("pod-resources", 0.0, False), ("checkpoint", 3600.0, False)],
)
def test_a_young_process_believes_a_kubelet_that_is_old(tmp_path: Path, source: Any, age: float, known: bool) -> None:
    beliefs, path = KubeletRecords(), tmp_path / "kubelet.sock"
    beliefs.last = Look(View(held={GPU: {"a": "ns/p/c"}}, source=source), 0.0, path.parent.stat().st_mtime + age)
    of = Records(cast("Beliefs", beliefs), lambda _: None, Ledger(tmp_path), path)
    assert of.taken(GPU) is None
    with listening(path):
        assert of.taken(GPU) == (Taken(frozenset("a")) if known else None)


async def test_two_instances_that_decide_at_once_give_a_device_once(tmp_path: Path) -> None:
    one, other, third = (Node(tmp_path) for _ in range(3))
    for each in (one, other, third):
        each.claims["d"] = claim({}, uid="v")
    second = ClaimName("ns", "d", "v")
    answers = dict(zip("uv", await asyncio.gather(one.of.prepare(ASKED), other.of.prepare(second)), strict=True))
    [loser] = [uid for uid, answer in answers.items() if isinstance(answer, Refused)]
    [winner] = {"u", "v"} - {loser}
    assert "gave its devices away in this moment: " in refusal(answers[loser])
    for each in (one, other):
        await each.scribe.close()
    asked = {"u": ASKED, "v": second}
    assert await third.of.prepare(asked[winner]) == answers[winner]
    assert [*third.ledger.claims] == [claims.key(NAME, winner)]
    assert await third.of.unprepare(asked[winner]) is None
    assert isinstance(await third.of.prepare(asked[loser]), tuple)
    await third.scribe.close()


async def test_of_two_that_were_prepared_beside_each_other_each_keeps_what_its_pod_has(node: Node) -> None:
    """As a gateway leaves them that dies before it refuses one."""
    await node.of.prepare(ASKED)
    node.ledger.set_claim(claims.key(NAME, "v"), node.ledger.claims[claims.key(NAME, "u")])
    assert await node.of.prepare(ASKED) == PREPARED
    assert len(node.ledger.claims) == 2


async def test_who_does_not_decide_prepares_nothing(node: Node) -> None:
    node.stock.decides.clear()
    assert "has not made room" in refusal(await node.of.prepare(ASKED))
    assert "has not made room" in refusal(await node.of.unprepare(ASKED))
    assert node.on_disk() == {}


async def test_what_another_instance_gives_back_is_noticed(node: Node, tmp_path: Path) -> None:
    other = Node(tmp_path)
    other.claims["d"] = claim({}, uid="v")
    await node.of.prepare(ASKED)
    waiting = asyncio.ensure_future(other.of.prepare(ClaimName("ns", "d", "v")))
    while other.reads == 0:  # noqa: ASYNC110 - a stand-in tells nobody
        await asyncio.sleep(0.001)
    await node.of.unprepare(ASKED)
    async with asyncio.timeout(10):
        assert isinstance(await waiting, tuple)
    await other.scribe.close()


async def test_a_claim_that_is_asked_for_twice_at_once_is_prepared_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = []

    async def read(asked: ClaimName) -> ResourceClaim:
        prepared.append(node.of.prepared)
        return await node.read(asked)

    monkeypatch.setattr(node.of, "_read", read)
    answers = await asyncio.gather(node.of.prepare(ASKED), node.of.prepare(ASKED))
    assert answers[0] == answers[1] == PREPARED
    assert prepared == [0, 1]
