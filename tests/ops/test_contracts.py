"""What every operation owes its callers, whatever it computes."""

import importlib
import inspect
import pkgutil

import pytest
import torch
from sample_calls import cache_of, call_with_targets, int32

import anymla.ops
from anymla.formats.page_layout import MAIN_FP8
from anymla.ops import attention
from anymla.ops.device import has_triton
from anymla.ops.registry import Operation


def _operations():
    for module in pkgutil.iter_modules(anymla.ops.__path__):
        if not module.ispkg:
            continue
        interface = importlib.import_module(f"anymla.ops.{module.name}.interface")
        family = importlib.import_module(f"anymla.ops.{module.name}")
        for name, value in vars(interface).items():
            if isinstance(value, Operation):
                yield pytest.param(family, value, id=f"{module.name}.{name}")


OPERATIONS = list(_operations())


def test_there_are_operations():
    assert len(OPERATIONS) >= 25


@pytest.mark.parametrize(("family", "operation"), OPERATIONS)
def test_backends_take_what_the_contract_takes(family, operation):
    """Defaults are not filled in on the way, so a backend must have the same ones."""
    contract = inspect.signature(operation._contract).parameters
    assert set(operation.backends) >= {"reference", "torch"}
    for backend in operation.backends.values():
        if backend.name == "triton" and not has_triton():
            continue
        taken = inspect.signature(backend.run).parameters
        assert list(taken) == list(contract)
        for name, parameter in contract.items():
            assert taken[name].default == parameter.default
            assert taken[name].kind == parameter.kind


@pytest.mark.parametrize(("family", "operation"), OPERATIONS)
def test_operations_are_public_documented_and_registered(family, operation):
    assert getattr(family, operation.name) is operation
    assert operation.name in family.__all__
    for section in ("Args:", "Raises:"):
        assert section in operation.__doc__
    assert hasattr(torch.ops.anymla, operation.name)
    assert operation.schema().endswith("-> ()")


def second_scope():
    return {
        "extra_cache": cache_of(MAIN_FP8),
        "extra_indices": int32([0, 5], [3, -1]),
        "extra_lengths": int32(2, 1),
        "sink": torch.zeros(2),
    }


def elsewhere(given):
    """The arguments with one tensor on another device, for each; and its name."""
    tensors = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
    for name in tensors if len(tensors) > 1 else ():
        yield name, given | {name: given[name].to("meta")}
    for name in [name for name, value in given.items() if isinstance(value, list) and value]:
        for place in range(len(given[name])):
            moved = [*given[name]]
            moved[place] = moved[place].to("meta")
            yield name, given | {name: moved}


@pytest.mark.parametrize(("family", "operation"), OPERATIONS)
def test_every_tensor_is_on_one_device(family, operation):
    given = call_with_targets(operation.name)
    if operation.name in ("sparse_attention", "sparse_attention_fp8_quant"):
        given |= second_scope()
    operation(**given)
    for name, changed in elsewhere(given):
        for _ in range(2):  # nor is it taken for a call of a known kind
            with pytest.raises(ValueError, match=rf"{operation.name}: .* must be on ") as raised:
                operation(**changed)
            assert name in str(raised.value) or "on meta" in str(raised.value)


@pytest.mark.parametrize("operation", ["sparse_attention", "sparse_attention_fp8_quant"])
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("indices", torch.zeros(1, 3, dtype=torch.int32)),
        ("indices", torch.zeros(2, 3)),
        ("lengths", int32(1)),
        ("sink", torch.zeros(3)),
        ("extra_indices", torch.zeros(3, 2, dtype=torch.int32)),
        ("extra_lengths", int32(1, 1, 1)),
        ("extra_cache", torch.zeros(3, 4, 528, dtype=torch.uint8)),
        ("k_cache", torch.zeros(3, 4, 528, dtype=torch.uint8)),
        ("extra_cache", None),
    ],
)
def test_both_scopes_fit_the_queries(operation, name, wrong):
    given = call_with_targets(operation) | second_scope() | {name: wrong}
    with pytest.raises((TypeError, ValueError), match=f"{operation}: {name}"):
        getattr(attention, operation)(**given)
