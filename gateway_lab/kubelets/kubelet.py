"""One handle on a kubelet, whether emulated or genuine: a process that speaks JSON lines, and what it can be asked.

Both kinds speak the same protocol on stdin and stdout (``gateway_lab/kubelets/driver/README.md``), so that a scenario is written
once. A kubelet restart or upgrade is: end the process (``kill``), launch another one on the same directory.

The process is killed, whole, when the handle is closed, when ``launch`` fails, and (by the end of its stdin) when this
process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from msgspec import Struct
from msgspec.structs import asdict

from devices.model import ContainerAnswer, DeviceNode, Mount
from gateway_lab.spawned import Spawned, spawn

DEADLINE_SECONDS = 20.0
"""How long an op may take that waits for no plugin."""
PLUGIN_DEADLINE_SECONDS = 60.0
"""How long an op may take that calls a plugin (PreStartContainer alone has 30 s)."""
LINE_LIMIT = 64 << 20
"""The most bytes in one reply: the records of 10 000 devices fit many times."""
LOG_TAIL_BYTES = 16 << 10


class KubeletError(Exception):
    """An op that failed. ``stage`` says where in an admission: ``allocate`` (final) or ``start`` (retried), else ''."""

    def __init__(self, op: str, message: str, stage: str = "") -> None:
        super().__init__(f"{op}: {message}" + (f" (at stage {stage})" if stage else ""))
        self.op = op
        self.message = message
        self.stage = stage


class Version(Struct, frozen=True):
    """Which kubelet it is: ``kubernetes`` such as ``v1.28.15``, ``runtime`` such as ``go1.26.6`` or ``python3.11.2``."""

    kubernetes: str
    runtime: str
    directory: str
    pid: int


class Totals(Struct, frozen=True):
    """How many devices the kubelet would tell the API server of, by resource name."""

    capacity: Mapping[str, int]
    allocatable: Mapping[str, int]


class Seen(Struct, frozen=True):
    """The records that were waited for, and CLOCK_MONOTONIC in nanoseconds when they were first seen."""

    totals: Totals
    monotonic_ns: int


class Gap(Struct, frozen=True):
    """How long after the first possible connect the records were right, and how late a 1 ms timer was meanwhile (worst)."""

    gap_ms: float
    timer_late_ms: float


class Admission(Struct, frozen=True):
    """What a container got: device IDs by resource name (sorted), and what the container runtime is told."""

    devices: Mapping[str, tuple[str, ...]]
    answer: ContainerAnswer


class Demand(Struct, frozen=True):
    """What one container of an active pod asks of one resource; a pod is named by its UID."""

    pod: str
    resource: str
    count: int
    container: str = "main"
    init: bool = False


class Running(Struct, frozen=True):
    """A container that the runtime reports as running when the kubelet starts."""

    pod: str
    container: str = "main"
    id: str = "container-id"


class Faults(Struct, frozen=True):
    """What goes wrong in an emulated kubelet until it is told otherwise; the default is: nothing."""

    register_hangs: bool = False
    """Register is not answered."""
    register_lost: bool = False
    """Register is not answered, ever: not even when this fault is over."""
    register_late_ms: float = 0
    """Register is looked at so much later."""
    register_errors: int = 0
    """So many Registers are answered with ``register_code`` and ``register_text``; then they work again."""
    register_code: str = "UNAVAILABLE"
    register_text: str = "the emulated kubelet was told to fail"
    never_calls_back: bool = False
    """Register is answered with OK, and the kubelet never connects."""
    reads_no_lists: bool = False
    """The streams of lists are left open and not read: the plugin's updates pile up on its side."""
    supports_only: str = ""
    """Register is refused by a kubelet that speaks only this version."""
    listen_late_ms: float = 0
    """At start kubelet.sock is bound, but connect() is refused for so long."""
    report_late_ms: float = 0
    """1.25 to 1.36: the time between closing a plugin's connection and reporting its resource as gone."""


Held = Mapping[str, Mapping[str, Mapping[str, tuple[str, ...]]]]
"""Device IDs by pod, container and resource name."""


