"""Whether a kubelet has just started, by what is known of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gateway.dra import pods
from gateway.kubelet.identity import KubeletId
from gateway.kubelet.presence import Presence


@pytest.mark.parametrize(
    ("there", "began", "starts"),
    [
        pytest.param(None, 0.0, True, id="none"),
        pytest.param(1.0, 1.0, True, id="a young one"),
        pytest.param(5.0, 5.0, False, id="an old one"),
        pytest.param(1.0, 5.0, False, id="an old one, found just now"),
        pytest.param(5.0, -3600.0, False, id="the clock was set back"),
    ],
)
def test_whether_one_starts(folder: Path, there: float | None, began: float, *, starts: bool) -> None:
    one = Presence(folder / "kubelet.sock")
    one.since = None if there is None else time.monotonic() - there
    one.kubelet = KubeletId(1, 2, round((time.time() - began) * 1e9))
    assert pods.starts(one, 4.0) is starts
