"""Runs genuine plugins of third parties behind the bridge, on genuine kubelets of both sides of each change of the API.

Kubernetes' own sample plugin, one on KubeVirt's device-plugin-manager, and the servers of the RDMA shared plugin, which wait in
plugins_registry. They live on while the kubelet goes from one version to the next; each is ended, killed and started again.
What is said: whether allocatable was ever less than all, and whether pods got devices and kept them.

They are built like the genuine kubelets, into the same cache. The plugins register at a path that is compiled in, so each runs in
a mount namespace in which that folder is the bridge's: it takes root, or user namespaces.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gateway_lab import inplace
from gateway_lab.bench.node import Node
from gateway_lab.kubelets import build
from gateway_lab.kubelets.kubelet import Kubelet
from gateway_lab.plugins.thirdparty.built import BRIDGED as PLUGINS
from gateway_lab.plugins.thirdparty.built import binary, folder

KUBELETS: Final = ("1.8", "1.9", "1.10", "1.37")
"""The last one of each API, and the first and the last one of v1beta1."""
SECONDS: Final = 30.0
LOOK_EVERY: Final = 0.02


class Running:
    """A plugin's process, which can be ended and started again."""

    def __init__(self, node: Node, command: Sequence[str], home: Path, log: Path) -> None:
        self._command = inplace.command(str(node.root / "b" / "device-plugins"), command)
        self._home = home if home.is_dir() else node.root
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, cwd=self._home, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )

    async def end(self, sign: signal.Signals) -> None:
        """End it by a signal."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(sign)
            await self._process.wait()


@dataclass
class Seen:
    """What was offered least, of each resource."""

    kubelet: Kubelet
    least: dict[str, int]

    async def watch(self) -> None:
        """Look, until it is cancelled."""
        while True:
            offered = (await self.kubelet.totals()).allocatable
            for one in PLUGINS:
                count = offered.get(one.resource, 0)
                self.least[one.resource] = min(count, self.least.get(one.resource, count))
            await asyncio.sleep(LOOK_EVERY)


@asynccontextmanager
async def watched(kubelet: Kubelet) -> AsyncIterator[Seen]:
    """Watch what a kubelet has to give."""
    seen = Seen(kubelet, {})
    watching = asyncio.create_task(seen.watch())
    try:
        yield seen
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _served(kubelet: Kubelet) -> None:
    """Wait until the kubelet has all of them."""
    for one in PLUGINS:
        await kubelet.wait(one.resource, one.count, SECONDS)
    async with asyncio.timeout(SECONDS):
        while not {one.resource for one in PLUGINS} <= (await kubelet.registers()).keys():  # noqa: ASYNC110 - it is asked
            await asyncio.sleep(LOOK_EVERY)


def _returns(log: Path) -> int:
    return log.read_text().count("the plugin is there")


async def _again(running: Running, sign: signal.Signals, log: Path) -> None:
    """End a plugin, start it again, and wait until the bridge says that it came."""
    before = _returns(log)
    await running.end(sign)
    await running.start()
    async with asyncio.timeout(SECONDS):
        while _returns(log) == before:  # noqa: ASYNC110 - another process writes
            await asyncio.sleep(LOOK_EVERY)


async def _on(kubelet: Kubelet, version: str, running: Sequence[Running], log: Path) -> list[str]:
    """Let the plugins come and go under one kubelet; say what went wrong."""
    wrong = []
    await _served(kubelet)
    held = await kubelet.pods()
    async with watched(kubelet) as seen:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for process in running:
                await _again(process, sign, log)
        for one in PLUGINS:
            if one.count and not held:
                await kubelet.admit(f"pod-{one.source}", one.resource, 1)
    for one in PLUGINS:
        least = seen.least[one.resource]
        print(f"  kubelet {version:4}  {one.name:42} {one.resource:22} at least {least} of {one.count} allocatable")
        if least != one.count:
            wrong.append(f"{one.resource} was at {least} on {version}")
    kept = await kubelet.pods()
    if any(kept.get(pod) != devices for pod, devices in held.items()) or not kept:
        wrong.append(f"pods had {held} and have {kept} on {version}")
    return wrong


async def run(versions: Sequence[str]) -> list[str]:
    """Run all plugins on one node through these kubelets; say what went wrong."""
    binaries = [binary(one) for one in PLUGINS]
    kubelets = build.build(versions, progress=print)
    wrong: list[str] = []
    async with Node.make(Path(sys.executable)) as node:
        options = ("--backend", "none", "--bridge", str(node.root / "b"), "--log-level", "info")
        await node.unheard(node.gateway_command(options))
        async with asyncio.timeout(SECONDS):
            while not (node.root / "b" / "device-plugins" / "kubelet.sock").exists():  # noqa: ASYNC110 - another process
                await asyncio.sleep(LOOK_EVERY)
        running = []
        for path, one in zip(binaries, PLUGINS, strict=True):
            command = [str(path) if word == one.name else word for word in shlex.split(one.command)]
            made = Running(node, command, folder(one), node.root / f"{one.source}.log")
            node.stack.push_async_callback(made.end, signal.SIGKILL)
            await made.start()
            running.append(made)
        for version in versions:
            kubelet = await Kubelet.launch(version, node.sockets, kubelets[version])
            async with kubelet:
                await kubelet.start()
                wrong += await _on(kubelet, version, running, node.root / "plugin.log")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m gateway_lab.plugins.thirdparty``."""
    parser = argparse.ArgumentParser(prog="python -m gateway_lab.plugins.thirdparty", description=__doc__)
    parser.add_argument("--kubelets", default=",".join(KUBELETS), help="by default %(default)s")
    options = parser.parse_args(arguments)
    try:
        inplace.see_that_it_works()
    except inplace.InPlaceError as error:
        print(error)
        return 1
    wrong = asyncio.run(run(options.kubelets.split(",")))
    for one in wrong:
        print(f"broken: {one}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
