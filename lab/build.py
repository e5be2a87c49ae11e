"""Specialisations of kernels to compile without a device, and what each build must fulfil."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

# Constructors of meta tensors, for the calls whose launches are built.
empty = functools.partial(torch.empty, device="meta")
uint8 = functools.partial(empty, dtype=torch.uint8)
int32 = functools.partial(empty, dtype=torch.int32)
int64 = functools.partial(empty, dtype=torch.int64)
float32 = functools.partial(empty, dtype=torch.float32)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Pages of a cache of rows: more than 2 GiB of them, as where models are served. Kernels for AMD
# address smaller tensors otherwise.
CACHE_PAGES = 200_100


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Requirements on a build's compiled code.

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
        label: text that distinguishes this build from the kernel's other builds.
        kernel: the ``triton.jit`` function to compile.
        types: Triton type of every argument that is no constexpr: "*u8", "i64", "fp32", ...
        constants: values of the constexpr arguments, by name.
        num_warps: warps of a CTA.
        num_stages: pipeline depth; None where the launch leaves it to the compiler as well.
        divisible: arguments known to be multiples of 16 (pointers always are).
        near: pointers of tensors below 2 GiB, which AMD's kernels address by 32 bits.
        judgement: requirements on the compiled code.
        fp_fusion: True to let the compiler contract a product and a sum into one FMA.
        registers: largest number of registers a thread may use; 0 for no limit.
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
    near: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the kernel function."""
        return str(self.kernel.fn.__name__)

    @property
    def module(self) -> str:
        """Dotted name of the kernel's file."""
        return str(self.kernel.fn.__module__)

    @property
    def key(self) -> tuple[Any, ...]:
        """Key of the compiled code: everything it depends on, except the kernel's text."""
        constants = tuple(sorted((name, repr(value)) for name, value in self.constants.items()))
        return (
            self.module, self.name, tuple(sorted(self.types.items())), constants, self.num_warps,
            self.num_stages, tuple(sorted(self.divisible)), self.fp_fusion, self.registers,
            self.near,
        )  # fmt: skip
