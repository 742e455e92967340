"""docs/compared.md is made of reports that other people's plugins have a say in: what they say stays text, and what wasn't seen is not told."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway_lab.conformance.report import PluginReport, RuleReport, to_yaml
from tools import compared


def made(version: str, **more: object) -> PluginReport:
    known: dict[str, object] = {
        "plugin": "plugin",
        "version": version,
        "date": "2026-11-22",
        "examined_with": "0.1.0",
        "command": "plugin {socket_dir}",
        "cap_seconds": 10,
        "kubelets": {"1.37": "genuine"},
        "resources": {"1.37": {"example.com/one": 2}},
        "process": "it stays in its process",
        "result": "kept",
        "levels": {"core": "kept"},
        "rules": {"registers": RuleReport(level="core", result="kept", kubelet="genuine")},
    }
    return PluginReport(**(known | more))  # type: ignore[arg-type]


BROKEN = {
    "rules": {"allocate": RuleReport(level="core", result="broken", kubelet="genuine", broken_on={"1.37": "it hung"})}
}


def written(monkeypatch: pytest.MonkeyPatch, folder: Path, *reports: PluginReport) -> str:
    for one in reports:
        path = folder / compared.REPORTS / one.plugin / f"{one.version}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(to_yaml(one))
    monkeypatch.setattr(compared, "ROOT", folder)
    return compared.page()


def test_versions_of_a_plugin_stand_from_old_to_new(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = written(monkeypatch, tmp_path, made("v1.28.15"), made("v1.9.0"), made("main", **BROKEN))
    assert page.index("[plugin main]") < page.index("[plugin v1.9.0]") < page.index("[plugin v1.28.15]")


def test_a_plugin_that_was_not_examined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without = made("v2.0.0", unexamined={"1.37": "no devices: none"}, result="not applicable")
    page = written(monkeypatch, tmp_path, made("v1.0.0", **BROKEN), without)
    name = "[plugin v2.0.0](../conformance/reports/plugin/v2.0.0.yaml)"
    assert f"| {name} | not examined | not examined | 1.37 (genuine) | no devices: none |" in page


def test_what_a_plugin_breaks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = written(monkeypatch, tmp_path, made("v1.0.0", **BROKEN))
    assert "; broken: [allocate](conformance.md#allocate) |\n" in page


@pytest.mark.parametrize(
    "more",
    [
        {"plugin": "x](https:example.com)"},
        {"plugin": "<script>"},
        {"version": "v1|"},
        {"date": "<b>"},
        {"examined_with": "0.1\n# heading"},
        {"kubelets": {"1.37|": "genuine"}},
        {"resources": {"1.37": {"example.com/`one": 2}}},
        {"command": "plugin\n\n<script>alert(1)</script>"},
        {"change": "true\n\n# heading"},
        {"notes": "see <script>alert(1)</script>"},
    ],
    ids=str,
)
def test_a_report_that_would_be_more_than_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: dict[str, object]
) -> None:
    path = tmp_path / compared.REPORTS / "x" / "1.yaml"
    path.parent.mkdir(parents=True)
    path.write_bytes(to_yaml(made(**({"version": "v1.0.0"} | more))))  # type: ignore[arg-type]
    monkeypatch.setattr(compared, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"1\.yaml: expected"):
        compared.page()


def test_what_a_plugin_says_stays_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = "no devices: `x` | <script>alert(1)</script>\n# heading"
    page = written(monkeypatch, tmp_path, made("v1.0.0", unexamined={"1.37": said}))
    assert "| `no devices: 'x' / <script>alert(1)</script> # heading` |" in page


def test_broken_rules_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = written(monkeypatch, tmp_path, made("v1.0.0", **BROKEN, result="broken", levels={"core": "broken"}))
    assert "yaml) | 0 kept, 1 broken |" in page
