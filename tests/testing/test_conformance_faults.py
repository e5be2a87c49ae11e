"""Every conformance case can fail, and the documentation says by which faults."""

import pathlib

import pytest
import torch

from anymla.layers.engram import NgramHash
from anymla.testing.conformance import Ops, load_cases, mutations
from anymla.testing.conformance.faults import load_faults
from anymla.testing.conformance.faults.fault import GOOD
from anymla.testing.conformance.ops import all_backends, all_operations

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "conformance.md"


def table(begin: str, end: str) -> list[str]:
    """Lines between two marks of the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return text.split(begin)[1].split(end)[0].strip().splitlines()


MUTATIONS = table(mutations.BEGIN, mutations.END)[2:]


@pytest.mark.parametrize("number", range(len(load_faults())), ids=[f.name for f in load_faults()])
def test_a_fault_is_caught_by_the_cases_that_the_table_says(number) -> None:
    fault = load_faults()[number]
    cases = mutations.caught_by(fault)
    assert set(fault.cases) <= set(cases)
    assert mutations.row(fault, cases) == MUTATIONS[number]


def test_the_table_has_nothing_else() -> None:
    assert len(MUTATIONS) == len(load_faults())


def test_the_documents_list_of_cases_is_todays() -> None:
    assert table(mutations.CASES_BEGIN, mutations.CASES_END) == mutations.case_table()


def test_every_case_has_a_fault() -> None:
    cases = load_cases().values()
    runnable = {case.case_id for case in cases if case.run is not None and not case.gpu}
    noticed = {case_id for fault in load_faults() for case_id in fault.cases}
    assert runnable == noticed


def test_tables_are_written_between_their_marks(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(mutations, "mutation_table", lambda found: ["| new |"])
    file = tmp_path / "conformance.md"
    file.write_text(DOCUMENT.read_text(encoding="utf-8"), encoding="utf-8")
    mutations.write_tables(file, [])
    text = file.read_text(encoding="utf-8")
    assert f"{mutations.BEGIN}\n| new |\n{mutations.END}" in text
    assert text.split(mutations.BEGIN)[0] == DOCUMENT.read_text().split(mutations.BEGIN)[0]


def test_tables_need_their_marks(tmp_path) -> None:
    file = tmp_path / "x.md"
    file.write_text("no marks")
    with pytest.raises(ValueError, match=r"x.md: has no <!-- cases: begin --> with"):
        mutations.write_tables(file, [])
    assert file.read_text() == "no marks"


def test_a_fault_that_is_no_operations_leaves_no_trace() -> None:
    found = next(fault for fault in load_faults() if fault.operation == "NgramHash.__call__")
    right, cases = NgramHash.__call__, [load_cases()["M5"]]
    with found.in_place():
        assert NgramHash.__call__ is not right
    assert NgramHash.__call__ is right
    assert mutations.caught(cases)
    assert NgramHash.__call__ is right
    assert mutations.caught_by(found, [load_cases()["Q5"]]) == []  # not meant for it


def test_replacements_reach_a_whole_model_and_leave_no_trace() -> None:
    calls = []

    def counted(*args, **rest):
        calls.append(1)
        return GOOD.linear(*args, **rest)

    before = all_backends()
    with Ops("torch", {"linear": counted}).as_backend() as name:
        assert name in all_operations()["linear"].backends
        all_operations()["linear"](torch.ones(1, 2), torch.ones(3, 2), backend=name)
    assert calls == [1]
    assert all_backends() == before


def test_unknown_operations_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no operation 'flash'"):
        Ops().flash  # noqa: B018
