"""``gateway compat``: the compatibility matrix on this machine, with the daemon's own options, for people and for their CI."""

from __future__ import annotations

import asyncio
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from adapters.registry import DIALECTS
from gateway.cli import runs
from gateway.cli.options import Seconds, Strict, Words, setting
from gateway.configuration import commandline
from gateway.configuration.flags import FLAGS
from gateway.configuration.settings import ConfigError

if TYPE_CHECKING:
    from gateway_lab.matrix.record import Report
    from gateway_lab.trials.scenarios import Scenario

_EXAMPLES = """
\b
Examples:
  gateway compat                                       every kubelet that there is, and every hop between two of them
  gateway compat --kubelets 1.28,1.32,1.36             those of your clusters
  gateway compat --kubelets 1.32 --genuine no          without Go: an emulated kubelet, in seconds
  gateway compat --kubelets 1.32 --only register --only kubelet-crash --no-hops
  gateway compat --kubelets 1.32,1.36 --simulate profile.yaml --api v1beta1
  gateway compat --kubelets 1.28,1.36 --config-file config.yaml --only your-profile
  gateway compat --kubelets 1.8,1.37 --behind v1alpha2   through the bridge: a plugin of 2017 on today's kubelet
  gateway compat --only help                           which scenarios there are
  gateway compat --kubelet-source ~/kubernetes         the kubelet of a checkout, before it is a release
  gateway compat --only issue-127803                   a known bug of kubelets, shown on one that has it and one that hasn't
  gateway compat --plugin './my-plugin --dir {socket_dir}' --kubelets 1.28,1.37
  gateway compat --plugin ./my-plugin --hard-wired     one that has /var/lib/kubelet/device-plugins compiled in

It writes report.json, report.md, junit.xml and index.html (with --plugin: plugin.json, plugin-report.yaml and plugin-badge.json). It ends
with 0 when everything passed and with 1 when not; with 2 when the plugin can't be examined.
"""

HOPS, CLUSTER = "hops", "cluster"
PASSED_ON = ("api", "simulate", "kubelet_version")
"""The daemon's settings that gateways are started with."""
_OF_A_PLUGIN = frozenset({"hard_wired", "plugin_name", "plugin_version", "notes", "resource", "change", "cap"})
_OF_GATEWAYS = frozenset({"config_file", "behind", "hops", "page", *PASSED_ON})


class _Versions(click.ParamType[tuple[str, ...]]):
    """Kubelet versions such as ``1.28,1.32``; the value is their minor versions, oldest first."""

    name = "1.N,1.M"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        from gateway_lab.kubelets.behaviour import NEWEST, OLDEST, behaviour

        if isinstance(value, tuple):
            return value
        try:
            found = {behaviour(one.strip()) for one in str(value).split(",")}
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if unknown := [one.name for one in found if not one.certain]:
            self.fail(f"kubelet {unknown[0]} is not known here: 1.{OLDEST} to 1.{NEWEST} are", param, ctx)
        return tuple(one.name for one in sorted(found, key=lambda one: one.minor))


