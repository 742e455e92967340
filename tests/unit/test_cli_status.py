"""``gateway status``: real control sockets, what a person sees of them, and what a script gets."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import structlog
from click.testing import CliRunner, Result
from msgspec.structs import replace

from devices.life import states
from devices.life.states import State
from devices.model import Device, Health
from gateway.cli import status as cli
from gateway.cli.main import gateway
from gateway.registration.events import Phase
from gateway.tally import Tally
from gateway.telling.sides import ByNameStatus, DriverStatus
from gateway.telling.status import Configuration, Gateways, GatewayStatus, ResourceFacts
from gateway.telling.status import resource as resource_status
from gateway.wires import control
from gateway.wires import log as observe
from tests.unit import documents
from tests.unit.answering import gateways
from tests.unit.documents import FULL, IDS, OTHER, SERVING, STANDBY, TROUBLED, WAITING, document, state

PAGE = Path(__file__).parents[2] / "docs" / "observability.md"
STATE_DIR = Path("/var/lib/device-plugin-gateway")


def showing(folder: Path, answers: Mapping[str, Any]) -> AbstractContextManager[object]:
    """Run gateways, by token, that show what is given for them."""
    return gateways(folder, {token: {"status": answer} for token, answer in answers.items()}, "status")


def call(folder: Path, *arguments: str, color: bool = False) -> Result:
    return CliRunner().invoke(gateway, ["status", "--state-dir", str(folder), *arguments], color=color)


def seen(*documents: GatewayStatus, width: int = 96, silent: Mapping[str, str] | None = None) -> str:
    look = cli.Answers(read=list(documents), silent=dict(silent or {}))
    return click.unstyle("\n".join(cli.render(look, STATE_DIR, width)))


# Asking.


def test_a_host_service_is_named(folder: Path) -> None:
    host = document(TROUBLED, host_service=True)
    pod = document(STANDBY, token=WAITING, led_by=SERVING, led_by_host_service=True)
    with showing(folder, {SERVING: host, WAITING: pod}):
        result = call(folder)
    assert f"gateway {SERVING}, the host service, leads" in result.output
    assert result.output.count(", host service, process") == 1


def test_for_a_script_it_is_the_documents_as_they_came(folder: Path) -> None:
    """With what only a newer gateway knows."""
    known, other = (json.loads(msgspec.json.encode(one)) for one in (FULL, OTHER))
    newer = known | {"surprise": [1]}
    with showing(folder, {SERVING: newer, WAITING: OTHER}):
        result = call(folder, "--json")
    assert result.exit_code == 0
    assert json.loads(result.output) == {"gateways": [newer, other], "silent": {}}
    assert msgspec.json.decode(result.output, type=Gateways).gateways == (FULL, OTHER)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        pytest.param({"nonsense": 1}, "no status document", id="something else"),
        pytest.param(None, "no status document", id="nothing"),
    ],
)
def test_a_gateway_that_says_something_else_is_told_of(folder: Path, answer: Any, words: str) -> None:
    with showing(folder, {SERVING: FULL, WAITING: answer}):
        result, raw = call(folder), call(folder, "--json")
    assert (result.exit_code, f"gateway {WAITING} does not answer" in result.output) == (0, True)
    assert words in " ".join(result.output.split())
    assert list(json.loads(raw.output)["silent"]) == [str(control.socket_path(folder, WAITING))]


# Watching.


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let somebody press Ctrl-C after so many looks."""

    def after(count: int) -> None:
        left = iter(range(count - 1))

        def sleep(seconds: float) -> None:
            assert seconds == cli._EVERY
            if next(left, None) is None:
                raise KeyboardInterrupt

        monkeypatch.setattr(cli, "sleep", sleep)

    return after


def test_watching_looks_again_until_it_is_ended(folder: Path, looks: Callable[[int], None]) -> None:
    with showing(folder, {SERVING: FULL}):
        looks(3)
        result = call(folder, "--watch")
        looks(2)
        raw = call(folder, "--watch", "--json")
    assert (result.exit_code, result.output.count(f"gateway {SERVING}")) == (0, 3)
    assert "\x1b" not in result.output
    assert [len(json.loads(line)["gateways"]) for line in raw.output.splitlines()] == [1, 1]


def test_watching_waits_for_a_gateway(folder: Path, looks: Callable[[int], None]) -> None:
    looks(2)
    result = call(folder, "--watch")
    assert (result.exit_code, result.output.count("No gateway runs")) == (0, 2)


