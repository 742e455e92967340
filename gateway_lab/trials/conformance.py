"""A conformance test for device plugins: which promises of the kubelet's API a plugin keeps, and which it breaks.

Any command that serves a socket directory can be examined. It is watched as a kubelet and a DaemonSet watch it: by the
kubelet's own records and count of Registers, by the names in the socket directory, and by its process, which is started
again whenever it ends by itself. Nothing is asked of its log, and nothing of it is known beforehand: its resources and
their devices are those in the kubelet's records.

Each rule says what it rests on. Waits have a cap, because a plugin that comes back at some time and one that never does
look alike until then: a rule is broken *within that cap*, and the findings name it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import grpc
import msgspec

from adapters.levels import minor_version
from adapters.registry import by_name
from devices.model import ContainerAnswer, ContainerRequest, PreferredRequest
from gateway.wires.unix import listens
from gateway_lab import inplace
from gateway_lab.conformance.registry import InapplicableError, waits_in_registry
from gateway_lab.conformance.started import Unexamined, ended, not_started, without_devices
from gateway_lab.gatewayproc import GatewayError
from gateway_lab.kubelets.kubelet import Demand, Faults, KubeletError, Totals
from gateway_lab.trials.scenarios import (
    SCENARIOS,
    BrokenPromiseError,
    Node,
    dialect,
    must,
    node,
    plugin_command,
)
from gateway_lab.waiting import until

CAP_SECONDS = 10.0
RULE_SECONDS = 120.0
"""The most that one rule may take on one kubelet, all its waits together."""
SIGTERM_SECONDS = 5.0
WATCH_SECONDS = 2.0
"""How long to watch for a Register too many."""
REGISTER_ERRORS = 3
AT_ONCE = 2 * (os.cpu_count() or 1)
CALL_SECONDS = 10.0
"""How long a call may take that a kubelet waits for."""
_OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
STRANGER = "a-device-that-was-never-announced"

Verdict: TypeAlias = Literal["kept", "broken", "not applicable"]
Observe: TypeAlias = Callable[[Node, str], Awaitable[str]]


class CommandError(ValueError):
    """A command that can't be examined. The message says what was expected, what came and what to do."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One promise. ``observe`` returns what was seen where it is kept, and raises what breaks it."""

    id: str
    promise: str
    reference: str
    """What the rule rests on: a Kubernetes issue, or what kubelets of which versions do."""
    observe: Observe
    emulated: bool = False
    """Whether the kubelet must misbehave or tell what it did, which only emulated ones can be asked for."""
    devices: int = 1
    """How many healthy devices it takes."""
    since: int = 0
    """The first minor version that it can be seen on."""
    why: str = ""
    """Why not before that."""
    changes: bool = False
    """Whether a device of the plugin must change, which only the plugin's own command for that can bring about."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One rule on one kubelet."""

    rule: str
    kubelet: str
    """The minor version, such as ``1.28``."""
    kind: Literal["genuine", "emulated"]
    verdict: Verdict
    seen: str = ""
    """What was seen; where the rule isn't applicable, why."""
    exits: int = 0
    """How often the plugin ended by itself meanwhile, and was started again."""
    seconds: float = 0.0


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What an examination found."""

    command: str
    cap_seconds: float
    """How long was waited for what must come."""
    resources: Mapping[str, Mapping[str, int]]
    """How many devices each resource had in its records, by kubelet and resource name."""
    findings: tuple[Finding, ...]
    unexamined: Mapping[str, Unexamined] = {}
    """Where the plugin couldn't be examined, by kubelet, and why: then nothing is said of any rule."""

    @property
    def passed(self) -> bool:
        """Whether the plugin was examined, and no rule is broken."""
        return not self.unexamined and not any(one.verdict == "broken" for one in self.findings)

    @property
    def broken(self) -> tuple[str, ...]:
        """The ids of the rules that are broken on some kubelet."""
        return tuple(
            rule.id for rule in RULES if any(one.rule == rule.id and one.verdict == "broken" for one in self.findings)
        )

    @property
    def watched(self) -> str:
        """How the plugin gets over things: in its process, or by ending and being started again."""
        exits = sum(one.exits for one in self.findings)
        where = dict.fromkeys(one.rule for one in self.findings if one.exits)
        if not exits and all(one.verdict == "not applicable" for one in self.findings):
            return "whether it stays in its process wasn't seen"
        if not exits:
            return "it stays in its process"
        return f"it exits and is started again ({'once' if exits == 1 else f'{exits} times'}: {', '.join(where)})"


