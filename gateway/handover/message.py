"""The messages of a handover.

What is said about one resource is a ``Say``; a message names all resources it is said of:

    {"v": 1, "op": "handover", "say": "ask", "resources": ["nvidia.com/gpu"], "until_ns": ...,
     "from": {"born_ns": ..., "token": ...}}                                                    the newer one, to begin with
    {"v": 1, "op": "handover", "say": "yours", "resources": ["nvidia.com/gpu"]}                 either, from then on

``until_ns`` (boot clock) is how long the newer one waits: who reads an ask later knows that it has gone on.
Unknown fields and words are ignored, so that a later release can say more; what is malformed ends the connection. A
partner of the same user may still be broken: whatever it says or doesn't, every wait here ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeGuard

from gateway.age import Age, plausible
from gateway.handover.events import Say
from gateway.handover.instance import TOKEN, boot_ns
from gateway.wires import control
from gateway.wires.control import ControlError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.wires.control import ControlConnection

OP: Final = "handover"
RESIGN: Final = "resign"
"""The order of a newer gateway to make room as a whole (``alone``)."""
STARTING: Final = "it is still starting"
HOST_SERVICE: Final = "the host service makes no room: its unit is restarted in place"
PAIR: Final = "a pair with DRA off makes no room: update with maxSurge 0"
"""Why none is made."""
ASK_TIME: Final = 0.15
"""Seconds within which an ask must be read: the newer one goes on after ``machine.ANSWER_WAIT``, and not a moment later
may a stream still be ended for it."""
IN_ONE_MESSAGE: Final = 64
"""Resources that a message names at most."""
_LONGEST_NAME: Final = 317
_SAYS: Final = {say.value: say for say in Say}


class NonsenseError(ValueError):
    """With this one no handover can be talked about."""


def written(age: Age, say: Say, resources: list[str], said_ns: int) -> dict[str, Any]:
    """Write what the gateway of this age says of some resources; it said so, and began to wait, at ``said_ns`` (boot clock)."""
    message = {
        "op": OP,
        "say": say.value,
        "resources": resources,
        "from": {"born_ns": age.born_ns, "token": age.token},
    }
    return message | {"until_ns": said_ns + int(ASK_TIME * 1e9)} if say is Say.ASK else message


def read(message: Mapping[str, Any]) -> tuple[Say, list[str]] | None:
    """Read what is said of which resources; None: a word of a later release.

    Raises:
        NonsenseError: it can't be understood, or it is a refusal.
    """
    if message.get("v") != control.VERSION or "error" in message:
        raise NonsenseError("the other gateway refused to talk about a handover")
    word, resources = message.get("say"), message.get("resources")
    say = _SAYS.get(word) if isinstance(word, str) else None
    if message.get("op") != OP or say is None:
        return None
    if not _are_names(resources):
        raise NonsenseError(
            f"expected at most {IN_ONE_MESSAGE} resource names in a message of the other gateway, got something else"
        )
    return say, resources


def sender(message: Mapping[str, Any]) -> Age | None:
    """Read who is speaking; None: nobody who can be."""
    match message.get("from"):
        case {"born_ns": int(born_ns), "token": str(token)} if TOKEN.fullmatch(token):
            age = Age(born_ns, token)
            return age if plausible(age, boot_ns()) else None
        case _:
            return None


async def makes_room(own: Age, stays: str, connection: ControlConnection, request: Mapping[str, Any]) -> str:
    """Tell a newer gateway whether this one makes room, or why it stays; return its token where that is to be now.

    Raises:
        ControlError: it isn't newer, or this one stays.
    """
    age = sender(request)
    if age is None or age <= own:
        raise ControlError(f"expected the age of a gateway newer than {own}, got {shown(request.get('from'))}")
    if stays:
        raise ControlError(stays)
    await connection.send({"resigns": True})
    return age.token if request.get("ready") is True else ""


def in_time(ask: Mapping[str, Any]) -> bool:
    """Whether an ask is read within the time that it names; one that names none waits for ever."""
    until_ns = ask.get("until_ns")
    return not isinstance(until_ns, int) or boot_ns() <= until_ns


def _are_names(said: object) -> TypeGuard[list[str]]:
    return (
        isinstance(said, list)
        and len(said) <= IN_ONE_MESSAGE
        and all(isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME for name in said)
    )
