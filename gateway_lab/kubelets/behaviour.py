"""What differs between kubelets as a device plugin meets them, 1.8 to 1.37: pure data, one row per difference.

A kubelet's behaviour is the oldest one known (1.8) with every later change up to its minor version laid over it, so each
row of ``CHANGES`` says one thing once. Rows were read in the device manager of the named version (newest patch release
of a minor version, unless a row says otherwise) and most were seen on the genuine device managers too.

Minor versions between two behaviour classes differ only in what the rows say; ``CLASSES`` are the ranges that people
talk about.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

OLDEST = 8
NEWEST = 37


class SecondRegister(Enum):
    """What a second Register of a resource does while the first plugin's stream lives."""

    UNION = "the old stream is closed after the new first list; the old devices stay for ever, as phantoms"
    CLOSE_OLD = "the old connection is closed; of two racing registrations the later to finish is dropped"
    OVERWRITE = "the old stream stays open, and its later lists overwrite the new plugin's"
    DISCONNECT_NEW = "as OVERWRITE, and when the old stream ends, the new plugin is disconnected"
    PER_SOCKET = "as OVERWRITE, but the resource lives until its last plugin is gone; a connected path is refused"


class Checkpoint(Enum):
    """The format of ``kubelet_internal_checkpoint``."""

    ENTRIES = "Entries: one per device"
    BARE = "PodDeviceEntries and RegisteredDevices"
    LIST = "Data and Checksum; DeviceIDs is a list"
    NUMA = "Data and Checksum; DeviceIDs is a map from NUMA node to list"


class Dial(Enum):
    """How the kubelet connects to the plugin."""

    AT_ONCE = "no waiting: a plugin that doesn't listen yet is never served"
    BLOCKING = "waits up to DIAL_SECONDS for the plugin to listen"


DIAL_SECONDS = 10.0
ENDPOINT_GRACE_SECONDS = 300.0
"""How long the records keep a resource whose plugin is gone (endpointStopGracePeriod)."""
PRE_START_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Behaviour:
    """One kubelet minor version."""

    minor: int = OLDEST
    certain: bool = True
    """False for a version newer than any that was read: it is taken to behave like the newest."""

    dialect: str = "0.1"
    grpc_go: str = "1.3.0"
    """The version of its grpc-go, which is its user-agent towards the plugin."""
    path_as_authority: bool = True
    """Whether ``:authority`` is the plugin's socket path (else ``localhost``)."""
    receive_limit: int | None = None
    """The most bytes it receives in one message, on kubelet.sock and from the plugin; None: no limit."""

    unsupported_version: str = "unsupported API version by the Kubelet registry"
    """The error of a Register with another version; ``{}`` is the version asked for, quoted."""
    invalid_name: str = "the ResourceName is invalid"
    """The error of a Register with an invalid resource name; ``{}`` is the name, quoted."""
    qualified_name: bool = False
    """Whether a name must be a qualified name, and may not start with ``requests.``."""

    sync_register: bool = False
    """Whether Register answers only after connecting and GetDevicePluginOptions, with their errors."""
    register_cancels_dial: bool = False
    """Whether a plugin that gives up its Register ends the connecting too."""
    dial: Dial = Dial.AT_ONCE
    second_register: SecondRegister = SecondRegister.UNION
    list_is_delta: bool = True
    """Whether a list is applied as a difference to this plugin's previous one (else it replaces what was there)."""

    sockets_only: bool = False
    """Whether a start deletes only sockets from its directory (else every non-directory but the checkpoint)."""
    checkpoint: Checkpoint = Checkpoint.ENTRIES
    overwrites_checkpoint: bool = True
    """Whether it writes it over in place (else beside, and renames that)."""
    also_reads: Checkpoint | None = None
    """A checkpoint format of an older version that it can still read."""
    numa_key: str = "0"
    """The key of devices without topology in a NUMA checkpoint."""

    allocates_at_start: bool = True
    """Whether Allocate is called at each start of a container, and nothing at admission."""
    checks_health: bool = False
    """Whether devices that a container already has are looked at when it is admitted again."""
    reallocates: bool = False
    """Whether a container that starts without devices in its records is allocated some then."""
    changed_request: str = "pod {0} container {1} changed request for resource {2} from {3} to {4}"
    """The error of an admission that asks for another number of devices than the container has."""
    unknown_plugin: str = "Unknown Device Plugin {}"
    """The error of an Allocate for a resource without a plugin."""
    starts_for_none: bool = True
    """Whether PreStartContainer is also due for a container that asks for 0 (which then fails)."""
    empty_answer: str = "panic: runtime error: index out of range [0] with length 0"
    """What becomes of an Allocate answer without container_responses."""

    counts_unhealthy: bool = False
    """Whether unhealthy devices count in the capacity (else capacity is what is allocatable)."""
    pre_start: bool = False
    preferred: bool = False
    topology: bool = False
    cdi: bool = False
    """Whether its API types have ``cdi_devices``: dropped in silence where they don't."""
    cdi_gate: bool | None = None
    """The default of the feature gate DevicePluginCDIDevices; None where there is no such gate."""
    cdi_annotation: bool = False
    """Whether CDI names are also told to the runtime as an annotation."""

    @property
    def name(self) -> str:
        """The version as people write it: ``1.28``."""
        return f"1.{self.minor}"

    def refuse_version(self, asked: str) -> str:
        """Give the text that answers a Register with version ``asked``."""
        return self.unsupported_version.format(_quoted(asked))

    def refuse_name(self, resource: str) -> str | None:
        """Give the text that answers a Register of ``resource``, or None where the name is a valid one."""
        if self.minor == OLDEST and not resource:
            return "invalid Empty ResourceName"
        native = "/" not in resource or "kubernetes.io/" in resource
        if native or (self.qualified_name and not _extended(resource)):
            return self.invalid_name.format(_quoted(resource))
        return None


