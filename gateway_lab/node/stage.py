"""A whole genuine node on which something is going to happen: its GPU pods, what they hold, and what became of them.

Three witnesses are asked, none of them ours: the API server, as a client watches it; the kubelet's own records, by its pod-resources
API; and each pod, which says what it was told and whether it can open its GPUs.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gateway.kubelet.records import Records, look
from gateway_lab.node import Node, pods
from gateway_lab.node.api import Api, ApiError
from gateway_lab.node.installed import DEVICES, GPUS, Installed
from gateway_lab.node.pods import Account
from gateway_lab.node.watch import Drop, NodeSeen, PodSeen, Recorder, drops, failed
from gateway_lab.trials.invariants import Holding, given_twice
from gateway_lab.trials.scenarios import RESOURCE, must
from gateway_lab.waiting import until

BARE, DEPLOYED, STATIC = "bare", "deployed", "static"
KINDS = (BARE, DEPLOYED, STATIC)
"""The GPU pods that are always there, one GPU each. The others are free."""
PATIENCE = 60.0
"""Seconds for what should take a few: nothing here is timed, and a busy machine is not a broken promise."""
ENDED_SECONDS = 15.0
"""How long a container may take to end."""
ALIVE_SECONDS = 2.0
"""A container that runs has written a line in this time."""
LOOK_SECONDS = 0.05
"""Between two looks into the kubelet's records, which answer 100 requests a second at most."""
POD = f"/api/v1/namespaces/{pods.NAMESPACE}/pods"
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{pods.NAMESPACE}/deployments"


@dataclass(frozen=True, slots=True)
class Standing:
    """A GPU pod at one moment: what the API server shows, what the kubelet's records give it, what it says itself."""

    seen: PodSeen
    uid: str
    """By which the kubelet knows it; the API server has another one of static pods."""
    devices: frozenset[str]
    account: Account


class Outcome(msgspec.Struct, frozen=True):
    """What became of the node in one run of one scenario: a row of results."""

    scenario: str
    installed: str
    kubelet: str
    """``1.37``, or ``1.36 -> 1.37``."""
    drops: int
    """How often the API server showed fewer GPUs than there are."""
    drop_ms: float
    """How long, in all."""
    gap_ms: float
    """For how long in all the kubelet's own records had fewer, while it could be asked."""
    fates: dict[str, str]
    """What became of each kind of pod, in words that ``fate`` gives."""
    failed: list[str]
    """Pods that failed, as sentences."""
    lost: list[str]
    """What a pod could not open, as sentences."""
    facts: dict[str, str | float] = {}
    """What else the scenario found."""


