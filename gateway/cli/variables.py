"""Which variables an error is about: who has set one looks for an option in vain."""

from __future__ import annotations

import re

import click
from click.core import ParameterSource

from gateway.cli.main import variable


def named(error: click.UsageError) -> click.UsageError:
    """Return the error with the variables that the options in its words come from, or could come from."""
    where = error.ctx or click.get_current_context(silent=True)
    if where is None:
        return error
    prefix, words = where.auto_envvar_prefix, error.format_message()
    if isinstance(error, click.MissingParameter) and isinstance(error.param, click.Option):
        return click.UsageError(f"{words} Give it, or set {variable(error.param, prefix)}.", error.ctx)
    found = "".join(
        f" ({option.opts[0]} comes from the variable {variable(option, prefix)})"
        for option in where.command.params
        if where.get_parameter_source(str(option.name)) is ParameterSource.ENVIRONMENT
        and re.search(rf"{re.escape(option.opts[0])}(?![\w-])", words)
    )
    return click.UsageError(words + found, where) if found else error
