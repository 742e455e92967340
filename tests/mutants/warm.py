"""``python -m tests.mutants.warm``: a Python that forks for each run of pytest that it is asked for.

A row's pytest spends four fifths of its time on importing libraries, and no mutant touches those. So they are imported once;
the project's own modules never are, because each run must find them as the tree has them at that moment. What was imported is
out of the garbage collector's sight, and a run ends without taking itself apart: both took as long as half of it.
Each line of standard input asks for one run: a JSON array of the file for what it prints, its limit in seconds, and pytest's
arguments. The line that answers is its exit status; minus the signal's number where one ended it (SIGKILL: the limit).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import sys

IMPORTED = (
    "click.testing",
    "google.protobuf.descriptor_pool",
    "grpc.aio",
    "hypothesis",
    "msgspec.yaml",
    "packaging.version",
    "prometheus_client",
    "pynvml",
    "pytest",
    "structlog.testing",
    "tenacity",
    "yaml",
)
"""Libraries only, and of these none that starts a thread when it is imported: a fork keeps one thread."""
PYTEST = (
    *("-q", "-x", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:rerunfailures"),
    "--hypothesis-profile=mutants",
    # Only that an assertion inside a library fails without its values.
    *("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"),
)


def run(printed: str, arguments: list[str]) -> int:
    """Run pytest in this process, which is a fork; return its exit status."""
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for file, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(file, number)
    import pytest  # noqa: PLC0415 -- with the others of IMPORTED

    return pytest.main([*PYTEST, *arguments])


def main() -> int:
    """Answer until standard input ends."""
    for library in IMPORTED:
        importlib.import_module(library)
    gc.freeze()
    while asked := sys.stdin.readline():
        printed, seconds, *arguments = json.loads(asked)
        if not (child := os.fork()):
            status = run(printed, arguments)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        # No alarm in the fork: pytest-timeout takes the only one that a process has.
        with os.fdopen(os.pidfd_open(child)) as ended:
            if not select.select([ended], [], [], seconds)[0]:
                os.kill(child, signal.SIGKILL)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)  # noqa: T201 -- the answer
    return 0


if __name__ == "__main__":
    sys.exit(main())
