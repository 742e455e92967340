"""Print docs/faults.md out of the table of faults: ``python -m tools.faults [--check] [FILE]``.

With FILE it is written there, with --check compared with what is there (exit status 1 where they differ).
"""

from __future__ import annotations

from gateway_lab.trials.faults import page
from tools.pages import main

if __name__ == "__main__":
    main(page, __doc__, "gateway_lab/trials/faults.py says")
