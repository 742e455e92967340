"""``gateway compat``: runs the compatibility matrix on this machine, with the daemon's own options."""

from __future__ import annotations

import asyncio
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from adapters.registry import DIALECTS
from gateway.cli import lab_options
from gateway.cli.options import Strict, Words, setting
from gateway.configuration import commandline
from gateway.configuration.flags import FLAGS
from gateway.configuration.settings import ConfigError

if TYPE_CHECKING:
    from gateway_lab.matrix.record import Report
    from gateway_lab.trials.scenarios import Scenario

_EXAMPLES = """
\b
Examples:
  gateway compat                                       all kubelet versions, and every hop between two of them
  gateway compat --kubelets 1.28,1.32,1.36             the versions of your clusters
  gateway compat --kubelets 1.32 --genuine no          without Go: an emulated kubelet, in seconds
  gateway compat --kubelets 1.32 --only register --only kubelet-crash --no-hops
  gateway compat --kubelets 1.32,1.36 --simulate profile.yaml --api v1beta1
  gateway compat --kubelets 1.28,1.36 --config-file config.yaml --only your-profile
  gateway compat --kubelets 1.8,1.37 --behind v1alpha2   through the bridge: a plugin of 2017 on a kubelet of today
  gateway compat --only help                           list the scenarios
  gateway compat --kubelet-source ~/kubernetes         the unreleased kubelet of a checkout

It writes report.json, report.md, junit.xml and index.html. The exit status is 0 if everything passed, else 1. To test another device plugin:
gateway conformance. To see known kubelet bugs: gateway bugs.
"""

HOPS, CLUSTER = "hops", "cluster"
PASSED_ON = ("api", "simulate", "kubelet_version")
"""The daemon's settings that gateways are started with."""


@click.command(epilog=_EXAMPLES)
@lab_options.kubelet_options
@click.option(
    "--only",
    multiple=True,
    metavar="SCENARIO",
    help="Run only this scenario, or 'hops', or 'cluster'; can be given several times. 'help' lists them.",
)
@click.option(
    "--config-file",
    cls=Strict,
    type=click.Path(path_type=Path),
    default=None,
    help="Your configuration file. It adds a scenario with the GPUs of --simulate (default: eight), configured by this file.",
)
@click.option(
    "--behind",
    type=Words(tuple(one.name for one in reversed(DIALECTS))),
    default=None,
    help="Run through the bridge: a plugin that speaks this API version offers the GPUs, and the gateways forward its calls.",
)
@click.option("--hops/--no-hops", default=True, help="Upgrades and downgrades between the kubelets, with pods.")
@lab_options.out_option
@click.option(
    "--page",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=None,
    help="A Markdown page into which the report is also written, between two marker lines.",
)
def compat(
    *,
    kubelets: tuple[str, ...] | None,
    genuine: str,
    kubelet_source: Path | None,
    only: tuple[str, ...],
    config_file: Path | None,
    behind: str | None,
    hops: bool,
    out: Path,
    page: Path | None,
    **daemon: Any,
) -> None:
    """Run every scenario and every hop on kubelets of many versions, and write a report.

    Gateways with simulated GPUs and kubelets are real processes on real sockets in temporary directories. This machine's own
    kubelet is not touched. Real kubelet code is the unmodified device manager of a release, built from its source. The first
    build of each takes about a minute. The gateways get the daemon's options that you give here. --simulate and --config-file
    add a scenario with your devices.
    """
    if find_spec("hpack") is None:
        raise click.ClickException("the extra `lab` is missing. Install it: pip install 'device-plugin-gateway[lab]'")
    from gateway_lab.kubelets import build
    from gateway_lab.matrix import report
    from gateway_lab.matrix import run as matrix

    given = commandline.read_sources(daemon, os.environ)
    try:
        settings = commandline.make_settings(
            {name: one for name, one in given.items() if name.replace("-", "_") in PASSED_ON}
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    selected = _scenarios(only, settings.profile, config_file)
    lab_options.require_writable_report(out, page)
    versions, binaries, why_emulated = lab_options.prepare_kubelets(kubelets, build.available, genuine, kubelet_source)
    job = matrix.Matrix(
        versions,
        binaries,
        why_emulated,
        selected,
        with_hops=hops and (not only or HOPS in only),
        with_cluster=not only or CLUSTER in only,
        api=settings.api,
        options=() if settings.kubelet_minor is None else ("--kubelet-version", f"1.{settings.kubelet_minor}"),
        behind=behind or "",
    )
    try:
        found = asyncio.run(matrix.run(job, lab_options.progress_printer()))
    except KeyboardInterrupt:
        lab_options.exit_after_interrupt()
    _write(found, out, page)
    click.echo(f"\n{report.summary(found)}\nreport: {out / 'index.html'}")
    sys.exit(0 if found.passed else 1)


compat.params.extend(setting(flag) for flag in FLAGS if flag.parameter in PASSED_ON)


def _scenarios(only: tuple[str, ...], profile: str | None, config_file: Path | None) -> tuple[Scenario, ...]:
    """Return the selected scenarios. ``--only help`` prints all of them and exits."""
    from gateway_lab.matrix import run as matrix
    from gateway_lab.trials.scenarios import SCENARIOS

    found = dict(SCENARIOS)
    if profile is not None or config_file is not None:
        try:
            found[matrix.PROFILE] = matrix.own_profile(profile or "default", config_file)
        except ConfigError as error:
            raise click.BadParameter(str(error), param_hint="--config-file") from error
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--simulate") from error
    known = {name: one.promise for name, one in found.items()}
    known[HOPS] = "upgrades and downgrades between the kubelets, with pods"
    known[CLUSTER] = "a node of each version at once, all with one configuration"
    lab_options.check_choice(only, known)
    return tuple(one for name, one in found.items() if not only or name in only)


def _write(found: Report, out: Path, page: Path | None) -> None:
    from gateway_lab.matrix import report

    try:
        for name, content in report.files(found).items():
            (out / name).write_bytes(content)
        if page is not None:
            fresh = report.place(page.read_text(encoding="utf-8"), found)
            page.write_text(fresh, encoding="utf-8")
    except (OSError, report.NoPlaceError) as error:
        raise click.ClickException(f"the report can't be written: {error}") from error
