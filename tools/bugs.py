"""Print docs/track-record.md out of the table of bugs: ``python -m tools.bugs [--check] [FILE]``."""

from __future__ import annotations

from gateway_lab.bugs.table import BUGS, Bug
from tools.pages import main

_BEGIN = """# Track record

This page lists bugs of kubelets that affect devices. A command shows each bug on real kubelet code, with a plain plugin instead of the gateway:

    gateway bugs issue-127803                     # on a kubelet with the bug, and on one without
    gateway bugs issue-127803 --kubelets 1.32     # on another one

The exit status is 0 if the bug appears exactly on the kubelets that have it, otherwise 1. `make track-record` shows all bugs.
"""


def page() -> str:
    """Write the page."""
    return "\n".join([_BEGIN, *(_section(name, bug) for name, bug in BUGS.items())])


def _section(name: str, bug: Bug) -> str:
    befallen = f"1.{bug.first}" + (
        " and later" if bug.last is None else f" to 1.{bug.last}" if bug.last > bug.first else ""
    )
    issues = ", ".join(f"[#{issue}](https://github.com/kubernetes/kubernetes/issues/{issue})" for issue in bug.issues)
    said = [
        f"## {name}",
        "",
        f"{bug.what[0].upper()}{bug.what[1:]}.",
        "",
        f"- This affects kubelets {befallen}{f' ({issues})' if issues else ''}. Fix: {bug.fixed}.",
        f"- The gateway {bug.here}.",
    ]
    if bug.show is None:
        said.append("- `gateway bugs` can't show this bug.")
    return "\n".join([*said, ""])


if __name__ == "__main__":
    main(page, __doc__, "gateway_lab/bugs/table.py says")