@click.command(epilog=_EXAMPLES)
@click.option(
    "--kubelets",
    type=_Versions(),
    default=None,
    show_default="all that can be genuine; with --plugin, one of each class",
    help="The kubelets to run against, separated by commas. Any from 1.8 to 1.37 can be emulated.",
)
@click.option(
    "--genuine",
    type=Words(("auto", "yes", "built", "no")),
    default="auto",
    help="auto builds genuine kubelets where there is Go, and emulates the others; yes insists (and fetches Go if there "
    "is none); built takes those that are built already, and of --kubelets wants each; no emulates all. The report says which "
    "was which.",
)
@click.option(
    "--kubelet-source",
    cls=Strict,
    type=click.Path(path_type=Path),
    default=None,
    metavar="DIR",
    help="A checkout of k8s.io/kubernetes (a release candidate, a fork): its kubelet is built, and runs in the place of the "
    "newest of --kubelets. Without --kubelets it runs alone, as the newest that is known here.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="SCENARIO",
    help="Run this scenario only, or 'hops', or 'cluster' (with --plugin: this rule); can be given several times. "
    "'help' lists them.",
)
@click.option(
    "--plugin",
    metavar="COMMAND",
    default=None,
    help="Examine this device plugin instead: which promises of the kubelet's API it keeps, which it breaks, and what each "
    "rests on. {socket_dir} stands for the socket directory, {state_dir} for a folder that outlives its process.",
)
@click.option(
    "--hard-wired",
    is_flag=True,
    help="With --plugin: it has /var/lib/kubelet/device-plugins compiled in, so it runs in a mount namespace of its own where that "
    "is the socket directory. Takes root, or user namespaces.",
)
@click.option(
    "--plugin-name",
    metavar="NAME",
    default="",
    show_default="its program's name",
    help="With --plugin: what the report calls it.",
)
@click.option(
    "--plugin-version",
    metavar="VERSION",
    default="",
    show_default="none",
    help="With --plugin: its version, for the report.",
)
@click.option(
    "--notes",
    metavar="TEXT",
    default="",
    show_default="none",
    help="With --plugin: what a reader of the report must know, such as simulated hardware.",
)
@click.option(
    "--resource",
    metavar="NAME",
    default="",
    show_default="all",
    help="With --plugin: look at this one of its resources only.",
)
@click.option(
    "--change",
    metavar="COMMAND",
    default="",
    show_default="none",
    help="With --plugin: what makes one of its devices unhealthy, for the rule updates-after-reconnect; {socket_dir} and "
    "{state_dir} stand for the same folders.",
)
@click.option(
    "--cap",
    cls=Strict,
    type=Seconds(0.1, 600),
    default=10,
    show_default=True,
    metavar="SECONDS",
    help="With --plugin: how long to wait for what must come.",
)
@click.option(
    "--config-file",
    cls=Strict,
    type=click.Path(path_type=Path),
    default=None,
    help="Your configuration: adds a scenario with the devices that it makes of those of --simulate (or of eight GPUs).",
)
@click.option(
    "--behind",
    type=Words(tuple(one.name for one in reversed(DIALECTS))),
    default=None,
    help="Run them through the bridge: a plugin that speaks this API has the GPUs, and the gateways only pass it on.",
)
@click.option("--hops/--no-hops", default=True, help="Upgrades and downgrades between the kubelets, with pods.")
@click.option(
    "--out",
    cls=Strict,
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("compat-report"),
    help="The folder for the report; what an earlier one left there is replaced.",
)
@click.option(
    "--page",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=None,
    help="A page in Markdown that is to hold this run too, between two lines that mark its place.",
)
@click.pass_context
def compat(
    ctx: click.Context,
    /,
    *,
    kubelets: tuple[str, ...] | None,
    genuine: str,
    kubelet_source: Path | None,
    only: tuple[str, ...],
    plugin: str | None,
    hard_wired: bool,
    plugin_name: str,
    plugin_version: str,
    notes: str,
    resource: str,
    change: str,
    cap: float,
    config_file: Path | None,
    behind: str | None,
    hops: bool,
    out: Path,
    page: Path | None,
    **daemon: Any,
) -> None:
    """Run every scenario and every hop on kubelets of many versions, and write a report.

    Gateways with simulated GPUs and kubelets are real processes on real sockets in temporary directories: nothing of this
    machine's own kubelet is touched. A genuine kubelet is the unmodified device manager of that version, built from its
    source; building one takes a minute or so, once. The options of the daemon are those that its gateways are run with;
    --simulate and --config-file add a scenario with your devices.
    """
    given = frozenset(
        option for option in compat.params if ctx.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
    )
    if plugin is not None:
        _refuse(given, _OF_GATEWAYS, "--plugin goes without {}, which changes nothing there")
        from gateway.cli import examine

        facts = {"plugin": plugin_name, "version": plugin_version, "notes": notes}
        how = {"resource": resource, "change": change, "cap_seconds": cap, "hard_wired": hard_wired}
        examine.examine(plugin, kubelets, genuine, only, out, kubelet_source, facts, **how)
    _refuse(given, _OF_A_PLUGIN, "--plugin is missing, which goes with {}")
    if find_spec("hpack") is None:
        raise click.ClickException(
            "expected the extra `lab`, with which calls are read off the wire: pip install 'device-plugin-gateway[lab]'"
        )
    from gateway_lab.bugs.table import BUGS

    if any(name in BUGS for name in only):
        _refuse(given, _OF_GATEWAYS | {"out"}, "a bug of --only goes without {}, which changes nothing there")
        _show(only, kubelets, genuine, kubelet_source)
    from gateway_lab.kubelets import build
    from gateway_lab.matrix import report
    from gateway_lab.matrix import run as matrix

    said = commandline.given(daemon, os.environ)
    try:
        settings = commandline.start({name: one for name, one in said.items() if name.replace("-", "_") in PASSED_ON})
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    chosen = _scenarios(only, settings.profile, config_file)
    runs.see_that_it_can_be_written(out, page)
    versions, binaries, why_emulated = runs.kubelets(kubelets, build.available, genuine, kubelet_source)
    job = matrix.Matrix(
        versions,
        binaries,
        why_emulated,
        chosen,
        with_hops=hops and (not only or HOPS in only),
        with_cluster=not only or CLUSTER in only,
        api=settings.api,
        options=() if settings.kubelet_minor is None else ("--kubelet-version", f"1.{settings.kubelet_minor}"),
        behind=behind or "",
    )
    try:
        found = asyncio.run(matrix.run(job, runs.clocked()))
    except KeyboardInterrupt:
        runs.stopped()
    _write(found, out, page)
    click.echo(f"\n{report.summary(found)}\nreport: {out / 'index.html'}")
    sys.exit(0 if found.passed else 1)


