"""By which words an operator leaves GPUs out (``--exclude-devices``)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from devices.gpu.model import GPU
from devices.gpu.naming import left_out

GPUS = "nvidia.com/gpu"
BIG = GPU("GPU-5f3a0c6e", 0, 0, pci="0000:07:00.0", product="NVIDIA H100 80GB HBM3", resource=GPUS, partitioned=True)
PART = replace(BIG, uuid="MIG-0a41", parent=BIG.uuid, place="0:1", profile="1g.10gb", partitioned=False)
DISPLAY = GPU("GPU-77b0", 1, 1, pci="0000:c5:00.0", product="NVIDIA T400 4GB", resource=GPUS)
TENTH = GPU("GPU-9d4a", 10, 10, pci="0001:07:00.0", product="NVIDIA H100 80GB HBM3", resource=GPUS)
ALL = (BIG, PART, DISPLAY, TENTH)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        pytest.param("GPU-77b0", [DISPLAY], id="UUID"),
        pytest.param("gpu-77B0", [DISPLAY], id="whatever its case"),
        pytest.param("GPU-77", [], id="the beginning alone is not enough"),
        pytest.param("GPU-77*", [DISPLAY], id="the beginning and a star"),
        pytest.param("1", [DISPLAY], id="index: not 10 also"),
        pytest.param("0", [BIG, PART], id="a GPU takes its partitions with it"),
        pytest.param("0:1", [PART], id="a partition alone, by place"),
        pytest.param("MIG-0a41", [PART], id="a partition alone, by UUID"),
        pytest.param("0000:c5:00.0", [DISPLAY], id="PCI address"),
        pytest.param("00000000:C5:00.0", [DISPLAY], id="PCI address as nvidia-smi writes it"),
        pytest.param("c5:00.0", [DISPLAY], id="PCI address as lspci writes it"),
        pytest.param("07:00.0", [BIG, PART], id="without a domain it is of the first one"),
        pytest.param("00000001:07:00.0", [TENTH], id="another domain"),
        pytest.param("NVIDIA T400 4GB", [DISPLAY], id="product"),
        pytest.param("*h100*", [BIG, PART, TENTH], id="some of a product"),
        pytest.param("T400", [], id="a part of a product is none"),
        pytest.param("GPU-[57]*", [], id="brackets are themselves"),
        pytest.param("*", ALL, id="all"),
    ],
)
def test_what_a_pattern_leaves_out(pattern: str, expected: Sequence[GPU]) -> None:
    assert left_out(ALL, (pattern,)) == {gpu.uuid: (pattern,) for gpu in expected}
