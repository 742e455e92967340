"""Options that refuse what click lets pass or doesn't explain, and which variables an error is about: who has set one looks for an option in vain."""

from __future__ import annotations

import contextlib
import math
import os
import re
from typing import Any

import click
from click.core import ParameterSource


class Seconds(click.FloatRange):
    """A number of seconds. Whatever else comes is told the bounds; so is ``nan``, which click finds within any."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Take a number within the bounds."""
        with contextlib.suppress(click.BadParameter):
            if not math.isnan(found := super().convert(value, param, ctx)):
                return found
        wanted = f"expected {self.min:g} to {self.max:g} seconds, got {str(value)!r:.80}"
        raise click.BadParameter(f"{wanted}: write a number without a unit", ctx, param)


class Strict(click.Option):
    """An option that refuses an empty value, which click lets pass: as a path it would mean this folder."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Read its variable; an empty one, too, which click takes for none."""
        return os.environ.get(variable(self, ctx.auto_envvar_prefix))

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Judge its value."""
        found = super().type_cast_value(ctx, value)
        if value == "":
            self.type.fail(f"{value!r} is not a valid {self.type.name}: write one, or leave it out.", self, ctx)
        return found


def variable(option: click.Parameter, prefix: str | None = "GATEWAY") -> str:
    """Name the variable of an option of the command whose variables begin so."""
    return str(option.envvar or f"{prefix}_{str(option.name).upper()}")


def named(error: click.UsageError) -> click.UsageError:
    """Return the error with the variables that the options in its words come from, or could come from."""
    where = error.ctx or click.get_current_context(silent=True)
    if where is None:
        return error
    prefix, words = where.auto_envvar_prefix, error.format_message()
    if isinstance(error, click.MissingParameter) and isinstance(error.param, click.Option):
        words = " ".join(words.split()).rstrip(".")
        return click.UsageError(f"{words}. Give it, or set {variable(error.param, prefix)}.", error.ctx)
    found = "".join(
        f" ({option.opts[0]} comes from the variable {variable(option, prefix)})"
        for option in where.command.params
        if where.get_parameter_source(str(option.name)) is ParameterSource.ENVIRONMENT
        and re.search(rf"{re.escape(option.opts[0])}(?![\w-])", words)
    )
    return click.UsageError(words + found, where) if found else error
