"""What the plugin relies on is looked up in vLLM's source, and refused where it has moved."""

import dataclasses
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from servers import SOURCE, needs_source, needs_vllm

from anymla.engines.seams import Seam, missing
from anymla.engines.vllm import plugin, report, seams
from anymla.engines.vllm.pinned import PLATFORMS, seams_of
from anymla.engines.vllm.pinned_v41 import v41_seams_of
from anymla.engines.vllm.report import Machine

EXAMPLE = """
from somewhere import helper as renamed
if renamed():
    from .here import Chosen
else:
    from .there import Chosen

class Layer(Chosen):
    written: int

    def __init__(self, first):
        self.assigned, (self.one, self.other) = first
        self.register_buffer("held", first)

    @classmethod
    def method(cls, first, second, *, third):
        pass

def function(first):
    pass
"""


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A package that stands for vLLM's."""
    (tmp_path / "inner").mkdir()
    for file in ("top.py", "inner/__init__.py"):
        (tmp_path / file).write_text(EXAMPLE)
    return tmp_path


@pytest.mark.parametrize(
    "seam",
    [
        Seam("vllm.top:renamed"),
        Seam("vllm.inner:Chosen"),
        Seam("vllm.top:function", ("first",)),
        Seam("vllm.top:Layer.method", ("first", "second")),
        Seam("vllm.top:Layer.method", ("first", "second", "third")),
        Seam(
            "vllm.top:Layer", attributes=("written", "assigned", "one", "other", "method", "held")
        ),
        Seam("vllm.top:Layer.other_method", optional=True),
    ],
    ids=lambda seam: seam.place,
)
def test_what_is_there_is_found(example: Path, seam: Seam) -> None:
    assert missing(example, [seam]) == []


@pytest.mark.parametrize(
    ("seam", "line"),
    [
        (Seam("vllm.gone:Layer"), "there is no module vllm.gone"),
        (Seam("vllm.top:helper"), "vllm.top has no helper"),
        (Seam("vllm.top:Layer.gone"), "vllm.top:Layer has no gone"),
        (
            Seam("vllm.top:Layer.method", ("second",)),
            "vllm.top:Layer.method does not take (second)",
        ),
        (Seam("vllm.top:function", ("first", "second")), "does not take (first, second)"),
        (Seam("vllm.top:Layer", attributes=("first",)), "vllm.top:Layer has no first"),
        (Seam("vllm.top:Layer.method", ("other",), optional=True), "does not take (other)"),
    ],
    ids=lambda each: each.place if isinstance(each, Seam) else "",
)
def test_what_is_missing_is_named(example: Path, seam: Seam, line: str) -> None:
    assert line in missing(example, [seam])[0]


@pytest.mark.parametrize("more", [0, 2])
def test_a_missing_seam_refuses_in_one_line_and_replaces_nothing(
    more: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(report.VARIABLE, "attention")
    monkeypatch.setattr(report, "this_machine", lambda: Machine("cuda", (9, 0)))
    for module in (plugin, report):
        monkeypatch.setattr(module, "installed_version", lambda: "0.33.0")
    monkeypatch.setattr(report, "source_of_vllm", lambda: Path("vllm"))
    monkeypatch.setattr(report, "v41_plan", lambda *_: [])
    asked = []

    def missing(root: Path, platform: str, parts: list[str]) -> list[str]:
        asked.append((root, platform, *parts))
        return ["vllm.top has no Layer", "something", "something else"][: 1 + more]

    monkeypatch.setattr(report, "missing_seams", missing)
    with caplog.at_level(logging.INFO):
        plugin.register()  # imports vLLM, which need not be here, to register a model
    (record,) = caplog.records
    said = "anymla replaces nothing: in vLLM 0.33.0 vllm.top has no Layer"
    assert record.getMessage() == said + (", and 2 more" if more else "")
    assert asked == [(Path("vllm"), "cuda", "attention", "draft model")]
    (row,) = report.plugin_view()
    assert "vllm.top has no Layer" in row["why"]


def test_each_model_is_refused_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(report, "this_machine", lambda: Machine("cuda", (8, 0)))
    for module in (plugin, report):
        monkeypatch.setattr(module, "installed_version", lambda: "0.33.0")
    monkeypatch.setattr(report, "source_of_vllm", lambda: Path("vllm"))
    registered: list[str] = []
    registry = SimpleNamespace(register_model=lambda name, _: registered.append(name))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=registry))
    gone = ["vllm.top has no Layer"]
    for lacking, shared, wanted in (
        ([], gone, {"DeepseekV4ForCausalLM", "DeepSeekV4MTPModel", "DSparkDraftModel"}),
        (gone, [], {"DeepseekV41ForCausalLM"}),
    ):
        monkeypatch.setattr(report, "missing_seams", lambda *_, found=lacking: found)
        monkeypatch.setattr(report, "missing_v41_seams", lambda *_, found=shared: found)
        registered.clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            plugin.register()
        assert set(registered) == wanted
        (record,) = caplog.records
        assert ("of DeepSeek-V4.1" in record.getMessage()) == bool(shared)
        rows = {row["part"]: row["action"] for row in report.plugin_view()}
        assert rows["DeepSeek-V4.1 attention"] == ("kept" if shared else "replaced")
        assert rows.get("attention") == (None if lacking else "replaced")


