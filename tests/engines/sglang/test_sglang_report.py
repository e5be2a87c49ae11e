"""The decision what the SGLang plugin replaces; SGLang is not needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from anymla.engines import seams
from anymla.engines.sglang import pinned, report


@pytest.mark.parametrize(
    ("machine", "value", "replaced"),
    [
        ("sm_90", "auto", set()),
        ("sm_100", "auto", set()),
        ("sm_120", "auto", set()),
        ("sm_80", "auto", {"attention", "indexer"}),
        ("sm_89", "auto,audit", {"attention", "indexer"}),
        ("rocm", "auto", set()),
        ("sm_90", "force", {"attention", "indexer"}),
        ("sm_90", "audit", set()),
        ("sm_90", "attention", {"attention"}),
        ("sm_80", "indexer, audit", {"indexer"}),
        ("sm_80", "off", set()),
    ],
)
def test_parts(
    machine: str, value: str, replaced: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(report.VARIABLE, value)
    parts = report.plan(machine, report.chosen())
    assert {part.name for part in parts if part.replaced} == replaced
    assert all(part.why for part in parts)


@pytest.mark.parametrize("value", ["", "on", "attention,force", "attention;indexer", "auto,off"])
def test_an_unknown_value_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(report.VARIABLE, value)
    with pytest.raises(ValueError, match="ANYMLA_SGLANG must be one of auto, force, off"):
        report.chosen()


def test_without_sglang_the_view_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "installed_version", lambda: None)
    assert [row["action"] for row in report.plugin_view()] == ["not installed"]


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "installed_version", lambda: "0.5.24")
    assert "0.5.24 is not among those" in report.plugin_view()[0]["why"]


def test_a_seam_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "source_of", lambda package: tmp_path)
    refused = report.refusal_by_source(["attention"])
    assert refused is not None
    assert "there is no module sglang.srt.plugins.hook_registry" in refused


def test_parts_and_audit_have_seams() -> None:
    assert set(pinned.SEAMS) == {*report.PARTS, report.AUDIT}
    assert all(isinstance(each, seams.Seam) for every in pinned.SEAMS.values() for each in every)