async def examine(
    command: str,
    *,
    versions: Sequence[str],
    genuine: Callable[[str], Path | None] = lambda _: None,
    progress: Callable[[str], None] = lambda _: None,
    cap_seconds: float = CAP_SECONDS,
    resource: str = "",
    change: str = "",
    rules: Sequence[Rule] = (),
    hard_wired: bool = False,
) -> Findings:
    """Examine a device plugin.

    Args:
        command: how it is started, without a shell: ``{socket_dir}`` stands for the kubelet's device plugin directory,
            ``{state_dir}`` for a folder that outlives its process.
        versions: the kubelets' minor versions, such as ``1.28``.
        genuine: where the genuine kubelet of a version is; None for an emulated one.
        progress: is told each finding, a line at a time.
        cap_seconds: how long to wait for what must come.
        resource: the resource to look at; all that it registers by default.
        change: a command that makes one of its devices unhealthy, with the same places in it as ``command``'s.
        rules: all by default.
        hard_wired: whether it has the path of the kubelet's folder compiled in, and gets one of its own there
            (``gateway_lab.inplace``).

    Raises:
        CommandError: it is no such command.
    """
    template, changing = parsed(command, hard_wired=hard_wired), shlex.split(change)
    busy = asyncio.Semaphore(AT_ONCE)
    resources: dict[str, Mapping[str, int]] = {}
    unexamined: dict[str, Unexamined] = {}

    async def one(rule: Rule, trial: _Trial) -> Finding:
        async with busy:
            finding = await trial.observe(rule)
        first = finding.seen.partition("\n")[0]
        progress(f"{rule.id} on {trial.version}: {finding.verdict}" + (f": {first}" if first else ""))
        return finding

    async def all_of(version: str) -> list[Finding]:
        trial = _Trial(template, version, genuine, cap_seconds, resource, changing)
        async with busy:
            await trial.discover()
        if trial.totals is not None:
            resources[version] = trial.totals.capacity
        if trial.unexamined is not None:
            unexamined[version] = trial.unexamined
        return await asyncio.gather(*(one(rule, trial) for rule in rules or RULES))

    found = await asyncio.gather(*(all_of(version) for version in versions))
    return Findings(
        command=command,
        cap_seconds=cap_seconds,
        resources={version: resources[version] for version in versions if version in resources},
        findings=tuple(finding for findings in found for finding in findings),
        unexamined=unexamined,
    )


