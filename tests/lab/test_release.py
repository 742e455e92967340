"""A release: the same chart from the same files, what is read from the changelog, and what is refused."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from gateway import VERSION
from tools.image import archive
from tools.image.contents import ImageError
from tools.release import chart
from tools.release.__main__ import changes

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/chart"


def test_the_chart_is_the_same_from_another_folder_at_another_time(tmp_path: Path) -> None:
    other = shutil.copytree(CHART, tmp_path / "chart")
    for path in other.rglob("*"):
        os.utime(path, (1, 1))
    assert chart.package(CHART, "a/b@sha256:0", 5) == chart.package(other, "a/b@sha256:0", 5)


def test_the_chart_names_the_image_of_its_release() -> None:
    with tarfile.open(fileobj=io.BytesIO(chart.package(CHART, "a/b@sha256:0", 5))) as packed:
        file = packed.extractfile("device-plugin-gateway/values.yaml")
        assert file is not None
        assert yaml.safe_load(file)["gateway"]["image"] == "a/b@sha256:0"


def test_the_plain_repository_has_the_charts_digest() -> None:
    [entry] = yaml.safe_load(chart.index(CHART, b"content", "x.tgz", 5))["entries"]["device-plugin-gateway"]
    wanted = {"digest": hashlib.sha256(b"content").hexdigest(), "urls": ["x.tgz"], "version": VERSION}
    assert wanted.items() <= entry.items()


def test_the_charts_artifact_is_what_helm_looks_for() -> None:
    packed = chart.artifact(CHART, b"content", 5)
    with tarfile.open(fileobj=io.BytesIO(packed.data)) as opened:
        file = opened.extractfile(f"blobs/{packed.digest.replace(':', '/')}")
        assert file is not None
        manifest = json.load(file)
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.helm.config.v1+json"
    assert [one["mediaType"] for one in manifest["layers"]] == ["application/vnd.cncf.helm.chart.content.v1.tar+gzip"]


def test_a_source_distribution_is_the_same_whenever_it_was_packed() -> None:
    files = {"x/b": b"b", "x/a": b"a"}
    one, other = archive.tar(files, 5), archive.tar(dict(reversed(files.items())), 6)
    assert archive.repacked(archive.gzipped(one), 7) == archive.repacked(archive.gzipped(other), 7)


def test_the_notes_are_the_changelogs_section() -> None:
    assert changes("# Changelog\n\n## 0.2.0\n\nB\n\n### C\n\n## 0.1.0\n\nA\n", "0.2.0") == "B\n\n### C\n"
    with pytest.raises(ImageError, match=r"no section `## 0\.3\.0`"):
        changes("## 0.2.0\n\nB\n", "0.3.0")


def test_a_tag_of_another_version_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tools.release",
        "--tag",
        "v9.9.9",
        "--repository",
        "a/b",
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, (tmp_path / "out").exists()) == (1, False)
    assert "the tag is v9.9.9" in done.stderr


def test_each_action_is_named_by_its_commit_and_each_file_names_no_host() -> None:
    for path in sorted((ROOT / ".github").rglob("*.yml")):
        text = path.read_text()
        assert yaml.safe_load(text)
        assert re.findall(r"uses: (?!\S+@[0-9a-f]{40} # v)", text) == []
        assert re.findall(r"https?://|ghcr\.io|docker\.io|quay\.io", text) == []


def test_the_workflow_makes_a_release_as_the_dry_run_does() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["release"]["steps"]
    commands = re.findall(r"python -m tools\.release (.+)", "\n".join(step.get("run", "") for step in steps))
    assert commands == ['--repository "$REPOSITORY" --tag "$GITHUB_REF_NAME"', '--repository "$REPOSITORY" --push']


@pytest.mark.parametrize("page", ["docs/first-hour.md", "docs/support.md", "docs/releasing.md", "SECURITY.md"])
def test_the_page_is_short(page: str) -> None:
    assert len((ROOT / page).read_text().split()) <= 500


def test_the_first_hour_changes_a_rule_that_a_test_notices(tmp_path: Path) -> None:
    text = (ROOT / "docs/first-hour.md").read_text()
    [change] = re.findall(r"^    (sed .+)$", text, re.MULTILINE)
    [test, _] = re.findall(r"^    \.venv/bin/python (-m pytest .+)$", text, re.MULTILINE)
    for folder in ("adapters", "devices", "gateway", "gateway_lab", "tests", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    run = functools.partial(subprocess.run, cwd=tmp_path, capture_output=True, text=True, check=False)
    command = [sys.executable, *test.split(), "-p", "no:cacheprovider"]
    assert run(command).returncode == 0
    subprocess.run(["bash", "-c", change], cwd=tmp_path, check=True)
    assert run(command).returncode == 1
