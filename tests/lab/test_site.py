"""The site of docs/: `make site` builds it and follows its links; here, what that is told beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.site import named, on_page_content, repository, titled

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = sorted((ROOT / "deploy" / "samples").glob("*.yaml"))


@pytest.mark.parametrize(
    ("markdown", "wanted"),
    [
        ("[upgrades.md](upgrades.md#x)", "[upgrades.md](upgrades.md#x)"),
        ("[the pages](../docs/upgrades.md)", "[the pages](../docs/upgrades.md)"),
        ("the rules ([Makefile](../Makefile))", "the rules (`Makefile`)"),
        ("[how](../CONTRIBUTING.md#tests) it goes", "how (`CONTRIBUTING.md`) it goes"),
    ],
)
def test_a_link_that_leads_out_of_the_site_names_its_file(markdown: str, wanted: str) -> None:
    assert named(markdown, Path()) == wanted


@pytest.mark.parametrize(
    ("markdown", "wanted"),
    [
        ("[security.md](security.md#x)", "[Security](security.md#x)"),
        ("[how](image.md)", "[how](image.md)"),
        ("[x.md](nothing.md)", "[x.md](nothing.md)"),
        ("[image.md](https://example.com/image.md)", "[image.md](https://example.com/image.md)"),
    ],
)
def test_a_link_to_a_page_has_its_title(markdown: str, wanted: str) -> None:
    assert titled(markdown, Path()) == wanted


@pytest.mark.parametrize(
    ("remote", "wanted"),
    [
        ("git@git.example.com:team/gateway.git", "https://git.example.com/team/gateway"),
        ("https://user:secret@git.example.com/team/gateway.git", "https://git.example.com/team/gateway"),
        ("https://git.example.com/team/gateway", "https://git.example.com/team/gateway"),
        ("../main", None),
        ("", None),
    ],
)
def test_the_site_links_the_repository_that_it_is_made_of(remote: str, wanted: str | None) -> None:
    assert repository(remote) == wanted


def test_a_page_in_a_folder_leads_out_of_it_first() -> None:
    assert named("[Makefile](../../Makefile)", Path("adr")) == "`Makefile`"


def test_a_cell_of_a_table_has_the_name_of_its_column() -> None:
    table = "<table><tr><th>a</th><th><code>b</code></th></tr><tr><td>1</td><td>2</td></tr></table>"
    assert '<td data-label="a">1</td><td data-label="b">2</td>' in on_page_content(table)


def test_a_link_to_nothing_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match="correct the link"):
        named("[x](../nothing.yaml)", Path())


def test_each_page_has_its_place_in_the_site() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    shown = {page for one in nav for page in (next(iter(one.values())) if isinstance(one, dict) else [one])}
    there = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert shown == there


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_asks_for_one_gpu_and_tolerates_what_gpu_nodes_have(path: Path) -> None:
    pod: dict[str, Any] = yaml.safe_load(path.read_text())
    (container,) = pod["spec"]["containers"]
    ((resource, count),) = container["resources"]["limits"].items()
    assert count == 1
    assert pod["spec"]["restartPolicy"] == "Never"
    assert path.stem == "simulated" or resource in {one["key"] for one in pod["spec"]["tolerations"]}