def parsed(command: str, *, hard_wired: bool = False) -> tuple[str, ...]:
    """Split a plugin's command into words, and put the kubelet's folder in its place where that is ``hard_wired``.

    Raises:
        CommandError: it isn't one.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise CommandError(f"expected a command, got {command!r} ({error}): correct its quotes") from error
    if not words or not (hard_wired or any("{socket_dir}" in word for word in words)):
        raise CommandError(
            f"expected a command with {{socket_dir}} where the socket directory belongs, got {command!r}: write it there, or say "
            "--hard-wired where the path is compiled in"
        )
    if shutil.which(words[0]) is None:
        raise CommandError(f"expected a program that can be run, got {words[0]!r}: give its path")
    return inplace.command("{socket_dir}", words) if hard_wired else (*words,)


class _Trial:
    """A plugin on a kubelet version, each rule on a node of its own."""

    def __init__(
        self,
        template: Sequence[str],
        version: str,
        genuine: Callable[[str], Path | None],
        cap_seconds: float,
        resource: str,
        change: Sequence[str],
    ) -> None:
        self.version = version
        self.totals: Totals | None = None
        """What the kubelet's records showed of the plugin; None where it never was in them."""
        self.unexamined: Unexamined | None = None
        """Why the plugin can't be examined; None where it can."""
        self.exits = 0
        """How often the plugin ended by itself before it was in its records."""
        self._template, self._genuine, self._cap, self._resource = template, genuine, cap_seconds, resource
        self._change = change
        self._why = ""

    async def discover(self) -> None:
        """Learn the plugin's resources and devices from the kubelet's records."""
        async with node(self._genuine, plugin=self._template, patience=self._cap) as made:
            kubelet = await made.start_kubelet(self.version)
            try:
                await made.start_gateway()
            except OSError as error:
                self.unexamined = not_started(self._template[0], error)
                return
            last: Mapping[str, int] = {}
            deadline = time.monotonic() + self._cap
            while time.monotonic() < deadline:
                totals = await kubelet.totals()
                found = self._own(totals)
                if found and found == last:  # no further resource came in a quarter of a second
                    self.totals = Totals(found, {name: totals.allocatable.get(name, 0) for name in found})
                    return
                last = found
                await asyncio.sleep(0.25)
            self.exits = made.exits
            registers = await kubelet.registers()
            wanted = {self._resource} if self._resource else {*registers}
            if made.ended is not None and not registers and minor_version(self.version) >= 10:
                status, log = made.ended
                self.unexamined = ended(status, _plain(log))
            elif wanted and not made.exits and wanted <= (await kubelet.totals()).capacity.keys():
                self.unexamined = without_devices(wanted)
            self._why = _why_none(registers, self._resource, made.exits, self._cap)
            log = _plain(made.gateway.log(8))
            self._why += f"; its log ends:\n{log}" if log else "; it has logged nothing"

    def _own(self, totals: Totals) -> dict[str, int]:
        wanted = {self._resource} if self._resource else totals.capacity.keys()
        return {name: count for name, count in totals.capacity.items() if count and name in wanted}

    def _why_not(self, rule: Rule) -> str:
        if minor_version(self.version) < rule.since:
            return rule.why
        if self.unexamined is not None:
            return f"it couldn't be examined: {self.unexamined.kind}"
        if self.totals is None:
            if minor_version(self.version) < 10:
                return f"it isn't served by a kubelet that speaks only {dialect(self.version)}"
            return "it was never in the kubelet's records: see the rule registers"
        if rule.changes and not self._change:
            return "say with --change what makes one of its devices unhealthy"
        least = min(self.totals.allocatable.values())
        return f"it takes {rule.devices} healthy devices, there are {least}" if least < rule.devices else ""

    async def observe(self, rule: Rule) -> Finding:
        """Observe one rule."""
        binary = None if rule.emulated else self._genuine(self.version)
        began, exits = time.monotonic(), 0
        verdict: Verdict = "not applicable"
        seen = self._why_not(rule)
        ran = self.unexamined is None and minor_version(self.version) >= 10
        if self.totals is None and ran and rule.id == "registers":
            verdict, seen, exits = "broken", self._why, self.exits
        elif not seen:
            verdict, seen, exits = await self._run(rule)
        return Finding(
            rule=rule.id,
            kubelet=self.version,
            kind="emulated" if binary is None else "genuine",
            verdict=verdict,
            seen=seen,
            exits=exits,
            seconds=round(time.monotonic() - began, 2),
        )

    async def _run(self, rule: Rule) -> tuple[Verdict, str, int]:
        assert self.totals is not None
        capacity, allocatable = self.totals.capacity, self.totals.allocatable
        resource, well = next(iter(allocatable.items()))
        demands = [Demand("a", resource, 1), *([Demand("b", resource, 2)] if well > 2 else [])]
        setting = node(
            (lambda _: None) if rule.emulated else self._genuine,
            gpus=capacity,
            demands=demands,
            plugin=self._template,
            patience=self._cap,
        )
        async with setting as made:
            made.ill = {name: range(capacity[name] - allocatable[name]) for name in capacity}
            made.change = self._change
            try:
                async with asyncio.timeout(RULE_SECONDS):
                    seen = await rule.observe(made, self.version)
            except (BrokenPromiseError, GatewayError, KubeletError) as error:
                return "broken", str(error).replace(str(made.root), "<node>"), made.exits
            except InapplicableError as error:
                return "not applicable", str(error), made.exits
            except TimeoutError:
                return "broken", f"it took more than {RULE_SECONDS:g} s", made.exits
            return "kept", seen, made.exits


def _plain(log: str) -> str:
    """Give lines of a log as the plugin wrote them: what is no JSON was wrapped when it was read."""
    read = [(line, json.loads(line)) for line in log.splitlines()]
    return "\n".join(str(found["event"]) if found.keys() == {"event"} else line for line, found in read)


def _why_none(registers: Mapping[str, int], resource: str, exits: int, cap: float) -> str:
    """Say how far a plugin came that had no device in the kubelet's records, by the kubelet's count of its Registers."""
    counted = {name: count for name, count in registers.items() if not resource or name == resource}
    others = "" if counted or not registers else f" (but of {', '.join(sorted(registers))})"
    ended = f"; it ended by itself {'once' if exits == 1 else f'{exits} times'}" if exits else ""
    if not counted:
        return f"no Register {f'of {resource} ' if resource else ''}came within {cap:g} s{others}{ended}"
    came = ", ".join(f"{count} of {name}" for name, count in sorted(counted.items()))
    return f"Registers came ({came}), but no list with a device within {cap:g} s{ended}"


# What is observed.


def _scenario(name: str) -> Observe:
    """Observe by a scenario that needs nothing of the plugin."""
    scenario = SCENARIOS[name]
    assert not scenario.needs, f"{name} needs {', '.join(scenario.needs)} of a plugin"

    async def observe(node: Node, version: str) -> str:
        await scenario.run(node, version)
        return ""

    return observe


async def _up(node: Node, version: str) -> None:
    await node.start_kubelet(version)
    await node.start_gateway()
    await node.served()


