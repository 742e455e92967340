"""``gateway devices``: real control sockets, what a person sees of a node's devices, what a script gets, what is let go of."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

from devices.life import states
from devices.life.states import State
from devices.model import Device, Health, TroubleKind
from devices.source import Facts
from gateway.cli import asking, devicemap
from gateway.cli import devices as cli
from gateway.cli.main import gateway
from gateway.registration.events import Phase
from gateway.telling.orders import Handled
from gateway.telling.status import GatewayStatus, ResourceFacts
from gateway.wires import control
from gateway.wires.control import ControlError
from tests.unit.answering import gateways
from tests.unit.documents import RESOURCE, SERVING, WAITING, document, state

PAGE = Path(__file__).parents[2] / "docs" / "devices.md"
MIG, FPGA = "nvidia.com/mig-1g.10gb", "example.com/fpga"
A100, H100 = "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3"
GPUS = [f"GPU-{number}f3a{number}c6e-77b0-4b1e-9d4a-0c5b8e21d9f{number}" for number in range(4)]
PARTS = [f"MIG-{number}a41d2b7-0d5c-5a0e-8b7e-3f0f6d1c2e4{number}" for number in range(2)]
KEYS = [
    *("gateway", "resource", "id", "health", "state", "kind", "reason", "numa", "holder", "drift", "stranger"),
    *("product", "index", "pci", "parent", "profile", "links", "nodes", "minor", "driver", "memory", "traits"),
    *("capacities", "slot"),
]

Says = dict[str, Any] | Handled | ControlError
Rows = Mapping[str, tuple[State, str, TroubleKind | None, int | None]]


def plugin(name: str, rows: Rows, holders: Mapping[str, str] | None = None) -> ResourceFacts:
    entries = {
        device_id: states.Entry(
            Device(
                device_id,
                Health.HEALTHY if where is State.PRESENT else Health.UNHEALTHY,
                () if numa is None else (numa,),
            ),
            where,
            reason,
            kind=kind,
        )
        for device_id, (where, reason, kind, numa) in rows.items()
    }
    return ResourceFacts(name=name, state=state(Phase.SERVING), entries=entries, holders=holders, level=None)


def well(*device_ids: str, numa: int | None = None) -> Rows:
    return dict.fromkeys(device_ids, (State.PRESENT, "", None, numa))


def answer(status: GatewayStatus, facts: Mapping[str, Mapping[str, Facts]] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins({"status": status, "facts": facts or {}})
    return found


WHOLE = plugin(
    RESOURCE,
    {
        **well(*GPUS[:2], numa=0),
        GPUS[2]: (State.UNHEALTHY, "Xid 79: GPU has fallen off the bus", TroubleKind.RESET_REQUIRED, 1),
    },
    {GPUS[0]: "default/training-0/main"},
)
SPLIT = plugin(MIG, well(*PARTS, numa=1), {PARTS[1]: "jupyter/notebook-7/kernel"})
SHARED = plugin(
    FPGA,
    well(*(f"/dev/fpga{card}::{number}" for card in range(2) for number in range(4))),
    {"/dev/fpga0::1": "a/b/c", "/dev/fpga0::3": "a/d/e"},
)
FACTS = {
    RESOURCE: {
        device_id: Facts(
            product=A100,
            index=str(index),
            pci=f"0000:0{index}:00.0",
            links={str(peer): "nvlink x12" if {peer, index} != {0, 2} else "sys" for peer in range(4) if peer != index},
            nodes=(f"/dev/nvidia{index}",),
        )
        for index, device_id in enumerate(GPUS[:3])
    },
    MIG: {
        device_id: Facts(product=A100, index=f"3:{index}", parent=GPUS[3], profile="1g.10gb")
        for index, device_id in enumerate(PARTS)
    },
    FPGA: {f"/dev/fpga{card}": Facts(nodes=(f"/dev/fpga{card}",)) for card in range(2)},
}
FULL = answer(document(WHOLE, SPLIT, SHARED), FACTS)


OPERATIONS = ("devices", "release", "acquire")


def call(folder: Path, *arguments: str, color: bool = False) -> Result:
    words = arguments if arguments[:1] in {("release",), ("acquire",)} else ("devices", *arguments)
    return CliRunner().invoke(gateway, words, env={"GATEWAY_STATE_DIR": str(folder)}, color=color)


def rows(*answers: dict[str, Any]) -> list[devicemap.Row]:
    return cli.rows([msgspec.convert(one, cli.NodeDevices) for one in answers])


def seen(*answers: dict[str, Any], unfolded: bool = False) -> str:
    return click.unstyle("\n".join(cli.render(rows(*answers), unfolded=unfolded)))


# What a person sees.


def test_a_map_has_gpus_by_numa_node_with_holders_and_links() -> None:
    lines = click.unstyle("\n".join(devicemap.render(rows(FULL), 80))).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "NUMA node 0",
        "0 GPU-0f3a0c6e ■ default/training-0/main",
        "1 GPU-1f3a1c6e □ free",
        "",
        "NUMA node 1",
        "2 GPU-2f3a2c6e ✕ unhealthy",
        "3 GPU-3f3a3c6e □■ jupyter/notebook-7/kernel",
        "",
        "NUMA node not known",
        "- /dev/fpga0 □■□■ a/b/c, a/d/e",
        "- /dev/fpga1 □□□□ free",
        "",
        "LINKS 0 1 2",
        "0 - NV12 SYS",
        "1 NV12 - NV12",
        "2 SYS NV12 -",
    ]


def test_a_map_keeps_to_the_width() -> None:
    assert [line for line in devicemap.render(rows(FULL), 40) if len(click.unstyle(line)) > 40] == []


def test_a_map_is_for_people(tmp_path: Path) -> None:
    result = call(tmp_path, "--map", "-o", "json")
    assert (result.exit_code, "Leave out --map, or -o json" in result.output) == (2, True)


def test_the_page_shows_what_it_looks_like() -> None:
    """If not: put what this test calls ``seen`` there."""
    assert f"```text\n{seen(FULL)}\n```" in PAGE.read_text()


def test_replicas_one_by_one() -> None:
    text = seen(answer(document(SHARED), FACTS), unfolded=True)
    assert re.findall(r"^  (/dev/fpga0\S+) +healthy +(\S+)$", text, re.MULTILINE) == [
        ("/dev/fpga0::0", "-"),
        ("/dev/fpga0::1", "a/b/c"),
        ("/dev/fpga0::2", "-"),
        ("/dev/fpga0::3", "a/d/e"),
    ]


RARER = {
    "replicas in different states": (
        plugin("a.b/c", {**well("x::0"), "x::1": (State.LOST, "gone", None, None)}, {}),
        {},
        ["a.b/c 1 healthy, 1 lost, 0 held", "DEVICE STATE HELD BY", "x \u00d72 1 healthy, 1 lost -", "gone"],
    ),
    "a few of many reasons": (
        plugin("a.b/c", {f"x::{number}": (State.LOST, f"reason {number}", None, None) for number in range(5)}, {}),
        {},
        [
            "5 lost",
            "DEVICE",
            "x \u00d75 lost -",
            "reason 0",
            "reason 1",
            "reason 2",
            "and 2 more: -o wide shows each",
        ],
    ),
    "nobody knows who holds them": (
        plugin("a.b/c", well("x", "y")),
        {},
        ["who holds them can't be seen", "DEVICE STATE HELD BY", "x healthy ?", "y healthy ?"],
    ),
    "different products": (
        plugin("a.b/c", well("x", "y"), {}),
        {"x": Facts(product=A100), "y": Facts(product=H100)},
        ["a.b/c 2 healthy, 0 held", "DEVICE KIND STATE HELD BY", f"x {A100} healthy -", f"y {H100} healthy -"],
    ),
    "a part under a GPU of the same resource": (
        plugin("a.b/c", well("p", "x"), {}),
        {"p": Facts(parent="x", profile="half")},
        ["2 healthy", "DEVICE KIND STATE HELD BY", "x - healthy -", "p half healthy -"],
    ),
    "a resource without devices": (plugin("a.b/c", {}, {}), {}, []),
}


@pytest.mark.parametrize(("one", "facts", "expected"), RARER.values(), ids=RARER)
def test_rarer_things(one: ResourceFacts, facts: dict[str, Facts], expected: list[str]) -> None:
    lines = [" ".join(line.split()) for line in seen(answer(document(one), {"a.b/c": facts})).splitlines() if line]
    assert len(lines) == len(expected)
    assert [wanted for line, wanted in zip(lines, expected, strict=True) if wanted not in line] == []


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param({}, "", id="none"),
        pytest.param({str(peer): "nvlink x18" for peer in range(1, 8)}, "nvlink x18: 1-7", id="all alike"),
        pytest.param({"3": "sys", "1": "pix", "2": "sys", "7": "sys"}, "sys: 2-3 7, pix: 1", id="by way"),
        pytest.param({"0:1": "xgmi", "2": "xgmi"}, "xgmi: 2 0:1", id="what is no number"),
    ],
)
def test_links(found: Mapping[str, str], expected: str) -> None:
    assert cli.links(found) == expected


def test_replicas_are_folded_into_one_line() -> None:
    one = plugin(RESOURCE, well(*(f"GPU-{number // 100}::{number % 100}" for number in range(10_000))), {})
    many = answer(document(one))
    assert len(seen(many).splitlines()) == 100 + 3
    assert len(seen(many, unfolded=True).splitlines()) == 10_000 + 3


def test_colours_are_for_terminals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with gateways(folder, {SERVING: FULL}, *OPERATIONS):
        plain, coloured = call(folder), call(folder, color=True)
    assert "\x1b" not in plain.output
    assert "\x1b[31munhealthy" in coloured.output
    assert click.unstyle(coloured.output) == plain.output


@pytest.mark.parametrize(
    "place", ["device", "holder", "reason", "product", "index", "profile", "parent", "link", "name"]
)
def test_what_others_wrote_does_not_steer_the_terminal(place: str) -> None:
    evil = "a\x1b[2Jb\rc\u202ed"

    def text(where: str) -> str:
        return evil if where == place else where

    device = text("device")
    one = plugin(text("name"), {device: (State.LOST, text("reason"), None, None)}, {device: text("holder")})
    facts = Facts(text("product"), text("index"), "", text("parent"), text("profile"), {"1": text("link")})
    shown = "\n".join(cli.render(rows(answer(document(one), {text("name"): {device: facts}}))))
    assert "[2Jb" in shown
    assert "\x1b[2J" not in shown
    assert "\r" not in shown
    assert "\u202e" not in shown


# Asking.


def test_the_page_names_the_keys() -> None:
    part = PAGE.read_text().partition("## gateway devices --json")[2]
    assert set(KEYS) <= set(re.findall(r"`(\w+)`", part))


@pytest.mark.parametrize(
    ("says", "arguments", "words"),
    [
        pytest.param({}, [], "name that folder with --state-dir", id="nobody to ask"),
        pytest.param({}, ["release", "GPU-1"], "name that folder with --state-dir", id="nobody to tell"),
        pytest.param({SERVING: FULL}, ["GPU-7"], "is called 'GPU-7': see `gateway devices`", id="an unknown name"),
        pytest.param({SERVING: ControlError("busy")}, [], f"gateway {SERVING} does not answer: busy", id="an error"),
        pytest.param({SERVING: {"status": 1}}, [], "it is of another release", id="something else"),
        pytest.param(
            {SERVING: ControlError("busy")}, ["acquire", "0"], f"gateway {SERVING}: busy", id="an order fails"
        ),
        pytest.param({SERVING: {"x": 1}}, ["release", "0"], f"gateway {SERVING}: ", id="an order's answer is none"),
    ],
)
def test_no_success(folder: Path, says: Mapping[str, Says], arguments: list[str], words: str) -> None:
    with gateways(folder, says, *OPERATIONS):
        result, raw = call(folder, *arguments), call(folder, *arguments, "-o", "json")
    assert (result.exit_code, raw.exit_code) == (1, 1)
    assert words in result.stderr


@pytest.mark.parametrize("first", [0, 1], ids=["the one that waits comes first", "and last"])
def test_who_serves_a_resource_tells_of_it(first: int) -> None:
    waiting = answer(document(plugin(RESOURCE, well("GPU-old"), {}), token=WAITING, led_by=SERVING))
    both = [waiting, FULL] if first == 0 else [FULL, waiting]
    assert {row.gateway for row in rows(*both)} == {SERVING}


def test_of_few_remarks_all_are_shown_and_of_many_some() -> None:
    def of(count: int) -> str:
        sick = {f"/dev/x::{number}": (State.UNHEALTHY, f"broken {number}", None, None) for number in range(count)}
        return seen(answer(document(plugin(FPGA, sick))))

    assert ("broken 2" in of(3), "more: -o wide" in of(3)) == (True, False)
    assert ("broken 3" in of(4), "and 1 more: -o wide shows each" in of(4)) == (False, True)


def test_one_gateway_of_two_is_enough_to_see(folder: Path) -> None:
    with gateways(folder, {SERVING: FULL, WAITING: ControlError("unknown op 'devices'")}, *OPERATIONS):
        result, raw = call(folder), call(folder, "--json")
    assert (result.exit_code, result.stdout) == (0, f"{seen(FULL)}\n")
    assert result.stderr == f"gateway {WAITING} does not answer: unknown op 'devices'\n"
    assert json.loads(raw.stdout)["silent"] == {str(control.socket_path(folder, WAITING)): "unknown op 'devices'"}


# Letting go of hardware.


def test_an_index_is_no_beginning_of_an_id() -> None:
    assert asking.resolve_device("0", {"0000:c1:00.0": "1", "0000:c2:00.0": "0"}) == "0000:c2:00.0"


def test_of_many_candidates_some_are_named() -> None:
    with pytest.raises(ControlError, match=r"short for 10 devices: g0, g1, g2, g3, g4, g5, g6, g7 and 2 more\."):
        asking.resolve_device("g", {f"g{number}": "" for number in range(10)})
