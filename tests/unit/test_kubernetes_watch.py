"""How long the API server is left alone after a failure, and how often the same is asked for."""

from __future__ import annotations

import pytest

from gateway.kubernetes import watch
from gateway.kubernetes.client import KubernetesError

AWAY = KubernetesError("GET", 0, "", away=True)
BUSY = KubernetesError("GET", 503, "")
LATER = KubernetesError("GET", 429, "", retry_after=7)
LATE = KubernetesError("GET", 429, "", retry_after=3600)


@pytest.mark.parametrize(
    ("error", "failures", "chance", "seconds"),
    [
        (None, 0, 1, 0.2),
        (None, 0, 0, 0.1),
        (None, 50, 1, 3),
        (AWAY, 1, 1, 0.4),
        (AWAY, 3, 0, 0.8),
        (AWAY, 1000, 1, 3),
        (AWAY, 1000, 0, 1.5),
        (BUSY, 1, 1, 0.4),
        (BUSY, 1000, 1, 30),
        (LATER, 0, 0, 7),
        (LATER, 0, 1, 10.5),
        (LATE, 0, 0, 30),
    ],
)
def test_how_long_the_server_is_left_alone(
    error: KubernetesError | None, failures: int, chance: float, seconds: float
) -> None:
    assert watch.pause(error, failures, chance) == pytest.approx(seconds)


def test_the_same_is_asked_ever_more_seldom_and_something_else_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "REPEAT_S", 1.0)
    monkeypatch.setattr(watch, "REPEAT_MAX_S", 6.0)
    backoff = watch.Backoff()
    assert [now for now in range(20) if backoff.due("a", now)] == [0, 1, 3, 7, 13, 19]
    assert backoff.due("b", 20)
    assert not backoff.due("b", 20.5)
