"""The commands of a running gateway's control socket: its status, and orders about devices.

An order is in force, and on disk, before it is answered.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import structlog

from devices.life.states import AWAY, State
from devices.replicas import unshared
from gateway.memory.rows import Cordon
from gateway.registration.devicelist import AT_ONCE
from gateway.telling import orders
from gateway.telling.orders import FoundDevice, Handled, Order, OrderOutcome
from gateway.wires.control import ControlError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from devices.life.states import Entry
    from devices.source import Facts
    from gateway.telling import status
    from gateway.telling.subject import Subject
    from gateway.wires.control import ControlConnection, Handler

    Listed = tuple[str, Mapping[str, Entry], Callable[[str], Facts]]

FRESH = 1.0
"""Seconds for which the last look into the kubelet's records is new enough for a person."""

_MOST_TOLD = 16
"""The most devices that one line of the log names."""
_log = structlog.get_logger()
_Made = TypeVar("_Made")

_HERE = frozenset({State.PRESENT, State.RELEASED, State.WITHHELD})
_OVER = AWAY | {State.CORDONED}


class Commands:
    """Answers the commands for one gateway."""

    def __init__(self, gateway: Subject) -> None:
        self._gateway = gateway
        self._turn = asyncio.Lock()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers, by op."""
        return {
            "status": self._status,
            "devices": self._devices,
            "move": self._move,
            **dict.fromkeys(orders.ORDERS, self._order),
            **dict.fromkeys(orders.HANDLES, self._handle),
        }

    @property
    def handlers_while_waiting(self) -> Mapping[str, Handler]:
        """The handlers, by op, while the gateway has no list yet."""
        return {"status": self._status, "cordon": self._order, "uncordon": self._order}

    def taken(self, few: bool) -> Callable[[], status.GatewayStatus]:  # noqa: FBT001 - the metrics' signature
        """Take what is known now, as ``gathered.taken`` does."""
        from gateway.telling import gathered, status  # noqa: PLC0415 - only a gateway that is asked pays for it

        return gathered.taken(self._gateway, status.build(), few=few)

    async def _apart(self, take: Callable[[], Any], make: Callable[[Any], _Made]) -> _Made:
        """Call ``take``, then ``make`` with its result: in a thread if there are many devices, so that calls are answered. One at a time."""
        async with self._turn:
            taken = take()
            many = sum(len(resource.entries) for resource in self._gateway.resources.values()) > AT_ONCE
            return await asyncio.to_thread(make, taken) if many else make(taken)

    async def _status(self, connection: ControlConnection, request: dict[str, Any]) -> None:
        await self._look()
        taken = partial(self.taken, request.get("few") is True)
        await connection.send(await self._apart(taken, _told))

    async def _look(self) -> None:
        """Read the kubelet's records, if the last look is too old."""
        last = self._gateway.holdings.reader.last
        if last is None or time.monotonic() - last.at > FRESH:
            await self._gateway.holdings.reader.look()

    async def _devices(self, connection: ControlConnection, _request: dict[str, Any]) -> None:
        """Send the status, and the facts of each device. Replicas have one entry, under the ID of their device."""
        await self._look()
        await connection.send(
            await self._apart(
                lambda: (self.taken(few=False), self._listed()), lambda it: _told(it[0]) | {"facts": _facts(it[1])}
            )
        )

    def _listed(self) -> list[Listed]:
        return [
            (one.name, one.entries, self._gateway.source.facts(one.name)) for one in self._gateway.resources.values()
        ]

    async def _move(self, connection: ControlConnection, request: dict[str, Any]) -> None:
        """Pass the order to the DRA drivers, if the gateway serves both APIs."""
        drivers = self._gateway.drivers()
        move = None if drivers is None else drivers.handlers.get("move")
        if move is None:
            raise ControlError(
                f"this gateway runs with --dra {self._gateway.settings.dra}: GPUs move where it serves both APIs, with --dra on"
            )
        await move(connection, request)

    async def _handle(self, connection: ControlConnection, request: dict[str, Any]) -> None:
        source, ids = self._gateway.source, orders.handle_ids(request)
        try:
            async with asyncio.timeout(orders.HANDLE_TIME):
                device_ids = await self._meant(ids)
                handled = await (source.release if request["op"] == "release" else source.acquire)(device_ids)
        except TimeoutError as error:
            raise ControlError(
                f"the driver did not answer within {orders.HANDLE_TIME:g} s: the log says what hangs; try again, or restart "
                "the gateway"
            ) from error
        await self._gateway.holdings.reader.look()  # To learn the holders of devices that were just given.
        names = list(self._gateway.resources)
        concerned, known = dict.fromkeys(handled), [self._gateway.holdings.recorded(name) for name in names]
        _log.info("order", op=request["op"], devices=[*concerned][:_MOST_TOLD], count=len(concerned))
        told = (one for name in names for one in (self._gateway.holdings.named(name) or {}).items())
        holders = {device_id: who for device_id, who in told if device_id in concerned}
        answer = Handled(tuple(concerned), None if None in known else holders)
        await connection.send(msgspec.to_builtins(answer))

    async def _meant(self, ids: Sequence[str]) -> tuple[str, ...]:
        """Return the devices that these IDs mean (``_meant``), by the lists that are in force when it returns."""
        before, found = None, tuple[str, ...]()
        while ids and before != (before := [one.entries.keys() for one in self._gateway.resources.values()]):
            found = await self._apart(self._listed, partial(_meant, ids))
        return found

    async def _order(self, connection: ControlConnection, request: dict[str, Any]) -> None:
        order = orders.order(request)
        if order.op == "forget":
            await self._gateway.holdings.reader.look()  # To learn the holders of devices that were just given.
        before = {resource.name: resource.entries.get(order.device_id) for resource in self._gateway.resources.values()}
        found = [(name, entry) for name, entry in before.items() if entry is not None]
        cordoned = order.device_id in self._gateway.holdings.ledger.cordons
        resources = [name for name, _ in found]
        if order.op == "forget":
            # It may have been held under a name that this gateway doesn't offer.
            forgotten = self._gateway.holdings.reader.forgotten_as(order.device_id)
            resources += [name for name in forgotten if name not in resources]
        if not resources and not (cordoned and order.op == "uncordon") and not self._gateway.lead.waits_for:
            raise ControlError(f"no device here is called {order.device_id!r}: `gateway devices` lists them")
        async with self._gateway.lock:  # A merge in progress would bring back what is to be forgotten.
            changed = self._carry_out(order, resources)
        _log.info(
            "order", op=order.op, device=order.device_id, resources=resources, reason=order.reason, changed=changed
        )
        if not self._gateway.lead.waits_for:
            await self._gateway.update()
        # Also if the order changes nothing now: an earlier write may have failed a moment ago.
        if not await self._gateway.holdings.scribe.durable():
            raise ControlError(
                f"done, but it will be forgotten when the gateway restarts: {self._gateway.holdings.scribe.state.error}"
            )
        if order.op == "cordon":
            await self._gateway.holdings.reader.look()  # So that the operator sees the holder.
        now = {resource.name: resource.entries.get(order.device_id) for resource in self._gateway.resources.values()}
        outcome = OrderOutcome(
            changed,
            tuple(
                FoundDevice(
                    name,
                    entry.state.value,
                    one.state.value if (one := now.get(name)) is not None else "forgotten",
                    (self._gateway.holdings.named(name) or {}).get(order.device_id),
                )
                for name, entry in found
            ),
        )
        await connection.send(msgspec.to_builtins(outcome))

    def _carry_out(self, order: Order, resources: list[str]) -> bool:
        """Carry out an order; return True if that changed anything."""
        ledger = self._gateway.holdings.ledger
        match order.op:
            case "cordon":
                cordon = ledger.cordons.get(order.device_id)
                if cordon is not None and cordon.reason == order.reason:
                    return False
                ledger.cordon(order.device_id, Cordon(order.reason, time.time()))
                return True
            case "uncordon":
                if (cordon := ledger.cordons.get(order.device_id)) is not None and cordon.annotated:
                    raise ControlError(
                        f"the node's annotation {orders.CORDON_ANNOTATION} names {order.device_id}. Take it out there"
                    )
                return ledger.uncordon(order.device_id)
            case _:
                # It may be offered under one name, and remembered under another.
                concerned = [one for one in resources if not self._is_just_here(order.device_id, one)] or resources
                return bool([resource for resource in concerned if self._forget(order.device_id, resource)])

    def _forget(self, device_id: str, resource: str) -> bool:
        """Forget what is remembered of a device: its troubles, its place on the list if it is gone, and holders that the kubelet forgot.

        Raises:
            ControlError: it is on the list because it exists, or because a container holds it.
        """
        gateway, one = self._gateway, self._gateway.resources.get(resource)
        state = self._state(device_id, resource)
        if state is not None and self._is_just_here(device_id, resource):
            raise ControlError(f"{device_id} of {resource} is {state.value}: there is nothing to forget of it")
        sticky = dict(gateway.holdings.ledger.sticky(resource))
        ill, forgotten = sticky.pop(device_id, None) is not None, self._is_forgotten(device_id, resource)
        holder = (self._gateway.holdings.named(resource) or {}).get(device_id)
        gone = state in {State.LOST, State.WITHDRAWN, State.NOT_LOOKED_YET}
        if gone and holder is not None:
            if forgotten:  # An earlier holder is gone; the present one stays.
                gateway.holdings.reader.forget(device_id)
                return True
            raise ControlError(f"{device_id} of {resource} is held by {holder}: end that pod first")
        gateway.holdings.reader.forget(device_id)
        if one is not None:
            one.plugin.list.forget(device_id)
        gateway.holdings.ledger.set_sticky(resource, sticky)
        return (gone and gateway.holdings.ledger.withdraw(resource, [device_id])) or ill or forgotten

    def _is_just_here(self, device_id: str, resource: str) -> bool:
        """Return True if a device is on the list only because it exists, and nothing is remembered of it."""
        remembered = device_id in self._gateway.holdings.ledger.sticky(resource) or self._is_forgotten(
            device_id, resource
        )
        return not remembered and self._state(device_id, resource) in _HERE

    def _is_forgotten(self, device_id: str, resource: str) -> bool:
        return resource in self._gateway.holdings.reader.forgotten_as(device_id)

    def _state(self, device_id: str, resource: str) -> State | None:
        """Return a device's state, or the one below a cordon or another API's; None if it isn't on the list."""
        one = self._gateway.resources.get(resource)
        if one is None or (entry := one.entries.get(device_id)) is None:
            return None
        return next((layer.state for layer in entry.layers if layer.state not in _OVER), entry.state)


