"""Pods that ask by name for what is DRA's: who would run without a GPU, and who waits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.dra.desk import DeviceClass, Names
from gateway.dra.publisher import Current
from gateway.kubernetes.client import KubernetesError, decoded
from gateway.sides import names
from gateway.sides.side import Side

GPU, OTHER = "nvidia.com/gpu", "example.com/other"
NAMED, UNNAMED = {"by-name": GPU, "c": ""}, {"c": "", "d": OTHER}


@pytest.mark.parametrize(
    ("resources", "kubelet", "classes", "words"),
    [
        ({GPU}, 35, NAMED, "the DeviceClass by-name has the extendedResourceName"),
        ({GPU}, None, NAMED, "the DeviceClass by-name has the extendedResourceName"),
        ({GPU}, 35, None, "it can't be known whether pods that ask by name would run without their GPU: no answer"),
        ({GPU}, 35, UNNAMED, ""),
        ({GPU}, 36, NAMED, ""),
        ({GPU}, 37, None, ""),
        (set(), 35, NAMED, ""),
        (set(), 35, None, ""),
    ],
)
def test_who_would_run_without_a_gpu(
    resources: Collection[str], kubelet: int | None, classes: Mapping[str, str] | None, words: str
) -> None:
    found = names.overlooked(resources, kubelet, classes, "no answer")
    assert found.startswith(words)
    assert bool(found) is bool(words)


@pytest.mark.parametrize("side", Side)
def test_a_resource_is_dras_where_one_gpu_is_or_is_on_its_way(side: Side) -> None:
    dras = side not in {Side.PLUGIN, Side.FOREIGN}
    assert names.of_dra({GPU: {side}, OTHER: {Side.PLUGIN}}) == ({GPU} if dras else set())
    assert names.of_dra({GPU: {side, Side.PLUGIN, Side.FOREIGN}}) == ({GPU} if dras else set())


@pytest.mark.parametrize(
    ("sides", "classes", "asked", "waits"),
    [
        ({Side.DRA}, UNNAMED, {GPU}, True),
        ({Side.DRA, Side.TO_DRA, Side.FOREIGN}, UNNAMED, {GPU}, True),
        ({Side.DRA}, NAMED, {GPU}, False),
        ({Side.DRA}, None, {GPU}, False),
        ({Side.DRA}, UNNAMED, {OTHER}, False),  # Nobody ever got one by name: people want claims alone.
        ({Side.DRA, Side.PLUGIN}, UNNAMED, {GPU}, False),
        ({Side.DRA, Side.TO_PLUGIN}, UNNAMED, {GPU}, False),
        ({Side.FOREIGN}, UNNAMED, {GPU}, False),
    ],
)
def test_who_waits_for_a_class(
    sides: Collection[Side], classes: Mapping[str, str] | None, asked: Collection[str], *, waits: bool
) -> None:
    found = names.waiting({GPU: sides}, classes, asked)
    assert found.startswith(f"no DeviceClass has the extendedResourceName {GPU} any more" if waits else "")
    assert bool(found) is waits


class Api:
    """An API server with one node and one DeviceClass, which may be away."""

    def __init__(self) -> None:
        self.named, self.kubelet, self.away = GPU, "v1.35.2", False

    async def get(self, path: str, kind: Any) -> Any:
        text = '{"versions": [{"version": "v1"}], "metadata": {}, "status": {"nodeInfo": {"kubeletVersion": "%s"}}}'
        return decoded((text % self.kubelet).encode(), kind, path)

    async def list(self, path: str, kind: Any, *, keep: Callable[[Any], bool]) -> tuple[list[Any], str]:
        if self.away:
            raise KubernetesError(path, 0, "nobody is there", away=True)
        assert kind is DeviceClass
        text = '{"metadata": {"name": "c"}, "spec": {"extendedResourceName": "%s"}}' % self.named  # noqa: UP031 - JSON
        return list(filter(keep, [decoded(text.encode(), kind, path)])), ""


async def test_it_is_said_once_and_what_was_known_counts_while_nobody_answers() -> None:
    api, changes = Api(), []
    boards: Any = SimpleNamespace(is_known=True, boards=lambda: {"a": [(GPU, None)]}, side=lambda _: Side.DRA)
    ledger: Any = SimpleNamespace(claims={})
    known: Any = api
    looks = Names(
        known, Current(known), "/api/v1/nodes/n1", boards, ledger, lambda: changes.append(looks.status.overlooked)
    )
    with capture_logs() as said:
        for away in (False, False, True, False):
            api.away = away
            error = await looks._look()
            assert (error is not None) is away
        api.named = OTHER
        for _ in range(2):
            await looks._look()
    assert len(changes) == 2
    assert "Upgrade the kubelet to 1.36 first" in changes[0]
    assert changes[1] == ""
    told = [(one["log_level"], one["event"]) for one in said]
    assert told == [
        ("error", "DRA offers no GPUs to new claims"),
        ("info", "DRA offers GPUs to new claims again"),
        ("warning", "pods that ask for GPUs by resource name wait"),
    ]
