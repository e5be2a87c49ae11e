"""Experts that are tensors of their own, at any distance from the first one."""

import itertools
import re

import pytest
import torch
from sample_calls import operations, sample_call

from anymla.ops.moe import inputs
from anymla.testing.conformance.registry import load_cases
from anymla.testing.conformance.runner import FAILED, PASSED, Subject, run_case
from anymla.testing.far_memory import GIB, large_memory, tensor_at

# Of the three experts, where each lies. Triton's buffer loads reach 2 GiB behind a tensor.
PLACES = {
    "one after the other": (0, 1 << 16, 2 << 16),
    "unevenly": (0, 1 << 16, 5 << 16),
    "before the first": (4 << 16, 0, 6 << 16),
    "2.5 GiB behind the first": (0, 5 * GIB // 2, 1 << 16),
    "2.5 GiB before the first": (5 * GIB // 2, 0, 5 * GIB // 2 + (1 << 16)),
    "5 GiB behind the first, in steps": (0, 5 * GIB // 2, 5 * GIB),
}


@pytest.fixture(scope="module")
def memory():
    """Six GiB of addresses; what nobody touches takes no memory."""
    return large_memory(6 * GIB, torch.device("cpu"))


def placed(memory, tensors, places, number):
    """The tensors' values at places in the memory, each a storage of its own."""
    start = number << 20
    return [tensor_at(memory, at + start, t) for t, at in zip(tensors, places, strict=True)]


def results(memory, places):
    """The operation on experts that lie so, and on the same by torch."""
    given = sample_call("experts")
    moved = given | {
        name: placed(memory, given[name], places, number)
        for number, name in enumerate(("w1", "w3", "w2"))
    }
    operation = operations()["experts"]
    return operation(**moved, backend="triton"), operation(**given, backend="torch")


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_experts_are_found_wherever_they_lie(device, memory, places):
    got, want = results(memory, places)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("name", ["before the first", "2.5 GiB behind the first"])
def test_a_kernel_that_takes_the_first_for_near_reads_zeros(device, memory, name, monkeypatch):
    """The fault that these tests are for, put back."""
    monkeypatch.setattr(inputs, "far_reaching", lambda tensor: tensor)
    said = ""
    try:
        got, want = results(memory, PLACES[name])
    except RuntimeError as error:
        said = str(error)
    if said:
        # The address is nobody's, or Triton does not compile a choice between two such tensors.
        assert re.search("outside of every tensor|PassManager", said)
    else:
        assert float((got - want).abs().max()) > 0.01 * float(want.abs().max())


def test_the_conformance_case_finds_the_fault(device, monkeypatch):
    """As ``anymla conformance --case M12`` does on an AMD GPU."""
    case, subject = load_cases()["M12"], Subject("triton")
    assert run_case(case, subject).status == PASSED
    monkeypatch.setattr(inputs, "far_reaching", lambda tensor: tensor)
    assert run_case(case, subject).status == FAILED


def test_the_places_differ():
    """No two experts overlap anywhere."""
    for places in PLACES.values():
        for one, other in itertools.combinations(places, 2):
            assert abs(one - other) >= 1 << 16
