"""One style for the error messages of all commands, and stricter checks of options than click's."""

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
def _reworded_errors() -> Iterator[None]:
    """Reword the error that ends a command."""
    try:
        yield
    except (click.ClickException, ControlError, OSError) as error:
        from gateway.cli.errors import worded

        raise worded(error, variable) from None


class Program(click.Command):
    """A command whose error messages have one style, also those of its subcommands."""

    make_context = _reworded_errors()(click.Command.make_context)

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        with _reworded_errors():
            return super().invoke(ctx)


class Words(click.Choice[str]):
    """One of a set of words. The error for an unknown word suggests a similar one."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:  # noqa: ARG002 - click's signature
        """Return the error for an unknown word."""
        return unknown(str(value), self.choices)


class Seconds(click.FloatRange):
    """A number of seconds within bounds. It also refuses ``nan``, which click accepts within any bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        with contextlib.suppress(click.BadParameter):
            if not math.isnan(found := super().convert(value, param, ctx)):
                return found
        words = f"{str(value)!r:.80} is not a number from {self.min:g} to {self.max:g} (seconds, without a unit)"
        raise click.BadParameter(words, ctx, param)


class Strict(click.Option):
    """An option that refuses an empty value. click accepts one, and as a path it means the current directory."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Read the environment variable. click would ignore an empty one."""
        return os.environ.get(variable(self, ctx.auto_envvar_prefix))

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Refuse an empty value."""
        found = super().type_cast_value(ctx, value)
        if value == "":
            self.type.fail(f"the value is empty. Write a {self.type.name}, or leave it out", self, ctx)
        return found


def setting(flag: Flag) -> click.Option:
    """Return the option of a setting. ``gateway.configuration.commandline`` checks its values."""
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
    """Return the environment variable of an option. ``prefix`` is the prefix of its command's variables."""
    return str(option.envvar or f"{prefix}_{str(option.name).upper()}")
