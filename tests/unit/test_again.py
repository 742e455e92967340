"""Whether a device that a container was given is given again: no kubelet's forgetting puts it into two pods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from devices.model import Fault, PreferredRequest
from gateway.kubelet.earlier import RECORDED_WITHIN, HandedOut
from gateway.kubelet.reader import Look
from gateway.kubelet.records import Records
from gateway.memory import again
from gateway.memory.again import MOST_PODS

GPU = "example.com/gpu"
AT = 1000.0


def look(held: Mapping[str, str], after: float, source: str = "pod-resources") -> Look:
    """A look so long after the device was given."""
    return Look(Records({GPU: held}, {}, source=source), 0.0, AT + after)  # type: ignore[arg-type]  # one of its words


@pytest.mark.parametrize(
    ("holder", "seen", "pod"),
    [
        pytest.param("", None, "", id="nobody looked"),
        pytest.param("ns/pod/main", None, "ns/pod", id="a gateway before this one looked"),
        pytest.param("uid/main", None, "", id="it found the pod's UID"),
        pytest.param("", look({}, -1), "", id="looked before it was given"),
        pytest.param("", look({"a": "ns/before/main"}, -1), "", id="who had it before is not who has it"),
        pytest.param("", look({"a": "ns/pod/main"}, 0.1), "ns/pod", id="looked since"),
        pytest.param("ns/pod/main", look({}, RECORDED_WITHIN), None, id="nobody holds it"),
        pytest.param("", look({}, 1), "", id="the kubelet may not have noted it"),
        pytest.param("", look({"a": "uid/main"}, 9, "checkpoint"), "", id="only its checkpoint could be read"),
        pytest.param("ns/pod/main", look({}, 9, "checkpoint"), "ns/pod", id="a checkpoint is no proof"),
    ],
)
def test_who_may_hold_what_was_given(holder: str, seen: Look | None, pod: str | None) -> None:
    found = again.holders(GPU, {"a": HandedOut("v1beta1", AT, (holder,) if holder else ())}, seen)
    assert found == ({} if pod is None else {"a": pod})


@pytest.mark.parametrize(
    ("offered", "must", "after", "counted"),
    [
        pytest.param("b", "", RECORDED_WITHIN, True, id="it isn't offered"),
        pytest.param("ab", "", RECORDED_WITHIN, False, id="it is: the kubelet forgot it, or its pod has ended"),
        pytest.param("b", "a", RECORDED_WITHIN, False, id="its own pod asks again"),
        pytest.param("b", "", RECORDED_WITHIN - 0.1, False, id="the kubelet may not have noted it"),
        pytest.param("c", "", RECORDED_WITHIN, False, id="only another NUMA node's are offered"),
        pytest.param("", "", RECORDED_WITHIN, False, id="nothing is offered"),
    ],
)
def test_what_the_kubelet_counts_as_in_use(offered: str, must: str, after: float, counted: bool) -> None:
    request = PreferredRequest((*offered,), (*must,), 1)
    numa = {"a": (0,), "b": (0,), "c": (1,)}
    assert again.counted({"a": AT}, request, numa, AT + after) == ({"a"} if counted else set())


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        pytest.param(["n/p", "n/q", "n/p"], {"n/p", "n/q"}, id="each once"),
        pytest.param(["n/p", ""], set(), id="one has no name"),
        pytest.param([f"n/{number}" for number in range(MOST_PODS)], {f"n/{number}" for number in range(MOST_PODS)}, id="as many as a kubelet answers"),
        pytest.param([f"n/{number}" for number in range(MOST_PODS + 1)], set(), id="too many"),
    ],
)  # fmt: skip
def test_which_pods_are_asked_about(given: Iterable[str], asked: set[str]) -> None:
    assert again.pods(given) == asked


@pytest.mark.parametrize(
    ("held", "fault"),
    [
        pytest.param({}, None, id="free"),
        pytest.param({"a": "ns/pod/main"}, Fault.FAILED_PRECONDITION, id="held"),
        pytest.param(None, Fault.UNAVAILABLE, id="nobody says"),
    ],
)
def test_what_is_refused(held: Mapping[str, str] | None, fault: Fault | None) -> None:
    refused = again.refusal(GPU, held)
    assert (refused.fault if refused is not None else None) is fault
    assert not held or "ns/pod/main" in str(refused)
