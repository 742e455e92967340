"""``gateway compat --plugin``: which promises of the kubelet's API a device plugin keeps, with a report and a badge."""

from __future__ import annotations

import asyncio
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import click

from gateway.cli import runs
from gateway.wires.log import printable_lines


def examine(
    command: str,
    kubelets: tuple[str, ...] | None,
    genuine: str,
    only: tuple[str, ...],
    out: Path,
    source: Path | None,
    said: dict[str, str],
    **how: Any,
) -> NoReturn:
    """Examine a device plugin, tell what was found, and end.

    Args:
        command: the plugin's.
        kubelets: the versions; one of each class by default.
        genuine: which kubelets are genuine.
        only: the rules; all by default.
        out: the folder for the reports.
        source: a checkout of Kubernetes.
        said: what the report says of the plugin.
        how: the further arguments of ``conformance.examine``.
    """
    from gateway_lab import inplace
    from gateway_lab.conformance import report as plugin_report
    from gateway_lab.kubelets import build
    from gateway_lab.trials import conformance

    rules = {rule.id: rule for rule in conformance.RULES}
    if "help" in only:
        width = max(map(len, rules))
        click.echo("\n".join(f"{name:{width}}  {rule.promise}" for name, rule in rules.items()))
        sys.exit(0)
    if unknown := [name for name in only if name not in rules]:
        raise click.BadParameter(
            f"unknown value {', '.join(unknown)}. Allowed: {', '.join(rules)}", param_hint="--only"
        )
    try:
        conformance.parsed(command, hard_wired=how["hard_wired"])
        if how["hard_wired"]:
            inplace.see_that_it_works()
    except conformance.CommandError as error:
        raise click.BadParameter(str(error), param_hint="--plugin") from error
    except inplace.InPlaceError as error:
        raise click.BadParameter(str(error), param_hint="--hard-wired") from error
    runs.see_that_it_can_be_written(out, None)
    versions, binaries, _ = runs.kubelets(kubelets, build.default, genuine, source)
    chosen = [rules[name] for name in only]
    work = conformance.examine(
        command, versions=versions, genuine=binaries.get, progress=runs.clocked(), rules=chosen, **how
    )
    try:
        found = asyncio.run(work)
    except KeyboardInterrupt:
        runs.stopped()
    try:
        (out / "plugin.json").write_bytes(conformance.to_json(found))
        told = plugin_report.report(
            found,
            **said | {"plugin": said["plugin"] or Path(shlex.split(command)[0]).name},
            date=datetime.now(UTC).date().isoformat(),
            hard_wired=how["hard_wired"],
            change=how["change"],
        )
        (out / "plugin-report.yaml").write_bytes(plugin_report.to_yaml(told))
        (out / "plugin-badge.json").write_bytes(plugin_report.badge(told))
    except OSError as error:
        raise click.ClickException(f"the report can't be written: {error}") from error
    click.echo(f"\n{printable_lines(conformance.to_text(found))}\nreport: {out / 'plugin-report.yaml'}")
    sys.exit(0 if found.passed else 1 if found.broken else 2)
