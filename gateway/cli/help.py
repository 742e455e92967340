"""What ``gateway --help`` prints besides its options. A daemon doesn't load it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gateway.configuration import flags

if TYPE_CHECKING:
    import click

EXAMPLES = """
\b
Examples:
  gateway                                        serve this node's GPUs to whichever kubelet runs
  gateway --backend simulated                    8 healthy simulated GPUs as nvidia.com/gpu
  gateway --backend simulated --simulate p.yaml  GPUs from a profile; edit it and the node follows
  gateway --api v1beta1                          only this API; an older kubelet is told so and left alone
  gateway config show                            the settings in force, and where each comes from
  gateway status                                 the state of the gateway, its kubelet and its devices
  gateway doctor                                 what keeps this node's GPUs from pods?
  gateway devices --release 3                    close GPU 3 for a reset; --acquire opens it again
  gateway probe --json                           which API does this node's kubelet speak?
  gateway demo                                   a kubelet upgrade on a simulated node, with no GPU and no cluster

Options before commands have a variable: --socket-dir is GATEWAY_SOCKET_DIR. NVIDIA's keep the plugin's names: --mig-strategy
is MIG_STRATEGY. Options win over variables, and those over the configuration file. docs/configuration.md lists all.
"""


def write(formatter: click.HelpFormatter, commands: Mapping[str, tuple[str, str]]) -> None:
    """Write the flags of other plugins, and the commands with what each does."""
    with formatter.section("Devices, by the flags and variables of NVIDIA's and AMD's plugins"):
        formatter.write_dl(list(flags.help_rows()))
    with formatter.section("Commands"):
        formatter.write_dl([(name, commands[name][1]) for name in sorted(commands)])
