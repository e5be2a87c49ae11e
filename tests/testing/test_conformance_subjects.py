"""Which cases a backend of ours is asked for."""

import pytest
import torch

from anymla.testing.conformance.registry import load_cases
from anymla.testing.conformance.runner import Subject


@pytest.mark.parametrize("name", ["A6", "M4"])
def test_cases_about_a_device_are_not_for_the_reference(name):
    case, device = load_cases()[name], torch.device("cuda")
    assert Subject("reference", device=device).why_not(case).endswith("computes on the host")
    assert not Subject("torch", device=device).why_not(case)
    assert Subject("torch", device=torch.device("cpu")).why_not(case) == "needs a CUDA device"
