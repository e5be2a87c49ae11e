"""What every operation owes its callers, whatever it computes."""

import importlib
import inspect
import pkgutil

import pytest
import torch

import anymla.ops
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
