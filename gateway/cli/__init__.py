"""The command line: one file per command, imported only when that command runs."""

from gateway.cli import environment

environment.require()
