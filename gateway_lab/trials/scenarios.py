"""What can happen to a node, each thing written once: a promise, the kubelets it holds for, and a script that proves it.

A scenario runs on a ``Node``: real processes (a gateway; kubelets, emulated or genuine) on real socket directories. It is
told the kubelet's version as a string and nothing else, and what it expects of a version it takes from this module's
tables, never from the emulated kubelets, which are on trial too. It raises ``BrokenPromiseError`` with sentences for a
person, or the error of the handle that failed it.

Nothing here is timed and nothing sleeps: scenarios wait for the kubelet's records, or for a line in the gateway's log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from adapters import checkpoint
from adapters.dialect import Fidelity, MalformedError
from adapters.levels import minor_version
from adapters.registry import DIALECTS, by_name
from devices.gpu import naming, sharing
from devices.gpu.backend import Sight
from devices.gpu.model import GPU
from devices.gpu.simulated import profile
from devices.gpu.simulated.backend import VENDORS
from devices.model import Field
from devices.policy import Policy
from devices.source import Listing
from gateway.wires.unix import listens
from gateway_lab.gatewayproc import GatewayProcess, gateway_command
from gateway_lab.kubelets.kubelet import Admission, Demand, Faults, Kubelet, KubeletError
from gateway_lab.trials.invariants import Holding, broken, holdings, registered, short, unannounced
from gateway_lab.waiting import until

if TYPE_CHECKING:
    from gateway_lab.wire.tap import Tap

RESOURCE = "nvidia.com/gpu"
SECOND_RESOURCE = "amd.com/gpu"
VISIBLE = {RESOURCE: "NVIDIA_VISIBLE_DEVICES", SECOND_RESOURCE: "AMD_VISIBLE_DEVICES"}
"""The environment variable that the vendor's container runtime reads."""
FIRST_BACKOFF, LONGEST_BACKOFF = 0.2, 5.0
"""Seconds before a device plugin that ended is started again. (A kubelet's own are 10 s, doubling to 5 min.)"""
PATIENCE: float = 30
"""Seconds for what should take milliseconds: nothing here is timed, and a busy machine is not a broken promise."""
VERSIONS = ("1.8", "1.9", "1.10", "1.12", "1.20", "1.28", "1.32", "1.37")
"""One kubelet of each behaviour class, and of each level of the dialects."""


class BrokenPromiseError(Exception):
    """What a scenario promises did not hold. Each line of the message is one thing that was found."""


# What is known of kubelets, by version.


def dialect(version: str) -> str:
    """Give the one version string that a kubelet's Register accepts."""
    minor = minor_version(version)
    return next(one.name for one in DIALECTS if one.kubelets.low <= minor <= (one.kubelets.high or minor))


def counted(version: str, accepted_before: str) -> int:
    """Say how many Registers a kubelet counts when a gateway negotiates with it from the start.

    Kubelets count every Register for a service that they have, also those that they refuse; the two alpha APIs share
    theirs. A gateway offers what was accepted last, then the newest first; 1.9 names what it speaks, 1.8 doesn't.
    """
    if dialect(version) == "0.1":
        return 1 if accepted_before == "0.1" else 2
    return 2 if dialect(version) == "v1alpha2" and accepted_before == "0.1" else 1


_CHECKPOINTS = ((8, 8), (9, 10), (11, 19), (20, 99))
"""First and last minor version that write one format of checkpoint. (Run on 1.8 to 1.37.)"""


def forgets(old: str, new: str) -> str | None:
    """Say why kubelet ``new`` forgets the pods of ``old`` on the same node; None where it knows them."""
    before, after = minor_version(old), minor_version(new)
    formats = [next(first for first, last in _CHECKPOINTS if first <= one <= last) for one in (before, after)]
    if formats[0] == formats[1] or (formats[0] == 11 and 20 <= after <= 30):
        return None
    return f"kubelet {new} can't read the checkpoint of {old}: it starts with empty records"


# The node.


