"""Error messages about wrong values: the option or variable, what is wrong, what is allowed. A daemon that starts doesn't load this module."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

import click
from click.core import ParameterSource

from gateway.wires.control import ControlError
from gateway.wires.log import printable_lines


def worded(
    error: click.ClickException | ControlError | OSError, variable: Callable[[click.Parameter, str | None], str]
) -> Exception:
    """Return the error that ends the command, in words, without characters that control the terminal."""
    if isinstance(error, ControlError):
        return click.ClickException(printable_lines(str(error)))
    if isinstance(error, click.ClickException):
        found = named(error, variable) if isinstance(error, click.UsageError) else error
        found.message = printable_lines(found.message)  # type: ignore[misc]
        return found
    if error.filename or error.errno != errno.ENOSPC:
        return error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes its buffer again at the exit.
    return click.ClickException(f"Cannot write the output: {error.strerror}.")


def named(error: click.UsageError, variable: Callable[[click.Parameter, str | None], str]) -> click.UsageError:
    """Return the error on one line. If a value is wrong, its option or variable comes first.

    ``variable`` returns the environment variable of an option; its second argument is the prefix of the command's variables.
    """
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return error
    where = error.ctx or click.get_current_context(silent=True)
    words = " ".join(error.format_message().split())
    if where is None:
        return click.UsageError(words)
    if isinstance(error, click.MissingParameter):
        if isinstance(error.param, click.Option):
            words = f"{words.rstrip('.')}. Give it, or set {variable(error.param, where.auto_envvar_prefix)}."
    elif isinstance(error, click.BadParameter):
        if source := _source(error, where, variable):
            words = f"{source}: {error.message}"
    elif isinstance(error, click.exceptions.NoSuchCommand) and isinstance(where.command, click.Group):
        words = type(error)(error.command_name, possibilities=where.command.list_commands(where)).format_message()
        words += f" See {where.command_path} --help."
    elif isinstance(error, click.NoSuchOption):
        words += f" See {where.command_path} --help."
    return click.UsageError(words)


def _source(
    error: click.BadParameter, where: click.Context, variable: Callable[[click.Parameter, str | None], str]
) -> str:
    """Return the option, variable or argument with the wrong value; empty if the error doesn't name it."""
    if error.param is None:
        return str(error.param_hint or "")
    if where.get_parameter_source(str(error.param.name)) is ParameterSource.ENVIRONMENT:
        return variable(error.param, where.auto_envvar_prefix)
    return max(error.param.opts, key=len) if isinstance(error.param, click.Option) else error.param.human_readable_name
