"""Status documents to test with: a node of 8 GPUs that knows every kind of trouble, and what its gateway counted."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from adapters.dialect import Level
from devices.life import states
from devices.life.states import State
from devices.model import Device, Health, TroubleKind
from gateway.kubelet import drift
from gateway.kubelet.drift import Finding
from gateway.memory.rows import FileState
from gateway.registration import machine as registration
from gateway.registration.events import Phase
from gateway.sides.side import Side
from gateway.sides.table import BoardStatus
from gateway.tally import Cause, Confirmation, Tally
from gateway.telling import status
from gateway.telling.served import verdict
from gateway.telling.sides import DriverStatus, sides
from gateway.telling.status import Build, Configuration, GatewayStatus, KubeletStatus, RecordsStatus, ResourceFacts

NOW = 1_000_000.0
RESOURCE = "nvidia.com/gpu"
BUILD = Build(gateway="0.1.0", python="3.11.7", grpcio="1.85.1", protobuf="7.36.2")
SERVING, WAITING = "3f9a2c1d", "8c2e11aa"
"""Tokens."""
IDS = [f"GPU-{number}f3a{number}c6e-77b0-4b1e-9d4a-0c5b8e21d9f{number}" for number in range(8)]


def _entries() -> dict[str, states.Entry]:
    """Eight GPUs, half of them in trouble."""
    troubles = {
        2: (
            State.UNHEALTHY,
            "Xid 79: GPU has fallen off the bus; the driver lost it, and no reset was seen since",
            TroubleKind.RESET_REQUIRED,
        ),
        3: (State.LOST, "the backend no longer finds it", None),
        5: (State.CORDONED, "swap the riser, ticket 4711", None),
        6: (State.UNHEALTHY, "double-bit ECC error", TroubleKind.UNKNOWN),
    }
    entries = {}
    for number, id_ in enumerate(IDS):
        state, reason, kind = troubles.get(number, (State.PRESENT, "", None))
        health = Health.HEALTHY if state is State.PRESENT else Health.UNHEALTHY
        entries[id_] = states.Entry(Device(id_, health, (number // 4,)), state, reason, kind=kind)
    return entries


def state(phase: Phase, dialect: str = "v1beta1") -> registration.State:
    """Give a registration that stands in ``phase``."""
    return replace(registration.start("t", "auto", dialect), phase=phase, dialect=dialect)


TROUBLED = ResourceFacts(
    name=RESOURCE,
    state=state(Phase.SERVING),
    entries=_entries(),
    level=Level(29),
    stream_since=NOW - 7800,
    checked=Confirmation.HELD,
    holders={IDS[0]: "default/training-0/main", IDS[2]: "default/training-1/main", IDS[4]: "jupyter/notebook-7/kernel"},
    drift=[
        Finding(
            drift.MismatchKind.FORGOTTEN,
            (IDS[7],),
            f"the kubelet lost its memory of devices of {RESOURCE} that were held before its start: '{IDS[7]}' (then held by "
            "'default/batch-3/main'). Containers that ran then may still use them: end those pods, then run `gateway forget ID` for "
            "each device",
        )
    ],
)
REFUSED = ResourceFacts(
    name="nvidia.com/mig-1g.10gb",
    state=state(Phase.WAITING),
    entries={"MIG-1": states.Entry(Device("MIG-1"), State.PRESENT)},
    trouble="Register was refused: the ResourceName is invalid",
)
STANDBY = ResourceFacts(name=RESOURCE, state=state(Phase.STANDBY), entries=_entries())
GOOD_LEDGER = FileState(path="/var/lib/device-plugin-gateway/ledger.json", written_s=185.2, writes=12)
BAD_LEDGER = replace(GOOD_LEDGER, writable=False, error="No space left on device", pending=2)


SIDES = sides(
    (
        BoardStatus("GPU-a", Side.PLUGIN, "ns/p/main", "offered by the device plugin API"),
        BoardStatus(
            "GPU-b", Side.TO_DRA, "ns/q/main", "it goes to DRA as soon as nobody holds it: held by ns/q/main", NOW - 130
        ),
        BoardStatus("GPU-c", Side.DRA, "claim ns/c (pod r)", "offered by DRA: claim ns/c (pod r) has it"),
        BoardStatus("GPU-d", Side.DRA, "", "offered by DRA"),
    ),
    NOW,
)


DRIVERS = (
    DriverStatus(name="gpu.nvidia.com", devices=2, registered=True, claims=1),
    DriverStatus(
        name="gpu.amd.com", devices=1, registered=False, trouble="no such version", unpublished="403 Forbidden"
    ),
)


def counted() -> Tally:
    """Give a tally in which every family has something."""
    tally = Tally()
    for why in (Cause.FIRST, Cause.KUBELET_START, Cause.KUBELET_START):
        tally.registrations.add(RESOURCE, why.value)
    tally.register_errors.add(REFUSED.name, "UNKNOWN")
    tally.restart_gap(RESOURCE, 0.0042)
    for _ in range(409):
        tally.call(RESOURCE, "Allocate", 0.0004, "OK")
        tally.call(RESOURCE, "GetPreferredAllocation", 0.0003, "OK")
    for _ in range(3):
        tally.call(RESOURCE, "Allocate", 0.0002, "FAILED_PRECONDITION")
    tally.lost_fields.add("v1alpha2", "topology")
    tally.checks.add(RESOURCE, Confirmation.HELD.value)
    tally.late(0.0021, NOW - 1)
    return tally


def judged(facts: ResourceFacts) -> ResourceFacts:
    """Add the verdict that follows from a registration."""
    leader = SERVING if facts.state.phase is Phase.STANDBY else ""
    since = facts.stream_since or NOW - 60
    found = verdict(
        facts.state.phase,
        checked=facts.checked,
        trouble=facts.trouble,
        since_s=NOW - since,
        kubelet_s=60,
        leader=leader,
    )
    return replace(facts, verdict=found)


def document(*plugins: ResourceFacts, tally: Tally | None = None, token: str = SERVING, **others: Any) -> GatewayStatus:
    """Say what a gateway with these resources says of itself; ``others`` are fields that it says otherwise."""
    tally = tally or Tally()
    known = GatewayStatus(
        build=BUILD,
        pid=4711,
        token=token,
        uptime_s=273_600,
        socket_dir="/var/lib/kubelet/device-plugins",
        kubelet=KubeletStatus(present=True, age_s=7800.2),
        books=RecordsStatus(source="pod-resources", age_s=12),
        ledger=GOOD_LEDGER,
        lag_s=tally.lag(NOW),
        configuration=Configuration(path="/config/config.yaml", accepted_s=60),
        resources=tuple(status.resource(judged(plugin), tally, NOW) for plugin in plugins),
    )
    return replace(known, **others)


FULL = document(TROUBLED, REFUSED, tally=counted(), ledger=BAD_LEDGER)
"""Trouble of every kind."""
OTHER = document(STANDBY, token=WAITING, led_by=SERVING)
"""A gateway that stands by for the one before."""
