"""What the tests of the command line share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from gateway.cli import main
from gateway.configuration.settings import Settings
from gateway.wires import log as observe


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

    monkeypatch.setattr(main, "serve", serve)
    return runs


@pytest.fixture
def no_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configured once, a logger stays so for the whole process: for every test after these."""
    monkeypatch.setattr(observe, "configure", lambda *_: None)
