"""The compatibility matrix: every scenario on every kubelet, every hop between two of them, and all of them as one cluster.

It runs a few nodes at a time, because a node mostly waits for processes to start; hops alone and last, because they measure
gaps. What fails is run once more on a node of its own, when nothing runs beside it, and its record says so. Nothing that goes wrong in one run ends the others: it is that run's record. Who was a genuine kubelet and who an
emulated one stands in each record.
"""

from __future__ import annotations

import asyncio
import os
import platform
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from devices.gpu import naming
from devices.gpu.simulated import profile
from devices.model import Health
from devices.policy import Policy
from gateway.configuration import file as config
from gateway.configuration.settings import ConfigError
from gateway.registration.negotiate import CHOICES
from gateway_lab.gatewayproc import GatewayError
from gateway_lab.kubelets.kubelet import Demand, Kubelet, KubeletError
from gateway_lab.matrix import witness
from gateway_lab.matrix.record import About, Cell, Cluster, Hop, Kind, KubeletFact, NodeFact, Promise, Report
from gateway_lab.matrix.report import counted, tally
from gateway_lab.trials import hops
from gateway_lab.trials.invariants import Holding, holdings, may_be_an_accident
from gateway_lab.trials.scenarios import (
    SCENARIOS,
    BrokenPromiseError,
    Node,
    Scenario,
    dialect,
    must,
    node,
    offered,
    unsaid,
)

CELL_SECONDS = 120
AT_ONCE = 2 * (os.cpu_count() or 1)
WATCHING_AT_ONCE = 12
ACCIDENTS = 8
"""So many failures may be a busy machine's, and are tried once more with nothing beside them; more of them never are."""
WATCHING = frozenset({"two-gateways"})
"""Scenarios that mostly watch, for ten seconds: they run beside the others."""
FORCING = frozenset({"wrong-version"})
"""Scenarios that choose the API themselves, whatever ``--api`` says."""
PROFILE = "your-profile"

Say = Callable[[str], None]
_R = TypeVar("_R", Cell, Hop)


@dataclass(frozen=True, slots=True)
class Matrix:
    """What is to be run."""

    versions: Sequence[str]
    """Minor versions, oldest first."""
    genuine: Mapping[str, Path]
    """The binaries of the genuine kubelets, by version; the other versions are emulated."""
    why_emulated: Mapping[str, str] = field(default_factory=dict)
    scenarios: Sequence[Scenario] = tuple(SCENARIOS.values())
    with_hops: bool = True
    with_cluster: bool = True
    api: str = "auto"
    """What the gateways are told with ``--api``."""
    options: Sequence[str] = ()
    """What else they are told."""
    behind: str = ""
    """The API of a plugin that has the GPUs, behind gateways that only bridge; empty: the gateways have them."""

    @property
    def setting(self) -> dict[str, Any]:
        """What every node is told."""
        return {"api": self.api, "options": self.options, "behind": self.behind}

    def kind(self, version: str) -> Kind:
        """Say which kind of kubelet a version is here."""
        return "genuine" if version in self.genuine else "emulated"

    def served(self, version: str) -> bool:
        """Whether the gateways may speak the API of a kubelet at all."""
        return dialect(version) in CHOICES[self.api]

    def why_not(self, scenario: Scenario, version: str) -> str:
        """Say why a scenario doesn't apply to a kubelet; '' where it does."""
        if not self.served(version) and scenario.name not in FORCING:
            return f"--api {self.api} doesn't speak {dialect(version)}, the API of kubelet {version}"
        return scenario.applies(version) or (unsaid(scenario, self.behind) if self.behind else "")

    def hoppable(self) -> list[str]:
        """Give the versions that hops go through."""
        return [version for version in self.versions if self.served(version)]


