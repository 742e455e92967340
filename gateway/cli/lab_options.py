"""Options and preparations of the commands that run against kubelets of many versions: ``gateway bugs``, ``compat``, ``conformance``."""

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
            self.fail(f"kubelet {unknown[0]} is unknown. Known: 1.{OLDEST} to 1.{NEWEST}", param, ctx)
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
        help="When to run real kubelet code instead of an emulation. auto: if it is built or Go is installed. yes: always; installs "
        "Go if it is missing. built: only if it is built; with --kubelets, each version must be built. no: never. The report marks the "
        "emulated kubelets.",
    ),
    click.option(
        "--kubelet-source",
        cls=Strict,
        type=click.Path(path_type=Path),
        default=None,
        metavar="DIR",
        help="A checkout of k8s.io/kubernetes, such as a fork. Its kubelet is built and replaces the newest of --kubelets. "
        "Without --kubelets, only this kubelet runs, as the newest known version.",
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
    help="The folder for the report. An earlier report in it is replaced.",
)


def check_choice(only: Sequence[str], known: Mapping[str, str], option: str = "--only") -> None:
    """Reject unknown names. If ``help`` is among them, print the known names with their descriptions and exit.

    Raises:
        click.BadParameter: a name is unknown.
    """
    if "help" in only:
        width = max(map(len, known))
        click.echo("\n".join(f"{name:{width}}  {words}" for name, words in known.items()))
        sys.exit(0)
    if unknown := [name for name in only if name not in known]:
        raise click.BadParameter(f"unknown value {', '.join(unknown)}. Allowed: {', '.join(known)}", param_hint=option)


def progress_printer() -> Callable[[str], None]:
    """Return a function that prints a progress line with the time since this call."""
    began = time.monotonic()

    def say(line: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - began), 60)
        click.echo(f"{minutes:2d}:{seconds:02d}  {printable_lines(line)}")

    return say


def exit_after_interrupt() -> NoReturn:
    """Exit with status 130 after Ctrl-C."""
    click.echo("stopped. All processes that this command started have ended, and no report was written", err=True)
    sys.exit(130)


def prepare_kubelets(
    wanted: tuple[str, ...] | None, usual: Callable[[], tuple[str, ...]], genuine: str, checkout: Path | None
) -> tuple[tuple[str, ...], dict[str, Path], dict[str, str]]:
    """Return the versions to run, the real kubelets' binaries by version, and by version why a kubelet is emulated."""
    from gateway_lab.kubelets import build, source

    try:
        versions = wanted or (usual()[-1:] if checkout is not None else usual())
        others = versions[:-1] if checkout is not None else versions
        if genuine == "built" and wanted:
            _require_built(others)
        found, why = _find_real(others, genuine)
        if checkout is not None:
            found[versions[-1]] = source.build_from(checkout, versions[-1], progress=click.echo)
    except build.BuildError as error:
        raise click.ClickException(str(error)) from error
    for version, reason in why.items():
        click.echo(f"kubelet {version} is emulated: {reason}")
    return versions, found, why


def _require_built(versions: tuple[str, ...]) -> None:
    """Raise a ``click.BadParameter`` if the real code of one of the versions is not built."""
    from gateway_lab.kubelets import build

    built = [version for version in build.available() if build.built(version)]
    if missing := [version for version in versions if version not in built]:
        raise click.BadParameter(
            f"kubelet {', '.join(missing)} is not built. Built: {', '.join(built) or 'none'}. To build it, set --genuine yes; to "
            "emulate it, set --genuine no",
            param_hint="--kubelets",
        )


def _find_real(versions: tuple[str, ...], genuine: str) -> tuple[dict[str, Path], dict[str, str]]:
    """Find or build real kubelet code. Return the binaries, and why each of the other versions is emulated.

    Raises:
        gateway_lab.kubelets.build.BuildError: ``--genuine yes`` is set, and a kubelet can't be built.
    """
    from gateway_lab.kubelets import build

    if genuine == "no":
        return {}, dict.fromkeys(versions, "--genuine no was set")
    found: dict[str, Path] = {}
    why: dict[str, str] = {}
    possible = build.available()
    for version in versions:
        path = build.built(version) if version in possible else None
        if path is None and genuine == "built":
            why[version] = "its real code is not built"
            continue
        if version not in possible and genuine == "auto":
            why[version] = f"real code can be built for {', '.join(possible)} only"
            continue
        if path is None and genuine == "auto" and not (os.environ.get("GO") or shutil.which("go")):
            why[version] = "Go is not installed, so its real code can't be built"
            continue
        try:
            found[version] = path or build.build([version], progress=click.echo)[version]
        except build.BuildError as error:
            if genuine == "yes":
                raise
            click.echo(str(error), err=True)
            why[version] = "building its real code failed: " + str(error).splitlines()[0]
    return found, why


def require_writable_report(out: Path, page: Path | None) -> None:
    """Raise a ``click.ClickException`` before a run of several minutes if its report can't be written."""
    from gateway_lab.matrix import report

    advice = "Name another folder with --out"
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
        advice = "Correct the page, or name another with --page"
        if page is not None:
            report.find_place(page.read_text(encoding="utf-8"))
            with page.open("a", encoding="utf-8"):
                pass
    except (OSError, UnicodeDecodeError, report.NoPlaceError) as error:
        raise click.ClickException(f"the report can't be written, so nothing was run: {error}. {advice}") from error
