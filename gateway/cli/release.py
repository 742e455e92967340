"""``gateway release`` and ``gateway acquire``: close GPUs for a reset or for partitions, and open them again, in each gateway that runs."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

import click

from devices.replicas import unshared
from gateway.cli import asking, common
from gateway.cli.devices import ANSWER_TIME, look, resolve_devices, times
from gateway.cli.page import print_json
from gateway.telling import orders
from gateway.telling.orders import Handled
from gateway.wires.control import ControlError
from gateway.wires.log import printable

_STATUS: Final = "Exit status: 0 if each gateway did it, 1 if one did not or there is none to ask, 2 for a wrong flag."
_RELEASE: Final = f"""\
\b
Examples:
  gateway release 3 && nvidia-smi -r -i 3; gateway acquire 3
  gateway release --all                          every GPU of this node

{_STATUS}
"""
_ACQUIRE: Final = f"""\
\b
Examples:
  gateway acquire GPU-5f3a
  gateway acquire --all

{_STATUS}
"""


def _on_devices(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command what both have."""
    for option in (
        common.state_dir,
        common.output("one object with op, ids and gateways"),
        click.option("--all", "every", is_flag=True, help="Every device of this node."),
        click.argument("names", metavar="[ID]...", nargs=-1),
    ):
        command = option(command)
    return command


@click.command(epilog=_RELEASE)
@_on_devices
def release(*, names: tuple[str, ...], every: bool, output: str, state_dir: Path) -> None:
    """Close these devices' GPUs, so that they can be reset or partitioned.

    A GPU is reset or partitioned while no process has it open. All devices on it are closed with it, until `gateway acquire` or a
    restart of the gateway. No new pod gets one of them; pods that hold one keep it.

    ID is a device's ID, as much of it as no other begins with, or its index (`gateway devices` shows both).
    """
    _handle("release", names, state_dir, every=every, as_json=output == "json")


@click.command(epilog=_ACQUIRE)
@_on_devices
def acquire(*, names: tuple[str, ...], every: bool, output: str, state_dir: Path) -> None:
    """Open these devices' GPUs again.

    ID is a device's ID, as much of it as no other begins with, or its index.
    """
    _handle("acquire", names, state_dir, every=every, as_json=output == "json")


def _handle(op: str, names: Sequence[str], state_dir: Path, *, every: bool, as_json: bool) -> NoReturn:
    """Tell every gateway to release or acquire hardware, and say what became of it."""
    if bool(names) is every:
        problem = "Devices don't go with --all" if every else f"No device to {op}"
        raise click.UsageError(
            f"{problem}. Name devices (`gateway devices` shows their IDs), or use --all for every one of this node"
        )
    if not all(names):
        raise click.UsageError("The name of a device is empty. Is a variable not set?")
    try:
        orders.handle_ids({"op": op, "ids": names})
    except ControlError as error:
        raise click.UsageError(str(error)) from error
    ids = resolve_devices(names, look(state_dir)[0]) if names else []
    request = {"op": op, "ids": ids}
    answers, silent = asyncio.run(asking.ask_all(state_dir, request, orders.HANDLE_TIME + ANSWER_TIME, Handled))
    if not answers and not silent:
        raise asking.no_gateway_error(state_dir, op)
    if as_json:
        print_json({"op": op, "ids": ids, "gateways": asking.by_token(answers, silent)})
    else:
        _tell_handled(op, ids, [*answers.values()], silent)
    sys.exit(1 if silent else 0)


def _tell_handled(op: str, ids: Sequence[str], done: Sequence[Handled], silent: Mapping[Path, str]) -> None:
    concerned = Counter(map(unshared, dict.fromkeys(device_id for one in done for device_id in one.devices)))
    if concerned:
        click.echo(_SAID[op])
        for device_id, count in concerned.items():
            click.echo(printable(f"  {times(device_id, count)}"))
    elif done:
        click.echo("Nothing keeps these devices open: nothing had to be done.")
    for path, why in silent.items():
        click.echo(f"gateway {path.stem}: {printable(why)}", err=True)
    if concerned and op == "release":
        held = {(who, unshared(device_id)) for one in done for device_id, who in (one.holders or {}).items()}
        for who, device_id in sorted(held):
            click.echo(printable(f"warning: {who} holds {device_id}: end that pod before you reset it"), err=True)
        if any(one.holders is None for one in done):
            click.echo("warning: who holds them can't be seen now: see to it yourself that no pod uses them", err=True)
        again = " ".join(["gateway acquire", *(map(printable, ids) if ids else ["--all"])])
        click.echo(f"Now reset or partition them (nvidia-smi -r, nvidia-smi mig), and then: {again}")


_SAID: Final = {
    "release": "The GPUs of these devices are closed. Until they are acquired no new pod gets one; who holds one keeps it:",
    "acquire": "The GPUs of these devices are open again:",
}
