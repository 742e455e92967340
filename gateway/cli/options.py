"""Commands that word their errors, and options that refuse what click lets pass."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from gateway.configuration.kinds import unknown
from gateway.wires.control import ControlError

if TYPE_CHECKING:
    from gateway.configuration.kinds import Flag


@contextlib.contextmanager
def _worded_errors() -> Iterator[None]:
    """Word what ends the command."""
    try:
        yield
    except (click.ClickException, ControlError, OSError) as error:
        from gateway.cli.errors import worded

        raise worded(error, variable) from None


class Program(click.Command):
    """A command that words its errors, and those of its commands."""

    make_context = _worded_errors()(click.Command.make_context)

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        with _worded_errors():
            return super().invoke(ctx)


class Words(click.Choice[str]):
    """One of several words."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:  # noqa: ARG002 - click's signature
        """Say which words there are."""
        return unknown(str(value), self.choices)


class Seconds(click.FloatRange):
    """A number of seconds. Whatever else comes is told the bounds; so is ``nan``, which click finds within any."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Take a number within the bounds."""
        with contextlib.suppress(click.BadParameter):
            if not math.isnan(found := super().convert(value, param, ctx)):
                return found
        words = f"{str(value)!r:.80} is not a number from {self.min:g} to {self.max:g} (seconds, without a unit)"
        raise click.BadParameter(words, ctx, param)


class Strict(click.Option):
    """An option that refuses an empty value, which click lets pass: as a path it would mean this folder."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Read its variable; an empty one, too, which click takes for none."""
        return os.environ.get(variable(self, ctx.auto_envvar_prefix))

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Judge its value."""
        found = super().type_cast_value(ctx, value)
        if value == "":
            self.type.fail(f"the value is empty. Write a {self.type.name}, or leave it out", self, ctx)
        return found


def setting(flag: Flag) -> click.Option:
    """Return the option of a setting: it takes texts, which ``gateway.configuration.commandline`` judges."""
    words = flag.values.split("|")

    def complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
        return [word for word in words if len(words) > 1 and word.startswith(incomplete)]

    return click.Option(
        [*(f"--{name}" for name in (flag.name, *flag.aliases)), flag.parameter],
        type=click.Path() if flag.values == "PATH" else str,
        shell_complete=None if flag.values == "PATH" else complete,
        multiple=True,
        hidden=flag.inert,
        allow_from_autoenv=False,
    )


def variable(option: click.Parameter, prefix: str | None = "GATEWAY") -> str:
    """Name the variable of an option of the command whose variables begin so."""
    return str(option.envvar or f"{prefix}_{str(option.name).upper()}")