async def _again(node: Node) -> str:
    """Wait until all devices are allocatable again, and one can indeed be allocated."""
    began = time.monotonic()
    await node.served()
    took = time.monotonic() - began
    await node.the_kubelet.admit("probe", node.resource, 1)
    await node.the_kubelet.remove("probe")
    return f"all devices were allocatable after {took:.1f} s"


async def _registered(node: Node, *, more_than: int = 0, seconds: float) -> bool:
    """Wait until the kubelet has counted more Registers; say whether it has."""

    async def more() -> bool:
        return (await node.the_kubelet.registers()).get(node.resource, 0) > more_than

    try:
        await until(more, seconds, every=0.05)
    except TimeoutError:
        return False
    return True


def _endpoint(node: Node) -> Path:
    """Find the socket that was registered last for the node's resource, in the log of an emulated kubelet."""
    pattern = rf"Register {re.escape(node.resource)} version=\S+ endpoint=(\S+): OK"
    found = re.findall(pattern, node.the_kubelet.log())
    must([] if found else [f"the kubelet took note of no accepted Register for {node.resource}"])
    return node.socket_dir / str(found[-1])


async def _registers_once(node: Node, version: str) -> str:
    await node.start_gateway()
    await node.gateway_begun()
    for what in ("its first start", "its restart"):
        await node.start_kubelet(version)
        await _registered(node, seconds=node.patience)
        # Nothing tells of a Register that doesn't come.
        await asyncio.sleep(WATCH_SECONDS)
        counted = await node.the_kubelet.registers()
        must([f"{name}: {counted[name]} Registers after {what}" for name in node.gpus if counted.get(name, 0) > 1])
    return ""


async def _stream_cut(node: Node, version: str) -> str:
    await _up(node, version)
    await node.run_pods()
    before = (await node.the_kubelet.registers())[node.resource]
    await node.the_kubelet.cut(node.resource)
    again = await _registered(node, more_than=before, seconds=node.patience)
    must([] if again else [f"no Register came within {node.patience:g} s of the end of the stream"])
    seen = await _again(node)
    await node.check()
    return seen


async def _update_after_cut(node: Node, version: str) -> str:
    """Cut the stream, and let a device change once the plugin is served again."""
    await _up(node, version)
    before = (await node.the_kubelet.registers())[node.resource]
    await node.the_kubelet.cut(node.resource)
    if not await _registered(node, more_than=before, seconds=node.patience):
        raise InapplicableError("it isn't served again: see the rule stream-cut")
    await _again(node)
    command = plugin_command(node.change, node.socket_dir, node.root / "state")
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    failed = f"--change ended with {process.returncode}: {said.decode(errors='replace')[-200:]}"
    must([failed] if process.returncode else [])
    began = time.monotonic()

    async def fewer() -> bool:
        return (await node.the_kubelet.totals()).allocatable.get(node.resource, 0) < node.healthy()

    try:
        await until(fewer, node.patience, every=0.05)
    except TimeoutError:
        silent = (
            f"it is served again after a cut, but a device that fell ill then didn't show within {node.patience:g} s"
        )
        must([silent])
    return f"the change showed after {time.monotonic() - began:.1f} s"


async def _second_call(node: Node, version: str) -> str:
    await _up(node, version)
    call = f"/{by_name(dialect(version)).plugin_service}/ListAndWatch"
    async with grpc.aio.insecure_channel(f"unix:{_endpoint(node)}", options=_OWN_CONNECTION) as channel:
        calls: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(call)
        lists = calls(b"")
        data: object = grpc.aio.EOF
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.TimeoutError):
            async with asyncio.timeout(node.patience):
                data = await lists.read()
        lists.cancel()
    silent = f"a second ListAndWatch, beside the kubelet's, got no list within {node.patience:g} s"
    must([] if isinstance(data, bytes) else [silent])
    return ""


async def _renamed_socket(node: Node, version: str) -> str:
    """Put another kubelet's socket in the place of the first one's, in one step: nothing is ever removed."""
    await _up(node, version)
    await node.the_kubelet.kill()
    came = asyncio.Event()

    async def registered(_request: bytes, _context: object) -> bytes:
        came.set()
        return b""

    server, fresh = grpc.aio.server(), node.socket_dir / ".fresh"
    service = by_name(dialect(version)).registration_service
    server.add_registered_method_handlers(service, {"Register": grpc.unary_unary_rpc_method_handler(registered)})
    server.add_insecure_port(f"unix:{fresh}")
    await server.start()
    try:
        fresh.rename(node.socket_dir / "kubelet.sock")
        async with asyncio.timeout(node.patience):
            await came.wait()
    except TimeoutError:
        must(
            [
                f"no Register came within {node.patience:g} s of a kubelet.sock that took the place of another in one step"
            ]
        )
    finally:
        await server.stop(None)
    return ""