def test_on_a_terminal_it_stays_in_place_and_on_the_screen(
    folder: Path, looks: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_is_live", lambda: True)
    monkeypatch.setenv("LINES", "12")
    monkeypatch.setenv("COLUMNS", "100")
    with showing(folder, {SERVING: FULL}):
        looks(2)
        result = call(folder, "--watch", color=True)
    first, second = result.output.removesuffix("\n").split("\x1b[H")[1:]  # the new line that Ctrl-C leaves
    for screen in (first, second):
        assert screen.endswith("\x1b[J")
        lines = click.unstyle(screen).splitlines()
        assert len(lines) == 11  # the cursor stays on the last one of the screen
        assert re.fullmatch(r"\d+ more lines", lines[-1]) is not None


@pytest.mark.parametrize(
    ("variable", "value", "coloured"),
    [("NO_COLOR", "1", False), ("NO_COLOR", "", True), ("TERM", "dumb", False), ("TERM", "xterm", True)],
)
@pytest.mark.parametrize("command", ["status", "devices", "watch", "log"])
def test_who_wants_no_colours_gets_none(
    folder: Path,
    command: str,
    variable: str,
    value: str,
    coloured: bool,
    looks: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(cli, "_is_live", lambda: True)
    if command == "log":
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        observe.configure("console", "info")
        output = structlog.get_config()["processors"][-1](None, "info", {"event": "serving", "level": "info"})
        structlog.reset_defaults()
    else:
        arguments = ["status", "--watch"] if command == "watch" else [command]
        with gateways(folder, {SERVING: {"status": FULL, "facts": {}}}, "status", "devices"):
            looks(1)
            output = CliRunner().invoke(gateway, [*arguments, "--state-dir", str(folder)], color=True).output
    assert (re.search(r"\x1b\[[0-9;]*m", output) is not None) is coloured
    assert ("\x1b[H" in output) is (command == "watch")  # Where it stands is no colour.


# What is seen.


@pytest.mark.parametrize(
    "sentence",
    [
        "registered 3 times (1 first, 2 kubelet start); last gap 4.2 ms",
        "Allocate 412 (3 FAILED_PRECONDITION), GetPreferredAllocation 409",
        "waiting to register again v1beta1",
        "Register was refused: the ResourceName is invalid",
        "can't be written: No space left on device",
    ],
)
def test_a_person_reads(sentence: str) -> None:
    """The rest is on the page: ``test_the_page_shows_what_it_looks_like``."""
    assert sentence in " ".join(seen(FULL).split())


@pytest.mark.parametrize(
    ("document_", "words"),
    [
        (
            msgspec.structs.replace(FULL, kubelet=msgspec.structs.replace(FULL.kubelet, present=False)),
            "kubelet none in",
        ),
        (msgspec.structs.replace(FULL, books=msgspec.structs.replace(FULL.books, source="none")), "own can't be read"),
        (msgspec.structs.replace(FULL, lag_s=0.3), "up to 0.3 s late"),
        (
            msgspec.structs.replace(
                FULL, ledger=msgspec.structs.replace(FULL.ledger, exposed="others may write to it")
            ),
            "others may write to it",
        ),
        (document(), "ledger.json, written 3 min ago"),
        (
            msgspec.structs.replace(FULL, waits_for="the socket directory: none"),
            "waiting for the socket directory: none",
        ),
        (
            msgspec.structs.replace(
                FULL, configuration=Configuration(path="/c/config.yaml", error="/c/config.yaml, line 3: no")
            ),
            "config rejected, so the last good one stays in force: /c/config.yaml, line 3: no",
        ),
        (msgspec.structs.replace(FULL, resources=()), "devices none was found yet"),
        (
            msgspec.structs.replace(FULL, resources=(msgspec.structs.replace(FULL.resources[0], checked="lacking"),)),
            "the kubelet's own records lack this registration",
        ),
    ],
)
def test_a_person_reads_of_rarer_things(document_: GatewayStatus, words: str) -> None:
    assert words in " ".join(seen(document_).split())


def test_the_next_command_is_named_where_devices_are_not_served() -> None:
    served = msgspec.structs.replace(FULL, resources=FULL.resources[:1])
    orphaned = msgspec.structs.replace(served, kubelet=msgspec.structs.replace(FULL.kubelet, present=False))
    assert ["gateway doctor" in seen(one) for one in (FULL, orphaned, served)] == [True, True, False]


def test_a_person_reads_on_which_side_gpus_are_and_what_those_between_wait_for() -> None:
    page = seen(document(sides=documents.SIDES))
    assert "  sides    2 dra, 1 plugin, 1 to-dra\n" in page
    assert "           GPU-b to-dra, for 2 min: it goes to DRA as soon as nobody holds it: held by ns/q/main" in page
    assert "GPU-a" not in page
    assert "sides" not in seen(FULL)
    many = seen(document(sides=documents.SIDES[1:2] * 10))
    assert many.count("GPU-b to-dra") == 8
    assert "2 more: gateway move --to dra --dry-run" in many


def test_a_person_reads_what_is_wrong_for_pods_that_ask_by_name() -> None:
    page = seen(
        document(sides=documents.SIDES, by_name=ByNameStatus(overlooked="got 1.35", waiting="no class names it"))
    )
    assert "  by name  DRA offers its GPUs to nobody new: got 1.35\n" in page
    assert "  by name  no class names it\n" in page
    assert "by name" not in seen(document(sides=documents.SIDES))


def test_a_person_reads_how_drivers_stand_and_what_another_driver_offers() -> None:
    took = DriverStatus(
        name="gpu.nvidia.com",
        devices=2,
        registered=True,
        unpublished="PATCH /x: 403 Forbidden",
        claims=1,
        refused=("claim ns/c: no",),
    )
    refused = DriverStatus(name="gpu.amd.com", devices=1, registered=False, trouble="no such version")
    strange = {IDS[1]: "dra.example.com offers it as x in theirs"}
    page = seen(document(replace(TROUBLED, strangers=strange), drivers=(took, refused)))
    for words in (
        "  driver   gpu.nvidia.com: registered, 2 devices, 1 claim prepared\n           not published: PATCH /x: 403 Forbidden\n           refused: claim ns/c: no\n",
        "  driver   gpu.amd.com: not registered, 1 device\n           no such version\n",
        "not offered by DRA here: dra.example.com offers it as x in theirs",
    ):
        assert words in page
    assert "  driver   " not in seen(FULL)


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_text_keeps_to_the_width_and_device_ids_are_whole(width: int) -> None:
    text = seen(OTHER, FULL, width=width, silent={"/x/0badcafe.sock": "why " * 60})
    assert [
        line for line in text.splitlines() if len(line) > width and "GPU-" not in line and "DEVICE" not in line
    ] == []
    assert all(f"{id_}\n" in text if width == 40 else f"\n  {id_} " in text for id_ in IDS)


def test_at_forty_columns_a_device_is_folded() -> None:
    lines = seen(FULL, width=40).splitlines()
    assert [line for line in lines if len(line) > 40] == []
    place = lines.index(IDS[0])
    assert lines[place : place + 3] == [IDS[0], "  healthy, NUMA 0", "  default/training-0/main"]


def test_of_many_devices_those_with_something_to_say_are_shown() -> None:
    entries = {
        f"GPU-{number}": states.Entry(
            Device(f"GPU-{number}", Health.UNHEALTHY if number < 3 else Health.HEALTHY),
            State.UNHEALTHY if number < 3 else State.PRESENT,
        )
        for number in range(1000)
    }
    plugin = ResourceFacts(name="a/b", state=state(Phase.SERVING), entries=entries)
    whole = document(plugin)
    few = replace(whole, resources=(resource_status(plugin, Tally(), documents.NOW, few=True),))
    for told in (whole, few):  # An older gateway tells of them all.
        text = seen(told)
        rows = [line.split()[0] for line in text.splitlines() if line.startswith("  GPU-")]
        assert rows == ["GPU-0", "GPU-1", "GPU-2"]
        assert "997 more of 1000 devices: -o wide has them all" in text
    wide = list(cli.render(cli.Answers(read=[whole]), STATE_DIR, 96, whole=True))
    assert len([line for line in wide if line.startswith("  GPU-")]) == 1000


def test_colours_are_for_terminals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with showing(folder, {SERVING: FULL}):
        plain, coloured = call(folder), call(folder, color=True)
    assert "\x1b" not in plain.output
    assert "\x1b[31mlost" in coloured.output
    assert click.unstyle(coloured.output) == plain.output


@pytest.mark.parametrize("field", ["name", "phase", "trouble", "api"])
def test_what_others_wrote_does_not_steer_the_terminal(field: str) -> None:
    evil = msgspec.structs.replace(FULL.resources[1], **{field: "a\x1b[2Jb\rc\u202ed"})
    text = "\n".join(cli.render(cli.Answers(read=[msgspec.structs.replace(FULL, resources=(evil,))]), STATE_DIR, 96))
    assert "[2Jb" in text
    assert "\x1b[2J" not in text
    assert "\r" not in text
    assert "\u202e" not in text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 ms"),
        (0.0042, "4.2 ms"),
        (0.02301, "23 ms"),
        (0.0999, "99.9 ms"),
        (0.1, "0.1 s"),
        (0.412, "0.4 s"),
        (1, "1 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (3599, "59 min"),
        (7800, "2 h 10 min"),
        (273_600, "3 d 4 h"),
    ],
)
def test_an_age(seconds: float, words: str) -> None:
    assert cli.age(seconds) == words


def test_the_page_shows_what_it_looks_like() -> None:
    """If not: put what this test calls ``seen`` there."""
    assert f"```text\n{seen(document(TROUBLED))}\n```" in PAGE.read_text()