def test_an_audit_relies_on_what_it_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def missing(root: Path, platform: str, parts: list[str]) -> list[str]:
        asked.append(parts)
        return ["vllm.top has no Layer"] if report.AUDIT in parts else []

    monkeypatch.setattr(report, "source_of_vllm", lambda: Path("vllm"))
    monkeypatch.setattr(report, "missing_seams", missing)
    machine = Machine("cuda", (9, 0))
    for chosen, names in (("audit", [report.AUDIT]), ("mhc,audit", [report.MHC, report.AUDIT])):
        monkeypatch.setenv(report.VARIABLE, chosen)
        refused = report.refusal_by_source(machine, report.plan(machine, report.mode()))
        assert "vllm.top has no Layer" in str(refused)
        assert asked.pop() == names
    monkeypatch.setenv(report.VARIABLE, "mhc")
    assert report.refusal_by_source(machine, report.plan(machine, report.mode())) is None


def test_each_part_relies_on_what_it_replaces() -> None:
    for platform in PLATFORMS:
        of_none = set(seams_of(platform, []))
        for part in EVERY:
            assert set(seams_of(platform, [part])) > of_none
        assert set(seams_of(platform, [report.DRAFT_MODEL])) == of_none
        of_none = set(v41_seams_of(platform, []))
        for part in report.V41_PARTS:
            assert set(v41_seams_of(platform, [part])) > of_none


EVERY = (*report.PARTS, report.AUDIT)


def every_seam() -> set[Seam]:
    found = {seam for platform in PLATFORMS for seam in seams_of(platform, EVERY)}
    for platform in PLATFORMS:
        found |= set(v41_seams_of(platform, report.V41_PARTS))
    return found


def assert_every_seam_is_there(root: Path, others: Path) -> None:
    for platform in PLATFORMS:
        assert seams.missing_seams(root, platform, EVERY) == []
        assert seams.missing_v41_seams(root, platform, report.V41_PARTS) == []
    for seam in every_seam():
        for changed in renamed(root, others, seam):
            assert missing(changed, [seam]), seam


def renamed(root: Path, others: Path, seam: Seam) -> Iterator[Path]:
    """Copies of the module in which a name of the seam is another."""
    module, _, place = seam.place.partition(":")
    inside = root.joinpath(*module.split(".")[1:])
    file = inside / "__init__.py" if inside.is_dir() else inside.with_suffix(".py")
    text = file.read_text()
    owner, _, method = place.partition(".")
    names = [owner]
    if not seam.optional:
        names += [*filter(None, [method]), *seam.parameters[:1], *seam.attributes]
    for name in names:
        changed = others / f"{len(list(others.iterdir()))}"
        copy = changed / file.relative_to(root)
        copy.parent.mkdir(parents=True)
        copy.write_text(re.sub(rf"\b{name}\b", f"{name}_is_gone", text))
        yield changed


@needs_vllm
def test_the_vllm_installed_here_has_every_seam_and_each_is_looked_up(tmp_path: Path) -> None:
    assert_every_seam_is_there(seams.source_of_vllm(), tmp_path)


@needs_source
def test_another_vllm_has_every_seam_and_each_is_looked_up(tmp_path: Path) -> None:
    root = Path(os.environ[SOURCE])
    assert_every_seam_is_there(root, tmp_path)
    optional = {dataclasses.replace(s, optional=False) for s in every_seam() if s.optional}
    assert len(optional) == 5  # 0.33 has them, 0.32 has none
    assert missing(root, optional) == []