async def _socket_deleted(node: Node, version: str) -> str:
    await _up(node, version)
    deleted = _endpoint(node)
    deleted.unlink()
    try:
        await until(lambda: listens(_endpoint(node)), node.patience, every=0.05)
    except TimeoutError:
        must([f"after {node.patience:g} s nobody listens on {deleted.name}, and no other socket is registered"])
    await _again(node)
    return "put back" if _endpoint(node) == deleted else "registered anew"


async def _register_errors(node: Node, version: str) -> str:
    await _up(node, version)
    await node.start_kubelet(version, faults=Faults(register_errors=REGISTER_ERRORS))
    tried = 0
    for _ in range(REGISTER_ERRORS):
        with contextlib.suppress(BrokenPromiseError, KubeletError):
            return await _again(node)
        # It is slow, not silent: the cap begins anew with each Register.
        counted = sum((await node.the_kubelet.registers()).values())
        if counted == tried:
            break
        tried = counted
    return await _again(node)


async def _kubelet_late(node: Node, version: str) -> str:
    await node.start_gateway()
    await asyncio.sleep(5)
    await node.start_kubelet(version)
    return await _again(node)


async def _hanging(node: Node, version: str) -> None:
    """Start a kubelet whose Register hangs, and wait until the plugin has run into it."""
    await node.start_kubelet(version, faults=Faults(register_hangs=True))
    if not node.gateways:
        await node.start_gateway()
    came = await _registered(node, seconds=node.patience)
    must([] if came else [f"no Register came within {node.patience:g} s of the start of a kubelet"])


async def _register_hangs(node: Node, version: str) -> str:
    await _up(node, version)
    await _hanging(node, version)
    await node.start_kubelet(version)
    return await _again(node)


async def _term_in_register(node: Node, version: str) -> str:
    await _hanging(node, version)
    return await _ended(node)


async def _ended(node: Node) -> str:
    began = time.monotonic()
    await node.gateway.terminate(SIGTERM_SECONDS)
    return f"it ended after {time.monotonic() - began:.2f} s"


async def _term(node: Node, version: str) -> str:
    await _up(node, version)
    seen = await _ended(node)
    left = sorted(
        str(path.relative_to(node.socket_dir))
        for path in node.socket_dir.rglob("*")
        if path.is_socket() and path != node.socket_dir / "kubelet.sock"
    )
    must([f"{seen} and left {name} behind" for name in left])
    return f"{seen}, and removed its sockets"


async def _restarts_in_a_row(node: Node, version: str) -> str:
    await _up(node, version)
    for _ in range(5):
        await node.the_kubelet.stop()
        await node.the_kubelet.start()
        await asyncio.sleep(0.3)
    return await _again(node)


async def _two_instances(node: Node, version: str) -> str:
    await _up(node, version)
    before = (await node.the_kubelet.registers()).get(node.resource, 0)
    await node.start_gateway()
    if await _registered(node, more_than=before, seconds=SIGTERM_SECONDS):
        await asyncio.sleep(1)
    await node.gateways[0].terminate(node.patience)
    await _again(node)
    await asyncio.sleep(WATCH_SECONDS)
    return await _again(node)


async def _allocate(path: Path, api: str, ids: Sequence[str]) -> tuple[str, str, ContainerAnswer]:
    """Ask a plugin as no kubelet would; return the status, its text, and what the container would be told."""
    spelling = by_name(api)
    request = spelling.encode_allocate_request([ContainerRequest(tuple(ids))]).data
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        allocate: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            f"/{spelling.plugin_service}/Allocate"
        )
        try:
            answers = spelling.decode_allocate_answer(await allocate(request, timeout=10))
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details() or "", ContainerAnswer()
    return "OK", "", answers[0] if answers else ContainerAnswer()


async def _unknown_device(node: Node, version: str) -> str:
    await _up(node, version)
    status, text, answer = await _allocate(_endpoint(node), dialect(version), [STRANGER])
    must([] if status != "OK" else [f"Allocate of {STRANGER!r} was answered with OK: {_told(answer) or 'nothing'}"])
    return f"{status}: {text}"


async def _no_ids(node: Node, version: str) -> str:
    await _up(node, version)
    status, _, answer = await _allocate(_endpoint(node), dialect(version), [])
    told = _told(answer)
    must([f"Allocate without device IDs gives the container {told}"] if told else [])
    return "it gives the container nothing" if status == "OK" else f"refused: {status}"


