"""The content of the state file in memory: tables of rows by resource and device. Does no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar, cast

import msgspec

from gateway.memory.rows import Content

Changes: TypeAlias = dict[tuple[str, ...], Any]
"""New values by path in the file: fields of a row, another value, or None to remove the row."""
_V = TypeVar("_V")


class Tables:
    """The content, and which fields of it changed since the last write."""

    def __init__(self) -> None:
        self.content: Content = {}
        self.touched: set[str] = set()
        """The fields of the file that changed since the last write."""
        self.revision = 0
        """A number that grows with each change."""
        self._values: dict[tuple[str, ...], Any] = {}
        """Cache of decoded tables, by path: each device event needs them, and they may have thousands of rows."""
        self._encoded: dict[tuple[str, ...], msgspec.Raw] = {}
        """Cache of encoded tables, by path: most writes change only one table, and to encode all takes 1.5 to 3 ms."""

    def replace(self, content: Content) -> None:
        """Replace the content, for instance with the file's."""
        self.content = content
        self._values.clear()
        self._encoded.clear()

    def encoded(self) -> Content:
        """Return the content with each resource's tables encoded as JSON."""
        resources = self.content.get("resources", {})
        if not resources:
            return self.content
        return self.content | {"resources": {name: self._encode(name, tables) for name, tables in resources.items()}}

    def _encode(self, resource: str, tables: Content) -> dict[str, msgspec.Raw]:
        for table in tables:
            place = ("resources", resource, table)
            if place not in self._encoded:
                self._encoded[place] = msgspec.Raw(msgspec.json.encode(tables[table]))
        return {table: self._encoded["resources", resource, table] for table in tables}

    def rows(self, resource: str, table: str, among: Iterable[str] | None = None) -> dict[str, Content]:
        """Return the undecoded rows of a table; if ``among`` is given, only the rows of these devices."""
        rows: dict[str, Content] = self.content.get("resources", {}).get(resource, {}).get(table, {})
        return rows if among is None else {one: rows[one] for one in among if one in rows}

    def decoded(self, kind: type[_V], *place: str) -> _V:
        """Return the table at a path, such as ``claims``, decoded as ``kind``. Don't change it."""
        return self._value(place, lambda rows: msgspec.convert(rows, kind))

    def read(self, resource: str, table: str, value: Callable[[str, Content], _V]) -> Mapping[str, _V]:
        """Return a resource's table, decoded, by device ID. Don't change it."""
        place = ("resources", resource, table)
        return self._value(place, lambda rows: {device_id: value(device_id, row) for device_id, row in rows.items()})

    def _value(self, place: tuple[str, ...], make: Callable[[Content], _V]) -> _V:
        if place not in self._values:
            rows = self.content
            for name in place:
                rows = rows.get(name, {})
            self._values[place] = make(rows)
        return cast("_V", self._values[place])

    def note(
        self,
        resource: str,
        table: str,
        values: Mapping[str, _V],
        value: Callable[[str, Content], _V],
        row: Callable[[_V], Content],
    ) -> bool:
        """Put decoded values into a table. Return True if that changes any. Unchanged values cost almost nothing."""
        known = self.read(resource, table, value)
        news = {at: one for at, one in values.items() if known.get(at) is not one and known.get(at) != one}
        if not news:
            return False
        changed = self.put(resource, table, {device_id: row(one) for device_id, one in news.items()})
        self._values["resources", resource, table] = {**known, **news}
        return changed

    def put(self, resource: str, table: str, rows: Mapping[str, Content]) -> bool:
        """Merge rows into a table; other fields of a row stay. Return True if that changes any."""
        known = self.rows(resource, table)
        return self.change(
            {
                ("resources", resource, table, device_id): row
                for device_id, row in rows.items()
                if not row.items() <= known.get(device_id, {}).items()
            }
        )

    def put_value(self, field: str, value: str) -> bool:
        """Set a text field of the file. Return True if that changes it."""
        return self.content.get(field, "") != value and self.change({(field,): value})

    def set(self, resource: str, table: str, rows: Mapping[str, Content]) -> bool:
        """Set all rows of a table. Return True if that changes any."""
        dropped = self.drop(resource, table, self.rows(resource, table).keys() - rows.keys())
        return self.put(resource, table, rows) or dropped

    def drop(self, resource: str, table: str, device_ids: Iterable[str]) -> bool:
        """Remove rows from a table. Return True if there were any."""
        gone = self.rows(resource, table).keys() & set(device_ids)
        return self.change({("resources", resource, table, device_id): None for device_id in gone})

    def change(self, changes: Changes) -> bool:
        """Apply changes. Return False if there are none."""
        self.touched |= {at[0] for at in changes}
        self.revision += len(changes)
        apply(self.content, changes)
        for place in {at[:-1] for at in changes}:
            self._values.pop(place, None)
            self._encoded.pop(place, None)
        return bool(changes)


def apply(content: Content, changes: Changes) -> Content:
    """Apply changes to ``content``. Unnamed fields stay; objects that become empty are removed."""
    by_table: dict[tuple[str, ...], Content] = {}
    for at, row in changes.items():
        by_table.setdefault(at[:-1], {})[at[-1]] = row
    for parents, rows in by_table.items():
        trail = [content]
        for key in parents:
            trail.append(trail[-1].setdefault(key, {}))
        table = trail[-1]
        for leaf, row in rows.items():
            if row is None:
                table.pop(leaf, None)
            else:  # A new dict, because callers keep the old row.
                known = table.get(leaf)
                table[leaf] = known | row if isinstance(known, dict) and isinstance(row, dict) else row
        for key in reversed(parents):
            child, holder = trail.pop(), trail[-1]
            if not child:
                del holder[key]
    return content


def list_inputs(content: Content) -> bytes:
    """Encode all stored state that device lists depend on, except the announced devices."""
    rest = [content.get(name) or {} for name in ("cordons", "claims", "sides")]
    resources = content.get("resources", {}).items()
    kept = {
        name: {one: rows for one, rows in tables.items() if rows and one != "announced"} for name, tables in resources
    }
    return msgspec.json.encode((rest, {name: tables for name, tables in kept.items() if tables}), order="sorted")


def merged(under: Content, over: Content) -> Content:
    """Merge the readable part of a damaged file (``under``) with the memory's content (``over``), which wins."""
    both = under | over
    for key in under.keys() & over.keys():
        if isinstance(under[key], dict) and isinstance(over[key], dict):
            both[key] = merged(under[key], over[key])
    return both
