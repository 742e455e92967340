"""The track record: each bug is seen on the genuine kubelet that has it, and not on the one that hasn't.

Kubelets that `make kubelets` doesn't build are skipped, and said to be, unless they are there: `make track-record` builds and plays all.
"""

from __future__ import annotations

import pytest

from gateway_lab.bugs.run import look, versions
from gateway_lab.bugs.table import BUGS
from gateway_lab.kubelets.build import built
from tests.compat.conftest import GENUINE


def _row(name: str, version: str) -> object:
    left = pytest.mark.skipif(
        version not in GENUINE and built(version) is None,
        reason=f"kubelet {version} is not built by make kubelets: the nightly `make track-record` shows {name} on it",
    )
    return pytest.param(name, version, id=f"{name}-{version}", marks=left)


@pytest.mark.genuine
@pytest.mark.parametrize(
    ("name", "version"),
    [_row(name, version) for name, bug in BUGS.items() if bug.show is not None for version in versions(name)],
)
async def test_a_bug_is_where_the_record_says(name: str, version: str) -> None:
    sight = await look(name, version, built)
    assert sight.genuine, f"kubelet {version} is not built: make kubelets"
    assert sight.expected, str(sight)
