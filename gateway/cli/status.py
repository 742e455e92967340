"""``gateway status``: what the gateways of this node know of themselves, their kubelet and their devices."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep
from typing import Any, Final, NoReturn

import click
import msgspec

from gateway.cli import asking, common
from gateway.cli.page import columns, count, print_json
from gateway.tally import Confirmation
from gateway.telling.served import Reason, VerdictState
from gateway.telling.status import FEW, DeviceStatus, GatewayStatus, ResourceStatus
from gateway.telling.unserved import unschedulable_words, unserved
from gateway.wires import log as observe
from gateway.wires.log import printable

_EXAMPLES = """
\b
Examples:
  gateway status
  gateway status --watch
  gateway status --check && echo all devices are served
  gateway status -o wide                         every device, not only the first of many
  gateway status -o json | jq '.gateways[].resources[] | {name, phase, allocatable}'
  gateway status -o json | jq -r '.gateways[].resources[].devices[] | select(.state != "healthy") | .id'

Exit status: 0 where at least one gateway answered, otherwise 1. With --check: 0 where every resource with devices is served, 1 where
one isn't, 2 where no gateway answers.
"""

_ANSWER_WITHIN: Final = 10.0
_EVERY: Final = 2.0
"""Seconds between two looks of --watch."""
_WIDEST: Final = 140
_UNFOLDED: Final = 60
"""Columns from which a device keeps to one line, even if that is longer."""
_LATE: Final = 0.05
"""Seconds from which a late event loop is worth a line."""
_MOST_MOVING: Final = 8
_ENDS: Final = frozenset({"plugin", "dra"})
"""The sides on which a GPU stays."""
_WELL: Final = "healthy"
_LIVE: Final = "live"
_COLOURS: Final = {
    "serving": "green",
    _WELL: "green",
    "unhealthy": "red",
    "lost": "red",
    "not offered": "red",
    "waiting for a kubelet": "red",
    "standing by for another gateway": "cyan",
}
"""Of phases and states; any other is yellow."""


@dataclass(slots=True)
class Answers:
    """The status documents of a node's gateways, raw and decoded, and why other gateways gave none."""

    raw: list[dict[str, Any]] = field(default_factory=list)
    read: list[GatewayStatus] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)


async def look(state_dir: Path, *, few: bool = False) -> Answers:
    """Ask every gateway for its status. ``few``: of many devices only those that need attention.

    Raises:
        control.ControlError: the folder can't be read.
    """
    request = {"op": "status", "few": few}
    answers, silent = await asking.ask_all(state_dir, request, _ANSWER_WITHIN, dict[str, Any])
    found = Answers(silent={str(path): why for path, why in silent.items()})
    for path, answer in answers.items():
        try:
            found.read.append(msgspec.convert(answer.get("status"), GatewayStatus))
            found.raw.append(answer["status"])
        except msgspec.ValidationError as error:
            found.silent[str(path)] = f"the answer is no status document: {error}"
    return found


@click.command(epilog=_EXAMPLES)
@common.state_dir
@common.output("one document (its schema: docs/status.schema.json)", wide="all devices, however many")
@click.option("--watch", is_flag=True, help=f"Look again every {_EVERY:g} seconds, until Ctrl-C.")
@click.option(
    "--check", is_flag=True, help="Say in a line and by the exit status whether the node's devices are served."
)
def status(*, state_dir: Path, output: str, watch: bool, check: bool) -> None:
    """Show what the gateways of this node know of themselves, their kubelet and their devices.

    All gateways that run are shown: during an update of the gateway, one serves and another stands by. It asks over the
    control sockets in --state-dir, so it must run on the node, as the gateway's own user (root).
    """
    if check and (output != "table" or watch):
        raise click.UsageError("--check prints lines of its own. Leave --output, --json and --watch out")
    try:
        while True:
            found = asyncio.run(look(state_dir, few=output == "table"))
            if check:
                _check(found)
            if output == "json":
                print_json({"gateways": found.raw, "silent": found.silent}, indent=0 if watch else 2)
            else:
                _show(found, state_dir, again=watch, whole=output == "wide")
            if not watch:
                sys.exit(0 if found.read else 1)
            sleep(_EVERY)
    except KeyboardInterrupt:  # The way to end --watch.
        if _is_live():
            click.echo()


