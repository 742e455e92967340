"""Whether a device that a container was given is given again: no kubelet's forgetting puts it into two pods."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc
import pytest
from msgspec.structs import replace

from devices.generic import GenericSource
from devices.model import ContainerAnswer, Device, Fault, PreferredRequest, RefusedError
from devices.policy import Policy
from gateway.configuration.settings import Settings
from gateway.daemon import Gateway
from gateway.kubelet.beliefs import Look
from gateway.kubelet.drift import steer
from gateway.kubelet.identity import KubeletId
from gateway.kubelet.view import View
from gateway.lab.kubelets.behaviour import behaviour
from gateway.lab.kubelets.podresources import PodResources
from gateway.lab.kubelets.records import DeviceRecords
from gateway.lab.waiting import until
from gateway.memory import again
from gateway.memory.again import MOST_PODS, RECORDED_WITHIN
from gateway.memory.holdings import Holdings, Memory
from gateway.memory.ledger import Ledger
from gateway.memory.rows import HandedOut
from gateway.memory.scribe import Scribe
from gateway.registration.events import Phase
from gateway.registration.registrar import Resource

GPU = "example.com/gpu"
AT = 1000.0


def look(held: Mapping[str, str], after: float, source: str = "pod-resources") -> Look:
    """A look so long after the device was given."""
    return Look(View({GPU: held}, {}, source=source), 0.0, AT + after)  # type: ignore[arg-type]  # one of its words


@pytest.mark.parametrize(
    ("holder", "seen", "pod"),
    [
        pytest.param("", None, "", id="nobody looked"),
        pytest.param("ns/pod/main", None, "ns/pod", id="a gateway before this one looked"),
        pytest.param("uid/main", None, "", id="it found the pod's UID"),
        pytest.param("", look({}, -1), "", id="looked before it was given"),
        pytest.param("", look({"a": "ns/before/main"}, -1), "", id="who had it before is not who has it"),
        pytest.param("", look({"a": "ns/pod/main"}, 0.1), "ns/pod", id="looked since"),
        pytest.param("ns/pod/main", look({}, RECORDED_WITHIN), None, id="nobody holds it"),
        pytest.param("", look({}, 1), "", id="the kubelet may not have noted it"),
        pytest.param("", look({"a": "uid/main"}, 9, "checkpoint"), "", id="only its checkpoint could be read"),
        pytest.param("ns/pod/main", look({}, 9, "checkpoint"), "ns/pod", id="a checkpoint is no proof"),
    ],
)
def test_who_may_hold_what_was_given(holder: str, seen: Look | None, pod: str | None) -> None:
    found = again.holders(GPU, {"a": HandedOut("v1beta1", AT, holder)}, seen)
    assert found == ({} if pod is None else {"a": pod})


@pytest.mark.parametrize(
    ("offered", "must", "after", "counted"),
    [
        pytest.param("b", "", RECORDED_WITHIN, True, id="it isn't offered"),
        pytest.param("ab", "", RECORDED_WITHIN, False, id="it is: the kubelet forgot it, or its pod has ended"),
        pytest.param("b", "a", RECORDED_WITHIN, False, id="its own pod asks again"),
        pytest.param("b", "", RECORDED_WITHIN - 0.1, False, id="the kubelet may not have noted it"),
        pytest.param("c", "", RECORDED_WITHIN, False, id="only another NUMA node's are offered"),
        pytest.param("", "", RECORDED_WITHIN, False, id="nothing is offered"),
    ],
)
def test_what_the_kubelet_counts_as_in_use(offered: str, must: str, after: float, counted: bool) -> None:
    request = PreferredRequest((*offered,), (*must,), 1)
    numa = {"a": (0,), "b": (0,), "c": (1,)}
    assert again.counted({"a": AT}, request, numa, AT + after) == ({"a": AT} if counted else {})


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        pytest.param(["n/p", "n/q", "n/p"], {"n/p", "n/q"}, id="each once"),
        pytest.param(["n/p", ""], set(), id="one has no name"),
        pytest.param([f"n/{number}" for number in range(MOST_PODS)], {f"n/{number}" for number in range(MOST_PODS)}, id="as many as a kubelet answers"),
        pytest.param([f"n/{number}" for number in range(MOST_PODS + 1)], set(), id="too many"),
    ],
)  # fmt: skip
def test_which_pods_are_asked_about(given: Iterable[str], asked: set[str]) -> None:
    assert again.pods(given) == asked


@pytest.mark.parametrize(
    ("held", "fault"),
    [
        pytest.param({}, None, id="free"),
        pytest.param({"a": "ns/pod/main"}, Fault.FAILED_PRECONDITION, id="held"),
        pytest.param(None, Fault.UNAVAILABLE, id="nobody says"),
    ],
)
def test_what_is_refused(held: Mapping[str, str] | None, fault: Fault | None) -> None:
    refused = again.refusal(GPU, held)
    assert (refused.fault if refused is not None else None) is fault
    assert not held or "ns/pod/main" in str(refused)


class Kubelet(PodResources):
    """A kubelet whose pod p holds a and d, and nobody b. It notes what it is asked."""

    asked: Sequence[str] = ()
    silent = False

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        self.asked = (*self.asked, handler_call_details.method.rpartition("/")[2])
        return None if self.silent else super().service(handler_call_details)


@asynccontextmanager
async def kubelet(folder: Path, version: str = "1.37") -> AsyncIterator[Kubelet]:
    records = DeviceRecords(behaviour(version))
    records.enter_list(GPU, {}, [Device(one) for one in "abcd"])
    records.activate("p", "main", {GPU: 2}, init=False)
    records.allot("p", "main", GPU, "ad", ContainerAnswer())
    (folder / "device-plugins").mkdir()
    server = Kubelet(behaviour(version), folder / "device-plugins", records, lambda _line: None)
    await server.start()
    yield server
    await server.stop()


@asynccontextmanager
async def remembering(folder: Path, server: PodResources, **holders: str) -> AsyncIterator[tuple[Memory, Ledger]]:
    """Remember that these devices were given, and to whom."""
    ledger = Ledger(folder)
    ledger.hand_out(GPU, holders, "v1beta1", AT)
    ledger.rebuild_handed_out(GPU, holders, AT + 1)
    beliefs = SimpleNamespace(
        asked=None, pod_resources=server.socket_path, last=None, avoid=lambda _: (), allocated=lambda *_: None
    )
    holdings = cast(
        "Holdings", SimpleNamespace(ledger=ledger, beliefs=beliefs, scribe=Scribe(ledger), note=lambda _: None)
    )
    yield Memory(holdings, GPU), ledger


P, GONE = "default/p/main", "default/gone/main"


@pytest.mark.parametrize(
    ("version", "holders", "asks", "asked", "fault"),
    [
        pytest.param("1.37", {}, "a", (), None, id="never given"),
        pytest.param("1.37", {"a": P}, "b", (), None, id="another one was given"),
        pytest.param("1.37", {"a": P}, "a", ("Get",), Fault.FAILED_PRECONDITION, id="its pod has it"),
        pytest.param("1.37", {"b": GONE}, "b", ("Get",), None, id="its pod is gone"),
        pytest.param("1.37", {"b": P}, "b", ("Get",), None, id="its pod has another one"),
        pytest.param("1.37", {"a": ""}, "a", ("List",), Fault.FAILED_PRECONDITION, id="a pod without a name has it"),
        pytest.param("1.37", {"b": ""}, "b", ("List",), None, id="a pod without a name had it"),
        pytest.param("1.37", {"a": P, "b": ""}, "ba", ("List",), Fault.FAILED_PRECONDITION, id="one of two"),
        pytest.param("1.28", {"a": P}, "a", ("Get", "List"), Fault.FAILED_PRECONDITION, id="Get is off"),
        pytest.param("1.20", {"b": P}, "b", ("Get", "List"), None, id="there is no Get"),
        pytest.param("1.15", {"a": P}, "a", ("Get", "List", "List"), Fault.FAILED_PRECONDITION, id="there is no v1"),
        pytest.param("1.14", {"a": P}, "a", (), None, id="the kubelet tells nobody"),
    ],
)
async def test_what_was_given_is_asked_about_before_it_is_given_again(
    folder: Path, version: str, holders: Mapping[str, str], asks: str, asked: tuple[str, ...], fault: Fault | None
) -> None:
    async with kubelet(folder, version) as server, remembering(folder, server, **holders) as (memory, _):
        found = None
        try:
            await memory.require_free(asks)
        except RefusedError as refused:
            found = refused.fault
        assert (found, server.asked) == (fault, asked)


async def test_a_kubelet_that_listens_and_does_not_answer_has_nothing_given_again(folder: Path) -> None:
    async with kubelet(folder) as server, remembering(folder, server, a=P) as (memory, _):
        server.silent = True
        with pytest.raises(RefusedError, match="doesn't answer") as refused:
            await memory.require_free("a")
        assert refused.value.fault is Fault.UNAVAILABLE


async def test_what_is_free_is_asked_about_once(folder: Path) -> None:
    async with kubelet(folder) as server, remembering(folder, server, a=P, b="") as (memory, ledger):
        await memory.require_free("b")
        await memory.require_free("b")
        assert len(server.asked) == 1
        ledger.hand_out(GPU, "b", "v1beta1", AT + 2)
        await memory.require_free("b")
        assert len(server.asked) == 2


async def test_what_is_handed_out_is_written_soon(folder: Path) -> None:
    async with kubelet(folder) as server, remembering(folder, server) as (memory, ledger):
        memory.hand_out([("v1beta1", ("a",)), ("v1beta1", ("b",))])
        await until(lambda: not ledger.pending, 10)
        written = Ledger(folder)
        written.load()
        assert sorted(written.handed_out(GPU)) == ["a", "b"]


async def test_a_look_ends_what_was_handed_out_of_what_is_served(folder: Path) -> None:
    """And only one that saw all that is served shows what a kubelet remembers."""
    gateway = Gateway(Settings(socket_dir=folder, state_dir=folder), GenericSource(Policy()))
    gateway.presence.kubelet, gateway.presence.since = KubeletId(1, 2, 3), 0.0
    served, waits = (Resource(gateway.around, name, "") for name in ("a.b/served", "a.b/waits"))
    gateway._resources.update({one.name: one for one in (served, waits)})
    for one in (served, waits):
        gateway.ledger.hand_out(one.name, ["x"], "v1beta1", AT)
    gateway.beliefs.last = Look(View({}, {}, source="pod-resources"), 1.0, AT + 10)
    for serving, left, kubelet in (([served], ["x"], ""), ([served, waits], [], gateway.holdings.kubelet_named())):
        for one in serving:
            one.state = replace(one.state, phase=Phase.SERVING, stream=1)
        gateway.holdings.looked(gateway.beliefs.last)
        assert [[*gateway.ledger.handed_out(one.name)] for one in (served, waits)] == [[], left]
        assert gateway.ledger.kubelet == kubelet
    for one in (served, waits):
        await one.close()
    await gateway._tasks.close()


@pytest.mark.parametrize(
    ("request_", "chosen", "asked"),
    [
        pytest.param(PreferredRequest(("b", "c"), (), 1), "c", 0, id="never given"),
        pytest.param(PreferredRequest(("a", "b", "c"), (), 1), "c", 0, id="what is asked about is what would be given"),
        pytest.param(PreferredRequest(("a", "b"), (), 1), "b", 1, id="free again"),
        pytest.param(PreferredRequest(("b", "a"), (), 1), "b", 2, id="held"),
        pytest.param(PreferredRequest(("c", "d", "a"), (), 1), "c", 2, id="and the next one, too"),
        pytest.param(PreferredRequest(("a",), (), 1), "a", 1, id="there is no other one"),
        pytest.param(PreferredRequest(("b", "a"), (), 2), "ab", 2, id="it takes all of them"),
        pytest.param(PreferredRequest(("b", "a"), ("a",), 1), "a", 0, id="its own pod's"),
    ],
)
async def test_what_is_held_though_the_kubelet_takes_it_for_free_is_given_last(
    folder: Path, request_: PreferredRequest, chosen: str, asked: int
) -> None:
    async def last(avoid: Sequence[str]) -> Sequence[str]:
        steered = steer(request_, avoid)
        return (*steered.must_include, *steered.available)[-request_.size :]

    async with kubelet(folder) as server, remembering(folder, server, a=P, b=GONE, d=P) as (memory, _):
        assert sorted(await memory.chosen(request_, last)) == sorted(chosen)
        assert len(server.asked) == asked
