"""Proves, in a copy of the tree, that an API version or a vendor that doesn't exist works (``test_contributing`` builds them).

Run as a program there: ``python pretend.py v1`` or ``python pretend.py RESOURCE ENVS NODES``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from adapters import levels, registry
from gateway.registration.api import ask
from gateway_lab.gatewayproc import GatewayProcess, gateway_command
from gateway_lab.kubelets import build
from gateway_lab.kubelets.kubelet import Kubelet

GUARD = 60.0


async def speaks(api: str, folder: Path) -> None:
    """A gateway finds out that kubelet 1.38 speaks ``api``, and serves it; and that those before don't, the oldest neither."""
    assert levels.level(registry.by_name(api), levels.Evidence("grpc-go/1.99.0")).low == 38
    assert build.available()[-1] == "1.38"
    async with await GatewayProcess.launch(gateway_command(folder / "dp", folder / "state")) as gateway:
        await gateway.begun()
        for version, spoken in (
            ("1.37", "v1beta1"),
            ("1.38", api),
            ("1.8", "0.1"),
            ("1.9", "v1alpha2"),
            ("1.37", "v1beta1"),
        ):
            mark = gateway.seen
            async with await Kubelet.launch(version, folder / "dp") as kubelet:
                await kubelet.start()
                await kubelet.wait("nvidia.com/gpu", 8)
                assert (await ask(folder / "dp" / "kubelet.sock")).api == spoken
                await gateway.wait_for("registered", since=mark, api=spoken)
                given = await kubelet.admit(f"on-{version}", "nvidia.com/gpu", 1)
                assert given.answer.envs["NVIDIA_VISIBLE_DEVICES"] == given.devices["nvidia.com/gpu"][0]


async def offers(resource: str, envs: dict[str, str], nodes: list[str], folder: Path) -> None:
    """A gateway with the backend ``pretend`` offers its GPU, and a container gets these variables and device nodes."""
    command = gateway_command(folder / "dp", folder / "state", options=("--backend", "pretend"))
    async with (
        await Kubelet.launch("1.37", folder / "dp") as kubelet,
        await GatewayProcess.launch(command) as gateway,
    ):
        await kubelet.start()
        await gateway.begun()
        await kubelet.wait(resource, 1)
        given = await kubelet.admit("pod", resource, 1)
        assert (dict(given.answer.envs), [one.host_path for one in given.answer.device_nodes]) == (envs, nodes), given


async def main() -> None:
    assert Path(build.__file__).is_relative_to(Path.cwd()), "it must be the copy that is tried"
    with tempfile.TemporaryDirectory(prefix="dpg-") as name:
        folder = Path(name)
        (folder / "dp").mkdir()
        async with asyncio.timeout(GUARD):
            what, *arguments = sys.argv[1:]
            if arguments:
                envs, nodes = map(json.loads, arguments)
                await offers(what, envs, nodes, folder)
            else:
                await speaks(what, folder)


if __name__ == "__main__":
    asyncio.run(main())