async def _preferred_allocation(node: Node, version: str) -> str:
    await _up(node, version)
    ids = sorted(await _all_ids(node, "all"))
    endpoint, exits = _endpoint(node), node.exits
    if not await _offers_choices(endpoint, dialect(version)):
        return "it doesn't ask for it (GetDevicePluginOptions)"
    asked = [
        PreferredRequest(tuple(ids), must, size) for size in range(1, len(ids) + 1) for must in ((), tuple(ids[-size:]))
    ]
    stranger = PreferredRequest((*ids, STRANGER), (), 1)
    for request in (*asked, stranger, PreferredRequest((STRANGER,), (STRANGER,), 1), asked[0]):
        code, chosen = await _choice(endpoint, dialect(version), request)
        must(
            [problem]
            if (problem := _choice_problem(request, code, chosen, refusable=STRANGER in request.available))
            else []
        )
        must([f"it ended when it was asked about {STRANGER!r}"] if node.exits > exits else [])
    return f"{len(asked)} choices, and one about a device that was never announced"


def _choice_problem(request: PreferredRequest, code: str, chosen: Sequence[str], *, refusable: bool) -> str:
    """Say what is wrong with an answer to GetPreferredAllocation; '' where nothing is. ``refusable``: it may be refused."""
    asked = f"asked for {request.size} of {len(request.available)} devices, {len(request.must_include)} to be included"
    if code in {"UNAVAILABLE", "DEADLINE_EXCEEDED"}:
        return f"{asked}: no answer ({code}); does it end, or hang, where {STRANGER!r} is among them?"
    if code != "OK":
        return "" if refusable else f"{asked}: refused with {code}"
    if len(chosen) != request.size or len(set(chosen)) < len(chosen):
        return f"{asked}: got {len(set(chosen))}"
    if lacking := sorted({*request.must_include} - {*chosen}):
        return f"{asked}: the choice lacks {lacking[0]}"
    if strange := sorted({*chosen} - {*request.available}):
        return f"{asked}: the choice holds {strange[0]}, which isn't available"
    return ""


async def _offers_choices(path: Path, api: str) -> bool:
    code, data = await _call(path, api, "GetDevicePluginOptions", b"")
    return code == "OK" and by_name(api).decode_options(data).preferred_allocation


async def _choice(path: Path, api: str, request: PreferredRequest) -> tuple[str, tuple[str, ...]]:
    """Ask a plugin for a choice, as a kubelet does; return the status and what was chosen."""
    code, data = await _call(path, api, "GetPreferredAllocation", by_name(api).encode_preferred_request([request]).data)
    chosen = by_name(api).decode_preferred_answer(data) if code == "OK" else ()
    return code, chosen[0] if chosen else ()


