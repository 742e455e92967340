"""CONTRIBUTING's two how-tos, followed: what they name, and nothing else, makes a new API version and a new vendor work."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from adapters.pb.v1beta1 import v1beta1_pb2

ROOT = Path(__file__).parents[2]
COPIED = ("adapters", "devices", "gateway", "gateway_lab", "protos")
PROOFS = {"tests/mutants/", "tests/fakes/", "docs/", "gateway_lab/kubelets/driver/"}
"""What the how-tos name for proofs alone: it is there already."""


def named(heading: str) -> list[str]:
    """Give the files that a section of CONTRIBUTING.md names; a folder, with a slash at its end, means any file below it."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    steps = section.split("\n1. ")[1]
    return list(dict.fromkeys(re.findall(r"`([\w<>./]*/[\w<>./]*|pyproject\.toml)`", steps)))


class Copy:
    """A copy of the tree, in which only files can be written that the text names."""

    def __init__(self, root: Path, heading: str, **placeholders: str) -> None:
        self.root = root
        names = named(heading)
        for placeholder, value in placeholders.items():
            names = [name.replace(f"<{placeholder}>", value) for name in names]
        self.names = names
        self.used: set[str] = set()
        for folder in COPIED:  # With its byte code, which stays valid.
            shutil.copytree(ROOT / folder, root / folder)
        shutil.copy2(ROOT / "pyproject.toml", root)

    def write(self, path: str, text: str) -> None:
        covering = [name for name in self.names if path == name or (name.endswith("/") and path.startswith(name))]
        assert covering, f"CONTRIBUTING.md doesn't name {path}: {self.names}"
        self.used.update(covering)
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def edit(self, path: str, old: str, new: str) -> None:
        text = (self.root / path).read_text()
        assert text.count(old) == 1, f"{path}: {old!r} is there {text.count(old)} times"
        self.write(path, text.replace(old, new))

    def run(self, *command: str) -> str:
        """Run a command there and give what it printed; AssertionError with that where it fails."""
        here = {**os.environ, "PYTHONPATH": str(self.root)}
        done = subprocess.run(command, cwd=self.root, env=here, text=True, capture_output=True, check=False)
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def proves(self, *arguments: str) -> None:
        self.run(sys.executable, str(ROOT / "tests" / "unit" / "pretend.py"), *arguments)

    def unused(self) -> set[str]:
        """Give what the text names in vain."""
        return {name for name in self.names if name not in self.used | PROOFS}


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dpg-contributing-") as folder:
        yield Path(folder)


def generated(path: str) -> str:
    """v1beta1's messages as ``make generate`` would write those of another package, in a module that needs no protoc."""
    proto = FileDescriptorProto.FromString(
        v1beta1_pb2.DESCRIPTOR.serialized_pb.replace(b".v1beta1.", b".v1alike.")  # As long, so that all lengths stay.
    )
    proto.name, proto.package = path, "v1alike"
    return (
        "from google.protobuf import descriptor_pool\n"
        "from google.protobuf.internal import builder\n"
        f"DESCRIPTOR = descriptor_pool.Default().AddSerializedFile({proto.SerializeToString()!r})\n"
        "builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())\n"
        f"builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, {path!r}, globals())\n"
    )


def test_an_api_version(folder: Path) -> None:
    copy = Copy(folder, "How to add an API version", package="v1", version="v1")
    proto = (ROOT / "protos/v1beta1/v1beta1.proto").read_text()
    copy.write("protos/v1/v1.proto", proto.replace("package v1beta1;", "package v1alike;"))
    copy.write("adapters/pb/v1/__init__.py", "")
    copy.write("adapters/pb/v1/v1_pb2.py", generated("adapters/pb/v1/v1.proto"))
    copy.write(
        "adapters/v1.py",
        "from adapters.dialect import Level\n"
        "from adapters.pb.v1 import v1_pb2 as pb\n"
        "from adapters.v1beta1 import RULES, Beta\n"
        'V1 = Beta("v1", Level(38), pb, RULES)\n',
    )
    copy.edit("adapters/registry.py", "from adapters.v1beta1 ", "from adapters.v1 import V1\nfrom adapters.v1beta1 ")
    copy.edit("adapters/registry.py", "= (V1BETA1, ", "= (V1, V1BETA1, ")
    copy.edit("adapters/levels.py", "    37: (", "    38: ((1, 99, 0), (1, 99, 0)),\n    37: (")
    behaviour = "gateway_lab/kubelets/behaviour.py"
    copy.edit(behaviour, "NEWEST = 37", "NEWEST = 38")
    new = (
        'Change(38, {"dialect": "v1", "grpc_go": "1.99.0", "unsupported_version": _supported(\'version is ["v1"]\')}),'
    )
    copy.edit(behaviour, "\n)\n\nCLASSES =", f"\n    {new}\n)\n\nCLASSES =")
    copy.edit("gateway_lab/kubelets/driver/versions.json", "\n}", ',\n  "1.38": {"kubernetes": "v1.38.0"}\n}')

    copy.proves("v1")
    assert copy.unused() == set()


