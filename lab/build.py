"""What is compiled of a kernel without a device: one specialisation, and what it must fulfil."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

# Tensors of the calls whose launches are built.
empty = functools.partial(torch.empty, device="meta")
uint8 = functools.partial(empty, dtype=torch.uint8)
int32 = functools.partial(empty, dtype=torch.int32)
int64 = functools.partial(empty, dtype=torch.int64)
float32 = functools.partial(empty, dtype=torch.float32)


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What a build must fulfil.

    Attributes:
        matrix: matrix-multiply instructions must appear in the code: any (True), or those with
            "bf16", "fp16" or "e4m3" operands.
        spills: spill instructions that are accepted.
        fails: part of the compiler's message if this build is expected to fail, else "".
    """

    matrix: bool | str = False
    spills: int = 0
    fails: str = ""


@dataclasses.dataclass(frozen=True)
class Build:
    """One specialisation of a kernel, to be compiled without a device.

    Attributes:
        label: what distinguishes it among the kernel's builds.
        kernel: the ``triton.jit`` function.
        types: Triton type of every argument that is no constexpr: "*u8", "i64", "fp32", ...
        constants: values of the constexprs.
        num_warps: warps of a CTA.
        num_stages: pipeline depth; None where the launch leaves it to the compiler as well.
        divisible: arguments known to be multiples of 16 (pointers always are).
        judgement: what it must fulfil.
        fp_fusion: products and sums may become one instruction, which rounds once.
        registers: of a thread, at most; 0 for as many as there are.
    """

    label: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int | None = None
    divisible: tuple[str, ...] = ()
    judgement: Judgement = Judgement()
    fp_fusion: bool = True
    registers: int = 0

    @property
    def name(self) -> str:
        """The kernel's."""
        return str(self.kernel.fn.__name__)

    @property
    def module(self) -> str:
        """Dotted name of the kernel's file."""
        return str(self.kernel.fn.__module__)

    @property
    def key(self) -> tuple[Any, ...]:
        """What the compiled code depends on, beside the kernel's text."""
        constants = tuple(sorted((name, repr(value)) for name, value in self.constants.items()))
        return (
            self.module, self.name, tuple(sorted(self.types.items())), constants, self.num_warps,
            self.num_stages, tuple(sorted(self.divisible)), self.fp_fusion, self.registers,
        )  # fmt: skip