async def _call(path: Path, api: str, method: str, request: bytes) -> tuple[str, bytes]:
    async with grpc.aio.insecure_channel(f"unix:{path}", options=_OWN_CONNECTION) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            f"/{by_name(api).plugin_service}/{method}"
        )
        try:
            return "OK", await call(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            return error.code().name, b""


def _told(answer: ContainerAnswer) -> str:
    """Say what a container would get; variables that are empty give it nothing."""
    envs = [f"{name}={value}" for name, value in answer.envs.items() if value]
    nodes = [one.host_path for one in answer.device_nodes]
    mounts = [one.host_path for one in answer.mounts]
    return ", ".join([*envs, *nodes, *mounts, *answer.cdi_devices])


async def _ids_stable(node: Node, version: str) -> str:
    await _up(node, version)
    before = await _all_ids(node, "before")
    await node.gateway.terminate(node.patience)
    await node.unserved()
    await node.start_gateway()
    await node.served()
    after = await _all_ids(node, "after")
    gone = sorted(before - after)
    must([f"{len(gone)} of {len(before)} devices have other IDs after a restart, such as {gone[0]}"] if gone else [])
    return ""


async def _all_ids(node: Node, pod: str) -> set[str]:
    """Learn the IDs of all healthy devices: a pod gets them all, for a moment."""
    admission = await node.the_kubelet.admit(pod, node.resource, node.healthy())
    await node.the_kubelet.remove(pod)
    return {*admission.devices[node.resource]}


_FORGETS = "at every start a kubelet deletes the sockets in its directory and forgets who was registered (1.8 to 1.37)"
_CHECKPOINT = "pods are kept in the kubelet's checkpoint by device ID (1.8 to 1.37)"

RULES: tuple[Rule, ...] = (
    Rule(
        "registers",
        "the plugin registers, and the kubelet's records have all its devices",
        "the device plugin API; from 1.25 on the kubelet calls GetDevicePluginOptions before it answers Register (kubernetes #124719)",
        _scenario("register"),
    ),
    Rule(
        "registers-once-per-start",
        "the plugin registers only once for each start of the kubelet",
        "a second Register cuts the first connection, and in 1.25 to 1.36 both (kubernetes #121994, #127803)",
        _registers_once,
        since=10,
        why="older kubelets also count the refused Registers by which a plugin finds their API",
    ),
    Rule(
        "registers-again",
        "when the kubelet restarts, the plugin registers again, and pods keep their devices",
        _FORGETS,
        _scenario("kubelet-restart"),
    ),
    Rule(
        "kubelet-crash",
        "when the kubelet crashes and leaves its socket behind, the plugin registers again, and pods keep their devices",
        _FORGETS,
        _scenario("kubelet-crash"),
    ),
    Rule(
        "restarts-in-a-row",
        "after 5 restarts within 2 s, the kubelet uses the plugin",
        _FORGETS,
        _restarts_in_a_row,
        emulated=True,
    ),
    Rule(
        "kubelet-late",
        "the plugin waits for a kubelet that starts 5 s later",
        "a DaemonSet's pod can start before the kubelet's registration service (any version)",
        _kubelet_late,
    ),
    Rule(
        "stale-socket",
        "the plugin waits while no kubelet listens on kubelet.sock",
        "a kubelet that ends leaves its socket behind (1.8 to 1.37)",
        _scenario("stale-socket"),
    ),
    Rule(
        "stream-cut",
        "when the ListAndWatch stream breaks, the plugin registers again",
        "the kubelet never reconnects to a plugin (kubernetes #125501)",
        _stream_cut,
        emulated=True,
    ),
    Rule(
        "updates-after-reconnect",
        "after the stream broke and the plugin registered again, the kubelet still learns that a device becomes unhealthy",
        "in 15 of 20 plugins that were read, all ListAndWatch handlers read one channel: the dead stream's handler takes the update",
        _update_after_cut,
        emulated=True,
        changes=True,
    ),
    Rule(
        "list-on-second-call",
        "a second ListAndWatch also gets the list",
        "a kubelet that connects again knows nothing of earlier lists; if the plugin sends only changes, it has no devices",
        _second_call,
        emulated=True,
    ),
    Rule(
        "sock-recreated-without-remove",
        "when kubelet.sock is replaced in one step, the plugin registers again",
        "a watch that expects Remove and then Create misses a restored directory, and a socket that is renamed into place",
        _renamed_socket,
        emulated=True,
    ),
    Rule(
        "registry-mode",
        "a plugin in plugins_registry answers each GetInfo, serves at the path in its answer, and registers nowhere else",
        "from 1.12 on kubelets also find device plugins in that folder: at each start they call GetInfo, for at most 1 s, and report the "
        "outcome to the plugin",
        waits_in_registry,
        emulated=True,
        since=12,
        why="older kubelets don't look there",
    ),
    Rule(
        "own-socket-deleted",
        "when the plugin's socket is deleted, the plugin restores it or registers again",
        "kubelets up to 1.32 delete all files of their directory at a start; a lost connection is dialled again by that name",
        _socket_deleted,
        emulated=True,
    ),
    Rule(
        "directory-replaced",
        "when the socket directory is replaced, the plugin registers in the new one",
        "at every start the kubelet creates its directory if it is missing (1.9 and later)",
        _scenario("directory-replaced"),
    ),
    Rule(
        "register-errors",
        "when a restarted kubelet answers three Registers with an error, the plugin tries again until the kubelet accepts one",
        "no kubelet remembers a Register that failed",
        _register_errors,
        emulated=True,
    ),
    Rule(
        "register-hangs",
        "if a Register hangs, the plugin still registers with the next kubelet",
        "from 1.25 on Register waits up to 10 s for the kubelet's connection; the kubelet can end in that time",
        _register_hangs,
        emulated=True,
    ),
    Rule(
        "sigterm-in-register",
        f"SIGTERM ends the plugin within {SIGTERM_SECONDS:g} s while Register hangs",
        "a pod that doesn't end within its grace period is killed (SIGKILL), and leaves its sockets behind",
        _term_in_register,
        emulated=True,
    ),
    Rule(
        "sigterm",
        f"SIGTERM ends the plugin within {SIGTERM_SECONDS:g} s, and the plugin removes its sockets",
        "nobody dials a socket that is left behind, but all who look for plugins find it",
        _term,
    ),
    Rule(
        "two-instances",
        "when the first of two instances ends (as in a rolling update), the kubelet uses the second",
        "a DaemonSet's update with maxSurge; kubelets handle a second Register in five different ways (kubernetes #127803, #135437)",
        _two_instances,
    ),
    Rule(
        "plugin-restart",
        "when the plugin is replaced, pods keep their devices, and the kubelet can give out the others",
        _CHECKPOINT,
        _scenario("gateway-restart"),
    ),
    Rule(
        "plugin-crash",
        "when the plugin crashes, pods keep their devices, and the kubelet can give out the others",
        _CHECKPOINT,
        _scenario("gateway-crash"),
    ),
    Rule(
        "ids-stable",
        "after a restart, the plugin's device IDs are the same",
        _CHECKPOINT,
        _ids_stable,
    ),
    Rule(
        "allocate",
        "pods get as many devices as they request, each device goes to one pod, and pods can get all devices",
        "the device plugin API: Allocate is called with the IDs that the kubelet chose",
        _scenario("allocate"),
    ),
    Rule(
        "init-containers",
        "the plugin gives a device to an init container and then to an app container of the same pod",
        "kubelets give an init container's device to an app container: the same ID is allocated again (1.9 and later)",
        _scenario("init-containers"),
        devices=2,
        since=9,
        why="kubelet 1.8 gives each container its own devices",
    ),
    Rule(
        "unknown-device",
        "the plugin refuses Allocate of a device that it never listed",
        "the kubelet's records can be older than the plugin's list; a container without its device is worse than one that doesn't start",
        _unknown_device,
        emulated=True,
    ),
    Rule(
        "preferred-allocation",
        "GetPreferredAllocation chooses the right number of devices, all of must_include and only available ones; an unknown device "
        "doesn't crash the plugin",
        "the device plugin API; the kubelet's records can be older than the plugin's list (ROCm's plugin panics on an unknown device)",
        _preferred_allocation,
        emulated=True,
        since=19,
        why="older kubelets don't call GetPreferredAllocation",
    ),
    Rule(
        "no-device-ids",
        "Allocate without device IDs gives the container nothing",
        "the device plugin API: a response is for the devices of the request",
        _no_ids,
        emulated=True,
    ),
)


# How it is told.


def to_json(findings: Findings) -> bytes:
    """Give the findings as JSON, with the rules and what they rest on."""
    rules = [{"id": rule.id, "promise": rule.promise, "reference": rule.reference} for rule in RULES]
    told = {
        "command": findings.command,
        "passed": findings.passed,
        "broken": findings.broken,
        "watched": findings.watched,
        "cap_seconds": findings.cap_seconds,
        "resources": findings.resources,
        "rules": rules,
        "findings": findings.findings,
        "unexamined": findings.unexamined,
    }
    return msgspec.json.format(msgspec.json.encode(told)) + b"\n"


_WORDS: Mapping[Verdict, str] = {"broken": "BROKEN", "kept": "kept", "not applicable": "n/a"}


def to_text(findings: Findings) -> str:
    """Give the findings as text for a terminal: rule by rule, those that are broken with what was seen."""
    lines = [f"device plugin: {findings.command}"]
    for version, resources in findings.resources.items():
        kinds = {one.kind for one in findings.findings if one.kubelet == version}
        devices = ", ".join(f"{count} of {name}" for name, count in resources.items())
        kind = "genuine, emulated where it must misbehave" if "genuine" in kinds else "emulated"
        lines.append(f"kubelet {version} ({kind}): {devices}")
    for version, why in findings.unexamined.items():
        first, *more = str(why).splitlines()
        lines += [f"kubelet {version}: NOT EXAMINED, {first}", *(f"  {line}" for line in more)]
    lines += [f"what must come was waited for {findings.cap_seconds:g} s; {findings.watched}", ""]
    for rule in RULES:
        own = [one for one in findings.findings if one.rule == rule.id and one.kubelet not in findings.unexamined]
        if not own:
            continue
        worst = min(own, key=lambda one: ("broken", "kept", "not applicable").index(one.verdict)).verdict
        lines.append(f"{_WORDS[worst]:7}{rule.id}: {rule.promise}")
        for one in own:
            if one.verdict == "broken":
                first, *more = one.seen.splitlines() or [""]
                lines += [f"         {one.kubelet} ({one.kind}): {first}", *(f"           {line}" for line in more[:4])]
            elif one.verdict == "not applicable":
                lines.append(f"         {one.kubelet}: not applicable: {one.seen.splitlines()[0]}")
        if worst == "broken":
            lines.append(f"         because: {rule.reference}")
    count = len(findings.broken)
    are = "rule is" if count == 1 else "rules are"
    looked = any(one.verdict != "not applicable" for one in findings.findings)
    unlooked = "no rule was looked at" + (": see NOT EXAMINED above" if findings.unexamined else "")
    nothing = "no rule is broken" if looked else unlooked
    lines += ["", f"{count} {are} broken: {', '.join(findings.broken)}" if count else nothing]
    return "\n".join(lines)
