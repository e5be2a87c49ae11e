"""Where attention's heads go that leave a kernel rotated back and quantised."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK


@dataclasses.dataclass(frozen=True)
class Turned:
    """The output of ``inverse_rope_fp8_quant`` and what it needs.

    Attributes:
        codes: uint8 [T, H, D], written.
        scales: float32 [T, H, D / 128], written.
        positions: int64 [T], contiguous.
        table: float32 [L, channels that turn], cosines then sines, contiguous.
        dtype: to which the heads would be rounded if they were stored.
        native: whether the device converts FP8 by itself.
    """

    codes: Tensor
    scales: Tensor
    positions: Tensor
    table: Tensor
    dtype: torch.dtype
    native: bool

    @classmethod
    def allocate(cls, q: Tensor, positions: Tensor, table: Tensor, native: bool) -> Turned:
        """For as many heads and channels as the queries have."""
        tokens, heads, channels = q.shape
        runs = (tokens, heads, channels // FP8_BLOCK)
        return cls(
            torch.empty(q.shape, dtype=torch.uint8, device=q.device),
            torch.empty(runs, dtype=torch.float32, device=q.device),
            positions.contiguous(),
            table.float().contiguous(),
            q.dtype,
            native,
        )

    def of(self, tokens: slice) -> Turned:
        """The same for some tokens."""
        return dataclasses.replace(
            self,
            codes=self.codes[tokens],
            scales=self.scales[tokens],
            positions=self.positions[tokens],
        )

    def results(self, groups: int) -> tuple[Tensor, Tensor]:
        """What ``inverse_rope_fp8_quant`` returns."""
        tokens, heads, channels = self.codes.shape
        width = heads // groups * channels
        codes = self.codes.view(torch.float8_e4m3fn).view(tokens, groups, width)
        return codes, self.scales.view(tokens, groups, width // FP8_BLOCK)


def pointers(turned: Turned | None, other: Tensor) -> tuple[Any, ...]:
    """Kernel arguments: scales, positions, table and its rows; ``other`` where there are none."""
    if turned is None:
        return other, other, other, 0
    return turned.scales, turned.positions, turned.table, len(turned.table)


def constants(turned: Turned | None) -> dict[str, Any]:
    """Kernel constants."""
    import triton.language as tl

    if turned is None:
        return {"TURNED": 0, "TYPE": tl.float32, "NATIVE": False}
    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    return {
        "TURNED": turned.table.shape[1],
        "TYPE": types[turned.dtype],
        "NATIVE": turned.native,
    }
