"""Pods that use GPUs: what they ask for, and what they themselves say of what they got.

The container of each says once which GPUs it was told of (``told``), and then twice a second whether it can open each device
node that it has (``open`` or ``lost``). That is read from its log on the node, so that neither a kubelet nor an API server is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway_lab.node.api import Object
from gateway_lab.trials.scenarios import RESOURCE, VISIBLE

CONTAINER = "main"
NAMESPACE = "default"
IMAGE = "localhost/busybox:1"
NODES = "/dev/nvidia[0-9]*"
"""The device nodes of GPUs, as a shell's pattern."""
FOR_EVER = -1

_SCRIPT = f"""\
trap 'exit 0' TERM
echo "told ${VISIBLE[RESOURCE]}"
left=$1
while [ $left != 0 ]; do
  for node in {NODES}; do ( : <"$node" ) 2>/dev/null && echo "open $node" || echo "lost $node"; done
  sleep 0.5 & wait $!
  left=$((left - 1))
done
"""
_LINE = re.compile(r"(?P<time>\S+) (?:stdout|stderr) [FP] (?P<text>.*)")
"""A line of a container's log, as the kubelet's log format has it."""


@dataclass(frozen=True, slots=True)
class Word:
    """A line that a container wrote. ``time`` is RFC 3339, UTC, to the nanosecond: later ones compare as greater."""

    time: str
    text: str


@dataclass(frozen=True, slots=True)
class Account:
    """What a pod's container says: the GPUs that it was told of, its device nodes, and when it last could open them all."""

    told: frozenset[str]
    nodes: frozenset[str]
    last: str
    lost: tuple[str, ...]
    began: str = ""
    """When it began to run."""


def gpu_pod(name: str, count: int = 1, resource: str = RESOURCE, looks: int = FOR_EVER) -> Object:
    """A bare pod with so many GPUs (0: it asks for none), which ends by itself after so many looks at its device nodes.

    Also what goes into the kubelet's folder for static pods.
    """
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"app": name}},
        "spec": _spec(count, resource, looks) | ({} if looks == FOR_EVER else {"restartPolicy": "Never"}),
    }


def deployment(name: str, replicas: int) -> Object:
    """A Deployment of such pods."""
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": _spec(1, RESOURCE, FOR_EVER)},
        },
    }


def _spec(count: int, resource: str, looks: int) -> dict[str, Any]:
    return {
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "containers": [
            {
                "name": CONTAINER,
                "image": IMAGE,
                "imagePullPolicy": "Never",
                "command": ["sh", "-c", _SCRIPT, "sh", str(looks)],
                "resources": {"limits": {resource: count}} if count else {},
            }
        ],
    }


def write_static(folder: Path, name: str) -> Path:
    """Have the kubelet run a static pod; give the file that is to be removed to end it."""
    path = folder / f"{name}.json"
    new = path.with_name(f".{path.name}")  # the kubelet reads no file that begins with a dot
    new.write_text(json.dumps(gpu_pod(name, 1)))
    return new.replace(path)


def words(logs: Path, pod: str, uid: str = "") -> list[Word]:
    """Read what the containers of a pod have written, oldest first; ``logs`` is where the kubelet has pods' logs.

    Without ``uid``, or where no folder has it (the API server shows another one of a static pod), the pod of that name
    that wrote last is meant. Nothing is there before the first container was made.
    """
    place = folder(logs, pod, uid)
    files = [] if place is None else place.glob(f"{CONTAINER}/*.log")
    lines = [
        match
        for path in sorted(files, key=lambda one: int(one.stem.partition(".")[0]))
        for match in map(_LINE.fullmatch, path.read_text(errors="replace").splitlines())
        if match
    ]
    return [Word(match["time"], match["text"]) for match in lines]


def folder(logs: Path, pod: str, uid: str = "") -> Path | None:
    """Find where a pod's logs are, as ``words`` does; its name has the UID by which the kubelet knows the pod."""
    there = [*logs.glob(f"{NAMESPACE}_{pod}_{uid}")] if uid else []
    return max(there or logs.glob(f"{NAMESPACE}_{pod}_*"), key=_written, default=None)


def _written(folder: Path) -> int:
    """When a container last wrote into a folder: a static pod that comes again has the UID that it had."""
    return max((one.stat().st_mtime_ns for one in folder.glob(f"{CONTAINER}/*.log")), default=0)


def account(said: Sequence[Word], since: str = "") -> Account:
    """Sum up what a container said, from its last start on; ``lost`` are the nodes that it could not open after ``since``."""
    starts = [number for number, word in enumerate(said) if word.text.startswith("told")]
    current = said[starts[-1] :] if starts else []
    told = current[0].text.split(" ", 1)[1] if current and " " in current[0].text else ""
    opened: Mapping[str, str] = {
        word.text.removeprefix("open "): word.time for word in current if word.text.startswith("open ")
    }
    return Account(
        frozenset(filter(None, told.split(","))),
        frozenset(opened),
        min(opened.values(), default=""),
        tuple(word.text.removeprefix("lost ") for word in said if word.text.startswith("lost") and word.time > since),
        current[0].time if current else "",
    )
