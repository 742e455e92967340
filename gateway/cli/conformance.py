"""``gateway conformance``: which promises of the kubelet's API a device plugin keeps, with a report and a badge."""

from __future__ import annotations

import asyncio
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

import click

from gateway.cli import runs
from gateway.cli.options import Seconds, Strict
from gateway.wires.log import printable_lines

_EXAMPLES = """
\b
Examples:
  gateway conformance './my-plugin --dir {socket_dir}' --kubelets 1.28,1.37
  gateway conformance ./my-plugin --hard-wired     one that has /var/lib/kubelet/device-plugins compiled in
  gateway conformance ./my-plugin --only help      which rules there are

It writes plugin.json, plugin-report.yaml and plugin-badge.json. It ends with 0 if no rule is broken, with 1 if one is, and with 2 if the
plugin can't be examined.
"""


@click.command(epilog=_EXAMPLES)
@click.argument("command")
@runs.kubelet_options
@click.option(
    "--only", multiple=True, metavar="RULE", help="Judge this rule only; can be given several times. 'help' lists them."
)
@click.option(
    "--hard-wired",
    is_flag=True,
    help="It has /var/lib/kubelet/device-plugins compiled in, so it runs in a mount namespace of its own where that is the socket "
    "directory. Takes root, or user namespaces.",
)
@click.option(
    "--plugin-name", metavar="NAME", default="", show_default="its program's name", help="What the report calls it."
)
@click.option(
    "--plugin-version", metavar="VERSION", default="", show_default="none", help="Its version, for the report."
)
@click.option(
    "--notes",
    metavar="TEXT",
    default="",
    show_default="none",
    help="What a reader of the report must know, such as simulated hardware.",
)
@click.option(
    "--resource", metavar="NAME", default="", show_default="all", help="Look at this one of its resources only."
)
@click.option(
    "--change",
    metavar="COMMAND",
    default="",
    show_default="none",
    help="What makes one of its devices unhealthy, for the rule updates-after-reconnect; {socket_dir} and {state_dir} stand for the "
    "same folders.",
)
@click.option(
    "--cap",
    cls=Strict,
    type=Seconds(0.1, 600),
    default=10,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for what must come.",
)
@runs.out_option
def conformance(
    *,
    command: str,
    kubelets: tuple[str, ...] | None,
    genuine: str,
    kubelet_source: Path | None,
    only: tuple[str, ...],
    hard_wired: bool,
    plugin_name: str,
    plugin_version: str,
    notes: str,
    resource: str,
    change: str,
    cap: float,
    out: Path,
) -> None:
    """Examine any device plugin: which promises of the kubelet's API it keeps, and which it breaks.

    COMMAND starts the plugin, without a shell. {socket_dir} stands for the socket directory, {state_dir} for a folder that outlives its
    process. Without --kubelets it runs on one kubelet of each class.
    """
    from gateway_lab import inplace
    from gateway_lab.conformance import report as plugin_report
    from gateway_lab.kubelets import build
    from gateway_lab.trials import conformance as trial

    rules = {rule.id: rule for rule in trial.RULES}
    runs.chosen(only, {name: rule.promise for name, rule in rules.items()})
    try:
        trial.parsed(command, hard_wired=hard_wired)
        if hard_wired:
            inplace.see_that_it_works()
    except trial.CommandError as error:
        raise click.BadParameter(str(error), param_hint="COMMAND") from error
    except inplace.InPlaceError as error:
        raise click.BadParameter(str(error), param_hint="--hard-wired") from error
    runs.see_that_it_can_be_written(out, None)
    versions, binaries, _ = runs.kubelets(kubelets, build.default, genuine, kubelet_source)
    work = trial.examine(
        command,
        versions=versions,
        genuine=binaries.get,
        progress=runs.clocked(),
        rules=[rules[name] for name in only],
        resource=resource,
        change=change,
        cap_seconds=cap,
        hard_wired=hard_wired,
    )
    try:
        found = asyncio.run(work)
    except KeyboardInterrupt:
        runs.stopped()
    try:
        (out / "plugin.json").write_bytes(trial.to_json(found))
        told = plugin_report.report(
            found,
            plugin=plugin_name or Path(shlex.split(command)[0]).name,
            version=plugin_version,
            notes=notes,
            date=datetime.now(UTC).date().isoformat(),
            hard_wired=hard_wired,
            change=change,
        )
        (out / "plugin-report.yaml").write_bytes(plugin_report.to_yaml(told))
        (out / "plugin-badge.json").write_bytes(plugin_report.badge(told))
    except OSError as error:
        raise click.ClickException(f"the report can't be written: {error}") from error
    click.echo(f"\n{printable_lines(trial.to_text(found))}\nreport: {out / 'plugin-report.yaml'}")
    sys.exit(0 if found.passed else 1 if found.broken else 2)
