"""Which plugins of third parties are tried, and building them from the Go module proxy into the user's cache.

A plugin's folder here has the module file that names it and all that it rests on, by hash; and its ``main``, where it is a library.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from gateway_lab.kubelets import build

_SOURCES: Final = Path(__file__).parent
_MODULES: Final = Path(build.__file__).parent / "driver" / "mods"


@dataclass(frozen=True, kw_only=True)
class ThirdParty:
    """A plugin: what it is, what is built of which module, what it offers, and how many of it."""

    name: str
    """Of the program, too."""
    module: str
    """The module whose version is the plugin's."""
    source: str
    """The folder with its module file; ``kubelet-1.37`` is that of this kubelet, which pins what Kubernetes' own plugin rests on."""
    package: str
    resource: str = ""
    count: int = 0
    command: str
    """How it is started, with its folder as the working directory; as ``gateway conformance`` takes it."""
    hard_wired: bool = False
    ldflags: str = "-s -w"
    cgo: bool = False
    nvml: bool = False
    """Whether it runs on the tests' library in the place of NVML."""
    change: str = ""
    """What makes one of its devices unhealthy."""
    notes: str = ""
    """What a reader of its report must know."""


_SAMPLE: Final = ThirdParty(
    name="sample-device-plugin",
    module="k8s.io/kubernetes",
    source="kubelet-1.37",
    package="k8s.io/kubernetes/test/images/sample-device-plugin",
    command="env PLUGIN_SOCK_DIR=/var/lib/kubelet/device-plugins sample-device-plugin",
    resource="example.com/resource",
    count=2,
    hard_wired=True,
    notes="Kubernetes' own, for its end-to-end tests; its two devices are files. The variable is that of its DaemonSet.",
)
_OLDER_SAMPLE: Final = replace(_SAMPLE, source="kubelet-1.28")
_DPM: Final = ThirdParty(
    name="dpm-example",
    module="github.com/kubevirt/device-plugin-manager",
    source="dpm",
    package=".",
    command="dpm-example",
    resource="dpm.example/null",
    count=2,
    hard_wired=True,
    notes="The library, under a plugin of this project's own with two devices: what it answers to Allocate isn't the library's.",
)
# Without RDMA hardware it has no devices; how it is found, asked and told is the same.
_RDMA: Final = ThirdParty(
    name="rdma-shared-example",
    module="github.com/Mellanox/k8s-rdma-shared-dev-plugin",
    source="rdma",
    package=".",
    resource="rdma/hca_shared",
    command="rdma-shared-example rdma.json",
    hard_wired=True,
    notes="Its own servers, under a main of this project's that asks for no hardware: without RDMA there is no device.",
)
# go-nvml finds NVML's functions when they are called: no other program can be linked so.
FEATURE_DISCOVERY: Final = ThirdParty(
    name="gpu-feature-discovery",
    module="github.com/NVIDIA/k8s-device-plugin",
    source="gfd",
    package="github.com/NVIDIA/k8s-device-plugin/cmd/gpu-feature-discovery",
    command="gpu-feature-discovery",
    ldflags="-s -w -extldflags=-Wl,-z,lazy",
    cgo=True,
)
"""No plugin: NVIDIA's program that labels nodes, with which `make labels` compares ours."""
_NVIDIA: Final = ThirdParty(
    name="nvidia-device-plugin",
    module="github.com/NVIDIA/k8s-device-plugin",
    source="nvidia",
    package="github.com/NVIDIA/k8s-device-plugin/cmd/nvidia-device-plugin",
    resource="nvidia.com/gpu",
    count=8,
    command="nvidia-device-plugin",
    hard_wired=True,
    ldflags="-s -w -extldflags=-Wl,-z,lazy",  # NVML's functions are found when they are called
    cgo=True,
    nvml=True,
    change="sh -c 'echo event GPU-bf428e1d-f221-55de-a77f-a61755a4d727 8 79 4294967295 4294967295 >>$FAKE_NVML_WORLD.events'",
    notes="NVIDIA's own, on a library in the place of NVML (tests/fakes/nvml.py), which shows eight H100s. The change is Xid 79.",
)
BRIDGED: Final = (_SAMPLE, _DPM, _RDMA)
"""Those that are run behind the bridge."""
EXAMINED: Final = (_OLDER_SAMPLE, _SAMPLE, _DPM, _RDMA, _NVIDIA)
"""Those that are examined by ``gateway conformance``."""


def folder(plugin: ThirdParty) -> Path:
    """Say where a plugin's files are; those that are built of a kubelet's module file have none."""
    return _SOURCES / plugin.source


def version(plugin: ThirdParty) -> str:
    """Say which version of a plugin is built, as its module file has it."""
    text = _files(plugin)["go.mod"].read_text(encoding="utf-8")
    found = re.search(rf"^(?:require)?\s*{re.escape(plugin.module)} (v\S+)", text, re.MULTILINE)
    if found is None:
        raise build.BuildError(f"expected {plugin.module} in the module file of {plugin.name}, found none")
    return found[1]


def binary(plugin: ThirdParty) -> Path:
    """Build a plugin unless it is built; say where it is.

    Raises:
        gateway_lab.kubelets.build.BuildError: it can't be.
    """
    go = build.machine_go() or build.pinned_go(print)
    content = sorted((name, path.read_bytes()) for name, path in _files(plugin).items())
    key = build.go_fingerprint(go.version, plugin.package, plugin.ldflags, content)
    home = build.cache() / "plugins"
    place = home / f"{plugin.source}-{key}"
    with build.locked(home, print):
        if not place.is_dir():
            with tempfile.TemporaryDirectory() as made:
                for name, data in content:
                    (Path(made) / name).write_bytes(data)
                build.go_build(
                    go,
                    Path(made),
                    place / "binary",
                    ["-mod=mod", "-ldflags", plugin.ldflags, plugin.package],
                    name=plugin.name,
                    progress=print,
                    cgo=plugin.cgo,
                )
    [found] = place.iterdir()
    return found


def _files(plugin: ThirdParty) -> dict[str, Path]:
    """Give what it is built of. Kubernetes' dependencies only a main module can pin: the kubelet's does."""
    kubelet = plugin.source.removeprefix("kubelet-")
    if kubelet != plugin.source:
        return {name: _MODULES / f"k{kubelet}{name[2:]}" for name in ("go.mod", "go.sum")}
    return {path.name: path for path in folder(plugin).iterdir()}