def _told(taken: Callable[[], status.GatewayStatus]) -> dict[str, Any]:
    return {"status": _spelled(taken())}


def _facts(listed: Sequence[Listed]) -> dict[str, msgspec.Raw]:
    """Encode what is known of each device, one by one, so that other threads run in between."""
    told = {}
    for name, entries, known in listed:
        one_each = {unshared(device_id): device_id for device_id in entries}
        told[name] = _spelled({shared: _spelled(known(device_id)) for shared, device_id in one_each.items()})
    return told


def _spelled(told: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(told))


def _meant(ids: Sequence[str], listed: Sequence[Listed]) -> tuple[str, ...]:
    """Return the devices that IDs mean. An ID may be a device's own, that of its GPU, or that of the device it is a replica of.

    Raises:
        ControlError: an ID means no device.
    """
    meant: dict[str, list[str]] = {one: [] for one in ids}
    for _, entries, known in listed:
        one_each = {unshared(device_id): device_id for device_id in entries}
        parents = {shared: known(device_id).parent for shared, device_id in one_each.items()}
        for device_id in entries:
            shared = unshared(device_id)
            for name in {device_id, shared, parents[shared]} & meant.keys():
                meant[name].append(device_id)
    if unknown := [one for one, found in meant.items() if not found]:
        raise ControlError(f"no device here is called {unknown[0]!r}: `gateway devices` lists them")
    return tuple(dict.fromkeys(device_id for found in meant.values() for device_id in found))