class Kubelet(Spawned):
    """A running kubelet process. Make one with ``launch``; end it with ``close``, or use it as a context manager."""

    def __init__(
        self,
        version: str,
        directory: Path,
        kind: Literal["emulated", "genuine"],
        process: asyncio.subprocess.Process,
        log: IO[bytes],
    ) -> None:
        super().__init__(process)
        self.version = version
        self.directory = directory
        self.kind = kind
        self._log = log
        self._waiting: dict[int, tuple[str, asyncio.Future[dict[str, Any]]]] = {}
        self._last_id = 0
        self._reader = asyncio.create_task(self._read(), name=f"kubelet-{version}-replies")

    @classmethod
    async def launch(
        cls, version: str, directory: Path, genuine: Path | None = None, log: Path | None = None
    ) -> Kubelet:
        """Spawn kubelet ``version`` on ``directory``: the binary ``genuine``, or an emulated one. It is not started yet.

        ``log`` is where its log goes (appended to); without it, it is kept for error messages only.

        Raises:
            KubeletError: it didn't come up.
        """
        arguments = (
            (sys.executable, "-m", "gateway_lab.kubelets.emulated", "--version", version, "--dir", str(directory))
            if genuine is None
            else (str(genuine), "-dir", str(directory))
        )
        sink: IO[bytes] = tempfile.TemporaryFile() if log is None else log.open("a+b")  # noqa: SIM115  closed in close()
        try:
            process = await spawn(
                arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=sink,
                limit=LINE_LIMIT,
            )
        except BaseException:
            sink.close()
            raise
        kubelet = cls(version, directory, "emulated" if genuine is None else "genuine", process, sink)
        try:
            await kubelet.about()
        except BaseException:
            await asyncio.shield(kubelet.close())
            raise
        return kubelet

    def log(self) -> str:
        """The end of the kubelet's own log."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), LOG_TAIL_BYTES, max(0, size - LOG_TAIL_BYTES)).decode(errors="replace")

    # -- what it can be asked -----------------------------------------------------------------------------------------

    async def about(self) -> Version:
        """Ask which kubelet it is."""
        reply = await self._ask("version")
        return Version(reply["kubernetes"], reply["go"], reply["dir"], reply["pid"])

    async def start(
        self,
        pods: Sequence[Demand] = (),
        *,
        ready: bool = True,
        running: Sequence[Running] = (),
        gates: str = "",
        numa: Sequence[int] = (),
        topology: str = "",
    ) -> None:
        """Start the device manager; when this returns, kubelet.sock listens.

        ``pods`` are active from the start (a pod with devices in the checkpoint that isn't among them loses them);
        ``ready`` says whether the kubelet has heard of all of them; ``gates`` are feature gates, ``A=true,B=false``;
        ``topology`` is the policy of its topology manager (genuine ones of 1.37 and later).
        """
        fields = _start(pods, ready=ready, running=running, gates=gates, numa=numa)
        await self._ask("start", **fields | ({"topology": topology} if topology else {}))

    async def start_measured(
        self, resource: str, count: int, *, seconds: float = 10, pods: Sequence[Demand] = ()
    ) -> Gap:
        """Start, and measure how long it takes until exactly ``count`` of ``resource`` are allocatable."""
        fields = _start(pods, ready=True, running=(), gates="", numa=())
        fields["measure"] = {"resource": resource, "count": count, "seconds": seconds}
        reply = await self._ask("start", DEADLINE_SECONDS + seconds, **fields)
        return Gap(reply["gap_ms"], reply["timer_late_ms"])

    async def ready(self, *, ready: bool = True) -> None:
        """Say whether the kubelet has heard of all its pods; until then no pod's devices are freed."""
        await self._ask("ready", ready=ready)

    async def admit(
        self,
        pod: str,
        resource: str = "",
        count: int = 0,
        *,
        container: str = "main",
        init: bool = False,
    ) -> Admission:
        """Admit a container (it gets devices) and start it (it gets the plugin's answer).

        Raises:
            KubeletError: ``stage`` is ``allocate`` (the pod has failed for good) or ``start`` (a kubelet tries again).
        """
        wanted = {resource: count} if resource else {}
        return await self._admission("admit", pod=pod, container=container, limits=wanted, init=init)

    async def restart_container(self, pod: str, container: str = "main") -> Admission:
        """Start a container again, of a pod that is known."""
        return await self._admission("restart_container", pod=pod, container=container)

    async def remove(self, pod: str) -> None:
        """End a pod. As in a kubelet, its devices are freed at the next admission."""
        await self._ask("remove", pod=pod)

    async def pods(self) -> Held:
        """Look up which devices each container holds."""
        reply = await self._ask("pods")
        return {
            pod: {name: _devices(held) for name, held in containers.items()}
            for pod, containers in reply["pods"].items()
        }

    async def totals(self) -> Totals:
        """Look up what the kubelet would tell the API server."""
        return _totals(await self._ask("capacity"))

    async def wait(self, resource: str, count: int, seconds: float = 10) -> Seen:
        """Wait until exactly ``count`` of ``resource`` are allocatable (0 also: not there)."""
        reply = await self._ask("wait", DEADLINE_SECONDS + seconds, resource=resource, count=count, seconds=seconds)
        return Seen(_totals(reply), reply["monotonic_ns"])

    async def registers(self) -> Mapping[str, int]:
        """Count the Registers that reached this process, by resource name, the refused ones too."""
        counted: dict[str, int] = (await self._ask("registers"))["registers"]
        return counted

    async def fault(self, faults: Faults) -> None:
        """Make things go wrong from now on (emulated kubelets only); ``Faults()`` heals all."""
        await self._ask("fault", faults=asdict(faults))

    async def cut(self, resource: str) -> None:
        """Break the connection to the resource's plugin, once, from the kubelet's side (emulated kubelets only)."""
        await self._ask("cut", resource=resource)

    async def ask(self, op: str, deadline: float = DEADLINE_SECONDS, **fields: Any) -> dict[str, Any]:
        """Ask for an op by its name in the protocol, such as the genuine kubelet's ``golden``."""
        return await self._ask(op, deadline, **fields)

    # -- how it ends --------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Stop the device manager in an orderly way, which a real kubelet never does; it can be started again."""
        await self._ask("stop")

    async def kill(self) -> None:
        """End the process as a crash does (KILL)."""
        await super().kill()
        await self._gone()

    async def terminate(self, seconds: float = 5) -> None:
        """End the process as an upgrade does (TERM); it leaves its socket behind.

        Raises:
            KubeletError: it was still there after ``seconds``; it has been killed.
        """
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(seconds):
                    await self._process.wait()
            except TimeoutError:
                await self.kill()
                raise self._error("terminate", f"the process was still there {seconds:g} s after SIGTERM") from None
        await self._gone()

    async def close(self) -> None:
        """End the process, if it still runs, and let go of everything."""
        try:
            await self.kill()
        finally:
            self._log.close()

    # -- the protocol -------------------------------------------------------------------------------------------------

    async def _ask(self, op: str, deadline: float = DEADLINE_SECONDS, **fields: Any) -> dict[str, Any]:
        stdin = self._process.stdin
        assert stdin is not None
        if not self.alive or self._reader.done():
            raise self._error(op, f"the process has ended (exit code {self._process.returncode})")
        self._last_id += 1
        number = self._last_id
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (op, reply)
        try:
            async with asyncio.timeout(deadline):
                with contextlib.suppress(ConnectionError):  # the reader tells what became of the process
                    stdin.write(json.dumps({"id": number, "op": op, **fields}).encode() + b"\n")
                    await stdin.drain()
                found = await reply
        except TimeoutError:
            raise self._error(op, f"no reply within {deadline:g} s") from None
        finally:
            self._waiting.pop(number, None)
        if not found.get("ok"):
            raise KubeletError(op, str(found.get("error", "failed without a reason")), str(found.get("stage", "")))
        return found

    async def _admission(self, op: str, **fields: Any) -> Admission:
        reply = await self._ask(op, PLUGIN_DEADLINE_SECONDS, **fields)
        return Admission(_devices(reply["devices"]), _answer(reply["options"]))

    async def _read(self) -> None:
        """Hand each reply to whoever waits for it; at the end of the stream, tell everyone."""
        stdout = self._process.stdout
        assert stdout is not None
        why = "the process closed its replies"
        try:
            while line := await stdout.readline():
                reply = json.loads(line)
                _, waiting = self._waiting.get(reply.get("id"), ("", None))
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        except (ValueError, TypeError, AttributeError) as error:
            why = f"what came is no reply: {error}"
        finally:
            for op, waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(self._error(op, why))

    def _error(self, op: str, message: str) -> KubeletError:
        tail = "\n".join(self.log().splitlines()[-12:])
        return KubeletError(
            op,
            f"{message}: {self.kind} kubelet {self.version}, pid {self.pid}"
            + (f"; its log ends:\n{tail}" if tail else ""),
        )

    async def _gone(self) -> None:
        """Wait for the end of a process that was told to end, and of the task that reads from it."""
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        await asyncio.wait([self._reader])


def _start(
    pods: Sequence[Demand],
    *,
    ready: bool,
    running: Sequence[Running],
    gates: str,
    numa: Sequence[int],
) -> dict[str, Any]:
    return {
        "pods": [asdict(pod) for pod in pods],
        "ready": ready,
        "running": [asdict(one) for one in running],
        "gates": gates,
        "numa": list(numa),
    }


def _totals(reply: Mapping[str, Any]) -> Totals:
    return Totals(reply["capacity"], reply["allocatable"])


def _devices(held: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    return {resource: tuple(ids) for resource, ids in held.items()}


def _answer(options: Mapping[str, Any]) -> ContainerAnswer:
    return ContainerAnswer(
        envs=options["envs"],
        mounts=tuple(Mount(m["container_path"], m["host_path"], m["read_only"]) for m in options["mounts"]),
        device_nodes=tuple(
            DeviceNode(d["container_path"], d["host_path"], d["permissions"]) for d in options["devices"]
        ),
        annotations=options["annotations"],
        cdi_devices=tuple(options["cdi_devices"]),
    )
