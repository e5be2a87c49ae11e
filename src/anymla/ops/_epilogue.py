"""Inverse RoPE and FP8 quantisation of attention's output: what launchers pass to epilogues.

The output projection reads heads that are rotated back by the query's position and quantised in
blocks of 128 channels. An attention kernel can do both before it stores its heads: the stores are
in ``_triton_epilogue`` and ``_gluon_epilogue``, their arguments and checks are here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.ops._check import FLOATS, INT64, check, check_cos_sin, require
from anymla.ops.registry import LazyFunction, signature_of_backends


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
        scales: one scale for 128 channels, float32 [T, H, D / 128], written by the kernel.
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
    def allocate(cls, q: Tensor, positions: Tensor, table: Tensor, native: bool) -> QuantizedOut:
        """Allocate buffers for the heads and channels of ``q`` [T, H, D]."""
        tokens, heads, channels = q.shape
        blocks = (tokens, heads, channels // FP8_BLOCK)
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
        width = heads // groups * channels
        codes = self.codes.view(torch.float8_e4m3fn).view(tokens, groups, width)
        return codes, self.scales.view(tokens, groups, width // FP8_BLOCK)


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


def quantized_results(*, q: Tensor, n_groups: int, **_: object) -> tuple[Tensor, Tensor]:
    """Allocate codes and scales, the results of an attention whose output is quantised."""
    tokens, heads, dim = q.shape
    width = heads // n_groups * dim
    return (
        q.new_empty((tokens, n_groups, width), dtype=torch.float8_e4m3fn),
        q.new_empty((tokens, n_groups, width // FP8_BLOCK), dtype=torch.float32),
    )


def check_quantized(
    name: str, q: Tensor, positions: Tensor, cos_sin_cache: Tensor, groups: int
) -> dict[str, int]:
    """Check the arguments that quantised output adds to an attention; return sizes by letter."""
    dims = check(
        name,
        q=(q, "T H D", FLOATS),
        positions=(positions, "T", INT64),
    )
    check_cos_sin(name, cos_sin_cache, q, dims["D"])
    whole = groups > 0 and dims["H"] % groups == 0 and dims["D"] % FP8_BLOCK == 0
    expected = f"[T, H, D] with H a multiple of {groups} groups and D of {FP8_BLOCK}"
    require(whole, name, "q", expected, list(q.shape))
    return dims


# Module with each backend's ``inverse_rope_fp8_quant``.
_QUANTIZE = {
    "reference": "anymla.ops._reference",
    "torch": "anymla.ops._torch_norm_rope",
    "triton": "anymla.ops._triton_epilogue",
}


def composed(
    contract: Callable[..., Any], attend: Callable[..., Any], backend: str
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Compose quantised attention of two operations: attend, then rotate back and quantise.

    Args:
        contract: contract to implement: ``attend``'s arguments, ``positions``, ``cos_sin_cache``,
            ``n_groups``.
        attend: operation whose first result, the heads, is quantised.
        backend: name of the backend that runs both: "reference", "torch" or "triton".
    """
    quantize = LazyFunction(_QUANTIZE[backend], "inverse_rope_fp8_quant")
    signature, of_attend = signature_of_backends(contract), signature_of_backends(attend)

    def attend_then_quantize(*args: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        given = signature.bind(*args, **keywords).arguments
        positions, table = given.pop("positions"), given.pop("cos_sin_cache")
        groups = given.pop("n_groups")
        bound = of_attend.bind(**given)
        out, _ = attend(*bound.args, **bound.kwargs, backend=backend)
        codes, scales = quantize(out, positions, table, n_groups=groups)
        return codes, scales

    attend_then_quantize.__signature__ = signature  # type: ignore[attr-defined]
    return attend_then_quantize
