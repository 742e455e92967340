"""Resource names: one row is one name, and whether every kubelet takes it."""

from __future__ import annotations

import pytest

from devices.naming import resource_name_error

LABEL = "a" * 63


@pytest.mark.parametrize(
    "name",
    [
        "nvidia.com/gpu",
        "nvidia.com/gpu.shared",
        "nvidia.com/mig-1g.5gb",
        "amd.com/GPU_0",
        "a/b",
        f"example.com/{'x' * 63}",
        f"{LABEL}.{LABEL}.{LABEL}.{'b' * 52}/gpu",
    ],
)
def test_a_name_that_kubelets_register(name: str) -> None:
    assert resource_name_error(name) is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "the resource name '' has no domain"),
        ("gpu", "the resource name 'gpu' has no domain. Write one before it, such as nvidia.com/gpu"),
        ("kubernetes.io/gpu", "kubernetes.io, which belongs to Kubernetes"),
        ("beta.kubernetes.io/gpu", "kubernetes.io, which belongs to Kubernetes"),
        ("requests.nvidia.com/gpu", "starts with 'requests.'"),
        ("/gpu", "before the slash"),
        ("NVIDIA.com/gpu", "before the slash"),
        ("nvidia..com/gpu", "before the slash"),
        ("-nvidia.com/gpu", "before the slash"),
        (f"{LABEL}.{LABEL}.{LABEL}.{'b' * 53}/gpu", "at most 244"),
        ("nvidia.com/", "After the slash"),
        ("nvidia.com/gpu/0", "After the slash"),
        ("nvidia.com/-gpu", "After the slash"),
        ("nvidia.com/gpu ", "After the slash"),
        ("nvidia.com/gpu\n", "After the slash"),
        ("nvidia.com/gpü", "After the slash"),
        (f"nvidia.com/{'x' * 64}", "1 to 63"),
    ],
)
def test_a_name_that_some_kubelet_refuses(name: str, says: str) -> None:
    error = resource_name_error(name)
    assert error is not None
    assert says in error


def test_the_error_about_a_huge_name_is_short() -> None:
    error = resource_name_error("x" * 1_000_000)
    assert error is not None
    assert len(error) < 300
