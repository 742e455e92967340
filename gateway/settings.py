"""The gateway's settings: one frozen value, made by the command line from flags and ``GATEWAY_*`` variables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SOCKET_DIR = Path("/var/lib/kubelet/device-plugins")
"""Where every kubelet has its registration socket; fixed in the kubelet, whatever its --root-dir (#120626)."""
STATE_DIR = Path("/var/lib/device-plugin-gateway")
BACKENDS = ("auto", "simulated")


@dataclass(frozen=True, slots=True)
class Settings:
    """All that the daemon can be told."""

    api: str = "auto"
    """One of ``gateway.negotiate.CHOICES``."""
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