@dataclass(slots=True)
class Node:
    """One node: directories, at most one kubelet, gateways, and what its pods hold. Make one with ``node``."""

    root: Path
    genuine: Callable[[str], Path | None]
    """Where the genuine kubelet of a version is; None for an emulated one."""
    gpus: Mapping[str, int]
    """How many simulated GPUs there are, by resource name."""
    demands: Sequence[Demand]
    """The pods that scenarios start."""
    watch_seconds: float
    """How long to watch for what must not happen."""
    tap: Tap | None = None
    api: str = "auto"
    """What gateways are told with ``--api``."""
    options: Sequence[str] = ()
    """What else they are told."""
    plugin: Sequence[str] = ()
    """The command of another device plugin that stands in the gateway's place; see ``plugin_command``."""
    patience: float = PATIENCE
    """How long to wait for what must come."""
    behind: str = ""
    """The API of a plugin that has the GPUs, behind gateways that only bridge; empty: the gateways have them."""
    exits: int = 0
    """How often the plugin ended by itself, and was started again."""
    ended: tuple[int, str] | None = None
    """The exit status of the plugin when it last ended by itself, and the end of its log."""
    kubelet_dir: Path = field(init=False)
    """The socket directory of the kubelet; the gateway's too, unless there is a tap between them."""
    socket_dir: Path = field(init=False)
    """The socket directory of the gateway."""
    kubelet: Kubelet | None = None
    gateways: list[GatewayProcess] = field(default_factory=list)
    pods: dict[str, Demand] = field(default_factory=dict)
    """The active pods."""
    held: tuple[Holding, ...] = ()
    """What the pods got, as the kubelet's records said when they came."""
    ill: Mapping[str, Collection[int]] = field(default_factory=dict)
    """Indices of the unhealthy GPUs, by resource name; those that are gone too."""
    gone: Mapping[str, Collection[int]] = field(default_factory=dict)
    """Indices of the GPUs that the hardware has no more, by resource name."""
    unlisted: Collection[str] = ()
    """Those of them that the plugin behind says nothing of; who bridges goes on listing what a pod holds."""
    traits: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Further lines of the profile, by resource name."""
    policy: Policy = Policy()
    """What their configuration makes of the GPUs, where ``options`` name one."""
    accepted: str = ""
    """The dialect that a kubelet of this node accepted last."""
    bridged: GatewayProcess | None = None
    """The plugin that is behind."""
    change: Sequence[str] = ()
    """The command that makes one of the devices of another plugin unhealthy; like ``plugin``."""
    _keepers: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.socket_dir = self.root / "device-plugins"
        self.kubelet_dir = self.root / "kubelet" if self.tap else self.socket_dir

    # The hardware.

    @property
    def profile_path(self) -> Path:
        """The gateway's own copy of the profile; it watches this file."""
        return self.root / "profile.yaml"

    def describe(self, traits: Mapping[str, Sequence[str]]) -> None:
        """Add lines to the profile, such as ``numa: [0, 1]``, by resource name."""
        self.traits = traits
        self.set_health(self.ill)

    def set_health(self, ill: Mapping[str, Collection[int]], gone: Mapping[str, Collection[int]] | None = None) -> None:
        """Make exactly these GPUs unhealthy, and exactly those vanish (indices by resource name)."""
        gone = gone or {}
        self.gone = gone
        self.ill = {name: {*ill.get(name, ()), *gone.get(name, ())} for name in self.gpus}
        text = ["resources:"]
        for resource, ids in device_ids(self.gpus).items():
            there = [uuid for index, uuid in enumerate(ids) if index not in gone.get(resource, ())]
            count = len(ids) if len(there) == len(ids) else "[" + ", ".join(f"{{uuid: {uuid}}}" for uuid in there) + "]"
            text += [f"  {resource}:", f"    gpus: {count}", *(f"    {line}" for line in self.traits.get(resource, ()))]
            sick = sorted({*ill.get(resource, ())} - {*gone.get(resource, ())})
            if reasons := ", ".join(f"{ids[index]}: the scenario made it unhealthy" for index in sick):
                text.append(f"    unhealthy: {{{reasons}}}")
        fresh = self.profile_path.with_suffix(".new")
        fresh.write_text("\n".join(text) + "\n")
        fresh.replace(self.profile_path)

    @property
    def resource(self) -> str:
        """The resource that pods ask for where a scenario needs only one."""
        return next(iter(self.gpus))

    def healthy(self, resource: str = "") -> int:
        """How many devices of a resource are well."""
        resource = resource or self.resource
        return self.gpus[resource] - len(self.ill.get(resource, ()))

    # Its processes.

    @property
    def gateway(self) -> GatewayProcess:
        """The gateway that was started last."""
        return self.gateways[-1]

    async def start_gateway(self, api: str = "") -> GatewayProcess:
        """Start a gateway, beside those that run; ``api`` where it isn't the node's."""
        if self.behind:
            await self.start_bridged()
        options, profile_path = (*self.options, *self.bridging), None if self.behind else self.profile_path
        command = (
            plugin_command(self.plugin, self.socket_dir, self.root / "state")
            if self.plugin
            else gateway_command(self.socket_dir, self.root / "state", profile_path, api or self.api, options)
        )
        process = await GatewayProcess.launch(command)
        self.gateways.append(process)
        if self.plugin:
            self._keepers.append(asyncio.create_task(self._keep(len(self.gateways) - 1, command)))
        return process

    @property
    def bridge_dir(self) -> Path:
        """Where plugins register with a gateway that bridges."""
        return self.root / "b"

    @property
    def behind_dir(self) -> Path:
        """What the plugin behind remembers."""
        return self.root / "behind"

    @property
    def bridging(self) -> Sequence[str]:
        """What a gateway is told that only bridges; nothing where it has the GPUs."""
        return ("--backend", "none", "--bridge", str(self.bridge_dir)) if self.behind else ()

    async def start_bridged(self) -> None:
        """Start the plugin that is behind, unless it runs: a gateway is as good a plugin as any, of each API."""
        if self.bridged is None or not self.bridged.alive:
            folder = self.bridge_dir / "device-plugins"
            folder.mkdir(parents=True, mode=0o750, exist_ok=True)
            command = gateway_command(folder, self.behind_dir, self.profile_path, self.behind, self.options)
            self.bridged = await GatewayProcess.launch(command)

    async def _keep(self, at: int, command: Sequence[str]) -> None:
        """Start a plugin that ends by itself again, with a growing wait, as a DaemonSet does; ours is not to end.

        Containers are started by a kubelet, so it waits for one that listens, too.
        """
        wait = FIRST_BACKOFF
        while True:
            await self.gateways[at].exited()
            if self.gateways[at].told_to_end:
                return
            self.exits += 1
            self.ended = (await self.gateways[at].wait(), self.gateways[at].log(8))
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_BACKOFF)
            await until(partial(listens, self.kubelet_dir / "kubelet.sock"))
            if self.gateways[at].told_to_end:
                return
            self.gateways[at] = await GatewayProcess.launch(command)

    async def gateway_says(self, event: str) -> None:
        """Wait for a line of the gateway's log; another plugin's can't be read, so it gets a second."""
        if self.plugin:
            await asyncio.sleep(1)
        else:
            await self.gateway.wait_for(event)

    async def gateway_begun(self) -> None:
        """Wait until the gateway is done with its start, with or without a kubelet."""
        if self.plugin:
            await asyncio.sleep(1)
        else:
            await self.gateway.begun()

    async def start_kubelet(
        self,
        version: str,
        *,
        gates: str = "",
        numa: Sequence[int] = (),
        topology: str = "",
        faults: Faults | None = None,
    ) -> Kubelet:
        """Start a kubelet that knows the active pods; one that runs is ended first, as an upgrade ends it.

        ``gates``, ``numa`` and ``topology`` as for ``Kubelet.start``; ``faults`` are there from the start (emulated kubelets only).
        """
        if self.kubelet is not None:
            await self.written()
            await self.kubelet.terminate()
            await self.kubelet.close()
        self.kubelet = await Kubelet.launch(version, self.kubelet_dir, genuine=self.genuine(version))
        if faults is not None:
            await self.kubelet.fault(faults)
        await self.kubelet.start([*self.pods.values()], gates=gates, numa=numa, topology=topology)
        return self.kubelet

    async def written(self, *, lists: bool = True) -> bool:
        """Let kubelet 1.9 write down what it knows, for 5 s at most, before it is ended; tell whether it did.

        It writes its checkpoint in place, after its records change: one that is ended in between has lost its pods (run),
        and that is no plugin's fault. ``lists``: what pods hold isn't enough, the list of devices must be there, too.
        """
        kubelet = self.kubelet
        if kubelet is None or minor_version(kubelet.version) != 9:
            return True
        held = {device_id for one in self.held for device_id in one.device_ids}
        with contextlib.suppress(TimeoutError):
            await until(lambda: not kubelet.alive or self._is_written(held, lists=lists), 5)
        return self._is_written(held, lists=lists)

    def _is_written(self, held: Collection[str], *, lists: bool) -> bool:
        try:
            found = checkpoint.read((self.kubelet_dir / "kubelet_internal_checkpoint").read_bytes())
        except (OSError, MalformedError):
            return False
        names = {device_id for one in found.held for device_id in one.device_ids}
        listed = {name: len(found.registered.get(name, ())) for name in self.gpus if lists}
        return names >= {*held} and all(self.healthy(name) == count for name, count in listed.items())

    @property
    def the_kubelet(self) -> Kubelet:
        """The kubelet that runs."""
        assert self.kubelet is not None, "the scenario must start a kubelet first"
        return self.kubelet

    async def close(self) -> None:
        """End every process."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        async with AsyncExitStack() as stack:
            for process in (*self.gateways, *([self.bridged] if self.bridged is not None else [])):
                stack.push_async_callback(process.kill)
            if self.kubelet is not None:
                stack.push_async_callback(self.kubelet.close)

    # What pods do, and what must hold.

    async def served(self) -> None:
        """Wait until the kubelet's records show what the hardware is, and check the capacity too.

        What is checked is what was seen then: a gateway that registers anew a moment later has nothing allocatable for some
        milliseconds (kubelets from 1.12 to 1.22, each time when a rival ends).
        """
        seen = [await self.the_kubelet.wait(resource, self.healthy(resource), self.patience) for resource in self.gpus]
        totals = seen[-1].totals
        # Before 1.10 there is no allocatable: unhealthy devices are not in the capacity either.
        alpha = minor_version(self.the_kubelet.version) < 10
        dropped = self.dropped()
        capacity = {
            name: self.healthy(name) if alpha else count - len(dropped.intersection(device_ids(self.gpus)[name]))
            for name, count in self.gpus.items()
        }
        must(short({name: self.healthy(name) for name in self.gpus}, totals.allocatable, "allocatable"))
        must(short(capacity, totals.capacity, "capacity"))
        self.accepted = dialect(self.the_kubelet.version)

    def dropped(self) -> set[str]:
        """Give the devices that the plugin behind says nothing of, and no pod holds."""
        return {*self.unlisted} - {one for held in self.held for one in held.device_ids}

    async def unserved(self) -> None:
        """Wait until the kubelet's records show no device."""
        for resource in self.gpus:
            await self.the_kubelet.wait(resource, 0, self.patience)

    async def admit(self, demand: Demand) -> Admission:
        """Run a container of a pod; it must get what it asked for, and must be told exactly that."""
        admission = await self.the_kubelet.admit(
            demand.pod, demand.resource, demand.count, container=demand.container, init=demand.init
        )
        got = admission.devices.get(demand.resource, ())
        must([] if len(got) == demand.count else [f"pod {demand.pod} asked for {demand.count}, it got {len(got)}"])
        must([] if self.plugin else mistold(demand.pod, demand.resource, got, admission))
        self.pods[demand.pod] = demand
        self.held = (*self.held, Holding(demand.pod, demand.container, demand.resource, got))
        await self.check()
        return admission

    async def run_pods(self) -> None:
        """Run all pods of ``demands``."""
        for demand in self.demands:
            await self.admit(demand)

    async def refuse(self, demand: Demand, because: str = "") -> None:
        """Ask for a pod that must fail at admission, with the words ``because`` in the error, and leave no trace."""
        try:
            admission = await self.the_kubelet.admit(demand.pod, demand.resource, demand.count)
        except KubeletError as error:
            must([] if error.stage == "allocate" else [f"expected a refusal at admission: {error}"])
            must([] if because in error.message else [f"expected a refusal with {because!r}: {error}"])
        else:
            must([f"pod {demand.pod} must not be admitted, it got {dict(admission.devices)}"])
        await self.the_kubelet.remove(demand.pod)

    async def drain(self) -> None:
        """End all pods."""
        for pod in self.pods:
            await self.the_kubelet.remove(pod)
        self.pods.clear()
        self.held = ()

    async def check(self) -> None:
        """Check the promises to pods against the kubelet's records."""
        now = [one for one in holdings(await self.the_kubelet.pods()) if one.pod in self.pods]
        must([*broken(self.held, now, ()), *([] if self.plugin else unannounced(now, self.announced()))])

    async def restart_containers(self) -> None:
        """Start each pod's container again: it must be told the devices it had."""
        for one in self.held:
            again = await self.the_kubelet.restart_container(one.pod, one.container)
            must([] if self.plugin else mistold(one.pod, one.resource, one.device_ids, again))
        await self.check()

    async def readmit(self) -> None:
        """Admit each pod again, as a kubelet does after its own restart: it must keep its devices."""
        for one in self.held:
            again = await self.the_kubelet.admit(one.pod, container=one.container)
            must([] if self.plugin else mistold(one.pod, one.resource, one.device_ids, again))
        await self.check()

    def announced(self) -> dict[str, tuple[str, ...]]:
        """The device IDs that are on the gateway's list, by resource name: those that are gone too."""
        parsed = profile.parse(self.profile_path.read_bytes(), self.profile_path.name)
        listings = offered(parsed, self.policy)
        ids = {resource: tuple(device.id for device in listing.devices) for resource, listing in listings.items()}
        for resource, gone in self.gone.items():
            ids[resource] = (*ids[resource], *(device_ids(self.gpus)[resource][index] for index in sorted(gone)))
        return ids

    async def registers(self, *expected: int) -> None:
        """Check the kubelet's own count of Registers since its start: one of ``expected`` for each resource."""
        if not self.plugin:
            must(registered(dict.fromkeys(self.gpus, expected), await self.the_kubelet.registers()))

    async def finish(self, *expected: int) -> None:
        """End the gateway as a rollout does, and check the count of Registers when none can follow any more."""
        await self.end_gateway()
        await self.registers(*expected)

    async def end_gateway(self) -> None:
        """End the gateway that was started last as a rollout does; it must be an orderly end."""
        code = await self.gateway.terminate(self.patience)
        must(
            [] if code == 0 or self.plugin else [f"the gateway ended with {code} after SIGTERM:\n{self.gateway.log()}"]
        )