@dataclass(slots=True)
class Stage:
    """The node and its witnesses. Make one with ``stage``."""

    node: Node
    api: Api
    seen: Recorder
    settle_seconds: float
    """How long to look on after each event for what must not happen: the kubelet tells the API server every 10 s."""
    installed: Installed | None = None
    records: list[NodeSeen] = field(default_factory=list)
    """The history of what is allocatable by the kubelet's own records, as far as they could be asked."""
    last_records: Records = field(default_factory=Records)

    @property
    def plugin(self) -> Installed:
        """The plugin that is on the node."""
        assert self.installed is not None, "install one first"
        return self.installed

    async def install(self, plugin: Installed) -> None:
        """Put a plugin on the node, in the place of the one that is there."""
        if self.installed is not None and self.installed is not plugin:
            await self.installed.stop()
            self.installed = None
        if self.installed is None:
            self.installed = plugin
            await plugin.start()

    async def prepare(self, version: str) -> None:
        """Make everything as it should be before something happens: the kubelet's version, the GPUs, the pods."""
        if self.node.kubelet.pid is None or self.node.kubelet.version != version:
            await self.node.kubelet.restart(version=version)
        await self.served()
        await self._remove_others()
        for _ in range(3):
            for kind in KINDS:
                if not any(pod.phase == "Failed" for pod in self._pods(kind)) and self._pods(kind):
                    continue
                await self._make(kind)
            await self.running()
            await self._ended()
            # A static pod can have failed at this kubelet's start, unheard of until now.
            if (await self.settled()).keys() >= set(KINDS):
                return

    async def served(self) -> None:
        """Wait until the node is ready and the GPUs are allocatable by the kubelet's records, and at the API server."""
        await self.node.ready(PATIENCE)
        await self._until(
            lambda: bool(self.records) and self.records[-1].allocatable[RESOURCE] == GPUS,
            f"{GPUS} GPUs in the kubelet's records",
        )
        await self.seen.until(
            lambda seen: seen.node.allocatable.get(RESOURCE, 0) == GPUS and seen.node.ready == "True",
            f"{GPUS} GPUs at the API server",
            PATIENCE,
        )

    async def running(self) -> None:
        """Wait until the pod of each kind runs, or has failed for good, and those that run have opened their GPUs."""
        await self.settled()
        mark = now()
        await self._until(
            lambda: all(one.account.last > mark for one in self.standing().values()), "the pods to open their GPUs"
        )

    async def _ended(self) -> None:
        """Wait, for a while, until pods and the kubelet's records agree: a static pod that was replaced may not have ended yet."""
        with contextlib.suppress(TimeoutError):
            await until(lambda: not self._mistold(self.standing()), ENDED_SECONDS, every=2 * LOOK_SECONDS)

    async def settled(self) -> dict[str, Standing]:
        """Wait until the pod of each kind runs or has failed for good; give those that run.

        A static pod runs when its log says so, which it doesn't for a moment after the machine stood still.
        """
        found: dict[str, Standing] = {}

        def all_are() -> bool:
            found.clear()
            found.update(self.standing())
            return all(kind in found or self._over(kind) for kind in KINDS)

        await self._until(all_are, f"the pods {', '.join(KINDS)} to run")
        return found

    def _over(self, kind: str) -> bool:
        """Whether the pods of a kind have failed for good; a Deployment goes on until one runs."""
        there = self._pods(kind)
        return kind != DEPLOYED and bool(there) and all(pod.phase == "Failed" for pod in there)

    def standing(self) -> dict[str, Standing]:
        """Look at the pods that run now, by kind."""
        held: dict[str, set[str]] = {}
        for device_id, holder in (self.last_records.held or {}).get(RESOURCE, {}).items():
            held.setdefault(holder, set()).add(device_id)
        found = {}
        for kind in KINDS:
            for pod in self._pods(kind):
                if self._alive(kind, pod):
                    place = pods.folder(self._logs, pod.name, pod.uid)
                    uid = "" if place is None else place.name.rpartition("_")[2]
                    holder = f"{pod.namespace}/{pod.name}/{pods.CONTAINER}"
                    said = pods.account(pods.words(self._logs, pod.name, pod.uid))
                    found[kind] = Standing(pod, uid, frozenset(held.get(holder, ())), said)
        return found

    def _alive(self, kind: str, pod: PodSeen) -> bool:
        """Whether a pod runs now, which of a static one its log tells: the API server may hear of it a minute later."""
        if kind != STATIC:
            return pod.runs and not pod.ending
        words = pods.words(self._logs, pod.name, pod.uid)
        return bool(words) and words[-1].time > now(-ALIVE_SECONDS)

    @property
    def _logs(self) -> Path:
        return self.node.root / "var/log/pods"

    async def observe(
        self,
        scenario: str,
        happens: Callable[[], Awaitable[Mapping[str, str | float] | None]],
        kubelet: str = "",
    ) -> Outcome:
        """Let something happen, wait until the node is healthy again, look on for a while, and tell what became of it.

        What ``happens`` returns are further facts; ``kubelet`` is how its version is to be called, where it changes.
        """
        before = await self.settled()
        must([f"pod {kind} wasn't there before" for kind in KINDS if kind not in before])
        began, said_since = time.monotonic_ns(), now()
        facts = await happens() or {}
        await self.served()
        await self.running()
        await asyncio.sleep(self.settle_seconds)
        await self.running()
        await self._ended()
        after = await self.settled()
        at_api = drops(self.seen.nodes, RESOURCE, GPUS, began)
        over = failed(self.seen.history, began)
        fates = {kind: self._fate(one, after.get(kind)) for kind, one in before.items()}
        if any(sentence.startswith(f"pod {STATIC}") for sentence in over) and not fates[STATIC].startswith("replaced"):
            fates[STATIC] = "failed"  # what its kubelet had not ended yet was still seen to run
        return Outcome(
            scenario,
            self.plugin.kind,
            kubelet or str(self.node.kubelet.version),
            len(at_api),
            _ms(at_api),
            _ms(drops(self.records, RESOURCE, GPUS, began)),
            fates,
            over,
            [*self._lost(after, said_since), *self._mistold(after)],
            dict(facts),
        )

    # -- how pods fared ------------------------------------------------------------------------------------------------

    def _fate(self, before: Standing, after: Standing | None) -> str:
        if after is None:
            return "failed"
        same = "the same GPU" if before.devices == after.devices else "another GPU"
        if after.uid != before.uid:
            return f"replaced, {same}"
        if after.account.began != before.account.began:
            return f"restarted, {same}"
        return "kept" if before.devices == after.devices else f"kept, {same}"

    def _lost(self, after: Mapping[str, Standing], since: str) -> list[str]:
        return [
            f"pod {kind} could not open {path} for a while"
            for kind, one in after.items()
            for path in sorted(set(pods.account(pods.words(self._logs, one.seen.name, one.seen.uid), since).lost))
        ]

    def _mistold(self, after: Mapping[str, Standing]) -> list[str]:
        """Compare what pods say with the kubelet's records."""
        found = [
            f"pod {kind} holds {sorted(one.devices)} by the kubelet's records, was told {sorted(one.account.told)} and has "
            f"{sorted(one.account.nodes)}"
            for kind, one in after.items()
            if one.devices != one.account.told or {DEVICES.get(uuid, "") for uuid in one.devices} != one.account.nodes
        ]
        held = [Holding(kind, pods.CONTAINER, RESOURCE, tuple(one.devices)) for kind, one in after.items()]
        return found + given_twice(held)

    # -- the pods ------------------------------------------------------------------------------------------------------

    def _pods(self, kind: str) -> list[PodSeen]:
        return self.seen.named(kind)

    async def _make(self, kind: str) -> None:
        """Make the pod of a kind anew."""
        await self.remove(kind)
        if kind == BARE:
            await self.api.create(POD, pods.gpu_pod(kind))
        elif kind == DEPLOYED:
            await self.api.create(DEPLOYMENTS, pods.deployment(kind, 1))
        else:
            pods.write_static(self.node.pods, kind)

    async def remove(self, kind: str) -> None:
        """End the pods of a kind, and what makes them."""
        (self.node.pods / f"{kind}.json").unlink(missing_ok=True)
        await self.api.delete(f"{DEPLOYMENTS}/{kind}")
        if kind != STATIC:  # the kubelet removes what it mirrors
            for pod in self._pods(kind):
                await self.api.delete(f"{POD}/{pod.name}", grace_seconds=0 if pod.phase == "Failed" else None)
        await self.seen.until(lambda _: not self._pods(kind), f"the pods {kind} to be gone", PATIENCE)

    async def _remove_others(self) -> None:
        """Remove pods that a scenario has left, and those that failed beside one that runs."""
        for pod in list(self.seen.pods.values()):
            known = {pod.name, pod.app} & {*KINDS}
            if pod.namespace == pods.NAMESPACE and (not known or pod.phase == "Failed") and STATIC not in known:
                await self.api.delete(f"{POD}/{pod.name}", grace_seconds=0)

    # -- waiting -------------------------------------------------------------------------------------------------------

    async def _until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait for what no watch tells: records and logs."""
        try:
            await until(holds, PATIENCE, every=2 * LOOK_SECONDS)
        except TimeoutError:
            must([f"expected {what} within {PATIENCE:g} s; {self.told()}"])

    def told(self) -> str:
        """Say how things stand, for an error's end."""
        accounts = {kind: (sorted(one.devices), one.account) for kind, one in self.standing().items()}
        return f"the kubelet's records: {self.records[-1:]}; the API server: {self.seen.node}; the pods: {accounts}"

    async def look_on(self) -> None:
        """Look into the kubelet's records for ever."""
        folder: Path = self.node.plugins
        while True:
            records = await look(
                folder.parent / "pod-resources" / "kubelet.sock", folder / "kubelet_internal_checkpoint"
            )
            if records.allocatable is not None and records.source == "pod-resources":
                self.last_records = records
                counts = {RESOURCE: len(records.allocatable.get(RESOURCE, ()))}
                if not self.records or self.records[-1].allocatable != counts:
                    self.records.append(NodeSeen(time.monotonic_ns(), counts, counts, "", ""))
            await asyncio.sleep(LOOK_SECONDS)


@contextlib.asynccontextmanager
async def stage(node: Node, settle_seconds: float) -> AsyncIterator[Stage]:
    """Take the node that this process is on, with devices for its GPUs, and look on as long as this lasts."""
    for path in DEVICES.values():
        node.make_device(path)
    api = Api.of(node)
    async with Recorder(api) as seen:
        made = Stage(node, api, seen, settle_seconds)
        looking = asyncio.create_task(made.look_on(), name="look into the kubelet's records")
        try:
            yield made
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking
            if made.installed is not None:
                with contextlib.suppress(ApiError):
                    await made.installed.stop()


def now(later: float = 0) -> str:
    """Give the time as containers' logs have it, or that of so many seconds later."""
    return (dt.datetime.now(dt.UTC) + dt.timedelta(seconds=later)).strftime("%Y-%m-%dT%H:%M:%S.%f")


def _ms(found: Sequence[Drop]) -> float:
    return round(sum(one.ms for one in found), 1)
