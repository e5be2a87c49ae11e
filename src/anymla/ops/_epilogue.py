"""Inverse RoPE and FP8 quantisation of attention's heads: where an epilogue writes them.

The output projection reads heads that are rotated back by the query's position and quantised in
blocks of 128 channels. A kernel that has finished heads can do that before it stores them:
``_triton_epilogue`` and ``_gluon_epilogue`` are the stores, this file is what launchers give them.
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
    """Angles of a call's queries.

    Attributes:
        positions: int64 [T], contiguous.
        table: float32 [L, channels that rotate], cosines then sines, contiguous, L > any position.
    """

    positions: Tensor
    table: Tensor

    @property
    def dim(self) -> int:
        """Channels of a head, the last ones, that rotate with the position."""
        return self.table.shape[1]


@dataclasses.dataclass(frozen=True)
class QuantizedOut:
    """The output of ``inverse_rope_fp8_quant`` and what it needs.

    Attributes:
        codes: uint8 [T, H, D], written.
        scales: float32 [T, H, D / 128], written.
        rope: angles of the queries.
        dtype: to which the heads would be rounded if they were stored as they are.
        native: whether the device converts FP8 by itself.
    """

    codes: Tensor
    scales: Tensor
    rope: RopeTable
    dtype: torch.dtype
    native: bool

    @classmethod
    def allocate(cls, q: Tensor, positions: Tensor, table: Tensor, native: bool) -> QuantizedOut:
        """For as many heads and channels as the queries have."""
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
        """The same for some tokens."""
        rope = dataclasses.replace(self.rope, positions=self.rope.positions[tokens])
        return dataclasses.replace(
            self, codes=self.codes[tokens], scales=self.scales[tokens], rope=rope
        )

    def results(self, groups: int) -> tuple[Tensor, Tensor]:
        """What ``inverse_rope_fp8_quant`` returns."""
        tokens, heads, channels = self.codes.shape
        width = heads // groups * channels
        codes = self.codes.view(torch.float8_e4m3fn).view(tokens, groups, width)
        return codes, self.scales.view(tokens, groups, width // FP8_BLOCK)


def epilogue_pointers(to: QuantizedOut | None, other: Tensor) -> tuple[Any, ...]:
    """Kernel arguments: scales, positions, table and its rows; ``other`` where there are none."""
    if to is None:
        return other, other, other, 0
    return to.scales, to.rope.positions, to.rope.table, len(to.rope.table)


def epilogue_constants(to: QuantizedOut | None) -> dict[str, Any]:
    """Constants of ``_triton_epilogue.store_quantized``; ROPE_DIM is 0 for heads as they are."""
    import triton.language as tl

    if to is None:
        return {"ROPE_DIM": 0, "TYPE": tl.float32, "NATIVE": False}
    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    return {"ROPE_DIM": to.rope.dim, "TYPE": types[to.dtype], "NATIVE": to.native}


def quantized_results(*, q: Tensor, n_groups: int, **_: object) -> tuple[Tensor, Tensor]:
    """Empty results of an attention whose output leaves as FP8: codes and scales."""
    tokens, heads, dim = q.shape
    width = heads // n_groups * dim
    return (
        q.new_empty((tokens, n_groups, width), dtype=torch.float8_e4m3fn),
        q.new_empty((tokens, n_groups, width // FP8_BLOCK), dtype=torch.float32),
    )


def check_quantized(
    name: str, q: Tensor, positions: Tensor, cos_sin_cache: Tensor, groups: int
) -> dict[str, int]:
    """Check what such an attention takes besides; sizes by letter."""
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


# Where ``inverse_rope_fp8_quant`` of each backend is.
_QUANTIZE = {
    "reference": "anymla.ops._reference",
    "torch": "anymla.ops._torch_norm_rope",
    "triton": "anymla.ops._triton_epilogue",
}


def composed(
    contract: Callable[..., Any], attend: Callable[..., Any], backend: str
) -> Callable[..., tuple[Tensor, Tensor]]:
    """``contract``, an attention whose output leaves as FP8: ``attend``, then the quantisation.

    Args:
        contract: takes what ``attend`` takes, and ``positions``, ``cos_sin_cache``, ``n_groups``.
        attend: the operation whose first result is quantised.
        backend: of both: "reference", "torch" or "triton".
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
