"""What the daemon's memory never holds: every import is paid on every node (docs/adr/0003)."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOADED = "import sys, gateway.cli.main, gateway.daemon, gateway.compose; print(*sys.modules)"


@pytest.fixture(scope="module")
def loaded() -> frozenset[str]:
    """Every module that a daemon has loaded before it chooses a backend, in an interpreter of its own."""
    done = subprocess.run([sys.executable, "-c", LOADED], check=True, stdout=subprocess.PIPE, text=True)
    return frozenset(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "gateway.lab",
        "gateway.bridge",
        "adapters.pluginregistration",
        "gateway.cli.demo",
        "gateway.cli.probe",
        "gateway.cli.status",
        "gateway.cli.advice",
        "gateway.doctor",
        "gateway.wires.http",
        "gateway.telling.gpumetrics",
        "gateway.telling.metrics",
        "gateway.telling.status",
        "devices.combined",
        "devices.generic",
        "devices.gpu",
        "gateway.configuration.file",
        "gateway.configuration.document",
        "gateway.kubernetes",
        "gateway.dra",
        "adapters.dra",
        "pynvml",
        "yaml",
        "h11",
        "hpack",
        "prometheus_client",
    ],
)
def test_the_daemon_does_not_load(module: str, loaded: frozenset[str]) -> None:
    assert not {name for name in loaded if name == module or name.startswith(f"{module}.")}
