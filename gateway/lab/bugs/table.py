"""The track record as data: each bug, whom it befalls, and what shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gateway.lab.bugs import shows
from gateway.lab.bugs.shows import Show


@dataclass(frozen=True, slots=True)
class Bug:
    """One bug.

    Args:
        what: what happens, to whoever has the bug.
        first: the first minor version of the kubelet that has it.
        last: the last one; None: it isn't fixed.
        fixed: what fixed it, or why it stays.
        found: how this project met it.
        here: what the gateway does about it.
        show: shows it on one kubelet; None: ``why_not`` says why no command does.
        good: a version without it, which is run beside one with it.
    """

    what: str
    first: int
    last: int | None
    fixed: str
    found: str
    here: str
    show: Show | None = None
    bad: str = ""
    """The version with it that is run."""
    good: str = ""
    why_not: str = ""
    issues: tuple[int, ...] = ()

    def befalls(self, minor: int) -> bool:
        """Whether a kubelet of this minor version has it."""
        return self.first <= minor and (self.last is None or minor <= self.last)


BUGS: Final[Mapping[str, Bug]] = {
    "issue-127803": Bug(
        "the end of an old plugin's stream disconnects the plugin that is registered now, by name: allocatable 0, for ever",
        25,
        36,
        "1.37 (#135437): clients are known by their sockets",
        "a DaemonSet's rolling update with maxSurge",
        "the older gateway ends its streams before the newer one registers; registrations are looked for in the kubelet's records",
        shows.old_end_disconnects_new,
        "1.28",
        "1.37",
        issues=(127803, 121994),
    ),
    "issue-125501": Bug(
        "the kubelet never connects again to a plugin whose stream has ended: the plugin must register again",
        8,
        None,
        "not fixed: plugins are to watch kubelet.sock, which doesn't change",
        "reading, then a connection cut on purpose",
        "registers again 5 ms after a stream that ended unasked",
        shows.never_reconnects,
        "1.37",
        issues=(125501,),
    ),
    "issue-66596": Bug(
        "an AllocateResponse without a container's answer makes the kubelet panic (index out of range)",
        10,
        11,
        "1.12",
        "reading, then the genuine device managers",
        "never answers for fewer containers than were asked for",
        shows.empty_answer_ends_kubelet,
        "1.10",
        "1.12",
        issues=(66596,),
    ),
    "issue-109595": Bug(
        "after a kubelet's restart a pod is started with devices that nobody serves, unhealthy ones included",
        9,
        24,
        "late 1.25 (#116376), which made the next one",
        "the genuine device managers, restarted without a plugin",
        "is registered milliseconds after a kubelet listens",
        shows.admitted_without_a_plugin,
        "1.24",
        "1.28",
        issues=(109595,),
    ),
    "readmission": Bug(
        "a pod that is admitted again before its plugin is back has failed for good: no healthy devices present",
        25,
        None,
        "not fixed, but for containers that the runtime still runs (#118635)",
        "reboots of a genuine node",
        "a host service that is ordered before the kubelet (docs/host-service.md), and what is known keeps its health",
        shows.readmission_fails,
        "1.28",
        "1.24",
        issues=(118559, 125579, 128043),
    ),
    "issue-138446": Bug(
        "a pod that runs is ended when the kubelet starts anew, because of an init container with devices that ended long ago: no healthy devices present",
        25,
        None,
        "not fixed: only containers that the runtime still runs are let through (#118635)",
        "reading, then the genuine device managers",
        "is registered milliseconds after a kubelet listens, or before it, as a host service",
        shows.ended_init_container_is_refused,
        "1.37",
        "1.20",
        issues=(138446, 124345),
    ),
    "register-ok": Bug(
        "Register is answered OK before anything was connected: a plugin that isn't there is registered, too",
        8,
        24,
        "1.25: Register waits for the connection and the options",
        "the genuine device managers",
        "what counts is the kubelet's call; without one within 11 s it registers again",
        shows.register_proves_nothing,
        "1.20",
        "1.28",
    ),
    "early-register": Bug(
        "a plugin that registers before it listens is never called",
        8,
        9,
        "1.10: the kubelet waits up to 10 s",
        "the genuine device managers",
        "is bound before it registers, once and for all",
        shows.early_is_never_called,
        "1.9",
        "1.10",
    ),
    "phantoms": Bug(
        "devices of a plugin that was replaced stay for ever, and are given to containers",
        8,
        8,
        "1.9",
        "the genuine device manager",
        "device IDs stay the same over restarts and updates",
        shows.phantoms,
        "1.8",
        "1.9",
    ),
    "old-list": Bug(
        "lists of a plugin that was replaced still count: they overwrite the new one's",
        12,
        None,
        "not fixed: streams of older registrations stay open",
        "the genuine device managers",
        "ends its streams before another one registers, and never registers while one is open",
        shows.old_list_overwrites_new,
        "1.20",
        "1.10",
    ),
    "checkpoint-in-place": Bug(
        "the checkpoint is written over in place: who reads it meanwhile finds a part of it, and a kubelet that dies meanwhile has lost who holds what",
        8,
        9,
        "1.10: it is written beside and renamed",
        "reading, then the genuine device managers",
        "what can't be read says nothing, and is read again",
        shows.checkpoint_is_overwritten,
        "1.9",
        "1.10",
    ),
    "checkpoint-1.9": Bug(
        "1.9 reads nothing of what 1.8 wrote: pods keep running, and their devices are given to others",
        9,
        9,
        "the format is another one",
        "hops of genuine device managers",
        "`gateway plan` says to drain first; whom a kubelet forgot is remembered, and others get those devices last",
        shows.forgets("1.8"),
        "1.9",
    ),
    "checkpoint-1.11": Bug(
        "1.11 can't read what 1.10 wrote (checkpoint is corrupted): the same",
        11,
        11,
        "the format is another one",
        "hops of genuine device managers",
        "as above",
        shows.forgets("1.10"),
        "1.11",
    ),
    "checkpoint-1.31": Bug(
        "1.31 and later read nothing of what kubelets up to 1.19 wrote: the same",
        31,
        None,
        "one step at a time: 1.20 to 1.29 read both formats",
        "hops of genuine device managers",
        "as above",
        shows.forgets("1.18"),
        "1.32",
        "1.28",
    ),
    "issue-102880": Bug(
        "1.20 to 1.22 read nothing of what 1.19 wrote",
        20,
        22,
        "1.23.0, and the last patch releases of 1.20 to 1.22",
        "reading",
        "`gateway plan` names the patch releases to go to",
        why_not="the patch releases that can be built as Go modules (1.20.15) have the fix",
        issues=(102880,),
    ),
    "issue-118559": Bug(
        "running pods are killed when the kubelet restarts: no healthy devices present",
        25,
        27,
        "1.25.11, 1.26.6, 1.27.3 (#118635)",
        "reading",
        "`gateway plan` names the patch releases to leave out",
        why_not="the versions between the two changes can't be built as Go modules; `readmission` shows what is left of it",
        issues=(118559,),
    ),
    "forgotten-in-flight": Bug(
        "a device that is being allocated while pod-resources `List` is called, and another pod has ended, is given to the next pod, too",
        15,
        None,
        "not fixed: UpdateAllocatedDevices counts anew what pods hold, and who waits for Allocate holds nothing yet",
        "a whole genuine node, where Allocate waited for DRA's GPUs",
        "gives a device again only when the kubelet says that no pod holds it; puts off its own looks while an Allocate is open",
        shows.in_flight_is_forgotten,
        "1.37",
        "1.12",
    ),
    "issue-136021": Bug(
        "the kubelet crashes (assignment to entry in nil map) when it starts a pod that has a GPU of DRA's by name, and admits another one by the device plugin API meanwhile",
        36,
        None,
        "not fixed in 1.37.1",
        "whole genuine nodes that cross: twice on 1.36.3, once on 1.37.1",
        "nothing helps: running pods go on, and the kubelet is started again",
        why_not="it is a race, and takes a whole node: once or twice in some dozens of crossings",
        issues=(136021,),
    ),
    "stuck-registration": Bug(
        "a Register that comes while the end of the stream before is being handled is held by nobody: its stream lives, and no pod gets a device",
        25,
        36,
        "1.37 (#135437)",
        "a genuine node: 11 of 400 registrations after 0.3 ms, none of 400 after 2 ms",
        "waits 5 ms, and looks into the kubelet's records",
        why_not="it is a race: 3 of 100 tries at the worst moment",
    ),
}
"""By name, as ``gateway compat --only`` takes it."""
