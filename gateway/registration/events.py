"""What the registration of one resource is told, and what it asks for: its events, its actions, its phases."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from gateway.kubelet.identity import KubeletId


class Phase(Enum):
    """Where a resource stands. The values are what people read."""

    ABSENT = "waiting for a kubelet"
    OFFERING = "registering"
    ACCEPTED = "accepted, waiting for the kubelet's call"
    SERVING = "serving"
    WAITING = "waiting to register again"
    STANDBY = "standing by for another gateway"
    OUT = "not offered"
    STOPPED = "stopped"


class Timer(Enum):
    """The timers of a resource. Setting one again replaces it."""

    RETRY = "retry"
    CALL = "call"
    SETTLED = "settled"
    VERIFY = "verify"
    RENEW = "renew"


class KubeletUp(Struct, frozen=True):
    """A kubelet.sock that takes connections was seen: a new one, or (after a poll) perhaps the known one."""

    kubelet: KubeletId


class Reached(Struct, frozen=True):
    """The Register of ``attempt`` is about to be sent on the socket of ``kubelet``."""

    attempt: int
    kubelet: KubeletId


class Replied(Struct, frozen=True):
    """The Register of ``attempt`` ended, with gRPC's status name and text. ``connected``: our options were asked for before that."""

    attempt: int
    code: str
    details: str = ""
    connected: bool = False


class StreamOpened(Struct, frozen=True):
    """Somebody called ListAndWatch. ``likely`` is whether the caller looks like a kubelet."""

    stream: int
    likely: bool = True


class StreamEnded(Struct, frozen=True):
    """A ListAndWatch stream is over, whoever ended it."""

    stream: int


class Fired(Struct, frozen=True):
    """A timer that was set has run out."""

    timer: Timer


class NameLost(Struct, frozen=True):
    """A name of ours in the socket directory was deleted by somebody."""

    name: str


class Verified(Struct, frozen=True):
    """What the kubelet's own records say: it holds our list, or it doesn't."""

    held: bool


class Lacking(Struct, frozen=True):
    """The kubelet may have lost the resource: a look into its records for another reason found nothing of it."""


class Withhold(Struct, frozen=True):
    """This resource must not be offered now (its list is too large for the dialect): end it, say why."""

    reason: str


class Renew(Struct, frozen=True):
    """What Register says of the resource has changed (its options): a kubelet that was told otherwise is told once more."""

    reason: str


class StandBy(Struct, frozen=True):
    """Nothing is offered until ``Resume``: another gateway leads, or DRA offers the resource."""


class Resume(Struct, frozen=True):
    """What held the resource back is gone, for ``waited`` seconds already."""

    waited: float = 0.0


class Stop(Struct, frozen=True):
    """The gateway ends."""


Event = (
    KubeletUp | Reached | Replied | StreamOpened | StreamEnded | Fired | NameLost | Verified | Lacking | Withhold
    | StandBy | Renew | Resume | Stop
)  # fmt: skip


class SendRegister(Struct, frozen=True):
    """Make a fresh name for the socket and send one Register in ``dialect`` under it."""

    attempt: int
    dialect: str
    name: str


class CancelRegister(Struct, frozen=True):
    """Give up the Register in flight: it was for a kubelet that is gone."""


class SetTimer(Struct, frozen=True):
    """Send ``Fired(timer)`` after ``seconds`` plus up to a quarter of it, by chance."""

    timer: Timer
    seconds: float


class CancelTimer(Struct, frozen=True):
    """Forget a timer."""

    timer: Timer


class Heed(Struct, frozen=True):
    """Take this stream for the kubelet's: what its caller shows is the kubelet's."""

    stream: int


class EndStreams(Struct, frozen=True):
    """End all ListAndWatch streams of the resource from our side."""


class LinkSocket(Struct, frozen=True):
    """Give the bound socket ``name`` in the socket directory (again)."""

    name: str


class UnlinkSocket(Struct, frozen=True):
    """Take our ``name`` out of the socket directory."""

    name: str


class Verify(Struct, frozen=True):
    """Look into the kubelet's records, where they can be reached, and send ``Verified``."""


class Report(Struct, frozen=True):
    """Tell people. ``level`` is one of info, warning, error."""

    level: str
    what: str
    details: str = ""


Action = (
    SendRegister
    | CancelRegister
    | SetTimer
    | CancelTimer
    | Heed
    | EndStreams
    | LinkSocket
    | UnlinkSocket
    | Verify
    | Report
)
