"""The gateway's settings: one frozen value, made by the command line from flags, variables and the configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field

from devices.policy import Policy

SOCKET_DIR = Path("/var/lib/kubelet/device-plugins")
"""Where every kubelet has its registration socket; fixed in the kubelet, whatever its --root-dir (#120626)."""
STATE_DIR = Path("/var/lib/device-plugin-gateway")


class ConfigError(ValueError):
    """Settings that can't be used. The message says where, what was expected, what came and what to do."""

    lasting = True
    """Whether it stays wrong until somebody corrects it."""


class Given(Struct, frozen=True):
    """What somebody said a flag to be, and where: ``--mig-strategy``, ``MIG_STRATEGY``, a line of the file."""

    value: bool | str | tuple[str, ...] | tuple[int, ...]
    source: str


class Choice(Struct, frozen=True):
    """How the node's label chooses one of several configuration files (``gateway.configuration.choice``)."""

    folder: Path
    label: str
    """The label's name."""
    default: str = ""
    """The configuration of a node without the label; empty: the fallback strategies say."""
    fallbacks: tuple[str, ...] = ()


class Settings(Struct, frozen=True):
    """All that the daemon can be told."""

    api: str = "auto"
    """One of ``gateway.registration.negotiate.CHOICES``."""
    socket_dir: Path = SOCKET_DIR
    state_dir: Path = STATE_DIR
    pod_resources: Path | None = None
    """The kubelet's pod-resources socket; None means beside the socket directory, where the kubelet has it."""
    backend: str = "auto"
    profile: str | None = None
    """For the simulated backend: a file, or the name of a profile that is shipped."""
    kubelet_minor: int | None = None
    """The kubelet's minor version (28 for 1.28), where the operator vouches for it."""
    startup_grace: float = 0.0
    """Seconds after the start in which a device may still turn up; 0: no such grace (docs/adr/0004)."""
    metrics_address: tuple[str, int] | None = None
    """Host and port to tell metrics on; None: nowhere."""
    metrics_device_ids: bool = False
    gpu_metrics: bool = False
    """Whether the metrics have the GPUs' own gauges, too."""
    probe_address: tuple[str, int] | None = None
    """Host and port to answer probes on; None: nowhere."""
    kubeconfig: Path | None = None
    """How to reach the API server; None: as a pod is told. Nobody is asked there unless a feature needs it."""
    node_name: str = ""
    """The node's name at the API server."""
    startup_taint: str = ""
    """The key of the taints that go when the node's GPUs are allocatable; empty: none."""
    node_condition: bool = False
    """Whether the node's condition says so."""
    node_events: bool = False
    """Whether the node's events tell what becomes of its GPUs."""
    dra: str = "off"
    """``off``, or ``only``: devices are offered by dynamic resource allocation, and not by the device plugin API."""
    dra_drivers: Mapping[str, str] = field(default_factory=dict)
    """The DRA drivers' names that an operator chose, by the domain of resources."""
    pod_uid: str = ""
    """The UID of the gateway's pod (``POD_UID``, by the downward API): the gateways of one pod are of one age. Empty: in no pod."""
    host_service: bool = False
    """Whether this is the node's own service, which every gateway that isn't leaves the resources to."""
    policy: Policy = Policy()
    """What the operator decided about devices."""
    config_file: Path | None = None
    """What can be edited while the gateway runs (``gateway.configuration.reload``)."""
    choice: Choice | None = None
    """How the configuration file is chosen; None: it is the one that was named."""
    node_label: str = ""
    """The label's value at the start."""
    log_format: str = "auto"
    log_level: str = "info"
    strict_config: bool = False
    """Whether keys of it that nobody knows are an error."""
    given: Mapping[str, Given] = field(default_factory=dict)
    """What command line and environment said of devices, by flag name: it beats the file, however often that changes."""

    @property
    def pod_resources_socket(self) -> Path:
        """Where the kubelet tells what it believes."""
        return self.pod_resources or self.socket_dir.parent / "pod-resources" / "kubelet.sock"

    @property
    def asks_api_server(self) -> bool:
        """Whether a feature is on that needs the API server."""
        return self.choice is not None or self.writes_node

    @property
    def writes_node(self) -> bool:
        """Whether a feature is on that writes the node at the API server, or events of it."""
        return bool(self.startup_taint) or self.node_condition or self.node_events
