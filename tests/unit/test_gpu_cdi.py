"""CDI specifications: what stands in them, what they are made of, and how they are kept on disk."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from devices.gpu import cdi
from devices.gpu.cdi import Specification, with_gone
from devices.gpu.model import GPU
from devices.gpu.nvidia.cdi import (
    DriverFiles,
    Extra,
    GraphicsFiles,
    Symlink,
    qualified,
    specifications,
)
from devices.gpu.nvidia.cdifiles import CDIFileError, path_of, write
from devices.gpu.nvidia.driverfiles import DriverFilesError, find
from devices.model import Mount
from devices.policy import IdStrategy, Policy

VERSION = "550.54.15"
GPUS = (
    GPU("GPU-a", 0, 0, resource="nvidia.com/gpu", spec_nodes=("/dev/nvidia0",)),
    GPU("GPU-b", 1, 1, resource="nvidia.com/gpu", spec_nodes=("/dev/nvidia1",), partitioned=True),
    GPU(
        "MIG-c", 2, 1, parent="GPU-b", profile="1g.5gb", place="1:2", resource="nvidia.com/gpu",
        spec_nodes=("/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap31"),
    ),
)  # fmt: skip
EGL = "egl/egl_external_platform.d"
CUDA = f"/usr/lib64/libcuda.so.{VERSION}"
DRIVER = DriverFiles(
    libraries=(Mount(CUDA, f"/run/driver{CUDA}", read_only=True),),
    others=(Mount("/usr/bin/nvidia-smi", "/run/driver/usr/bin/nvidia-smi", read_only=True),),
    links=(
        Symlink("/usr/lib64/libcuda.so", "libcuda.so.1"),
        Symlink("/usr/lib64/libcuda.so.1", f"libcuda.so.{VERSION}"),
    ),
    nodes={Extra.GDS: ("/dev/nvidia-fs0",), Extra.GDRCOPY: ()},
    mounts={Extra.GDS: (Mount("/run/udev", "/run/udev", read_only=True),)},
)
PCI = "0000:07:00.0"
RO = ["ro", "nosuid", "nodev", "rbind", "rprivate"]
HOOKS = [
    ["create-symlinks", "--link", "libcuda.so.1::/usr/lib64/libcuda.so",
     "--link", f"libcuda.so.{VERSION}::/usr/lib64/libcuda.so.1"],
    ["enable-cuda-compat", f"--host-driver-version={VERSION}"],
    ["update-ldcache", "--folder", "/usr/lib64"],
    ["disable-device-node-modification"],
    ["update-application-profile"],
]  # fmt: skip


def only(policy: Policy | None = None, gpus: tuple[GPU, ...] = GPUS) -> Specification:
    (spec,) = specifications(gpus, ("/dev/nvidiactl",), policy or Policy(driver_root="/run/driver"), DRIVER)
    return spec


def node(path: str, root: str = "/run/driver") -> dict[str, str]:
    return {"path": path, "hostPath": root + path}


def test_the_whole_specification() -> None:
    assert only(gpus=GPUS[:1]) == {
        "cdiVersion": "0.5.0",
        "kind": "k8s.device-plugin.nvidia.com/gpu",
        "devices": [
            {"name": "GPU-a", "containerEdits": {"deviceNodes": [node("/dev/nvidia0")]}},
            {"name": "all", "containerEdits": {"deviceNodes": [node("/dev/nvidia0")]}},
        ],
        "containerEdits": {
            "env": ["NVIDIA_CTK_LIBCUDA_DIR=/usr/lib64", "NVIDIA_VISIBLE_DEVICES=void"],
            "deviceNodes": [node("/dev/nvidiactl")],
            "mounts": [
                {"hostPath": f"/run/driver{CUDA}", "containerPath": CUDA, "options": RO},
                {"hostPath": "/run/driver/usr/bin/nvidia-smi", "containerPath": "/usr/bin/nvidia-smi", "options": RO},
            ],
            "hooks": [
                {
                    "hookName": "createContainer",
                    "path": "/usr/bin/nvidia-ctk",
                    "args": ["nvidia-ctk", "hook", *words],
                    "env": ["NVIDIA_CTK_DEBUG=false"],
                }
                for words in HOOKS
            ],
        },
    }


@pytest.mark.parametrize(
    ("off", "left"),
    [
        pytest.param((), HOOKS, id="none"),
        pytest.param(("all",), [], id="all"),
        pytest.param(("update-ldcache", "create-symlinks", "chmod"), HOOKS[1:2] + HOOKS[3:], id="some, one unknown"),
        pytest.param(("enable-cuda-compat",), HOOKS[:1] + HOOKS[2:], id="what an older toolkit lacks"),
    ],
)
def test_hooks_that_are_disabled(off: tuple[str, ...], left: list[list[str]]) -> None:
    hooks = only(Policy(cdi_disabled_hooks=frozenset(off)))["containerEdits"].get("hooks", [])
    assert [hook["args"][2:] for hook in hooks] == left


@pytest.mark.parametrize(
    ("changes", "draws"),
    [
        pytest.param({}, True, id="a GPU"),
        pytest.param({"parent": "GPU-b", "profile": "1g.24gb+gfx"}, True, id="an instance for graphics"),
        pytest.param({"parent": "GPU-b", "profile": "1g.24gb+me"}, False, id="another instance"),
        pytest.param({"pci": "0000:08:00.0"}, False, id="a GPU that can't"),
    ],
)
def test_containers_get_what_they_draw_with(changes: dict[str, str], draws: bool) -> None:
    path = f"/dev/dri/by-path/pci-{PCI}-card"
    driver = DriverFiles((), graphics={PCI: GraphicsFiles(("/dev/dri/card1",), (Symlink(path, "../card1"),))})
    gpu = replace(GPU("GPU-x", 0, 0, pci=PCI, spec_nodes=("/dev/nvidia0",)), **changes)
    (spec,) = specifications([gpu, GPU("GPU-y", 1, 1)], (), Policy(driver_root="/run/driver"), driver)
    one, _, every = (device["containerEdits"] for device in spec["devices"])
    assert one == every
    assert one["deviceNodes"] == [node("/dev/nvidia0"), *([node("/dev/dri/card1")] if draws else [])]
    links = [hook["args"][2:] for hook in one.get("hooks", [])]
    assert links == ([["create-symlinks", "--link", f"../card1::{path}"]] if draws else [])
    (spec,) = specifications([gpu], (), Policy(cdi_disabled_hooks=frozenset({"create-symlinks"})), driver)
    assert "hooks" not in spec["devices"][0]["containerEdits"]


@pytest.mark.parametrize(
    ("policy", "version"),
    [
        pytest.param(Policy(), "0.3.0", id="nothing that is newer"),
        pytest.param(Policy(dev_root="/run/driver"), "0.5.0", id="host paths of nodes"),
        pytest.param(Policy(id_strategy=IdStrategy.INDEX), "0.5.0", id="names that begin with a digit"),
    ],
)
def test_the_lowest_version_that_has_all_of_it(policy: Policy, version: str) -> None:
    assert only(policy)["cdiVersion"] == version


@pytest.mark.parametrize("kind", ["gpu", "a/b/c", "1a/b", "a/b.c", "a/", "/b"])
def test_kinds_that_cdi_does_not_allow(kind: str) -> None:
    with pytest.raises(ValueError, match="not a kind"):
        cdi.qualified("a", kind)


# The rules of pkg/parser (ValidateDeviceName) in their own words, character by character.
@given(st.text(st.sampled_from("aZ0_.:-/ ,"), max_size=6))
def test_names_are_what_cdi_says(name: str) -> None:
    good = bool(name) and name[0].isalnum() and name[-1].isalnum() and all(c.isalnum() or c in "_.:-" for c in name)
    try:
        assert qualified(name).endswith(f"={name}")
    except ValueError:
        assert not good
    else:
        assert good


# --- what is gone ------------------------------------------------------------------------------------------------------

GONE = {"name": "GPU-gone", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia7"}]}}
ODD: tuple[dict[str, Any], ...] = (
    {"deviceNodes": 5},
    {"deviceNodes": [{}]},
    {"mounts": [{"hostPath": "/a"}]},
    {"env": [5]},
)
OLD = {"cdiVersion": "0.6.0", "kind": "k8s.device-plugin.nvidia.com/gpu", "devices": [GONE, {**GONE, "name": "GPU-a"}]}


@pytest.mark.parametrize(
    ("old", "kept"),
    [
        pytest.param(OLD, True, id="gone"),
        pytest.param({**OLD, "kind": "nvidia.com/gpu"}, False, id="another kind"),
        pytest.param({**OLD, "devices": [7, {"name": "GPU-gone"}]}, False, id="malformed devices"),
        pytest.param({**OLD, "devices": {"name": "GPU-gone"}}, False, id="malformed"),
        pytest.param(None, False, id="no file"),
        pytest.param({**OLD, "devices": [GONE, GONE]}, True, id="twice"),
        pytest.param({**OLD, "devices": [{**GONE, "name": "../x"}, GONE]}, True, id="a name that no runtime takes"),
        *(pytest.param({**OLD, "devices": [{"name": "GPU-odd", "containerEdits": edits}, GONE]}, True, id=f"odd {edits}") for edits in ODD),
        pytest.param({**OLD, "cdiVersion": "9.0.0"}, False, id="a version that no runtime takes"),
    ],
)  # fmt: skip
def test_a_device_that_went_stays(old: object, kept: bool) -> None:
    new = only(Policy())
    merged = with_gone(new, old)
    assert merged["devices"] == [*new["devices"], GONE] if kept else merged == new
    assert merged["cdiVersion"] == ("0.6.0" if kept else "0.3.0")


@pytest.mark.parametrize("version", ["9.x.0", "", None, "1.1", "999999.0.0"])
def test_a_version_that_is_none_does_not_spoil_the_file(version: object) -> None:
    assert with_gone(only(Policy()), {**OLD, "cdiVersion": version})["cdiVersion"] == "0.3.0"


def test_only_the_last_that_went_stay() -> None:
    many = [{**GONE, "name": f"GPU-{number}"} for number in range(1000)]
    assert with_gone(only(), {**OLD, "devices": many})["devices"] == [*only()["devices"], *many[-256:]]


# --- the file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff", b"[]", b'"x"', b"{}"])
def test_a_file_that_is_broken_is_replaced(tmp_path: Path, content: bytes) -> None:
    path_of(only(), tmp_path).write_bytes(content)
    assert write(only(), folder=tmp_path)
    assert json.loads(path_of(only(), tmp_path).read_bytes()) == only()


def test_a_foreign_file_stays_as_it_is(tmp_path: Path) -> None:
    foreign = tmp_path / "nvidia.yaml"
    foreign.write_text("kind: nvidia.com/gpu")
    write(only(), folder=tmp_path)
    assert foreign.read_text() == "kind: nvidia.com/gpu"
    ours = path_of(only(), tmp_path)
    ours.write_text('{"kind": "vendor.com/gpu"}')
    with pytest.raises(
        CDIFileError,
        match=re.escape("'vendor.com/gpu', not k8s.device-plugin.nvidia.com/gpu, so another program wrote it"),
    ):
        write(only(), folder=tmp_path)
    assert ours.read_text() == '{"kind": "vendor.com/gpu"}'


def test_a_link_in_its_place_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    path_of(only(), tmp_path).symlink_to(victim)
    write(only(), folder=tmp_path)
    assert victim.read_text() == "mine"
    assert not path_of(only(), tmp_path).is_symlink()


# --- the driver's files ------------------------------------------------------------------------------------------------


def put(root: Path, path: str, mode: int = 0o644) -> None:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    file.chmod(mode)


def link(root: Path, path: str, target: str) -> None:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.symlink_to(target)


def look(root: Path, **changes: Any) -> DriverFiles:
    policy = Policy(driver_root="/run/nvidia/driver", container_driver_root=str(root), **changes)
    return find(policy, VERSION, gpus=[PCI], sys=root / "sys")


def paths(mounts: tuple[Mount, ...]) -> dict[str, str]:
    assert all(mount.read_only is ("socket" not in mount.container_path) for mount in mounts)
    return {mount.container_path: mount.host_path for mount in mounts}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put(tmp_path, CUDA)
    return tmp_path


@pytest.mark.parametrize(
    "folder",
    [
        "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/lib64", "/lib/x86_64-linux-gnu",
        "/usr/lib/x86_64-linux-gnu/nvidia/current", "/usr/lib", "/usr/lib64/nvidia", "/usr/local/nvidia/lib64",
        "/usr/local/glibc/usr/lib", "/run/opengl-driver/lib",
    ],
)  # fmt: skip
def test_libraries_are_found_where_distributions_put_them(tmp_path: Path, folder: str) -> None:
    put(tmp_path, f"{folder}/libcuda.so.{VERSION}")
    put(tmp_path, f"{folder}/vdpau/libvdpau_nvidia.so.{VERSION}")
    put(tmp_path, f"{folder}/libcuda.so.470.1")
    put(tmp_path, f"{folder}/libc.so.6")
    assert paths(look(tmp_path).libraries) == {
        path: f"/run/nvidia/driver{path}"
        for path in (f"{folder}/libcuda.so.{VERSION}", f"{folder}/vdpau/libvdpau_nvidia.so.{VERSION}")
    }


def test_links_beside_a_library_are_made_again(root: Path) -> None:
    link(root, "/usr/lib64/libcuda.so.1", f"libcuda.so.{VERSION}")
    link(root, "/usr/lib64/libcuda.so", "libcuda.so.1")
    link(root, "/usr/lib64/libfoo.so", "/etc/passwd")
    link(root, "/usr/lib64/libcuda.so.0", f"libcuda.so.{VERSION}")
    assert look(root).links == (
        Symlink("/usr/lib64/libcuda.so", "libcuda.so.1"),
        Symlink("/usr/lib64/libcuda.so.0", f"libcuda.so.{VERSION}"),
        Symlink("/usr/lib64/libcuda.so.1", f"libcuda.so.{VERSION}"),
    )


@pytest.mark.parametrize(
    ("library", "path", "target"),
    [
        ("libcuda.so", "libcuda.so", "libcuda.so.1"),
        ("libGLX_nvidia.so", "libGLX_indirect.so.0", f"libGLX_nvidia.so.{VERSION}"),
        ("libnvidia-opticalflow.so", "libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1"),
        ("libnvidia-allocator.so", "gbm/nvidia-drm_gbm.so", "../libnvidia-allocator.so.1"),
        ("libnvidia-vulkan-producer.so", "libnvidia-vulkan-producer.so", f"libnvidia-vulkan-producer.so.{VERSION}"),
    ],
)
def test_links_that_the_loader_does_not_make(root: Path, library: str, path: str, target: str) -> None:
    put(root, f"/usr/lib64/{library}.{VERSION}")
    put(root, f"/usr/lib64/{library}.470.1")
    assert Symlink(f"/usr/lib64/{path}", target) in look(root).links
    assert len(look(root).links) == (1 if library == "libcuda.so" else 2)


@pytest.mark.parametrize(
    ("there", "inside"),
    [
        pytest.param("/usr/lib64/libnvidia-egl-gbm.so.1.1.2", "", id="EGL for GBM"),
        pytest.param("/usr/lib64/libnvidia-egl-wayland.so.1.1.13", "", id="EGL for Wayland"),
        pytest.param("/usr/lib64/libnvidia-egl-wayland2.so.1.0.1", "", id="EGL for Wayland, the second"),
        pytest.param("/usr/lib64/libnvidia-egl-xcb.so.1.0.4", "", id="EGL for XCB"),
        pytest.param("/usr/lib64/libnvidia-egl-xlib.so.1.0.4", "", id="EGL for Xlib"),
        pytest.param("/usr/lib64/libnvidia-nvvm70.so.4", "", id="NVVM"),
        pytest.param("/usr/share/nvidia/nvoptix.bin", "", id="OptiX"),
        pytest.param("/usr/share/glvnd/egl_vendor.d/10_nvidia.json", "", id="EGL"),
        *(pytest.param(f"/usr/local/share/{EGL}/{name}", f"/usr/share/{EGL}/{name}", id=name) for name in ("09_nvidia_wayland2.json", "20_nvidia_xcb.json", "20_nvidia_xlib.json")),
        pytest.param("/etc/X11/xorg.conf.d/10-nvidia.conf", "/usr/share/X11/xorg.conf.d/10-nvidia.conf", id="X server"),
        pytest.param("/etc/OpenCL/vendors/nvidia.icd", "", id="OpenCL"),
        pytest.param("/usr/share/OpenCL/vendors/nvidia.icd", "/etc/OpenCL/vendors/nvidia.icd", id="OpenCL, elsewhere"),
        pytest.param("/usr/lib64/xorg/modules/drivers/nvidia_drv.so", "", id="the X server's driver"),
        pytest.param(f"/usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{VERSION}", "", id="GLX"),
        pytest.param("/usr/share/vulkan/icd.d/nvidia_icd.json", "/etc/vulkan/icd.d/nvidia_icd.json", id="Vulkan"),
        pytest.param("/vulkan/icd.d/nvidia_layers.json", "/etc/vulkan/icd.d/nvidia_layers.json", id="Vulkan on GKE"),
        pytest.param("/etc/vulkan/implicit_layer.d/nvidia_layers.json", "/etc/vulkan/implicit_layer.d/nvidia_layers.json", id="Vulkan's layers"),
        pytest.param("/etc/passwd", None, id="nothing else"),
        pytest.param("/usr/lib64/libnvidia-egl-gbm.so.1", None, id="no version of its own"),
    ],
)  # fmt: skip
def test_what_graphics_needs(root: Path, there: str, inside: str | None) -> None:
    put(root, there)
    expected = {} if inside is None else {inside or there: f"/run/nvidia/driver{there}"}
    assert paths(look(root).others) == expected


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (f"/lib/firmware/updates/nvidia/{VERSION}/gsp.bin", f"/lib/firmware/nvidia/{VERSION}/gsp.bin"),
        (f"/lib/firmware/updates/{os.uname().release}/nvidia/{VERSION}/gsp.bin", f"/lib/firmware/updates/nvidia/{VERSION}/gsp.bin"),
        (f"/opt/firmware/nvidia/{VERSION}/gsp.bin", f"/lib/firmware/updates/nvidia/{VERSION}/gsp.bin"),
        ("/usr/lib64/xorg/modules/drivers/nvidia_drv.so", "/usr/X11R6/lib/modules/drivers/nvidia_drv.so"),
    ],
    ids=["firmware", "firmware of this kernel", "firmware, where the kernel is told to look", "the X server's driver"],
)  # fmt: skip
def test_of_several_places_the_first_counts(root: Path, first: str, second: str) -> None:
    put(root, "/sys/module/firmware_class/parameters/path")
    (root / "sys/module/firmware_class/parameters/path").write_text("/opt/firmware\n")
    put(root, first)
    put(root, second)
    assert list(paths(look(root).others)) == [first]


def test_links_stay_inside_the_root(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    put(outside, f"libnvidia-ml.so.{VERSION}")
    put(outside, "nvidia-smi", 0o755)
    link(root, f"/usr/lib64/libnvidia-ml.so.{VERSION}", f"{outside}/libnvidia-ml.so.{VERSION}")
    link(root, "/usr/lib/x86_64-linux-gnu", "../../../../../.." + str(outside))
    link(root, "/usr/bin", str(outside))
    link(root, "/usr/lib64/libcycle.so.1", "libcycle.so.1")
    found = look(root)
    assert list(paths(found.libraries)) == [CUDA]
    assert found.others == ()


@pytest.mark.parametrize(("links", "leads"), [(40, True), (41, False)])
def test_as_many_links_are_followed_as_linux_follows(root: Path, links: int, leads: bool) -> None:
    put(root, f"/opt/libnvidia-ml.so.{VERSION}")
    for number in range(1, links):
        link(root, f"/opt/{number}", str(number + 1) if number < links - 1 else f"libnvidia-ml.so.{VERSION}")
    link(root, f"/usr/lib64/libnvidia-ml.so.{VERSION}", "/opt/1")
    assert (f"/opt/libnvidia-ml.so.{VERSION}" in paths(look(root).libraries)) is leads


def test_an_absolute_link_means_the_root_of_the_driver(root: Path) -> None:
    put(root, f"/opt/driver/libnvidia-ml.so.{VERSION}")
    link(root, f"/usr/lib64/libnvidia-ml.so.{VERSION}", f"/opt/driver/libnvidia-ml.so.{VERSION}")
    assert f"/opt/driver/libnvidia-ml.so.{VERSION}" in paths(look(root).libraries)


def test_programs_firmware_and_sockets(root: Path) -> None:
    put(root, "/usr/bin/nvidia-smi", 0o755)
    put(root, "/usr/bin/nvidia-imex", 0o644)
    put(root, "/usr/bin/bash", 0o755)
    put(root, f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin")
    put(root, f"/lib/firmware/nvidia/{VERSION}/ucodes_gb10x.bin")
    put(root, f"/lib/firmware/nvidia/{VERSION}/readme")
    put(root, "/lib/firmware/nvidia/470.1/gsp.bin")
    put(root, "/var/run/nvidia-persistenced/socket")
    link(root, "/run", "var/run")
    assert paths(look(root).others) == {
        "/usr/bin/nvidia-smi": "/run/nvidia/driver/usr/bin/nvidia-smi",
        **{
            f"/lib/firmware/nvidia/{VERSION}/{name}": f"/run/nvidia/driver/lib/firmware/nvidia/{VERSION}/{name}"
            for name in ("gsp_ga10x.bin", "ucodes_gb10x.bin")
        },
        "/run/nvidia-persistenced/socket": "/run/nvidia/driver/var/run/nvidia-persistenced/socket",
    }


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take plain files for device nodes, which only root can make."""
    monkeypatch.setattr(stat, "S_ISCHR", stat.S_ISREG)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    ("extra", "nodes"),
    [
        (Extra.GDRCOPY, ("/dev/gdrdrv",)),
        (Extra.GDS, ("/dev/nvidia-fs0", "/dev/nvidia-fs1")),
        (Extra.MOFED, ("/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm")),
    ],
    ids=lambda value: value.value if isinstance(value, Extra) else "",
)
def test_nodes_of_extras_are_below_the_drivers_root(root: Path, extra: Extra, nodes: tuple[str, ...]) -> None:
    for path in (*nodes, "/dev/infiniband/umad0"):
        put(root, path)
    assert look(root).nodes[extra] == nodes


