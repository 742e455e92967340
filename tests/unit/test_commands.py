"""Commands as people run them in the chart's pod (``kubectl exec POD -- gateway …``): what they print, load and take of the pod's memory."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import tarfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gateway_lab.gatewayproc import GatewayProcess
from tests.fakes.apiserver import ApiServer
from tests.unit.kubernetes import authority, node, server

__all__ = ["authority", "server"]

VALUES: Mapping[str, object] = {
    "gateway.backend": "simulated",
    "config.map": {"plain": "version: v1\n", "shared": "version: v1\n"},
    "config.default": "plain",
}
ENVIRONMENT = {
    "GATEWAY_PROBE_ADDRESS": ":8081",
    "GATEWAY_METRICS_ADDRESS": ":9400",
    "GATEWAY_BACKEND": "simulated",
    "GATEWAY_SIMULATE": "/etc/device-plugin-gateway/profile.yaml",
    "CONFIG_FILE_SRCDIR": "/available-configs",
    "DEFAULT_CONFIG": "plain",
    "FALLBACK_STRATEGIES": "named,single",
    "POD_UID": None,
    "NODE_NAME": None,
}
ARGUMENTS = ["run"]
"""What the chart makes of ``VALUES``: tests/chart holds that. None: the kubelet fills it in."""
MOST_MIB = 32
"""Of resident memory, at a command's peak: it counts against the limit of the gateway's container."""
# Without rich, as in the image: structlog imports it wherever it is installed.
COMMAND = """
import atexit, re, sys
sys.modules["rich"] = None
@atexit.register
def tell():
    with open("/proc/self/status") as status, open(%r, "w") as told:
        print(re.search("VmHWM:[^0-9]+([0-9]+) kB", status.read())[1], *sys.modules, file=told)
from gateway.__main__ import main
main()
"""


class Done:
    """A command that has ended: what it printed, its peak in MiB, and the modules that it loaded."""

    def __init__(self, out: bytes, err: bytes, status: int | None, told: str) -> None:
        peak, *modules = told.split()
        self.out, self.err, self.status = out, err.decode(), status
        self.peak, self.modules = int(peak) / 1024, {name.partition(".")[0] for name in modules} | set(modules)


class Pod:
    """A gateway in the chart's pod, its paths below ``root``."""

    def __init__(self, root: Path, server: ApiServer) -> None:
        configs, profile = root / "configs", root / "profile.yaml"
        configs.mkdir()
        for name, text in dict(VALUES["config.map"]).items():  # type: ignore[call-overload]
            (configs / name).write_text(text)
        profile.write_text("resources: {nvidia.com/gpu: {gpus: 8}}\n")
        (root / "device-plugins").mkdir()
        given = ENVIRONMENT | {
            "GATEWAY_SIMULATE": str(profile),
            "CONFIG_FILE_SRCDIR": str(configs),
            "NODE_NAME": "n1",
            "GATEWAY_SOCKET_DIR": str(root / "device-plugins"),
            "GATEWAY_STATE_DIR": str(root / "state"),
            "KUBECONFIG": str(server.kubeconfig(root / "kubeconfig")),
        }
        self.root = root
        self.environment = {"PATH": os.environ["PATH"], **{name: value for name, value in given.items() if value}}

    async def run(self, *arguments: str) -> Done:
        """Run a command in it."""
        told = self.root / "told"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", COMMAND % str(told), *arguments),
            env=self.environment,
            cwd=self.root,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        return Done(out, err, process.returncode, told.read_text())


@asynccontextmanager
async def pod(root: Path, server: ApiServer) -> AsyncIterator[Pod]:
    server.put("/api/v1/nodes/n1", **node())
    made = Pod(root, server)
    own = {"GATEWAY_PROBE_ADDRESS": "127.0.0.1:0", "GATEWAY_METRICS_ADDRESS": "127.0.0.1:0"}
    words = [f"{name}={value}" for name, value in (made.environment | own).items()]
    command = [sys.executable, "-m", "gateway", *ARGUMENTS]
    async with await GatewayProcess.launch(["/usr/bin/env", "-i", *words, *command]) as process:
        await process.wait_for("waiting for a kubelet")
        yield made


def document(done: Done) -> Any:
    return json.loads(done.out)


def archive(done: Done) -> Any:
    with tarfile.open(fileobj=io.BytesIO(done.out)) as tar:
        return sorted(member.name.partition("/")[2] for member in tar.getmembers())


EXPECTED: Mapping[tuple[str, ...], Callable[[Done], Any]] = {
    ("status", "--json"): document,
    ("devices", "--json"): document,
    ("doctor", "--json"): document,
    ("config", "show", "--json"): document,
    ("plan", "--from", "1.36", "--to", "1.37", "--json"): document,
    ("cordon", "--json", "0", "--reason", "a test"): document,
    ("uncordon", "--json", "0"): document,
    ("forget", "--json", "0"): document,
    ("release", "--all", "--json"): document,
    ("probe", "--json"): document,
    ("status", "-o", "json"): document,
    ("version", "-o", "json"): document,
    ("support-bundle", "--output", "-"): archive,
}
LEAN = [("status",), ("devices",), ("doctor",), ("support-bundle", "--output", "-")]


async def test_a_program_can_read_what_a_command_prints(folder: Path, server: ApiServer) -> None:
    async with pod(folder, server) as made:
        for arguments, read in EXPECTED.items():
            done = await made.run(*arguments)
            assert read(done), (arguments, done.err)


async def test_a_command_takes_little_of_the_memory_of_the_gateways_container(folder: Path, server: ApiServer) -> None:
    async with pod(folder, server) as made:
        for arguments in LEAN:
            done = await made.run(*arguments)
            assert not done.modules & {"grpc", "google.protobuf", "pynvml"}, arguments
            assert done.peak <= MOST_MIB, arguments
