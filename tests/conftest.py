"""What every test shares: a header that says what is really run against."""

from __future__ import annotations

import platform
from importlib.metadata import version

from gateway.lab.build import available, built


def pytest_report_header() -> list[str]:
    wire = ", ".join(f"{name} {version(name)}" for name in ("grpcio", "protobuf"))
    kubelets = ", ".join(kubelet for kubelet in available() if built(kubelet))
    return [
        f"against: Python {platform.python_version()}, {wire}",
        f"genuine kubelets: {kubelets or 'none (make kubelets)'}",
    ]
