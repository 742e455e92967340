"""The verdict on a resource: each state, with its reason."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.registration.events import Phase
from gateway.tally import Confirmation
from gateway.telling.served import Reason, verdict
from gateway.telling.sides import DriverStatus

DRIVER = DriverStatus(name="gpu.nvidia.com", devices=2, registered=True, since_s=3.0)
GONE = DriverStatus(name="gpu.nvidia.com", devices=2, registered=False, trouble="no such version")
RIVAL = DriverStatus(name="gpu.nvidia.com", devices=2, registered=False, rival="another process has this name")


@pytest.mark.parametrize(
    ("phase", "facts", "state", "reason", "why"),
    [
        (Phase.SERVING, {"checked": Confirmation.HELD}, "served", Reason.VERIFIED, ""),
        (Phase.SERVING, {"checked": Confirmation.UNKNOWN}, "served", Reason.UNVERIFIABLE, "can't be read"),
        (Phase.SERVING, {}, "served", Reason.UNVERIFIED, "not looked up"),
        (Phase.SERVING, {"checked": Confirmation.LACKING}, "waiting", Reason.LACKING, "lack it"),
        (Phase.WAITING, {"checked": Confirmation.LACKING}, "waiting", Reason.LACKING, "lack it"),
        (Phase.ACCEPTED, {"trouble": "never called"}, "waiting", Reason.REGISTERING, "kubelet's call: never called"),
        (Phase.ABSENT, {"kubelet_s": None}, "waiting", Reason.NO_KUBELET, "waiting for a kubelet"),
        (Phase.WAITING, {"refused": True, "trouble": "no"}, "refused", Reason.KUBELET, "register again: no"),
        (Phase.OUT, {"trouble": "too large"}, "refused", Reason.LIST, "not offered: too large"),
        (Phase.STANDBY, {"leader": "3f9a2c1d"}, "standby", Reason.LEADER, "3f9a2c1d leads"),
        (Phase.STANDBY, {}, "waiting", Reason.REGISTERING, "standing by"),
        (Phase.STOPPED, {}, "standby", Reason.STOPPED, "stopped"),
        (Phase.STANDBY, {"driver": DRIVER}, "served", Reason.DRA, "gpu.nvidia.com is registered"),
        (Phase.STANDBY, {"driver": GONE}, "waiting", Reason.NO_DRA, "not registered: no such version"),
        (Phase.STANDBY, {"driver": RIVAL}, "waiting", Reason.RIVAL, "not registered: another process"),
        (Phase.STANDBY, {"driver": DRIVER, "leader": "host service"}, "standby", Reason.LEADER, "host service leads"),
        (Phase.STANDBY, {"driver": DRIVER, "kubelet_s": None}, "waiting", Reason.NO_KUBELET, "waiting for a kubelet"),
    ],
)
def test_a_verdict(phase: Phase, facts: dict[str, Any], state: str, reason: Reason, why: str) -> None:
    found = verdict(phase, **facts)
    assert (found.state, found.reason, why in found.why) == (state, reason, True)
    assert bool(found.why) is bool(why)


@pytest.mark.parametrize(
    ("phase", "since_s", "kubelet_s", "found"),
    [
        pytest.param(Phase.SERVING, 5.0, 60.0, 5.0, id="served since its stream began"),
        pytest.param(Phase.OFFERING, 5.0, 60.0, 5.0, id="waiting since its stream ended"),
        pytest.param(Phase.OFFERING, 60.0, 5.0, 5.0, id="waiting since the kubelet came"),
        pytest.param(Phase.ABSENT, 60.0, None, 60.0, id="waiting without a kubelet"),
    ],
)
def test_since_when(phase: Phase, since_s: float, kubelet_s: float | None, found: float) -> None:
    assert verdict(phase, since_s=since_s, kubelet_s=kubelet_s).since_s == found