async def run(matrix: Matrix, say: Say = lambda _: None) -> Report:
    """Run it all; ``say`` is told of the progress, a line at a time."""
    began, started = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    kubelets = [await _about(matrix, version) for version in matrix.versions]
    cells = await _cells(matrix, say)
    cluster = await _cluster(matrix, say) if matrix.with_cluster else None
    hopped = await _hops(matrix, say) if matrix.with_hops else []
    about = About(
        started=started,
        seconds=round(time.monotonic() - began, 1),
        gateway=installed("device-plugin-gateway"),
        python=platform.python_version(),
        grpcio=installed("grpcio"),
        protobuf=installed("protobuf"),
        go=", ".join(sorted({one.runtime for one in kubelets if one.kind == "genuine"})),
        host=f"{platform.system()} {'.'.join(platform.release().split('.')[:2])} {platform.machine()}, {os.cpu_count()} processors",
        options=(
            *(() if matrix.api == "auto" else ("--api", matrix.api)),
            *(("--behind", matrix.behind) if matrix.behind else ()),
            *matrix.options,
        ),
        kubelets=tuple(kubelets),
        notes=() if matrix.with_hops else ("without the hops",),
    )
    rows = tuple(Promise(name=one.name, promise=one.promise) for one in matrix.scenarios)
    return Report(about=about, scenarios=rows, cells=tuple(cells), hops=tuple(hopped), cluster=cluster)


async def _about(matrix: Matrix, version: str) -> KubeletFact:
    """Ask a kubelet what it is."""
    with tempfile.TemporaryDirectory(prefix="dpg-") as folder:
        async with await Kubelet.launch(version, Path(folder), genuine=matrix.genuine.get(version)) as kubelet:
            found = await kubelet.about()
    return KubeletFact(
        version=version,
        kind=matrix.kind(version),
        api=dialect(version),
        kubernetes=found.kubernetes,
        runtime=found.runtime,
        why_emulated=""
        if version in matrix.genuine
        else matrix.why_emulated.get(version, "genuine ones were not asked for"),
    )


# Scenarios.


async def _cells(matrix: Matrix, say: Say) -> list[Cell]:
    busy, watching = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(WATCHING_AT_ONCE)

    async def one(scenario: Scenario, version: str) -> Cell:
        why_not = matrix.why_not(scenario, version)
        if why_not:
            kind = matrix.kind(version)
            return Cell(scenario=scenario.name, version=version, kind=kind, status="not applicable", reason=why_not)
        async with watching if scenario.name in WATCHING else busy:
            return await _cell(matrix, scenario, version)

    async def row(scenario: Scenario) -> list[Cell]:
        cells = await asyncio.gather(*(one(scenario, version) for version in matrix.versions))
        say(f"{scenario.name}: {tally(cell.status for cell in cells)}{_named(cells)}")
        return cells

    found = [cell for cells in await asyncio.gather(*map(row, matrix.scenarios)) for cell in cells]
    by_name = {scenario.name: scenario for scenario in matrix.scenarios}

    async def again(cell: Cell) -> Cell:
        return await _cell(matrix, by_name[cell.scenario], cell.version)

    return await _twice(found, again, say)


async def _twice(found: Sequence[_R], again: Callable[[_R], Awaitable[_R]], say: Say) -> list[_R]:
    """Run what failed once more, each with nothing beside it; both tries stand in its record then."""
    failed = [one for one in found if one.status == "failed" and may_be_an_accident(one.reason)]
    second: dict[str, _R] = {}
    for one in failed if len(failed) <= ACCIDENTS else ():
        record = replace(await again(one), first=one.reason)
        say(f"{one.words}: {record.status} at the second try" + (f"\n  {record.reason}" if record.reason else ""))
        second[one.words] = record
    return [second.get(one.words, one) for one in found]


