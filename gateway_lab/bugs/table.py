"""The track record as data: each bug, whom it befalls, and what shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gateway_lab.bugs import shows
from gateway_lab.bugs.shows import Show


@dataclass(frozen=True, slots=True)
class Bug:
    """One bug.

    Args:
        what: what happens, to whoever has the bug.
        first: the first minor version of the kubelet that has it.
        last: the last one; None: it isn't fixed.
        fixed: what fixed it, or why it stays.
        here: what the gateway does about it.
        show: shows it on one kubelet; None: ``why_not`` says why no command does.
        good: a version without it, which is run beside one with it.
    """

    what: str
    first: int
    last: int | None
    fixed: str
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
        "the end of an old plugin's stream disconnects the plugin that is registered now, by name: 0 allocatable, for ever",
        25,
        36,
        "1.37 (#135437): clients are known by their sockets",
        "ends the older gateway's streams before the newer gateway registers",
        shows.old_end_disconnects_new,
        "1.28",
        "1.37",
        issues=(127803, 121994),
    ),
    "issue-125501": Bug(
        "the kubelet never reconnects to a plugin whose stream ended; the plugin must register again",
        8,
        None,
        "none; plugins should watch kubelet.sock, which doesn't change in this case",
        "registers again 5 ms after a stream broke",
        shows.never_reconnects,
        "1.37",
        issues=(125501,),
    ),
    "issue-66596": Bug(
        "an AllocateResponse without a container's answer makes the kubelet panic (index out of range)",
        10,
        11,
        "1.12",
        "always responds for each container of the request",
        shows.empty_answer_ends_kubelet,
        "1.10",
        "1.12",
        issues=(66596,),
    ),
    "issue-109595": Bug(
        "after a kubelet's restart a pod starts with devices that no plugin serves, even unhealthy ones",
        9,
        24,
        "late 1.25 (#116376), which causes `readmission`",
        "registers milliseconds after the kubelet listens",
        shows.admitted_without_a_plugin,
        "1.24",
        "1.28",
        issues=(109595,),
    ),
    "readmission": Bug(
        "a pod that is admitted again before its plugin is back fails for good: no healthy devices present",
        25,
        None,
        "none, except for containers that the runtime still runs (#118635)",
        "a [host service](host-service.md) that starts before the kubelet; known devices keep their health",
        shows.readmission_fails,
        "1.28",
        "1.24",
        issues=(118559, 125579, 128043),
    ),
    "issue-138446": Bug(
        "a running pod is ended when the kubelet restarts, because an init container with devices ended long ago: no healthy devices present",
        25,
        None,
        "none; only containers that the runtime still runs are let through (#118635)",
        "registers milliseconds after the kubelet listens, or before it, as a host service",
        shows.ended_init_container_is_refused,
        "1.37",
        "1.20",
        issues=(138446, 124345),
    ),
    "register-ok": Bug(
        "Register is answered OK before the kubelet connects, even if no plugin is there",
        8,
        24,
        "1.25: Register waits for the connection and the options",
        "waits for the kubelet's call; without one within 11 s it registers again",
        shows.register_proves_nothing,
        "1.20",
        "1.28",
    ),
    "early-register": Bug(
        "a plugin that registers before it listens is never called",
        8,
        9,
        "1.10: the kubelet waits up to 10 s",
        "listens before it registers",
        shows.early_is_never_called,
        "1.9",
        "1.10",
    ),
    "phantoms": Bug(
        "devices of a replaced plugin stay for ever, and are given to containers",
        8,
        8,
        "1.9",
        "device IDs stay the same over restarts and updates",
        shows.phantoms,
        "1.8",
        "1.9",
    ),
    "old-list": Bug(
        "lists of a replaced plugin overwrite the new one's",
        12,
        None,
        "none; streams of older registrations stay open",
        "ends its streams before another gateway registers, and never registers while a stream is open",
        shows.old_list_overwrites_new,
        "1.20",
        "1.10",
    ),
    "checkpoint-in-place": Bug(
        "the checkpoint is overwritten in place: readers find a part of it, and a kubelet that dies then has lost who holds what",
        8,
        9,
        "1.10: it is written under another name and renamed",
        "reads an unreadable checkpoint again",
        shows.checkpoint_is_overwritten,
        "1.9",
        "1.10",
    ),
    "checkpoint-1.9": Bug(
        "1.9 reads nothing of what 1.8 wrote: pods keep running, and their devices are given to others",
        9,
        9,
        "none; the format changed",
        "`gateway plan` advises to drain first; devices whose holder the kubelet forgot are given last",
        shows.forgets("1.8"),
        "1.9",
    ),
    "checkpoint-1.11": Bug(
        "1.11 can't read what 1.10 wrote (checkpoint is corrupted), as with `checkpoint-1.9`",
        11,
        11,
        "none; the format changed",
        "as with `checkpoint-1.9`",
        shows.forgets("1.10"),
        "1.11",
    ),
    "checkpoint-1.31": Bug(
        "1.31 and later read nothing of what kubelets up to 1.19 wrote, as with `checkpoint-1.9`",
        31,
        None,
        "upgrade in steps: 1.20 to 1.29 read both formats",
        "as with `checkpoint-1.9`",
        shows.forgets("1.18"),
        "1.32",
        "1.28",
    ),
    "issue-102880": Bug(
        "1.20 to 1.22 read nothing of what 1.19 wrote",
        20,
        22,
        "1.23.0, and the last patch releases of 1.20 to 1.22",
        "`gateway plan` names the patch releases to use",
        why_not="the patch releases that can be built as Go modules (1.20.15) have the fix",
        issues=(102880,),
    ),
    "issue-118559": Bug(
        "running pods are killed when the kubelet restarts: no healthy devices present",
        25,
        27,
        "1.25.11, 1.26.6, 1.27.3 (#118635)",
        "`gateway plan` names the patch releases to avoid",
        why_not="the versions between the two changes can't be built as Go modules; `readmission` shows what is left of it",
        issues=(118559,),
    ),
    "forgotten-in-flight": Bug(
        "pod A has ended, and the kubelet waits for the Allocate of pod B. If pod-resources `List` is called then, B's device also goes to the next pod",
        15,
        None,
        "none",
        "[gives a device again only when it is free](architecture.md#a-device-is-given-again-only-when-it-is-free)",
        shows.in_flight_is_forgotten,
        "1.37",
        "1.12",
    ),
    "issue-136021": Bug(
        "the kubelet crashes (assignment to entry in nil map) if it starts a pod with a GPU of DRA by resource name while it admits another by the device plugin API",
        36,
        None,
        "none in 1.37.1",
        "nothing helps; running pods continue, and the kubelet is started again",
        why_not="it is a race on a whole node: once or twice in some dozens of moves",
        issues=(136021,),
    ),
    "stuck-registration": Bug(
        "a Register that comes while the kubelet handles the end of the stream before is lost: its stream lives, and no pod gets a device (11 of 400 after 0.3 ms, none after 2 ms)",
        25,
        36,
        "1.37 (#135437)",
        "waits 5 ms, and checks the kubelet's records",
        why_not="it is a race: 3 of 100 tries at the worst moment",
    ),
}
"""By name, as ``gateway bugs`` takes it."""
