"""Commands that take the daemon's options, too, to know the settings that a daemon would have."""

from __future__ import annotations

import click
from click.core import ParameterSource

from gateway.cli.run import Run, given, read, run
from gateway.configuration import effective


class Settled(Run):
    """Such a command. Its own options go before the daemon's of the same name."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Add the daemon's options to its own."""
        own = super().get_params(ctx)
        names = {one.name for one in own}
        return [*own, *(one for one in run.params if one.name not in names and one.expose_value)]


def effective_settings(ctx: click.Context) -> list[effective.Setting]:
    """Return the settings that a daemon would use with this command's options, this process's variables and its file.

    Raises:
        ConfigError: one of them can't be used.
    """
    texts = {
        name: value if isinstance(value, tuple) else (str(value),)
        for name, value in ctx.params.items()
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    return [*effective.in_force(*read(ctx, *given(ctx, texts)))]