async def _cell(matrix: Matrix, scenario: Scenario, version: str) -> Cell:
    """Run one scenario on a node of its own."""
    began = time.monotonic()
    error = ""
    registers: dict[str, int] = {}
    calls: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    try:
        async with node(matrix.genuine.get, gpus=scenario.gpus, tapped=scenario.tappable, **matrix.setting) as made:
            try:
                async with asyncio.timeout(CELL_SECONDS):
                    await scenario.run(made, version)
            except Exception as caught:  # noqa: BLE001  whatever it is, it is this run's alone
                error = what_went_wrong(caught, made)
            if made.kubelet is not None and made.kubelet.alive:
                with suppress(KubeletError):
                    registers = dict(await made.kubelet.registers())
            calls, logs = witness.calls(made), witness.logs(made)
    except Exception as caught:  # noqa: BLE001  setting a node up and taking it down, as above
        error = error or what_went_wrong(caught)
    return Cell(
        scenario=scenario.name,
        version=version,
        kind=matrix.kind(version),
        status="failed" if error else "passed",
        seconds=round(time.monotonic() - began, 2),
        reason=error,
        registers=registers,
        witness="wire" if calls else "logs" if logs else "",
        # What a failure wants is both: what was said, and what the two thought of it.
        transcript=(*calls, *logs) if error or not calls else calls,
    )


def what_went_wrong(error: Exception, node: Node | None = None) -> str:
    """Say what ended a run, in words that fit a report: without the names of this machine's folders."""
    text = str(error)
    if isinstance(error, TimeoutError):
        text = text or f"it took more than {CELL_SECONDS} s"
    elif not isinstance(error, BrokenPromiseError | GatewayError | KubeletError):
        text = f"{type(error).__name__}: {text}"
    return text if node is None else text.replace(str(node.root), "<node>")


def _named(cells: Sequence[Cell]) -> str:
    """Name the kubelets on which a scenario failed, and why it did on the first."""
    failed = [cell for cell in cells if cell.status == "failed"]
    if not failed:
        return ""
    return f" on {', '.join(cell.version for cell in failed)}\n  {failed[0].version}: {failed[0].reason}"


# Hops.


async def _hops(matrix: Matrix, say: Say) -> list[Hop]:
    found: list[Hop] = []

    def done(hop: Hop) -> None:
        found.append(hop)
        gap = "" if hop.gap_ms is None else f", allocatable after {hop.gap_ms:.0f} ms"
        forgets = ", drained first: the kubelet forgets" if hop.forgets else ""
        say(f"hop {hop.old} -> {hop.new}: {hop.status}{gap}{forgets}" + (f"\n  {hop.reason}" if hop.reason else ""))

    for path in hops.walks(matrix.hoppable()):
        await hops.walk(path, matrix.genuine.get, done, **matrix.setting)

    async def again(hop: Hop) -> Hop:
        second: list[Hop] = []
        await hops.walk((hop.old, hop.new), matrix.genuine.get, second.append, **matrix.setting)
        return second[0]

    return await _twice(found, again, say)


# The cluster.


async def _cluster(matrix: Matrix, say: Say) -> Cluster:
    """Run a node of each version at the same time, all with one configuration; each must be served in its own API."""
    began = time.monotonic()
    starting = asyncio.Semaphore(AT_ONCE)
    async with AsyncExitStack() as stack:
        nodes = {
            version: await stack.enter_async_context(node(matrix.genuine.get, **matrix.setting))
            for version in matrix.versions
            if matrix.served(version)
        }

        async def up(version: str) -> str:
            try:
                async with starting, asyncio.timeout(CELL_SECONDS):
                    await nodes[version].start_kubelet(version)
                    await nodes[version].start_gateway()
                    await nodes[version].served()
            except Exception as caught:  # noqa: BLE001  one node's trouble is no other's
                return what_went_wrong(caught, nodes[version])
            return ""

        async def pods(version: str) -> str:
            try:
                async with asyncio.timeout(CELL_SECONDS):
                    await nodes[version].run_pods()
                    api = _api(nodes[version])
                    must(
                        []
                        if api == dialect(version)
                        else [f"expected the API {dialect(version)}, it is {api or 'none'}"]
                    )
            except Exception as caught:  # noqa: BLE001  as above
                return what_went_wrong(caught, nodes[version])
            return ""

        # Pods come when all nodes are there: no node has its gateway for itself.
        errors = dict(zip(nodes, await asyncio.gather(*map(up, nodes)), strict=True))
        well = [version for version, error in errors.items() if not error]
        errors.update(zip(well, await asyncio.gather(*map(pods, well)), strict=True))
        facts = [await _node_fact(matrix, version, nodes[version], errors[version]) for version in nodes]
    say(f"mixed cluster of {counted(len(facts), 'node')}: {tally(fact.status for fact in facts)}")
    return Cluster(seconds=round(time.monotonic() - began, 2), nodes=tuple(facts))


