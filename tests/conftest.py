"""What every test shares: a folder for sockets, a header that says what is really run against, how hypothesis searches.

No example has a deadline, nor may making one be too slow: a busy machine is not a broken promise. ``mutants``
(tests/mutants) searches the same way each time, and doesn't look for the smallest failure: there any will do.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, Phase, settings

from gateway.cli import run
from gateway.configuration.settings import Settings
from gateway.wires import log as observe
from gateway_lab.kubelets.build import available, built

PATIENT = settings(deadline=None, suppress_health_check=(HealthCheck.too_slow,))
settings.register_profile("patient", PATIENT)
settings.register_profile("mutants", PATIENT, derandomize=True, phases=(Phase.explicit, Phase.generate))
settings.load_profile("patient")


def pytest_report_header() -> list[str]:
    wire = ", ".join(f"{name} {version(name)}" for name in ("grpcio", "protobuf"))
    kubelets = ", ".join(kubelet for kubelet in available() if built(kubelet))
    return [
        f"against: Python {platform.python_version()}, {wire}",
        f"genuine kubelets: {kubelets or 'none (make kubelets)'}",
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the module that computes longest: where modules are dealt out to processes, all would wait for it in the end."""
    items.sort(key=lambda item: item.path.name != "test_sides.py")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose name is short enough for a socket in it (107 bytes), as those of ``tmp_path`` are not."""
    root = Path(tempfile.mkdtemp(prefix="dpg-"))
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command that runs in a test's own process configures the log of all tests after it."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Runs of the daemon, not run: the settings that it would have had."""
    runs: list[Settings] = []

    def serve(settings: Settings) -> int:
        runs.append(settings)
        return 0

    monkeypatch.setattr(run, "serve", serve)
    return runs


@pytest.fixture
def no_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configured once, a logger stays so for the whole process: for every test after these."""
    monkeypatch.setattr(observe, "configure", lambda *_: None)
