"""What a person or a script does with the command line, on a node where real gateways run, or none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.contract.node import GPU, Gateway, Node

A, B, C = "GPU-a1", "GPU-b2", "GPU-b3"
PART = "nvidia.com/mig-1g.10gb"
KEYS = {
    *("gateway", "resource", "id", "health", "state", "kind", "reason", "numa", "holder", "drift", "stranger"),
    *("product", "index", "pci", "parent", "profile", "links", "nodes", "minor", "driver", "memory", "traits"),
    *("capacities", "slot", "cause", "by_claim"),
}


class Shell:
    """The command line on a node, with its state directory."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def __call__(self, command: str, *words: str, status: int = 0) -> str:
        """Run a command that ends with this status; return what it printed."""
        found, said = await self._node.command(command, "--state-dir", str(self._node.state), *words)
        assert found == status, said
        return said

    async def json(self, command: str, *words: str, status: int = 0) -> dict[str, Any]:
        """Run a command with ``--json``; return what it printed."""
        found: dict[str, Any] = json.loads(await self(command, *words, "--json", status=status))
        return found

    async def ids(self, *names: str) -> list[str]:
        """Return the IDs of the devices that these names mean."""
        return [row["id"] for row in (await self.json("devices", *names))["devices"]]


async def ready(node: Node, *options: str, **more: Any) -> tuple[Gateway, Shell]:
    """Start a kubelet and a gateway with three GPUs, two of which have names that begin alike."""
    links = [{"between": [0, 1], "by": "nvlink", "lanes": 4}]
    gpus = [{"uuid": A, "numa": 0}, {"uuid": B}, {"uuid": C}]
    node.simulate({GPU: {"gpus": gpus, "links": links, "product": "H100", **more}})
    await node.start_kubelet()
    one = node.gateway(*options)
    await node.until(lambda: node.allocatable() >= 2, "the GPUs")
    await node.pass_time(2)
    return one, Shell(node)


