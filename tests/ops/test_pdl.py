"""Kernels that are launched early keep the rules of ``ops/pdl.py``, read from their source."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from anymla.ops.device import CPU, TARGETS, has_triton
from anymla.ops.pdl import pdl_launch, target_has_pdl

pytestmark = pytest.mark.skipif(not has_triton(), reason="triton is not installed")

_WRITES = ("store", "atomic", "copy", "async", "tma", "arrive")


# In a process that does not interpret kernels.
EARLY = """
from lab.build_matrix import builds_of
from lab.kernel_files import kernel_modules
from anymla.ops.device import TARGETS
for family in kernel_modules():
    for module, builds in builds_of(family, TARGETS["sm_90"]).items():
        if "gluon" not in module:
            for name in sorted({b.name for b in builds if b.constants.get("PDL") is True}):
                print(module, name)
"""


def early_kernels() -> Iterator[Any]:
    """Every Triton kernel of the operations that is launched early on sm_90."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", EARLY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        module, name = line.split()
        yield getattr(importlib.import_module(module), name)


def source(function: Any) -> ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(function, "fn", function))))
    body = tree.body[0]
    assert isinstance(body, ast.FunctionDef)
    return body


class Reader:
    """Follows the statements of a kernel, or of one of its helpers, in order."""

    def __init__(self, function: Any, *, helper: bool = False) -> None:
        self.body = source(function).body
        self.names = getattr(function, "fn", function).__globals__
        self.title = function.__name__
        self.helper = helper

    def statements(self, body: list[ast.stmt], waited: bool) -> bool:
        """Whether every way through has waited; AssertionError where one may not go on."""
        for statement in body:
            waited = self.statement(statement, waited)
        return waited

    def statement(self, statement: ast.stmt, waited: bool) -> bool:
        if isinstance(statement, ast.If):
            if ast.unparse(statement.test) == "PDL":
                return self.statements(statement.body, waited)
            ways = [self.statements(statement.body, waited)]
            ways.append(self.statements(statement.orelse, waited))
            return all(ways)
        if isinstance(statement, ast.For | ast.While):
            self.statements(statement.body, waited)
            return waited
        if isinstance(statement, ast.Return):
            at = f"line {statement.lineno}"
            assert waited or self.helper, f"{self.title} ends before it has waited, {at}"
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                waited = self.call(node, waited)
        return waited

    def call(self, call: ast.Call, waited: bool) -> bool:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if ast.unparse(call.func) == "gdc_wait":
            return True
        wrote = any(name.startswith(word) for word in _WRITES)
        assert waited or not wrote, f"{self.title} writes before it waits, line {call.lineno}"
        if isinstance(call.func, ast.Name) and not waited:
            helper = self.names.get(call.func.id)
            if hasattr(helper, "fn"):
                inside = Reader(helper, helper=True)
                return inside.statements(inside.body, waited)
        return waited


def test_every_program_waits_before_it_writes_or_ends() -> None:
    kernels = list(early_kernels())
    assert len(kernels) > 25
    for kernel in kernels:
        reader = Reader(kernel)
        assert reader.statements(reader.body, False), f"{kernel} may end without waiting"


def leaves(count: int, PDL: bool) -> None:
    if count > 0:
        return
    if PDL:
        gdc_wait()  # noqa: F821


def waits_on_one_way(count: int, PDL: bool) -> None:
    if count > 0 and PDL:
        print(count)
    elif PDL:
        gdc_wait()  # noqa: F821


def writes_first(at: int, PDL: bool) -> None:
    tl.store(at, 1)  # noqa: F821
    if PDL:
        gdc_wait()  # noqa: F821


@pytest.mark.parametrize("wrong", [leaves, waits_on_one_way, writes_first])
def test_what_is_wrong_is_seen(wrong: Any) -> None:
    with pytest.raises(AssertionError):
        assert Reader(wrong).statements(Reader(wrong).body, False)


def test_what_was_copied_for_a_launch_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anymla.ops.pdl._pdl_launch", lambda device: {"PDL": True})
    device = torch.device("cpu")
    assert pdl_launch(device, None, torch.zeros(2, 2))["PDL"]
    assert not pdl_launch(device, torch.zeros(2, 2).t())["PDL"]


def test_only_where_it_has_run() -> None:
    assert [name for name, target in TARGETS.items() if target_has_pdl(target)] == ["sm_90"]
    assert not target_has_pdl(CPU)
    assert pdl_launch(torch.device("cpu")) == {"PDL": False}
