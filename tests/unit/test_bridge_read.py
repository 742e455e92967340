"""A plugin's list, read by what differs from the one before: whatever it holds, as if it were read anew."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adapters.dialect import MalformedError
from adapters.registry import DIALECTS
from devices.model import Device, Health
from gateway.bridge.read import read

DEVICES = st.builds(
    Device, st.text(max_size=300), st.sampled_from(Health), st.lists(st.integers(0, 300), max_size=3).map(tuple)
)
LISTS = st.lists(DEVICES, max_size=8)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.name)
@given(before=LISTS, after=LISTS)
def test_it_reads_what_the_dialect_reads(dialect: object, before: list[Device], after: list[Device]) -> None:
    first, second = (dialect.encode_list(devices).data for devices in (before, after))  # type: ignore[attr-defined]
    _, known = read(dialect, first, {}, lambda device: device)  # type: ignore[arg-type]
    assert read(dialect, second, known, lambda device: device)[0] == dialect.decode_list(second)  # type: ignore[arg-type, attr-defined]


def test_what_is_the_same_is_the_same_object_and_made_once() -> None:
    dialect, made = DIALECTS[0], list[str]()

    def make(device: Device) -> Device:
        made.append(device.id)
        return device

    many = [Device(str(number)) for number in range(100)]
    first, known = read(dialect, dialect.encode_list(many).data, {}, make)
    many[7] = Device("7", Health.UNHEALTHY)
    second, _ = read(dialect, dialect.encode_list(many).data, known, make)
    assert [one for one, other in zip(first, second, strict=True) if one is not other] == [Device("7")]
    assert made[100:] == ["7"]


@given(st.binary(max_size=40))
@example(b"\x0a\x00\x10\x00")  # A field that nobody knows.
@example(b"\x0a\x00\x0a\x09\x0a\x01a")  # A device that breaks off.
@example(b"\x0a")  # A length that isn't there.
@example(b"\x0a\x00\x0a\x80")  # One that breaks off.
def test_whatever_comes_is_a_list_or_malformed(data: bytes) -> None:
    dialect = DIALECTS[0]
    try:
        expected = dialect.decode_list(data)
    except MalformedError:
        with pytest.raises(MalformedError):
            read(dialect, data, {}, lambda device: device)
    else:
        assert read(dialect, data, {}, lambda device: device)[0] == expected
