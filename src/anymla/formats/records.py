"""Coding of a cache page's entries, one class for each kind of record."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anymla.formats.e4m3 import E4M3_MAX, decode_e4m3, encode_e4m3
from anymla.formats.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from anymla.formats.nvfp4 import dequantize_nvfp4, quantize_nvfp4_rows
from anymla.formats.pages import PageLayout
from anymla.formats.ue8m0 import (
    LARGEST_CODE_EXPONENT,
    decode_ue8m0,
    encode_ue8m0,
    scale_exponent,
)

KV_AMAX_FLOOR = 1e-4


def _scaled(blocks: Tensor, exponent: Tensor) -> Tensor:
    """Scale values before rounding to codes; blocks that are not finite use the largest power."""
    return torch.ldexp(blocks, -exponent.clamp(max=LARGEST_CODE_EXPONENT))


@dataclasses.dataclass(frozen=True)
class SplitFp8Layout(PageLayout):
    """Records of DeepSeek-V4's KV cache: e4m3 "nope" channels, then bfloat16 rope channels.

    Blocks of ``block`` nope channels share a power-of-two scale byte; an entry's scale bytes are
    padded to ``scale_bytes`` with zeros. Rows are rounded to bfloat16 first. In V4.1's record every
    channel is a code, the rotated ones too, so ``nope`` is all of them and nothing is padded.
    """

    nope: int
    block: int

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Code rows [n, channels] as uint8 values and scales."""
        rows = rows.bfloat16().contiguous()
        blocks = rows[:, : self.nope].float().unflatten(1, (-1, self.block))
        exponent = scale_exponent(blocks.abs().amax(-1), E4M3_MAX, KV_AMAX_FLOOR)
        codes = encode_e4m3(_scaled(blocks, exponent.unsqueeze(-1))).flatten(1)
        rope = rows[:, self.nope :].view(torch.uint8)
        scales = torch.zeros(len(rows), self.scale_bytes, dtype=torch.uint8, device=rows.device)
        scales[:, : exponent.shape[1]] = encode_ue8m0(exponent)
        return torch.cat((codes, rope), 1), scales

    def decode(self, data: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Decode values and scales to [n, channels]; exact in bfloat16 and wider."""
        assert scales is not None
        scale = decode_ue8m0(scales[:, : self.nope // self.block].contiguous(), torch.float32)
        values = decode_e4m3(data[:, : self.nope]).unflatten(1, (-1, self.block))
        # The product is exact in float32 unless it leaves the normal range.
        nope = (values.double() * scale.double().unsqueeze(-1)).flatten(1).to(dtype)
        rope = data.contiguous()[:, self.nope :].view(torch.bfloat16).to(dtype)
        return torch.cat((nope, rope), 1)


@dataclasses.dataclass(frozen=True)
class InlineFp8Layout(PageLayout):
    """The record of DeepSeek-V3.2's KV cache: codes, their scales and the rope channels in a row.

    ``nope`` e4m3 codes, a float32 scale for each ``block`` of them, then bfloat16 rope channels.
    This writer's scales are powers of two (rows are rounded to bfloat16 first, as in
    ``SplitFp8Layout``), so its rows decode exactly in bfloat16; a reader accepts any scale.
    """

    nope: int
    block: int

    @property
    def rope_start(self) -> int:
        """Offset of the rope channels in an entry, in bytes."""
        return self.nope + self.nope // self.block * torch.float32.itemsize

    def encode(self, rows: Tensor) -> tuple[Tensor, None]:
        """Code rows [n, channels] as uint8 entries."""
        rows = rows.bfloat16()
        blocks = rows[:, : self.nope].float().unflatten(1, (-1, self.block))
        exponent = scale_exponent(blocks.abs().amax(-1), E4M3_MAX, KV_AMAX_FLOOR)
        codes = encode_e4m3(_scaled(blocks, exponent.unsqueeze(-1))).flatten(1)
        scales = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
        rope = rows[:, self.nope :].contiguous().view(torch.uint8)
        return torch.cat((codes, scales.view(torch.uint8), rope), 1), None

    def decode(self, data: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Decode entries [n, data_bytes] to [n, channels], each value rounded once to ``dtype``."""
        scale = data[:, self.nope : self.rope_start].contiguous().view(torch.float32)
        values = decode_e4m3(data[:, : self.nope]).unflatten(1, (-1, self.block))
        nope = (values.double() * scale.double().unsqueeze(-1)).flatten(1).to(dtype)
        rope = data[:, self.rope_start :].contiguous().view(torch.bfloat16).to(dtype)
        return torch.cat((nope, rope), 1)


@dataclasses.dataclass(frozen=True)
class RowFp8Layout(PageLayout):
    """Index keys in e4m3: one float32 power-of-two scale for all channels of an entry."""

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Code rows [n, channels], rounded to bfloat16 first."""
        wide = rows.bfloat16().float()
        exponent = scale_exponent(wide.abs().amax(-1, keepdim=True), E4M3_MAX, KV_AMAX_FLOOR)
        codes = encode_e4m3(_scaled(wide, exponent))
        scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
        return codes, scale.view(torch.uint8)

    def decode(self, data: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Decode values and scales to [n, channels]."""
        assert scales is not None
        scale = scales.contiguous().view(torch.float32)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return (decode_e4m3(data, wide) * scale.to(wide)).to(dtype)


@dataclasses.dataclass(frozen=True)
class RowMxfp4Layout(PageLayout):
    """Index keys in MXFP4: packed e2m1 values, one scale byte for 32 channels.

    The caller applies the Hadamard transform, because it concerns both q and k.
    """

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Code rows [n, channels], rounded to bfloat16 first."""
        return quantize_mxfp4(rows.bfloat16())

    def decode(self, data: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Decode values and scales to [n, channels]."""
        assert scales is not None
        return dequantize_mxfp4(data, scales, dtype)


@dataclasses.dataclass(frozen=True)
class RowNvfp4Layout(PageLayout):
    """The record of DeepSeek-V4.1's compressed cache: packed e2m1, an e4m3 scale for 16 channels.

    There is no global scale, and every value decodes exactly in bfloat16.
    """

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Code rows [n, channels], rounded to bfloat16 first."""
        return quantize_nvfp4_rows(rows.bfloat16())

    def decode(self, data: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Decode values and scales to [n, channels]; any scale byte is allowed."""
        assert scales is not None
        return dequantize_nvfp4(data, scales, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class PlainRowsLayout(PageLayout):
    """Unquantised rows of the exposed dtype."""

    def encode(self, rows: Tensor) -> tuple[Tensor, None]:
        """Round rows [n, channels] to the dtype and return their bytes."""
        return rows.to(self.dtype).contiguous().view(torch.uint8), None

    def decode(self, data: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Reinterpret bytes as rows [n, channels] and convert."""
        return data.contiguous().view(self.dtype).to(dtype)
