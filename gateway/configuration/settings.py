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
    """A setting can't be used. The message names its source, what is wrong and what to do.

    Args:
        message: the message.
        options: the other settings that the message names, such as ``state-dir``.
    """

    lasting = True
    """True if only a person can correct it; False if it may pass by itself."""

    def __init__(self, message: str, *options: str) -> None:
        super().__init__(message)
        self.options = options


class Given(Struct, frozen=True):
    """The value of a setting, and where it comes from: ``--mig-strategy``, ``MIG_STRATEGY``, a line of the file."""

    value: bool | str | tuple[str, ...] | tuple[int, ...]
    source: str


class Choice(Struct, frozen=True):
    """How the node's label chooses one of several configuration files (``gateway.configuration.choice``)."""

    folder: Path
    label: str
    """The label's name."""
    default: str = ""
    """The configuration of a node without the label; empty: the fallback strategies decide."""
    fallbacks: tuple[str, ...] = ()


class Settings(Struct, frozen=True):
    """All settings of the daemon."""

    api: str = "auto"
    """One of ``gateway.registration.negotiate.CHOICES``."""
    socket_dir: Path = SOCKET_DIR
    state_dir: Path = STATE_DIR
    pod_resources: Path | None = None
    """The kubelet's pod-resources socket; None means next to the socket directory, where the kubelet has it."""
    backend: str = "auto"
    profile: str | None = None
    """For the simulated backend: a file, or the name of a profile that is shipped."""
    kubelet_minor: int | None = None
    """The kubelet's minor version (28 for 1.28), if the operator sets it."""
    startup_grace: float = 0.0
    """Seconds after a reboot for which containers wait for a late driver (docs/adr/0004)."""
    metrics_address: tuple[str, int] | None = None
    """Host and port of the metrics; None: no metrics."""
    metrics_device_ids: bool = False
    gpu_metrics: bool = False
    """True if the metrics have the GPUs' own gauges."""
    probe_address: tuple[str, int] | None = None
    """Host and port of the probes; None: no probes."""
    kubeconfig: Path | None = None
    """The kubeconfig for the API server; None: the pod's service account is used. The gateway connects only if a feature needs it."""
    node_name: str = ""
    """The node's name at the API server."""
    startup_taint: str = ""
    """The key of the taints to remove when the node's GPUs are allocatable; empty: none."""
    node_condition: bool = False
    """True to keep a condition of the node that reports whether its GPUs are allocatable."""
    node_events: bool = False
    """True to report GPUs that become unhealthy or recover in events of the node."""
    dra: str = "off"
    """``off``, ``on`` (with the device plugin API) or ``only`` (without it): Dynamic Resource Allocation."""
    dra_drivers: Mapping[str, str] = field(default_factory=dict)
    """The DRA drivers' names that an operator chose, by the domain of resources."""
    dra_shares: str = "devices"
    """How claims get a shared GPU: each replica is one of the ``devices``, or claims ask for shares of its ``capacity``."""
    pod_uid: str = ""
    """The UID of the gateway's pod (``POD_UID``, by the downward API), because the gateways of one pod have one age; '' outside a pod."""
    host_service: bool = False
    """True for the node's own service. Gateways in pods stand by for it."""
    policy: Policy = Policy()
    """The settings of devices."""
    config_file: Path | None = None
    """The configuration file, which can be edited while the gateway runs (``gateway.configuration.reload``)."""
    choice: Choice | None = None
    """How the node's label chooses the configuration file; None: no label chooses it."""
    node_label: str = ""
    """The value of the node's label at the start."""
    log_format: str = "auto"
    log_level: str = "info"
    strict_config: bool = False
    """True if unknown keys of the configuration file are an error."""
    given: Mapping[str, Given] = field(default_factory=dict)
    """The settings of devices from the command line and the environment, by name. They win over each version of the file."""

    @property
    def pod_resources_socket(self) -> Path:
        """The kubelet's pod-resources socket."""
        return self.pod_resources or self.socket_dir.parent / "pod-resources" / "kubelet.sock"

    @property
    def asks_api_server(self) -> bool:
        """True if a feature needs the API server."""
        return self.choice is not None or self.writes_node

    @property
    def writes_node(self) -> bool:
        """True if a feature writes the node at the API server, or its events."""
        return bool(self.startup_taint) or self.node_condition or self.node_events
