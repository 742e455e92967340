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
        "when an old plugin's stream ends, the kubelet disconnects the new plugin, and no device is allocatable any more",
        25,
        36,
        "1.37 (#135437)",
        "ends the older gateway's streams before the newer gateway registers",
        shows.old_end_disconnects_new,
        "1.28",
        "1.37",
        issues=(127803, 121994),
    ),
    "issue-125501": Bug(
        "the kubelet never reconnects to a plugin whose stream ended",
        8,
        None,
        "none",
        "registers again 5 ms after a stream ended",
        shows.never_reconnects,
        "1.37",
        issues=(125501,),
    ),
    "issue-66596": Bug(
        "the kubelet panics if an AllocateResponse lacks a container (index out of range)",
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
        "after a restart of the kubelet, a pod starts with devices that no plugin serves, even unhealthy ones",
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
        "after a restart of the kubelet, a pod fails if the kubelet admits it before the plugin registers (no healthy devices present)",
        25,
        None,
        "none, except for containers that the runtime still runs (#118635)",
        "can run as a [host service](host-service.md), which starts before the kubelet",
        shows.readmission_fails,
        "1.28",
        "1.24",
        issues=(118559, 125579, 128043),
    ),
    "issue-138446": Bug(
        "a restarted kubelet ends a running pod whose init container had devices (no healthy devices present)",
        25,
        None,
        "none",
        "registers milliseconds after the kubelet listens",
        shows.ended_init_container_is_refused,
        "1.37",
        "1.20",
        issues=(138446, 124345),
    ),
    "register-ok": Bug(
        "the kubelet responds with OK to Register before it connects, even if no plugin listens",
        8,
        24,
        "1.25",
        "registers again if the kubelet doesn't call within 11 s",
        shows.register_proves_nothing,
        "1.20",
        "1.28",
    ),
    "early-register": Bug(
        "the kubelet never calls a plugin that registers before it listens",
        8,
        9,
        "1.10",
        "listens before it registers",
        shows.early_is_never_called,
        "1.9",
        "1.10",
    ),
    "phantoms": Bug(
        "devices of a replaced plugin stay allocatable for ever",
        8,
        8,
        "1.9",
        "keeps device IDs over restarts and updates",
        shows.phantoms,
        "1.8",
        "1.9",
    ),
    "old-list": Bug(
        "lists of a replaced plugin overwrite the lists of the new plugin",
        12,
        None,
        "none",
        "ends its streams before another gateway registers, and never registers while a stream is open",
        shows.old_list_overwrites_new,
        "1.20",
        "1.10",
    ),
    "checkpoint-in-place": Bug(
        "the kubelet overwrites the checkpoint in place, so a kubelet that dies then loses all holders",
        8,
        9,
        "1.10",
        "reads a damaged checkpoint again",
        shows.checkpoint_is_overwritten,
        "1.9",
        "1.10",
    ),
    "checkpoint-1.9": Bug(
        "1.9 can't read the checkpoint of 1.8. Pods keep running, and the kubelet gives their devices to other pods",
        9,
        9,
        "none",
        "remembers the holders; `gateway plan` advises to drain first",
        shows.forgets("1.8"),
        "1.9",
    ),
    "checkpoint-1.11": Bug(
        "1.11 can't read the checkpoint of 1.10 (checkpoint is corrupted)",
        11,
        11,
        "none",
        "remembers the holders",
        shows.forgets("1.10"),
        "1.11",
    ),
    "checkpoint-1.31": Bug(
        "1.31 and later can't read the checkpoint of 1.19 and earlier",
        31,
        None,
        "none; upgrade first to 1.20 to 1.29, which read both formats",
        "remembers the holders",
        shows.forgets("1.18"),
        "1.32",
        "1.28",
    ),
    "issue-102880": Bug(
        "1.20 to 1.22 can't read the checkpoint of 1.19",
        20,
        22,
        "1.23.0, and the last patch releases of 1.20 to 1.22",
        "names the patch releases to use in `gateway plan`",
        why_not="the patch releases that can be built as Go modules (1.20.15) have the fix",
        issues=(102880,),
    ),
    "issue-118559": Bug(
        "a restarted kubelet kills running pods (no healthy devices present)",
        25,
        27,
        "1.25.11, 1.26.6, 1.27.3 (#118635)",
        "names the patch releases to avoid in `gateway plan`",
        why_not="the versions between the two changes can't be built as Go modules; `readmission` shows what is left of it",
        issues=(118559,),
    ),
    "forgotten-in-flight": Bug(
        "if pod-resources `List` is called while an Allocate is open, the kubelet may give the same device to the next pod also",
        15,
        None,
        "none",
        "[gives a device again only when it is free](architecture.md#a-device-is-given-again-only-when-it-is-free)",
        shows.in_flight_is_forgotten,
        "1.37",
        "1.12",
    ),
    "issue-136021": Bug(
        "the kubelet crashes if it starts a pod with a GPU of DRA by resource name while it admits a pod by the device plugin API",
        36,
        None,
        "none in 1.37.1",
        "can't prevent this; running pods continue, and systemd restarts the kubelet",
        why_not="it is a race on a whole node: once or twice in some dozens of moves",
        issues=(136021,),
    ),
    "stuck-registration": Bug(
        "a plugin that registers in the first 2 ms after the end of its old stream gets a stream, but no pod gets its devices",
        25,
        36,
        "1.37 (#135437)",
        "waits 5 ms, and checks the kubelet's records",
        why_not="it is a race: 3 of 100 tries at the worst moment",
    ),
}
"""By name, as ``gateway bugs`` takes it."""
