"""Every conformance case can fail, and the documentation says by which faults."""

import dataclasses
import pathlib
from types import SimpleNamespace

import pytest
import torch

from anymla.formats.e4m3 import encode_e4m3
from anymla.layers import engram
from anymla.layers.compressor import LatentCompressor
from anymla.ops.engram import torch_engram
from anymla.runtime.ngrams import NgramReader
from anymla.testing.conformance import Ops, load_cases, mutations
from anymla.testing.conformance import cache as cache_cases
from anymla.testing.conformance import numbers as number_cases
from anymla.testing.conformance import rope as rope_cases
from anymla.testing.conformance import shared as shared_cases
from anymla.testing.conformance.faults import load_faults
from anymla.testing.conformance.faults.fault import GOOD
from anymla.testing.conformance.ops import all_backends, all_operations

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "conformance.md"
# Cases that are not about operations, by the tests below that break them.
WITHOUT_OPERATIONS = {"L7", "Q5", "R5", "M5"}


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
    assert runnable == noticed | WITHOUT_OPERATIONS


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


def test_a_plain_row_is_no_default_layout(monkeypatch) -> None:
    monkeypatch.setattr(cache_cases, "get_layout", lambda _: cache_cases.ROWS_BF16_512)
    with pytest.raises(AttributeError):
        load_cases()["L7"].run(Ops())
    monkeypatch.undo()
    known = cache_cases.get_layout
    monkeypatch.setattr(
        cache_cases, "get_layout", lambda i: known("v4_main_fp8" if i == "auto" else i)
    )
    with pytest.raises(AssertionError, match="nothing was raised"):
        load_cases()["L7"].run(Ops())


@pytest.mark.parametrize(
    "encode",
    [  # towards zero; NaN instead of the largest value
        lambda x: (x.float() * (1 - 2**-6)).to(torch.float8_e4m3fn).view(torch.uint8),
        lambda x: torch.where(x.abs() > 448, 0x7F, encode_e4m3(x)).to(torch.uint8),
    ],
)
def test_truncating_or_unsaturated_codes_fail(monkeypatch, encode) -> None:
    monkeypatch.setattr(number_cases, "encode_e4m3", encode)
    with pytest.raises(AssertionError):
        load_cases()["Q5"].run(Ops())


def test_a_swapped_base_fails(monkeypatch) -> None:
    good = rope_cases.inv_freq
    monkeypatch.setattr(
        rope_cases, "inv_freq", lambda dim, theta, yarn=None: good(dim, 170000.0 - theta, yarn)
    )
    for case_id in ("R1", "R5"):
        with pytest.raises(AssertionError):
            load_cases()[case_id].run(Ops("torch"))


def _other_multipliers(monkeypatch) -> None:
    good = shared_cases.ngram_hash

    def other(*args):
        hashes = good(*args)
        return dataclasses.replace(hashes, multipliers=hashes.multipliers.flip(0))

    monkeypatch.setattr(shared_cases, "ngram_hash", other)


def _a_gap_hides_nothing(monkeypatch) -> None:
    good = engram.NgramHash.__call__

    def seen(self, token_ids, previous):
        return good(self, token_ids, torch.where(previous < 0, 2, previous))

    monkeypatch.setattr(engram.NgramHash, "__call__", seen)


def _least_size_of_a_gate_missing(monkeypatch) -> None:
    monkeypatch.setattr(torch_engram, "LEAST_DOT", 0.0)


@pytest.mark.parametrize(
    "break_it", [_other_multipliers, _a_gap_hides_nothing, _least_size_of_a_gate_missing]
)
def test_wrong_ngrams_fail(monkeypatch, break_it) -> None:
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        load_cases()["M5"].run(Ops())


def _ngrams_of_the_chunk_alone(monkeypatch) -> None:
    good = NgramReader.found

    def forgetful(self, spans):
        nothing = SimpleNamespace(tokens=[])
        return good(self, [dataclasses.replace(span, state=nothing) for span in spans])

    monkeypatch.setattr(NgramReader, "found", forgetful)


def _entries_rotated_at_their_last_token(monkeypatch) -> None:
    good = LatentCompressor.insert

    def late(self, rows, step, *rest):
        moved = step.positions + (self.ape.shape[0] - 1)
        good(self, rows, dataclasses.replace(step, positions=moved), *rest)

    monkeypatch.setattr(LatentCompressor, "insert", late)


@pytest.mark.parametrize(
    "break_it", [_ngrams_of_the_chunk_alone, _entries_rotated_at_their_last_token]
)
def test_wrong_layers_of_v41_fail(monkeypatch, break_it) -> None:
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        load_cases()["C11"].run(Ops("torch"))


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
