"""``gateway bugs``: known bugs of kubelets, listed or seen happening."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import click

from gateway.cli import runs

if TYPE_CHECKING:
    from pathlib import Path

_EXAMPLES = """
\b
Examples:
  gateway bugs                                     which bugs there are
  gateway bugs issue-127803                        on a kubelet that has it, and on one that doesn't
  gateway bugs issue-127803 --kubelets 1.32        on another one

It ends with 0 if each bug is seen exactly on the kubelets that have it, else with 1.
"""


@click.command(epilog=_EXAMPLES)
@click.argument("names", metavar="[BUG]...", nargs=-1)
@runs.kubelet_options
def bugs(
    *, names: tuple[str, ...], kubelets: tuple[str, ...] | None, genuine: str, kubelet_source: Path | None
) -> None:
    """Show known bugs of kubelets, each on the device manager of a kubelet that has it, with a plain plugin."""
    from gateway_lab.bugs import run
    from gateway_lab.bugs.table import BUGS
    from gateway_lab.kubelets.kubelet import KubeletError

    shown = [name for name, bug in BUGS.items() if bug.show is not None]
    if not names:
        width = max(map(len, shown))
        click.echo("\n".join(f"{name:{width}}  {BUGS[name].what}" for name in shown))
        return
    if unknown := [name for name in names if name not in BUGS]:
        raise click.BadParameter(f"unknown value {', '.join(unknown)}. Allowed: {', '.join(shown)}", param_hint="BUG")
    if unshown := [name for name in names if BUGS[name].show is None]:
        raise click.BadParameter(f"{unshown[0]} can't be shown: {BUGS[unshown[0]].why_not}", param_hint="BUG")
    wanted = kubelets or tuple(sorted({one for name in names for one in run.versions(name)}))
    _, binaries, _ = runs.kubelets(wanted, tuple, genuine, kubelet_source)
    try:
        sights = asyncio.run(run.look_all(names, kubelets or (), binaries.get, runs.clocked()))
    except KubeletError as error:
        raise click.ClickException(f"the kubelet didn't run as it must: {error}") from error
    except KeyboardInterrupt:
        runs.stopped()
    sys.exit(0 if all(sight.expected for sight in sights) else 1)
