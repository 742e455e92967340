"""Namespaces of a node's own (user and mount): mounts and limits that its gateways meet and nobody else on the machine.

A process that holds them waits for the end of its input, so that they are gone, whatever happens, when this process is.
Programs are run in them by ``nsenter``. No real root is needed where the machine lets users make user namespaces.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Self

from gateway_lab.spawned import Spawned, spawn

SECONDS = 10.0
"""How long making namespaces, or a command in them, may take."""


class NamespacesError(Exception):
    """The machine doesn't allow it. The message is the reason, in its own words."""


class Namespaces(Spawned):
    """Namespaces of a node. Make one with ``open``; ``async with`` closes it."""

    def __init__(self, holder: asyncio.subprocess.Process) -> None:
        super().__init__(holder)

    @classmethod
    async def open(cls) -> Self:
        """Make new namespaces.

        Raises:
            NamespacesError: this machine doesn't allow it, or has no ``unshare`` and ``nsenter``.
        """
        for program in ("unshare", "nsenter", "mount", "umount", "tee"):
            if shutil.which(program) is None:
                raise NamespacesError(f"there is no {program} here (util-linux has it)")
        made = ("unshare", "--user", "--map-root-user", "--mount", "--propagation", "private")
        pipe = asyncio.subprocess.PIPE
        holder = await spawn((*made, "sh", "-c", "echo ready && exec cat"), stdin=pipe, stdout=pipe, stderr=pipe)
        namespaces = cls(holder)
        assert holder.stdout is not None
        assert holder.stderr is not None
        try:
            async with asyncio.timeout(SECONDS):
                ready = await holder.stdout.readline()
                reason = b"" if ready else await holder.stderr.read()
        except BaseException:
            await namespaces.close()
            raise
        if not ready:
            await namespaces.close()
            raise NamespacesError(
                f"namespaces of our own aren't allowed here: {reason.decode(errors='replace').strip()}"
            )
        return namespaces

    @property
    def prefix(self) -> tuple[str, ...]:
        """What a command line begins with to be run inside; it stays the same process."""
        here = ("--user", "--mount", "--preserve-credentials", f"--wd={Path.cwd()}")
        return ("nsenter", "--target", str(self.pid), *here, "--")

    def inside(self, path: Path) -> Path:
        """Give the path by which this process reaches what ``path`` is inside."""
        return Path("/proc", str(self.pid), "root", *path.absolute().parts[1:])

    async def run(self, *command: str, text: str = "") -> None:
        """Run a command inside, with ``text`` as its input.

        Raises:
            NamespacesError: it failed; the message has its words.
        """
        process = await asyncio.create_subprocess_exec(
            *self.prefix,
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(SECONDS):
            _, said = await process.communicate(text.encode())
        if process.returncode:
            raise NamespacesError(f"{' '.join(command)}: {said.decode(errors='replace').strip()}")

    async def limit(self, name: str, value: int) -> None:
        """Set one of the limits in /proc/sys/user, such as ``max_inotify_instances``, for everybody inside."""
        await self.run("tee", f"/proc/sys/user/{name}", text=f"{value}\n")

    async def close(self) -> None:
        """Let go of the namespaces; they end with the last process in them."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(SECONDS):
                await self._process.wait()
        except TimeoutError:
            await self.kill()
