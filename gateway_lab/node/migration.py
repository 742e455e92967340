"""From another device plugin to ours and back, with pods that hold GPUs: what happens at each stage of it.

The other one (``otherplugin.py``) speaks no handover, so it and ours meet as two plugins of one resource do. Device IDs and answers are
the same, which is what lets pods keep what they have. At each stage the containers are killed, too, and the kubelet restarted: then
everything that was remembered must still be true.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from gateway_lab.node.continuity import SAME_GPU, Promise
from gateway_lab.node.installed import DaemonSet, HostService, Installed, OtherPlugin
from gateway_lab.node.stage import PATIENCE, Outcome, Stage

OURS, OTHER = "ours", "other"
TEN_SECONDS = 11_000.0
"""The API server is told every ten seconds: what it was told in a gap stays for so long."""


@dataclass(frozen=True, slots=True)
class Step:
    """Something that happens while one of the two plugins is on the node, or when it takes the other's place."""

    name: str
    words: str
    plugin: str
    """Which plugin serves in the end."""
    promise: Promise


_SWAPPED = Promise(drop_ms=TEN_SECONDS)
_CONTAINERS = Promise(fates=SAME_GPU)
_OTHERS = Promise(drop_ms=TEN_SECONDS)
"""The other plugin isn't ours to promise for: it may be late for the first status of a kubelet."""

STEPS: Sequence[Step] = (
    Step("other-containers", "containers are killed", OTHER, _CONTAINERS),
    Step("other-kubelet", "the kubelet is restarted", OTHER, _OTHERS),
    Step("swapped", "the other plugin is ended, ours is started", OURS, _SWAPPED),
    Step("ours-containers", "containers are killed", OURS, _CONTAINERS),
    Step("ours-kubelet", "the kubelet is restarted", OURS, Promise()),
    Step("back", "ours is ended, the other plugin is started", OTHER, _SWAPPED),
    Step("back-containers", "containers are killed", OTHER, _CONTAINERS),
    Step("back-kubelet", "the kubelet is restarted", OTHER, _OTHERS),
    Step("beside", "ours is started next to the other plugin, which then ends", OURS, _SWAPPED),
    Step("beside-containers", "containers are killed", OURS, _CONTAINERS),
    Step("beside-kubelet", "the kubelet is restarted", OURS, Promise()),
)


async def run(stage: Stage, version: str, step: Step, plugins: Mapping[str, Installed]) -> Outcome:
    """Let one step happen; the node is prepared for it if the step before it failed."""
    before = {"swapped": OTHER, "back": OURS, "beside": OTHER}.get(step.name, step.plugin)
    await stage.install(plugins[before])
    await stage.prepare(version)
    if step.name == "beside":
        happens = partial(_beside, stage, plugins[step.plugin])
    elif before != step.plugin:
        happens = partial(stage.install, plugins[step.plugin])
    elif step.name.endswith("-kubelet"):
        happens = partial(stage.node.kubelet.restart)
    else:
        happens = partial(kill_containers, stage)
    return await stage.observe(step.name, happens, version)


async def _beside(stage: Stage, ours: Installed) -> None:
    """Start ours while the other one runs, wait until it serves, and end the other one."""
    other = stage.plugin
    await ours.start()
    stage.installed = ours
    await asyncio.sleep(2)  # the kubelet knows ours by then
    await other.stop()


async def kill_containers(stage: Stage) -> None:
    """Kill the process of each GPU pod's container, and wait until each has been started again."""
    old = {kind: one.seen for kind, one in (await stage.settled()).items()}
    for pod in old.values():
        for container in pod.containers.values():
            await stage.node.ctr("tasks", "kill", "-s", "SIGKILL", container.id.removeprefix("containerd://"))
    await stage.seen.until(
        lambda seen: all(
            any(now.runs and now.containers != pod.containers for now in seen.named(kind)) for kind, pod in old.items()
        ),
        "each container to be started again",
        PATIENCE,
    )


def plugins(stage: Stage, ours: str, image: str) -> dict[str, Installed]:
    """Give the two plugins of a migration; ``ours`` is the way in which ours is installed."""
    made: Installed = (
        HostService(stage.node) if ours == HostService.kind else DaemonSet(stage.node, stage.api, stage.seen, image)
    )
    return {OTHER: OtherPlugin(stage.node), OURS: made}