@dataclass(frozen=True, slots=True)
class Change:
    """From kubelet 1.``since`` on, these fields of ``Behaviour`` have these values."""

    since: int
    values: Mapping[str, Any]
    source: str = ""


def _supported(word: str) -> str:
    return f"requested API version {{}} is not supported by kubelet. Supported {word}"


_NO_CONTAINERS = "no containers return in allocation response {}"
_GOGO_EMPTY = "&AllocateResponse{ContainerResponses:[]*ContainerAllocateResponse{},}"

CHANGES = (
    Change(9, {"dialect": "v1alpha2", "unsupported_version": _supported('version is "v1alpha2"')}),
    Change(9, {"invalid_name": "the ResourceName {} is invalid"}),
    Change(9, {"second_register": SecondRegister.CLOSE_OLD}),
    Change(9, {"allocates_at_start": False}),
    Change(9, {"checkpoint": Checkpoint.BARE}),
    Change(10, {"dialect": "v1beta1", "unsupported_version": _supported('versions are ["v1beta1"]')}),
    Change(10, {"grpc_go": "1.7.5", "receive_limit": 4 << 20}, "grpc-go limits messages from 1.4 on"),
    Change(10, {"qualified_name": True, "overwrites_checkpoint": False}),
    Change(10, {"dial": Dial.BLOCKING}),
    Change(10, {"counts_unhealthy": True, "pre_start": True}),
    Change(11, {"checkpoint": Checkpoint.LIST}, "kubernetes #61491"),
    Change(12, {"unsupported_version": _supported('version is ["v1beta1"]')}),
    Change(12, {"second_register": SecondRegister.OVERWRITE, "list_is_delta": False}),
    Change(12, {"empty_answer": _NO_CONTAINERS.format(_GOGO_EMPTY)}, "kubernetes #66596"),
    Change(12, {"changed_request": 'pod "{0}" container "{1}" changed request for resource "{2}" from {3} to {4}'}),
    Change(13, {"grpc_go": "1.13.0"}),
    Change(14, {"reallocates": True}),
    Change(16, {"grpc_go": "1.23.0", "topology": True}),
    Change(16, {"unknown_plugin": "unknown Device Plugin {}"}),
    Change(17, {"grpc_go": "1.23.1"}),
    Change(18, {"grpc_go": "1.26.0"}),
    Change(19, {"grpc_go": "1.27.0", "preferred": True}),
    Change(20, {"grpc_go": "1.27.1"}),
    Change(20, {"checkpoint": Checkpoint.NUMA, "also_reads": Checkpoint.LIST}, "reading: late 1.20, #102880"),
    Change(21, {"starts_for_none": False}),
    Change(22, {"grpc_go": "1.38.0"}),
    Change(23, {"grpc_go": "1.40.0", "numa_key": "-1"}),
    Change(25, {"grpc_go": "1.47.0", "sync_register": True}),
    Change(25, {"second_register": SecondRegister.DISCONNECT_NEW}, "kubernetes #121994, #127803"),
    Change(25, {"checks_health": True}, "late 1.25, kubernetes #116376"),
    Change(26, {"grpc_go": "1.56.3", "path_as_authority": False}),
    Change(28, {"cdi": True, "cdi_gate": False, "cdi_annotation": True}),
    Change(29, {"grpc_go": "1.58.3", "cdi_gate": True}),
    Change(31, {"grpc_go": "1.65.0", "also_reads": None, "sockets_only": True}, "read in 1.31.0"),
    Change(33, {"grpc_go": "1.68.1", "cdi_annotation": False}, "read in 1.33.0"),
    Change(34, {"grpc_go": "1.72.1", "cdi_gate": None}, "the gate was removed by 1.34.0"),
    Change(35, {"grpc_go": "1.72.2", "register_cancels_dial": True, "empty_answer": _NO_CONTAINERS.format("")}),
    Change(36, {"grpc_go": "1.79.3"}),
    Change(37, {"grpc_go": "1.82.1", "second_register": SecondRegister.PER_SOCKET}, "kubernetes #135437"),
)

CLASSES = ((8, 8), (9, 9), (10, 11), (12, 24), (25, 36), (37, 37))
"""The behaviour classes as people talk of them: first and last minor version."""


def behaviour(version: str) -> Behaviour:
    """Give the behaviour of a kubelet version such as ``1.28``, ``v1.28`` or ``1.28.15`` (the patch plays no part).

    Raises:
        ValueError: this is no kubelet version, or one from before device plugins.
    """
    match = re.fullmatch(r"v?1\.(\d{1,3})(\.\d+)?", version)
    if match is None or (minor := int(match[1])) < OLDEST:
        raise ValueError(f"expected a kubelet version from 1.{OLDEST} on, such as 1.28, but got {version!r}")
    values = {name: value for change in CHANGES if change.since <= minor for name, value in change.values.items()}
    return Behaviour(minor=minor, certain=minor <= NEWEST, **values)


_NAME_PART = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def _extended(resource: str) -> bool:
    """Tell whether ``requests.`` + the name is a qualified name, and the name itself has no such prefix."""
    prefix, _, name = f"requests.{resource}".partition("/")
    return (
        not resource.startswith("requests.")
        and len(prefix) <= 253
        and _SUBDOMAIN.fullmatch(prefix) is not None
        and len(name) <= 63
        and _NAME_PART.fullmatch(name) is not None
    )


def _quoted(text: str) -> str:
    """Spell a string as the kubelet's ``%q`` does; alike for anything printable."""
    return json.dumps(text, ensure_ascii=False)
