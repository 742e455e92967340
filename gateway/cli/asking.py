"""Ask the gateways of a node over their control sockets, and find the device that a person means."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import msgspec

from gateway.wires import control
from gateway.wires.control import ControlError

_MOST_NAMED: Final = 8
_Answer = TypeVar("_Answer")


async def ask_all(
    state_dir: Path, request: Mapping[str, Any], seconds: float, kind: type[_Answer]
) -> tuple[dict[Path, _Answer], dict[Path, str]]:
    """Ask every gateway of a state directory at once. Return the answers, and why the other gateways gave none, by control socket.

    Raises:
        ControlError: the folder can't be read.
    """
    paths = control.sockets(state_dir)
    found = await asyncio.gather(*(control.ask(path, request, seconds) for path in paths), return_exceptions=True)
    answers: dict[Path, _Answer] = {}
    silent: dict[Path, str] = {}
    for path, answer in zip(paths, found, strict=True):
        try:
            if isinstance(answer, BaseException):
                raise answer
            answers[path] = msgspec.convert(answer, kind)
        except msgspec.ValidationError as error:
            silent[path] = (
                f"its answer can't be read ({error}), so it is of another release: use that release's command"
            )
        except ControlError as error:
            silent[path] = str(error)
    return answers, silent


def by_token(answers: Mapping[Path, object], silent: Mapping[Path, str]) -> dict[str, object]:
    """Return what each gateway answered, or its error, by its token."""
    errors = {path.stem: {"error": why} for path, why in silent.items()}
    return {path.stem: answer for path, answer in answers.items()} | errors


def no_gateway_error(state_dir: Path, command: str) -> click.ClickException:
    """Return the error that no gateway runs on a state directory, with what to do about it."""
    return click.ClickException(
        f"No gateway runs on this node, as far as {state_dir} tells. Where it runs in a pod, ask there: kubectl exec --namespace "
        f"device-plugin-gateway POD -- gateway {command}. Where it keeps its state elsewhere, name that folder with --state-dir. "
        "Else start it (docs/install.md, docs/host-service.md)"
    )


def resolve_device(name: str, indexes: Mapping[str, str]) -> str:
    """Return the ID that ``name`` stands for; ``name`` itself if it stands for none of them.

    Args:
        name: a device's ID, its index, or as much of its ID as no other begins with.
        indexes: the index of each device that could be meant, by its ID; '' if it has none.

    Raises:
        ControlError: it could be several; the message names them.
    """
    if not name or name in indexes:
        return name
    by_index = [device_id for device_id, index in indexes.items() if index == name]
    found = by_index or [device_id for device_id in indexes if device_id.startswith(name)]
    if len(found) > 1:
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise ControlError(
            f"{name!r} is short for {len(found)} devices: {', '.join(found[:_MOST_NAMED])}{more}. Nothing was done: write more "
            "of the ID"
        )
    return found[0] if found else name