def lines(text: str) -> list[str]:
    """Return the lines of a table with single blanks between the words."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


# Devices.


async def test_a_person_reads_each_device_with_what_is_known_of_it(node: Node) -> None:
    one, shell = await ready(node)
    await one.order("cordon", id=B, reason="smells")
    (held,) = (await node.admit("pod")).devices[GPU]
    await node.pass_time(2)
    holder = {held: "default/pod/main"}
    assert lines(await shell("devices")) == [
        f"{GPU} H100 2 healthy, 1 cordoned, 1 held",
        "INDEX DEVICE STATE NUMA LINKS HELD BY",
        f"0 {A} healthy 0 nvlink x4: 1 {holder.get(A, '-')}",
        f"1 {B} cordoned - nvlink x4: 0 -",
        "smells",
        f"2 {C} healthy - - {holder.get(C, '-')}",
    ]


async def test_a_script_reads_each_device_with_every_key(node: Node) -> None:
    one, shell = await ready(node, "--mig-strategy=mixed", mig={0: ["1g.10gb", "1g.10gb"]})
    await node.allocatable_is(2, PART)
    (held,) = (await node.admit("pod", PART)).devices[PART]
    await node.pass_time(2)
    found = await shell.json("devices")
    assert set(found) == {"devices", "silent"}
    assert {tuple(sorted(row)) for row in found["devices"]} == {tuple(sorted(KEYS))}
    (row,) = [row for row in found["devices"] if row["id"] == held]
    assert (row["gateway"], row["resource"], row["holder"]) == ((await one.status())["token"], PART, "default/pod/main")
    assert (row["parent"], row["profile"], row["product"]) == (A, "1g.10gb", "H100")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], {"all"}),
        ([PART], {"parts"}),
        (["mig-1g.10gb"], {"parts"}),
        (["nvidia.com"], {"all"}),
        ([B], {B}),
        (["GPU-b"], {B, C}),
        ([A], {"parts"}),
        (["1"], {B}),
        (["0:0"], {"first"}),
        ([B, "2"], {B, C}),
    ],
)
async def test_devices_are_named_by_id_index_resource_or_gpu(node: Node, names: list[str], expected: set[str]) -> None:
    _, shell = await ready(node, "--mig-strategy=mixed", mig={0: ["1g.10gb", "1g.10gb"]})
    await node.allocatable_is(2, PART)
    await node.pass_time(2)
    parts = {row["index"]: row["id"] for row in (await shell.json("devices", PART))["devices"]}
    meant = {"all": [*parts.values(), B, C], "parts": [*parts.values()], "first": [parts["0:0"]]}
    assert sorted(await shell.ids(*names)) == sorted(one for name in expected for one in meant.get(name, [name]))


async def test_replicas_are_one_line_unless_each_is_wanted(node: Node) -> None:
    file = node.folder / "config.yaml"
    file.write_text("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 4}]}}")
    node.shared = (GPU,)
    _, shell = await ready(node, "--config-file", str(file))
    for number in range(6):
        await node.admit(f"pod-{number}")
    await node.pass_time(2)
    said = lines(await shell("devices"))
    assert sum("\u00d74 healthy" in line and "2 held" in line for line in said) == 3
    assert sum("healthy" in line for line in lines(await shell("devices", "-o", "wide"))) == 13
    assert len(await shell.ids(A)) == 4


async def test_the_one_that_serves_a_resource_tells_of_it_and_who_is_silent_is_named(node: Node) -> None:
    one, shell = await ready(node)
    two = node.gateway()
    await node.pass_time(10)
    tokens = {(await each.status())["resources"][0]["phase"]: (await each.status())["token"] for each in (one, two)}
    assert {row["gateway"] for row in (await shell.json("devices"))["devices"]} == {tokens["serving"]}
    shown = await shell("status")
    assert shown.index(f"gateway {tokens['serving']}") < shown.index(f"standby  gateway {tokens['serving']} leads")
    two.process.stop()
    assert "did not answer" in await shell("devices")
    assert len((await shell.json("devices"))["silent"]) == 1
    assert len((await shell.json("status"))["silent"]) == 1
    one.process.stop()
    assert "does not answer" in await shell("status", status=1)
    two.process.go_on()
    one.process.go_on()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("devices",), "name that folder with --state-dir"),
        (("release", A), "name that folder with --state-dir"),
        (("status",), "No gateway runs"),
        (("forget", A), "no gateway runs"),
    ],
)
async def test_where_no_gateway_runs_that_is_said(node: Node, words: tuple[str, ...], says: str) -> None:
    node.state.mkdir()
    assert says in await Shell(node)(*words, status=1)
    node.state.rmdir()
    node.state.write_text("")
    assert "Not a directory. Correct --state-dir." in await Shell(node)(*words, status=1)


# Hardware that is let go of.


async def test_released_hardware_is_named_with_what_to_do_and_who_still_holds_it(node: Node) -> None:
    _, shell = await ready(node)
    (held,) = (await node.admit("pod")).devices[GPU]
    free = next(one for one in (A, B, C) if one != held)
    await node.pass_time(2)
    said = lines(await shell("release", free))
    assert "are closed" in said[0]
    assert said[1] == free
    assert said[2].endswith(f"and then: gateway acquire {free}")
    assert f"warning: default/pod/main holds {held}: end that pod before you reset it" in await shell(
        "release", "--all"
    )
    await node.allocatable_is(0)
    assert lines(await shell("acquire", "--all"))[0] == "The GPUs of these devices are open again:"
    await node.allocatable_is(3)
    found = await shell.json("release", "1", A)
    assert (found["op"], found["ids"]) == ("release", [B, A])
    assert [sorted(each["devices"]) for each in found["gateways"].values()] == [[A, B]]


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["release"], 2, "No device to release. Name devices"),
        (["acquire"], 2, "No device to acquire. Name devices"),
        (["release", ""], 2, "is empty. Is a variable not set?"),
        (["release", A, ""], 2, "is empty"),
        (["release", "--all", A], 2, "Devices don't go with --all"),
        (["devices", ""], 2, "is empty"),
        (["release", "\x1b"], 2, "printable"),
        (["release", A, "GPU-b"], 1, f"'GPU-b' is short for 2 devices: {B}, {C}. Nothing was done"),
        (["release", "GPU-7"], 1, "GPU-7"),
        (["devices", "GPU-7"], 1, "is called 'GPU-7': see `gateway devices`"),
    ],
)
async def test_a_wrong_word_about_devices_does_nothing(node: Node, words: list[str], status: int, says: str) -> None:
    one, shell = await ready(node)
    assert says in await shell(*words, status=status)
    assert set((await one.states()).values()) == {"healthy"}


# Cordons.


async def test_what_a_cordon_did_is_told_to_a_person(node: Node) -> None:
    one, shell = await ready(node)
    token = (await one.status())["token"]
    (held,) = (await node.admit("pod")).devices[GPU]
    free = next(each for each in (A, B, C) if each != held)
    await node.pass_time(2)
    told = f"gateway {token}: {GPU}:"
    for words, status, said in (
        (("cordon", free, "--reason", "ECC"), 0, [f"{free} is cordoned: ECC", f"{told} was healthy, is cordoned"]),
        (
            ("cordon", free, "--reason", "ECC"),
            0,
            [f"{free} was cordoned already: ECC", f"{told} is cordoned, as before"],
        ),
        (
            ("cordon", held, "--reason", "ECC"),
            0,
            [
                f"{held} is cordoned: ECC",
                f"{told} was healthy, is cordoned, held by default/pod/main",
                "Who holds it keeps it; nobody else gets it.",
            ],
        ),
        (
            ("uncordon", held),
            0,
            [f"{held} is no longer cordoned", f"{told} was cordoned, is healthy, held by default/pod/main"],
        ),
        (
            ("uncordon", held),
            0,
            [f"{held} was not cordoned", f"{told} is healthy, as before, held by default/pod/main"],
        ),
        (("uncordon", free), 0, [f"{free} is no longer cordoned", f"{told} was cordoned, is healthy"]),
    ):
        assert lines(await shell(*words, status=status)) == said
    node.simulate({GPU: {"gpus": [{"uuid": each} for each in (A, B, C) if each != free]}})
    await node.allocatable_is(2)
    assert lines(await shell("forget", free)) == [
        f"what was remembered of {free} is forgotten",
        f"{told} was lost, is forgotten",
    ]
    assert free in await shell("forget", free, status=1)
    assert "nothing to forget" in await shell("forget", held, status=1)


async def test_every_gateway_is_told_and_a_script_reads_what_each_did(node: Node) -> None:
    one, shell = await ready(node)
    two = node.gateway()
    await node.pass_time(10)
    found = await shell.json("cordon", "1", "--reason", "ECC")
    assert (found["op"], found["id"], found["ledger"]) == ("cordon", B, None)
    assert set(found["gateways"]) == {(await each.status())["token"] for each in (one, two)}
    for each in (one, two):
        assert (await each.states())[B] == "cordoned"
    one.process.stop()
    found = await shell.json("uncordon", B, status=1)
    assert [bool(each.get("error")) for each in found["gateways"].values()].count(True) == 1
    one.process.go_on()


@pytest.mark.parametrize("command", ["cordon", "uncordon", "forget"])
async def test_a_name_that_is_short_for_several_does_nothing(node: Node, command: str) -> None:
    one, shell = await ready(node)
    reason = ("--reason", "ECC") if command == "cordon" else ()
    assert f"is short for 2 devices: {B}, {C}. Nothing was done" in await shell(command, "GPU-b", *reason, status=1)
    assert set((await one.states()).values()) == {"healthy"}


async def test_what_was_cordoned_is_uncordoned_by_its_id_whatever_is_offered_now(node: Node) -> None:
    one, shell = await ready(node)
    await shell("cordon", B, "--reason", "ECC")
    file = node.folder / "config.yaml"
    file.write_text("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}")
    node.shared = (GPU,)
    one.kill()
    one = node.gateway("--config-file", str(file))
    await node.allocatable_is(4)
    await shell("uncordon", B)
    await node.allocatable_is(6)


@pytest.mark.parametrize(
    ("words", "cordoned", "says"),
    [
        (("cordon", "GPU-a"), [A], f"{A} is cordoned: ECC"),
        (("cordon", "GPU-b"), [], f"short for 2 devices: {B}, {C}. Nothing was done"),
        (("cordon", "GPU-x"), ["GPU-x"], "never had a device of the ID GPU-x"),
        (("cordon", "0"), [], "device has the index 0. Nothing was done: write the device's ID"),
        (("uncordon", A), [], f"{A} was not cordoned"),
    ],
)
async def test_a_cordon_without_a_gateway_counts_from_its_next_start(
    node: Node, words: tuple[str, ...], cordoned: list[str], says: str
) -> None:
    one, shell = await ready(node)
    await one.terminate()
    reason = ("--reason", "ECC") if words[0] == "cordon" else ()
    status = 1 if "Nothing was done" in says else 0
    said = await shell(*words, *reason, status=status)
    assert says in said
    assert ("counts from the gateway's next start" in said) is not status
    two = await node.registered()
    await node.pass_time(5)
    found = [name for name, state in (await two.states()).items() if state == "cordoned"]
    assert found == [name for name in cordoned if name in {A, B, C}]
    if cordoned == [A]:
        await two.terminate()
        assert "is no longer cordoned" in await shell("uncordon", A)
        await node.registered()
        await node.allocatable_is(3)


async def test_a_cordon_on_a_node_that_no_gateway_ran_on_counts_and_a_damaged_memory_is_put_aside(node: Node) -> None:
    node.state.mkdir()
    shell = Shell(node)
    found = await shell.json("cordon", B, "--reason", "ECC")
    assert (found["gateways"], found["ledger"]["changed"]) == ({}, True)
    one, _ = await ready(node)
    assert (await one.states())[B] == "cordoned"
    await one.terminate()
    (node.state / "ledger.json").write_text("{")
    assert "put aside" in await shell("cordon", C, "--reason", "ECC")
    two = await node.registered()
    assert (await two.states())[C] == "cordoned"


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("cordon", A), 2, "Missing option '--reason'"),
        (("cordon", A, "--reason", " "), 2, "not a reason"),
        (("cordon", A, "--reason", "a\nb"), 2, "not a reason"),
        (("cordon", "GPU\x1b", "--reason", "ECC"), 2, "not a device ID"),
        (("uncordon",), 2, "Missing argument 'ID'"),
        (("cordon", A, "--reason", "ECC", "--state-dir", "/none"), 1, "no folder /none, so no gateway"),
        (("cordon", A, "--reason", "ECC", "--state-dir", "/proc"), 1, "could not write"),
        (("uncordon", A, "--state-dir", "/none"), 1, "correct --state-dir"),
    ],
)
async def test_a_wrong_call_says_what_is_wrong(node: Node, words: tuple[str, ...], status: int, says: str) -> None:
    assert says in " ".join((await Shell(node)(*words, status=status)).split())


# Status.


async def test_a_person_reads_how_a_gateway_is(node: Node) -> None:
    one, shell = await ready(node)
    (held,) = (await node.admit("pod")).devices[GPU]
    await one.order("cordon", id=held, reason="ticket 4711")
    await node.allocatable_is(2)
    await node.pass_time(3)
    said = " ".join((await shell("status")).split())
    for words in (
        "2 of 3 allocatable, 1 held, 2 free",
        "1 free device can't be scheduled",
        "default/pod/main (its device is cordoned)",
        "registered 1 time (1 first)",
        "Allocate 1",
        f"{held} cordoned",
        "ticket 4711",
        "default/pod/main",
        "pod-resources, read",
        "v1beta1, kubelet 1.34",
    ):
        assert words in said, words
    assert await shell("status", "--check") == "ready"
    node.kill_kubelet()
    await node.pass_time(5)
    assert "kubelet none in" in " ".join((await shell("status")).split())


@pytest.mark.parametrize(
    ("pattern", "words"), [("0,7", "exclude-devices: '7' names no GPU"), ("0", "left out simulated: GPU 0")]
)
async def test_settings_without_effect_and_gpus_left_out_are_shown(node: Node, pattern: str, words: str) -> None:
    _, shell = await ready(node, "--exclude-devices", pattern)
    assert words in " ".join((await shell("status")).split())


async def test_a_script_reads_the_document_as_the_gateway_said_it(node: Node) -> None:
    one, shell = await ready(node)
    found = await shell.json("status")
    assert found["silent"] == {}
    (document,) = found["gateways"]
    now = await one.status()
    assert document.keys() == now.keys()
    assert (document["token"], document["resources"][0]["devices"]) == (now["token"], now["resources"][0]["devices"])


async def test_a_check_fails_where_a_gateway_is_not_ready_or_none_runs(node: Node) -> None:
    node.fault(never_calls_back=True)
    node.simulate({GPU: {"gpus": 2}})
    await node.start_kubelet()
    node.gateway()
    await node.pass_time(30)
    shell = Shell(node)
    assert f"not ready\n{GPU}: accepted, waiting" in await shell("status", "--check", status=1)
    node.gateways[-1].kill()
    assert await shell("status", "--check", status=2) == "no gateway answers"
