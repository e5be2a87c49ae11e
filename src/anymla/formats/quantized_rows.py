"""Activations in FP8, in the memory order that every product reads."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK, dequantize_fp8_rows

# Granularity of the allocated rows; products of the vendor's library need multiples of 16.
ROW_STEP = 16


@dataclasses.dataclass(frozen=True)
class QuantizedRows:
    """Activations x [T, K] quantised by ``fp8_block.quantize_fp8_rows``.

    The kernel that computes x may fill them, and a product may read them instead of x. Memory is
    allocated for R rows, T rounded up to a multiple of ``ROW_STEP``; rows after T are undefined.

    Attributes:
        codes: e4m3 codes, uint8 [R, K], contiguous.
        scales: float32 powers of two [R, ceil(K/128)], contiguous along the first dimension
            (strides 1 and R).
    """

    codes: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device) -> QuantizedRows:
        """Allocate memory for ``rows`` of ``width`` channels."""
        padded = -(-rows // ROW_STEP) * ROW_STEP
        codes = torch.empty((padded, width), dtype=torch.uint8, device=device)
        blocks = -(-width // FP8_BLOCK)
        return cls(codes, torch.empty((blocks, padded), dtype=torch.float32, device=device).t())

    def decoded(self, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decode the first rows, [rows, K] of ``dtype``."""
        return dequantize_fp8_rows(self.codes[:rows], self.scales[:rows], dtype)
