"""Succession: who yields."""

from __future__ import annotations

import pytest

from gateway.succession import Age, elder_should_wait


@pytest.mark.parametrize(
    ("own", "peers", "waits_for"),
    [
        pytest.param(Age(5, "b"), [], None, id="alone"),
        pytest.param(Age(5, "b"), [Age(4, "z")], None, id="the other is older: it yields"),
        pytest.param(Age(5, "b"), [Age(6, "a")], Age(6, "a"), id="the other is younger: we yield"),
        pytest.param(Age(5, "b"), [Age(6, "a"), Age(7, "a")], Age(7, "a"), id="the youngest counts"),
        pytest.param(Age(5, "b"), [Age(5, "c")], Age(5, "c"), id="born together: the token decides"),
        pytest.param(Age(5, "c"), [Age(5, "b")], None, id="and decides the other way for the other"),
    ],
)
def test_the_older_yields(own: Age, peers: list[Age], waits_for: Age | None) -> None:
    assert elder_should_wait(own, peers) == waits_for
