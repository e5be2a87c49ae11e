"""Activations in FP8, in the memory order that every product reads."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK, dequantize_fp8_rows

# Rows that there is memory for come in such steps; products of the vendor's library want 16.
ROW_STEP = 16


@dataclasses.dataclass(frozen=True)
class QuantizedRows:
    """What ``fp8_block.quantize_fp8_rows`` makes of activations x [T, K].

    Whoever computes x may fill them on the way, and whoever multiplies x may read them instead of
    it. There is memory for R rows, T up to a multiple of ``ROW_STEP``; those after T are anything.

    Attributes:
        codes: e4m3, uint8 [R, K], contiguous.
        scales: float32 powers of two [R, ceil(K/128)], the first dimension next to each other in
            memory (strides 1 and R).
    """

    codes: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device) -> QuantizedRows:
        """Memory for ``rows`` of ``width`` channels."""
        padded = -(-rows // ROW_STEP) * ROW_STEP
        codes = torch.empty((padded, width), dtype=torch.uint8, device=device)
        blocks = -(-width // FP8_BLOCK)
        return cls(codes, torch.empty((blocks, padded), dtype=torch.float32, device=device).t())

    def decoded(self, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The first rows, [rows, K] of ``dtype``."""
        return dequantize_fp8_rows(self.codes[:rows], self.scales[:rows], dtype)
