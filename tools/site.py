"""MkDocs' hooks: titles for links between pages, paths for links out of docs/, diagrams, and the repository's link.

On the site there is no repository around the pages, so a link to a file of it can only name it. One that names nothing is an
error, as a link to a page that isn't there.
"""

from __future__ import annotations

import os
import re
import tarfile
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_OUTWARD = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#]*)(#[^)]*)?\)")
_PAGE = re.compile(r"\[`?[\w./-]+\.md`?\]\(((?!https?:)[^)#]+\.md)(#[^)]*)?\)")
_ADDRESS = re.compile(r"(?:https?://(?:[^@/]*@)?|(?:ssh://)?git@)([\w.-]+)[:/](.+?)(?:\.git)?/?")
_SCRIPT = "assets/mermaid.min.js"


def on_config(config: Any) -> None:
    """Link the repository, and have diagrams drawn if there is a script for it (MkDocs calls this)."""
    if address := repository(os.environ.get("REPOSITORY", "")):
        config.repo_url, config.repo_name = address, address.rpartition("/")[2]
    if _archive().is_file():
        config.extra_javascript.append(_SCRIPT)
        drawn = import_module("pymdownx.superfences").fence_code_format  # The tests' environment has none.
        fence = {"name": "mermaid", "class": "mermaid", "format": drawn}
        config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}


def on_post_build(config: Any) -> None:
    """Put the script that draws diagrams into the site (MkDocs calls this)."""
    if _archive().is_file():
        with tarfile.open(_archive()) as package:
            script = package.getmember("package/dist/mermaid.min.js")
            script.name = Path(_SCRIPT).name
            package.extract(script, Path(config.site_dir) / "assets", filter="data")


def _archive() -> Path:
    """Return where the npm package of mermaid is, if `make site` could fetch it."""
    return Path(os.environ.get("MERMAID", "build/mermaid.tgz"))


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite a page's links (MkDocs calls this).

    Raises:
        FileNotFoundError: there is no such file in the repository.
    """
    folder = Path(page.file.src_uri).parent
    return titled(named(markdown, folder), folder)


def on_page_content(html: str, **_: Any) -> str:
    """Name the column of each cell of a table, for screens on which a row is a paragraph (MkDocs calls this)."""
    return re.sub(r"<table>.*?</table>", labelled, html, flags=re.DOTALL)


def labelled(table: re.Match[str]) -> str:
    """Write the head of its column into each cell of a table."""
    heads = [
        re.sub(r"<[^>]*>", "", head).replace('"', "&quot;")
        for head in re.findall(r"<th[^>]*>(.*?)</th>", table[0], re.DOTALL)
    ]
    columns = cycle(heads)
    return re.sub(r"<td", lambda _: f'<td data-label="{next(columns)}"', table[0])


def repository(remote: str) -> str | None:
    """Return the address at which people see a repository, given that of a git remote; None if it has none."""
    found = _ADDRESS.fullmatch(remote)
    return f"https://{found[1]}/{found[2]}" if found else None


def titled(markdown: str, folder: Path) -> str:
    """Put the title of a page in the place of its file's name in links, for a page in ``folder`` of docs/."""

    def link(match: re.Match[str]) -> str:
        target = ROOT / "docs" / folder / match[1]
        if not target.is_file():
            return match[0]  # MkDocs names it.
        title = target.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        return f"[{title}]({match[1]}{match[2] or ''})"

    return _PAGE.sub(link, markdown)


def named(markdown: str, folder: Path) -> str:
    """Put a path in the place of each link that leads out of docs/, for a page in ``folder`` of it."""

    def path_of(match: re.Match[str]) -> str:
        found = (ROOT / "docs" / folder / match[2]).resolve()
        if (ROOT / "docs") in found.parents:
            return match[0]
        if not found.exists():
            raise FileNotFoundError(f"expected a file of the repository, and {match[2]} is none: correct the link")
        path = f"`{found.relative_to(ROOT)}`"
        return path if match[1].strip("`") in str(found) else f"{match[1]} ({path})"

    return _OUTWARD.sub(path_of, markdown)
