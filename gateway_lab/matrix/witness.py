"""What a node leaves to read when a run on it is over: the calls that the tap saw, and the ends of its processes' logs.

A list of 5 000 devices is one line of a transcript, and a report holds hundreds of transcripts: each is bounded in lines and
in columns, and says where it was cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from gateway_lab.wire.transcript import transcript

if TYPE_CHECKING:
    from gateway_lab.gatewayproc import Line
    from gateway_lab.trials.scenarios import Node

LINES = 300
COLUMNS = 500
LOG_LINES = 60
"""How many of the newest lines of one process's log are kept."""


def calls(node: Node) -> tuple[str, ...]:
    """Give the calls that the node's tap saw, in their order; nothing where there was no tap."""
    if node.tap is None:
        return ()
    names = {str(node.kubelet_dir): "<kubelet>", str(node.socket_dir): "<sockets>"}
    return bounded(transcript(node.tap.connections, names))


def logs(node: Node, since: int = 0) -> tuple[str, ...]:
    """Give the ends of the logs of the node's gateways (of the last one only what came after ``since``) and kubelet."""
    return bounded(line.replace(str(node.root), "<node>") for line in _logs(node, since))


def _logs(node: Node, since: int) -> Iterator[str]:
    for number, gateway in enumerate(node.gateways, 1):
        yield f"gateway {number if len(node.gateways) > 1 else ''}".strip()
        count = min(LOG_LINES, gateway.seen - (since if gateway is node.gateway else 0))
        yield from (f"  {said(json.loads(line))}" for line in gateway.log(count).splitlines() if count)
    if node.kubelet is not None:
        yield f"kubelet {node.kubelet.version} ({node.kubelet.kind})"
        yield from (f"  {line}" for line in node.kubelet.log().splitlines()[-LOG_LINES:])


def said(line: Line) -> str:
    """Spell a log line for people: the event, then its fields."""
    details = " ".join(f"{key}={value}" for key, value in line.items() if key not in {"event", "timestamp", "level"})
    level = line.get("level", "")
    return " ".join(
        filter(None, (level if level in {"warning", "error", "critical"} else "", str(line["event"]), details))
    )


def bounded(lines: Iterable[str]) -> tuple[str, ...]:
    """Cut what is too long for a report: lines in the middle, columns at the end."""
    found = [line if len(line) <= COLUMNS else f"{line[:COLUMNS]}… ({len(line)} characters)" for line in lines]
    left_out = len(found) - LINES
    if left_out > 0:
        half = LINES // 2
        found[half : len(found) - half] = [f"… {left_out} lines left out"]
    return tuple(found)
