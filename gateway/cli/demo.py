"""``gateway demo``: a kubelet upgrade on a simulated node. It needs no GPU and no cluster."""

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
  gateway demo                   run it (without a terminal, it prints lines instead of a picture)
  gateway demo --pace 3          wait 3 s between the steps
  gateway demo --real            use real kubelet code (build it with: make kubelets)
  gateway demo --json | jq .verdict

The exit status is 0 if the verdict is good, else 1.
"""


@click.command(epilog=_EXAMPLES)
@click.option("--real", is_flag=True, help="Use the real kubelet code that is built; emulate other versions.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: steps, GPU holders, outages, verdict.")
@click.option(
    "--pace",
    cls=Strict,
    type=Seconds(0, 60),
    default=None,
    metavar="SECONDS",
    show_default="0.8 for the live picture, else 0",
    help="Seconds to wait between two steps.",
)
def demo(*, real: bool, as_json: bool, pace: float | None) -> None:
    """Take a node with 8 simulated GPUs through a rolling kubelet upgrade and a step back.

    The gateway and the kubelets (1.8, 1.9, 1.10, 1.20, 1.28, 1.37 and 1.28 again) are real processes on real sockets in a
    temporary directory. Pods ask for GPUs, a GPU becomes unhealthy and recovers. The verdict comes from the kubelet's
    checkpoint: each pod that wasn't drained has kept its GPUs, no GPU has two holders, and no GPU is missing.
    """
    from gateway_lab.demo import run as lab
    from gateway_lab.demo import story, view
    from gateway_lab.gatewayproc import GatewayError
    from gateway_lab.kubelets.kubelet import KubeletError

    _pass_on_python_flags()
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
        click.echo("stopped: ended the gateway and the kubelets, and removed their directory", err=True)
        sys.exit(130)
    if as_json:
        click.echo(lab.document(looks, verdict))
    sys.exit(0 if verdict.passed else 1)


def _built(versions: Iterable[str]) -> dict[str, Path]:
    """Return the path of the real kubelet code of each version that is built already."""
    from gateway_lab.kubelets import build

    try:
        found = {version: build.built(version) for version in versions}
    except build.BuildError as error:
        click.echo(f"no real kubelet code: {error}", err=True)
        return {}
    return {version: path for version, path in found.items() if path is not None}


def _pass_on_python_flags() -> None:
    """Set the variables of this interpreter's -X dev and -W, so that child processes use them."""
    if sys.flags.dev_mode:
        os.environ["PYTHONDEVMODE"] = "1"
    if sys.warnoptions:
        os.environ["PYTHONWARNINGS"] = ",".join(sys.warnoptions)