def _check(found: Answers) -> NoReturn:
    """Print a line for each resource that isn't served, and exit with the status of ``--check``."""
    lacking = unserved(found.read)
    lacking |= {Path(path).stem: why for path, why in found.silent.items()}
    lacking |= {each.token: f"waiting for {each.waits_for}" for each in found.read if each.waits_for}
    click.echo("no gateway answers" if not found.read else "not ready" if lacking else "ready")
    for name, why in lacking.items():
        click.echo(f"{printable(name)}: {printable(why)}")
    sys.exit(2 if not found.read else 1 if lacking else 0)


def _show(found: Answers, state_dir: Path, *, again: bool, whole: bool) -> None:
    """Print for a person; with ``again`` on a terminal, each time at the same place."""
    lines = list(render(found, state_dir, columns(_WIDEST), whole=whole))
    if again and _is_live():
        if len(lines) >= (height := shutil.get_terminal_size().lines):
            rest = len(lines) - height + 2
            lines[-rest:] = [click.style(f"{rest} more lines", dim=True)]
        shown = lines if observe.wants_colour() else map(click.unstyle, lines)
        click.echo("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in shown) + "\x1b[J", nl=False, color=True)
    else:
        click.echo("\n".join([*lines, ""] if again else lines), err=not found.read)


def _is_live() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def render(found: Answers, state_dir: Path, width: int, *, whole: bool = False) -> Iterator[str]:
    """Yield the answers in lines of about ``width`` columns, with colours; ``click.echo`` drops those without a terminal."""
    page = _Page(width, whole=whole)
    if not found.read and not found.silent:
        yield from page.text("", asking.no_gateway_error(state_dir, "status").message)
    # The leader comes first.
    for number, one in enumerate(sorted(found.read, key=lambda one: bool(one.led_by))):
        yield from ([""] if number else [])
        yield from page.gateway(one)
    for number, (path, why) in enumerate(found.silent.items()):
        yield from ([""] if found.read and not number else [])
        yield click.style(f"gateway {Path(path).stem} does not answer", fg="red", bold=True)
        yield from page.text("  ", why)
    if found.silent or unserved(found.read) or not all(one.kubelet.present for one in found.read):
        yield from [
            "",
            *page.text("", "Devices aren't served: gateway doctor looks for the cause, and says what to do."),
        ]


class _Page:
    """Writes for a person, ``width`` columns wide. ``whole``: also every one of many devices."""

    def __init__(self, width: int, *, whole: bool) -> None:
        self._width, self._whole = width, whole

    def text(self, lead: str, text: str, colour: str | None = None) -> Iterator[str]:
        """Wrap ``text`` behind ``lead``, as far in as that is wide."""
        for line in textwrap.wrap(printable(text), self._width - len(lead)):
            yield lead + (click.style(line, fg=colour) if colour else line)
            lead = " " * len(lead)

    def _beside(self, lead: str, text: str) -> Iterator[str]:
        """Write ``text`` on the line of ``lead``, or below it if the line would be too long."""
        if len(click.unstyle(f"{lead}  {text}")) <= self._width:
            yield f"{lead}  {text}".rstrip()
        else:
            yield lead
            yield from self.text("  ", click.unstyle(text))

    def gateway(self, one: GatewayStatus) -> Iterator[str]:
        """Write all about one gateway."""
        title = click.style(f"gateway {printable(one.token)}", bold=True)
        kind = ", host service" if one.host_service else ""
        yield from self._beside(
            title, f"{printable(one.build.gateway)}{kind}, process {one.pid}, up {age(one.uptime_s)}"
        )
        yield from self.text("  waiting  ", one.waits_for and f"for {one.waits_for}", "red")
        leader = f"gateway {printable(one.led_by)}" + (", the host service," if one.led_by_host_service else "")
        yield from self.text("  standby  ", one.led_by and f"{leader} leads", "cyan")
        if one.kubelet.present:
            yield from self.text("  kubelet  ", f"found {age(one.kubelet.age_s or 0)} ago, {one.socket_dir}")
        else:
            yield from self.text("  kubelet  ", f"none in {one.socket_dir}", "red")
        if one.books.source == "none":
            yield from self.text("  records  ", "the kubelet's own can't be read", "yellow")
        else:
            yield from self.text("  records  ", f"{one.books.source}, read {age(one.books.age_s or 0)} ago")
        if one.ledger.writable:
            written = "not written yet" if one.ledger.written_s is None else f"written {age(one.ledger.written_s)} ago"
            yield from self.text("  state    ", f"{one.ledger.path}, {written}")
        else:
            yield from self.text("  state    ", f"{one.ledger.path} can't be written: {one.ledger.error}", "red")
        yield from self.text("           ", one.ledger.exposed, "yellow")
        if one.configuration is not None and one.configuration.error:
            rejected = f"rejected, so the last good one stays in force: {one.configuration.error}"
            yield from self.text("  config   ", rejected, "red")
        for warning in one.warnings:
            yield from self.text("  config   ", warning, "yellow")
        for hindered in one.hindrances:
            yield from self.text("  backend  ", f"{hindered.source}: {hindered.reason}", "yellow")
        for unusable in one.unusable:
            if unusable.excluded:
                yield from self.text("  left out ", f"{unusable.source}: {unusable.name}: {unusable.reason}")
        yield from self._drivers(one)
        yield from self._sides(one)
        if one.lag_s >= _LATE:
            yield from self.text(
                "  loop     ", f"answers come up to {age(one.lag_s)} late, in the last minute", "yellow"
            )
        if not (one.resources or one.drivers or one.waits_for):
            none = "none can be used" if one.unusable else "none was found yet"
            yield from self.text("  devices  ", f"{none}: nothing is offered to the kubelet", "yellow")
        for resource in () if one.led_by else one.resources:  # The leader knows more of them.
            yield ""
            yield from self.resource(resource)

    def _drivers(self, one: GatewayStatus) -> Iterator[str]:
        """Write for each DRA driver: its registration, why its ResourceSlices are out of date, and what it refused."""
        for each in one.drivers:
            stands = "registered" if each.registered else "not registered"
            text = f"{each.name}: {stands}, {count(each.devices, 'device')}"
            text += f", {count(each.claims, 'claim')} prepared" if each.claims else ""
            yield from self.text("  driver   ", text, None if each.registered else "red")
            yield from self.text("           ", each.rival or each.trouble, "red")
            unpublished = each.unpublished if each.unpublished != each.rival else ""
            yield from self.text("           ", unpublished and f"not published: {unpublished}", "red")
            for refused in each.refused:
                yield from self.text("           ", f"refused: {refused}", "red")

    def _sides(self, one: GatewayStatus) -> Iterator[str]:
        """Write how many GPUs each API has, and what moving GPUs wait for."""
        counts = Counter(each.side for each in one.sides)
        yield from self.text("  sides    ", ", ".join(f"{number} {side}" for side, number in sorted(counts.items())))
        ignored = one.crossing and f"the node's annotation isn't followed: {one.crossing}"
        yield from self.text("           ", ignored, "red")
        overlooked = one.by_name.overlooked and f"DRA offers its GPUs to nobody new: {one.by_name.overlooked}"
        yield from self.text("  by name  ", overlooked, "red")
        yield from self.text("  by name  ", one.by_name.waiting, "yellow")
        moving = [each for each in one.sides if each.side not in _ENDS]
        for each in moving[:_MOST_MOVING]:
            since = "" if each.moving_s is None else f", for {age(each.moving_s)}"
            yield from self.text("           ", f"{each.id} {each.side}{since}: {each.words}", "yellow")
        if (more := len(moving) - _MOST_MOVING) > 0:
            yield from self.text("           ", f"{more} more: gateway move --to dra --dry-run has them")

    def resource(self, one: ResourceStatus) -> Iterator[str]:
        """Write all about one resource."""
        name = click.style(printable(one.name), bold=True)
        held = "" if one.held is None else f", {one.held} held"
        held += "" if one.free is None else f", {one.free} free"
        yield from self._beside(name, f"{_bar(one)}{one.allocatable} of {one.listed} allocatable{held}")
        since = "" if one.stream_s is None else f" for {age(one.stream_s)}"
        spoken = ", ".join(part for part in (one.api, one.kubelets and f"kubelet {one.kubelets}") if part)
        phase = click.style(printable(one.phase), fg=_colour(one.phase))
        yield from self._beside(f"  {phase}{since}", printable(spoken))
        yield from self.text("  ", unschedulable_words(one), "yellow")
        yield from self.text("  ", _chain(one), "yellow" if one.behind and one.behind.state != _LIVE else None)
        by_dra = one.verdict.reason in {Reason.DRA, Reason.NO_DRA, Reason.RIVAL}
        why = one.verdict.why if by_dra else one.trouble
        yield from self.text("  ", why, None if one.verdict.state == VerdictState.SERVED else "red")
        yield from self.text("  ", _registered(one))
        yield from self.text("  ", ", ".join(_answered(call, codes) for call, codes in one.calls.items()))
        if one.checked == Confirmation.LACKING.value:
            yield from self.text("  ", "the kubelet's own records lack this registration", "red")
        for finding in one.drift:
            yield from self.text("  ", f"mismatch: {finding.words}", "yellow")
        yield from self._devices(one)

    def _devices(self, one: ResourceStatus) -> Iterator[str]:
        """Draw the devices as a table, with remarks below each."""
        shown = one.devices
        if one.listed > FEW and not self._whole:  # An older gateway says them all.
            shown = tuple(device for device in shown if device.state != _WELL or _remarks(device))[:FEW]
        if shown:
            cells = [("DEVICE", "STATE", "NUMA", "HELD BY"), *map(_cells, shown)]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            head, *rows = ([f"{text:<{room}}" for text, room in zip(row, widths, strict=True)] for row in cells)
            folded = self._width < _UNFOLDED and sum(widths) + 2 * len(widths) > self._width
            yield ""
            if not folded:
                yield click.style("  " + "  ".join(head).rstrip(), dim=True)
            for device, row in zip(shown, rows, strict=True):
                row[1] = click.style(row[1].rstrip() if folded else row[1], fg=_colour(device.state))
                if folded:
                    id_, state, numa, holder = (text.rstrip() for text in row)
                    yield from (id_, f"  {state}, NUMA {numa}", *self.text("  ", "" if holder == "-" else holder))
                else:
                    yield "  " + "  ".join(row).rstrip()
                yield from self.text(
                    "      ", _remarks(device), "yellow" if device.state == _WELL else _colour(device.state)
                )
        if hidden := one.listed - len(shown):
            yield click.style(f"  {hidden} more of {one.listed} devices: -o wide has them all", dim=True)


def _chain(one: ResourceStatus) -> str:
    """Return the path of a bridged resource from its plugin to the kubelet, with the API on each side; empty for the gateway's own."""
    plugin = one.behind
    if plugin is None:
        return ""
    renamed = "" if plugin.resource == one.name else f" ({plugin.resource})"
    state = (
        plugin.state if plugin.state == _LIVE else f"{plugin.state}, away for {age(plugin.state_s)}: {plugin.reason}"
    )
    went = f", went {count(plugin.absences, 'time')}" if plugin.absences else ""
    return (
        f"{plugin.folder}/{plugin.endpoint}{renamed} -{plugin.api}-> gateway -{one.api or '?'}-> kubelet; {state}{went}"
    )


def _bar(one: ResourceStatus) -> str:
    """Draw one square for each device, if they are few enough to count."""
    if not 0 < one.listed <= FEW:
        return ""
    colour = "green" if one.allocatable == one.listed else "yellow"
    squares = (("■" * one.allocatable, {"fg": colour}), ("□" * (one.listed - one.allocatable), {"dim": True}))
    return "".join(click.style(text, **style) for text, style in squares if text) + "  "


def _registered(one: ResourceStatus) -> str:
    """Return how often a resource was registered, and why; empty if it never was."""
    times = sum(one.registrations.values())
    causes = ", ".join(f"{number} {why}" for why, number in one.registrations.items())
    gap = "" if one.last_gap_s is None else f"; last gap {age(one.last_gap_s)}"
    return f"registered {count(times, 'time')} ({causes}){gap}" if times else ""


def _answered(call: str, codes: dict[str, int]) -> str:
    failed = ", ".join(f"{number} {code}" for code, number in codes.items() if code != "OK")
    return f"{call} {sum(codes.values())}" + (f" ({failed})" if failed else "")


def _cells(device: DeviceStatus) -> tuple[str, ...]:
    numa = ",".join(map(str, device.numa)) or "-"
    return printable(device.id), printable(device.state), numa, printable(device.holder or "-")


def _remarks(device: DeviceStatus) -> str:
    """Return the remarks about a device; empty for a healthy one without any."""
    parts = (
        ": ".join(part for part in (device.kind, device.reason) if part),
        device.drift and f"mismatch: {', '.join(device.drift)}",
        device.stranger and f"not offered by DRA here: {device.stranger}",
    )
    return "; ".join(part for part in parts if part)


def _colour(word: str) -> str:
    return _COLOURS.get(word, "yellow")


def age(seconds: float) -> str:
    """Return a time in at most two units: ``4.2 ms``, ``0.4 s``, ``12 s``, ``3 min``, ``2 h 10 min``, ``3 d 4 h``."""
    if seconds < 0.1:
        return f"{round(seconds * 1000, 1):g} ms"
    if seconds < 1:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{int(seconds)} s"
    minutes, hours, days = (int(seconds // unit) for unit in (60, 3600, 86400))
    if minutes < 60:
        return f"{minutes} min"
    if hours < 24:
        return f"{hours} h {minutes % 60} min"
    return f"{days} d {hours % 24} h"
