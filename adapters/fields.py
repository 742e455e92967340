"""Which parts of the model a message uses, so that a dialect can tell what it would drop (``dialect.left_out``).

There is one function per kind of message, the same for every dialect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from devices.model import ContainerAnswer, Device, Field, Options, Registration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_OF_ANSWERS: Final = {
    Field.ENVS: "envs",
    Field.MOUNTS: "mounts",
    Field.DEVICE_NODES: "device_nodes",
    Field.ANNOTATIONS: "annotations",
    Field.CDI_DEVICES: "cdi_devices",
}


def of_registration(registration: Registration) -> Iterator[Field]:
    """Return the fields that Register uses."""
    return _of(registration.options, Field.OPTIONS)


def of_options(options: Options) -> Iterator[Field]:
    """Return the fields that the answer of GetDevicePluginOptions uses."""
    return _of(options, Field.GET_OPTIONS)


def of_list(devices: Iterable[Device]) -> Iterator[Field]:
    """Return the fields that a list uses."""
    if any(device.numa_nodes for device in devices):
        yield Field.TOPOLOGY


def of_allocate(containers: Sequence[object], answers: Iterable[ContainerAnswer] = ()) -> Iterator[Field]:
    """Return the fields that Allocate uses, in its request or its answer."""
    if len(containers) != 1:
        yield Field.SEVERAL_CONTAINERS
    for answer in answers:
        for field, name in _OF_ANSWERS.items():
            if getattr(answer, name):
                yield field


def of_preferred(containers: Sequence[object]) -> Iterator[Field]:
    """Return the fields that GetPreferredAllocation uses, in its request or its answer."""
    if containers:
        yield Field.PREFERRED_ALLOCATION


def _of(options: Options, said_in: Field) -> Iterator[Field]:
    if options.pre_start_required:
        yield Field.PRE_START
    if options.preferred_allocation:
        yield Field.PREFERRED_ALLOCATION
    if options != Options():
        yield said_in
