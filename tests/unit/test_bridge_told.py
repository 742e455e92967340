"""What is told of bridged plugins: the chain from the plugin to the kubelet, its absences, and metrics of both."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from msgspec.structs import replace

from devices.policy import Bridging
from devices.source import Behind
from gateway.cli import status as cli
from gateway.telling.metrics import Metrics
from tests.unit.bridging import NIC, bridged, plugin
from tests.unit.documents import TROUBLED, counted, document

LIVE = Behind(NIC, "nic.sock", "device-plugins", "v1alpha2", "live", 60, registrations=1)
AWAY = replace(LIVE, state="shielded", state_s=5, reason="it ended its stream", absences=2, repeated=3)


@pytest.mark.parametrize(
    ("behind", "name", "words"),
    [
        (LIVE, NIC, "device-plugins/nic.sock -v1alpha2-> gateway -v1beta1-> kubelet; live"),
        (LIVE, "vendor.example/old", "nic.sock (vendor.example/nic) -v1alpha2->"),
        (replace(AWAY, absences=1), NIC, "it ended its stream, went 1 time "),
        (AWAY, NIC, "shielded, away for 5 s: it ended its stream, went 2 times"),
    ],
)
def test_a_person_reads_the_chain(behind: Behind, name: str, words: str) -> None:
    look = cli.Answers(read=[document(replace(TROUBLED, name=name, behind=behind))], silent={})
    text = " ".join(click.unstyle("\n".join(cli.render(look, Path("/state"), 96))).split())
    assert words in text


@pytest.mark.parametrize(("behind", "up"), [(LIVE, 1), (AWAY, 0)])
def test_metrics(behind: Behind, up: int) -> None:
    told = Metrics(lambda _: lambda: document(replace(TROUBLED, name=NIC, behind=behind)), counted())
    told.take()
    lines = told.exposition().decode().splitlines()
    name = "device_plugin_gateway_bridged"
    assert f'{name}_plugin_up{{resource="{NIC}"}} {up}.0' in lines
    assert f'{name}_absences_total{{resource="{NIC}"}} {behind.absences}.0' in lines
    assert f'{name}_repeated_answers_total{{resource="{NIC}"}} {behind.repeated}.0' in lines


async def test_a_bridge_tells_of_its_plugins_under_the_names_that_the_kubelet_knows(folder: Path) -> None:
    bridging = Bridging(renames={NIC: "vendor.example/old"})
    async with bridged(folder, bridging=bridging) as bridge:
        async with plugin(folder, api="0.1"):
            await bridge.lists("a", "b", resource="vendor.example/old")
            live = bridge.bridge.behind("vendor.example/old")
            assert live is not None
            assert (live.resource, live.endpoint, live.api, live.state) == (NIC, "played.sock", "0.1", "live")
            assert await bridge.allocate("a", resource="vendor.example/old") is not None
            assert (bridge.bridge.behind(NIC), bridge.bridge.claims(NIC)) == (None, False)
        await bridge.until(lambda _: bridge.one().peer is None)
        away = bridge.bridge.behind("vendor.example/old")
        assert away is not None
        assert (away.state, away.absences, away.reason) == ("shielded", 1, "it ended its stream")
