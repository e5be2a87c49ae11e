"""Inverse RoPE and FP8 quantisation of attention's output: what launchers pass to epilogues.

The output projection reads heads that are rotated back by the query's position and quantised in
blocks of 128 channels. An attention kernel can do both before it stores its heads: the stores are
in ``_triton_epilogue`` and ``_gluon_epilogue``, their arguments and checks are here.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.ops._check import FLOATS, INT64, check, check_cos_sin, require


class InverseRopeQuant(NamedTuple):
    """Epilogue of an attention: its heads are rotated back by position and quantised to FP8.

    The result is ``inverse_rope_fp8_quant`` of the heads, which may be rounded to the query's dtype
    in between, as separate calls do, or not at all.

    Attributes:
        positions: absolute positions of the queries, [T] int64.
        cos_sin_cache: cosines then sines by position, [L, rotating channels] float32 or float64;
            L is larger than every position.
        n_groups: number G of groups of the output projection, a divisor of the number of heads.
    """

    positions: Tensor
    cos_sin_cache: Tensor
    n_groups: int


@dataclasses.dataclass(frozen=True)
class RopeTable:
    """Rotary table and positions of a call's queries.

    Attributes:
        positions: absolute positions of the queries, [T] int64, contiguous.
        table: cosines then sines by position, [L, rotating channels] float32, contiguous.
    """

    positions: Tensor
    table: Tensor

    @property
    def dim(self) -> int:
        """Number of trailing channels of a head that rotate with the position."""
        return self.table.shape[1]


@dataclasses.dataclass(frozen=True)
class QuantizedOut:
    """Output buffers and parameters of ``inverse_rope_fp8_quant`` inside an attention kernel.

    Attributes:
        codes: e4m3 codes as uint8 [T, H, D], written by the kernel.
        scales: one scale for each quant block, float32 [T, H, blocks], written by the kernel.
        rope: rotary table and positions of the queries.
        dtype: dtype to which heads are rounded before they are quantised.
        native: True if the device converts FP8 by instructions.
    """

    codes: Tensor
    scales: Tensor
    rope: RopeTable
    dtype: torch.dtype
    native: bool

    @classmethod
    def allocate(
        cls, q: Tensor, epilogue: InverseRopeQuant, native: bool, block: int = FP8_BLOCK
    ) -> QuantizedOut:
        """Allocate buffers for ``q`` [T, H, D], whose scales have ``block`` channels each."""
        positions, table, _ = epilogue
        tokens, heads, channels = q.shape
        blocks = (tokens, heads, channels // block)
        return cls(
            torch.empty(q.shape, dtype=torch.uint8, device=q.device),
            torch.empty(blocks, dtype=torch.float32, device=q.device),
            RopeTable(positions.contiguous(), table.float().contiguous()),
            q.dtype,
            native,
        )

    def of(self, tokens: slice) -> QuantizedOut:
        """Return views of the buffers and positions for a slice of the tokens."""
        rope = dataclasses.replace(self.rope, positions=self.rope.positions[tokens])
        return dataclasses.replace(
            self, codes=self.codes[tokens], scales=self.scales[tokens], rope=rope
        )

    def results(self, groups: int) -> tuple[Tensor, Tensor]:
        """Return codes and scales in the shapes that ``inverse_rope_fp8_quant`` returns."""
        tokens, heads, channels = self.codes.shape
        of_group = heads // groups
        codes = self.codes.view(torch.float8_e4m3fn).view(tokens, groups, of_group * channels)
        return codes, self.scales.view(tokens, groups, of_group * self.scales.shape[2])


def epilogue_pointers(to: QuantizedOut | None, other: Tensor) -> tuple[Any, ...]:
    """Return the kernel's pointers to scales, positions and table; ``other`` stands in for None."""
    if to is None:
        return other, other, other, 0
    return to.scales, to.rope.positions, to.rope.table, len(to.rope.table)


def epilogue_constants(to: QuantizedOut | None) -> dict[str, Any]:
    """Return constexprs of ``_triton_epilogue.store_quantized``; ROPE_DIM is 0 without ``to``."""
    import triton.language as tl

    if to is None:
        return {"ROPE_DIM": 0, "TYPE": tl.float32, "NATIVE": False}
    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    return {"ROPE_DIM": to.rope.dim, "TYPE": types[to.dtype], "NATIVE": to.native}


def quantized_results(q: Tensor, epilogue: InverseRopeQuant) -> tuple[Tensor, Tensor]:
    """Allocate codes and scales, the results of an attention of queries [T, H, D] with epilogue."""
    tokens, heads, dim = q.shape
    groups = epilogue.n_groups
    width = heads // groups * dim
    return (
        q.new_empty((tokens, groups, width), dtype=torch.float8_e4m3fn),
        q.new_empty((tokens, groups, width // FP8_BLOCK), dtype=torch.float32),
    )


def check_epilogue(
    name: str, q: Tensor, epilogue: InverseRopeQuant | None, **others: object
) -> None:
    """Check an attention's epilogue.

    Args:
        name: name of the operation, for error messages.
        q: queries of the operation, [T, H, D].
        epilogue: epilogue of the operation, or None.
        **others: arguments that must be None with an epilogue, by name.
    """
    if epilogue is None:
        return
    if not isinstance(epilogue, InverseRopeQuant):
        got = type(epilogue).__name__
        raise TypeError(f"{name}: epilogue must be an InverseRopeQuant or None, got {got}")
    for argument, value in others.items():
        require(value is None, name, argument, "None with an epilogue", "a value")
    positions, table, groups = epilogue
    given: dict[str, tuple[object, str, torch.dtype]]
    given = {"epilogue.positions": (positions, "T", INT64)}
    dims = check(name, dims=None, q=(q, "T H D", FLOATS), **given)
    check_cos_sin(name, table, q, dims["D"], argument="epilogue.cos_sin_cache")
    whole = groups > 0 and dims["H"] % groups == 0 and dims["D"] % FP8_BLOCK == 0
    expected = f"[T, H, D] with H a multiple of {groups} groups and D of {FP8_BLOCK}"
    require(whole, name, "q", expected, list(q.shape))
