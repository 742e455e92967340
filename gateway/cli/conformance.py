"""``gateway conformance``: which promises of the kubelet's API a device plugin keeps, with a report and a badge."""

from __future__ import annotations

import asyncio
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

import click

from gateway.cli import lab_options
from gateway.cli.options import Seconds, Strict
from gateway.wires.log import printable_lines

_EXAMPLES = """
\b
Examples:
  gateway conformance './my-plugin --dir {socket_dir}' --kubelets 1.28,1.37
  gateway conformance ./my-plugin --hard-wired     /var/lib/kubelet/device-plugins is compiled into the plugin
  gateway conformance ./my-plugin --only help      list the rules

It writes plugin.json, plugin-report.yaml and plugin-badge.json. The exit status is 0 if no rule is broken, 1 if one is, and 2 if the plugin
can't be examined.
"""


@click.command(epilog=_EXAMPLES)
@click.argument("command")
@lab_options.kubelet_options
@click.option(
    "--only", multiple=True, metavar="RULE", help="Check only this rule; can be given several times. 'help' lists all."
)
@click.option(
    "--hard-wired",
    is_flag=True,
    help="For a plugin with /var/lib/kubelet/device-plugins compiled in: run it in its own mount namespace, with the socket "
    "directory at that path. Needs root or user namespaces.",
)
@click.option(
    "--plugin-name", metavar="NAME", default="", show_default="its program's name", help="Its name, for the report."
)
@click.option(
    "--plugin-version", metavar="VERSION", default="", show_default="none", help="Its version, for the report."
)
@click.option(
    "--notes",
    metavar="TEXT",
    default="",
    show_default="none",
    help="A remark for the report's readers, such as: simulated hardware.",
)
@click.option(
    "--resource", metavar="NAME", default="", show_default="all", help="Examine only this resource of the plugin."
)
@click.option(
    "--change",
    metavar="COMMAND",
    default="",
    show_default="none",
    help="A command that makes one device unhealthy, for the rule updates-after-reconnect. {socket_dir} and {state_dir} are replaced "
    "as in COMMAND.",
)
@click.option(
    "--cap",
    cls=Strict,
    type=Seconds(0.1, 600),
    default=10,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait for each expected reaction of the plugin.",
)
@lab_options.out_option
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
    """Check which rules of the kubelet's device plugin API any device plugin keeps.

    COMMAND starts the plugin, without a shell. {socket_dir} stands for the socket directory, {state_dir} for a folder that is kept if the
    plugin restarts. Without --kubelets it runs on one kubelet version of each group that behaves alike.
    """
    from gateway_lab import inplace
    from gateway_lab.conformance import report as plugin_report
    from gateway_lab.kubelets import build
    from gateway_lab.trials import conformance as trial

    rules = {rule.id: rule for rule in trial.RULES}
    lab_options.check_choice(only, {name: rule.promise for name, rule in rules.items()})
    try:
        trial.parsed(command, hard_wired=hard_wired)
        if hard_wired:
            inplace.see_that_it_works()
    except trial.CommandError as error:
        raise click.BadParameter(str(error), param_hint="COMMAND") from error
    except inplace.InPlaceError as error:
        raise click.BadParameter(str(error), param_hint="--hard-wired") from error
    lab_options.require_writable_report(out, None)
    versions, binaries, _ = lab_options.prepare_kubelets(kubelets, build.default, genuine, kubelet_source)
    work = trial.examine(
        command,
        versions=versions,
        genuine=binaries.get,
        progress=lab_options.progress_printer(),
        rules=[rules[name] for name in only],
        resource=resource,
        change=change,
        cap_seconds=cap,
        hard_wired=hard_wired,
    )
    try:
        found = asyncio.run(work)
    except KeyboardInterrupt:
        lab_options.exit_after_interrupt()
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
