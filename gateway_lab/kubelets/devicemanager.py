"""An emulated kubelet device manager of any version, over real sockets: what a device plugin meets, and nothing else.

It serves Registration on ``kubelet.sock``, connects to the plugins that register, keeps the records of their devices, gives
devices to containers, and remembers them in the checkpoint. How it does each of these follows from its ``Behaviour``;
names and error texts are the kubelet's own. Between two awaits nothing else runs, which stands for the kubelet's mutex:
the awaits are where the kubelet lets go of it, so that its races can happen here too.
"""

from __future__ import annotations

import asyncio
import contextlib
import stat
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import grpc
from msgspec.structs import replace

from adapters.dialect import MalformedError
from adapters.registry import by_name
from devices.model import ContainerAnswer, Device, Health, PreferredRequest
from gateway.wires.rpc import target
from gateway_lab.kubelets.behaviour import Behaviour, Checkpoint, SecondRegister
from gateway_lab.kubelets.checkpoint import FILE_NAME, CorruptError, decode, encode, known
from gateway_lab.kubelets.kubelet import Admission, Demand, Faults, Gap, Held, KubeletError, Running, Seen, Totals
from gateway_lab.kubelets.latelistener import LateListener
from gateway_lab.kubelets.pluginclient import EMPTY, CallError, PluginClient
from gateway_lab.kubelets.podresources import PodResources
from gateway_lab.kubelets.records import Claim, DeviceRecords

SOCKET_NAME = "kubelet.sock"

Context = grpc.aio.ServicerContext[bytes, bytes]
Add = Callable[["DeviceManager", PluginClient], Coroutine[Any, Any, None]]


class RegisterError(Exception):
    """Why a Register is refused, in the kubelet's words. On the wire it has the code UNKNOWN, as any Go error."""


def _ignore(_event: str) -> None: ...


