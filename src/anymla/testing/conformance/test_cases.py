"""Runs every case for every backend, or for the library that ANYMLA_AGAINST names.

This is a variable because pytest reads options of a package's conftest only if a path names it.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from anymla.ops.registry import BackendUnavailable
from anymla.runtime.devices import default_device
from anymla.testing.conformance.ops import Ops, all_backends
from anymla.testing.conformance.registry import Case, NotApplicable, load_cases
from anymla.testing.conformance.runner import FAILED, NOT_APPLICABLE, Subject, run_case
from anymla.testing.conformance.setup import subject_of

_AGAINST = os.environ.get("ANYMLA_AGAINST")
# Backends that run on any device, and are judged on the CPU.
_GENERAL = ("torch", "reference", "any")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each case and backend, or for each case if another library is judged."""
    if "judged" not in metafunc.fixturenames:
        return
    parameters: list[Any] = []
    for case in load_cases().values():
        marks = [pytest.mark.gpu] if case.gpu else []
        if _AGAINST is not None:
            parameters.append(pytest.param((case, None), id=case.case_id, marks=marks))
            continue
        backends = all_backends() if case.operations else ["any"]
        for backend in backends:
            name = f"{case.case_id}-{backend}"
            parameters.append(pytest.param((case, backend), id=name, marks=marks))
    metafunc.parametrize("judged", parameters)


def test_case(judged: tuple[Case, str | None]) -> None:
    """Run one case; skip it with the reason if it does not apply."""
    case, backend = judged
    if backend is None:
        _other_library(case)
        return
    device = torch.device("cpu" if backend in _GENERAL and not case.gpu else default_device())
    subject = Subject(backend, device=device)
    reason = subject.why_not(case)
    if reason:
        pytest.skip(reason)
    try:
        case.run(Ops(backend if case.operations else None, device=device))
    except (BackendUnavailable, NotApplicable) as unavailable:
        pytest.skip(str(unavailable))


def _other_library(case: Case) -> None:
    outcome = run_case(case, subject_of(None, _AGAINST, None))
    print("\n".join(outcome.notes))
    if outcome.status == NOT_APPLICABLE:
        pytest.skip(outcome.detail)
    assert outcome.status != FAILED, outcome.detail
