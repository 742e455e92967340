"""Print docs/track-record.md out of the table of bugs: ``python -m tools.bugs [--check] [FILE]``."""

from __future__ import annotations

from gateway_lab.bugs.table import BUGS, Bug
from tools.pages import main

_BEGIN = """# Track record

Bugs of kubelets, and a command that shows each on real kubelet code, with a plain plugin and without the gateway.

    gateway bugs issue-127803                     # on a kubelet that has it, and on one that doesn't
    gateway bugs issue-127803 --kubelets 1.32     # on another one

The command ends with 0 if the bug is seen exactly on the kubelets that have it, else with 1. `make track-record` shows all.
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
        f"- Kubelets {befallen}{f' ({issues})' if issues else ''}. Fix: {bug.fixed}.",
        f"- The gateway: {bug.here}.",
    ]
    if bug.show is None:
        said.append("- No command shows it.")
    return "\n".join([*said, ""])


if __name__ == "__main__":
    main(page, __doc__, "gateway_lab/bugs/table.py says")
