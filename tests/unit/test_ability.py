"""Which gateway could serve by the kubelet that runs: only one that could asks the leader to make room."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.handover import Ability
from gateway.kubelet.identity import KUBELET_SOCKET, kubelet_id
from gateway.registration.api import Probed


@pytest.mark.parametrize(
    ("resources", "speaks", "unable"),
    [
        pytest.param([], "v1beta1", "", id="nothing to ask for yet"),
        pytest.param([(8, "")], "v1beta1", "", id="a list that fits"),
        pytest.param([(8, "")], None, "speaks none", id="a kubelet that refuses it"),
        pytest.param([(0, "")], "v1beta1", "", id="nothing to serve, on purpose"),
        pytest.param([(8, "too large")], "v1beta1", "too large for v1beta1", id="a list that is too large"),
        pytest.param([(8, "too large"), (8, "")], "v1beta1", "", id="one of two lists fits"),
    ],
)
async def test_only_who_could_serve_asks(
    folder: Path, resources: Sequence[tuple[int, str]], speaks: str | None, unable: str
) -> None:
    with socket.socket(socket.AF_UNIX) as kubelet:
        kubelet.bind(str(folder / KUBELET_SOCKET))
    here = kubelet_id(folder / KUBELET_SOCKET)
    presence = SimpleNamespace(socket=folder / KUBELET_SOCKET, listens=lambda: True)

    def served(devices: int, why: str) -> Any:
        large = SimpleNamespace(too_large=lambda dialect: (why and f"{why} for {dialect.name}") or None)
        return SimpleNamespace(entries=dict.fromkeys(range(devices)), plugin=SimpleNamespace(list=large))

    all_ = {str(number): served(*one) for number, one in enumerate(resources)}
    one = Ability("auto", cast("Any", presence), cast("Any", all_))
    assert here is not None
    one._speaks = here, speaks
    found = await one.unable()
    assert unable in found
    assert bool(unable) is bool(found)


async def test_each_kubelet_is_asked_once_what_it_speaks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Path]()

    async def ask(path: Path, _seconds: float) -> Probed:
        asked.append(path)
        return Probed("v1beta1", "", "")

    monkeypatch.setattr("gateway.registration.api.ask", ask)
    presence = SimpleNamespace(socket=folder / "kubelet.sock")
    counts = list[int]()
    one = Ability("auto", cast("Any", presence), cast("Any", {"example.com/gpu": None}))
    for comes in (False, True, False, True):
        if comes:
            presence.socket.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as kubelet:
                kubelet.bind(str(presence.socket))
        assert await one.probe() == ""
        counts.append(len(asked))
    assert counts == [0, 1, 1, 2]
