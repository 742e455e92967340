"""This machine's own mirrors of Debian, for another release of it: so no address of a mirror is written down anywhere here."""

from __future__ import annotations

import os
import subprocess

__all__ = ["DebianError", "mirrors", "output", "served"]

_TARGET = "$(REPO_URI) $(RELEASE) $(ORIGIN) $(COMPONENT)"


class DebianError(Exception):
    """apt or dpkg can't tell what is asked; the message says what was expected, what came, and what to do."""


def mirrors(release: str) -> tuple[tuple[str, str], ...]:
    """Where the release is, with its updates and its security updates: an address and a suite each, in order.

    Empty on a machine whose apt knows other vendors only.

    Raises:
        DebianError: there is no apt, or it hasn't fetched any lists.
    """
    targets = output("apt-get", "indextargets", "--format", _TARGET, "Created-By: Packages")
    if not targets.strip():
        raise DebianError("expected apt to know its sources' lists, but it has none: run `apt-get update` as root")
    return served(release, targets)


def served(release: str, targets: str) -> tuple[tuple[str, str], ...]:
    """Take a machine's sources for those of a release.

    Args:
        release: the wanted one, as ``trixie``.
        targets: the machine's, as apt tells them: a line of address, suite, origin and component each.
    """
    found = set()
    for row in filter(lambda row: len(row) == 4, map(str.split, targets.splitlines())):
        address, suite, origin, component = row
        _, dash, pocket = suite.partition("-")
        if origin == "Debian" and component == "main" and pocket in {"", "updates", "security"}:
            found.add((address, f"{release}{dash}{pocket}"))
    return tuple(sorted(found))


def output(*command: str) -> str:
    """What a command of apt or dpkg prints.

    Raises:
        DebianError: it isn't there, or failed.
    """
    try:
        return subprocess.run(
            command, check=True, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
        ).stdout
    except OSError as error:
        raise DebianError(f"expected `{command[0]}` of a Debian or Ubuntu to answer, but: {error}") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip()
        raise DebianError(f"expected `{command[0]}` of a Debian or Ubuntu to answer, but: {said or error}") from error
