"""``gateway cordon``, ``uncordon`` and ``forget``: orders about one device.

Every gateway of the state directory gets the order over its control socket. If none runs, a cordon is written into the state
file, and is in force from the next start: devices are often cordoned before a node is opened. ``forget`` needs a gateway that
runs, because only that knows who holds the device.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import click
from msgspec import Struct
from msgspec.structs import replace

from gateway.cli import asking, common
from gateway.cli.devices import look, rows
from gateway.cli.page import print_json
from gateway.configuration.settings import STATE_DIR
from gateway.telling import orders
from gateway.telling.orders import Order, OrderOutcome
from gateway.wires import control
from gateway.wires.control import ControlError
from gateway.wires.log import printable

ANSWER_TIME = 5.0
"""Seconds within which a gateway must answer: it writes its ledger to disk before it does."""

_MOST_LISTED = 16
"""Device IDs in a message."""

_STATUS = "Exit status: 0 where every gateway did it, 1 where one did not or there was none to ask, 2 for a wrong flag."

_CORDON = f"""\
\b
Examples:
  gateway cordon GPU-5f3a --reason "ECC errors, ticket 4711"
  gateway cordon GPU-5f3a --reason "ECC errors" --json | jq -r '.gateways[].found[].holder'

{_STATUS}
"""
_UNCORDON = f"""\
\b
Examples:
  gateway uncordon GPU-5f3a
  gateway uncordon GPU-5f3a --json

{_STATUS}
"""
_FORGET = f"""\
\b
Examples:
  gateway forget GPU-5f3a
  gateway forget GPU-5f3a --json

{_STATUS}
"""


def _on_a_device(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command what all three have."""
    for option in (
        common.output("one object with op, id, gateways, and `ledger`, the state file"),
        common.state_dir,
        click.argument("device_id", metavar="ID"),
    ):
        command = option(command)
    return command


@click.command(epilog=_CORDON)
@_on_a_device
@click.option("--reason", required=True, help="Why, in a line: it is shown wherever the device is refused.")
def cordon(*, device_id: str, reason: str, state_dir: Path, output: str) -> None:
    """Let no new pod have the device ID, until it is uncordoned.

    ID is the device's ID, as much of it as no other begins with, or its index (`gateway devices` shows both). Pods that hold
    it keep it. The cordon outlives restarts, upgrades and rollbacks of the gateway. Cordoning a device again changes the
    reason.
    """
    _carry_out({"op": "cordon", "id": device_id, "reason": reason}, state_dir, output=output)


@click.command(epilog=_UNCORDON)
@_on_a_device
def uncordon(*, device_id: str, state_dir: Path, output: str) -> None:
    """Give the device ID back to pods, if it is healthy.

    ID is the device's ID, as much of it as no other begins with, or its index.
    """
    _carry_out({"op": "uncordon", "id": device_id}, state_dir, output=output)


@click.command(epilog=_FORGET)
@_on_a_device
def forget(*, device_id: str, state_dir: Path, output: str) -> None:
    """Forget what is remembered of the device ID: that it is lost, that it needs a reset, or who may still use it.

    A lost device stays listed as unhealthy, in case it comes back; this takes one off the list that won't. A device of which
    `gateway status` says that the kubelet forgot its holder counts as free again: end that pod first. It is refused where
    there is nothing to forget, and for a lost device that a pod still holds. ID is the device's ID, as much of it as no other
    begins with, or its index.
    """
    _carry_out({"op": "forget", "id": device_id}, state_dir, output=output)


def _carry_out(request: Mapping[str, Any], state_dir: Path, *, output: str) -> NoReturn:
    try:
        order = orders.order(request)
    except ControlError as error:
        raise click.UsageError(str(error)) from error
    noted: _Noted | None = None
    answers: dict[Path, OrderOutcome] = {}
    silent: dict[Path, str] = {}
    running = bool(control.sockets(state_dir))
    if order.op != "cordon":  # It may be on no list by now, and another device's ID may begin alike.
        answers, silent = _tell(order, state_dir)
    if running and not any(one.changed for one in answers.values()):
        indexes = {row.device.id: row.facts.index for row in rows(look(state_dir)[0])}
        order = replace(order, device_id=asking.resolve_device(order.device_id, indexes))
        answers, silent = _tell(order, state_dir)
    if not answers and not silent:
        order, noted = _note(order, state_dir)
    if output == "json":
        gateways = asking.by_token(answers, silent)
        print_json({"op": order.op, "id": order.device_id, "gateways": gateways, "ledger": noted})
    else:
        _print(order, answers, silent, noted)
    sys.exit(1 if silent else 0)


