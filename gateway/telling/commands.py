"""What people ask of a running gateway, over its control socket: its status, and orders about one device.

An order is in force, and on disk, before it is answered.
"""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import structlog
from msgspec.structs import replace

from devices.life.states import AWAY, State
from devices.replicas import unshared
from gateway.configuration import effective
from gateway.memory.claimed import holding
from gateway.memory.rows import Cordon
from gateway.registration.devicelist import AT_ONCE
from gateway.registration.registrar import SERVED
from gateway.telling import orders
from gateway.telling.orders import FoundDevice, Handled, Order, OrderOutcome
from gateway.wires.control import ControlError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from devices.life.states import Entry
    from devices.source import Facts
    from gateway.registration.registrar import Resource
    from gateway.telling import status
    from gateway.telling.served import Verdict
    from gateway.telling.subject import Subject
    from gateway.wires.control import ControlConnection, Handler

    Listed = tuple[str, Mapping[str, Entry], Callable[[str], Facts]]

FRESH = 1.0
"""Seconds for which the last look into the kubelet's records is good enough for a person."""

_MOST_TOLD = 16
"""How many devices one line of the log names."""
_log = structlog.get_logger()
_Made = TypeVar("_Made")

_HERE = frozenset({State.PRESENT, State.RELEASED, State.WITHHELD})
_OVER = AWAY | {State.CORDONED}


