"""GPUs of a node as their drivers show them: NVIDIA's by the fake NVML, AMD's by a sysfs tree; and what the kernel shows beside."""

from __future__ import annotations

import ctypes
import importlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

from tests.contract import threads
from tests.contract.clock import current, patches
from tests.contract.node import GPU, VERSION, Gateway, Node
from tests.fakes import amd, nvml


def _by_default(of: str, name: str, **values: object) -> None:
    """Let a function's arguments be others where it isn't given any: where this node has its /sys, say."""
    function: Any = importlib.import_module(of)
    for part in name.split("."):
        function = getattr(function, part)
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = dict(zip(reversed(names), reversed(function.__defaults__ or ()), strict=False))
    others = {name: value for name, value in values.items() if name not in names}
    given = tuple(values.get(one, defaults[one]) for one in names if one in defaults)
    patches.setattr(function, "__defaults__", given or None)
    patches.setattr(function, "__kwdefaults__", {**(function.__kwdefaults__ or {}), **others})


class Host:
    """What stands for the host's root: its /sys, /proc and /dev, where CDI specifications are, and the driver's files."""

    resource = GPU
    """That of its GPUs, if they aren't shared or partitioned."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.backend: tuple[str, ...] = ("--backend", "none")
        self.root = node.folder / "host"
        self.sys, self.proc, self.dev = self.root / "sys", self.root / "proc", self.root / "dev"
        self.cdi, self.driver = self.root / "cdi", self.root / "driver"
        for folder in (self.sys, self.proc, self.dev, self.cdi, self.driver):
            folder.mkdir(parents=True, exist_ok=True)
        _by_default("devices.gpu.nvidia.backend", "NvidiaBackend.__init__", sys=self.sys, proc=self.proc, dev=self.dev)
        _by_default("devices.gpu.nvidia.cdifiles", "write_all", folder=self.cdi)
        self.features = self.root / "features.d" / "device-plugin-gateway"
        self.features.parent.mkdir(exist_ok=True)
        _by_default("devices.gpu.labels", "FeatureFile.__init__", path=self.features)
        _by_default("devices.gpu.nvidia.labels", "labels", sys=self.sys)
        _by_default("devices.gpu.amd.backend", "AmdBackend.__init__", sys=self.sys)
        exporter = self.root / "exporter.sock"
        _by_default("devices.gpu.amd.exporter", "Exporter.__init__", socket=exporter)
        _by_default("devices.generic", "GenericSource.__init__", root=self.root)
        _by_default("gateway.compose", "source", sys=self.sys)
        patches.setattr("gateway.unseen.PCI", self.sys / "bus/pci/devices")

    def gateway(self, *options: str, **environment: str) -> Gateway:
        """Start a gateway on this node."""
        return self.node.gateway(*self.backend, *options, environment=environment)

    async def served(
        self, count: int = 4, *options: str, resource: str = "", version: str = VERSION, **environment: str
    ) -> Gateway:
        """Start a kubelet and a gateway, and wait until so many devices are allocatable."""
        await self.node.start_kubelet(version)
        one = self.gateway(*options, **environment)
        await self.node.allocatable_is(count, resource or self.resource)
        return one

    def specification(self, kind: str = "k8s.device-plugin.nvidia.com-gpu") -> dict[str, Any]:
        """Return a CDI specification as container runtimes find it."""
        found: dict[str, Any] = json.loads((self.cdi / f"{kind}.json").read_text())
        return found


class Nvidia(Host):
    """NVIDIA's GPUs: change ``world`` and ``show`` it."""

    def __init__(self, node: Node, make: Callable[[Path], nvml.World] | None = None) -> None:
        super().__init__(node)
        self.backend = ("--backend", "nvidia", "--container-driver-root", str(self.driver))
        patches.setenv("FAKE_NVML_WORLD", str(self.root / "nvml"))
        self.world = (make or (lambda path: nvml.dgx(path, 4)))(self.root / "nvml")
        self._libraries: dict[object, ctypes.CDLL] = {}
        patches.setattr(pynvml, "_nvmlGetFunctionPointer", self._function)
        patches.setattr(pynvml, "nvmlLib", None)
        self.install()
        self.load()
        self.show()

    @property
    def uuids(self) -> list[str]:
        """The UUIDs of the GPUs, by index."""
        return [gpu.uuid for gpu in self.world.gpus]

    def install(self) -> None:
        """Put the driver's libraries into its root."""
        folder = self.driver / "usr/lib64"
        folder.mkdir(parents=True, exist_ok=True)
        draft = Path(shutil.copy(nvml.library(), folder / "draft"))
        draft.replace(folder / "libnvidia-ml.so.1")  # A process has the one before.
        (folder / f"libcuda.so.{self.world.driver}").touch()

    def load(self) -> None:
        """Load the kernel's driver, anew if it was loaded."""
        shutil.rmtree(self.sys / "module/nvidia", ignore_errors=True)
        (self.sys / f"module/{time.monotonic()}").mkdir(parents=True)  # The next one has another inode.
        (self.sys / "module/nvidia").mkdir()

    def show(self, *, nodes: bool = True) -> None:
        """Let NVML and the kernel show the world as it is now."""
        self.world.sysfs(self.sys)
        self.world.capabilities(self.proc)
        if nodes:
            self.world.device_nodes(self.dev)
            for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"):
                (self.dev / name).touch()
        gpus = self.proc / "driver/nvidia/gpus"
        shutil.rmtree(gpus, ignore_errors=True)
        for gpu in self.world.gpus:
            folder = gpus / gpu.pci.lower()
            folder.mkdir(parents=True)
            (folder / "information").write_text(f"GPU UUID: \t {gpu.uuid}\nDevice Minor: \t {gpu.minor}\n")
        self.show_nvml()

    def show_nvml(self) -> None:
        """Let NVML alone show the world as it is now: which of its calls fail is nothing that the kernel shows."""
        self.world.write()
        threads.wake()

    def event(self, gpu: int, xid: int = 0, **others: Any) -> None:
        """Let an error happen to a GPU, by its index."""
        self.world.event(gpu, xid, **others)
        threads.wake()

    def fails(self, function: str, code: int, gpu: int | None = None, *, hangs: float = 0) -> None:
        """Let a call of NVML fail, as ``World.fails``."""
        self.world.fails(function, code, gpu, hangs=hangs)
        self.show_nvml()

    def works(self, function: str, gpu: int | None = None) -> None:
        """Let it work again."""
        self.world.works(function, gpu)
        self.show_nvml()

    def mig(self, gpu: int, *profiles: str) -> list[nvml.Instance]:
        """Split a GPU, by its index, into these instances."""
        found = self.world.mig(gpu, *profiles)
        self.show()
        return found

    def no_mig(self, gpu: int) -> None:
        """Make a GPU whole, by its index."""
        self.world.no_mig(gpu)
        self.show()

    def calls(self) -> int:
        """Return how often NVML was called on this node."""
        found, many = nvml.Counts(), 0
        for library in self._libraries.values():
            library.fake_nvml_counts(ctypes.byref(found))
            many += found.calls
        return many

    def _function(self, name: str) -> Any:
        """Find a function of NVML as pynvml does: in a library of the process's own, which goes by the moved clock."""
        process = current()
        if process not in self._libraries:
            path = self.root / f"nvml-{len(self._libraries)}.so"
            shutil.copy(nvml.library(), path)
            self._libraries[process] = library = ctypes.CDLL(str(path))
            threads.clocked(library, self.node.clock.advance)
        try:
            return getattr(self._libraries[process], name)
        except AttributeError:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND) from None


class Amd(Host):
    """AMD's GPUs: ``make`` writes their tree, a row changes it."""

    resource = "amd.com/gpu"

    def __init__(self, node: Node, make: Callable[[Path], amd.Sysfs] = amd.mi210) -> None:
        super().__init__(node)
        self.backend = ("--backend", "amd")
        self.tree = make(self.sys)
