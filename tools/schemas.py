"""Write the JSON schemas of the documents that commands print into docs/: ``python -m tools.schemas [--check]``.

Each record is described by its docstring, each field by the one below it. With --check they are compared with what is there (exit
status 1 where they differ).
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec

from gateway.telling.status import Gateways
from gateway_lab.conformance.report import PluginReport
from gateway_lab.matrix.record import Report
from tools import pages

DOCS: Final = Path(__file__).parents[1] / "docs"
RECORDS: Final[Mapping[str, type]] = {
    "status.schema.json": Gateways,
    "compat-report.schema.json": Report,
    "plugin-report.schema.json": PluginReport,
}


def schema(record: type) -> dict[str, Any]:
    """Give the JSON schema of a record (draft 2020-12), and of those in it."""
    found = msgspec.json.schema(record)
    for name, definition in found["$defs"].items():
        definition["description"] = inspect.cleandoc(definition["description"])  # as Python 3.13 and later keep it
        if (of_module := getattr(sys.modules[record.__module__], name, None)) is not None:
            for field, text in _descriptions(of_module):
                definition["properties"][field]["description"] = text
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def _descriptions(record: type) -> Iterator[tuple[str, str]]:
    """Read the docstrings that stand below a record's fields."""
    [definition] = (one for one in ast.parse(inspect.getsource(record)).body if isinstance(one, ast.ClassDef))
    for statement, below in pairwise(definition.body):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, text
            case _:
                pass


def _files() -> dict[Path, str]:
    return {DOCS / name: json.dumps(schema(record), indent=1) + "\n" for name, record in RECORDS.items()}


if __name__ == "__main__":
    pages.several(_files, __doc__, "the records declare")
