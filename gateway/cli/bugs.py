"""``gateway bugs``: lists known kubelet bugs, or shows them on real or emulated kubelets."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import click

from gateway.cli import lab_options

if TYPE_CHECKING:
    from pathlib import Path

_EXAMPLES = """
\b
Examples:
  gateway bugs                                     list the bugs
  gateway bugs issue-127803                        show it on a kubelet with this bug and on one without
  gateway bugs issue-127803 --kubelets 1.32        show it on another version

The exit status is 0 if each bug is seen exactly on the kubelets that have it, else 1.
"""


@click.command(epilog=_EXAMPLES)
@click.argument("names", metavar="[BUG]...", nargs=-1)
@lab_options.kubelet_options
def bugs(
    *, names: tuple[str, ...], kubelets: tuple[str, ...] | None, genuine: str, kubelet_source: Path | None
) -> None:
    """Show known kubelet bugs: run a minimal plugin on the device manager of a kubelet with the bug and of one without."""
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
    _, binaries, _ = lab_options.prepare_kubelets(wanted, tuple, genuine, kubelet_source)
    try:
        sights = asyncio.run(run.look_all(names, kubelets or (), binaries.get, lab_options.progress_printer()))
    except KubeletError as error:
        raise click.ClickException(f"the kubelet did not run as expected: {error}") from error
    except KeyboardInterrupt:
        lab_options.exit_after_interrupt()
    sys.exit(0 if all(sight.expected for sight in sights) else 1)
