"""The node's root file system: a small Debian with a container runtime, made from the list in ``packages.txt``.

It comes from this machine's own mirrors, by its own apt settings, and is kept outside the tree under a name that carries
the hash of all that goes into it: $XDG_CACHE_HOME/device-plugin-gateway/node/root-HASH. Nodes see it through an overlay;
nothing ever writes to it. So nothing is installed on the machine, and its container runtime, if any, is left alone.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from gateway_lab.debian import DebianError, mirrors, output
from gateway_lab.kubelets.build import cache, locked

__all__ = ["RootError", "root"]

_LIST = Path(__file__).with_name("packages.txt")
_UNWANTED = ("doc", "info", "locale", "man")
_OURS_TO_CARRY = re.compile(r'^Acquire::(?!IndexTargets|cdrom|Changelogs)(?!.*(:: ""| "");$)')


class RootError(Exception):
    """The root file system can't be made; the message says what was expected, what came, and what to do."""


def root(*, progress: Callable[[str], None]) -> Path:
    """Makes the root file system if it isn't there, and says where it is. Wants root, and a Debian or Ubuntu.

    Args:
        progress: Is given one line of text at a time.

    Raises:
        RootError: There is no mmdebstrap, or it failed; apt isn't there, or has no lists.
    """
    release, packages = _wanted(_LIST.read_text())
    try:
        settings = "\n".join(filter(_OURS_TO_CARRY.match, output("apt-config", "dump").splitlines()))
        # Without any, on a machine of another vendor, mmdebstrap knows a mirror.
        sources = tuple(f"deb {address} {suite} main" for address, suite in mirrors(release))
        architecture = output("dpkg", "--print-architecture")
    except DebianError as error:
        raise RootError(str(error)) from error
    about = "\0".join((release, *packages, settings, *sources, architecture))
    made = cache() / "node" / f"root-{hashlib.sha256(about.encode()).hexdigest()[:16]}"
    if made.is_dir():
        return made
    if shutil.which("mmdebstrap") is None:
        raise RootError("expected mmdebstrap, which makes the node's root, on the PATH: apt-get install mmdebstrap")
    with locked(cache() / "node", progress):
        if not made.is_dir():
            progress(f"the node's root: Debian {release} with {' '.join(packages)} (half a minute, or more)")
            _make(made, release, packages, settings, sources)
            progress(f"the node's root: in {made}")
    return made


def _make(made: Path, release: str, packages: Sequence[str], settings: str, sources: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(prefix=".new-", dir=made.parent) as new:
        apt = Path(new, "apt.conf")
        apt.write_text(f"{settings}\n")
        done = subprocess.run(
            [
                "mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", "--format=directory",
                f"--include={','.join(packages)}", f"--aptopt={apt}",
                *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _UNWANTED),
                release, f"{new}/root", *sources,
            ],
            check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if done.returncode:
            raise RootError(
                f"expected mmdebstrap to make a Debian {release} of {' '.join(packages)}, but it ended with "
                f"{done.returncode}; look at the network and at this machine's apt sources:\n{done.stdout[-3000:]}"
            )
        Path(new, "root").rename(made)


def _wanted(text: str) -> tuple[str, tuple[str, ...]]:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    release = [line.removeprefix("release:").strip() for line in lines if line.startswith("release:")]
    if len(release) != 1:
        raise RootError(f"expected one line `release: NAME` in {_LIST}, found {len(release)}")
    return release[0], tuple(line for line in lines if not line.startswith("release:"))
