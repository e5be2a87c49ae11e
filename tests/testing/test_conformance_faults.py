"""Every conformance case can fail: a fault of the kind it tells about makes it fail."""

import pytest
import torch
from conformance_faults import FAULTS, GOOD

from anymla.formats.e4m3 import encode_e4m3
from anymla.testing.conformance import Ops, load_cases
from anymla.testing.conformance import cache as cache_cases
from anymla.testing.conformance import numbers as number_cases
from anymla.testing.conformance import rope as rope_cases
from anymla.testing.conformance.ops import all_backends, all_operations

PAIRS = [(fault, case_id) for fault in FAULTS for case_id in fault.cases]
# Cases that are not about operations, by the test below that breaks them.
WITHOUT_OPERATIONS = {"L7", "Q5", "R5"}


@pytest.mark.parametrize(("fault", "case_id"), PAIRS, ids=[f"{f.name}-{c}" for f, c in PAIRS])
def test_a_fault_makes_its_case_fail(fault, case_id: str) -> None:
    with pytest.raises(AssertionError):
        load_cases()[case_id].run(Ops("torch", fault.replacements))


def test_every_case_has_a_fault() -> None:
    cases = load_cases().values()
    runnable = {case.case_id for case in cases if case.run is not None and not case.gpu}
    assert runnable == {case_id for _, case_id in PAIRS} | WITHOUT_OPERATIONS


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