def plugin_command(template: Sequence[str], socket_dir: Path, state_dir: Path) -> list[str]:
    """Fill a device plugin's command in: ``{socket_dir}`` and ``{state_dir}`` (which outlives the process) in any word."""
    state_dir.mkdir(exist_ok=True)
    return [word.replace("{socket_dir}", str(socket_dir)).replace("{state_dir}", str(state_dir)) for word in template]


def offered(described: Mapping[str, Sight], policy: Policy) -> Mapping[str, Listing]:
    """Say what a gateway with these simulated GPUs offers.

    Raises:
        devices.gpu.naming.NamingError: the policy can't name them.
    """
    nothing: frozenset[str] = frozenset()
    gpus = [gpu for one in described.values() for gpu in one.gpus]
    named: dict[str, tuple[GPU, ...]] = dict.fromkeys(described, ()) | naming.named(gpus, policy, VENDORS)
    return {name: sharing.listing(one, nothing, nothing) for name, one in sharing.offered(named, policy).items()}


def device_ids(gpus: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Give the IDs of simulated GPUs that a profile only counts, by resource name."""
    lines = ["resources:", *(f"  {resource}: {{gpus: {count}}}" for resource, count in gpus.items())]
    parsed = profile.parse("\n".join(lines).encode(), "profile.yaml")
    return {resource: tuple(gpu.uuid for gpu in found.gpus) for resource, found in parsed.items()}


def must(sentences: Sequence[str]) -> None:
    """Raise BrokenPromiseError if there is anything to say."""
    if sentences:
        raise BrokenPromiseError("\n".join(sentences))


def mistold(pod: str, resource: str, device_ids: Collection[str], admission: Admission) -> list[str]:
    """Compare what a container is told to use with the devices that its pod holds by the records."""
    told = admission.answer.envs.get(VISIBLE[resource], "")
    if set(filter(None, told.split(","))) == set(device_ids):
        return []
    return [f"pod {pod} holds {', '.join(sorted(device_ids)) or 'nothing'}, its container is told {told or 'nothing'}"]


@asynccontextmanager
async def node(
    genuine: Callable[[str], Path | None] = lambda _: None,
    *,
    gpus: Mapping[str, int] | None = None,
    demands: Sequence[Demand] = (Demand("a", RESOURCE, 1), Demand("b", RESOURCE, 2)),
    tapped: bool = False,
    watch_seconds: float = 10,
    api: str = "auto",
    options: Sequence[str] = (),
    plugin: Sequence[str] = (),
    patience: float = PATIENCE,
    behind: str = "",
) -> AsyncIterator[Node]:
    """Set up a node in a directory of its own and take it down with all its processes; see ``Node`` for the arguments."""
    root = Path(tempfile.mkdtemp(prefix="dpg-"))  # short: a socket's path may have 107 bytes
    try:
        async with AsyncExitStack() as stack:
            for name in ("device-plugins", "kubelet"):
                (root / name).mkdir()
            tap = await stack.enter_async_context(_tap(root)) if tapped else None
            made = Node(
                root,
                genuine,
                gpus or {RESOURCE: 4},
                demands,
                watch_seconds,
                tap,
                api,
                options,
                plugin,
                patience,
                behind,
            )
            made.set_health({})
            stack.push_async_callback(made.close)
            yield made
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _tap(root: Path) -> Tap:
    """Make a tap, which alone needs the extra ``lab``: who examines a plugin doesn't."""
    from gateway_lab.wire.tap import Tap  # noqa: PLC0415

    return Tap(root / "kubelet", root / "device-plugins")


# The scenarios.


@dataclass(frozen=True, slots=True)
class Scenario:
    """``run`` proves ``promise`` on a node with a kubelet of one version; ``applies`` says why it can't (None: it can)."""

    name: str
    promise: str
    run: Callable[[Node, str], Awaitable[None]]
    applies: Callable[[str], str | None] = lambda _: None
    needs: frozenset[str] = frozenset({"profile"})
    """What it needs of the plugin under test: ``profile``, that its hardware can be changed and is known; ``api``, that it
    can be told which API to speak; ``log``, that its log is ours. Nothing: it can be run on any device plugin."""
    tappable: bool = True
    """Whether it may be watched through a tap. Not where it acts on names in the socket directory: a tap has two of them."""
    gpus: Mapping[str, int] = field(default_factory=lambda: {RESOURCE: 4})
    says: frozenset[Field] = frozenset()
    """What a plugin's API must be able to say for it."""


def unsaid(scenario: Scenario, api: str) -> str:
    """Say why a scenario can't be run with a plugin of this API behind the bridge; '' where it can."""
    rules = by_name(api).rules
    missing = sorted(one.value for one in scenario.says if rules[one].verdict is not Fidelity.LOSSLESS)
    return f"a plugin that speaks {api} can't say: {', '.join(missing)}" if missing else ""


async def _register(node: Node, version: str) -> None:
    await node.start_kubelet(version)
    await node.start_gateway()
    await node.served()
    await node.finish(counted(version, ""))


async def _kubelet_late(node: Node, version: str) -> None:
    await node.start_gateway()
    await node.gateway_begun()
    await node.start_kubelet(version)
    await node.served()
    await node.finish(counted(version, ""))


async def _stale_socket(node: Node, version: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(node.kubelet_dir / "kubelet.sock"))
    await node.start_gateway()
    await node.gateway_begun()
    await node.start_kubelet(version)
    await node.served()
    await node.finish(counted(version, ""))


async def _allocate(node: Node, version: str) -> None:
    await node.start_kubelet(version)
    await node.start_gateway()
    await node.served()
    await node.run_pods()
    free = node.healthy() - sum(demand.count for demand in node.demands)
    if free:
        await node.admit(Demand("the-rest", node.resource, free))
    await node.refuse(Demand("one-too-many", node.resource, 1))
    await node.check()
    await node.drain()
    await node.admit(Demand("all", node.resource, node.healthy()))
    await node.finish(counted(version, ""))


async def _health(node: Node, version: str) -> None:
    await node.start_kubelet(version)
    await node.start_gateway()
    await node.served()
    node.set_health({RESOURCE: [0]})
    await node.served()
    await node.refuse(Demand("too-many", RESOURCE, node.gpus[RESOURCE]))
    await node.admit(Demand("the-well", RESOURCE, node.healthy()))
    ill = node.announced()[RESOURCE][0]
    must([f"{ill} is unhealthy, and pod {one.pod} got it" for one in node.held if ill in one.device_ids])
    node.set_health({})
    await node.served()
    await node.drain()
    await node.admit(Demand("all", RESOURCE, node.gpus[RESOURCE]))
    node.set_health({RESOURCE: [1]})
    await node.served()
    await node.check()
    await node.finish(counted(version, ""))


async def _init_containers(node: Node, version: str) -> None:
    await node.start_kubelet(version)
    await node.start_gateway()
    await node.served()
    for container, count, init in (("setup", 2, True), ("one", 1, False), ("two", 1, False)):
        await node.admit(Demand("a", node.resource, count, container, init))
    setup, *apps = ({*one.device_ids} for one in node.held)
    must(
        []
        if apps[0] | apps[1] == setup and not apps[0] & apps[1]
        else [f"expected {setup} to be handed on, got {apps}"]
    )
    await node.admit(Demand("b", node.resource, node.healthy() - 2))
    await node.refuse(Demand("one-too-many", node.resource, 1))
    await node.check()
    await node.finish(counted(version, ""))


async def _preferred(node: Node, version: str) -> None:
    # Each NUMA node has the first and the last of the GPUs that are left: chance finds that once in 2 520 times.
    node.describe({RESOURCE: ["numa: [0, 1, 2, 3, 3, 2, 1, 0]"]})
    await node.start_kubelet(version)
    await node.start_gateway()
    await node.served()
    ids = node.announced()[RESOURCE]
    for index in range(4):
        await node.admit(Demand(f"pod-{index}", RESOURCE, 2))
        wanted, got = {ids[index], ids[7 - index]}, {*node.held[-1].device_ids}
        must([] if got == wanted else [f"the two GPUs of NUMA node {index} are {wanted}, pod {index} got {got}"])
    await node.finish(counted(version, ""))


async def _pre_start(node: Node, version: str) -> None:
    node.describe({RESOURCE: ["pre_start: true"]})
    await node.start_kubelet(version)
    gateway = await node.start_gateway()
    await node.served()
    await node.admit(Demand("a", RESOURCE, 1))
    held = node.held[0].device_ids[0]
    node.set_health({RESOURCE: [node.announced()[RESOURCE].index(held)]})
    await node.served()
    for _ in range(2):  # a kubelet tries again and again; the pod keeps its devices meanwhile
        try:
            await node.the_kubelet.restart_container("a")
        except KubeletError as error:
            well = error.stage == "start" and "not healthy" in error.message
            must([] if well else [f"expected the error of PreStartContainer at the start of the container: {error}"])
        else:
            must([f"the container started although {held} can't be made ready"])
        await node.check()
    node.set_health({})
    await node.served()
    await node.restart_containers()
    asked = len(gateway.lines("refused", call="PreStartContainer"))
    must([] if asked == 2 else [f"expected 2 refused PreStartContainer, the gateway tells of {asked}"])
    await node.finish(counted(version, ""))


CDI_KIND = "example.com/gpu"


async def _cdi(node: Node, version: str) -> None:
    node.describe({RESOURCE: [f"cdi: {CDI_KIND}"]})
    await node.start_kubelet(version)
    await node.start_gateway()
    await node.served()
    if minor_version(version) < 29:
        await node.refuse(Demand("a", RESOURCE, 1), because="CDI device names")
        if minor_version(version) == 28:
            # What 1.28 has behind its gate can't be told from outside: grpc-go and calls are those of 1.26.
            await node.start_kubelet(version, gates="DevicePluginCDIDevices=true")
            await node.served()
            await node.refuse(Demand("a", RESOURCE, 1), because="CDI device names")
        await node.finish(counted(version, node.accepted if minor_version(version) == 28 else ""))
        return
    admission = await node.the_kubelet.admit("a", RESOURCE, 2)
    names = {f"{CDI_KIND}={device_id}" for device_id in admission.devices[RESOURCE]}
    told = {*admission.answer.cdi_devices}
    must([] if len(names) == 2 and told == names else [f"the pod holds {names}, its container is told {told}"])
    must([f"its container is told {one} too" for one in admission.answer.envs])
    await node.finish(counted(version, ""))


async def _topology(node: Node, version: str) -> None:
    node.describe({RESOURCE: ["numa: [0, 1, 1, null]"]})
    await node.start_kubelet(version, numa=[0, 1])
    await node.start_gateway()
    await node.served()
    await node.admit(Demand("a", RESOURCE, node.gpus[RESOURCE]))
    first, second, third, unplaced = node.announced()[RESOURCE]
    nowhere = "-1" if minor_version(version) >= 23 else "0"
    wanted: dict[str, set[str]] = {"0": {first}, "1": {second, third}}
    wanted[nowhere] = {*wanted.get(nowhere, ()), unplaced}
    written = json.loads((node.kubelet_dir / "kubelet_internal_checkpoint").read_bytes())
    [entry] = written["Data"]["PodDeviceEntries"]
    found = {place: {*ids} for place, ids in entry["DeviceIDs"].items()}
    must([] if found == wanted else [f"expected in the checkpoint, by NUMA node, {wanted}, found {found}"])
    await node.finish(counted(version, ""))


async def _lost(node: Node, version: str) -> None:
    kubelet = await node.start_kubelet(version)
    gateway = await node.start_gateway()
    await node.served()
    await node.admit(Demand("a", RESOURCE, node.gpus[RESOURCE] - 1))
    await kubelet.kill()
    seer = node.bridged or gateway
    mark = seer.seen
    node.set_health({}, gone={RESOURCE: [node.announced()[RESOURCE].index(node.held[0].device_ids[0])]})
    await seer.wait_for("profile read", since=mark)
    await node.start_kubelet(version)
    await node.served()
    await node.check()
    await node.refuse(Demand("too-many", RESOURCE, 2))
    await node.admit(Demand("b", RESOURCE, 1))
    # A gateway that comes later has never seen it, but remembers whose list it was on.
    await gateway.terminate()
    await node.unserved()
    await node.start_gateway()
    await node.served()
    await node.check()
    node.set_health({})
    await node.served()
    await node.readmit()
    await node.finish(2 * counted(version, node.accepted))


async def _many(node: Node, version: str) -> None:
    await node.start_kubelet(version)
    await node.start_gateway()
    await node.served()
    await node.run_pods()
    await node.admit(Demand("many", RESOURCE, 1000))
    node.set_health({RESOURCE: range(10)})
    await node.served()
    await node.start_kubelet(version)
    node.set_health({})
    await node.served()
    await node.check()
    await node.readmit()
    await node.admit(Demand("the-rest", RESOURCE, 5000 - 1000 - sum(demand.count for demand in node.demands)))
    await node.refuse(Demand("one-too-many", RESOURCE, 1))
    await node.finish(counted(version, node.accepted))


async def _kubelet_restart(node: Node, version: str, *, crash: bool) -> None:
    kubelet = await node.start_kubelet(version)
    await node.start_gateway()
    await node.served()
    await node.run_pods()
    await node.written()
    await (kubelet.kill() if crash else kubelet.terminate())
    await node.start_kubelet(version)
    await node.served()
    await node.check()
    await node.readmit()
    await one_more(node)
    await node.finish(counted(version, node.accepted))


async def _gateway_restart(node: Node, version: str, *, crash: bool) -> None:
    await node.start_kubelet(version)
    await node.start_gateway()
    await node.served()
    await node.run_pods()
    await node.gateway_says("registered")
    await (node.gateway.kill() if crash else node.end_gateway())
    await node.unserved()
    await node.start_gateway()
    await node.served()
    await node.restart_containers()
    await one_more(node)
    first = counted(version, "")
    # Which dialect was accepted is remembered, but a crash right after the Register may come before it was written.
    await node.finish(*{first + counted(version, known) for known in (node.accepted, *([""] if crash else []))})


async def one_more(node: Node) -> None:
    """Run one more pod on all that is free: nobody else's devices may be among them."""
    free = node.healthy() - sum(len(one.device_ids) for one in node.held)
    if free:
        await node.admit(Demand("late", node.resource, free))
    await node.refuse(Demand("one-too-many", node.resource, 1))
    await node.check()


async def _several_resources(node: Node, version: str) -> None:
    await node.start_kubelet(version)
    await node.start_gateway()
    await node.served()
    await node.admit(Demand("nvidia", RESOURCE, node.gpus[RESOURCE]))
    await node.admit(Demand("amd", SECOND_RESOURCE, 1))
    node.set_health({SECOND_RESOURCE: [0]})
    await node.served()
    await node.start_kubelet(version)
    await node.served()
    await node.check()
    await node.finish(counted(version, node.accepted))


async def _wrong_version(node: Node, version: str) -> None:
    kubelet = await node.start_kubelet(version)
    wrong = "v1alpha" if dialect(version) == "v1beta1" else "v1beta1"
    gateway = await node.start_gateway(api=wrong)
    line = await gateway.wait_for("no common version", level="error")
    said = str(line.get("details", ""))
    must(
        [
            f"the error doesn't say {word!r}: {said}"
            for word in (f"--api {wrong}", "--api auto", "kubelet")
            if word not in said
        ]
    )
    must([] if kubelet.alive and gateway.alive else ["expected kubelet and gateway to go on"])
    totals = await kubelet.totals()
    must(
        [
            f"{name} must not be there, the kubelet's records have {count}"
            for name, count in totals.capacity.items()
            if count
        ]
    )
    code = await gateway.terminate()
    must([] if code == 0 else [f"the gateway ended with {code} after SIGTERM:\n{gateway.log()}"])
    refused = (await kubelet.registers()).get(RESOURCE, 0)
    must([f"the kubelet was asked {refused} times"] if refused > 2 else [])
    await node.start_gateway(api=dialect(version))
    await node.served()
    await node.finish(refused + 1)


async def _directory_replaced(node: Node, version: str) -> None:
    kubelet = await node.start_kubelet(version)
    await node.start_gateway()
    await node.served()
    await node.gateway_says("registered")
    await kubelet.kill()
    # Renamed away in one step: the gateway takes its own name out of it at the same time.
    shutil.rmtree(node.socket_dir.rename(node.socket_dir.with_name("replaced")), ignore_errors=True)
    node.socket_dir.mkdir()
    await node.start_kubelet(version)
    await node.served()
    await node.run_pods()
    await node.finish(counted(version, node.accepted))


async def _two_gateways(node: Node, version: str) -> None:
    kubelet = await node.start_kubelet(version)
    older = await node.start_gateway()
    await node.served()
    newer = await node.start_gateway()
    await newer.wait_for("registered")
    await older.wait_for("standing by")
    await node.served()
    # A kubelet that is being fought for loses the resource again and again.
    try:
        await kubelet.wait(RESOURCE, 0, seconds=node.watch_seconds)
    except KubeletError:
        pass
    else:
        must([f"{RESOURCE} was lost although two gateways are there"])
    asked = (await kubelet.registers())[RESOURCE]
    allowed = 3 + counted(version, "") - 1
    must([f"expected at most {allowed} Registers, the kubelet counted {asked}"] if asked > allowed else [])
    await node.run_pods()
    mark = older.seen
    await newer.kill()
    await older.wait_for("registered", since=mark)
    await node.served()
    await node.restart_containers()
    third = await node.start_gateway()
    await third.wait_for("registered")
    await node.served()
    await older.terminate()
    await node.served()
    await node.restart_containers()


def _since(first: int, why: str) -> Callable[[str], str | None]:
    """Give an ``applies`` for what kubelets do from 1.``first`` on."""
    return lambda version: None if minor_version(version) >= first else why


SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "register",
            "the kubelet finds every device of a gateway that starts later, by one accepted Register",
            _register,
            needs=frozenset(),
        ),
        Scenario(
            "kubelet-late",
            "the gateway waits for a kubelet that starts later",
            _kubelet_late,
            needs=frozenset(),
        ),
        Scenario(
            "stale-socket",
            "the gateway waits while nobody listens on kubelet.sock",
            _stale_socket,
            tappable=False,
            needs=frozenset(),
        ),
        Scenario(
            "allocate",
            "pods get as many devices as they ask for; each device is given once, and all can be given",
            _allocate,
            needs=frozenset(),
        ),
        Scenario(
            "init-containers",
            "an init container's devices go to the pod's app containers, and to nobody else",
            _init_containers,
            _since(9, "kubelet 1.8 gives each container devices of its own"),
            needs=frozenset(),
        ),
        Scenario(
            "preferred-allocation",
            "the kubelet asks which devices are best together, and gives those",
            _preferred,
            _since(19, "GetPreferredAllocation came with kubelet 1.19: an older one chooses by itself"),
            gpus={RESOURCE: 8},
            says=frozenset({Field.PREFERRED_ALLOCATION}),
        ),
        Scenario(
            "pre-start",
            "a container starts only when its devices are ready; a failure is tried again",
            _pre_start,
            _since(10, "PreStartContainer came with kubelet 1.10"),
            needs=frozenset({"profile", "log"}),
            says=frozenset({Field.PRE_START}),
        ),
        Scenario(
            "cdi-names",
            "CDI names arrive from 1.29 on; an older kubelet would drop them, so the pod is refused with the reason",
            _cdi,
            says=frozenset({Field.CDI_DEVICES}),
        ),
        Scenario(
            "topology",
            "each device's NUMA node is in the kubelet's checkpoint",
            _topology,
            _since(20, "NUMA nodes came with 1.16 and are in the checkpoint since 1.20; before, nothing shows them"),
            says=frozenset({Field.TOPOLOGY}),
        ),
        Scenario("health", "an unhealthy device is not given, and is back when it is healthy", _health),
        Scenario(
            "kubelet-crash",
            "pods keep their devices when the kubelet crashes, by one Register",
            partial(_kubelet_restart, crash=True),
            needs=frozenset(),
        ),
        Scenario(
            "kubelet-restart",
            "pods keep their devices when the kubelet restarts, by one Register",
            partial(_kubelet_restart, crash=False),
            needs=frozenset(),
        ),
        Scenario(
            "device-lost",
            "a device that is lost while the kubelet is down stays listed as Unhealthy, and its pod keeps it",
            _lost,
            needs=frozenset({"profile", "log"}),
        ),
        Scenario(
            "gateway-crash",
            "pods keep their devices when the gateway crashes",
            partial(_gateway_restart, crash=True),
            needs=frozenset(),
        ),
        Scenario(
            "gateway-restart",
            "pods keep their devices when the gateway is replaced",
            partial(_gateway_restart, crash=False),
            needs=frozenset(),
        ),
        Scenario(
            "several-resources",
            "each resource registers on its own, and trouble of one doesn't affect another",
            _several_resources,
            gpus={RESOURCE: 2, SECOND_RESOURCE: 2},
        ),
        Scenario(
            "many-devices",
            "5 000 devices are listed, given and kept like a few",
            _many,
            gpus={RESOURCE: 5000},
        ),
        Scenario(
            "wrong-version",
            "an API that is forced and that the kubelet doesn't speak is reported, and does no harm",
            _wrong_version,
            needs=frozenset({"api", "log"}),
        ),
        Scenario(
            "directory-replaced",
            "the gateway finds and serves a replaced socket directory",
            _directory_replaced,
            tappable=False,
            needs=frozenset(),
        ),
        Scenario(
            "two-gateways",
            "the newer of two gateways leads; the older one takes over when it ends",
            _two_gateways,
            needs=frozenset({"log"}),
        ),
    )
}
"""All scenarios by name."""
