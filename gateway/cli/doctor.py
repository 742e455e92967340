"""``gateway doctor``: what keeps this node's GPUs from pods, and what to do about it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from adapters.levels import minor_version
from gateway.cli import advice, asking, common, run
from gateway.cli.page import columns, count, print_json
from gateway.cli.status import look as ask
from gateway.configuration.settings import SOCKET_DIR, ConfigError
from gateway.doctor import checks, drivers
from gateway.doctor.look import Places, look
from gateway.doctor.snapshot import Cluster, DoctorAnswer, GatewayFacts, NodeFacts, Release
from gateway.wires import control
from gateway.wires.log import printable

_EXAMPLES = """
\b
Examples:
  gateway doctor
  gateway doctor --json | jq -r '.checks[] | select(.outcome != "ok") | .code'
  gateway doctor --ignore DPG0405 --ignore DPG0110
  gateway doctor --host-root /host               in a container that has the host's file system there

Exit status: 0 where nothing was found, 1 with warnings only, 2 with errors.
"""

_MARKS: Final = {"ok": ("✓", "green"), "unseen": ("-", None), "warning": ("!", "yellow"), "error": ("✗", "red")}
_ANSWER_WITHIN: Final = 30.0
"""Seconds: NVIDIA's library has 10, and the API server 5 for each of a few questions."""
_WIDEST: Final = 110
_NARROWEST: Final = 50


@click.command(cls=run.Settled, epilog=_EXAMPLES)
@common.state_dir
@common.host_root
@click.option("--ignore", multiple=True, metavar="CODE", help="Leave a check out. Can be repeated.")
@common.output("one document")
@click.pass_context
def doctor(
    ctx: click.Context, /, *, state_dir: Path, host_root: Path, ignore: Sequence[str], output: str, **_: Any
) -> None:
    """Look at this node, and name what keeps its GPUs from pods.

    It asks the gateways that run, and looks at the kubelet's folder, the driver, the container runtime and, where a token or
    --kubeconfig leads there, at the API server. It changes nothing, and works without a gateway, too. What
    can't be seen from where it runs is no finding: on the node itself, as root, it sees most.
    """
    known = {check.code for category in checks.categories() for check in category.checks}
    if wrong := sorted(set(ignore) - known):
        raise click.UsageError(f"--ignore: unknown code {', '.join(wrong)}. docs/doctor.md has all")
    if not host_root.is_dir():
        raise click.UsageError(f"--host-root: {host_root} is not a folder")
    results = list(checks.judged(seen(ctx, state_dir, host_root), ignore))
    outcomes = Counter(result.outcome for result in results)
    if output == "json":
        print_json({"schema": 1, "checks": results}, indent=2)
    else:
        click.echo("\n".join(render(results, columns(_WIDEST, _NARROWEST))))
    sys.exit(2 if outcomes["error"] else 1 if outcomes["warning"] else 0)


def render(results: Sequence[checks.CheckResult], width: int) -> Iterator[str]:
    """Write the results for a person: a line for each check, and what to do below each that found something."""
    for heading, group in groupby(results, key=lambda result: result.category):
        yield click.style(heading, bold=True)
        for result in group:
            mark, colour = _MARKS[result.outcome]
            title = f"{result.title}  {result.code}" if result.seen else result.title
            first, *rest = textwrap.wrap(title, width - 2)
            yield from (f"{click.style(mark, fg=colour)} {first}", *(f"  {line}" for line in rest))
            for lead, text in (("seen", result.seen), ("means", result.means), ("do", result.do), ("see", result.page)):
                if text:
                    first = f"    {lead:<6}"
                    yield from textwrap.wrap(
                        printable(text), width, initial_indent=first, subsequent_indent=" " * len(first)
                    )
        yield ""
    outcomes = Counter(result.outcome for result in results)
    found = ", ".join(count(outcomes[word], word) for word in ("error", "warning") if outcomes[word])
    passed = f"{count(outcomes['ok'], 'check')} passed, {outcomes['unseen']} can't be judged from here (-)."
    yield from textwrap.wrap(f"{found or 'Nothing found'}; {passed}", width)


