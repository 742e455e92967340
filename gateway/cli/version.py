"""``gateway version``."""

from __future__ import annotations

import click
import msgspec

from gateway.cli import common
from gateway.cli.page import print_json

_EXAMPLES = """
\b
Examples:
  gateway version
  gateway version -o wide                        of Python and of the libraries, too
  gateway version -o json | jq -r .gateway
"""


@click.command(epilog=_EXAMPLES)
@common.output("one object with gateway, python, grpcio and protobuf", wide="all of these")
def version(*, output: str) -> None:
    """Print the version of this command, which is that of its gateway."""
    from gateway.telling.status import build

    found = msgspec.to_builtins(build())
    if output == "json":
        print_json(found)
        return
    for name in found if output == "wide" else ["gateway"]:
        click.echo(f"{name} {found[name]}")
