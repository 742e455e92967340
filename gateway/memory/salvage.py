"""Decode a state file, even if it is damaged or another release wrote it. Pure; time and memory are limited for every input."""

from __future__ import annotations

import contextlib
import json
import math
import re
from typing import Any, cast

import msgspec

from devices import naming
from gateway.memory import rows
from gateway.memory.claimed import Claimed
from gateway.memory.rows import Cordon
from gateway.sides.side import Side

MAX_BYTES = 16 * 1024 * 1024
"""Maximum size of a state file, in bytes."""
_MAX_DEPTH = 32
_MAX_CONTAINERS = 500_000
"""Maximum number of lists and objects in a file. A file with 80,000 devices has half as many. Each takes up to 230 bytes of memory."""
_MAX_SALVAGED_BYTES = 960_000
"""Maximum number of bytes of a damaged file that are decoded. The cordons and 10,000 devices fit in."""
_MAX_WRONG_ROWS = 1000
"""After this many wrong rows, the rest of a table is dropped."""
_FIELD = r'[\s{,]*("(?:[^"\\]|\\.)*")\s*:\s*'
"""Matches separators and the name of an object's next field."""
_DECODER = json.JSONDecoder(
    parse_float=lambda text: float(text) if math.isfinite(float(text)) else None,
    parse_int=lambda text: int(text) if len(text) < 20 else None,
    parse_constant=lambda _: None,
)
"""A lenient decoder: numbers that the strict decoder rejects become null."""


def decode(data: bytes) -> tuple[rows.Content, str]:
    """Return the valid part of a file, and what is wrong with the rest ('' if nothing is)."""
    complaint = f"it is larger than {MAX_BYTES} bytes" if len(data) > MAX_BYTES else ""
    try:
        if data.count(b"[") + data.count(b"{") > _MAX_CONTAINERS:
            raise ValueError(f"it has more than {_MAX_CONTAINERS} lists and objects")  # noqa: TRY301 - handled below
        content = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        complaint = complaint or str(error)
        content = _decode_damaged(data)
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        complaint = complaint or "it holds no object with a format number"
        content = _only_cordons(content)
    elif content["format"] > rows.FORMAT:
        complaint = f"it is of format {content['format']}, written by a newer gateway"
        content = _only_cordons(content)
    elif not _is_shallow(content):
        complaint = f"it is more than {_MAX_DEPTH} levels deep"
        content = _only_cordons(content)
    wrong = _remove_wrong(content)
    return content, complaint or "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")


def _decode_damaged(data: bytes) -> Any:
    """Return the intact fields at the beginning of a damaged file; None if there are none. Takes about a second.

    A write replaces the whole file, so a crash never leaves a partial file. If a disk error or a person truncated the file, its
    first fields are intact. The cordons are among them.
    """
    with contextlib.suppress(ValueError):
        fields = _intact_fields(data[:_MAX_SALVAGED_BYTES].decode(errors="replace"), 0)
        # Replace halves of surrogate pairs: the lenient decoder accepts them, and they can't be encoded.
        return msgspec.json.decode(json.dumps(fields, ensure_ascii=False).encode(errors="replace"))
    return None


def _intact_fields(text: str, at: int, within: str = "") -> dict[str, Any]:
    """Decode the fields of an object up to the first damaged one, which becomes None. If ``cordons`` is damaged, keep its intact entries."""
    found: dict[str, Any] = {}
    field = re.compile(_FIELD, re.DOTALL)
    while match := field.match(text, at):
        try:
            key = json.loads(match[1], strict=False)
        except ValueError:
            break
        try:
            value, at = _DECODER.raw_decode(text, match.end())
            found[key] = (
                value if _is_shallow({key: value}) else None
            )  # json.dumps fails if values are nested too deeply.
        except (ValueError, RecursionError):
            found[key] = _intact_fields(text, match.end(), key) if key == "cordons" != within else None
            break
    return found


def _only_cordons(content: Any) -> rows.Content:
    """Return the cordons with their known fields. Cordons are kept from a file of any format."""
    cordons = content.get("cordons") if isinstance(content, dict) else None
    return {"cordons": {key: _valid_cordon(row) for key, row in cordons.items()}} if isinstance(cordons, dict) else {}


def _valid_cordon(row: Any) -> rows.Content:
    """Return a cordon even if its row is invalid: the cordon matters more than its reason."""
    fields = row if isinstance(row, dict) else {"reason": row}
    reason, at, annotated = fields.get("reason"), fields.get("at"), fields.get("annotated")
    return rows.row_of(
        Cordon(
            reason if isinstance(reason, str) else "its reason was lost with a damaged state file",
            float(at) if isinstance(at, (int, float)) and 0 <= at < 2**63 else 0.0,
            annotated is True,
        )
    )


def _remove_wrong(content: rows.Content) -> list[str]:
    """Remove all invalid entries in place; return a description of each."""
    wrong: list[str] = []
    for key in ("accepted", "kubelet"):
        if not isinstance(content.get(key, ""), str):
            wrong.append(f"{key}: not a string")
            del content[key]
    if type(number := content.get("generation", 0)) is not int or not 0 <= number < 2**62:
        wrong.append("generation: not an integer from 0 to 2**62-1")
        del content["generation"]
    for key, kind in {
        "cordons": Cordon,
        "claims": Claimed,
        "sides": Side,
        "time_slices": str,
        "resources": dict,
    }.items():
        if key in content:
            content[key] = _valid_rows(content[key], kind, key, wrong)
    resources = content.get("resources", {})
    for name in [name for name in resources if naming.resource_name_error(name)]:
        wrong.append(f"resources: {name[:80]!r} is no resource name")
        del resources[name]
    for name, resource in resources.items():
        for table, kind in rows.TABLES.items():
            if table in resource:
                resource[table] = _valid_rows(resource[table], kind, f"resources.{name}.{table}", wrong)
    return wrong


def _valid_rows(rows: Any, kind: Any, path: str, wrong: list[str]) -> dict[str, Any]:
    with contextlib.suppress(msgspec.ValidationError):  # All at once: it is fast, and rows are almost always valid.
        msgspec.convert(rows, dict[str, kind])
        return cast("dict[str, Any]", rows)
    if not isinstance(rows, dict):
        wrong.append(f"{path}: not an object")
        return {}
    valid = {}
    most = len(wrong) + _MAX_WRONG_ROWS
    for key, row in rows.items():
        try:
            msgspec.convert(row, kind)
            valid[key] = row
        except msgspec.ValidationError as error:
            wrong.append(f"{path}.{key:.80}: {error!s:.200}")
            if len(wrong) > most:
                break
            if kind is Cordon:
                valid[key] = _valid_cordon(row)
    return valid


def _is_shallow(content: rows.Content) -> bool:
    """Return True if lists and objects are at most ``_MAX_DEPTH`` levels deep, so that encoding can't exhaust the stack."""
    level: list[Any] = [content]
    for _ in range(_MAX_DEPTH):
        parts = (part for value in level for part in (value.values() if isinstance(value, dict) else value))
        level = [part for part in parts if isinstance(part, (dict, list))]
        if not level:
            return True
    return False
