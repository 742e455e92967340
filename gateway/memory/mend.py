"""Find the sound part of a state file that is damaged, or that another release wrote. Pure, and bounded for every input."""

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
"""Most bytes of a state file."""
_MAX_DEPTH = 32
_MAX_PARTS = 500_000
"""Most lists and objects in a file: 80,000 devices have half of it. Each takes up to 230 bytes of memory."""
_MAX_SALVAGE = 960_000
"""Most bytes of a damaged file that are decoded: the cordons and 10,000 devices, and never more than ``_MAX_PARTS``."""
_MAX_WRONG = 1000
"""After so many wrong rows, the rest of a table is dropped."""
_FIELD = r'[\s{,]*("(?:[^"\\]|\\.)*")\s*:\s*'
"""The name of an object's next field, and what precedes it."""
_DECODER = json.JSONDecoder(
    parse_float=lambda text: float(text) if math.isfinite(float(text)) else None,
    parse_int=lambda text: int(text) if len(text) < 20 else None,
    parse_constant=lambda _: None,
)
"""It decodes numbers that the strict decoder rejects as null."""


def decode(data: bytes) -> tuple[rows.Content, str]:
    """Return the sound part of a file, and what is wrong with the rest (empty: nothing)."""
    complaint = f"it is larger than {MAX_BYTES} bytes" if len(data) > MAX_BYTES else ""
    try:
        if data.count(b"[") + data.count(b"{") > _MAX_PARTS:
            raise ValueError(f"it has more than {_MAX_PARTS} lists and objects")  # noqa: TRY301 - as one that can't be read
        content = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        complaint = complaint or str(error)
        content = _mend(data)
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        complaint = complaint or "it holds no object with a format number"
        content = _only_cordons(content)
    elif content["format"] > rows.FORMAT:
        complaint = f"it is of format {content['format']}, written by a newer gateway"
        content = _only_cordons(content)
    elif not _is_shallow(content):
        complaint = f"it is more than {_MAX_DEPTH} levels deep"
        content = _only_cordons(content)
    wrong = _prune(content)
    return content, complaint or "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")


def _mend(data: bytes) -> Any:
    """Decode the whole fields at the beginning of a damaged file, in about a second; None if there are none.

    A write replaces the whole file, so a crash leaves no half of it. If a disk or a person cut it off, its first fields are whole,
    the cordons among them.
    """
    with contextlib.suppress(ValueError):
        whole = _fields(data[:_MAX_SALVAGE].decode(errors="replace"), 0)
        # Replace halves of surrogate pairs: the lenient decoder accepts them, and they can't be encoded.
        return msgspec.json.decode(json.dumps(whole, ensure_ascii=False).encode(errors="replace"))
    return None


def _fields(text: str, at: int, within: str = "") -> dict[str, Any]:
    """Decode the fields of an object up to the first damaged one. That one is None; of cordons, the whole ones are kept."""
    found: dict[str, Any] = {}
    field = re.compile(_FIELD, re.DOTALL)
    while match := field.match(text, at):
        try:
            key = json.loads(match[1], strict=False)
        except ValueError:
            break
        try:
            value, at = _DECODER.raw_decode(text, match.end())
            found[key] = value if _is_shallow({key: value}) else None  # It will be encoded deeper in the stack.
        except (ValueError, RecursionError):
            found[key] = _fields(text, match.end(), key) if key == "cordons" != within else None
            break
    return found


def _only_cordons(content: Any) -> rows.Content:
    """Return the cordons, which survive any format. Only known fields: the meaning of others is unknown."""
    cordons = content.get("cordons") if isinstance(content, dict) else None
    return {"cordons": {key: _sound_cordon(row) for key, row in cordons.items()}} if isinstance(cordons, dict) else {}


def _sound_cordon(row: Any) -> rows.Content:
    """Return a cordon for any value in its place: that there is a cordon matters more than its reason."""
    fields = row if isinstance(row, dict) else {"reason": row}
    reason, at, annotated = fields.get("reason"), fields.get("at"), fields.get("annotated")
    return rows.row_of(
        Cordon(
            reason if isinstance(reason, str) else "its reason was lost with a damaged state file",
            float(at) if isinstance(at, (int, float)) and 0 <= at < 2**63 else 0.0,
            annotated is True,
        )
    )


def _prune(content: rows.Content) -> list[str]:
    """Remove everything that is wrong, in place; return what it was."""
    wrong: list[str] = []
    for key in ("accepted", "kubelet"):
        if not isinstance(content.get(key, ""), str):
            wrong.append(f"{key}: not a text")
            del content[key]
    if type(number := content.get("generation", 0)) is not int or not 0 <= number < 2**62:
        wrong.append("generation: not a number")
        del content["generation"]
    for key, kind in {
        "cordons": Cordon,
        "claims": Claimed,
        "sides": Side,
        "time_slices": str,
        "resources": dict,
    }.items():
        if key in content:
            content[key] = _sound_rows(content[key], kind, key, wrong)
    resources = content.get("resources", {})
    for name in [name for name in resources if naming.resource_name_error(name)]:
        wrong.append(f"resources: {name[:80]!r} is no resource name")
        del resources[name]
    for name, resource in resources.items():
        for table, kind in rows.TABLES.items():
            if table in resource:
                resource[table] = _sound_rows(resource[table], kind, f"resources.{name}.{table}", wrong)
    return wrong


def _sound_rows(rows: Any, kind: Any, path: str, wrong: list[str]) -> dict[str, Any]:
    with contextlib.suppress(msgspec.ValidationError):  # All at once: it is fast, and rows are almost always sound.
        msgspec.convert(rows, dict[str, kind])
        return cast("dict[str, Any]", rows)
    if not isinstance(rows, dict):
        wrong.append(f"{path}: not an object")
        return {}
    sound = {}
    most = len(wrong) + _MAX_WRONG
    for key, row in rows.items():
        try:
            msgspec.convert(row, kind)
            sound[key] = row
        except msgspec.ValidationError as error:
            wrong.append(f"{path}.{key:.80}: {error!s:.200}")
            if len(wrong) > most:
                break
            if kind is Cordon:
                sound[key] = _sound_cordon(row)
    return sound


def _is_shallow(content: rows.Content) -> bool:
    """Return True if a value can be encoded at any depth of the stack."""
    level: list[Any] = [content]
    for _ in range(_MAX_DEPTH):
        parts = (part for value in level for part in (value.values() if isinstance(value, dict) else value))
        level = [part for part in parts if isinstance(part, (dict, list))]
        if not level:
            return True
    return False