compat.params.extend(setting(flag) for flag in FLAGS if flag.parameter in PASSED_ON)


def _refuse(given: frozenset[click.Parameter], names: frozenset[str], words: str) -> None:
    """End where one of the options ``names`` is given, which would be without effect here."""
    if stray := sorted(option.opts[0] for option in given if option.name in names):
        raise click.UsageError(f"{words.format(', '.join(stray))}: leave out what isn't meant")


def _scenarios(only: tuple[str, ...], profile: str | None, config_file: Path | None) -> tuple[Scenario, ...]:
    """Find the scenarios that were asked for."""
    from gateway_lab.bugs.table import BUGS
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
    if "help" in only:
        width = max(map(len, found))
        click.echo("\n".join(f"{name:{width}}  {one.promise}" for name, one in found.items()))
        click.echo(f"{HOPS:{width}}  upgrades and downgrades between the kubelets, with pods")
        click.echo("\n".join(f"{name:{width}}  {bug.what}" for name, bug in BUGS.items() if bug.show is not None))
        click.echo(f"{CLUSTER:{width}}  a node of each version at once, all with one configuration")
        sys.exit(0)
    unknown = [name for name in only if name not in {*found, HOPS, CLUSTER}]
    if unknown:
        bugs = ", ".join(name for name, bug in BUGS.items() if bug.show is not None)
        raise click.BadParameter(
            f"unknown value {', '.join(unknown)}. Allowed: {', '.join([*found, HOPS, CLUSTER])}, and the bugs {bugs}",
            param_hint="--only",
        )
    return tuple(one for name, one in found.items() if not only or name in only)


def _show(only: tuple[str, ...], kubelets: tuple[str, ...] | None, genuine: str, source: Path | None) -> NoReturn:
    """Show known bugs of kubelets happen, and end."""
    from gateway_lab.bugs import run as bugs
    from gateway_lab.bugs.table import BUGS
    from gateway_lab.kubelets.kubelet import KubeletError

    if others := [name for name in only if name not in BUGS]:
        raise click.BadParameter(f"bugs don't go with scenarios ({', '.join(others)})", param_hint="--only")
    if unshown := [name for name in only if BUGS[name].show is None]:
        raise click.BadParameter(f"{unshown[0]} can't be shown: {BUGS[unshown[0]].why_not}", param_hint="--only")
    wanted = kubelets or tuple(sorted({one for name in only for one in bugs.versions(name)}))
    _, binaries, _ = runs.kubelets(wanted, tuple, genuine, source)
    try:
        sights = asyncio.run(bugs.look_all(only, kubelets or (), binaries.get, runs.clocked()))
    except KubeletError as error:
        raise click.ClickException(f"the kubelet didn't run as it must: {error}") from error
    except KeyboardInterrupt:
        runs.stopped()
    sys.exit(0 if all(sight.expected for sight in sights) else 1)


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
