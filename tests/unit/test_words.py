"""What people are told is in their words: in pages, messages, logs and help is none that only this project has a meaning for.

In names and comments neither: who reads the code meets the words of the pages.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    path
    for folder in ("adapters", "devices", "gateway", "gateway/cli")
    for path in (ROOT / folder).rglob("*.py")
    if not {"pb", "lab"} & set(path.relative_to(ROOT).parts)
)
CODE = sorted(
    path
    for folder in ("adapters", "devices", "gateway", "tests", "tools")
    for path in (ROOT / folder).rglob("*.py")
    if "pb" not in path.parts and path != Path(__file__)
)
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")])
PRIVATE = re.compile(
    r"(?<![`\w-])(ledgers?|books|mend(?:s|ed)?|elders?|heirs?|younger|ill|well|(?:lets?|letting) go of|illness|illnesses|drifts?)\b(?![`-]|\.json|\.py)"
)
"""In backticks, in a file's name and as a part of a scenario's name they are names that were shipped."""
PLAIN = {"*stream ended* and *books*"}
"""Where one of them is meant: a cause as `gateway status` shows it."""
OUR_OWN = {"elder", "heir", "younger", "book", "booked", "door"}
"""What names and comments don't say: older or newer gateway, the kubelet's records, the folders and APIs by which something comes."""
MAYBE = re.compile(
    rf"(?<![a-z])({'|'.join(OUR_OWN)})|{'|'.join(map(str.title, OUR_OWN))}|{'|'.join(map(str.upper, OUR_OWN))}"
)
"""What a file has somewhere that may have one of them: the others need not be taken apart."""
NAMED_AS_SHIPPED = {"books"}
"""Names that are keys of `gateway status --json`."""
TOLD = {"info", "warning", "error", "exception", "echo", "option", "say"}


def told(tree: ast.AST) -> Iterator[str]:
    """Every text in a call that tells people something, and the help of commands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in TOLD or name.endswith(("Error", "Exception", "BadParameter")):
                yield from (
                    one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)
                )
        elif isinstance(node, ast.FunctionDef) and any("command" in ast.dump(one) for one in node.decorator_list):
            yield ast.get_docstring(node) or ""


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('_log.error("ledger not written")', ["ledger"]),
        ('raise Error(f"{one} is ill: repair it")', ["ill"]),
        ('@command()\ndef devices() -> None:\n    """The books of it."""', ["books"]),
        ('click.echo("all is well")', ["well"]),
        ('click.echo("the `ledger` key")', []),
        ('click.echo("ledger.json, gpu-ill")', []),
        ('_log.info("drift is over")', ["drift"]),
        ('_log.info("a younger gateway comes")', ["younger"]),
        ('"""The ledger."""\nledger = "books"', []),
    ],
)
def test_what_is_looked_for(code: str, found: list[str]) -> None:
    assert [word for text in told(ast.parse(code)) for word in PRIVATE.findall(text)] == found


def test_people_are_told_what_happened_in_their_words() -> None:
    assert len(MODULES) > 50
    found = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in MODULES
        for text in told(ast.parse(path.read_text()))
        if PRIVATE.search(text) or text.startswith("expected ")
    ]
    assert found == []


def said_in(code: str) -> Iterator[str]:
    """Give the words of each name, comment and docstring that are our own."""
    for token in (
        () if not MAYBE.search(code) else tokenize.generate_tokens(iter(code.splitlines(keepends=True)).__next__)
    ):
        text = token.string
        comment = token.type == tokenize.COMMENT or (token.type == tokenize.STRING and text.startswith('"""'))
        if comment or (token.type == tokenize.NAME and text not in NAMED_AS_SHIPPED):
            words = (word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", text))
            yield from (word for word in words if {word, word.removesuffix("s")} & OUR_OWN)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("class Elder: ...", ["elder"]),
        ("_heirs = DeviceBooks()", ["heirs", "books"]),
        ("YOUNGER, old = 1, 2  # the front door", ["younger", "door"]),
        ('"""What is booked."""', ["booked"]),
        ("doors_open = theirs = older = bookmark = outdoors = 1", ["doors"]),
        ('status.books == "books"', []),
    ],
)
def test_what_is_looked_for_in_code(code: str, found: list[str]) -> None:
    assert list(said_in(code)) == found


def test_code_is_in_the_words_of_the_pages() -> None:
    assert len(CODE) > 400
    found = {str(path.relative_to(ROOT)): list(said_in(path.read_text())) for path in CODE}
    assert {path: words for path, words in found.items() if words} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_in_their_words(page: Path) -> None:
    text = page.read_text()
    for plain in PLAIN:
        text = text.replace(plain, "")
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert [line for line in text.splitlines() if PRIVATE.search(line)] == []
