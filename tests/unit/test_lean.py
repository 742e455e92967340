"""What the daemon's memory never holds: every import is paid on every node (docs/adr/0003)."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Without rich, as on a node: structlog imports it wherever it is installed.
LOADED = "import sys; sys.modules['rich'] = None; import gateway.cli.run, gateway.daemon, gateway.compose, gateway.process; print(*sys.modules)"
SERVING = """
import sys
sys.modules["rich"] = None
from pathlib import Path
import gateway.cli.run, gateway.daemon, gateway.compose, gateway.process
from gateway.configuration.settings import Settings
gateway.compose.source(Settings(backend="simulated"))
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] in {"gateway", "adapters", "devices"} and not name.startswith("adapters.pb"):
        print(name, len(Path(module.__file__).read_text().splitlines()))
"""
FEATURES = """
gateway_lab gateway.bridge adapters.pluginregistration gateway.cli.demo gateway.cli.probe gateway.cli.status gateway.cli.advice gateway.doctor
gateway.wires.http gateway.telling.gathered gateway.telling.gpumetrics gateway.telling.metrics gateway.telling.status devices.combined devices.generic devices.gpu
gateway.configuration.file gateway.configuration.document gateway.kubernetes gateway.dra gateway.sides.table adapters.dra devices.gpu.cdi
devices.gpu.nvidia gateway.cli.nodeconfig pynvml yaml tenacity inotify_simple ctypes.util tempfile random secrets bz2 lzma http email zipfile
urllib.request importlib.metadata h11 hpack prometheus_client
"""
MOST_MODULES, MOST_LINES = 120, 17_900
"""What of our own a daemon with every feature off may load, beside the generated. 55 modules with 3 150 lines more once took 14 ms of
its start and 0.4 MiB. Before these numbers grow: what is only needed where a feature is on is imported there."""


@pytest.fixture(scope="module")
def loaded() -> frozenset[str]:
    """Every module that a daemon has loaded before it chooses a backend, in an interpreter of its own."""
    done = subprocess.run([sys.executable, "-c", LOADED], check=True, stdout=subprocess.PIPE, text=True)
    return frozenset(done.stdout.split())


@pytest.mark.parametrize("module", FEATURES.split())
def test_the_daemon_does_not_load(module: str, loaded: frozenset[str]) -> None:
    assert not {name for name in loaded if name == module or name.startswith(f"{module}.")}


def test_what_is_loaded_of_our_own_with_every_feature_off() -> None:
    done = subprocess.run([sys.executable, "-c", SERVING], check=True, stdout=subprocess.PIPE, text=True)
    lines = {name: int(count) for name, count in (line.split() for line in done.stdout.splitlines())}
    assert "devices.gpu.simulated.backend" in lines
    assert not [name for name in lines if name.startswith(("devices.gpu.cdi", "devices.gpu.nvidia.cdi", "gateway.dra"))]
    assert len(lines) <= MOST_MODULES
    assert sum(lines.values()) <= MOST_LINES
