"""The events, actions and phases of the registration of one resource."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from gateway.kubelet.identity import KubeletId


class Phase(Enum):
    """The phases of a registration. The values are shown to people."""

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
    """A kubelet.sock accepts connections. After a poll it may be the known kubelet."""

    kubelet: KubeletId


class Reached(Struct, frozen=True):
    """The Register of ``attempt`` is about to be sent on the socket of ``kubelet``."""

    attempt: int
    kubelet: KubeletId


class Replied(Struct, frozen=True):
    """The Register of ``attempt`` ended, with gRPC's status name and text. ``connected``: the kubelet asked for our options first."""

    attempt: int
    code: str
    details: str = ""
    connected: bool = False


class StreamOpened(Struct, frozen=True):
    """A client called ListAndWatch. ``likely`` is True if it may be a kubelet."""

    stream: int
    likely: bool = True


class StreamEnded(Struct, frozen=True):
    """A ListAndWatch stream has ended, from either side."""

    stream: int


class Fired(Struct, frozen=True):
    """A timer has expired."""

    timer: Timer


class NameLost(Struct, frozen=True):
    """One of our socket's names in the kubelet's directory was deleted."""

    name: str


class Verified(Struct, frozen=True):
    """The kubelet's records were read. ``held`` is True if they have our list."""

    held: bool


class Lacking(Struct, frozen=True):
    """The kubelet's records were read for another reason, and lack the resource."""


class Withhold(Struct, frozen=True):
    """The list is too large for the dialect. The registration must end, and report the reason."""

    reason: str


class Renew(Struct, frozen=True):
    """The resource's options have changed. Register again if the kubelet got other options."""

    reason: str


class StandBy(Struct, frozen=True):
    """Offer nothing until ``Resume``: another gateway leads, or DRA offers the resource."""


class Resume(Struct, frozen=True):
    """The reason of ``StandBy`` ended ``waited`` seconds ago."""

    waited: float = 0.0


class Stop(Struct, frozen=True):
    """The gateway ends."""


Event = (
    KubeletUp | Reached | Replied | StreamOpened | StreamEnded | Fired | NameLost | Verified | Lacking | Withhold
    | StandBy | Renew | Resume | Stop
)  # fmt: skip


class SendRegister(Struct, frozen=True):
    """Give our socket the new ``name``, and send one Register with it in ``dialect``."""

    attempt: int
    dialect: str
    name: str


class CancelRegister(Struct, frozen=True):
    """Cancel the Register in flight: its kubelet is gone."""


class SetTimer(Struct, frozen=True):
    """Send ``Fired(timer)`` after ``seconds``, plus a random part of up to a quarter of them."""

    timer: Timer
    seconds: float


class CancelTimer(Struct, frozen=True):
    """Cancel a timer."""

    timer: Timer


class Heed(Struct, frozen=True):
    """Treat the client of this stream as the kubelet."""

    stream: int


class EndStreams(Struct, frozen=True):
    """End all ListAndWatch streams of the resource."""


class LinkSocket(Struct, frozen=True):
    """Give our bound socket this name in the kubelet's directory."""

    name: str


class UnlinkSocket(Struct, frozen=True):
    """Remove our ``name`` from the socket directory."""

    name: str


class Verify(Struct, frozen=True):
    """Read the kubelet's records, if possible, and send ``Verified``."""


class Report(Struct, frozen=True):
    """Log an event. ``level`` is info, warning or error."""

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