def release(version: str) -> Release | None:
    """Return the facts about a kubelet's version that matter to GPUs."""
    facts = advice.load()
    try:
        found = advice.kubelet(version, facts)
    except advice.PlanError as error:
        return Release(unknown_reason=str(error))
    unkept = ""
    after = advice.Kubelet(found.minor + 1)
    if after.minor <= minor_version(facts.last) and not facts.keeps_checkpoint(found, after):
        unkept = f"kubelet {found} has written it, and {after} can't read it"
    fixed = tuple(
        f"kubelet {found}: {bug.title} ({bug.id}); fixed in {later}"
        for bug in facts.bugs
        if found.patch is not None and bug.hits(found)
        for later in bug.fixed(found)
        if later.startswith(f"1.{found.minor}.")
    )
    return Release(found.minor, checkpoint_lost_reason=unkept, bugs_fixed_later=fixed)


def seen(ctx: click.Context, state_dir: Path, host_root: Path) -> NodeFacts:
    """Collect what the checks need. The daemon's options in ``ctx`` say where to look."""
    told: dict[str, Any] = {"monitors_mig": "NVIDIA_MIG_MONITOR_DEVICES" in os.environ}
    found: dict[str, Any] = {}
    try:
        found = {setting.name: setting.value for setting in run.effective_settings(ctx)}
        told["strategies"] = frozenset(found["device-list-strategy"])
        told["imex"] = bool(found["imex-channel-ids"])
    except ConfigError as error:
        told["settings_error"] = str(error)
    kept = below(host_root, state_dir)
    folder = Path(found.get("socket-dir") or next(reversed(ctx.params["socket_dir"]), SOCKET_DIR))
    # Where the folder isn't there, no gateway runs, and that has a check of its own.
    with contextlib.suppress(control.ControlError):
        answers = asyncio.run(ask(kept))
        told.update(statuses=tuple(answers.read), unreachable=answers.silent)
        if theirs := frozenset(one for status in answers.read for one in status.list_strategies):
            told["strategies"] = theirs  # A gateway's own flags aren't known here.
        if folder == SOCKET_DIR and len(folders := {one.socket_dir for one in answers.read}) == 1:
            folder = Path(folders.pop())
    socket_dir = below(host_root, folder)
    known = found.get("pod-resources-socket")
    pod_resources = below(host_root, Path(known)) if known else socket_dir.parent / "pod-resources" / "kubelet.sock"
    places = Places(root=host_root, socket_dir=socket_dir, state_dir=kept, pod_resources=pod_resources)
    answered = None
    with contextlib.suppress(control.ControlError):
        # The gateways have the libraries loaded that this takes.
        replies, _ = asyncio.run(asking.ask_all(kept, {"op": "doctor"}, _ANSWER_WITHIN, DoctorAnswer))
        answered = next(iter(replies.values()), None)
    cluster, nvml = Cluster(), None
    if answered is not None:
        of_nvidia = "nvidia" in answered.backend.split("+")
        cluster, nvml = answered.cluster, (lambda: drivers.reported(told["statuses"])) if of_nvidia else None
    kubeconfig = found.get("kubeconfig") or os.environ.get("KUBECONFIG")
    if answered is None or (kubeconfig and not cluster.node_name):
        # Only here: TLS and NVIDIA's library take 15 MiB.
        from gateway.doctor import server

        name = found.get("node-name")
        rights = server.needed(told.get("statuses", ()))
        path = Path(kubeconfig) if kubeconfig else None
        cluster = asyncio.run(server.ask(path, name or os.uname().nodename, rights))
        if not name:  # A pod's own name is no node's.
            cluster = msgspec.structs.replace(cluster, node_missing=False)
        if answered is None and host_root == Path("/"):
            nvml = server.nvml
    return look(places, GatewayFacts(**told), cluster, release, nvml)


def below(root: Path, path: Path) -> Path:
    """Return where a path of the host is, with the host's file system below ``root``."""
    return root / path.absolute().relative_to("/")
