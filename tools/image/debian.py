"""Debian's part of the root: packages fetched and verified by apt, as an ordinary user, and unpacked without being installed.

apt works in folders of its own in the cache, with this machine's mirrors, proxies and keys, so nothing of the machine changes.
Without a lock its lists are asked for again each time, so that no cache hides a security update. No dependency is followed: the list of packages is the whole truth, and ``unresolved`` proves that it is enough.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway_lab.debian import DebianError, mirrors
from tools.image.contents import Contents, ImageError, Pin, pin

TRIPLES = {"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}
"""Debian's architectures, which OCI calls the same, and the names of their library folders."""

_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
Progress = Callable[[str], None]

_LICENCE = re.compile(r"^License: *(\S.*?) *$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Package:
    """A Debian package as it was unpacked: the control file's words, the archive's SHA-256, the licences where it lists them."""

    name: str
    version: str
    sha256: str
    control: str
    licences: tuple[str, ...]


def architecture() -> str:
    """This machine's architecture in Debian's and OCI's words.

    Raises:
        ImageError: no dpkg, or an architecture that nobody has tried.
    """
    for tool in ("dpkg", "dpkg-deb", "apt-get"):
        if shutil.which(tool) is None:
            raise ImageError(f"expected {tool}, found none: build the image on a Debian, or in a container of it")
    found = _run("dpkg", "--print-architecture").strip()
    if found not in TRIPLES:
        raise ImageError(f"expected one of the architectures {', '.join(TRIPLES)}, got {found}")
    return found


def sources(served: Sequence[tuple[str, str]]) -> str:
    """Write apt sources of Debian's mirrors, an address and a suite each.

    Raises:
        ImageError: none of them has security updates.
    """
    if not any(suite.endswith("-security") for _, suite in served):
        raise ImageError(
            "expected apt sources of a Debian with its security updates on this machine, found none (apt-get indextargets): "
            "build the image on a Debian, or in a container of it"
        )
    signed = f"Signed-By: {_KEYRING}\n" if _KEYRING.exists() else ""
    return "\n".join(
        f"Types: deb\nURIs: {address}\nSuites: {suite}\nComponents: main\n{signed}" for address, suite in served
    )


def fetch(
    contents: Contents, pins: Sequence[Pin] | None, architecture: str, cache: Path, progress: Progress
) -> list[Path]:
    """Bring packages of the release into the cache, and give their archives in the order of their names.

    Args:
        contents: the release and the packages.
        pins: which versions; the newest if None. If the cache has them all, nothing is fetched.
        architecture: of which architecture.
        cache: the folder of the cache.
        progress: gets one line of text at a time.

    Raises:
        ImageError: apt could not get or verify them, or the mirrors have other versions than the pinned ones.
    """
    try:
        wanted = sources(mirrors(contents.release))
    except DebianError as error:
        raise ImageError(str(error)) from error
    folder = cache / hashlib.sha256(f"{architecture}\n{wanted}".encode()).hexdigest()[:16]
    for name in ("lists/partial", "cache/archives/partial", "packages"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "debian.sources").write_text(wanted)
    settings = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "Dir::Etc::SourceList": folder / "debian.sources",
        "Dir::Etc::SourceParts": "-",
        "Dir::State::Lists": folder / "lists",
        "Dir::State::Status": "/dev/null",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
        "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled": "false",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if pins and (kept := _kept(folder / "packages", pins)):
            return kept
        progress(f"{architecture}: asking for Debian {contents.release}'s packages")
        _run(*apt, "update")
        names = [f"{one.name}={one.version}" for one in pins] if pins else contents.packages
        try:
            # A line for each: 'ADDRESS' FILE SIZE HASH
            lines = _run(*apt, "download", "--print-uris", *names).splitlines()
            _run(*apt, "download", *names, cwd=folder / "packages")
        except ImageError as error:
            if not pins:
                raise
            raise ImageError(
                f"This machine's mirrors don't have a package of deploy/image.lock:\n{error}\nRun `make image-lock` and commit the "
                "new lock, add a mirror that keeps old packages to apt's sources, or build with --newest"
            ) from error
        files = sorted(folder / "packages" / line.split()[1] for line in lines)
        if len(files) != len(names):
            raise ImageError(f"expected {len(names)} packages of {contents.release}, apt knows {len(files)}: {lines}")
        if pins and _kept(folder / "packages", pins) != files:
            raise ImageError(
                "The SHA-256 of a package that was fetched is not that of deploy/image.lock: "
                + ", ".join(path.name for path in files if pin(path) not in pins)
            )
    return files


def _kept(folder: Path, pins: Sequence[Pin]) -> list[Path]:
    """The archives of all pinned packages, in the order of their names; none if one is missing or another."""
    found = {pin(path): path for path in folder.glob("*.deb")}
    return sorted(found[one] for one in pins) if set(pins) <= found.keys() else []


def unpack(archives: Sequence[Path], root: Path) -> list[Package]:
    """Unpack packages into an empty root, and say what they are.

    Raises:
        ImageError: one can't be unpacked.
    """
    packages = []
    for archive in archives:
        _run("dpkg-deb", "--extract", str(archive), str(root))
        control = _run("dpkg-deb", "--field", str(archive))
        fields = dict(line.split(": ", 1) for line in control.splitlines() if re.match(r"[A-Z][\w-]*: ", line))
        copyright_file = root / "usr/share/doc" / fields["Package"] / "copyright"
        packages.append(
            Package(
                name=fields["Package"],
                version=fields["Version"],
                sha256=hashlib.sha256(archive.read_bytes()).hexdigest(),
                control=control,
                licences=licences(copyright_file.read_text() if copyright_file.exists() else ""),
            )
        )
    return packages


def licences(text: str) -> tuple[str, ...]:
    """The licences that a copyright file names, where it has the machine-readable form (DEP 5); else none."""
    if not text.startswith("Format:"):
        return ()
    return tuple(sorted(set(_LICENCE.findall(text))))


def loader(root: Path, built_for: str) -> list[str]:
    """The command line that runs a program of the root on this machine, with the root's libraries: the program comes next.

    Raises:
        ImageError: the root has no dynamic loader, or it is of another architecture and there is no emulator.
    """
    folder = root / "usr/lib" / TRIPLES[built_for]
    found = next(folder.glob("ld-linux-*.so.*"), None)
    if found is None:
        raise ImageError(f"expected the dynamic loader in {folder}: libc6 puts it there from Debian 13 (trixie) on")
    return [*emulator(built_for), str(found), "--library-path", str(folder)]


def emulator(built_for: str) -> list[str]:
    """What comes before a program of an architecture to run it on this machine.

    Raises:
        ImageError: there is no emulator of that architecture.
    """
    if built_for == architecture():
        return []
    name = f"qemu-{TRIPLES[built_for].partition('-')[0]}"
    found = shutil.which(f"{name}-static") or shutil.which(name)
    if found is None:
        raise ImageError(f"{name} is not on the PATH: an image for {built_for} needs it here. Install qemu-user-static")
    return [found]


def unresolved(root: Path, built_for: str) -> list[str]:
    """Every library that a program or a library of the root wants and the root doesn't have, as ``WHO: WHAT``."""
    missing = []
    for path in sorted(root.rglob("*")):
        if path.is_symlink() or not path.is_file() or path.name.startswith("ld-linux"):
            continue
        with path.open("rb") as file:
            if file.read(4) != b"\x7fELF":
                continue
        command = [*loader(root, built_for), "--list", str(path)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={}
        )  # no LD_PRELOAD of this machine's
        lost = [
            line.strip()
            for line in (done.stdout + done.stderr).splitlines()
            if "not found" in line or "cannot open" in line
        ]
        outside = [line.strip() for line in done.stdout.splitlines() if " => /" in line and f" => {root}" not in line]
        missing += [f"{path.relative_to(root)}: {line}" for line in (*lost, *outside)]
    return missing


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ImageError(f"{' '.join(command[:1] + command[-2:])} ended with {done.returncode}:\n{done.stderr.strip()}")
    return done.stdout
