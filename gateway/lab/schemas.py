"""JSON schemas of the laboratory's records: each field described by the docstring below it."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec


def schema(record: type) -> dict[str, Any]:
    """Give the JSON schema of a record (draft 2020-12), and of those in it, all of one module."""
    found = msgspec.json.schema(record)
    for name, definition in found["$defs"].items():
        for field, text in _descriptions(getattr(sys.modules[record.__module__], name)):
            definition["properties"][field]["description"] = text
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def _descriptions(record: type) -> Iterator[tuple[str, str]]:
    """Read the docstrings that stand below a record's fields."""
    [definition] = ast.parse(inspect.getsource(record)).body
    assert isinstance(definition, ast.ClassDef)
    for statement, below in pairwise(definition.body):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, text
            case _:
                pass
