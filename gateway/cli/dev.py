"""``gateway dev``: tools to write and try a device plugin. There is one: an emulated kubelet."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gateway.cli.options import Strict
from gateway.wires.log import printable_lines

if TYPE_CHECKING:
    from gateway_lab.kubelets.behaviour import Behaviour
    from gateway_lab.kubelets.devicemanager import DeviceManager

COMMANDS = """\
  admit POD RESOURCE N   admit a pod that asks for N devices, and start it
  start POD              start its container again, as after a crash
  remove POD             end a pod; its devices are freed at the next admit
  capacity               the capacity that a kubelet would report to the API server
  pods                   who holds which devices
  restart [VERSION]      restart the kubelet, also as another version. Pods keep running. Warns if
                         that version can't read the checkpoint
  help, quit"""

KUBELET_FILES = frozenset({"kubelet_internal_checkpoint", ".kubelet_internal_checkpoint", "DEPRECATION"})
"""Files that a kubelet writes to its socket directory."""


@click.group()
def dev() -> None:
    """Tools for writing and trying device plugins."""


@dev.command(
    epilog="""\b
Examples:
  gateway dev kubelet --version 1.28 --socket-dir /tmp/node
  gateway --socket-dir /tmp/node --state-dir /tmp/state --backend simulated   (in a second terminal)
  and then, in the first: admit web nvidia.com/gpu 2, restart 1.37, and: pods

\b
Commands on stdin, while it runs:
"""
    + COMMANDS
)
@click.option("--version", "version", required=True, metavar="VERSION", help="Kubelet version to emulate, from 1.8 on.")
@click.option(
    "--socket-dir",
    cls=Strict,
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of kubelet.sock and the checkpoint. Created if missing. As a real kubelet does, it deletes other files there.",
)
def kubelet(version: str, socket_dir: Path) -> None:
    """Run an emulated kubelet of any version.

    It stays in the foreground, shows what device plugins do, and takes the commands below on its standard input.

    It serves kubelet.sock with that version's device plugin API, errors and timing, and remembers what that version
    remembers over a restart. Ctrl-C ends it.
    """
    from gateway_lab.kubelets.behaviour import behaviour

    try:
        found = behaviour(version)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--version") from error
    refusal = why_unusable(socket_dir)
    if refusal:
        raise click.BadParameter(refusal, param_hint="--socket-dir")
    try:
        socket_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(f"cannot create it: {error}", param_hint="--socket-dir") from error
    asyncio.run(_run(found, socket_dir.absolute()))


def why_unusable(directory: Path) -> str:
    """Return why a kubelet must not use this directory; empty if it may. A kubelet's start deletes files."""
    if not directory.is_dir():
        return ""
    path = directory / "kubelet.sock"
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as trying:
        trying.connect(str(path))
        return f"a kubelet serves on {path} already. Choose another directory"
    strange = sorted(entry.name for entry in directory.iterdir() if not _is_kubelets(entry))
    if not strange:
        return ""
    return (
        "a kubelet's start would delete "
        f"{', '.join(strange[:3])}{', …' if len(strange) > 3 else ''} in {directory}. Choose an "
        "empty directory, or one that a kubelet used"
    )


def _is_kubelets(entry: Path) -> bool:
    mode = entry.lstat().st_mode
    return entry.name in KUBELET_FILES or stat.S_ISSOCK(mode) or stat.S_ISDIR(mode)


async def _run(found: Behaviour, directory: Path) -> None:
    from gateway_lab.kubelets.kubelet import KubeletError

    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for ending in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(ending, ended.set)
    node = _Node(directory)
    try:
        await node.boot(found)
        lines: asyncio.Queue[str] = asyncio.Queue()
        threading.Thread(target=_read, args=(loop, lines), daemon=True).start()
        ending_task = asyncio.create_task(ended.wait())
        while not ended.is_set():
            line = asyncio.create_task(lines.get())
            await asyncio.wait({line, ending_task}, return_when=asyncio.FIRST_COMPLETED)
            if not line.done():
                line.cancel()
            elif not await node.obey(line.result()):
                ended.set()
        await ending_task
    except KubeletError as error:
        raise click.ClickException(str(error)) from error
    finally:
        await node.halt()


def _read(loop: asyncio.AbstractEventLoop, lines: asyncio.Queue[str]) -> None:
    """Pass on each line of standard input. Ctrl-D on a terminal means ``quit``; a script may have no input."""
    with contextlib.suppress(RuntimeError):  # the loop is gone
        for line in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        if sys.stdin.isatty():
            loop.call_soon_threadsafe(lines.put_nowait, "quit")


