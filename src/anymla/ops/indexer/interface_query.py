"""Contract of index queries: rotated, quantised, with the heads' weights."""

import torch
from torch import Tensor

from anymla.formats.mxfp4 import MXFP4_BLOCK
from anymla.ops.indexer import device_support, reference, torch_query
from anymla.ops.indexer.reference import QUANTISATIONS
from anymla.ops.registry import FLOATS, INT64, check, check_turns, operation, require


def _query_outputs(
    q: Tensor, weights: Tensor, *, quant: str, **_: object
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, width = q.shape
    scales = torch.empty(0, dtype=torch.uint8, device=q.device)
    out = q
    if quant == "fp8":
        out = q.to(torch.float8_e4m3fn)
    elif quant == "mxfp4":
        out = q.new_empty((tokens, heads, width // 2), dtype=torch.uint8)
        scales = q.new_empty((tokens, heads, width // MXFP4_BLOCK), dtype=torch.uint8)
    wide = torch.promote_types(weights.dtype, torch.float32)
    return torch.empty_like(out), scales, weights.new_empty(weights.shape, dtype=wide)


@operation(outputs=_query_outputs)
def indexer_q_rope_quant(
    q: Tensor,
    weights: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    softmax_scale: float,
    head_scale: float,
    quant: str = "fp8",
    hadamard: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate the index queries by position, quantise them, and scale the head weights.

    RoPE turns the last channels of each head (see ``rope``). If ``quant`` is not "none", the result
    is rounded to bfloat16, as keys are. ``hadamard`` then multiplies by the normalised Hadamard
    matrix, which must have been done to the keys too. Then:

    - "fp8": e4m3 codes with one scale for each head, 2^ceil(log2(max(amax, 1e-4) / 448)). The
      scale is multiplied into the weights: relu commutes with it.
    - "mxfp4": e2m1 codes, one scale byte for 32 channels (see ``quantize_mxfp4``).
    - "none": left as they are.

    Args:
        q: [T, Hi, D] floating point.
        weights: [T, Hi] floating point.
        positions: [T] int64; read clamped to the table.
        cos_sin_cache: [L, R] float32 or float64, see ``rope``.
        softmax_scale: D^-0.5, multiplied into the weights.
        head_scale: Hi^-0.5, multiplied into the weights.
        quant: "fp8", "mxfp4" or "none".
        hadamard: transform the queries; D must be a power of two.

    Returns:
        q: [T, Hi, D] float8_e4m3fn, or [T, Hi, D/2] packed uint8, or [T, Hi, D] of q's dtype.
        q_scales: [T, Hi, D/32] uint8 for "mxfp4"; else empty [0].
        weights: [T, Hi] float32 (float64 for float64 weights), scaled.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device; unknown quant; D that it cannot take.

    Source: DeepSeek-V4 reference, inference/model.py (Indexer) for rotation and MXFP4; vLLM's
    operation for FP8 with the folded scale.
    """
    name = "indexer_q_rope_quant"
    sizes = check(
        name,
        q=(q, "T H D", FLOATS),
        weights=(weights, "T H", FLOATS),
        positions=(positions, "T", INT64),
    )
    width = sizes["D"]
    check_turns(name, cos_sin_cache, q, width)
    require(quant in QUANTISATIONS, name, "quant", "one of " + ", ".join(QUANTISATIONS), quant)
    blocks = quant != "mxfp4" or width % MXFP4_BLOCK == 0
    require(blocks, name, "q", f"of a multiple of {MXFP4_BLOCK} channels for mxfp4", width)
    power_of_two = not hadamard or width & (width - 1) == 0
    require(power_of_two, name, "q", "of 2^n channels for the Hadamard transform", width)


indexer_q_rope_quant.register("reference", reference.indexer_q_rope_quant)
indexer_q_rope_quant.register("torch", torch_query.indexer_q_rope_quant)
indexer_q_rope_quant.register_lazy(
    "triton", "anymla.ops.indexer.triton_query", supports=device_support.query_support
)
