"""What may be done beside another process that has the name of our DRA driver."""

from __future__ import annotations

import pytest

from gateway.dra.rivals import OtherProcess

DRIVER = "gpu.example.com"
UNREGISTERED = "the API server has not reported"


@pytest.mark.parametrize(
    ("known", "unregistered", "unpublished", "stale"),
    [
        (OtherProcess(DRIVER), "", "", False),
        (OtherProcess(DRIVER, slices=None), UNREGISTERED, UNREGISTERED, False),
        (OtherProcess(DRIVER, "a.sock", (), 0.0, None), "listens on a.sock", "listens on a.sock", False),
        (OtherProcess(DRIVER, "a.sock", ("s",), 99.0, ()), "and publishes s", "and publishes s", False),
        (OtherProcess(DRIVER, "a.sock", None, 99.0, ()), "listens on a.sock", "listens on a.sock", False),
        (
            OtherProcess(DRIVER, slices=("s",), away_s=59.9, claims=()),
            "less than 60 s ago",
            "less than 60 s ago",
            False,
        ),
        (OtherProcess(DRIVER, slices=(), away_s=59.9, claims=()), "less than 60 s ago", "less than 60 s ago", False),
        (
            OtherProcess(DRIVER, slices=("s",), away_s=60.0, claims=None),
            "is unknown which",
            "is unknown which",
            False,
        ),
        (OtherProcess(DRIVER, slices=("s",), away_s=60.0, claims=("n/c",)), "have its devices: n/c", "n/c", False),
        (
            OtherProcess(DRIVER, slices=("s",), away_s=60.0, claims=()),
            "left ResourceSlices",
            "left ResourceSlices",
            True,
        ),
        (OtherProcess(DRIVER, slices=(), away_s=60.0, claims=None), "", "is unknown which", False),
        (OtherProcess(DRIVER, slices=(), away_s=60.0, claims=("n/c",)), "", "n/c", False),
        (OtherProcess(DRIVER, slices=(), away_s=60.0, claims=()), "", "", False),
    ],
)
def test_what_may_be_done_beside_another_process(
    known: OtherProcess, unregistered: str, unpublished: str, *, stale: bool
) -> None:
    for said, wanted in ((known.registration_blocker, unregistered), (known.publication_blocker, unpublished)):
        assert (wanted in said) if wanted else not said
    assert known.has_stale_slices is stale
