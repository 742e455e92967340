"""docs/try.md on a genuine node: the commands of Helm and kubectl as they are written there, and a kubelet restart between them."""

import re
import time
from pathlib import Path

import pytest

from tests.e2e.test_readme import ROOT, done, prepared

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]
PAGE = (ROOT / "docs/try.md").read_text()
MOST_SECONDS = 300


def commands(heading: str) -> list[str]:
    """The commands of a section of the page."""
    text = PAGE.partition(f"## {heading}")[2].partition("\n## ")[0]
    return re.findall(r"^    ((?:helm|kubectl) .+)$", text, re.MULTILINE)


async def test_what_the_page_shows_can_be_seen(images: list[Path], tmp_path: Path) -> None:
    began = time.monotonic()
    node = await prepared(tmp_path, images)
    for number in range(8):
        node.make_device(f"/dev/nvidia{number}")
    for command in commands("2. Install"):
        await done(node, tmp_path, command)
    said = [await done(node, tmp_path, command) for command in commands("3. Start pods")]
    assert len(set(re.findall(r"/dev/nvidia\d", said[-1]))) == 4
    assert time.monotonic() - began < MOST_SECONDS
    before = await done(node, tmp_path, "kubectl get pods -l app=training -o jsonpath={..containerID}")

    await node.kubelet.restart()
    await node.ready()
    for command in commands("4. Restart"):  # a kubelet that has just started knows its pods a moment later
        await done(node, tmp_path, f"until {command}; do sleep 0.2; done")
    assert await done(node, tmp_path, "kubectl get pods -l app=training -o jsonpath={..containerID}") == before

    said = [await done(node, tmp_path, command) for command in commands("5. Move")]
    assert "dra" in said[-1]
    assert await done(node, tmp_path, "kubectl get pods -l app=training -o jsonpath={..containerID}") == before
    for command in commands("Undo"):
        await done(node, tmp_path, command)
