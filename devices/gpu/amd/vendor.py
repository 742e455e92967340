"""AMD's rules: names by partition, as in its own device plugin (cmd/k8s-device-plugin/main.go), and device nodes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from devices.gpu.asked import Asked, by_nodes, visible_devices
from devices.gpu.model import GPU
from devices.gpu.naming import NamingError
from devices.gpu.vendor import Vendor
from devices.model import ContainerAnswer
from devices.policy import Naming, Policy

PREFIX: Final = "amd.com/"
# If both vendors had the same variable, a container with GPUs of both would see only those that the kubelet wrote last.
_VARIABLE: Final = "AMD_VISIBLE_DEVICES"


class _Amd(Vendor):
    name, prefix = "amd", PREFIX

    def name_of(self, gpu: GPU, policy: Policy) -> str | None:
        if gpu.partitioned:
            return None
        return f"{PREFIX}{gpu.profile}" if policy.resource_naming is Naming.MIXED and gpu.profile else gpu.resource

    def check(self, gpus: Sequence[GPU], policy: Policy) -> None:
        """Refuse GPUs that are partitioned differently. GPUs with a trouble don't count: they are unhealthy in any mode."""
        profiles = {gpu.profile for gpu in gpus if not gpu.partitioned and gpu.profile and gpu.trouble is None}
        if policy.resource_naming is Naming.SINGLE and len(profiles) > 1:
            raise NamingError(
                "with the resource naming strategy 'single', all GPUs must be partitioned alike, but the modes are "
                f"{', '.join(sorted(profiles)[:8])}. Partition them alike, or use the strategy 'mixed'"
            )

    def was_repartitioned(self, uuid: str, gpus: Collection[GPU]) -> bool:
        # A partition (``amdgpu_xcp_<n>``) also goes if its GPU fails. It was removed on purpose if all GPUs are healthy and whole.
        whole = all(not gpu.parent and gpu.profile.partition("_")[0] in {"", "spx"} for gpu in gpus)
        return uuid.startswith("amdgpu_xcp") and whole and bool(gpus) and all(gpu.trouble is None for gpu in gpus)

    def answer(self, asked: Asked) -> ContainerAnswer:
        """Return /dev/kfd and the GPUs' own nodes. Simulated GPUs have none, and are named in a variable."""
        asked.require_known("device nodes")
        return by_nodes(asked) if any(gpu.device_nodes for gpu in asked.known) else self.again(asked)

    def again(self, asked: Asked) -> ContainerAnswer:
        return visible_devices(asked, _VARIABLE)


AMD: Final = _Amd()
