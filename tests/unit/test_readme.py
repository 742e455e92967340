"""The README: it is short, it has the words that people search for, and its commands and outputs are true."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gateway import VERSION
from gateway_lab.spawned import Spawned, spawn

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = TEXT.splitlines()
GATEWAY = [sys.executable, "-m", "gateway"]
PACKAGES = ["make", "--silent", "--directory", str(ROOT), "system-packages"]
GUARD = 30.0
"""Seconds after which a test that waits for ever is told so."""
NAMES = (
    "version-negotiating core",
    "adapters",
    "Rolling upgrades",
    "compatibility matrix",
    "`gateway --api auto`",
    "make demo",
    "make test",
)


def blocks(first: str) -> Iterator[str]:
    """The commands of the README that begin with a word, without their comments."""
    for line in LINES:
        if line.startswith(f"    {first}"):
            yield re.split(r"\s+#", line)[0].strip()


def test_it_is_short() -> None:
    assert len(LINES) <= 150
    assert [line for line in LINES if len(line) > 120] == []


@pytest.mark.parametrize("name", NAMES)
def test_it_names(name: str) -> None:
    assert name in TEXT


def test_it_names_the_packages_that_a_bare_debian_needs() -> None:
    assert subprocess.run(PACKAGES, check=True, capture_output=True, text=True).stdout.strip() in TEXT


def test_it_shows_a_recording_of_the_demo_that_passed() -> None:
    [picture] = re.findall(r"!\[[^\]]+\]\((docs/[^)]+\.svg)\)", TEXT)
    assert "PASSED: through 7 kubelets" in (ROOT / picture).read_text(encoding="utf-8")


def test_the_image_has_the_name_that_is_copied() -> None:
    [copied] = re.findall(r"oci-archive:(\S+)", TEXT)
    made = (ROOT / "tools/image/__main__.py").read_text(encoding="utf-8")
    assert 'f"{build.NAME}-{tag}-{made.architecture}.oci.tar"' in made
    assert re.fullmatch(r"dist/image/device-plugin-gateway-[0-9.]+-amd64\.oci\.tar", copied)


def test_its_values_are_values_of_the_chart() -> None:
    text = TEXT.partition("    # values.yaml\n")[2].partition("\n\n")[0]
    known = yaml.safe_load((ROOT / "deploy/chart/values.yaml").read_text(encoding="utf-8"))
    said = yaml.safe_load(text)
    assert said.keys() <= known.keys()
    assert said["gateway"].keys() <= known["gateway"].keys()


def test_the_plan_says_what_is_shown_of_it() -> None:
    [command] = blocks("gateway plan --from")
    done = subprocess.run(
        [*GATEWAY, *shlex.split(command)[1:]], check=True, capture_output=True, text=True, timeout=GUARD
    )
    shown = TEXT.partition(f"    {command}")[2].partition("```text\n")[2].partition("```")[0]
    assert done.stdout.startswith(shown)


@pytest.mark.parametrize("code", sorted(set(re.findall(r"`(gateway[^`]*)`", TEXT))))
def test_a_command_in_a_sentence_can_be_typed(code: str) -> None:
    words = shlex.split(code)[1:]
    alone = words[0].startswith("-")  # It is the daemon: its settings are read, and nothing is served.
    whole = ["config", "show", *words, "--backend", "simulated"] if alone else [*words, "--help"]
    done = subprocess.run([*GATEWAY, *whole], check=False, capture_output=True, text=True, timeout=GUARD)
    assert not done.returncode, done.stderr


async def test_a_node_of_ones_own_does_what_is_shown() -> None:
    kubelet, daemon, status = (shlex.split(one)[1:] for one in blocks(".venv/bin/gateway"))
    [admit] = re.findall(r"# then type: (.+)", TEXT)
    with tempfile.TemporaryDirectory(prefix="dpg-") as folder:

        def here(words: list[str]) -> list[str]:
            return [*GATEWAY, *(word.replace("/tmp/", f"{folder}/") for word in words)]

        process = await spawn(here(kubelet), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
        assert process.stdin is not None
        async with Spawned(process), asyncio.timeout(GUARD):
            await told(process, " serves ")
            async with Spawned(await spawn(here(daemon), stderr=asyncio.subprocess.DEVNULL)):
                await told(process, ": 8 healthy")
                process.stdin.write(f"{admit}\n".encode())
                await told(process, "pod web runs")
                shown = await spawn(here([*status, "--watch"]), stdout=asyncio.subprocess.PIPE)
                async with Spawned(shown):
                    await told(shown, "nvidia.com/gpu  ■■■■■■■■  8 of 8 allocatable, 2 held, 6 free")
                    await told(shown, "v1beta1, kubelet 1.26 to 1.28")
                    await told(shown, "healthy  0     default/web/main")


async def told(process: asyncio.subprocess.Process, words: str) -> None:
    """Wait until a process prints these words."""
    assert process.stdout is not None
    async for line in process.stdout:
        if words in line.decode():
            return
    pytest.fail(f"expected {words!r}, and the process ended")


def test_the_changelog_is_short() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition(f"## {VERSION}")[2].partition("\n## ")[0]
    assert len(changes.split()) <= 600
