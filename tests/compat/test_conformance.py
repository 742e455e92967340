"""The conformance test tells each bad plugin by name what it breaks, and the gateway that it keeps everything."""

from __future__ import annotations

import asyncio
import sys

import pytest

from gateway_lab.kubelets.build import built
from gateway_lab.trials.conformance import RULES, Findings, examine, to_text

GATEWAY = (
    f"{sys.executable} -m gateway --backend simulated --log-format json "
    "--socket-dir {socket_dir} --state-dir {state_dir}"
)
CORDON = f"{sys.executable} -m gateway cordon 0 --reason rule --state-dir {{state_dir}}"
OWN_FAULTS = {
    "registers_once": "registers-again",
    "loses_ids": "ids-stable",
    "allocates_anything": "unknown-device",
    "prefers_others": "preferred-allocation",
    "lists_once": "list-on-second-call",
    "deaf_later": "updates-after-reconnect",
}
CHANGE = "touch {state_dir}/ill"
CAP_SECONDS = 10
"""A busy machine is not a broken promise."""


async def _examine(plugin: str, *, only: frozenset[str]) -> Findings:
    command = f"{sys.executable} -m tests.compat.plugins.{plugin} {{socket_dir}} {{state_dir}}"
    rules = [rule for rule in RULES if rule.id in only]
    return await examine(command, versions=["1.28"], cap_seconds=CAP_SECONDS, change=CHANGE, rules=rules)


async def test_each_bad_plugin_breaks_its_own_rule_alone() -> None:
    targets = frozenset(OWN_FAULTS.values())
    found = await asyncio.gather(*(_examine(plugin, only=targets) for plugin in OWN_FAULTS))
    assert {plugin: one.broken for plugin, one in zip(OWN_FAULTS, found, strict=True)} == {
        plugin: (rule,) for plugin, rule in OWN_FAULTS.items()
    }
    assert all(one.watched == "it stays in its process" for one in found)


async def test_a_plugin_that_ends_itself_is_started_again_and_that_is_told() -> None:
    found = await _examine("ends_itself", only=frozenset({"registers-again"}))
    assert found.passed, to_text(found)
    assert found.watched.startswith("it exits and is started again")
    assert found.watched.endswith("registers-again)")


async def test_a_plugin_that_registers_once_is_not_found_by_a_socket_that_is_renamed_into_place() -> None:
    found = await _examine("registers_once", only=frozenset({"sock-recreated-without-remove"}))
    assert found.broken == ("sock-recreated-without-remove",)


async def test_a_plugin_that_waits_to_be_found() -> None:
    rule = frozenset({"registry-mode"})
    good, bad, other = await asyncio.gather(
        *(_examine(plugin, only=rule) for plugin in ("found", "misfound", "keeps_all"))
    )
    assert (good.passed, good.findings[0].verdict) == (True, "kept"), to_text(good)
    assert bad.broken == ("registry-mode",)
    assert "the plugin speaks 'v1'" in bad.findings[0].seen
    assert other.findings[0].verdict == "not applicable"
    assert "registers on kubelet.sock" in other.findings[0].seen


async def test_what_must_change_is_asked_for() -> None:
    command = f"{sys.executable} -m tests.compat.plugins.keeps_all {{socket_dir}}"
    rules = [rule for rule in RULES if rule.changes]
    found = await examine(command, versions=["1.28"], cap_seconds=CAP_SECONDS, rules=rules)
    assert [(one.verdict, "--change" in one.seen) for one in found.findings] == [("not applicable", True)]


async def test_a_plugin_that_dies_of_a_device_that_it_does_not_know_is_told_of() -> None:
    """As ROCm's does."""
    found = await _examine("dies_of_a_stranger", only=frozenset({"preferred-allocation"}))
    assert found.broken == ("preferred-allocation",)
    assert "a-device-that-was-never-announced" in found.findings[0].seen


async def test_who_keeps_these_rules_is_told_so() -> None:
    found = await _examine("keeps_all", only=frozenset(OWN_FAULTS.values()))
    assert [one for one in found.findings if one.verdict != "kept"] == [], to_text(found)
    assert found.watched == "it stays in its process"


@pytest.mark.genuine
async def test_the_gateway_keeps_every_rule() -> None:
    """On a genuine kubelet, and on an emulated one where the kubelet must misbehave."""
    assert built("1.37") is not None, "kubelets are not built: make kubelets"
    found = await examine(GATEWAY, versions=["1.37"], genuine=built, cap_seconds=CAP_SECONDS, change=CORDON)
    assert [one.rule for one in found.findings if one.verdict != "kept"] == ["registry-mode"], to_text(found)
    assert found.passed, to_text(found)
    assert len(found.findings) == len(RULES)
    assert {one.kind for one in found.findings} == {"emulated", "genuine"}
