"""Storage of a random linear layer in checkpoints' formats, together with its exact value.

Every stored value is exact in bfloat16, so that an unquantised twin can hold the same model: codes
have up to 4 significant bits, scales 1 or 4, and bfloat16 has 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.e2m1 import E2M1_MAX, encode_e2m1, pack_nibbles
from anymla.formats.e4m3 import E4M3_MAX, decode_e4m3, encode_e4m3
from anymla.formats.fp8_block import (
    FP8_BLOCK,
    dequantize_fp8_rows,
    dequantize_fp8_weight,
    expand_block_scales,
    quantize_fp8_rows,
    quantize_fp8_weight,
)
from anymla.formats.mxfp4 import MXFP4_BLOCK, dequantize_mxfp4, quantize_mxfp4
from anymla.formats.nvfp4 import NVFP4_BLOCK, dequantize_nvfp4

Stored = dict[str, Tensor]


def store_plain(prefix: str, values: Tensor) -> tuple[Stored, Tensor]:
    """Store bfloat16; return the tensors by name, and the value that they hold."""
    rounded = values.bfloat16()
    return {f"{prefix}.weight": rounded}, rounded


def store_fp8(
    prefix: str, values: Tensor, scale_format: str, block: int = FP8_BLOCK
) -> tuple[Stored, Tensor]:
    """Store square blocks of e4m3, with scales in "ue8m0" or "fp32".

    Float32 scales are amax / 448 rounded up to 4 significant bits, not to a power of two.
    """
    codes, scales = quantize_fp8_weight(values, scale_format, block)
    if scale_format == "fp32":
        mantissa, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ceil(mantissa * 16) / 16, exponent)
        codes = encode_e4m3(values / expand_block_scales(scales, values.shape, block))
    stored = {
        f"{prefix}.weight": codes.view(torch.float8_e4m3fn),
        f"{prefix}.scale": scales if scale_format == "fp32" else scales.view(torch.float8_e8m0fnu),
    }
    return stored, _exact(dequantize_fp8_weight(codes, scales, block=block))


def store_table(prefix: str, values: Tensor) -> tuple[Stored, Tensor]:
    """Store rows of e4m3, with a power of two for each 32 channels."""
    codes, scales = quantize_fp8_rows(values, MXFP4_BLOCK)
    stored = {
        f"{prefix}.weight": codes.view(torch.float8_e4m3fn),
        f"{prefix}.scale": scales.to(torch.float8_e8m0fnu),
    }
    return stored, _exact(dequantize_fp8_rows(codes, scales, block=MXFP4_BLOCK))


def store_mxfp4(prefix: str, values: Tensor) -> tuple[Stored, Tensor]:
    """Store packed e2m1 with a power-of-two scale for 32 channels."""
    packed, scales = quantize_mxfp4(values)
    stored = {
        f"{prefix}.weight": packed.view(torch.int8),
        f"{prefix}.scale": scales.view(torch.float8_e8m0fnu),
    }
    return stored, _exact(dequantize_mxfp4(packed, scales))


def store_nvfp4(
    prefix: str, values: Tensor, *, static_input: bool = False
) -> tuple[Stored, Tensor]:
    """Store packed e2m1 with an e4m3 scale for 16 channels and a power-of-two global scale.

    With ``static_input`` there is a scale of the activations as well, which nothing reads.
    """
    blocks = values.unflatten(-1, (-1, NVFP4_BLOCK))
    amax = blocks.abs().amax(-1) / E2M1_MAX
    exponent = torch.frexp(amax.amax() / E4M3_MAX).exponent
    global_scale = torch.ldexp(torch.ones(1), exponent)
    block_scales = encode_e4m3(amax / global_scale)
    step = (decode_e4m3(block_scales) * global_scale).unsqueeze(-1)
    packed = pack_nibbles(encode_e2m1(blocks / step).flatten(-2))
    stored = {
        f"{prefix}.weight": packed,
        f"{prefix}.weight_scale": block_scales.view(torch.float8_e4m3fn),
        f"{prefix}.weight_scale_2": global_scale.reshape(()),
    }
    if static_input:
        stored[f"{prefix}.input_scale"] = torch.ones(())
    return stored, _exact(dequantize_nvfp4(packed, block_scales, global_scale))


def _exact(values: Tensor) -> Tensor:
    """Narrow to bfloat16, which must change no value."""
    narrow = values.bfloat16()
    assert torch.equal(narrow.float(), values), "a stored value is not exact in bfloat16"
    return narrow