@pytest.mark.usefixtures("plain")
def test_a_gpu_has_the_nodes_that_it_draws_with(root: Path) -> None:
    for path in (f"/sys/bus/pci/devices/{PCI}/drm/card1", f"/sys/bus/pci/devices/{PCI}/drm/renderD128"):
        put(root, path)
    put(root, f"/sys/bus/pci/devices/{PCI}/drm/card9")
    for name in ("card0", "card1", "renderD128"):
        put(root, f"/dev/dri/{name}")
    link(root, f"/dev/dri/by-path/pci-{PCI}-card", "../card1")
    link(root, f"/dev/dri/by-path/pci-{PCI}-render", "../card0")
    drawing = GraphicsFiles(
        ("/dev/dri/card1", "/dev/dri/renderD128"), (Symlink(f"/dev/dri/by-path/pci-{PCI}-card", "../card1"),)
    )
    assert look(root).graphics == {PCI: drawing}
    (root / f"dev/dri/by-path/pci-{PCI}-card").unlink()
    assert look(root).graphics == {PCI: GraphicsFiles(drawing.nodes)}


@pytest.mark.parametrize("version", ["", "550", "../../etc", "550.54.15\n", "*", "550.54.15/x"])
def test_a_version_that_is_none(root: Path, version: str) -> None:
    with pytest.raises(DriverFilesError, match="the driver's version, such as"):
        find(Policy(container_driver_root=str(root)), version)


def test_no_libraries_is_said(tmp_path: Path) -> None:
    put(tmp_path, f"/usr/lib64/libnvidia-ml.so.{VERSION}")
    (tmp_path / f"usr/lib64/libcuda.so.{VERSION}").mkdir()
    with pytest.raises(DriverFilesError, match=re.escape(f"no libcuda.so.{VERSION}")):
        look(tmp_path)