def checkpoint_warning(old: str, new: str, pods: Iterable[str]) -> str:
    """Return a warning with advice if the new kubelet can't read the old one's checkpoint; else empty."""
    from gateway.cli import advice as plan

    holders, facts = ", ".join(sorted(pods)), plan.load()
    try:
        before, after = plan.kubelet(old, facts), plan.kubelet(new, facts)
    except plan.PlanError:  # A newer version: its checkpoint format is unknown.
        return ""
    if not holders or before == after or facts.keeps_checkpoint(before, after):
        return ""
    [hop] = plan.plan(facts, before, after, direct=True).hops
    way = f"`restart {hop.stop_at}` first" if hop.stop_at else "`remove` them first, as a drain would"
    return (
        f"warning: kubelet {new} can't read the checkpoint of {old}: it may give the devices of {holders} to other "
        f"pods. To prevent this: {way}. Details: gateway plan --from {old} --to {new} --direct"
    )


class _Node:
    """A directory with an emulated kubelet, and the pods, which survive its restarts."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pods: dict[str, tuple[str, int]] = {}
        self._kubelet: DeviceManager | None = None

    async def boot(self, found: Behaviour) -> None:
        from gateway_lab.kubelets.behaviour import NEWEST
        from gateway_lab.kubelets.devicemanager import DeviceManager
        from gateway_lab.kubelets.kubelet import Demand

        if self._kubelet is not None and (
            lost := checkpoint_warning(self._kubelet.behaviour.name, found.name, self._kubelet.pods())
        ):
            self.say(lost)
        await self.halt()
        if not found.certain:
            self.say(f"kubelet {found.name} is newer than any known here: it will behave like 1.{NEWEST}")
        self._kubelet = DeviceManager(found, self._directory, note=self.say)
        await self._kubelet.start([Demand(pod, resource, count) for pod, (resource, count) in self._pods.items()])

    async def halt(self) -> None:
        if self._kubelet is not None:
            await self._kubelet.stop()
            self._kubelet = None

    def say(self, event: str) -> None:
        click.echo(f"{time.strftime('%H:%M:%S')} {printable_lines(event)}")

    async def obey(self, line: str) -> bool:
        """Carry out one command. Return False if it is ``quit``."""
        from gateway_lab.kubelets.behaviour import behaviour
        from gateway_lab.kubelets.kubelet import KubeletError

        kubelet = self._kubelet
        assert kubelet is not None  # noqa: S101  booted before the first command
        try:
            match shlex.split(line, comments=True):
                case []:
                    pass
                case ["admit", pod, resource, count] if count.isdecimal():
                    await self._admit(kubelet, pod, resource, int(count))
                case ["start", pod]:
                    admission = await kubelet.restart_container(pod)
                    self.say(f"pod {pod} runs again with {_ids(i for ids in admission.devices.values() for i in ids)}")
                case ["remove", pod]:
                    kubelet.remove(pod)
                    known = self._pods.pop(pod, None)
                    self.say(f"pod {pod} has ended" if known else f"no pod {pod} was admitted")
                case ["capacity"]:
                    self._show_capacity(kubelet)
                case ["pods"]:
                    self._show_pods(kubelet)
                case ["restart"]:
                    await self.boot(kubelet.behaviour)
                case ["restart", version]:
                    await self.boot(behaviour(version))
                case ["help"]:
                    click.echo(COMMANDS)
                case ["quit"]:
                    return False
                case _:
                    self.say(f"unknown command {line.strip()!r}. Allowed:")
                    click.echo(COMMANDS)
        except (KubeletError, ValueError) as error:
            self.say(str(error))
        return True

    async def _admit(self, kubelet: DeviceManager, pod: str, resource: str, count: int) -> None:
        admission = await kubelet.admit(pod, {resource: count})
        self._pods[pod] = (resource, count)
        ids = admission.devices.get(resource, ())
        why = "" if ids or count == 0 else f": no plugin has registered {resource} (see `capacity`)"
        self.say(f"pod {pod} runs with {_ids(ids)}{why}")
        for name, value in admission.answer.envs.items():
            self.say(f"  env {name}={value}")
        for mount in admission.answer.mounts:
            self.say(f"  mount {mount.host_path} at {mount.container_path}")
        for node in admission.answer.device_nodes:
            self.say(f"  device {node.host_path} as {node.container_path} ({node.permissions})")
        for name in admission.answer.cdi_devices:
            self.say(f"  CDI device {name}")

    def _show_capacity(self, kubelet: DeviceManager) -> None:
        totals = kubelet.totals()
        for resource, total in sorted(totals.capacity.items()):
            self.say(f"{resource}: capacity {total}, allocatable {totals.allocatable[resource]}")
        if not totals.capacity:
            self.say("no resource is registered")

    def _show_pods(self, kubelet: DeviceManager) -> None:
        held = kubelet.pods()
        for pod, containers in sorted(held.items()):
            for resources in containers.values():
                for resource, ids in resources.items():
                    self.say(f"pod {pod}: {resource} {_ids(ids)}")
        if not held:
            self.say("no pod holds a device")


def _ids(devices: Iterable[str]) -> str:
    return ", ".join(sorted(devices)) or "no device"
