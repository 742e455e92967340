"""What MkDocs is told beside mkdocs.yml: links that lead out of docs/ become the paths that they name.

On the site there is no repository around the pages, so a link to a file of it can only name it. One that names nothing is an
error, as a link to a page that isn't there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_OUTWARD = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#]*)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite a page's links that lead out of docs/ (MkDocs calls this).

    Raises:
        FileNotFoundError: there is no such file in the repository.
    """
    return named(markdown, Path(page.file.src_uri).parent)


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