def _tell(order: Order, state_dir: Path) -> tuple[dict[Path, OrderOutcome], dict[Path, str]]:
    request = {"op": order.op, "id": order.device_id, "reason": order.reason}
    return asyncio.run(asking.ask_all(state_dir, request, ANSWER_TIME, OrderOutcome))


class _Noted(Struct, frozen=True):
    """A change of the ledger of a gateway that doesn't run."""

    path: Path
    changed: bool


def _note(order: Order, state_dir: Path) -> tuple[Order, _Noted]:
    """Write a cordon, or its end, into the ledger; return what was written, with the device's whole ID."""
    from gateway.leader.locks import Locks
    from gateway.memory.file import LedgerError
    from gateway.memory.ledger import Ledger
    from gateway.memory.rows import Cordon

    if order.op == "forget":
        raise ControlError(
            f"no gateway runs on {state_dir}, and only one that runs knows whether a pod holds {order.device_id}: start it, "
            "or name its own --state-dir"
        )
    if state_dir != STATE_DIR and not state_dir.is_dir():
        raise ControlError(f"there is no folder {state_dir}, so no gateway keeps its state there: correct --state-dir")
    ledger = Ledger(state_dir)
    try:
        ledger.load()
    except LedgerError as error:  # It was put aside; what could be saved of it is in memory.
        click.echo(printable(str(error)), err=True)
    except OSError as error:
        raise ControlError(f"could not read {ledger.path}: {error.strerror}. Nothing was done") from error
    known = {device_id for resource in ledger.resources() for device_id in ledger.announced(resource)}
    order = replace(
        order, device_id=asking.resolve_device(order.device_id, dict.fromkeys(sorted(known | {*ledger.cordons}), ""))
    )
    if order.device_id.isdecimal() and order.device_id not in known | {*ledger.cordons}:
        listed = f", one of {', '.join(sorted(known)[:_MOST_LISTED])}" if known else ""
        raise ControlError(
            f"no gateway runs on {state_dir}, and only one that runs knows which device has the index {order.device_id}. Nothing was "
            f"done: write the device's ID{listed}, or start the gateway first"
        )
    if known and order.op == "cordon" and order.device_id not in known:
        click.echo(_STRANGE.format(order.device_id), err=True)
    before = ledger.cordons.get(order.device_id)
    if order.op == "uncordon":
        changed = ledger.uncordon(order.device_id)
    elif changed := before is None or before.reason != order.reason:
        ledger.cordon(order.device_id, Cordon(order.reason, time.time()))
    if changed:
        try:
            _ = ledger.save(ledger.snapshot(), Locks(Path(), state_dir, "").writing)
        except LedgerError as error:
            raise ControlError(str(error)) from error
    return order, _Noted(ledger.path, changed)


def _print(
    order: Order, answers: Mapping[Path, OrderOutcome], silent: Mapping[Path, str], noted: _Noted | None
) -> None:
    found = [device for outcome in answers.values() for device in outcome.found]
    if answers or noted:
        changed = noted.changed if noted else any(outcome.changed for outcome in answers.values())
        click.echo(_SAID[order.op, changed].format(order.device_id, order.reason))
    for path, answer in answers.items():
        for device in answer.found:
            held = f", held by {device.holder}" if device.holder else ""
            was = (
                f"was {device.before}, is {device.now}"
                if device.now != device.before
                else f"is {device.now}, as before"
            )
            click.echo(printable(f"gateway {path.stem}: {device.resource}: {was}{held}"))
    for path, why in silent.items():
        click.echo(printable(f"gateway {path.stem}: {why}"), err=True)
    if noted:
        click.echo(
            f"No gateway runs here now: it is written to {noted.path}, and counts from the gateway's next start."
        )
    elif order.op == "cordon" and answers and not found:
        click.echo("No resource has a device of this ID now: is it spelled right? The cordon counts once there is one.")
    elif order.op == "cordon" and any(device.holder for device in found):
        click.echo("Who holds it keeps it; nobody else gets it.")


_STRANGE = (
    "warning: this node never had a device of the ID {0}, as far as its state file tells: is it spelled right? "
    "The cordon counts once there is one."
)
_SAID = {
    ("cordon", True): "{0} is cordoned: {1}",
    ("cordon", False): "{0} was cordoned already: {1}",
    ("uncordon", True): "{0} is no longer cordoned",
    ("uncordon", False): "{0} was not cordoned",
    ("forget", True): "what was remembered of {0} is forgotten",
    ("forget", False): "{0} is on no list: nothing to forget",
}
