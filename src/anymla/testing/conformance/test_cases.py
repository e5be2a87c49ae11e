"""Runs every case for every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anymla.ops._operation import BackendUnavailable
from anymla.testing.conformance.ops import Ops, all_backends
from anymla.testing.conformance.registry import Case, NotApplicable, load_cases
from anymla.testing.conformance.runner import Subject
from anymla.testing.devices import default_device


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
    """Run one case; where it does not apply it is skipped with the reason."""
    subject = Subject(backend, device=torch.device(default_device()))
    reason = subject.why_not(case)
    if reason:
        pytest.skip(reason)
    assert case.run is not None
    try:
        case.run(Ops(backend if case.operations else None))
    except (BackendUnavailable, NotApplicable) as unavailable:
        pytest.skip(str(unavailable))
