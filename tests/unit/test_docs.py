"""What the pages say can be typed: each command of theirs is parsed by the real command line, each profile is read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from devices.gpu.simulated.profile import parse
from gateway.cli.main import gateway
from tools import prose

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
COMMANDS = [
    pytest.param(re.split(r" && | \| |; | > ", found[1].split("#", 1)[0])[0].strip(), id=f"{page.name}: {line.strip()}")
    for page in PAGES
    for line in page.read_text().splitlines()
    if (found := re.match(r"\s{4,}(?:.* (?:--|\|) )?(gateway(?: .*|$))", line))
]


def _examples(name: str, command: click.Command) -> Iterator[tuple[str, str]]:
    for line in (command.epilog or "").splitlines():
        if match := re.match(r"  (gateway(?: [^ ]+)*)", line):
            yield name, re.split(r" && | \| |; | > ", match[1])[0]
    if isinstance(command, click.Group):
        for one in command.list_commands(click.Context(command)):
            found = command.get_command(click.Context(command), one)
            assert found is not None
            yield from _examples(one, found)


EXAMPLES = [pytest.param(example, id=f"{name} --help: {example}") for name, example in _examples("gateway", gateway)]
TARGETS = sorted(
    {target for page in PAGES for target in re.findall(r"(?<!git )\bmake ([a-z][a-z0-9-]*)", page.read_text())}
)


NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
HOW_TOS = next(one["How-to"] for one in NAV if "How-to" in one)
TASKS = {
    "swap NVIDIA's plugin 0.17 with time-slicing, by Helm": "migration.md",
    "a pod is Pending after an upgrade of the kubelet": "pending.md",
    "move one node to DRA": "move-to-dra.md",
    "share GPUs four ways on nodes with a label": "share.md",
    "which image do I run": "image.md",
    "an alert when a GPU falls off the bus": "alerts.md",
    "cordon a GPU": "cordon.md",
    "reset a GPU": "reset.md",
    "restarts of the SR-IOV plugin lose VFs": "bridge.md",
    "partitions of MI300": "amd.md",
    "a fleet from 1.27 to 1.34": "upgrades.md",
}


@pytest.mark.parametrize("page", HOW_TOS)
def test_a_how_to_is_short_and_says_how_to_check_and_undo_it(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert len(text.split()) <= 1200
    assert re.findall("^## (.*)$", text, re.MULTILINE)[-2:] == ["Check that it worked", "Undo"]


@pytest.mark.parametrize("task", TASKS)
def test_a_task_takes_one_short_page(task: str) -> None:
    assert len((ROOT / "docs" / TASKS[task]).read_text().split()) <= 900


def test_the_sample_of_a_claim_is_the_one_that_the_page_shows() -> None:
    sample = (ROOT / "deploy" / "samples" / "claims" / "nvidia.yaml").read_text().partition("\n")[2]
    assert f"```yaml\n{sample}```" in (ROOT / "docs" / "dra.md").read_text()


@pytest.mark.parametrize("command", [*COMMANDS, *EXAMPLES])
def test_a_command_can_be_typed(command: str) -> None:
    name, *arguments = shlex.split(command)
    found: click.Command = gateway
    while True:
        context = found.make_context(name, arguments)
        if not (isinstance(found, click.Group) and context._protected_args):
            break
        name, found, arguments = found.resolve_command(context, [*context._protected_args, *context.args])  # type: ignore[assignment]
        assert found is not None


@pytest.mark.parametrize("target", TARGETS)
def test_a_make_target_is_there(target: str) -> None:
    assert re.search(rf"^(\.PHONY: .*)?\b{target}\b.*:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_profile_is_one() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text().partition("## Simulated GPUs\n")[2]
    [yaml] = re.findall(r"```yaml\n(.*?)```", text.partition("\n## ")[0], re.DOTALL)
    assert set(parse(yaml.encode(), "configuration.md")) == {"nvidia.com/gpu"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", [page for page in PAGES if "docs" in page.parts], ids=lambda page: page.name)
def test_what_belongs_to_a_step_is_indented_by_four(page: Path) -> None:
    """With less, the site shows a command as text, and counts the steps after it from 1. Without a line between, it shows no step."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    assert re.findall(r"\n\n((?: {1,3}| {5,7})\S.*)", text) == []
    assert re.findall(r"\n    [^ \n-].*\n(\d+\. .*)", text) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("- Whoever has it keeps it.\n- A pod keeps it.\n", ["Whoever has it keeps it.", "A pod keeps it."]),
        (
            "Run `a b c.d` first. Then\ngo on.\n\n    a command\n\n| a | table |\n# A title\n",
            ["Run CODE first.", "Then go on."],
        ),
        ("A [link](x.md#y), and\n```text\ncode. code.\n```\nmore.", ["A link, and", "more."]),
    ],
)
def test_a_page_is_read_by_sentences(text: str, found: list[str]) -> None:
    assert [*prose.sentences(text)] == found
