"""The container runtime's configuration: that of containerd and CRI-O, as each version reads it. Bounded, and it changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from glob import glob
from pathlib import Path
from typing import Any, Final

from devices.files import NotPlainError, read_plain
from gateway.doctor.collect import MOST_BYTES, listed, names, table
from gateway.doctor.snapshot import Runtime

_CONTAINERD: Final = (
    "etc/containerd/config.toml",
    "var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "var/lib/rancher/rke2/agent/etc/containerd/config.toml",
    "run/k0s/containerd-cri.toml",
    "var/snap/microk8s/current/args/containerd.toml",
)
_CRI: Final = ("io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "cri")
"""The name of containerd's plugin that starts containers, in configurations of version 3, 2 and 1."""
_MODERN: Final = 3
"""The configuration version that only containerd 2.0 and later read."""
_HAS_CDI: Final = (1, 7)
_MERGES: Final = (2, 0)
_CRIO_HAS_CDI: Final = (1, 23)
_HOOKS: Final = ("/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d")
_NOTHING: Final[Mapping[str, Any]] = {}
_MOST_IMPORTS: Final = 64


def runtime(root: Path, reported: str) -> Runtime | None:
    """Read the container runtime's configuration; None if the runtime is unknown.

    ``reported`` is what the kubelet reports to the API server, such as ``containerd://1.7.27``; '' if unknown.
    """
    name, _, text = reported.partition("://")
    path, content = next(((root / one, found) for one in _CONTAINERD if (found := _toml(root / one))), (root, None))
    crio = root / "etc/crio"
    parts = [crio / "crio.conf", *sorted((crio / "crio.conf.d").glob("*"))[:_MOST_IMPORTS]]
    theirs = [found for one in parts if (found := _toml(one)) is not None]
    if not name and bool(content) != bool(theirs):
        name = "containerd" if content else "cri-o"
    if name == "cri-o":
        return _crio(root, str(crio), text, theirs)
    if name != "containerd":
        return Runtime(f"{name} {text}") if name else None
    if content is None:
        return _containerd("", text, _version(text), [])
    version = _version(text) or _by_binary(root) or (_MERGES if _number_of(content) >= _MODERN else ())
    return _containerd(str(path), text, version, [content, *_imported(root, path, content)])


def _imported(root: Path, path: Path, content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Read the files that a containerd configuration imports, such as the one of NVIDIA's toolkit, in their order."""
    for pattern in map(str, listed(content.get("imports"))[:_MOST_IMPORTS]):
        whole = root / pattern.lstrip("/") if pattern.startswith("/") else path.parent / pattern
        for name in sorted(glob(str(whole)))[:_MOST_IMPORTS]:  # noqa: PTH207 - for pathlib ** is the whole disk
            if (found := _toml(Path(name))) is not None:
                yield found


def _cri(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section of the plugin that starts containers, under its name in this version."""
    plugins = table(content, "plugins")
    return next(filter(None, (table(plugins, name) for name in _CRI)), {})


def _number_of(content: Mapping[str, Any]) -> int:
    version = content.get("version")
    return version if isinstance(version, int) else 1


def _containerd(path: str, text: str, version: tuple[int, ...], files: Sequence[Mapping[str, Any]]) -> Runtime:
    """Return the state of containerd's configuration with its imports.

    Up to 1.7, the last file's section of a plugin replaces earlier ones (containerd#5837). From 2.0 on, sections are merged
    (containerd#9982). CDI came with 1.7, off by default; from 2.0 on, it is on by default (containerd#9621).
    """
    name = f"containerd {text or '.'.join(map(str, version)) or 'of an unknown version'}"
    if not version or not files:
        return Runtime(name, path, cdi=False if version and version < _HAS_CDI else None)
    sections = [one for one in map(_cri, files) if one]
    whole: Mapping[str, Any] = reduce(_merged, sections, _NOTHING)
    section = whole if version >= _MERGES else next(reversed(sections), {})
    containerd = table(section, "containerd")
    nvidia = _of_nvidia(table(containerd, "runtimes"), lambda one: table(one, "options").get("BinaryName"))
    return Runtime(
        name,
        path,
        nvidia=bool(nvidia),
        nvidia_is_default=containerd.get("default_runtime_name") in nvidia,
        cdi=version >= _HAS_CDI and bool(section.get("enable_cdi", version >= _MERGES)),
        cdi_dirs=_folders(section.get("cdi_spec_dirs")),
    )


def _crio(root: Path, path: str, text: str, files: Sequence[Mapping[str, Any]]) -> Runtime:
    """Return the state of CRI-O's configuration, merged with its drop-ins. CDI is on from 1.23 on. NVIDIA's hook replaces a runtime."""
    name, version = f"CRI-O {text or 'of an unknown version'}", _version(text)
    if not version or not files:
        return Runtime(name, path if files else "", cdi=version >= _CRIO_HAS_CDI if version else None)
    section = table(table(reduce(_merged, files, _NOTHING), "crio"), "runtime")
    nvidia = _of_nvidia(table(section, "runtimes"), lambda one: one.get("runtime_path"))
    folders = (root / str(one).lstrip("/") for one in listed(section.get("hooks_dir")) or _HOOKS)
    hooked = any("nvidia" in name for folder in folders for name in names(folder))
    return Runtime(
        name,
        path,
        nvidia=bool(nvidia) or hooked,
        nvidia_is_default=hooked or section.get("default_runtime") in nvidia,
        cdi=version >= _CRIO_HAS_CDI,
        cdi_dirs=_folders(section.get("cdi_spec_dirs")),
    )


def _of_nvidia(runtimes: Mapping[str, Any], program: Callable[[Mapping[str, Any]], Any]) -> set[str]:
    named = {name: one if isinstance(one, dict) else {} for name, one in runtimes.items()}
    return {name for name, one in named.items() if "nvidia" in name or "nvidia" in str(program(one) or "")}


def _folders(found: Any) -> tuple[str, ...]:
    return tuple(map(str, found)) if isinstance(found, list) else ("/etc/cdi", "/var/run/cdi")


def _merged(first: Mapping[str, Any], then: Mapping[str, Any]) -> Mapping[str, Any]:
    """Merge one table into another, also the tables within them."""
    both = {name: _merged(table(first, name), one) for name, one in then.items() if isinstance(one, dict)}
    return {**first, **then, **both}


def _version(text: str) -> tuple[int, ...]:
    found = re.match(r"v?(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()


def _by_binary(root: Path) -> tuple[int, ...]:
    """Tell containerd 2 from 1 by the module path that Go wrote into the program; () if that can't be seen."""
    for folder in ("usr/bin", "usr/local/bin", "opt/bin"):
        with suppress(OSError), (root / folder / "containerd").open("rb") as file:
            end = b""
            while piece := file.read(MOST_BYTES):
                if found := re.search(rb"path\tgithub\.com/containerd/containerd/(v2/)?cmd/containerd\n", end + piece):
                    return _MERGES if found[1] else ()
                end = piece[-128:]
    return ()


def _toml(path: Path) -> dict[str, Any] | None:
    with suppress(OSError, NotPlainError, ValueError):
        text = read_plain(path, MOST_BYTES).decode()
        import tomllib  # noqa: PLC0415 - a pod usually sees no such file

        return tomllib.loads(text)
    return None
