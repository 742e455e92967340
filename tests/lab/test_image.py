"""The image: what goes into it, what is said of it, and that the same files are the same digest, whoever packs them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tools.image import archive, build, contents, debian, python, sbom

ROOT = Path(__file__).resolve().parents[2]


def folder(at: Path, *, when: int, order: tuple[str, ...], umask: int = 0) -> Path:
    """A small root, as two machines might have written it."""
    for name in order:
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_text(name)
        (at / name).chmod((0o755 if name.startswith("bin") else 0o644) & ~umask)
        os.utime(at / name, (when, when))
    (at / "tmp").mkdir()
    (at / "run").symlink_to("tmp")
    return at


def members(layer: archive.Layer) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(layer.data))) as tar:
        return tar.getmembers()


def test_the_same_files_are_the_same_layer_whenever_and_however_they_were_written(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", when=1, order=("bin/run", "etc/a", "etc/b"))
    other = folder(tmp_path / "other", when=10**9, order=("etc/b", "bin/run", "etc/a"), umask=0o077)
    assert archive.layer(one, 5) == archive.layer(other, 5)


def test_a_layer_has_one_time_one_owner_and_two_modes(tmp_path: Path) -> None:
    layer = archive.layer(folder(tmp_path / "root", when=1, order=("bin/run", "etc/a"), umask=0o077), 5)
    assert [(info.name, info.mode) for info in members(layer)] == [
        ("bin", 0o755),
        ("bin/run", 0o755),
        ("etc", 0o755),
        ("etc/a", 0o644),
        ("run", 0o777),
        ("tmp", 0o1777),
    ]
    assert {(info.mtime, info.uid, info.gid, info.uname, info.gname) for info in members(layer)} == {(5, 0, 0, "", "")}


def image(tmp_path: Path, tag: str = "1.0") -> dict[str, bytes]:
    layer = archive.layer(folder(tmp_path / tag, when=1, order=("bin/run",)), 5)
    one = archive.Image(architecture="arm64", layer=layer, config={"Labels": {"version": tag}})
    return opened(archive.archive([one], name="docker.io/library/x", tag=tag, when=5))


def opened(packed: archive.Archive) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(packed.data)) as tar:
        return {info.name: file.read() for info in tar.getmembers() if (file := tar.extractfile(info))}


def blob(files: dict[str, bytes], descriptor: dict[str, Any]) -> bytes:
    """What a descriptor leads to; it tells the size and the digest of it."""
    data = files["blobs/" + descriptor["digest"].replace(":", "/")]
    assert (descriptor["size"], descriptor["digest"]) == (len(data), "sha256:" + hashlib.sha256(data).hexdigest())
    return data


def test_every_part_of_an_archive_is_reached_by_its_digest(tmp_path: Path) -> None:
    files = image(tmp_path)
    (entry,) = json.loads(files["index.json"])["manifests"]
    manifest = json.loads(blob(files, entry))
    config = json.loads(blob(files, manifest["config"]))
    (layer,) = manifest["layers"]
    tar = gzip.decompress(blob(files, layer))
    assert config["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(tar).hexdigest()]
    assert (config["architecture"], config["created"]) == ("arm64", "1970-01-01T00:00:05Z")
    assert len(files) == len(("oci-layout", "index.json", "manifest", "config", "layer"))


def test_an_image_for_two_architectures_is_an_index_of_both(tmp_path: Path) -> None:
    layer = archive.layer(folder(tmp_path / "root", when=1, order=("bin/run",)), 5)
    images = [archive.Image(architecture=name, layer=layer, config={}) for name in ("amd64", "arm64")]
    packed = archive.archive(images, name="docker.io/library/x", tag="1.0", when=5)
    files = opened(packed)
    (entry,) = json.loads(files["index.json"])["manifests"]
    index = json.loads(blob(files, entry))
    assert entry["digest"] == packed.digest
    assert [one["platform"]["architecture"] for one in index["manifests"]] == ["amd64", "arm64"]
    assert {json.loads(blob(files, one))["layers"][0]["digest"] for one in index["manifests"]} == {
        "sha256:" + hashlib.sha256(layer.data).hexdigest()
    }


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('release = "trixie"\npackages = ["libc6"]\nleft_out = []', "expected one python3.N-minimal"),
        ('release = "trixie"\npackages = []\nleft_out = []\nmore = 1', "unknown field `more`"),
        ("release = 13", "Expected `str`"),
        ("release", "Expected '='"),
    ],
)
def test_a_wrong_list_of_contents_is_told(text: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "image.toml").write_text(text)
    with pytest.raises(contents.ImageError, match=error):
        contents.read(tmp_path / "image.toml")


def test_a_command_listens_to_no_python_variable() -> None:
    entry_points = "[console_scripts]\ngateway = gateway.cli.main:main\n\n[other]\nx = y:z\n"
    assert python.commands(entry_points, "3.13") == {
        "gateway": "#!/usr/bin/python3.13 -I\nimport sys\nfrom gateway.cli.main import main\n\nsys.exit(main())\n"
    }


@pytest.mark.parametrize(
    ("said", "licence"),
    [
        ("License-Expression: BSD-3-Clause\nLicense: long ago\n", "BSD-3-Clause"),
        ("License: MIT\nClassifier: License :: OSI Approved :: MIT License\n", "MIT License"),
        ("License: MIT\n", "MIT"),
        ("License: Copyright\n  all of its text\n", None),
        ("", None),
    ],
)
def test_the_licence_of_a_wheel(said: str, licence: str | None) -> None:
    found = python.wheel(f"Metadata-Version: 2.4\nName: x\nVersion: 1.0\n{said}\nREADME\n", {"x": "0123"})
    assert found == python.Wheel(name="x", version="1.0", sha256="0123", licence=licence)


def test_the_licences_of_a_debian_package_are_those_of_a_machine_readable_file() -> None:
    assert debian.licences("Format: https://example/1.0/\n\nFiles: *\nLicense: MIT\n\nLicense: GPL-2+\n text\n") == (
        "GPL-2+",
        "MIT",
    )
    assert debian.licences("This is a story.\nLicense: none that could be read\n") == ()


def test_the_bill_names_each_part_as_scanners_look_for_it() -> None:
    package = debian.Package(name="libstdc++6", version="1:14-2", sha256="aa", control="", licences=("GPL-3",))
    wheel = python.Wheel(name="Some_Wheel", version="1.0", sha256=None, licence=None)
    parts = [sbom.deb(package, "amd64", "debian-13"), sbom.pypi(wheel)]
    bill = sbom.bill(sbom.subject("container", "x", "1"), parts, 5)
    assert json.loads(bill)["components"] == [
        {
            "type": "library",
            "bom-ref": "pkg:deb/debian/libstdc%2B%2B6@1%3A14-2?arch=amd64&distro=debian-13",
            "purl": "pkg:deb/debian/libstdc%2B%2B6@1%3A14-2?arch=amd64&distro=debian-13",
            "name": "libstdc++6",
            "version": "1:14-2",
            "hashes": [{"alg": "SHA-256", "content": "aa"}],
            "licenses": [{"license": {"name": "GPL-3"}}],
        },
        {
            "type": "library",
            "bom-ref": "pkg:pypi/some-wheel@1.0",
            "purl": "pkg:pypi/some-wheel@1.0",
            "name": "Some_Wheel",
            "version": "1.0",
        },
    ]


def test_a_bill_has_a_number_of_its_own_that_is_the_same_next_time() -> None:
    def number(version: str) -> str:
        bill = sbom.bill(sbom.subject("container", "x", version), [], 5)
        return str(json.loads(bill)["serialNumber"])

    assert number("1") == number("1") != number("2")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [(["--tag", "a/b"], "expected a tag of letters"), (["--tag", ""], "expected a tag of letters")],
)
def test_a_wrong_tag_is_told_before_anything_is_made(arguments: list[str], error: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.image", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert error in done.stderr


def test_the_containerfile_runs_it_as_the_archive_does() -> None:
    text = (ROOT / "deploy/Containerfile").read_text()
    assert f"ENTRYPOINT {json.dumps(build.ENTRYPOINT)}\n" in text
    assert "ENV " + " ".join(f"{name}={value}" for name, value in build.ENVIRONMENT.items()) + "\n" in text
