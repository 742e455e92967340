"""What NVML's numbers mean: the names of MIG profiles, which GPU has which address, and how many there can be."""

from __future__ import annotations

from pathlib import Path

import pynvml
import pytest

from devices.gpu.nvidia.nvml import Nvml, NvmlError
from devices.gpu.nvidia.scan import Seat, addressed
from devices.gpu.nvidia.timeslice import set_time_slice
from devices.gpu.nvidia.vendor import MIG_PROFILE_SUFFIXES, profile_name
from devices.policy import Policy
from tests.fakes.nvml import GIB, library


@pytest.mark.parametrize(
    ("of", "name"),
    [
        ((1, 1, 4864, 40 * GIB), "1g.5gb"),
        ((1, 3, 19968, 40 * GIB), "1c.3g.20gb"),
        ((7, 7, 40192, 40 * GIB), "7g.40gb"),
        ((1, 1, 5952, 24 * GIB), "1g.6gb"),
        ((1, 1, 9984, 80 * GIB - 85 * 2**20), "1g.10gb"),
        ((0, 0, 0, 0), "0g.0gb"),
    ],
)
def test_the_name_of_a_profile(of: tuple[int, int, int, int], name: str) -> None:
    assert profile_name(*of) == name


def test_what_a_profiles_name_ends_in() -> None:
    ends = {"GFX": "+gfx", "NO_ME": "-me", "ALL_ME": "+me.all", "REV1": "+me"}
    numbers = ((name.partition("_SLICE_")[2], number) for name, number in vars(pynvml).items() if "_PROFILE_" in name)
    assert {number: ends[kind] for kind, number in numbers if kind in ends} == MIG_PROFILE_SUFFIXES


def test_it_counts_no_more_gpus_than_a_node_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1 << 31)
    assert Nvml(str(library())).count() == 256


@pytest.mark.parametrize(
    ("unseen", "free", "found"),
    [
        pytest.param([Seat(3)], ["d"], [(3, "d")], id="the address that is left is its own"),
        pytest.param([Seat(3), Seat(5)], ["d", "f"], [(3, "d"), (5, "f")], id="two, in the order of the bus"),
        pytest.param([Seat(3, pci="d"), Seat(5)], ["f"], [(3, "d"), (5, "f")], id="one told its address itself"),
        pytest.param([Seat(3)], [], [(3, "")], id="the kernel shows no addresses"),
        pytest.param([], ["d"], [(None, "d")], id="NVML doesn't count it"),
        pytest.param([Seat(3)], ["d", "f"], [(None, "d"), (None, "f")], id="NVML counts fewer: nobody knows which"),
    ],
)
def test_which_gpus_they_are_that_can_not_say_so(
    unseen: list[Seat], free: list[str], found: list[tuple[int | None, str]]
) -> None:
    assert [(one.index, one.pci) for one in addressed(unseen, free, NvmlError)] == found


def test_a_program_that_hangs_is_ended(tmp_path: Path) -> None:
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    policy = Policy(container_driver_root=str(tmp_path))
    words = set_time_slice(policy, "libnvidia-ml.so.1", "GPU-0", "Long", limit_s=0.1)
    assert words == f"{program} did not end within 0.1 s. Does the driver answer? See dmesg"