BACKEND = """
import asyncio

from devices.gpu.backend import Sight
from devices.gpu.model import GPU


class PretendBackend:
    name, hindrance = "pretend", None

    async def watch(self):
        yield Sight((GPU("SN0", 0, 0, resource="pretend.example/gpu", device_nodes=("/dev/pretend0",)),))
        await asyncio.Event().wait()

    async def release(self, uuids): ...

    async def acquire(self, uuids): ...
"""
VENDOR = """
from devices.gpu.asked import visible_devices
from devices.gpu.vendor import Vendor


class _Pretend(Vendor):
    name, prefix = "pretend", "pretend.example/"

    def name_of(self, gpu, policy):
        return "pretend.example/accelerator"

    def answer(self, asked):
        return visible_devices(asked, "PRETEND_VISIBLE_DEVICES")

    again = answer


PRETEND = _Pretend()
"""
MAKER = """
def _pretend(settings: Settings) -> DeviceSource:
    from devices.gpu.pretend.backend import PretendBackend
    {imported}
    from devices.gpu.source import GPUSource

    return GPUSource(PretendBackend(), settings.policy, ({vendor}))


_MAKERS"""


def vendor(folder: Path, *, rules: bool) -> Copy:
    copy = Copy(folder, "Adding a vendor", vendor="pretend")
    copy.write("devices/gpu/pretend/__init__.py", "")
    copy.write("devices/gpu/pretend/backend.py", BACKEND)
    if rules:
        copy.write("devices/gpu/pretend/vendor.py", VENDOR)
    imported = "from devices.gpu.pretend.vendor import PRETEND" if rules else ""
    compose = "gateway/compose.py"
    copy.edit(compose, "\n_MAKERS", MAKER.format(imported=imported, vendor="PRETEND," if rules else ""))
    copy.edit(compose, '    "amd": _amd,\n', '    "amd": _amd,\n    "pretend": _pretend,\n')
    copy.edit(compose, '"0x1002": "amd"', '"0x1002": "amd", "0x1234": "pretend"')
    copy.edit("gateway/configuration/flags.py", 'form="auto|nvidia|amd|', 'form="auto|nvidia|amd|pretend|')
    return copy


VENDORS = {
    "by its own rules": (True, "pretend.example/accelerator", {"PRETEND_VISIBLE_DEVICES": "SN0"}, ["/dev/pretend0"]),
    "without rules, by its device nodes": (False, "pretend.example/gpu", {}, ["/dev/pretend0"]),
}


@pytest.mark.parametrize(("rules", "resource", "envs", "nodes"), VENDORS.values(), ids=VENDORS)
def test_a_vendor(folder: Path, rules: bool, resource: str, envs: dict[str, str], nodes: list[str]) -> None:
    vendor(folder, rules=rules).proves(resource, json.dumps(envs), json.dumps(nodes))


def test_a_vendor_that_is_found_by_itself_and_held_to_the_import_rules(folder: Path) -> None:
    copy = vendor(folder, rules=True)
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    text = (ROOT / "pyproject.toml").read_text()
    for rule, key, after in (
        ("vendors-behind-the-model", "forbidden_modules", "devices.gpu.pretend"),
        ("pure-model", "source_modules", "devices.gpu.pretend.vendor"),
    ):
        assert key in next(one for one in rules if one["id"] == rule)
        before, start, rest = text.partition(f'id = "{rule}"')
        text = f"{before}{start}" + re.sub(rf"({key} = \[\s*)", rf'\g<1>"{after}", ', rest, count=1)
    copy.write("pyproject.toml", text)
    lint = str(Path(sys.executable).with_name("lint-imports"))
    assert "0 broken" in copy.run(lint, "--no-cache")

    pci = folder / "sys/bus/pci/devices/0000:01:00.0"
    pci.mkdir(parents=True)
    (pci / "vendor").write_text("0x1234\n")
    (pci / "class").write_text("0x120000\n")
    found = "from pathlib import Path; from gateway import compose; print(*compose.hardware(Path('sys')), *compose.BACKENDS)"
    assert copy.run(sys.executable, "-c", found).split() == [
        "pretend",
        "auto",
        "nvidia",
        "amd",
        "pretend",
        "simulated",
        "none",
    ]
    assert copy.unused() == set()

    naming = folder / "devices/gpu/naming.py"
    naming.write_text(naming.read_text() + "from devices.gpu.pretend.vendor import PRETEND\n")
    with pytest.raises(AssertionError, match="knows no vendor"):
        copy.run(lint, "--no-cache")
