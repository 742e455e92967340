"""``gateway demo``: the main job, shown to someone with no GPU and no cluster."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from gateway.cli.options import Seconds, Strict

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_EXAMPLES = """
\b
Examples:
  gateway demo                   watch it (lines instead of a picture where there is no terminal)
  gateway demo --pace 3          with time to read between the steps
  gateway demo --real            with the genuine kubelets that are built here (make kubelets)
  gateway demo --json | jq .verdict

It ends with 0 when every promise was kept and with 1 when one was broken.
"""


@click.command(epilog=_EXAMPLES)
@click.option("--real", is_flag=True, help="Use genuine kubelets where they are built, emulated ones elsewhere.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: steps, holdings, gaps, verdict.")
@click.option(
    "--pace",
    cls=Strict,
    type=Seconds(0, 60),
    default=None,
    metavar="SECONDS",
    show_default="0.8 for the live picture, else 0",
    help="Time to look between two steps.",
)
def demo(*, real: bool, as_json: bool, pace: float | None) -> None:
    """Take a node with 8 simulated GPUs through a rolling kubelet upgrade and a step back.

    The gateway and the kubelets (1.8, 1.9, 1.10, 1.20, 1.28, 1.37 and 1.28 again) are real processes on real sockets in a
    temporary directory. Pods ask for GPUs, a GPU becomes unhealthy and recovers. The verdict is computed from the kubelet's
    own records: each pod that wasn't drained still has its GPUs, none was given twice, none is lost.
    """
    from gateway_lab.demo import run as lab
    from gateway_lab.demo import story, view
    from gateway_lab.gatewayproc import GatewayError
    from gateway_lab.kubelets.kubelet import KubeletError

    _pass_on_strictness()
    versions = tuple(dict.fromkeys(step.version for step in story.STORY if isinstance(step, story.Hop)))
    genuine = _built(versions) if real else {}
    missing = [version for version in versions if version not in genuine]
    if real and missing:
        click.echo(f"not built, so emulated: kubelet {', '.join(missing)} (`make kubelets` builds them)", err=True)
    picture, usual_pace = (view.silent(), 0.0) if as_json else view.choose()
    try:
        with picture as show:
            looks, verdict = lab.perform(show, genuine, usual_pace if pace is None else pace)
    except (GatewayError, KubeletError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        click.echo("stopped: the gateway and the kubelets are ended, their directory is removed", err=True)
        sys.exit(130)
    if as_json:
        click.echo(lab.document(looks, verdict))
    sys.exit(0 if verdict.passed else 1)


def _built(versions: Iterable[str]) -> dict[str, Path]:
    """Find the genuine kubelets that need no building."""
    from gateway_lab.kubelets import build

    try:
        found = {version: build.built(version) for version in versions}
    except build.BuildError as error:
        click.echo(f"no genuine kubelets: {error}", err=True)
        return {}
    return {version: path for version, path in found.items() if path is not None}


def _pass_on_strictness() -> None:
    """Let the processes that the demo starts see this interpreter's -X dev and -W, which aren't in the environment."""
    if sys.flags.dev_mode:
        os.environ["PYTHONDEVMODE"] = "1"
    if sys.warnoptions:
        os.environ["PYTHONWARNINGS"] = ",".join(sys.warnoptions)