class Commands:
    """Answers for one gateway."""

    def __init__(self, gateway: Subject) -> None:
        self._gateway = gateway
        self._build: status.Build | None = None
        self._turn = asyncio.Lock()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Who meets which op."""
        return {
            "status": self._status,
            "devices": self._devices,
            "move": self._move,
            **dict.fromkeys(orders.ORDERS, self._order),
            **dict.fromkeys(orders.HANDLES, self._handle),
        }

    @property
    def handlers_while_waiting(self) -> Mapping[str, Handler]:
        """Who meets which op before there is a list."""
        return {"status": self._status, "cordon": self._order, "uncordon": self._order}

    def taken(self, few: bool) -> Callable[[], status.GatewayStatus]:  # noqa: FBT001 - the metrics' signature
        """Take what is known now; what is given puts the document of it together, and may do so in a thread.

        ``few``: with a row for at most so many devices of a resource (``status.FEW``), else for each.
        """
        from gateway.telling import served, sides, status  # noqa: PLC0415 - only a gateway that is asked pays for it

        gateway, now = self._gateway, time.monotonic()
        leader = gateway.lead.led_by
        self._build = self._build or status.build()
        last, since, config, drivers = (
            gateway.holdings.beliefs.last,
            gateway.holdings.presence.since,
            gateway.config,
            gateway.drivers(),
        )
        path, policy = str(config.path or gateway.settings.config_file or ""), config.policy or gateway.settings.policy
        judged = served.verdicts(gateway, now)
        facts = [(self._resource(one, judged[one.name]), self._strangers(one)) for one in gateway.resources.values()]
        known = status.GatewayStatus(
            build=self._build,
            pid=os.getpid(),
            token=gateway.instance.token,
            host_service=gateway.settings.host_service,
            uptime_s=status.age(gateway.started, now),
            socket_dir=str(gateway.settings.socket_dir),
            led_by="" if leader is None else leader.token,
            led_by_host_service=leader is not None and leader.host_service,
            waits_for=gateway.lead.waits_for,
            kubelet=status.KubeletStatus(present=since is not None, age_s=status.age_or_none(since, now)),
            books=status.RecordsStatus(source=last.view.source, age_s=status.age(last.at, now))
            if last
            else status.RecordsStatus(),
            ledger=gateway.holdings.scribe.state,
            lag_s=round(gateway.tally.lag(now), 6),
            hindrances=tuple(gateway.hindrances()),
            unusable=gateway.source.unusable(),
            warnings=effective.idle(policy, gateway.source) if gateway.lead.begun else (),
            configuration=status.configuration(path, config, now),
            list_strategies=tuple(sorted(one.value for one in policy.list_strategies)),
            crossing="" if drivers is None else drivers.trouble,
            by_name=sides.ByNameStatus() if drivers is None else drivers.by_name,
            drivers=() if drivers is None else tuple(drivers.standings()),
            sides=() if drivers is None else sides.sides(drivers.stands(), now),
        )

        def together() -> status.GatewayStatus:
            found = (replace(one, strangers=strangers()) for one, strangers in facts)
            told = tuple(status.resource(one, gateway.tally, now, few=few) for one in found)
            return replace(known, resources=told)

        return together

    async def _apart(self, take: Callable[[], Any], make: Callable[[Any], _Made]) -> _Made:
        """Take something, and make something of it: of many devices in a thread, for one who asks at a time. Calls are answered meanwhile."""
        async with self._turn:
            taken = take()
            many = sum(len(resource.entries) for resource in self._gateway.resources.values()) > AT_ONCE
            return await asyncio.to_thread(make, taken) if many else make(taken)

    def _resource(self, resource: Resource, verdict: Verdict) -> status.ResourceFacts:
        from gateway.telling import status  # noqa: PLC0415 - as above

        name = resource.name
        return status.ResourceFacts(
            name=name,
            state=resource.state,
            entries=resource.entries,
            level=resource.plugin.level,
            stream_since=resource.stream_since,
            trouble=resource.trouble,
            verdict=verdict,
            checked=resource.checked,
            holders=self._holders(name),
            drift=self._gateway.holdings.beliefs.findings(name),
            others=self._others(resource),
            behind=self._gateway.source.behind(name),
        )

    def _others(self, resource: Resource) -> frozenset[str]:
        """Return the devices that the kubelet would give though no gateway serves the resource: they are another plugin's."""
        last = self._gateway.holdings.beliefs.last
        if last is None or resource.state.phase in SERVED or last.at < resource.since:
            return frozenset()
        return (last.view.allocatable or {}).get(resource.name, frozenset())

    def _strangers(self, resource: Resource) -> Callable[[], dict[str, str]]:
        drivers, known, entries = self._gateway.drivers(), self._gateway.source.facts(resource.name), resource.entries
        if drivers is None:
            return dict
        return lambda: {one: words for one in entries if (words := drivers.stranger(one, known(one)))}

    def _holders(self, resource: str) -> dict[str, str] | None:
        """Say who has which device, by the kubelet's records and by what is prepared for ResourceClaims."""
        holders, prepared = (
            self._gateway.holdings.recorded(resource),
            holding(self._gateway.holdings.ledger.claims, resource),
        )
        return holders if not prepared else {**(holders or {}), **prepared}

    async def _status(self, connection: ControlConnection, request: dict[str, Any]) -> None:
        await self._look()
        taken = partial(self.taken, request.get("few") is True)
        await connection.send(await self._apart(taken, _told))

    async def _look(self) -> None:
        """See that the kubelet's records were read just now."""
        last = self._gateway.holdings.beliefs.last
        if last is None or time.monotonic() - last.at > FRESH:
            await self._gateway.holdings.beliefs.look()

    async def _devices(self, connection: ControlConnection, _request: dict[str, Any]) -> None:
        """Say the status, and what is known of each device; of replicas once, by the ID of what they share."""
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
        await self._gateway.holdings.beliefs.look()  # Who was given one a moment ago holds it.
        names = list(self._gateway.resources)
        concerned, known = dict.fromkeys(handled), [self._gateway.holdings.beliefs.holders(name) for name in names]
        _log.info("order", op=request["op"], devices=[*concerned][:_MOST_TOLD], count=len(concerned))
        told = (one for name in names for one in (self._holders(name) or {}).items())
        holders = {device_id: who for device_id, who in told if device_id in concerned}
        answer = Handled(tuple(concerned), None if None in known else holders)
        await connection.send(msgspec.to_builtins(answer))

    async def _meant(self, ids: Sequence[str]) -> tuple[str, ...]:
        """Return the devices that are meant, as ``_meant`` does, by the lists that are in force when it returns."""
        before, found = None, tuple[str, ...]()
        while ids and before != (before := [one.entries.keys() for one in self._gateway.resources.values()]):
            found = await self._apart(self._listed, partial(_meant, ids))
        return found

    async def _order(self, connection: ControlConnection, request: dict[str, Any]) -> None:
        order = orders.order(request)
        if order.op == "forget":
            await self._gateway.holdings.beliefs.look()  # Who was given one a moment ago holds it.
        before = {resource.name: resource.entries.get(order.device_id) for resource in self._gateway.resources.values()}
        found = [(name, entry) for name, entry in before.items() if entry is not None]
        cordoned = order.device_id in self._gateway.holdings.ledger.cordons
        resources = [name for name, _ in found]
        if order.op == "forget":
            resources += [
                name for name in before if name not in resources and self._is_forgotten(order.device_id, name)
            ]
        if not resources and not (cordoned and order.op == "uncordon") and not self._gateway.lead.waits_for:
            raise ControlError(f"no device here is called {order.device_id!r}: `gateway devices` lists them")
        async with self._gateway.lock:  # What is put together now would bring back what is to be forgotten.
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
            await self._gateway.holdings.beliefs.look()  # As above: the operator is told who holds it.
        now = {resource.name: resource.entries.get(order.device_id) for resource in self._gateway.resources.values()}
        outcome = OrderOutcome(
            changed,
            tuple(
                FoundDevice(
                    name,
                    entry.state.value,
                    one.state.value if (one := now.get(name)) is not None else "forgotten",
                    (self._holders(name) or {}).get(order.device_id),
                )
                for name, entry in found
            ),
        )
        await connection.send(msgspec.to_builtins(outcome))

    def _carry_out(self, order: Order, resources: list[str]) -> bool:
        """Do what an order says; True where that changed anything."""
        ledger = self._gateway.holdings.ledger
        match order.op:
            case "cordon":
                cordon = ledger.cordons.get(order.device_id)
                if cordon is not None and cordon.reason == order.reason:
                    return False
                ledger.cordon(order.device_id, Cordon(order.reason, time.time()))
                return True
            case "uncordon":
                return ledger.uncordon(order.device_id)
            case _:
                # It may be offered under one name, and be remembered under another.
                concerned = [one for one in resources if not self._is_just_here(order.device_id, one)] or resources
                return bool([resource for resource in concerned if self._forget(order.device_id, resource)])

    def _forget(self, device_id: str, resource: str) -> bool:
        """Forget what is remembered of a device: its illness, its place on the list if it is gone, whom the kubelet forgot.

        Raises:
            ControlError: it is on the list because it is there, or because a container holds it.
        """
        gateway = self._gateway
        one = gateway.resources[resource]
        state = _state(one.entries.get(device_id))
        if state is not None and self._is_just_here(device_id, resource):
            raise ControlError(f"{device_id} of {resource} is {state.value}: there is nothing to forget of it")
        sticky = dict(gateway.holdings.ledger.sticky(resource))
        ill, forgotten = sticky.pop(device_id, None) is not None, self._is_forgotten(device_id, resource)
        holder = (self._holders(resource) or {}).get(device_id)
        gone = state in {State.LOST, State.WITHDRAWN, State.NOT_LOOKED_YET}
        if gone and holder is not None:
            if forgotten:  # Somebody had it before, and is gone: whoever has it now stays.
                gateway.holdings.beliefs.forget(device_id)
                return True
            raise ControlError(f"{device_id} of {resource} is held by {holder}: end that pod first")
        gateway.holdings.beliefs.forget(device_id)
        one.plugin.list.forget(device_id)
        gateway.holdings.ledger.set_sticky(resource, sticky)
        return (gone and gateway.holdings.ledger.withdraw(resource, [device_id])) or ill or forgotten

    def _is_just_here(self, device_id: str, resource: str) -> bool:
        """Whether a device is on the list because it is there, and nothing of it is remembered that could be forgotten."""
        entries = self._gateway.resources[resource].entries
        remembered = device_id in self._gateway.holdings.ledger.sticky(resource) or self._is_forgotten(
            device_id, resource
        )
        return not remembered and _state(entries.get(device_id)) in _HERE

    def _is_forgotten(self, device_id: str, resource: str) -> bool:
        return device_id in self._gateway.holdings.beliefs.earlier(resource)


def _told(taken: Callable[[], status.GatewayStatus]) -> dict[str, Any]:
    return {"status": _spelled(taken())}


def _facts(listed: Sequence[Listed]) -> dict[str, msgspec.Raw]:
    """Spell what is known of each device, one by one: while all were spelled at once, no other thread would run."""
    told = {}
    for name, entries, known in listed:
        one_each = {unshared(device_id): device_id for device_id in entries}
        told[name] = _spelled({shared: _spelled(known(device_id)) for shared, device_id in one_each.items()})
    return told


def _spelled(told: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(told))


def _meant(ids: Sequence[str], listed: Sequence[Listed]) -> tuple[str, ...]:
    """Return the devices that are meant: named themselves, by what they are replicas of, or by the GPU they are part of.

    Raises:
        ControlError: an ID means none.
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


def _state(entry: Entry | None) -> State | None:
    """Return a device's state, or the one that a cordon or another API covers; None where it isn't on the list."""
    return None if entry is None else next((one.state for one in entry.layers if one.state not in _OVER), entry.state)
