"""Runs every case for every backend."""

from __future__ import annotations

from typing import Any

import pytest

from anymla.ops import _triton
from anymla.ops._operation import BackendUnavailable
from anymla.testing.conformance.ops import Ops, all_backends, all_operations
from anymla.testing.conformance.registry import Case, load_cases


def _parameters() -> list[Any]:
    parameters = []
    for case in load_cases().values():
        marks = [pytest.mark.gpu] if case.gpu else []
        backends = all_backends() if case.operations else ["any"]
        for backend in backends if case.run else ["none"]:
            name = f"{case.case_id}-{backend}"
            parameters.append(pytest.param(case, backend, id=name, marks=marks))
    return parameters


@pytest.mark.parametrize(("case", "backend"), _parameters())
def test_case(case: Case, backend: str) -> None:
    """Run one case; a backend that lacks one of its operations is skipped with the reason."""
    if case.run is None:
        pytest.skip(case.absent)
    if not case.operations:
        case.run(Ops())
        return
    if case.bulk and backend == "reference":
        pytest.skip("a case about size; the reference loops in Python")
    if case.bulk and backend == "triton" and _triton.INTERPRETED:
        pytest.skip("a case about size; Triton's interpreter takes minutes")
    whole_model = {"sparse_attention", "experts"} <= set(case.operations)
    if whole_model and backend == "triton" and _triton.INTERPRETED:
        pytest.skip("a case of whole models; Triton's interpreter takes minutes, a GPU runs it")
    missing = [name for name in case.operations if backend not in all_operations()[name].backends]
    if missing:
        pytest.skip(f"backend {backend} has no {', '.join(missing)}")
    try:
        case.run(Ops(backend))
    except BackendUnavailable as unavailable:
        pytest.skip(str(unavailable))
