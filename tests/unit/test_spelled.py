"""A list in parts: the whole is what the dialect would spell, and only what changed is spelled anew."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from adapters.dialect import Dialect, Level, Wire
from adapters.pb.v1beta1 import v1beta1_pb2
from adapters.registry import DIALECTS, by_name
from adapters.v1beta1 import RULES, Beta
from devices.model import Device, Health
from gateway.registration.devicelist import PART_DEVICES, spell

DEVICES = st.lists(
    st.builds(
        Device,
        st.integers(0, 9).map("GPU-{}".format),
        st.sampled_from(Health),
        st.lists(st.integers(0, 3), max_size=2).map(tuple),
    ),
    max_size=6,
)
MANY = tuple(Device(f"GPU-{number}", numa_nodes=(number % 2,)) for number in range(3 * PART_DEVICES))


class Counting(Beta):
    """A dialect that counts the devices that it spells."""

    spelled = 0

    def __init__(self) -> None:
        super().__init__("v1beta1", Level(10), v1beta1_pb2, RULES)

    def encode_list(self, devices: Sequence[Device]) -> Wire:
        self.spelled += len(devices)
        return super().encode_list(devices)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@given(st.lists(DEVICES, min_size=1, max_size=4), st.integers(1, 4))
def test_the_parts_make_the_whole(dialect: Dialect, lists: list[list[Device]], part: int) -> None:
    """Whatever the list before was."""
    parts: Sequence[tuple[Sequence[Device], Wire]] = ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.registration.devicelist.PART_DEVICES", part)
        for devices in lists:
            wire, parts = spell(dialect, tuple(devices), parts)
            assert wire == dialect.encode_list(devices)


@pytest.mark.parametrize(
    ("devices", "spelled"),
    [
        pytest.param(MANY, 0, id="the same list"),
        pytest.param((*MANY[:-1], replace(MANY[-1], health=Health.UNHEALTHY)), PART_DEVICES, id="one fell ill"),
        pytest.param(MANY[: 2 * PART_DEVICES], 0, id="the last ones went"),
        pytest.param((*MANY, Device("GPU-new")), 1, id="one more"),
    ],
)
def test_only_what_changed_is_spelled_anew(devices: tuple[Device, ...], spelled: int) -> None:
    dialect = Counting()
    _, parts = spell(dialect, MANY, ())
    dialect.spelled = 0
    wire, _ = spell(dialect, devices, parts)
    assert (wire, dialect.spelled) == (by_name("v1beta1").encode_list(devices), spelled)
