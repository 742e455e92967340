"""Transcripts: what a tap recorded, as lines that two kubelets of one version must share. Pure.

Each line is a connection, a call with its end, or one whole message of it. Lines stand in the order in which connections
were first used and calls were opened; messages are spelled field by field from the wire definitions, and bytes that no
definition knows are shown, not dropped.

Normalised is only what chance decides:

- paths (the given directories) and the names of sockets, numbered in the order in which they are first mentioned;
- the order within sets: devices in a list and device IDs in a request (kubelets walk a hash map). Dialect 0.1 repeats a
  request's IDs in its answer, one spec each, so the IDs are sorted there too, apart from what the specs hold.

Left out is what is no part of a call: connections without one (a plain look whether somebody listens), HTTP/2's own
frames, and the headers, which name the library. Whether a call was over when the recording was read is a question of
when it was read.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from adapters.pb.v1beta1 import v1beta1_pb2
from adapters.registry import DIALECTS
from gateway_lab.wire.calls import Call
from gateway_lab.wire.tap import Connection

_UNORDERED = frozenset({"devicesIDs", "available_deviceIDs", "must_include_deviceIDs"})
"""Repeated strings that are sets: the kubelet's choice among equals, in the order of a hash map."""


def transcript(connections: Sequence[Connection], paths: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Write down what was said; ``paths`` says what to call a directory, such as ``{"/tmp/x": "<sockets>"}``."""
    return tuple(_Writer(connections, paths or {}).lines())


def diff(a: Sequence[str], b: Sequence[str]) -> list[str]:
    """Compare two transcripts: nothing when they are equal, else the differing lines with their surroundings."""
    return list(difflib.unified_diff(a, b, "first", "second", n=3, lineterm=""))


class _Writer:
    def __init__(self, connections: Sequence[Connection], paths: Mapping[str, str]) -> None:
        self._connections = [one for one in connections if one.calls or one.fault]
        self._paths = sorted(paths.items(), key=lambda item: -len(item[0]))
        self._sockets: dict[str, str] = {}
        self._versions: dict[str, str] = {}
        """The version under which each endpoint was registered: the two alpha APIs share their services' names."""
        for connection in self._connections:
            for call in connection.calls if connection.kind == "registration" else ():
                for request in call.requests:
                    register = v1beta1_pb2.RegisterRequest.FromString(request)
                    self._versions[register.endpoint] = register.version

    def lines(self) -> Iterator[str]:
        for number, connection in enumerate(self._connections, 1):
            to = "the kubelet" if connection.kind == "registration" else self._socket(connection.endpoint)
            yield f"connection {number}, to {to}"
            for opened, call in enumerate(connection.calls, 1):
                details = f": {self._plain(call.details)}" if call.details else ""
                yield f"  call {opened}, {call.path}: {call.end or 'open'}{details}"
                request, answer = self._classes(connection, call)
                for message in call.requests:
                    yield f"    > {self._message(request, message)}"
                for message in call.answers:
                    yield f"    < {self._message(answer, message)}"
            if connection.fault:
                yield f"  unreadable from here on: {connection.fault}"

    def _classes(self, connection: Connection, call: Call) -> tuple[type[Message] | None, type[Message] | None]:
        service, _, method = call.path.lstrip("/").partition("/")
        version = self._versions.get(connection.endpoint, "")
        speaking = [one for one in DIALECTS if service in {one.registration_service, one.plugin_service}]
        if not speaking:
            return None, None
        dialect = next((one for one in speaking if one.name == version), speaking[0])
        services: Mapping[str, ServiceDescriptor] = dialect.schema.services_by_name
        found = services[service.rpartition(".")[2]].methods_by_name.get(method)
        if found is None:
            return None, None
        return GetMessageClass(found.input_type), GetMessageClass(found.output_type)

    def _message(self, kind: type[Message] | None, data: bytes) -> str:
        if kind is None:
            return f"{len(data)} bytes of an unknown call: {data.hex()}"
        try:
            message = kind.FromString(data)
        except DecodeError:
            return f"{len(data)} bytes that are no {kind.DESCRIPTOR.name}: {data.hex()}"
        return f"{kind.DESCRIPTOR.name} {json.dumps(self._fields(message), ensure_ascii=False)}"

    def _fields(self, message: Message) -> dict[str, Any]:
        """Spell a message's fields in their order; those without a name by number and wire type."""
        found: dict[str, Any] = {}
        for field, value in message.ListFields():
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                found[field.name] = {str(key): self._value(one) for key, one in sorted(value.items())}
            elif isinstance(value, str | bytes | bool | int | float | Message):
                found[field.name] = self._value(value, field)
            else:
                found[field.name] = self._several(field, [self._value(one) for one in value])
        strangers = UnknownFieldSet(message)
        unknown = [
            f"field {one.field_number}, wire type {one.wire_type}: {one.data!r}"
            for one in (strangers[index] for index in range(len(strangers)))
        ]
        return {**found, "(unknown)": unknown} if unknown else found

    def _several(self, field: FieldDescriptor, values: list[Any]) -> list[Any]:
        if field.name in _UNORDERED:
            return sorted(values)
        if field.full_name.endswith(".ListAndWatchResponse.devices"):
            return sorted(values, key=lambda device: (device.get("ID", ""), json.dumps(device)))
        if field.message_type is not None and field.message_type.name == "DeviceRuntimeSpec":
            ids = sorted(spec.get("ID", "") for spec in values)
            return [{**spec, "ID": device_id} for spec, device_id in zip(values, ids, strict=True)]
        return values

    def _value(self, value: Any, field: FieldDescriptor | None = None) -> Any:
        if isinstance(value, Message):
            return self._fields(value)
        if isinstance(value, str):
            return self._socket(value) if field is not None and field.name == "endpoint" else self._plain(value)
        return value.hex() if isinstance(value, bytes) else value

    def _socket(self, name: str) -> str:
        return self._sockets.setdefault(name, f"<socket {len(self._sockets) + 1}>")

    def _plain(self, text: str) -> str:
        for path, name in self._paths:
            text = text.replace(path, name)
        for socket, name in self._sockets.items():
            text = text.replace(socket, name)
        return text
