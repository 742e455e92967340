"""The README's five steps on a genuine node, as they are written there: those that Helm and kubectl do.

The image is in no registry, but on the node already, under the name that the README gives it; the GPUs are simulated.
"""

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from gateway_lab.node import Node
from gateway_lab.node.api import Api
from gateway_lab.node.chart import helm
from gateway_lab.node.image import BUSYBOX
from gateway_lab.node.installed import STATE

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]
ROOT = Path(__file__).parents[2]
SAMPLE = "docker.io/library/busybox:1.37"
TEXT = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Install\n")[2].partition("\n## ")[0]
COMMANDS = [line.strip() for line in TEXT.splitlines() if re.match(r"    (helm|kubectl) ", line)]
[REMOVAL] = re.findall(r"`(helm uninstall [^`]+)`", TEXT)
[IMAGE] = re.findall(r"^    IMAGE=(\S+)$", TEXT, re.MULTILINE)


@pytest_asyncio.fixture(loop_scope="session")
async def node(images: list[Path], tmp_path: Path) -> AsyncIterator[Node]:
    """A node whose runtime has what is to be pulled; afterwards nobody sees that a gateway was there."""
    one = await prepared(tmp_path, images)
    (tmp_path / "values.yaml").write_text("gateway: {backend: simulated}\n")
    await one.ctr("images", "tag", f"docker.io/library/{IMAGE.rpartition('/')[2]}", IMAGE)
    await simulates(one)
    yield one
    await done(one, tmp_path, f"{REMOVAL} --ignore-not-found --wait")
    shutil.rmtree(one.root / STATE)


async def prepared(folder: Path, images: Sequence[Path] = ()) -> Node:
    """A node with these images, and a folder in which Helm and the chart are where a page's commands look for them."""
    node = Node.here()
    (folder / "bin").mkdir()
    (folder / "bin" / "helm").symlink_to(helm())
    shutil.copytree(ROOT / "deploy", folder / "deploy")
    for archive in images:
        await node.import_image(archive)
    await node.ctr("images", "tag", "--force", BUSYBOX, SAMPLE)
    return node


async def simulates(node: Node) -> None:
    """Give the node the label for simulated GPUs."""
    label = {"metadata": {"labels": {"device-plugin-gateway.io/simulated": "true"}}}
    await Api.of(node).merge(f"/api/v1/nodes/{node.name}", label)


async def done(node: Node, folder: Path, command: str) -> str:
    """Run a command of the README; give what it said."""
    facts = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder), "IMAGE": IMAGE}
    ran = await asyncio.to_thread(
        subprocess.run,
        ["bash", "-euo", "pipefail", "-c", command.replace("samples/nvidia.yaml", "samples/simulated.yaml")],
        cwd=folder,
        env=os.environ | {"KUBECONFIG": str(node.kubeconfig)} | facts,
        check=False,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert not ran.returncode, f"{command}: {ran.returncode}: {ran.stdout}{ran.stderr}"
    return ran.stdout


async def test_the_five_steps_work_as_they_are_written(node: Node, tmp_path: Path) -> None:
    assert [command.split()[0] for command in COMMANDS] == ["helm", *["kubectl"] * 5]
    said = [await done(node, tmp_path, command) for command in COMMANDS]
    assert "NVIDIA_VISIBLE_DEVICES=GPU-" in said[-1]
    await done(node, tmp_path, REMOVAL)