async def _node_fact(matrix: Matrix, version: str, made: Node, error: str) -> NodeFact:
    registers: dict[str, int] = {}
    if made.kubelet is not None and made.kubelet.alive:
        with suppress(KubeletError):
            registers = dict(await made.kubelet.registers())
    return NodeFact(
        version=version,
        kind=matrix.kind(version),
        status="failed" if error else "passed",
        api=_api(made),
        reason=error,
        registers=registers,
        transcript=witness.logs(made),
    )


def _api(made: Node) -> str:
    """The API in which the node's last gateway is registered; '' where it isn't."""
    lines = made.gateways[-1].lines("registered") if made.gateways else []
    return str(lines[-1]["api"]) if lines else ""


# The profile of whoever runs the matrix.


def own_profile(name: str, config_file: Path | None = None) -> Scenario:
    """Make a scenario of a profile (a file, or the name of a shipped one): the kubelet must know exactly its devices.

    With ``config_file``, its gateways go by that file, and the devices are those that it makes of the profile's GPUs.

    Raises:
        devices.gpu.simulated.profile.ProfileError: the profile is not usable; the message says why.
        gateway.configuration.settings.ConfigError: nor is the configuration.
    """
    path = profile.find(name)
    content = profile.read(path)
    policy = Policy()
    if config_file is not None:
        policy = config.policy(config.parse(config.read(config_file), config_file.name), {}, "simulated")
    try:
        listings = offered(profile.parse(content, path.name), policy)
    except naming.NamingError as error:
        raise ConfigError(str(error)) from error
    ill = {
        resource: [index for index, device in enumerate(listing.devices) if device.health is not Health.HEALTHY]
        for resource, listing in listings.items()
    }

    options = () if config_file is None else ("--config-file", str(config_file.absolute()))

    async def run(node: Node, version: str) -> None:
        node.profile_path.write_bytes(content)
        node.ill = ill
        node.options, node.policy = (*node.options, *options), policy
        await node.start_kubelet(version)
        await node.start_gateway()
        await node.served()
        for number, resource in enumerate(listings):
            if node.healthy(resource):
                await _hold(node, Demand(f"pod-{number}", resource, 1))
        await node.start_kubelet(version)
        await node.served()
        await node.check()

    counts = {resource: len(listing.devices) for resource, listing in listings.items()}
    of = path.name if config_file is None else f"{path.name} as {config_file.name} offers them"
    return Scenario(
        PROFILE, f"the kubelet knows the devices of {of}, and pods keep theirs when it restarts", run, gpus=counts
    )


async def _hold(node: Node, demand: Demand) -> None:
    await node.the_kubelet.admit(demand.pod, demand.resource, demand.count)
    node.pods[demand.pod] = demand
    node.held = tuple(one for one in holdings(await node.the_kubelet.pods()) if one.pod in node.pods)
    got = sum((len(one.device_ids) for one in node.held if _is_of(one, demand)), start=0)
    must(
        [] if got == demand.count else [f"pod {demand.pod} asked for {demand.count} of {demand.resource}, it got {got}"]
    )
    await node.check()


def _is_of(holding: Holding, demand: Demand) -> bool:
    return (holding.pod, holding.resource) == (demand.pod, demand.resource)
