"""A release as its users get it, on a genuine node: `make release-dry-run` made it, and brings the node.

A registry on the node's loopback has image and chart. The README's steps run with that chart, which names its image by digest.
RELEASE is the folder of the release.
"""

import asyncio
import hashlib
import http.server
import json
import os
import re
import subprocess
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from gateway_lab.node.chart import helm
from gateway_lab.spawned import Spawned, spawn
from tests.e2e.test_readme import COMMANDS, REMOVAL, done, prepared, simulates
from tools.release.__main__ import push

pytestmark = pytest.mark.e2e
RELEASE = Path(os.environ.get("RELEASE", "dist/release"))


@pytest.fixture
def released() -> dict[str, str]:
    found: dict[str, str] = json.loads((RELEASE / "release.json").read_text())
    return found


@pytest_asyncio.fixture(loop_scope="session")
async def registry(released: dict[str, str], tmp_path: Path) -> AsyncIterator[str]:
    """Serve an empty registry where the release was made for; give its address."""
    address = released["image"].partition("/")[0]
    config = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "registry")}},
        "http": {"addr": address},
    }
    path = tmp_path / "registry.yaml"
    path.write_text(yaml.safe_dump(config))
    async with Spawned(await spawn(["docker-registry", "serve", str(path)])), asyncio.timeout(60):
        host, _, port = address.partition(":")
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                break
            except ConnectionRefusedError:
                await asyncio.sleep(0.1)
        yield address


@pytest.mark.asyncio(loop_scope="session")
async def test_the_readmes_steps_work_with_what_was_released(
    registry: str, released: dict[str, str], tmp_path: Path
) -> None:
    for line in (RELEASE / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((RELEASE / name).read_bytes()).hexdigest() == digest
    await asyncio.to_thread(push, RELEASE, registry, "tls-verify=false")

    node = await prepared(tmp_path)
    await simulates(node)
    (tmp_path / "values.yaml").write_text("gateway: {backend: simulated}\n")

    chart = f"oci://{released['chart'].partition('@')[0]} --plain-http --version {released['version']}"
    install = COMMANDS[0].replace("deploy/chart", chart).replace(" --set gateway.image=$IMAGE", "")
    said = [await done(node, tmp_path, command) for command in (install, *COMMANDS[1:])]
    assert "NVIDIA_VISIBLE_DEVICES=GPU-" in said[-1]
    [running] = re.findall(
        r"\S+@sha256:\S+",
        await done(node, tmp_path, "kubectl get pods -A -l app.kubernetes.io/name -o jsonpath={..imageID}"),
    )
    assert running == released["image"]
    await done(node, tmp_path, f"{REMOVAL} --wait")


def test_helm_reads_the_plain_repository(released: dict[str, str], tmp_path: Path) -> None:
    files = partial(http.server.SimpleHTTPRequestHandler, directory=RELEASE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), files) as server:
        threading.Thread(target=server.serve_forever).start()
        repository = f"http://127.0.0.1:{server.server_port}"
        try:
            subprocess.run(
                [helm(), "pull", "device-plugin-gateway", "--repo", repository], cwd=tmp_path, check=True, timeout=60
            )
        finally:
            server.shutdown()
    name = f"device-plugin-gateway-{released['version']}.tgz"
    assert (tmp_path / name).read_bytes() == (RELEASE / name).read_bytes()
