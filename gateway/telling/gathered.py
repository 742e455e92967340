"""Gather the facts about a gateway at one moment, for its status. Imported when the status is first asked for."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gateway.configuration import effective
from gateway.memory.claimed import claim_holders
from gateway.registration.registrar import SERVED
from gateway.telling import served, sides, status

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.registration.registrar import Resource
    from gateway.telling.served import Verdict
    from gateway.telling.subject import Subject


def taken(gateway: Subject, build: status.Build, *, few: bool) -> Callable[[], status.GatewayStatus]:
    """Gather the facts now. Return a function that makes the status document from them; it may run in a thread.

    With ``few``, the document has rows for at most ``status.FEW`` devices per resource, otherwise for each device.
    """
    now, leader = time.monotonic(), gateway.lead.led_by
    last, since, config, drivers = (
        gateway.holdings.reader.last,
        gateway.holdings.presence.since,
        gateway.config,
        gateway.drivers(),
    )
    path, policy = str(config.path or gateway.settings.config_file or ""), config.policy or gateway.settings.policy
    judged = served.verdicts(gateway, now)
    facts = [
        (_resource(gateway, one, judged[one.name]), _strangers(gateway, one)) for one in gateway.resources.values()
    ]
    known = status.GatewayStatus(
        build=build,
        pid=os.getpid(),
        token=gateway.instance.token,
        host_service=gateway.settings.host_service,
        uptime_s=status.age(gateway.started, now),
        socket_dir=str(gateway.settings.socket_dir),
        led_by="" if leader is None else leader.token,
        led_by_host_service=leader is not None and leader.host_service,
        waits_for=gateway.lead.waits_for,
        kubelet=status.KubeletStatus(present=since is not None, age_s=status.age_or_none(since, now)),
        books=status.RecordsStatus(source=last.records.source, age_s=status.age(last.at, now))
        if last
        else status.RecordsStatus(),
        ledger=gateway.holdings.scribe.state,
        lag_s=round(gateway.tally.lag(now), 6),
        hindrances=tuple(gateway.hindrances()),
        unusable=gateway.source.unusable(),
        warnings=effective.settings_without_effect(policy, gateway.source) if gateway.lead.begun else (),
        configuration=status.configuration(path, config, now),
        list_strategies=tuple(sorted(one.value for one in policy.list_strategies)),
        crossing="" if drivers is None else drivers.trouble,
        by_name=sides.ByNameStatus() if drivers is None else drivers.by_name,
        drivers=() if drivers is None else tuple(drivers.standings()),
        sides=() if drivers is None else sides.sides(drivers.board_statuses(), now),
    )

    def together() -> status.GatewayStatus:
        found = (replace(one, strangers=strangers()) for one, strangers in facts)
        told = tuple(status.resource(one, gateway.tally, now, few=few) for one in found)
        return replace(known, resources=told)

    return together


def _resource(gateway: Subject, resource: Resource, verdict: Verdict) -> status.ResourceFacts:
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
        holders=gateway.holdings.named(name),
        claimed=claim_holders(gateway.holdings.ledger.claims, name).keys(),
        drift=gateway.holdings.reader.findings(name),
        others=_others(gateway, resource),
        behind=gateway.source.behind(name),
    )


def _others(gateway: Subject, resource: Resource) -> frozenset[str]:
    """Return the devices that the kubelet would give although no gateway serves the resource, because another plugin does."""
    last = gateway.holdings.reader.last
    if last is None or resource.state.phase in SERVED or last.at < resource.since:
        return frozenset()
    return (last.records.allocatable or {}).get(resource.name, frozenset())


def _strangers(gateway: Subject, resource: Resource) -> Callable[[], dict[str, str]]:
    drivers, known, entries = gateway.drivers(), gateway.source.facts(resource.name), resource.entries
    if drivers is None:
        return dict
    return lambda: {one: words for one in entries if (words := drivers.stranger(one, known(one)))}