class DeviceManager:
    """The device manager of one kubelet process. Make a new one for each start.

    ``note`` is told of each event, one line each. ``registers`` counts the Registers by resource name. ``faults`` may be
    changed at any time.
    """

    def __init__(
        self,
        behaviour: Behaviour,
        directory: Path,
        *,
        note: Callable[[str], None] = _ignore,
        registers: Counter[str] | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.behaviour = behaviour
        self.directory = directory
        self._checkpoint, self._draft = directory / FILE_NAME, directory / f".{FILE_NAME}"
        self.registers: Counter[str] = Counter() if registers is None else registers
        self._faults = faults or Faults()
        self._healed = asyncio.Event()
        self._note = note
        self._dialect = by_name(behaviour.dialect)
        self._records = DeviceRecords(behaviour)
        self._pod_resources = PodResources(behaviour, directory, self._records, note)
        self._changed = asyncio.Event()
        self._admitting = asyncio.Lock()
        self._tells_cdi = False

        self._server: grpc.aio.Server | None = None
        self._late: LateListener | None = None
        self._bound_ns = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._dialed: list[PluginClient] = []
        """All that were ever connected, to be closed at the end: kubelets forget some."""

        self._endpoints: dict[str, PluginClient] = {}
        """Who is allocated from, by resource."""
        self._clients: dict[str, list[PluginClient]] = {}
        """1.25 and later: who is registered, which is another matter."""
        self._connected: dict[str, dict[str, PluginClient]] = {}
        """1.37 and later: endpoints by resource and socket path."""

    @property
    def socket_path(self) -> Path:
        """Where plugins register."""
        return self.directory / SOCKET_NAME

    @property
    def faults(self) -> Faults:
        """What goes wrong at present."""
        return self._faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self._faults = faults
        self._healed.set()
        self._healed = asyncio.Event()

    # -- start and stop -----------------------------------------------------------------------------------------------

    async def start(
        self,
        pods: Sequence[Demand] = (),
        *,
        ready: bool = True,
        running: Sequence[Running] = (),
        gates: str = "",
    ) -> None:
        """Read the checkpoint, clean up the directory and serve; ``Kubelet.start`` says what the arguments mean.

        With the fault ``listen_late_ms`` kubelet.sock is only bound when this returns.

        Raises:
            KubeletError: an unknown feature gate, or kubelet.sock can't be bound.
        """
        self._tells_cdi = self._cdi_gate(gates)
        self._records.ready = ready
        self._records.expect(pods, running)
        self._read_checkpoint()
        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._clean_up()
        await self._pod_resources.start()
        await self._serve()
        self._note(f"kubelet {self.behaviour.name} serves {self._dialect.registration_service} on {self.socket_path}")

    async def start_measured(
        self,
        resource: str,
        count: int,
        seconds: float,
        pods: Sequence[Demand] = (),
        *,
        ready: bool = True,
        running: Sequence[Running] = (),
        gates: str = "",
    ) -> Gap:
        """Start, and measure until exactly ``count`` of ``resource`` are allocatable.

        The gap is counted from the moment before kubelet.sock is bound.
        """
        late = _Lateness()
        timer = asyncio.create_task(late.watch())
        try:
            await self.start(pods, ready=ready, running=running, gates=gates)
            seen = await self.wait(resource, count, seconds)
        finally:
            timer.cancel()
        return Gap((seen.monotonic_ns - self._bound_ns) / 1e6, late.worst_ms)

    async def stop(self) -> None:
        """Close everything. kubelet.sock is removed, as when a kubelet stops its manager (which it never does)."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)
        await self._pod_resources.stop()
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for plugin in self._dialed:
            await plugin.close()
        self._dialed.clear()
        if self._late is not None:
            await self._late.close()
        with contextlib.suppress(FileNotFoundError):
            self.socket_path.unlink()

    def _cdi_gate(self, gates: str) -> bool:
        told = self.behaviour.cdi and self.behaviour.cdi_gate is not False
        for gate in filter(None, gates.split(",")):
            name, _, value = gate.partition("=")
            if name != "DevicePluginCDIDevices" or self.behaviour.cdi_gate is None:
                raise KubeletError("start", f"unrecognized feature gate: {name}")
            if value.lower() not in {"true", "false"}:
                raise KubeletError("start", f"invalid value of {name}: expected true or false, got {value!r}")
            told = value.lower() == "true"
        return told

    def _clean_up(self) -> None:
        for entry in self.directory.iterdir():
            if entry.name == FILE_NAME:
                continue
            with contextlib.suppress(OSError):
                mode = entry.stat().st_mode
                if not stat.S_ISDIR(mode) and (stat.S_ISSOCK(mode) or not self.behaviour.sockets_only):
                    entry.unlink()

    async def _serve(self) -> None:
        limit = self.behaviour.receive_limit
        self._server = grpc.aio.server(
            handlers=[_Registration(self)],
            options=[("grpc.max_receive_message_length", -1 if limit is None else limit)],
        )
        address = target(self.socket_path)
        self._bound_ns = time.monotonic_ns()
        try:
            if self._faults.listen_late_ms > 0:
                self._late = LateListener(self.socket_path, self._faults.listen_late_ms / 1e3)
                address = self._late.inner
            self._server.add_insecure_port(address)
        except (RuntimeError, OSError) as error:
            raise KubeletError("start", f"failed to listen on {self.socket_path}: {error}") from error
        await self._server.start()
        if self._late is not None:
            self._spawn(self._listen(self._late))

    async def _listen(self, late: LateListener) -> None:
        await late.listen()
        self._note(f"{self.socket_path} listens at last")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._note(f"DEFECT of the emulated kubelet: {error!r}")

    # -- Registration -------------------------------------------------------------------------------------------------

    async def register(self, data: bytes, context: Context) -> bytes:
        """Answer a Register as this version does."""
        try:
            asked = self._dialect.decode_register(data)
        except MalformedError as error:
            self._note(f"Register: malformed: {error}")
            await context.abort(grpc.StatusCode.INTERNAL, f"grpc: error unmarshalling request: {error}")
        line = f"Register {asked.resource_name} version={asked.version} endpoint={asked.endpoint}"
        self.registers[asked.resource_name] += 1
        await self._sabotage(line, context)
        refusal = None if asked.version == self._dialect.name else self.behaviour.refuse_version(asked.version)
        refusal = refusal or self.behaviour.refuse_name(asked.resource_name)
        if refusal:
            self._note(f"{line}: refused: {refusal}")
            await context.abort(grpc.StatusCode.UNKNOWN, refusal)
        if self._faults.never_calls_back:
            self._note(f"{line}: OK, but told never to call back")
            return EMPTY
        path = str(self.directory / asked.endpoint)
        plugin = PluginClient(asked.resource_name, path, self.behaviour, asked.options)
        if not self.behaviour.sync_register:
            self._note(f"{line}: OK")
            self._spawn(self._ADD[self.behaviour.second_register](self, plugin))
            return EMPTY
        connecting = asyncio.create_task(self._connect(plugin))
        try:
            # From 1.35 on, the end of the plugin's call ends the connecting; before, it goes on by itself.
            await (connecting if self.behaviour.register_cancels_dial else asyncio.shield(connecting))
        except RegisterError as error:
            self._note(f"{line}: failed: {error}")
            await context.abort(grpc.StatusCode.UNKNOWN, str(error))
        except asyncio.CancelledError:
            self._note(f"{line}: the plugin gave up waiting")
            self._spawn(self._finish(connecting))
            raise
        self._note(f"{line}: OK")
        return EMPTY

    async def _finish(self, connecting: asyncio.Task[None]) -> None:
        """Let a connecting that nobody waits for any more finish by itself."""
        with contextlib.suppress(RegisterError):
            await connecting

    async def _sabotage(self, line: str, context: Context) -> None:
        faults = self._faults
        if faults.register_hangs:
            self._note(f"{line}: told to hang")
            await self._healed.wait()
        if faults.register_lost:
            self._note(f"{line}: told to lose it")
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(faults.register_late_ms / 1e3)
        if faults.register_errors > 0:
            self._faults = replace(faults, register_errors=faults.register_errors - 1)
            self._note(f"{line}: told to fail: {faults.register_code} {faults.register_text}")
            await context.abort(grpc.StatusCode[faults.register_code], faults.register_text)
        if faults.supports_only:
            text = (
                f'requested API version "{self._dialect.name}" is not supported by kubelet. '
                f'Supported version is ["{faults.supports_only}"]'
            )
            self._note(f"{line}: told to refuse: {text}")
            await context.abort(grpc.StatusCode.UNKNOWN, text)

    async def _add_union(self, plugin: PluginClient) -> None:
        """1.8: the plugin counts once its first list is there; a plugin that is replaced leaves its devices behind."""
        await self._dial(plugin)
        await self._follow(plugin, self._replace)
        if self._endpoints.get(plugin.resource) is plugin:
            del self._endpoints[plugin.resource]
            self._records.drop(plugin.resource, plugin.devices)
            self._announce_change()

    def _replace(self, plugin: PluginClient) -> None:
        old = self._endpoints.get(plugin.resource)
        self._endpoints[plugin.resource] = plugin
        if old is not None and old is not plugin:
            old.cancel_lists()

    async def _add_close_old(self, plugin: PluginClient) -> None:
        """1.9 to 1.11: the old one's devices are the new one's, unhealthy, until its own list says better."""
        old = self._endpoints.get(plugin.resource)
        if old is not None:
            plugin.devices = {name: replace(device, health=Health.UNHEALTHY) for name, device in old.devices.items()}
        try:
            await self._dial(plugin)
        except CallError as error:
            self._note(f"{plugin.resource}: {error}")
            return
        if self._endpoints.get(plugin.resource) is not old:
            self._note(f"{plugin.resource}: some other endpoint was added while {plugin.path} was connected: dropped")
            await plugin.close()
            return
        self._endpoints[plugin.resource] = plugin
        if old is not None:
            old.stop()
            await old.close()
        await self._run_endpoint(plugin)

    async def _add_overwrite(self, plugin: PluginClient) -> None:
        """1.12 to 1.24: the old stream is left alone."""
        try:
            await self._dial(plugin)
        except CallError as error:
            self._note(f"{plugin.resource}: {error}")
            return
        self._endpoints[plugin.resource] = plugin
        await self._run_endpoint(plugin)

    _ADD: ClassVar[Mapping[SecondRegister, Add]] = {
        SecondRegister.UNION: _add_union,
        SecondRegister.CLOSE_OLD: _add_close_old,
        SecondRegister.OVERWRITE: _add_overwrite,
    }

    async def _run_endpoint(self, plugin: PluginClient) -> None:
        await self._follow(plugin)
        plugin.stop()
        await plugin.close()
        if self._endpoints.get(plugin.resource) is plugin:
            self._records.mark_unhealthy(plugin.resource)
            self._announce_change()

    async def _connect(self, plugin: PluginClient) -> None:
        """1.25 and later: connect, ask for the options, and only then answer Register.

        Raises:
            RegisterError: it failed; then whoever is registered under the name is forgotten, the old plugin too.
        """
        before = self._clients.get(plugin.resource, ()) if self._per_socket else ()
        self._clients[plugin.resource] = [*before, plugin]
        try:
            await self._dial(plugin)
            await self._learn_options(plugin)
        except CallError as error:
            self._unregister(plugin)
            raise RegisterError(str(error)) from error
        except BaseException:
            self._unregister(plugin)
            raise
        self._endpoints[plugin.resource] = plugin
        self._spawn(self._run_client(plugin))

    async def _learn_options(self, plugin: PluginClient) -> None:
        try:
            plugin.options = await plugin.ask_options()
        except CallError as error:
            raise RegisterError(f"failed to get device plugin options: {error}") from error
        if self._per_socket:
            connected = self._connected.setdefault(plugin.resource, {})
            if plugin.path in connected:
                raise RegisterError(f"device plugin already connected: {plugin.path}")
            connected[plugin.path] = plugin

    async def _run_client(self, plugin: PluginClient) -> None:
        await self._follow(plugin)
        current = self._registered_as(plugin)
        if current is None:
            return
        self._unregister(current)
        await current.close()
        if self._faults.report_late_ms > 0:
            await asyncio.sleep(self._faults.report_late_ms / 1e3)
        self._disconnected(current)

    @property
    def _per_socket(self) -> bool:
        return self.behaviour.second_register is SecondRegister.PER_SOCKET

    def _registered_as(self, plugin: PluginClient) -> PluginClient | None:
        """Find who is registered now where ``plugin`` was: under its name, from 1.37 on under its name and path."""
        for client in self._clients.get(plugin.resource, ()):
            if not self._per_socket or client.path == plugin.path:
                return client
        return None

    def _unregister(self, plugin: PluginClient) -> None:
        clients = self._clients.pop(plugin.resource, [])
        rest = [client for client in clients if client.path != plugin.path] if self._per_socket else []
        if rest:
            self._clients[plugin.resource] = rest

    def _disconnected(self, plugin: PluginClient) -> None:
        """Take out of the records who has gone: whoever is there now, from 1.37 on only the plugin itself."""
        resource = plugin.resource
        connected = self._connected.get(resource, {})
        endpoint = connected.pop(plugin.path, None) if self._per_socket else self._endpoints.get(resource)
        if endpoint is None:
            return
        endpoint.stop()
        if connected:
            self._endpoints[resource] = next(iter(connected.values()))
        else:
            self._connected.pop(resource, None)
            self._records.mark_unhealthy(resource)
            self._announce_change()

    # -- plugins ------------------------------------------------------------------------------------------------------

    async def _dial(self, plugin: PluginClient) -> None:
        self._dialed.append(plugin)
        self._note(f"Dial {plugin.resource} {plugin.path}")
        await plugin.dial()

    async def _follow(self, plugin: PluginClient, listed: Callable[[PluginClient], None] | None = None) -> None:
        """Enter the plugin's lists into the records until its stream ends; ``listed`` is told of each."""
        self._note(f"ListAndWatch {plugin.resource} {plugin.path}")
        try:
            async for devices in plugin.lists():
                self._enter(plugin, devices)
                if listed is not None:
                    listed(plugin)
                while self._faults.reads_no_lists:
                    await self._healed.wait()
        except CallError as error:
            self._note(f"ListAndWatch {plugin.resource} {plugin.path} ended: {error}")

    def _enter(self, plugin: PluginClient, devices: Sequence[Device]) -> None:
        healthy = sum(device.health is Health.HEALTHY for device in devices)
        self._note(f"List {plugin.resource}: {healthy} healthy, {len(devices) - healthy} unhealthy")
        plugin.devices = self._records.enter_list(plugin.resource, plugin.devices, devices)
        if self.behaviour.checkpoint is not Checkpoint.ENTRIES:
            self._write_checkpoint()
        self._announce_change()

    def cut(self, resource: str) -> None:
        """Break the stream of the resource's present plugin from this side, as a lost connection does.

        Raises:
            KubeletError: nobody is registered for it.
        """
        plugin = self._endpoints.get(resource)
        if plugin is None or not plugin.listing:
            raise KubeletError("cut", f"expected a resource with a registered plugin, got {resource!r}")
        plugin.cancel_lists()

    # -- records --------------------------------------------------------------------------------------------------------

    def totals(self) -> Totals:
        """Say what the API server would be told. A resource whose plugin has been gone too long is forgotten by this."""
        for resource in self._records.resources:
            endpoint = self._endpoints.get(resource)
            if self.behaviour.checkpoint is not Checkpoint.ENTRIES and (endpoint is None or endpoint.expired):
                self._endpoints.pop(resource, None)
                self._records.forget(resource)
                self._write_checkpoint()
        return self._records.totals()

    async def wait(self, resource: str, count: int, seconds: float = 10) -> Seen:
        """Wait until exactly ``count`` of ``resource`` are allocatable.

        Raises:
            KubeletError: they weren't within ``seconds``; the message says what was seen last.
        """
        try:
            async with asyncio.timeout(seconds):
                while (totals := self.totals()).allocatable.get(resource, 0) != count:
                    await self._changed.wait()
        except TimeoutError:
            seen = self.totals()
            raise KubeletError(
                "wait",
                f"timed out after {seconds:g} s: expected {count} of {resource} allocatable, saw "
                f"allocatable {dict(seen.allocatable)}, capacity {dict(seen.capacity)}",
            ) from None
        return Seen(totals, time.monotonic_ns())

    def ready(self, *, ready: bool = True) -> None:
        """Say whether the kubelet has heard of all its pods."""
        self._records.ready = ready

    def remove(self, pod: str) -> None:
        """End a pod; its devices are freed at the next admission."""
        self._records.deactivate(pod)

    def pods(self) -> Held:
        """Look up which devices each container holds."""
        return self._records.pods()

    def _announce_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _read_checkpoint(self) -> None:
        try:
            memory = decode(self._checkpoint.read_bytes(), self.behaviour)
        except FileNotFoundError:
            return
        except (CorruptError, OSError) as error:
            self._note(f"continue after failing to read the checkpoint, all devices are free: {error}")
            return
        self._records.recall(memory)
        for resource in memory.registered:
            self._endpoints[resource] = PluginClient(resource, "", self.behaviour, stopped_at=time.monotonic())

    def _write_checkpoint(self) -> None:
        draft = self._checkpoint if self.behaviour.overwrites_checkpoint else self._draft
        try:
            draft.write_bytes(encode(self._records.memory(), self.behaviour))
            draft.replace(self._checkpoint)
        except OSError as error:
            self._note(f"failed to write the checkpoint: {error}")

    # -- admission ----------------------------------------------------------------------------------------------------

    async def admit(
        self, pod: str, limits: Mapping[str, int] | None = None, *, container: str = "main", init: bool = False
    ) -> Admission:
        """Admit a container and start it; ``Kubelet.admit`` says the rest."""
        self._records.activate(pod, container, limits or {}, init=init)
        if self.behaviour.allocates_at_start:
            return await self._allocate_at_start("admit", pod, container)
        try:
            async with self._admitting:
                await self._allocate(pod, container)
        except KubeletError as error:
            self._records.deactivate(pod)
            self._note(f"pod {pod}: rejected: {error.message}")
            raise
        return await self._start_container("admit", pod, container)

    async def restart_container(self, pod: str, container: str = "main") -> Admission:
        """Start a container of an active pod again.

        Raises:
            KubeletError: the pod isn't active, or has no such container; or as ``admit`` does.
        """
        if self._records.container(pod, container) is None:
            raise KubeletError(
                "restart_container",
                f'no container "{container}" of a pod "{pod}" is active: expected one that was admitted, or named at start',
            )
        if self.behaviour.allocates_at_start:
            return await self._allocate_at_start("restart_container", pod, container)
        return await self._start_container("restart_container", pod, container)

    async def _allocate_at_start(self, op: str, pod: str, name: str) -> Admission:
        """1.8: devices are found, and Allocate called, at every start of the container."""
        self._records.free_inactive()
        answers = []
        try:
            for resource, required in self._limits(pod, name).items():
                if resource in self._records.resources and required:
                    ids = self._records.claim_at_start(pod, name, resource, required)
                    answers.append(await self._call_allocate(pod, resource, ids))
        except KubeletError as error:
            raise KubeletError(op, error.message, error.stage) from error
        self._write_checkpoint()
        return self._records.admission(pod, name, answers, tells_cdi=False)

    async def _allocate(self, pod: str, name: str) -> None:
        """Give a container its devices, those it already has included."""
        updated = False
        for resource, required in self._limits(pod, name).items():
            if not self._records.manages(resource):
                continue
            if not updated:
                updated = True
                self._records.free_inactive()
            claim = self._records.claim(pod, name, resource, required)
            if claim is not None:
                await self._fulfil(claim, pod, name, resource)
        self._records.pass_on(pod, name)
        self._write_checkpoint()

    async def _fulfil(self, claim: Claim, pod: str, name: str, resource: str) -> None:
        """Let the plugin say which devices it prefers, call Allocate, and enter what came into the records."""
        plugin = self._endpoints.get(resource)
        if plugin is not None and claim.missing and self.behaviour.preferred and plugin.options.preferred_allocation:
            request = PreferredRequest(tuple(claim.available | claim.taken), tuple(claim.taken), claim.required)
            try:
                claim.take(await plugin.prefer(request) & claim.available)
            except CallError as error:
                text = f"device plugin GetPreferredAllocation rpc failed with err: {error}"
                raise KubeletError("admit", text, "allocate") from error
            self._note(f"GetPreferredAllocation {resource} {claim.required} of {len(request.available)}: OK")
        claim.take(claim.available - claim.taken)
        self._records.reserve(resource, claim.taken)
        ids = tuple(claim.taken)
        try:
            answer = await self._call_allocate(pod, resource, ids)
        except _EmptyAnswerError:
            raise  # the kubelet forgets to give the devices back
        except KubeletError:
            self._records.release()
            raise
        self._records.allot(pod, name, resource, ids, answer)

    async def _call_allocate(self, pod: str, resource: str, ids: tuple[str, ...]) -> ContainerAnswer:
        plugin = self._endpoints.get(resource)
        line = f"Allocate {resource} for pod {pod}: {', '.join(sorted(ids)[:8])}" + ("…" if len(ids) > 8 else "")
        try:
            if plugin is None:
                raise CallError(self.behaviour.unknown_plugin.format(resource))  # noqa: TRY301  noted like a failed call
            answers = await plugin.allocate(ids)
        except CallError as error:
            self._note(f"{line}: {error}")
            raise KubeletError("admit", str(error), "allocate") from error
        if not answers:
            self._note(f"{line}: no container_responses")
            raise _EmptyAnswerError("admit", self.behaviour.empty_answer, "allocate")
        self._note(f"{line}: OK")
        return known(answers[0], self.behaviour)

    async def _start_container(self, op: str, pod: str, name: str) -> Admission:
        """Start a container: PreStartContainer, and what the container runtime is told."""
        reallocate = False
        for resource, required in self._limits(pod, name).items():
            if not self._records.manages(resource) or (required == 0 and not self.behaviour.starts_for_none):
                continue
            if self.behaviour.pre_start:
                await self._pre_start(op, pod, name, resource)
            reallocate |= self.behaviour.reallocates and not self._records.ids(pod, name, resource)
        if reallocate:
            try:
                async with self._admitting:
                    await self._allocate(pod, name)
            except KubeletError as error:
                raise KubeletError(op, error.message, "start") from error
        return self._records.admission(pod, name, tells_cdi=self._tells_cdi)

    async def _pre_start(self, op: str, pod: str, name: str, resource: str) -> None:
        plugin = self._endpoints.get(resource)
        if plugin is None:
            raise KubeletError(op, f"endpoint not found in cache for a registered resource: {resource}", "start")
        if not plugin.options.pre_start_required:
            return
        ids = tuple(self._records.ids(pod, name, resource))
        if not ids:
            text = f"no devices found allocated in local cache for pod {pod}, container {name}, resource {resource}"
            raise KubeletError(op, text, "start")
        try:
            await plugin.pre_start(ids)
        except CallError as error:
            self._note(f"PreStartContainer {resource} for pod {pod}: {error}")
            raise KubeletError(op, f"device plugin PreStartContainer rpc failed with err: {error}", "start") from error
        self._note(f"PreStartContainer {resource} for pod {pod}: OK")

    def _limits(self, pod: str, name: str) -> Mapping[str, int]:
        container = self._records.container(pod, name)
        return container.limits if container is not None else {}


class _EmptyAnswerError(KubeletError):
    """An Allocate answer for no container at all."""


class _Registration(grpc.GenericRpcHandler):
    """The one service that a kubelet of this version has on its socket."""

    def __init__(self, manager: DeviceManager) -> None:
        self._manager = manager

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        called = handler_call_details.method
        served = by_name(self._manager.behaviour.dialect).registration_service
        if called == f"/{served}/Register":
            return grpc.unary_unary_rpc_method_handler(self._manager.register)
        service, _, method = called.lstrip("/").partition("/")
        why = f"unknown service {service}" if service != served else f"unknown method {method} for service {service}"

        async def refuse(_request: bytes, context: Context) -> bytes:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, why)

        return grpc.unary_unary_rpc_method_handler(refuse)


class _Lateness:
    """How late a 1 ms timer is at worst: what part of a measured gap the machine itself may have caused."""

    def __init__(self) -> None:
        self.worst_ms = 0.0

    async def watch(self) -> None:
        while True:
            before = time.monotonic_ns()
            await asyncio.sleep(0.001)
            self.worst_ms = max(self.worst_ms, (time.monotonic_ns() - before) / 1e6 - 1)
