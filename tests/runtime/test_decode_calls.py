"""A decode step on a CPU asks torch for few operators: of a small model their cost is the time."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from anymla.runtime.request import Request
from anymla.testing.conformance.ops import all_operations
from lab.cpu.tiny_model import engine_with, load, prompt, tiny
from lab.timing import CountedCalls

PROMPT_TOKENS, STEPS = 150, 8
# Of four layers of ratios 0, 4, 128, 4: a usual step, and one whose token closes a window of 4.
# Tests fill what torch.empty returns, which is an operator too.
LEAST, USUAL, CLOSING = 990, 1530, 1770


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(tiny(tmp_path_factory.mktemp("tiny") / "checkpoint"), torch.bfloat16)


def calls(model):
    """Fewest and most operators of a decode step, the second of which closes a window."""
    request = Request("one", prompt(model, PROMPT_TOKENS), max_new_tokens=STEPS + 2)
    engine = engine_with(model, request, "fp8")
    while not engine.state("one").generated:
        engine.step()
    engine.step()  # the first decode step is checked
    counts = []
    for _ in range(STEPS):
        with CountedCalls() as counted:
            report = engine.step()
        assert len(report.new_tokens["one"]) == 1
        counts.append(counted.count)
    return min(counts), max(counts)


def test_without_numba(model):
    """The least number shows that the counter sees what torch is asked for."""
    with ExitStack() as stack:
        for operation in all_operations().values():
            if "numba" in operation.backends:
                left = [each for each in operation.backends.values() if each.name == "torch"]
                stack.enter_context(operation.with_backends(left))
        usual, closing = calls(model)
    assert LEAST < usual <= USUAL
    assert usual < closing <= CLOSING
