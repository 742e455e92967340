"""Options and preparations of the commands that run the laboratory: its kubelets, its progress and its report."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import click

from gateway.cli.options import Strict, Words
from gateway.wires.log import printable_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_Command = TypeVar("_Command", bound="Callable[..., Any]")


class _Versions(click.ParamType[tuple[str, ...]]):
    """Kubelet versions such as ``1.28,1.32``; the value is their minor versions, oldest first."""

    name = "1.N,1.M"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Read the versions."""
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


_OPTIONS: Final = (
    click.option(
        "--kubelets",
        type=_Versions(),
        default=None,
        help="The kubelets to run against, separated by commas. Any from 1.8 to 1.37 can be emulated.",
    ),
    click.option(
        "--genuine",
        type=Words(("auto", "yes", "built", "no")),
        default="auto",
        help="auto builds genuine kubelets where there is Go, and emulates the others; yes insists (and fetches Go if there "
        "is none); built takes those that are built already, and of --kubelets wants each; no emulates all. The report says which "
        "was which.",
    ),
    click.option(
        "--kubelet-source",
        cls=Strict,
        type=click.Path(path_type=Path),
        default=None,
        metavar="DIR",
        help="A checkout of k8s.io/kubernetes (a release candidate, a fork): its kubelet is built, and runs in the place of the "
        "newest of --kubelets. Without --kubelets it runs alone, as the newest that is known here.",
    ),
)


def kubelet_options(command: _Command) -> _Command:
    """Add the options that choose the kubelets."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


out_option: Final = click.option(
    "--out",
    cls=Strict,
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("compat-report"),
    help="The folder for the report; what an earlier one left there is replaced.",
)


def chosen(only: Sequence[str], known: Mapping[str, str], option: str = "--only") -> None:
    """Print what can be chosen (name and description) and end, if that is ``help``; refuse what can't be.

    Raises:
        click.BadParameter: a name is unknown.
    """
    if "help" in only:
        width = max(map(len, known))
        click.echo("\n".join(f"{name:{width}}  {words}" for name, words in known.items()))
        sys.exit(0)
    if unknown := [name for name in only if name not in known]:
        raise click.BadParameter(f"unknown value {', '.join(unknown)}. Allowed: {', '.join(known)}", param_hint=option)


def clocked() -> Callable[[str], None]:
    """Return a function that prints a line of progress, with the time since now."""
    began = time.monotonic()

    def say(line: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - began), 60)
        click.echo(f"{minutes:2d}:{seconds:02d}  {printable_lines(line)}")

    return say


def stopped() -> NoReturn:
    """End the command after Ctrl-C."""
    click.echo("stopped: all processes that were started are ended, no report is written", err=True)
    sys.exit(130)


def kubelets(
    asked: tuple[str, ...] | None, usual: Callable[[], tuple[str, ...]], genuine: str, checkout: Path | None
) -> tuple[tuple[str, ...], dict[str, Path], dict[str, str]]:
    """Return the versions to run, the binaries of real kubelets, and why each of the others is emulated."""
    from gateway_lab.kubelets import build, source

    try:
        versions = asked or (usual()[-1:] if checkout is not None else usual())
        others = versions[:-1] if checkout is not None else versions
        if genuine == "built" and asked:
            _want_built(others)
        found, why = _genuine(others, genuine)
        if checkout is not None:
            found[versions[-1]] = source.build_from(checkout, versions[-1], progress=click.echo)
    except build.BuildError as error:
        raise click.ClickException(str(error)) from error
    for version, reason in why.items():
        click.echo(f"kubelet {version} is emulated: {reason}")
    return versions, found, why


def _want_built(asked: tuple[str, ...]) -> None:
    """Refuse versions that aren't built."""
    from gateway_lab.kubelets import build

    there = [version for version in build.available() if build.built(version)]
    if missing := [version for version in asked if version not in there]:
        raise click.BadParameter(
            f"no genuine kubelet {', '.join(missing)} is built; built are {', '.join(there) or 'none'}: leave --genuine out to "
            "have it built where there is Go, or say --genuine no to have it emulated",
            param_hint="--kubelets",
        )


def _genuine(versions: tuple[str, ...], genuine: str) -> tuple[dict[str, Path], dict[str, str]]:
    """Find or build real kubelets. Return their binaries, and why the other versions have none.

    Raises:
        gateway_lab.kubelets.build.BuildError: with ``--genuine yes``, one can't be built.
    """
    from gateway_lab.kubelets import build

    if genuine == "no":
        return {}, dict.fromkeys(versions, "genuine ones were not asked for")
    found: dict[str, Path] = {}
    why: dict[str, str] = {}
    possible = build.available()
    for version in versions:
        path = build.built(version) if version in possible else None
        if path is None and genuine == "built":
            why[version] = "no genuine one is built"
            continue
        if version not in possible and genuine == "auto":
            why[version] = f"genuine ones can be built of {', '.join(possible)}"
            continue
        if path is None and genuine == "auto" and not (os.environ.get("GO") or shutil.which("go")):
            why[version] = "there is no Go on this machine to build a genuine one with"
            continue
        try:
            found[version] = path or build.build([version], progress=click.echo)[version]
        except build.BuildError as error:
            if genuine == "yes":
                raise
            click.echo(str(error), err=True)
            why[version] = "the genuine one could not be built: " + str(error).splitlines()[0]
    return found, why


def see_that_it_can_be_written(out: Path, page: Path | None) -> None:
    """Refuse a run of minutes whose report can't be written."""
    from gateway_lab.matrix import report

    advice = "name another folder with --out"
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
        advice = "correct --page"
        if page is not None:
            report.find_place(page.read_text(encoding="utf-8"))
            with page.open("a", encoding="utf-8"):
                pass
    except (OSError, UnicodeDecodeError, report.NoPlaceError) as error:
        raise click.ClickException(f"the report can't be written, so nothing was run: {error}: {advice}") from error
