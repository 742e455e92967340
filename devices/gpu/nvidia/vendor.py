"""NVIDIA's rules: names, and the MIG strategy, as in its device plugin (internal/rm/device_map.go of 0.17 to 0.20). Pure.

A GPU in MIG mode is offered whole, as its instances under the GPUs' name (``single``), or as its instances under a name per
profile (``mixed``). Profiles are named as by NVIDIA/go-nvlib (pkg/nvlib/device/mig_profile.go).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from devices.gpu.asked import Asked, visible_devices
from devices.gpu.model import GPU
from devices.gpu.naming import NamingError, matches
from devices.gpu.nvidia.answers import VARIABLE, by_strategies
from devices.gpu.vendor import Vendor
from devices.model import ContainerAnswer
from devices.policy import MigStrategy, Policy

PREFIX: Final = "nvidia.com/"
MIG_PROFILE_SUFFIXES: Final = (
    dict.fromkeys((7, 8), "+me")
    | dict.fromkeys((15, 16), "+me.all")
    | dict.fromkeys((10, 11, 12, 17), "+gfx")
    | dict.fromkeys((13, 14), "-me")
)
"""The suffix of a MIG profile's name, by the profile's number (NVML_GPU_INSTANCE_PROFILE_…)."""
ARCHITECTURES: Final = dict(
    enumerate(
        ("Kepler", "Maxwell", "Pascal", "Volta", "Turing", "Ampere", "Ada Lovelace", "Hopper", "Blackwell"), start=2
    )
)
"""By NVML_DEVICE_ARCH_…."""
BRANDS: Final = dict(enumerate(("Quadro", "Tesla", "NVS", "Grid", "GeForce", "Titan"), start=1)) | dict(
    enumerate(("QuadroRTX", "NvidiaRTX", "Nvidia", "GeForceRTX", "TitanRTX"), start=12)
)
"""By NVML_BRAND_…."""
ADDRESSING_MODES: Final = ("None", "HMM", "ATS")
"""By NVML_DEVICE_ADDRESSING_MODE_…."""


class _Nvidia(Vendor):
    name, prefix = "nvidia", PREFIX

    def name_of(self, gpu: GPU, policy: Policy) -> str | None:
        mig = policy.mig_strategy
        if not (gpu.parent and gpu.profile):  # It is not a MIG instance.
            whole = not gpu.partitioned or mig is MigStrategy.NONE
            return _by_pattern(gpu.product, policy.gpu_names, gpu.resource) if whole else None
        if mig is MigStrategy.MIXED:
            return _by_pattern(gpu.profile, policy.mig_names, f"{PREFIX}mig-{gpu.profile.replace('+', '.')}")
        return _by_pattern(gpu.profile, policy.mig_names, gpu.resource) if mig is MigStrategy.SINGLE else None

    def check(self, gpus: Sequence[GPU], policy: Policy) -> None:
        """Refuse what ``single`` can't name: GPUs with and without MIG, MIG without instances, or several profiles."""
        split = {gpu.uuid: gpu for gpu in gpus if gpu.partitioned}
        if not split or policy.mig_strategy is not MigStrategy.SINGLE:
            return
        whole = [gpu for gpu in gpus if not gpu.parent and not gpu.partitioned]
        empty = split.keys() - {gpu.parent for gpu in gpus}
        profiles = sorted({gpu.profile for gpu in gpus if gpu.parent in split})
        if whole:
            problem = f"{len(split)} GPUs in MIG mode and {len(whole)} without it ({_indexes(whole)})"
        elif empty:
            problem = f"no MIG instance on GPU {_indexes([split[uuid] for uuid in empty])}"
        elif len(profiles) > 1:
            problem = f"instances of several profiles ({', '.join(profiles[:8])})"
        else:
            return
        raise NamingError(
            "with the MIG strategy 'single', every GPU of the node must be in MIG mode, with instances of one profile. This node has "
            f"{problem}. Configure the GPUs alike, or use the strategy 'mixed'"
        )

    def given_names(self, policy: Policy) -> Collection[str]:
        return {name for _, name in (*policy.gpu_names, *policy.mig_names)}

    def was_repartitioned(self, uuid: str, gpus: Collection[GPU]) -> bool:  # noqa: ARG002 - Vendor's signature
        return uuid.startswith("MIG-")  # An instance vanishes only if the GPU was repartitioned.

    def answer(self, asked: Asked) -> ContainerAnswer:
        return by_strategies(asked)

    def again(self, asked: Asked) -> ContainerAnswer:
        return visible_devices(asked, VARIABLE)


NVIDIA: Final = _Nvidia()


def _by_pattern(word: str, names: Sequence[tuple[str, str]], usual: str) -> str | None:
    """Return the name of the first pattern that matches; ``usual`` without patterns."""
    if not names:
        return usual
    return next((name for pattern, name in names if matches(word, pattern)), None)


def _indexes(gpus: Iterable[GPU]) -> str:
    return ", ".join(str(gpu.index) for gpu in sorted(gpus, key=lambda gpu: gpu.index)[:8])


def profile_name(compute: int, slices: int, mebibytes: int, gpu_bytes: int) -> str:
    """Return the name of a MIG profile, such as ``1g.10gb``, with ``compute`` compute slices and ``slices`` GPU slices.

    Its memory (``mebibytes``) is rounded up to eighths of the GPU's memory (``gpu_bytes``, rounded up to GiB), as in
    getMigMemorySizeGB of go-nvlib.
    """
    eighths = math.ceil(mebibytes * 2**20 / max(gpu_bytes, 1) * 8) / 8
    gigabytes = math.floor(eighths * math.ceil(gpu_bytes / 2**30) + 0.5)
    return ("" if compute == slices else f"{compute}c.") + f"{slices}g.{gigabytes}gb"
