"""When a list is sent once more so that the kubelet writes its checkpoint anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gateway.kubelet.records import SEND_AGAIN_S, Outdated, Records

if TYPE_CHECKING:
    from collections.abc import Sequence

GPU = "nvidia.com/gpu"
A, B = ("default/a",), ("default/b",)


def seen(written: dict[str, str], pods: Sequence[str], source: str = "pod-resources") -> Records:
    return Records(held={}, written={GPU: written}, source=source, pods=frozenset(pods))  # type: ignore[arg-type]


ENDED = seen({"U0": "uid-a/main"}, ())


SENT_AGAIN = {
    "a pod that only the checkpoint names": ([(0, ENDED)], [True]),
    "the checkpoint names nobody else": ([(0, seen({}, A))], [False]),
    "there is no checkpoint": ([(0, Records(held={}, source="pod-resources"))], [False]),
    "a kubelet without List": ([(0, seen({"U0": "uid-a/main"}, (), "checkpoint"))], [False]),
    "it was just sent": ([(0, ENDED), (2, ENDED)], [True, False]),
    "it names them still": ([(0, ENDED), (SEND_AGAIN_S, ENDED)], [True, True]),
    "a pod went meanwhile": ([(0, seen({"U0": "uid-a/main"}, A)), (2, ENDED)], [True, True]),
    "it names another": ([(0, seen({"U0": "uid-a/main"}, B)), (2, seen({"U1": "uid-c/main"}, B))], [True, True]),
}


@pytest.mark.parametrize(("looks", "due"), SENT_AGAIN.values(), ids=SENT_AGAIN)
def test_when_a_list_is_sent_once_more(looks: Sequence[tuple[float, Records]], due: Sequence[bool]) -> None:
    outdated = Outdated()
    assert [outdated.is_due(records, now) for now, records in looks] == [*due]
