import ast
import logging
from pathlib import Path

import pytest

import anymla.engines.vllm
from anymla.engines.vllm import pinned, plugin, report
from anymla.engines.vllm.report import Machine

TESTED = pinned.TESTED[-1]


def cuda(major: int, minor: int = 0, flashinfer: bool = False) -> Machine:
    return Machine("cuda", (major, minor), flashinfer)


def replaced(machine: Machine, mode: str) -> set[str]:
    return {part.name for part in report.plan(machine, mode) if part.replaced}


@pytest.mark.parametrize(
    "machine",
    [Machine("cpu"), Machine("xpu"), cuda(8), cuda(8, 6), cuda(8, 9), cuda(12), cuda(12, 1)],
    ids=lambda machine: machine.name,
)
def test_a_device_without_kernels_in_vllm_gets_anymla_by_itself(machine: Machine) -> None:
    assert {report.ATTENTION, report.INDEXER} <= replaced(machine, "auto")


@pytest.mark.parametrize(
    "machine", [cuda(9), cuda(10), cuda(10, 3), cuda(12, flashinfer=True)], ids=lambda m: m.name
)
def test_a_device_that_vllm_serves_gets_anymla_when_asked(machine: Machine) -> None:
    assert not replaced(machine, "auto")
    assert {report.ATTENTION, report.INDEXER, report.DRAFT_MODEL} <= replaced(machine, "force")
    assert not replaced(machine, "off")


def test_a_platform_without_an_adapter_keeps_everything() -> None:
    assert not replaced(Machine("rocm"), "force")
    assert all("ROCM" in part.why for part in report.plan(Machine("rocm"), "force"))


def test_hyper_connections_are_replaced_where_vllm_has_none() -> None:
    assert report.HYPER_CONNECTIONS in replaced(cuda(8), "auto")
    for machine in (Machine("cpu"), Machine("xpu"), cuda(12)):
        assert report.HYPER_CONNECTIONS not in replaced(machine, "auto")
        assert report.HYPER_CONNECTIONS in replaced(machine, "force")


def test_only_a_cpu_needs_stand_ins_for_metadata_kernels_and_has_no_draft_model() -> None:
    assert report.METADATA_KERNELS in replaced(Machine("cpu"), "auto")
    assert report.METADATA_KERNELS not in replaced(cuda(8), "auto")
    assert report.DRAFT_MODEL not in replaced(Machine("cpu"), "force")
    assert report.DRAFT_MODEL in replaced(cuda(8), "auto")


def test_the_summary_names_the_device_the_parts_and_the_reasons() -> None:
    machine = cuda(8, 6)
    line = report.summary(machine, report.plan(machine, "auto"))
    assert "sm_86" in line
    assert "attention, indexer, hyper-connections" in line
    assert "FlashMLA and DeepGEMM do not run on sm_86" in line


def test_the_mode_is_one_of_three_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(report.VARIABLE, raising=False)
    assert report.mode() == "auto"
    monkeypatch.setenv(report.VARIABLE, "on")
    with pytest.raises(ValueError, match="ANYMLA_VLLM must be auto, force or off, got 'on'"):
        report.mode()


@pytest.mark.parametrize("mode", ["auto", "force"])
def test_an_untested_vllm_is_left_alone_with_a_warning(
    mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(report.VARIABLE, mode)
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.99.0")
    # anything beyond the warning would ask which machine this is
    monkeypatch.setattr(report, "this_machine", None)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    (record,) = caplog.records
    assert "vLLM 0.99.0 is not among the tested versions" in record.getMessage()
    assert TESTED in record.getMessage()


def test_the_view_without_vllm_and_with_an_untested_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "installed_version", lambda: None)
    (row,) = report.plugin_view()
    assert row["action"] == "not installed"
    monkeypatch.setattr(report, "installed_version", lambda: "0.99.0")
    (row,) = report.plugin_view()
    assert "0.99.0 is not among the tested versions" in row["why"]


def test_the_view_has_a_row_for_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(report.VARIABLE, "auto")
    monkeypatch.setattr(report, "installed_version", lambda: TESTED)
    monkeypatch.setattr(report, "this_machine", lambda: cuda(8))
    head, *rows = report.plugin_view()
    assert head == {"part": "vLLM", "action": TESTED, "why": "a tested version"}
    assert [row["part"] for row in rows] == [part.name for part in report.plan(cuda(8), "auto")]
    assert {row["action"] for row in rows} == {"replaced"}


def test_the_adapters_compute_nothing() -> None:
    names = set()
    for file in Path(anymla.engines.vllm.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    mathematics = {"matmul", "einsum", "bmm", "mm", "softmax", "exp", "exp2", "rsqrt", "sigmoid"}
    assert not names & mathematics
